"""Batches that contain lists: dp divides the samples, as one process counts them, or leaves the batch whole."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from kit.loops import cpu_loop
from kit.warned import warnings_of
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, default_collate

from trainloop import TTModel


@dataclass
class Target:
    value: Tensor


@dataclass
class Kind:
    """Samples, how they become a batch, and what a model reads from it: rows of three numbers and their targets."""

    samples: list[Any]
    collate: Callable[[list[Any]], Any]
    read: Callable[[Any], list[tuple[Tensor, Tensor]]]
    whole: frozenset[int] = frozenset()
    """Sizes of batches that can't be divided, because samples and columns look alike."""


class Bag:
    """An object of a class that trainloop doesn't know, as of a library of graphs or sparse features."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Names(list[Any]):
    pass


N = 13
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(N, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(N, 1, generator=GENERATOR, dtype=torch.float64)
LENGTHS = torch.randint(1, 6, (N,), generator=GENERATOR).tolist()
SEQUENCES = [torch.randn(n, 3, generator=GENERATOR, dtype=torch.float64) for n in LENGTHS]
IMAGES = [torch.randn(3, 2, 2, generator=GENERATOR, dtype=torch.float64) for _ in range(N)]


def table(rows: Any) -> Tensor:
    return torch.as_tensor(np.asarray(rows), dtype=torch.float64)


def columns(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def rows_of(x: Any, y: Any) -> list[tuple[Tensor, Tensor]]:
    assert len(x) == len(y)
    return list(zip(x, y, strict=True))


ALL = frozenset(range(1, 99))
KINDS = {
    "ragged lists": Kind(
        [(X[i], list(range(n)), Y[i]) for i, n in enumerate(LENGTHS)],
        lambda s: [torch.stack([x for x, _, _ in s]), [list(k) for _, k, _ in s], torch.stack([y for *_, y in s])],
        lambda b: [(x + sum(k), y) for (x, y), k in zip(rows_of(b[0], b[2]), b[1], strict=True)],
    ),
    "ragged lists, some empty": Kind(
        [(X[i], list(range(n - 1)), Y[i]) for i, n in enumerate(LENGTHS)],
        lambda s: {"x": [x for x, _, _ in s], "k": [k for _, k, _ in s], "y": torch.stack([y for *_, y in s])},
        lambda b: [(x + sum(k), y) for (x, y), k in zip(rows_of(b["x"], b["y"]), b["k"], strict=True)],
        frozenset({3}),  # each x has three entries
    ),
    "images and dicts": Kind(
        [(image, {"y": y, "id": i}) for i, (image, y) in enumerate(zip(IMAGES, Y, strict=True))],
        columns,
        lambda b: [(image.mean((1, 2)), t["y"]) for image, t in zip(*b, strict=True)],
        frozenset({3}),  # each image has three channels
    ),
    "images and objects": Kind(
        [(image, Target(y)) for image, y in zip(IMAGES, Y, strict=True)],
        lambda s: [list(column) for column in columns(s)],
        lambda b: [(image.mean((1, 2)), t.value) for image, t in zip(*b, strict=True)],
        frozenset({3}),
    ),
    "a list of samples": Kind(
        list(zip(IMAGES, Y, strict=True)),
        list,
        lambda b: [(image.mean((1, 2)), y) for image, y in b],
        frozenset({3}),
    ),
    "sequences of several lengths": Kind(
        list(zip(SEQUENCES, Y, strict=True)),
        lambda s: {"x": [x for x, _ in s], "y": torch.stack([y for _, y in s])},
        lambda b: [(x.sum(0), y) for x, y in rows_of(b["x"], b["y"])],
    ),
    "nested columns": Kind(
        [(x, (x.flip(0), x**2), y) for x, y in zip(X, Y, strict=True)],
        default_collate,
        lambda b: rows_of(b[0] + b[1][0] - b[1][1], b[2]),
        frozenset({2}),
    ),
    "two tensors": Kind(list(zip(X, Y, strict=True)), default_collate, lambda b: rows_of(*b)),
    "dicts of plain values": Kind(
        [{"x": x.tolist(), "y": y.tolist()} for x, y in zip(X, Y, strict=True)],
        list,
        lambda b: [(table(d["x"]), table(d["y"])) for d in b],
        frozenset({3}),  # each x has three entries
    ),
    "time first": Kind(
        [(x, y) for x, y in zip(X.repeat(1, 7).view(N, 7, 3), Y, strict=True)],
        lambda s: (torch.stack([x for x, _ in s], 1), [y for _, y in s]),
        lambda b: rows_of(b[0].sum(0), b[1]),
        ALL,
    ),
    "an object beside a tensor": Kind(
        list(zip(X, Y, strict=True)),
        lambda s: (Bag(torch.stack([x for x, _ in s])), torch.stack([y for _, y in s])),
        lambda b: rows_of(b[0].x, b[1]),
        ALL,
    ),
    "an object with slots beside a tensor": Kind(
        list(zip(X, Y, strict=True)),
        lambda s: (Slots(torch.stack([x for x, _ in s])), torch.stack([y for _, y in s])),
        lambda b: rows_of(b[0].x, b[1]),
        ALL,
    ),
    "names in a list of another class": Kind(
        [(x, str(i), y) for i, (x, y) in enumerate(zip(X, Y, strict=True))],
        lambda s: {"x": torch.stack([x for x, *_ in s]), "y": [y for *_, y in s], "names": Names(k for _, k, _ in s)},
        lambda b: [(x + float(k), y) for (x, y), k in zip(rows_of(b["x"], b["y"]), b["names"], strict=True)],
    ),
    "a sparse tensor": Kind(
        list(zip(X, Y, strict=True)),
        lambda s: (torch.stack([x for x, _ in s]).to_sparse(), torch.stack([y for _, y in s])),
        lambda b: rows_of(b[0].to_dense(), b[1]),
        ALL,
    ),
    "a nested tensor": Kind(
        list(zip(SEQUENCES, Y, strict=True)),
        lambda s: {
            "x": torch.nested.nested_tensor([x for x, _ in s], layout=torch.jagged),
            "y": torch.stack([y for _, y in s]),
        },
        lambda b: [(x.sum(0), y) for x, y in zip(b["x"].unbind(), b["y"], strict=True)],
        ALL,
    ),
}


class Net(TTModel):
    def __init__(self, kind: Kind, yields: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.kind, self.calls = nn.Linear(3, 1, dtype=torch.float64), kind, itertools.count()
        self.sizes: list[int] = []
        if yields:
            self.__class__ = Yielding

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return self.loss(batch_data)

    def loss(self, batch_data: Any) -> Tensor:
        rows = self.kind.read(batch_data)
        self.sizes.append(len(rows))
        return torch.stack([(self(x) - y).square().mean() for x, y in rows]).mean()

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        rows = self.kind.read(batch_data)
        return torch.stack([self(x) for x, _ in rows]), torch.stack([y for _, y in rows]), {}


class Yielding(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Iterator[Any]:
        yield self.loss(batch_data)
        yield 2 * self.loss(batch_data)


def trained(kind: Kind, replicas: int, batch_size: int, accumulation: int = 1, yields: bool = False) -> Any:
    model = Net(kind, yields)
    make = {"batch_size": batch_size, "collate_fn": kind.collate}
    how: Any = {"gpu_mode": "dp", "devices": replicas} if replicas else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*devices=")
        loop = cpu_loop(
            model,
            DataLoader(kind.samples, shuffle=True, **make),
            optim.SGD(model.parameters(), lr=0.05),
            None,
            validation_loader=DataLoader(kind.samples, **make),
            seed=1,
            **how,
        )
        loop.fit(num_epochs=2, grad_accumulation=accumulation)
        predicted, *_ = loop.predict_with_model(loop.validation_loader)
    return [*model.state_dict().values(), torch.tensor([*loop.history["loss"], *loop.history["val_loss"]]), predicted]


NOT_DIVIDED = "ignore:gpu_mode='dp'. a batch of . samples was not divided:UserWarning"


@pytest.mark.long(but=3)
@pytest.mark.filterwarnings(NOT_DIVIDED)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_dp_equals_one_process(name: str, replicas: int) -> None:
    kind = KINDS[name]
    for batch_size, accumulation, yields in [(4, 1, False), (5, 2, False), (2, 1, False), (3, 1, True), (6, 1, True)]:
        ways = [trained(kind, n, batch_size, accumulation, yields) for n in (0, replicas)]
        torch.testing.assert_close(*ways, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("name", KINDS)
def test_what_can_be_divided_is_divided(name: str, size: int) -> None:
    """And what can't is warned of."""
    kind = KINDS[name]
    shown = []

    class Shows(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            shown.append(len(kind.read(batch_data)))
            return super().get_loss(batch_data, criterion, device)

    model = Shows(kind)
    loader = DataLoader(kind.samples[:size], batch_size=size, collate_fn=kind.collate)
    loop = cpu_loop(model, loader, criterion=None, gpu_mode="dp", devices=2)
    said = warnings_of(lambda: loop.fit(num_epochs=2), "was not divided")
    if size in kind.whole:
        assert shown == [size] * 2
        assert len(said) == 1
        assert f"a batch of {size} samples was not divided among the replicas, because " in said[0]
    else:
        assert shown == [-(-size // 2), size // 2] * 2
        assert not said


def test_a_batch_without_rows_is_left_whole() -> None:
    """Its tensors have another length than its number of samples, which get_loss returns."""

    class Tokens(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            x, starts = batch_data
            return self(x).square().mean(), len(starts) - 1

    results = []
    for how in ({}, {"gpu_mode": "dp", "devices": 2}):
        model = Tokens(KINDS["two tensors"])
        loader = DataLoader(
            SEQUENCES,  # type: ignore[arg-type]
            batch_size=4,
            collate_fn=lambda s: (torch.cat(s), torch.tensor([0, *map(len, s)]).cumsum(0)),
        )
        loop = cpu_loop(model, loader, criterion=None, **how)
        said = warnings_of(lambda loop=loop: loop.fit(num_epochs=1), "because it has tensors of another length: (1")
        results.append(model.net.weight)
    assert said
    assert torch.equal(*results)


@pytest.mark.filterwarnings(NOT_DIVIDED)
def test_boxes_stay_whole_in_a_batch_that_has_as_many_as_images() -> None:
    def boxes(samples: list[Any]) -> Any:  # of all images in one tensor, with the number of the image in its batch
        of_image = torch.cat([torch.full((n,), float(i)) for i, (_, n) in enumerate(samples)])
        return torch.stack([x for x, _ in samples]), of_image

    class Detects(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            x, of_image = batch_data
            return self(x)[of_image.long()].square().mean(), len(of_image)

    counts = [1, 2, 0, 0, *[0, 3, 1, 0], *[2, 2, 0, 0]]  # 3, 4 and 4 boxes for 4 images
    data: Any = [(torch.full((3,), 1.0 + i, dtype=torch.float64), n) for i, n in enumerate(counts)]
    results = []
    for how in ({}, {"gpu_mode": "dp", "devices": 2}):
        model = Detects(KINDS["two tensors"])
        loop = cpu_loop(
            model, DataLoader(data, batch_size=4, collate_fn=boxes), optim.SGD(model.parameters(), lr=0.01), None, **how
        )
        loop.fit(num_epochs=1)
        results.append(model.net.weight)
    assert torch.equal(*results)


class OfTwo:
    """Batches of two loaders, the second of which has more samples in each batch."""

    def __init__(self, size: int, two_views: bool) -> None:
        self.size, self.two_views = size, two_views

    def __iter__(self) -> Iterator[Any]:
        for begin in range(0, N - 1, self.size):  # the last batch may have two samples, as many as columns
            x, y, u = X[begin : N - 1][: self.size], Y[begin : N - 1, 0][: self.size], X[:7]
            yield {"a": [x, y], "b": [u, 0.9 * u] if self.two_views else [u, u[:, 0].long()]}

    def __len__(self) -> int:
        return -(-(N - 1) // self.size)


@pytest.mark.filterwarnings(NOT_DIVIDED)
@pytest.mark.parametrize(("size", "two_views"), [(5, True), (5, False), (2, False)])
def test_columns_of_a_second_loader_are_not_divided_as_samples(size: int, two_views: bool) -> None:
    class OfBoth(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            (x, y), (first, second) = batch_data["a"], batch_data["b"]
            return (self(x)[:, 0] - y).square().mean() + (self(first) * second.double().mean()).square().mean()

    results = []
    for how in ({}, {"gpu_mode": "dp", "devices": 2}):
        model = OfBoth(KINDS["two tensors"])
        loop = cpu_loop(model, OfTwo(size, two_views), optim.SGD(model.parameters(), lr=0.01), None, **how)
        loop.fit(num_epochs=1)
        results.append(model.net.weight)
    assert torch.equal(*results)
