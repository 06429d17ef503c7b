"""Ranks whose models differ: an error that names the first difference, in place of averages of different layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.loops import cpu_loop
from kit.ranks import run_own_ranks
from kit.sharded_models import needs_fsdp_on_cpu
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTBasicModel
from trainloop.errors import ConfigurationError
from trainloop.parallel import TTDistributedDataParallel, TTFullyShardedDataParallel


class Three(TTBasicModel):
    def __init__(self, order: str = "abc") -> None:
        super().__init__()
        layers = {name: nn.Linear(3, 3) for name in "abc"}
        for name in order:
            setattr(self, name, layers[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())  # type: ignore[no-any-return]


def same() -> nn.Module:
    return Three()


def other_order() -> nn.Module:
    return Three("abc" if dist.get_rank() == 0 else "cba")


def other_layer_frozen() -> nn.Module:
    model = Three()
    (model.a if dist.get_rank() == 0 else model.b).requires_grad_(False)
    return model


def other_shape() -> nn.Module:
    model = Three()
    if dist.get_rank() == 1:
        model.b = nn.Linear(3, 3, bias=False)
    return model


def other_dtype() -> nn.Module:
    return Three().to(torch.float64 if dist.get_rank() else torch.float32)


def buffer_on_one_rank() -> nn.Module:
    model = Three()
    if dist.get_rank() == 1:
        model.register_buffer("seen", torch.zeros(2))
    return model


MODELS = {
    same: ("no error", "no error"),
    other_order: ("Tensor 0 of Three", "a.weight (float32 of shape [3, 3], requires_grad=True) on rank 0"),
    other_layer_frozen: ("Tensor 0 of Three", "a.weight (float32 of shape [3, 3], requires_grad=False) on rank 0"),
    other_shape: ("Tensor 3 of Three", "b.bias (float32 of shape [3], requires_grad=True) on rank 0"),
    other_dtype: ("Tensor 0 of Three", "a.weight (float32 of shape [3, 3], requires_grad=True) on rank 0"),
    buffer_on_one_rank: ("Tensor 6 of Three", "is missing on rank 0"),
}


def errors_of(wrap: Any) -> list[str]:
    found = []
    for make in MODELS:
        try:
            wrap(make())
            found.append("no error")
        except ConfigurationError as error:
            found.append(str(error))
    return found


def own_buffers() -> Any:
    model = Three()
    model.register_buffer("rows", torch.full((dist.get_rank() + 1,), 7.0))
    return TTDistributedDataParallel(model, broadcast_buffers=False).rows.tolist()


def fitted(mode: str) -> str:
    model = other_order()
    data = TensorDataset(torch.zeros(8, 3), torch.zeros(8, 3))
    loop = cpu_loop(model, DataLoader(data, 2), criterion=nn.MSELoss(), gpu_mode=mode, devices=2)  # type: ignore[call-overload]
    try:
        loop.fit(num_epochs=1)
    except ConfigurationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "wrap",
    [TTDistributedDataParallel, pytest.param(TTFullyShardedDataParallel, marks=needs_fsdp_on_cpu)],
)
def test_ranks_with_other_models_are_an_error_on_all_ranks(wrap: Any, tmp_path: Path) -> None:
    first, second = run_own_ranks(errors_of, 2, wrap, folder=tmp_path)
    for (where, what), found, of_other in zip(MODELS.values(), first, second, strict=True):
        assert where in found
        assert what in found
        assert where in of_other
        assert f"{wrap.__name__}: the ranks' models differ" in found or found == "no error"


@pytest.mark.skipif(torch.__version__ < TorchVersion("2.13"), reason="an older one sends these buffers once")
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_buffers_that_are_not_shared_may_differ(tmp_path: Path) -> None:
    assert run_own_ranks(own_buffers, 2, folder=tmp_path) == [[7.0], [7.0, 7.0]]


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=needs_fsdp_on_cpu)])
def test_a_fit_of_ranks_of_a_launcher_names_the_difference(mode: str, tmp_path: Path) -> None:
    for found in run_own_ranks(fitted, 2, mode, folder=tmp_path):
        assert "the ranks' models differ. Tensor 0 of Three" in found
