"""Batches that lack some losses of a ``MultiLoss``, or have other ones: every mode equals one mean over the step.

A loss with a weight of its own is the mean over the units of the batches that have it. Any other loss is a mean over
all samples, so that it counts as zero for a batch that lacks it. A loss of zero is no mean over samples if other
batches' losses have units: ``get_loss`` returns it if all targets are ignored.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from trainloop import MultiLoss, TTModel
from trainloop.errors import ConfigurationError, WorkerFailedError
from trainloop.optim import MultiOptimizer

EPOCHS = 2
Losses = dict[str, tuple[Tensor, int | None]]


def _losses(kind: str, out: Tensor, y: Tensor, task: int) -> Losses:
    """Losses of a batch, each with the number of its units; ``None`` for a mean over samples."""
    square, size, units = (out**2).mean(), 0.3 * out.abs().mean(), int((y != -100).sum())
    classes = functional.cross_entropy(out, y)
    if kind == "a class loss in some batches":
        return {"square": (square, None), **({"classes": (classes, units)} if task else {})}
    if kind == "one loss for each task":
        return {"classes": (classes, units)} if task else {"square": (square, None)}
    if kind == "zero without targets":
        return {"square": (square, None), "classes": (classes, units) if task else (0 * out.sum(), None)}
    if kind == "means only":
        return {"square": (square, None), **({} if task else {"size": (size, None)})}
    assert kind == "three tasks"
    if task == 0:
        return {"size": (size, None)}
    if task == 1:
        return {"square": (square, None), "classes": (classes, units)}
    return {"sharper": (functional.cross_entropy(2 * out, y), units), "size": (size, None)}


KINDS = ("a class loss in some batches", "one loss for each task", "zero without targets", "means only", "three tasks")


class Tasks(TTModel):
    def __init__(self, kind: str, mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.mixed = kind, mixed
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y, task = batch_data
        losses = {name: loss for name, (loss, _) in _losses(self.kind, self.net(x), y, int(task[0])).items()}
        return losses["square"] if self.mixed and list(losses) == ["square"] else MultiLoss(losses)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        raise NotImplementedError


def _data(length: int, tasks: int) -> TensorDataset:
    """Samples of which a third is ignored; the first batches have task 0 only, so that other losses appear later."""
    draws = torch.Generator(device="cpu").manual_seed(length)
    x = torch.randn(length, 4, dtype=torch.float64, generator=draws, device="cpu")
    y = torch.randint(3, (length,), generator=draws, device="cpu")
    y[torch.arange(length, device="cpu") % 3 == 1] = -100
    task = torch.randint(tasks, (length,), generator=draws, device="cpu")
    task[: length // 3] = 0
    return TensorDataset(x, y, task)


def _steps(length: int, size: int, ranks: int, accumulation: int) -> list[list[range]]:
    """The batches of each step of an epoch, by the indices of their samples."""
    of_ranks = [range(length)[rank::ranks] for rank in range(ranks)]
    batches = [[own[i : i + size] for i in range(0, len(own), size)] for own in of_ranks]
    firsts = range(0, max(map(len, batches)), accumulation)
    return [[batch for own in batches for batch in own[first : first + accumulation]] for first in firsts]


def _by_hand(kind: str, data: TensorDataset, steps: list[list[range]]) -> list[Tensor]:
    """Train on the same batches in one process, with one mean for each loss of a step."""
    model = Tasks(kind)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    has_units: set[str] = set()
    for batches in steps * EPOCHS:
        step = [data[list(batch)] for batch in batches]
        losses = [_losses(kind, model.net(x), y, int(task[0])) for x, y, task in step]
        has_units |= {name for each in losses for name, (_, units) in each.items() if units is not None}
        total: Any = 0.0
        for name in {name for each in losses for name in each}:
            having = [
                (each[name][0], (len(x) if each[name][0] else 0) if each[name][1] is None else each[name][1])
                for each, (x, _, _) in zip(losses, step, strict=True)
                if name in each
            ]
            whole = sum(units for _, units in having) if name in has_units else sum(len(x) for x, _, _ in step)
            total = total + sum(loss * units for loss, units in having) / max(whole, 1)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return list(model.parameters())


def _trained(model: Tasks, data: TensorDataset, size: int, accumulation: int, **options: Any) -> list[Tensor]:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loop = cpu_loop(model, DataLoader(data, size), optimizer, None, timeout=60, **options)
    loop.fit(num_epochs=EPOCHS, grad_accumulation=accumulation)
    return list(model.parameters())


@pytest.mark.long(every=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_process_equals_the_hand_written_loop(kind: str, accumulation: int) -> None:
    data = _data(46, tasks=3 if kind == "three tasks" else 2)
    trained = _trained(Tasks(kind), data, 4, accumulation)
    torch.testing.assert_close(trained, _by_hand(kind, data, _steps(46, 4, 1, accumulation)), rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "mode, ranks, accumulation, length",
    [("ddp", 2, 1, 48), ("ddp", 3, 2, 50), ("fsdp", 2, 1, 46), ("fsdp", 2, 2, 45), ("ddp", 2, 3, 46)],
)
def test_ranks_equal_the_hand_written_loop(kind: str, mode: Any, ranks: int, accumulation: int, length: int) -> None:
    data = _data(length, tasks=3 if kind == "three tasks" else 2)
    trained = _trained(Tasks(kind), data, 4, accumulation, gpu_mode=mode, devices=ranks)
    expected = _by_hand(kind, data, _steps(length, 4, ranks, accumulation))
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-12)


@pytest.mark.long(every=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation, length", [(1, 46), (3, 45)])
def test_replicas_equal_the_hand_written_loop(kind: str, accumulation: int, length: int) -> None:
    data = _data(length, tasks=3 if kind == "three tasks" else 2)
    trained = _trained(Tasks(kind), data, 4, accumulation, gpu_mode="dp", devices=2)
    steps = [[(batch, (len(batch) + 1) // 2) for batch in step] for step in _steps(length, 4, 1, accumulation)]
    halves = [[half for batch, n in step for half in (batch[:n], batch[n:]) if half] for step in steps]
    torch.testing.assert_close(trained, _by_hand(kind, data, halves), rtol=0, atol=1e-12)


def test_losses_of_another_form_for_one_replica_name_the_way() -> None:
    model = Tasks("one loss for each task", mixed=True)
    with pytest.raises(ConfigurationError, match=r"a MultiLoss for the samples of one replica.*Return a MultiLoss"):
        _trained(model, _data(48, tasks=2), 4, 1, gpu_mode="dp", devices=2)


@pytest.mark.long
def test_a_multi_loss_after_single_losses_names_the_way() -> None:
    model = Tasks("one loss for each task", mixed=True)
    with pytest.raises(WorkerFailedError, match=r"Return a MultiLoss for every batch"):
        _trained(model, _data(48, tasks=2), 4, 1, gpu_mode="ddp", devices=2)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_function_of_classes_that_only_one_rank_calls_later(mode: Any) -> None:
    class Single(Tasks):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return super().get_loss(batch_data, criterion, device).total()

    data = _data(48, tasks=2)
    model = Single("one loss for each task")
    trained = _trained(model, data, 4, 1, gpu_mode=mode, devices=2)
    reference = Single("one loss for each task")
    optimizer = optim.SGD(reference.parameters(), lr=0.1)
    for first in list(range(0, 48, 8)) * EPOCHS:
        total: Any = 0.0
        whole = 0
        for x, y, task in (data[list(range(first + rank, first + 8, 2))] for rank in range(2)):
            ((loss, units),) = _losses("one loss for each task", reference.net(x), y, int(task[0])).values()
            total, whole = total + loss * (units or len(x)), whole + (units or len(x))
        optimizer.zero_grad()
        (total / whole).backward()
        optimizer.step()
    torch.testing.assert_close(trained, list(reference.parameters()), rtol=0, atol=1e-12)


class IgnoresTargets(Tasks):
    """Returns zero instead of 0 / 0 for a batch, or for the part of one, whose targets are all ignored."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        out = self.net(x)
        return functional.cross_entropy(out, y) if (y != -100).any() else 0 * out.sum()


@pytest.mark.long(every=2)
@pytest.mark.parametrize(
    "mode, devices, accumulation",
    [
        ("single", 1, 1),
        ("single", 1, 3),
        ("dp", 2, 1),
        ("dp", 3, 2),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [("ddp", 2, 1), ("ddp", 3, 2), ("fsdp", 2, 2)]),
    ],
)
@pytest.mark.parametrize("ignored_first", [True, False])
def test_a_loss_of_zero_without_targets_has_no_units(
    mode: Any, devices: int, accumulation: int, ignored_first: bool
) -> None:
    """Steps and the history have the mean over the targets of all batches."""
    x, y, _ = _data(46, tasks=2).tensors
    y = torch.where(torch.arange(46, device="cpu") % 5 > (3 if ignored_first else 0), y, -100)
    y[:5] = -100 if ignored_first else 1
    data, model, reference = TensorDataset(x, y), IgnoresTargets(""), IgnoresTargets("")
    in_ranks = mode in ("ddp", "fsdp")
    options = {} if mode == "single" else {"devices": devices}
    loop = cpu_loop(
        model,
        DataLoader(data, 2),
        criterion=None,
        validation_loader=DataLoader(data, 3),
        gpu_mode=mode,
        timeout=60,
        **options,
    )
    loop.fit(num_epochs=EPOCHS, grad_accumulation=accumulation)
    optimizer = optim.SGD(reference.parameters(), lr=0.1)
    expected: dict[str, list[float]] = {"loss": [], "val_loss": []}
    size = 2 * accumulation * (devices if in_ranks else 1)
    for _ in range(EPOCHS):
        losses = []
        for xs, ys in zip(x.split(size), y.split(size), strict=True):
            units = max(int((ys != -100).sum()), 1)
            loss = functional.cross_entropy(reference.net(xs), ys, reduction="sum")
            optimizer.zero_grad()
            (loss / units).backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        expected["loss"].append(sum(losses) / int((y != -100).sum()))
        expected["val_loss"].append(float(functional.cross_entropy(reference.net(x).detach(), y)))
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()], rtol=0, atol=1e-12)
    for name, values in expected.items():
        assert loop.history[name] == pytest.approx(values, rel=1e-12)


class TwoOptimizers(Tasks):
    """Losses of two optimizers, of which a batch may have those of one only."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))  # not sharded in fsdp

    def losses(self, x: Tensor, y: Tensor, task: int) -> Losses:
        out = self.net(x) * self.scale
        units = int((y != -100).sum()) if self.kind == "own weights" else None
        classes = functional.cross_entropy(out, y, reduction="sum") / 4 if units is None else None
        body: Losses = {"body": ((out**2).mean(), None)}
        head: Losses = {"head": (functional.cross_entropy(out, y) if classes is None else classes, units)}
        return body if task == 0 else {**body, **head} if task == 1 else head

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y, task = batch_data
        return MultiLoss({name: loss for name, (loss, _) in self.losses(x, y, int(task[0])).items()})

    def optimizers(self) -> dict[str, optim.Optimizer]:
        # Their decay changes parameters whose gradients are zeros, rather than None.
        parts = {"body": [*self.net[0].parameters(), self.scale], "head": [*self.net[2].parameters()]}
        return {name: optim.AdamW(own, lr=0.05, weight_decay=0.1) for name, own in parts.items()}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["own weights", "means"])
@pytest.mark.parametrize("mode, accumulation, length", [("ddp", 1, 48), ("fsdp", 1, 48), ("fsdp", 2, 45)])
def test_batches_that_lack_the_losses_of_an_optimizer(kind: str, mode: Any, accumulation: int, length: int) -> None:
    data, model, reference = _data(length, tasks=3), TwoOptimizers(kind), TwoOptimizers(kind)
    loop = cpu_loop(
        model, DataLoader(data, 4), MultiOptimizer(model.optimizers()), None, gpu_mode=mode, devices=2, timeout=60
    )
    loop.fit(num_epochs=EPOCHS, grad_accumulation=accumulation)
    optimizers = reference.optimizers()
    for first in list(range(0, length, 8 * accumulation)) * EPOCHS:
        of_ranks = [range(length)[first + rank : first + 8 * accumulation : 2] for rank in range(2)]
        step = [data[list(own[i : i + 4])] for own in of_ranks for i in range(0, len(own), 4)]
        losses = [reference.losses(x, y, int(task[0])) for x, y, task in step]
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            having = [
                (each[name][0], len(x) if each[name][1] is None else each[name][1])
                for each, (x, _, _) in zip(losses, step, strict=True)
                if name in each
            ]
            own_units = kind == "own weights" and name == "head"
            whole = sum(units for _, units in having) if own_units else sum(len(x) for x, _, _ in step)
            if having:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                total = torch.stack([loss * units for loss, units in having]).sum() / whole
                total.backward(inputs=parameters, retain_graph=True)
        for optimizer in optimizers.values():
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=0, atol=1e-9)


class Normalized(Tasks):
    """Has buffers that every forward pass in training changes, and losses with weights of their own."""

    def __init__(self) -> None:
        super().__init__("")
        nn.utils.parametrizations.spectral_norm(self.net[0])

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y, _ = batch_data
        out = self.net(x)
        return MultiLoss({"classes": functional.cross_entropy(out, y), "square": out.square().mean()})


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [1, 2])
def test_buffers_and_the_loss_of_each_step_are_those_of_one_process(accumulation: int) -> None:
    """Also in the first step of an epoch after a step in which some ranks had no batch."""
    data, one, model = _data(19, tasks=2), Normalized(), Normalized()
    loops = []
    for net, size, options in [(one, 9, {}), (model, 3, {"gpu_mode": "ddp", "devices": 3})]:
        loop: Any = cpu_loop(net, DataLoader(data, size), criterion=None, timeout=60, **options)
        loop.fit(num_epochs=3, grad_accumulation=accumulation)
        loops.append(loop)
    torch.testing.assert_close(model.state_dict(), one.state_dict(), rtol=0, atol=1e-12)
    steps, expected = (loop.history.steps("loss") for loop in loops)
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected), rtol=1e-12, atol=0)
