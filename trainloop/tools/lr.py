"""Find a learning rate: losses for increasing rates, and a suggestion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trainloop._support.distribution import import_extra
from trainloop._support.platform import absolute_path
from trainloop.callbacks.arguments import count_of, number_of
from trainloop.callbacks.base import AbstractCallback
from trainloop.errors import ConfigurationError
from trainloop.history import html_table
from trainloop.optim import MultiOptimizer
from trainloop.optim.optimizers import set_rate
from trainloop.tools.trial import require_training_parts, trial_of, wrapper_args_of
from trainloop.train_loop.execution.execute import untouched
from trainloop.train_loop.loop import TrainLoop

SMOOTHING = 0.9
"""Weight of the previous mean in the smoothed loss. The mean covers about ten steps."""
SKIPPED = 5
"""Number of initial losses to skip, because a mean of so few values gives no reliable slope."""


@dataclass(frozen=True)
class LearningRates:
    """Result of :func:`find_lr`."""

    rates: tuple[float, ...]
    """Learning rate of each step."""
    losses: tuple[float, ...]
    """Loss of each step, over all ranks, computed before the weights change."""
    diverged: bool
    """True if the loss diverged before the largest rate was reached."""

    @property
    def smoothed(self) -> list[float]:
        """Exponential moving average of the losses, with bias correction."""
        means, mean = [], 0.0
        for i, loss in enumerate(self.losses, start=1):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
            means.append(mean / (1 - SMOOTHING**i))
        return means

    @property
    def suggestion(self) -> float | None:
        """Rate at which the smoothed loss falls most steeply; ``None`` if it never falls."""
        values = self.smoothed
        slopes = {i: values[i + 1] - values[i - 1] for i in range(SKIPPED, len(values) - 1)}
        slopes = {i: slope for i, slope in slopes.items() if math.isfinite(slope)}
        best = min(slopes, key=slopes.__getitem__, default=None)
        return None if best is None or slopes[best] >= 0 else self.rates[best]

    def _repr_html_(self) -> str:
        every = max(1, len(self.rates) // 20)
        steps = list(zip(self.rates, self.losses, self.smoothed))[::every]
        suggestion = "no suggestion" if self.suggestion is None else f"suggestion: {self.suggestion:.3g}"
        return html_table([dict(zip(("rate", "loss", "smoothed loss"), step)) for step in steps]) + suggestion

    def plot(self, path: str | None = None) -> Any:
        """Plot the losses over the rates, with the suggestion marked, and return the Matplotlib figure."""
        figure = import_extra("matplotlib.figure", "LearningRates.plot", "plot").Figure(
            figsize=(5, 3.5), layout="constrained"
        )
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, alpha=0.3, label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="gray", linestyle="--", label=f"suggestion {self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        if path is not None:
            figure.savefig(absolute_path(path), dpi=150)
        return figure

    def __str__(self) -> str:
        end = "the loss diverged there" if self.diverged else "the largest requested"
        found = "none, the loss never fell" if self.suggestion is None else f"{self.suggestion:.3g}"
        return f"learning rates {self.rates[0]:.2g} to {self.rates[-1]:.2g} ({end}); suggestion: {found}"


def find_lr(
    loop: TrainLoop[Any],
    *,
    smallest: float = 1e-7,
    largest: float = 1.0,
    steps: int = 100,
    diverges_at: float = 4.0,
) -> LearningRates:
    """Train a copy of the loop with a learning rate that increases from step to step.

    The copy uses the loop's mode, devices and batches. If there are fewer batches than steps, the batches are repeated.
    The loop itself is not changed, so set the rate yourself: ``optimizer.param_groups[0]["lr"] = found.suggestion``.

    Parameters
    ----------
    loop : TrainLoop
    smallest, largest : float
        Range of rates. Each rate is the previous rate times a constant. With several parameter groups, the range
        applies to the first group, and the other groups keep their ratio to it.
    steps : int
        Number of optimizer steps.
    diverges_at : float
        End early if a loss is not finite, or is more than this many times the smallest loss so far.

    Returns
    -------
    LearningRates
        ``.suggestion``, ``.plot("lr.png")``, ``.rates``, ``.losses``.

    Raises
    ------
    ConfigurationError
        For invalid arguments, for several optimizers, and for a loop without ``train_loader`` or ``optimizer``.

    Notes
    -----
    This needs memory for a second model and optimizer. A stream is read from its beginning, and is not rewound
    afterwards.

    Examples
    --------
    >>> found = tl.find_lr()                                                                  # doctest: +SKIP
    >>> found.plot("lr.png"), found.suggestion                                                # doctest: +SKIP
    """
    require_training_parts(loop, "find_lr")
    if not 0 < smallest < largest < math.inf:
        raise ConfigurationError(f"find_lr: smallest={smallest}, largest={largest}: must be 0 < smallest < largest.")
    steps = count_of("find_lr", "steps", steps, 10)
    number_of("find_lr", "diverges_at", diverges_at, above=1)
    if isinstance(loop.optimizer, MultiOptimizer):
        raise ConfigurationError(
            "find_lr: the loop has several optimizers, whose rates depend on each other. Use a loop with a single "
            "optimizer."
        )
    rates = [smallest * (largest / smallest) ** (i / (steps - 1)) for i in range(steps)]
    sweep = _Sweep(rates, diverges_at)
    # Random states and loaders are restored, so that a later fit is not affected.
    with untouched(loop):
        trial = trial_of(loop)
        trial.fit(num_iterations=steps, callbacks=[sweep], **wrapper_args_of(loop))
    losses = trial.history.steps("loss")
    return LearningRates(tuple(rates[: len(losses)]), tuple(losses), trial.early_stop)


class _Sweep(AbstractCallback):
    """Set each step's learning rate, and end when the loss diverges."""

    def __init__(self, rates: list[float], diverges_at: float) -> None:
        super().__init__("find_lr")
        self.rates = rates
        self.diverges_at = diverges_at
        self.best = math.inf
        self.ratios: list[float] = []

    def on_train_begin(self) -> None:
        groups = self.train_loop_obj.optimizer.param_groups
        # Groups keep their ratios. For example, a head keeps ten times the rate of the backbone.
        first = float(groups[0]["lr"])
        self.ratios = [float(group["lr"]) / first if first else 1.0 for group in groups]
        self._set_rates(self.rates[0])

    def _set_rates(self, rate: float) -> None:
        for group, ratio in zip(self.train_loop_obj.optimizer.param_groups, self.ratios, strict=True):
            set_rate(group, rate * ratio)

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step < len(self.rates):
            self._set_rates(self.rates[loop.global_step])

    def on_batch_end(self) -> None:
        last = self.train_loop_obj.last_loss
        if last is None:  # this rank had no batch in this step
            return
        # This waits for the device at each step, which is acceptable in a sweep of a few hundred steps.
        loss = float(last)
        self.best = min(self.best, loss) if math.isfinite(loss) else self.best
        if not math.isfinite(loss) or 0 < self.best <= loss / self.diverges_at:
            self.end_training()
