"""Training batches: every kind of loader, shared out among simulated ranks, against the same loader in one process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from kit.loader_kinds import (
    EVALUATED,
    MAP_KINDS,
    ROWS,
    WORKER_KINDS,
    BatchSource,
    Blocks,
    Buckets,
    Kind,
    OwnEntropy,
    RankStream,
    Rows,
    Stream,
    TaggedLoader,
    _tensors,
    batches_of,
    indices,
    parts,
)
from kit.simulated_ranks import SEED, each, global_state, in_ranks, rank_steps, same
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from trainloop.data import EvalFeed, StepBatches, TrainFeed
from trainloop.data.loader.generators import generators_of
from trainloop.data.loader.loader_copies import end_workers
from trainloop.errors import ConfigurationError

# -- shares ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "world_size", "grad_accumulation"),
    [
        pytest.param(
            kind,
            world_size,
            grad_accumulation,
            id=f"{kind.name}-{world_size}-{grad_accumulation}",
            # Each number of ranks and each accumulation with each loader; all pairs of them in make test-all.
            marks=[pytest.mark.slow] if (number + world_size + grad_accumulation // 2) % 2 else [],
        )
        for number, kind in enumerate(MAP_KINDS)
        for world_size in (2, 3)
        for grad_accumulation in (1, 3)
    ]
    + [
        pytest.param(kind, 2, 1, id=kind.name, marks=[pytest.mark.slow] if kind.name in EVALUATED else marks)
        for kind in WORKER_KINDS
        for marks in [[] if kind.name == "workers persistent" else [pytest.mark.long]]
    ],
)
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
                lengths = [len(s.batches) for s in shares]
                assert share.counts == (lengths if len(set(lengths)) > 1 else None)
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
        equal = len({size for share in shares for size in share.sizes}) == 1 and shares[0].counts is None
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

    feed = TrainFeed(DataLoader(Watched(), 4), rank=1, world_size=3, seed=SEED)
    batches = [batch for step in feed.steps(1) for batch in step.batches]
    assert fetched == list(range(1, ROWS, 3)) == [i for batch in batches for i in indices(batch)]


def test_known_sizes_are_not_exchanged() -> None:
    for make in (lambda: DataLoader(Rows(), 4, shuffle=True), lambda: DataLoader(Rows(), batch_sampler=Buckets())):
        feeds = [TrainFeed(make(), rank=rank, world_size=2, seed=SEED) for rank in range(2)]
        assert all(list(feed.steps(2)) for feed in feeds)


@pytest.mark.parametrize("lengths", [(10, 7), (7, 10), (0, 3)], ids=str)
def test_streams_of_unequal_length_end_together(lengths: tuple[int, int]) -> None:
    def of_rank(ranked: dict[str, Any]) -> list[StepBatches]:
        stream = Stream(lengths[ranked["rank"]] * 4)
        stream.is_distributed = True  # type: ignore[attr-defined]  # as a user's own class would say
        loader: Any = DataLoader(stream, 4)
        return list(TrainFeed(loader, seed=SEED, **ranked).steps(2))

    ranks = in_ranks(2, of_rank)
    assert len(ranks[0]) == len(ranks[1]) == (max(lengths) + 1) // 2
    for rank, length in enumerate(lengths):
        assert [i for step in ranks[rank] for batch in step.batches for i in indices(batch)] == list(range(4 * length))
    for first, second in zip(*ranks, strict=True):
        assert first.total == second.total == sum(first.sizes) + sum(second.sizes)
        lengths = [len(first.batches), len(second.batches)]
        assert first.counts == second.counts == (lengths if lengths[0] != lengths[1] else None)


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
    feed, given, given_states = TrainFeed(loader), [], []
    for _ in range(2):
        for i, step in enumerate(feed.steps(1)):
            given += step.batches
            if i + 1 == stop:
                break
        given_states.append(states(loader))
    # A copy counts the samples of some loaders; it has the same dataset.
    assert feed.loader is loader or feed.loader.dataset is loader.dataset
    assert len(given) == len(expected)
    assert all(same(a, b) for a, b in zip(given, expected, strict=True))
    assert all(type(a) is type(b) for a, b in zip(given, expected, strict=True))
    assert given_states == expected_states


class Together(Rows):
    """Read a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in reversed(indices)]


class DrawsAtOnce:
    """Draws its order when an epoch is begun, not when the first batch is asked for."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(ROWS).split(4))

    def __len__(self) -> int:
        return -(-ROWS // 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Together(), 4, shuffle=True),
        lambda: DataLoader(Rows(), batch_sampler=DrawsAtOnce()),  # type: ignore[arg-type]
        lambda: DataLoader(_tensors(), batch_sampler=DrawsAtOnce()),  # type: ignore[arg-type]
        lambda: DataLoader(Rows(), 4, collate_fn=lambda rows: default_collate(rows[::-1]), drop_last=True),
    ],
    ids=["__getitems__", "a sampler that draws at once", "and tensors", "collate_fn"],
)
def test_without_seed_the_loaders_parts_do_what_its_iterator_does(make: Callable[[], DataLoader[Any]]) -> None:
    torch.manual_seed(1)
    expected = [batch for _ in range(2) for batch in make()]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    given = [batch for _ in range(2) for step in TrainFeed(make()).steps(1) for batch in step.batches]
    assert len(given) == len(expected) > 2
    assert all(same(a, b) for a, b in zip(given, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_tensor_batches_are_copies_as_the_loader_collates_them() -> None:
    x = torch.arange(24.0).reshape(8, 3)
    dataset = TensorDataset(x, torch.arange(8), torch.ones(8, 2, 2, dtype=torch.bool))
    for loader in (DataLoader(dataset, 3), DataLoader(dataset, 3, shuffle=True)):
        torch.manual_seed(0)
        expected: list[Any] = list(loader)
        torch.manual_seed(0)
        steps = list(TrainFeed(loader).steps(1))
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
    for step, (wanted,) in zip(TrainFeed(loader).steps(1), loader, strict=True):
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
    for step, wanted in zip(TrainFeed(loader).steps(1), loader, strict=True):
        assert same(step.batches[0], wanted)


# -- the twin ----------------------------------------------------------------------------------------------------------


def test_the_twin_has_all_arguments_and_the_users_loader_is_as_before() -> None:
    generator, dataset = torch.Generator(), Rows()
    loader = TaggedLoader(
        "tag",
        dataset,
        4,
        shuffle=True,
        num_workers=2,
        collate_fn=default_collate,
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
    twin = TrainFeed(loader, rank=1, world_size=2, seed=SEED).loader
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
        TrainFeed(DataLoader(dataset, 4, sampler=sampler), rank=rank, world_size=2, seed=SEED) for rank in range(2)
    ]
    for rank, feed in enumerate(feeds):
        assert feed.loader.sampler is sampler
        sampler.rank = rank  # each rank has its own copy of it
        feed.set_epoch(1)
        expected = DistributedSampler(dataset, num_replicas=2, rank=rank, seed=9)  # type: ignore[var-annotated]
        expected.set_epoch(1)
        steps = list(feed.steps(1))
        assert [i for step in steps for i in indices(step.batches[0])] == list(expected)
        assert steps[0][1:] == ([4], None, 8, None)
        assert (feed.num_batches, feed.num_samples, feed.global_batch_size) == (6, 42, 8)


class Zipped:
    """A loader of the user's own, which reads two loaders."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders

    def __iter__(self) -> Any:
        return zip(*self.loaders, strict=False)


def test_distributed_samplers_of_loaders_within_a_loader_get_the_rank() -> None:
    dataset = Rows()
    read = []
    for rank in range(2):
        samplers: list[Any] = [DistributedSampler(dataset, num_replicas=2, rank=0, seed=seed) for seed in range(2)]
        loader = Zipped(*(DataLoader(dataset, 4, sampler=sampler) for sampler in samplers))
        feed = TrainFeed(loader, rank=rank, world_size=2, seed=SEED, exchange_ints=lambda values: [values] * 2)
        feed.set_epoch(1)
        steps = list(feed.steps(1))
        assert [sampler.rank for sampler in samplers] == [rank, rank]
        expected: Any = DistributedSampler(dataset, num_replicas=2, rank=rank, seed=1)
        expected.set_epoch(1)
        assert [i for step in steps for i in indices(step.batches[0][1])] == list(expected)
        read.append(list(expected))
    assert sorted({*read[0], *read[1]}) == list(range(len(dataset)))
    loader = Zipped(DataLoader(dataset, 4, sampler=samplers[0]), DataLoader(dataset, 4))
    with pytest.raises(ConfigurationError, match="loaders with and without a sampler that splits samples over ranks"):
        TrainFeed(loader, rank=0, world_size=2, seed=SEED)


def test_loaders_in_nested_containers_are_loaders_within_a_loader() -> None:
    class Mixed(Zipped):
        """Each loader has a weight, and the loaders are in groups."""

        def __init__(self, *loaders: Any) -> None:
            self.groups = {"all": [(loader, 0.5) for loader in loaders]}

        def __iter__(self) -> Any:
            return zip(*(loader for loader, _ in self.groups["all"]), strict=False)

    dataset = Rows()
    samplers: list[Any] = [DistributedSampler(dataset, num_replicas=2, rank=0, seed=seed) for seed in range(2)]
    loader = Mixed(*(DataLoader(dataset, 4, sampler=sampler) for sampler in samplers))
    feed = TrainFeed(loader, rank=1, world_size=2, seed=SEED, exchange_ints=lambda values: [values] * 2)
    feed.set_epoch(3)
    assert [(sampler.rank, sampler.epoch) for sampler in samplers] == [(1, 3)] * 2
    generator = torch.Generator()
    loader = Mixed(DataLoader(dataset, 4, shuffle=True, generator=generator))
    assert [*generators_of(loader).values()] == [generator]


def test_a_generator_behind_a_long_list_is_found() -> None:
    class Draws(Sampler[int]):
        def __init__(self, generator: torch.Generator) -> None:
            self.state = {"indices": [*range(100)], "deep": [[0], {"generator": generator}]}

        def __iter__(self) -> Iterator[int]:
            return iter(self.state["indices"])

    generator = torch.Generator()
    assert [*generators_of(DataLoader(Rows(), sampler=Draws(generator))).values()] == [generator]


def test_what_is_known_of_an_epoch() -> None:
    def known(loader: Any, world_size: int = 2) -> tuple[Any, ...]:
        feed = TrainFeed(loader, rank=1, world_size=world_size, seed=SEED, exchange_ints=lambda values: [values] * 2)
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

    feed = TrainFeed(DataLoader(Huge(), 4, shuffle=True), rank=1, world_size=2, seed=SEED)
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
        (7, r"train_loader=7 can't be iterated. Pass a torch DataLoader, or any iterable of batches."),
        (DataLoader(Rows(0), 4), r"train_loader has no samples: .* length 0. Training needs at least one sample."),
        ([], r"train_loader has no batches: its length is 0"),
        (
            DataLoader(Rows(7), 4, drop_last=True),
            r"train_loader has 7 samples and drop_last=True, but one global batch takes 8 \(batch_size 4 on 2 ranks\), "
            r"so no batch would be left. Use drop_last=False, or a smaller batch_size.",
        ),
        (
            DataLoader(Rows(), 4, sampler=DistributedSampler(Rows(), num_replicas=4, rank=0)),
            r"train_loader has a DistributedSampler with num_replicas=4, but world_size=2. Create the sampler for 2",
        ),
    ],
    ids=["no loader", "no samples", "no batches", "all dropped", "other ranks"],
)
def test_what_cant_be_shared_out_is_an_error_at_once(loader: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TrainFeed(loader, rank=0, world_size=2, seed=SEED)


def test_an_iterator_is_empty_the_second_time() -> None:
    feed = TrainFeed(iter(batches_of(4)))
    assert len(list(feed.steps(1))) == 11
    feed.set_epoch(1)
    with pytest.raises(
        ConfigurationError, match=r"train_loader yielded no batch in epoch 2, .* begins again in each epoch"
    ):
        list(feed.steps(1))


def test_drop_last_is_named_where_a_stream_has_no_full_batch() -> None:
    class Few(IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.zeros(3, 2))

    feed = TrainFeed(DataLoader(Few(), 4, drop_last=True))
    with pytest.raises(ConfigurationError, match=r"yielded no batch in epoch 1, .* or leave drop_last out"):
        list(feed.steps(1))


def test_a_loader_that_ignores_its_sampler_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"RepeatedLoader.__iter__ yielded a batch without asking the sampler"):
        TrainFeed(RepeatedLoader(Rows(), 4), rank=0, world_size=2, seed=SEED)


def _of_chance() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: DataLoader(Rows(), 4, sampler=OwnEntropy()), id="sampler"),
        pytest.param(
            lambda: DataLoader(Rows(), batch_sampler=[[random.SystemRandom().randrange(ROWS)]] * 9), id="list"
        ),
        pytest.param(
            lambda: DataLoader(Rows(), batch_sampler=[torch.randint(ROWS, (2,), generator=_of_chance())] * 9),  # type: ignore[arg-type]
            id="list of tensors",
        ),
    ],
)
def test_ranks_that_read_different_orders_are_an_error(make: Callable[[], Any]) -> None:
    message = r"train_loader: (OwnEntropy|list) yields a different order on each rank, so its samples can't be split"
    with pytest.raises(ConfigurationError, match=message):
        rank_steps(make, 3)


def test_indices_may_be_anything() -> None:
    class Keyed(Rows):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(int(index[0]))

    keys: Any = [(str(i), object()) for i in range(ROWS)]
    ranks = rank_steps(lambda: DataLoader(Keyed(), 4, sampler=keys), 2, epochs=1)
    assert sorted(i for rank in ranks for step in rank[0] for b in step.batches for i in indices(b)) == list(
        range(ROWS)
    )


class StreamOverALoader(RankStream):
    def __iter__(self) -> Any:
        yield from DataLoader(Rows(), batch_size=None)


def test_a_loader_within_a_stream_does_not_make_it_one_that_splits_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each iterator of a DataLoader asks for the rank and the number of ranks, and uses them for datapipes only."""
    asked = []
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda name=name, value=value: asked.append(name) or value)
    loader: Any = DataLoader(StreamOverALoader(), 4)
    feed = TrainFeed(loader, rank=1, world_size=2, seed=SEED, exchange_ints=lambda values: [values, values])
    steps = list(feed.steps(1))
    assert [i for step in steps for batch in step.batches for i in indices(batch)] == list(range(1, ROWS, 2))
    assert "get_world_size" in asked, "torch does not ask any more"


# torch waits 5 s for a worker whose dataset could not be iterated.
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stream_that_asks_for_its_rank_has_to_say_why(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    loader: Any = DataLoader(RankStream(), 4, num_workers=workers)
    feed = TrainFeed(loader, rank=1, world_size=2, seed=SEED, exchange_ints=lambda values: [values, values])
    evaluation = EvalFeed(loader, rank=1, world_size=2, seed=SEED)
    message = r"RankStream calls torch.distributed.get_rank\(\) while it is iterated.*RankStream.is_distributed = True"
    for batches in (feed.steps(1), evaluation.batches()):
        with pytest.raises(ConfigurationError, match=message):
            list(batches)

    monkeypatch.setattr(RankStream, "is_distributed", True, raising=False)
    feed = TrainFeed(loader, rank=1, world_size=2, seed=SEED, exchange_ints=lambda values: [values, values])
    assert [i for step in feed.steps(1) for i in indices(step.batches[0])] == list(range(1, ROWS, 2))
    monkeypatch.setattr(RankStream, "is_distributed", False)
    feed = TrainFeed(loader, rank=1, world_size=2, seed=SEED, exchange_ints=lambda values: [values, values])
    assert len([i for step in feed.steps(1) for batch in step.batches for i in indices(batch)]) == ROWS // 2 // 2


class Continues:
    """Two batches of an epoch are the next two of an iterator that all epochs share, or of a new one."""

    def __init__(self, shared: bool) -> None:
        self.shared, self.left = shared, iter(torch.arange(40.0).view(10, 4))

    def __iter__(self) -> Iterator[Any]:
        if not self.shared:
            self.left = iter(torch.arange(40.0).view(10, 4))
        yield from islice(self.left, 2)


class ContinuingStream(Continues, IterableDataset[Any]):
    pass


class ContinuesWithState(Continues):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    "loader, attribute",
    [
        (Continues(True), "train_loader.left"),
        (DataLoader(ContinuingStream(True), 1), "train_loader.dataset.left"),
        (Continues(False), ""),
        (DataLoader(ContinuingStream(False), 1), ""),
        (ContinuesWithState(True), ""),
        (DataLoader(range(8), 2, num_workers=1, persistent_workers=True), ""),
    ],
)
def test_an_iterator_that_epochs_share_is_noticed(loader: Any, attribute: str) -> None:
    feed = TrainFeed(loader)
    for epoch in range(3):
        feed.set_epoch(epoch)
        assert len(list(feed.steps(1))) in (2, 4)
        feed.end_epoch()
        assert feed.about_iterator[: len(attribute) + 1].strip() == (attribute if epoch else "")
    if isinstance(loader, DataLoader):
        end_workers(loader)
