"""What a model registers while it runs: in dp, as in one process, or an error that names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTBasicModel
from trainloop.errors import ConfigurationError

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS = TensorDataset(X, X.sum(1, keepdim=True))


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(3, 1, dtype=torch.float64) for _ in range(2)])
        self.calls = 0

    def forward(self, x: Any) -> Any:
        return self.heads[0](x)

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.calls += 1
        return super().get_loss(batch_data, criterion, device)


class ComputesATable(Net):
    table: Tensor

    def forward(self, x: Any) -> Any:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0, 1, 3, dtype=torch.float64), persistent=False)
        return self.heads[0](x * self.table)


class GrowsATable(Net):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        if len(self.table) < 3:
            self.table = torch.linspace(0, 1, 3, dtype=torch.float64)
        return self.heads[0](x * self.table)


class FillsATable(Net):
    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)

    def forward(self, x: Any) -> Any:
        self.table = torch.ones(3, dtype=torch.float64) if self.table is None else 0.9 * self.table
        return self.heads[0](x * self.table)


class UsesATableOnce(Net):
    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 3, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        table, self.table = self.table, None
        return self.heads[0](x if table is None else x * table)


class RemovesATable(UsesATableOnce):
    def forward(self, x: Any) -> Any:
        table = self._buffers.pop("table", None)
        return self.heads[0](x if table is None else x * table)


class NamesItsHead(Net):
    def forward(self, x: Any) -> Any:
        self.head = self.heads[self.calls % 2]
        return self.head(x)


class HasAName(NamesItsHead):
    """The name of the part is found before the part."""

    def __init__(self) -> None:
        super().__init__()
        heads = self._modules.pop("heads")
        self.head = heads[0]
        self.heads = heads


class AddsAHead(Net):
    def forward(self, x: Any) -> Any:
        if self.calls == 3 and not hasattr(self, "more"):
            self.more = nn.Linear(3, 1, dtype=torch.float64)
        return super().forward(x)


class AddsAParameter(Net):
    def forward(self, x: Any) -> Any:
        if self.calls == 3:
            self.heads[0].register_parameter("scale", nn.Parameter(torch.ones(1, dtype=torch.float64)))
        return super().forward(x)


class FillsAParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("scale", None)

    def forward(self, x: Any) -> Any:
        if self.calls == 3:
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        return super().forward(x)


class ReplacesAHead(Net):
    def forward(self, x: Any) -> Any:
        if self.calls == 3:
            self.heads[1] = nn.Linear(3, 1, dtype=torch.float64)
        return super().forward(x)


class RemovesAHead(Net):
    def forward(self, x: Any) -> Any:
        if self.calls == 3:
            del self.heads[1]
        return super().forward(x)


class CentresOnItsPart(Net):
    def forward(self, x: Any) -> Any:
        if getattr(self, "mean", None) is None:
            self.register_buffer("mean", x.mean(0))
        return super().forward(x)


class FillsTheCentreOfItsPart(CentresOnItsPart):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)


def trained(model: Net, mode: str) -> Net:
    options: dict[str, Any] = {"devices": 2} if mode == "dp" else {}
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loop = cpu_loop(model, DataLoader(ROWS, 8), optimizer, nn.MSELoss(), gpu_mode=mode, **options)
    return loop.fit(num_epochs=2)


@pytest.mark.parametrize("kind", [ComputesATable, GrowsATable, FillsATable, UsesATableOnce, RemovesATable])
def test_a_buffer_that_all_replicas_compute_alike_is_the_models(kind: Any) -> None:
    alone, replicated = (trained(kind(), mode) for mode in ("single", "dp"))
    assert alone._buffers.keys() == replicated._buffers.keys()
    for name, buffer in alone._buffers.items():
        assert buffer is replicated._buffers[name] is None or torch.equal(replicated._buffers[name], buffer)
    assert replicated.state_dict().keys() == alone.state_dict().keys()
    assert torch.allclose(replicated.heads[0].weight, alone.heads[0].weight, rtol=1e-12)


@pytest.mark.parametrize("kind", [NamesItsHead, HasAName])
def test_another_name_of_a_part_is_that_of_one_process(kind: Any) -> None:
    alone, replicated = (trained(kind(), mode) for mode in ("single", "dp"))
    assert replicated.head is replicated.heads[0]
    assert replicated.state_dict().keys() == alone.state_dict().keys()
    assert torch.allclose(replicated.heads[1].weight, alone.heads[1].weight, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (AddsAHead, "more"),
        (AddsAParameter, "heads.0.scale"),
        (FillsAParameter, "scale"),
        (ReplacesAHead, "heads.1"),
        (RemovesAHead, "heads.1"),
    ],
)
def test_a_part_that_would_be_lost_is_an_error_in_any_step(kind: Any, what: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"gpu_mode='dp': {what} is registered, replaced or removed"):
        trained(kind(), "dp")


@pytest.mark.parametrize("kind", [CentresOnItsPart, FillsTheCentreOfItsPart])
def test_a_buffer_that_depends_on_the_part_is_warned_of(kind: Any) -> None:
    with pytest.warns(UserWarning, match="get_loss changes mean"):
        trained(kind(), "dp")
