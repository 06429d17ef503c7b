"""Evaluation batches: each batch of one process on one rank, rows put back into dataset order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kit.loader_kinds import (
    EVALUATED,
    KINDS,
    MAP_KINDS,
    ROWS,
    WORKER_KINDS,
    Blocks,
    Buckets,
    Kind,
    NoisyRows,
    OwnEntropy,
    Reversed,
    Rows,
    Stream,
    _tensors,
    batches_of,
    indices,
)
from kit.simulated_ranks import SEED, each, global_state, in_ranks, same
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from trainloop.data import EvalFeed, TrainFeed
from trainloop.errors import ConfigurationError


def feeds(make: Any, world_size: int, seed: int | None = SEED) -> list[EvalFeed]:
    return [EvalFeed(make(), rank=rank, world_size=world_size, seed=seed) for rank in range(world_size)]


def whole_pass(ranks: list[EvalFeed]) -> list[tuple[int, Any, int]]:
    """The batches of all ranks, in batch order."""
    return sorted((item for feed in ranks for item in feed.batches()), key=lambda item: item[0])


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        pytest.param(kind, world_size, id=f"{kind.name}-{world_size}", marks=marks)
        for kind in KINDS
        for world_size in (2, 3)
        # Each with workers is in test_rows_come_in_dataset_order.
        for mark in [pytest.mark.long if EVALUATED.get(kind.name) == world_size else pytest.mark.slow]
        for marks in [[mark] if kind in WORKER_KINDS and (kind.name, world_size) != ("workers", 2) else []]
    ],
)
def test_ranks_get_the_batches_of_one_process(kind: Kind, world_size: int) -> None:
    alone = feeds(lambda: kind.make(4), 1)
    passes = [whole_pass(alone) for _ in range(2)]  # the second is another one only where the user's generator is used
    for batches in passes:
        assert [index for index, _, _ in batches] == list(range(len(batches)))
        assert [size for _, _, size in batches] == [len(indices(batch)) for _, batch, _ in batches]
        visited = [i for _, batch, _ in batches for i in indices(batch)]
        assert not kind.once or Counter(visited) == Counter(range(ROWS))

    ranks = feeds(lambda: kind.make(4), world_size)
    for expected in passes:
        of_ranks = [list(feed.batches()) for feed in ranks]
        for rank, given in enumerate(of_ranks):
            assert all(index % world_size == rank for index, _, _ in given)
            assert ranks[rank].num_batches in (None, len(expected))
        together = sorted((item for given in of_ranks for item in given), key=lambda item: item[0])
        assert [(index, size) for index, _, size in together] == [(index, size) for index, _, size in expected]
        assert all(same(a, b) for (_, a, _), (_, b, _) in zip(together, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(pytest.param(kind, [(1, None), (1, SEED), (2, SEED)], id=kind.name) for kind in MAP_KINDS),
        *(pytest.param(kind, [(2, SEED)], id=kind.name) for kind in WORKER_KINDS),
        *(
            pytest.param(kind, [(1, None), (1, SEED)], id=f"{kind.name}, one process", marks=pytest.mark.slow)
            for kind in WORKER_KINDS
        ),
    ],
)
def test_rows_come_in_dataset_order(kind: Kind, settings: list[tuple[int, int | None]]) -> None:
    for world_size, seed in settings:
        ranks = feeds(lambda: kind.make(4), world_size, seed)
        batches = whole_pass(ranks)
        sizes = [size for _, _, size in batches]
        rows = [i for _, batch, _ in batches for i in indices(batch)]
        orders = [feed.row_order(sizes) for feed in ranks]
        assert all(order == orders[0] for order in orders)
        if orders[0] is not None:
            rows = [rows[place] for place in orders[0]]
        if kind.in_rows and kind.once:
            assert rows == list(range(ROWS))
        elif not kind.in_rows:
            assert (orders[0] is None) == (kind.name != "tensors subset")


def test_a_subset_is_ordered_as_the_subset() -> None:
    kind = next(kind for kind in KINDS if kind.name == "tensors subset")
    dataset = kind.make(4).dataset
    (feed,) = feeds(lambda: kind.make(4), 1)
    batches = whole_pass([feed])
    order = feed.row_order([size for _, _, size in batches])
    assert order is not None
    rows = [i for _, batch, _ in batches for i in indices(batch)]
    assert [rows[place] for place in order] == [int(dataset[i][2]) for i in range(ROWS)]


def test_rows_that_are_not_one_a_sample_stay_in_loader_order() -> None:
    for loader in (DataLoader(Rows(), 4, shuffle=True), DataLoader(Rows(), batch_sampler=Buckets())):
        for seed in (None, SEED):
            feed = EvalFeed(loader, seed=seed)
            sizes = [size for _, _, size in feed.batches()]
            assert feed.row_order(sizes) is not None
            assert feed.row_order([1] * len(sizes)) is None
            assert feed.row_order([sizes[0] + 1, sizes[1] - 1, *sizes[2:]]) is None
            assert feed.row_order(sizes[:-1]) is None


@pytest.mark.parametrize("stop", [None, 3], ids=["whole", "after 3"])
@each(MAP_KINDS)
def test_without_seed_batches_and_random_numbers_are_the_loaders(kind: Kind, stop: int | None) -> None:
    states, passes = [], []
    for fed in (False, True):
        torch.manual_seed(1)
        random.seed(1)
        loader = kind.make(4)
        feed = EvalFeed(loader)
        for _ in range(2):
            given: list[Any] = []
            for batch in (item[1] for item in feed.batches()) if fed else loader:
                given.append(batch)
                if len(given) == stop:
                    break
            passes.append(given)
        generator = getattr(loader, "generator", None)
        states.append((global_state(), None if generator is None else generator.get_state().tolist()))
    assert states[0] == states[1]
    for plain, fed_batches in zip(passes[:2], passes[2:], strict=True):
        assert len(plain) == len(fed_batches)
        assert all(same(a, b) for a, b in zip(plain, fed_batches, strict=True))


@each(KINDS)
def test_seeded_evaluation_leaves_global_random_state_alone(kind: Kind) -> None:
    before = global_state()
    for _ in EvalFeed(kind.make(4), seed=SEED).batches():
        assert global_state() == before
    assert global_state() == before


@pytest.mark.parametrize("workers", [0, 2], ids=["no workers", "2 workers"])
def test_augmentation_is_that_of_one_process(workers: int) -> None:
    def make(num_workers: int) -> Any:
        return DataLoader(NoisyRows(), 4, shuffle=True, num_workers=num_workers)

    alone = whole_pass(feeds(lambda: make(0), 1))
    ranks = whole_pass(feeds(lambda: make(workers), 2))
    assert all(torch.equal(a[0], b[0]) for (_, a, _), (_, b, _) in zip(alone, ranks, strict=True))


@pytest.mark.parametrize("length", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["tensors", "stream", "rows"])
def test_fewer_samples_than_ranks(length: int, kind: str) -> None:
    def make() -> Any:
        if kind == "stream":
            return DataLoader(Stream(length), 2)
        return DataLoader(Rows(length) if kind == "rows" else torch.utils.data.TensorDataset(*Rows(length).rows), 2)

    ranks = feeds(make, 3)
    batches = whole_pass(ranks)
    assert [i for _, batch, _ in batches for i in indices(batch)] == list(range(length))
    assert all(feed.row_order([size for _, _, size in batches]) is None for feed in ranks)


def test_only_own_batches_are_fetched() -> None:
    fetched: list[int] = []

    class Watched(Rows):
        def __getitem__(self, index: int) -> Any:
            fetched.append(index)
            return super().__getitem__(index)

    list(EvalFeed(DataLoader(Watched(), 4), rank=1, world_size=3, seed=SEED).batches())
    assert fetched == [i for start in range(4, ROWS, 12) for i in range(start, min(start + 4, ROWS))]


def test_a_distributed_loader_is_read_as_it_is() -> None:
    dataset = Rows()

    def make(rank: int) -> Any:
        return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=False))

    ranks = [EvalFeed(make(rank), rank=rank, world_size=2, seed=SEED) for rank in range(2)]
    for rank, feed in enumerate(ranks):
        given = list(feed.batches())
        assert [index for index, _, _ in given] == list(range(rank, 12, 2))
        assert [i for _, batch, _ in given for i in indices(batch)] == [*range(rank, ROWS, 2)] + [0] * rank
        assert feed.num_batches == 12
        assert feed.row_order([size for _, _, size in whole_pass(ranks)]) is None


class OwnDistributed(Sampler[int]):
    """Splits samples over ranks, and is no DistributedSampler, like the samplers of torchvision and timm."""

    def __init__(self, **attributes: int) -> None:
        vars(self).update(attributes)
        self.rank = 0

    def __len__(self) -> int:
        return len(self.shard)

    def __iter__(self) -> Iterator[int]:
        return iter(self.shard)

    @property
    def shard(self) -> range:
        return range(self.rank, ROWS, getattr(self, "num_replicas", None) or self.world_size)


@pytest.mark.parametrize("kind", [int, np.int64])
@pytest.mark.parametrize("name", ["num_replicas", "world_size"])
def test_a_sampler_that_says_its_ranks_is_not_split_again(name: str, kind: Any) -> None:
    dataset = Rows()

    def loader(ranks: int) -> Any:
        return DataLoader(dataset, 4, sampler=OwnDistributed(**{name: kind(ranks)}))

    for feeds in (
        [EvalFeed(loader(2), rank=rank, world_size=2, seed=SEED) for rank in range(2)],
        [EvalFeed(loader(1), rank=rank, world_size=2, seed=SEED) for rank in range(2)],
    ):
        read = [i for feed in feeds for _, batch, _ in feed.batches() for i in indices(batch)]
        assert sorted(read) == list(range(ROWS))
    for rank in range(2):
        train = TrainFeed(loader(2), rank=rank, world_size=2, seed=SEED, exchange_ints=lambda values: [values] * 2)
        assert [i for step in train.steps(1) for i in indices(step.batches[0])] == list(range(rank, ROWS, 2))
        assert (train.num_batches, train.num_samples) == ((ROWS + 1) // 2 // 4 + 1, ROWS)  # equal on all ranks
    with pytest.raises(ConfigurationError, match=rf"the_loader has a sampler \(OwnDistributed\) with {name}=3, but"):
        EvalFeed(loader(3), rank=0, world_size=2, seed=SEED, name="the_loader")


def test_one_process_refuses_a_sampler_that_leaves_half_of_the_rows_to_another() -> None:
    dataset = Rows()
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=False))
    with pytest.raises(ConfigurationError, match="the_loader has a DistributedSampler with num_replicas=2"):
        EvalFeed(loader, name="the_loader")
    whole = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=False))
    assert sum(size for _, _, size in EvalFeed(whole).batches()) == len(dataset)


def test_distributed_for_other_ranks_is_an_error() -> None:
    loader = DataLoader(Rows(), 4, sampler=DistributedSampler(Rows(), num_replicas=4, rank=0))
    with pytest.raises(ConfigurationError, match=r"val_loader has a DistributedSampler with num_replicas=4"):
        EvalFeed(loader, rank=0, world_size=2, seed=SEED, name="val_loader")


def test_no_loader_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"val_loader=3 can't be iterated"):
        EvalFeed(3, name="val_loader")


def test_elements_are_put_in_order_as_blocks() -> None:
    (feed,) = feeds(lambda: DataLoader(Blocks(), batch_size=None, sampler=Reversed(9)), 1)
    batches = whole_pass([feed])
    order = feed.row_order([size for _, _, size in batches])
    assert order is not None
    rows = [i for _, batch, _ in batches for i in indices(batch)]
    assert [rows[place] for place in order] == list(range(ROWS))


def test_a_part_of_the_dataset_stays_in_loader_order() -> None:
    for dataset in (Rows(), _tensors()):
        feed = EvalFeed(DataLoader(dataset, 4, sampler=SubsetRandomSampler(range(20))), seed=SEED)
        sizes = [size for _, _, size in feed.batches()]
        assert sum(sizes) == 20
        assert feed.row_order(sizes) is None


def test_a_list_of_batches_is_a_loader() -> None:
    feed = EvalFeed(batches_of(4))
    assert [size for _, _, size in feed.batches()] == [4] * 10 + [1]
    assert feed.num_batches == 11


def test_a_dataset_whose_length_raises_an_error_can_be_read_by_a_sampler() -> None:
    class Unsized(Rows):
        def __len__(self) -> int:
            raise RuntimeError("not known yet")

    feed = EvalFeed(DataLoader(Unsized(), 4, sampler=range(5)), seed=SEED)
    assert [size for _, _, size in feed.batches()] == [4, 1]


def test_the_order_of_10_billion_rows_is_not_computed() -> None:
    class Huge(Rows):
        def __len__(self) -> int:
            return 10**10

        def __getitem__(self, index: int) -> Any:
            return torch.zeros(1), torch.zeros(1), torch.tensor(index)

    batches = EvalFeed(DataLoader(Huge(), 4), rank=1, world_size=2, seed=SEED).batches()
    assert indices(next(batches)[1]) == [4, 5, 6, 7]


def test_ranks_that_read_different_orders_are_an_error() -> None:
    def of_rank(ranked: dict[str, Any]) -> Any:
        loader = DataLoader(Rows(), 4, sampler=OwnEntropy())
        return list(EvalFeed(loader, seed=SEED, name="val", **ranked).batches())

    with pytest.raises(ConfigurationError, match=r"val: OwnEntropy yields a different order on each rank"):
        in_ranks(2, of_rank)


def test_keys_of_any_kind_stay_in_loader_order() -> None:
    class Keyed(Rows):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(int(index[0]))

    keys: Any = [(f"{i}", [i] * (i % 2)) for i in reversed(range(ROWS))]
    batches = whole_pass(ranks := feeds(lambda: DataLoader(Keyed(), 4, sampler=keys), 2))
    assert [i for _, batch, _ in batches for i in indices(batch)] == list(reversed(range(ROWS)))
    assert ranks[0].row_order([size for _, _, size in batches]) is None
