"""A run resumes with optimizers that contain others, also if their ``state_dict`` has a form of its own."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.small_loop import Raises
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.callbacks import LRScheduler, ModelCheckpoint
from trainloop.optim.states import saved_groups, with_group_settings


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Lookahead(optim.Optimizer):
    """Has the groups of the optimizer within it; its state is in two parts."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = optim.Adam(model.parameters(), 0.05)
        super().__init__(self.optimizer.param_groups, {})
        self.param_groups = self.optimizer.param_groups
        self.slow = [p.detach().clone() for p in model.parameters()]
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        slow = {str(i): value for i, value in enumerate(self.slow)}
        return {"slow": slow, "calls": self.calls, "base": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["base"])
        self.param_groups = self.optimizer.param_groups
        self.slow = [value.clone() for value in state_dict["slow"].values()]
        self.calls = state_dict["calls"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.calls += 1
        if self.calls % 2 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Chained(optim.Optimizer):
    """Steps several optimizers, whose groups are its own groups, so that one schedule sets all rates."""

    def __init__(self, model: nn.Module) -> None:
        matrices, vectors = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
        self.parts = [optim.SGD(matrices, 0.1, momentum=0.9), optim.Adam(vectors, 0.05)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._take_groups()

    def _take_groups(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


class ChainedWithState(Chained):
    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._take_groups()


class ChainedByName(Chained):
    """Has its optimizers by name, in an attribute of any class."""

    @property
    def parts(self) -> Any:
        return self._named.optimizers.values()

    @parts.setter
    def parts(self, parts: list[optim.Optimizer]) -> None:
        self._named = SimpleNamespace(optimizers=UserDict({"matrices": parts[0], "vectors": parts[1]}))


class Counted(optim.SGD):
    """Has an entry in its state that belongs to no parameter, and contains tensors, as in TRAC."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), 0.1)
        self.state["sums"] = {"squares": torch.zeros(2)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        sums = self.state["sums"]["squares"]
        for p in self.param_groups[0]["params"]:
            sums += p.grad.square().sum()
            p.sub_(p.grad / sums[0].sqrt(), alpha=0.1)


def fit(made: Callable[[nn.Module], optim.Optimizer], *callbacks: AbstractCallback, **arguments: Any) -> list[Tensor]:
    x, y = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3
    model = Net()
    loop = TrainLoop(
        model,
        DataLoader(TensorDataset(x, y), 4),
        optimizer=made(model),
        criterion=nn.CrossEntropyLoss(),
        progress_bar=False,
    )
    rates = LRScheduler(StepLR, interval="step", step_size=2, gamma=0.5)
    loop.fit(num_epochs=2, callbacks=[rates, *callbacks], **arguments)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("made", [Lookahead, Chained, ChainedWithState, ChainedByName, Counted])
@pytest.mark.parametrize("step", [3, 6])
def test_a_run_resumes_to_the_bit(made: Callable[[nn.Module], optim.Optimizer], step: int, tmp_path: Path) -> None:
    uninterrupted = fit(made)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(
            made,
            ModelCheckpoint(tmp_path, every_n_steps=1),
            Raises(RuntimeError("stopped"), "on_batch_begin", step=step),
        )
    resumed = fit(made, ModelCheckpoint(tmp_path, every_n_steps=1), resume_from="last")
    torch.testing.assert_close(list(resumed), list(uninterrupted), rtol=0, atol=0)


def test_settings_of_groups_are_replaced_wherever_the_groups_are() -> None:
    own = {"parts": [{"param_groups": [{"lr": 1.0, "params": [i]}]} for i in range(2)], "calls": 3}
    saved = {"type": "Chained", "state": own, "inner": {"parts.0": own["parts"][0], "parts.1": own["parts"][1]}}
    changed = with_group_settings(saved, [{"lr": 0.1}, {"lr": 0.2}])
    assert saved_groups(changed) == [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    assert changed["inner"]["parts.1"]["param_groups"] == [{"lr": 0.2, "params": [1]}]
    assert saved_groups(saved)[0]["lr"] == 1.0
    assert with_group_settings(saved, [{"lr": 0.1}]) == saved


class MasterWeights(optim.Optimizer):
    """Steps float32 copies of bf16 weights, and counts steps in a tensor of integers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.003})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                master = p.detach().float().clone()
                state.update(master=master, nested={"momentum": torch.zeros_like(master)}, n=torch.zeros(1).long())
            state["n"] += 1
            state["master"].sub_(0.003 * state["nested"]["momentum"].mul_(0.9).add_(p.grad.float()))
            p.copy_(state["master"])


def half_loop(dtype: torch.dtype = torch.bfloat16) -> TrainLoop:
    class Cast(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net().to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.to(dtype)).float()

    torch.manual_seed(1)
    model, data = Cast(), TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
    return cpu_loop(model, DataLoader(data, batch_size=8), MasterWeights(model.parameters()))


def test_a_state_keeps_its_dtypes_when_a_run_resumes(tmp_path: Path) -> None:
    whole = half_loop()
    whole.fit(num_epochs=3)
    half_loop().fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path)])
    resumed = half_loop()
    resumed.fit(num_epochs=3, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    for mine, theirs in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        own, other = whole.optimizer.state[mine], resumed.optimizer.state[theirs]
        assert (other["master"].dtype, other["n"].dtype) == (torch.float32, torch.int64)
        assert torch.equal(own["master"], other["master"])
        assert torch.equal(own["nested"]["momentum"], other["nested"]["momentum"])


def test_a_state_follows_a_model_of_another_dtype(tmp_path: Path) -> None:
    half_loop().fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path)])
    wider = half_loop(torch.float64)
    wider.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert {state["master"].dtype for state in wider.optimizer.state.values()} == {torch.float64}
