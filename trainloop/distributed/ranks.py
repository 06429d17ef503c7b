"""Rank, local rank and world size of the processes that train together."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Rank:
    """One process's place among all that train together."""

    rank: int = 0
    """Global rank, 0 to ``world_size - 1``."""

    world_size: int = 1
    """Processes over all nodes."""

    local_rank: int = 0
    """Rank among this node's processes, 0 to ``local_world_size - 1``."""

    local_world_size: int = 1
    """Processes on this node."""

    node_rank: int = 0
    """Rank of this node, 0 to ``num_nodes - 1``."""

    num_nodes: int = 1
    """Nodes that train together."""

    def __repr__(self) -> str:
        return (
            f"Rank(rank={self.rank}({self.world_size}), local_rank={self.local_rank}({self.local_world_size}), "
            f"node={self.node_rank}({self.num_nodes}))"
        )


def has_group() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def leave_group(*, failed: bool = False) -> None:
    """Leave the process group, if there is one.

    Parameters
    ----------
    failed : bool
        Don't wait for anybody: NCCL's orderly end waits for what is queued on the device, and a collective there never
        ends once another rank is gone.
    """
    if not has_group():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if failed and abort is not None and "nccl" in str(dist.get_backend_config()):
        with contextlib.suppress(Exception):  # of the failure alone is to be told
            abort()
        return
    dist.destroy_process_group()


def get_rank() -> int:
    """Global rank of this process.

    Returns
    -------
    int
        The process group's where there is one. Before it is up, ``RANK``, ``LOCAL_RANK`` or ``SLURM_PROCID``, the
        first of these environment variables that holds a number; 0 where none does.
    """
    if has_group():
        return dist.get_rank()
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        text = os.environ.get(name, "").strip()
        if text.isascii() and text.isdigit():
            return int(text)
    return 0


def get_world_size() -> int:
    """Number of processes that the exchanges of this module reach.

    Returns
    -------
    int
        The process group's size, and 1 where there is none, whatever the environment says: a shell inside a Slurm
        allocation has ``SLURM_NTASKS=8`` and is one process all the same.
    """
    return dist.get_world_size() if has_group() else 1


def is_global_zero() -> bool:
    """Whether this process has global rank 0: true in exactly one process of all nodes."""
    return get_rank() == 0


def rank_zero_only(f: Callable[P, T]) -> Callable[P, T | None]:
    """Let a function run on global rank 0 only; elsewhere a call does nothing and returns ``None``.

    Parameters
    ----------
    f : callable
        Must not contain an exchange: the other ranks don't take part in it.

    Returns
    -------
    callable
        The rank is read at each call (see :func:`get_rank`), so decorating at import time, before ranks exist, is
        fine.

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
