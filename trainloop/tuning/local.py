"""Folds as child processes of this machine, each on CPUs and GPUs of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainloop.tuning.template import Template
from trainloop.tuning.worker import Job, command

__all__ = ["Child", "FoldExit", "ForkingBackend", "LocalBackend", "read_end"]


@dataclass
class FoldExit:
    """The end of a fold's process."""

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
                stdin=subprocess.PIPE,  # the system closes it when this process ends, however it ends
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
    """Read how a fold ended, from its folder and its exit code."""
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


class Fork:
    """A fold's process that a template became."""

    def __init__(self, job: Job, template: Template) -> None:
        self.job = job
        self.file = str(job.write())
        self.pid: int | None = None
        """None until the template has forked."""
        template.ask(self.file, str(Path(job.folder) / "log.txt"), job.environment)

    def end(self) -> None:
        """Kill what is left of it; the template, or what adopts its children, waits for it."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class ForkingBackend:
    """Starts folds as forks of one process that has imported what they need."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self._template = Template(modules, environment)
        self._forks: dict[str, Fork] = {}
        self._closed = False

    def start(self, job: Job, slot: Any = None) -> None:
        fork = Fork(job, self._template)
        self._forks[fork.file] = fork

    def wait(self, timeout_s: float) -> list[FoldExit]:
        """The folds that ended, at once where there are some, else those of the next ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            heard = self._template.hear(deadline - time.monotonic())
            if heard is None:  # killed: nobody can tell how its folds end
                return [read_end(job, -signal.SIGKILL) for job in self.close()]
            ends = []
            for what, file, number in heard:
                if what == "began":
                    self._forks[file].pid = number
                else:
                    ends.append(read_end(self._forks.pop(file).job, number))
            if ends or time.monotonic() >= deadline:
                return ends

    def close(self) -> list[Job]:
        """End all; the jobs that were running."""
        running = [fork.job for fork in self._forks.values()]
        if not self._closed:
            self._closed = True
            while any(fork.pid is None for fork in self._forks.values()):  # asked for, and soon there
                heard = self._template.hear(60.0)
                if not heard:
                    break
                for what, file, number in heard:
                    if what == "began":
                        self._forks[file].pid = number
            for fork in self._forks.values():
                fork.end()
            self._forks.clear()
            self._template.close()
        return running


class LocalBackend:
    """Starts children, and returns those that ended."""

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
