"""Run a part of the tests with each Python that is installed here, and the oldest and the newest torch for each.

With the oldest Python and the oldest torch, the core's other packages are the oldest that ``setup.cfg`` allows, too.
``make test-versions`` runs it and prints a table for the README. Each pair gets an environment of its own (5 GB with
CUDA's libraries), which is deleted afterwards. A Python that is not here is listed as such.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OLDEST_TORCH = (2, 6)
TESTS = ("tests/unit", "tests/ranks", "-m", "not slow and not hosts and not ecosystem")  # the long ones, too
HEAD = ("Python", "PyTorch", "tests", "result")


def interpreter(version: str) -> str | None:
    """Return a Python of a version: of pyenv, or else by its name."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(path) for path in sorted(of_pyenv.glob(f"{version}.*/bin/python"))]
    return found[-1] if found else shutil.which(f"python{version}")


def torch_versions(python: str) -> list[str]:
    """Return the releases of torch that the package index has for a Python, oldest first."""
    listed = subprocess.run(
        [python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=True
    )
    numbers = re.findall(r"(?<![\w.])\d+\.\d+\.\d+(?![\w.+])", listed.stdout.partition("Available versions:")[2])
    releases = {tuple(map(int, number.split("."))) for number in numbers}
    return [".".join(map(str, release)) for release in sorted(releases) if release[:2] >= OLDEST_TORCH]


def oldest_allowed() -> list[str]:
    """Return what pip installs for the oldest versions that ``setup.cfg`` allows of the core's packages but torch."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    pinned = [one.replace(">=", "==") for one in required if not one.startswith("torch>=")]
    return [*pinned, "protobuf<5"]  # what a tensorboard of that time reads with its own plugins


def constraints_without_torch() -> str:
    """Return the project's constraints, without torch and what torch pins itself.

    Without them, pip gives up its search for versions of boto3 and s3fs that fit each other.
    """
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("torch==", "sympy==", "setuptools=="))]
    aws = ("s3fs==", "fsspec==", "boto3==", "botocore==", "aiobotocore==", "moto==")
    return "\n".join(line.partition(" ;")[0] if line.startswith(aws) else line for line in kept)


def tried(python: str, torch: str, folder: Path, arguments: list[str], *, oldest: bool) -> tuple[str, bool]:
    """Run the tests with one pair of versions; return the summary and whether all passed.

    With ``oldest``, the core's other packages are the oldest that ``setup.cfg`` allows.
    """
    shutil.rmtree(folder, ignore_errors=True)
    log = Path(f"{folder}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    own = str(folder / "bin" / "python")
    constraints = Path(f"{folder}.txt")
    constraints.write_text(constraints_without_torch())
    steps = [
        [python, "-m", "venv", str(folder)],
        [own, "-m", "pip", "install", "-q", "-c", str(constraints), f"torch=={torch}", "-e", f"{ROOT}[test]"],
        *([[own, "-m", "pip", "install", "-q", *oldest_allowed()]] if oldest else []),
        [own, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *TESTS, *arguments],
    ]
    try:
        with log.open("w") as file:
            for step in steps:
                done = subprocess.run(step, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
                if done.returncode:
                    break
        lines = log.read_text(errors="replace").splitlines()
        said = re.search(r"\d+ (?:passed|failed).*?(?= in )", lines[-1] if lines else "")
        summary = said[0] if said else f"{step[2]} {step[3]} failed, see {log}"
        return re.sub(r", \d+ (?:deselected|warnings?)", "", summary), done.returncode == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pairs(wanted: list[str]) -> Iterator[tuple[str, str | None, str]]:
    """Yield each Python with its interpreter, and a version of torch; without one if there is no interpreter."""
    for version in wanted:
        python = interpreter(version)
        if python is None:
            yield version, None, ""
            continue
        releases = torch_versions(python)
        for release in dict.fromkeys((releases[0], releases[-1])):
            yield version, python, release


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows as a simple table of reStructuredText."""
    widths = [max(len(row[i]) for row in [HEAD, *rows]) for i in range(len(HEAD))]
    rule = " ".join("=" * width for width in widths)
    lines = [" ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [HEAD, *rows]]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="only this version of Python, such as 3.12; repeatable")
    parser.add_argument("--torch", help="only this release of torch")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="for environments and logs")
    parser.add_argument("--dry-run", action="store_true", help="only list the pairs")
    options, arguments = parser.parse_known_args()
    rows: list[tuple[str, ...]] = []
    passed = True
    for version, python, torch in pairs(options.python or list(PYTHONS)):
        if python is None:
            rows.append((version, "", "", "no interpreter here"))
        elif options.torch not in (None, torch):
            continue
        elif options.dry_run:
            rows.append((version, torch, "", "not run"))
        else:
            begin = time.monotonic()
            oldest = version == PYTHONS[0] and torch.startswith("{}.{}.".format(*OLDEST_TORCH))
            result, ok = tried(python, torch, options.folder / f"{version}-{torch}", arguments, oldest=oldest)
            passed &= ok
            rows.append((version, torch, result, "ok" if ok else "FAILED"))
            print(*rows[-1], f"({(time.monotonic() - begin) / 60:.0f} min)", flush=True)
    print(table(rows))
    return not passed


if __name__ == "__main__":
    sys.exit(main())
