"""Folds as child processes of this machine, each on CPUs and GPUs of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainloop.tuning.worker import Job, command

__all__ = ["Child", "FoldExit", "LocalBackend", "read_end"]


@dataclass
class FoldExit:
    """How a fold's process ended."""

    job: Job
    """What it was told."""
    error: str = ""
    """Why there is no result; empty where there is one."""


class Child:
    """A fold's process, with all that it starts in one process group, which ends with it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        with open(Path(job.folder) / "log.txt", "wb") as log:
            self._process = subprocess.Popen(
                command(job.write()),
                stdin=subprocess.PIPE,  # closed by the system when this process ends, however it does
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **job.environment},
                start_new_session=True,  # a Ctrl-C in the terminal is for the search, which then ends its folds
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def end(self) -> int:
        """Kill what is left of it; its exit code."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        return code


def read_end(job: Job, exitcode: int) -> FoldExit:
    """What the fold's folder and its exit code say."""
    folder = Path(job.folder)
    if (folder / "result.pkl").exists():
        return FoldExit(job)
    if (folder / "error.txt").exists():
        return FoldExit(job, (folder / "error.txt").read_text())
    if exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        killer = ", as the system does when memory runs out" if exitcode == -signal.SIGKILL else ""
        what = f"The fold's process was killed by {name}{killer}."
    else:
        what = f"The fold's process ended with exit code {exitcode}, without a result."
    with contextlib.suppress(OSError):
        lines = (folder / "log.txt").read_text(errors="replace").splitlines()[-20:]
        if lines:
            what += "\nIts last output:\n" + "\n".join(lines)
    (folder / "error.txt").write_text(what)
    return FoldExit(job, what)


class LocalBackend:
    """Starts children, and tells of those that ended."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def start(self, job: Job, slot: Any = None) -> None:
        self._children.append(Child(job))

    def wait(self, timeout_s: float) -> list[FoldExit]:
        """The folds that ended, at once where there are some, else those of the next ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            over = [child for child in self._children if child.ended()]
            if over or time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        ends = []
        for child in over:
            self._children.remove(child)
            ends.append(read_end(child.job, child.end()))
        return ends

    def close(self) -> list[Job]:
        """End all; the jobs that were running."""
        running = [child.job for child in self._children]
        for child in self._children:
            child.end()
        self._children.clear()
        return running
