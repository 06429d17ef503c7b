"""Run folds as child processes of this machine, on CPUs and GPUs that the search has leased."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trainloop._launch.failures import exit_text
from trainloop._processes import fork_server as processes
from trainloop._support.platform import usable_cpus
from trainloop.errors import ResourceError
from trainloop.extending import warn
from trainloop.resources import ResourceQuota, available, enforce, gpus, lease
from trainloop.resources.quota import exact
from trainloop.tuning.running.worker import Job, train_fold

logger = logging.getLogger("trainloop")


def machine_total(total: ResourceQuota | None) -> ResourceQuota:
    machine = available()
    total = (total or ResourceQuota()).filled(ResourceQuota(machine.num_cpus, machine.num_gpus))
    # The number of GPUs of a search may be a fraction, such as 1.5. For the check, this number is rounded up.
    enforce.check_quota(replace(total, num_gpus=math.ceil(exact(total.num_gpus))), machine=machine)
    return total


def lease_total(total: ResourceQuota, timeout_s: float | None, undo: ExitStack) -> tuple[list[int], list[int]]:
    """Lease CPUs and GPUs for this search. Return the numbers of the CPUs and the indices of the GPUs."""
    cpus = usable_cpus()
    num_cpus, num_gpus = int(total.num_cpus), math.ceil(exact(total.num_gpus))
    names = gpus.names(available().num_gpus) if num_gpus else []
    if lease.inherited():
        return cpus[:num_cpus], list(range(num_gpus))
    # GPUs that no other process uses are preferred.
    others = gpus.other_processes(names)
    requests = {
        "cpu": lease.Request(num_cpus, [f"cpu-{cpu}" for cpu in cpus]),
        "gpu": lease.Request(num_gpus, sorted(names, key=lambda name: others.get(name, 0) > 0)),
    }
    try:
        held = lease.acquire(requests, timeout_s=0)
    except OSError:  # no folder for lock files
        return cpus[:num_cpus], list(range(num_gpus))
    except ResourceError as busy:
        if timeout_s == 0:
            raise
        print(f"tune is waiting for other runs: {busy}", file=sys.stderr)
        held = lease.acquire(requests, timeout_s=timeout_s)
    undo.enter_context(held)
    return [int(name.removeprefix("cpu-")) for name in held.names["cpu"]], sorted(
        names.index(name) for name in held.names["gpu"]
    )


class Child:
    """A process that trains one fold. Processes that the child starts are in its process group, and are killed with it.

    Parameters
    ----------
    job : Job
        The fold.
    modules : sequence of str
        Modules that the fork server imports when it starts. If ``modules`` is empty, the process is a fresh
        interpreter.
    """

    def __init__(self, job: Job, modules: Sequence[str] = ()) -> None:
        self.job = job
        self.served = bool(modules)
        """True if the process is forked from the fork server."""
        self.no_server: processes.NoServerError | None = None
        """Reason why the process was not forked although ``modules`` is not empty; otherwise None."""
        self.modules = modules
        self._dropped = self._ended = False
        self._started: Future[BaseProcess | None] = Future()
        # Started in a thread, because the server's imports may take a minute on a busy machine.
        threading.Thread(target=self._start_process, name="trainloop-fold-start", daemon=True).start()

    def _start_process(self) -> None:
        calls = [(train_fold, (self.job,))]
        started: list[BaseProcess] = []
        try:
            if self.served:
                try:
                    started = processes.from_server(calls, [train_fold.__module__, *self.modules], self.job.environment)
                except processes.NoServerError as error:
                    self.served, self.no_server = False, error
            if not self.served and not self._dropped:
                started = processes.spawned(calls, self.job.environment)
            self._started.set_result(started[0] if started else None)
        except BaseException as error:
            self._started.set_exception(error)

    def ended(self) -> bool:
        """Return True if the process has ended. If it could not be started, raise the error."""
        if not self._started.done():
            return False
        process = self._started.result()
        return process is not None and not process.is_alive()

    def wait(self) -> None:
        """Wait for the end of the process."""
        if process := self._started.result():
            process.join()

    def end(self) -> int | None:
        """Kill the process and its group.

        Return the exit code; None if the process had not started, or if its status was lost.
        """
        self._dropped = True
        if not self._started.done():
            self._started.add_done_callback(lambda _: self.end())
            return None
        process = None if self._started.exception() else self._started.result()
        if process is None or self._ended:
            return None
        self._ended = True
        assert process.pid is not None
        if sys.platform != "win32":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # the process may not have created its group yet
        process.join()
        code = process.exitcode
        process.close()
        return None if self.served and code == processes.STATUS_LOST else code


def note_end(job: Job, exitcode: int | None) -> None:
    """Write ``error.txt`` for a fold whose process wrote neither a result nor an error.

    ``exitcode`` is None if the status was lost because the fork server was killed.
    """
    folder = Path(job.folder)
    # The result is written last. If it exists, the fold is done, regardless of the exit code.
    if (folder / "result.pkl").exists() or (folder / "error.txt").exists():
        return
    if exitcode is None:
        what = "The fold was stopped because the fork server that started its process was killed."
    elif exitcode < 0:
        sender = ", which the system sends when memory runs out" if exitcode == -9 else ""
        what = f"The fold's process was killed by {exit_text(exitcode)}{sender}."
    else:
        what = f"The fold's process ended with {exit_text(exitcode)}, without a result."
    with contextlib.suppress(OSError):
        lines = (folder / "log.txt").read_text(errors="replace").splitlines()[-20:]
        if lines:
            what += "\nIts last output:\n" + "\n".join(lines)
    (folder / "error.txt").write_text(what)


class LocalBackend:
    """Start child processes, and return the folds of those that have ended.

    Parameters
    ----------
    modules : sequence of str
        As in :class:`Child`. Once no fork server is available, all further children are fresh interpreters.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._children: list[Child] = []
        self._modules = modules

    def start(self, job: Job, slot: Any = None) -> None:
        self._children.append(Child(job, self._modules))

    def wait(self, timeout_s: float) -> list[Job]:
        """Return the folds that have ended. If no fold has ended, wait up to ``timeout_s`` seconds for one."""
        deadline = time.monotonic() + timeout_s
        while True:
            over = [child for child in self._children if child.ended()]
            if over or time.monotonic() >= deadline:
                break
            # This polls, because Python can't wait for the first of several Popen objects. A fold takes seconds or
            # more.
            time.sleep(0.02)
        for child in over:
            self._children.remove(child)
            if child.no_server is not None:
                logger.info("Models start in fresh interpreters, not from the fork server, because %s", child.no_server)
            if isinstance(child.no_server, processes.NoOwnServerError) and self._modules:
                self._modules = ()
                warn(
                    "tune: from now on, models start in fresh interpreters, not from a fork server with "
                    f"preload={list(child.modules)}, because {child.no_server}."
                )
            note_end(child.job, child.end())
        return [child.job for child in over]

    def close(self) -> list[Job]:
        """Kill all processes, and return the jobs that were running."""
        running = [child.job for child in self._children]
        for child in self._children:
            child.end()
        self._children.clear()
        return running
