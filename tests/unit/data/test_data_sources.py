"""Reading a loader, as training and evaluation have it in common."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kit.loader_kinds import ROWS, NoisyRows, Rows, indices
from kit.simulated_ranks import SEED, in_ranks
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.distributed import DistributedSampler

from trainloop.data import EvalFeed, TrainFeed
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


class Each:
    """Items of a list, each made into something else."""

    def __init__(self, items: list[Any], make: Any) -> None:
        self.items, self.make = items, make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.items)

    def __len__(self) -> int:
        return len(self.items)


def range_of(indices: list[int]) -> range:
    return range(indices[0], indices[-1] + 1)


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


INDICES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "array": np.asarray,
    "tensor": lambda indices: torch.tensor([*indices]),
    "range": range_of,
    "set": set,
    "generator": iter,
}


@pytest.mark.parametrize("seed", [None, SEED])
@pytest.mark.parametrize("kind", INDICES)
def test_a_batch_has_as_many_samples_as_indices_of_any_kind(kind: str, seed: int | None) -> None:
    lists = [[0, 1, 2, 3, 4], [5, 6], [7, 8, 9]]

    def make() -> Any:
        return DataLoader(Rows(), batch_sampler=Each(lists, INDICES[kind]))  # type: ignore[arg-type]

    feed = EvalFeed(make(), seed=seed)
    assert [(sorted(indices(batch)), size) for _, batch, size in feed.batches()] == [(own, len(own)) for own in lists]
    (step,) = TrainFeed(make(), seed=seed).steps(3)
    assert (step.sizes, step.scales, step.total) == ([5, 2, 3], [0.5, 0.2, 0.3], 10)
    if seed is not None:
        ranks = in_ranks(2, lambda ranked: [*TrainFeed(make(), seed=SEED, **ranked).steps(1)])
        assert [[step.sizes for step in steps] for steps in ranks] == [[[5], [3]], [[2], []]]
        assert [[step.total for step in steps] for steps in ranks] == [[7, 3]] * 2


@pytest.mark.parametrize("batch_size", [None, 1])
def test_an_index_that_is_a_tuple_is_no_list_of_indices(batch_size: int | None) -> None:
    """Of batches: ``batch_size=None``. Its batch is counted as it arrives."""

    class Spans(Rows):
        def __getitem__(self, span: Any) -> Any:
            rows = [super(Spans, self).__getitem__(i) for i in range(*span)]
            return default_collate(rows) if batch_size is None else rows[0]

    def make() -> Any:
        sampler: Any = [(0, 5), (5, 9), (9, 10)]
        return DataLoader(Spans(), batch_size, sampler=sampler)

    expected = [5, 4, 1] if batch_size is None else [1, 1, 1]
    assert [size for _, _, size in EvalFeed(make(), seed=SEED).batches()] == expected
    assert [step.sizes for step in TrainFeed(make(), seed=SEED).steps(1)] == [[size] for size in expected]


def test_a_batch_of_no_indices_is_the_collate_functions_affair() -> None:
    lists = [[0, 1], [], [2, 3, 4]]

    def collate(samples: list[Any]) -> list[int]:
        return [int(sample[2]) for sample in samples] or [-1]

    def make() -> Any:
        return DataLoader(Rows(), batch_sampler=lists, collate_fn=collate)

    expected = list(make())
    assert [batch for step in TrainFeed(make(), seed=SEED).steps(1) for batch in step.batches] == expected
    assert [batch for _, batch, _ in EvalFeed(make(), seed=SEED).batches()] == expected
    first, second = in_ranks(2, lambda ranked: [*TrainFeed(make(), seed=SEED, **ranked).steps(1)])
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
