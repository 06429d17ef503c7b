"""A stream with a state of its own goes on where its checkpoint was, without reading its begin again."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from kit.simulated_ranks import SEED, in_ranks
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainloop.checkpoint import plain
from trainloop.data import EvalFeed, TrainFeed


class Stream(IterableDataset[Any]):
    """Samples that are counted as they are read; its position goes on over epochs, each of which ends it anew."""

    per_epoch = 22

    def __init__(self, asks: bool = False, noisy: bool = False, orders: bool = False) -> None:
        self.asks, self.noisy, self.orders = asks, noisy, orders
        self.at = self.in_epoch = self.reads = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info() if self.asks else None
        first, step = (info.id, info.num_workers) if info else (0, 1)
        order = torch.randperm(self.per_epoch) if self.orders else torch.arange(self.per_epoch)
        while self.in_epoch < self.per_epoch:
            place, at = self.in_epoch, self.at
            self.in_epoch += 1
            self.at += 1
            if place % step == first:
                self.reads += 1
                noise = torch.rand(()).item() if self.noisy else 0.0
                yield torch.tensor([at, int(order[place]), noise], dtype=torch.float64)
        self.in_epoch = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": np.array([self.at, self.in_epoch])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["at"], np.ndarray)
        self.at, self.in_epoch = state["at"].tolist()


class OwnLoader:
    """A loader that is no ``DataLoader``."""

    def __init__(self) -> None:
        self.stream = Stream(noisy=True)

    def __len__(self) -> int:
        return -(-self.stream.per_epoch // 3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = iter(self.stream)
        while batch := list(islice(samples, 3)):
            yield torch.stack(batch)

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)


def epochs(make: Any, world_size: int, seed: int | None, *, stop: tuple[int, int] | None = None, saved: Any = None,
           resumed_on: int | None = None, accumulation: int = 2) -> tuple[list[Any], list[Any], list[Any]]:  # fmt: skip
    """Each rank's steps by epoch, up to ``stop`` (epoch, step) or from ``saved``; states at the stop; the loaders."""
    loaders = [make() for _ in range(world_size)]

    def of_rank(ranked: dict[str, Any]) -> tuple[list[Any], Any]:
        rank = ranked["rank"]
        feed = TrainFeed(loaders[rank], seed=seed, **ranked)
        first, skip = (0, 0) if saved is None else saved[0]
        if saved is not None:
            states = saved[1]
            feed.load_state_dict(states[rank] if len(states) == world_size else states[0])
        steps: list[Any] = []
        for epoch in range(first, 3):
            feed.set_epoch(epoch)
            shares = feed.steps(accumulation, skip)
            for index in range(skip, 100):
                if stop == (epoch, index):
                    return steps, feed.state_dict(plain)
                share = next(shares, None)
                if share is None:
                    break
                steps.append((epoch, [batch.tolist() for batch in share.batches], share.total))
            if stop is not None and stop[0] == epoch:  # at its end, whatever the number of steps
                return steps, feed.state_dict(plain)
            skip = 0
        return steps, None

    results = in_ranks(world_size, of_rank)
    return [steps for steps, _ in results], [state for _, state in results], loaders


def loader(workers: int = 0, batch_size: int = 3, persistent: bool = False, **kind: bool) -> Any:
    return lambda: DataLoader(
        Stream(**kind), batch_size, num_workers=workers, persistent_workers=persistent and workers > 0
    )


KINDS: dict[str, tuple[Any, int, int | None]] = {
    "as it is": (loader(orders=True), 1, None),
    "as it is, noisy": (loader(noisy=True), 1, None),
    "own loader": (OwnLoader, 1, None),
    "own loader, seeded": (OwnLoader, 1, SEED),
    "own loader, ranks": (OwnLoader, 2, SEED),
    "seeded": (loader(orders=True), 1, SEED),
    "ranks": (loader(noisy=True), 2, SEED),
    "3 ranks": (loader(batch_size=2), 3, SEED),
    "workers": (loader(workers=3), 1, SEED),
    "workers that ask": (loader(workers=3, asks=True, noisy=True, persistent=True), 2, SEED),
    "workers that stay": (loader(workers=2, batch_size=2, noisy=True, persistent=True), 1, SEED),
}
PLACES = [(0, 1), (0, 2), (0, 4), (0, 100), (1, 1), (2, 2)]
# Workers are started anew in each epoch, so that of the places below the first of each kind is in the default run.
PLACES_OF_WORKERS = {
    "workers": [(0, 2), (0, 4), (1, 1)],
    "workers that ask": [(1, 1), (0, 2), (0, 4)],
    "workers that stay": [(0, 4), (0, 2), (1, 1)],
}
STOPS = [
    *((kind, PLACES) for kind in KINDS if kind not in PLACES_OF_WORKERS),
    *(
        pytest.param(kind, places[:1], marks=[] if kind == "workers" else pytest.mark.long)
        for kind, places in PLACES_OF_WORKERS.items()
    ),
    *(pytest.param(kind, places[1:], marks=pytest.mark.slow) for kind, places in PLACES_OF_WORKERS.items()),
]


def through_a_file(states: list[Any]) -> list[Any]:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("kind", "places"), STOPS)
def test_it_goes_on_to_the_same_batches(kind: str, places: list[tuple[int, int]]) -> None:
    make, world_size, seed = KINDS[kind]
    torch.manual_seed(5)
    whole, _, _ = epochs(make, world_size, seed)
    for stop in places:
        torch.manual_seed(5)
        before, states, _ = epochs(make, world_size, seed, stop=stop)
        assert all(state["position"] for state in states) or "workers" in kind
        going_on = torch.get_rng_state()  # which the loop restores
        finished = stop[1] > sum(epoch == stop[0] for epoch, *_ in before[0])
        place = stop if not finished else (stop[0] + 1, 0)
        torch.manual_seed(99)
        torch.set_rng_state(going_on)
        after, _, _ = epochs(make, world_size, seed, saved=(place, through_a_file(states)))
        assert [one + other for one, other in zip(before, after, strict=True)] == whole, stop


def test_what_was_trained_on_is_not_read_again() -> None:
    before, states, _ = epochs(loader(), 2, SEED, stop=(1, 1))
    _, _, loaders = epochs(loader(), 2, SEED, saved=((1, 1), states))
    on_each = before[0][-1][2]
    assert on_each == 12
    for of_rank in loaders:
        assert of_rank.dataset.reads == 2 * Stream.per_epoch - on_each


def samples(steps: list[Any]) -> list[list[float]]:
    """The samples of all ranks, in the stream's order."""
    return sorted(sample for rank in steps for _, batches, _ in rank for batch in batches for sample in batch)


def test_a_stream_read_by_all_ranks_goes_on_with_another_number_of_them() -> None:
    whole, _, _ = epochs(loader(noisy=True, batch_size=4), 1, SEED)
    before, states, _ = epochs(loader(noisy=True, batch_size=2), 2, SEED, stop=(1, 2))
    after, _, _ = epochs(loader(noisy=True, batch_size=4), 1, SEED, saved=((1, 2), states))
    assert samples(before) + samples(after) == samples(whole)


@pytest.mark.parametrize(
    ("make", "world_size"),
    [(loader(workers=1), 1), (OwnLoader, 1), (lambda: DataLoader(list(range(22)), 3), 1)],
    ids=["workers", "another loader", "no stream"],
)
def test_where_a_state_does_not_fit_the_epoch_is_read_again(make: Any, world_size: int) -> None:
    _, states, _ = epochs(loader(), 1, SEED, stop=(0, 1))
    whole, _, _ = epochs(make, world_size, SEED)
    with pytest.warns(UserWarning, match="the stream's position in the checkpoint is for a different loader"):
        after, _, _ = epochs(make, world_size, SEED, saved=((0, 1), states))
    assert after[0] == whole[0][1:]


class Unsaid(Stream):
    """Its state can't be kept."""

    value: Any = object()

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.value, Exception):
            raise self.value
        return {"deep": [self.value]}


class Unpicklable(Unsaid):
    value = (part for part in ())


class Raising(Unsaid):
    value = RuntimeError("closed already")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "message"),
    [(Unsaid, r"\['deep'\]\[0\] is a builtins.object"), (Unpicklable, "generator"), (Raising, "closed already")],
)
def test_a_state_that_is_not_plain_is_told_and_left_out(kind: Any, message: str, workers: int) -> None:
    for seed in [SEED] if workers else [SEED, None]:
        with pytest.warns(UserWarning, match=f"train_loader: its state_dict\\(\\) can't be stored.*{message}"):
            _, states, _ = epochs(lambda: DataLoader(kind(), 3, num_workers=workers), 1, seed, stop=(0, 1))
        assert states[0]["position"] is None


class NeedsMore(Stream):
    """As Mosaic's and litdata's: only their own loader can ask."""

    def state_dict(self, samples: int) -> dict[str, Any]:  # type: ignore[override]
        raise AssertionError(samples)


def test_checkpoints_from_before_and_streams_that_say_nothing_are_read_again() -> None:
    for make in (loader(noisy=True), lambda: DataLoader(NeedsMore(noisy=True), 3)):
        whole, _, _ = epochs(make, 1, SEED)
        _, states, _ = epochs(make, 1, SEED, stop=(0, 1))
        states[0].pop("position")
        after, _, _ = epochs(make, 1, SEED, saved=((0, 1), states))
        assert after[0] == whole[0][1:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_evaluation_gives_its_batches_only(num_workers: int) -> None:
    """A training's batches bring places along, and turns without a batch."""
    batches = {}
    for rank in range(2):
        loader = DataLoader(Stream(asks=num_workers > 0), batch_size=4, num_workers=num_workers)
        feed = EvalFeed(loader, rank=rank, world_size=2, seed=0)
        for index, batch, size in feed.batches():
            assert size == len(batch)
            batches[index] = batch
    rows = torch.cat([batches[index] for index in sorted(batches)])
    assert sorted(rows[:, 1].tolist()) == list(range(Stream.per_epoch))
    whole = DataLoader(Stream(asks=num_workers > 0), batch_size=4, num_workers=num_workers)
    assert torch.equal(rows, torch.cat(list(whole)))
