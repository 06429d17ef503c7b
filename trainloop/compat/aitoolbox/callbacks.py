"""AIToolbox's callbacks for stopping, functions, gradients and metrics, and the base of its experiment callbacks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trainloop.callbacks import basic as core
from trainloop.callbacks import performance_eval as core_performance
from trainloop.callbacks.base import AbstractCallback
from trainloop.compat.aitoolbox.results import AbstractResultPackage, TorchMetricsPackage, prepare_package
from trainloop.compat.aitoolbox.saving import BaseLocalResultsSaver, Bucket, ExperimentFolder, bucket_of

_EXPERIMENT = ("project_name", "experiment_name", "local_model_result_folder_path")
_CLOUD = ("cloud_save_mode", "bucket_name", "cloud_dir_prefix")


def experiment_arguments(arguments: dict[str, Any], **fixed: Any) -> dict[str, Any]:
    """Remove arguments of :class:`AbstractExperimentCallback` from ``arguments``, and return them with ``fixed``."""
    return {name: arguments.pop(name) for name in (*_EXPERIMENT, *_CLOUD) if name in arguments} | fixed


class CompatCallback(AbstractCallback):
    """Base class of AIToolbox's callbacks. Their loop and message board have more attributes than trainloop's own."""

    train_loop_obj: Any
    message_service: Any


@dataclass(eq=False, repr=False)
class AbstractExperimentCallback(CompatCallback):
    """Base class of callbacks that write into an experiment's folder, and optionally into a cloud.

    Missing values are taken from a tracking loop by :meth:`try_infer_experiment_details`. Subclasses have these
    arguments, from ``project_name`` on, after their own arguments. All can be passed in this order or by name.
    """

    callback_name: str
    project_name: str | None = None
    experiment_name: str | None = None
    local_model_result_folder_path: str | None = None
    cloud_save_mode: str | None = None
    bucket_name: str | None = None
    cloud_dir_prefix: str | None = None
    execution_order: int = 0
    device_idx_execution: int | None = None

    def __post_init__(self) -> None:
        if self.local_model_result_folder_path is not None:
            self.local_model_result_folder_path = os.path.expanduser(self.local_model_result_folder_path)

    def try_infer_experiment_details(self, infer_cloud_details: bool = False) -> None:
        """Take missing values from the loop; take the cloud's details only if none of these was given.

        Raises
        ------
        AttributeError
            If a value is missing in the loop, too.
        """
        missing = [name for name in _EXPERIMENT if getattr(self, name) is None]
        if infer_cloud_details and all(getattr(self, name) is None for name in _CLOUD):
            missing += _CLOUD
        for name in missing:
            if not hasattr(self.train_loop_obj, name):
                raise AttributeError(
                    f"{type(self).__name__} has no {name}, and neither does the {type(self.train_loop_obj).__name__}. "
                    f"Pass {name} to the callback, or use a tracking loop, such as TrainLoopCheckpoint."
                )
            setattr(self, name, getattr(self.train_loop_obj, name))

    def experiment_folder(self) -> str:
        """Return the experiment's folder; create the folder if it is missing."""
        return ExperimentFolder.create_base_folder(*self.experiment_names, str(self.local_model_result_folder_path))

    def results_folder(self) -> str:
        """Return the folder ``results`` in the experiment's folder. Create it if it is missing."""
        where = *self.experiment_names, str(self.local_model_result_folder_path)
        return BaseLocalResultsSaver.create_experiment_local_results_folder(*where)

    @property
    def experiment_names(self) -> tuple[str, str, str]:
        """Names of the project and the experiment, and the experiment's time stamp."""
        return str(self.project_name), str(self.experiment_name), self.train_loop_obj.experiment_timestamp

    @property
    def cloud_bucket(self) -> Bucket | None:
        """Bucket to save to; ``None`` for the local disk only."""
        return bucket_of(self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix)

    def upload(self, paths: Iterable[str]) -> None:
        """Upload files of the experiment's folder if the experiment is saved to a cloud."""
        bucket = self.cloud_bucket
        if bucket is not None:
            for path in paths:
                name = os.path.relpath(path, self.experiment_folder())
                bucket.save_file(path, bucket.experiment_path(*self.experiment_names, name))


class ListRegisteredCallbacks(CompatCallback):
    """Print the registered callbacks."""

    def __init__(self) -> None:
        super().__init__("Print the list of registered callbacks")

    def on_train_begin(self) -> None:
        self.train_loop_obj.callbacks_handler.print_registered_callback_names()


def _lower_is_better(metric: str) -> bool:
    return "loss" in metric.lower() or "error" in metric.lower()


class _StopsWithPatience(CompatCallback):
    in_checkpoints: tuple[str, ...] = ("patience_count",)

    def __init__(self, callback_name: str, monitor: str, patience: int) -> None:
        super().__init__(callback_name, execution_order=99)
        self.monitor = monitor
        self.patience = patience
        self.patience_count = patience

    def be_patient(self, better: bool, message: str) -> None:
        """Count an epoch, and stop with this message after too many epochs without an improvement."""
        self.patience_count = self.patience if better else self.patience_count - 1
        if self.patience_count < 0:
            self.end_training()
            print(message)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.in_checkpoints}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class EarlyStopping(_StopsWithPatience):
    """Stop when a metric has not improved for ``patience + 1`` epochs. Lower is better for a loss or an error."""

    in_checkpoints = ("patience_count", "best_performance", "best_epoch")

    def __init__(self, monitor: str = "val_loss", min_delta: float = 0.0, patience: int = 0) -> None:
        super().__init__("EarlyStopping", monitor, patience)
        self.min_delta = min_delta
        self.best_performance: Any = None
        self.best_epoch = 0

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        now, best = loop.train_history[self.monitor][-1], self.best_performance
        sign = -1 if _lower_is_better(self.monitor) else 1
        better = best is None or sign * now > sign * best + self.min_delta
        if better:
            self.best_performance, self.best_epoch = now, loop.epoch
        self.be_patient(better, f"Early stopping at epoch: {loop.epoch}. Best recorded epoch: {self.best_epoch}.")


class ThresholdEarlyStopping(_StopsWithPatience):
    """Stop when a metric has been on the wrong side of a threshold for ``patience + 1`` consecutive epochs."""

    def __init__(self, monitor: str, threshold: float, patience: int = 0) -> None:
        super().__init__("Threshold early stopping", monitor, patience)
        self.threshold = threshold

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        now = loop.train_history[self.monitor][-1]
        wrong = now > self.threshold if _lower_is_better(self.monitor) else now < self.threshold
        self.be_patient(not wrong, f"Threshold performance not reached. Early stopping at epoch: {loop.epoch}.")


class TerminateOnNaN(CompatCallback):
    """Stop at the end of an epoch whose metric is not finite."""

    def __init__(self, monitor: str = "loss") -> None:
        super().__init__("TerminateOnNaN", execution_order=98)
        self.monitor = monitor

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        value = loop.train_history[self.monitor][-1]
        if value is not None and not np.isfinite(value):
            self.end_training()
            print(f"Terminating on {self.monitor} = {value} at epoch: {loop.epoch}.")


class AllPredictionsSame(core.AllPredictionsSame):
    """Print a message, and optionally stop, if all predictions on the validation set have the same value."""

    def __init__(self, value: float = 0.0, stop_training: bool = False, verbose: bool = True) -> None:
        super().__init__(value, stop_training, verbose)
        self.callback_name = "All predictions have the same value"


class FunctionOnTrainLoop(core.FunctionOnTrainLoop):
    """Call a function with the loop at chosen hooks; do nothing if no hook is chosen."""

    may_do_nothing = True

    def register_train_loop_object(self, train_loop_obj: Any) -> AbstractCallback:
        if self.after_gradient_update or self.after_optimizer_step:
            train_loop_obj.grad_cb_used = True
        return super().register_train_loop_object(train_loop_obj)


# -- gradients --------------------------------------------------------------------------------------------------------


class GradientCallbackBase(CompatCallback):
    """Base class of callbacks that inspect gradients."""

    def on_train_loop_registration(self) -> None:
        self.train_loop_obj.grad_cb_used = True


class _Clip(GradientCallbackBase):
    clip: Callable[[Iterable[nn.Parameter]], None]

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        if self.train_loop_obj.should_execute_optimizer_update():
            self.clip(self.train_loop_obj.model.parameters())


class GradValueClip(_Clip):
    """Clip the values of each gradient."""

    def __init__(self, max_grad_value: float) -> None:
        super().__init__("Gradient value clipping")
        self.max_grad_value = max_grad_value

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        nn.utils.clip_grad_value_(parameters, self.max_grad_value)


class GradNormClip(_Clip):
    """Clip the norm of all gradients. Further arguments are passed to ``clip_grad_norm_``."""

    def __init__(self, max_grad_norm: float, **kwargs: Any) -> None:
        super().__init__("Gradient norm clipping")
        self.max_grad_norm = max_grad_norm
        self.kwargs = kwargs

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(parameters, self.max_grad_norm, **self.kwargs)


class GradientStatsPrint(CompatCallback):
    """Print statistics of each layer's weight gradients after each epoch, or after each backward."""

    def __init__(
        self, model_layers_extract_def: Callable[[Any], Iterable[nn.Module]], on_every_grad_update: bool = False
    ) -> None:
        super().__init__("Print model gradient stats", device_idx_execution=0)
        self.model_layers_extract_def = model_layers_extract_def
        self.on_every_grad_update = on_every_grad_update

    def on_train_loop_registration(self) -> None:
        if self.on_every_grad_update:
            self.train_loop_obj.grad_cb_used = True

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        if self.on_every_grad_update and optimizer_idx == 0:
            self.gradients_report()

    def on_epoch_end(self) -> None:
        self.gradients_report()

    def gradients_report(self) -> None:
        """Print the report for the current gradients."""
        print("---> Model layers gradients stats")
        for i, layer in enumerate(self.model_layers_extract_def(self.train_loop_obj.model)):
            gradient = layer.weight.grad
            if not isinstance(gradient, torch.Tensor):
                print(f"Layer {i} grad are None")
                continue
            print(f"Layer {i} grads: Mean: {gradient.mean().item()}; Std {gradient.std(correction=0).item()}")
            print(f"\tRatio of zero gradients: {(gradient == 0).float().mean().item()}")


class DistributedSamplerSetEpoch(CompatCallback):
    """Call ``set_epoch`` of samplers before each epoch. Samplers of the loop's loaders do not need this callback."""

    def __init__(self, train_sampler: Any = None, validation_sampler: Any = None, test_sampler: Any = None) -> None:
        super().__init__("Distributed sampler set epoch", execution_order=-100)
        self.train_sampler = train_sampler
        self.validation_sampler = validation_sampler
        self.test_sampler = test_sampler

    def on_epoch_begin(self) -> None:
        for sampler in (self.train_sampler, self.validation_sampler, self.test_sampler):
            if sampler is not None:
                sampler.set_epoch(self.train_loop_obj.epoch)


# -- metrics -----------------------------------------------------------------------------------------------------------


class ModelPerformanceEvaluation(core_performance.ModelPerformanceEvaluation):
    """Evaluate a result package on the training or validation set after epochs, and at the end of training.

    The history has the results as ``train_<metric>`` and ``val_<metric>``; the results at the end of training are
    ``train_end_val_<metric>``.
    """

    train_loop_obj: Any

    def __init__(
        self,
        result_package: AbstractResultPackage,
        args: dict[str, Any],
        on_each_epoch: bool = True,
        on_train_data: bool = False,
        on_val_data: bool = True,
        eval_frequency: int | None = None,
        if_available_output_to_project_dir: bool = True,
    ) -> None:
        when = on_each_epoch, on_train_data, on_val_data, eval_frequency
        super().__init__(
            result_package, args, *when, if_available_output_to_project_dir=if_available_output_to_project_dir
        )
        self.callback_name = "Model performance calculator - evaluator"
        if on_train_data:
            self.train_result_package = copy.deepcopy(result_package)

    def check_loaders(self) -> None:
        """Check the loaders only in a loop that can train: AIToolbox accepts the callback in any loop."""
        if self.train_loop_obj.train_loader is not None:
            super().check_loaders()

    def on_train_loop_registration(self) -> None:
        super().on_train_loop_registration()
        for package in self._torch_packages():
            package.metric.to(self.train_loop_obj.device)

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        every = self.eval_frequency or 1
        if self.on_each_epoch and (epoch := self.train_loop_obj.epoch) % every:
            print(f"Skipping performance evaluation on this epoch ({epoch}). Evaluating every {every} epochs.")
        for package in self._torch_packages():
            package.metric_reset()

    def evaluate_model_performance(self, prefix: str = "") -> None:
        """Evaluate now. Names in the history begin with ``prefix``."""
        loop = self.train_loop_obj
        if self.on_train_data:
            package = self.train_result_package
            self._insert_results(f"{prefix}train_", package, loop.predict_on_train_set, loop.evaluate_loss_on_train_set)
        if self.on_val_data:
            evaluations = loop.predict_on_validation_set, loop.evaluate_loss_on_validation_set
            self._insert_results(f"{prefix}val_", self.result_package, *evaluations)

    def _insert_results(self, prefix: str, package: Any, predict: Callable[..., Any], loss: Callable[..., Any]) -> None:
        prepare_package(package, self.args or {}, predict, loss)
        for name, value in package.get_results().items():
            self.train_loop_obj.insert_metric_result_into_history(f"{prefix}{name}", value)

    def _torch_packages(self) -> list[TorchMetricsPackage]:
        packages = [getattr(self, "train_result_package", None), self.result_package if self.on_val_data else None]
        return [package for package in packages if isinstance(package, TorchMetricsPackage)]


class ModelPerformancePrintReport(core_performance.ModelPerformancePrintReport):
    """Print metrics of the history after epochs, and at the end of training, in AIToolbox's format."""

    train_loop_obj: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.callback_name = "Model performance print reporter"  # callbacks_handler finds callbacks by their names

    def print_heading(self, at_end: bool) -> None:
        dashes, when = ("-" * 17, "training") if at_end else ("-" * 18, "epoch")
        print(f"{dashes}  End of {when} performance report  {dashes}")

    def print_performance_report(self, prefix: str = "") -> None:
        """Print the last result of each metric; at the end of training, only results with the prefix."""
        history = self.train_loop_obj.train_history
        if self.list_tracked_metrics:
            print(list(history.keys()))
        for name in (prefix + metric for metric in self.metrics):
            if history.get(name):
                print(f"{name}: {history[name][-1]}")
            else:
                self._report_missing(name, history.keys())


class TrainHistoryFormatter(core_performance.TrainHistoryFormatter):
    """Compute a metric from other metrics in AIToolbox's history, after each epoch or at the end of training."""

    train_loop_obj: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.callback_name = "Train history general formatter engine"

    def read_history(self) -> Any:
        return self.train_loop_obj.train_history


class MetricHistoryRename(TrainHistoryFormatter, core_performance.MetricHistoryRename):
    """Copy a metric of the history to another name."""
