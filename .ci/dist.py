"""Build the sdist and the wheel of the last commit twice, compare them, check them, and try the wheel: ``make dist``.

The files are in ``dist/`` afterwards. Nothing is uploaded.
"""

from __future__ import annotations

import email.message
import email.parser
import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

import docutils.core

ROOT = Path(__file__).resolve().parents[1]
HOOKS = "from setuptools import build_meta as b; b.build_{}({!r})"
PLACE = "import trainloop; print(trainloop.__version__, trainloop.__file__)"
# Not scripts of their own, or in need of more than the extra ``examples``.
NOT_RUN = set(
    "readme.py digits.py two_hosts.py huggingface_style.py tabular_multimodal.py tabular_predictor.py "
    "tuning_bagging.py".split()
)
WITHOUT_EPOCHS = {"debug_failed_step.py", "resume_after_kill.py"}


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Return a command's output, without the variables that let Python find other packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=kept | variables, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: failed with {done.returncode}.\n{done.stdout}")
    return done.stdout


def environment(folder: Path, *packages: str) -> Path:
    """Make an environment with some packages, in the versions of constraints.txt; return its Python."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", *packages)
    return python


def without_times(sdist: Path, epoch: int) -> None:
    """Rewrite an sdist, in which setuptools leaves the time and the user of the build."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))


def build(python: Path, folder: Path, epoch: int) -> dict[str, bytes]:
    """Build the sdist, and from what it holds the wheel; return both files by name."""
    source, out = folder / "source", folder / "out"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(source, filter="data")
    run(python, "-c", HOOKS.format("sdist", str(out)), cwd=source)
    (sdist,) = out.glob("*.tar.gz")
    without_times(sdist, epoch)
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    run(python, "-c", HOOKS.format("wheel", str(out)), cwd=unpacked, SOURCE_DATE_EPOCH=str(epoch))
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def metadata_of(wheel: Path) -> email.message.Message:
    """Check that a wheel has all tracked files of the package and no other; return its metadata."""
    tracked = set(run("git", "ls-tree", "-r", "--name-only", "HEAD", "trainloop").split())
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (own,) = {name for name in names if name.endswith(".dist-info/METADATA")}
        text = file.read(own).decode()
    info = PurePosixPath(own).parent.name
    packaged = {name for name in names if not name.startswith(f"{info}/")}
    if packaged != tracked:
        raise SystemExit(f"{wheel.name}: lacks {sorted(tracked - packaged)}, has {sorted(packaged - tracked)} besides.")
    if tests := [name for name in names if re.search(r"(^|/)(tests?|conftest\.py|test_[^/]*)(/|$)", name)]:
        raise SystemExit(f"{wheel.name}: has files of tests: {tests}.")
    return email.parser.Parser().parsestr(text)


def check_description(metadata: email.message.Message) -> None:
    """Render the description as the package index does, which shows none that has a warning."""
    if metadata["Description-Content-Type"] != "text/x-rst":
        raise SystemExit(f"Description-Content-Type: {metadata['Description-Content-Type']}; must be text/x-rst.")
    settings = {"halt_level": 2, "report_level": 2, "raw_enabled": False, "file_insertion_enabled": False}
    docutils.core.publish_string(metadata.get_payload(), writer="html5", settings_overrides=settings)


def try_wheel(wheel: Path, folder: Path, version: str) -> None:
    """Install a wheel where nothing else is; run the README's script and the examples, without the sources."""
    python = environment(folder / "empty", f"{wheel}[examples]")
    scripts = folder / "scripts"
    shutil.copytree(ROOT / "examples", scripts)
    found = run(python, "-c", PLACE, cwd=scripts).split()
    if found[0] != version or not Path(found[1]).is_relative_to(folder):
        raise SystemExit(f"The wheel has version {version}; imported: {' '.join(found)}.")
    readme = (ROOT / "README.rst").read_text().partition(".. code-block:: python\n\n")[2]
    script = re.split(r"\n(?=\S)", readme)[0]
    (scripts / "readme.py").write_text("\n".join(line[4:] for line in script.splitlines()) + "\n")
    said = run(python, "readme.py", cwd=scripts)
    if "test accuracy: 9" not in said:
        raise SystemExit(f"The README's script printed:\n{said}")
    for name in sorted({path.name for path in scripts.glob("*.py")} - NOT_RUN):
        print(f"examples/{name}", flush=True)
        run(python, name, *(() if name in WITHOUT_EPOCHS else ("--epochs", "2")), cwd=scripts, OMP_NUM_THREADS="1")


def main() -> None:
    os.umask(0o022)
    epoch = int(run("git", "log", "-1", "--format=%ct"))
    if changed := run("git", "status", "--porcelain", "--untracked-files=no"):
        print(f"These changes are not committed, and not in what is built:\n{changed}", end="")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        tools = environment(folder / "tools", "setuptools")  # without torch: the version is read, not imported
        first, second = (build(tools, folder / name, epoch) for name in ("first", "second"))
        if different := [name for name in {*first, *second} if first.get(name) != second.get(name)]:
            raise SystemExit(f"Two builds of one commit differ: {sorted(different)}.")
        out = ROOT / "dist"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for name, data in first.items():
            (folder / name).write_bytes(data)
        (wheel,) = folder.glob("*.whl")
        metadata = metadata_of(wheel)
        check_description(metadata)
        try_wheel(wheel, folder, metadata["Version"])
        for name, data in first.items():
            (out / name).write_bytes(data)
            print(f"dist/{name}: {len(data) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
