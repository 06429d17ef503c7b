"""Start, watch and end this node's ranks, and fetch their result."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection, resource_tracker
from typing import Any

import torch

from trainloop.distributed.peers import DisturbedStartError
from trainloop.launch.failures import Failure, exit_text, first_failure, read_record, worker_failed_error
from trainloop.launch.fork_server import ServedProcess
from trainloop.launch.forked import LAUNCH_VARIABLE
from trainloop.launch.hosts import Hosts
from trainloop.launch.inherited import own_cpus, signals_blocked, variables_set
from trainloop.launch.kept import Work
from trainloop.launch.liveness import Liveness, Sign, hanging_ranks
from trainloop.launch.main_guard import main_not_imported_again, main_place
from trainloop.launch.rank_process import STACK_SIGNAL, RankSpec, State, run_rank
from trainloop.signals import Heard
from trainloop.stopping import SharedStop
from trainloop.transfer import Parcel
from trainloop.transfer.result import ResultFile
from trainloop.user_line import warn

__all__ = ["Ranks"]

_POLL_S = 0.1
_UNWIND_S = 1.0  # after a failure, until the others' own errors have arrived
_TERMINATE_S = 5.0  # after SIGTERM, for finally blocks
_KILL_S = 2.0
_HEAR_S = 3.0  # for another host's message about its failure
_DUMP_S = 1.0  # for the stacks of a rank

_environment_lock = threading.Lock()  # os.environ and __main__ belong to the process, and several threads may call fit


class Ranks:
    """The processes of one launch on this node.

    Parameters
    ----------
    spec : RankSpec
        Their arguments.
    token : str
        Marks this launch's processes, in their environment, and what they make.
    hosts : Hosts, optional
        The other hosts of the run.
    lines : sequence of socket, optional
        A line to each rank, for further work.
    handed_over : sequence of socket, optional
        Sockets that the ranks inherit; closed here afterwards.
    """

    def __init__(
        self,
        spec: RankSpec,
        token: str,
        hosts: Hosts | None = None,
        lines: Sequence[socket.socket] = (),
        handed_over: Sequence[socket.socket] = (),
    ) -> None:
        self._spec = spec
        self._hosts = hosts
        self._map = mmap.mmap(spec.words_fd, 0)
        self._words = memoryview(self._map).cast("q")
        self.stop = SharedStop(self._words, -1, spec.local_world_size)
        self._processes: list[Any] = []
        self._failures: dict[int, Failure] = {}
        self._liveness = Liveness(spec.timeout_s)
        self._token = token
        self.cause: Failure | None = None
        """The first failure, once the run has failed."""
        self._lines = lines
        self._handed_over = handed_over
        self._told: dict[str, str] = {}
        self._cpus = own_cpus()

    def start(self, environment: dict[str, str], *, served: bool, may_spawn: bool = True) -> None:
        """Start the processes, with ``environment`` added to this process's own.

        Parameters
        ----------
        environment : dict of str to str
            Variables.
        served : bool
            From this process's :mod:`~trainloop.launch.fork_server`; else each is a fresh interpreter.
        may_spawn : bool
            Whether to start fresh interpreters if the server fails.
        """
        before = set(multiprocessing.active_children())
        resource_tracker.ensure_running()  # it lives as long as this process: not with a launch's environment
        # The token goes to all that ranks start, so that what is left of them can be found.
        variables = {**environment, LAUNCH_VARIABLE: self._token}
        with _environment_lock, variables_set(variables), signals_blocked(), main_not_imported_again():
            self._told = dict(os.environ)
            try:
                if served:
                    for local_rank in range(self._spec.local_world_size):
                        process = ServedProcess(target=run_rank, args=(local_rank, self._spec))
                        process.may_spawn = may_spawn
                        process.start()
                        self._processes.append(process)
                else:
                    self._processes = torch.multiprocessing.spawn(
                        run_rank, args=(self._spec,), nprocs=self._spec.local_world_size, join=False
                    ).processes
            except BaseException:
                for child in set(multiprocessing.active_children()) - before:
                    child.kill()
                    child.join()
                self._processes = []
                raise
        for end in self._handed_over:
            end.close()

    # -- watching --------------------------------------------------------------------------------------------------

    def watch(self, *, at_once: bool = False) -> None:
        """Wait until all ranks are done: ended, or ready for more work where there are lines to them.

        Parameters
        ----------
        at_once : bool
            Whether a signal that a rank got ends the work, which the ranks themselves don't.

        Raises
        ------
        WorkerFailedError
            When one fails; the others have been ended then.
        KeyboardInterrupt, SystemExit
            With ``at_once``, after a signal; the caller ends the ranks.
        """
        busy = set(self._locals()) if self._lines else set()
        while True:
            alive = self._alive()
            if alive:
                sentinels = [self._processes[r].sentinel for r in alive]
                ready = connection.wait([*sentinels, *(self._lines[r] for r in busy)], timeout=_POLL_S)
                busy -= {r for r in busy if self._lines[r] in ready and _has_answered(self._lines[r])}
            if at_once:
                heard = Heard()
                heard.note(self.stop.requested)
                heard.end()
            if self._notice() or any(self._state(r) == State.TIMED_OUT for r in self._locals()):
                self.fail()
            if self._hosts is not None and self._hosts.failure() is not None:
                self.fail()
            if not self._alive():
                if self._notice():  # the last server was killed since
                    self.fail()
                return
            if self._lines and not busy and all(self._state(r) == State.DONE for r in self._locals()):
                return
            overdue = self._overdue()
            if overdue and self._state(overdue[0]) == State.DONE:
                self._end_lingering(overdue)
                return
            if overdue:
                self.fail(overdue)

    def part(self) -> None:
        """Wait until the ranks of all hosts are done, as those of this one are.

        Raises
        ------
        WorkerFailedError
            If another host fails.
        """
        while self._hosts is not None and not self._hosts.part(_POLL_S):
            if self._hosts.failure() is not None:
                self.fail()

    def are_up(self) -> bool:
        """Whether all ranks wait for more work."""
        return bool(self._lines) and len(self._alive()) == self._spec.local_world_size

    def begin_again(self) -> None:
        """Forget the last work: nothing is requested, recorded or done. The ranks are up."""
        for i in range(len(self._words)):
            self._words[i] = 0
        for fd in (*self._spec.record_fds, *self._spec.stack_fds):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)  # the rank's place, too
        self._failures, self._liveness, self.cause = {}, Liveness(self._spec.timeout_s), None

    def give(self, parcel: Parcel, inherited: Sequence[int], settings: bytes, environment: dict[str, str]) -> None:
        """Give the ranks more work; see :class:`~trainloop.launch.kept.Work`."""
        told, cpus, folder = {**os.environ, **environment, LAUNCH_VARIABLE: self._token}, own_cpus(), None
        with contextlib.suppress(OSError):
            folder = os.getcwd()
        work = Work(
            parcel,
            tuple(inherited),
            settings,
            main_place(),
            {name: told.get(name) for name in {*told, *self._told} if told.get(name) != self._told.get(name)},
            folder,
            cpus if cpus != self._cpus else None,
        )
        self._told, self._cpus = told, cpus
        for line in self._lines:
            with contextlib.suppress(OSError):  # a rank that has died is found by watch()
                work.send_over(line)

    def _locals(self) -> range:
        return range(len(self._processes))

    def _alive(self) -> list[int]:
        return [r for r in self._locals() if self._processes[r].is_alive()]

    def _state(self, local_rank: int) -> int:
        return self._words[SharedStop.num_words(self._spec.local_world_size) + local_rank]

    def _overdue(self) -> list[int]:
        signs = [Sign(self.stop.boundary_of(r), self._state(r) != State.DONE) for r in self._locals()]
        elsewhere = self._hosts.done_since if self._hosts is not None else None
        return self._liveness.overdue(signs, time.monotonic(), done_elsewhere_since=elsewhere)

    def _notice(self, ended_by_us: frozenset[int] = frozenset()) -> bool:
        """Record ranks that failed; returns whether there are any."""
        for r in self._locals():
            process = self._processes[r]
            if r in self._failures:
                continue
            rank = self._spec.rank + r
            # Before its exit code: it says more, and is there earlier.
            record = read_record(self._spec.record_fds[r])
            if record is not None:
                self._failures[r] = record
            elif r not in ended_by_us and not process.is_alive():
                if self._state(r) == State.DONE and process.exitcode == 0:
                    continue
                by_watchdog = self._ended_by_watchdog(r)
                timeout = by_watchdog and self._liveness.silent_s(r, time.monotonic()) > self._spec.timeout_s / 2
                self._failures[r] = Failure(
                    rank=rank,
                    time_ns=time.monotonic_ns(),
                    type=None,
                    exitcode=process.exitcode,
                    # Gloo's threads abort the process when a neighbour is lost at a bad moment.
                    consequence=not timeout
                    and (by_watchdog or (process.exitcode == -signal.SIGABRT and bool(self._failures))),
                    timeout=timeout,
                )
        return bool(self._failures)

    def _ended_by_watchdog(self, local_rank: int) -> bool:
        """Whether NCCL's watchdog, a native thread, aborted a rank: a collective timed out or lost its other end."""
        if "nccl" not in self._spec.backend or self._processes[local_rank].exitcode != -signal.SIGABRT:
            return False
        # Where a thread of Python's aborts, its stack is marked as that of the current one.
        return "Current thread" not in self._stacks(ask=False, ranks=[local_rank]).get(self._spec.rank + local_rank, "")

    # -- ending ----------------------------------------------------------------------------------------------------

    def fail(self, overdue: Sequence[int] = ()) -> None:
        """End all ranks and raise the first failure's error; ``overdue``: ranks without a sign of life."""
        stacks: dict[int, str] = {}
        hanging: list[int] = []
        elsewhere = self._hosts.failure() if self._hosts is not None else None
        timed_out = [r for r in self._locals() if self._state(r) == State.TIMED_OUT]
        if any(failure.timeout for failure in self._failures.values()):
            # Watchdogs of others that wait are about to end these, too; who hangs has none that is worried.
            self._join(_UNWIND_S)
            timed_out += [r for r, failure in self._failures.items() if failure.timeout]
        if timed_out or overdue or (elsewhere and elsewhere.timeout):
            self._notice()
            first = self._spec.rank
            # Before the signal, which may wake a rank from a system call. A rank that is about to tell does not hang.
            told = {first + r for r in self._locals() if r in self._failures or self._state(r) == State.FAILING}
            stacks = self._stacks()
            boundaries = {first + r: self.stop.boundary_of(r) for r in self._locals()}
            hanging = hanging_ranks({r: stack for r, stack in stacks.items() if r not in told}, boundaries)
        if overdue:
            hanging = [self._spec.rank + r for r in overdue]
            late = Failure(rank=hanging[0], time_ns=time.monotonic_ns(), type=None, timeout=True)
            self._failures.setdefault(overdue[0], late)
        ended = self.end()
        self.cause = cause = self._first_failure()
        if cause.type is None and not cause.timeout and cause.rank - self._spec.rank in self._locals():
            stacks = self._stacks(ask=False, ranks=[cause.rank - self._spec.rank])
        raise worker_failed_error(
            cause,
            world_size=self._spec.world_size,
            ended=[r for r in ended if r != cause.rank],
            stacks=stacks,
            hanging=hanging if cause.timeout else [],
            others_done=bool(overdue),
            timeout_s=self._spec.timeout_s,
        )

    def _end_lingering(self, ranks: list[int]) -> None:
        """Kill processes that don't end although all work is done and the result is here."""
        stacks = self._stacks(ranks=ranks)
        still = [self._spec.rank + r for r in ranks if self._processes[r].is_alive()]  # the others were about to end
        self.end()
        if not still:
            return
        text = "".join(f"\n\nPython stack of rank {rank}:\n{stacks[rank].rstrip()}" for rank in still)
        warn(
            f"{len(still)} of {self._spec.world_size} ranks had done all work but did not end within "
            f"{self._spec.timeout_s:g} s, and were ended: see below for what they waited for (a thread that is no "
            f"daemon, most often).{text}",
            RuntimeWarning,
        )

    @property
    def disturbance(self) -> str:
        """The message of a rank that found an untrusted connection before its work began; empty if there is none."""
        kind = DisturbedStartError.__name__
        return next((failure.message for failure in self._failures.values() if failure.type == kind), "")

    def _first_failure(self) -> Failure:
        """This host's first failure, or another host's if that is the cause."""
        own = first_failure(list(self._failures.values())) if self._failures else None
        if self._hosts is None:
            assert own is not None
            return own
        if own is not None and not own.consequence:
            self._hosts.tell(own)
            return own
        elsewhere = self._hosts.wait_for_failure(_HEAR_S)
        if elsewhere is None:
            assert own is not None
            self._hosts.tell(own)
            return own
        return elsewhere

    def end(self) -> list[int]:
        """End all ranks, gently first; returns the global ranks that had not finished by themselves."""
        running = [self._spec.rank + r for r in self._locals() if self._state(r) != State.DONE]
        self.stop.abort()
        self._join(_UNWIND_S)
        self._notice()
        signalled = frozenset(self._alive())
        for r in signalled:
            # Not where the work is over and the interpreter is about to end.
            if self._state(r) not in (State.DONE, State.FAILED):
                self._signal(r, signal.SIGTERM)
        self._join(_TERMINATE_S)
        for r in self._alive():
            self._signal(r, signal.SIGCONT)
            self._signal(r, signal.SIGKILL)
        self._join(_KILL_S)
        self._notice(ended_by_us=signalled)
        _kill_strays(self._token)
        return running

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (alive := self._alive()) and (left := deadline - time.monotonic()) > 0:
            # Returns when one has ended; the loop looks whether others are left.
            connection.wait([self._processes[r].sentinel for r in alive], timeout=left)

    def _signal(self, local_rank: int, number: int) -> None:
        process = self._processes[local_rank]
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _stacks(self, *, ask: bool = True, ranks: list[int] | None = None) -> dict[int, str]:
        """Python stacks of all ranks: requested now, left by a crash, or from the error that ended the rank."""
        ranks = list(self._locals()) if ranks is None else ranks
        fds = self._spec.stack_fds
        told = {r: failure.traceback for r, failure in self._failures.items()}
        if ask and STACK_SIGNAL is not None:
            # One that is still starting has no handler yet: the signal would kill it.
            asked = [r for r in ranks if self._processes[r].is_alive() and self._state(r) != State.STARTING]
            for r in asked:
                self._signal(r, STACK_SIGNAL)
            deadline = time.monotonic() + _DUMP_S
            while time.monotonic() < deadline and not all(os.fstat(fds[r]).st_size for r in asked):
                time.sleep(0.02)
            time.sleep(0.1)  # a dump is written line by line
        stacks = {}
        for r in ranks:
            text = os.pread(fds[r], 1 << 20, 0).decode(errors="replace")
            text = told.get(r) or text
            if text:
                stacks[self._spec.rank + r] = text
            elif ask:
                starting = "it is still starting: the script's imports? " if self._state(r) == State.STARTING else ""
                stacks[self._spec.rank + r] = f"none: {starting}{_process_state(self._processes[r])}"
        return stacks

    def result(self) -> Any:
        """The result of local rank 0's function."""
        return ResultFile(self._spec.result_fd).read()

    def close(self) -> None:
        """Release the processes' resources. Ranks that wait for more work end; no others may be alive."""
        for line in self._lines:
            line.close()
        if self._lines and self._alive():
            self._join(_TERMINATE_S)
            if self._alive():
                self.end()
        for process in self._processes:
            process.join()
            process.close()
        self.stop.release()
        self._map.close()


def _has_answered(line: socket.socket) -> bool:
    """Read a rank's message that it is ready for more work. If it has died instead, its process tells."""
    with contextlib.suppress(OSError):
        line.recv(1)
    return True


def _process_state(process: Any) -> str:
    """The reason why a rank wrote no stack."""
    if not process.is_alive():
        return f"it ended with {exit_text(process.exitcode)}"
    try:
        with open(f"/proc/{process.pid}/status") as file:
            state = next(line.split(":", 1)[1].strip() for line in file if line.startswith("State:"))
    except (OSError, StopIteration):
        return "it did not answer"
    return f"it did not answer; the system says '{state}'"


def _kill_strays(token: str) -> None:
    """Kill DataLoader workers whose rank was killed: they would notice only after some seconds.

    They carry the launch's token in their environment. Other programs that user code started are left alone.
    """
    mark = f"{LAUNCH_VARIABLE}={token}".encode()
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:  # no /proc: they notice by themselves
        return
    for pid in pids:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = mark in file.read().split(b"\0")
            if marked:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    arguments = file.read().split(b"\0")
                if b"--multiprocessing-fork" in arguments:
                    os.kill(pid, signal.SIGKILL)
