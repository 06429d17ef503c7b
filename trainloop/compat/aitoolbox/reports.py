"""AIToolbox's callbacks that plot and write the history, and plot gradients, into an experiment's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from trainloop.compat.aitoolbox.callbacks import AbstractExperimentCallback, experiment_in
from trainloop.compat.aitoolbox.cloud import Bucket, bucket_of
from trainloop.compat.aitoolbox.messages import MessageHandling
from trainloop.compat.aitoolbox.plots import GradientPlotter, TrainingHistoryPlotter, TrainingHistoryWriter
from trainloop.compat.aitoolbox.saving import BaseLocalResultsSaver
from trainloop.errors import ConfigurationError

__all__ = ["GradDistributionPlot", "ModelTrainHistoryBaseCB", "ModelTrainHistoryFileWriter", "ModelTrainHistoryPlot"]


class _Reports(AbstractExperimentCallback):
    """Writes files among an experiment's results, on the local disk and optionally in a cloud; only on rank 0."""

    train_loop_obj: Any  # this package's loop, with more attributes
    message_service: Any  # AIToolbox's, in which a message has a lifetime

    formats: tuple[str, ...] = ()
    file_format = ""

    def _check_format(self) -> None:
        if self.formats and self.file_format not in self.formats:
            raise ConfigurationError(
                f"{type(self).__name__}: file_format={self.file_format!r}: must be one of {', '.join(self.formats)}."
            )

    def on_train_loop_registration(self) -> None:
        self.try_infer_experiment_details(infer_cloud_details=True)
        self.prepare_results_saver()

    def prepare_results_saver(self) -> None:
        """Check the destination of files."""
        bucket_of(self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix)

    @property
    def cloud_results_saver(self) -> Bucket | None:
        """The bucket; ``None`` for the local disk only."""
        return bucket_of(self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix)

    def _results_folder(self) -> str:
        return BaseLocalResultsSaver.create_experiment_local_results_folder(
            str(self.project_name),
            str(self.experiment_name),
            self.train_loop_obj.experiment_timestamp,
            str(self.local_model_result_folder_path),
        )

    def _upload(self, files: Iterable[Iterable[str]]) -> None:
        bucket = self.cloud_results_saver
        if bucket is not None:
            bucket.save_among_results(self.train_loop_obj, self, files)


class ModelTrainHistoryBaseCB(_Reports):
    """Report the history, after epochs and at the end of training."""

    train_loop_obj: Any  # this package's loop, with more attributes

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
        super().__init__(
            callback_name,
            *experiment_in(experiment, named),
            execution_order=execution_order,
            device_idx_execution=0,
            **named,
        )
        if epoch_end is False and train_end is False:
            raise ConfigurationError("epoch_end and train_end are both False: at least one must be True.")
        self.epoch_end = epoch_end
        self.train_end = train_end
        self.file_format = file_format
        self._check_format()

    def on_epoch_end(self) -> None:
        if self.epoch_end:
            self._report("")

    def on_train_end(self) -> None:
        if self.train_end:
            self._report("train_end_")

    def _report(self, prefix: str) -> None:
        files = self._write(prefix)
        # Other callbacks, for example one that mails them, read the paths until the end of the epoch.
        self.message_service.write_message(
            f"{type(self).__name__}_results_file_local_paths",
            [path for _, path in files],
            msg_handling_settings=MessageHandling.UNTIL_END_OF_EPOCH,
        )
        self._upload(files)

    def _write(self, prefix: str) -> list[Any]:
        """Write files; return ``[path among the results, local path]`` of each."""
        raise NotImplementedError


class ModelTrainHistoryPlot(ModelTrainHistoryBaseCB):
    """Plot each metric, in ``results/plots_epoch_<n>``."""

    train_loop_obj: Any  # this package's loop, with more attributes

    formats = ("png", "pdf")

    def __init__(
        self, epoch_end: bool = True, train_end: bool = False, file_format: str = "png", *args: Any, **kwargs: Any
    ) -> None:
        super().__init__("Model Train history Plot report", 97, epoch_end, train_end, file_format, *args, **kwargs)

    def _write(self, prefix: str) -> list[Any]:
        loop = self.train_loop_obj
        name = f"{prefix}plots_epoch_{loop.epoch}"
        plotter = TrainingHistoryPlotter(self._results_folder())
        return plotter.generate_report(loop.train_history, name, self.file_format)


class ModelTrainHistoryFileWriter(ModelTrainHistoryBaseCB):
    """Append the last results of all metrics to ``results/results.<format>``."""

    train_loop_obj: Any  # this package's loop, with more attributes

    formats = ("txt", "tsv", "csv")

    def __init__(
        self, epoch_end: bool = True, train_end: bool = False, file_format: str = "txt", *args: Any, **kwargs: Any
    ) -> None:
        name = "Model Train performance history file writer"
        super().__init__(name, 97, epoch_end, train_end, file_format, *args, **kwargs)
        self.result_writer = TrainingHistoryWriter(None)

    def _write(self, prefix: str) -> list[Any]:
        loop = self.train_loop_obj
        self.result_writer.experiment_results_local_path = self._results_folder()
        file_name = f"{prefix}results.{self.file_format}"
        return [
            self.result_writer.generate_report(loop.train_history, loop.epoch, file_name, file_format=self.file_format)
        ]


class GradDistributionPlot(_Reports):
    """Plot a histogram of each layer's gradients after each epoch, in ``results/grad_distribution``.

    The gradients are those of the epoch's last step, which are kept for this.
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
        super().__init__(
            "Gradient distribution plotter",
            *experiment_in(experiment, named),
            device_idx_execution=0,
            **named,
        )
        self.model_layers_extract_def = model_layers_extract_def
        self.grad_plots_dir_name = grad_plots_dir_name
        self.file_format = file_format
        self._check_format()
        self._gradients: list[Any] = []

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        gradients = [layer.weight.grad for layer in self.model_layers_extract_def(self.train_loop_obj.model)]
        # References only: zero_grad removes a gradient from its parameter, but keeps its values.
        self._gradients = [None if gradient is None else gradient.detach() for gradient in gradients]

    def on_epoch_end(self) -> None:
        self.gradient_plot()

    def gradient_plot(self) -> None:
        """Plot and save."""
        folder = os.path.join(self._results_folder(), self.grad_plots_dir_name)
        os.makedirs(folder, exist_ok=True)
        gradients = [None if g is None else g.reshape(-1).float().cpu().numpy() for g in self._gradients]
        name = f"epoch_{self.train_loop_obj.epoch}"
        files = GradientPlotter(folder).generate_report(gradients, name, self.file_format)
        self._upload((os.path.join(self.grad_plots_dir_name, file), path) for file, path in files)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gradients": []}
