"""A criterion that is a module: its mode in evaluation, its buffers, clipping and the best checkpoint, in all modes.

Also parameters that neither the model nor the criterion has, but only the optimizer.
"""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, MultiOptimizer, TrainLoop, TTBasicModel, distributed
from trainloop.callbacks import GradientClipping, GradientStats, ModelCheckpoint
from trainloop.checkpoint import checkpoints
from trainloop.errors import ConfigurationError, WorkerFailedError

D = torch.float64


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 3, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Margin(nn.Module):
    """A scale for each output (parameter), dropout, and a count of samples (buffer)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, -1.0, 0.5], dtype=D))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.seen += len(y)
        return (self.dropout(out * self.scale) - y).square().sum(1).mean()


class Regularized(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean() + 0.1 * self.model(torch.ones(2, 3, dtype=D)).square().mean()


def data(n: int = 24, seed: int = 0) -> TensorDataset:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=D)
    return TensorDataset(x, x.sum(1, keepdim=True).expand(n, 3).contiguous())


def loop_of(model: Any, criterion: Any, optimizer: Any, mode: str = "single", **kwargs: Any) -> TrainLoop[Any]:
    ranks = 1 if mode == "single" else 2
    train = DataLoader(data(), batch_size=6 if mode in ("single", "dp") else 3)
    return cpu_loop(
        model,
        train,
        optimizer,
        criterion,
        validation_loader=DataLoader(data(11, 3), batch_size=4),
        gpu_mode=mode,
        devices=ranks,
        **kwargs,
    )


def by_hand(clip: float | None) -> tuple[list[Tensor], float]:
    model, criterion = Net(), Margin()
    learned = [*model.parameters(), *criterion.parameters()]
    sgd = optim.SGD(learned, lr=0.05)
    x, y = data().tensors
    norms = []
    for start in range(0, 24, 6):
        sgd.zero_grad()
        criterion(model(x[start : start + 6]), y[start : start + 6]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(learned, clip or 1e9)))
        sgd.step()
    return [p.detach() for p in learned], sum(norms) / len(norms)


@pytest.mark.long(but=1)
class LazyMargin(Margin):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3, dtype=D)
        self.norm = nn.LazyBatchNorm1d(affine=False, dtype=D)
        self.norm.eval()

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.norm(self.head(out)), y)


@pytest.mark.parametrize("mode", ["dp", pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_its_lazy_layers_get_their_shapes_before_ranks_start(mode: str) -> None:
    def trained(mode: str) -> dict[str, Tensor]:
        model, criterion = Net(), LazyMargin()
        whole = mode in ("single", "dp")
        cpu_loop(
            model,
            DataLoader(data(), 8 if whole else 4),
            optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.01),
            criterion,
            gpu_mode=mode,
            devices=2,
            seed=0,
        ).fit(num_epochs=2)
        return {**model.state_dict(), **criterion.head.state_dict(prefix="head.")}

    expected = trained("single")
    for name, tensor in trained(mode).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["single", "dp", "ddp", "fsdp"])
def test_one_of_several_optimizers_may_step_only_the_criterion(mode: str) -> None:
    model, criterion = Net(), Margin()
    both = MultiOptimizer([optim.SGD(part.parameters(), lr=0.05) for part in (model, criterion)])
    loop_of(model, criterion, both, mode).fit(1)
    torch.testing.assert_close([*model.parameters(), *criterion.parameters()], by_hand(None)[0], rtol=0, atol=1e-12)


def test_an_optimizer_of_the_criterion_only_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="has none of the model's parameters"):
        loop_of(Net(), criterion := Margin(), optim.SGD(criterion.parameters(), lr=0.05))


class Unknown(Net):
    """A network and an unknown factor beside it, which is in a list, so that it is not a parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = [nn.Parameter(torch.ones(3, dtype=D))]

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        units = (x[:, 0] > 0).sum() + 1  # the loss's own divisor, so that gradients are scaled after backward
        return (self(x) * self.beside[0] - y).square().sum() / units, units


class UnknownOfMean(Unknown):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        return (self(x) * self.beside[0] - y).square().mean()


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode", ["single", "dp", "ddp", "fsdp"])
def test_a_parameter_that_only_the_optimizer_has_is_trained_by_all_samples(mode: str) -> None:
    ours, theirs = Unknown(), Unknown()
    sgd = optim.SGD([*theirs.parameters(), *theirs.beside], lr=0.01)
    for start in (0, 12):
        sgd.zero_grad()
        theirs.get_loss([t[start : start + 12] for t in data().tensors], None, torch.device("cpu"))[0].backward()
        # 1 for each micro-batch, rank and replica that has been added to the number of units
        parts, units = (4 if mode != "single" else 2), (data().tensors[0][start : start + 12, 0] > 0).sum()
        for p in (*theirs.parameters(), *theirs.beside):
            p.grad.mul_((units + 1) / (units + parts))  # type: ignore[union-attr]
        sgd.step()
    loop = loop_of(ours, None, optim.SGD([*ours.parameters(), *ours.beside], lr=0.01), mode)
    loop.fit(1, grad_accumulation=2)
    torch.testing.assert_close(
        [*ours.parameters(), *ours.beside], [*theirs.parameters(), *theirs.beside], rtol=0, atol=1e-8
    )


class AddsUnknown(AbstractCallback):
    """Adds the unknown factor to the optimizer, before the first step or after it."""

    def __init__(self, step: int, how: str) -> None:
        super().__init__("adds a parameter")
        self.step = step
        self.how = how

    def add(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step != self.step:
            return
        if self.how == "group":
            loop.optimizer.add_param_group({"params": loop.model.beside})
        else:
            loop.optimizer.param_groups[0]["params"] += loop.model.beside

    on_train_begin = on_batch_end = add


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    "mode, step, how",
    [
        *(("single", 0, "group"), ("single", 1, "group"), ("dp", 1, "list")),
        *(("ddp", 0, "list"), ("ddp", 1, "group"), ("fsdp", 1, "list")),
    ],
)
def test_a_parameter_that_a_callback_adds_to_the_optimizer_is_trained_by_all_samples(
    mode: str, step: int, how: str
) -> None:
    ours, theirs = UnknownOfMean(), UnknownOfMean()
    sgd = optim.SGD(theirs.parameters(), lr=0.01)
    for i in range(4):
        if i == step:
            sgd.add_param_group({"params": theirs.beside})
        sgd.zero_grad()
        x, y = (t[6 * i : 6 * i + 6] for t in data().tensors)
        (theirs(x) * theirs.beside[0] - y).square().mean().backward()
        nn.utils.clip_grad_norm_([p for group in sgd.param_groups for p in group["params"]], 0.5)
        sgd.step()
    loop = loop_of(ours, None, optim.SGD(ours.parameters(), lr=0.01), mode, gradient_clip_norm=0.5)
    loop.fit(1, callbacks=[AddsUnknown(step, how)])
    torch.testing.assert_close(
        [*ours.parameters(), *ours.beside], [*theirs.parameters(), *theirs.beside], rtol=0, atol=1e-12
    )


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode", ["single", "dp", "ddp", "fsdp"])
def test_a_parameter_that_only_the_optimizer_has_is_in_checkpoints(mode: str, tmp_path: Path) -> None:
    def trained(epochs: int, resume_from: Any = None) -> list[Tensor]:
        model = UnknownOfMean()
        adam = optim.Adam([*model.parameters(), *model.beside], lr=0.01)
        keeper = ModelCheckpoint(tmp_path, every_n_steps=1, keep=None)
        loop_of(model, None, adam, mode).fit(epochs, callbacks=[keeper], resume_from=resume_from)
        return [p.detach().clone() for p in (*model.parameters(), *model.beside)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # checkpoints lack nothing
        whole = trained(2)
        (half,) = [c.path for c in checkpoints(tmp_path) if c.info is not None and c.info.step == 3]
        assert all(map(torch.equal, trained(2, half), whole))


class ReplacesTheNet(AbstractCallback):
    """Replaces the network after the first epoch, and again when a run resumes later; the optimizer keeps both."""

    def replace(self) -> None:
        loop = self.train_loop_obj
        torch.manual_seed(1)
        loop.model.net = nn.Linear(3, 3, dtype=D)
        loop.optimizer.add_param_group({"params": list(loop.model.net.parameters())})

    def on_train_begin(self) -> None:
        if self.train_loop_obj.resumed:
            self.replace()

    def on_epoch_begin(self) -> None:
        if self.train_loop_obj.epoch == 1:
            self.replace()


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode", ["fsdp", "single"])
def test_parameters_of_a_replaced_module_are_resumed(mode: str, tmp_path: Path) -> None:
    def trained(resume_from: Any = None) -> list[Tensor]:
        model = Net()
        given = {"fsdp_model_args": {"shard": [nn.Linear]}} if mode == "fsdp" else {}
        callbacks = [ModelCheckpoint(tmp_path, every_n_steps=1, keep=None), ReplacesTheNet()]
        loop = loop_of(model, nn.MSELoss(), optim.Adam(model.parameters(), lr=0.01), mode)
        loop.fit(3, callbacks=callbacks, resume_from=resume_from, **given)
        return [p.detach().clone() for p in model.parameters()]

    whole = trained()
    (late,) = [c.path for c in checkpoints(tmp_path) if c.info is not None and c.info.step == 10]
    assert all(map(torch.equal, trained(late), whole))


def test_a_parameter_that_another_runs_optimizer_does_not_have_is_named(tmp_path: Path) -> None:
    model = UnknownOfMean()
    sgd = optim.SGD([*model.parameters(), *model.beside], lr=0.01)
    loop_of(model, None, sgd).fit(1, callbacks=[ModelCheckpoint(tmp_path)])
    other = UnknownOfMean()
    other.beside = [nn.Parameter(torch.ones(1, dtype=D))]
    sgd = optim.SGD([*other.parameters(), *other.beside], lr=0.01)
    with pytest.warns(UserWarning, match="do not both have parameter 2 of the optimizer, which the model does not"):
        loop_of(other, None, sgd).fit(2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_parameter_that_ranks_have_twice_is_named(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, twice = Net(), nn.Parameter(torch.ones(3, dtype=D))
    loop_of(model, nn.MSELoss(), optim.SGD([*model.parameters(), twice], lr=0.01), mode).fit(1)
    assert capfd.readouterr().err.count("parameter 2 of the optimizer, which the model does not have, got no") == 1


class Centres(nn.Module):
    """Follows the mean of the outputs, which differs between ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        centre = torch.zeros(3, dtype=D)
        if kind == "buffer":
            self.register_buffer("centre", centre)
        else:
            self.centre = nn.Parameter(centre, requires_grad=False)

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(out.mean(0), 0.5)
        return (out - y).square().mean() + (out - self.centre).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_changes_that_differ_between_ranks_are_reported(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    loop_of(model, Centres("buffer"), optim.SGD(model.parameters(), lr=0.05), mode).fit(1)
    assert capfd.readouterr().err.count("get_loss has changed criterion.centre differently on each rank") == 1
    with pytest.raises(WorkerFailedError, match=r"the ranks' weights differ: criterion\.centre differs"):
        loop_of(model, Centres("parameter"), optim.SGD(model.parameters(), lr=0.05), mode).fit(1)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode", ["single", "dp", "ddp", "fsdp"])
@pytest.mark.parametrize("how", ["argument", "callback"])
def test_its_parameters_are_clipped_and_measured(mode: str, how: str) -> None:
    model, criterion = Net(), Margin()
    sgd: Any = optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.05)
    limit = {"gradient_clip_norm": 0.7} if how == "argument" else {}
    loop = loop_of(
        model, criterion, MultiOptimizer([sgd]) if how == "argument" and mode == "single" else sgd, mode, **limit
    )
    callbacks: list[AbstractCallback] = [GradientStats(every_n_steps=1)] if mode != "fsdp" else []
    loop.fit(1, callbacks=callbacks if limit else [*callbacks, GradientClipping(0.7)])
    expected, norm = by_hand(0.7)
    torch.testing.assert_close([*model.parameters(), *criterion.parameters()], list(expected), rtol=0, atol=1e-12)
    if callbacks and not isinstance(loop.optimizer, MultiOptimizer):
        assert loop.history["grad_norm"] == [pytest.approx(norm, rel=1e-5)]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode", ["single", "ddp"])
@pytest.mark.parametrize("kind", ["module", "dict"])
def test_it_is_evaluated_in_eval_mode(mode: str, kind: str) -> None:
    class Named(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return super().get_loss(batch_data, criterion["margin"] if kind == "dict" else criterion, device)

    model, margin = Named(), Margin(dropout=0.5)
    criterion: Any = {"margin": margin} if kind == "dict" else margin
    loop = loop_of(model, criterion, optim.SGD([*model.parameters(), *margin.parameters()], lr=0.05), mode)
    x, y = data(11, 3).tensors
    expected = copy.deepcopy(margin).eval()(model(x), y).item()
    assert loop.evaluate_loss_on_validation_set() == pytest.approx(expected, abs=1e-12)
    assert margin.training
    assert margin.seen == 0


def test_load_best_loads_it_too(tmp_path: Path) -> None:
    class Worse(AbstractCallback):
        def on_epoch_begin(self) -> None:
            loop.optimizer.param_groups[0]["lr"] = 0.02 if self.train_loop_obj.epoch < 2 else 0.3

    model, margin = Net(), Margin()
    loop = loop_of(model, margin, optim.SGD([*model.parameters(), *margin.parameters()], lr=0.02))
    best = ModelCheckpoint(tmp_path, monitor="val_loss", keep=1)
    loop.fit(3, callbacks=[Worse("worse"), best])
    assert loop.evaluate_loss_on_validation_set() != best.best_value
    best.load_best()
    assert loop.evaluate_loss_on_validation_set() == best.best_value


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_criterion_may_hold_the_model(mode: str, tmp_path: Path) -> None:
    weights = []
    for one in ("single", mode):
        model = Net()
        loop = loop_of(model, Regularized(model), optim.SGD(model.parameters(), lr=0.05), one)
        loop.fit(1, callbacks=[ModelCheckpoint(tmp_path / one)])
        loop.fit(2, callbacks=[ModelCheckpoint(tmp_path / one)], resume_from="last")
        weights.append((model.net.weight.detach(), loop.history["val_loss"][-1]))
    torch.testing.assert_close(weights[0][0], weights[1][0], rtol=0, atol=1e-12)
    assert weights[0][1] == pytest.approx(weights[1][1])


@pytest.mark.long(but=1)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_for_gradients_are_reported_in_ddp(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    getattr(model.net.weight, kind)(clamped)
    loop_of(model, nn.MSELoss(), optim.SGD(model.parameters(), lr=0.05), "ddp").fit(1)
    assert f"net.weight has a hook for its gradient ({kind})" in capfd.readouterr().err


def clamped(gradient: Tensor) -> None:
    gradient.clamp(-1, 1)


class Named(Net):
    """Its criterion is a dict with a list in it."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        out = self(x)
        return criterion["mean"](out, y) + criterion["learned"][0](out, y)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["single", "fsdp"])
def test_modules_in_a_dict_are_resumed_and_come_back(mode: str, tmp_path: Path) -> None:
    def fit(epochs: int, folder: str, **kwargs: Any) -> TrainLoop[Any]:
        model, criterion = Named(), {"mean": nn.MSELoss(), "learned": [Margin()], "no module": abs}
        adam = optim.Adam([*model.parameters(), *criterion["learned"][0].parameters()], lr=0.05)
        loop = loop_of(model, criterion, adam, mode, seed=1)
        loop.fit(num_epochs=epochs, callbacks=[ModelCheckpoint(tmp_path / folder)], **kwargs)
        return loop

    whole, begun = fit(3, "whole"), fit(1, "begun")
    resumed = fit(3, "begun", resume_from="last")
    learned, half, again = (loop.criterion["learned"][0].state_dict() for loop in (whole, begun, resumed))
    assert not torch.equal(half["scale"], Margin().scale)
    assert not torch.equal(half["scale"], learned["scale"])
    assert all(torch.equal(learned[name], again[name]) for name in ("scale", "seen"))
    assert learned["seen"] == 3 * (24 if mode == "single" else 12)


class GathersItsRows(Net):
    """A loss over the rows of all ranks, by a function that a rank without a batch does not call."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        others = distributed.gather_object(len(x))
        return criterion(self(x), y) * len(others)


@pytest.mark.long
def test_a_rank_without_rows_in_a_loss_over_ranks_is_named_as_a_cause() -> None:
    model = GathersItsRows()
    loop = loop_of(model, nn.MSELoss(), optim.SGD(model.parameters(), lr=0.1), "ddp", timeout=60)
    loop.train_loader = DataLoader(data(7), batch_size=3)  # the last batch of an epoch is rank 0's only
    with pytest.raises(WorkerFailedError) as caught:
        loop.fit(num_epochs=1)
    assert re.search("rank 1 has no samples in this batch|rank without samples", str(caught.value))
    assert "drop_last=True" in str(caught.value)


class Rows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 1, sparse=True, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.rows(torch.zeros(len(x), dtype=torch.int64))


def test_sparse_gradients_are_no_hook_of_the_user(capfd: pytest.CaptureFixture[str]) -> None:
    """DDP divides them in place, so that the wrapper copies them in a hook."""
    model = Rows()
    loop_of(model, nn.MSELoss(), optim.SGD(model.parameters(), lr=0.05), "ddp").fit(1)
    assert "has a hook" not in capfd.readouterr().err
