"""Gradients that a hook changes with a graph, without torch.no_grad(): in ranks, as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kit.loops import Layers, cpu_loop
from kit.sharded_models import FSDP
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Decays(AbstractCallback):
    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        for p in self.train_loop_obj.model.parameters():
            p.grad.add_(p, alpha=0.1)  # type: ignore[union-attr]
            p.grad = 0.5 * p.grad if p.ndim == 1 else p.grad  # type: ignore[operator]


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", ["single", "dp", "ddp", FSDP])
def test_a_hook_may_add_to_gradients_with_a_graph(mode: Any, accumulation: int) -> None:
    torch.manual_seed(0)
    model = Layers(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    reference, in_ranks = copy.deepcopy(model), mode not in ("single", "dp")
    loop = cpu_loop(
        model,
        DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), 3 if in_ranks else 6),
        criterion=nn.MSELoss(),
        gpu_mode=mode,
        devices=2,
        timeout=60,
    )
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
