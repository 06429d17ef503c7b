"""Pages of results: each is written as a whole by one run of one command, with its date, commit and versions."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
LIBRARIES = ("torch", "numpy", "lightning", "accelerate", "pytorch-ignite")


QUIET = 0.7
"""Load at the start, up to which figures count."""
PATIENCE_S = 180.0
"""How long a benchmark waits for a quiet machine. The load of the last minute fades slowly."""
PRELIMINARY = "**Preliminary:** the machine was not quiet, or there were fewer than three rounds. Measure again."
"""What a page says whose figures README does not show."""


@dataclass
class Size:
    """How much is measured."""

    rounds: int
    """Interleaved rounds."""
    tiny: bool = False
    """True to run everything once with two steps, which shows only that it runs."""

    def steps(self, number: int) -> int:
        """Return a number of steps: ``number``, or 2 in a tiny run."""
        return 2 if self.tiny else number

    def at_most(self, rounds: int) -> Size:
        """Return the same with fewer rounds, for what takes long."""
        return Size(min(self.rounds, rounds), self.tiny)


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the arguments of all benchmarks that write a page."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help=f"interleaved rounds ({rounds})")
    made.add_argument("--tiny", action="store_true", help="run everything once with two steps, to see that it runs")
    made.add_argument("--out", type=Path, default=HERE, help="folder of the pages (benchmarks/)")
    return made


def size_of(arguments: argparse.Namespace) -> Size:
    """Return how much the arguments ask for."""
    if arguments.tiny and arguments.out == HERE:
        raise SystemExit("--tiny: its figures mean nothing. Pass --out FOLDER, to keep the pages.")
    arguments.out.mkdir(parents=True, exist_ok=True)  # now: it is written at the end
    began = time.monotonic()
    while not arguments.tiny and os.getloadavg()[0] > QUIET and time.monotonic() - began < PATIENCE_S:
        time.sleep(1.0)
    return Size(1 if arguments.tiny else arguments.rounds, arguments.tiny)


class Page:
    """A page of results. Create it before the first measurement: it notes the date, the commit and the load.

    Parameters
    ----------
    name : str
        File name without its ending.
    title : str
    command : str
        Command that writes the page.
    """

    def __init__(self, name: str, title: str, command: str) -> None:
        self.name, self.title, self.command = name, title, command
        self._load = os.getloadavg()[0]
        self._head = provenance()
        self._begin = time.perf_counter()

    def write(self, folder: Path, size: Size, note: str, parts: Iterable[str]) -> Path:
        """Write the page: a note, the provenance, and the parts."""
        minutes = (time.perf_counter() - self._begin) / 60
        preliminary = [PRELIMINARY, ""] if size.rounds < 3 or self._load > QUIET else []
        lines = [
            self.title,
            "=" * len(self.title),
            "",
            f".. Written by ``{self.command}``; do not edit.",
            "",
            f"``{self.command}`` wrote this page in {minutes:.0f} minutes. {note}".rstrip(),
            "",
            *preliminary,
            self._head,
            "",
            *parts,
        ]
        path = folder / f"{self.name}.rst"
        path.write_text("\n".join(lines).rstrip() + "\n")
        print(f"wrote {path}", flush=True)
        return path


def heading(text: str, under: str = "-") -> str:
    """Return a heading as reStructuredText."""
    return f"{text}\n{under * len(text)}\n"


def provenance() -> str:
    """Return the lines by which a reader can repeat a measurement: date, commit, machine, versions."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {name: _version(name) for name in LIBRARIES}
    versions["torch"] = torch.__version__
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = [
        f"* {model}, {cores} cores; load at the start: {os.getloadavg()[0]:.1f}",
        f"* {time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit()}",
        f"* Python {platform.python_version()}, {platform.system()} {platform.release()}",
        "* " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"* GPUs: {', '.join(gpus) if gpus else 'none'}",
    ]
    return "\n".join(lines)


def commit() -> str:
    """Return the commit that is measured; with a note if files of the package or the benchmarks differ from it."""
    try:
        name = _git("rev-parse", "--short=8", "HEAD")
        changed = _git("status", "--porcelain", "--", "trainloop", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}, with uncommitted changes" if changed else name


def commits_of(page: str) -> list[str]:
    """Return the commits that a page names."""
    return re.findall(r"^\* \d{4}-\d\d-\d\d, commit (\S+?)(?:,.*)?$", page, re.MULTILINE)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=HERE.parent, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
