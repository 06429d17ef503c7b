"""The loop against hand-written PyTorch (reference.py), value by value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import reference
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, WeightedRandomSampler

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel, TTModel
from trainloop.callbacks import LRScheduler

CRITERION = nn.CrossEntropyLoss()


class Net(TTBasicModel):
    """A small classifier with dropout, so that a stray draw from the RNG shows."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return self(x.to(device)).argmax(1), y, {}


class Winding(TTModel):
    """``get_loss`` calls a submodule directly, and ``forward`` twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)
        self.side = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = (t.to(device) for t in batch_data)
        direct = self.side(torch.relu(self.body(x)))
        return criterion(self(x), y) + 0.5 * criterion(self(0.5 * x), y) + 0.1 * criterion(direct, y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return self(x.to(device)).argmax(1), y, {}


class Lazy(Winding):
    """Weights are drawn when the first batch tells their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.side = nn.LazyLinear(16), nn.LazyLinear(3), nn.LazyLinear(3)


def loss_of(model: Any, batch: Any) -> Tensor:
    return model.get_loss(batch, CRITERION, torch.device("cpu"))


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.01)


def make_pair(
    make_optimizer: Callable[[nn.Module], optim.Optimizer], model_type: Callable[[], nn.Module] = Net
) -> tuple[nn.Module, optim.Optimizer, nn.Module, optim.Optimizer]:
    """The same model and optimizer twice, for the loop and for the reference."""
    torch.manual_seed(3)
    ours = model_type()
    theirs = copy.deepcopy(ours)
    return ours, make_optimizer(ours), theirs, make_optimizer(theirs)


def loop(model: Any, loader: Any, optimizer: Any, **arguments: Any) -> TrainLoop:
    return cpu_loop(model, loader, optimizer, CRITERION, **arguments)


# -- single ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("drop_last", [False, True], ids=["short last batch", "drop_last"])
def test_single_is_bit_identical(make_optimizer: Any, shuffle: bool, drop_last: bool) -> None:
    ours, our_optimizer, theirs, their_optimizer = make_pair(make_optimizer)
    loader = DataLoader(make_data(), batch_size=16, shuffle=shuffle, drop_last=drop_last)

    torch.manual_seed(7)
    losses = reference.train(theirs, loader, their_optimizer, loss_of, num_epochs=3)
    after_reference = torch.get_rng_state()
    torch.manual_seed(7)
    tl = loop(ours, loader, our_optimizer)
    trained = tl.fit(num_epochs=3)

    assert trained is ours
    assert reference.identical(ours, theirs)
    assert torch.equal(torch.get_rng_state(), after_reference)  # so that what the user does next is the same, too
    assert tl.history["loss"] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
@pytest.mark.parametrize(
    "length, accumulation, steps_an_epoch",
    [(96, 3, 2), (96, 4, 2), (101, 7, 1), (101, 3, 3), (96, 1, 6), (96, 50, 1)],
    ids=["even", "short last step", "unequal batches in a step", "short batch alone", "one", "more than there are"],
)
def test_accumulation_is_bit_identical(
    make_optimizer: Any, length: int, accumulation: int, steps_an_epoch: int
) -> None:
    ours, our_optimizer, theirs, their_optimizer = make_pair(make_optimizer)
    loader = DataLoader(make_data(length), batch_size=16, shuffle=True)

    torch.manual_seed(7)
    steps = reference.train_accumulated(theirs, loader, their_optimizer, loss_of, 2, accumulation)
    torch.manual_seed(7)
    tl = loop(ours, loader, our_optimizer)
    tl.fit(num_epochs=2, grad_accumulation=accumulation)

    assert steps == 2 * steps_an_epoch == tl.global_step
    assert reference.identical(ours, theirs)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_clipping_is_bit_identical(accumulation: int) -> None:
    ours, our_optimizer, theirs, their_optimizer = make_pair(sgd)
    unclipped = copy.deepcopy(theirs)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)

    torch.manual_seed(7)
    reference.train_accumulated(theirs, loader, their_optimizer, loss_of, 2, accumulation, max_norm=0.1)
    torch.manual_seed(7)
    reference.train_accumulated(unclipped, loader, sgd(unclipped), loss_of, 2, accumulation)
    torch.manual_seed(7)
    loop(ours, loader, our_optimizer, gradient_clip_norm=0.1).fit(num_epochs=2, grad_accumulation=accumulation)

    assert reference.identical(ours, theirs)
    assert not reference.identical(theirs, unclipped)  # the norm was low enough to clip


@pytest.mark.filterwarnings("ignore:LRScheduler. the schedule ends after")
@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=40),
    ],
    ids=["StepLR", "OneCycleLR"],
)
def test_schedulers_are_bit_identical(make_scheduler: Any, every: str) -> None:
    ours, our_optimizer, theirs, their_optimizer = make_pair(sgd)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)
    rates: list[float] = []

    class Rates(AbstractCallback):
        def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
            rates.append(our_optimizer.param_groups[0]["lr"])

    torch.manual_seed(7)
    expected = reference.train_scheduled(
        theirs, loader, their_optimizer, loss_of, 3, make_scheduler(their_optimizer), every
    )
    torch.manual_seed(7)
    scheduler = LRScheduler(make_scheduler(our_optimizer), interval=every)
    loop(ours, loader, our_optimizer).fit(num_epochs=3, callbacks=[Rates("rates"), scheduler])

    assert rates == expected
    assert len(set(rates)) > 1
    assert reference.identical(ours, theirs)


def test_num_iterations_stops_in_the_middle_of_an_epoch() -> None:
    ours, our_optimizer, theirs, their_optimizer = make_pair(sgd)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)  # 7 batches an epoch

    torch.manual_seed(7)
    done = 0
    while done < 10:
        for batch in loader:
            loss_of(theirs, batch).backward()
            their_optimizer.step()
            their_optimizer.zero_grad()
            done += 1
            if done == 10:
                break
    torch.manual_seed(7)
    tl = loop(ours, loader, our_optimizer)
    tl.fit(num_iterations=10)

    assert tl.global_step == 10
    assert reference.identical(ours, theirs)


def test_a_second_fit_goes_on() -> None:
    ours, our_optimizer, theirs, their_optimizer = make_pair(adam)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)

    torch.manual_seed(7)
    reference.train(theirs, loader, their_optimizer, loss_of, num_epochs=5)
    torch.manual_seed(7)
    tl = loop(ours, loader, our_optimizer)
    assert tl.fit(num_epochs=2) is ours
    assert (tl.epoch, tl.global_step, len(tl.history["loss"])) == (2, 14, 2)
    assert tl.fit(num_epochs=3) is ours

    assert (tl.epoch, tl.global_step, len(tl.history["loss"])) == (5, 35, 5)
    assert reference.identical(ours, theirs)  # Adam's moments and step count went on, too


# -- dp ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_equals_one_process_with_the_same_global_batches(world_size: int) -> None:
    batch_size, num_epochs = 4, 4 if world_size == 2 else 6
    data = make_data()  # 101: the last global batch is short, and doesn't divide
    ours, our_optimizer, theirs, their_optimizer = make_pair(sgd, Winding)
    before = our_optimizer.state_dict()["param_groups"]

    losses = reference.train(
        theirs, DataLoader(data, batch_size=batch_size * world_size), their_optimizer, loss_of, num_epochs
    )
    tl = loop(ours, DataLoader(data, batch_size=batch_size), our_optimizer, gpu_mode="ddp", devices=world_size)
    trained = tl.fit(num_epochs=num_epochs)

    assert trained is ours
    assert tl.global_step >= 50
    assert reference.largest_difference(ours, theirs) < 1e-6
    assert tl.history["loss"] == pytest.approx(losses, abs=1e-6)
    # The caller's optimizer holds the state after training: the very object, with the very parameters.
    assert tl.optimizer is our_optimizer
    assert our_optimizer.state_dict()["param_groups"] == before
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(
            our_optimizer.state[mine]["momentum_buffer"], their_optimizer.state[other]["momentum_buffer"], atol=1e-6
        )


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_orders_of_a_loaders_own_generator_go_on_in_a_second_fit(mode: str) -> None:
    """The ranks draw from copies of the generators; the caller's have the same states afterwards as in ``single``."""

    def weighted(rows: int, batch_size: int) -> DataLoader:
        generator = torch.Generator().manual_seed(rows)
        sampler = WeightedRandomSampler(torch.arange(1.0, rows + 1), rows, generator=generator)
        return DataLoader(make_data(rows), batch_size, sampler=sampler)

    def trained(mode: str, devices: int) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = Net(dropout=0.0).double()
        model.layers.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
        loaders = weighted(24, 8 // devices), weighted(10, 3), weighted(11, 3)
        loop = TrainLoop(
            model, *loaders, optim.SGD(model.parameters(), lr=0.1), CRITERION, gpu_mode=mode, accelerator="cpu",
            devices=devices, seed=1, progress_bar=False,
        )  # fmt: skip
        loop.fit(num_epochs=1)
        loop.evaluate_loss_on_validation_set()
        loop.fit(num_epochs=2)
        states = [loader.sampler.generator.get_state().tolist() for loader in loaders]  # type: ignore[attr-defined]
        return loop.history.to_dict(), loop.predict_on_test_set()[1].tolist(), states

    ours, expected = trained(mode, 2), trained("single", 1)
    assert ours[0].keys() == expected[0].keys()
    for name, values in expected[0].items():
        assert ours[0][name] == pytest.approx(values, rel=1e-12), name
    assert ours[1:] == expected[1:]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("model_type, seed", [(Winding, 11), (Lazy, 11), (Lazy, None)])
def test_all_modes_see_the_same_batches_with_a_seed(model_type: Any, seed: int | None) -> None:
    """Shuffled, the same global batch: 16 in one process, 8 on each of two ranks. Lazy weights are the same, too."""
    data, trained = make_data(), []
    for mode, devices, batch_size in [("single", "auto", 16), ("dp", 2, 16), ("ddp", 2, 8)]:
        torch.manual_seed(3)
        model = model_type()
        loader = DataLoader(data, batch_size=batch_size, shuffle=seed is not None)
        torch.manual_seed(len(trained) if seed is not None else 3)  # with a seed, whatever the caller's RNG is
        trained.append(loop(model, loader, sgd(model), gpu_mode=mode, devices=devices, seed=seed).fit(num_epochs=2))
    assert reference.largest_difference(trained[0], trained[1]) < 1e-6
    assert reference.largest_difference(trained[0], trained[2]) < 1e-6
