"""Ranks and their exchanges. Every function works in one process without a process group, too.

*Ranks*: :class:`Rank`, :func:`get_rank`, :func:`get_world_size`, :func:`is_global_zero`, :func:`rank_zero_only`.
*Exchanges*: :func:`all_gather`, :func:`all_reduce`, :func:`broadcast_object`, :func:`gather_object`, :func:`gather_to`,
:func:`exchange_ints`, :func:`barrier`. These are collective: every rank must call them, in the same order.

Objects and CPU tensors are sent over Gloo, so that small exchanges do not wait for a GPU. If the default process group
does not support CPU tensors (``init_process_group('nccl')``), the first exchange creates an additional Gloo group,
which exists as long as the default group. GPU tensors are sent over the default group's backend for their device or, if
it has none, over the CPU.
"""

from trainloop.distributed.objects import (
    barrier,
    broadcast_object,
    exchange_ints,
    gather_object,
    gather_to,
)
from trainloop.distributed.ranks import Rank, get_rank, get_world_size, is_global_zero, rank_zero_only
from trainloop.distributed.tensors import all_gather, all_reduce

__all__ = [
    "Rank",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast_object",
    "exchange_ints",
    "gather_object",
    "gather_to",
    "get_rank",
    "get_world_size",
    "is_global_zero",
    "rank_zero_only",
]
