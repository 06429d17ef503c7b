"""Batches of a step whose losses differ in kind, as with several tasks: each mode equals a hand-written mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.sharded_models import FSDP
from torch import Tensor, nn, optim
from torch.nn import functional

from trainloop import MultiLoss, TrainLoop, TTModel

DRAWS = torch.Generator().manual_seed(1)
X = torch.randn(36, 5, generator=DRAWS, dtype=torch.float64)
Y = torch.randint(4, (36,), generator=DRAWS)
TASKS = {"class loss first": "crcrcr", "class loss second": "rcrcrc", "tail": "crr"}
KINDS = ["one loss", "ignored targets", "zero for the missing loss"]


class Batches:
    """A batch of 5 or 6 rows for each task."""

    def __init__(self, tasks: str) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i, task in enumerate(self.tasks):
            rows = slice(5 * i, 5 * i + 5 + i % 2)
            yield {"x": X[rows], "y": Y[rows], "task": task}


class TwoTasks(TTModel):
    modules_only = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.classes, self.values = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 5)
        self.double()
        self.kind = kind
        self.criterion = nn.CrossEntropyLoss(ignore_index=0 if kind == "ignored targets" else -100)

    def losses(self, batch: dict[str, Any]) -> tuple[Tensor, int, Tensor]:
        """Return the batch's loss, over how many units it is a mean, and a zero that all parameters reach."""
        hidden = torch.tanh(self.body(batch["x"]))
        scores, values = self.classes(hidden), self.values(hidden)
        zero = 0 * (scores.sum() + values.sum())
        if batch["task"] == "r":
            return functional.mse_loss(values + zero, batch["x"]), len(batch["x"]), zero
        ignored = self.criterion.ignore_index
        units = int((batch["y"] != ignored).sum())
        if not self.modules_only:
            return functional.cross_entropy(scores + zero, batch["y"], ignore_index=ignored), units, zero
        return self.criterion(scores + zero, batch["y"]), units, zero

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        loss, _, zero = self.losses(batch_data)
        if self.kind != "zero for the missing loss":
            return loss
        return MultiLoss({"c": loss, "r": zero} if batch_data["task"] == "c" else {"c": zero, "r": loss})

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        return self.body(batch_data["x"]), None, {}


def by_hand(kind: str, tasks: str, per_step: int) -> TwoTasks:
    model = TwoTasks(kind)
    sgd = optim.SGD(model.parameters(), 0.05)
    batches = list(Batches(tasks))
    for _ in range(2):
        for i in range(0, len(batches), per_step):
            parts = [model.losses(batch)[:2] for batch in batches[i : i + per_step]]
            # A zero for a missing class loss has no targets; a zero for the other loss is a mean over samples.
            units = [units for _, units in parts]
            classes = [n for n, batch in zip(units, batches[i:], strict=False) if batch["task"] == "c"]
            separate = kind == "zero for the missing loss"
            wholes = {"c": sum(classes if separate else units), "r": sum(units)}
            step = [loss * n / wholes[batch["task"]] for (loss, n), batch in zip(parts, batches[i:], strict=False)]
            sgd.zero_grad()
            sum(step[1:], step[0]).backward()
            sgd.step()
    return model


def by_loop(kind: str, tasks: str, **options: Any) -> tuple[TwoTasks, TrainLoop]:
    model = TwoTasks(kind)
    accumulation = options.pop("grad_accumulation", 1)
    loader: Any = Batches(tasks)
    sgd = optim.SGD(model.parameters(), 0.05)
    loop = cpu_loop(model, loader, sgd, None, validation_loader=loader, timeout=60, **options)
    loop.fit(num_epochs=2, grad_accumulation=accumulation)
    return model, loop


def check_equal(model: TwoTasks, expected: TwoTasks) -> None:
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", TASKS)
def test_micro_batches_of_one_process_weigh_what_their_losses_count(kind: str, order: str) -> None:
    model, _ = by_loop(kind, TASKS[order], grad_accumulation=2)
    check_equal(model, by_hand(kind, TASKS[order], 2))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", TASKS)
@pytest.mark.parametrize("mode", ["ddp", FSDP])
def test_ranks_with_other_losses_step_as_one_process(kind: str, order: str, mode: str) -> None:
    model, loop = by_loop(kind, TASKS[order], gpu_mode=mode, devices=2)
    check_equal(model, by_hand(kind, TASKS[order], 2))
    _, alone = by_loop(kind, TASKS[order], grad_accumulation=2)
    for name in alone.history:
        assert loop.history[name] == pytest.approx(alone.history[name], rel=1e-12), name


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["ddp", FSDP])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_first_class_loss_may_be_one_rank_s_in_a_later_step(
    kind: str, mode: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoTasks, "modules_only", True)
    tasks = "rrcr" if accumulation == 1 else "rrrrrcr"
    model, _ = by_loop(kind, tasks, gpu_mode=mode, devices=2, grad_accumulation=accumulation)
    check_equal(model, by_hand(kind, tasks, 2 * accumulation))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_other_losses_accumulate_as_one_process(kind: str) -> None:
    model, _ = by_loop(kind, "crcrcr", gpu_mode="ddp", devices=2, grad_accumulation=2)
    check_equal(model, by_hand(kind, "crcrcr", 4))


@pytest.mark.parametrize("first", ["c", "r"])
def test_the_loss_of_an_epoch_is_the_sum_of_the_parts_whichever_batch_comes_first(first: str) -> None:
    _, loop = by_loop("zero for the missing loss", first + "cr" * 2)
    for prefix in ("", "val_"):
        total, parts = loop.history[f"{prefix}loss"], (loop.history[f"{prefix}loss_c"], loop.history[f"{prefix}loss_r"])
        assert total == pytest.approx([sum(values) for values in zip(*parts)])
