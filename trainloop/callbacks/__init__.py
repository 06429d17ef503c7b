"""Callbacks: the base class, and those of the package, imported on first access."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainloop.callbacks.base import AbstractCallback

# `X as X` makes a name this module's own for type checkers, which can't read a computed __all__.
if TYPE_CHECKING:
    from trainloop.callbacks.abstract import AbstractExperimentCallback as AbstractExperimentCallback
    from trainloop.callbacks.basic import AllPredictionsSame as AllPredictionsSame
    from trainloop.callbacks.basic import DataSubsetTestRun as DataSubsetTestRun
    from trainloop.callbacks.basic import FunctionOnTrainLoop as FunctionOnTrainLoop
    from trainloop.callbacks.basic import ListRegisteredCallbacks as ListRegisteredCallbacks
    from trainloop.callbacks.checkpoint import ModelCheckpoint as ModelCheckpoint
    from trainloop.callbacks.confusion import ConfusionMatrix as ConfusionMatrix
    from trainloop.callbacks.ddp import InMultiProcessDataLoad as InMultiProcessDataLoad
    from trainloop.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from trainloop.callbacks.early_stopping import ThresholdEarlyStopping as ThresholdEarlyStopping
    from trainloop.callbacks.early_stopping import TimeLimit as TimeLimit
    from trainloop.callbacks.ema import ExponentialMovingAverage as ExponentialMovingAverage
    from trainloop.callbacks.failure_recorder import FailureRecorder as FailureRecorder
    from trainloop.callbacks.gradient import GradientCallbackBase as GradientCallbackBase
    from trainloop.callbacks.gradient import GradientClipping as GradientClipping
    from trainloop.callbacks.gradient import GradientStats as GradientStats
    from trainloop.callbacks.mlflow import MLflowTracking as MLflowTracking
    from trainloop.callbacks.model_load import ModelLoadContinueTraining as ModelLoadContinueTraining
    from trainloop.callbacks.nan import TerminateOnNaN as TerminateOnNaN
    from trainloop.callbacks.performance_eval import MetricHistoryRename as MetricHistoryRename
    from trainloop.callbacks.performance_eval import ModelPerformanceEvaluation as ModelPerformanceEvaluation
    from trainloop.callbacks.performance_eval import ModelPerformancePrintReport as ModelPerformancePrintReport
    from trainloop.callbacks.performance_eval import ModelTrainHistoryFileWriter as ModelTrainHistoryFileWriter
    from trainloop.callbacks.performance_eval import ModelTrainHistoryPlot as ModelTrainHistoryPlot
    from trainloop.callbacks.performance_eval import TrainHistoryPlot as TrainHistoryPlot
    from trainloop.callbacks.profiler import Profiler as Profiler
    from trainloop.callbacks.profiler import ThroughputMonitor as ThroughputMonitor
    from trainloop.callbacks.swa import StochasticWeightAveraging as StochasticWeightAveraging
    from trainloop.callbacks.tensorboard import TensorBoard as TensorBoard
    from trainloop.callbacks.train_schedule import AbstractScheduler as AbstractScheduler
    from trainloop.callbacks.train_schedule import LearningRateMonitor as LearningRateMonitor
    from trainloop.callbacks.train_schedule import LRScheduler as LRScheduler
    from trainloop.callbacks.wandb import AlertConfig as AlertConfig
    from trainloop.callbacks.wandb import WandBTracking as WandBTracking
    from trainloop.compat.callbacks import DistributedSamplerSetEpoch as DistributedSamplerSetEpoch
    from trainloop.compat.callbacks import GradDistributionPlot as GradDistributionPlot
    from trainloop.compat.callbacks import GradientStatsPrint as GradientStatsPrint
    from trainloop.compat.callbacks import GradNormClip as GradNormClip
    from trainloop.compat.callbacks import GradValueClip as GradValueClip
    from trainloop.compat.callbacks import ModelIterationCheckpoint as ModelIterationCheckpoint
    from trainloop.compat.callbacks import ModelTrainEndSave as ModelTrainEndSave
    from trainloop.compat.callbacks import TensorboardFullTracking as TensorboardFullTracking
    from trainloop.compat.callbacks import TensorboardTrainBatchLoss as TensorboardTrainBatchLoss
    from trainloop.compat.callbacks import TensorboardTrainHistoryMetric as TensorboardTrainHistoryMetric
    from trainloop.schedulers.basic import GeneralLRScheduler as GeneralLRScheduler
    from trainloop.schedulers.basic import GeneralLRSchedulerCallback as GeneralLRSchedulerCallback
    from trainloop.schedulers.basic import LambdaLRScheduler as LambdaLRScheduler
    from trainloop.schedulers.basic import MultiStepLRScheduler as MultiStepLRScheduler
    from trainloop.schedulers.basic import ReduceLROnPlateauMetricScheduler as ReduceLROnPlateauMetricScheduler
    from trainloop.schedulers.basic import ReduceLROnPlateauScheduler as ReduceLROnPlateauScheduler
    from trainloop.schedulers.basic import StepLRScheduler as StepLRScheduler

_HOMES = {
    name: f"trainloop.{module}"
    for module, names in {
        "callbacks.abstract": "AbstractExperimentCallback",
        "callbacks.basic": "AllPredictionsSame DataSubsetTestRun FunctionOnTrainLoop ListRegisteredCallbacks",
        "callbacks.checkpoint": "ModelCheckpoint",
        "callbacks.confusion": "ConfusionMatrix",
        "callbacks.ddp": "InMultiProcessDataLoad",
        "callbacks.early_stopping": "EarlyStopping ThresholdEarlyStopping TimeLimit",
        "callbacks.ema": "ExponentialMovingAverage",
        "callbacks.failure_recorder": "FailureRecorder",
        "callbacks.gradient": "GradientCallbackBase GradientClipping GradientStats",
        "callbacks.mlflow": "MLflowTracking",
        "callbacks.model_load": "ModelLoadContinueTraining",
        "callbacks.nan": "TerminateOnNaN",
        "callbacks.performance_eval": "MetricHistoryRename ModelPerformanceEvaluation ModelPerformancePrintReport "
        "ModelTrainHistoryFileWriter ModelTrainHistoryPlot TrainHistoryPlot",
        "callbacks.profiler": "Profiler ThroughputMonitor",
        "callbacks.swa": "StochasticWeightAveraging",
        "callbacks.tensorboard": "TensorBoard",
        "callbacks.train_schedule": "AbstractScheduler LearningRateMonitor LRScheduler",
        "callbacks.wandb": "AlertConfig WandBTracking",
        "compat.callbacks": "DistributedSamplerSetEpoch GradDistributionPlot GradientStatsPrint GradNormClip "
        "GradValueClip ModelIterationCheckpoint ModelTrainEndSave TensorboardFullTracking TensorboardTrainBatchLoss "
        "TensorboardTrainHistoryMetric",
        "schedulers.basic": "GeneralLRScheduler GeneralLRSchedulerCallback LambdaLRScheduler MultiStepLRScheduler "
        "ReduceLROnPlateauMetricScheduler ReduceLROnPlateauScheduler StepLRScheduler",
    }.items()
    for name in names.split()
}
__all__ = ["AbstractCallback", *_HOMES]  # a test compares them with the imports above

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'trainloop.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
