"""AIToolbox's learning rate schedulers, which are :class:`LRScheduler` with other arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from trainloop.callbacks.train_schedule import AbstractScheduler, LRScheduler
from trainloop.errors import ConfigurationError
from trainloop.schedulers.warmup import (
    ConstantWithWarmupScheduler,
    CosineWithWarmupScheduler,
    HardRestartsCosineWithWarmupScheduler,
    LinearWithWarmupScheduler,
)

__all__ = [
    "AbstractScheduler",
    "ConstantWithWarmupScheduler",
    "CosineWithWarmupScheduler",
    "GeneralLRSchedulerCallback",
    "HardRestartsCosineWithWarmupScheduler",
    "LambdaLRScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepLRScheduler",
    "ReduceLROnPlateauMetricScheduler",
    "ReduceLROnPlateauScheduler",
    "StepLRScheduler",
]


class GeneralLRSchedulerCallback(LRScheduler):
    """A torch scheduler class, stepped once per epoch."""

    def __init__(self, scheduler_class: Any, optimizer_idx: int | Optimizer | None = None, **kwargs: Any) -> None:
        super().__init__(scheduler_class, optimizer_idx=optimizer_idx, **kwargs)


class LambdaLRScheduler(GeneralLRSchedulerCallback):
    """Multiply the initial rates by a function of the number of epochs, or of steps."""

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
    """Multiply rates by ``gamma`` every ``step_size`` epochs."""

    def __init__(self, step_size: int, **kwargs: Any) -> None:
        super().__init__(lr_scheduler.StepLR, step_size=step_size, **kwargs)


class MultiStepLRScheduler(GeneralLRSchedulerCallback):
    """Multiply rates by ``gamma`` at given epochs."""

    def __init__(self, milestones_list: Sequence[int], **kwargs: Any) -> None:
        super().__init__(lr_scheduler.MultiStepLR, milestones=list(milestones_list), **kwargs)


class _Plateau(GeneralLRSchedulerCallback):
    def __init__(self, monitor: str, **kwargs: Any) -> None:
        super().__init__(lr_scheduler.ReduceLROnPlateau, monitor=monitor, **kwargs)

    def _value(self) -> Any:
        raise NotImplementedError

    def on_epoch_end(self) -> None:
        self._step(float(self._value()))


class ReduceLROnPlateauScheduler(_Plateau):
    """Lower rates when the validation loss stops falling; of several losses their mean, or ``main_multi_loss``."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(self, main_multi_loss: str | None = None, **kwargs: Any) -> None:
        super().__init__(monitor="val_loss", **kwargs)
        self.main_multi_loss = main_multi_loss

    def _value(self) -> Any:
        loss = self.train_loop_obj.evaluate_loss_on_validation_set(float_dict_format=True)
        if not isinstance(loss, dict):
            return loss
        return sum(loss.values()) / len(loss) if self.main_multi_loss is None else loss[self.main_multi_loss]


class ReduceLROnPlateauMetricScheduler(_Plateau):
    """Lower rates when a metric of the history stops improving."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(self, metric_name: str, **kwargs: Any) -> None:
        super().__init__(monitor="loss", **kwargs)  # not read: the metric is in train_history
        self.metric_name = metric_name

    def _value(self) -> Any:
        history = self.train_loop_obj.train_history
        if not (history.get(self.metric_name)):
            raise ConfigurationError(
                f"ReduceLROnPlateauMetricScheduler: {self.metric_name!r} is not in train_history; there are "
                f"{', '.join(history.keys())}."
            )
        return history[self.metric_name][-1]
