"""Start, watch and end this node's ranks, and fetch their result."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import Any

from trainloop._launch.failures import Failure, exit_text, first_failure, read_record, read_text, worker_failed_error
from trainloop._launch.hosts import Hosts
from trainloop._launch.liveness import Liveness, Sign, hanging_ranks
from trainloop._launch.output import Outlets
from trainloop._launch.rank_process import STACK_SIGNAL, run_rank
from trainloop._launch.work import LAUNCH_VARIABLE, RunSpec, StartFiles, Task, Work
from trainloop._processes import fork_server as processes
from trainloop._support.platform import affinity
from trainloop._support.signals import ReceivedSignals
from trainloop._support.stopping import SharedStop, State
from trainloop._support.user_line import warn
from trainloop._transfer.result import ResultFile
from trainloop.distributed.peers import DisturbedStartError

_PROC = os.path.isdir("/proc/self/fd")

_POLL_S = 0.1
_UNWIND_S = 1.0  # time for the other ranks' errors to arrive after a failure
_RESCUE_S = 30.0  # time for a rank that sends its state although the run has failed
_TERMINATE_S = 5.0  # time for ``finally`` blocks after SIGTERM
_KILL_S = 2.0
_REPORT_S = 3.0  # time for another host to report its failure
_DUMP_S = 1.0  # time for a rank to write its stacks

SERVER_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "trainloop.callbacks",
    "trainloop.data",
    "trainloop._launch.rank_process",
    "trainloop.parallel",
    "trainloop.train_loop",
    "trainloop.train_loop.execution.handover",
)
"""Modules that a rank of a TrainLoop imports before the user's own; the first takes nearly all of the time."""


def server_modules() -> list[str]:
    """Return the modules that the fork server imports for ranks."""
    # The caller's first optimizer has imported the compiler; each rank's optimizer would import it, too.
    return [*SERVER_MODULES, *({"torch._dynamo"} & sys.modules.keys())]


class Ranks:
    """The processes of one launch on this node.

    Parameters
    ----------
    run : RunSpec
        Settings of the processes.
    files : StartFiles
        Files of this start.
    token : str
        String that marks this launch: it is in the names of the launch's files and in the environment of its processes.
    outlets : Outlets
        Receives the ranks' output for this process's streams and log handlers.
    hosts : Hosts, optional
        The other hosts of the run.
    """

    def __init__(
        self,
        run: RunSpec,
        files: StartFiles,
        token: str,
        outlets: Outlets,
        hosts: Hosts | None = None,
    ) -> None:
        self._run, self._files = run, files
        self._first_rank = run.first.rank
        self._hosts = hosts
        self._outlets = outlets
        self._map = files.map_slots()
        self._slots = memoryview(self._map).cast("q")
        self.stop = SharedStop(self._slots, -1, run.first.local_world_size)
        self._processes: list[Any] = []
        self._failures: dict[int, Failure] = {}
        self._reported: Failure | None = None  # to the other hosts
        self._liveness = Liveness(run.timeout_s)
        self._token = token
        self.cause: Failure | None = None
        """The first failure, once the run has failed."""
        self._lines: list[connection.Connection] = []
        self._line_marks: list[str] = []
        self._begun = False
        self._env: dict[str, str] = {}
        self._cpus = affinity()

    def start(self, environment: dict[str, str], *, served: bool) -> None:
        """Start the processes, which then wait for work.

        Parameters
        ----------
        environment : dict of str to str
            Environment variables to set in addition to this process's.
        served : bool
            True to fork the processes from the server; False to start each as a fresh interpreter.

        Raises
        ------
        NoServerError
            If the processes can't be forked from the server.
        """
        # All processes that ranks start inherit the token, so that remaining ones can be found.
        variables = {**environment, LAUNCH_VARIABLE: self._token}
        pairs = _pairs(self._run.first.local_world_size)
        calls: list[processes.Call] = [(run_rank, (r, theirs)) for r, (_, theirs) in enumerate(pairs)]
        self._line_marks = [os.readlink(f"/proc/self/fd/{theirs.fileno()}") for _, theirs in pairs] if _PROC else []
        try:
            if served:
                self._processes = processes.from_server(calls, server_modules(), variables)
            else:
                self._processes = processes.spawned(calls, variables)
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            # If this process kept a rank's end of a connection open, the rank's death would not close it.
            _close_ends([theirs for _, theirs in pairs])
        self._lines = [ours for ours, _ in pairs]
        self._env = {**os.environ, **variables}

    def give(self, task: Task, variables: dict[str, str]) -> None:
        """Send the ranks a task, with the changes of this process's state since their start or the previous task."""
        env, cpus, folder = {**os.environ, **variables, LAUNCH_VARIABLE: self._token}, affinity(), None
        with contextlib.suppress(OSError):
            folder = os.getcwd()
        changed = {name: env.get(name) for name in {*env, *self._env} if env.get(name) != self._env.get(name)}
        work = Work(self._run, self._files, task, changed, folder, cpus if cpus != self._cpus else None)
        is_first, self._begun, self._env, self._cpus = not self._begun, True, env, cpus
        for r, line in enumerate(self._lines):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a rank that has died is found by watch()
                work.send_over(line, [*(self._files.descriptors(r) if is_first else ()), *task.fds])

    # -- watching --------------------------------------------------------------------------------------------------

    def watch(self, *, at_once: bool = False) -> None:
        """Wait until all ranks are done: they have ended, or are ready for more work if they outlive their work.

        Parameters
        ----------
        at_once : bool
            True to end the work here once a rank has received a signal, since ranks only record it.

        Raises
        ------
        WorkerFailedError
            If a rank fails; the others have ended by then.
        KeyboardInterrupt, SystemExit
            With ``at_once``, after a signal; the caller ends the ranks.
        """
        try:
            self._watch(at_once)
        finally:
            self._outlets.pass_on()

    def _watch(self, at_once: bool) -> None:
        busy = set(self._locals()) if self._run.outlives_work else set()
        while True:
            alive = self._alive()
            if alive:
                sentinels = [self._processes[r].sentinel for r in alive]
                awaited = [*sentinels, *(self._lines[r] for r in busy), *self._outlets.readable]
                ready = connection.wait(awaited, timeout=_POLL_S)
                self._outlets.pass_on()
                busy -= {r for r in busy if self._lines[r] in ready and _has_answered(self._lines[r])}
            if at_once:
                received = ReceivedSignals()
                received.note(self.stop.requested)
                received.raise_if_any()
            if self._notice() or any(self.stop.state_of(r) == State.TIMED_OUT for r in self._locals()):
                self.fail()
            if self._hosts is not None and self._hosts.failure() is not None:
                self.fail()
            if not self._alive():
                if self._notice():  # a rank may have failed since the check above
                    self.fail()
                return
            if (
                self._run.outlives_work
                and not busy
                and all(self.stop.state_of(r) == State.DONE for r in self._locals())
            ):
                return
            overdue = self._overdue()
            if overdue and self.stop.state_of(overdue[0]) == State.DONE:
                self._end_lingering(overdue)
                return
            if overdue:
                self.fail(overdue)

    def wait_for_other_hosts(self) -> None:
        """Report that this host's ranks are done, and wait until the ranks of all hosts are done.

        Raises
        ------
        WorkerFailedError
            If another host fails.
        """
        while self._hosts is not None and not self._hosts.leave(_POLL_S):
            if self._hosts.failure() is not None:
                self.fail()

    def are_up(self) -> bool:
        """Return True if all ranks wait for more work."""
        return self._run.outlives_work and len(self._alive()) == self._run.first.local_world_size

    def reset(self) -> None:
        """Reset the state of the last work, while the ranks are running."""
        for i in range(len(self._slots)):
            self._slots[i] = 0
        for fd in (*self._files.record_fds, *self._files.stack_fds):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)  # the rank shares this file position
        self._failures, self._liveness = {}, Liveness(self._run.timeout_s)
        self.cause = self._reported = None

    def _locals(self) -> range:
        return range(len(self._processes))

    def _alive(self) -> list[int]:
        return [r for r in self._locals() if self._processes[r].is_alive()]

    def _overdue(self) -> list[int]:
        signs = [Sign(self.stop.boundary_of(r), self.stop.state_of(r) != State.DONE) for r in self._locals()]
        elsewhere = self._hosts.done_since if self._hosts is not None else None
        return self._liveness.overdue(signs, time.monotonic(), done_elsewhere_since=elsewhere)

    def _notice(self, ended_by_us: frozenset[int] = frozenset()) -> bool:
        """Record ranks that failed; return True if there are any."""
        for r in self._locals():
            process = self._processes[r]
            if r in self._failures:
                continue
            rank = self._first_rank + r
            # The record has more detail than the exit code. Once the process has ended, the record is complete.
            ended = not process.is_alive()
            record = read_record(self._files.record_fds[r])
            if record is not None:
                self._failures[r] = record
            elif r not in ended_by_us and ended:
                if self.stop.state_of(r) == State.DONE and process.exitcode == 0:
                    continue
                by_watchdog = self._ended_by_watchdog(r)
                timeout = by_watchdog and self._liveness.silent_s(r, time.monotonic()) > self._run.timeout_s / 2
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
        """Return True if NCCL's watchdog thread aborted a rank: a collective timed out or lost its connection."""
        if "nccl" not in self._run.backend or self._processes[local_rank].exitcode != -signal.SIGABRT:
            return False
        # If a Python thread aborts, its stack is marked as the current thread's.
        stacks = self._stacks(ask=False, ranks=[local_rank])
        return "Current thread" not in stacks.get(self._first_rank + local_rank, "")

    # -- ending ----------------------------------------------------------------------------------------------------

    def fail(self, overdue: Sequence[int] = ()) -> None:
        """End all ranks and raise the error of the first failure; ``overdue`` lists ranks without a sign of life."""
        stacks: dict[int, str] = {}
        hanging: list[int] = []
        elsewhere = self._hosts.failure() if self._hosts is not None else None
        self._report_first_failure()  # immediately, since the other hosts do not wait for long
        timed_out = [r for r in self._locals() if self.stop.state_of(r) == State.TIMED_OUT]
        if any(failure.timeout for failure in self._failures.values()):
            # The watchdogs of the waiting ranks will soon end the waiting ranks, too, but not the hanging rank.
            self._join(_UNWIND_S)
            timed_out += [r for r, failure in self._failures.items() if failure.timeout]
        if timed_out or overdue or (elsewhere and elsewhere.timeout):
            self._notice()
            # Read the stacks before sending the signal, which may interrupt a system call. A rank that is about to
            # report does not hang.
            reported = {
                self._first_rank + r
                for r in self._locals()
                if r in self._failures or self.stop.state_of(r) == State.FAILING
            }
            stacks = self._stacks()
            boundaries = {self._first_rank + r: self.stop.boundary_of(r) for r in self._locals()}
            hanging = hanging_ranks({r: stack for r, stack in stacks.items() if r not in reported}, boundaries)
        if overdue:
            hanging = [self._first_rank + r for r in overdue]
            late = Failure(rank=hanging[0], time_ns=time.monotonic_ns(), type=None, timeout=True)
            self._failures.setdefault(overdue[0], late)
        ended = self.end()
        self.cause = cause = self._first_failure(elsewhere)
        if cause.type is None and not cause.timeout and cause.rank - self._first_rank in self._locals():
            stacks = self._stacks(ask=False, ranks=[cause.rank - self._first_rank])
        raise worker_failed_error(
            cause,
            world_size=self._run.first.world_size,
            ended=[r for r in ended if r != cause.rank],
            stacks=stacks,
            hanging=hanging if cause.timeout else [],
            others_done=bool(overdue),
            timeout_s=self._run.timeout_s,
        )

    def _end_lingering(self, ranks: list[int]) -> None:
        """Kill processes that don't end although all work is done and the result has been written."""
        stacks = self._stacks(ranks=ranks)
        still = [self._first_rank + r for r in ranks if self._processes[r].is_alive()]  # others have just ended
        self.end()
        if not still:
            return
        text = "".join(f"\n\nPython stack of rank {rank}:\n{stacks[rank].rstrip()}" for rank in still)
        warn(
            f"{len(still)} of {self._run.first.world_size} ranks did not exit within {self._run.timeout_s:g} s after "
            "finishing all work, and had to be ended. The stacks below show what they waited for (usually a thread "
            f"that is not a daemon).{text}",
            RuntimeWarning,
        )

    @property
    def disturbance(self) -> str:
        """Message of a rank that found an untrusted connection before its work began; empty if no rank found one."""
        kind = DisturbedStartError.__name__
        return next((failure.message for failure in self._failures.values() if failure.type == kind), "")

    def _report_first_failure(self, *, consequence: bool = False) -> Failure | None:
        """Report this host's first failure to the other hosts, and return it; None if no rank failed.

        A failure that is a consequence is reported only if ``consequence`` is True.
        """
        own = first_failure(list(self._failures.values())) if self._failures else None
        if own is None or (own.consequence and not consequence):
            return None
        if self._hosts is not None and self._reported is None:
            self._hosts.report(own)
            self._reported = own
        return self._reported or own

    def _first_failure(self, elsewhere: Failure | None) -> Failure:
        """Return the run's first failure: this host's failure, ``elsewhere``, or a failure that arrives soon."""
        cause = self._report_first_failure() or elsewhere
        if cause is None and self._hosts is not None:
            cause = self._hosts.wait_for_failure(_REPORT_S)
        cause = cause or self._report_first_failure(consequence=True)
        assert cause is not None
        return cause

    def end(self) -> list[int]:
        """End all ranks, first by a request, then by signals; return the global ranks whose work was not finished."""
        running = [self._first_rank + r for r in self._locals() if self.stop.state_of(r) != State.DONE]
        if not self._begun:
            for process in self._processes:
                process.kill()  # the rank is waiting for work, so it has nothing to unwind
        self.stop.abort()
        if len(alive := self._alive()) < len(self._processes):
            # Loader workers keep the connections of the rank that forked them open. If that rank was killed, other
            # ranks would wait for it in a collective, where no signal reaches them.
            _kill_strays({mark for r, mark in enumerate(self._line_marks) if r not in alive})
        self._join(_UNWIND_S)
        deadline = time.monotonic() + _RESCUE_S
        while any(self.stop.state_of(r) == State.RESCUING for r in self._alive()) and time.monotonic() < deadline:
            self._join(0.05)
        self._notice()
        signalled = frozenset(self._alive())
        for r in signalled:
            # Don't signal ranks whose work is over: their interpreter is about to end.
            if self.stop.state_of(r) not in (State.DONE, State.FAILED):
                self._signal(r, signal.SIGTERM)
        self._join(_TERMINATE_S)
        for r in self._alive():
            if sys.platform != "win32":
                self._signal(r, signal.SIGCONT)
            self._processes[r].kill()
        self._join(_KILL_S)
        self._notice(ended_by_us=signalled)
        _kill_strays(set(self._line_marks), self._token)
        return running

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (alive := self._alive()) and (left := deadline - time.monotonic()) > 0:
            # This returns once one process has ended; the loop checks for others.
            # A rank that prints would otherwise wait for this process.
            connection.wait([*(self._processes[r].sentinel for r in alive), *self._outlets.readable], timeout=left)
            self._outlets.pass_on()

    def _signal(self, local_rank: int, number: int) -> None:
        process = self._processes[local_rank]
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _stacks(self, *, ask: bool = True, ranks: list[int] | None = None) -> dict[int, str]:
        """Return Python stacks by global rank: requested now, left by a crash, or from the rank's error."""
        ranks = list(self._locals()) if ranks is None else ranks
        fds = self._files.stack_fds
        tracebacks = {r: failure.traceback for r, failure in self._failures.items()}
        if ask and STACK_SIGNAL is not None:
            # A rank that is still starting has no handler yet: the signal would kill it.
            requested = [r for r in ranks if self._processes[r].is_alive() and self.stop.state_of(r) != State.STARTING]
            for r in requested:
                self._signal(r, STACK_SIGNAL)
            deadline = time.monotonic() + _DUMP_S
            while time.monotonic() < deadline and not all(os.fstat(fds[r]).st_size for r in requested):
                time.sleep(0.02)
            time.sleep(0.1)  # a dump is written line by line
        stacks = {}
        for r in ranks:
            text = read_text(fds[r])[: 1 << 20].decode(errors="replace")
            text = tracebacks.get(r) or text
            if text:
                stacks[self._first_rank + r] = text
            elif ask:
                starting = (
                    "it is still starting (the script's imports?); " if self.stop.state_of(r) == State.STARTING else ""
                )
                stacks[self._first_rank + r] = f"none: {starting}{_process_state(self._processes[r])}"
        return stacks

    def result(self) -> Any:
        """Return the result of local rank 0's function."""
        return ResultFile(self._files.result_fd).read()

    def rescued(self) -> Any:
        """Return the result that local rank 0 sent although its work has failed; ``None`` if it sent none."""
        file = ResultFile(self._files.result_fd)
        return file.read() if self.stop.state_of(0) == State.FAILED and file.is_complete() else None

    def close(self) -> None:
        """End ranks that wait for more work, and release all processes' resources. No other rank may be alive."""
        for line in self._lines:
            line.close()
        if self._run.outlives_work and self._alive():
            self._join(_TERMINATE_S)
            if self._alive():
                self.end()
        for process in self._processes:
            process.join()
            process.close()
        self.stop.release()
        self._map.close()


# Other threads may fork this process while ranks start. Such a fork would keep the ranks' ends of connections open and
# look like a remaining process of a rank. So forks close these ends, and wait while an end is opened and listed.
_fork_lock = threading.RLock()
_open_ends: set[connection.Connection] = set()


def _pairs(number: int) -> list[tuple[connection.Connection, connection.Connection]]:
    """Return a connection for each rank: this process's end, and the rank's, which :func:`_close_ends` closes here."""
    with _fork_lock:
        pairs: list[Any] = [multiprocessing.Pipe() for _ in range(number)]
        _open_ends.update(theirs for _, theirs in pairs)
    return pairs


def _close_ends(ends: Sequence[connection.Connection]) -> None:
    with _fork_lock:
        for end in ends:
            end.close()
            _open_ends.discard(end)


def _in_fork() -> None:
    for end in _open_ends:
        end.close()
    _open_ends.clear()
    _fork_lock.release()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_in_fork)


def _has_answered(line: connection.Connection) -> bool:
    """Read a rank's message that it is ready for more work. Return True even if the rank has died instead."""
    with contextlib.suppress(EOFError, OSError):
        line.recv_bytes()
    return True


def _process_state(process: Any) -> str:
    """Return the reason why a rank wrote no stack."""
    if not process.is_alive():
        return f"it ended with {exit_text(process.exitcode)}"
    import psutil

    with contextlib.suppress(psutil.Error):
        return f"it did not respond (process state: {psutil.Process(process.pid).status()})"
    return "it did not respond"


def _kill_strays(line_marks: set[str], token: str = "") -> None:
    """Kill remaining processes of ranks: a killed rank's DataLoader workers would take seconds to end by themselves.

    A rank's forked children keep the rank's end of its connection open. So does a rank whose fork server was killed.
    Workers that a rank has spawned have the launch's token in their environment: if ``token`` is given, they are
    killed, too. Other programs that user code started are left alone.
    """
    import psutil

    for process in psutil.process_iter() if _PROC else ():
        with contextlib.suppress(OSError, psutil.Error):  # the process has ended, or is another user's
            if line_marks.isdisjoint(_open_files(process.pid)):
                has_token = token and process.environ().get(LAUNCH_VARIABLE) == token
                if not has_token or "--multiprocessing-fork" not in process.cmdline():
                    continue
            process.kill()


def _open_files(pid: int) -> Iterator[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            yield os.readlink(f"/proc/{pid}/fd/{name}")
