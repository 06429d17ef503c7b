"""Callbacks that look at gradients, or change them, between the backward pass and the optimizer's step.

``on_after_gradient_update`` is called once a step (with a :class:`~trainloop.optim.MultiOptimizer` once for each
optimizer), when gradients are complete: summed over micro-batches, averaged over ranks, unscaled by AMP. They are
the same on all ranks, and nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainloop.callbacks.abstract import AbstractExperimentCallback
from trainloop.callbacks.base import AbstractCallback
from trainloop.callbacks.history_report import require_matplotlib
from trainloop.callbacks.norms import norms_of
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiOptimizer, parameters_of

__all__ = [
    "GradDistributionPlot",
    "GradNormClip",
    "GradValueClip",
    "GradientCallbackBase",
    "GradientClipping",
    "GradientStats",
    "GradientStatsPrint",
]


class GradientCallbackBase(AbstractCallback):
    """Base of callbacks over gradients: knows which parameters a call is about.

    Parameters
    ----------
    callback_name : str
    execution_order : int
        Clipping has 0, statistics -1: they show gradients as they came.

    Examples
    --------
    >>> class AddNoise(GradientCallbackBase):
    ...     def on_after_gradient_update(self, optimizer_idx=0):
    ...         for parameter in self.parameters(optimizer_idx):
    ...             parameter.grad += 0.01 * torch.randn_like(parameter)
    """

    def __init__(self, callback_name: str, execution_order: int = 0) -> None:
        super().__init__(callback_name, execution_order=execution_order)

    def parameters(self, optimizer_idx: int = 0) -> list[Tensor]:
        """The model's parameters; of several optimizers, those of the given one."""
        loop = self.train_loop_obj
        if isinstance(loop.optimizer, MultiOptimizer):
            return parameters_of(loop.optimizer[optimizer_idx])
        return list(loop.model.parameters())


class GradientClipping(GradientCallbackBase):
    """Clip gradients before each step: each element, the total norm, or both, in this order.

    With AMP gradients are unscaled before. ``TrainLoop(gradient_clip_norm=...)`` does the same for the norm.

    Parameters
    ----------
    max_norm : float, optional
        Largest total norm; with several optimizers that of each one's parameters.
    max_value : float, optional
        Largest absolute value of an element.
    norm_type : float
        Order of the norm, ``inf`` among them.

    Raises
    ------
    ConfigurationError
        If neither limit is given, or one is not above zero.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[GradientClipping(max_norm=1.0)])
    """

    def __init__(
        self, max_norm: float | None = None, max_value: float | None = None, norm_type: float = 2.0, **kwargs: Any
    ) -> None:
        super().__init__("GradientClipping")
        if max_norm is None and max_value is None:
            raise ConfigurationError(f"{type(self).__name__}: give it max_norm, max_value or both.")
        for name, limit in (("max_norm", max_norm), ("max_value", max_value)):
            if limit is not None and not limit > 0:
                raise ConfigurationError(f"{type(self).__name__}: {name}={limit!r}: must be above zero.")
        self.max_norm = max_norm
        self.max_value = max_value
        self.norm_kwargs = {"norm_type": norm_type, **kwargs}

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        parameters = self.parameters(optimizer_idx)
        if self.max_value is not None:
            nn.utils.clip_grad_value_(parameters, self.max_value)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.max_norm, **self.norm_kwargs)


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


class GradientStats(GradientCallbackBase):
    """Log the gradients' norms: in the history, in TensorBoard, wherever logs go.

    Logged are ``grad_norm``, the total 2-norm, ``grad_max``, the largest absolute value, and with ``per_parameter``
    each parameter's norm as ``grad_norm/<name>``; with several optimizers ``grad_norm/optimizer0`` and so on.

    Parameters
    ----------
    every_n_steps : int
        Look at the first step and at every n-th.
    per_parameter : bool
        Each parameter by itself, too.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[GradientStats(every_n_steps=10), TensorBoard(log_every_n_steps=10)])
    >>> tl.history["grad_norm"]
    [1.25, 0.75, 0.5]
    """

    def __init__(self, every_n_steps: int = 50, per_parameter: bool = False) -> None:
        super().__init__("GradientStats", execution_order=-1)
        if every_n_steps < 1:
            raise ConfigurationError(f"GradientStats: every_n_steps={every_n_steps}: must be 1 or more.")
        self.every_n_steps = every_n_steps
        self.per_parameter = per_parameter

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        loop = self.train_loop_obj
        step = loop.global_step + 1
        if step % self.every_n_steps and step != 1:
            return
        suffix = f"/optimizer{optimizer_idx}" if isinstance(loop.optimizer, MultiOptimizer) else ""
        gradients = [p.grad for p in self.parameters(optimizer_idx) if p.grad is not None and p.grad.numel()]
        if not gradients:
            return
        dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        norms = _stack(norms_of(dense))
        self._log(f"grad_norm{suffix}", torch.linalg.vector_norm(norms))
        self._log(f"grad_max{suffix}", _stack(norms_of(dense, math.inf)).max())
        if self.per_parameter:
            names = {id(p): name for name, p in loop.model.named_parameters()}
            owners = [p for p in self.parameters(optimizer_idx) if p.grad is not None and p.grad.numel()]
            for parameter, norm in zip(owners, norms, strict=True):
                if id(parameter) in names:
                    self._log(f"grad_norm/{names[id(parameter)]}", norm)

    def _log(self, name: str, value: Tensor) -> None:
        # The same on all ranks, so there is nothing to average.
        self.log(name, value, on_step=True, on_epoch=True, sync_dist=False, batch_size=1)


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


def _stack(values: Iterable[Tensor]) -> Tensor:
    values = list(values)
    return torch.stack([value.to(values[0].device, torch.float32) for value in values])
