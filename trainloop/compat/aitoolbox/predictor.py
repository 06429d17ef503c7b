"""AIToolbox's predictions and evaluations of a model, without a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainloop.compat.aitoolbox.cloud import GoogleStorageResultsSaver, S3ResultsSaver, bucket_of, gcs_available_options
from trainloop.compat.aitoolbox.history import TrainingHistory
from trainloop.compat.aitoolbox.loop import TrainLoop
from trainloop.compat.aitoolbox.saving import LocalResultsSaver

__all__ = ["PyTorchModelPredictor"]


class PyTorchModelPredictor:
    """A model and the loader to evaluate it on; predictions are cached."""

    def __init__(self, model: Any, data_loader: Any, callbacks: Sequence[Any] | None = None) -> None:
        self.model = model
        self.data_loader = data_loader
        self.train_loop = TrainLoop(model, None, None, data_loader, None, None)
        self.train_loop.callbacks_handler.register_callbacks(callbacks)

    def model_predict(self) -> Any:
        """Return ``(y_pred, y_true, metadata)``."""
        return self.train_loop.predict_on_test_set()

    def model_get_loss(self, loss_criterion: Any) -> Any:
        """Return the mean loss, as a tensor or ``MultiLoss``."""
        self.train_loop.criterion = loss_criterion
        return self.train_loop.evaluate_loss_on_test_set()

    def evaluate_model(
        self,
        result_package: Any,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str,
        cloud_save_mode: str | None = "s3",
        bucket_name: str = "model-result",
        cloud_dir_prefix: str = "",
        save_true_pred_labels: bool = False,
    ) -> None:
        """Evaluate a result package, and save its results as an experiment."""
        names = project_name, experiment_name, self.train_loop.experiment_timestamp
        result_package.set_experiment_dir_path_for_additional_results(*names, local_model_result_folder_path)
        package = self.evaluate_result_package(result_package)
        history = TrainingHistory()
        for name, value in package.get_results().items():
            history.insert_single_result_into_history(name, value)
        saver: Any = LocalResultsSaver(local_model_result_folder_path)
        if bucket_of(cloud_save_mode, bucket_name, cloud_dir_prefix) is not None:
            in_cloud = GoogleStorageResultsSaver if cloud_save_mode in gcs_available_options else S3ResultsSaver
            saver = in_cloud(bucket_name, cloud_dir_prefix, local_model_result_folder_path)
        saver.save_experiment_results(package, history, *names, save_true_pred_labels=save_true_pred_labels)

    def evaluate_result_package(self, result_package: Any, return_result_package: bool = True) -> Any:
        """Return the package with its results, or the results."""
        y_pred, y_true, metadata = self.model_predict()
        result_package.prepare_result_package(y_true, y_pred, hyperparameters={}, additional_results=metadata)
        return result_package if return_result_package else result_package.get_results()

    def evaluate_metric(self, metric_class: Any, return_metric: bool = True) -> Any:
        """Return a metric of targets and predictions, or its result by name."""
        y_pred, y_true, _ = self.model_predict()
        metric = metric_class(y_true, y_pred)
        return metric if return_metric else metric.get_metric_dict()

    def evaluate_metric_list(self, metrics_class_list: Sequence[Any], return_metric_list: bool = True) -> Any:
        """Return several metrics, or their results by name."""
        metrics = [self.evaluate_metric(metric) for metric in metrics_class_list]
        if return_metric_list:
            return metrics
        return {name: value for metric in metrics for name, value in metric.get_metric_dict().items()}

    def execute_batch_end_callbacks(self) -> None:
        """Call the callbacks' ``on_batch_end``."""
        self.train_loop.callbacks_handler.execute_batch_end()

    def execute_epoch_end_callbacks(self) -> None:
        """Call the callbacks' ``on_epoch_end``."""
        self.train_loop.callbacks_handler.execute_epoch_end()
