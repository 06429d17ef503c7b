"""Where a step's time goes: parts that are made slow are found slow, in every kind of step; a GPU by its own events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from small_loop import STEPS_PER_EPOCH, Net, make_loop
from trainloop import AbstractCallback, MultiOptimizer, TrainLoop
from trainloop.train_loop import timings
from trainloop.train_loop.timings import StepClock, Timings

NAP = 0.02
PARTS = ("data", "forward", "backward", "optimizer", "other")


def nap() -> None:
    time.sleep(NAP)


class _Naps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        nap()
        return grad


class Sleepy(Net):
    """Naps once a batch where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        if self.where == "forward":
            nap()
        loss = super().get_loss(batch_data, criterion, device)
        return _Naps.apply(loss) if self.where == "backward" else loss


class SleepySGD(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nap()
        return super().step(closure)


class SleepyRows(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        if i % 16 == 0:
            nap()
        return self.data[i]


class SleepyHook(AbstractCallback):
    """In the midst of what is timed as the optimizer's."""

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        nap()


def slow_loop(where: str) -> TrainLoop:
    torch.manual_seed(0)
    model = Sleepy(where)
    kind = SleepySGD if where == "optimizer" else optim.SGD
    loop = make_loop(model, optimizer=kind(model.parameters(), lr=0.1))
    if where == "data":
        loop.train_loader = DataLoader(SleepyRows(loop.train_loader.dataset), 16)
    return loop


def check_sum(found: Timings) -> None:
    assert sum(getattr(found, part) for part in PARTS) == pytest.approx(found.seconds)
    assert all(getattr(found, part) >= 0 for part in PARTS), found


@pytest.mark.parametrize("where", PARTS)
def test_the_part_that_is_slow_is_found(where: str) -> None:
    loop = slow_loop(where)
    begun = time.perf_counter()
    loop.fit(num_epochs=2, callbacks=[SleepyHook()] if where == "other" else [])
    took = time.perf_counter() - begun
    found = loop.timings
    assert (found.steps, found.samples, len(found.epochs)) == (2 * STEPS_PER_EPOCH, 2 * 101, 2)
    check_sum(found)
    slept = 2 * STEPS_PER_EPOCH * NAP
    assert slept <= getattr(found, where) <= found.seconds <= took
    assert found.seconds - getattr(found, where) <= took - slept  # and no nap is counted elsewhere
    assert 202 / took < found.samples_per_s < 202 / slept
    assert found.share(where) == max(found.share(part) for part in PARTS)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[1:6]] == list(PARTS)
    assert lines[-1].startswith("14 steps in ")


def test_a_closure_is_no_part_of_its_optimizer() -> None:
    torch.manual_seed(0)
    model = Sleepy("forward")
    optimizer = optim.LBFGS(model.parameters(), max_iter=3, tolerance_grad=0.0, tolerance_change=0.0)
    loop = make_loop(model, optimizer=optimizer)
    loop.fit(num_iterations=2, callbacks=[SleepyHook()])
    check_sum(loop.timings)
    evaluations = optimizer.state[optimizer._params[0]]["func_evals"]
    assert evaluations >= 4
    assert loop.timings.forward >= evaluations * NAP
    assert loop.timings.other >= evaluations * NAP  # of the hook
    assert loop.timings.optimizer < loop.timings.seconds - 2 * evaluations * NAP + 1e-3


class Alternates(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 3)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Iterator[Any]:  # type: ignore[override]
        x, y = batch_data
        nap()
        yield 0, criterion(self.fc(x), y)
        nap()
        yield 1, _Naps.apply(criterion(self.other(x), y))


def test_alternating_steps() -> None:
    model = Alternates()
    optimizers = MultiOptimizer([SleepySGD(m.parameters(), lr=0.1) for m in (model.fc, model.other)])
    loop = make_loop(model, optimizer=optimizers, validation=False)
    loop.fit(num_iterations=4, grad_accumulation=2)
    found = loop.timings
    check_sum(found)
    assert found.steps == 2
    assert found.forward >= 8 * NAP
    assert found.backward >= 4 * NAP
    assert found.optimizer >= 4 * NAP


def test_a_running_epoch_can_be_read_from_anywhere() -> None:
    """In a hook, and in ``get_loss`` itself, where a part has begun and not ended."""
    seen: list[Timings] = []

    class Looks(Sleepy):
        def get_loss(self, *args: Any) -> Tensor:
            loss = super().get_loss(*args)
            seen.append(loop.timings)
            return loss

    class Reads(AbstractCallback):
        def on_batch_end(self) -> None:
            seen.append(self.train_loop_obj.timings)

    loop = make_loop(Looks("forward"), validation=False)
    assert loop.timings == Timings()
    loop.fit(num_iterations=3, callbacks=[Reads()])
    # In the first step's get_loss there is no step yet that could be told about.
    assert [found.steps for found in seen] == [0, 0, 1, 1, 2, 2]
    for found in seen[2:]:
        check_sum(found)
        assert found.forward >= NAP
    again = make_loop()
    with pytest.raises(KeyError):
        again.fit(num_epochs=2, callbacks=[Fails()])
    assert again.timings.steps == STEPS_PER_EPOCH  # of the epoch that was whole


class Fails(AbstractCallback):
    def on_batch_begin(self) -> None:
        if self.train_loop_obj.epoch == 1:
            raise KeyError("no more")


# -- on a GPU ----------------------------------------------------------------------------------------------------------


class _Device:
    """A device that is ``behind`` seconds behind its host, and says so as CUDA's events do."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.busy_until = 0.0

    def give(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.clock()) + seconds


def test_a_gpu_s_own_time_is_taken_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that hands over a step in 1 ms, and waits 2 ms for data, while the device computes for 10 ms."""
    host = [0.0]
    device = _Device(lambda: host[0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            self.at = max(device.busy_until, host[0])

        def query(self) -> bool:
            return self.at <= host[0]

        def elapsed_time(self, end: Event) -> float:
            assert self.query(), "CUDA refuses this"
            assert end.query(), "CUDA refuses this"
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(timings.time, "perf_counter_ns", lambda: now())

    def now() -> int:
        return round(1e9 * host[0])

    def spend(clock: StepClock, part: str, on_host: float, on_device: float) -> None:
        setattr(clock, part, getattr(clock, part).__isub__(now()) if timed(part) else getattr(clock, part) - now())
        host[0] += on_host
        device.give(on_device)
        setattr(clock, part, getattr(clock, part).__iadd__(now()) if timed(part) else getattr(clock, part) + now())

    def timed(part: str) -> bool:
        return not isinstance(getattr(clock, part), int)

    def epoch(steps: int, data: float, compute: float) -> Timings:
        clock.whole -= now()
        for step in range(steps):
            spend(clock, "data", data, 0.0)
            spend(clock, "forward", 0.001, 0.3 * compute)
            spend(clock, "backward", 0.001, 0.5 * compute)
            spend(clock, "optimizer", 0.001, 0.2 * compute)
            clock.steps += 1
            if step < steps - 1:
                clock.between_steps()
                waiting.append(len(clock._waiting))
        host[0] = max(host[0], device.busy_until)  # logs are read
        clock.whole += now()
        clock.end_epoch()
        return clock.epochs[-1]

    waiting: list[int] = []
    clock = StepClock(torch.device("cuda", 0))
    behind = epoch(40, data=0.002, compute=0.010)
    assert behind.seconds == pytest.approx(0.4, rel=0.02)
    assert behind.share("data") == pytest.approx(0.0, abs=0.01)  # the device never waits for the loader
    assert behind.share("backward") == pytest.approx(0.5, abs=0.02)
    assert behind.share("optimizer") == pytest.approx(0.2, abs=0.02)
    starved = epoch(40, data=0.020, compute=0.003)
    assert starved.share("data") > 0.75
    check_sum(starved)
    short = epoch(1, data=0.002, compute=0.010)  # no step of it is timed on the device: the host's clock
    assert short.data == pytest.approx(0.002)
    assert clock.timings().steps == 81
    # A long epoch that nobody looks into, as without a terminal.
    unread = epoch(3 * timings.MOST_WAITING * timings.STEPS_BETWEEN_TIMED, data=0.020, compute=0.003)
    assert unread.share("data") > 0.75
    assert max(waiting) < 2 * timings.MOST_WAITING
