"""AIToolbox's names for what other callbacks of this package do.

:mod:`trainloop.callbacks` offers them. Those that behave as AIToolbox's do are in :mod:`trainloop.compat.aitoolbox`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainloop.callbacks.abstract import AbstractExperimentCallback
from trainloop.callbacks.base import AbstractCallback
from trainloop.callbacks.gradient import GradientClipping
from trainloop.callbacks.history_report import require_matplotlib
from trainloop.callbacks.tensorboard import TensorBoard
from trainloop.callbacks.tracking import Experiment, ExperimentCheckpoint, ExperimentEndSave

__all__ = [
    "DistributedSamplerSetEpoch",
    "GradDistributionPlot",
    "GradientStatsPrint",
    "GradNormClip",
    "GradValueClip",
    "ModelIterationCheckpoint",
    "ModelTrainEndSave",
    "TensorboardFullTracking",
    "TensorboardReporterBaseCB",
    "TensorboardTrainBatchLoss",
    "TensorboardTrainHistoryMetric",
]


class GradValueClip(GradientClipping):
    """Clip each element of the gradients; AIToolbox's name for ``GradientClipping(max_value=...)``.

    Parameters
    ----------
    max_grad_value : float
        Largest absolute value.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[GradValueClip(0.5)])
    """

    def __init__(self, max_grad_value: float) -> None:
        super().__init__(max_value=max_grad_value)


class GradNormClip(GradientClipping):
    """Clip the total norm of the gradients; AIToolbox's name for ``GradientClipping(max_norm=...)``.

    Parameters
    ----------
    max_grad_norm : float
        Largest norm.
    **kwargs
        More for ``torch.nn.utils.clip_grad_norm_``.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[GradNormClip(1.0)])
    """

    def __init__(self, max_grad_norm: float, **kwargs: Any) -> None:
        super().__init__(max_norm=max_grad_norm, **kwargs)


class GradientStatsPrint(AbstractCallback):
    """Print mean, standard deviation and share of zeros of chosen layers' gradients.

    Reading them waits for the device; :class:`GradientStats` does not.

    Parameters
    ----------
    model_layers_extract_def : callable
        Takes the model, returns its layers to report, each with a ``weight``.
    on_every_grad_update : bool
        After every step; else after the last step of each epoch, by the gradients kept from it.

    Examples
    --------
    >>> GradientStatsPrint(lambda model: [model.encoder, model.head])
    """

    def __init__(
        self, model_layers_extract_def: Callable[[Any], Iterable[nn.Module]], on_every_grad_update: bool = False
    ) -> None:
        super().__init__("GradientStatsPrint", execution_order=-1, device_idx_execution=0)
        self.model_layers_extract_def = model_layers_extract_def
        self.on_every_grad_update = on_every_grad_update
        self._gradients: list[Tensor | None] = []

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        # References only: the loop drops a step's gradients (set to None), it does not overwrite them.
        self._gradients = [layer.weight.grad for layer in self._layers()]
        if self.on_every_grad_update:
            self.gradients_report()

    def on_epoch_end(self) -> None:
        if not self.on_every_grad_update:
            self.gradients_report()
        self._gradients = []

    def gradients_report(self) -> None:
        """Print the report for the gradients seen last."""
        print("---> Model layers gradients stats")
        for i, gradient in enumerate(self._gradients):
            if gradient is None:
                print(f"Layer {i} has no gradient")
                continue
            std, mean = torch.std_mean(gradient, correction=0)
            zeros = (gradient == 0).double().mean()
            print(f"Layer {i} gradients: mean {mean.item():.6g}; std {std.item():.6g}; zeros {zeros.item():.2%}")

    def _layers(self) -> list[Any]:
        return list(self.model_layers_extract_def(self.train_loop_obj.model))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gradients": []}


class GradDistributionPlot(AbstractExperimentCallback):
    """Plot how chosen layers' gradients are distributed, an image a layer after each epoch.

    Written to ``<experiment folder>/results/grad_distribution/epoch_<n>/Layer_<i>.png``.

    Parameters
    ----------
    model_layers_extract_def : callable
        Takes the model, returns its layers to plot, each with a ``weight``.
    file_format : str
        Ending of the files.
    project_name, experiment_name, local_model_result_folder_path : str, optional
        Where files go; taken from a tracking loop, such as ``TrainLoopCheckpoint``, where left out.

    Raises
    ------
    ConfigurationError
        If matplotlib is missing, or the folder is not known.

    Examples
    --------
    >>> GradDistributionPlot(lambda model: [model.encoder, model.head])
    """

    def __init__(
        self,
        model_layers_extract_def: Callable[[Any], Iterable[nn.Module]],
        file_format: str = "png",
        project_name: str | None = None,
        experiment_name: str | None = None,
        local_model_result_folder_path: str | None = None,
    ) -> None:
        super().__init__(
            "GradDistributionPlot",
            project_name,
            experiment_name,
            local_model_result_folder_path,
            execution_order=-1,
            device_idx_execution=0,
        )
        self.model_layers_extract_def = model_layers_extract_def
        self.file_format = file_format
        self._gradients: list[Tensor | None] = []

    def on_train_loop_registration(self) -> None:
        self.try_infer_experiment_details()
        require_matplotlib("GradDistributionPlot")

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        layers: Iterable[Any] = self.model_layers_extract_def(self.train_loop_obj.model)
        self._gradients = [layer.weight.grad for layer in layers]

    def on_epoch_end(self) -> None:
        from matplotlib.figure import Figure

        folder = Path(self.results_folder()) / "grad_distribution" / f"epoch_{self.train_loop_obj.epoch}"
        folder.mkdir(parents=True, exist_ok=True)
        for i, gradient in enumerate(self._gradients):
            if gradient is None:
                continue
            figure = Figure(figsize=(8, 6), layout="constrained")
            axes = figure.subplots()
            axes.hist(gradient.detach().float().reshape(-1).cpu().numpy(), bins=100)
            axes.set(title=f"Gradients of layer {i}", xlabel="gradient", ylabel="elements")
            figure.savefig(folder / f"Layer_{i}.{self.file_format}")
        self._gradients = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gradients": []}


class TensorboardReporterBaseCB(TensorBoard):
    """Base of AIToolbox's three: :class:`TensorBoard`, in an experiment's folder if so wished.

    Parameters
    ----------
    log_dir : str, optional
        Folder; inside the experiment's folder with ``is_project``. Default: ``tensorboard``.
    is_project : bool
        Write into the folder of the experiment, which a tracking loop knows; else ``log_dir`` is the whole path.
    project_name, experiment_name, local_model_result_folder_path : str, optional
        Where the experiment's folder is; taken from the loop where left out.
    log_every_n_steps : int, optional
        As in :class:`TensorBoard`.
    metric_names : sequence of str, optional
        Metrics of the history to write. Default: all.

    Examples
    --------
    >>> TensorboardReporterBaseCB("runs/first", is_project=False)
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        is_project: bool = True,
        project_name: str | None = None,
        experiment_name: str | None = None,
        local_model_result_folder_path: str | None = None,
        log_every_n_steps: int | None = 1,
        metric_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__("tensorboard" if log_dir is None else log_dir, log_every_n_steps, **kwargs)
        self.is_project = is_project
        self.metric_names = None if metric_names is None else list(metric_names)
        self._experiment = AbstractExperimentCallback(
            type(self).__name__, project_name, experiment_name, local_model_result_folder_path
        )

    def on_train_loop_registration(self) -> None:
        if self.is_project:
            assert self.log_dir is not None
            self._experiment.train_loop_obj = self.train_loop_obj
            self._experiment.try_infer_experiment_details()
            # Joining a path that is absolute already, by an earlier fit, changes nothing.
            self.log_dir = os.path.join(os.path.abspath(self._experiment.experiment_folder()), self.log_dir)
        super().on_train_loop_registration()


class TensorboardTrainBatchLoss(TensorboardReporterBaseCB):
    """Step values only.

    Parameters
    ----------
    batch_log_frequency : int
        Steps between two records.
    **kwargs
        As in :class:`TensorboardReporterBaseCB`.

    Examples
    --------
    >>> TensorboardTrainBatchLoss(batch_log_frequency=10, log_dir="runs/first", is_project=False)
    """

    def __init__(self, batch_log_frequency: int = 1, **kwargs: Any) -> None:
        super().__init__(log_every_n_steps=batch_log_frequency, metric_names=(), **kwargs)


class TensorboardTrainHistoryMetric(TensorboardReporterBaseCB):
    """Epoch values only.

    Parameters
    ----------
    metric_names : sequence of str, optional
        Metrics of the history to write. Default: all.
    **kwargs
        As in :class:`TensorboardReporterBaseCB`.

    Examples
    --------
    >>> TensorboardTrainHistoryMetric(["loss", "val_loss"], log_dir="runs/first", is_project=False)
    """

    def __init__(self, metric_names: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(log_every_n_steps=None, metric_names=metric_names, **kwargs)


class TensorboardFullTracking(TensorboardReporterBaseCB):
    """Step values and epoch values.

    Parameters
    ----------
    metric_names : sequence of str, optional
        Metrics of the history to write. Default: all.
    batch_log_frequency : int
        Steps between two records.
    **kwargs
        As in :class:`TensorboardReporterBaseCB`.

    Examples
    --------
    >>> TensorboardFullTracking(batch_log_frequency=10, log_dir="runs/first", is_project=False)
    """

    def __init__(self, metric_names: Sequence[str] | None = None, batch_log_frequency: int = 1, **kwargs: Any) -> None:
        super().__init__(log_every_n_steps=batch_log_frequency, metric_names=metric_names, **kwargs)


class DistributedSamplerSetEpoch(AbstractCallback):
    """Call ``set_epoch`` of samplers before each epoch.

    The loop does so by itself for every loader it is given; only samplers that it can't see, inside a dataset say, need
    this.

    Parameters
    ----------
    train_sampler, validation_sampler, test_sampler : DistributedSampler or None

    Examples
    --------
    >>> tl.fit(num_epochs=3, callbacks=[DistributedSamplerSetEpoch(dataset.inner_sampler)])
    """

    def __init__(self, train_sampler: Any = None, validation_sampler: Any = None, test_sampler: Any = None) -> None:
        super().__init__("DistributedSamplerSetEpoch", execution_order=-100)
        self.train_sampler = train_sampler
        self.validation_sampler = validation_sampler
        self.test_sampler = test_sampler

    def on_epoch_begin(self) -> None:
        for sampler in (self.train_sampler, self.validation_sampler, self.test_sampler):
            if sampler is not None:
                sampler.set_epoch(self.train_loop_obj.epoch)


class ModelIterationCheckpoint(ExperimentCheckpoint):
    """Write a checkpoint every so many optimizer steps, into an experiment's folder.

    Parameters
    ----------
    save_frequency : int
        Optimizer steps between two checkpoints.
    project_name, experiment_name, local_model_result_folder_path
        Where: in ``<local_model_result_folder_path>/<project_name>/<experiment_name>_<time stamp>/checkpoints``.
    hyperparams : mapping, optional
        Of the experiment.
    **more
        As for :class:`trainloop.callbacks.tracking.ExperimentCheckpoint`.

    Examples
    --------
    >>> ModelIterationCheckpoint(500, "digits", "cnn", "~/results")
    """

    def __init__(
        self,
        save_frequency: int,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str | os.PathLike[str],
        hyperparams: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        experiment = Experiment(project_name, experiment_name, local_model_result_folder_path, hyperparams)
        super().__init__(experiment, iteration_save_freq=save_frequency, **more)


class ModelTrainEndSave(ExperimentEndSave):
    """Save the model and a report at the end of training, into an experiment's folder.

    Parameters
    ----------
    project_name, experiment_name, local_model_result_folder_path
        Files go to ``<local_model_result_folder_path>/<project_name>/<experiment_name>_<time stamp>``.
    hyperparams : mapping, optional
        Of the experiment; they stand in the report.
    val_result_package, test_result_package
        Evaluated at the end, see :func:`trainloop.result_package.evaluate_result_package`.
    source_dirs : sequence of str or path
        Folders of source that belong to the experiment.

    Examples
    --------
    >>> ModelTrainEndSave("digits", "cnn", "~/results", {"lr": 0.1}, test_result_package=ClassificationResultPackage())
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str | os.PathLike[str],
        hyperparams: Mapping[str, Any] | None = None,
        val_result_package: Any = None,
        test_result_package: Any = None,
        source_dirs: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        where = (project_name, experiment_name, local_model_result_folder_path)
        super().__init__(Experiment(*where, hyperparams, source_dirs), val_result_package, test_result_package)
