"""collate_fn leaves out or multiplies samples: every mode equals one process that is fed the whole global batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import Layers, cpu_loop
from torch import nn, optim
from torch.utils.data import DataLoader

BAD = {0, 2, 4, 12, 13, 14, 15}


def net() -> Layers:
    torch.manual_seed(0)
    return Layers(nn.Linear(4, 1, dtype=torch.float64))


def rows() -> list[Any]:
    x = torch.randn(18, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [None if i in BAD else (row, row.sum().sin()[None]) for i, row in enumerate(x)]


def keep(samples: list[Any]) -> Any:
    good = [sample for sample in samples if sample is not None]
    if not good:
        return torch.empty(0, 4, dtype=torch.float64), torch.empty(0, 1, dtype=torch.float64)
    return tuple(map(torch.stack, zip(*good, strict=True)))


def multiply(samples: list[Any]) -> Any:
    good = [sample for sample in samples if sample is not None]
    return keep([(x + k, y) for x, y in good for k in range(1 + 2 * int(x[0] > 0))])


def by_hand(collate: Any) -> tuple[Any, ...]:
    model, data = net(), rows()
    sgd = optim.SGD(model.parameters(), lr=0.1)
    total, count = 0.0, 0
    for start in range(0, 18, 6):
        x, y = collate(data[start : start + 6])
        sgd.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        sgd.step()
        total, count = total + loss.item() * len(x), count + len(x)
    x, y = collate(data)
    return model.layers[0].weight.detach(), total / count, nn.functional.mse_loss(model(x), y).item()


@pytest.mark.long
@pytest.mark.parametrize("collate", [keep, multiply])
@pytest.mark.parametrize(
    "mode, ranks, accumulation",
    [("single", 1, 1), ("single", 1, 3), ("dp", 2, 1), ("ddp", 2, 1), ("ddp", 3, 2), ("fsdp", 2, 3)],
)
def test_batches_weigh_by_the_samples_that_are_left(collate: Any, mode: str, ranks: int, accumulation: int) -> None:
    size = 6 // accumulation // (1 if mode == "dp" else ranks)
    model, data = net(), rows()

    def loader() -> DataLoader[Any]:
        return DataLoader(data, batch_size=size, collate_fn=collate)  # type: ignore[arg-type]

    loop = cpu_loop(model, loader(), criterion=nn.MSELoss(), validation_loader=loader(), gpu_mode=mode, devices=ranks)
    loop.fit(1, grad_accumulation=accumulation)
    weight, loss, val_loss = by_hand(collate)
    torch.testing.assert_close(model.layers[0].weight.detach(), weight, rtol=0, atol=1e-12)
    assert loop.history["loss"] == [pytest.approx(loss, abs=1e-12)]
    assert loop.history["val_loss"] == [pytest.approx(val_loss, abs=1e-12)]
