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
from trainloop.user_line import warn

__all__ = ["Child", "FoldExit", "ForkingBackend", "LocalBackend", "read_end"]

_LAST_WORDS_S = 2.0


@dataclass
class FoldExit:
    """The end of a fold's process."""

    job: Job
    """The job that the process was given."""
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


def read_end(job: Job, exitcode: int, why: str = "") -> FoldExit:
    """Read how a fold ended, from its folder and its exit code; ``why``: where the cause is not its own."""
    folder = Path(job.folder)
    # Whatever the exit code: the result is written last, so the fold is done.
    if (folder / "result.pkl").exists():
        return FoldExit(job)
    if (folder / "error.txt").exists():
        return FoldExit(job, (folder / "error.txt").read_text())
    what = why or f"The fold's process {_how(exitcode)}{'' if exitcode < 0 else ', without a result'}."
    with contextlib.suppress(OSError):
        lines = (folder / "log.txt").read_text(errors="replace").splitlines()[-20:]
        if lines:
            what += "\nIts last output:\n" + "\n".join(lines)
    (folder / "error.txt").write_text(what)
    return FoldExit(job, what)


def _how(exitcode: int) -> str:
    """How a process ended, as the rest of a sentence."""
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    killer = ", as the system does when memory runs out" if exitcode == -signal.SIGKILL else ""
    return f"was killed by {name}{killer}"


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
    """Starts folds as forks of one process that has imported what they need, the template.

    If that ends, a second one takes its place; if that ends too, folds start as fresh interpreters.
    """

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self._told = (modules, environment)
        self._template: Template | None = None  # made for the first fold: a search may have none left to train
        self._templates_left = 2
        self._forks: dict[str, Fork] = {}
        self._fresh = LocalBackend()

    def start(self, job: Job, slot: Any = None) -> None:
        if self._template is None and self._templates_left:
            self._templates_left -= 1
            self._template = Template(*self._told)
        if self._template is None:
            self._fresh.start(job, slot)
        else:
            fork = Fork(job, self._template)
            self._forks[fork.file] = fork

    def wait(self, timeout_s: float) -> list[FoldExit]:
        """The folds that ended, at once where there are some, else those of the next ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._template is not None:
            heard = self._template.hear(deadline - time.monotonic())
            ends = self._without(self._template) if heard is None else self._ends(heard)
            if ends or time.monotonic() >= deadline:
                return ends
        return self._fresh.wait(deadline - time.monotonic())

    def _ends(self, heard: list[tuple[str, str, int]]) -> list[FoldExit]:
        ends = []
        for what, file, number in heard:
            if what == "began":
                self._forks[file].pid = number
            else:
                ends.append(read_end(self._forks.pop(file).job, number))
        return ends

    def _without(self, template: Template) -> list[FoldExit]:
        """Go on after the template has ended: the folds that ended with it. Those it had not begun start again."""
        forks, self._forks = list(self._forks.values()), {}
        for fork in forks:
            fork.end()  # nobody can tell how these will end
        exitcode, lines = template.ending()
        template.close()
        self._template = None
        how = "closed its connection" if exitcode is None else _how(exitcode)
        what = f"the process that had imported preload={list(self._told[0])}, from which folds are forked, {how}."
        output = "\nIts last output:\n" + "\n".join(lines) if lines else ""
        then = (
            "another one takes its place" if self._templates_left else "folds start as fresh interpreters from now on"
        )
        warn(f"tune: {then}: {what}{output}")
        for fork in forks:
            if fork.pid is None:
                self.start(fork.job)
        why = f"The fold was ended with its parent: {what}{output}"
        return [read_end(fork.job, -signal.SIGKILL, why) for fork in forks if fork.pid is not None]

    def close(self) -> list[Job]:
        """End all; the jobs that were running."""
        running = [fork.job for fork in self._forks.values()] + self._fresh.close()
        template, self._template, self._templates_left = self._template, None, 0
        if template is not None:
            # It may be importing for a while yet, before it would fork what it was asked for.
            template.kill()
            while heard := template.hear(_LAST_WORDS_S):  # what it had said until then
                for what, file, number in heard:
                    if what == "began":
                        self._forks[file].pid = number
            for fork in self._forks.values():
                fork.end()
            self._forks.clear()
            template.close()
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
            # Nothing waits for one of several Popen; and a fold takes seconds at least.
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
