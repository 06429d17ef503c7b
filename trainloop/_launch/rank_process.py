"""Run a rank that ``launch`` started: set its limits (descriptors), receive and do its work, report failures, end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

from trainloop._launch.failures import failure_of, write_record
from trainloop._launch.output import Report, Sender, quieten_log_streams, rank_handlers, rank_streams
from trainloop._launch.script.main_guard import take_main_place
from trainloop._launch.script.module_state import receive_modules
from trainloop._launch.script.settings import apply_settings, write_settings
from trainloop._launch.work import LAUNCH_VARIABLE, RunSpec, StartFiles, Task, next_work
from trainloop._support.forks import guard_process
from trainloop._support.platform import process_config, resource
from trainloop._support.scratch import name_semaphores
from trainloop._support.signals import rank_signals
from trainloop._support.stopping import GroupStop, SharedStop, State
from trainloop._transfer.result import ResultFile
from trainloop.distributed import Rank
from trainloop.distributed.key import set_run_key
from trainloop.distributed.peers import DisturbedStartError, only_trusted_peers
from trainloop.distributed.ranks import leave_group

STACK_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else None
"""Signal that makes a rank write its Python stacks: a real-time signal, which other programs do not use."""

_STACK_WAIT_S = 2.0  # time before a rank ends after a time-out, for the parent to collect all stacks
_DAEMONS_S = 5.0  # at a rank's end, time for loader workers to end
_ORPHAN_GRACE_S = 5.0  # time for a rank to unwind after its parent was killed


class RankTerminated(BaseException):
    """Raised in a rank by SIGTERM once another rank has failed, so that ``finally`` blocks run."""

    def __init__(self) -> None:
        super().__init__("another rank has failed, so this rank ends. The output of that rank has the cause.")


_here: _RanksTask | None = None


def started_by_launch() -> bool:
    """Return True if this process is a rank that ``launch`` started."""
    return _here is not None


def started_as() -> Rank | None:
    """Return the rank that ``launch`` has given this process; ``None`` if ``launch`` did not start this process."""
    return None if _here is None else _here.me


def result_file() -> ResultFile | None:
    """Return the file for local rank 0's result, to which other ranks may add parts; ``None`` outside of ranks."""
    return None if _here is None else _here.result_file


def rescue_result(get_result: Callable[[], object]) -> None:
    """Send a result although this rank's work has failed. Only local rank 0 calls it, before it raises the error.

    The launching process waits for it, within limits, even if another rank has failed first.
    """
    assert _here is not None
    _here.stop.set_state(State.RESCUING)
    _here.result_file.write(get_result())


def run_rank(local_rank: int, line: connection.Connection) -> None:
    """Receive work over ``line`` and do it; this is the main function of a rank's process."""
    global _here
    first = next_work(line)
    if first is None:
        return
    work, received = first
    run, files, me = work.run, work.files.numbered(received), work.run.rank_of(local_rank)
    slots = memoryview(files.map_slots()).cast("q")
    stack_fd = files.stack_fds[local_rank]
    # Semaphores and temporary files (of loader workers) are named after their launch, because a killed rank can't
    # remove them.
    name_semaphores(os.environ[LAUNCH_VARIABLE])
    process_config()["tempdir"] = files.scratch.path
    faulthandler.enable(file=stack_fd, all_threads=True)  # a crash in native code leaves its Python stack
    if sys.platform != "win32" and STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True)
    end_with_parent(files.caller_fd)
    guard_process()
    while True:
        work.apply()
        _here = _RanksTask(run, files, me, slots, work.task, received)
        exitcode = _here.do()
        if exitcode or not run.outlives_work:
            break
        os.close(received[work.task.handle.fd])
        gc.collect()  # releases the caller's shared memory
        with contextlib.suppress(OSError):  # the launching process has ended; the next line detects that
            line.send_bytes(b"1")
        given = next_work(line)
        if given is None:
            break
        work, received = given
    leave_group()
    _end_process(exitcode)


# Kept until the process ends: a group's destructor waits for the group's threads. If a Reducer had the last reference,
# it would wait while it holds the GIL, which such a thread needs to free a tensor.
_groups: list[Any] = []


class _RanksTask:
    """A task of this process, which is a rank."""

    def __init__(
        self, run: RunSpec, files: StartFiles, me: Rank, slots: memoryview, task: Task, received: Mapping[int, int]
    ) -> None:
        self._run, self._files, self.me, self._task, self._received = run, files, me, task, received
        self._device = torch.device(run.devices[me.local_rank])
        self.result_file = ResultFile(files.result_fd)
        self.stop = SharedStop(slots, me.local_rank, me.local_world_size, run.timeout_s)

    def do(self) -> int:
        """Open the payload, do its work and write the result; return the exit code, 0 for success."""
        with (
            rank_signals(self.stop, ended=self._run_failed, end=RankTerminated),
            contextlib.ExitStack() as undo,
        ):
            try:
                self._set_up(undo)
                # This opens the payload, too, so that an error in the user's imports is recorded like any other.
                result = self._call(undo)
                if self.me.local_rank == 0:
                    self.result_file.write(result)
                self.stop.set_state(State.DONE)
            except BaseException as error:
                try:
                    exitcode = self._fail(error)
                except RuntimeError:  # DataLoader's handler of SIGCHLD raises at a call, once for each dead worker
                    exitcode = self._fail(error)
                leave_group(failed=True)
                return exitcode
        return 0

    def _run_failed(self) -> bool:
        return self.stop.aborted or parent_has_ended()

    def _set_up(self, undo: contextlib.ExitStack) -> None:
        """Prepare this process for the task; ``undo`` reverts it."""
        run, me, task = self._run, self.me, self._task
        sender = Sender(self._files.output_fd) if self._files.output_fd >= 0 else None
        report = Report(os.path.join(self._files.scratch.path, "output-not-shown"))
        undo.enter_context(rank_streams(me, sender, task.targets, report))
        self.stop.set_state(State.RUNNING)
        if "nccl" in run.backend:
            undo.enter_context(unblocking(self._run_failed))
        os.environ.update(
            RANK=str(me.rank),
            WORLD_SIZE=str(me.world_size),
            LOCAL_RANK=str(me.local_rank),
            LOCAL_WORLD_SIZE=str(me.local_world_size),
        )
        if run.interface is not None:  # this applies to groups that the work creates, and to later work of kept ranks
            os.environ["GLOO_SOCKET_IFNAME"] = run.interface
        if run.num_threads is not None:
            torch.set_num_threads(run.num_threads)
        _allow_many_descriptors()
        if "nccl" in run.backend:
            # After a time-out, NCCL's watchdog dumps its state and waits four times this value for it: by default a
            # minute.
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        take_main_place(*task.main)
        set_run_key(run.key)
        # Before the payload is opened, which imports the user's modules, whose warnings must be filtered, too.
        apply_settings(task.settings)
        quieten_log_streams(me, report)
        undo.enter_context(rank_handlers(sender, task.targets, me, report))

    def _call(self, undo: contextlib.ExitStack) -> Any:
        """Open the payload, join the process group, and call the task's function; return its result."""
        run, me = self._run, self.me
        write_late = receive_modules(self._task.modules, self._device, warns=me.local_rank == 0)
        function, used, settings = self._task.handle.open(self._device, self._received)
        write_late(used)
        write_settings(settings)
        if not run.outlives_work:
            undo.callback(leave_group)
        if not dist.is_initialized():
            with only_trusted_peers(DisturbedStartError):
                self._make_group()
            _groups.append(dist.group.WORLD)
        if me.num_nodes == 1:
            return function(self.stop)
        with only_trusted_peers():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=run.timeout_s))
        agreement = GroupStop(group, me.world_size, also=self.stop)
        result = function(agreement)
        agreement.finish()
        return result

    def _make_group(self) -> None:
        run = self._run
        options: dict[str, Any] = {
            "rank": self.me.rank,
            "world_size": self.me.world_size,
            "timeout": timedelta(seconds=run.timeout_s),
        }
        if run.init_method is not None:
            dist.init_process_group(run.backend, init_method=run.init_method, **options)
            return
        store: dist.Store
        if run.store is None:
            # A file needs no free port, and two runs can't connect to each other.
            # Outside Linux, a descriptor can't be reopened with a separate position and lock.
            named = os.path.join(self._files.scratch.path, "store")
            path = f"/proc/self/fd/{self._files.store_fd}" if sys.platform == "linux" else named
            store = dist.FileStore(path, self.me.world_size)
        else:
            host, port, prefix = run.store
            timeout = options["timeout"]
            client = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
            store = dist.PrefixStore(prefix, client)
        # Don't pass device_id (the current device is set): NCCL would create every smaller group by a split that needs
        # all ranks, and a user's Gloo group of some ranks would wait for it forever (torch 2.6 to 2.13).
        dist.init_process_group(run.backend, store=store, **options)

    def _fail(self, error: BaseException) -> int:
        """Record the error, before this rank leaves the group and others fail as a consequence; return exit code."""
        if isinstance(error, RankTerminated):
            return 128 + signal.SIGTERM
        self.stop.set_state(State.FAILING)  # reading the lines of its traceback takes a while on a busy machine
        # DataLoader's handler of SIGCHLD may raise anywhere, including here, once for each dead worker.
        for _ in range(8):
            with contextlib.suppress(RuntimeError):
                failure = failure_of(error, self.me.rank)
                write_record(self._files.record_fds[self.me.local_rank], failure)
                if sys.platform != "win32":
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                break
        if failure.timeout:
            # Don't end yet: the other ranks must keep hanging where they are until the parent has read their stacks.
            self.stop.set_state(State.TIMED_OUT)
            deadline = time.monotonic() + _STACK_WAIT_S
            while not self.stop.aborted and time.monotonic() < deadline:
                time.sleep(0.01)
        else:
            self.stop.set_state(State.FAILED)
        return failure.exitcode or 1


def _end_process(exitcode: int) -> None:
    """Join threads, run exit handlers and end this process, without finalizing the interpreter.

    Native threads, such as those of a process group, may still be running. A thread that requests the GIL of an
    interpreter that is finalizing is ended in the middle of C++ code, which can abort the process although all work is
    done.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads
    _kill_stuck_daemons()
    atexit._run_exitfuncs()  # including multiprocessing's, which ends loader workers
    gc.collect()  # closes objects in reference cycles
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # output of native code
    os._exit(exitcode)


def _kill_stuck_daemons() -> None:
    """Kill daemon processes (loader workers) that are stuck in native code: Python only sends SIGTERM and waits."""
    for child in multiprocessing.active_children():
        if child.daemon:
            timer = threading.Timer(_DAEMONS_S, child.kill)
            timer.daemon = True
            timer.start()


def _allow_many_descriptors() -> None:
    """Raise the limit of open descriptors: each tensor from a DataLoader worker needs one, in any sharing mode."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = 65536 if hard == unlimited else min(hard, 65536)
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# --------------------------------------------------------------------------------------------------------------------
# The parent
# --------------------------------------------------------------------------------------------------------------------


_parent: list[int] = []  # descriptors that become readable when the parent ends


def parent_has_ended() -> bool:
    """Return True if the process that started this one has ended."""
    return bool(_parent and connection.wait(_parent, 0))


def end_with_parent(caller_fd: int) -> None:
    """Make this process end soon after the launching process ends, for whatever reason.

    Parameters
    ----------
    caller_fd : int
        Descriptor of the launching process (``pidfd_open``); -1 for none. Without it, a fork of the launching process
        could keep this process alive, since the fork also holds the other end of ``multiprocessing``'s sentinel.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    _parent.append(parent.sentinel)
    if caller_fd >= 0:
        _parent.append(caller_fd)
    if parent_has_ended():
        os._exit(1)
    threading.Thread(target=_outlive_parent_briefly, name="trainloop-parent-watch", daemon=True).start()


def _outlive_parent_briefly() -> None:
    connection.wait(_parent)
    # A native thread ends the process: this Python thread would wait forever if a stuck thread held the GIL.
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(_ORPHAN_GRACE_S, exit=True, file=nowhere)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()


# -- a rank that NCCL blocks -------------------------------------------------------------------------------------------


_LOOK_S = 0.2
_OWN_ERROR_S = 0.5  # time for this rank's own error to arrive, and for its main thread to unwind if it is not blocked
_ABORT_S = 10.0  # longest time that a rank that ends waits for collectives that are being aborted


@contextlib.contextmanager
def unblocking(run_failed: Callable[[], bool]) -> Iterator[None]:
    """In the block, abort NCCL's collectives once the run has failed, from a thread, so that no rank blocks forever.

    A Gloo collective raises as soon as a neighbour has ended. On one machine, an NCCL collective keeps running on the
    device, and the host waits for it in native code, where no Python signal handler runs. Such a rank could only be
    killed, once the time that the launching process (torchrun: 30 seconds) gives ranks to unwind is over.

    Parameters
    ----------
    run_failed : callable
        Returns True if the run has failed: the handler of SIGTERM then raises.
    """
    over = threading.Event()
    thread = threading.Thread(target=_unblock, args=(run_failed, over), name="trainloop-unblocking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_ABORT_S)  # it may still use the group and the shared memory


def _unblock(run_failed: Callable[[], bool], over: threading.Event) -> None:
    while not run_failed():
        if over.wait(_LOOK_S):
            return
    if over.wait(_OWN_ERROR_S):
        return
    # Send the signal before aborting the collectives. Aborted collectives leave invalid gradients on the device, and
    # the main thread would use them for a step and a checkpoint. With the signal pending, the main thread runs the
    # handler instead.
    os.kill(os.getpid(), signal.SIGTERM)
    if not over.wait(_OWN_ERROR_S):
        leave_group(failed=True)
