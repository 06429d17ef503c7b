"""Callbacks that end training early: without improvement, below a threshold, or after a time limit."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import count_of, number_of
from trainloop.callbacks.base import AbstractCallback, logs_nothing
from trainloop.callbacks.monitor import Mode, Monitor
from trainloop.errors import ConfigurationError

__all__ = ["EarlyStopping", "ThresholdEarlyStopping", "TimeLimit"]


class _EndsByMetric(AbstractCallback):
    """Base of callbacks that end training after too many bad values of a metric in a row."""

    counters: tuple[str, ...] = ()  # names of the attributes that are saved in checkpoints

    def __init__(self, name: str, monitor: str, mode: Mode, patience: int) -> None:
        # Runs after callbacks that compute metrics at an epoch's end.
        super().__init__(name, execution_order=99)
        self._metric = Monitor(monitor, mode, owner=name)
        self.monitor = self.state_key = monitor
        self.patience = number_of(name, "patience", patience, least=0)

    def on_train_loop_registration(self) -> None:
        self._metric.check(self.train_loop_obj)

    def on_train_begin(self) -> None:
        self._metric.begin(self.train_loop_obj)

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric.state_dict(), **{name: getattr(self, name) for name in self.counters}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._metric.load_state_dict(state["metric"])
        for name in self.counters:
            setattr(self, name, state.get(name, getattr(self, name)))  # older checkpoints lack some


class EarlyStopping(_EndsByMetric):
    """Stop once a metric has not improved for ``patience`` epochs in a row.

    It decides at the end of each epoch, from the same values on all ranks. Epochs in which the metric is not evaluated
    don't count, and a NaN is not an improvement.

    ``fit(num_iterations=...)`` that ends in the middle of an epoch evaluates, too, and this evaluation counts like the
    one of a finished epoch. The best value and the count continue in the next call of ``fit``, so patience counts
    evaluations over all pieces of a training. If this callback has ended the training (``tl.early_stop`` is True), the
    next call of ``fit`` trains nevertheless: the best value stays, and a new count starts.

    Parameters
    ----------
    monitor : str
        Name in ``history``.
    min_delta : float
        Minimum improvement: a value counts only if it beats the best one by more than this.
    patience : int
        Training ends after this many evaluations in a row without an improvement; 0 is the same as 1. (AIToolbox
        continues for one more epoch if ``patience`` is above 0.)
    mode : {'auto', 'min', 'max'}
        ``'min'`` if lower is better, ``'max'`` if higher is; ``'auto'`` decides by words in the name (``loss``,
        ``rmse``, ``accuracy``) or, if a torchmetrics metric has the name, by that metric. For other names, pass the
        mode.
    every_n_steps : int, optional
        Decide after every n-th optimizer step instead of at the end of epochs, for a metric that is logged within
        epochs, such as a validation every ``n`` steps, by its newest value. Each value counts once. A metric that is
        known only at the end of epochs, such as ``'val_loss'``, is judged there. Ranks exchange their logs at these
        steps.

    Attributes
    ----------
    best : float or None
        Best value so far; None before the first evaluation.
    best_epoch : int
        Index of the epoch with the best value.
    stopped_epoch : int or None
        Index of the epoch after which this callback ended training; None if it did not end training.
    judged_step : int
        With ``every_n_steps``: the last step after which it decided.

    Raises
    ------
    ConfigurationError
        At ``fit``, if the run can't produce the metric; later, if there is no value by the end of the first epoch.

    Examples
    --------
    >>> tl.fit(num_epochs=100, callbacks=[EarlyStopping("val_loss", patience=3)])
    """

    counters = ("best", "best_epoch", "epochs_without_improvement", "judged_step", "stopped_epoch")

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        mode: Mode = "auto",
        *,
        every_n_steps: int | None = None,
    ) -> None:
        super().__init__("EarlyStopping", monitor, mode, patience)
        self.every_n_steps = count_of("EarlyStopping", "every_n_steps", every_n_steps, optional=True)
        self.judged_step = 0
        self.min_delta = number_of("EarlyStopping", "min_delta", min_delta, least=0)
        self.best: float | None = None
        self.best_epoch = 0
        self.epochs_without_improvement = 0
        self.stopped_epoch: int | None = None

    def reset(self) -> None:
        super().reset()
        self.best, self.best_epoch, self.judged_step, self.epochs_without_improvement = None, 0, 0, 0

    def on_train_begin(self) -> None:
        super().on_train_begin()
        # The count continues over calls of fit, unless it has ended the last one.
        if self.ends_again(self.state_dict()):
            self.epochs_without_improvement = 0
        self.stopped_epoch = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of an earlier run."""
        super().load_state_dict(state)
        if not self.ends_again(state):  # with another patience, the run continues
            self.stopped_epoch = None

    def on_batch_end(self) -> None:
        if self.every_n_steps is None:
            return
        loop = self.train_loop_obj
        step = loop.global_step
        # Before the last micro-batch of a step, the step does not count yet.
        if step % self.every_n_steps == 0 and step != self.judged_step:
            self.judged_step = step
            self._judge(self._metric.newest_within(loop))

    @logs_nothing
    def on_epoch_end(self) -> None:
        loop, metric = self.train_loop_obj, self._metric
        at_steps = self.every_n_steps is not None
        self._judge(metric.left_for_epoch_end(loop, due=self.judged_step > 0) if at_steps else metric.new_value(loop))

    @logs_nothing
    def on_train_end(self) -> None:
        loop = self.train_loop_obj
        if self.every_n_steps is not None and 0 < loop.global_step < self.every_n_steps and loop.is_global_zero:
            warn(
                f"EarlyStopping(every_n_steps={self.every_n_steps}): training ended after {loop.global_step} steps, so "
                f"{self.monitor!r} was never read. Use a smaller every_n_steps, or continue with another fit."
            )

    def _judge(self, value: float | None) -> None:
        loop = self.train_loop_obj
        if value is None:
            return
        if self._metric.improves(value, self.best, self.min_delta):
            self.best, self.best_epoch = value, loop.epoch
            self.epochs_without_improvement = 0
            return
        self.epochs_without_improvement += 1
        if self.epochs_without_improvement >= self.patience:
            self.stopped_epoch = loop.epoch
            best = "no finite value" if self.best is None else f"{self.best:.6g} in epoch {self.best_epoch + 1}"
            least = f", min_delta={self.min_delta:g}" if self.min_delta else ""
            self.end_training(f"{self.monitor} = {value:.6g}, best was {best} (mode='{self._metric.mode}'{least}).")

    def ends_again(self, state: dict[str, Any]) -> bool:
        return bool(state["epochs_without_improvement"] >= self.patience)


class ThresholdEarlyStopping(_EndsByMetric):
    """Stop if a metric does not reach a threshold, to end unpromising runs early.

    Parameters
    ----------
    monitor : str
        Name in ``history``.
    threshold : float
        Value to reach: the metric must not be worse.
    patience : int
        Number of evaluations in a row that may be worse than the threshold. One more such evaluation ends training. The
        count continues in the next call of ``fit``, as in :class:`EarlyStopping`.
    mode : {'auto', 'min', 'max'}
        As in :class:`EarlyStopping`.

    Examples
    --------
    >>> tl.fit(num_epochs=100, callbacks=[ThresholdEarlyStopping("val_accuracy", threshold=0.5, patience=4)])
    """

    counters = ("epochs_below",)

    def __init__(self, monitor: str, threshold: float, patience: int = 0, mode: Mode = "auto") -> None:
        super().__init__("ThresholdEarlyStopping", monitor, mode, patience)
        self.threshold = number_of("ThresholdEarlyStopping", "threshold", threshold)
        self.epochs_below = 0

    def reset(self) -> None:
        super().reset()
        self.epochs_below = 0

    def on_train_begin(self) -> None:
        super().on_train_begin()
        if self.ends_again(self.state_dict()):
            self.epochs_below = 0

    @logs_nothing
    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        value = self._metric.new_value(loop)
        if value is None:
            return
        if value == self.threshold or self._metric.improves(value, self.threshold):
            self.epochs_below = 0
            return
        self.epochs_below += 1
        if self.epochs_below > self.patience:
            self.end_training(
                f"{self.monitor} = {value:.6g} has not reached {self.threshold:.6g} (mode='{self._metric.mode}')."
            )

    def ends_again(self, state: dict[str, Any]) -> bool:
        return bool(state["epochs_below"] > self.patience)


class TimeLimit(AbstractCallback):
    """Stop after a given time, at the end of the current step.

    Each rank has its own clock. The first rank past the limit ends training on all ranks at the same step. If a run is
    resumed, the earlier time counts too; a second ``fit`` starts from zero. To end a cluster job before its time limit
    and resume in the next job, use the cluster's signal instead, because this callback also counts the time of earlier
    jobs.

    Parameters
    ----------
    seconds : float or datetime.timedelta
        Time from the start of training; added to the other arguments.
    minutes, hours, days : float
        Additional time in these units.

    Attributes
    ----------
    elapsed_s : float
        Seconds of training so far.

    Raises
    ------
    ConfigurationError
        If the limit is not above zero.

    Examples
    --------
    >>> tl.fit(num_epochs=1000, callbacks=[TimeLimit(hours=11.5)])
    """

    def __init__(
        self, seconds: float | timedelta = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0
    ) -> None:
        super().__init__("TimeLimit")
        first = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        parts = {"seconds": (first, 1), "minutes": (minutes, 60), "hours": (hours, 3600), "days": (days, 86400)}
        given = {name: (number_of("TimeLimit", name, value, least=0), unit) for name, (value, unit) in parts.items()}
        self.limit_s = sum(value * unit for value, unit in given.values())
        if not self.limit_s > 0:
            raise ConfigurationError(
                f"TimeLimit: the limit is {self.limit_s} seconds. It must be above zero, as in TimeLimit(hours=2)."
            )
        self._elapsed_before_s = 0.0
        self._started: float | None = None

    @property
    def elapsed_s(self) -> float:
        running = 0.0 if self._started is None else time.monotonic() - self._started
        return self._elapsed_before_s + running

    def on_train_begin(self) -> None:
        self._elapsed_before_s = 0.0
        self._started = time.monotonic()

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        if self.elapsed_s >= self.limit_s and not loop.early_stop:
            self.end_training(f"the limit of {timedelta(seconds=self.limit_s)} was reached at step {loop.global_step}.")

    def ends_again(self, state: dict[str, Any]) -> bool:
        return bool(state["elapsed_s"] >= self.limit_s)

    @logs_nothing
    def on_train_end(self) -> None:
        self._stop_clock()

    def on_exception(self, exception: BaseException) -> None:
        self._stop_clock()

    def _stop_clock(self) -> None:
        # A reading of a monotonic clock is meaningless in another process.
        self._elapsed_before_s, self._started = self.elapsed_s, None

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._elapsed_before_s = state["elapsed_s"]
