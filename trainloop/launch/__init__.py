"""Run one function in many processes; get local rank 0's result, or the first failure.

:func:`launch` starts the ranks of this node; :func:`join` runs it in this process, as a rank that ``torchrun`` or Slurm
started; :func:`joined` tells which of the two is right. Nothing here knows models or training: the function gets a
:class:`~trainloop.stopping.StopAgreement`, and finds a process group that is up.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from trainloop.devices import usable_cores
from trainloop.distributed.key import key_from_environment, new_key
from trainloop.errors import ConfigurationError, WorkerFailedError
from trainloop.launch.failures import Failure
from trainloop.launch.fork_server import (
    ForkServerError,
    ServerGoneError,
    chosen_method,
    end_server,
    no_server,
    server,
)
from trainloop.launch.inherited import circumstances, taken_at_start
from trainloop.launch.joining import join, joined
from trainloop.launch.kept import keeping, kept_here
from trainloop.launch.main_guard import check_main_guard, main_place
from trainloop.launch.messages import connection_pair
from trainloop.launch.rank_process import RankSpec, started_by_launch
from trainloop.launch.rendezvous import FAREWELL_S, RENDEZVOUS_WAIT_S, Rendezvous, rendezvous_point
from trainloop.launch.settings import dumped_settings
from trainloop.launch.spawning import Ranks
from trainloop.scratch import scratch_folder
from trainloop.signals import signals, uninterrupted
from trainloop.stopping import SharedStop, StopAgreement
from trainloop.transfer import pack
from trainloop.transfer.pages import anonymous_file

__all__ = ["Survival", "join", "joined", "keeping", "launch"]

logger = logging.getLogger("trainloop")

T = TypeVar("T")


class Survival(Protocol):
    """Decides whether ranks that have failed start again, and tells them from where."""

    def failed(self, failure: Failure, error: WorkerFailedError) -> WorkerFailedError | None:
        """The ranks have ended by this failure: the error that ends the run, or ``None`` to start them again."""

    def says(self) -> dict[str, Any]:
        """What the other hosts have to know of this one, before each start; plain types."""

    def agreed(self, said: Sequence[dict[str, Any]]) -> None:
        """All hosts have said it; ranks are about to start. May raise, on all hosts alike."""

    def error_that_ends(self, why: str) -> WorkerFailedError | None:
        """The last failure's error with a word about why there is no going on; ``None`` where there was none."""


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
    survival: Survival | None = None,
) -> T:
    """Run ``function`` in ``ranks_per_node`` new processes of this node, joined in a process group.

    Parameters
    ----------
    function : callable
        Takes one argument, the run's :class:`~trainloop.stopping.StopAgreement`. May be defined anywhere (notebook,
        closure, lambda) and refer to anything that can be pickled, directly or by cloudpickle. Large arrays and
        tensors are mapped by all ranks, not copied.
    ranks_per_node : int
        Processes to start here.
    num_nodes, node_rank : int
        Hosts of the run, and this one's place among them. Each calls ``launch`` and starts its own ranks only.
    devices : sequence of torch.device, optional
        One for each local rank; the CPU by default.
    backend : str, optional
        Of the process group; by default Gloo, with NCCL for CUDA tensors where each rank has a GPU of its own.
    init_method : str, optional
        Rendezvous point of several nodes, ``tcp://host:port`` or a ``file://`` that all see; ``MASTER_ADDR`` and
        ``MASTER_PORT`` by default. One node needs none: its ranks meet in a file without a name.
    timeout_s : float
        How long a rank waits for another in a collective, or at a step boundary, before the run fails.
    child_env : dict of str to str, optional
        Environment variables of the ranks, set before their interpreters start.
    start_method : {'auto', 'forkserver', 'spawn'}
        Fork ranks from a process that has torch loaded (:mod:`trainloop.launch.fork_server`), or start each as a fresh
        interpreter. ``'auto'``: by ``TRAINLOOP_START_METHOD``, else a fork server if possible.
    roots : dict of str to object, optional
        Names that paths in an ``UnpicklableError`` start with.
    survival : Survival, optional
        Whether ranks that have failed start again, with the same payload; by default the first failure ends the run.

    Returns
    -------
    object
        The result of local rank 0's function, with its tensors on the CPU.

    Raises
    ------
    ConfigurationError, UnpicklableError
        Before any rank starts: no ``__main__`` guard, hosts that don't come, something that can't be sent, no fork
        server where one was asked for.
    WorkerFailedError
        A rank raised, exited, was killed or hung, or a host was lost. All ranks have ended by then.
    KeyboardInterrupt
        At the second Ctrl-C. The first asks the ranks to stop at a step boundary, as SIGTERM and SIGUSR1 do; no rank is
        started if the surrounding :func:`trainloop.signals.signals` has had a signal before.

    Notes
    -----
    The caller's environment, random state, threads, signal handlers and process group are left as they were. Ranks take
    over its process-wide settings: see :mod:`trainloop.launch.settings`.
    """
    if started_by_launch():
        raise ConfigurationError("a rank can't start ranks: call fit() with gpu_mode='single' inside of one.")
    if multiprocessing.current_process().daemon:
        raise ConfigurationError(
            "this process is a daemon (a worker of a pool or of a DataLoader), which may not start processes: call "
            "fit() with gpu_mode='single', or from the main process."
        )
    check_main_guard()
    served = _begin_server(start_method)  # it loads its modules while the payload is packed
    chosen = list(devices) if devices is not None else [torch.device("cpu")] * ranks_per_node
    on_cuda = all(device.type == "cuda" for device in chosen)
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if on_cuda and len(set(chosen)) == len(chosen) else "gloo"
    environment = dict(child_env or {})
    threads = max(1, usable_cores() // ranks_per_node)
    own_choice = environment.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    num_threads: int | None = torch.get_num_threads()  # the caller may have chosen fewer threads
    if not own_choice:
        num_threads = min(threads, torch.get_num_threads())
        environment["OMP_NUM_THREADS"] = str(num_threads)
    elif environment.get("OMP_NUM_THREADS"):
        num_threads = None

    def met(ends: str = "") -> Rendezvous:
        """All hosts meet, at the start and after each failure; ``ends``: why this one does not go on."""
        says = None if survival is None else {"ends": ends} if ends else survival.says()
        wait_s = FAREWELL_S if ends else RENDEZVOUS_WAIT_S if attempts > 1 else min(timeout_s, RENDEZVOUS_WAIT_S)
        try:
            with signals() as heard:
                return Rendezvous(
                    rendezvous_point(init_method),
                    node_rank=node_rank,
                    num_nodes=num_nodes,
                    ranks_per_node=ranks_per_node,
                    wait_s=wait_s,
                    key=key_from_environment(),
                    says=says,
                    look=heard.end,
                )
        except ConfigurationError as error:
            struck = None if survival is None else survival.error_that_ends(f"The run could not go on: {error}")
            raise struck or error from None

    def new_ranks(undo: contextlib.ExitStack) -> Ranks:
        token = f"{os.getpid()}-{time.monotonic_ns()}"
        hosts = None
        if num_nodes > 1 and not (init_method or "").startswith("file:"):
            hosts = undo.enter_context(met())
        if survival is not None:
            survival.agreed([survival.says()] if hosts is None else hosts.said)
        listener = hosts.store_listener if hosts is not None else None
        lines = [connection_pair() for _ in range(ranks_per_node if kept is not None else 0)]
        for end in (end for line in lines for end in line):
            undo.callback(end.close)
        file = partial(_file, undo)
        spec = RankSpec(
            rank=node_rank * ranks_per_node,
            world_size=num_nodes * ranks_per_node,
            local_world_size=ranks_per_node,
            node_rank=node_rank,
            num_nodes=num_nodes,
            devices=tuple(str(device) for device in chosen),
            backend=backend,
            timeout_s=timeout_s,
            num_threads=num_threads,
            parcel=payload.parcel,
            words_fd=file("words", 8 * (SharedStop.num_words(ranks_per_node) + ranks_per_node)),
            store_fd=file("store"),
            result_fd=file("result"),
            record_fds=tuple(file("record") for _ in range(ranks_per_node)),
            stack_fds=tuple(file("stacks") for _ in range(ranks_per_node)),
            store_address=hosts.store_address if hosts is not None else None,
            listen_fd=listener.fileno() if listener is not None else None,
            interface=hosts.interface if hosts is not None else "lo" if num_nodes == 1 else None,
            init_method=init_method if num_nodes > 1 and hosts is None else None,
            scratch=undo.enter_context(scratch_folder(token)),
            inherited=tuple(payload.inherited),
            line_fds=tuple(theirs.fileno() for _, theirs in lines),
            key=new_key() if num_nodes == 1 else key_from_environment(),
            settings=dumped_settings(),
            main=main_place(),
        )
        # If another process held a rank's end of a connection, the rank's death would not close it.
        handed_over = [*([] if listener is None else [listener]), *(theirs for _, theirs in lines)]
        ranks = Ranks(spec, token, hosts, lines=[ours for ours, _ in lines], handed_over=handed_over)
        undo.callback(ranks.close)
        return ranks

    kept = kept_here() if num_nodes == 1 and survival is None else None
    terms = None
    if kept is not None:
        terms = [chosen, backend, timeout_s, environment, num_threads, start_method, circumstances(), taken_at_start()]
    attempts = 0
    final: WorkerFailedError | None = None
    with pack(function, roots=roots) as payload:
        while final is None:
            attempts += 1
            with contextlib.ExitStack() as undo:
                up = kept.fitting(terms) if kept is not None else None
                if kept is not None and up is not None:
                    undo.callback(kept.close)  # unless all goes well
                    up.begin_again()
                ranks = up or new_ranks(undo)
                with signals(ranks.stop) as heard:
                    if attempts == 1:
                        heard.end()  # nothing has begun, so there is nothing to start and stop
                    if served and up is None:
                        served = _server_is_ready(start_method)
                        if attempts == 1:
                            heard.end()
                    try:
                        if up is None:
                            ranks.start(
                                environment, served=served, may_spawn=chosen_method(start_method) != "forkserver"
                            )
                        else:
                            ranks.give(payload.parcel, payload.inherited, dumped_settings(), environment)
                        ranks.watch()
                        ranks.part()
                    except BaseException as error:
                        with uninterrupted():
                            ranks.end()
                        if survival is None or ranks.cause is None or not isinstance(error, WorkerFailedError):
                            raise
                        final = survival.failed(ranks.cause, error)
                        continue
                    heard.note(ranks.stop.requested)  # a signal to a rank after its last step
                result: T = ranks.result()
                if kept is not None:
                    ending = undo.pop_all()
                    if up is None:
                        kept.keep(ranks, terms, ending)
                return result
    if num_nodes > 1:  # others would wait for this host
        with contextlib.suppress(ConfigurationError, WorkerFailedError):
            met(ends=str(final).splitlines()[0]).__exit__()
    raise final


def _file(undo: contextlib.ExitStack, name: str, size: int = 0) -> int:
    """A descriptor of an unnamed file, closed with ``undo``."""
    fd = anonymous_file(name)
    undo.callback(os.close, fd)
    os.ftruncate(fd, size)
    return fd


def _begin_server(start_method: str) -> bool:
    """Start loading the fork server, if ranks are to come from one and this process has none yet."""
    method = chosen_method(start_method)
    if method == "spawn":
        return False
    try:
        server()
    except ForkServerError as error:
        _explain(error, method)
        return False
    return True


def _server_is_ready(start_method: str) -> bool:
    """Wait for the server. Returns whether it can serve. If not, ranks are spawned (always, if it says why)."""
    try:
        for again in (True, False):  # a killed server is replaced once
            loading = server()
            try:
                loading.wait()
                return True
            except ServerGoneError:
                end_server(of=loading)
                if not again:
                    raise
            except ForkServerError as error:
                end_server(str(error), of=loading)
                raise
    except ForkServerError as error:
        _explain(error, chosen_method(start_method))
    return False


def _explain(error: ForkServerError, method: str) -> None:
    if method == "forkserver":
        raise no_server(error) from error
    logger.info("ranks are spawned, since there can be no fork server: %s", error)
