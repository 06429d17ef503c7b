"""What the script's classes change in globals, outer variables and class attributes in ranks comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.sharded_models import needs_fsdp_on_cpu
from kit.small_loop import make_loop
from torch import Tensor

from trainloop import AbstractCallback, TTBasicModel

losses: list[float] = []
count = 0
means = {"y": torch.zeros(())}


class Meter:
    def __init__(self) -> None:
        self.total, self.values = 0.0, [1.0]


meter = Meter()


def note(value: float) -> None:
    """Called by a method, so that what it uses counts, too."""
    global count
    count += 1
    meter.total += value
    meter.values.append(value)


class Net(TTBasicModel):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        loss = super().get_loss(batch_data, criterion, device)
        if self.training:
            Net.calls += 1
            means["y"] = 0.5 * means["y"] + batch_data[1].float().mean()
        return loss


def changed(**ranks: Any) -> dict[str, Any]:
    """Train, and return what the script sees afterwards."""
    global count, meter
    losses.clear()
    count, meter, Net.calls, means["y"] = 0, Meter(), 0, torch.zeros(())
    own_meter, seen, outer = meter, [], 1.0

    class Notes(AbstractCallback):
        def on_epoch_end(self) -> None:
            nonlocal outer
            loss = self.train_loop_obj.history["loss"][-1]
            losses.append(loss)
            seen.append(loss)
            outer += loss
            note(loss)

    make_loop(Net(), validation=False, **ranks).fit(num_epochs=2, callbacks=[Notes()])
    assert meter is own_meter
    return {
        "losses": list(losses),
        "seen": seen,
        "outer": outer,
        "count": count,
        "calls": Net.calls,
        "mean": means["y"].item(),
        "total": meter.total,
        "values": meter.values,
    }


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=needs_fsdp_on_cpu)])
def test_what_ranks_change_comes_back(mode: str) -> None:
    alone = changed()
    assert len(alone["losses"]) == alone["count"] == 2
    # One rank makes the same steps as one process.
    assert changed(gpu_mode=mode, accelerator="cpu", devices=1) == alone


@pytest.mark.long
def test_of_several_ranks_the_values_of_rank_0_come_back() -> None:
    ranks = changed(gpu_mode="ddp", accelerator="cpu", devices=2)
    assert len(ranks["losses"]) == len(ranks["seen"]) == ranks["count"] == 2
    assert ranks["outer"] == 1.0 + sum(ranks["seen"])
    assert ranks["calls"] > 0


@pytest.mark.long
def test_large_values_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(means, "y", torch.zeros(2**19))
    large = means["y"]

    class Changes(AbstractCallback):
        def on_epoch_end(self) -> None:
            means["y"].add_(1.0)

    make_loop(validation=False, gpu_mode="ddp", accelerator="cpu", devices=1).fit(num_epochs=1, callbacks=[Changes()])
    assert means["y"] is large
    assert not large.any()
