"""AIToolbox's callbacks that save models after epochs, after iterations and at the end, and that load them."""

from __future__ import annotations

import os
from typing import Any

from trainloop.callbacks.base import AbstractCallback
from trainloop.compat.aitoolbox.callbacks import AbstractExperimentCallback, experiment_in
from trainloop.compat.aitoolbox.cloud import (
    PyTorchGoogleStorageModelLoader,
    PyTorchGoogleStorageModelSaver,
    PyTorchS3ModelLoader,
    PyTorchS3ModelSaver,
    bucket_of,
    experiment_saver,
    gcs_available_options,
)
from trainloop.compat.aitoolbox.inputs import OwnOptimizer
from trainloop.compat.aitoolbox.results import AbstractResultPackage
from trainloop.compat.aitoolbox.saving import (
    LocalSubOptimalModelRemover,
    PyTorchLocalModelLoader,
    PyTorchLocalModelSaver,
)
from trainloop.compat.aitoolbox.sources import HyperParamSourceReporter
from trainloop.errors import ConfigurationError
from trainloop.model import ModelWrap

__all__ = ["ModelCheckpoint", "ModelIterationCheckpoint", "ModelLoadContinueTraining", "ModelTrainEndSave"]


def _model_of(loop: Any) -> Any:
    """Return the model in AIToolbox's form: of a ModelWrap the module."""
    return loop.model.model if isinstance(loop.model, ModelWrap) else loop.model


class _Saves(AbstractCallback):
    """Base of callbacks that save: the experiment's location, and the files of its hyperparameters."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(
        self,
        name: str,
        order: int,
        rank: int | None,
        experiment: tuple[str, str, str],
        hyperparams: dict[str, Any],
        cloud: tuple[str | None, str, str],
    ) -> None:
        super().__init__(name, execution_order=order, device_idx_execution=rank)
        self.project_name, self.experiment_name = experiment[:2]
        self.local_model_result_folder_path = os.path.expanduser(experiment[2])
        self.hyperparams = hyperparams
        self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix = cloud
        self._hyperparams_already_saved = False

    @property
    def _cloud(self) -> tuple[str | None, str, str]:
        return self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix

    def _check_registered(self) -> None:
        if isinstance(self.train_loop_obj.optimizer, OwnOptimizer):
            self.train_loop_obj.optimizer.check_state()
        os.makedirs(self.local_model_result_folder_path, exist_ok=True)
        if not self.train_loop_obj.lazy_experiment_save and self.train_loop_obj.is_main_process():
            self.save_hyperparams()

    def save_hyperparams(self) -> None:
        """Write hyperparameters and source, once."""
        if self._hyperparams_already_saved:
            return
        self._hyperparams_already_saved = True
        stamp = self.train_loop_obj.experiment_timestamp
        names = self.project_name, self.experiment_name, stamp
        reporter = HyperParamSourceReporter(*names, self.local_model_result_folder_path)
        if os.path.isfile(reporter.local_hyperparams_file_path):  # written by another callback of the experiment
            return
        written = [
            reporter.save_hyperparams_to_text_file(self.hyperparams),
            reporter.save_experiment_python_file(self.hyperparams),
            reporter.save_experiment_source_files(self.hyperparams),
        ]
        bucket = bucket_of(*self._cloud)
        for path in filter(None, written) if bucket is not None else ():
            assert bucket is not None
            bucket.save_file(path, bucket.experiment_path(*names, os.path.basename(path)))

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

    With ``rm_subopt_local_models`` only the ``num_best_checkpoints_kept`` best remain on the local disk, by ``loss`` or
    by the given metric.
    """

    train_loop_obj: Any  # this package's loop, with more attributes

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
        super().__init__(
            "Model checkpoint at end of epoch",
            100,
            0,
            (project_name, experiment_name, local_model_result_folder_path),
            hyperparams,
            (cloud_save_mode, bucket_name, cloud_dir_prefix),
        )
        self.rm_subopt_local_models = rm_subopt_local_models
        metric = "loss" if rm_subopt_local_models is True else str(rm_subopt_local_models)
        self.subopt_model_remover = LocalSubOptimalModelRemover(metric, num_best_checkpoints_kept)
        self.model_checkpointer: Any = None
        """Writes the files; created at registration."""

    def on_train_loop_registration(self) -> None:
        self.model_checkpointer = self._saver()
        self._check_registered()

    def _saver(self) -> PyTorchLocalModelSaver | PyTorchS3ModelSaver:
        if bucket_of(*self._cloud) is None:  # a missing s3fs raises an error before training
            return PyTorchLocalModelSaver(self.local_model_result_folder_path, checkpoint_model=True)
        google = self.cloud_save_mode in gcs_available_options
        saver = PyTorchGoogleStorageModelSaver if google else PyTorchS3ModelSaver
        return saver(
            self.bucket_name, self.cloud_dir_prefix, self.local_model_result_folder_path, checkpoint_model=True
        )

    def on_epoch_end(self) -> None:
        path = self._save()
        if self.rm_subopt_local_models is not False:
            self.subopt_model_remover.decide_if_remove_suboptimal_model(self.train_loop_obj.train_history, [path])

    def _save(self, iteration_idx: int | None = None) -> str:
        self.save_hyperparams()
        loop = self.train_loop_obj
        names = self.project_name, self.experiment_name, loop.experiment_timestamp
        *_, path = self.model_checkpointer.save_model(self._state(), *names, loop.epoch, iteration_idx)
        return str(path)


class ModelIterationCheckpoint(ModelCheckpoint):
    """Save the model also every ``save_frequency`` batches, with ``_ITER<total_iteration_idx>`` in the file's name."""

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

    train_loop_obj: Any  # this package's loop, with more attributes

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
        super().__init__(
            "Model save at the end of training",
            101,
            None,  # all ranks predict together; the main process writes
            (project_name, experiment_name, local_model_result_folder_path),
            hyperparams,
            (cloud_save_mode, bucket_name, cloud_dir_prefix),
        )
        packages = {"val_result_package": val_result_package, "test_result_package": test_result_package}
        if not any(package is not None for package in packages.values()):
            raise ConfigurationError("val_result_package and test_result_package are both None: pass one of them.")
        for name, package in packages.items():
            if package is not None and not isinstance(package, AbstractResultPackage):
                raise TypeError(f"{name}={package!r}: must be an AbstractResultPackage.")
        self.val_result_package = val_result_package
        self.test_result_package = test_result_package
        self.result_package: Any = None
        self.results_saver: Any = None
        """Writes the files; created at registration."""

    def on_train_loop_registration(self) -> None:
        names = self.project_name, self.experiment_name, self.train_loop_obj.experiment_timestamp
        packages = (
            self.val_result_package,
            self.test_result_package,
        )  # their len() is that of results they have not yet
        for package in (package for package in packages if package is not None):
            package.set_experiment_dir_path_for_additional_results(*names, self.local_model_result_folder_path)
        self.results_saver = experiment_saver(
            self.cloud_save_mode,  # a missing s3fs raises an error before training
            self.project_name,
            self.experiment_name,
            self.bucket_name,
            self.cloud_dir_prefix,
            self.local_model_result_folder_path,
        )
        self._check_registered()

    def on_train_end(self) -> None:
        loop = self.train_loop_obj
        state, self.result_package = self._state(), None
        for package, suffix, predict, evaluate in (
            (self.val_result_package, "_VAL", loop.predict_on_validation_set, loop.evaluate_loss_on_validation_set),
            (self.test_result_package, "_TEST", loop.predict_on_test_set, loop.evaluate_loss_on_test_set),
        ):
            if package is None:
                continue
            y_pred, y_true, metadata = predict()
            package.pkg_name = f"{package.pkg_name}{suffix}"
            if package.requires_loss:
                metadata = {**metadata, "loss": evaluate(float_dict_format=True)}
            package.prepare_result_package(y_true, y_pred, self.hyperparams, additional_results=metadata)
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
    """Load model, optimizer and schedulers of an earlier experiment, and resume with the epoch after it."""

    train_loop_obj: Any  # this package's loop, with more attributes

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
        super().__init__(
            "Model loading and initialization from checkpoint before training",
            *experiment_in(experiment, kwargs),
            execution_order=-10,
        )
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
        """Create the loader."""
        folder = str(self.local_model_result_folder_path)
        local = self.custom_local_loader_class or PyTorchLocalModelLoader
        if bucket_of(self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix) is None:
            self.model_loader = local(folder)
            return
        google = self.cloud_save_mode in gcs_available_options
        loader = PyTorchGoogleStorageModelLoader if google else PyTorchS3ModelLoader
        self.model_loader = loader(folder, self.bucket_name or "model-result", self.cloud_dir_prefix or "")
