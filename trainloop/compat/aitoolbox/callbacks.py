"""AIToolbox's callbacks for stopping, subsets, functions and gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trainloop.callbacks import base
from trainloop.callbacks.base import AbstractCallback
from trainloop.callbacks.basic import AllPredictionsSame as CoreAllPredictionsSame
from trainloop.callbacks.basic import DataSubsetTestRun
from trainloop.callbacks.basic import FunctionOnTrainLoop as CoreFunctionOnTrainLoop
from trainloop.callbacks.ddp import InMultiProcessDataLoad
from trainloop.compat.aitoolbox.optim import MultiOptimizer

__all__ = [
    "AbstractCallback",
    "AbstractExperimentCallback",
    "AllPredictionsSame",
    "DataSubsetTestRun",
    "DistributedSamplerSetEpoch",
    "EarlyStopping",
    "FunctionOnTrainLoop",
    "GradNormClip",
    "GradValueClip",
    "GradientCallbackBase",
    "GradientStatsPrint",
    "InMultiProcessDataLoad",
    "ListRegisteredCallbacks",
    "TerminateOnNaN",
    "ThresholdEarlyStopping",
]


_EXPERIMENT = ("project_name", "experiment_name", "local_model_result_folder_path")
_CLOUD = ("cloud_save_mode", "bucket_name", "cloud_dir_prefix")


def experiment_in(given: Sequence[Any], arguments: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Return an experiment's names and folders, from positional arguments and those removed from ``arguments``."""
    names = (*_EXPERIMENT, *_CLOUD)
    if len(given) > len(names):
        raise TypeError(f"{given[len(names)]!r} comes after {names[-1]}, the last positional one: pass it by keyword.")
    twice = [name for name in names[: len(given)] if name in arguments]
    if twice:
        raise TypeError(f"{', '.join(twice)} passed twice: by position, and by keyword.")
    later = [arguments.pop(name, None) for name in names[len(given) :]]
    project, experiment, folder, mode, bucket, prefix = [*given, *later]
    return project, experiment, folder, mode, bucket, prefix


class AbstractExperimentCallback(AbstractCallback):
    """A callback that writes into an experiment's folder, and optionally into a cloud.

    Missing values are taken from a tracking loop, by :meth:`try_infer_experiment_details`. Subclasses take
    these arguments, from ``project_name`` on, after their own: ``*experiment`` in this order, or by name.
    """

    def __init__(
        self,
        callback_name: str,
        project_name: str | None = None,
        experiment_name: str | None = None,
        local_model_result_folder_path: str | None = None,
        cloud_save_mode: str | None = None,
        bucket_name: str | None = None,
        cloud_dir_prefix: str | None = None,
        execution_order: int = 0,
        device_idx_execution: int | None = None,
    ) -> None:
        super().__init__(callback_name, execution_order=execution_order, device_idx_execution=device_idx_execution)
        path = local_model_result_folder_path
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.local_model_result_folder_path = None if path is None else os.path.expanduser(path)
        self.cloud_save_mode = cloud_save_mode
        self.bucket_name = bucket_name
        self.cloud_dir_prefix = cloud_dir_prefix

    def try_infer_experiment_details(self, infer_cloud_details: bool) -> None:
        """Take missing values from the loop; the cloud's details only if none of them was given.

        Raises
        ------
        AttributeError
            If the loop is not a tracking loop and has no such attribute.
        """
        missing = [name for name in _EXPERIMENT if getattr(self, name) is None]
        if infer_cloud_details and all(getattr(self, name) is None for name in _CLOUD):
            missing += _CLOUD
        for name in missing:
            if not hasattr(self.train_loop_obj, name):
                raise AttributeError(
                    f"{type(self).__name__} has no {name}, and neither has the {type(self.train_loop_obj).__name__}. "
                    f"Pass {name} to the callback, or use a tracking loop, such as TrainLoopCheckpoint."
                )
            setattr(self, name, getattr(self.train_loop_obj, name))


class ListRegisteredCallbacks(AbstractCallback):
    """Print the registered callbacks."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(self) -> None:
        super().__init__("Print the list of registered callbacks")

    def on_train_begin(self) -> None:
        self.train_loop_obj.callbacks_handler.print_registered_callback_names()


def _falls(metric: str) -> bool:
    return "loss" in metric.lower() or "error" in metric.lower()


class EarlyStopping(AbstractCallback):
    """Stop when a metric has not improved for ``patience + 1`` epochs; a loss or an error should fall."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(self, monitor: str = "val_loss", min_delta: float = 0.0, patience: int = 0) -> None:
        super().__init__("EarlyStopping", execution_order=99)
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.patience_count = patience
        self.best_performance: Any = None
        self.best_epoch = 0

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        now, best = loop.train_history[self.monitor][-1], self.best_performance
        sign = -1 if _falls(self.monitor) else 1
        if best is None or sign * now > sign * best + self.min_delta:
            self.best_performance, self.best_epoch = now, loop.epoch
            self.patience_count = self.patience
            return
        self.patience_count -= 1
        if self.patience_count < 0:
            loop.early_stop = True
            print(f"Early stopping at epoch: {loop.epoch}. Best recorded epoch: {self.best_epoch}.")

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("patience_count", "best_performance", "best_epoch")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class ThresholdEarlyStopping(AbstractCallback):
    """Stop when a metric has been on the wrong side of a threshold for ``patience + 1`` consecutive epochs."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(self, monitor: str, threshold: float, patience: int = 0) -> None:
        super().__init__("Threshold early stopping", execution_order=99)
        self.monitor = monitor
        self.threshold = threshold
        self.patience = patience
        self.patience_count = patience

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        now = loop.train_history[self.monitor][-1]
        wrong = now > self.threshold if _falls(self.monitor) else now < self.threshold
        self.patience_count = self.patience_count - 1 if wrong else self.patience
        if self.patience_count < 0:
            loop.early_stop = True
            print(f"Threshold performance not reached. Early stopping at epoch: {loop.epoch}.")

    def state_dict(self) -> dict[str, Any]:
        return {"patience_count": self.patience_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class TerminateOnNaN(AbstractCallback):
    """Stop at the end of an epoch whose metric is not finite."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(self, monitor: str = "loss") -> None:
        super().__init__("TerminateOnNaN", execution_order=98)
        self.monitor = monitor

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        value = loop.train_history[self.monitor][-1]
        if value is not None and not np.isfinite(value):
            loop.early_stop = True
            print(f"Terminating on {self.monitor} = {value} at epoch: {loop.epoch}.")


class AllPredictionsSame(CoreAllPredictionsSame):
    """Report, and optionally stop, when all predictions on the validation set have one value."""

    def __init__(self, value: float = 0.0, stop_training: bool = False, verbose: bool = True) -> None:
        super().__init__(value, stop_training, verbose)
        self.callback_name = "All predictions have the same value"


class FunctionOnTrainLoop(CoreFunctionOnTrainLoop):
    """Call a function with the loop at some of the hooks; without hooks it does nothing."""

    def __init__(
        self,
        fn_to_execute: Callable[[Any], Any],
        tl_registration: bool = False,
        epoch_begin: bool = False,
        epoch_end: bool = False,
        train_begin: bool = False,
        train_end: bool = False,
        batch_begin: bool = False,
        batch_end: bool = False,
        after_gradient_update: bool = False,
        after_optimizer_step: bool = False,
        execution_order: int = 0,
        device_idx_execution: int | None = None,
    ) -> None:
        where = {
            "tl_registration": tl_registration,
            "epoch_begin": epoch_begin,
            "epoch_end": epoch_end,
            "train_begin": train_begin,
            "train_end": train_end,
            "batch_begin": batch_begin,
            "batch_end": batch_end,
            "after_gradient_update": after_gradient_update,
            "after_optimizer_step": after_optimizer_step,
        }
        self._reads_gradients = after_gradient_update or after_optimizer_step
        if not any(where.values()):  # the core rejects this
            base.AbstractCallback.__init__(
                self, "Execute given function as a callback", execution_order, device_idx_execution
            )
            self.fn_to_execute = fn_to_execute
            return
        super().__init__(
            fn_to_execute, **where, execution_order=execution_order, device_idx_execution=device_idx_execution
        )

    def register_train_loop_object(self, train_loop_obj: Any) -> AbstractCallback:
        if self._reads_gradients:
            train_loop_obj.grad_cb_used = True
        return super().register_train_loop_object(train_loop_obj)


# -- gradients ---------------------------------------------------------------------------------------------------------


class GradientCallbackBase(AbstractCallback):
    """A callback that inspects gradients."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(self, callback_name: str, execution_order: int = 0, device_idx_execution: int | None = None) -> None:
        super().__init__(callback_name, execution_order, device_idx_execution)

    def on_train_loop_registration(self) -> None:
        self.train_loop_obj.grad_cb_used = True


class _Clip(GradientCallbackBase):
    train_loop_obj: Any  # this package's loop, with more attributes

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        loop = self.train_loop_obj
        if loop.should_execute_optimizer_update():
            optimizer = loop.optimizer
            loop.amp_scaler.unscale_(optimizer[optimizer_idx] if isinstance(optimizer, MultiOptimizer) else optimizer)
            self.clip(loop.model.parameters())

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients of these parameters."""
        raise NotImplementedError


class GradValueClip(_Clip):
    """Clip each gradient's values."""

    def __init__(self, max_grad_value: float) -> None:
        super().__init__("Gradient value clipping")
        self.max_grad_value = max_grad_value

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        nn.utils.clip_grad_value_(parameters, self.max_grad_value)


class GradNormClip(_Clip):
    """Clip the norm of all gradients; further arguments go to ``clip_grad_norm_``."""

    def __init__(self, max_grad_norm: float, **kwargs: Any) -> None:
        super().__init__("Gradient norm clipping")
        self.max_grad_norm = max_grad_norm
        self.kwargs = kwargs

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(parameters, self.max_grad_norm, **self.kwargs)


class GradientStatsPrint(AbstractCallback):
    """Print mean, deviation and fraction of zeros of layers' weight gradients after each epoch, or each backward."""

    train_loop_obj: Any  # this package's loop, with more attributes

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


class DistributedSamplerSetEpoch(AbstractCallback):
    """Call ``set_epoch`` of samplers before each epoch; those of the loop's loaders need no callback."""

    def __init__(self, train_sampler: Any = None, validation_sampler: Any = None, test_sampler: Any = None) -> None:
        super().__init__("Distributed sampler set epoch", execution_order=-100)
        self.train_sampler = train_sampler
        self.validation_sampler = validation_sampler
        self.test_sampler = test_sampler

    def on_epoch_begin(self) -> None:
        for sampler in (self.train_sampler, self.validation_sampler, self.test_sampler):
            if sampler is not None:
                sampler.set_epoch(self.train_loop_obj.epoch)
