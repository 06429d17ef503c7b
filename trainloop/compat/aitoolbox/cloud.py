"""AIToolbox's cloud storage, through fsspec: S3 by s3fs, Google Cloud Storage by gcsfs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from trainloop.callbacks.base import AbstractCallback
from trainloop.checkpoint.storage import split_file
from trainloop.compat.aitoolbox.bases import AbstractExperimentSaver, AbstractModelSaver, AbstractResultsSaver
from trainloop.compat.aitoolbox.callbacks import AbstractExperimentCallback, experiment_in
from trainloop.compat.aitoolbox.saving import (
    DEFAULT_FOLDER,
    ExperimentFolder,
    FullPyTorchExperimentLocalSaver,
    LocalResultsSaver,
    PyTorchLocalModelLoader,
    PyTorchLocalModelSaver,
    model_file_name,
    new_timestamp,
)
from trainloop.errors import ConfigurationError

__all__ = [
    "BaseModelSaver",
    "BaseResultsGoogleStorageSaver",
    "BaseResultsSaver",
    "EmailNotification",
    "FullPyTorchExperimentGoogleStorageSaver",
    "FullPyTorchExperimentS3Saver",
    "GoogleStorageResultsSaver",
    "LogUpload",
    "PyTorchGoogleStorageModelLoader",
    "PyTorchGoogleStorageModelSaver",
    "PyTorchS3ModelLoader",
    "PyTorchS3ModelSaver",
    "S3ResultsSaver",
    "bucket_of",
    "gcs_available_options",
    "s3_available_options",
]

s3_available_options = ["s3", "aws_s3", "aws"]
gcs_available_options = ["gcs", "google_storage", "google storage"]

# fsspec's names of the stores, by AIToolbox's names.
PROTOCOLS = {**dict.fromkeys(s3_available_options, "s3"), **dict.fromkeys(gcs_available_options, "gcs")}


class Bucket:
    """Files under a prefix in a bucket."""

    def __init__(self, cloud_save_mode: str, bucket_name: str | None, cloud_dir_prefix: str | None) -> None:
        self.bucket_name = bucket_name or "model-result"
        self.cloud_dir_prefix = cloud_dir_prefix or ""
        self.protocol = PROTOCOLS[cloud_save_mode]

    def url(self, cloud_file_path: str) -> str:
        """Return fsspec's URL of a path in the bucket."""
        return f"{self.protocol}://{self.bucket_name}/{cloud_file_path.lstrip('/')}"

    def check(self) -> None:
        """Raise an error if the store's file system is not installed."""
        split_file(self.url("x/y"))

    def save_file(self, local_file_path: str, cloud_file_path: str) -> None:
        """Upload a file."""
        folder, name = split_file(self.url(cloud_file_path))
        with open(os.path.expanduser(local_file_path), "rb") as source:
            folder.write(name, lambda file: shutil.copyfileobj(source, file))

    def load_file(self, cloud_file_path: str, local_file_path: str) -> None:
        """Download a file unless it exists locally."""
        if os.path.isfile(local_file_path):
            print(f"{local_file_path} already exists, and is not downloaded")
            return
        folder, name = split_file(self.url(cloud_file_path))
        here, own_name = split_file(local_file_path)
        with folder.open(name) as source:
            here.write(own_name, lambda file: shutil.copyfileobj(source, file))

    def experiment_path(self, project: str, experiment: str, timestamp: str, *parts: str) -> str:
        """Return a path of an experiment in the bucket."""
        return os.path.join(self.cloud_dir_prefix, project, f"{experiment}_{timestamp}", *parts)

    def save_among_results(self, loop: Any, callback: Any, files: Any) -> None:
        """Upload pairs ``[path among the results, local path]`` of a callback's experiment."""
        names = callback.project_name, callback.experiment_name, loop.experiment_timestamp
        for name, path in files:
            self.save_file(path, self.experiment_path(*names, "results", name))


def bucket_of(cloud_save_mode: str | None, bucket_name: str | None, cloud_dir_prefix: str | None) -> Bucket | None:
    """Return the bucket to save to; ``None`` for the local disk, which any other text selects.

    Raises
    ------
    ConfigurationError
        If the store's file system (s3fs, gcsfs) is not installed.
    """
    if cloud_save_mode not in PROTOCOLS:
        return None
    bucket = Bucket(cloud_save_mode, bucket_name, cloud_dir_prefix)
    try:
        bucket.check()
    except ConfigurationError as error:
        raise ConfigurationError(
            f"cloud_save_mode={cloud_save_mode!r}: {error} To use only the local disk, pass cloud_save_mode=None."
        ) from error
    return bucket


# -- AIToolbox's classes -----------------------------------------------------------------------------------------------


class _Saver(Bucket):
    mode = "s3"

    def __init__(self, bucket_name: str = "model-result", cloud_dir_prefix: str = "") -> None:
        super().__init__(self.mode, bucket_name, cloud_dir_prefix)


class BaseResultsSaver(_Saver):
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
        where, local = (project_name, experiment_name, stamp), self.local_results_saver
        save = local.save_experiment_results_separate_files if separate_files else local.save_experiment_results
        saved = save(result_package, training_history, *where, save_true_pred_labels=save_true_pred_labels)
        folder = self.create_experiment_cloud_storage_folder_structure(*where)
        for name, path in saved:
            self.save_file(path, os.path.join(folder, name))
        return os.path.join(self.bucket_name, folder, saved[0][0]), stamp


class GoogleStorageResultsSaver(S3ResultsSaver):
    """Like the base class, for Google Cloud Storage."""

    mode = "gcs"


class BaseModelSaver(_Saver):
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
        epoch: int | None = None,
        iteration_idx: int | None = None,
        protect_existing_folder: bool = True,
    ) -> tuple[Any, ...]:
        """Return ``(path with the bucket, time stamp, local path)``."""
        stamp = experiment_timestamp or new_timestamp()
        where = project_name, experiment_name, stamp
        name, path = self.pytorch_local_saver.save_model(model, *where, epoch, iteration_idx)
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
        self.bucket = Bucket(self.mode, bucket_name, cloud_dir_prefix)

    def load_model(
        self,
        project_name: str,
        experiment_name: str,
        experiment_timestamp: str,
        model_save_dir: str = "checkpoint_model",
        epoch_num: int | None = None,
        map_location: Any = None,
    ) -> dict[str, Any]:
        where = project_name, experiment_name, experiment_timestamp
        base = ExperimentFolder.create_base_folder(*where, self.local_model_result_folder_path)
        name = model_file_name(experiment_name, experiment_timestamp, epoch_num)
        os.makedirs(os.path.join(base, model_save_dir), exist_ok=True)
        self.bucket.load_file(
            self.bucket.experiment_path(*where, model_save_dir, name), os.path.join(base, model_save_dir, name)
        )
        return super().load_model(*where, model_save_dir, epoch_num, map_location)


class PyTorchGoogleStorageModelLoader(PyTorchS3ModelLoader):
    """Like the base class, for Google Cloud Storage."""

    mode = "gcs"


class FullPyTorchExperimentS3Saver(AbstractExperimentSaver):
    """Write a model and its results to the local disk, and upload them."""

    mode = "s3"

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
        local_model_result_folder_path: str = DEFAULT_FOLDER,
    ) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name
        where = bucket_name, cloud_dir_prefix, local_model_result_folder_path
        google = self.mode == "gcs"
        self.model_saver = (PyTorchGoogleStorageModelSaver if google else PyTorchS3ModelSaver)(*where)
        self.results_saver = (GoogleStorageResultsSaver if google else S3ResultsSaver)(*where)

    def save_experiment(
        self,
        model: Mapping[str, Any],
        result_package: Any,
        training_history: Any,
        experiment_timestamp: str | None = None,
        save_true_pred_labels: bool = False,
        separate_files: bool = False,
        protect_existing_folder: bool = True,
    ) -> tuple[str, str]:
        """Return ``(path of the model, path of the results)`` in the cloud."""
        where = self.project_name, self.experiment_name, experiment_timestamp or new_timestamp()
        model_path, _, _ = self.model_saver.save_model(model, *where)
        results_path, _ = self.results_saver.save_experiment_results(
            result_package, training_history, *where, save_true_pred_labels, separate_files
        )
        return model_path, results_path


class FullPyTorchExperimentGoogleStorageSaver(FullPyTorchExperimentS3Saver):
    """Like the base class, for Google Cloud Storage."""

    mode = "gcs"


def experiment_saver(
    cloud_save_mode: str | None, project: str, experiment: str, bucket: str | None, prefix: str | None, folder: str
) -> Any:
    """Return the saver for a model and its results."""
    if bucket_of(cloud_save_mode, bucket, prefix) is None:
        return FullPyTorchExperimentLocalSaver(project, experiment, folder)
    google = cloud_save_mode in gcs_available_options
    saver = FullPyTorchExperimentGoogleStorageSaver if google else FullPyTorchExperimentS3Saver
    return saver(project, experiment, bucket or "model-result", prefix or "", folder)


# -- callbacks ---------------------------------------------------------------------------------------------------------


class LogUpload(AbstractExperimentCallback):
    """Upload a log file after each epoch."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(
        self,
        log_file_path: str = "~/project/training.log",
        fail_if_cloud_missing: bool = True,
        *experiment: Any,
        **named: Any,
    ) -> None:
        super().__init__(
            "Upload Tmux logging file to cloud",
            *experiment_in(experiment, named),
            execution_order=1500,
            device_idx_execution=0,
            **named,
        )
        self.log_file_path = os.path.expanduser(log_file_path)
        self.fail_if_cloud_missing = fail_if_cloud_missing
        self.bucket: Bucket | None = None

    def on_train_loop_registration(self) -> None:
        self.try_infer_experiment_details(infer_cloud_details=True)
        self.bucket = bucket_of(self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix)
        if self.bucket is None:
            if self.fail_if_cloud_missing:
                raise ConfigurationError(
                    f"LogUpload: cloud_save_mode={self.cloud_save_mode!r} is not a cloud: must be 's3' or 'gcs'."
                )
            print("Cloud saving not supported. Produced logs can potentially get lost.")

    def on_epoch_end(self) -> None:
        self.upload_log_file()

    def on_train_end(self) -> None:
        self.upload_log_file()

    def upload_log_file(self) -> None:
        """Upload the file in its current state."""
        if self.bucket is not None:
            names = str(self.project_name), str(self.experiment_name), self.train_loop_obj.experiment_timestamp
            name = os.path.basename(self.log_file_path)
            self.bucket.save_file(self.log_file_path, self.bucket.experiment_path(*names, name))


class EmailNotification(AbstractCallback):
    """Mail the last results after each epoch and at the end of training, by Amazon's SES."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(
        self,
        sender_name: str,
        sender_email: str,
        recipient_email: str,
        project_name: str | None = None,
        experiment_name: str | None = None,
        aws_region: str = "eu-west-1",
    ) -> None:
        super().__init__("Send email to notify about the state of training", 98, device_idx_execution=0)
        self.sender_name = sender_name
        self.sender_email = sender_email
        self.recipient_email = recipient_email
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.aws_region = aws_region

    def on_train_loop_registration(self) -> None:
        try:
            import boto3  # noqa: F401  # a missing package raises an error before training
        except ImportError as error:
            raise ConfigurationError("EmailNotification needs boto3: pip install boto3.") from error
        for name in ("project_name", "experiment_name"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.train_loop_obj, name))

    def on_epoch_end(self) -> None:
        epoch = self.train_loop_obj.epoch
        self._send(f"End of epoch {epoch} report", f"<h2>End of epoch {epoch}</h2>{self.get_metric_list_html()}")

    def on_train_end(self) -> None:
        heading = f"<h2>End of training at epoch {self.train_loop_obj.epoch}</h2>"
        hyperparams = f"<h3>Used hyper parameters:</h3>{self.get_hyperparams_html()}"
        self._send("End of training", f"{heading}{self.get_metric_list_html()}{hyperparams}")

    def get_metric_list_html(self) -> str:
        """Return the last result of each metric as HTML."""
        history = self.train_loop_obj.train_history
        return _html_list({name: results[-1] for name, results in history.items() if results})

    def get_hyperparams_html(self) -> str:
        """Return a tracking loop's hyperparameters as HTML."""
        hyperparams = getattr(self.train_loop_obj, "hyperparams", None)
        return "Not given" if hyperparams is None else _html_list(hyperparams)

    def _send(self, subject: str, body: str) -> None:
        import boto3

        boto3.client("ses", region_name=self.aws_region).send_email(
            Source=f"{self.sender_name} <{self.sender_email}>",
            Destination={"ToAddresses": [self.recipient_email]},
            Message={
                "Subject": {"Data": f"{subject}: {self.project_name}: {self.experiment_name}"},
                "Body": {"Html": {"Data": body}},
            },
        )


def _html_list(items: Mapping[str, Any]) -> str:
    return "<ul>" + "\n".join(f"<li><p>{name}: {value}</p></li>" for name, value in items.items()) + "</ul>"
