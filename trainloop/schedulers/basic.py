"""Schedulers by AIToolbox's names: see :mod:`trainloop.callbacks.train_schedule`, where they are."""

from __future__ import annotations

from trainloop.callbacks.train_schedule import (
    AbstractScheduler,
    GeneralLRScheduler,
    GeneralLRSchedulerCallback,
    LambdaLRScheduler,
    LRScheduler,
    MultiStepLRScheduler,
    ReduceLROnPlateauMetricScheduler,
    ReduceLROnPlateauScheduler,
    StepLRScheduler,
)

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
