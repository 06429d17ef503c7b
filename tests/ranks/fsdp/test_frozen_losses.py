"""A ``MultiLoss`` in fsdp whose second network is frozen: the first one is trained as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.sharded_models import needs_fsdp_on_cpu
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import MultiLoss, MultiOptimizer, TTModel


class Two(TTModel):
    """With ``joined=False``, the second loss has no graph while ``b`` is frozen."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 1, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)
        self.b.requires_grad_(False)
        self.joined = joined

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        other = self.b(x) + (self.a(x) if self.joined else 0)
        return MultiLoss({"a": criterion(self.a(x), y), "b": criterion(other, y)})

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        return self.a(batch_data[0]), batch_data[1], {}


def trained(joined: bool, names: str, **how: Any) -> torch.Tensor:
    data = TensorDataset(torch.arange(80.0, dtype=torch.float64).reshape(20, 4) / 80, torch.ones(20, 1).double())
    model, size = Two(joined), 4 // how.get("devices", 1)
    loop = cpu_loop(
        model,
        DataLoader(data, size),
        MultiOptimizer({name: torch.optim.SGD(getattr(model, name).parameters(), 0.1) for name in names}),
        nn.MSELoss(),
        **how,
    )
    loop.fit(num_epochs=1)
    return model.a.weight.detach()


@needs_fsdp_on_cpu
@pytest.mark.parametrize(
    ("joined", "names", "devices"),
    [
        (False, "ab", 2),
        pytest.param(False, "ba", 2, marks=pytest.mark.long),
        pytest.param(True, "ab", 2, marks=pytest.mark.long),
        pytest.param(False, "ab", 1, marks=pytest.mark.long),
    ],
)
def test_the_other_network_is_trained_as_in_one_process(joined: bool, names: str, devices: int) -> None:
    alone = trained(joined, names)
    ranks = trained(joined, names, gpu_mode="fsdp", devices=devices)
    torch.testing.assert_close(ranks, alone, rtol=1e-12, atol=1e-12)
