"""A rank's share of an order that a sampler draws: torch's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from trainloop._support.rng import derive_seed
from trainloop.data.batch.randomness import IsolatedRandomState
from trainloop.data.order.samplers import ShardSampler

KINDS: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, 60.0), 53),
    "weighted without replacement": lambda: WeightedRandomSampler(torch.arange(1.0, 60.0), 53, replacement=False),
    "weighted with a generator": lambda: WeightedRandomSampler(
        torch.arange(1.0, 60.0), 53, generator=torch.Generator().manual_seed(5)
    ),
    "subset": lambda: SubsetRandomSampler(range(100, 153)),
    "subset of text": lambda: SubsetRandomSampler([f"key {i}" for i in range(53)]),  # type: ignore[misc]
    "shuffled with a generator": lambda: RandomSampler(range(53), generator=torch.Generator().manual_seed(6)),
    "several shuffles": lambda: RandomSampler(range(9), num_samples=53, generator=torch.Generator().manual_seed(6)),
    "whole shuffles": lambda: RandomSampler(range(9), num_samples=54, generator=torch.Generator().manual_seed(6)),
    "part of a shuffle": lambda: RandomSampler(range(99), num_samples=53, generator=torch.Generator().manual_seed(6)),
    "list": lambda: list(range(53, 0, -1)),
    "range": lambda: range(5, 58),
    "array": lambda: np.arange(53)[::-1],
}


def shares(make: Callable[[], Any], world_size: int, epoch: int, first_batch: int = 0, **arguments: Any) -> list[Any]:
    found = []
    for rank in range(world_size):
        shard = ShardSampler(
            make(), None, batch_size=4, rank=rank, world_size=world_size, seed=3, **{"drop_last": False, **arguments}
        )
        shard.set_epoch(epoch)
        found.append((list(shard.batches(first_batch)), shard.digest))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_shares_are_cut_from_torchs_own_order(kind: str, world_size: int) -> None:
    make = KINDS[kind]
    for epoch in range(2):
        with IsolatedRandomState(derive_seed(3, "sampler", epoch)):
            order = list(make())
        whole = shares(make, world_size, epoch)
        together = [[batches[i][0] for batches, _ in whole] for i in range(max(len(batches) for batches, _ in whole))]
        found = []
        for step in together:
            for place in range(4):
                found += [indices[place] for indices in step if place < len(indices)]
        assert found == order
        assert [sum(sizes) for _, sizes in whole[0][0]] == [sum(map(len, step)) for step in together]
        assert len({digest for _, digest in whole}) == 1
        assert None not in [digest for _, digest in whole]
        later = shares(make, world_size, epoch, first_batch=2)
        assert [batches for batches, _ in later] == [batches[2:] for batches, _ in whole]
        dropped = shares(make, world_size, epoch, drop_last=True)
        assert [batches for batches, _ in dropped] == [
            [batch for batch in batches if sum(batch[1]) == 4 * world_size] for batches, _ in whole
        ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "shuffle" in kind or "generator" in kind])
def test_the_users_generator_ends_where_torchs_own_loader_leaves_it(kind: str) -> None:
    own, split = KINDS[kind](), KINDS[kind]()
    shard = ShardSampler(split, None, batch_size=4, rank=1, world_size=3, drop_last=False, seed=3)
    for epoch in range(2):
        list(own)
        shard.set_epoch(epoch)
        list(shard.batches())
        assert torch.equal(split.generator.get_state(), own.generator.get_state())


def test_ranks_with_other_weights_are_told_apart() -> None:
    digests = [
        shares(lambda weights=weights: WeightedRandomSampler(weights, 53), 2, 0)[0][1]
        for weights in (torch.ones(59), torch.arange(1.0, 60.0))
    ]
    assert digests[0] != digests[1]
