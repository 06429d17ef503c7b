"""Training batches: every kind of loader, shared out among simulated ranks, against the same loader in one process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loader_kinds import (
    KINDS,
    MAP_KINDS,
    ROWS,
    BatchSource,
    Blocks,
    Buckets,
    Exchange,
    Kind,
    NoisyRows,
    Reversed,
    Rows,
    Stream,
    TaggedLoader,
    _tensors,
    batches_of,
    indices,
    parts,
)
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from trainloop.data import StepShare, TrainFeed, train_feed
from trainloop.errors import ConfigurationError

SEED = 3


def each(kinds: list[Kind]) -> Any:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


def rank_steps(
    make: Callable[[], Any], world_size: int, grad_accumulation: int = 1, *, epochs: int = 2, skip: int = 0
) -> list[list[list[StepShare]]]:
    """Steps of each rank, in each epoch."""
    exchange = Exchange(world_size)

    def of_rank(rank: int) -> list[list[StepShare]]:
        feed = train_feed(make(), rank=rank, world_size=world_size, seed=SEED, exchange_ints=exchange.of_rank(rank))
        steps = []
        for epoch in range(epochs):
            feed.set_epoch(epoch)
            steps.append(list(feed.steps(grad_accumulation, skip)))
        feed.close()
        return steps

    return exchange.run([lambda rank=rank: of_rank(rank) for rank in range(world_size)])  # type: ignore[misc]


def global_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


def same(batch: Any, other: Any) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(parts(batch), parts(other), strict=True))


# -- shares ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
@each(KINDS)
def test_ranks_share_the_global_batches_of_one_process(kind: Kind, world_size: int, grad_accumulation: int) -> None:
    if kind.unit == "sample":
        (alone,) = rank_steps(lambda: kind.make(4 * world_size), 1, grad_accumulation)
    else:
        (alone,) = rank_steps(lambda: kind.make(4), 1, grad_accumulation * world_size)
    ranks = rank_steps(lambda: kind.make(4), world_size, grad_accumulation)

    for epoch, steps in enumerate(alone):
        of_ranks = [rank[epoch] for rank in ranks]
        assert {len(rank) for rank in of_ranks} == {len(steps)}
        for step, *shares in zip(steps, *of_ranks, strict=True):
            together = Counter(i for share in shares for batch in share.batches for i in indices(batch))
            assert together == Counter(i for batch in step.batches for i in indices(batch))
            assert {share.total for share in shares} == {step.total} == {together.total()}
            for share in shares:
                assert share.sizes == [len(indices(batch)) for batch in share.batches]
                assert share.ragged == (len({len(s.batches) for s in shares}) > 1)
        visited = Counter(i for step in steps for batch in step.batches for i in indices(batch))
        assert not kind.once or visited == Counter(range(ROWS))


@pytest.mark.parametrize("grad_accumulation", [1, 3])
@each(MAP_KINDS)
def test_scales_make_the_mean_over_ranks_the_mean_over_samples(kind: Kind, grad_accumulation: int) -> None:
    for shares in zip(*(rank[0] for rank in rank_steps(lambda: kind.make(4), 3, grad_accumulation)), strict=True):
        losses = [[parts(batch)[1].mean() for batch in share.batches] for share in shares]
        of_ranks = []
        for share, of_rank in zip(shares, losses, strict=True):
            scales = share.scales if share.scales is not None else [1 / len(of_rank)] * len(of_rank)
            of_ranks.append(sum(scale * loss for scale, loss in zip(scales, of_rank, strict=True)))
        everything = torch.cat([parts(batch)[1] for share in shares for batch in share.batches])
        assert torch.isclose(torch.as_tensor(sum(of_ranks) / 3), everything.mean(), rtol=1e-12)
        equal = len({size for share in shares for size in share.sizes}) == 1 and not shares[0].ragged
        assert all((share.scales is None) == equal for share in shares)


def test_epochs_differ_and_repeat() -> None:
    def make() -> Any:
        return DataLoader(Rows(), 4, shuffle=True)

    (first,), (again,) = rank_steps(make, 1), rank_steps(make, 1)
    orders = [[i for step in epoch for i in indices(step.batches[0])] for epoch in first]
    assert orders[0] != orders[1]
    assert orders == [[i for step in epoch for i in indices(step.batches[0])] for epoch in again]


def test_only_own_samples_are_fetched() -> None:
    fetched: list[int] = []

    class Watched(Rows):
        def __getitem__(self, index: int) -> Any:
            fetched.append(index)
            return super().__getitem__(index)

    feed = train_feed(DataLoader(Watched(), 4), rank=1, world_size=3, seed=SEED)
    batches = [batch for step in feed.steps(1) for batch in step.batches]
    assert fetched == list(range(1, ROWS, 3)) == [i for batch in batches for i in indices(batch)]


def test_known_sizes_are_not_exchanged() -> None:
    for make in (lambda: DataLoader(Rows(), 4, shuffle=True), lambda: DataLoader(Rows(), batch_sampler=Buckets())):
        feeds = [train_feed(make(), rank=rank, world_size=2, seed=SEED) for rank in range(2)]
        assert all(list(feed.steps(2)) for feed in feeds)


@pytest.mark.parametrize("lengths", [(10, 7), (7, 10), (0, 3)], ids=str)
def test_streams_of_unequal_length_end_together(lengths: tuple[int, int]) -> None:
    exchange = Exchange(2)

    def of_rank(rank: int) -> list[StepShare]:
        stream = Stream(lengths[rank] * 4)
        stream.is_distributed = True  # type: ignore[attr-defined]  # as a user's own class would say
        loader: Any = DataLoader(stream, 4)
        feed = train_feed(loader, rank=rank, world_size=2, seed=SEED, exchange_ints=exchange.of_rank(rank))
        return list(feed.steps(2))

    ranks = exchange.run([lambda: of_rank(0), lambda: of_rank(1)])
    assert len(ranks[0]) == len(ranks[1]) == (max(lengths) + 1) // 2
    for rank, length in enumerate(lengths):
        assert [i for step in ranks[rank] for batch in step.batches for i in indices(batch)] == list(range(4 * length))
    for first, second in zip(*ranks, strict=True):
        assert first.total == second.total == sum(first.sizes) + sum(second.sizes)
        assert first.ragged == second.ragged == (len(first.batches) != len(second.batches))


# -- one process without a seed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [None, 1, 3], ids=["whole", "after 1", "after 3"])
@each(MAP_KINDS)
def test_without_seed_batches_and_random_numbers_are_the_loaders(kind: Kind, stop: int | None) -> None:
    def states(loader: Any) -> list[Any]:
        generators = (getattr(loader, "generator", None), getattr(getattr(loader, "sampler", None), "generator", None))
        return [global_state(), *(g.get_state().tolist() for g in generators if g is not None)]

    torch.manual_seed(1)
    random.seed(1)
    loader, expected, expected_states = kind.make(4), [], []
    for _ in range(2):
        for i, batch in enumerate(loader):
            expected.append(batch)
            if i + 1 == stop:
                break
        expected_states.append(states(loader))

    torch.manual_seed(1)
    random.seed(1)
    loader = kind.make(4)
    feed, given, given_states = train_feed(loader), [], []
    for _ in range(2):
        for i, step in enumerate(feed.steps(1)):
            given += step.batches
            if i + 1 == stop:
                break
        given_states.append(states(loader))
    assert feed.loader is loader
    assert len(given) == len(expected)
    assert all(same(a, b) for a, b in zip(given, expected, strict=True))
    assert all(type(a) is type(b) for a, b in zip(given, expected, strict=True))
    assert given_states == expected_states


def test_tensor_batches_are_copies_as_the_loader_collates_them() -> None:
    x = torch.arange(24.0).reshape(8, 3)
    dataset = TensorDataset(x, torch.arange(8), torch.ones(8, 2, 2, dtype=torch.bool))
    for loader in (DataLoader(dataset, 3), DataLoader(dataset, 3, shuffle=True)):
        torch.manual_seed(0)
        expected: list[Any] = list(loader)
        torch.manual_seed(0)
        steps = list(train_feed(loader).steps(1))
        for step, wanted in zip(steps, expected, strict=True):
            (batch,) = step.batches
            assert [t.stride() for t in batch] == [t.stride() for t in wanted]
            assert all(torch.equal(a, b) for a, b in zip(batch, wanted, strict=True))
            for tensor in batch:
                tensor.zero_()
    assert torch.equal(x, torch.arange(24.0).reshape(8, 3))


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.randn(6, 4, requires_grad=True), id="grad"),
        pytest.param(torch.randn(4, 6).T, id="transposed"),
        pytest.param(torch.randn(6, 2, 3, 3).to(memory_format=torch.channels_last), id="channels_last"),
        pytest.param(torch.randn(6, 2, dtype=torch.complex64).conj(), id="conj"),
        pytest.param(torch.randn(6), id="1-d"),
        pytest.param(torch.randn(6, 0), id="empty rows"),
        pytest.param(torch.nn.Parameter(torch.randn(6, 2)), id="parameter"),
    ],
)
def test_tensors_of_all_kinds_are_collated_alike(tensor: torch.Tensor) -> None:
    loader = DataLoader(TensorDataset(tensor), 4)
    for step, (wanted,) in zip(train_feed(loader).steps(1), loader, strict=True):
        ((given,),) = step.batches
        assert torch.equal(given, wanted)
        assert (given.stride(), given.dtype, given.requires_grad, type(given)) == (
            wanted.stride(),
            wanted.dtype,
            wanted.requires_grad,
            type(wanted),
        )


@pytest.mark.parametrize("batch_sampler", [[[-1, 0]], [[0], [5, 5]]], ids=str)
def test_tensor_indices_mean_what_they_mean_to_the_dataset(batch_sampler: list[list[int]]) -> None:
    loader = DataLoader(_tensors(), batch_sampler=batch_sampler)
    for step, wanted in zip(train_feed(loader).steps(1), loader, strict=True):
        assert same(step.batches[0], wanted)


# -- with a seed -------------------------------------------------------------------------------------------------------


@each(KINDS)
def test_seeded_loading_leaves_global_random_state_alone(kind: Kind) -> None:
    feed = train_feed(kind.make(4), seed=SEED)
    before = global_state()
    for _ in feed.steps(1):
        assert global_state() == before
    assert global_state() == before
    feed.close()


@pytest.mark.parametrize("workers", [0, 2], ids=["no workers", "2 workers"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda **kw: DataLoader(NoisyRows(), 4, shuffle=True, **kw), id="shuffled"),
        pytest.param(lambda **kw: DataLoader(NoisyRows(), batch_sampler=Buckets(), **kw), id="batch_sampler"),
        pytest.param(lambda **kw: DataLoader(NoisyRows(), batch_size=None, sampler=Reversed(), **kw), id="elements"),
        pytest.param(lambda **kw: DataLoader(Stream(noisy=True), 4, **kw), id="stream"),
    ],
)
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
        feed = train_feed(loader, seed=SEED)
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

    feed = train_feed(DataLoader(Watched(), 4, shuffle=True), seed=SEED)
    list(feed.steps(2, skip_steps=3))
    assert len(fetched) == ROWS - 3 * 2 * 4


def test_skipping_all_steps_gives_none() -> None:
    feed = train_feed(DataLoader(Rows(), 4), seed=SEED)
    assert list(feed.steps(1, skip_steps=11)) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_number_of_ranks_goes_on_with_the_same_global_batches(world_size: int) -> None:
    ranks = [
        train_feed(DataLoader(Rows(), 12 // world_size, shuffle=True), rank=r, world_size=world_size, seed=SEED)
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
        feed = train_feed(make_with_generator(dataset), seed=seed)
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
    def train(feed: TrainFeed, steps: Iterator[StepShare]) -> list[Any]:
        # The model draws as well, between one fetch and the next.
        return [(step.batches[0], torch.rand(())) for step in steps]

    torch.manual_seed(2)
    feed = train_feed(make(), seed=seed)
    train(feed, feed.steps(1))
    feed.set_epoch(1)
    steps = feed.steps(1)
    train(feed, (next(steps) for _ in range(3)))
    saved, rng_then = feed.state_dict(), (random.getstate(), np.random.get_state(), torch.get_rng_state())
    expected = train(feed, steps)
    assert len(expected) == 8

    torch.manual_seed(99)
    feed = train_feed(make(), seed=seed)
    feed.load_state_dict(saved)
    feed.set_epoch(1)
    random.setstate(rng_then[0])
    np.random.set_state(rng_then[1])
    torch.set_rng_state(rng_then[2])
    resumed = train(feed, feed.steps(1, skip_steps=3))
    assert all(same(a, b) and r == s for (a, r), (b, s) in zip(resumed, expected, strict=True))


def test_set_epoch_reaches_whoever_wants_it() -> None:
    class Told(Reversed):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    for loader in (DataLoader(Rows(), 4, sampler=Told()), DataLoader(Rows(), batch_size=None, sampler=Told())):
        Told.epochs.clear()
        for seed in (None, SEED):
            train_feed(loader, seed=seed).set_epoch(7)
        assert Told.epochs == [7, 7]


# -- the twin ----------------------------------------------------------------------------------------------------------


def test_the_twin_has_all_arguments_and_the_users_loader_is_as_before() -> None:
    generator, dataset = torch.Generator(), Rows()
    loader = TaggedLoader(
        "tag",
        dataset,
        4,
        shuffle=True,
        num_workers=2,
        collate_fn=list,
        pin_memory=False,
        drop_last=True,
        timeout=7,
        worker_init_fn=print,
        multiprocessing_context="fork",
        generator=generator,
        prefetch_factor=5,
        persistent_workers=True,
    )
    before = dict(loader.__dict__)
    twin = train_feed(loader, rank=1, world_size=2, seed=SEED).loader
    assert type(twin) is TaggedLoader
    changed = {name for name, value in before.items() if twin.__dict__[name] is not value}
    assert changed == {"sampler", "batch_sampler"}
    assert loader.__dict__ == before
    assert isinstance(twin.sampler, DistributedSampler)
    assert (twin.sampler.rank, twin.sampler.num_replicas, len(twin.sampler)) == (1, 2, 20)
    assert (twin.multiprocessing_context, twin.label) == (loader.multiprocessing_context, "TAG")
    assert len(twin) == 5


def test_the_twin_of_a_distributed_loader_keeps_its_sampler() -> None:
    dataset = Rows()
    sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=0, seed=9)
    feeds = [
        train_feed(DataLoader(dataset, 4, sampler=sampler), rank=rank, world_size=2, seed=SEED) for rank in range(2)
    ]
    for rank, feed in enumerate(feeds):
        assert feed.loader.sampler is sampler
        sampler.rank = rank  # each rank has its own copy of it
        feed.set_epoch(1)
        expected = DistributedSampler(dataset, num_replicas=2, rank=rank, seed=9)  # type: ignore[var-annotated]
        expected.set_epoch(1)
        steps = list(feed.steps(1))
        assert [i for step in steps for i in indices(step.batches[0])] == list(expected)
        assert steps[0][1:] == ([4], None, 8, False)
        assert (feed.num_batches, feed.num_samples, feed.global_batch_size) == (6, 42, 8)


def test_what_is_known_of_an_epoch() -> None:
    def known(loader: Any, world_size: int = 2) -> tuple[Any, ...]:
        feed = train_feed(loader, rank=1, world_size=world_size, seed=SEED, exchange_ints=lambda values: [values] * 2)
        return feed.num_batches, feed.num_samples, feed.global_batch_size

    assert known(DataLoader(Rows(), 4, shuffle=True)) == (6, 41, 8)
    assert known(DataLoader(Rows(), 4, drop_last=True)) == (5, 40, 8)
    assert known(DataLoader(Rows(), batch_sampler=Buckets())) == (6, None, None)
    assert known(DataLoader(Blocks(), batch_size=None)) == (5, None, None)
    assert known(DataLoader(Stream(), 4)) == (None, None, 8)
    assert known(batches_of(4)) == (6, None, None)
    assert known(BatchSource()) == (None, None, None)


def test_a_dataset_of_10_billion_starts_at_once() -> None:
    class Huge(Rows):
        def __len__(self) -> int:
            return 10**10

        def __getitem__(self, index: int) -> Any:
            return torch.zeros(1), torch.zeros(1), torch.tensor(index)

    feed = train_feed(DataLoader(Huge(), 4, shuffle=True), rank=1, world_size=2, seed=SEED)
    first = indices(next(feed.steps(1)).batches[0])
    late = next(feed.steps(1, skip_steps=10**9))
    assert len(set(first)) == len(set(indices(late.batches[0]))) == 4
    assert max(first) > 2**32 // 2
    assert feed.num_batches == 10**10 // 8


# -- errors ------------------------------------------------------------------------------------------------------------


class RepeatedLoader(DataLoader[Any]):
    """Holds on to one iterator of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own = super().__iter__()

    def __iter__(self) -> Any:
        yield next(self.own)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (7, r"train_loader=7: can't be iterated. Pass a torch DataLoader, or any iterable of batches."),
        (DataLoader(Rows(0), 4), r"train_loader has no samples: .* length 0. Training needs one."),
        ([], r"train_loader has no batches: its length is 0"),
        (
            DataLoader(Rows(7), 4, drop_last=True),
            r"train_loader has 7 samples and drop_last=True, but one global batch takes 8 \(batch_size 4 on 2 ranks\): "
            r"no batch would be left. Use drop_last=False, or a smaller batch_size.",
        ),
        (
            DataLoader(Rows(), 4, sampler=DistributedSampler(Rows(), num_replicas=4, rank=0)),
            r"train_loader has a DistributedSampler with num_replicas=4, but world_size=2. Make it for 2",
        ),
        (
            DataLoader(Stream(), 4),
            r"train_loader: how many samples each of 2 ranks has is known only by asking; exchange_ints=None was given",
        ),
    ],
    ids=["no loader", "no samples", "no batches", "all dropped", "other ranks", "no exchange"],
)
def test_what_cant_be_shared_out_is_an_error_at_once(loader: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train_feed(loader, rank=0, world_size=2, seed=SEED)


def test_an_iterator_is_empty_the_second_time() -> None:
    feed = train_feed(iter(batches_of(4)))
    assert len(list(feed.steps(1))) == 11
    feed.set_epoch(1)
    with pytest.raises(ConfigurationError, match=r"train_loader gave no batch in epoch 1: .* starts anew each epoch"):
        list(feed.steps(1))


def test_a_loader_that_ignores_its_sampler_is_an_error() -> None:
    feed = train_feed(RepeatedLoader(Rows(), 4), rank=0, world_size=2, seed=SEED)
    with pytest.raises(ConfigurationError, match=r"RepeatedLoader.__iter__ gave a batch without asking its sampler"):
        list(feed.steps(1))
