"""The base class of callbacks, and the package's own callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

# `X as X` re-exports a name for type checkers, which can't read a computed __all__.
from trainloop.callbacks.base import AbstractCallback as AbstractCallback
from trainloop.callbacks.basic import AllPredictionsSame as AllPredictionsSame
from trainloop.callbacks.basic import DataSubsetTestRun as DataSubsetTestRun
from trainloop.callbacks.basic import FunctionOnTrainLoop as FunctionOnTrainLoop
from trainloop.callbacks.basic import InMultiProcessDataLoad as InMultiProcessDataLoad
from trainloop.callbacks.basic import ListRegisteredCallbacks as ListRegisteredCallbacks
from trainloop.callbacks.basic import TrainHistoryPlot as TrainHistoryPlot
from trainloop.callbacks.checkpoint import ModelCheckpoint as ModelCheckpoint
from trainloop.callbacks.early_stopping import EarlyStopping as EarlyStopping
from trainloop.callbacks.early_stopping import ThresholdEarlyStopping as ThresholdEarlyStopping
from trainloop.callbacks.early_stopping import TimeLimit as TimeLimit
from trainloop.callbacks.failure_recorder import FailureRecorder as FailureRecorder
from trainloop.callbacks.gradient import GradientCallbackBase as GradientCallbackBase
from trainloop.callbacks.gradient import GradientClipping as GradientClipping
from trainloop.callbacks.gradient import GradientStats as GradientStats
from trainloop.callbacks.loop import Loop as Loop
from trainloop.callbacks.nan import TerminateOnNaN as TerminateOnNaN
from trainloop.callbacks.performance_eval import ConfusionMatrix as ConfusionMatrix
from trainloop.callbacks.performance_eval import MetricHistoryRename as MetricHistoryRename
from trainloop.callbacks.performance_eval import ModelPerformanceEvaluation as ModelPerformanceEvaluation
from trainloop.callbacks.performance_eval import ModelPerformancePrintReport as ModelPerformancePrintReport
from trainloop.callbacks.profiler import Profiler as Profiler
from trainloop.callbacks.profiler import ThroughputMonitor as ThroughputMonitor
from trainloop.callbacks.tensorboard import TensorBoard as TensorBoard
from trainloop.callbacks.trackers import AlertConfig as AlertConfig
from trainloop.callbacks.trackers import MLflowTracking as MLflowTracking
from trainloop.callbacks.trackers import WandBTracking as WandBTracking
from trainloop.callbacks.train_schedule import AbstractScheduler as AbstractScheduler
from trainloop.callbacks.train_schedule import LearningRateMonitor as LearningRateMonitor
from trainloop.callbacks.train_schedule import LRScheduler as LRScheduler
from trainloop.callbacks.weight_averages import ExponentialMovingAverage as ExponentialMovingAverage
from trainloop.callbacks.weight_averages import StochasticWeightAveraging as StochasticWeightAveraging
from trainloop.callbacks.weight_averages import WeightAverage as WeightAverage

__all__ = [name for name, value in globals().items() if isinstance(value, type)]

# AIToolbox names that this package exported until 0.2.0; they are now in trainloop.compat.aitoolbox.
_REMOVED = {
    "AbstractExperimentCallback": "Use AbstractCallback. A TrainLoopCheckpoint has its folder in loop.experiment.",
    "DistributedSamplerSetEpoch": "fit calls set_epoch of a loader's samplers itself.",
    "GeneralLRScheduler": "Use LRScheduler(scheduler_class, ...).",
    "GeneralLRSchedulerCallback": "Use LRScheduler(scheduler_class, ...).",
    "GradDistributionPlot": "Use TensorBoard(histograms_every_n_epochs=1).",
    "GradNormClip": "Use GradientClipping(max_norm=...).",
    "GradValueClip": "Use GradientClipping(max_value=...).",
    "GradientStatsPrint": "Use GradientStats().",
    "LambdaLRScheduler": "Use LRScheduler(LambdaLR, lr_lambda=...).",
    "ModelIterationCheckpoint": "Use ModelCheckpoint(dirpath, every_n_epochs=None, every_n_steps=...).",
    "ModelLoadContinueTraining": "Use fit(resume_from=path), with the path of the checkpoint.",
    "ModelTrainEndSave": "Use trainloop.TrainLoopEndSave.",
    "ModelTrainHistoryFileWriter": "Use TrainLoopEndSave, or write history.rows() to a file.",
    "ModelTrainHistoryPlot": "Use TrainHistoryPlot(path).",
    "MultiStepLRScheduler": "Use LRScheduler(MultiStepLR, milestones=...).",
    "ReduceLROnPlateauMetricScheduler": "Use LRScheduler(ReduceLROnPlateau, monitor=...).",
    "ReduceLROnPlateauScheduler": "Use LRScheduler(ReduceLROnPlateau).",
    "StepLRScheduler": "Use LRScheduler(StepLR, step_size=...).",
    "TensorboardFullTracking": "Use TensorBoard(log_dir).",
    "TensorboardTrainBatchLoss": "Use TensorBoard(log_dir).",
    "TensorboardTrainHistoryMetric": "Use TensorBoard(log_dir, log_every_n_steps=None).",
}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name in _REMOVED:  # an AttributeError's text would not reach `from trainloop.callbacks import ...`
            raise ImportError(
                f"trainloop.callbacks has no {name} since 0.2.0. {_REMOVED[name]} To keep the imports of a script "
                "written for AIToolbox, add `import trainloop.compat.aitoolbox` above them."
            )
        raise AttributeError(f"module 'trainloop.callbacks' has no attribute {name!r}")
