"""Promises of TrainLoop beyond parity: whose objects it uses, the order of things, what comes back, what ends it."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from typing import Any

import pytest
import torch
from kit.loops import Layers, cpu_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.data import EvalFeed, TrainFeed
from trainloop.errors import ConfigurationError
from trainloop.train_loop.arguments.run_config import run_config_of


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def data(n: int = 101, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(n, 8, generator=generator, dtype=dtype), torch.randint(0, 3, (n,), generator=generator)
    )


def make(mode: str = "single", devices: Any = "auto", model: Any = None, **arguments: Any) -> TrainLoop:
    torch.manual_seed(0)
    model = model or Net()
    dataset = arguments.pop("dataset", None) or data()
    arguments.setdefault("optimizer", optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    batch_size = arguments.pop("batch_size", 10)
    return cpu_loop(
        model,
        arguments.pop("train_loader", DataLoader(dataset, batch_size=batch_size)),
        gpu_mode=mode,
        devices=devices,
        **arguments,
    )


def test_num_iterations_counts_batches_over_epochs() -> None:
    loop = make(dataset=data(30))
    loop.fit(num_iterations=7)
    assert (loop.total_iteration_idx, loop.global_step, loop.epoch) == (6, 7, 3)
    loop.fit(num_iterations=2, grad_accumulation=2)
    assert (loop.total_iteration_idx, loop.global_step) == (8, 8)


def test_early_stop_in_an_epoch_ends_after_the_step() -> None:
    class Stop(AbstractCallback):
        def on_batch_end(self) -> None:
            self.train_loop_obj.early_stop = self.train_loop_obj.global_step == 3

    loop = make()
    loop.fit(num_epochs=5, callbacks=[Stop()])
    assert loop.global_step == 3
    assert len(loop.history["loss"]) == 1
    loop.fit(num_epochs=1)  # the wish to stop was of that fit
    assert loop.global_step == 3 + 11


def test_fit_inside_of_a_callback_is_refused() -> None:
    class Again(AbstractCallback):
        def on_epoch_end(self) -> None:
            self.train_loop_obj.fit(num_epochs=1)

    with pytest.raises(ConfigurationError, match="called by a callback"):
        make().fit(num_epochs=1, callbacks=[Again()])


def test_ctrl_c_keeps_the_last_step_and_the_loop_goes_on() -> None:
    class Press(AbstractCallback):
        def on_batch_begin(self) -> None:
            if self.train_loop_obj.total_iteration_idx == 4:
                os.kill(os.getpid(), signal.SIGINT)

    loop = make()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(num_epochs=1, callbacks=[Press()])
    assert loop.global_step == 5  # the step in which it was pressed is finished
    assert signal.getsignal(signal.SIGINT) is before
    expected = make()
    expected.fit(num_iterations=5)
    assert torch.equal(loop.model.fc.weight, expected.model.fc.weight)
    loop.fit(num_epochs=1)
    assert loop.global_step == 16


def test_fit_works_in_a_thread() -> None:
    loop = make()
    thread = threading.Thread(target=loop.fit, kwargs={"num_epochs": 1})
    thread.start()
    thread.join()
    assert loop.global_step == 11


# -- evaluation changes nothing --------------------------------------------------------------------------------------


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(8).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(x))


def test_evaluation_leaves_random_numbers_and_modes_alone() -> None:
    weights = []
    for evaluated in (True, False):
        torch.manual_seed(0)
        model = Dropping()
        validation = DataLoader(data(20), batch_size=4, shuffle=True) if evaluated else None
        training = DataLoader(data(), batch_size=10, shuffle=True)
        loop = make(model=model, train_loader=training, validation_loader=validation)
        torch.manual_seed(3)
        loop.fit(num_epochs=3)
        weights.append(model.fc.weight)
    assert torch.equal(*weights)
    model.frozen.eval()
    loop.evaluate_model_loss(loop.train_loader)
    assert not model.frozen.training
    assert model.dropout.training


# -- ddp: what comes back --------------------------------------------------------------------------------------------


class Attributes(TTBasicModel):
    """Tied, lazy, counted: what a copy that comes back could lose."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 8, bias=False)
        self.decode = nn.Linear(8, 8, bias=False)
        self.decode.weight = self.encode.weight
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.LazyLinear(3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)
        self.batches = 0
        self.note = "before"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.decode(self.encode(x))))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        if self.training:
            self.batches += 1
            self.seen += len(x)
            self.note = "after"
        return criterion(self(x), y)


class CountsCalls(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(3)
        self.register_buffer("seen", torch.zeros(()))
        self.batches = 0

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.batches += 1
        self.seen += 1
        return super().get_loss(batch_data, criterion, device)


@pytest.mark.parametrize("mode, batches", [("dp", 4), pytest.param("ddp", 2, marks=pytest.mark.long)])
def test_the_forward_that_initializes_lazy_modules_counts_nothing(mode: str, batches: int) -> None:
    model: Any = CountsCalls()
    make(mode, 2, model, dataset=data(40)).evaluate_loss_on_train_set()
    assert (model.batches, model.seen, model.fc.in_features) == (batches, batches, 8)


class Remembers(AbstractCallback):
    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__("remembers")
        self.scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.ranks: list[int] = []
        self.model: Any = None

    def on_epoch_end(self) -> None:
        self.scheduler.step()
        self.ranks.append(self.train_loop_obj.rank)
        self.model = self.train_loop_obj.model


@pytest.mark.long
def test_ddp_brings_everything_back_into_the_callers_objects() -> None:
    torch.manual_seed(0)
    model = Attributes()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = make("ddp", 2, model=model, optimizer=optimizer, sync_batchnorm=True, dataset=data(100))
    identities = [id(p) for p in model.parameters()]
    callback = Remembers(optimizer)
    scheduler = callback.scheduler
    rng_before, environment = torch.get_rng_state(), dict(os.environ)

    assert loop.fit(num_epochs=2, callbacks=[callback]) is model

    assert [id(p) for p in model.parameters()] == identities
    assert model.decode.weight is model.encode.weight
    assert type(model.norm) is nn.BatchNorm1d
    assert int(model.norm.num_batches_tracked) == 10
    assert model.head.weight.shape == (3, 8)
    assert (model.batches, model.note, int(model.seen)) == (10, "after", 100)
    assert callback.ranks == [0, 0]
    assert callback.model is model
    assert callback.train_loop_obj is loop
    assert callback.scheduler is scheduler
    assert scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert set(optimizer.state) == set(model.parameters())
    assert (loop.epoch, loop.global_step, len(loop.history["loss"])) == (2, 10, 2)
    assert (loop.rank, loop.world_size, loop.is_main_process()) == (0, 1, True)
    assert torch.equal(torch.get_rng_state(), rng_before)
    assert dict(os.environ) == environment
    assert not torch.distributed.is_initialized()


class StopsOnOneRank(AbstractCallback):
    def __init__(self, at_end: bool) -> None:
        super().__init__("stops")
        self.at_end = at_end

    def on_batch_end(self) -> None:
        if not self.at_end and self.train_loop_obj.rank == 1 and self.train_loop_obj.global_step == 3:
            self.train_loop_obj.early_stop = True

    def on_epoch_end(self) -> None:
        if self.at_end and self.train_loop_obj.rank == 1:
            self.train_loop_obj.early_stop = True


@pytest.mark.long
def test_early_stop_on_one_rank_stops_all_at_one_step() -> None:
    loop = make("ddp", 2, dataset=data(400))
    loop.fit(num_epochs=3, callbacks=[StopsOnOneRank(at_end=False)])
    assert 3 <= loop.global_step <= 6  # the others hear of it within a step or two
    assert loop.epoch == 1
    steps = loop.global_step
    loop.fit(num_epochs=3, callbacks=[StopsOnOneRank(at_end=True)])
    assert loop.global_step == steps + 20


@pytest.mark.long
def test_data_can_be_made_in_the_ranks() -> None:
    class Load(AbstractCallback):
        def on_multiprocess_start(self) -> None:
            self.train_loop_obj.train_loader = DataLoader(data(40), batch_size=5)

    loop = make("ddp", 2, train_loader=None)
    loop.fit(num_epochs=1, in_process_data_load=Load())
    assert loop.global_step == 4


@pytest.mark.long
def test_synchronised_batchnorm_equals_one_process_where_a_rank_has_no_samples() -> None:
    models = []
    for mode, devices, batch_size in (("single", "auto", 30), ("ddp", 3, 10), ("fsdp", 3, 10)):
        torch.manual_seed(0)
        model = Layers(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
        # 62 = 2 x 30 + 2: the third rank has none of the last global batch.
        dataset = data(62, torch.float64)
        loop = make(mode, devices, model=model, dataset=dataset, batch_size=batch_size, sync_batchnorm=mode != "single")
        loop.fit(num_epochs=2)
        models.append(model.state_dict())
    for model in models[1:]:
        torch.testing.assert_close(model, models[0], rtol=0, atol=1e-9)


def test_devices_are_warned_of_once() -> None:
    with pytest.warns(UserWarning, match="compete for CPU time"):
        loop = make("ddp", devices=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(run_config_of(loop.options, select=True).devices) == 64  # as in fit


@pytest.mark.parametrize("make_feed", [TrainFeed, EvalFeed])
def test_batches_are_moved_to_any_device(make_feed: Any) -> None:
    """As to Apple's GPU, which has no streams. On the meta device, as here, there are only shapes."""
    feed = make_feed(DataLoader(data(10), 5), device=torch.device("meta"))
    trains = make_feed is TrainFeed
    batches = [step.batches[0] for step in feed.steps(1)] if trains else [batch for _, batch, _ in feed.batches()]
    assert [tensor.device.type for batch in batches for tensor in batch] == ["meta"] * 4
