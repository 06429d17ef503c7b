"""Wrap torch's schedulers as callbacks, also with a length that follows the training's; log and check rates.

In every mode, a scheduler steps once per optimizer step or once per epoch, regardless of the numbers of ranks, replicas
and micro-batches. It does not step if AMP skips the optimizer's step.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

from torch.optim import Optimizer, lr_scheduler

from trainloop._launch.rank_process import started_by_launch
from trainloop._support.keywords import name_of, why_not
from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import count_of
from trainloop.callbacks.base import AbstractCallback, logs_nothing, runs_first
from trainloop.callbacks.monitor import Monitor
from trainloop.callbacks.weights.torch_schedulers import (
    CLASS_KEY,
    is_plateau,
    is_scheduler,
    load_scheduler,
    restore_counters,
    schedule_length,
    scheduler_class,
    scheduler_state,
    settings_that_differ,
    state_fits,
)
from trainloop.devices import whole_number
from trainloop.distributed.ranks import is_global_zero
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiOptimizer
from trainloop.optim.optimizers import optimizers_of

__all__ = [
    "AbstractScheduler",
    "LRScheduler",
    "LearningRateMonitor",
    "warn_of_rates_left",
]


_WRONG_ORDER = r".*(lr_scheduler|optimizer)\.step\(\)`"  # a warning of torch's schedulers

_RATE_LEFT = 1e-3  # below this part of its initial value, a learning rate hardly trains


class AbstractScheduler:
    """Base of callbacks with a learning rate scheduler in ``self.scheduler``. It saves and loads the scheduler's state.

    Examples
    --------
    >>> class Halve(AbstractScheduler, AbstractCallback):
    ...     def on_train_loop_registration(self):
    ...         self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.train_loop_obj.optimizer, gamma=0.5)
    ...     def on_epoch_end(self):
    ...         self.scheduler.step()
    """

    scheduler: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state."""
        return {} if self.scheduler is None else scheduler_state(self.scheduler)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned. Learning rates are part of the optimizer's state."""
        if self.scheduler is None or not state_dict:
            return
        if not AbstractScheduler.fits(self, state_dict):  # torch would mix the attributes of both, or raise a KeyError
            self._warn_of_other(state_dict[CLASS_KEY], scheduler_class(self.scheduler))
            return
        load_scheduler(self.scheduler, state_dict)
        restore_counters(self.scheduler)

    def _warn_of_other(self, before: str, now: str) -> None:
        if is_global_zero():
            warn(
                f"{type(self).__name__}: the checkpoint has the state of a {before}, but this fit has a {now}. That "
                "state is ignored: the new schedule begins at its first step, with the checkpoint's learning rate. To "
                "begin with another rate, set group['lr'] in a callback's on_resume."
            )

    def fits(self, state_dict: Mapping[str, Any]) -> bool:
        """Return True if a state is that of a scheduler of the same class, which is stepped at the same times."""
        return self.scheduler is None or not state_dict or state_fits(self.scheduler, state_dict)

    def other_settings(self, state_dict: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return the arguments of the scheduler that differ in a state: ``(name, value in the state, own value)``."""
        return [] if self.scheduler is None else settings_that_differ(self.scheduler, state_dict)


# Arguments of torch's schedulers (and of transformers' functions) that are numbers of steps.
_STEP_COUNTS = frozenset(
    {"total_steps", "T_max", "total_iters", "T_0", "step_size", "step_size_up", "milestones"}
    | {"num_training_steps", "num_warmup_steps"}
)


class LRScheduler(AbstractScheduler, AbstractCallback):
    """Step any scheduler of ``torch.optim.lr_scheduler`` once per optimizer step or once per epoch.

    Parameters
    ----------
    scheduler : class, callable or scheduler
        A scheduler class, with its arguments in ``kwargs``; a function that takes the optimizer and returns a
        scheduler; or a scheduler of the loop's optimizer.
    interval : {'step', 'epoch'}, optional
        When to step. Default: ``'epoch'``, as in most torch examples. ``OneCycleLR`` and warm-up need ``'step'``.
    monitor : str, optional
        Metric for ``ReduceLROnPlateau``. Default: ``'val_loss'``. With ``interval='step'``, a metric that is logged
        within epochs, such as ``'loss'`` or a validation every ``frequency`` steps; each newest value counts once.
    optimizer_idx : int or Optimizer, optional
        The optimizer of a :class:`trainloop.MultiOptimizer` to schedule. Required for a ``MultiOptimizer``, unless
        ``scheduler`` is a scheduler object.
    frequency : int
        The scheduler steps once in this many optimizer steps or epochs.
    **kwargs
        Arguments of the scheduler class. A number of steps (``total_steps``, ``T_max``, ``total_iters``, ...) may be
        ``None`` for the number of steps of this ``fit``, or a function of that number, such as
        ``milestones=lambda n: [n // 2, 3 * n // 4]``. In ``ddp``, the number is that of all ranks together.

    Attributes
    ----------
    scheduler : torch.optim.lr_scheduler.LRScheduler
        The scheduler; available from ``on_train_loop_registration`` on.

    Raises
    ------
    ConfigurationError
        At construction: for an unknown ``interval``, an optimizer among the arguments, a ``frequency`` below 1, or a
        plateau scheduler with ``interval='step'`` and no ``monitor``. At ``fit``: if there is no
        optimizer, if ``optimizer_idx`` is missing or out of range, if a scheduler object belongs to another optimizer
        (also after ``tl.optimizer = ...``), if it can't be created with the arguments, if its ``step`` needs arguments,
        if the metric does not exist, or if there is a ``monitor`` for a scheduler that reads no metric.

    Notes
    -----
    A second ``fit`` continues the schedule. Its state is part of checkpoints. If the loop gets another optimizer
    (``tl.optimizer = ...``), the schedule begins again with the rates of this optimizer.

    Examples
    --------
    >>> from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau
    >>> LRScheduler(CosineAnnealingLR, T_max=10)
    >>> LRScheduler(OneCycleLR, interval="step", max_lr=0.1, total_steps=None)
    >>> LRScheduler(ReduceLROnPlateau, monitor="val_loss", patience=2)
    >>> LRScheduler(CosineAnnealingLR(optimizer, T_max=10))
    """

    def __init__(
        self,
        scheduler: Any,
        interval: Literal["step", "epoch"] = "epoch",
        monitor: str | None = None,
        optimizer_idx: int | Optimizer | None = None,
        frequency: int = 1,
        **kwargs: Any,
    ) -> None:
        # Runs after callbacks that compute metrics at an epoch's end, and before callbacks that write checkpoints.
        AbstractCallback.__init__(self, "LRScheduler", execution_order=90)
        if isinstance(interval, Optimizer) or "optimizer" in kwargs:
            raise ConfigurationError(
                "LRScheduler: the scheduler gets the loop's optimizer. Leave it out, and pass the other arguments by "
                "name: LRScheduler(MultiStepLR, milestones=[30, 60]). Choose one of several optimizers with "
                "optimizer_idx."
            )
        if interval not in ("step", "epoch"):
            raise ConfigurationError(
                f"LRScheduler: interval={interval!r}: must be 'step' or 'epoch'. Name the scheduler's arguments."
            )
        made = is_scheduler(scheduler)
        if not made and not callable(scheduler):
            raise ConfigurationError(
                f"LRScheduler: scheduler={scheduler!r}: must be a class of torch.optim.lr_scheduler, a function "
                "(optimizer) -> scheduler, or a scheduler."
            )
        if made and kwargs:
            raise ConfigurationError(
                "LRScheduler: scheduler is not a class, so these arguments can't be passed to it: "
                f"{', '.join(sorted(kwargs))}. Pass the class: LRScheduler({type(scheduler).__name__}, ...)."
            )
        self.scheduler = scheduler if made else None
        self.factory: Callable[..., Any] | None = None if made else scheduler
        self.factory_kwargs = kwargs
        self.interval = interval
        self.monitor = monitor
        index = whole_number(optimizer_idx)
        self.optimizer_idx = optimizer_idx if index is None else index
        self.state_key = "" if index is None else f"optimizer {index}"
        self.frequency = count_of("LRScheduler", "frequency", frequency)
        self._count = 0
        self._groups = 0  # of the optimizer, when the scheduler was made; 0 before
        self._first = False  # True before the first step of a resumed schedule
        self._begin = 0  # steps of the schedule before this fit; negative if it began within this fit
        self._optimizer_of_loop: Optimizer | None = None  # for which the scheduler was made
        self._seen_step = 0  # global step at which this callback last counted
        self._length_in_script: int | None = None
        self._metric: Monitor | None = None
        self._judged_step = 0
        if is_plateau(scheduler):
            self._check_plateau()

    def reset(self) -> None:
        super().reset()
        self._count, self._metric, self._judged_step = 0, None, 0
        if self.factory is not None:
            self.scheduler, self._optimizer_of_loop, self._groups = None, None, 0

    def on_train_loop_registration(self) -> None:
        loop = self.train_loop_obj
        optimizer = self._optimizer()
        self._begin = self._count
        if self.factory is None:
            self._refuse_other(optimizer)
        elif self._optimizer_of_loop is not optimizer:
            self._make_scheduler(optimizer)
        self._groups = self._groups or len(optimizer.param_groups)
        self._check_step()
        if is_plateau(self.scheduler):
            self._check_plateau()
            # Torch's scheduler decides by its own mode, 'min' by default.
            self._metric = self._metric or Monitor(self.monitor or "val_loss", self.scheduler.mode, owner="LRScheduler")
            self._metric.check(loop)
        elif self.monitor is not None:
            raise ConfigurationError(
                f"LRScheduler: monitor={self.monitor!r}: {type(self.scheduler).__name__} reads no metric, only "
                "ReduceLROnPlateau does. Leave monitor out, or use ReduceLROnPlateau."
            )
        self._check_length()
        self._length_in_script = self._schedule_length()[0]

    def follow_optimizer(self) -> None:
        """Begin the schedule again, for the steps left, if the loop has another optimizer now.

        A scheduler object is checked when it is used: the callback that replaces the optimizer may replace it, too.
        """
        if self.factory is None or self._optimizer_of_loop is (now := self._optimizer()):
            return
        run = self.train_loop_obj.watch()
        ended = run.epoch_steps > 0
        if self.interval == "epoch":
            ended = run.epoch_finished or (run.stage == "done" and run.epoch_batches == run.feed.num_batches)
        # The last step or epoch counts if this callback's hook for it is still to be called.
        begin = self._begin - self._count - int(ended and self._seen_step != self.train_loop_obj.global_step)
        of_fit = self._units_of_fit()
        if of_fit is None or begin + of_fit > 0:  # otherwise the next fit begins the schedule
            self._make_scheduler(now, begin)

    def _make_scheduler(self, optimizer: Optimizer, begin: int = 0) -> None:
        """Create the scheduler of an optimizer that the loop has now."""
        assert self.factory is not None
        self._count, self._begin, self._groups = 0, begin, len(optimizer.param_groups)
        self.scheduler = self._made(self.factory, optimizer)
        self._optimizer_of_loop = optimizer

    def _refuse_other(self, optimizer: Optimizer) -> None:
        """Raise an error if a scheduler object is not for an optimizer."""
        if self.scheduler.optimizer is not optimizer:
            raise ConfigurationError(
                f"LRScheduler: the {type(self.scheduler).__name__} was created for an optimizer that is not "
                "the loop's. Create the scheduler with the loop's optimizer, or pass the scheduler's class and "
                "arguments."
            )

    def _is_trained(self) -> bool:
        """Return True if the loop's optimizer did the last step; False if the loop got it only after that.

        A scheduler object that is not for this optimizer is an error.
        """
        self.follow_optimizer()  # one may have been replaced in a MultiOptimizer
        optimizer = self._optimizer()
        if self.factory is None:
            self._refuse_other(optimizer)
        return any(one is optimizer for one in self.train_loop_obj.watch().gradients.optimizers)

    def _made(self, factory: Callable[..., Any], optimizer: Optimizer) -> Any:
        """Return a new scheduler."""
        arguments = self._made_with()
        if why := why_not(factory, optimizer, **arguments):
            name = name_of(factory)
            raise ConfigurationError(
                f"LRScheduler: {name} can't be called with the optimizer and the given arguments "
                f"({', '.join(arguments) or 'none'}): {why}. It takes {inspect.signature(factory)}."
            )
        return factory(optimizer, **arguments)

    def _made_with(self) -> dict[str, Any]:
        """Return the arguments of a new scheduler, whose length may be that of the run."""
        lengths = {name: value for name, value in self.factory_kwargs.items() if name in _STEP_COUNTS}
        if "epochs" in self.factory_kwargs:  # OneCycleLR's other way to say it
            lengths.pop("total_steps", None)
        asked = {name: value for name, value in lengths.items() if value is None or callable(value)}
        steps = self._planned_steps() if asked else None
        if asked and steps is None:
            name = next(iter(asked))
            raise ConfigurationError(
                f"{type(self).__name__}: {name} is to be computed from the length of the training, which is unknown "
                f"(the train_loader has no length). Pass {name}, or fit(num_iterations=...)."
            )
        given = {name: steps if value is None else value(steps) for name, value in asked.items()}
        return {**self.factory_kwargs, **given}

    def _check_step(self) -> None:
        step = getattr(self.scheduler, "step", None)
        if step is None:
            raise ConfigurationError(
                f"LRScheduler: scheduler made {self.scheduler!r}: it must be a function (optimizer) -> scheduler."
            )
        if why := why_not(step, *([0.0] if is_plateau(self.scheduler) else [])):
            raise ConfigurationError(
                f"LRScheduler: {type(self.scheduler).__name__}.step() can't be called without arguments: {why}. If "
                "step() takes the number of the epoch or step, write a callback. It creates the scheduler in "
                "on_train_begin, and calls scheduler.step(self.train_loop_obj.epoch) in on_epoch_begin, or "
                "scheduler.step(self.train_loop_obj.global_step) in on_after_optimizer_step."
            )

    def _planned_steps(self) -> int | None:
        """Return the number of scheduler steps by the end of ``fit``, including earlier steps; ``None`` if unknown."""
        of_fit = self._units_of_fit()
        return None if of_fit is None else (self._begin + of_fit) // self.frequency

    def _units_of_fit(self) -> int | None:
        """Return the number of optimizer steps, or epochs, in this ``fit``; ``None`` if unknown."""
        loop = self.train_loop_obj
        if not (loop.num_epochs or loop.num_iterations):  # registered outside of fit
            return None
        of_fit = loop.num_optimizer_steps() if self.interval == "step" else loop.num_epochs or None
        if of_fit is None and (of_epoch := loop.num_optimizer_steps(num_epochs=1)):
            of_fit = -(-(loop.num_optimizer_steps() or 0) // of_epoch)
        return of_fit

    def _schedule_length(self) -> tuple[int | None, bool]:
        """Return the number of steps until the schedule ends, or ``None``; and False if it may end earlier."""
        return schedule_length(self.scheduler)

    def _check_length(self) -> None:
        loop = self.train_loop_obj
        length, exact = self._schedule_length()
        planned = None if length is None or loop.train_loader is None else self._planned_steps()
        if length is None or planned is None or not loop.is_global_zero:
            return
        # A difference of one step is accepted, because conventions of counting differ. OneCycleLR raises an error in a
        # step after its end.
        if planned - (not isinstance(self.scheduler, lr_scheduler.OneCycleLR)) <= length <= planned + 1:
            return
        if length < planned and not exact:
            return
        unit, steps = "optimizer step", None
        if self.interval == "epoch":
            unit, steps = "epoch", loop.num_optimizer_steps()
        also = "" if steps is None else f" (optimizer step {steps} of this fit)"
        meant = " For a schedule that counts optimizer steps, pass interval='step'." if steps is not None else ""
        warn(
            f"{type(self).__name__}: the schedule ends after {unit} {length * self.frequency}, but the training ends "
            f"after {unit} {planned * self.frequency}{also}. Make both equal (tl.num_optimizer_steps(num_epochs=...) "
            f"counts optimizer steps, with any number of ranks).{meant} Ignore this if further calls of fit continue "
            "the schedule, or if it is intended."
        )

    def _check_plateau(self) -> None:
        if self.interval == "step" and self.monitor is None:
            raise ConfigurationError(
                "LRScheduler: ReduceLROnPlateau needs a metric, and most metrics are known only once per epoch. Use "
                "interval='epoch', or pass a monitor that is logged within epochs, such as 'loss', and frequency=n to "
                "read it after every n-th step."
            )

    def _optimizer(self) -> Optimizer:
        optimizers = optimizers_of(self.train_loop_obj.optimizer)
        chosen = self.optimizer_idx
        if not optimizers:
            raise ConfigurationError("LRScheduler: the loop has no optimizer. Pass one to TrainLoop.")
        if chosen is None and self.scheduler is not None and self.factory is None:
            chosen = self.scheduler.optimizer
        if isinstance(chosen, Optimizer):
            if all(optimizer is not chosen for optimizer in optimizers):
                raise ConfigurationError(
                    f"LRScheduler: the given {type(chosen).__name__} is not one of the loop's optimizers. Create "
                    "the scheduler with one of these, or pass the scheduler's class and arguments."
                )
            return chosen
        if chosen is None and len(optimizers) > 1:
            raise ConfigurationError(
                f"LRScheduler: the loop has {len(optimizers)} optimizers. Choose one with optimizer_idx=0 to "
                f"{len(optimizers) - 1}, and pass a separate LRScheduler for each optimizer that needs one."
            )
        if chosen is not None and (whole_number(chosen) is None or not 0 <= chosen < len(optimizers)):
            raise ConfigurationError(
                f"LRScheduler: optimizer_idx={chosen!r}: must be the index of one of the loop's optimizers (0 to "
                f"{len(optimizers) - 1})."
            )
        return optimizers[chosen or 0]

    def on_train_begin(self) -> None:
        if started_by_launch():
            # Torch's schedulers wrap the optimizer's step, to warn about calls in the wrong order. The wrapper is lost
            # when the optimizer is sent to a rank, and the warning would be wrong: the loop's order is correct.
            warnings.filterwarnings("ignore", _WRONG_ORDER)
        self._first = self.train_loop_obj.resumed
        self._seen_step = self.train_loop_obj.global_step
        if self._metric is not None:
            self._metric.begin(self.train_loop_obj)
        self.follow_optimizer()

    def on_resume(self) -> None:
        """Warn if the schedule, which is the checkpoint's, ends earlier than the script's would."""
        (length, exact), meant = self._schedule_length(), self._length_in_script
        of_run = any(self.factory_kwargs.get(name, 0) is None for name in _STEP_COUNTS)
        if length is None or meant is None or length >= meant or not (exact or of_run) or self._begin < 0:
            return
        if self.train_loop_obj.is_global_zero:
            unit = "optimizer step" if self.interval == "step" else "epoch"
            warn(
                f"{type(self).__name__}: the resumed run continues the schedule of its checkpoint, which ends after "
                f"{unit} {length * self.frequency}. The script's {type(self.scheduler).__name__} would end after "
                f"{unit} {meant * self.frequency}, so the learning rates are not those of this longer schedule; they "
                "may stay at 0. To train for longer, load the checkpoint's weights into a new run, or change the "
                "schedule in a callback's on_resume."
            )

    def on_after_optimizer_step(self) -> None:
        # The schedule counts only steps that AMP did not skip, as torch's documentation recommends.
        if self.interval == "step" and self._metric is None:
            loop, trained = self.train_loop_obj, self._is_trained()
            self._seen_step = loop.global_step
            # Of several optimizers, AMP may have skipped the step of another one.
            if trained and not (loop.step_skipped and loop.watch().gradients.skipped(self._optimizer())):
                self._step_scheduler()

    def on_batch_end(self) -> None:
        # A plateau's metric may be logged in this hook, by callbacks before this one.
        loop = self.train_loop_obj
        if self.interval != "step" or self._metric is None or loop.global_step in (0, self._judged_step):
            return
        if loop.global_step % self.frequency == 0:
            self._judged_step = loop.global_step
            value = self._metric.newest_within(loop)
            if value is not None and self._is_trained():
                self.scheduler.step(value)

    @logs_nothing
    def on_epoch_end(self) -> None:
        loop, metric = self.train_loop_obj, self._metric
        trained = self._is_trained()
        self._seen_step = loop.global_step
        if not trained:
            return
        if self.interval == "step":
            value = None if metric is None else metric.left_for_epoch_end(loop, due=self._judged_step > 0)
            if value is not None and loop.cut is None:  # a cut epoch is not at its end
                self.scheduler.step(value)
        elif loop.cut is None:
            if metric is None:
                self._step_scheduler()
            elif (value := metric.new_value(loop)) is not None:
                self._step_scheduler(value)

    def _step_scheduler(self, *metric: float) -> None:
        self._count += 1
        if self._count % self.frequency == 0:
            # The step of the optimizer that precedes the first step of a resumed schedule was before the checkpoint.
            first, self._first = self._first, False
            try:
                with warnings.catch_warnings() if first else nullcontext():
                    if first:
                        warnings.filterwarnings("ignore", _WRONG_ORDER)
                    self.scheduler.step(*metric)
            except (ValueError, KeyError) as error:
                self._explain_added_groups(error)
                raise

    def _explain_added_groups(self, error: Exception) -> None:
        """Raise an error that explains the scheduler's own if it was made for fewer groups than the optimizer has."""
        before, now = self._groups, len(self.scheduler.optimizer.param_groups)
        if before < now:
            raise ConfigurationError(
                f"LRScheduler: the {type(self.scheduler).__name__} was made for {before} parameter group"
                f"{'s' * (before > 1)} of the optimizer, which has {now} now, and it can't schedule added groups. Give "
                "the optimizer all groups before fit, and freeze their parameters until they train "
                "(requires_grad_(False)). Or use a scheduler that multiplies the current rates, such as StepLR or "
                "ExponentialLR."
            ) from error

    def state_dict(self) -> dict[str, Any]:
        return {
            "scheduler": AbstractScheduler.state_dict(self),
            "count": self._count,
            "begin": self._begin,
            "metric": None if self._metric is None else self._metric.state_dict(),
            "judged_step": self._judged_step,
            "interval": self.interval,
        }

    def fits(self, state_dict: Mapping[str, Any]) -> bool:
        # A count of steps is not one of epochs. Older checkpoints lack the interval.
        same_units = state_dict.get("interval", self.interval) == self.interval
        return same_units and AbstractScheduler.fits(self, state_dict["scheduler"])

    def other_settings(self, state_dict: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        return AbstractScheduler.other_settings(self, state_dict["scheduler"]) if self.fits(state_dict) else []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (before := state_dict.get("interval", self.interval)) != self.interval:
            self._warn_of_other(f"schedule for each {before}", f"schedule for each {self.interval}")
            return
        AbstractScheduler.load_state_dict(self, state_dict["scheduler"])
        if not self.fits(state_dict):
            return
        self._count = state_dict["count"]
        # Older checkpoints lack these entries.
        self._begin = state_dict.get("begin", self._begin)
        self._judged_step = state_dict.get("judged_step", 0)
        if self._metric is not None and state_dict["metric"] is not None:
            self._metric.load_state_dict(state_dict["metric"])


class LearningRateMonitor(AbstractCallback):
    """Log the learning rate of each step to the history, TensorBoard and other loggers.

    The name is ``lr``. With several parameter groups, the names are ``lr/group0`` and so on (or ``lr/<name>`` if the
    group has a ``'name'``; groups with equal names are ``lr/<name>/group0`` and so on). With several optimizers, they
    are ``lr/optimizer0`` or ``lr/optimizer0/group0``. The value of an epoch is the largest one logged in it.

    Parameters
    ----------
    every_n_steps : int
        Log at the first step and at every n-th step.

    Examples
    --------
    >>> tl.fit(num_epochs=2, callbacks=[LRScheduler(StepLR, step_size=1), LearningRateMonitor()])
    >>> tl.history["lr"]
    [0.1, 0.01]
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        super().__init__("LearningRateMonitor")
        self.every_n_steps = count_of("LearningRateMonitor", "every_n_steps", every_n_steps)

    @runs_first  # schedulers set the next step's rate in this hook
    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step % self.every_n_steps == 0 or loop.global_step == 1:
            for name, group in groups_with_rates(loop.optimizer):
                # The rate is equal on all ranks, so no average is needed.
                self.log(name, group["lr"], on_step=True, on_epoch=True, reduce="max", sync_dist=False)


def groups_with_rates(optimizer: Optimizer | MultiOptimizer) -> list[tuple[str, dict[str, Any]]]:
    """Return ``(name of the rate, group)`` for each parameter group, in the order of ``optimizer.param_groups``.

    Groups without ``'lr'`` are left out. So are groups whose ``'lr'`` is None because the optimizer chooses the rate.
    """
    optimizers = optimizers_of(optimizer)
    found = []
    for i, one in enumerate(optimizers):
        prefix = f"lr/optimizer{i}" if len(optimizers) > 1 else "lr"
        names = [str(group.get("name", f"group{j}")) for j, group in enumerate(one.param_groups)]
        for j, (name, group) in enumerate(zip(names, one.param_groups, strict=True)):
            if group.get("lr") is None:
                continue
            unique = name if names.count(name) == 1 else f"{name}/group{j}"
            found.append((f"{prefix}/{unique}" if len(names) > 1 else prefix, group))
    return found


def warn_of_rates_left(optimizer: Any, callbacks: Sequence[Any]) -> None:
    """Warn if the schedule of an earlier ``fit`` has left hardly any learning rate, and this ``fit`` has no schedule.

    Parameters
    ----------
    optimizer : Optimizer or MultiOptimizer
    callbacks : sequence of AbstractCallback
        Callbacks of this ``fit``.

    Examples
    --------
    >>> warn_of_rates_left(tl.optimizer, tl.callbacks)
    """
    groups = [group for one in optimizers_of(optimizer) for group in one.param_groups]
    # Torch's schedulers store the initial rate in the group.
    rates = [(float(group["lr"]), float(group["initial_lr"])) for group in groups if group.get("initial_lr")]
    if not rates or len(rates) < len(groups) or any(hasattr(callback, "scheduler") for callback in callbacks):
        return
    if all(rate <= _RATE_LEFT * initial for rate, initial in rates):
        warn(
            f"fit: the schedule of an earlier fit has left a learning rate of {rates[0][0]:.3g} (initially "
            f"{rates[0][1]:.3g}), and this fit has no schedule, so that it hardly trains. Set group['lr'] in "
            "optimizer.param_groups, or pass a schedule in callbacks."
        )
