"""sync_batchnorm covers the layers that the loop trains, not only those that the model had when fit began."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TTBasicModel

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ROWS = TensorDataset(X, X.sum(1, keepdim=True) ** 2)


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 1, dtype=torch.float64)
        self.between: nn.Module = nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.between(self.first(x))))


class NormalisedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)

    def forward(self, y_pred: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.norm(y_pred), y)


class AddsALayer(AbstractCallback):
    def __init__(self, hook: str, affine: bool) -> None:
        super().__init__("adds")
        self.affine = affine
        setattr(self, hook, self.add)

    def add(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step >= 5 and isinstance(loop.model.between, nn.Identity):
            loop.model.between = nn.BatchNorm1d(6, affine=self.affine, dtype=torch.float64)
            if self.affine:
                loop.optimizer.add_param_group({"params": list(loop.model.between.parameters())})


class RemovesIt(AddsALayer):
    """Adds a layer, and puts another one in its place."""

    def add(self) -> None:
        super().add()
        loop = self.train_loop_obj
        if loop.global_step >= 9 and loop.model.between.affine == self.affine:
            loop.model.between = nn.BatchNorm1d(6, affine=False, dtype=torch.float64)


def trained(mode: str, criterion: nn.Module, *callbacks: AbstractCallback) -> tuple[list[Tensor], list[float]]:
    model, ranks = Net(), 1 if mode == "single" else 2
    parameters = [*model.parameters(), *criterion.parameters()]
    loop = cpu_loop(
        model,
        DataLoader(ROWS, 12 // ranks),
        optim.SGD(parameters, lr=0.05),
        criterion,
        validation_loader=DataLoader(ROWS, 20),
        gpu_mode=mode,
        devices=ranks,
        sync_batchnorm=True,
    )
    model = loop.fit(num_epochs=3, callbacks=list(callbacks))
    assert not any(hasattr(layer, "_class_before_sync") for layer in (*model.modules(), *criterion.modules()))
    values = [*model.state_dict().values(), *criterion.state_dict().values()]
    return values, loop.history["loss"] + loop.history["val_loss"]


def assert_like_one_process(mode: str, make: Any, *callbacks: Any) -> None:
    (values, losses), (expected, expected_losses) = (
        trained(kind, make(), *(callback() for callback in callbacks)) for kind in (mode, "single")
    )
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    assert all(torch.allclose(one, other, rtol=1e-10) for one, other in zip(values, expected, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_layer_of_the_criterion_normalises_over_all_ranks(mode: str) -> None:
    assert_like_one_process(mode, NormalisedLoss)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_batch_begin"])
def test_a_layer_that_a_hook_adds_normalises_over_all_ranks(hook: str, affine: bool, mode: str) -> None:
    assert_like_one_process(mode, nn.MSELoss, lambda: AddsALayer(hook, affine))


@pytest.mark.long
def test_a_layer_that_replaces_one_normalises_over_all_ranks() -> None:
    assert_like_one_process("ddp", nn.MSELoss, lambda: RemovesIt("on_batch_end", affine=True))


class FailsAtTheEnd(AddsALayer):
    def on_epoch_end(self) -> None:
        raise ZeroDivisionError("on purpose")


@pytest.mark.long
def test_after_a_failure_an_added_layer_has_its_own_class() -> None:
    model = Net()
    loader = DataLoader(ROWS, 4)
    loop = cpu_loop(model, loader, criterion=nn.MSELoss(), sync_batchnorm=True, gpu_mode="ddp", devices=2)
    with pytest.raises(Exception, match="on purpose"):
        loop.fit(num_epochs=1, callbacks=[FailsAtTheEnd("on_batch_begin", True)])
    assert type(model.between) is nn.BatchNorm1d
    assert not {"process_group", "_class_before_sync"} & vars(model.between).keys()
