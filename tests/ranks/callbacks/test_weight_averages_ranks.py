"""Averages of weights over ranks: SWA's BatchNorm statistics, and averages without an update."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import Layers, cpu_loop
from kit.sharded_models import needs_fsdp_on_cpu
from torch import Tensor, nn, optim
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.callbacks import ExponentialMovingAverage, ModelCheckpoint, StochasticWeightAveraging


class Norms(TTBasicModel):
    """BatchNorm layers that are used never, in the last batch only, once and twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.never, self.last, self.once, self.twice = (nn.BatchNorm1d(8, affine=False) for _ in range(4))
        self.fc = nn.Linear(8, 3)
        self.never.running_mean.fill_(5.0)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.once(x)
        if not self.training and len(x) < 8:
            x = self.last(x)
        return self.fc(self.twice(self.twice(x) + 1))


class Norm(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(input=x))  # type: ignore[no-any-return]


def loop_of(model: Any, ranks: int, samples: int = 103, mode: Any = "ddp") -> TrainLoop[Any]:
    loader = DataLoader(make_data(samples), 8)
    sgd = optim.SGD(model.parameters(), lr=0.05)
    return cpu_loop(model, loader, sgd, validation_loader=loader, gpu_mode=mode, devices=ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_each_batchnorm_counts_the_batches_of_all_ranks(ranks: int) -> None:
    model = Norms()
    loop = loop_of(model, ranks)
    loop.fit(2, callbacks=[StochasticWeightAveraging(start=0)])
    by_hand = copy.deepcopy(model)
    by_hand.eval()
    for norm in (by_hand.last, by_hand.once, by_hand.twice):
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        for x, _ in loop.train_loader:
            by_hand(x)
    for name in ("last", "once", "twice"):
        torch.testing.assert_close(getattr(model, name).running_mean, getattr(by_hand, name).running_mean)
        torch.testing.assert_close(getattr(model, name).running_var, getattr(by_hand, name).running_var)
    assert model.never.running_mean.tolist() == [5.0] * 8  # type: ignore[union-attr]
    update_bn(((x,) for x, _ in loop.train_loader), by_hand)
    torch.testing.assert_close(model.once.running_mean, by_hand.once.running_mean)


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=[needs_fsdp_on_cpu, pytest.mark.long])])
def test_a_last_batch_of_one_sample_is_left_out_of_the_statistics(mode: str) -> None:
    model = Norm()
    loop = loop_of(model, 2, samples=105, mode=mode)
    loop.fit(1, callbacks=[StochasticWeightAveraging(start=0)])  # the last step has 5 and 4 samples on the ranks
    by_hand = copy.deepcopy(model)
    update_bn([x for x, _ in loop.train_loader if len(x) > 1], by_hand)
    torch.testing.assert_close(model.norm.running_mean, by_hand.norm.running_mean)
    torch.testing.assert_close(model.norm.running_var, by_hand.norm.running_var)
    assert model.norm.num_batches_tracked == 13


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:ExponentialMovingAverage")
def test_the_trained_weights_stay_without_an_update() -> None:
    model, plain = Norms(), Norms()
    loop_of(plain, 2).fit(1)
    loop_of(model, 2).fit(1, callbacks=[ExponentialMovingAverage(every_n_steps=100)])
    assert torch.equal(model.fc.weight, plain.fc.weight)


class Grows(AbstractCallback):
    """Adds a head in a hook that runs after that of the average."""

    def __init__(self, hook: str) -> None:
        super().__init__("grows")
        self.hook, self.at = hook, 1 if hook == "on_epoch_begin" else 3

    def add(self, hook: str, now: int) -> None:
        loop = self.train_loop_obj
        if hook == self.hook and now == self.at:
            head = nn.Linear(3, 3)
            with torch.no_grad():
                head.weight.fill_(0.1)
                head.bias.zero_()
            loop.model.layers.append(head)
            loop.optimizer.add_param_group({"params": list(head.parameters())})

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.resumed and loop.global_step >= (8 if self.hook == "on_epoch_begin" else 3):
            self.add(self.hook, self.at)

    def on_epoch_begin(self) -> None:
        self.add("on_epoch_begin", self.train_loop_obj.epoch)

    def on_after_optimizer_step(self) -> None:
        self.add("on_after_optimizer_step", self.train_loop_obj.global_step)


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_after_optimizer_step"])
@pytest.mark.parametrize("mode", ["single", pytest.param("ddp", marks=pytest.mark.long)])
def test_a_parameter_that_a_later_callback_adds_is_averaged_from_its_first_update_on(
    mode: Any, hook: str, tmp_path: Path
) -> None:
    """Whether or not checkpoints are written, which ask rank 0 for the average."""

    def grown() -> Layers:
        torch.manual_seed(0)
        return Layers(nn.Linear(8, 3))

    def trained(*more: Any, **options: Any) -> dict[str, Tensor]:
        model = grown()
        loop = (
            loop_of(model, 2)
            if mode == "ddp"
            else cpu_loop(model, DataLoader(make_data(103), 16), optim.SGD(model.parameters(), lr=0.05))
        )
        loop.fit(2, callbacks=[ExponentialMovingAverage(0.7), Grows(hook), *more], **options)
        return model.state_dict()

    plain = trained()
    kept = trained(ModelCheckpoint(tmp_path, every_n_steps=1, keep=None))
    torch.testing.assert_close(kept, plain, rtol=0, atol=0)
    for written in sorted(tmp_path.glob("checkpoint*"))[2:12:3]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the checkpoint has state of callbacks not in this fit")
            torch.testing.assert_close(trained(resume_from=written), plain, rtol=0, atol=0, msg=written.name)
    by_hand = grown()
    optimizer, step, average = optim.SGD(by_hand.parameters(), lr=0.05), 0, {}
    for _ in range(2):
        for x, y in DataLoader(make_data(103), 16):
            if step == (7 if hook == "on_epoch_begin" else 3):
                by_hand.layers.append(nn.Linear(3, 3))
                nn.init.constant_(by_hand.layers[1].weight, 0.1)
                nn.init.zeros_(by_hand.layers[1].bias)
                optimizer.add_param_group({"params": list(by_hand.layers[1].parameters())})
            optimizer.zero_grad()
            nn.functional.cross_entropy(by_hand(x), y).backward()
            optimizer.step()
            step += 1
            for name, p in by_hand.named_parameters():
                average[name] = 0.7 * average[name] + 0.3 * p.detach() if name in average else p.detach().clone()
    torch.testing.assert_close(plain, average, rtol=1e-5, atol=1e-6)
