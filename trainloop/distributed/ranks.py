"""Rank and world size of this process; leave its process groups and their threads; refuse exchanges of one rank."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from trainloop.errors import ConfigurationError

if dist.is_available():
    # Import this module before a process group exists: its functions store the current group as a default argument at
    # import, and would keep that group alive forever.
    importlib.import_module("torch.distributed.nn.functional")

P = ParamSpec("P")
T = TypeVar("T")

_alone: ContextVar[bool] = ContextVar("alone", default=False)
_whole_batch: ContextVar[bool] = ContextVar("whole_batch", default=False)
_one_rank: ContextVar[str] = ContextVar("one_rank", default="")


@dataclass(frozen=True, repr=False)
class Rank:
    """The rank of one process among all processes of a run, and among the processes of its node."""

    rank: int = 0
    """Global rank, 0 to ``world_size - 1``."""

    world_size: int = 1
    """Number of processes on all nodes."""

    local_rank: int = 0
    """Rank among this node's processes, 0 to ``local_world_size - 1``."""

    local_world_size: int = 1
    """Number of processes on this node."""

    node_rank: int = 0
    """Rank of this node, 0 to ``num_nodes - 1``."""

    num_nodes: int = 1
    """Number of nodes."""

    def __repr__(self) -> str:
        return (
            f"Rank(rank={self.rank}({self.world_size}), local_rank={self.local_rank}({self.local_world_size}), "
            f"node={self.node_rank}({self.num_nodes}))"
        )


def has_group() -> bool:
    """Return True if this process exchanges values: it is in a process group, not :func:`alone`, and not in
    :func:`whole_batch`."""
    return _in_group() and not _whole_batch.get()


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized() and not is_alone()


@contextlib.contextmanager
def with_value(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def whole_batch() -> AbstractContextManager[None]:
    """In the block, exchanges are those of a single process, although this process keeps its rank.

    Used for the batches of an evaluation: each rank has whole batches that one process would see apart, and ranks may
    have different numbers of them.
    """
    return with_value(_whole_batch, True)


def exchanges_nothing() -> bool:
    """Return True in :func:`alone` and :func:`whole_batch`."""
    return is_alone() or _whole_batch.get()


def alone(enabled: bool) -> AbstractContextManager[None]:
    """In the block, treat this thread as the only rank, for a run in a single process; ``False`` undoes this for ranks.

    Such a run may be in one of several processes that a launcher started, or in a rank's callback. The other processes
    take no part in the run, so it can't wait for them, and must write its files itself.
    """
    return with_value(_alone, enabled)


def on_one_rank(callback: str) -> AbstractContextManager[None]:
    """In the block, which only one rank executes, what needs all ranks raises an error that names the callback."""
    return with_value(_one_rank, callback)


def refuse_on_one_rank(what: str) -> None:
    """Raise an error if only one rank makes a call that needs all ranks.

    Raises
    ------
    ConfigurationError
        In :func:`on_one_rank`. Without it, this rank would wait for the other ranks until the timeout.
    """
    callback = _one_rank.get()
    if callback and dist.get_world_size() > 1:
        raise ConfigurationError(
            f"{callback} was made with device_idx_execution, so that its hooks run on one rank, but it calls {what}, "
            "which all ranks must call together. Leave device_idx_execution out, and do the part that is for one rank "
            "under `if self.train_loop_obj.is_main_process():`."
        )


def is_alone() -> bool:
    """Return True if this thread is :func:`alone`."""
    return _alone.get()


def leave_group(*, failed: bool = False) -> None:
    """Leave the process group, if there is one.

    Parameters
    ----------
    failed : bool
        True to not wait for other ranks: NCCL's orderly shutdown waits for work queued on the device, and a collective
        there never ends once another rank has ended.
    """
    if not has_group():
        return
    if not failed:
        _destroy_group()
        return
    with contextlib.suppress(Exception):  # report only the original failure
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None and "nccl" in str(dist.get_backend_config()):
            # Without the argument, torch 2.6.0 aborts only the default group, and leaves it half registered.
            abort(dist.group.WORLD)
        else:
            _destroy_group()


def _destroy_group() -> None:
    group, gloo = dist.group.WORLD, None
    if group is not None and "gloo" in str(dist.get_backend_config()):
        with contextlib.suppress(RuntimeError):  # a group made by a wrapper of Gloo, for example
            gloo = group._get_backend(torch.device("cpu"))
    dist.destroy_process_group()
    if sys.getrefcount(group) > 2:  # this function's variable and the call's argument; reference cycles may have others
        gc.collect()
    # Drop the last references here: Gloo's destructor waits for its threads, which may need the GIL to end. It releases
    # the GIL only if Python destroys Gloo's part itself (torch 2.6), or the group (later versions).
    del group
    del gloo


def get_rank() -> int:
    """Return the global rank of this process.

    Returns
    -------
    int
        Rank in the process group if there is one. Otherwise the first of the environment variables ``RANK``,
        ``LOCAL_RANK`` and ``SLURM_PROCID`` that is a number, or 0. Always 0 in a run of ``single`` or ``dp``.
    """
    if is_alone():
        return 0
    if _in_group():
        return dist.get_rank()
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        text = os.environ.get(name, "").strip()
        if text.isascii() and text.isdigit():
            return int(text)
    return 0


def get_world_size() -> int:
    """Return the number of processes that take part in the exchanges of this module.

    Returns
    -------
    int
        Size of the process group, or 1 if there is no group. Environment variables are ignored, because a shell inside
        a Slurm allocation has ``SLURM_NTASKS=8`` but is a single process.
    """
    return dist.get_world_size() if has_group() else 1


def is_global_zero() -> bool:
    """Return True in exactly one process across all nodes: the one with global rank 0."""
    return get_rank() == 0


def outside_of_graphs(f: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that exchanges values: compiled code calls it, instead of containing it.

    torch.compile would compile messages, their keys and their counters into many graphs, and compile them again for
    each new message.
    """

    @functools.wraps(f)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(f)(*args, **kwargs)
        return f(*args, **kwargs)

    return called


def rank_zero_only(f: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function to run on global rank 0 only; on other ranks a call does nothing and returns ``None``.

    Parameters
    ----------
    f : callable
        Function to call on rank 0. It must not contain an exchange, because the other ranks would not take part.

    Returns
    -------
    callable
        The decorated function. It reads the rank at each call (see :func:`get_rank`), so functions can be decorated
        at import time, before ranks exist.

    Examples
    --------
    >>> @rank_zero_only
    ... def save(path: str) -> str:
    ...     return f"saved {path}"
    >>> save("weights.pt")  # in one process
    'saved weights.pt'
    """

    @functools.wraps(f)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return f(*args, **kwargs) if is_global_zero() else None

    return on_rank_zero
