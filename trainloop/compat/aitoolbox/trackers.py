"""AIToolbox's TensorBoard and Weights & Biases callbacks, with its tags and steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainloop._support.distribution import pip_install
from trainloop.compat.aitoolbox.callbacks import AbstractExperimentCallback, experiment_in
from trainloop.compat.aitoolbox.cloud import bucket_of
from trainloop.compat.aitoolbox.saving import ExperimentFolder
from trainloop.errors import ConfigurationError

__all__ = [
    "AlertConfig",
    "TensorboardFullTracking",
    "TensorboardReporterBaseCB",
    "TensorboardTrainBatchLoss",
    "TensorboardTrainHistoryMetric",
    "WandBTracking",
]


def _batch_losses(loop: Any) -> dict[str, float]:
    """Return ``train_loss/last_batch_<loss>`` and the epoch's mean so far, ``train_loss/accumulated_batch_<loss>``."""
    values = {}
    for kind, losses in (("last", loop.loss_batch_accum[-1:]), ("accumulated", loop.loss_batch_accum)):
        loss = loop.parse_loss(losses)
        for name, value in (loss if isinstance(loss, Mapping) else {"loss": loss}).items():
            values[f"train_loss/{kind}_batch_{name}"] = float(value)
    return values


def _last_results(loop: Any, metric_names: Iterable[str] | None, loss_prefix: str) -> dict[str, Any]:
    """Return the last result of each metric, ``<loss_prefix>/<name>`` or ``metrics/<name>``."""
    history = loop.train_history
    return {
        f"{loss_prefix if 'loss' in name else 'metrics'}/{name}": history[name][-1]
        for name in (history.keys() if metric_names is None else metric_names)
        if history[name]
    }


class TensorboardReporterBaseCB(AbstractExperimentCallback):
    """Write TensorBoard files, on rank 0, into an experiment's folder, or with ``is_project=False`` into ``log_dir``.

    Further arguments go to ``SummaryWriter``.
    """

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(
        self,
        callback_name: str,
        log_dir: str | None = None,
        is_project: bool = True,
        *experiment: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            callback_name,
            *experiment_in(experiment, kwargs),
            execution_order=97,
            device_idx_execution=0,
        )
        self.log_dir = "tensorboard" if log_dir is None else os.path.expanduser(log_dir)
        self.is_project = is_project
        self.tb_writer_kwargs = kwargs
        self.global_step = 0
        self._writer: Any = None
        self._folder: str | None = None

    def on_train_loop_registration(self) -> None:
        if self.is_project:
            self.try_infer_experiment_details(infer_cloud_details=True)
            bucket_of(self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix)
        else:
            self.tb_writer_kwargs.setdefault("filename_suffix", f"_{self.train_loop_obj.experiment_timestamp}")
        self.create_log_dir()

    def create_log_dir(self) -> str:
        """Create the folder; return its path."""
        names = [name for name in (self.project_name, self.experiment_name) if name is not None]
        path = self.log_dir
        if self.is_project:
            base = ExperimentFolder.create_base_folder(
                str(self.project_name),
                str(self.experiment_name),
                self.train_loop_obj.experiment_timestamp,
                str(self.local_model_result_folder_path),
            )
            path = os.path.join(base, path)
        self._folder = os.path.join(path, "_".join(names)) if len(names) == 2 else path
        os.makedirs(self._folder, exist_ok=True)
        return self._folder

    @property
    def tb_writer(self) -> Any:
        """The writer, created at first use: in the rank."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigurationError(
                    f"{type(self).__name__} needs TensorBoard: pip install tensorboard."
                ) from error
            self._writer = SummaryWriter(log_dir=self._folder, **self.tb_writer_kwargs)
        return self._writer

    def log_mid_train_loss(self) -> None:
        """Write the batch's losses."""
        for name, value in _batch_losses(self.train_loop_obj).items():
            self.tb_writer.add_scalar(name, value, self.global_step)

    def log_train_history_metrics(self, metric_names: Iterable[str] | None) -> None:
        """Write metrics' last results, at the epoch."""
        for name, value in _last_results(self.train_loop_obj, metric_names, "loss").items():
            self.tb_writer.add_scalar(name, value, self.train_loop_obj.epoch)
        self.tb_writer.flush()

    def on_train_end(self) -> None:
        self.tb_writer.close()
        self._writer = None
        self.upload_to_cloud()

    def on_exception(self, exception: BaseException) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def upload_to_cloud(self) -> None:
        """Upload the files, if the experiment is in a cloud."""
        bucket = bucket_of(self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix) if self.is_project else None
        if bucket is None or self._folder is None:
            return
        names = str(self.project_name), str(self.experiment_name), self.train_loop_obj.experiment_timestamp
        base = os.path.dirname(self._folder)
        for folder, _, files in os.walk(self._folder):
            for file in files:
                path = os.path.join(folder, file)
                in_cloud = os.path.join(os.path.basename(base), os.path.relpath(path, base))
                bucket.save_file(path, bucket.experiment_path(*names, in_cloud))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}


class _BatchLosses(TensorboardReporterBaseCB):
    batch_log_frequency = 1

    def on_batch_end(self) -> None:
        if self.global_step % self.batch_log_frequency == 0:
            self.log_mid_train_loss()
        self.global_step += 1


class TensorboardTrainBatchLoss(_BatchLosses):
    """Write batches' losses."""

    def __init__(self, batch_log_frequency: int = 1, *args: Any, **kwargs: Any) -> None:
        super().__init__("Tensorboard end of batch report of batch loss", *args, **kwargs)
        self.batch_log_frequency = batch_log_frequency

    def on_epoch_end(self) -> None:
        self.upload_to_cloud()


class TensorboardTrainHistoryMetric(TensorboardReporterBaseCB):
    """Write metrics of the history."""

    def __init__(self, metric_names: Sequence[str] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__("Tensorboard end of batch report of batch loss", *args, **kwargs)
        self.metric_names = metric_names

    def on_epoch_end(self) -> None:
        self.log_train_history_metrics(self.metric_names)
        self.upload_to_cloud()


class TensorboardFullTracking(_BatchLosses):
    """Write batches' losses and metrics of the history."""

    def __init__(
        self,
        metric_names: Sequence[str] | None = None,
        batch_log_frequency: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__("Tensorboard full tracking", *args, **kwargs)
        self.metric_names = metric_names
        self.batch_log_frequency = batch_log_frequency

    def on_epoch_end(self) -> None:
        self.log_train_history_metrics(self.metric_names)
        self.upload_to_cloud()


@dataclass
class AlertConfig:
    """A metric, by its logged name, and the value below (or above) which wandb alerts."""

    metric_name: str
    threshold_value: float
    objective: str = "maximize"
    wandb_alert_level: Any = None


class WandBTracking(AbstractExperimentCallback):
    """Send the history, and batches' losses, to Weights & Biases; further arguments go to ``wandb.init``."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(
        self,
        metric_names: Sequence[str] | None = None,
        batch_log_frequency: int | None = None,
        hyperparams: dict[str, Any] | None = None,
        tags: Sequence[str] | None = None,
        alerts: Sequence[AlertConfig] | None = None,
        wandb_pre_initialized: bool = False,
        source_dirs: Sequence[str] = (),
        log_dir: str | None = None,
        is_project: bool = True,
        project_name: str | None = None,
        experiment_name: str | None = None,
        local_model_result_folder_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            "WeightsAndBiases Experiment Tracking",
            project_name,
            experiment_name,
            local_model_result_folder_path,
            execution_order=97,
            device_idx_execution=0,
        )
        for alert in alerts or ():
            if not isinstance(alert, AlertConfig):
                raise TypeError(f"alerts has {alert!r}: each must be an AlertConfig.")
            if alert.objective not in ("maximize", "minimize"):
                raise ConfigurationError(f"{alert}: objective must be 'maximize' or 'minimize'.")
        self.metric_names = metric_names
        self.batch_log_frequency = batch_log_frequency
        self.hyperparams = hyperparams
        self.tags = tags
        self.alerts = alerts
        self.wandb_pre_initialized = wandb_pre_initialized
        self.source_dirs = source_dirs
        self.log_dir = None if log_dir is None else os.path.expanduser(log_dir)
        self.is_project = is_project
        self.wandb_params_kwargs = kwargs

    def on_train_loop_registration(self) -> None:
        _wandb()
        self.try_infer_experiment_details(infer_cloud_details=False)
        loop = self.train_loop_obj
        if self.hyperparams is None:
            self.hyperparams = getattr(loop, "hyperparams", None)
        if self.is_project and not self.source_dirs and hasattr(loop, "source_dirs"):
            self.source_dirs = [loop.hyperparams["experiment_file_path"], *loop.source_dirs]

    def on_train_begin(self) -> None:  # in the rank that sends, not where the callback is registered
        wandb = _wandb()
        if not self.wandb_pre_initialized:
            folder = self.log_dir
            if self.is_project:
                folder = ExperimentFolder.create_base_folder(
                    str(self.project_name),
                    str(self.experiment_name),
                    self.train_loop_obj.experiment_timestamp,
                    str(self.local_model_result_folder_path),
                )
            wandb.init(
                project=self.project_name,
                name=self.experiment_name,
                config=self.hyperparams,
                tags=self.tags,
                save_code=True,
                dir=folder,
                **self.wandb_params_kwargs,
            )
        for path in self.source_dirs:
            wandb.run.log_code(path, name=os.path.basename(path), include_fn=lambda _: True)

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        if self.batch_log_frequency is not None and loop.total_iteration_idx % self.batch_log_frequency == 0:
            _wandb().run.log(_batch_losses(loop), step=loop.total_iteration_idx)

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        values = {"epoch": loop.epoch, **_last_results(loop, self.metric_names, "loss_at_epoch_end")}
        _wandb().run.log(values, step=loop.total_iteration_idx, commit=True)
        for alert in self.alerts or ():
            _send_alert(alert, values[alert.metric_name])


def _send_alert(alert: AlertConfig, value: Any) -> None:
    low = alert.objective == "maximize"
    if (value < alert.threshold_value) if low else (value > alert.threshold_value):
        which, side = ("low", "below") if low else ("high", "above")
        _wandb().alert(
            title=f"{alert.metric_name} is too {which}",
            text=f"Metric {alert.metric_name} is currently at {value} which is {side} the specified threshold of "
            f"{alert.threshold_value}.",
            level=alert.wandb_alert_level,
        )


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigurationError(f"WandBTracking needs wandb: {pip_install('wandb')}.") from error
    return wandb
