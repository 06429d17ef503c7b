"""Maps the names in AIToolbox's modules to their modules here, with a finder that imports ``aitoolbox`` from these."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from trainloop.errors import ConfigurationError

__all__ = ["MODULES", "install"]

_HERE = "trainloop.compat.aitoolbox"

# Names, by the module of this package that defines them.
_MODELS = {
    "models": "TTModel TTBasicModel TTBasicMultiGPUModel MultiGPUModelWrap ModelWrap AbstractModelFeedDefinition"
}
_PARALLEL = {"models": "TTParallelBase TTDataParallel TTDistributedDataParallel"}
_FEEDS = {"models": "AbstractModelFeedDefinition"}
_DATASETS = {"models": "BasicDataset ListDataset"}
_LOSSES = {"optim": "MultiLoss MultiOptimizer"}
_TRACKED = {"tracking": "TrainLoopCheckpoint TrainLoopEndSave TrainLoopCheckpointEndSave"}
_LOOPS = {"loop": "TrainLoop", **_TRACKED}
_BASES = {"callbacks": "AbstractCallback AbstractExperimentCallback"}
_BASIC = {
    "callbacks": "AbstractCallback AbstractExperimentCallback ListRegisteredCallbacks EarlyStopping "
    "ThresholdEarlyStopping TerminateOnNaN AllPredictionsSame DataSubsetTestRun FunctionOnTrainLoop",
    "cloud": "EmailNotification LogUpload",
}
_EVALUATION = {
    "performance": "ModelPerformanceEvaluation ModelPerformancePrintReport TrainHistoryFormatter MetricHistoryRename",
    "reports": "ModelTrainHistoryBaseCB ModelTrainHistoryPlot ModelTrainHistoryFileWriter",
}
_GRADIENTS = {
    "reports": "GradDistributionPlot",
    "callbacks": "GradientCallbackBase GradValueClip GradNormClip GradientStatsPrint",
}
_TENSORBOARD = {
    "trackers": "TensorboardReporterBaseCB TensorboardTrainBatchLoss TensorboardTrainHistoryMetric "
    "TensorboardFullTracking"
}
_WANDB = {"trackers": "AlertConfig WandBTracking"}
_SCHEDULERS = {
    "schedulers": "AbstractScheduler GeneralLRSchedulerCallback ReduceLROnPlateauScheduler "
    "ReduceLROnPlateauMetricScheduler LambdaLRScheduler StepLRScheduler MultiStepLRScheduler"
}
_WARMUP = {
    "schedulers": "ConstantWithWarmupScheduler CosineWithWarmupScheduler HardRestartsCosineWithWarmupScheduler "
    "LinearWithWarmupScheduler"
}
_PACKAGES = {"results": "BinaryClassificationResultPackage ClassificationResultPackage RegressionResultPackage"}
_CLOUDS = {"cloud": "s3_available_options gcs_available_options"}

# Names that AIToolbox imports at its top level, and that `from aitoolbox import *` imports.
_TORCHTRAIN: dict[str, dict[str, str]] = {
    "model": {"models": "TTModel MultiGPUModelWrap ModelWrap AbstractModelFeedDefinition TTDataParallel BasicDataset"},
    "loops": {"loop": "TrainLoop", **_TRACKED, **_LOSSES},
}
_CALLBACKS = {
    "callbacks": "AbstractCallback AbstractExperimentCallback EarlyStopping ThresholdEarlyStopping TerminateOnNaN "
    "AllPredictionsSame GradNormClip GradValueClip",
    "cloud": "EmailNotification LogUpload",
    "performance": "ModelPerformanceEvaluation ModelPerformancePrintReport",
    "reports": "ModelTrainHistoryPlot ModelTrainHistoryFileWriter",
    "trackers": "TensorboardFullTracking TensorboardTrainHistoryMetric WandBTracking",
    "schedulers": "LinearWithWarmupScheduler ReduceLROnPlateauScheduler ReduceLROnPlateauMetricScheduler",
}
_TORCHTRAIN_NAMES = {**_TORCHTRAIN["model"], **_TORCHTRAIN["loops"]}

MODULES: dict[str, dict[str, str]] = {
    "aitoolbox": {**_TORCHTRAIN_NAMES, **_CALLBACKS, **_PACKAGES},
    "aitoolbox.torchtrain": _TORCHTRAIN_NAMES,
    "aitoolbox.torchtrain.model": _MODELS,
    "aitoolbox.torchtrain.parallel": _PARALLEL,
    "aitoolbox.torchtrain.multi_loss_optim": _LOSSES,
    "aitoolbox.torchtrain.model_predict": {"predictor": "PyTorchModelPredictor"},
    "aitoolbox.torchtrain.data": {},
    "aitoolbox.torchtrain.data.dataset": _DATASETS,
    "aitoolbox.torchtrain.data.batch_model_feed_defs": _FEEDS,
    "aitoolbox.torchtrain.train_loop": _LOOPS,
    "aitoolbox.torchtrain.train_loop.train_loop": {"loop": "TrainLoop"},
    "aitoolbox.torchtrain.train_loop.train_loop_tracking": _TRACKED,
    "aitoolbox.torchtrain.train_loop.components": {},
    "aitoolbox.torchtrain.train_loop.components.callback_handler": {"handler": "CallbacksHandler"},
    "aitoolbox.torchtrain.train_loop.components.message_passing": {
        "messages": "MessageHandling Message MessageService"
    },
    "aitoolbox.torchtrain.train_loop.components.model_prediction_store": {"store": "ModelPredictionStore"},
    "aitoolbox.torchtrain.train_loop.components.pred_collate_fns": {
        "store": "append_predictions append_concat_predictions torch_cat_transf keep_list_transf"
    },
    "aitoolbox.torchtrain.callbacks": _CALLBACKS,
    "aitoolbox.torchtrain.callbacks.abstract": _BASES,
    "aitoolbox.torchtrain.callbacks.basic": _BASIC,
    "aitoolbox.torchtrain.callbacks.performance_eval": _EVALUATION,
    "aitoolbox.torchtrain.callbacks.gradient": _GRADIENTS,
    "aitoolbox.torchtrain.callbacks.tensorboard": _TENSORBOARD,
    "aitoolbox.torchtrain.callbacks.wandb": _WANDB,
    "aitoolbox.torchtrain.callbacks.model_save": {
        "checkpoints": "ModelCheckpoint ModelIterationCheckpoint ModelTrainEndSave"
    },
    "aitoolbox.torchtrain.callbacks.model_load": {"checkpoints": "ModelLoadContinueTraining"},
    "aitoolbox.torchtrain.callbacks.ddp": {"callbacks": "DistributedSamplerSetEpoch InMultiProcessDataLoad"},
    "aitoolbox.torchtrain.callbacks.train_schedule": {
        "schedulers": f"{_SCHEDULERS['schedulers']} {_WARMUP['schedulers']}"
    },
    "aitoolbox.torchtrain.schedulers": {},
    "aitoolbox.torchtrain.schedulers.basic": _SCHEDULERS,
    "aitoolbox.torchtrain.schedulers.warmup": _WARMUP,
    "aitoolbox.experiment": {"loop": "TrainLoop", **_TRACKED, **_PACKAGES},
    "aitoolbox.experiment.training_history": {"history": "TrainingHistory"},
    "aitoolbox.experiment.result_package": {},
    "aitoolbox.experiment.result_package.abstract_result_packages": {
        "results": "AbstractResultPackage PreCalculatedResultPackage MultipleResultPackageWrapper"
    },
    "aitoolbox.experiment.result_package.basic_packages": {
        "results": f"AbstractResultPackage GeneralResultPackage {_PACKAGES['results']}"
    },
    "aitoolbox.experiment.result_package.torch_metrics_packages": {"results": "TorchMetricsPackage"},
    "aitoolbox.experiment.result_package.hf_evaluate_packages": {"results": "HFEvaluateResultPackage"},
    "aitoolbox.experiment.core_metrics": {},
    "aitoolbox.experiment.core_metrics.abstract_metric": {"core_metrics": "AbstractBaseMetric"},
    "aitoolbox.experiment.core_metrics.classification": {
        "core_metrics": "AccuracyMetric ROCAUCMetric PrecisionRecallCurveAUCMetric F1ScoreMetric PrecisionMetric "
        "RecallMetric"
    },
    "aitoolbox.experiment.core_metrics.regression": {"core_metrics": "MeanSquaredErrorMetric MeanAbsoluteErrorMetric"},
    "aitoolbox.experiment.local_save": {},
    "aitoolbox.experiment.local_save.folder_create": {"saving": "ExperimentFolder"},
    "aitoolbox.experiment.local_save.local_model_save": {
        "bases": "AbstractLocalModelSaver",
        "saving": "PyTorchLocalModelSaver LocalSubOptimalModelRemover",
    },
    "aitoolbox.experiment.local_save.local_results_save": {
        "bases": "AbstractLocalResultsSaver",
        "saving": "BaseLocalResultsSaver LocalResultsSaver",
    },
    "aitoolbox.experiment.local_load": {},
    "aitoolbox.experiment.local_load.local_model_load": {
        "bases": "AbstractLocalModelLoader",
        "saving": "PyTorchLocalModelLoader",
    },
    "aitoolbox.experiment.local_experiment_saver": {"saving": "FullPyTorchExperimentLocalSaver"},
    "aitoolbox.experiment.experiment_saver": {
        "bases": "AbstractExperimentSaver",
        "cloud": "FullPyTorchExperimentS3Saver FullPyTorchExperimentGoogleStorageSaver",
    },
    "aitoolbox.experiment.result_reporting": {},
    "aitoolbox.experiment.result_reporting.hyperparam_reporter": {"sources": "HyperParamSourceReporter"},
    "aitoolbox.experiment.result_reporting.report_generator": {
        "plots": "TrainingHistoryPlotter TrainingHistoryWriter GradientPlotter"
    },
    "aitoolbox.cloud": _CLOUDS,
    "aitoolbox.cloud.AWS": {},
    "aitoolbox.cloud.AWS.model_save": {
        "bases": "AbstractModelSaver",
        "cloud": "BaseModelSaver PyTorchS3ModelSaver",
    },
    "aitoolbox.cloud.AWS.model_load": {"cloud": "PyTorchS3ModelLoader"},
    "aitoolbox.cloud.AWS.results_save": {
        "bases": "AbstractResultsSaver",
        "cloud": "BaseResultsSaver S3ResultsSaver",
    },
    "aitoolbox.cloud.GoogleCloud": {},
    "aitoolbox.cloud.GoogleCloud.model_save": {"cloud": "PyTorchGoogleStorageModelSaver"},
    "aitoolbox.cloud.GoogleCloud.model_load": {"cloud": "PyTorchGoogleStorageModelLoader"},
    "aitoolbox.cloud.GoogleCloud.results_save": {"cloud": "BaseResultsGoogleStorageSaver GoogleStorageResultsSaver"},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Creates the modules of :data:`MODULES`; each name is imported on first access."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "aitoolbox":
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: trainloop.compat.aitoolbox has AIToolbox's torchtrain, and the parts "
                "of its experiment and cloud packages that training scripts use. See the guide 'From AIToolbox'.",
                name=fullname,
            )
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return importlib.machinery.ModuleSpec(fullname, self, origin=_HERE, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, f"AIToolbox's ``{spec.name}``, by :mod:`{_HERE}`.")

    def exec_module(self, module: ModuleType) -> None:
        homes = {name: home for home, names in MODULES[module.__name__].items() for name in names.split()}

        def get(name: str) -> Any:
            if name not in homes:
                known = ", ".join(homes) or "nothing but modules"
                raise AttributeError(f"module {module.__name__!r} (by {_HERE}) has no attribute {name!r}, but {known}")
            value = getattr(importlib.import_module(f"{_HERE}.{homes[name]}"), name)
            setattr(module, name, value)
            return value

        module.__dict__.update(__all__=sorted(homes), __getattr__=get, __dir__=lambda: sorted({*homes, *vars(module)}))
        # `import aitoolbox` alone provided AIToolbox's parts as attributes.
        if module.__name__ == "aitoolbox":
            importlib.import_module("aitoolbox.torchtrain")
            importlib.import_module("aitoolbox.experiment")


def install() -> None:
    """Handle imports of ``aitoolbox`` from now on; further calls do nothing.

    Raises
    ------
    ConfigurationError
        If AIToolbox itself has been imported before.
    """
    there = sys.modules.get("aitoolbox")
    if there is not None and not isinstance(getattr(there.__spec__, "loader", None), _Finder):
        raise ConfigurationError(
            f"aitoolbox is already imported, from {getattr(there, '__file__', None)}: use one or the other. Put "
            "`import trainloop.compat.aitoolbox` before the first import of aitoolbox, or leave it out."
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
