"""Modules that the user put into eval() stay so, over epochs, evaluations and predictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import reference
from torch import Tensor, nn
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


class Freezing(Net):
    """The usual recipe: a train() of one's own; a flag ends it."""

    frozen = True

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        if self.frozen:
            self.body.eval()
        return self


class Modes(AbstractCallback):
    def __init__(self, act: Any = None) -> None:
        super().__init__("modes")
        self.act = act
        self.seen: list[list[str]] = []

    def on_epoch_begin(self) -> None:
        if self.act is not None:
            self.act(self.train_loop_obj)

    def on_batch_end(self) -> None:
        self.seen.append([name for name, m in self.train_loop_obj.model.named_modules() if not m.training])


def fit(model: Net, callback: Modes, epochs: int = 2, **options: Any) -> TrainLoop:
    loader = DataLoader(make_data(64), 16)
    tl = TrainLoop(
        model,
        loader,
        loader,
        loader,
        torch.optim.SGD(model.parameters(), 0.1),
        nn.CrossEntropyLoss(),
        **{"progress_bar": False, "accelerator": "cpu", **options},
    )
    tl.fit(num_epochs=epochs, callbacks=[callback])
    return tl


BODY = ["body", "body.0", "body.1", "body.2"]


@pytest.mark.parametrize("options", [{}, {"gpu_mode": "dp", "devices": 2}], ids=["single", "dp"])
def test_a_frozen_part_stays_in_eval_as_in_the_loop_by_hand(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = Net(), Net()
    ours.body.eval()
    modes = Modes()
    tl = fit(ours, modes, progress_bar=True, **options)
    assert capsys.readouterr().out.count("modules that stay in eval() while training: body (") == 1
    tl.predict_on_test_set()
    assert modes.seen == [BODY] * 8
    assert ours.training
    assert [name for name, m in ours.named_modules() if not m.training] == BODY

    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for _ in range(2):
        theirs.train()
        theirs.body.eval()
        for x, y in DataLoader(make_data(64), 16):
            nn.functional.cross_entropy(theirs(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    statistics = ours.body[1].running_mean
    assert torch.equal(statistics, torch.zeros_like(statistics))
    if not options:
        assert reference.identical(ours, theirs)


def test_a_model_in_eval_as_a_whole_is_trained_as_a_whole() -> None:
    model, modes = Net(), Modes()
    model.eval()
    fit(model, modes)
    assert modes.seen == [[]] * 8


def test_a_callback_that_leaves_the_model_in_eval_changes_nothing_about_its_parts() -> None:
    model, modes = Net(), Modes(lambda tl: tl.epoch and tl.model.eval())
    model.body.eval()
    with pytest.warns(UserWarning, match="put into eval\\(\\) in on_epoch_begin, and the loop switches it back"):
        fit(model, modes)
    assert modes.seen == [BODY] * 8


def test_a_callback_may_train_the_whole_model_in_eval() -> None:
    class Evaluates(Modes):
        def on_batch_begin(self) -> None:
            self.train_loop_obj.model.eval()

    model, modes = Net(), Evaluates()
    fit(model, modes)
    assert modes.seen == [[name for name, _ in model.named_modules()]] * 8


def test_a_callback_may_freeze_and_thaw() -> None:
    def act(tl: TrainLoop) -> None:
        tl.model.body.train(tl.epoch != 1)

    model, modes = Net(), Modes(act)
    fit(model, modes, epochs=3)
    assert modes.seen == [[]] * 4 + [BODY] * 4 + [[]] * 4


def test_a_train_method_of_ones_own_decides() -> None:
    def thaw(tl: TrainLoop) -> None:
        tl.model.frozen = tl.epoch == 0

    model, modes = Freezing(), Modes(thaw)
    fit(model, modes)
    assert modes.seen == [BODY] * 4 + [[]] * 4


class Merged(nn.Linear):
    """A layer of LoRA: ``eval()`` adds the low-rank weights to the frozen ones, and ``train()`` subtracts them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.low = nn.Parameter(torch.randn(outputs, 1))
        self.high = nn.Parameter(torch.randn(1, inputs))
        self.merged = False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode is self.merged:
            self.weight.data += (self.low @ self.high) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.merged else super().forward(x) + x @ self.high.T @ self.low.T


class LoRA(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Merged(8, 16), Merged(16, 16))


def test_what_eval_changes_is_undone_after_each_evaluation() -> None:
    class Evaluates(Modes):
        def on_batch_end(self) -> None:
            self.train_loop_obj.evaluate_loss_on_validation_set()

    ours, theirs = LoRA().double(), LoRA().double()
    loader = [(x.double(), y) for x, y in DataLoader(make_data(64), 16)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, theirs)]
    tl = TrainLoop(ours, loader, loader, None, optimizers[0], nn.CrossEntropyLoss(), progress_bar=False)
    tl.fit(num_epochs=2, callbacks=[Evaluates()])
    for x, y in loader * 2:
        theirs.train()
        nn.functional.cross_entropy(theirs(x), y).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        theirs.eval()
    theirs.train()
    assert not any(part.merged for part in ours.body)
    assert reference.largest_difference(ours, theirs) < 1e-12
