"""AIToolbox's learning rate schedulers: those of trainloop, but for two that read its history."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler

from trainloop.callbacks.train_schedule import AbstractScheduler
from trainloop.errors import ConfigurationError
from trainloop.schedulers.basic import (
    GeneralLRSchedulerCallback,
    LambdaLRScheduler,
    MultiStepLRScheduler,
    StepLRScheduler,
)
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


class _Plateau(GeneralLRSchedulerCallback):
    def __init__(self, monitor: str, **kwargs: Any) -> None:
        super().__init__(lr_scheduler.ReduceLROnPlateau, monitor=monitor, **kwargs)

    def _value(self) -> Any:
        raise NotImplementedError

    def on_epoch_end(self) -> None:
        self._step(float(self._value()))


class ReduceLROnPlateauScheduler(_Plateau):
    """Lowers rates when the validation loss stops falling; of several losses their mean, or ``main_multi_loss``."""

    train_loop_obj: Any  # the loop of this package, which has more

    def __init__(self, main_multi_loss: str | None = None, **kwargs: Any) -> None:
        super().__init__(monitor="val_loss", **kwargs)
        self.main_multi_loss = main_multi_loss

    def _value(self) -> Any:
        loss = self.train_loop_obj.evaluate_loss_on_validation_set(float_dict_format=True)
        if not isinstance(loss, dict):
            return loss
        return sum(loss.values()) / len(loss) if self.main_multi_loss is None else loss[self.main_multi_loss]


class ReduceLROnPlateauMetricScheduler(_Plateau):
    """Lowers rates when a metric of the history stops improving."""

    train_loop_obj: Any  # the loop of this package, which has more

    def __init__(self, metric_name: str, **kwargs: Any) -> None:
        super().__init__(monitor="loss", **kwargs)  # not read: the metric is one of train_history
        self.metric_name = metric_name

    def _value(self) -> Any:
        history = self.train_loop_obj.train_history
        if not (history.get(self.metric_name)):
            raise ConfigurationError(
                f"ReduceLROnPlateauMetricScheduler: {self.metric_name!r} is not in train_history; there are "
                f"{', '.join(history.keys())}."
            )
        return history[self.metric_name][-1]
