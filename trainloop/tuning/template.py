"""A process that has imported what all folds need, and becomes a fold as often as it is asked.

A fresh interpreter takes seconds of CPU time to import scikit-learn or torch, often more than a small model takes to
train. The template starts no thread and reads nothing of the search; each fold is a fork of it, in a process group of
its own, with the environment, log and CPUs that a fresh one would have.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from trainloop.tuning import worker

__all__ = ["Template", "main"]

_END_S = 2.0
_START = "from trainloop.tuning.template import main; main()"


class Template:
    """The searching process's end: asks for folds, and hears of those that ended."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        told = {"modules": list(modules), "sys_path": [os.path.abspath(p) for p in sys.path]}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(commands), str(answers), json.dumps(told)],
            stdin=subprocess.PIPE,  # inherited by the folds, and closed by the system when this process ends
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, **environment},
            pass_fds=(commands, answers),
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._heard = b""

    def ask(self, job_file: str, log: str, environment: dict[str, str]) -> None:
        """Let a fold begin."""
        with contextlib.suppress(BrokenPipeError):  # gone: `hear` will tell
            os.write(self._commands, json.dumps([job_file, log, environment]).encode() + b"\n")

    def hear(self, timeout_s: float) -> list[tuple[str, str, int]] | None:
        """``('began', job_file, pid)`` and ``('ended', job_file, exitcode)``; None where the template is no more."""
        if not wait([self._answers], max(0.0, timeout_s)):  # select.select would refuse descriptors above 1023
            return []
        read = os.read(self._answers, 65536)
        if not read:
            return None
        *lines, self._heard = (self._heard + read).split(b"\n")
        return [tuple(json.loads(line)) for line in lines]

    def ending(self) -> tuple[int | None, list[str]]:
        """Exit code and last lines of a template that has hung up; None in place of the code: it still lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._errors.seek(max(0, os.fstat(self._errors.fileno()).st_size - 4096))
        return self._process.returncode, self._errors.read().decode(errors="replace").splitlines()[-20:]

    def kill(self) -> None:
        """Kill it, with forks that have not become folds yet: these are in its group still."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the template; folds that still run are for the caller to end."""
        self.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._errors.close()
        for end in (self._commands, self._answers):
            os.close(end)


def main() -> None:
    """Import, then fork when asked, until the searching process ends."""
    commands, answers = int(sys.argv[1]), int(sys.argv[2])
    told = json.loads(sys.argv[3])
    sys.path[:] = list(dict.fromkeys([*told["sys_path"], *sys.path]))
    for name in told["modules"]:
        # Whoever needs it will say so. It need not be an ImportError: a library that lacks another is an OSError.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # the folds share these pages
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    folds: dict[int, str] = {}
    waiting = b""
    while True:
        ready = wait([commands, woken])
        if woken in ready:
            os.read(woken, 4096)
            for pid, exitcode in _ended():
                _answer(answers, "ended", folds.pop(pid), exitcode)
        if commands in ready:
            read = os.read(commands, 65536)
            if not read:
                os._exit(0)
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                job_file, log, environment = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _become(job_file, log, environment, close=(commands, answers, woken, wake))
                folds[pid] = job_file
                _answer(answers, "began", job_file, pid)


def _answer(answers: int, *what: Any) -> None:
    try:
        os.write(answers, json.dumps(what).encode() + b"\n")
    except BrokenPipeError:
        os._exit(0)


def _ended() -> list[tuple[int, int]]:
    """Folds that ended, and their exit codes; what they left behind ends too, while their number is still theirs."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (status := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(status.si_pid, signal.SIGKILL)
            pid, code = os.waitpid(status.si_pid, 0)
            found.append((pid, os.waitstatus_to_exitcode(code)))
    return found


def _become(job_file: str, log: str, environment: dict[str, str], close: Sequence[int]) -> None:
    """In the fork: what a fresh interpreter would be, and then the fold."""
    try:
        # A session of its own, as a fresh child has: a Ctrl-C is for the search, and the group can be ended as one.
        os.setsid()
        # The template waits for its children by these two; the fold must not write into its pipe.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Ends of the search's pipes: while a fold held one, the search would not see the template go.
        for end in close:
            os.close(end)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(environment)
        sys.argv = [sys.argv[0], job_file]
        worker.main()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
