"""Reading a loader, as training and evaluation have it in common."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
from kit.loader_kinds import ROWS, NoisyRows, Rows, indices
from kit.simulated_ranks import SEED, Exchange
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from trainloop.data import EvalFeed, StepBatches, TrainFeed
from trainloop.data.loader.loader_copies import end_workers


class FirstBatchIsSlow(Rows):
    """The first batch of 4 is ready only once a worker reads row `until`."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self._until = until
        self._other_worker_is_ahead = multiprocessing.Event()

    def __getitem__(self, index: int) -> Any:
        if index == self._until:
            self._other_worker_is_ahead.set()
        elif index == 0:
            self._other_worker_is_ahead.wait(60)
        return super().__getitem__(index)


@pytest.mark.parametrize("seed", [None, SEED])
def test_workers_that_may_overtake_each_other_change_no_row(seed: int | None) -> None:
    # The fifth batch is asked for only once the loader has another batch than the first.
    plain = [indices(batch) for batch in DataLoader(FirstBatchIsSlow(16), 4, num_workers=2, in_order=False)]
    assert plain[0] != [0, 1, 2, 3]  # so they do, where nothing depends on it
    feed = EvalFeed(DataLoader(FirstBatchIsSlow(12), 4, num_workers=2, in_order=False), seed=seed)
    given = [(index, indices(batch), size) for index, batch, size in feed.batches()]
    assert given == [(i, list(range(4 * i, min(4 * i + 4, ROWS))), min(4, ROWS - 4 * i)) for i in range(11)]
    if seed is None:
        steps = [*TrainFeed(DataLoader(FirstBatchIsSlow(12), 4, num_workers=2, in_order=False)).steps(1)]
        assert [indices(step.batches[0]) for step in steps] == [rows for _, rows, _ in given]


def test_persistent_workers_that_overtake_each_other_change_no_size() -> None:
    batches = [[0, 1, 2, 3], [4], *([*range(first, first + 4)] for first in range(5, 41, 4))]
    loader = DataLoader(
        FirstBatchIsSlow(40), batch_sampler=batches, num_workers=2, in_order=False, persistent_workers=True
    )
    steps = [*TrainFeed(loader).steps(1)]
    end_workers(loader)
    sizes = [len(indices(step.batches[0])) for step in steps]
    assert sizes[0] == 1  # the second batch overtakes the first
    assert [step.sizes for step in steps] == [[size] for size in sizes]


def test_a_batch_of_no_indices_is_the_collate_functions_affair() -> None:
    lists = [[0, 1], [], [2, 3, 4]]

    def collate(samples: list[Any]) -> list[int]:
        return [int(sample[2]) for sample in samples] or [-1]

    def make() -> Any:
        return DataLoader(Rows(), batch_sampler=lists, collate_fn=collate)

    expected = list(make())
    assert [batch for step in TrainFeed(make(), seed=SEED).steps(1) for batch in step.batches] == expected
    assert [batch for _, batch, _ in EvalFeed(make(), seed=SEED).batches()] == expected
    exchange = Exchange(2)

    def of_rank(rank: int) -> list[StepBatches]:
        feed = TrainFeed(make(), rank=rank, world_size=2, seed=SEED, exchange_ints=exchange.of_rank(rank))
        return list(feed.steps(1))

    first, second = exchange.run([lambda: of_rank(0), lambda: of_rank(1)])
    assert [step.batches for step in first] == [[[0, 1]], [[2, 3, 4]]]
    assert [step.batches for step in second] == [[[-1]], []]


def test_of_a_distributed_loader_each_batch_has_random_numbers_of_its_own() -> None:
    """They depend on the rank and on the batch's place alone: with workers or none, and in each pass."""

    def noise(rank: int, num_workers: int) -> list[list[float]]:
        sampler = DistributedSampler(NoisyRows(), num_replicas=2, rank=0, shuffle=False)
        loader = DataLoader(NoisyRows(), 4, sampler=sampler, num_workers=num_workers)
        feed = EvalFeed(loader, rank=rank, world_size=2, seed=SEED)
        return [[(batch[0] - Rows().rows[0][batch[2]]).mean().item() for _, batch, _ in feed.batches()] for _ in "12"]

    first, second = noise(0, 0)
    assert first == second == noise(0, 2)[0]
    assert len({*first, *noise(1, 0)[0]}) == 12
