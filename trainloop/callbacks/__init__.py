"""Callbacks: the base class, and those that ship with the package, imported when first asked for."""

from __future__ import annotations

import importlib
from typing import Any

from trainloop.callbacks.base import AbstractCallback

_NAMES = {
    "abstract": ["AbstractExperimentCallback"],
    "basic": ["AllPredictionsSame", "DataSubsetTestRun", "FunctionOnTrainLoop", "ListRegisteredCallbacks"],
    "checkpoint": ["ModelCheckpoint"],
    "ddp": ["DistributedSamplerSetEpoch", "InMultiProcessDataLoad"],
    "early_stopping": ["EarlyStopping", "ThresholdEarlyStopping", "TimeLimit"],
    "ema": ["ExponentialMovingAverage"],
    "gradient": [
        "GradDistributionPlot",
        "GradNormClip",
        "GradValueClip",
        "GradientCallbackBase",
        "GradientClipping",
        "GradientStats",
        "GradientStatsPrint",
    ],
    "mlflow": ["MLflowTracking"],
    "model_load": ["ModelLoadContinueTraining"],
    "model_save": ["ModelIterationCheckpoint", "ModelTrainEndSave"],
    "nan": ["TerminateOnNaN"],
    "performance_eval": [
        "MetricHistoryRename",
        "ModelPerformanceEvaluation",
        "ModelPerformancePrintReport",
        "ModelTrainHistoryFileWriter",
        "ModelTrainHistoryPlot",
        "TrainHistoryPlot",
    ],
    "tensorboard": [
        "TensorBoard",
        "TensorboardFullTracking",
        "TensorboardTrainBatchLoss",
        "TensorboardTrainHistoryMetric",
    ],
    "train_schedule": [
        "AbstractScheduler",
        "GeneralLRScheduler",
        "GeneralLRSchedulerCallback",
        "LRScheduler",
        "LambdaLRScheduler",
        "LearningRateMonitor",
        "MultiStepLRScheduler",
        "ReduceLROnPlateauMetricScheduler",
        "ReduceLROnPlateauScheduler",
        "StepLRScheduler",
    ],
    "wandb": ["AlertConfig", "WandBTracking"],
}
_HOMES = {name: f"trainloop.callbacks.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["AbstractCallback", *_HOMES]  # names, each checked by a test


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trainloop.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
