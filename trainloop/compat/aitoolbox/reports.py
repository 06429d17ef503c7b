"""AIToolbox's callbacks that report: plots, tables, TensorBoard, Weights & Biases, email, and uploads of a log file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainloop._support.distribution import import_extra
from trainloop._support.user_line import warn
from trainloop.callbacks.trackers import AlertConfig
from trainloop.compat.aitoolbox.callbacks import AbstractExperimentCallback, CompatCallback, experiment_arguments
from trainloop.compat.aitoolbox.components import MessageHandling
from trainloop.compat.aitoolbox.history import GradientPlotter, TrainingHistoryPlotter, TrainingHistoryWriter
from trainloop.errors import ConfigurationError

# -- plots and tables -------------------------------------------------------------------------------------------------


class _Reports(AbstractExperimentCallback):
    """Base class of callbacks that write files into an experiment's results, and optionally into a cloud, on rank 0."""

    formats: tuple[str, ...] = ()

    def __init__(self, callback_name: str, file_format: str, *experiment: Any, **named: Any) -> None:
        super().__init__(callback_name, *experiment, **(named | {"device_idx_execution": 0}))
        self.file_format = file_format
        if self.formats and file_format not in self.formats:
            raise ConfigurationError(
                f"{type(self).__name__}: file_format={file_format!r}: must be one of {', '.join(self.formats)}."
            )

    def on_train_loop_registration(self) -> None:
        self.try_infer_experiment_details(infer_cloud_details=True)
        self.prepare_results_saver()

    def prepare_results_saver(self) -> None:
        """Check the destination of the files."""
        _ = self.cloud_bucket

    @property
    def cloud_results_saver(self) -> Any:
        """Bucket to upload to; ``None`` for the local disk only."""
        return self.cloud_bucket


class ModelTrainHistoryBaseCB(_Reports):
    """Base class of callbacks that report the history after epochs and at the end of training."""

    def __init__(
        self,
        callback_name: str,
        execution_order: int = 0,
        epoch_end: bool = True,
        train_end: bool = False,
        file_format: str = "",
        *experiment: Any,
        **named: Any,
    ) -> None:
        super().__init__(callback_name, file_format, *experiment, execution_order=execution_order, **named)
        if epoch_end is False and train_end is False:
            raise ConfigurationError("epoch_end and train_end are both False. Set at least one to True.")
        self.epoch_end = epoch_end
        self.train_end = train_end

    def on_epoch_end(self) -> None:
        if self.epoch_end:
            self._report("")

    def on_train_end(self) -> None:
        if self.train_end:
            self._report("train_end_")

    def _report(self, prefix: str) -> None:
        paths = [path for _, path in self._write(prefix)]
        # Other callbacks can read the paths until the end of the epoch, for example to send the files by email.
        self.message_service.write_message(
            f"{type(self).__name__}_results_file_local_paths", paths, MessageHandling.UNTIL_END_OF_EPOCH
        )
        self.upload(paths)

    def _write(self, prefix: str) -> list[Any]:
        """Write files, and return ``[path in the results, local path]`` for each file."""
        raise NotImplementedError


class ModelTrainHistoryPlot(ModelTrainHistoryBaseCB):
    """Plot each metric into ``results/plots_epoch_<n>``."""

    formats = ("png", "pdf")

    def __init__(
        self, epoch_end: bool = True, train_end: bool = False, file_format: str = "png", *args: Any, **kwargs: Any
    ) -> None:
        super().__init__("Model Train history Plot report", 97, epoch_end, train_end, file_format, *args, **kwargs)

    def _write(self, prefix: str) -> list[Any]:
        loop = self.train_loop_obj
        name = f"{prefix}plots_epoch_{loop.epoch}"
        plotter = TrainingHistoryPlotter(self.results_folder())
        return plotter.generate_report(loop.train_history, name, self.file_format)


class ModelTrainHistoryFileWriter(ModelTrainHistoryBaseCB):
    """Append the last results of all metrics to ``results/results.<format>``."""

    formats = ("txt", "tsv", "csv")

    def __init__(
        self, epoch_end: bool = True, train_end: bool = False, file_format: str = "txt", *args: Any, **kwargs: Any
    ) -> None:
        name = "Model Train performance history file writer"
        super().__init__(name, 97, epoch_end, train_end, file_format, *args, **kwargs)
        self.result_writer = TrainingHistoryWriter(None)

    def _write(self, prefix: str) -> list[Any]:
        loop = self.train_loop_obj
        self.result_writer.experiment_results_local_path = self.results_folder()
        file_name = f"{prefix}results.{self.file_format}"
        return [
            self.result_writer.generate_report(loop.train_history, loop.epoch, file_name, file_format=self.file_format)
        ]


class GradDistributionPlot(_Reports):
    """After each epoch, plot a histogram of each layer's gradients into ``results/grad_distribution``.

    The gradients of the epoch's last step are plotted, and stay in memory until then.
    """

    formats = ("png", "pdf")

    def __init__(
        self,
        model_layers_extract_def: Callable[[Any], Iterable[Any]],
        grad_plots_dir_name: str = "grad_distribution",
        file_format: str = "png",
        *experiment: Any,
        **named: Any,
    ) -> None:
        super().__init__("Gradient distribution plotter", file_format, *experiment, **named)
        self.model_layers_extract_def = model_layers_extract_def
        self.grad_plots_dir_name = grad_plots_dir_name
        self._gradients: list[Any] = []

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        gradients = [layer.weight.grad for layer in self.model_layers_extract_def(self.train_loop_obj.model)]
        # References are enough: zero_grad removes a gradient from its parameter, but does not change its values.
        self._gradients = [None if gradient is None else gradient.detach() for gradient in gradients]

    def on_epoch_end(self) -> None:
        self.gradient_plot()

    def gradient_plot(self) -> None:
        """Plot the gradients, and save the plots."""
        folder = os.path.join(self.results_folder(), self.grad_plots_dir_name)
        os.makedirs(folder, exist_ok=True)
        gradients = [None if g is None else g.reshape(-1).float().cpu().numpy() for g in self._gradients]
        name = f"epoch_{self.train_loop_obj.epoch}"
        files = GradientPlotter(folder).generate_report(gradients, name, self.file_format)
        self.upload(path for _, path in files)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gradients": []}


# -- TensorBoard and Weights & Biases ----------------------------------------------------------------------------------


@contextmanager
def _beside_training(what: str) -> Iterator[None]:
    """Let training continue if a service fails."""
    try:
        yield
    except Exception as error:
        warn(f"{what} failed ({type(error).__name__}: {error}). Training continues.", RuntimeWarning)


_wandb = partial(import_extra, "wandb", "WandBTracking", "wandb")


def _batch_losses(loop: Any) -> dict[str, float]:
    """Return the last loss and the epoch's mean so far, as ``train_loss/{last,accumulated}_batch_<loss>``."""
    values = {}
    for kind, losses in (("last", loop.loss_batch_accum[-1:]), ("accumulated", loop.loss_batch_accum)):
        loss = loop.parse_loss(losses)
        for name, value in (loss if isinstance(loss, Mapping) else {"loss": loss}).items():
            values[f"train_loss/{kind}_batch_{name}"] = float(value)
    return values


def _last_results(loop: Any, metric_names: Iterable[str] | None, loss_prefix: str) -> dict[str, Any]:
    """Return the last result of each metric, named ``<loss_prefix>/<name>`` or ``metrics/<name>``."""
    history = loop.train_history
    return {
        f"{loss_prefix if 'loss' in name else 'metrics'}/{name}": history[name][-1]
        for name in (history.keys() if metric_names is None else metric_names)
        if history[name]
    }


class TensorboardReporterBaseCB(AbstractExperimentCallback):
    """Write TensorBoard files on rank 0, into an experiment's folder, or with ``is_project=False`` into ``log_dir``.

    Further arguments are passed to ``SummaryWriter``.
    """

    def __init__(
        self,
        callback_name: str,
        log_dir: str | None = None,
        is_project: bool = True,
        *experiment: Any,
        **kwargs: Any,
    ) -> None:
        named = experiment_arguments(kwargs, execution_order=97, device_idx_execution=0)
        super().__init__(callback_name, *experiment, **named)
        self.log_dir = "tensorboard" if log_dir is None else os.path.expanduser(log_dir)
        self.is_project = is_project
        self.tb_writer_kwargs = kwargs
        self.global_step = 0
        self._writer: Any = None
        self._folder: str | None = None

    def on_train_loop_registration(self) -> None:
        if self.is_project:
            self.try_infer_experiment_details(infer_cloud_details=True)
            _ = self.cloud_bucket  # a missing file system raises an error before training
        else:
            self.tb_writer_kwargs.setdefault("filename_suffix", f"_{self.train_loop_obj.experiment_timestamp}")
        self.create_log_dir()

    def create_log_dir(self) -> str:
        """Create the folder of the files, and return its path."""
        names = [name for name in (self.project_name, self.experiment_name) if name is not None]
        path = os.path.join(self.experiment_folder(), self.log_dir) if self.is_project else self.log_dir
        self._folder = os.path.join(path, "_".join(names)) if len(names) == 2 else path
        os.makedirs(self._folder, exist_ok=True)
        return self._folder

    @property
    def tb_writer(self) -> Any:
        """TensorBoard's writer, created in the rank at first use."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=self._folder, **self.tb_writer_kwargs)
        return self._writer

    def log_mid_train_loss(self) -> None:
        """Write the losses of the current batch."""
        for name, value in _batch_losses(self.train_loop_obj).items():
            self.tb_writer.add_scalar(name, value, self.global_step)

    def log_train_history_metrics(self, metric_names: Iterable[str] | None) -> None:
        """Write the last results of metrics, with the epoch as the step."""
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
        """Upload the files if the experiment is saved to a cloud."""
        if self.is_project and self._folder is not None:
            self.upload(os.path.join(folder, file) for folder, _, files in os.walk(self._folder) for file in files)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}


class TensorboardTrainBatchLoss(TensorboardReporterBaseCB):
    """Write the losses of batches to TensorBoard."""

    def __init__(self, batch_log_frequency: int = 1, *args: Any, **kwargs: Any) -> None:
        super().__init__("Tensorboard end of batch report of batch loss", *args, **kwargs)
        self.batch_log_frequency = batch_log_frequency

    def on_batch_end(self) -> None:
        if self.global_step % self.batch_log_frequency == 0:
            self.log_mid_train_loss()
        self.global_step += 1

    def on_epoch_end(self) -> None:
        self.upload_to_cloud()


class TensorboardTrainHistoryMetric(TensorboardReporterBaseCB):
    """Write metrics of the history to TensorBoard."""

    def __init__(self, metric_names: Sequence[str] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__("Tensorboard end of batch report of batch loss", *args, **kwargs)
        self.metric_names = metric_names

    def on_epoch_end(self) -> None:
        self.log_train_history_metrics(self.metric_names)
        self.upload_to_cloud()


class TensorboardFullTracking(TensorboardTrainBatchLoss):
    """Write the losses of batches and metrics of the history to TensorBoard."""

    def __init__(
        self, metric_names: Sequence[str] | None = None, batch_log_frequency: int = 1, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(batch_log_frequency, *args, **kwargs)
        self.callback_name = "Tensorboard full tracking"
        self.metric_names = metric_names

    def on_epoch_end(self) -> None:
        self.log_train_history_metrics(self.metric_names)
        self.upload_to_cloud()


class WandBTracking(AbstractExperimentCallback):
    """Send the history and the losses of batches to Weights & Biases.

    Further arguments are passed to ``wandb.init``.
    """

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
        *experiment: Any,
        **kwargs: Any,
    ) -> None:
        named = experiment_arguments(kwargs, execution_order=97, device_idx_execution=0)
        super().__init__("WeightsAndBiases Experiment Tracking", *experiment, **named)
        for alert in alerts or ():
            if not isinstance(alert, AlertConfig):
                raise TypeError(f"alerts contains {alert!r}: each alert must be an AlertConfig.")
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

    def on_train_begin(self) -> None:  # in the rank that sends the values, not where the callback is registered
        wandb = _wandb()
        if not self.wandb_pre_initialized:
            folder = self.experiment_folder() if self.is_project else self.log_dir
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
            with _beside_training("Weights & Biases"):
                _wandb().run.log(_batch_losses(loop), step=loop.total_iteration_idx)

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        values = {"epoch": loop.epoch, **_last_results(loop, self.metric_names, "loss_at_epoch_end")}
        messages = [(alert, alert.message(values[alert.metric_name])) for alert in self.alerts or ()]
        with _beside_training("Weights & Biases"):
            _wandb().run.log(values, step=loop.total_iteration_idx, commit=True)
            for alert, message in messages:
                if message is not None:
                    _wandb().alert(*message, level=alert.wandb_alert_level)


# -- upload of a log file, and email ----------------------------------------------------------------------------------


class LogUpload(AbstractExperimentCallback):
    """Upload a log file after each epoch."""

    def __init__(
        self,
        log_file_path: str = "~/project/training.log",
        fail_if_cloud_missing: bool = True,
        *experiment: Any,
        **named: Any,
    ) -> None:
        named |= {"execution_order": 1500, "device_idx_execution": 0}
        super().__init__("Upload Tmux logging file to cloud", *experiment, **named)
        self.log_file_path = os.path.expanduser(log_file_path)
        self.fail_if_cloud_missing = fail_if_cloud_missing

    def on_train_loop_registration(self) -> None:
        self.try_infer_experiment_details(infer_cloud_details=True)
        if self.cloud_bucket is None:
            if self.fail_if_cloud_missing:
                raise ConfigurationError(
                    f"LogUpload: cloud_save_mode={self.cloud_save_mode!r} is not a cloud. Use 's3' or 'gcs'."
                )
            print("Cloud saving not supported. Produced logs can potentially get lost.")

    def on_epoch_end(self) -> None:
        self.upload_log_file()

    def on_train_end(self) -> None:
        self.upload_log_file()

    def upload_log_file(self) -> None:
        """Upload the log file in its current state."""
        bucket = self.cloud_bucket
        if bucket is not None:
            name = os.path.basename(self.log_file_path)
            with _beside_training("the upload of the log file"):
                bucket.save_file(self.log_file_path, bucket.experiment_path(*self.experiment_names, name))


@dataclass(eq=False, repr=False)
class EmailNotification(CompatCallback):
    """Email the last results through Amazon SES after each epoch and at the end of training."""

    sender_name: str
    sender_email: str
    recipient_email: str
    project_name: str | None = None
    experiment_name: str | None = None
    aws_region: str = "eu-west-1"

    def __post_init__(self) -> None:
        super().__init__("Send email to notify about the state of training", 98, device_idx_execution=0)

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

        with _beside_training("the email"):
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
