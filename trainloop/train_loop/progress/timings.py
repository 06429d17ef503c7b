"""Measure the time of a training run's steps, and its wait for data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

__all__ = ["StepClock", "Timings"]


@dataclass(frozen=True)
class Timings:
    """Time in seconds that a training run's steps take in this process (in ``ddp``, on rank 0).

    Evaluations and hooks outside of steps are not included. ``data`` is the time that the host waited for the loader. A
    GPU works asynchronously, so on a GPU only the total is exact. :class:`~trainloop.callbacks.Profiler` measures the
    parts of a step.

    Examples
    --------
    >>> tl.fit(num_epochs=3)
    >>> print(tl.timings)  # a table; tl.timings.epochs has the timings of each epoch
    >>> tl.timings.samples_per_s, tl.timings.share("data")
    """

    steps: int = 0
    """Optimizer steps."""
    samples: int = 0
    """Number of samples of all ranks."""
    seconds: float = 0.0
    """Total time in seconds."""
    data: float = 0.0
    """Time spent waiting for the loader, in seconds."""
    epochs: tuple[Timings, ...] = ()
    """Timings of each epoch that this process has trained in the last ``fit``."""

    @property
    def step(self) -> float:
        """Time without the wait for the loader, in seconds: ``get_loss``, backward, optimizers, hooks and logs."""
        return self.seconds - self.data

    @classmethod
    def over(cls, epochs: Iterable[Timings]) -> Timings:
        """Return the sum of several epochs' timings."""
        epochs = tuple(epochs)
        steps, samples = sum(epoch.steps for epoch in epochs), sum(epoch.samples for epoch in epochs)
        seconds, data = sum(epoch.seconds for epoch in epochs), sum(epoch.data for epoch in epochs)
        return cls(steps, samples, seconds, data, epochs)

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second."""
        return self.samples / self.seconds if self.seconds else 0.0

    def share(self, part: str) -> float:
        """Return ``'data'`` or ``'step'`` as a fraction of the whole time, from 0 to 1."""
        return float(getattr(self, part) / self.seconds) if self.seconds else 0.0

    def __str__(self) -> str:
        lines = [f"{'part':<12}{'ms a step':>10}  {'share':>6}"]
        for part in ("data", "step"):
            milliseconds = 1e3 * getattr(self, part) / max(self.steps, 1)
            lines.append(f"{part:<12}{milliseconds:>10.3f}  {self.share(part):>6.1%}")
        lines.append(f"{self.steps:,} steps in {self.seconds:.1f} s, {self.samples_per_s:,.0f} samples/s")
        return "\n".join(lines)


class StepClock:
    """Sum up an epoch's steps, samples and wait for data; the loop writes to the attributes."""

    def __init__(self) -> None:
        self.epochs: list[Timings] = []
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Reset the counts."""
        self.steps = self.samples = 0
        self.data = 0.0
        self._began = perf_counter()

    def read(self) -> Timings:
        """Return the timings of the epoch so far."""
        return Timings(self.steps, self.samples, perf_counter() - self._began, self.data)

    def end_epoch(self) -> None:
        """Store the timings of the epoch."""
        self.epochs.append(self.read())
        self.begin_epoch()

    def timings(self) -> Timings:
        """Return the timings of all epochs, including the finished steps of the current epoch."""
        running = [self.read()] if self.steps else []
        return Timings.over([*self.epochs, *running])
