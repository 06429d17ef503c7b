"""Batches on the GPU: pinned, copied ahead on a stream of their own, without the host waiting."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from trainloop.data import EvalFeed, TrainFeed

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # 'a prototype feature'
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_loader(**kwargs: Any) -> Any:
    return DataLoader(TensorDataset(torch.arange(4096.0).reshape(1024, 4), torch.arange(1024)), 64, **kwargs)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("kwargs", [{}, {"shuffle": True}, {"num_workers": 1, "pin_memory": True}], ids=str)
def test_batches_arrive_on_the_gpu_in_order(seed: int | None, kwargs: dict[str, Any]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(3):
        torch.manual_seed(0)
        expected = [step.batches[0] for step in TrainFeed(make_loader(**kwargs), seed=seed).steps(1)]
        torch.manual_seed(0)
        feed = TrainFeed(make_loader(**kwargs), seed=seed, device=device)
        given = []
        for step in feed.steps(1):
            assert all(tensor.device == device for tensor in step.batches[0])
            given.append([tensor * 1 for tensor in step.batches[0]])  # work on the current stream, as a step's would be
        assert all(
            torch.equal(a.cpu(), b)
            for got, want in zip(given, expected, strict=True)
            for a, b in zip(got, want, strict=True)
        )


@pytest.mark.parametrize("sampler", [None, [5, 3, -1] * 30], ids=["own", "a list"])
@pytest.mark.parametrize("subset", [False, True], ids=["all rows", "a subset"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_a_loader_that_pins_are_torch_s_and_pinned(shuffle: bool, subset: bool, sampler: Any) -> None:
    data = TensorDataset(torch.arange(4096.0).reshape(1024, 4), torch.arange(1024))
    dataset: Any = Subset(data, range(1000, 100, -1)) if subset else data
    order = {"shuffle": shuffle} if sampler is None else {"sampler": sampler}
    loader = DataLoader(dataset, 64, pin_memory=True, **order)
    torch.manual_seed(0)
    expected = list(loader)
    torch.manual_seed(0)
    found = [step.batches[0] for step in TrainFeed(loader, seed=None).steps(1)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(part.is_pinned() for batch in found for part in batch)


@pytest.mark.parametrize("mixed", [False, True], ids=["on the GPU", "partly on the GPU"])
def test_batches_that_are_on_the_gpu_are_used_as_they_are(mixed: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.arange(4096.0, device=device).reshape(64, 16, 4)
    batches = [(rows, torch.arange(16) if mixed else rows[:, 0]) for rows in x]
    with no_synchronisation():
        found = [step.batches[0] for step in TrainFeed(batches, seed=None, device=device).steps(1)]
    assert [rows.data_ptr() for rows, _ in found] == [rows.data_ptr() for rows in x]
    assert all(y.device == device for _, y in found)
    torch.testing.assert_close([y.cpu() for _, y in found], [y.cpu() for _, y in batches], rtol=0, atol=0)


class Pair:
    """A batch whose method takes a device only."""

    def __init__(self, items: Any) -> None:
        self.x, self.y = default_collate(items)
        self.where = "cpu"

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.x, self.y)[index]

    def to(self, device: torch.device) -> Pair:
        self.x, self.y, self.where = self.x.to(device), self.y.long().to(device=device), str(device)
        return self


@pytest.mark.parametrize("collate", [None, Pair], ids=["tensors", "object"])
def test_the_host_waits_for_nothing(collate: Any) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    feed = TrainFeed(make_loader(shuffle=True, collate_fn=collate), seed=1, device=device)
    list(feed.steps(1))
    total = torch.zeros((), device=device)
    with no_synchronisation():
        for step in feed.steps(1):
            total += step.batches[0][0].sum()
    assert total.item() == sum(range(4096))


def test_the_next_copy_is_under_way_while_a_step_runs() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    feed = TrainFeed(make_loader(), seed=1, device=device)
    steps = feed.steps(1)
    first = next(steps).batches[0][0]
    torch.cuda._sleep(500_000_000)  # the current stream is busy for some tenths of a second
    busy = torch.cuda.Event()
    busy.record()
    second = next(steps).batches[0][0]
    assert not busy.query()  # the second batch was handed over without waiting for the first step
    assert torch.equal(torch.cat([first, second]).cpu(), torch.arange(512.0).reshape(128, 4))


def test_shapes_of_all_kinds_and_batches_that_are_there_already() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    batches = [
        {"x": torch.ones(3), "there": torch.ones(3, device=device), "text": ["a", "b", "c"]},
        (torch.ones(2), None),
    ]
    (first, second) = [batch for _, batch, _ in EvalFeed(batches, device=device).batches()]
    assert first["x"].device == first["there"].device == second[0].device == device
    assert first["text"] == ["a", "b", "c"]
    assert second[1] is None


def test_epochs_and_evaluations_use_the_same_memory() -> None:
    """The allocator keeps freed memory for the stream that it was allocated on."""
    device = torch.device("cuda", torch.cuda.current_device())
    data = DataLoader(TensorDataset(torch.zeros(6, 1 << 20)), 1)  # 4 MiB a batch
    train, evaluation = TrainFeed(data, device=device), EvalFeed(data, device=device)
    reserved = []
    for _ in range(10):
        for step in train.steps(1):
            step.batches[0][0].sum().item()
        for _, (batch,), _ in evaluation.batches():
            batch.sum().item()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[9] == reserved[1]
