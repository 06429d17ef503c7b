"""Start ranks on this node and run one function in them; return local rank 0's result, or raise the first failure."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from trainloop._launch.failures import RestartPolicy, with_note
from trainloop._launch.hosts import Hosts, meet_hosts
from trainloop._launch.joining import backend_for
from trainloop._launch.output import Outlets, targets_here
from trainloop._launch.rank_process import started_by_launch
from trainloop._launch.script.main_guard import check_main_guard, main_place
from trainloop._launch.script.module_state import LoadedCode, dumped_modules
from trainloop._launch.script.settings import dumped_settings, settings_of_work
from trainloop._launch.spawning import Ranks, server_modules
from trainloop._launch.work import RunSpec, StartFiles, Task
from trainloop._processes.fork_server import (
    NoServerError,
    absolute_path,
    begin_server,
    chosen_method,
    fixed_state,
    limits,
)
from trainloop._support.blocks import refuse_blocks
from trainloop._support.platform import blocked_signals, loopback_interface, resource
from trainloop._support.scratch import scratch_folder
from trainloop._support.signals import signals, uninterrupted
from trainloop._support.stopping import SharedStop, StopAgreement
from trainloop._transfer import pack
from trainloop._transfer.pages import anonymous_file, close_file
from trainloop.distributed import Rank
from trainloop.distributed.key import key_from_environment, new_key
from trainloop.errors import ConfigurationError, WorkerFailedError
from trainloop.resources.enforce import child_environment, threads_in

logger = logging.getLogger("trainloop")

T = TypeVar("T")

_PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)  # before each start that follows a start with an untrusted connection


def launch(
    function: Callable[[StopAgreement], T],
    *,
    ranks_per_node: int,
    num_nodes: int = 1,
    node_rank: int = 0,
    devices: Sequence[torch.device] | None = None,
    backend: str | None = None,
    init_method: str | None = None,
    timeout_s: float = 1800.0,
    child_env: dict[str, str] | None = None,
    start_method: str = "auto",
    roots: dict[str, object] | None = None,
    known: Sequence[object] = (),
    restart_policy: RestartPolicy | None = None,
    take_rescued: Callable[[Any], str] | None = None,
) -> T:
    """Run ``function`` in ``ranks_per_node`` new processes of this node, joined in a process group.

    Parameters
    ----------
    function : callable
        Takes one argument, the run's :class:`~trainloop._support.stopping.StopAgreement`. May be defined
        anywhere (notebook, closure, lambda) and refer to anything that can be pickled, directly or by cloudpickle.
        Large arrays and tensors are mapped by all ranks, not copied.
    ranks_per_node : int
        Processes to start here.
    num_nodes, node_rank : int
        Number of hosts of the run, and index of this one. Each calls ``launch`` and starts its own ranks only.
    devices : sequence of torch.device, optional
        Device of each local rank; the CPU by default.
    backend : str, optional
        Backend of the process group; by default Gloo, with NCCL for CUDA tensors if each rank has its own GPU.
    init_method : str, optional
        Rendezvous point of several nodes: ``tcp://host:port``, or a ``file://`` URL that all nodes can access;
        ``MASTER_ADDR`` and ``MASTER_PORT`` by default. A single node does not need one: its ranks use an unnamed file.
    timeout_s : float
        Seconds that a rank waits for another in a collective or at a step boundary, before the run fails.
    child_env : dict of str to str, optional
        Environment variables of the ranks, set before their interpreters start; ``OMP_NUM_THREADS`` must be among them.
        By default, all CPUs are divided among the ranks, which would otherwise compete for them.
    start_method : {'auto', 'forkserver', 'spawn'}
        Fork ranks from ``multiprocessing``'s fork server, which has torch loaded, or start each as a fresh interpreter.
        ``'auto'``: the value of ``TRAINLOOP_START_METHOD``; if it is not set, a fork server if possible.
    roots : dict of str to object, optional
        Objects by name. Paths in an ``UnpicklableError`` start with these names.
    known : sequence of objects
        Parts of ``function``: variables of the user's modules that refer to one of them refer to it in ranks, too.
    restart_policy : RestartPolicy, optional
        Decides whether ranks that have failed start again, with the same payload; by default the first failure ends the
        run.
    take_rescued : callable, optional
        Called before a failure is raised, with the result that local rank 0 has passed to
        :func:`~trainloop._launch.rank_process.rescue_result`, if it has. Returns a sentence for the error's message.

    Returns
    -------
    object
        The result of local rank 0's function, with its tensors on the CPU.

    Raises
    ------
    ConfigurationError, UnpicklableError
        Before any rank starts, if the script has no ``__main__`` guard, a host does not connect, an object can't be
        sent, or a requested fork server can't be used.
    WorkerFailedError
        If a rank raised, exited, was killed or hung, or a host was lost. All ranks have ended by then.
    KeyboardInterrupt
        At the second Ctrl-C. The first Ctrl-C, SIGTERM and SIGUSR1 ask the ranks to stop at a step boundary. No rank
        is started if the surrounding :func:`trainloop._support.signals.signals` context has already received a signal.
        If that context is ``at_once``, any signal ends the ranks, including a signal that only one rank receives.

    Notes
    -----
    The caller's environment, random state, threads, signal handlers and process group are left unchanged. Ranks apply
    its process-wide settings and the state of the user's modules: see :mod:`trainloop._launch.script.settings` and
    :mod:`trainloop._launch.script.module_state`.
    """
    _check_caller()
    check_main_guard()
    method = chosen_method(start_method)
    served = _begin_server(method)  # the server imports its modules while the payload is packed
    chosen = list(devices) if devices is not None else [torch.device("cpu")] * ranks_per_node
    backend = backend or backend_for(chosen)
    environment = child_environment(None, ranks_per_node) if child_env is None else child_env
    kept = kept_here() if num_nodes == 1 and restart_policy is None else None
    used: list[object] = []
    large: list[object] = []
    of_work = settings_of_work()
    settings, modules, targets = dumped_settings(of_work), dumped_modules(known, used, large), targets_here()
    meet = partial(meet_hosts, init_method, node_rank=node_rank, num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    with (
        _descriptors_explained(),
        pack((function, used, of_work), roots=roots, large=large) as payload,
        meet(timeout_s=timeout_s) as hosts,
    ):
        run = RunSpec(
            Rank(node_rank * ranks_per_node, num_nodes * ranks_per_node, 0, ranks_per_node, node_rank, num_nodes),
            devices=tuple(str(device) for device in chosen),
            backend=backend,
            timeout_s=timeout_s,
            num_threads=threads_in(environment["OMP_NUM_THREADS"]),
            store=None if hosts is None else (*hosts.store_address, "ranks"),
            interface=loopback_interface() if num_nodes == 1 else None if hosts is None else hosts.interface,
            init_method=init_method if num_nodes > 1 and hosts is None else None,
            key=new_key() if num_nodes == 1 else key_from_environment(),
            outlives_work=kept is not None,
        )
        task = Task(payload.handle, tuple(payload.descriptors), settings, modules, targets, main_place())
        starts = _Starts(run, task, environment, method, served, hosts, kept, restart_policy, take_rescued)
        result: T = starts.run_to_end()
        return result


@dataclass
class _Starts:
    """All starts of one call's ranks: the first start, and restarts after failures."""

    run: RunSpec
    task: Task
    environment: dict[str, str]
    """Environment variables to set in addition to this process's."""
    method: str
    """``'auto'``, ``'forkserver'`` or ``'spawn'``, as chosen for this machine."""
    served: bool
    """True to fork the processes from the server."""
    hosts: Hosts | None
    kept: KeptRanks | None
    policy: RestartPolicy | None
    take_rescued: Callable[[Any], str] | None
    first: bool = True
    disturbed: int = 0
    """Number of starts that were repeated because an untrusted process had connected."""

    def run_to_end(self) -> Any:
        """Start ranks until their work is done; return the result of local rank 0's function."""
        terms = None if self.kept is None else self._terms()
        while True:
            with contextlib.ExitStack() as undo:
                if self.policy is not None:
                    self.policy.before_start()
                up = self.kept.resume(terms, undo) if self.kept is not None else None
                ranks = up or _new_ranks(self.run, self.hosts, undo)
                if self._run_once(ranks, are_up=up is not None):
                    result = ranks.result()
                    if self.kept is not None:
                        self.kept.keep(ranks, terms, undo)
                    return result

    def _terms(self) -> list[Any]:
        """Return what ranks get or inherit at their start, and keep. If it changes, new ranks must be started."""
        settings = replace(self.run, key=None, interface=None), self.environment, self.method
        return [*settings, LoadedCode(), fixed_state(), limits(), absolute_path(), blocked_signals()]

    def _run_once(self, ranks: Ranks, *, are_up: bool) -> bool:
        """Start the ranks if they are not running, send the work, and wait; return False if new ranks must start."""
        with signals(ranks.stop) as received:
            if self.first:
                received.raise_if_any()  # no work has begun yet, so end at once
            try:
                if not are_up:
                    self._start_processes(ranks)
                    if self.first:
                        received.raise_if_any()  # check again: the server's imports may have taken a long time
                self.first = False  # from here on a signal makes ranks write a checkpoint before they stop
                ranks.give(self.task, self.environment)
                ranks.watch(at_once=received.at_once)
                ranks.wait_for_other_hosts()
            except WorkerFailedError as error:  # all ranks have ended
                self._raise_unless_restarting(ranks, error)
                return False
            except BaseException:
                with uninterrupted():  # a second Ctrl-C must not leave processes behind
                    ranks.end()
                raise
            received.note(ranks.stop.requested)  # include a signal that a rank received after its last step
        return True

    def _start_processes(self, ranks: Ranks) -> None:
        """Start the ranks' processes; without a server, these and later ones are spawned."""
        if self.served:
            try:
                ranks.start(self.environment, served=True)
                return
            except NoServerError as error:
                _explain(error, self.method)
                self.served = False
        ranks.start(self.environment, served=False)

    def _raise_unless_restarting(self, ranks: Ranks, error: WorkerFailedError) -> None:
        """Raise the error if it ends the run; otherwise print or record why ranks restart."""
        # Not with several hosts: every host would have to restart its ranks.
        again = self.disturbed < len(_PAUSES_S) and self.run.first.num_nodes == 1
        if ranks.disturbance and again:
            pause_s = _PAUSES_S[self.disturbed]
            self.disturbed += 1
            attempt = f"{self.disturbed} of {len(_PAUSES_S)}, after {pause_s:g} s"
            logger.warning(f"Restarting the ranks ({attempt}): {ranks.disturbance}")
            time.sleep(pause_s)  # a scan of ports may be over by then
            return
        if self.policy is None or ranks.cause is None:
            raise self._with_rescued(ranks, error) from None
        final = self.policy.error_that_ends_run(ranks.cause, error)
        if final is not None:
            raise self._with_rescued(ranks, final) from None

    def _with_rescued(self, ranks: Ranks, error: WorkerFailedError) -> WorkerFailedError:
        rescued = ranks.rescued() if self.take_rescued is not None else None
        if rescued is None or self.take_rescued is None:
            return error
        return with_note(error, self.take_rescued(rescued))


def _check_caller() -> None:
    if started_by_launch():
        raise ConfigurationError(
            "a rank can't start other ranks. Inside a rank, call fit() with gpu_mode='single'. If a module that the "
            "rank imports makes this call, put the call inside an `if __name__ == '__main__':` block."
        )
    refuse_blocks()
    if kept_here() is None:
        _check_folder()


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigurationError(
            f"the current folder of this process can't be read ({error.strerror}): it was probably deleted, and ranks "
            "would start in it. Call os.chdir with an existing folder before fit."
        ) from error


@contextlib.contextmanager
def _descriptors_explained() -> Iterator[None]:
    """Explain the system's error about the limit of open files."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = "" if resource is None else f" of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
        raise ConfigurationError(
            f"ranks can't be started: the limit{limit} open files of this process is too low ({error.strerror}). Raise "
            "it in the shell (ulimit -n 1024), or close files that are no longer used."
        ) from error


def _new_ranks(run: RunSpec, hosts: Hosts | None, undo: contextlib.ExitStack) -> Ranks:
    """Return ranks that are not started yet, and create the files of one start; ``undo`` removes both."""
    ranks_per_node = run.first.local_world_size
    token = f"{os.getpid()}-{time.monotonic_ns()}"
    file = partial(_unnamed_file, undo)
    outlets = Outlets()
    undo.callback(outlets.close)
    files = StartFiles(
        slots_fd=file("slots", 8 * SharedStop.num_slots(ranks_per_node)),
        store_fd=file("store"),
        result_fd=file("result"),
        output_fd=outlets.sending_fd,
        record_fds=tuple(file("record") for _ in range(ranks_per_node)),
        stack_fds=tuple(file("stacks") for _ in range(ranks_per_node)),
        scratch=undo.enter_context(scratch_folder(token)),
        caller_fd=_this_process(undo),
    )
    ranks = Ranks(run, files, token, outlets, hosts)
    undo.callback(ranks.close)
    return ranks


def _unnamed_file(undo: contextlib.ExitStack, name: str, size: int = 0) -> int:
    """Return a descriptor of an unnamed file; ``undo`` closes it."""
    fd = anonymous_file(name)
    undo.callback(close_file, fd)
    os.ftruncate(fd, size)
    return fd


def _this_process(undo: contextlib.ExitStack) -> int:
    """Return a descriptor that becomes readable when this process ends; -1 if the system has no pidfds."""
    if sys.platform != "linux":
        return -1
    try:
        fd = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return -1
    undo.callback(os.close, fd)
    return fd


def _begin_server(method: str) -> bool:
    """Start the fork server, which imports its modules in the background; return False if ranks must be spawned."""
    if method == "spawn":
        return False
    try:
        begin_server(server_modules())
    except NoServerError as error:
        _explain(error, method)
        return False
    return True


def _explain(error: NoServerError, method: str) -> None:
    if method == "forkserver":
        raise ConfigurationError(
            f"start_method='forkserver': a fork server can't be used here, because {error}. Use 'spawn', or 'auto', "
            "which then chooses 'spawn'."
        ) from error
    logger.info("ranks are spawned: a fork server can't be used, because %s", error)


# -- ranks that are kept for the next launch ---------------------------------------------------------------------------


class KeptRanks:
    """The running ranks of one :func:`keeping` block, which may have no ranks."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._terms: object = None
        self._undo = contextlib.ExitStack()

    def resume(self, terms: object, undo: contextlib.ExitStack) -> Ranks | None:
        """Return the ranks, reset for new work; ``undo`` will end them.

        If settings differ or a rank has ended, end all ranks here and return None.
        """
        if self._ranks is not None and (self._terms != terms or not self._ranks.are_up()):
            self.close()
        if self._ranks is not None:
            undo.callback(self.close)
            self._ranks.reset()
        return self._ranks

    def keep(self, ranks: Ranks, terms: object, undo: contextlib.ExitStack) -> None:
        """Keep these ranks after their work has succeeded; ``undo`` then runs when they end."""
        ending, self._terms = undo.pop_all(), terms
        if ranks is not self._ranks:  # otherwise ``undo`` contains only the call to close()
            self._ranks, self._undo = ranks, ending

    def close(self) -> None:
        """End the ranks."""
        self._ranks, self._terms = None, None
        self._undo.close()


class _Block(threading.local):
    """The :func:`keeping` block that a thread is in. Several threads may call ``fit``; each has its own ranks."""

    kept: KeptRanks | None = None
    pid = 0


_block = _Block()


def kept_here() -> KeptRanks | None:
    """Return the ranks of this thread's block; None outside of a block and in a forked child, which can't use them."""
    return _block.kept if _block.pid == os.getpid() else None


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Keep ranks alive between the calls of :func:`launch` in this block and in inner ones.

    ::

        with keeping():                 # TrainLoop.ranks()
            launch(first, ...)          # starts ranks
            launch(second, ...)         # in the same processes, with their process group, GPU memory and imports
        # the ranks have ended
    """
    if kept_here() is not None:
        yield
        return
    with contextlib.closing(KeptRanks()) as kept:
        _block.kept, _block.pid = kept, os.getpid()
        try:
            yield
        finally:
            _block.kept = None
