"""A ``StopIteration`` out of a dataset or a collate function is an error that says where, in every feed."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit.loader_kinds import ROWS, Rows, Stream
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainloop.data import EvalFeed, TrainFeed

# Streams of single samples, each a row and its label.
pytestmark = pytest.mark.filterwarnings("ignore:.*it may be one sample with a number")


class StopsInItem(Rows):
    def __getitem__(self, index: int) -> Any:
        return next(iter([])) if index == 9 else super().__getitem__(index)


class StopsInItems(Rows):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] if i != 9 else next(iter([])) for i in indices]


class ItemsOneByOne(IterableDataset[Any]):
    """A stream whose own end is a ``StopIteration`` raised in Python."""

    def __iter__(self) -> Iterator[Any]:
        self.rows = iter([Rows()[i] for i in range(ROWS)])
        return self

    def __next__(self) -> Any:
        return next(self.rows)


def stops_in_collate(rows: list[Any]) -> Any:
    return next(iter([])) if any(int(row[-1]) == 9 for row in rows) else default_collate(rows)


def stops_in_element(row: Any) -> Any:
    return stops_in_collate([row])


WHERE = rf"(?s)train_loader.*raised StopIteration.*{re.escape(__file__)}.*next\(iter\(\[\]\)\)"

BROKEN: dict[str, Callable[[int], DataLoader[Any]]] = {
    "__getitem__": lambda workers: DataLoader(StopsInItem(), 4, num_workers=workers),
    "__getitems__": lambda workers: DataLoader(StopsInItems(), 4, num_workers=workers),
    "element": lambda workers: DataLoader(StopsInItem(), None, num_workers=workers),
    "collate_fn": lambda workers: DataLoader(Rows(), 4, collate_fn=stops_in_collate, num_workers=workers),
    "stream": lambda workers: DataLoader(Stream(), 4, collate_fn=stops_in_collate, num_workers=workers),
    "stream's element": lambda workers: DataLoader(Stream(), None, collate_fn=stops_in_element, num_workers=workers),
}


def feeds(make: Callable[[int], DataLoader[Any]], workers: int, seed: int | None) -> list[Callable[[], Any]]:
    loader = make(workers)

    def train() -> int:
        feed = TrainFeed(loader, seed=seed)
        try:
            return sum(step.total for step in feed.steps(1))
        finally:
            feed.close()

    return [train, lambda: sum(size for _, _, size in EvalFeed(loader, seed=seed, name="train_loader").batches())]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", BROKEN)
def test_it_is_an_error_that_says_where(kind: str, seed: int | None) -> None:
    for run in feeds(BROKEN[kind], 0, seed):
        with pytest.raises(RuntimeError, match=WHERE):
            run()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["__getitem__", "collate_fn", "stream"])
def test_out_of_a_worker_too(kind: str) -> None:
    for run in feeds(BROKEN[kind], 1, 3):
        with pytest.raises(RuntimeError, match=WHERE):
            run()
    del run
    gc.collect()  # tracebacks hold the workers' queues


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [4, None])
def test_a_streams_own_end_is_none(batch_size: int | None, workers: int, seed: int | None) -> None:
    for run in feeds(lambda n: DataLoader(ItemsOneByOne(), batch_size, num_workers=n), workers, seed):
        assert run() == ROWS  # an item by itself is one sample
