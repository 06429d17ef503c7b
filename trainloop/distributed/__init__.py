"""Ranks and what they exchange; every function is right in one process too, with no process group.

*Who is who*: :class:`Rank`, :func:`get_rank`, :func:`get_world_size`, :func:`is_global_zero`, :func:`rank_zero_only`.
*Exchanges*: :func:`all_gather`, :func:`all_reduce`, :func:`broadcast_object`, :func:`gather_object`, :func:`gather_to`,
:func:`exchange_ints`, :func:`barrier`. These are collective: every rank calls them, in the same
order.

Objects and CPU tensors go through Gloo, so that no exchange of a few bytes waits for a GPU. Where the default
process group can't take CPU tensors (``init_process_group('nccl')``), one Gloo group is made beside it, at the
first exchange, and kept for as long as that default group lives. GPU tensors go through the default group's backend for
that device, or through the CPU if it has none.

* ``ranks.py``: who is who
* ``hosts.py``: who is on this host
* ``objects.py``: objects and ints, over the CPU
* ``wire.py``, ``key.py``: messages that prove their sender
* ``encoding.py``: objects as bytes
* ``tensors.py``: nested tensors and numbers
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
