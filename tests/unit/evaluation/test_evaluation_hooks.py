"""Hooks around evaluation passes: of callbacks, and of a model that carries state from batch to batch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from kit.small_loop import Net, make_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.errors import ConfigurationError


class Passes(AbstractCallback):
    """Writes down each pass: what it was told, and how the model stood."""

    def __init__(self) -> None:
        super().__init__("passes")
        self.heard: list[Any] = []

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        self.heard.append(("begin", dict(dataset_info), self.train_loop_obj.model.training, torch.is_grad_enabled()))

    def on_after_batch_prediction(self, y_pred: Any, y_true: Any, metadata: Any, dataset_info: dict[str, Any]) -> None:
        dataset_info["batches"] = dataset_info.get("batches", 0) + 1

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        self.heard.append(("end", dict(dataset_info)))

    def take(self) -> list[Any]:
        heard, self.heard = self.heard, []
        return heard


def test_hooks_stand_around_every_pass() -> None:
    tl, passes = make_loop(), Passes()
    tl.test_loader = tl.validation_loader
    tl.fit(num_epochs=1, callbacks=[passes])

    def around(kind: str, purpose: str, **more: Any) -> list[Any]:
        info = {"type": kind, "pass": purpose}
        return [("begin", info, False, False), ("end", {**info, **more})]

    assert passes.take() == around("validation", "loss") + around("test", "loss")
    # outside of fit too
    tl.evaluate_loss_on_train_set()
    tl.evaluate_model_loss(tl.validation_loader)
    assert passes.take() == around("train", "loss") + around("other", "loss")
    tl.predict_on_test_set()
    assert passes.take() == around("test", "predictions", batches=3)
    given = {"type": "other", "name": "mine"}
    tl.predict_with_model(tl.validation_loader, dataset_info=given)
    (_, begun, *_), (_, ended) = passes.take()
    assert begun == {**given, "pass": "predictions"}
    assert ended == {**begun, "batches": 3}
    assert given == {"type": "other", "name": "mine"}
    tl.predict_with_model(tl.validation_loader, execute_callbacks=False)
    assert passes.take() == []


def test_a_pass_that_raises_has_no_end() -> None:
    class Breaks(Net):
        def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
            raise ZeroDivisionError("on purpose")

    tl, passes = make_loop(Breaks()), Passes()
    tl.fit(num_epochs=1, callbacks=[passes])
    passes.take()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        tl.predict_on_validation_set()
    assert [what for what, *_ in passes.take()] == ["begin"]
    assert tl.evaluate_loss_on_validation_set() == tl.history["val_loss"][-1]
    assert [what for what, *_ in passes.take()] == ["begin", "end"]


def test_random_numbers_drawn_in_a_hook_do_not_show() -> None:
    class Draws(AbstractCallback):
        def on_evaluation_begin(self) -> None:
            torch.rand(7)

        def on_evaluation_end(self) -> None:
            torch.rand(7)

    weights = []
    for callbacks in ([], [Draws()]):
        torch.manual_seed(3)
        weights.append(make_loop(shuffle=True).fit(num_epochs=3, callbacks=callbacks).fc.weight)
    assert torch.equal(*weights)


OWN_ORDER: dict[str, Any] = {
    "loader": lambda data, g: DataLoader(data, 16, shuffle=True, generator=g),
    "sampler": lambda data, g: DataLoader(data, 16, sampler=RandomSampler(data, True, 40, generator=g)),
    "weights": lambda data, g: DataLoader(data, 16, sampler=WeightedRandomSampler([1.0] * len(data), 40, generator=g)),
}


@pytest.mark.parametrize("kind", OWN_ORDER)
@pytest.mark.parametrize("hook", ["on_batch_end", "on_epoch_end"])
@pytest.mark.parametrize("mode", ["single", "dp", pytest.param("ddp", marks=pytest.mark.long)])
def test_evaluations_of_a_loader_with_a_generator_do_not_change_the_training(kind: str, hook: str, mode: str) -> None:
    class Evaluates(AbstractCallback):
        def evaluate(self) -> None:
            self.train_loop_obj.evaluate_loss_on_train_set()
            self.train_loop_obj.predict_on_validation_set()

    setattr(Evaluates, hook, Evaluates.evaluate)
    weights = []
    for callbacks in ([], [Evaluates()]):
        tl = make_loop(gpu_mode=mode, devices=1 if mode == "single" else 2)
        generator = torch.Generator().manual_seed(4)
        tl.train_loader = OWN_ORDER[kind](make_data(41), generator)
        tl.validation_loader = DataLoader(make_data(17, seed=5), 16, shuffle=True, generator=generator)
        weights.append(tl.fit(num_epochs=2, callbacks=callbacks).fc.weight)
    assert torch.equal(*weights)


class Draws(Net):
    """Draws noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 3)
        self.generator = torch.Generator().manual_seed(4)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        noise = torch.rand(1, generator=self.generator)
        return noise * super().get_loss(batch_data, criterion, device)


class Noisy(TensorDataset):
    """Draws from a generator of its own, too."""

    def __init__(self) -> None:
        super().__init__(*make_data().tensors)
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.rng.random(), y


@pytest.mark.parametrize("mode", ["single", pytest.param("ddp", marks=pytest.mark.long)])
def test_evaluations_do_not_advance_generators_of_the_model_and_the_dataset(mode: str) -> None:
    class Evaluates(AbstractCallback):
        def on_batch_end(self) -> None:
            self.train_loop_obj.evaluate_loss_on_train_set()

    weights = []
    for callbacks in ([], [Evaluates()]):
        tl = make_loop(Draws(), gpu_mode=mode, devices=1 if mode == "single" else 2, end_auto_eval=False)
        tl.train_loader = DataLoader(Noisy(), 16)
        weights.append(tl.fit(num_epochs=2, callbacks=callbacks).fc.weight)
    assert torch.equal(*weights)


class NoisyLoss:
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(6)

    def __call__(self, y_pred: Tensor, y: Tensor) -> Tensor:
        return torch.rand(1, generator=self.generator) * nn.functional.cross_entropy(y_pred, y)


class NoisyLossModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draws = NoisyLoss()
        self.generator = self.draws.generator
        self.forward = self.draws


class NamesItsLoss(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        return criterion["of classes"][0](self(x), y)


@pytest.mark.parametrize("kind", [NoisyLoss, NoisyLossModule])
def test_evaluations_do_not_advance_generators_of_a_criterion_in_a_dict(kind: Any) -> None:
    histories = []
    for auto_eval in (False, True):
        torch.manual_seed(0)
        loop = make_loop(NamesItsLoss(), end_auto_eval=auto_eval)
        loop.criterion = {"of classes": [kind()]}
        loop.fit(num_epochs=3)
        histories.append(loop.history["loss"])
    assert histories[0] == histories[1]


class Prefetcher:
    """Its own iterator, which begins again in ``__iter__``."""

    def __init__(self) -> None:
        self.batches = list(DataLoader(make_data(), 16))
        self.done = 0

    def __iter__(self) -> Prefetcher:
        self.done = 0
        return self

    def __next__(self) -> Any:
        if self.done == len(self.batches):
            raise StopIteration
        self.done += 1
        return self.batches[self.done - 1]


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_batch_begin", "on_after_optimizer_step", "on_epoch_end"])
def test_a_loader_that_is_its_own_iterator_is_not_evaluated_while_it_is_read(hook: str) -> None:
    class Evaluates(AbstractCallback):
        def evaluate(self) -> None:
            self.train_loop_obj.evaluate(self.train_loop_obj.train_loader)

    setattr(Evaluates, hook, Evaluates.evaluate)
    tl = make_loop()
    tl.train_loader = Prefetcher()
    if hook.startswith("on_epoch"):
        tl.fit(num_epochs=2, callbacks=[Evaluates()])
        assert tl.global_step == 14
    else:
        with pytest.raises(ConfigurationError, match=r"its own iterator \(Prefetcher has __next__\)"):
            tl.fit(num_epochs=2, callbacks=[Evaluates()])


class OwnIndices:
    """A sampler that is its own iterator, which begins again in ``__iter__``."""

    def __iter__(self) -> OwnIndices:
        self.left = list(range(10))
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("same_loader", [True, False])
def test_a_sampler_that_is_its_own_iterator_is_not_evaluated_while_it_is_read(same_loader: bool) -> None:
    class Evaluates(AbstractCallback):
        def on_batch_end(self) -> None:
            self.train_loop_obj.evaluate(loader if same_loader else DataLoader(make_data(), 5, sampler=sampler))

    sampler: Any = OwnIndices()
    loader = DataLoader(make_data(), 4, sampler=sampler)
    tl = make_loop()
    tl.train_loader = loader
    with pytest.raises(ConfigurationError, match=r"train_loader\.sampler is its own iterator \(OwnIndices has"):
        tl.fit(num_epochs=1, callbacks=[Evaluates()])
    assert len(tl.predict_with_model(loader)[0]) == 10


# -- a model's own -----------------------------------------------------------------------------------------------------


class Recurrent(TTBasicModel):
    """Truncated backpropagation through time: each batch goes on with the hidden state of the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.RNN(8, 5)
        self.out = nn.Linear(5, 3)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = self.rnn(x, self.hidden)  # a batch is a stretch of one long sequence
        self.hidden = hidden.detach()
        return self.out(y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return self(x).argmax(1), y, {}


class Resetting(Recurrent):
    def on_epoch_begin(self) -> None:
        self.hidden = None

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        self.kept, self.hidden = self.hidden, None

    def on_evaluation_end(self) -> None:  # the argument may be left out
        self.hidden = self.kept


def test_a_model_resets_what_it_carries() -> None:
    """Evaluated in the middle of epochs and after them: each number is that of a loop by hand."""
    train, validation = DataLoader(make_data(), 16), DataLoader(make_data(33, seed=5), 16)
    criterion = nn.CrossEntropyLoss()

    def evaluated(model: Recurrent) -> float:
        kept, model.hidden, total = model.hidden, None, 0.0
        with torch.no_grad():
            for x, y in validation:
                total += criterion(model(x), y).item() * len(x)
        model.hidden = kept
        return total / 33

    by_hand = Recurrent()
    optimizer = optim.SGD(by_hand.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        by_hand.hidden = None
        for x, y in train:
            optimizer.zero_grad()
            criterion(by_hand(x), y).backward()
            optimizer.step()
            expected.append(evaluated(by_hand))
        expected.append(evaluated(by_hand))

    found = []

    class Evaluates(AbstractCallback):
        def on_after_optimizer_step(self) -> None:
            found.append(self.train_loop_obj.evaluate_loss_on_validation_set())

        def on_epoch_end(self) -> None:
            # without callbacks, the model's own hooks are called all the same
            self.train_loop_obj.predict_with_model(validation, execute_callbacks=False)
            found.append(self.train_loop_obj.history["val_loss"][-1])

    model = Resetting()
    tl = TrainLoop(model, train, validation, None, optim.SGD(model.parameters(), lr=0.1), criterion, progress_bar=False)
    tl.fit(num_epochs=2, callbacks=[Evaluates()])
    assert found == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters()))


def test_a_models_hook_that_can_not_be_called_is_refused() -> None:
    class Wrong(Net):
        def on_epoch_begin(self, epoch: int, total: int) -> None: ...  # type: ignore[override]

    with pytest.raises(ConfigurationError, match=r"Wrong.on_epoch_begin\(self, epoch: .* does not accept the argum"):
        make_loop(Wrong()).fit(num_epochs=1)


class Swaps(AbstractCallback):
    """Trains with one criterion and evaluates with another one, as mixup does."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__("swaps")
        self.plain = plain

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        tl = self.train_loop_obj
        self.training, tl.criterion = tl.criterion, self.plain

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        self.train_loop_obj.criterion = self.training


def test_a_criterion_assigned_when_an_evaluation_begins_is_that_of_the_evaluation() -> None:
    plain = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]), reduction="mean")
    tl = make_loop()
    tl.fit(num_epochs=1, callbacks=[Swaps(plain)])
    with torch.no_grad():
        rows = [tl.validation_loader.dataset[i] for i in range(len(tl.validation_loader.dataset))]
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        expected = plain(tl.model(x), y).item()
    assert tl.history["val_loss"] == [pytest.approx(expected, rel=1e-5)]
    assert tl.criterion is not plain


def test_a_part_that_is_assigned_when_an_evaluation_begins_is_evaluated() -> None:
    class Swaps(AbstractCallback):
        def on_evaluation_begin(self, dataset_info: Any) -> None:
            model: Any = self.train_loop_obj.model
            self.before, model.fc = model.fc, nn.Sequential(model.fc, nn.Dropout(0.5))

        def on_evaluation_end(self, dataset_info: Any) -> None:
            model: Any = self.train_loop_obj.model
            modes.append(model.fc[1].training)
            model.fc = self.before

    modes: list[bool] = []
    torch.manual_seed(0)
    plain, swaps = (make_loop(copy.deepcopy(model)) for model in [Net()] * 2)
    for loop, callbacks in ((plain, []), (swaps, [Swaps()])):
        loop.validation_loader = DataLoader(make_data(17, seed=5), 16)
        loop.fit(num_epochs=2, callbacks=callbacks)
    assert modes == [False] * 2
    assert swaps.history["val_loss"] == plain.history["val_loss"]
