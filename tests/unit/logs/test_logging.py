"""Logs of whole runs: right over samples, replicas and ranks; no waiting in the step; a cost that doesn't grow."""

from __future__ import annotations

import gc
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, MultiLoss, TrainLoop, TTModel, distributed
from trainloop.errors import ConfigurationError

SAMPLES = 19  # in batches of 2 ranks x 3: the last one has a single sample, so that one rank has none


def numbered(length: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(length, dtype=torch.float64))


class Logs(TTModel):
    """Logs whatever it is told to, and learns nothing to speak of."""

    def __init__(self, log: Callable[[Logs, Tensor], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.make_logs = log

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        (x,) = batch_data
        self.make_logs(self, x)
        return self(x).mean()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        (x,) = batch_data
        self.log("predicted", x.mean())
        return x, x, {}


def loop(
    log: Callable[[Logs, Tensor], None], batch_size: int = 6, length: int = SAMPLES, **arguments: Any
) -> TrainLoop:
    model = Logs(log)
    return TrainLoop(
        model,
        DataLoader(numbered(length), batch_size),
        optimizer=optim.SGD(model.parameters(), lr=1e-9),
        progress_bar=False,
        **{"accelerator": "cpu", **arguments},
    )


class Heard(AbstractCallback):
    """Collects what ``on_log`` gets."""

    def __init__(self) -> None:
        super().__init__("heard")
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.calls = 0

    def on_log(self, rows: Any) -> None:
        self.rows += rows
        self.calls += 1


# -- one process -------------------------------------------------------------------------------------------------------


def log_kinds(model: Logs, x: Tensor) -> None:
    model.log("mean", x.mean())
    model.log("total", x.sum(), reduce="sum")
    model.log("least", x.min(), reduce="min")
    model.log("most", x.max(), reduce="max")
    model.log("weighted", x.mean(), batch_size=2 * len(x))
    model.log("number", len(x), on_epoch=False)
    model.log("epoch_only", x.mean(), on_step=False)


def kinds_expected(history: Any) -> None:
    """The result of log_kinds over a whole epoch, however it is divided."""
    assert history["mean"] == history["weighted"] == history["epoch_only"] == [9.0]
    assert history["total"] == [171.0]
    assert (history["least"], history["most"]) == ([0.0], [18.0])
    assert "number" not in history
    assert history.steps("epoch_only") == []


def test_values_of_an_epoch_and_its_steps() -> None:
    tl = loop(log_kinds)
    tl.fit(num_epochs=1)
    kinds_expected(tl.history)
    assert next(iter(tl.history)) == "loss"
    assert tl.history["loss"] == pytest.approx([9.0])
    assert tl.history.steps("mean") == [2.5, 8.5, 14.5, 18.0]
    assert tl.history.step_indices("mean") == [1, 2, 3, 4]
    assert tl.history.steps("number") == [6.0, 6.0, 6.0, 1.0]


def test_micro_batches_of_a_step_are_one_value() -> None:
    tl = loop(log_kinds)
    tl.fit(num_epochs=1, grad_accumulation=2)
    kinds_expected(tl.history)
    assert tl.history.step_indices("mean") == [1, 2]
    assert tl.history.steps("mean") == [5.5, pytest.approx((14.5 * 6 + 18) / 7)]
    assert tl.history.steps("total") == [66.0, 105.0]
    assert tl.history.steps("most") == [11.0, 18.0]


def test_replicas_are_weighed_by_their_samples() -> None:
    """19 samples over 2 replicas: 3 and 3, then a single one, which a second replica doesn't see."""
    tl = loop(log_kinds, batch_size=5, gpu_mode="dp", devices=2)  # 3 and 2 in each batch
    tl.fit(num_epochs=1)
    kinds_expected(tl.history)
    assert tl.history.steps("mean") == pytest.approx([2.0, 7.0, 12.0, 16.5])
    assert tl.history.steps("number") == pytest.approx([2.6, 2.6, 2.6, 2.0])  # 3 of the 5 samples saw 3


def test_epochs_are_separate_and_steps_go_on() -> None:
    tl = loop(lambda model, x: model.log("seen", x.mean() + model.epochs))
    tl.model.epochs = 0.0

    class Next(AbstractCallback):
        def on_epoch_end(self) -> None:
            self.train_loop_obj.model.epochs += 100

    tl.fit(num_epochs=2, callbacks=[Next()])
    assert tl.history["seen"] == [9.0, 109.0]
    tl.fit(num_epochs=1, callbacks=[Next()])
    assert tl.history["seen"] == [9.0, 109.0, 209.0]
    assert tl.history.step_indices("seen") == list(range(1, 13))
    assert tl.history.step_indices("loss") == list(range(1, 13))


def test_evaluation_gives_names_a_prefix() -> None:
    tl = loop(lambda model, x: model.log("seen", x.mean()))
    tl.validation_loader = DataLoader(numbered(10), 4)
    tl.test_loader = DataLoader(numbered(5), 4)
    tl.fit(num_epochs=2)
    assert {name: values for name, values in tl.history.items() if "seen" in name} == {
        "seen": [9.0, 9.0],
        "val_seen": [4.5, 4.5],
        "test_seen": [2.0],
    }
    assert tl.history["val_loss"] == pytest.approx([4.5, 4.5])
    assert tl.history["test_loss"] == pytest.approx([2.0])
    assert tl.history.step_names == ["loss", "seen"]
    before = tl.history.to_dict()
    tl.evaluate_loss_on_validation_set()  # outside of fit: no epoch it would belong to
    tl.predict_on_test_set()
    assert tl.history.to_dict() == before


def test_predictions_inside_fit_log_too() -> None:
    class Predicts(AbstractCallback):
        def on_epoch_end(self) -> None:
            self.train_loop_obj.predict_on_validation_set()

    tl = loop(lambda model, x: None)
    tl.validation_loader = DataLoader(numbered(10), 4)
    tl.fit(num_epochs=1, callbacks=[Predicts()])
    assert tl.history["val_predicted"] == [4.5]


def test_outside_of_a_loop_log_does_nothing() -> None:
    model = Logs(log_kinds)
    model.get_loss((torch.ones(3),), None, torch.device("cpu"))
    model.log("no check either", "text")  # type: ignore[arg-type]
    tl = loop(log_kinds)
    tl.fit(num_epochs=1)
    tl.model.log("after", 1.0)
    assert "after" not in tl.history


def test_on_log_hears_each_step_once() -> None:
    heard = Heard()
    tl = loop(lambda model, x: model.log("seen", x.mean()), batch_size=1, length=300)
    tl.fit(num_epochs=1, callbacks=[heard])
    assert [step for step, _ in heard.rows] == list(range(1, 301))
    assert [row["seen"] for _, row in heard.rows] == tl.history.steps("seen") == [float(i) for i in range(300)]
    assert heard.calls == 3  # after 128, 256 and at the end


def test_flush_times_do_not_show_in_the_history() -> None:
    class Flushes(AbstractCallback):
        def on_batch_end(self) -> None:
            self.train_loop_obj.flush_logs()

    def log(model: Logs, x: Tensor) -> None:
        model.log("odd", (x * 0.1).mean())

    histories = []
    for callbacks in ([], [Flushes()], [Heard()], [Flushes(), Heard()]):
        tl = loop(log, batch_size=4)
        tl.fit(num_epochs=2, callbacks=callbacks)
        histories.append((tl.history.to_dict(), tl.history.steps("odd"), tl.history.step_indices("odd")))
    assert all(history == histories[0] for history in histories)
    values = [(torch.arange(i, min(i + 4, SAMPLES), dtype=torch.float64) * 0.1) for i in range(0, SAMPLES, 4)]
    assert histories[0][0]["odd"][0] == math.fsum(v.mean().item() * len(v) for v in values) / SAMPLES


def test_a_flush_puts_all_steps_so_far_into_the_history() -> None:
    class Reads(AbstractCallback):
        def __init__(self) -> None:
            super().__init__("reads")
            self.read: list[list[float]] = []

        def on_after_optimizer_step(self) -> None:
            self.train_loop_obj.flush_logs()
            self.read.append(self.train_loop_obj.history.steps("loss"))

    reads, tl = Reads(), loop(lambda model, x: None, batch_size=4)
    tl.fit(num_epochs=2, callbacks=[reads])
    losses = tl.history.steps("loss")
    assert reads.read == [losses[: i + 1] for i in range(len(losses))]


def test_parts_of_a_loss_are_recorded() -> None:
    class Two(Logs):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            (x,) = batch_data
            return MultiLoss({"a": self(x).mean(), "b": 2 * self(x).mean()})

    model = Two(log_kinds)
    loader = DataLoader(numbered(), 6)
    tl = TrainLoop(model, loader, loader, None, optim.SGD(model.parameters(), lr=1e-9), progress_bar=False)
    tl.fit(num_epochs=1)
    assert tl.history.to_dict() == {
        name: pytest.approx([value])
        for name, value in {
            "loss": 27.0, "loss_a": 9.0, "loss_b": 18.0, "val_loss": 27.0, "val_loss_a": 9.0, "val_loss_b": 18.0,
        }.items()
    }  # fmt: skip
    assert tl.evaluate_loss_on_validation_set() == pytest.approx({"a": 9.0, "b": 18.0})


# -- ranks -------------------------------------------------------------------------------------------------------------


def log_by_rank(model: Logs, x: Tensor) -> None:
    """Metrics that both ranks log, in opposite orders, and some that only one does."""
    rank = distributed.get_rank()
    calls: list[Callable[[], None]] = [
        lambda: model.log("mean", x.mean()),
        lambda: model.log("total", x.sum(), reduce="sum"),
        lambda: model.log("least", x.min(), reduce="min"),
        lambda: model.log("most", x.max(), reduce="max"),
        lambda: model.log("samples", len(x), reduce="sum"),
        lambda: model.log("own", 10.0 + rank, sync_dist=False),
        lambda: model.log("main", 20.0 + rank, rank_zero_only=True),
        lambda: model.log(f"of_rank_{rank}", 30.0 + rank),
        lambda: model.log("weighted", float(rank), batch_size=1 + 2 * rank),
    ]
    if rank == 1:
        calls.reverse()
        model.log("late", 1.0)
        if x.min() > 8:
            model.log("now_and_then", 5.0)
    for call in calls:
        call()


class Watching(AbstractCallback):
    """Counts exchanges in the rank it comes to, and reports what each rank has."""

    def __init__(self) -> None:
        super().__init__("watching")
        self.facts: list[Any] = []
        self.gathers = 0
        self.rows: list[Any] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if multiprocessing.parent_process() is not None:  # arrived in a rank, before the loop begins there
            gather = distributed.gather_object

            def counted(obj: Any) -> list[Any]:
                self.gathers += 1
                return gather(obj)

            distributed.gather_object = counted

    def on_log(self, rows: Any) -> None:
        self.rows += rows

    def on_epoch_begin(self) -> None:
        self.gathers = 0

    def on_batch_end(self) -> None:
        tl = self.train_loop_obj
        if tl.global_step % 4 == 2:
            before = self.gathers
            tl.flush_logs()
            flushed = self.gathers - before
            tl.flush_logs()  # a rank may have logged since
            self.facts.append(("flush", flushed, self.gathers - before))

    def on_epoch_end(self) -> None:
        tl = self.train_loop_obj
        self.facts.append(("epoch", self.gathers))
        before = self.gathers
        tl.predict_on_validation_set()
        self.facts.append(("predictions", self.gathers - before))
        history = {
            name: values for name, values in tl.history.items() if name not in ("own", "main", "val_own", "val_main")
        }
        everyone = distributed.all_gather({name: values[-1] for name, values in history.items()})
        self.facts.append(("same", all(v[0] == v[1] or math.isnan(v[0]) for v in everyone.values())))
        self.facts.append(("own", [v.item() for v in distributed.all_gather(tl.history["own"][-1])]))


@pytest.mark.long
def test_ranks_log_what_they_like() -> None:
    """One run with two ranks, and all that section 7 of the contract says of it."""
    watching = Watching()
    tl = loop(log_by_rank, batch_size=3, gpu_mode="ddp", devices=2)
    tl.validation_loader = DataLoader(numbered(10), 3)
    tl.fit(num_epochs=2, callbacks=[watching])
    history = tl.history

    def both(value: float) -> list[Any]:
        return [pytest.approx(value, rel=1e-12)] * 2

    assert history["loss"] == [pytest.approx(9.0)] * 2
    assert history["mean"] == both(9.0)
    assert history["total"] == both(171.0)
    assert history["least"] == both(0.0)
    assert history["most"] == both(18.0)
    assert history["samples"] == both(SAMPLES)
    assert history["own"] == both(10.0)  # of rank 0, whose history comes back
    assert history["main"] == both(20.0)
    assert history["of_rank_0"] == both(30.0)
    assert history["of_rank_1"] == both(31.0)
    assert history["late"] == both(1.0)
    assert history["now_and_then"] == both(5.0)
    assert history["weighted"] == both(9 / 13)  # 4 batches of weight 1, 3 of weight 3
    # each step: over the ranks, once
    assert history.step_indices("mean") == history.step_indices("samples") == list(range(1, 9))
    assert history.steps("mean") == [pytest.approx(v) for v in (2.5, 8.5, 14.5, 18.0)] * 2
    assert history.steps("samples") == [6.0, 6.0, 6.0, 1.0] * 2
    assert history.steps("own")[0] == 10.0
    # validation: 10 samples in whole batches, whichever rank has them
    assert history["val_mean"] == both(4.5)
    assert history["val_samples"] == both(10.0)
    assert history["val_loss"] == [pytest.approx(4.5)] * 2
    assert history["val_predicted"] == both(4.5)
    # one exchange a flush, one an epoch, one for each evaluation, for all metrics together
    facts = {fact[0]: fact[1] for fact in watching.facts}
    assert [fact for fact in watching.facts if fact[0] == "flush"] == [("flush", 1, 2)] * 2
    assert [fact for fact in watching.facts if fact[0] == "epoch"] == [("epoch", 4)] * 2
    assert facts["predictions"] == 1
    assert [fact for fact in watching.facts if fact[0] == "same"] == [("same", True)] * 2
    assert facts["own"] == [10.0, 11.0]
    # rank 0 alone hears, each step once
    assert [step for step, _ in watching.rows] == list(range(1, 9))
    assert {row["samples"] for _, row in watching.rows} == {6.0, 1.0}


# -- cost --------------------------------------------------------------------------------------------------------------


def log_ten(model: Logs, x: Tensor) -> None:
    value = x.mean()
    for name in "abcdefghij":
        model.log(name, value)


def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these would: none is called between two flushes. (What is on the CPU is read at once.)"""
    reads: list[str] = []
    counting = False

    def watched(name: str) -> Any:
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if counting:
                reads.append(name)
            return original(self, *args, **kwargs)

        return read

    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "nonzero"):
        monkeypatch.setattr(Tensor, name, watched(name))
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))

    class Steps(AbstractCallback):
        def on_batch_begin(self) -> None:
            nonlocal counting
            counting = True

        def on_batch_end(self) -> None:
            nonlocal counting
            counting = self.train_loop_obj.total_iteration_idx < 99

    for arguments in ({}, {"grad_accumulation": 3}):
        tl = loop(log_ten, batch_size=1, length=100, gradient_clip_norm=1.0)
        tl.fit(num_epochs=1, callbacks=[Steps()], **arguments)
        assert reads == []
        assert tl.history["a"] == [49.5]


@pytest.mark.long
def test_a_compiled_forward_may_log() -> None:
    """The same values, and nothing is compiled anew when logs grow or evaluation comes in between."""
    from torch._dynamo.utils import counters

    class Inside(Logs):
        def forward(self, x: Tensor) -> Tensor:
            self.log("inside", x.mean())
            return super().forward(x)

    model = Inside(lambda model, x: None)
    loader = DataLoader(numbered(20), 4)
    optimizer = optim.SGD(model.parameters(), lr=1e-9)
    tl = TrainLoop(model, loader, loader, None, optimizer, progress_bar=False, compile={"backend": "eager"})
    torch._dynamo.reset()
    compiled = []
    for epochs in (2, 10):
        tl.fit(num_epochs=epochs)
        compiled.append(counters["frames"]["ok"])
    torch._dynamo.reset()
    assert tl.history["inside"] == tl.history["val_inside"] == [9.5] * 12
    assert tl.history.step_indices("inside") == list(range(1, 61))
    assert compiled[1] <= 2 * compiled[0]  # a second fit may compile its own


class Meter(AbstractCallback):
    """Objects there are, function calls that a step makes, and its time, at the beginning of an epoch and later."""

    def __init__(self, every: int) -> None:
        super().__init__("meter")
        self.every = every
        self.objects: list[int] = []
        self.calls: list[int] = []
        self.seconds: list[float] = []
        self.began = 0.0
        self.called = 0

    def count_calls(self, frame: Any, event: str, argument: Any) -> None:
        self.called += event in ("call", "c_call")

    def on_batch_end(self) -> None:
        place = self.train_loop_obj.global_step % self.every
        if place == 0:
            self.train_loop_obj.flush_logs()
            gc.collect()
            self.objects.append(len(gc.get_objects()))
        elif place == 10:
            self.called = 0
            sys.setprofile(self.count_calls)
        elif place == 20:
            sys.setprofile(None)
            self.calls.append(self.called)
        elif place % 100 == 50:
            self.began = time.thread_time()
        elif place % 100 == 99:
            self.seconds.append(time.thread_time() - self.began)


@pytest.mark.parametrize("length", [4_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_cost_and_objects_do_not_grow_over_an_epoch(length: int) -> None:
    """As many objects at the end of thousands of steps as at the beginning, and steps that do as much."""
    meter = Meter(every=length // 10)
    tl = loop(lambda model, x: [model.log(name, x.mean()) for name in "abc"], batch_size=1, length=length)
    tl.fit(num_epochs=1, callbacks=[meter])
    assert len(tl.history.steps("a")) == length
    assert tl.history["a"] == [(length - 1) / 2]
    assert max(meter.objects[1:]) - min(meter.objects[1:]) < 100
    assert len(meter.calls) == 10
    assert median(meter.calls[5:]) <= median(meter.calls[:5])  # single ones may hold the fetching of many samples
    # Calls of C that would grow inside show in the time. The fastest ones: what the machine does besides slows steps.
    quarter = len(meter.seconds) // 4
    assert min(meter.seconds[-quarter:]) < 3 * min(meter.seconds[:quarter])


def test_two_names_of_one_metric_are_not_mixed() -> None:
    """In a validation, ``acc`` is recorded as ``val_acc``, which the model may also log."""

    class Twice(Net):
        def get_loss_eval(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            self.log("acc", 1.0)
            self.log("val_acc", 0.0)
            return criterion(self(batch_data[0]), batch_data[1])

    message = "'acc' has been logged in this evaluation, too, and both names are recorded as 'val_acc'"
    with pytest.raises(ConfigurationError, match=message):
        make_loop(Twice()).fit(num_epochs=1)


def test_an_int_that_is_no_float_is_an_error_that_names_the_metric() -> None:
    class Huge(AbstractCallback):
        def on_epoch_end(self) -> None:
            self.log("huge", 10**400)

    with pytest.raises(ConfigurationError, match=r"log\('huge', ...\): the value is an int that is larger"):
        make_loop().fit(num_epochs=1, callbacks=[Huge("huge")])
