"""Losses over many units per sample, such as pixels: fp16 has the range that it has in a hand-written loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, MultiLoss, TTBasicModel, TTModel


class Segmentation(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(1, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        return self(batch_data[0]).argmax(1), batch_data[1], {}


class Counted(Segmentation):
    """Returns its number of units, as an int that equals the number of samples in no batch."""

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return super().get_loss(batch_data, criterion, device), batch_data[1].numel()


class Parts(Segmentation):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return MultiLoss({name: Segmentation.get_loss(self, batch_data, criterion, device) for name in "ab"})


class Compress(AbstractCallback):
    def on_train_begin(self) -> None:
        self.train_loop_obj.running.place.wrapper.register_comm_hook(None, fp16_compress_hook)


class Skipped(AbstractCallback):
    steps = 0

    def on_after_optimizer_step(self) -> None:
        self.steps += self.train_loop_obj.step_skipped


def trained(model: TTModel, pixels: int, callback: AbstractCallback, *, samples: int = 8, **options: Any) -> Tensor:
    before = [p.detach().clone() for p in model.parameters()]
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 1, pixels, pixels, generator=draws)
    data = TensorDataset(x, torch.randint(0, 3, (samples, pixels, pixels), generator=draws))
    accumulation = options.pop("grad_accumulation", 1)
    loop = cpu_loop(model, DataLoader(data, 2), torch.optim.SGD(model.parameters(), 1.0), **options)
    loop.fit(num_epochs=1, grad_accumulation=accumulation, callbacks=[callback])
    return torch.cat([(p.detach() - old).flatten() for p, old in zip(model.parameters(), before, strict=True)])


@pytest.mark.long
@pytest.mark.parametrize("cls", [Segmentation, Counted])
def test_a_compressed_exchange_moves_the_weights(cls: type[Segmentation]) -> None:
    expected = trained(cls(), 300, AbstractCallback("none"), gpu_mode="ddp", devices=2)
    moved = trained(cls(), 300, Compress("compress"), gpu_mode="ddp", devices=2)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(moved, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("cls", [Segmentation, Counted, Parts])
def test_no_step_overflows_more_than_that_of_a_mean(cls: type[Segmentation]) -> None:
    skipped = Skipped("skipped")
    trained(cls(), 96, skipped, samples=16, use_amp="fp16", grad_accumulation=2)
    assert skipped.steps == 0
