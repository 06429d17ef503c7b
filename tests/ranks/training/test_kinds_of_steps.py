"""Closures, alternating optimizers and summed losses over ranks: each equals one process fed the whole global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import reference
from kit.alternating_models import (
    WGAN,
    Discrepancy,
    discrepancy_optimizers,
    points,
    wgan_by_hand,
    wgan_optimizers,
)
from kit.loops import cpu_loop
from kit.ranks import run_own_ranks
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TrainLoop, TTBasicModel
from trainloop.errors import ConfigurationError
from trainloop.parallel import TTDistributedDataParallel


class Net(TTBasicModel):
    """Draws nothing; logs how often it is evaluated."""

    def __init__(self, divided: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.divided = divided

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.log("one", 1.0, reduce="sum")
        loss = super().get_loss(batch_data, criterion, device)
        return loss / len(batch_data[0]) if self.divided else loss


class Tokens(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        counted = y > 0
        if not bool(counted.any()):
            return 0 * self(x).sum(), 0
        return criterion(self(x)[counted], y[counted]), counted.sum()


def classes(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 6, generator=generator).double()
    return TensorDataset(x, (x @ torch.randn(6, 3, generator=generator).double()).argmax(1))


def cases() -> dict[str, Any]:
    """Model, data, what makes its optimizer, criterion, steps' micro-batches."""

    def searching(model: nn.Module) -> Any:
        return optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def adam(model: nn.Module) -> Any:
        return optim.Adam(model.parameters(), lr=0.02)

    cross, summed = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")
    return {
        "closure": (Net(), classes(43), searching, cross, 1),
        "closure, accumulated": (Net(), classes(43), searching, cross, 2),
        "closure, weighted": (Tokens(), classes(43), searching, cross, 1),
        "closure, summed": (Net(), classes(43), searching, summed, 2),
        "alternating": (WGAN(), points(43), wgan_optimizers, None, 1),
        "alternating, accumulated": (WGAN(), points(43), wgan_optimizers, None, 2),
        "alternating, weighted": (WGAN(weighted=True), points(43), wgan_optimizers, None, 2),
        "alternating, several optimizers": (Discrepancy(), points(43), discrepancy_optimizers, None, 2),
        "summed": (Net(), classes(43), adam, summed, 1),
        "summed, accumulated": (Net(), classes(43), adam, summed, 3),
        "summed, but divided": (Net(divided=True), classes(43), adam, summed, 2),
    }


def trained(name: str, ranks: int, mode: str) -> tuple[Any, dict[str, Any], float | dict[str, float]]:
    """12 samples a global batch and micro-batch: 43 leave 7, of which 3 ranks have 3, 2 and 2 (and 5 ranks 0, some)."""
    torch.manual_seed(0)
    model, data, make_optimizer, criterion, accumulation = cases()[name]
    model = model.double()
    loop = cpu_loop(
        model,
        DataLoader(data, batch_size=12 // ranks if mode == "ddp" else 12),
        make_optimizer(model),
        criterion,
        validation_loader=DataLoader(data, batch_size=5),
        gpu_mode=mode,
        devices=ranks if mode == "ddp" else "auto",
        seed=3,
        gradient_clip_norm=0.5,
    )
    loop.fit(num_epochs=2, grad_accumulation=accumulation)
    return model.state_dict(), loop.history.to_dict(), loop.evaluate_loss_on_train_set()


class Disagreeing(WGAN):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.critic_steps = 1 + torch.distributed.get_rank()
        yield from super().get_loss(batch_data, criterion, device)


def in_rank(ranks: int) -> dict[str, Any]:
    """Each case, in a group that is up: the loops join it, so that all cases cost one start."""
    rank = torch.distributed.get_rank()
    facts: dict[str, Any] = {name: trained(name, ranks, "ddp") for name in cases()}

    torch.manual_seed(0)
    model, optimizers = WGAN().double(), None
    wrapper = TTDistributedDataParallel(model, find_unused_parameters=True)
    optimizers = wgan_optimizers(model)
    for batch in DataLoader(points(36), batch_size=12):
        mine = [t[rank::ranks] for t in batch]
        for which, loss in wrapper.get_loss(mine, None, torch.device("cpu")):
            optimizers.zero_grad()
            loss.backward()
            optimizers[which].step()
    facts["wrapper"] = model.state_dict()

    try:
        model = Disagreeing().double()
        loader = DataLoader(points(24), batch_size=12 // ranks)
        TrainLoop(
            model, loader, None, None, wgan_optimizers(model), gpu_mode="ddp", accelerator="cpu", devices=ranks
        ).fit(num_epochs=1)
    except ConfigurationError as error:
        facts["disagreeing"] = str(error)
    return facts


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_equal_one_process(ranks: int, tmp_path: Path) -> None:
    everyone = run_own_ranks(in_rank, ranks, ranks, folder=tmp_path)
    for name in cases():
        state, history, loss = trained(name, 1, "single")
        for facts in everyone:
            assert reference.largest_difference(state, facts[name][0]) < 1e-9, name
        ours = everyone[0][name][1]
        assert ours.keys() == history.keys(), name
        for metric in history:
            if metric != "one":
                assert ours[metric] == pytest.approx(history[metric], rel=1e-9), (name, metric)
        assert everyone[0][name][2] == pytest.approx(loss, rel=1e-9), name
        if "one" in history:  # logged once a micro-batch, not once an evaluation: 4 global ones of 43 samples
            assert history["one"] == [4.0, 4.0]
            assert ours["one"] == [4.0 * ranks, 4.0 * ranks]
    torch.manual_seed(0)
    by_hand = WGAN().double()
    wgan_by_hand(by_hand, DataLoader(points(36), batch_size=12), 1)
    for facts in everyone:
        assert reference.largest_difference(by_hand, facts["wrapper"]) < 1e-9
        assert (
            "Make the sequence of losses depend only on values that are the same for all batches"
            in facts["disagreeing"]
        )


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> MultiLoss:
        x, y = batch_data
        found = self(x)
        return MultiLoss({"body": criterion(found, y), "head": criterion(self.head(found.detach()), y)})


@pytest.mark.long(but=1)
@pytest.mark.parametrize("several", [False, True], ids=["accumulation", "optimizers"])
def test_one_rank_equals_one_process(several: bool) -> None:
    """Each part of the loss has a backward of its own, which DDP does not expect, even on a single rank."""

    def trained(mode: str) -> nn.Module:
        torch.manual_seed(0)
        model = TwoHeads().double()
        parts = [model.layers, model.head] if several else [model]
        optimizers = [optim.Adam(part.parameters(), lr=0.02) for part in parts]
        several_named = dict(zip(("body", "head"), optimizers))
        loop = cpu_loop(
            model,
            DataLoader(classes(24), batch_size=4),
            MultiOptimizer(several_named) if several else optimizers[0],
            gpu_mode=mode,
            devices=1,
            seed=0,
        )
        return loop.fit(num_epochs=2, grad_accumulation=1 if several else 2)

    assert reference.largest_difference(trained("ddp"), trained("single")) < 1e-12


class StopsAt(AbstractCallback):
    """Notes hooks of a run in which a rank has no samples in the last step."""

    def __init__(self) -> None:
        super().__init__("stops at")
        self.calls = 0

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        self.calls += 1

    def on_after_optimizer_step(self) -> None:
        self.train_loop_obj.log("in_hook", float(self.train_loop_obj.global_step))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("rows, accumulation", [(14, 1), (38, 2)])  # the third rank gets none of the last two rows
@pytest.mark.parametrize("name", ["closure, weighted", "alternating"])
def test_a_rank_without_samples_takes_part(name: str, rows: int, accumulation: int) -> None:
    results = []
    for mode, size in (("single", 12), ("ddp", 4)):
        torch.manual_seed(0)
        model, _, make_optimizer, criterion, _ = cases()[name]
        model = model.double()
        data = classes(rows) if "closure" in name else points(rows)
        loop = cpu_loop(
            model,
            DataLoader(data, batch_size=size),
            make_optimizer(model),
            criterion,
            gpu_mode=mode,
            devices=3 if mode == "ddp" else "auto",
            seed=3,
        )
        hooks = StopsAt()
        loop.fit(num_epochs=1, callbacks=[hooks], grad_accumulation=accumulation)
        logged = loop.history["loss"] + loop.history["in_hook"]
        results.append((model.state_dict(), logged, hooks.calls, loop.global_step))
    single, ddp = results
    assert reference.largest_difference(single[0], ddp[0]) < 1e-9
    assert single[1] == pytest.approx(ddp[1], rel=1e-9)
    assert single[2:] == ddp[2:]


class Centred(TTBasicModel):
    """Subtracts a running mean, which each loss changes first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
        self.register_buffer("mean", torch.zeros(6).double())

    def centred(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.3)
        return x - self.mean

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        yield "a", criterion(self.a(self.centred(x)), y)
        yield "b", criterion(self.b(self.centred(x)), y)


def two_optimizers(model: Any) -> dict[str, optim.Optimizer]:
    return {name: optim.SGD(getattr(model, name).parameters(), 0.1) for name in "ab"}


def loop_in_two_ranks(model: Any, data: TensorDataset, mode: str) -> TrainLoop:
    return cpu_loop(
        model,
        DataLoader(data, batch_size=4),
        MultiOptimizer(two_optimizers(model)),
        nn.functional.cross_entropy,
        gpu_mode=mode,
        devices=2,
    )


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_each_yielded_loss_reads_the_buffers_of_rank_0(mode: str) -> None:
    """The reference sends rank 0's buffers before each forward, as DDP does."""
    data = classes(24)
    ours, theirs = Centred(), [Centred(), Centred()]
    optimizers = two_optimizers(theirs[0])
    for start in range(0, 24, 8):
        parts = [tuple(t[start + rank : start + 8 : 2] for t in data.tensors) for rank in range(2)]
        losses = [
            model.get_loss(part, nn.functional.cross_entropy, torch.device("cpu"))
            for model, part in zip(theirs, parts, strict=True)
        ]
        for optimizer in optimizers.values():
            theirs[1].load_state_dict(theirs[0].state_dict())
            for model, generator in zip(theirs, losses, strict=True):
                model.zero_grad()
                next(generator)[1].backward()
            for first, second in zip(theirs[0].parameters(), theirs[1].parameters(), strict=True):
                if first.grad is not None and second.grad is not None:
                    first.grad.add_(second.grad).div_(2)
            optimizer.step()
    loop_in_two_ranks(ours, data, mode).fit(num_epochs=1)
    torch.testing.assert_close(ours.state_dict(), theirs[0].state_dict(), rtol=0, atol=1e-12)


class Uncentred(Centred):
    def centred(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Grows(AbstractCallback):
    def on_batch_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 1:
            grow(loop.model, loop.optimizer["a"])


def grow(model: Any, optimizer: optim.Optimizer) -> None:
    torch.manual_seed(5)
    further = nn.Linear(3, 3).double()
    model.a = nn.Sequential(model.a, further)
    optimizer.add_param_group({"params": list(further.parameters())})


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_layer_that_a_hook_adds_is_trained_by_yielded_losses_from_that_step_on(mode: str) -> None:
    data = classes(24)
    ours, theirs = Uncentred(), Uncentred()
    optimizers: Any = two_optimizers(theirs)
    for step, start in enumerate(range(0, 24, 8)):
        if step == 1:
            grow(theirs, optimizers["a"])
        batch = tuple(t[start : start + 8] for t in data.tensors)
        for name, loss in theirs.get_loss(batch, nn.functional.cross_entropy, torch.device("cpu")):
            theirs.zero_grad()
            loss.backward()
            optimizers[name].step()
    loop_in_two_ranks(ours, data, mode).fit(num_epochs=1, callbacks=[Grows()])
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)
