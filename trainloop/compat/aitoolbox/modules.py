"""List the modules of AIToolbox with their names, and create ``aitoolbox`` from this package by an import finder."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections import ChainMap
from collections.abc import Sequence
from types import ModuleType

from trainloop.callbacks import basic
from trainloop.compat.aitoolbox import (
    callbacks,
    components,
    experiments,
    history,
    loop,
    models,
    optim,
    reports,
    results,
    saving,
)
from trainloop.errors import ConfigurationError
from trainloop.schedulers import warmup

# Modules in which names are looked up: first the modules of this package, then trainloop's own. A name means the same
# class in all modules of AIToolbox.
_OWN = models, optim, components, history, results, saving, callbacks, reports, loop, experiments
_HOMES = ChainMap(*map(vars, (*_OWN, basic, warmup)))

_WARMUP = (
    "ConstantWithWarmupScheduler CosineWithWarmupScheduler HardRestartsCosineWithWarmupScheduler "
    "LinearWithWarmupScheduler"
)
_SCHEDULERS = (
    "AbstractScheduler GeneralLRSchedulerCallback ReduceLROnPlateauScheduler ReduceLROnPlateauMetricScheduler "
    "LambdaLRScheduler StepLRScheduler MultiStepLRScheduler"
)

MODULES: dict[str, str] = {
    "aitoolbox.torchtrain.model": "TTModel TTBasicModel TTBasicMultiGPUModel MultiGPUModelWrap ModelWrap "
    "AbstractModelFeedDefinition",
    "aitoolbox.torchtrain.parallel": "TTParallelBase TTDataParallel TTDistributedDataParallel",
    "aitoolbox.torchtrain.multi_loss_optim": "MultiLoss MultiOptimizer",
    "aitoolbox.torchtrain.model_predict": "PyTorchModelPredictor",
    "aitoolbox.torchtrain.data.dataset": "BasicDataset ListDataset",
    "aitoolbox.torchtrain.data.batch_model_feed_defs": "AbstractModelFeedDefinition",
    "aitoolbox.torchtrain.train_loop.train_loop": "TrainLoop",
    "aitoolbox.torchtrain.train_loop.train_loop_tracking": "TrainLoopCheckpoint TrainLoopEndSave "
    "TrainLoopCheckpointEndSave",
    "aitoolbox.torchtrain.train_loop.components.callback_handler": "CallbacksHandler",
    "aitoolbox.torchtrain.train_loop.components.message_passing": "MessageHandling Message MessageService",
    "aitoolbox.torchtrain.train_loop.components.model_prediction_store": "ModelPredictionStore",
    "aitoolbox.torchtrain.train_loop.components.pred_collate_fns": "append_predictions append_concat_predictions "
    "torch_cat_transf keep_list_transf",
    "aitoolbox.torchtrain.callbacks.abstract": "AbstractCallback AbstractExperimentCallback",
    "aitoolbox.torchtrain.callbacks.basic": "AbstractCallback AbstractExperimentCallback ListRegisteredCallbacks "
    "EarlyStopping ThresholdEarlyStopping TerminateOnNaN AllPredictionsSame DataSubsetTestRun FunctionOnTrainLoop "
    "EmailNotification LogUpload",
    "aitoolbox.torchtrain.callbacks.performance_eval": "ModelPerformanceEvaluation ModelPerformancePrintReport "
    "TrainHistoryFormatter MetricHistoryRename ModelTrainHistoryBaseCB ModelTrainHistoryPlot "
    "ModelTrainHistoryFileWriter",
    "aitoolbox.torchtrain.callbacks.gradient": "GradDistributionPlot GradientCallbackBase GradValueClip GradNormClip "
    "GradientStatsPrint",
    "aitoolbox.torchtrain.callbacks.tensorboard": "TensorboardReporterBaseCB TensorboardTrainBatchLoss "
    "TensorboardTrainHistoryMetric TensorboardFullTracking",
    "aitoolbox.torchtrain.callbacks.wandb": "AlertConfig WandBTracking",
    "aitoolbox.torchtrain.callbacks.model_save": "ModelCheckpoint ModelIterationCheckpoint ModelTrainEndSave",
    "aitoolbox.torchtrain.callbacks.model_load": "ModelLoadContinueTraining",
    "aitoolbox.torchtrain.callbacks.ddp": "DistributedSamplerSetEpoch InMultiProcessDataLoad",
    "aitoolbox.torchtrain.callbacks.train_schedule": f"{_SCHEDULERS} {_WARMUP}",
    "aitoolbox.torchtrain.schedulers.basic": _SCHEDULERS,
    "aitoolbox.torchtrain.schedulers.warmup": _WARMUP,
    "aitoolbox.experiment": "TrainLoop TrainLoopCheckpoint TrainLoopEndSave TrainLoopCheckpointEndSave",
    "aitoolbox.experiment.training_history": "TrainingHistory",
    "aitoolbox.experiment.result_package.abstract_result_packages": "AbstractResultPackage "
    "PreCalculatedResultPackage MultipleResultPackageWrapper",
    "aitoolbox.experiment.result_package.basic_packages": "AbstractResultPackage GeneralResultPackage "
    "BinaryClassificationResultPackage ClassificationResultPackage RegressionResultPackage",
    "aitoolbox.experiment.result_package.torch_metrics_packages": "TorchMetricsPackage",
    "aitoolbox.experiment.result_package.hf_evaluate_packages": "HFEvaluateResultPackage",
    "aitoolbox.experiment.core_metrics.abstract_metric": "AbstractBaseMetric",
    "aitoolbox.experiment.core_metrics.classification": "AccuracyMetric ROCAUCMetric PrecisionRecallCurveAUCMetric "
    "F1ScoreMetric PrecisionMetric RecallMetric",
    "aitoolbox.experiment.core_metrics.regression": "MeanSquaredErrorMetric MeanAbsoluteErrorMetric",
    "aitoolbox.experiment.local_save.folder_create": "ExperimentFolder",
    "aitoolbox.experiment.local_save.local_model_save": "AbstractLocalModelSaver PyTorchLocalModelSaver "
    "LocalSubOptimalModelRemover",
    "aitoolbox.experiment.local_save.local_results_save": "AbstractLocalResultsSaver BaseLocalResultsSaver "
    "LocalResultsSaver",
    "aitoolbox.experiment.local_load.local_model_load": "AbstractLocalModelLoader PyTorchLocalModelLoader",
    "aitoolbox.experiment.local_experiment_saver": "FullPyTorchExperimentLocalSaver",
    "aitoolbox.experiment.experiment_saver": "AbstractExperimentSaver FullPyTorchExperimentS3Saver "
    "FullPyTorchExperimentGoogleStorageSaver",
    "aitoolbox.experiment.result_reporting.hyperparam_reporter": "HyperParamSourceReporter",
    "aitoolbox.experiment.result_reporting.report_generator": "TrainingHistoryPlotter TrainingHistoryWriter "
    "GradientPlotter",
    "aitoolbox.cloud": "s3_available_options gcs_available_options",
    "aitoolbox.cloud.AWS.model_save": "AbstractModelSaver BaseModelSaver PyTorchS3ModelSaver",
    "aitoolbox.cloud.AWS.model_load": "PyTorchS3ModelLoader",
    "aitoolbox.cloud.AWS.results_save": "AbstractResultsSaver BaseResultsSaver S3ResultsSaver",
    "aitoolbox.cloud.GoogleCloud.model_save": "PyTorchGoogleStorageModelSaver",
    "aitoolbox.cloud.GoogleCloud.model_load": "PyTorchGoogleStorageModelLoader",
    "aitoolbox.cloud.GoogleCloud.results_save": "BaseResultsGoogleStorageSaver GoogleStorageResultsSaver",
}
"""Names in each module of AIToolbox. A package has the names of all its modules."""


def _names_in(module: str) -> list[str]:
    inside = [names for name, names in MODULES.items() if f"{name}.".startswith(f"{module}.")]
    return sorted({name for names in inside for name in names.split()})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder that creates the modules in :data:`MODULES`, and the packages that contain them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "aitoolbox":
            return None
        if not _names_in(fullname):
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: trainloop.compat.aitoolbox provides only AIToolbox's torchtrain, and "
                'the parts of its experiment and cloud packages that training scripts use. See the guide "From '
                'AIToolbox".',
                name=fullname,
            )
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return importlib.machinery.ModuleSpec(fullname, self, origin=__package__, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        names = _names_in(module.__name__)

        def missing(name: str) -> None:
            raise AttributeError(
                f"module {module.__name__!r} (by {__package__}) has no attribute {name!r}. It has: {', '.join(names)}"
            )

        module.__dict__.update({name: _HOMES[name] for name in names}, __all__=names, __getattr__=missing)
        # In AIToolbox, `import aitoolbox` provides its subpackages as attributes.
        if module.__name__ == "aitoolbox":
            importlib.import_module("aitoolbox.torchtrain")
            importlib.import_module("aitoolbox.experiment")


def install() -> None:
    """Install the finder, which handles imports of ``aitoolbox`` from now on. Further calls do nothing.

    Raises
    ------
    ConfigurationError
        If AIToolbox itself was imported before.
    """
    existing = sys.modules.get("aitoolbox")
    if existing is not None and not isinstance(getattr(existing.__spec__, "loader", None), _Finder):
        raise ConfigurationError(
            f"aitoolbox is already imported, from {getattr(existing, '__file__', None)}. Put `import "
            "trainloop.compat.aitoolbox` before the first import of aitoolbox, or leave this line out."
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
