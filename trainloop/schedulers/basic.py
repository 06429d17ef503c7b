"""A callback for each of torch's most used schedulers, with AIToolbox's names.

:class:`~trainloop.callbacks.train_schedule.LRScheduler` takes any scheduler; these need fewer arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from trainloop.callbacks.base import logs_nothing
from trainloop.callbacks.train_schedule import AbstractScheduler, LRScheduler
from trainloop.errors import ConfigurationError

__all__ = [
    "AbstractScheduler",
    "GeneralLRScheduler",
    "GeneralLRSchedulerCallback",
    "LRScheduler",
    "LambdaLRScheduler",
    "MultiStepLRScheduler",
    "ReduceLROnPlateauMetricScheduler",
    "ReduceLROnPlateauScheduler",
    "StepLRScheduler",
]


class GeneralLRSchedulerCallback(LRScheduler):
    """Step a scheduler class of torch once per epoch; AIToolbox's name for :class:`LRScheduler`.

    Parameters
    ----------
    scheduler_class : class
        Class of ``torch.optim.lr_scheduler``.
    optimizer_idx : int or Optimizer, optional
        Optimizer of a :class:`trainloop.MultiOptimizer`.
    **kwargs
        Arguments of the scheduler class, and of :class:`LRScheduler`.

    Examples
    --------
    >>> GeneralLRSchedulerCallback(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    """

    def __init__(self, scheduler_class: Any, optimizer_idx: int | Optimizer | None = None, **kwargs: Any) -> None:
        super().__init__(scheduler_class, optimizer_idx=optimizer_idx, **kwargs)


GeneralLRScheduler = GeneralLRSchedulerCallback


class LambdaLRScheduler(GeneralLRSchedulerCallback):
    """Multiply the initial learning rates by a function of the number of epochs, or of steps.

    Parameters
    ----------
    lr_lambda : callable or list of callables
        Takes the number of epochs or steps done, returns the factor; a list has one for each parameter group.
    execute_epoch_end, execute_batch_end : bool
        Step once per epoch, or once per optimizer step; exactly one must be True.
    **kwargs
        Further arguments of ``LambdaLR``, and ``optimizer_idx``.

    Examples
    --------
    >>> LambdaLRScheduler(lambda epoch: 0.9**epoch)
    """

    def __init__(
        self,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        execute_epoch_end: bool = True,
        execute_batch_end: bool = False,
        **kwargs: Any,
    ) -> None:
        if bool(execute_epoch_end) == bool(execute_batch_end):
            raise ConfigurationError(
                f"{type(self).__name__}: execute_epoch_end={execute_epoch_end}, execute_batch_end={execute_batch_end}: "
                "exactly one must be True."
            )
        interval = "step" if execute_batch_end else "epoch"
        super().__init__(lr_scheduler.LambdaLR, interval=interval, lr_lambda=lr_lambda, **kwargs)


class StepLRScheduler(GeneralLRSchedulerCallback):
    """Multiply learning rates by ``gamma`` every ``step_size`` epochs.

    Parameters
    ----------
    step_size : int
        Number of epochs between two changes.
    **kwargs
        Further arguments of ``StepLR``, such as ``gamma``, and ``optimizer_idx``.

    Examples
    --------
    >>> StepLRScheduler(step_size=10, gamma=0.5)
    """

    def __init__(self, step_size: int, **kwargs: Any) -> None:
        super().__init__(lr_scheduler.StepLR, step_size=step_size, **kwargs)


class MultiStepLRScheduler(GeneralLRSchedulerCallback):
    """Multiply learning rates by ``gamma`` at given epochs.

    Parameters
    ----------
    milestones_list : list of int
        Epochs, in increasing order.
    **kwargs
        Further arguments of ``MultiStepLR``, such as ``gamma``, and ``optimizer_idx``.

    Examples
    --------
    >>> MultiStepLRScheduler([30, 80], gamma=0.1)
    """

    def __init__(self, milestones_list: Sequence[int], **kwargs: Any) -> None:
        super().__init__(lr_scheduler.MultiStepLR, milestones=list(milestones_list), **kwargs)


class ReduceLROnPlateauMetricScheduler(GeneralLRSchedulerCallback):
    """Lower learning rates once a metric of the history stops improving.

    Parameters
    ----------
    metric_name : str
        Name in ``history``.
    **kwargs
        Further arguments of ``ReduceLROnPlateau`` (``mode='max'`` for metrics that should rise), and ``optimizer_idx``.

    Examples
    --------
    >>> ReduceLROnPlateauMetricScheduler("val_accuracy", mode="max", patience=2)
    """

    def __init__(self, metric_name: str, **kwargs: Any) -> None:
        super().__init__(lr_scheduler.ReduceLROnPlateau, monitor=metric_name, **kwargs)
        self.metric_name = metric_name


class ReduceLROnPlateauScheduler(GeneralLRSchedulerCallback):
    """Lower learning rates once the validation loss stops improving.

    The loop's own ``val_loss`` is used; in epochs that don't have it, it is evaluated here.

    Parameters
    ----------
    main_multi_loss : str, optional
        Name of the loss to use if the model returns a :class:`trainloop.MultiLoss`. Default: the mean of all.
    **kwargs
        Further arguments of ``ReduceLROnPlateau``, and ``optimizer_idx``.

    Examples
    --------
    >>> ReduceLROnPlateauScheduler(patience=2, factor=0.5)
    """

    def __init__(self, main_multi_loss: str | None = None, **kwargs: Any) -> None:
        super().__init__(lr_scheduler.ReduceLROnPlateau, monitor="val_loss", **kwargs)
        self.main_multi_loss = main_multi_loss

    @logs_nothing
    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        assert self._metric is not None, "call on_train_loop_registration first"
        known = loop.history.get("val_loss") and self.main_multi_loss is None
        value: Any = self._metric.new_value(loop) if known else None
        if value is None:
            value = loop.evaluate_loss_on_validation_set()
        if isinstance(value, dict):
            if self.main_multi_loss is None:
                value = sum(value.values()) / len(value)
            elif self.main_multi_loss in value:
                value = value[self.main_multi_loss]
            else:
                raise ConfigurationError(
                    f"ReduceLROnPlateauScheduler: main_multi_loss={self.main_multi_loss!r}: the model's losses are "
                    f"{', '.join(map(repr, value))}."
                )
        self._step(float(value))
