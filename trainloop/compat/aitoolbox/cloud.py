"""AIToolbox's cloud storage, through fsspec: S3 by s3fs, Google Cloud Storage by gcsfs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from trainloop.checkpoint.storage import split_file
from trainloop.compat.aitoolbox.saving import (
    DEFAULT_FOLDER,
    AbstractModelSaver,
    AbstractResultsSaver,
    FullPyTorchExperimentLocalSaver,
    LocalResultsSaver,
    PyTorchLocalModelLoader,
    PyTorchLocalModelSaver,
    new_timestamp,
)
from trainloop.errors import ConfigurationError

s3_available_options = ["s3", "aws_s3", "aws"]
gcs_available_options = ["gcs", "google_storage", "google storage"]

# fsspec's names of the stores, by AIToolbox's names.
PROTOCOLS = {**dict.fromkeys(s3_available_options, "s3"), **dict.fromkeys(gcs_available_options, "gcs")}


class Bucket:
    """Files under a prefix in an S3 bucket; subclasses for Google Cloud Storage have another ``mode``."""

    mode = "s3"

    def __init__(
        self, bucket_name: str | None = None, cloud_dir_prefix: str | None = None, cloud_save_mode: str | None = None
    ) -> None:
        self.bucket_name = bucket_name or "model-result"
        self.cloud_dir_prefix = cloud_dir_prefix or ""
        self.mode = cloud_save_mode or self.mode
        self.protocol = PROTOCOLS[self.mode]

    def url(self, cloud_file_path: str) -> str:
        """Return fsspec's URL of a path in the bucket."""
        return f"{self.protocol}://{self.bucket_name}/{cloud_file_path.lstrip('/')}"

    def save_file(self, local_file_path: str, cloud_file_path: str) -> None:
        """Upload a file."""
        folder, name = split_file(self.url(cloud_file_path))
        with open(os.path.expanduser(local_file_path), "rb") as source:
            folder.write(name, lambda file: shutil.copyfileobj(source, file))

    def load_file(self, cloud_file_path: str, local_file_path: str) -> None:
        """Download a file unless it exists locally."""
        if os.path.isfile(local_file_path):
            print(f"{local_file_path} already exists, so it is not downloaded")
            return
        folder, name = split_file(self.url(cloud_file_path))
        here, own_name = split_file(local_file_path)
        with folder.open(name) as source:
            here.write(own_name, lambda file: shutil.copyfileobj(source, file))

    def experiment_path(self, project: str, experiment: str, timestamp: str, *parts: str) -> str:
        """Return a path of an experiment in the bucket."""
        return os.path.join(self.cloud_dir_prefix, project, f"{experiment}_{timestamp}", *parts)


def bucket_of(cloud_save_mode: str | None, bucket_name: str | None, cloud_dir_prefix: str | None) -> Bucket | None:
    """Return the bucket to save to; ``None`` (the local disk) for any mode that is not a cloud.

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
    """Upload files into ``results/`` of an experiment."""

    def create_experiment_cloud_storage_folder_structure(
        self, project_name: str, experiment_name: str, experiment_timestamp: str
    ) -> str:
        """Return the folder's path in the bucket."""
        return self.experiment_path(project_name, experiment_name, experiment_timestamp, "results")


class BaseResultsGoogleStorageSaver(BaseResultsSaver):
    """Like the base class, for Google Cloud Storage."""

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
        """Return ``(path of the main file, with the bucket, time stamp)``."""
        stamp = experiment_timestamp or new_timestamp()
        where = project_name, experiment_name, stamp
        results = result_package, training_history, *where, save_true_pred_labels
        saved = self.local_results_saver.save_experiment_results(*results, separate_files=separate_files)
        folder = self.create_experiment_cloud_storage_folder_structure(*where)
        for name, path in saved:
            self.save_file(path, os.path.join(folder, name))
        return os.path.join(self.bucket_name, folder, saved[0][0]), stamp


class GoogleStorageResultsSaver(S3ResultsSaver):
    """Like the base class, for Google Cloud Storage."""

    mode = "gcs"


class BaseModelSaver(Bucket):
    """Upload files into ``model/`` or ``checkpoint_model/`` of an experiment."""

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
        """Return ``(path with the bucket, time stamp, local path)``; arguments as in the local saver."""
        stamp = experiment_timestamp or new_timestamp()
        where = project_name, experiment_name, stamp
        name, path = self.pytorch_local_saver.save_model(model, *where, *args, **kwargs)
        in_cloud = os.path.join(self.create_experiment_cloud_storage_folder_structure(*where), name)
        self.save_file(path, in_cloud)
        return os.path.join(self.bucket_name, in_cloud), stamp, path


class PyTorchGoogleStorageModelSaver(PyTorchS3ModelSaver):
    """Like the base class, for Google Cloud Storage."""

    mode = "gcs"


class PyTorchS3ModelLoader(PyTorchLocalModelLoader):
    """Download a model unless it is already on the local disk, and read it."""

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
    """Like the base class, for Google Cloud Storage."""

    mode = "gcs"


class FullPyTorchExperimentS3Saver(FullPyTorchExperimentLocalSaver):
    """Write a model and its results to the local disk, and upload them."""

    kinds = (PyTorchS3ModelSaver, S3ResultsSaver)

    def paths(self, of_model: tuple[Any, ...], of_results: Any) -> tuple[str, str]:
        """Return ``(path of the model, path of the results)`` in the cloud."""
        return of_model[0], of_results[0]


class FullPyTorchExperimentGoogleStorageSaver(FullPyTorchExperimentS3Saver):
    """Like the base class, for Google Cloud Storage."""

    kinds = (PyTorchGoogleStorageModelSaver, GoogleStorageResultsSaver)


# -- the class for a store ---------------------------------------------------------------------------------------------

# For the local disk, S3 and Google Cloud Storage.
MODEL_SAVERS = PyTorchLocalModelSaver, PyTorchS3ModelSaver, PyTorchGoogleStorageModelSaver
MODEL_LOADERS = PyTorchLocalModelLoader, PyTorchS3ModelLoader, PyTorchGoogleStorageModelLoader
RESULTS_SAVERS = LocalResultsSaver, S3ResultsSaver, GoogleStorageResultsSaver
EXPERIMENT_SAVERS = (
    FullPyTorchExperimentLocalSaver,
    FullPyTorchExperimentS3Saver,
    FullPyTorchExperimentGoogleStorageSaver,
)


def in_store(kinds: tuple[Any, Any, Any], bucket: Bucket | None, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """Create the saver or loader for a bucket's store, or for the local disk."""
    local, s3, google = kinds
    kind = local if bucket is None else google if bucket.mode in gcs_available_options else s3
    if bucket is not None:
        kwargs |= {"bucket_name": bucket.bucket_name, "cloud_dir_prefix": bucket.cloud_dir_prefix}
    return kind(*args, local_model_result_folder_path=folder, **kwargs)
