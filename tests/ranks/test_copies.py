"""A snapshot's parts on other hosts, and their way back: ranks of one host that take themselves for several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpoints import same
from ranks import run_ranks
from trainloop import distributed
from trainloop.distributed import Rank
from trainloop.distributed import copies as swapping
from trainloop.train_loop.copies import Copies, parts_of_host
from trainloop.transfer.slots import SnapshotMemory, Snapshotter


def content(rank: int) -> dict[str, Any]:
    """As long as no other rank's, and longer than a piece of it that is under way."""
    return {"of": {"rank": rank, "tensor": torch.full((1000 + 400_000 * rank,), float(rank))}}


def spread_and_lose(nodes: int, lost: list[int]) -> Any:
    """Whether what was lost with some hosts came back, whose part was copied here, and whether all copies were made."""
    swapping._CHUNK = 1 << 18
    ranks = dist.get_world_size() // nodes
    rank = dist.get_rank()
    me = Rank(rank, dist.get_world_size(), rank % ranks, ranks, rank // ranks, nodes)
    distributed.barrier()  # ranks have met
    # A memory for each rank, though ranks of a host share one: each has its own parts only.
    parts = parts_of_host(ranks, nodes)
    mine = [1 + me.local_rank, 1 + ranks + me.local_rank, *([0] if me.local_rank == 0 else [])]
    memory = SnapshotMemory(parts, 0)
    packed, copies = Snapshotter((), {}).pack, Copies(memory, me)
    for number in (1, 2):
        memory.write(number, 1 + me.local_rank, 10 * number, packed(content(rank)))
        if me.local_rank == 0:
            memory.write(number, 0, 10 * number, packed({"common": {"to": "all"}}))
        assert copies.spread(number, written=True)

    def found() -> list[Any]:
        return [memory.read(2, part, ()) for part in sorted(mine)]

    before = found()
    if me.node_rank in lost:
        memory.close()
        memory = SnapshotMemory(parts, 0)
        copies._memory = memory
    copies.give_back(2, lost)
    after = found()
    complete = copies.spread(3, written=rank != 0)
    memory.close()
    return same(before, after), before[-1]["of"]["rank"], complete


@pytest.mark.parametrize(("nodes", "lost"), [(2, [0]), (4, [1, 3])])
def test_what_a_host_has_lost_another_gives_back(nodes: int, lost: list[int], tmp_path: Path) -> None:
    found = run_ranks(spread_and_lose, 4, nodes, lost, folder=tmp_path)
    on_each = 4 // nodes
    assert [came_back for came_back, *_ in found] == [True] * 4
    assert [copied for _, copied, _ in found] == [(rank - on_each) % 4 for rank in range(4)]
    assert [rank for rank, (_, _, complete) in enumerate(found) if not complete] == [
        on_each
    ]  # rank 0's is missing there
