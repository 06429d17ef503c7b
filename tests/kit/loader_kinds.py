"""Loaders of every kind that a user may bring, all over the same rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

ROWS = 41  # prime: short last batches everywhere
FEATURES = 3


def make_rows(length: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (float64), targets (float64) and the index of each row (int64)."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(length, FEATURES, generator=generator, dtype=torch.float64)
    y = x.sum(1) + 0.1 * torch.randn(length, generator=generator, dtype=torch.float64)
    return x, y, torch.arange(length)


class Rows(Dataset[Any]):
    def __init__(self, length: int = ROWS) -> None:
        self.rows = make_rows(length)

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.rows)


class NoisyRows(Rows):
    """Augmented: each fetch draws from Python's, numpy's and torch's global generators."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y, i = super().__getitem__(index)
        return x + random.random() + np.random.rand() + torch.rand(()).double(), y, i


class FetchesLists(Rows):
    """Indexed with a list of indices (``sampler=BatchSampler(...), batch_size=None``)."""


class Blocks(Rows):
    """Elements are batches, of different sizes."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index >= len(self):
            raise IndexError(index)
        starts = [0, 5, 6, 11, 16, 20, 25, 31, 38, ROWS]
        return tuple(column[starts[index] : starts[index + 1]] for column in self.rows)


class Stream(IterableDataset[Any]):
    """Knows nothing of ranks and workers."""

    def __init__(self, length: int = ROWS, noisy: bool = False) -> None:
        self.rows = NoisyRows(length) if noisy else Rows(length)
        self.start, self.step = 0, 1

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.start, len(self.rows), self.step):
            yield self.rows[index]


class ShuffledStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.rows)))
        random.shuffle(order)
        for index in order:
            yield self.rows[index]


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class WorkersStream(Stream):
    """Shares itself out among workers."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, len(self.rows), step):
            yield self.rows[index]


class BlocksStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        blocks = Blocks()
        for index in range(len(blocks)):
            yield blocks[index]


class RankStream(Stream):
    """Gives every second row, by the rank that it asks torch for."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(torch.distributed.get_rank(), len(self.rows), 2):
            yield self.rows[index]


def split_stream(worker_id: int) -> None:
    """The other way to share a stream out among workers, from torch's documentation."""
    info = get_worker_info()
    assert info is not None
    info.dataset.start, info.dataset.step = info.id, info.num_workers  # type: ignore[attr-defined]


class Reversed(Sampler[int]):
    def __init__(self, length: int = ROWS) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from reversed(range(self.length))


class Unsized(Sampler[int]):
    """No length, and the order is drawn from Python's generator as it goes."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(ROWS))
        while left:
            yield left.pop(random.randrange(len(left)))


class OwnEntropy(Reversed):
    """Another order in each process: no number of ranks can share it out."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng().permutation(self.length).tolist()


class Buckets(Sampler[list[int]]):
    """Batches of neighbours, of 2 to 5 rows, in random order."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        sizes = [2, 3, 4, 5, 2, 3, 4, 5, 2, 3, 4, 4]
        starts = np.cumsum([0, *sizes])
        for bucket in torch.randperm(len(sizes)).tolist():
            yield list(range(starts[bucket], starts[bucket + 1]))


class BucketsOfTensors(Buckets):
    def __iter__(self) -> Iterator[Any]:
        return map(torch.tensor, super().__iter__())


class TaggedLoader(DataLoader[Any]):
    """A subclass with an argument of its own, that it doesn't keep under that name."""

    def __init__(self, tag: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label = tag.upper()


class ScalingLoader(TaggedLoader):
    """A subclass that changes what it gives."""

    def __iter__(self) -> Any:
        for x, y, i in super().__iter__():
            yield x * 2, y * 2, i


class BatchSource:
    """No loader at all: gives batches, each time anew, and has no length."""

    def __iter__(self) -> Iterator[Any]:
        yield from batches_of(4)


def batches_of(size: int) -> list[tuple[Tensor, ...]]:
    rows = make_rows()
    return [tuple(column[start : start + size] for column in rows) for start in range(0, ROWS, size)]


def as_dict(samples: list[Any]) -> dict[str, Any]:
    x, y, i = default_collate(samples)
    return {"text": [f"row {index}" for index in i.tolist()], "inputs": (x, {"y": y}), "index": i}


def seed_nothing(worker_id: int) -> None:
    assert get_worker_info() is not None


def parts(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(x, y, index) of a batch of any of the kinds below."""
    if isinstance(batch, dict):
        return batch["inputs"][0], batch["inputs"][1]["y"], batch["index"]
    return tuple(batch)  # type: ignore[return-value]


def indices(batch: Any) -> list[int]:
    values: list[int] = parts(batch)[2].tolist()
    return values


@dataclass(frozen=True)
class Kind:
    """A kind of loader."""

    name: str
    make: Callable[[int], Any]
    """From ``batch_size`` to a loader."""
    unit: str = "sample"
    """What ranks share out: "sample", or "batch", where the loader's batches are what they are."""
    once: bool = True
    """Whether an epoch visits each row exactly once."""
    in_rows: bool = True
    """Whether predictions come in dataset order."""


def _weights() -> list[float]:
    return [1.0 + (index % 5) for index in range(ROWS)]


def _tensors() -> TensorDataset:
    return TensorDataset(*make_rows())


def _subset() -> Subset[Any]:
    inner = Subset(_tensors(), [*range(1, ROWS, 2), *range(0, ROWS, 2)])
    return Subset(inner, list(range(ROWS - 1, -1, -1)))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


MAP_KINDS = [
    Kind("sequential", lambda b: DataLoader(Rows(), b)),
    Kind("shuffled", lambda b: DataLoader(Rows(), b, shuffle=True)),
    Kind("tensors", lambda b: DataLoader(_tensors(), b)),
    Kind("tensors shuffled", lambda b: DataLoader(_tensors(), b, shuffle=True)),
    Kind("tensors subset", lambda b: DataLoader(_subset(), b, shuffle=True), in_rows=False),
    Kind("tensors generator", lambda b: DataLoader(_tensors(), b, shuffle=True, generator=_generator())),
    Kind("tensors drop_last", lambda b: DataLoader(_tensors(), b, shuffle=True, drop_last=True), once=False),
    Kind("list", lambda b: DataLoader([Rows()[i] for i in range(ROWS)], b, shuffle=True)),  # type: ignore[arg-type]
    Kind("concatenated", lambda b: DataLoader(ConcatDataset([_tensors()]), b, shuffle=True)),
    Kind("stacked", lambda b: DataLoader(StackDataset(*make_rows()), b, shuffle=True)),  # type: ignore[arg-type]
    Kind("drop_last", lambda b: DataLoader(Rows(), b, shuffle=True, drop_last=True), once=False),
    Kind("generator", lambda b: DataLoader(Rows(), b, shuffle=True, generator=_generator())),
    Kind("subset sampler", lambda b: DataLoader(Rows(), b, sampler=SubsetRandomSampler(range(ROWS)))),
    Kind(
        "weighted sampler",
        lambda b: DataLoader(Rows(), b, sampler=WeightedRandomSampler(_weights(), 37)),
        once=False,
        in_rows=False,
    ),
    Kind(
        "tensors weighted",
        lambda b: DataLoader(_tensors(), b, sampler=WeightedRandomSampler(_weights(), 37)),
        once=False,
        in_rows=False,
    ),
    Kind(
        "replacement",
        lambda b: DataLoader(Rows(), b, sampler=RandomSampler(Rows(), replacement=True)),
        once=False,
        in_rows=False,
    ),
    Kind(
        "fewer",
        lambda b: DataLoader(Rows(), b, sampler=RandomSampler(Rows(), num_samples=19)),
        once=False,
        in_rows=False,
    ),
    Kind(
        "more",
        lambda b: DataLoader(_tensors(), b, sampler=RandomSampler(Rows(), num_samples=90)),
        once=False,
        in_rows=False,
    ),
    Kind("custom sampler", lambda b: DataLoader(Rows(), b, sampler=Reversed())),
    Kind("unsized sampler", lambda b: DataLoader(Rows(), b, sampler=Unsized())),
    Kind("list as sampler", lambda b: DataLoader(_tensors(), b, sampler=list(range(ROWS))[::-1])),
    Kind("range as sampler", lambda b: DataLoader(Rows(), b, sampler=range(ROWS))),
    Kind("BatchSampler", lambda b: DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), b, False))),
    Kind("custom batch_sampler", lambda b: DataLoader(Rows(), batch_sampler=Buckets()), unit="batch"),
    Kind("tensors batch_sampler", lambda b: DataLoader(_tensors(), batch_sampler=Buckets()), unit="batch"),
    Kind("batches of tensors", lambda b: DataLoader(Rows(), batch_sampler=BucketsOfTensors()), unit="batch"),
    Kind(
        "lists as batch_sampler",
        lambda b: DataLoader(Rows(), batch_sampler=[list(range(i, min(i + 6, ROWS))) for i in range(0, ROWS, 6)]),
        unit="batch",
    ),
    Kind("elements", lambda b: DataLoader(Blocks(), batch_size=None, shuffle=True), unit="batch"),
    Kind("elements custom", lambda b: DataLoader(Blocks(), batch_size=None, sampler=Reversed(9)), unit="batch"),
    Kind(
        "lists of indices",
        lambda b: DataLoader(
            FetchesLists(), batch_size=None, sampler=BatchSampler(SequentialSampler(Rows()), b, False)
        ),
    ),
    Kind("collate_fn", lambda b: DataLoader(Rows(), b, shuffle=True, collate_fn=as_dict)),
    Kind("subclass", lambda b: TaggedLoader("tag", Rows(), b, shuffle=True)),
    Kind("subclass iterating", lambda b: ScalingLoader("tag", Rows(), b, shuffle=True)),
    Kind("batches", lambda b: batches_of(4), unit="batch"),
    Kind("iterable", lambda b: BatchSource(), unit="batch"),
    Kind("stream", lambda b: DataLoader(Stream(), b)),
    Kind("stream shuffled", lambda b: DataLoader(ShuffledStream(), b), in_rows=False),
    Kind("stream sized", lambda b: DataLoader(SizedStream(), b)),
    Kind("stream drop_last", lambda b: DataLoader(Stream(), b, drop_last=True), once=False),
    Kind("stream collate_fn", lambda b: DataLoader(Stream(), b, collate_fn=as_dict)),
    Kind("stream of batches", lambda b: DataLoader(BlocksStream(), batch_size=None), unit="batch"),
    Kind("stream subclass iterating", lambda b: ScalingLoader("tag", Stream(), 4), unit="batch"),
]

WORKER_KINDS = [
    Kind(
        "workers",
        lambda b: DataLoader(Rows(), b, shuffle=True, num_workers=2, worker_init_fn=seed_nothing, timeout=300),
    ),
    Kind(
        "workers persistent",
        lambda b: DataLoader(Rows(), b, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=3),
    ),
    Kind("workers batch_sampler", lambda b: DataLoader(Rows(), batch_sampler=Buckets(), num_workers=1), unit="batch"),
    Kind("workers elements", lambda b: DataLoader(Blocks(), batch_size=None, num_workers=1), unit="batch"),
    Kind("workers stream", lambda b: DataLoader(Stream(), b, num_workers=2)),
    Kind("workers stream split", lambda b: DataLoader(WorkersStream(), b, num_workers=2), in_rows=False),
    Kind(
        "workers stream init",
        lambda b: DataLoader(Stream(), b, num_workers=2, worker_init_fn=split_stream),
        in_rows=False,
    ),
    Kind("workers stream persistent", lambda b: DataLoader(SizedStream(), b, num_workers=2, persistent_workers=True)),
]

KINDS = MAP_KINDS + WORKER_KINDS
# Workers take time to start: shared out over ranks, some are evaluated in the default run, the others trained on.
EVALUATED = {"workers": 2, "workers batch_sampler": 3, "workers stream": 2, "workers stream init": 3}
