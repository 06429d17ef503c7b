"""Optimizers around others and averaged models, in two ranks: as in a hand-written loop, and back where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from tests.kit.ranks import run_own_ranks
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.callbacks import ModelCheckpoint


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x.view(-1, 2, 4))[0][:, -1])


class Lookahead(optim.Optimizer):
    """Shares the groups and the state of the optimizer it is around."""

    def __init__(self, inner: optim.Optimizer, alpha: float = 0.5, k: int = 2) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.alpha, self.k, self.calls = inner, alpha, k, 0
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.calls += 1
        if self.calls % self.k == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, self.alpha)
                p.copy_(slow)


class Averages(AbstractCallback):
    def __init__(self, averaged: AveragedModel) -> None:
        super().__init__("averages")
        self.held = {"ema": [averaged]}

    def on_after_optimizer_step(self) -> None:
        self.held["ema"][0].update_parameters(self.train_loop_obj.model)


@pytest.mark.long
def test_lookahead_and_averages_in_ranks_equal_the_hand_written_loop() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(22, 8).double(), torch.randint(3, (22,)))  # the last batch is short, and uneven
    start = Net().double().state_dict()

    def made() -> tuple[Net, Lookahead, AveragedModel]:
        model = Net().double()
        model.load_state_dict(start)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return model, Lookahead(optim.AdamW(model.parameters(), lr=0.01)), averaged

    model, optimizer, averaged = made()
    reference, by_hand, by_hand_averaged = made()
    inner, slow = optimizer.inner, optimizer.slow
    loop = cpu_loop(model, DataLoader(data, 4), optimizer, gpu_mode="ddp", devices=2)
    loop.fit(num_epochs=1, callbacks=[Averages(averaged)])
    loop.fit(num_epochs=1, callbacks=[Averages(averaged)])
    for _ in range(2):
        for x, y in DataLoader(data, 8):
            by_hand.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            by_hand.step()
            by_hand_averaged.update_parameters(reference)

    def close(mine: nn.Module, theirs: nn.Module) -> None:
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=1e-9)

    close(model, reference)
    close(averaged, by_hand_averaged)
    assert averaged.n_averaged == by_hand_averaged.n_averaged == 6
    assert (loop.optimizer is optimizer, optimizer.inner is inner, optimizer.slow is slow) == (True, True, True)
    assert optimizer.calls == 6
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(slow[mine], by_hand.slow[theirs], rtol=0, atol=1e-9)
        torch.testing.assert_close(
            inner.state[mine]["exp_avg_sq"], by_hand.inner.state[theirs]["exp_avg_sq"], rtol=0, atol=1e-9
        )


class Counting(optim.Optimizer):
    """Counts its steps in an entry of its state that belongs to no parameter, as some optimizers do."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.state["k"] = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["sum"] = state["sum"].add(p.grad) if "sum" in state else p.grad.clone()
            p.sub_(state["sum"], alpha=self.param_groups[0]["lr"] / (1 + self.state["k"].item()))
        self.state["k"] += 1


@pytest.mark.long
@pytest.mark.parametrize("mode", ["single", "fsdp"])
def test_state_that_belongs_to_no_parameter_is_used_comes_back_and_is_resumed(mode: Any, tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(22, 8, generator=torch.Generator().manual_seed(0)).double(), torch.arange(22) % 3)
    ranks = 2 if mode == "fsdp" else 1

    def made() -> TrainLoop[Net]:
        torch.manual_seed(0)
        model = Net().double()
        return cpu_loop(model, DataLoader(data, 8 // ranks), Counting(model.parameters()), gpu_mode=mode, devices=ranks)

    loop, reference = made(), made()
    loop.fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path)])
    loop.fit(num_epochs=1)
    for _ in range(2):
        for x, y in DataLoader(data, 8):
            reference.optimizer.zero_grad()
            F.cross_entropy(reference.model(x), y).backward()
            reference.optimizer.step()
    resumed = made()
    resumed.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    for one in (loop, resumed):
        assert one.optimizer.state["k"] == 6
        torch.testing.assert_close(list(one.model.parameters()), list(reference.model.parameters()), rtol=0, atol=1e-9)
    if mode == "single":
        assert "memory of a training step" in str(loop.summary())
        assert loop.find_batch_size().suggestion is not None


def train_with_divided_state(folder: str) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(22, 8).double(), torch.randint(3, (22,)))  # the last batch is short, and uneven
    start = Net().double().state_dict()

    def trained(epochs: int, resume_from: str | None = None) -> dict[str, Tensor]:
        model = Net().double()
        model.load_state_dict(start)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=0.01)
        loop = TrainLoop(
            model,
            DataLoader(data, 4),
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            gpu_mode="ddp",
            progress_bar=False,
        )
        loop.fit(epochs, callbacks=[ModelCheckpoint(folder)], resume_from=resume_from)
        return {name: value.clone() for name, value in model.state_dict().items()}

    by_hand = Net().double()
    by_hand.load_state_dict(start)
    adam = optim.Adam(by_hand.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in DataLoader(data, 8):
            adam.zero_grad()
            F.cross_entropy(by_hand(x), y).backward()
            adam.step()
    trained(1)
    return [by_hand.state_dict(), trained(2, "last"), torch.load(newest(folder), weights_only=True)["model"]]


def newest(folder: str) -> Path:
    return max(Path(folder).glob("*.pt"))


@pytest.mark.long
def test_a_run_with_an_optimizer_that_divides_its_state_over_ranks_resumes(tmp_path: Path) -> None:
    for by_hand, resumed, saved in run_own_ranks(
        train_with_divided_state, 2, str(tmp_path / "checkpoints"), folder=tmp_path
    ):
        for name, value in by_hand.items():
            torch.testing.assert_close(resumed[name], value, rtol=1e-9, atol=1e-9)
            assert torch.equal(saved[name], resumed[name])
