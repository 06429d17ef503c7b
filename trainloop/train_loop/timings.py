"""Where a training's time goes: each part of a step by the clock, on a GPU by its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

__all__ = ["StepClock", "Timings"]

# Steps between two that are timed on the GPU: an event costs the host a microsecond or two.
STEPS_BETWEEN_TIMED = 16
# Timed steps that may wait to be read; where nobody looks, as without a terminal, events would pile up for an epoch.
MOST_WAITING = 64


@dataclass(frozen=True)
class Timings:
    """Seconds that the steps of a training took, by part, in the process that is asked (in ``ddp``: rank 0).

    On the CPU by the clock, every step. On a GPU, which works behind the host, by events on the device in every
    sixteenth step, without waiting for it: ``data`` is the time in which the device had nothing to do while the loader
    was waited for. Evaluations and an epoch's other hooks are no part of it.

    Examples
    --------
    >>> tl.fit(num_epochs=3)
    >>> print(tl.timings)  # a table; tl.timings.epochs has one for each epoch
    >>> tl.timings.samples_per_s, tl.timings.share("data")
    """

    steps: int = 0
    """Optimizer steps."""
    samples: int = 0
    """Samples of all ranks."""
    seconds: float = 0.0
    """The whole time; the parts below add up to it."""
    data: float = 0.0
    """Waiting for the loader."""
    forward: float = 0.0
    """``get_loss``."""
    backward: float = 0.0
    """With the exchange of gradients: here a rank waits for slower ones."""
    optimizer: float = 0.0
    """Clipping, the optimizers' steps, gradients dropped."""
    other: float = 0.0
    """Hooks of callbacks, logs, the bar, and the loop itself."""
    graph: float = 0.0
    """With ``compile='step'``: forward, backward and the optimizer's step at once, and compiling them."""
    epochs: tuple[Timings, ...] = ()
    """The same of each epoch that this process has trained in the last ``fit``."""

    @classmethod
    def over(cls, epochs: Iterable[Timings]) -> Timings:
        """The sum of epochs."""
        epochs = tuple(epochs)
        names = [field.name for field in fields(cls) if field.name != "epochs"]
        return cls(**{name: sum(getattr(epoch, name) for epoch in epochs) for name in names}, epochs=epochs)

    @property
    def samples_per_s(self) -> float:
        """Over all ranks."""
        return self.samples / self.seconds if self.seconds else 0.0

    def share(self, part: str) -> float:
        """The share of a part in the whole time, from 0 to 1."""
        return float(getattr(self, part) / self.seconds) if self.seconds else 0.0

    def __str__(self) -> str:
        lines = [f"{'part':<12}{'ms a step':>10}  {'share':>6}"]
        for part in _PARTS:
            if part == "graph" and not self.graph:  # few have one
                continue
            milliseconds = 1e3 * getattr(self, part) / max(self.steps, 1)
            lines.append(f"{part:<12}{milliseconds:>10.3f}  {self.share(part):>6.1%}")
        lines.append(f"{self.steps:,} steps in {self.seconds:.1f} s, {self.samples_per_s:,.0f} samples/s")
        return "\n".join(lines)


_PARTS = ("data", "forward", "backward", "optimizer", "graph", "other")
_TIMED = _PARTS[:-1]


class StepClock:
    """Adds up what the parts of an epoch's steps take, in nanoseconds.

    A part begins by ``clock.forward -= now()`` and ends by ``clock.forward += now()``: whole numbers add up exactly,
    and nothing is called but the clock. In a step that is timed on the device, a part is a :class:`_PartOnDevice`
    instead, which records an event at the same two places.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_device = device.type == "cuda"
        self.epochs: list[Timings] = []
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Set all parts to zero."""
        self.steps = self.samples = 0
        # Ints; `Any`, since for a step each may be a part on the device.
        self.whole: Any = 0
        self.data: Any = 0
        self.forward: Any = 0
        self.backward: Any = 0
        self.optimizer: Any = 0
        self.graph: Any = 0
        self._timed_now: dict[str, _PartOnDevice] = {}
        self._waiting: deque[tuple[dict[str, _PartOnDevice], Any]] = deque()  # what the device has not come to yet
        self._on_device_ms = dict.fromkeys((*_TIMED, "whole"), 0.0)

    def between_steps(self) -> None:
        """On CUDA, after each step: the end of one that is timed, the beginning of another."""
        if self._timed_now:
            self._waiting.append((self._timed_now, _event_on(self.device)))
            self._by_clock()
            if len(self._waiting) > MOST_WAITING:
                self._take_in()
        if self.steps % STEPS_BETWEEN_TIMED == 1:  # not the epoch's first: its workers are only starting
            self._timed_now = {name: _PartOnDevice(getattr(self, name), self.device) for name in _TIMED}
            for name, part in self._timed_now.items():
                setattr(self, name, part)

    def _by_clock(self) -> None:
        for name, part in self._timed_now.items():
            setattr(self, name, part.nanoseconds)
        self._timed_now = {}

    def _take_in(self) -> None:
        """Read the events that the device has passed by now, without waiting for others."""
        while self._waiting and self._waiting[0][1].query():
            parts, end = self._waiting.popleft()
            for name, part in parts.items():
                self._on_device_ms[name] += sum(begin.elapsed_time(stop) for begin, stop in part.events)
            self._on_device_ms["whole"] += parts["data"].events[0][0].elapsed_time(end)

    def read(self) -> Timings:
        """The timings of the epoch up to now."""
        now = time.perf_counter_ns()
        values = {name: int(getattr(self, name)) for name in (*_TIMED, "whole")}
        values = {name: value + now if value < 0 else value for name, value in values.items()}  # below 0: it goes on
        nanoseconds = values.pop("whole")
        shares = {name: value / max(nanoseconds, 1) for name, value in values.items()}
        self._take_in()
        if self._on_device_ms["whole"]:
            # The device's shares of the clock's time: only every sixteenth step was timed there.
            shares = {name: self._on_device_ms[name] / self._on_device_ms["whole"] for name in _TIMED}
        seconds = 1e-9 * nanoseconds
        parts: dict[str, Any] = {name: shares[name] * seconds for name in _TIMED}
        return Timings(self.steps, self.samples, seconds, **parts, other=max(0.0, seconds - sum(parts.values())))

    def end_epoch(self) -> None:
        """Keep what the epoch took; nothing is going on any more."""
        self._by_clock()
        self.epochs.append(self.read())
        self.begin_epoch()

    def timings(self) -> Timings:
        """The timings of all epochs, with the steps that are done of the one that is running."""
        running = [self.read()] if self.steps else []
        return Timings.over([*self.epochs, *running])


class _PartOnDevice:
    """A part of one step: its nanoseconds up to now, and events that the device passes where it begins and ends."""

    def __init__(self, nanoseconds: int, device: torch.device) -> None:
        self.nanoseconds = nanoseconds
        self.device = device
        self.events: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def __isub__(self, now: int) -> _PartOnDevice:
        self.nanoseconds -= now
        self._begun = _event_on(self.device)
        return self

    def __iadd__(self, now: int) -> _PartOnDevice:
        self.nanoseconds += now
        self.events.append((self._begun, _event_on(self.device)))
        return self

    def __int__(self) -> int:
        return self.nanoseconds


def _event_on(device: torch.device) -> Any:
    """An event that the device passes when all work queued up to now is done."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
