"""Write and read AIToolbox's files of an experiment, on a disk and in a cloud: models, optimizers, results, settings.

The folder ``<folder>/<project>/<experiment>_<time stamp>/`` has ``model/``, ``checkpoint_model/`` and ``results/``.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainloop.checkpoint.storage import split_file
from trainloop.compat.aitoolbox.history import TrainingHistoryPlotter
from trainloop.errors import CheckpointError, ConfigurationError

DEFAULT_FOLDER = "~/project/model_result"


def new_timestamp() -> str:
    """Return the current time in AIToolbox's format."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def write_atomically(path: str, write: Any) -> None:
    """Write a file at a path or URL atomically."""
    where, name = split_file(path)
    where.write(name, write)


class ExperimentFolder:
    """The folder of an experiment."""

    @staticmethod
    def create_base_folder(*where: str, **named: str) -> str:
        """Create the folder if it is missing, and return its path.

        Arguments are as in :meth:`get_base_folder_paths`.
        """
        _, path = ExperimentFolder.get_base_folder_paths(*where, **named)
        os.makedirs(path, exist_ok=True)
        return path

    @staticmethod
    def get_base_folder_paths(
        project_name: str, experiment_name: str, experiment_timestamp: str, local_model_result_folder_path: str
    ) -> tuple[str, str]:
        """Return the paths of the project and of the experiment."""
        project = os.path.join(os.path.expanduser(local_model_result_folder_path), project_name)
        return project, os.path.join(project, f"{experiment_name}_{experiment_timestamp}")


# -- base classes of savers and loaders that a script defines ----------------------------------------------------------


class AbstractLocalModelLoader(ABC):
    """Base class of loaders that read models from the local disk, for example as ``custom_local_loader_class``."""

    @abstractmethod
    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Read the model of an experiment."""


class AbstractModelSaver(ABC):
    """Base class of savers that write models to a cloud."""

    @abstractmethod
    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        """Write the model, and return ``(path with the bucket, time stamp, local path)``.

        A local saver returns ``(file name, path)``.
        """


class AbstractLocalModelSaver(AbstractModelSaver):
    """Base class of savers that write models to the local disk."""


class AbstractResultsSaver(ABC):
    """Base class of savers that write results to a cloud."""

    @abstractmethod
    def save_experiment_results(self, *args: Any, **kwargs: Any) -> Any:
        """Write results, and return ``(path of the main file, with the bucket, time stamp)``.

        A local saver returns ``[path in the results, local path]`` for each file.
        """


class AbstractLocalResultsSaver(AbstractResultsSaver):
    """Base class of savers that write results to the local disk."""

    @abstractmethod
    def save_experiment_results_separate_files(self, *args: Any, **kwargs: Any) -> Any:
        """Write each result to a separate file."""


class AbstractExperimentSaver(ABC):
    """Base class of savers that write a model and its results."""

    @abstractmethod
    def save_experiment(self, *args: Any, **kwargs: Any) -> Any:
        """Write the model and its results, and return the paths."""


# -- models -----------------------------------------------------------------------------------------------------------


def model_file_name(
    experiment_name: str, timestamp: str, epoch: int | None = None, iteration: int | None = None
) -> str:
    """Return ``model_<experiment>_<time stamp>[_E<epoch>[_ITER<iteration>]].pth``."""
    suffix = "" if epoch is None else f"_E{epoch}" + ("" if iteration is None else f"_ITER{iteration}")
    return f"model_{experiment_name}_{timestamp}{suffix}.pth"


class PyTorchLocalModelSaver(AbstractLocalModelSaver):
    """Write a model's state into ``model/`` or ``checkpoint_model/``."""

    def __init__(self, local_model_result_folder_path: str = DEFAULT_FOLDER, checkpoint_model: bool = False) -> None:
        self.local_model_result_folder_path = os.path.expanduser(local_model_result_folder_path)
        self.checkpoint_model = checkpoint_model

    def create_experiment_local_models_folder(self, *experiment: str) -> str:
        """Create the folder of ``(project, experiment, time stamp)`` if it is missing, and return its path."""
        base = ExperimentFolder.create_base_folder(*experiment, self.local_model_result_folder_path)
        path = os.path.join(base, "checkpoint_model" if self.checkpoint_model else "model")
        os.makedirs(path, exist_ok=True)
        return path

    def save_model(
        self,
        model: Mapping[str, Any],
        project_name: str,
        experiment_name: str,
        experiment_timestamp: str | None = None,
        epoch: int | None = None,
        iteration_idx: int | None = None,
        protect_existing_folder: bool = True,
    ) -> tuple[Any, ...]:
        """Write the model, and return ``(file name, path)``."""
        self.check_model_dict_contents(model)
        stamp = experiment_timestamp or new_timestamp()
        name = model_file_name(experiment_name, stamp, epoch, iteration_idx)
        path = os.path.join(self.create_experiment_local_models_folder(project_name, experiment_name, stamp), name)
        write_atomically(path, lambda file: torch.save(model, file))
        return name, path

    @staticmethod
    def check_model_dict_contents(model: Mapping[str, Any]) -> None:
        """Raise an error if a saved model lacks data that is needed to resume from it."""
        for name in ("model_state_dict", "optimizer_state_dict", "epoch", "hyperparams"):
            if name not in model:
                raise ConfigurationError(f"the model's dict has no {name!r}. It has: {', '.join(map(str, model))}.")


class LocalSubOptimalModelRemover:
    """Keep only the best models by a metric of the history.

    For a loss, lower is better; otherwise, higher is better.
    """

    def __init__(self, metric_name: str, num_best_kept: int = 2) -> None:
        self.metric_name = metric_name
        self.decrease_metric = "loss" in metric_name
        self.num_best_kept = num_best_kept
        # Losses are known when a model is saved. Other metrics may be computed later in the epoch, so these models are
        # rated at the next save.
        self.is_default_metric = metric_name in ("loss", "accumulated_loss", "val_loss")
        self.non_default_metric_buffer: list[str] | None = None
        self.model_save_history: list[tuple[list[str], float]] = []

    def decide_if_remove_suboptimal_model(self, history: Any, new_model_dump_paths: list[str]) -> None:
        """Remove the worst model if there are too many models. Called after a model was saved."""
        paths = new_model_dump_paths
        if not self.is_default_metric:
            paths, self.non_default_metric_buffer = self.non_default_metric_buffer or [], new_model_dump_paths
        if paths and self.metric_name in history and history[self.metric_name]:
            self.model_save_history.append((paths, history[self.metric_name][-1]))
        elif paths:
            print(f"Provided metric {self.metric_name} not found on the list of evaluated metrics: {history.keys()}")
        if len(self.model_save_history) > self.num_best_kept:
            self.model_save_history.sort(key=lambda saved: saved[1], reverse=not self.decrease_metric)
            worst, _ = self.model_save_history.pop()
            print(f"Removing suboptimal models. Paths to be removed: {worst}")
            self.rm_suboptimal_model(worst)

    @staticmethod
    def rm_suboptimal_model(rm_model_paths: Sequence[str]) -> None:
        """Remove the files of a model."""
        for path in rm_model_paths:
            os.remove(path)


class PyTorchLocalModelLoader(AbstractLocalModelLoader):
    """Read the files that :class:`PyTorchLocalModelSaver` (or AIToolbox) wrote, and load their contents into objects.

    Files are read with ``weights_only=True``, which allows only tensors and plain types, and runs no code.
    """

    def __init__(self, local_model_result_folder_path: str) -> None:
        self.local_model_result_folder_path = os.path.expanduser(local_model_result_folder_path)
        self.model_representation: dict[str, Any] | None = None

    def load_model(
        self,
        project_name: str,
        experiment_name: str,
        experiment_timestamp: str,
        model_save_dir: str = "checkpoint_model",
        epoch_num: int | None = None,
        map_location: Any = None,
    ) -> dict[str, Any]:
        """Read the model of an experiment. If an epoch is given, read the model of that epoch."""
        where = project_name, experiment_name, experiment_timestamp
        _, folder = ExperimentFolder.get_base_folder_paths(*where, self.local_model_result_folder_path)
        name = model_file_name(experiment_name, experiment_timestamp, epoch_num)
        path = os.path.join(folder, model_save_dir, name)
        self.fetch(path, *where, model_save_dir, name)
        return self.load_model_from_path(path, map_location)

    def fetch(self, path: str, *in_experiments: str) -> None:
        """Download the file if it is not on the local disk. Loaders from a cloud override this method."""

    def load_model_from_path(self, model_path: str, map_location: Any = None) -> dict[str, Any]:
        """Read a model's file, and return its content."""
        try:
            state = torch.load(os.path.expanduser(model_path), map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{model_path} contains more than tensors and plain types, usually in its hyperparams ({error}). Allow "
                "these types with torch.serialization.add_safe_globals([...]), or leave them out of hyperparams."
            ) from error
        state.setdefault("schedulers_state_dict", [])
        self.model_representation = state
        return dict(state)

    def check_if_model_loaded(self) -> dict[str, Any]:
        """Return the content of the model's file, or raise an error if no file was read."""
        if self.model_representation is None:
            raise ConfigurationError("no model has been loaded yet. Call load_model() first.")
        return self.model_representation

    def init_model(self, model: Any, used_data_parallel: bool = False) -> Any:
        """Load the weights into a model. With ``used_data_parallel``, remove the prefix ``module.`` from names."""
        state = self.check_if_model_loaded()["model_state_dict"]
        if used_data_parallel:
            state = {name.removeprefix("module."): value for name, value in state.items()}
        model.load_state_dict(state)
        return model

    def init_optimizer(self, optimizer: Any, device: str = "cuda") -> Any:
        """Load the state into an optimizer."""
        optimizer.load_state_dict(self.check_if_model_loaded()["optimizer_state_dict"])
        return optimizer

    def init_scheduler(
        self, scheduler_callbacks_list: list[Any], ignore_saved: bool = False, ignore_missing_saved: bool = False
    ) -> list[Any]:
        """Load the saved states into scheduler callbacks.

        Raises
        ------
        ConfigurationError
            If the numbers of saved states and of callbacks are different, unless an argument allows it.
        """
        saved = self.check_if_model_loaded()["schedulers_state_dict"]
        given = scheduler_callbacks_list
        if (given and not saved and ignore_missing_saved) or (saved and not given and ignore_saved):
            return given
        if len(saved) != len(given):
            raise ConfigurationError(
                f"the number of schedulers is {len(saved)} in the saved model, but {len(given)} in the loop. Pass the "
                "same schedulers, or pass ignore_saved_schedulers=True or ignore_missing_saved_schedulers=True."
            )
        for scheduler, state in zip(given, saved, strict=True):
            scheduler.load_state_dict(state)
        return given

    def init_amp(self, amp_scaler: Any) -> Any:
        """Load the state into a ``GradScaler``."""
        amp_scaler.load_state_dict(self.check_if_model_loaded()["amp"])
        return amp_scaler


# -- results ----------------------------------------------------------------------------------------------------------


_ENDINGS = {"pickle": ".p", "json": ".json"}


class BaseLocalResultsSaver:
    """Write dicts into ``results/``, as pickle or JSON."""

    def __init__(self, local_model_result_folder_path: str = DEFAULT_FOLDER, file_format: str = "pickle") -> None:
        self.local_model_result_folder_path = os.path.expanduser(local_model_result_folder_path)
        if file_format not in _ENDINGS:
            print("Warning: file format should be: pickle or json. Setting it to default pickle")
            file_format = "pickle"
        self.file_format = file_format

    def create_experiment_local_folder_structure(self, *experiment: str) -> str:
        """Create ``results/`` of ``(project, experiment, time stamp)``, and return its path."""
        return self.create_experiment_local_results_folder(*experiment, self.local_model_result_folder_path)

    @staticmethod
    def create_experiment_local_results_folder(*where: str, **named: str) -> str:
        """Create ``results/``, and return its path.

        Arguments are as in :meth:`ExperimentFolder.get_base_folder_paths`.
        """
        *_, path = BaseLocalResultsSaver.get_experiment_local_results_folder_paths(*where, **named)
        os.makedirs(path, exist_ok=True)
        return path

    @staticmethod
    def get_experiment_local_results_folder_paths(*where: str, **named: str) -> tuple[str, str, str]:
        """Return the paths of the project, the experiment, and its ``results/``."""
        project, base = ExperimentFolder.get_base_folder_paths(*where, **named)
        return project, base, os.path.join(base, "results")

    def save_file(self, result_dict: Any, file_name_w_type: str, file_local_path_w_type: str) -> tuple[str, str]:
        """Write a file, and return ``(file name, path)`` with the format's extension."""
        if self.file_format not in _ENDINGS:  # the format may have been set after construction
            raise ConfigurationError(f"file_format={self.file_format!r}: must be one of {', '.join(_ENDINGS)}.")
        ending, as_json = _ENDINGS[self.file_format], self.file_format == "json"
        content = json.dumps(result_dict, sort_keys=True, indent=4).encode() if as_json else pickle.dumps(result_dict)
        write_atomically(file_local_path_w_type + ending, lambda file: file.write(content))
        return file_name_w_type + ending, file_local_path_w_type + ending


class LocalResultsSaver(AbstractLocalResultsSaver, BaseLocalResultsSaver):
    """Write a result package, hyperparameters, and the history with its plots."""

    def save_experiment_results(
        self,
        result_package: Any,
        training_history: Any,
        project_name: str,
        experiment_name: str,
        experiment_timestamp: str | None = None,
        save_true_pred_labels: bool = False,
        protect_existing_folder: bool = True,
        *,
        separate_files: bool = False,
    ) -> list[list[str]]:
        """Write one file or separate files, and return ``[path in the results, local path]`` for each file."""
        stamp, package = experiment_timestamp or new_timestamp(), result_package
        folder = self.create_experiment_local_folder_structure(project_name, experiment_name, stamp)
        names = {"experiment_name": experiment_name, "experiment_results_local_path": folder}
        labels = {"y_true": package.y_true, "y_predicted": package.y_predicted} if save_true_pred_labels else {}
        results = {"results": package.get_results()}
        hyperparams = {"hyperparameters": package.get_hyperparameters()}
        train_history = {"training_history": training_history.get_train_history()}
        files = {
            "results": {**names, **results},
            "hyperparams": {**names, **hyperparams},
            "train_history": {**names, **train_history},
            "true_pred_labels": labels,
        }
        if not separate_files:
            files = {"results_hyperParams_hist": {**labels, **names, **results, **hyperparams, **train_history}}
        further = package.get_additional_results_dump_paths() or []
        plots = TrainingHistoryPlotter(folder).generate_report(training_history, plots_folder_name="plots")
        saved = []
        for kind, content in files.items():
            if content:
                name = f"{kind}_{experiment_name}_{stamp}"
                saved.append(list(self.save_file(content, name, os.path.join(folder, name))))
        return saved + list(further) + plots

    def save_experiment_results_separate_files(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Write each part to a separate file. Arguments are as in :meth:`save_experiment_results`."""
        return self.save_experiment_results(*args, **kwargs, separate_files=True)


class FullPyTorchExperimentLocalSaver(AbstractExperimentSaver):
    """Write a model and its results. Further arguments are passed to both savers."""

    kinds: tuple[type[Any], type[Any]] = (PyTorchLocalModelSaver, LocalResultsSaver)

    def __init__(self, project_name: str, experiment_name: str, *where: str, **named: str) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.model_saver, self.results_saver = (kind(*where, **named) for kind in self.kinds)

    def save_experiment(
        self,
        model: Mapping[str, Any],
        result_package: Any,
        training_history: Any,
        experiment_timestamp: str | None = None,
        save_true_pred_labels: bool = False,
        separate_files: bool = False,
        protect_existing_folder: bool = True,
    ) -> Sequence[str]:
        """Write the model and its results, and return the paths."""
        where = self.project_name, self.experiment_name, experiment_timestamp or new_timestamp()
        model_paths = self.model_saver.save_model(model, *where)
        results = result_package, training_history, *where, save_true_pred_labels
        results_paths = self.results_saver.save_experiment_results(*results, separate_files=separate_files)
        return self.paths(model_paths, results_paths)

    def paths(self, of_model: tuple[Any, ...], of_results: Any) -> Sequence[str]:
        """Return the local paths from the results of the two savers."""
        return [of_model[1], *(path for _, path in of_results)]


# -- the same in a cloud, with fsspec: S3 with s3fs, Google Cloud Storage with gcsfs -----------------------------------

s3_available_options = ["s3", "aws_s3", "aws"]
gcs_available_options = ["gcs", "google_storage", "google storage"]

# fsspec's protocol of each cloud store, by AIToolbox's name.
PROTOCOLS = {**dict.fromkeys(s3_available_options, "s3"), **dict.fromkeys(gcs_available_options, "gcs")}


class Bucket:
    """Files under a prefix in an S3 bucket. Subclasses for Google Cloud Storage have a different ``mode``."""

    mode = "s3"

    def __init__(
        self, bucket_name: str | None = None, cloud_dir_prefix: str | None = None, cloud_save_mode: str | None = None
    ) -> None:
        self.bucket_name = bucket_name or "model-result"
        self.cloud_dir_prefix = cloud_dir_prefix or ""
        self.mode = cloud_save_mode or self.mode
        self.protocol = PROTOCOLS[self.mode]

    def url(self, cloud_file_path: str) -> str:
        """Return the URL of a path in the bucket, for fsspec."""
        return f"{self.protocol}://{self.bucket_name}/{cloud_file_path.lstrip('/')}"

    def save_file(self, local_file_path: str, cloud_file_path: str) -> None:
        """Upload a file."""
        with open(os.path.expanduser(local_file_path), "rb") as source:
            write_atomically(self.url(cloud_file_path), lambda file: shutil.copyfileobj(source, file))

    def load_file(self, cloud_file_path: str, local_file_path: str) -> None:
        """Download a file unless it exists locally."""
        if os.path.isfile(local_file_path):
            print(f"{local_file_path} already exists, so it is not downloaded")
            return
        folder, name = split_file(self.url(cloud_file_path))
        with folder.open(name) as source:
            write_atomically(local_file_path, lambda file: shutil.copyfileobj(source, file))

    def experiment_path(self, project: str, experiment: str, timestamp: str, *parts: str) -> str:
        """Return the path of an experiment in the bucket, with ``parts`` appended."""
        return os.path.join(self.cloud_dir_prefix, project, f"{experiment}_{timestamp}", *parts)


def bucket_of(cloud_save_mode: str | None, bucket_name: str | None, cloud_dir_prefix: str | None) -> Bucket | None:
    """Return the bucket to save to; ``None`` (the local disk) if the mode is not a cloud.

    Raises
    ------
    ConfigurationError
        If the store's file system (s3fs, gcsfs) is not installed.
    """
    if cloud_save_mode not in PROTOCOLS:
        return None
    bucket = Bucket(bucket_name, cloud_dir_prefix, cloud_save_mode)
    try:
        split_file(bucket.url("x/y"))
    except ConfigurationError as error:
        raise ConfigurationError(
            f"cloud_save_mode={cloud_save_mode!r}: {error} To use only the local disk, pass cloud_save_mode=None."
        ) from error
    return bucket


# -- AIToolbox's classes ----------------------------------------------------------------------------------------------


class BaseResultsSaver(Bucket):
    """Upload files into the folder ``results/`` of an experiment."""

    def create_experiment_cloud_storage_folder_structure(
        self, project_name: str, experiment_name: str, experiment_timestamp: str
    ) -> str:
        """Return the folder's path in the bucket."""
        return self.experiment_path(project_name, experiment_name, experiment_timestamp, "results")


class BaseResultsGoogleStorageSaver(BaseResultsSaver):
    """The same as the base class, for Google Cloud Storage."""

    mode = "gcs"


class S3ResultsSaver(AbstractResultsSaver, BaseResultsSaver):
    """Write results to the local disk, and upload them."""

    def __init__(
        self,
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
        local_model_result_folder_path: str = DEFAULT_FOLDER,
    ) -> None:
        super().__init__(bucket_name, cloud_dir_prefix)
        self.local_results_saver = LocalResultsSaver(local_model_result_folder_path)

    def save_experiment_results(
        self,
        result_package: Any,
        training_history: Any,
        project_name: str,
        experiment_name: str,
        experiment_timestamp: str | None = None,
        save_true_pred_labels: bool = False,
        separate_files: bool = False,
        protect_existing_folder: bool = True,
    ) -> tuple[str, str]:
        """Write and upload the results, and return ``(path of the main file, with the bucket, time stamp)``."""
        stamp = experiment_timestamp or new_timestamp()
        where = project_name, experiment_name, stamp
        results = result_package, training_history, *where, save_true_pred_labels
        saved = self.local_results_saver.save_experiment_results(*results, separate_files=separate_files)
        folder = self.create_experiment_cloud_storage_folder_structure(*where)
        for name, path in saved:
            self.save_file(path, os.path.join(folder, name))
        return os.path.join(self.bucket_name, folder, saved[0][0]), stamp


class GoogleStorageResultsSaver(S3ResultsSaver):
    """The same as the base class, for Google Cloud Storage."""

    mode = "gcs"


class BaseModelSaver(Bucket):
    """Upload files into the folder ``model/`` or ``checkpoint_model/`` of an experiment."""

    def __init__(
        self, bucket_name: str = "model-result", cloud_dir_prefix: str = "", checkpoint_model: bool = False
    ) -> None:
        super().__init__(bucket_name, cloud_dir_prefix)
        self.checkpoint_model = checkpoint_model

    def create_experiment_cloud_storage_folder_structure(
        self, project_name: str, experiment_name: str, experiment_timestamp: str
    ) -> str:
        """Return the folder's path in the bucket."""
        name = "checkpoint_model" if self.checkpoint_model else "model"
        return self.experiment_path(project_name, experiment_name, experiment_timestamp, name)


class PyTorchS3ModelSaver(AbstractModelSaver, BaseModelSaver):
    """Write a model to the local disk, and upload it."""

    def __init__(
        self,
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
        local_model_result_folder_path: str = DEFAULT_FOLDER,
        checkpoint_model: bool = False,
    ) -> None:
        super().__init__(bucket_name, cloud_dir_prefix, checkpoint_model)
        self.pytorch_local_saver = PyTorchLocalModelSaver(local_model_result_folder_path, checkpoint_model)

    def save_model(
        self,
        model: Mapping[str, Any],
        project_name: str,
        experiment_name: str,
        experiment_timestamp: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Write and upload the model, and return ``(path with the bucket, time stamp, local path)``.

        Arguments are as in :class:`PyTorchLocalModelSaver`.
        """
        stamp = experiment_timestamp or new_timestamp()
        where = project_name, experiment_name, stamp
        name, path = self.pytorch_local_saver.save_model(model, *where, *args, **kwargs)
        in_cloud = os.path.join(self.create_experiment_cloud_storage_folder_structure(*where), name)
        self.save_file(path, in_cloud)
        return os.path.join(self.bucket_name, in_cloud), stamp, path


class PyTorchGoogleStorageModelSaver(PyTorchS3ModelSaver):
    """The same as the base class, for Google Cloud Storage."""

    mode = "gcs"


class PyTorchS3ModelLoader(PyTorchLocalModelLoader):
    """Download a model if it is not on the local disk, and read it."""

    mode = "s3"

    def __init__(
        self,
        local_model_result_folder_path: str = DEFAULT_FOLDER,
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
    ) -> None:
        super().__init__(local_model_result_folder_path)
        self.bucket = Bucket(bucket_name, cloud_dir_prefix, self.mode)

    def fetch(self, path: str, *in_experiments: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.bucket.load_file(self.bucket.experiment_path(*in_experiments), path)


class PyTorchGoogleStorageModelLoader(PyTorchS3ModelLoader):
    """The same as the base class, for Google Cloud Storage."""

    mode = "gcs"


class FullPyTorchExperimentS3Saver(FullPyTorchExperimentLocalSaver):
    """Write a model and its results to the local disk, and upload them."""

    kinds = (PyTorchS3ModelSaver, S3ResultsSaver)

    def paths(self, of_model: tuple[Any, ...], of_results: Any) -> tuple[str, str]:
        """Return ``(path of the model, path of the results)`` in the cloud."""
        return of_model[0], of_results[0]


class FullPyTorchExperimentGoogleStorageSaver(FullPyTorchExperimentS3Saver):
    """The same as the base class, for Google Cloud Storage."""

    kinds = (PyTorchGoogleStorageModelSaver, GoogleStorageResultsSaver)


# -- the class for a store ---------------------------------------------------------------------------------------------

# Classes for the local disk, for S3 and for Google Cloud Storage.
MODEL_SAVERS = PyTorchLocalModelSaver, PyTorchS3ModelSaver, PyTorchGoogleStorageModelSaver
MODEL_LOADERS = PyTorchLocalModelLoader, PyTorchS3ModelLoader, PyTorchGoogleStorageModelLoader
RESULTS_SAVERS = LocalResultsSaver, S3ResultsSaver, GoogleStorageResultsSaver
EXPERIMENT_SAVERS = (
    FullPyTorchExperimentLocalSaver,
    FullPyTorchExperimentS3Saver,
    FullPyTorchExperimentGoogleStorageSaver,
)


def in_store(kinds: tuple[Any, Any, Any], bucket: Bucket | None, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """Create the saver or loader for the bucket's kind of store, or for the local disk."""
    local, s3, google = kinds
    kind = local if bucket is None else google if bucket.mode in gcs_available_options else s3
    if bucket is not None:
        kwargs |= {"bucket_name": bucket.bucket_name, "cloud_dir_prefix": bucket.cloud_dir_prefix}
    return kind(*args, local_model_result_folder_path=folder, **kwargs)


# -- hyperparameters and source ----------------------------------------------------------------------------------------


class HyperParamSourceReporter:
    """Write ``hyperparams_list.txt``, the script, and a zip file of the source folders into the experiment's folder."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        experiment_timestamp: str,
        local_model_result_folder_path: str,
    ) -> None:
        self.experiment_dir_path = ExperimentFolder.create_base_folder(
            project_name, experiment_name, experiment_timestamp, local_model_result_folder_path
        )
        self.file_name = "hyperparams_list.txt"
        self.local_hyperparams_file_path = os.path.join(self.experiment_dir_path, self.file_name)

    def save_hyperparams_to_text_file(self, hyperparams: Mapping[str, Any], sort_names: bool = False) -> str:
        """Write one line per hyperparameter."""
        names = sorted(hyperparams) if sort_names else hyperparams
        text = "".join(f"{name}:\t{hyperparams[name]}\n" for name in names)
        write_atomically(self.local_hyperparams_file_path, lambda file: file.write(text.encode()))
        return self.local_hyperparams_file_path

    def save_experiment_python_file(self, hyperparams: Mapping[str, Any]) -> str | None:
        """Copy the file ``hyperparams['experiment_file_path']``, if it exists."""
        path = hyperparams.get("experiment_file_path")
        if not path or not os.path.isfile(path):  # for example in a notebook
            print(f"experiment_file_path={path!r} in hyperparams is not a file, so it is not copied to the experiment.")
            return None
        return shutil.copyfile(path, os.path.join(self.experiment_dir_path, os.path.basename(path)))

    def save_experiment_source_files(self, hyperparams: Mapping[str, Any]) -> str | None:
        """Zip the folders ``hyperparams['source_dirs_paths']``."""
        folders = hyperparams.get("source_dirs_paths")
        if not isinstance(folders, (list, tuple)) or not folders:
            return None
        copied = os.path.join(self.experiment_dir_path, "source_code")
        for folder in map(os.path.expanduser, folders):
            shutil.copytree(folder, os.path.join(copied, os.path.basename(os.path.normpath(folder))))
        path = shutil.make_archive(copied, "zip", copied)
        shutil.rmtree(copied)
        return path
