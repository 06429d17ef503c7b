"""Callbacks: the base class, and those that ship with the package, imported when first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainloop.callbacks.base import AbstractCallback

if TYPE_CHECKING:  # editors complete these, and type checkers refuse other names
    from trainloop.callbacks.abstract import (
        AbstractExperimentCallback,
    )
    from trainloop.callbacks.basic import (
        AllPredictionsSame,
        DataSubsetTestRun,
        FunctionOnTrainLoop,
        ListRegisteredCallbacks,
    )
    from trainloop.callbacks.checkpoint import (
        ModelCheckpoint,
    )
    from trainloop.callbacks.ddp import (
        DistributedSamplerSetEpoch,
        InMultiProcessDataLoad,
    )
    from trainloop.callbacks.early_stopping import (
        EarlyStopping,
        ThresholdEarlyStopping,
        TimeLimit,
    )
    from trainloop.callbacks.ema import (
        ExponentialMovingAverage,
    )
    from trainloop.callbacks.gradient import (
        GradDistributionPlot,
        GradientCallbackBase,
        GradientClipping,
        GradientStats,
        GradientStatsPrint,
        GradNormClip,
        GradValueClip,
    )
    from trainloop.callbacks.mlflow import (
        MLflowTracking,
    )
    from trainloop.callbacks.model_load import (
        ModelLoadContinueTraining,
    )
    from trainloop.callbacks.model_save import (
        ModelIterationCheckpoint,
        ModelTrainEndSave,
    )
    from trainloop.callbacks.nan import (
        TerminateOnNaN,
    )
    from trainloop.callbacks.performance_eval import (
        MetricHistoryRename,
        ModelPerformanceEvaluation,
        ModelPerformancePrintReport,
        ModelTrainHistoryFileWriter,
        ModelTrainHistoryPlot,
        TrainHistoryPlot,
    )
    from trainloop.callbacks.profiler import Profiler, ThroughputMonitor
    from trainloop.callbacks.swa import StochasticWeightAveraging
    from trainloop.callbacks.tensorboard import (
        TensorBoard,
        TensorboardFullTracking,
        TensorboardTrainBatchLoss,
        TensorboardTrainHistoryMetric,
    )
    from trainloop.callbacks.train_schedule import (
        AbstractScheduler,
        GeneralLRScheduler,
        GeneralLRSchedulerCallback,
        LambdaLRScheduler,
        LearningRateMonitor,
        LRScheduler,
        MultiStepLRScheduler,
        ReduceLROnPlateauMetricScheduler,
        ReduceLROnPlateauScheduler,
        StepLRScheduler,
    )
    from trainloop.callbacks.wandb import (
        AlertConfig,
        WandBTracking,
    )

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
    "profiler": ["Profiler", "ThroughputMonitor"],
    "swa": ["StochasticWeightAveraging"],
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

# Written out, since type checkers read it and don't run it; a test compares the three.
__all__ = [
    "AbstractCallback",
    "AbstractExperimentCallback",
    "AllPredictionsSame",
    "DataSubsetTestRun",
    "FunctionOnTrainLoop",
    "ListRegisteredCallbacks",
    "ModelCheckpoint",
    "DistributedSamplerSetEpoch",
    "InMultiProcessDataLoad",
    "EarlyStopping",
    "ThresholdEarlyStopping",
    "TimeLimit",
    "ExponentialMovingAverage",
    "GradDistributionPlot",
    "GradNormClip",
    "GradValueClip",
    "GradientCallbackBase",
    "GradientClipping",
    "GradientStats",
    "GradientStatsPrint",
    "MLflowTracking",
    "ModelLoadContinueTraining",
    "ModelIterationCheckpoint",
    "ModelTrainEndSave",
    "TerminateOnNaN",
    "MetricHistoryRename",
    "ModelPerformanceEvaluation",
    "ModelPerformancePrintReport",
    "ModelTrainHistoryFileWriter",
    "ModelTrainHistoryPlot",
    "TrainHistoryPlot",
    "Profiler",
    "ThroughputMonitor",
    "StochasticWeightAveraging",
    "TensorBoard",
    "TensorboardFullTracking",
    "TensorboardTrainBatchLoss",
    "TensorboardTrainHistoryMetric",
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
    "AlertConfig",
    "WandBTracking",
]

if not TYPE_CHECKING:  # with it, every name would be right

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'trainloop.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
