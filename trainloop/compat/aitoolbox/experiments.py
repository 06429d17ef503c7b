"""AIToolbox's tracking loops, its predictor, and its callbacks that save an experiment or load a saved model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from trainloop._support.user_line import user_place
from trainloop.callbacks.base import require_loader
from trainloop.compat.aitoolbox.callbacks import AbstractExperimentCallback, experiment_arguments
from trainloop.compat.aitoolbox.history import TrainingHistory
from trainloop.compat.aitoolbox.loop import TrainLoop
from trainloop.compat.aitoolbox.optim import OwnOptimizer
from trainloop.compat.aitoolbox.results import AbstractResultPackage, prepare_package
from trainloop.compat.aitoolbox.saving import (
    EXPERIMENT_SAVERS,
    MODEL_LOADERS,
    MODEL_SAVERS,
    RESULTS_SAVERS,
    HyperParamSourceReporter,
    LocalSubOptimalModelRemover,
    bucket_of,
    in_store,
)
from trainloop.errors import ConfigurationError
from trainloop.model import ModelWrap

# -- callbacks --------------------------------------------------------------------------------------------------------


def _model_of(loop: Any) -> Any:
    """Return the model as AIToolbox saves it: the module of a ModelWrap, otherwise the model itself."""
    return loop.model.model if isinstance(loop.model, ModelWrap) else loop.model


class _Saves(AbstractExperimentCallback):
    """Base class of callbacks that save the experiment's hyperparameters and the state of the training."""

    local_model_result_folder_path: str
    hyperparams: dict[str, Any]
    _hyperparams_already_saved = False

    def on_train_loop_registration(self) -> None:
        if isinstance(self.train_loop_obj.optimizer, OwnOptimizer):
            self.train_loop_obj.optimizer.check_state()
        os.makedirs(self.local_model_result_folder_path, exist_ok=True)
        if not self.train_loop_obj.lazy_experiment_save and self.train_loop_obj.is_main_process():
            self.save_hyperparams()

    def save_hyperparams(self) -> None:
        """Write hyperparameters and source, unless they have already been written."""
        if self._hyperparams_already_saved:
            return
        self._hyperparams_already_saved = True
        reporter = HyperParamSourceReporter(*self.experiment_names, self.local_model_result_folder_path)
        if os.path.isfile(reporter.local_hyperparams_file_path):  # written by another callback of the experiment
            return
        written = [
            reporter.save_hyperparams_to_text_file(self.hyperparams),
            reporter.save_experiment_python_file(self.hyperparams),
            reporter.save_experiment_source_files(self.hyperparams),
        ]
        self.upload(filter(None, written))

    def _state(self) -> dict[str, Any]:
        loop = self.train_loop_obj
        state = {
            "model_state_dict": _model_of(loop).state_dict(),
            "optimizer_state_dict": loop.optimizer.state_dict(),
            "schedulers_state_dict": [scheduler.state_dict() for scheduler in loop.get_schedulers()],
            "epoch": loop.epoch,
            "iteration_idx": loop.total_iteration_idx,
            "hyperparams": self.hyperparams,
        }
        if loop.use_amp:
            state["amp"] = loop.amp_scaler.state_dict()
        return state


class ModelCheckpoint(_Saves):
    """Save the model after each epoch, as ``checkpoint_model/model_<experiment>_<time stamp>_E<epoch>.pth``.

    With ``rm_subopt_local_models``, only the ``num_best_checkpoints_kept`` best models by ``loss`` or by the given
    metric remain on the local disk.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str,
        hyperparams: dict[str, Any],
        cloud_save_mode: str | None = "s3",
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
        rm_subopt_local_models: bool | str = False,
        num_best_checkpoints_kept: int = 2,
    ) -> None:
        experiment = project_name, experiment_name, local_model_result_folder_path
        cloud = cloud_save_mode, bucket_name, cloud_dir_prefix
        super().__init__("Model checkpoint at end of epoch", *experiment, *cloud, 100, 0)
        self.hyperparams = hyperparams
        self.rm_subopt_local_models = rm_subopt_local_models
        metric = "loss" if rm_subopt_local_models is True else str(rm_subopt_local_models)
        self.subopt_model_remover = LocalSubOptimalModelRemover(metric, num_best_checkpoints_kept)
        self.model_checkpointer: Any = None
        """Saver of the files, created at registration."""

    def on_train_loop_registration(self) -> None:
        where = self.cloud_bucket, self.local_model_result_folder_path  # a missing s3fs raises an error before training
        self.model_checkpointer = in_store(MODEL_SAVERS, *where, checkpoint_model=True)
        super().on_train_loop_registration()

    def on_epoch_end(self) -> None:
        path = self._save()
        if self.rm_subopt_local_models is not False:
            self.subopt_model_remover.decide_if_remove_suboptimal_model(self.train_loop_obj.train_history, [path])

    def _save(self, iteration_idx: int | None = None) -> str:
        self.save_hyperparams()
        loop = self.train_loop_obj
        *_, path = self.model_checkpointer.save_model(self._state(), *self.experiment_names, loop.epoch, iteration_idx)
        return str(path)


class ModelIterationCheckpoint(ModelCheckpoint):
    """Save the model every ``save_frequency`` batches, too, with ``_ITER<total_iteration_idx>`` in the file's name."""

    def __init__(self, save_frequency: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if save_frequency < 1:
            raise ConfigurationError(f"save_frequency={save_frequency}: must be 1 or more.")
        self.save_frequency = save_frequency

    def on_batch_end(self) -> None:
        iteration = self.train_loop_obj.total_iteration_idx
        if iteration > 0 and iteration % self.save_frequency == 0:
            self._save(iteration)


class ModelTrainEndSave(_Saves):
    """Evaluate result packages at the end of training, and save the model, their results and the history."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str,
        hyperparams: dict[str, Any],
        val_result_package: AbstractResultPackage | None = None,
        test_result_package: AbstractResultPackage | None = None,
        cloud_save_mode: str | None = "s3",
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
    ) -> None:
        experiment = project_name, experiment_name, local_model_result_folder_path
        cloud = cloud_save_mode, bucket_name, cloud_dir_prefix
        # The callback runs on all ranks, because all ranks predict together. Only the main process writes files.
        super().__init__("Model save at the end of training", *experiment, *cloud, 101)
        self.hyperparams = hyperparams
        packages = [package for package in (val_result_package, test_result_package) if package is not None]
        if not packages:
            raise ConfigurationError("val_result_package and test_result_package are both None. Pass at least one.")
        for package in packages:
            if not isinstance(package, AbstractResultPackage):
                raise TypeError(f"result package {package!r}: must be an AbstractResultPackage.")
        self.val_result_package = val_result_package
        self.test_result_package = test_result_package
        self.result_package: Any = None
        self.results_saver: Any = None
        """Saver of the files, created at registration."""

    def on_train_loop_registration(self) -> None:
        for package in (self.val_result_package, self.test_result_package):
            if package is not None:  # bool() would call len(), which needs results
                package.set_experiment_dir_path_for_additional_results(
                    *self.experiment_names, self.local_model_result_folder_path
                )
        where = self.cloud_bucket, self.local_model_result_folder_path  # a missing s3fs raises an error before training
        self.results_saver = in_store(EXPERIMENT_SAVERS, *where, *self.experiment_names[:2])
        super().on_train_loop_registration()

    def on_train_end(self) -> None:
        loop = self.train_loop_obj
        state, self.result_package = self._state(), None
        for package, suffix, predict, evaluate in (
            (self.val_result_package, "_VAL", loop.predict_on_validation_set, loop.evaluate_loss_on_validation_set),
            (self.test_result_package, "_TEST", loop.predict_on_test_set, loop.evaluate_loss_on_test_set),
        ):
            if package is None:
                continue
            package.pkg_name = f"{package.pkg_name}{suffix}"
            prepare_package(package, self.hyperparams, predict, evaluate)
            self.result_package = package if self.result_package is None else package + self.result_package
        if loop.is_main_process():
            self.save_hyperparams()
            self.results_saver.save_experiment(
                state,
                self.result_package,
                loop.train_history,
                experiment_timestamp=loop.experiment_timestamp,
                save_true_pred_labels=True,
            )


class ModelLoadContinueTraining(AbstractExperimentCallback):
    """Load the model, optimizer and schedulers of an earlier experiment, and resume with the next epoch."""

    def __init__(
        self,
        saved_experiment_timestamp: str,
        saved_model_dir: str = "checkpoint_model",
        epoch_num: int | None = None,
        ignore_saved_schedulers: bool = False,
        ignore_missing_saved_schedulers: bool = False,
        used_data_parallel: bool = False,
        custom_local_loader_class: Any = None,
        *experiment: Any,
        **kwargs: Any,
    ) -> None:
        name = "Model loading and initialization from checkpoint before training"
        super().__init__(name, *experiment, **experiment_arguments(kwargs, execution_order=-10))
        self.saved_experiment_timestamp = saved_experiment_timestamp
        self.saved_model_dir = saved_model_dir
        self.epoch_num = epoch_num
        self.ignore_saved_schedulers = ignore_saved_schedulers
        self.ignore_missing_saved_schedulers = ignore_missing_saved_schedulers
        self.used_data_parallel = used_data_parallel
        self.custom_local_loader_class = custom_local_loader_class
        self.local_loader_kwargs = kwargs
        self.model_loader: Any = None

    def on_train_loop_registration(self) -> None:
        loop = self.train_loop_obj
        self.try_infer_experiment_details(infer_cloud_details=True)
        self.init_model_loader()
        state = self.model_loader.load_model(
            self.project_name,
            self.experiment_name,
            self.saved_experiment_timestamp,
            self.saved_model_dir,
            self.epoch_num,
            **self.local_loader_kwargs,
        )
        self.model_loader.init_model(_model_of(loop), self.used_data_parallel)
        self.model_loader.init_optimizer(loop.optimizer)
        loop.epoch = state["epoch"] + 1

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        self.model_loader.init_scheduler(
            loop.get_schedulers(),
            ignore_saved=self.ignore_saved_schedulers,
            ignore_missing_saved=self.ignore_missing_saved_schedulers,
        )
        if loop.use_amp and "amp" in self.model_loader.model_representation:
            self.model_loader.init_amp(loop.amp_scaler)

    def init_model_loader(self) -> None:
        """Create the loader of the saved model."""
        bucket, folder = self.cloud_bucket, self.local_model_result_folder_path
        if bucket is None and self.custom_local_loader_class is not None:
            self.model_loader = self.custom_local_loader_class(folder)
        else:
            self.model_loader = in_store(MODEL_LOADERS, bucket, folder)


# -- loops -------------------------------------------------------------------------------------------------------------


_EXPERIMENT = ("project_name", "experiment_name", "local_model_result_folder_path", "hyperparams")
_PACKAGES = ("val_result_package", "test_result_package")
_CLOUD = ("cloud_save_mode", "bucket_name", "cloud_dir_prefix", "source_dirs")
_CHECKPOINTS = ("rm_subopt_local_models", "num_best_checkpoints_kept", "iteration_save_freq")


class _TrackingLoop(TrainLoop):
    """Base class of the three loops with an experiment.

    Parameters
    ----------
    model, train_loader, validation_loader, test_loader, optimizer, criterion
        As in :class:`TrainLoop`.
    *args, **kwargs
        Arguments of the experiment, by name or in the order of :attr:`arguments`, followed by the other arguments of
        :class:`TrainLoop`.
    """

    arguments: ClassVar[tuple[str, ...]]
    """Names of the arguments after ``criterion``, in AIToolbox's order."""

    def __init__(
        self,
        model: Any,
        train_loader: Any,
        validation_loader: Any,
        test_loader: Any,
        optimizer: Any,
        criterion: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        positional = dict(zip(self.arguments, args))
        named = {name: kwargs.pop(name) for name in self.arguments if name in kwargs}
        parts = (model, train_loader, validation_loader, test_loader, optimizer, criterion)
        super().__init__(*parts, *args[len(positional) :], **kwargs)
        self._set_experiment(**positional, **named)

    def _set_experiment(
        self,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str,
        hyperparams: dict[str, Any],
        cloud_save_mode: str | None = "s3",
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
        source_dirs: Sequence[str] = (),
    ) -> None:
        self.project_name, self.experiment_name = project_name, experiment_name
        self.local_model_result_folder_path = os.path.expanduser(local_model_result_folder_path)
        self.hyperparams = hyperparams
        self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix = cloud_save_mode, bucket_name, cloud_dir_prefix
        self.source_dirs = source_dirs
        if not isinstance(hyperparams, dict):
            raise ConfigurationError(f"hyperparams={hyperparams!r}: must be a dict.")
        hyperparams.setdefault("experiment_file_path", user_place().file)
        hyperparams.setdefault("source_dirs_paths", source_dirs)

    def _save(self, kind: Any, *first: Any, **options: Any) -> None:
        """Register a callback that saves files. It runs before all callbacks of ``fit``."""
        named = {name: getattr(self, name) for name in (*_EXPERIMENT, *_CLOUD[:3])}
        self.callbacks_handler.register_callbacks([kind(*first, **named, **options)], cache_callbacks=True)


class TrainLoopCheckpoint(_TrackingLoop):
    """Save the model after each epoch or every ``iteration_save_freq`` batches; see :class:`ModelCheckpoint`.

    Parameters
    ----------
    model, train_loader, validation_loader, test_loader, optimizer, criterion
        As in :class:`TrainLoop`.
    project_name, experiment_name, local_model_result_folder_path : str
    hyperparams : dict
    cloud_save_mode : str, optional
        ``'s3'`` (default), ``'gcs'``, or ``None`` for the local disk only.
    bucket_name, cloud_dir_prefix : str
    source_dirs : sequence of str
    rm_subopt_local_models : bool or str
    num_best_checkpoints_kept, iteration_save_freq : int
    *args, **kwargs
        The other arguments of :class:`TrainLoop`.
    """

    arguments: ClassVar[tuple[str, ...]] = (*_EXPERIMENT, *_CLOUD, *_CHECKPOINTS)

    def _set_experiment(
        self,
        *experiment: Any,
        rm_subopt_local_models: bool | str = False,
        num_best_checkpoints_kept: int = 2,
        iteration_save_freq: int = 0,
        **named: Any,
    ) -> None:
        super()._set_experiment(*experiment, **named)
        self.rm_subopt_local_models = rm_subopt_local_models
        self.iteration_save_freq = iteration_save_freq
        if iteration_save_freq < 0:
            raise ConfigurationError(f"iteration_save_freq={iteration_save_freq}: must be 0 or more.")
        first = (iteration_save_freq,) if iteration_save_freq else ()
        kind = ModelIterationCheckpoint if iteration_save_freq else ModelCheckpoint
        kept = num_best_checkpoints_kept
        self._save(kind, *first, rm_subopt_local_models=rm_subopt_local_models, num_best_checkpoints_kept=kept)


class TrainLoopEndSave(_TrackingLoop):
    """Evaluate result packages at the end of training, and save the model; see :class:`ModelTrainEndSave`.

    Parameters
    ----------
    model, train_loader, validation_loader, test_loader, optimizer, criterion
        As in :class:`TrainLoop`.
    project_name, experiment_name, local_model_result_folder_path, hyperparams
        As in :class:`TrainLoopCheckpoint`.
    val_result_package, test_result_package : AbstractResultPackage, optional
    cloud_save_mode, bucket_name, cloud_dir_prefix, source_dirs
        As in :class:`TrainLoopCheckpoint`.
    *args, **kwargs
        The other arguments of :class:`TrainLoop`.
    """

    arguments: ClassVar[tuple[str, ...]] = (*_EXPERIMENT, *_PACKAGES, *_CLOUD)

    def _set_experiment(
        self, *experiment: Any, val_result_package: Any = None, test_result_package: Any = None, **named: Any
    ) -> None:
        super()._set_experiment(*experiment, **named)
        self.val_result_package = val_result_package
        self.test_result_package = test_result_package
        self.check_if_result_packages_possible()
        self._save(ModelTrainEndSave, val_result_package=val_result_package, test_result_package=test_result_package)

    def check_if_result_packages_possible(self) -> None:
        """Raise an error if there is a result package for a dataset that the loop does not have."""
        for part, loader in (("val", "validation_loader"), ("test", "test_loader")):
            if getattr(self, f"{part}_result_package") is not None:
                require_loader(self, loader, f"{part}_result_package")


class TrainLoopCheckpointEndSave(TrainLoopCheckpoint, TrainLoopEndSave):
    """Save checkpoints during training, and the results and the model at the end.

    The arguments of :class:`TrainLoopEndSave` are followed by the arguments for checkpoints; see :attr:`arguments`.
    """

    arguments = (*_EXPERIMENT, *_PACKAGES, *_CLOUD, *_CHECKPOINTS)


# -- predictor ---------------------------------------------------------------------------------------------------------


class PyTorchModelPredictor:
    """A model, and the loader on which the model is evaluated. Predictions are cached."""

    def __init__(self, model: Any, data_loader: Any, callbacks: Sequence[Any] | None = None) -> None:
        self.model = model
        self.data_loader = data_loader
        self.train_loop = TrainLoop(model, None, None, data_loader, None, None)
        self.train_loop.callbacks_handler.register_callbacks(callbacks)

    def model_predict(self) -> Any:
        """Return ``(y_pred, y_true, metadata)``."""
        return self.train_loop.predict_on_test_set()

    def model_get_loss(self, loss_criterion: Any) -> Any:
        """Return the mean loss as a tensor or ``MultiLoss``."""
        self.train_loop.criterion = loss_criterion
        return self.train_loop.evaluate_loss_on_test_set()

    def evaluate_model(
        self,
        result_package: Any,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str,
        cloud_save_mode: str | None = "s3",
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
        save_true_pred_labels: bool = False,
    ) -> None:
        """Evaluate a result package, and save its results as an experiment."""
        names = project_name, experiment_name, self.train_loop.experiment_timestamp
        result_package.set_experiment_dir_path_for_additional_results(*names, local_model_result_folder_path)
        package = self.evaluate_result_package(result_package)
        history = TrainingHistory()
        for name, value in package.get_results().items():
            history.insert_single_result_into_history(name, value)
        bucket = bucket_of(cloud_save_mode, bucket_name, cloud_dir_prefix)
        saver = in_store(RESULTS_SAVERS, bucket, local_model_result_folder_path)
        saver.save_experiment_results(package, history, *names, save_true_pred_labels=save_true_pred_labels)

    def evaluate_result_package(self, result_package: Any, return_result_package: bool = True) -> Any:
        """Evaluate the package; return the package or its results."""
        y_pred, y_true, metadata = self.model_predict()
        result_package.prepare_result_package(y_true, y_pred, hyperparameters={}, additional_results=metadata)
        return result_package if return_result_package else result_package.get_results()

    def evaluate_metric(self, metric_class: Any, return_metric: bool = True) -> Any:
        """Compute a metric; return the metric, or a dict with its name and result."""
        y_pred, y_true, _ = self.model_predict()
        metric = metric_class(y_true, y_pred)
        return metric if return_metric else metric.get_metric_dict()

    def evaluate_metric_list(self, metrics_class_list: Sequence[Any], return_metric_list: bool = True) -> Any:
        """Compute several metrics; return the metrics, or a dict with their names and results."""
        metrics = [self.evaluate_metric(metric) for metric in metrics_class_list]
        if return_metric_list:
            return metrics
        return {name: value for metric in metrics for name, value in metric.get_metric_dict().items()}

    def execute_batch_end_callbacks(self) -> None:
        """Call the callbacks' ``on_batch_end``."""
        self.train_loop.callbacks_handler.execute_batch_end()

    def execute_epoch_end_callbacks(self) -> None:
        """Call the callbacks' ``on_epoch_end``."""
        self.train_loop.callbacks_handler.execute_epoch_end()
