"""Gradients that a hook changes with a graph, without torch.no_grad(): in ranks, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.sharded_models import FSDP
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTBasicModel

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, x: Any) -> Any:
        return self.net(x)


class Decays(AbstractCallback):
    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        for p in self.train_loop_obj.model.parameters():
            p.grad.add_(p, alpha=0.1)  # type: ignore[union-attr]
            p.grad = 0.5 * p.grad if p.ndim == 1 else p.grad  # type: ignore[operator]


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", ["single", "dp", "ddp", FSDP])
def test_a_hook_may_add_to_gradients_with_a_graph(mode: Any, accumulation: int) -> None:
    model, reference = Net(), Net()
    in_ranks, options = mode not in ("single", "dp"), {} if mode == "single" else {"devices": 2}
    loop = TrainLoop(
        model, DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), 3 if in_ranks else 6), gpu_mode=mode,
        optimizer=optim.SGD(model.parameters(), lr=0.1), criterion=nn.MSELoss(), accelerator="cpu",
        progress_bar=False, timeout=60, **options,
    )  # fmt: skip
    for _ in range(2):  # gradients come back to the caller, and are there in the next fit
        loop.fit(num_epochs=2, callbacks=[Decays()], grad_accumulation=accumulation)
    optimizer = optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(4):
        for x in X.split(6 * accumulation):
            optimizer.zero_grad()
            nn.functional.mse_loss(reference(x), x.sum(1, keepdim=True)).backward()
            for p in reference.parameters():
                p.grad = (p.grad + 0.1 * p.detach()) * (0.5 if p.ndim == 1 else 1)  # type: ignore[operator]
            optimizer.step()
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()], rtol=0, atol=1e-12)
