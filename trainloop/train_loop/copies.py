"""Snapshots of a run over several hosts: each keeps a copy of the one before it, and gives it back where that is lost.

What is common to all ranks, each host has itself. What is a rank's own is written twice: by the rank, and by the one in
its place on the next host (the first is next to the last). So any host can be lost, and two that are not neighbours.

==========  ========================================
part        of a host's memory, with ``n`` ranks here
==========  ========================================
0           common to all
1 to n      of its own ranks
n+1 to 2n   copies, of the ranks of the host before
==========  ========================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from trainloop.distributed import Rank
from trainloop.distributed.copies import swap
from trainloop.transfer.slots import SnapshotMemory

__all__ = ["Copies", "beyond_help", "parts_of_host"]


def parts_of_host(ranks: int, num_nodes: int) -> int:
    """Parts of a snapshot in the memory of one host with so many ranks."""
    return 1 + ranks * (1 if num_nodes == 1 else 2)


def beyond_help(lost: Collection[int], num_nodes: int) -> list[int]:
    """Of hosts that have lost their memory, those whose copies are lost, too."""
    return sorted(node for node in lost if (node + 1) % num_nodes in lost)


class _Move(NamedTuple):
    """A part that goes from one rank's host to another's."""

    source: int
    source_part: int
    to: int
    to_part: int


class _Part:
    """A part of a snapshot as a :class:`~trainloop.distributed.copies.Piece`."""

    def __init__(self, memory: SnapshotMemory, number: int, part: int, *, there: bool = True) -> None:
        self._memory, self._number, self._part, self._there = memory, number, part, there
        self.no_room = False

    def words(self) -> list[int] | None:
        return self._memory.head_of(self._number, self._part) if self._there else None

    def size(self) -> int:
        return self._memory.size_of(self._number, self._part)

    def read(self, place: int, nbytes: int) -> bytes:
        return self._memory.bytes_of(self._number, self._part, place, nbytes)

    def write(self, place: int, data: memoryview) -> None:
        try:
            self._memory.put_bytes(self._number, self._part, place, data)
        except OSError:  # no memory: what is under way comes to its end, since the sender waits for that
            self.no_room = True


class Copies:
    """Of one rank in a run over several hosts.

    Parameters
    ----------
    memory : SnapshotMemory
        Of this host.
    me : Rank
    """

    def __init__(self, memory: SnapshotMemory, me: Rank) -> None:
        self._memory, self._me, self._swaps = memory, me, 0

    def spread(self, number: int, *, written: bool) -> bool:
        """After this rank has written its part: have a copy of it on the next host. Collective.

        Returns
        -------
        bool
            Whether there is a copy here of the part that this rank is to keep; not, where its writer had none.
        """
        me = self._me
        ranks = me.local_world_size
        moves = (
            _Move(rank, 1 + rank % ranks, (rank + ranks) % me.world_size, 1 + ranks + rank % ranks)
            for rank in ((me.rank - ranks) % me.world_size, me.rank)
        )
        return self._do(number, moves, written=written)

    def give_back(self, number: int, lost: Collection[int]) -> None:
        """Let hosts that have lost their memory have snapshot ``number`` again. Collective."""
        for moves in self._moves_back(lost):
            self._do(number, moves)

    def _moves_back(self, lost: Collection[int]) -> Iterator[list[_Move]]:
        """Round by round: in each, a rank sends one part at most, and receives one at most."""
        ranks, nodes = self._me.local_world_size, self._me.num_nodes
        here = range(ranks)
        for node in sorted(lost):
            first, before, after = node * ranks, (node - 1) % nodes * ranks, (node + 1) % nodes * ranks
            yield [_Move(after, 0, first, 0)]
            yield [_Move(after + i, 1 + ranks + i, first + i, 1 + i) for i in here]
            yield [_Move(before + i, 1 + i, first + i, 1 + ranks + i) for i in here]

    def _do(self, number: int, moves: Collection[_Move] | Iterator[_Move], *, written: bool = True) -> bool:
        memory = self._memory
        send: tuple[_Part, int] | None = None
        receive: tuple[_Part, int] | None = None
        part = -1
        for move in moves:
            if move.source == self._me.rank:
                send = _Part(memory, number, move.source_part, there=written), move.to
            if move.to == self._me.rank:
                part = move.to_part
                receive = _Part(memory, number, part), move.source
                memory.begin_copy(number, part)
        # Counted on all ranks, also those without a part in it: the number keeps an old message from being used again.
        self._swaps += 1
        if send is None and receive is None:
            return True
        came = swap(self._swaps, send=send, receive=receive)
        if receive is None:
            return True
        if came is None or receive[0].no_room:
            return False
        memory.end_copy(number, part, came.words)
        return True
