"""AIToolbox's loops that save checkpoints, and results at the end of training."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

from trainloop.compat.aitoolbox.checkpoints import ModelCheckpoint, ModelIterationCheckpoint, ModelTrainEndSave
from trainloop.compat.aitoolbox.loop import TrainLoop
from trainloop.compat.aitoolbox.store import append_predictions, torch_cat_transf
from trainloop.errors import ConfigurationError

__all__ = ["TrainLoopCheckpoint", "TrainLoopCheckpointEndSave", "TrainLoopEndSave"]


class _TrackingLoop(TrainLoop):
    """Base class of the three loops with an experiment."""

    def _track(
        self,
        experiment: tuple[str, str, str],
        hyperparams: dict[str, Any],
        cloud: tuple[str | None, str, str],
        source_dirs: Sequence[str],
    ) -> None:
        self.project_name, self.experiment_name = experiment[:2]
        self.local_model_result_folder_path = os.path.expanduser(experiment[2])
        self.hyperparams = hyperparams
        self.cloud_save_mode, self.bucket_name, self.cloud_dir_prefix = cloud
        self.source_dirs = source_dirs
        if not isinstance(hyperparams, dict):
            raise ConfigurationError(f"hyperparams={hyperparams!r}: must be a dict.")
        hyperparams.setdefault("experiment_file_path", _script())
        hyperparams.setdefault("source_dirs_paths", source_dirs)

    @property
    def _where(self) -> tuple[Any, ...]:
        return self.project_name, self.experiment_name, self.local_model_result_folder_path, self.hyperparams

    @property
    def _cloud(self) -> dict[str, Any]:
        names = ("cloud_save_mode", "bucket_name", "cloud_dir_prefix")
        return {name: getattr(self, name) for name in names}

    def _save_checkpoints(self, rm_subopt_local_models: bool | str, kept: int, iteration_save_freq: int) -> None:
        self.rm_subopt_local_models = rm_subopt_local_models
        self.iteration_save_freq = iteration_save_freq
        if iteration_save_freq < 0:
            raise ConfigurationError(f"iteration_save_freq={iteration_save_freq}: must be 0 or more.")
        best: dict[str, Any] = {"rm_subopt_local_models": rm_subopt_local_models, "num_best_checkpoints_kept": kept}
        kind: Any = ModelIterationCheckpoint if iteration_save_freq else ModelCheckpoint
        first = (iteration_save_freq,) if iteration_save_freq else ()
        checkpoint = kind(*first, *self._where, **self._cloud, **best)
        self.callbacks_handler.register_callbacks([checkpoint], cache_callbacks=True)

    def _save_end(self, val_result_package: Any, test_result_package: Any) -> None:
        self.val_result_package = val_result_package
        self.test_result_package = test_result_package
        self.check_if_result_packages_possible()
        kind: Any = ModelTrainEndSave
        end_save = kind(*self._where, val_result_package, test_result_package, **self._cloud)
        self.callbacks_handler.register_callbacks([end_save], cache_callbacks=True)

    def check_if_result_packages_possible(self) -> None:
        """Raise an error for a result package whose data set is missing."""
        for part, loader in (("val", self.validation_loader), ("test", self.test_loader)):
            if getattr(self, f"{part}_result_package") is not None and loader is None:
                name = "validation_loader" if part == "val" else "test_loader"
                raise ConfigurationError(f"{part}_result_package is given, but no {name}: pass one to the loop.")


class TrainLoopCheckpoint(_TrackingLoop):
    """Save the model after each epoch, or every ``iteration_save_freq`` batches, see :class:`ModelCheckpoint`."""

    def __init__(
        self,
        model: Any,
        train_loader: Any,
        validation_loader: Any,
        test_loader: Any,
        optimizer: Any,
        criterion: Any,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str,
        hyperparams: dict[str, Any],
        cloud_save_mode: str | None = "s3",
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
        source_dirs: Sequence[str] = (),
        rm_subopt_local_models: bool | str = False,
        num_best_checkpoints_kept: int = 2,
        iteration_save_freq: int = 0,
        collate_batch_pred_fn: Any = append_predictions,
        pred_transform_fn: Any = torch_cat_transf,
        *loop_args: Any,
        **loop_kwargs: Any,
    ) -> None:
        parts = (model, train_loader, validation_loader, test_loader, optimizer, criterion)
        super().__init__(*parts, collate_batch_pred_fn, pred_transform_fn, *loop_args, **loop_kwargs)
        experiment = project_name, experiment_name, local_model_result_folder_path
        self._track(experiment, hyperparams, (cloud_save_mode, bucket_name, cloud_dir_prefix), source_dirs)
        self._save_checkpoints(rm_subopt_local_models, num_best_checkpoints_kept, iteration_save_freq)


class TrainLoopEndSave(_TrackingLoop):
    """Evaluate result packages at the end of training, and save the model, see :class:`ModelTrainEndSave`."""

    def __init__(
        self,
        model: Any,
        train_loader: Any,
        validation_loader: Any,
        test_loader: Any,
        optimizer: Any,
        criterion: Any,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str,
        hyperparams: dict[str, Any],
        val_result_package: Any = None,
        test_result_package: Any = None,
        cloud_save_mode: str | None = "s3",
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
        source_dirs: Sequence[str] = (),
        collate_batch_pred_fn: Any = append_predictions,
        pred_transform_fn: Any = torch_cat_transf,
        *loop_args: Any,
        **loop_kwargs: Any,
    ) -> None:
        parts = (model, train_loader, validation_loader, test_loader, optimizer, criterion)
        super().__init__(*parts, collate_batch_pred_fn, pred_transform_fn, *loop_args, **loop_kwargs)
        experiment = project_name, experiment_name, local_model_result_folder_path
        self._track(experiment, hyperparams, (cloud_save_mode, bucket_name, cloud_dir_prefix), source_dirs)
        self._save_end(val_result_package, test_result_package)


class TrainLoopCheckpointEndSave(TrainLoopEndSave):
    """Do both: checkpoints during training, and results and model at the end."""

    def __init__(
        self,
        model: Any,
        train_loader: Any,
        validation_loader: Any,
        test_loader: Any,
        optimizer: Any,
        criterion: Any,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str,
        hyperparams: dict[str, Any],
        val_result_package: Any = None,
        test_result_package: Any = None,
        cloud_save_mode: str | None = "s3",
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
        source_dirs: Sequence[str] = (),
        rm_subopt_local_models: bool | str = False,
        num_best_checkpoints_kept: int = 2,
        iteration_save_freq: int = 0,
        collate_batch_pred_fn: Any = append_predictions,
        pred_transform_fn: Any = torch_cat_transf,
        *loop_args: Any,
        **loop_kwargs: Any,
    ) -> None:
        parts = (model, train_loader, validation_loader, test_loader, optimizer, criterion)
        experiment = project_name, experiment_name, local_model_result_folder_path, hyperparams
        others = val_result_package, test_result_package, cloud_save_mode, bucket_name, cloud_dir_prefix, source_dirs
        end_save: tuple[Any, ...] = (*experiment, *others, collate_batch_pred_fn, pred_transform_fn)
        super().__init__(*parts, *end_save, *loop_args, **loop_kwargs)
        self._save_checkpoints(rm_subopt_local_models, num_best_checkpoints_kept, iteration_save_freq)


def _script() -> str:
    """Return the file that created the loop: the first frame outside of this package."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("trainloop."):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename
