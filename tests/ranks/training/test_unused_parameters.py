"""Parameters that some steps, ranks or rows don't use: a gradient that no rank has is None, and Adam passes over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import reference
from kit.loops import cpu_loop
from kit.ranks import run_own_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TTBasicModel, distributed

GLOBAL_BATCH = 8


class Branches(TTBasicModel):
    """``how``: extra layers used in some steps, for some rows, or where a batch as a whole says so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first, self.second, self.third = (nn.Linear(4, 3).double() for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.how == "steps":
            y = y + (self.second(x) if self.calls % 2 else 0) + (self.third(x) if self.calls % 3 == 0 else 0)
        elif self.how == "rows":
            rows = (x[:, 0] > 1).nonzero().flatten()
            if len(rows):
                y = y.index_add(0, rows, self.second(x[rows]))
        elif x.sum() > 0:
            y = y + self.second(x)
        return y

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        self.calls += 1
        return criterion(self(batch_data[0]), batch_data[1])


class Without(AbstractCallback):
    """Which parameters have no gradient in each step."""

    def __init__(self) -> None:
        super().__init__("without")
        self.found: list[list[str]] = []

    def on_after_gradient_update(self, optimizer_idx: int) -> None:
        self.found.append([name for name, p in self.train_loop_obj.model.named_parameters() if p.grad is None])


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)  # the last global batch is short
    return TensorDataset(x, torch.randint(0, 3, (60,), generator=generator))


def train(how: str, mode: str) -> tuple[dict[str, Tensor], list[list[str]]]:
    model, without = Branches(how), Without()
    tl = cpu_loop(
        model,
        DataLoader(rows(), GLOBAL_BATCH // distributed.get_world_size()),
        torch.optim.Adam(model.parameters(), 0.01),
        gpu_mode=mode,
    )
    tl.fit(num_epochs=2, callbacks=[without], ddp_model_args={"find_unused_parameters": True})
    return model.state_dict(), without.found


def in_ranks() -> dict[str, Any]:
    return {how: train(how, "ddp") for how in ("steps", "rows", "batches")}


def by_hand_in_parts(how: str) -> Branches:
    """One process that gives each rank's part of a batch to the model by itself."""
    model = Branches(how)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(2):
        for x, y in DataLoader(rows(), GLOBAL_BATCH):
            for rank in range(2):
                part = slice(rank, None, 2)
                loss = nn.functional.cross_entropy(model(x[part]), y[part], reduction="sum") / len(x)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_a_gradient_that_no_rank_has_is_none(tmp_path: Path) -> None:
    for facts in run_own_ranks(in_ranks, 2, folder=tmp_path):
        for how in ("steps", "rows"):
            expected, without = train(how, "single")
            weights, theirs = facts[how]
            assert theirs == without
            assert any(without)
            assert reference.largest_difference(weights, expected) < 1e-9, how
        # What a batch as a whole decides, each rank decides for its own part of it.
        assert reference.largest_difference(facts["batches"][0], by_hand_in_parts("batches")) < 1e-9


def optional_in_the_tail() -> TensorDataset:
    """One rank has the last row, the only one of the first and last global batches that uses ``second``."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(2 * GLOBAL_BATCH + 1, 4, generator=generator, dtype=torch.float64)
    x[GLOBAL_BATCH : GLOBAL_BATCH + 2, 0] = x[-1, 0] = 2.0
    return TensorDataset(x, torch.randint(0, 3, (len(x),), generator=generator))


class WithSparse(Branches):
    """An embedding with a sparse gradient, too, which DDP needs in each step."""

    def __init__(self) -> None:
        super().__init__("rows")
        self.table = nn.Embedding(3, 3, sparse=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table((10 * x[:, 1]).long() % 3)


class TwoLosses(WithSparse):
    """Losses of which each has its own weight, so that a step of several micro-batches has a backward for each."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> MultiLoss:
        x, y = batch_data
        return MultiLoss({"class": criterion(self(x), y), "size": self.third(x).square().mean()})


def train_with_two_losses(mode: str) -> dict[str, Tensor]:
    model = TwoLosses()
    tl = cpu_loop(
        model,
        DataLoader(optional_in_the_tail(), GLOBAL_BATCH // 2 // distributed.get_world_size()),
        criterion=nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3]).double()),
        gpu_mode=mode,
    )
    tl.fit(num_epochs=2, grad_accumulation=2, ddp_model_args={"find_unused_parameters": True})
    return model.state_dict()


def train_with_a_tail(mode: str, sparse: bool = False, **ddp: Any) -> tuple[dict[str, Tensor], list[list[str]]]:
    model, without = WithSparse() if sparse else Branches("rows"), Without()
    tl = cpu_loop(
        model,
        DataLoader(optional_in_the_tail(), GLOBAL_BATCH // distributed.get_world_size()),
        torch.optim.SGD(model.parameters(), 0.1, momentum=0 if sparse else 0.9),
        gpu_mode=mode,
    )
    tl.fit(num_epochs=3, callbacks=[without], ddp_model_args={"find_unused_parameters": True, **ddp})
    return model.state_dict(), without.found


TAILS: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"sparse": True}]


def tails_in_ranks() -> list[Any]:
    return [train_with_a_tail("ddp", **options) for options in TAILS]


def test_losses_with_separate_backward_passes(tmp_path: Path) -> None:
    expected = train_with_two_losses("single")
    for weights in run_own_ranks(train_with_two_losses, 2, "ddp", folder=tmp_path):
        assert reference.largest_difference(weights, expected) < 1e-9


def test_a_parameter_may_be_unused_after_a_step_that_only_some_ranks_have(tmp_path: Path) -> None:
    for facts in run_own_ranks(tails_in_ranks, 2, folder=tmp_path):
        for options, (weights, without) in zip(TAILS, facts, strict=True):
            expected, theirs = train_with_a_tail("single", sparse="sparse" in options)
            assert without == theirs
            assert "second.bias" in without[0]
            assert "second.bias" not in without[2]
            assert reference.largest_difference(weights, expected) < 1e-9, options


OTHER = Branches("steps")


class ReadsAnother(Branches):
    """Computes the loss of a model that is not trained."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        yield "all", criterion(OTHER(batch_data[0]), batch_data[1])


@pytest.mark.long
def test_a_training_that_reaches_no_parameter_is_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    model = ReadsAnother("steps")
    optimizer = MultiOptimizer({"all": torch.optim.SGD(model.parameters(), lr=0.1)})
    before = model.first.weight.detach().clone()
    loop = cpu_loop(model, DataLoader(rows(), 4), optimizer, gpu_mode="ddp", devices=2)
    loop.fit(num_epochs=2)
    assert torch.equal(model.first.weight, before)
    assert capfd.readouterr().err.count("No trained parameter got a gradient in this epoch") == 1
