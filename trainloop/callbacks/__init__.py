"""The base class of callbacks, and the package's own callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

# `X as X` re-exports a name for type checkers, which can't read a computed __all__.
from trainloop.callbacks.base import AbstractCallback as AbstractCallback
from trainloop.callbacks.basic import DataSubsetTestRun as DataSubsetTestRun
from trainloop.callbacks.basic import TrainHistoryPlot as TrainHistoryPlot
from trainloop.callbacks.checkpoints.checkpoint import ModelCheckpoint as ModelCheckpoint
from trainloop.callbacks.early_stopping import EarlyStopping as EarlyStopping
from trainloop.callbacks.early_stopping import ThresholdEarlyStopping as ThresholdEarlyStopping
from trainloop.callbacks.early_stopping import TimeLimit as TimeLimit
from trainloop.callbacks.loop import Loop as Loop
from trainloop.callbacks.reports.performance_eval import ConfusionMatrix as ConfusionMatrix
from trainloop.callbacks.reports.performance_eval import ModelPerformanceEvaluation as ModelPerformanceEvaluation
from trainloop.callbacks.reports.tensorboard import TensorBoard as TensorBoard
from trainloop.callbacks.reports.trackers import MLflowTracking as MLflowTracking
from trainloop.callbacks.reports.trackers import WandBTracking as WandBTracking
from trainloop.callbacks.watch.failure_recorder import FailureRecorder as FailureRecorder
from trainloop.callbacks.watch.nan import TerminateOnNaN as TerminateOnNaN
from trainloop.callbacks.watch.profiler import Profiler as Profiler
from trainloop.callbacks.watch.profiler import ThroughputMonitor as ThroughputMonitor
from trainloop.callbacks.weights.gradient import GradientCallbackBase as GradientCallbackBase
from trainloop.callbacks.weights.gradient import GradientClipping as GradientClipping
from trainloop.callbacks.weights.gradient import GradientStats as GradientStats
from trainloop.callbacks.weights.train_schedule import AbstractScheduler as AbstractScheduler
from trainloop.callbacks.weights.train_schedule import LearningRateMonitor as LearningRateMonitor
from trainloop.callbacks.weights.train_schedule import LRScheduler as LRScheduler
from trainloop.callbacks.weights.weight_averages import ExponentialMovingAverage as ExponentialMovingAverage
from trainloop.callbacks.weights.weight_averages import StochasticWeightAveraging as StochasticWeightAveraging
from trainloop.callbacks.weights.weight_averages import WeightAverage as WeightAverage

__all__ = [name for name, value in globals().items() if isinstance(value, type)]

# Names of AIToolbox, most of which this package exported once, and what replaces them.
_REMOVED = {
    "AlertConfig": "Call wandb.alert(...) in a callback's on_epoch_end.",
    "AllPredictionsSame": "Compare the predictions of predict_on_validation_set() in a callback's on_epoch_end.",
    "AbstractExperimentCallback": "Use AbstractCallback. A TrainLoopCheckpoint has its folder in loop.experiment.",
    "DistributedSamplerSetEpoch": "fit calls set_epoch of a loader's samplers itself.",
    "FunctionOnTrainLoop": "Write a callback whose hook calls the function.",
    "GeneralLRScheduler": "Use LRScheduler(scheduler_class, ...).",
    "GeneralLRSchedulerCallback": "Use LRScheduler(scheduler_class, ...).",
    "GradDistributionPlot": "Use TensorBoard(histograms_every_n_epochs=1).",
    "GradNormClip": "Use GradientClipping(max_norm=...).",
    "GradValueClip": "Use GradientClipping(max_value=...).",
    "GradientStatsPrint": "Use GradientStats().",
    "InMultiProcessDataLoad": "Pass a callback with on_multiprocess_start as fit(in_process_data_load=...).",
    "LambdaLRScheduler": "Use LRScheduler(LambdaLR, lr_lambda=...).",
    "ListRegisteredCallbacks": "Print tl.callbacks.",
    "MetricHistoryRename": "Call insert_metric_result_into_history in a callback's on_epoch_end.",
    "ModelIterationCheckpoint": "Use ModelCheckpoint(dirpath, every_n_epochs=None, every_n_steps=...).",
    "ModelLoadContinueTraining": "Use fit(resume_from=path), with the path of the checkpoint.",
    "ModelPerformancePrintReport": "The table of fit shows every metric; or print tl.history in a callback.",
    "ModelTrainEndSave": "Use trainloop.TrainLoopEndSave.",
    "ModelTrainHistoryFileWriter": "Use TrainLoopEndSave, or write history.rows() to a file.",
    "ModelTrainHistoryPlot": "Use TrainHistoryPlot(path).",
    "MultiStepLRScheduler": "Use LRScheduler(MultiStepLR, milestones=...).",
    "ReduceLROnPlateauMetricScheduler": "Use LRScheduler(ReduceLROnPlateau, monitor=...).",
    "ReduceLROnPlateauScheduler": "Use LRScheduler(ReduceLROnPlateau).",
    "StepLRScheduler": "Use LRScheduler(StepLR, step_size=...).",
    "TensorboardFullTracking": "Use TensorBoard(log_dir).",
    "TensorboardTrainBatchLoss": "Use TensorBoard(log_dir).",
    "TrainHistoryFormatter": "Call insert_metric_result_into_history in a callback's on_epoch_end.",
    "TensorboardTrainHistoryMetric": "Use TensorBoard(log_dir, log_every_n_steps=None).",
}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name in _REMOVED:  # an AttributeError's text would not reach `from trainloop.callbacks import ...`
            raise ImportError(f'trainloop.callbacks has no {name}. {_REMOVED[name]} See the page "From AIToolbox".')
        raise AttributeError(f"module 'trainloop.callbacks' has no attribute {name!r}")
