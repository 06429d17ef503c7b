"""Parameters of callbacks, states of optimizers: warnings name those that differ between ranks; rank 0's are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TTBasicModel
from trainloop.distributed import all_reduce, get_rank, get_world_size

pytestmark = pytest.mark.long


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        self.seen = self.body(x)
        return self.seen


class Probe(AbstractCallback):
    """Trains a layer on the outputs of the last batch."""

    def __init__(self, averages: bool) -> None:
        super().__init__("probe")
        torch.manual_seed(1)
        self.averages = averages
        self.head, self.temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(()))

    def on_batch_end(self) -> None:
        parameters = [*self.head.parameters(), self.temperature]
        loss = (self.head(self.train_loop_obj.model.seen.detach()) / self.temperature).square().mean()
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.data -= 0.1 * (all_reduce(gradient) if self.averages else gradient)


class OwnProbe(Probe):
    """Has a state on each rank, which a resumed run loads."""

    def rank_state_dict(self) -> dict[str, Any]:
        return self.head.state_dict()


class Divided(optim.SGD):
    """Each rank has the momenta of some of the parameters, steps these, and sends them to the others, as in Muon."""

    divides = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for i, p in enumerate(self.param_groups[0]["params"]):
            owner = i % get_world_size() if self.divides else get_rank()
            if owner == get_rank():
                state = self.state[p]
                state["momentum"] = p.grad + 0.9 * state.get("momentum", 0)
                p.sub_(state["momentum"], alpha=0.1)
            if self.divides:
                torch.distributed.broadcast(p, owner)


class Undivided(Divided):
    divides = False


def fit(probe: AbstractCallback, mode: str, optimizer: type[optim.Optimizer] = optim.SGD) -> None:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    model = Net()
    loop = cpu_loop(
        model,
        DataLoader(TensorDataset(x, x[:, :2]), 2),
        optimizer(model.parameters(), lr=0.1),
        nn.MSELoss(),
        gpu_mode=mode,
        devices=2,
    )
    loop.fit(2, callbacks=[probe])


def test_parameters_that_differ_are_warned_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    message = "the callbacks' parameters probe.head.weight, probe.head.bias, probe.temperature differ between ranks"
    for mode in ("ddp", "fsdp"):
        fit(Probe(averages=False), mode)
        assert capfd.readouterr().err.count(message) == 1


@pytest.mark.parametrize("probe", [Probe(averages=True), OwnProbe(averages=False)], ids=["averaged", "own"])
def test_parameters_that_are_equal_or_meant_to_differ_are_not_warned_of(
    probe: Probe, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(probe, "ddp")
    assert "the callbacks' parameters" not in capfd.readouterr().err


def test_states_of_an_optimizer_that_differ_are_warned_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    message = "the optimizer's states of body.weight (Divided), body.bias (Divided) differ between ranks"
    for optimizer, times in ((Divided, 1), (Undivided, 0)):
        fit(AbstractCallback("none"), "ddp", optimizer)
        warned = capfd.readouterr().err
        assert warned.count(message) == times
        assert warned.count("the optimizer's states of") == times
