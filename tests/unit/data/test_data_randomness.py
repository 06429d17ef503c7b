"""Random numbers of loading: kept apart from training's, the same however an epoch is entered or loaded."""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from kit.loader_kinds import (
    KINDS,
    ROWS,
    Buckets,
    Kind,
    NoisyRows,
    Reversed,
    Rows,
    Stream,
    _tensors,
    indices,
)
from kit.simulated_ranks import SEED, each, global_state, rank_steps, same
from numpy.random import mtrand
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, StackDataset, Subset

from trainloop.data import StepBatches, TrainFeed
from trainloop.data.batch import randomness

# Streams of single samples, each a row and its label.
pytestmark = pytest.mark.filterwarnings("ignore:.*it may be one sample with a number")

# -- in threads --------------------------------------------------------------------------------------------------------


def test_threads_replace_the_generators_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, each would restore the other's generator, and numpy would crash when one of them is freed."""
    monkeypatch.setattr(randomness, "_warned", False)
    ours, draws, switch = mtrand.get_bit_generator(), {}, sys.getswitchinterval()

    def draw(seed: int) -> None:
        for _ in range(300):
            with randomness.IsolatedRandomState(seed):
                found = np.random.random_sample(), random.random(), float(torch.rand(()))
            draws.setdefault(seed, set()).add(found)
            np.random.get_state(legacy=False)

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in (1, 2)]
    sys.setswitchinterval(1e-5)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert mtrand.get_bit_generator() is ours
    assert [len(found) for found in draws.values()] == [1, 1]
    assert sum("two loops with a seed run at the same time" in str(one.message) for one in caught) == 1


def test_a_thread_that_waits_for_another_one_is_not_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_PATIENCE_S", 0.05)
    before = global_state()
    done: list[bool] = []

    def draw() -> None:
        with randomness.IsolatedRandomState(1):
            done.append(np.random.random_sample() > 0)

    with warnings.catch_warnings(), randomness.IsolatedRandomState(2):
        warnings.simplefilter("ignore")
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
    assert done == [True]
    assert global_state() == before


# -- with a seed -------------------------------------------------------------------------------------------------------


@each(KINDS)
def test_seeded_loading_leaves_global_random_state_alone(kind: Kind) -> None:
    feed = TrainFeed(kind.make(4), seed=SEED)
    before = global_state()
    for _ in feed.steps(1):
        assert global_state() == before
    assert global_state() == before
    feed.close()


@pytest.mark.long(but=5)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda **kw: DataLoader(NoisyRows(), 4, shuffle=True, **kw), id="shuffled"),
        pytest.param(lambda **kw: DataLoader(NoisyRows(), batch_sampler=Buckets(), **kw), id="batch_sampler"),
        pytest.param(lambda **kw: DataLoader(NoisyRows(), batch_size=None, sampler=Reversed(), **kw), id="elements"),
        pytest.param(lambda **kw: DataLoader(Stream(noisy=True), 4, **kw), id="stream"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2], ids=["no workers", "2 workers"])
def test_an_epoch_entered_in_its_middle_has_the_same_bits(make: Callable[..., Any], workers: int) -> None:
    def loader() -> Any:
        return make(num_workers=workers, persistent_workers=workers > 0)

    whole = rank_steps(loader, 2, 2, epochs=2)
    resumed = rank_steps(loader, 2, 2, epochs=1, skip=2)
    for of_rank, of_resumed in zip(whole, resumed, strict=True):
        assert len(of_resumed[0]) == len(of_rank[0]) - 2
        for step, again in zip(of_rank[0][2:], of_resumed[0], strict=True):
            assert step[1:] == again[1:]
            assert all(torch.equal(a[0], b[0]) for a, b in zip(step.batches, again.batches, strict=True))


@pytest.mark.parametrize("seed", [SEED, None])
@pytest.mark.parametrize("own_generator", [False, True], ids=["global generators", "own generator"])
@pytest.mark.parametrize("workers_later", [1, 0], ids=["workers", "workers only before"])
def test_an_order_resumed_while_workers_stayed(seed: int | None, own_generator: bool, workers_later: int) -> None:
    """Workers that stay up draw no base seed in a later epoch; those that replace them must not shift its order."""

    def feed_of(workers: int) -> TrainFeed:
        generator = torch.Generator().manual_seed(5) if own_generator else None
        loader = DataLoader(
            NoisyRows(), 4, shuffle=True, num_workers=workers, persistent_workers=workers > 0, generator=generator
        )
        return TrainFeed(loader, seed=seed)

    def batches(steps: Any) -> list[list[Any]]:
        return [step.batches[0] for step in steps]

    whole = feed_of(1)
    list(whole.steps(1))
    whole.set_epoch(1)
    steps = whole.steps(1)
    batches(islice(steps, 2))
    state, random_state = whole.state_dict(), torch.get_rng_state()
    rest = batches(steps)
    before_the_next = whole.state_dict()
    torch.rand(7)
    resumed = feed_of(workers_later)
    resumed.load_state_dict(state)
    torch.set_rng_state(random_state)
    resumed.set_epoch(1)
    again = batches(resumed.steps(1, skip_steps=2))
    assert len(again) == len(rest) > 2
    for (x, y, i), (x_again, y_again, i_again) in zip(rest, again, strict=True):
        assert torch.equal(i, i_again)
        assert torch.equal(y, y_again)
        assert torch.equal(x, x_again) or seed is None  # a worker's own numbers are those of its base seed
    assert before_the_next["generators"].keys() == resumed.state_dict()["generators"].keys()
    for name, generator in before_the_next["generators"].items():
        assert torch.equal(generator, resumed.state_dict()["generators"][name])
    for feed in (whole, resumed):
        feed.close()


def test_augmentation_differs_by_rank_and_not_by_workers() -> None:
    def noise(workers: int) -> list[list[float]]:
        ranks = rank_steps(lambda: DataLoader(NoisyRows(), 4, num_workers=workers), 2, epochs=1)
        rows = Rows()
        return [
            [float(x[0] - rows[i][0][0]) for step in rank[0] for b in step.batches for x, _, i in zip(*b, strict=True)]
            for rank in ranks
        ]

    here, there = noise(0), noise(2)
    assert here == there
    assert not set(here[0]) & set(here[1])
    assert len(set(here[0])) == len(here[0])


def test_persistent_workers_of_a_later_epoch_draw_as_fresh_ones() -> None:
    def epoch_1(epochs: list[int]) -> list[torch.Tensor]:
        loader = DataLoader(Stream(noisy=True), 4, num_workers=1, persistent_workers=True)
        feed = TrainFeed(loader, seed=SEED)
        for epoch in epochs:
            feed.set_epoch(epoch)
            steps = list(feed.steps(1))
        feed.close()
        return [step.batches[0][0] for step in steps]

    assert all(torch.equal(a, b) for a, b in zip(epoch_1([0, 1]), epoch_1([1]), strict=True))


def test_skipped_steps_are_not_fetched() -> None:
    fetched = []

    class Watched(Rows):
        def __getitem__(self, index: int) -> Any:
            fetched.append(index)
            return super().__getitem__(index)

    feed = TrainFeed(DataLoader(Watched(), 4, shuffle=True), seed=SEED)
    list(feed.steps(2, skip_steps=3))
    assert len(fetched) == ROWS - 3 * 2 * 4


def test_skipping_all_steps_gives_none() -> None:
    feed = TrainFeed(DataLoader(Rows(), 4), seed=SEED)
    assert list(feed.steps(1, skip_steps=11)) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_number_of_ranks_goes_on_with_the_same_global_batches(world_size: int) -> None:
    ranks = [
        TrainFeed(DataLoader(Rows(), 12 // world_size, shuffle=True), rank=r, world_size=world_size, seed=SEED)
        for r in range(world_size)
    ]
    given = [
        sorted(i for share in step for i in indices(share.batches[0])) for step in zip(*(f.steps(1, 2) for f in ranks))
    ]
    three = zip(*(rank[0] for rank in rank_steps(lambda: DataLoader(Rows(), 4, shuffle=True), 3, epochs=1)))
    assert given == [sorted(i for share in step for i in indices(share.batches[0])) for step in three][2:]


# -- the user's generator, and state -----------------------------------------------------------------------------------


def make_with_generator(dataset: Any) -> Any:
    return DataLoader(dataset, 4, shuffle=True, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("dataset", [Rows(), _tensors()], ids=["rows", "tensors"])
def test_a_users_generator_gives_the_order_in_every_mode(dataset: Any) -> None:
    plain = make_with_generator(dataset)
    orders = [[i for batch in plain for i in indices(batch)] for _ in range(2)]
    for seed in (None, SEED):
        feed = TrainFeed(make_with_generator(dataset), seed=seed)
        assert [[i for step in feed.steps(1) for i in indices(step.batches[0])] for _ in range(2)] == orders
    ranks = rank_steps(lambda: make_with_generator(dataset), 2)
    for epoch in range(2):
        shares = [[i for step in rank[epoch] for batch in step.batches for i in indices(batch)] for rank in ranks]
        assert shares == [orders[epoch][0::2], orders[epoch][1::2]]


@pytest.mark.parametrize("seed", [None, SEED], ids=["unseeded", "seeded"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: make_with_generator(Rows()), id="generator"),
        pytest.param(lambda: make_with_generator(_tensors()), id="tensors generator"),
        pytest.param(lambda: DataLoader(NoisyRows(), 4, shuffle=True), id="shuffled"),
        pytest.param(lambda: DataLoader(_tensors(), 4, shuffle=True), id="tensors"),
        pytest.param(
            lambda: DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), generator=torch.Generator().manual_seed(4))),
            id="sampler's generator",
        ),
    ],
)
def test_state_resumes_an_epoch_where_it_was_left(make: Callable[[], Any], seed: int | None) -> None:
    def train(feed: TrainFeed, steps: Iterator[StepBatches]) -> list[Any]:
        # The model draws as well, between one fetch and the next.
        return [(step.batches[0], torch.rand(())) for step in steps]

    torch.manual_seed(2)
    feed = TrainFeed(make(), seed=seed)
    train(feed, feed.steps(1))
    feed.set_epoch(1)
    steps = feed.steps(1)
    train(feed, (next(steps) for _ in range(3)))
    expected = []
    for skip in (3, 5):  # left twice in one epoch
        saved, rng_then = feed.state_dict(), (random.getstate(), np.random.get_state(), torch.get_rng_state())
        if not expected:
            expected = train(feed, steps)
            assert len(expected) == 8

        torch.manual_seed(99)
        feed = TrainFeed(make(), seed=seed)
        feed.load_state_dict(saved)
        feed.set_epoch(1)
        random.setstate(rng_then[0])
        np.random.set_state(rng_then[1])
        torch.set_rng_state(rng_then[2])
        steps = feed.steps(1, skip_steps=skip)
        resumed = train(feed, islice(steps, 2) if skip == 3 else steps)
        of_these = expected[skip - 3 :][: len(resumed)]
        assert all(same(a, b) and r == s for (a, r), (b, s) in zip(resumed, of_these, strict=True))
    assert len(resumed) == 6


def test_set_epoch_reaches_whoever_wants_it() -> None:
    class Told(Reversed):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    for loader in (DataLoader(Rows(), 4, sampler=Told()), DataLoader(Rows(), batch_size=None, sampler=Told())):
        Told.epochs.clear()
        for seed in (None, SEED):
            TrainFeed(loader, seed=seed).set_epoch(7)
        assert Told.epochs == [7, 7]

    class Pairs:
        def __init__(self) -> None:
            self.loaders = [DataLoader(Rows(), 4, sampler=Told()), DataLoader(Rows(), 4, sampler=Told())]

        def __iter__(self) -> Any:
            return zip(*self.loaders, strict=True)

    Told.epochs.clear()
    TrainFeed(Pairs()).set_epoch(7)
    assert Told.epochs == [7, 7]

    class ToldRows(Rows):
        set_epoch = Told.set_epoch
        epochs = Told.epochs

    for dataset in (
        ConcatDataset([ToldRows(), Subset(ToldRows(), [1])]),
        StackDataset(first=ToldRows(), second=ToldRows()),
        Subset(Subset(ConcatDataset([ToldRows(), ToldRows()]), [1, 2]), [0]),
    ):
        Told.epochs.clear()
        TrainFeed(DataLoader(dataset, 4)).set_epoch(7)
        assert Told.epochs == [7, 7]

    class Outer(Reversed):
        def __init__(self) -> None:
            self.samplers = [Told(), Told()]

    class Passes(Outer):
        def set_epoch(self, epoch: int) -> None:
            self.samplers[0].set_epoch(-epoch)

    for sampler, expected in ((Outer(), [7, 7]), (Passes(), [-7])):
        Told.epochs.clear()
        TrainFeed(DataLoader(Rows(), 4, sampler=sampler)).set_epoch(7)
        assert Told.epochs == expected
