"""get_loss as a generator: one optimizer's step after another within a batch, in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kit import reference
from kit.alternating_models import (
    DCGAN,
    WGAN,
    Discrepancy,
    dcgan_by_hand,
    dcgan_optimizers,
    discrepancy_by_hand,
    discrepancy_optimizers,
    images,
    points,
    wgan_by_hand,
    wgan_optimizers,
)
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_data
from trainloop import AbstractCallback, ModelWrap, MultiLoss, MultiOptimizer, TrainLoop, TTBasicModel
from trainloop.callbacks import GradientClipping, LRScheduler
from trainloop.data.batch_model_feed_defs import AbstractModelFeedDefinition
from trainloop.errors import ConfigurationError
from trainloop.model import yields_losses
from trainloop.parallel import TTDataParallel


def loop_of(model: Any, loader: Any, optimizer: Any, criterion: Any = None, **arguments: Any) -> TrainLoop:
    return TrainLoop(
        model,
        loader,
        optimizer=optimizer,
        criterion=criterion,
        progress_bar=False,
        **{"accelerator": "cpu", **arguments},
    )


class Witness(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("witness")
        self.calls: list[str] = []

    def on_batch_begin(self) -> None:
        self.calls.append("begin")

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        self.calls.append(f"gradients {optimizer_idx}")

    def on_after_optimizer_step(self) -> None:
        self.calls.append("step")

    def on_batch_end(self) -> None:
        self.calls.append("end")


def test_dcgan_of_pytorchs_examples() -> None:
    torch.manual_seed(0)
    ours = DCGAN()
    theirs = copy.deepcopy(ours)
    loader = DataLoader(images(), batch_size=16, shuffle=True)
    torch.manual_seed(1)
    loss_d, loss_g = dcgan_by_hand(theirs, loader, epochs=3)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    tl = loop_of(ours, loader, dcgan_optimizers(ours), nn.BCELoss())
    seen = Witness()
    tl.fit(num_epochs=3, callbacks=[seen])
    assert reference.identical(ours, theirs)
    assert torch.equal(torch.get_rng_state(), after)
    assert seen.calls == 9 * ["begin", "gradients 1", "gradients 0", "step", "end"]
    assert tl.global_step == 9
    assert tl.history["loss_discriminator"][-1] == pytest.approx(loss_d, rel=1e-6)
    assert tl.history["loss_generator"][-1] == pytest.approx(loss_g, rel=1e-6)
    assert tl.history["loss"][-1] == pytest.approx(loss_d + loss_g, rel=1e-6)
    assert len(tl.history.steps("loss_generator")) == 9
    losses = tl.evaluate_loss_on_train_set()  # no steps
    assert isinstance(losses, dict)
    assert set(losses) == {"generator", "discriminator"}
    assert reference.identical(ours, theirs)
    assert len(tl.predict_on_train_set()[0]) == 40


@pytest.mark.long(every=2)
@pytest.mark.parametrize("mode", ["single", "dp", "accumulated", "weighted", "amp"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_several_steps_of_one(mode: str, max_norm: float | None) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if mode == "amp" else torch.float64
    ours = WGAN(weighted=mode == "weighted").to(dtype)
    theirs = copy.deepcopy(ours)
    data = points(45, dtype)
    loader = DataLoader(data, batch_size=4 if mode == "accumulated" else 20)
    clip: Any = {"callbacks": [GradientClipping(max_norm=max_norm)]} if max_norm and mode == "single" else {}
    tl = loop_of(
        ours,
        loader,
        wgan_optimizers(ours),
        gradient_clip_norm=None if clip else max_norm,
        gpu_mode="dp" if mode == "dp" else "single",
        devices=3 if mode == "dp" else "auto",
        use_amp={"init_scale": 2.0**4} if mode == "amp" else False,
    )
    tl.fit(num_epochs=2, grad_accumulation=5 if mode == "accumulated" else 1, **clip)
    wgan_by_hand(theirs, DataLoader(data, batch_size=20), 2, max_norm)
    difference = reference.largest_difference(ours, theirs)
    if mode == "amp":
        assert difference < 0.05  # float16's rounding, through Adam
    else:
        assert difference <= (1e-12 if mode in ("dp", "accumulated") else 0.0)
    assert tl.global_step == 6
    assert set(tl.history) == {"loss", "loss_critic", "loss_generator", "critic_now"}


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("mode", ["single", "dp", "accumulated"])
def test_one_loss_steps_several_optimizers(mode: str, max_norm: float | None) -> None:
    torch.manual_seed(0)
    ours = Discrepancy().double()
    theirs = copy.deepcopy(ours)
    tl = loop_of(
        ours,
        DataLoader(points(45), batch_size=4 if mode == "accumulated" else 20),
        discrepancy_optimizers(ours),
        gradient_clip_norm=max_norm,
        gpu_mode="dp" if mode == "dp" else "single",
        devices=3 if mode == "dp" else "auto",
    )
    tl.fit(num_epochs=2, grad_accumulation=5 if mode == "accumulated" else 1)
    discrepancy_by_hand(theirs, DataLoader(points(45), batch_size=20), 2, max_norm)
    assert reference.largest_difference(ours, theirs) <= (0.0 if mode == "single" else 1e-12)
    assert set(tl.history) == {"loss", "loss_generator_and_first_and_second", "loss_first_and_second", "loss_generator"}


def test_an_unknown_one_of_several_optimizers_is_named() -> None:
    class Wrong(Discrepancy):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            yield ("generator", "frist"), self.fits(batch_data[0])

    model = Wrong().double()
    with pytest.raises(ConfigurationError, match="is for optimizer 'frist'"):
        loop_of(model, DataLoader(points(4)), discrepancy_optimizers(model)).fit(num_epochs=1)


class Repeats(TTBasicModel):
    """One optimizer, and several steps of it on each batch: no name is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        for _ in range(2):
            yield super().get_loss(batch_data, criterion, device)


class Feed(AbstractModelFeedDefinition):
    def get_loss(self, model: nn.Module, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        for _ in range(2):
            yield criterion(model(batch_data[0]), batch_data[1])

    def get_predictions(self, model: nn.Module, batch_data: Any, device: torch.device) -> Any:
        return model(batch_data[0]), batch_data[1], {}


@pytest.mark.parametrize("wrapped", [False, True], ids=["TTModel", "ModelWrap"])
def test_one_optimizer_steps_twice_on_each_batch(wrapped: bool) -> None:
    torch.manual_seed(0)
    plain = Repeats()
    ours: Any = ModelWrap(copy.deepcopy(plain.fc), Feed()) if wrapped else plain
    theirs = copy.deepcopy(plain.fc)
    assert yields_losses(ours)
    loader = DataLoader(make_data(), batch_size=16)
    optimizer = optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    schedule = LRScheduler(optim.lr_scheduler.StepLR(optimizer, 3), interval="step")
    tl = loop_of(ours, loader, optimizer, nn.CrossEntropyLoss())
    tl.fit(num_epochs=2, callbacks=[schedule])
    by_hand = optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    by_hand_schedule = optim.lr_scheduler.StepLR(by_hand, 3)
    for x, y in [*loader, *loader]:
        for _ in range(2):
            by_hand.zero_grad()
            nn.functional.cross_entropy(theirs(x), y).backward()
            by_hand.step()
        by_hand_schedule.step()  # once a batch, as a step is counted
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=0, atol=0)
    assert set(tl.history) == {"loss"}
    assert isinstance(tl.evaluate_loss_on_train_set(), float)


def test_the_wrapper_alone_yields_the_losses_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    ours = WGAN().double()
    theirs = copy.deepcopy(ours)
    wrapper, optimizers = TTDataParallel(ours, devices=3), wgan_optimizers(ours)
    batches = [tuple(batch) for batch in DataLoader(points(45), batch_size=20)]
    for batch in batches:
        for name, loss in wrapper.get_loss(batch, None, torch.device("cpu")):
            optimizers.zero_grad()
            loss.backward()
            optimizers[name].step()
    wgan_by_hand(theirs, batches, 1)
    assert reference.largest_difference(ours, theirs) < 1e-12


class Odd(TTBasicModel):
    """Yields whatever the test says."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(3, 3)
        self.give = give

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        yield from self.give(self, criterion(self(batch_data[0]), batch_data[1]), len(batch_data[0]))


@pytest.mark.parametrize(
    ("give", "accumulation", "message"),
    [
        (lambda model, loss, size: [loss], 1, r"without saying which of 2 optimizers"),
        (lambda model, loss, size: [("c", loss)], 1, r"is for optimizer 'c', but there are 2"),
        (lambda model, loss, size: [("a", MultiLoss({"x": loss}))], 1, r"yielded a MultiLoss. Yield the losses one by"),
        (lambda model, loss, size: [("a", 0.5)], 1, r"get_loss returned a float"),
        (lambda model, loss, size: [("a", loss.detach())], 1, r"without a graph"),
        (lambda model, loss, size: [], 1, r"yielded no loss for a batch"),
        (lambda model, loss, size: [("a", loss), ("b", loss)], 1, r"begins before an earlier yield"),
        (
            lambda model, loss, size: [("a" if size > 5 else "b", loss)],
            2,
            r"Make the sequence of losses depend only on",
        ),
        (lambda model, loss, size: [("a", loss)] * (size > 5), 2, r"Make the sequence of losses depend only on"),
    ],
)
def test_what_may_be_yielded(give: Any, accumulation: int, message: str) -> None:
    model = Odd(give)
    optimizer = MultiOptimizer({name: optim.SGD(getattr(model, name).parameters(), lr=0.1) for name in "ab"})
    with pytest.raises(ConfigurationError, match=message):
        loop_of(model, DataLoader(make_data(15), batch_size=10), optimizer, nn.CrossEntropyLoss()).fit(
            num_epochs=1, grad_accumulation=accumulation
        )


def test_hooks_at_the_end_of_micro_batches_count_them() -> None:
    class Indices(AbstractCallback):
        def __init__(self) -> None:
            super().__init__("indices")
            self.seen: list[int] = []

        def on_batch_end(self) -> None:
            self.seen.append(self.train_loop_obj.total_iteration_idx)

    model, indices = Repeats(), Indices()
    loader = DataLoader(make_data(50), batch_size=10)
    tl = loop_of(model, loader, optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    tl.fit(num_epochs=2, grad_accumulation=2, callbacks=[indices])
    assert indices.seen == list(range(10))


def test_what_else_can_not_be() -> None:
    class Passing(Repeats):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return super().get_loss(batch_data, criterion, device)

    loader = DataLoader(make_data(15), batch_size=10)
    model = Passing()
    with pytest.raises(ConfigurationError, match=r"returned a generator, .* `yield from super\(\).get_loss\(...\)`"):
        loop_of(model, loader, optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()).fit(num_epochs=1)
    repeats = Repeats()
    with pytest.raises(ConfigurationError, match=r"LBFGS .* get_loss yields its losses"):
        loop_of(repeats, loader, optim.LBFGS(repeats.parameters())).fit(num_epochs=1)
    mixed = Odd(lambda model, loss, size: [loss, ("a", loss)])
    with pytest.raises(
        ConfigurationError, match=r"yielded some losses with an optimizer \('a'\), and others without one"
    ):
        loop_of(mixed, loader, None, nn.CrossEntropyLoss()).evaluate_loss_on_train_set()
    unnamed = Odd(lambda model, loss, size: [("a", loss)])
    optimizer = MultiOptimizer([optim.SGD(part.parameters(), lr=0.1) for part in (unnamed.a, unnamed.b)])
    with pytest.raises(
        ConfigurationError, match=r"optimizer 'a', .* without names\)\. Yield .* `yield 0, loss`, or name"
    ):
        loop_of(unnamed, loader, optimizer, nn.CrossEntropyLoss()).fit(num_epochs=1)


@pytest.mark.parametrize("explicit", [False, True], ids=["class weights", "(loss, weight)"])
def test_each_loss_has_its_own_weight_in_the_history(explicit: bool) -> None:
    """A mean over class weights and a mean over samples; the rates are 0, so that each epoch has the same losses."""
    weights = torch.tensor([1.0, 3.0, 0.5])

    class Weighted(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 1)

        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            x, y = batch_data
            loss = criterion(self.a(x), y)
            yield "a", (loss * 1.0, weights[y].sum()) if explicit else loss
            yield "b", self.b(x).square().mean()

    model = Weighted()
    optimizer = MultiOptimizer({name: optim.SGD(getattr(model, name).parameters(), lr=0.0) for name in "ab"})
    data = make_data(15)
    loader = DataLoader(data, batch_size=10)
    loop = loop_of(model, loader, optimizer, nn.CrossEntropyLoss(weight=weights), validation_loader=loader)
    loop.fit(num_epochs=1)
    x, y = data.tensors
    expected = {"a": nn.functional.cross_entropy(model.a(x), y, weights), "b": model.b(x).square().mean()}
    for kind in ("loss", "val_loss"):
        for name, value in expected.items():
            assert loop.history[f"{kind}_{name}"] == [pytest.approx(value.item(), rel=1e-6)]
        assert loop.history[kind] == [pytest.approx(sum(value.item() for value in expected.values()), rel=1e-6)]


class Replaces(AbstractCallback):
    """At the third step, replaces what the loop trains with."""

    def __init__(self, change: Any) -> None:
        super().__init__("replaces")
        self.change = change

    def on_batch_begin(self) -> None:
        if self.train_loop_obj.global_step == 2:
            self.change(self.train_loop_obj)


def test_what_a_hook_assigns_at_a_batch_trains_from_that_batch_on() -> None:
    def others(model: Any) -> MultiOptimizer:
        return MultiOptimizer({name: optim.Adam(getattr(model, name).parameters(), 0.01) for name in "ab"})

    class Two(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 3)

        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            x, y = batch_data
            yield "a", criterion(self.a(x), y)
            yield "b", criterion(self.b(x) + self.a(x).detach(), y)

    ours, theirs = Two(), Two()
    loader = DataLoader(make_data(40), batch_size=8)
    steps = iter(range(5))
    criterion: Any = nn.CrossEntropyLoss()
    optimizers: Any = {name: optim.SGD(getattr(theirs, name).parameters(), 0.1) for name in "ab"}
    for batch in loader:
        if next(steps) == 2:
            optimizers, criterion = others(theirs), nn.CrossEntropyLoss(label_smoothing=0.1)
        for name, loss in theirs.get_loss(batch, criterion, torch.device("cpu")):
            theirs.zero_grad()
            loss.backward()
            optimizers[name].step()

    def change(loop: Any) -> None:
        loop.optimizer, loop.criterion = others(loop.model), nn.CrossEntropyLoss(label_smoothing=0.1)

    first = MultiOptimizer({name: optim.SGD(getattr(ours, name).parameters(), 0.1) for name in "ab"})
    loop = loop_of(ours, loader, first, nn.CrossEntropyLoss())
    loop.fit(num_epochs=1, callbacks=[Replaces(change)])
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=0, atol=0)


def test_a_weighted_class_loss_among_others_is_warned_of() -> None:
    class Sum(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            x, y = batch_data
            yield criterion(self.layer(x), y) + self.layer.weight.square().sum()

    model = Sum()
    loader = DataLoader(make_data(16), batch_size=4)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]))
    with pytest.warns(UserWarning, match="averages over the targets' weights"):
        loop_of(model, loader, optim.SGD(model.parameters(), 0.1), criterion).fit(num_epochs=1, grad_accumulation=2)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.factor = nn.Parameter(torch.ones(3)), 1.0

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output * self.scale * self.factor, y)


class Shifted(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Sequential(nn.Linear(8, 3)), nn.Linear(8, 3)
        self.gain, self.gains = 1.0, [1.0]
        self.register_buffer("shift", torch.zeros(3))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        yield "a", criterion(self.a(x) * self.gain + self.shift, y)
        yield "b", criterion(self.b(x) * self.gain * self.gains[0] + self.a(x).detach() + self.shift, y)


def add_a_layer(model: Any, criterion: Any) -> None:
    torch.manual_seed(1)
    model.a.append(nn.Linear(3, 3).double())


BETWEEN_LOSSES: dict[str, Any] = {
    "a number": lambda model, criterion: setattr(model, "gain", 0.5),
    "a list": lambda model, criterion: model.gains.__setitem__(0, 0.5),
    "a buffer in place": lambda model, criterion: model.shift.add_(0.3),
    "another buffer": lambda model, criterion: setattr(model, "shift", torch.ones(3)),
    "the criterion": lambda model, criterion: setattr(criterion, "factor", 0.5),
    "a layer": add_a_layer,
}


@pytest.mark.parametrize("kind", BETWEEN_LOSSES)
def test_replicas_follow_what_a_hook_changes_between_two_losses_of_a_batch(kind: str) -> None:
    def trained(mode: str) -> list[Tensor]:
        class Changes(AbstractCallback):
            def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
                loop = self.train_loop_obj
                if loop.global_step == 1 and optimizer_idx == 0:
                    BETWEEN_LOSSES[kind](loop.model, loop.criterion)

        model, criterion = Shifted().double(), Learned().double()
        optimizers = {
            "a": optim.SGD([*model.a.parameters(), *criterion.parameters()], 0.1),
            "b": optim.SGD(model.b.parameters(), 0.1),
        }
        ranks: dict[str, Any] = {} if mode == "single" else {"devices": 2}
        x, y = make_data(24).tensors
        loader = DataLoader(TensorDataset(x.double(), y), batch_size=8)
        loop = loop_of(model, loader, MultiOptimizer(optimizers), criterion, gpu_mode=mode, **ranks)
        loop.fit(num_epochs=1, callbacks=[Changes()])
        return [*model.parameters(), *criterion.parameters()]

    torch.testing.assert_close(list(trained("dp")), list(trained("single")), rtol=0, atol=1e-12)
