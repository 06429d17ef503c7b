"""Callbacks that read or change gradients between the backward pass and the optimizer's step.

``on_after_gradient_update`` is called once per step (with a :class:`~trainloop.optim.MultiOptimizer`, once for each
optimizer). The gradients are then complete: summed over micro-batches, averaged over ranks, and unscaled. They are the
same on all ranks. These callbacks do not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainloop.callbacks.arguments import check_flags, count_of, number_of
from trainloop.callbacks.base import AbstractCallback
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiOptimizer
from trainloop.optim.optimizers import parameters_of
from trainloop.optim.parameters import explain_sparse, named_trained_parameters, trained_parameters
from trainloop.parallel.sharded.shards import clip_gradients, is_sharded, norms_over_ranks

__all__ = ["GradientCallbackBase", "GradientClipping", "GradientStats"]


class GradientCallbackBase(AbstractCallback):
    """Base of callbacks that read or change gradients. :meth:`parameters` returns the parameters to process.

    Parameters
    ----------
    callback_name : str
    execution_order : int
        As in :class:`AbstractCallback`. :class:`GradientStats` has -1 and :class:`GradientClipping` has 0, so that
        statistics are taken before clipping.

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
        """Return the parameters of the model, the criterion and the optimizer; with several, of the given optimizer."""
        loop = self.train_loop_obj
        if isinstance(loop.optimizer, MultiOptimizer):
            return parameters_of(loop.optimizer[optimizer_idx])
        return trained_parameters(loop.model, loop.criterion, loop.optimizer)

    def named_parameters(self, optimizer_idx: int = 0) -> list[tuple[str, Tensor]]:
        """Return ``(name, parameter)`` for each of the :meth:`parameters`.

        Names of the criterion's parameters begin with ``criterion.``
        """
        loop = self.train_loop_obj
        chosen = {id(parameter) for parameter in self.parameters(optimizer_idx)}
        named = named_trained_parameters(loop.model, loop.criterion, loop.optimizer)
        return [(name, parameter) for name, parameter in named if id(parameter) in chosen]


class GradientClipping(GradientCallbackBase):
    """Clip gradients before each step: first each element (``max_value``), then the total norm (``max_norm``).

    With AMP, gradients are unscaled first. With one optimizer, ``TrainLoop(gradient_clip_norm=...)`` is the same as
    ``max_norm``. With several that step together, it limits the norm of all their gradients together.

    Parameters
    ----------
    max_norm : float, optional
        Maximum total norm of the gradients. With several optimizers, the limit applies to each optimizer separately.
    max_value : float, optional
        Maximum absolute value of an element.
    norm_type : float
        Order of the norm; ``inf`` is allowed.

    Raises
    ------
    ConfigurationError
        If no limit is given, or a limit is not above zero.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[GradientClipping(max_norm=1.0)])
    """

    def __init__(
        self, max_norm: float | None = None, max_value: float | None = None, norm_type: float = 2.0, **kwargs: Any
    ) -> None:
        super().__init__("GradientClipping")
        if max_norm is None and max_value is None:
            raise ConfigurationError(f"{type(self).__name__}: pass max_norm, max_value or both.")
        self.max_norm = number_of("GradientClipping", "max_norm", max_norm, optional=True, above=0)
        self.max_value = number_of("GradientClipping", "max_value", max_value, optional=True, above=0)
        norm_type = math.inf if norm_type == "inf" else norm_type  # as torch allows
        self.norm_kwargs = {"norm_type": number_of("GradientClipping", "norm_type", norm_type), **kwargs}

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        parameters = self.parameters(optimizer_idx)
        try:
            if self.max_value is not None:
                nn.utils.clip_grad_value_(parameters, self.max_value)
            if self.max_norm is not None:
                clip_gradients(parameters, self.max_norm, **self.norm_kwargs)
        except (RuntimeError, NotImplementedError):
            loop = self.train_loop_obj
            explain_sparse(loop.model, loop.criterion, loop.optimizer, type(self).__name__)
            raise


class GradientStats(GradientCallbackBase):
    """Log the gradients' norms to the history, TensorBoard and other loggers.

    It logs the total 2-norm as ``grad_norm``, the largest absolute value as ``grad_max``, and, with ``per_parameter``,
    each parameter's norm as ``grad_norm/<name>``. With several optimizers, the names are ``grad_norm/optimizer0``,
    ``grad_max/optimizer0`` and so on. All values are measured before clipping.

    Parameters
    ----------
    every_n_steps : int
        Log at the first step and at every n-th step. Default: 50.
    per_parameter : bool
        Log the norm of each parameter, too.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[GradientStats(every_n_steps=10), TensorBoard(log_every_n_steps=10)])
    >>> tl.history["grad_norm"]
    [1.25, 0.75, 0.5]
    """

    def __init__(self, every_n_steps: int = 50, per_parameter: bool = False) -> None:
        super().__init__("GradientStats", execution_order=-1)
        self.every_n_steps = count_of("GradientStats", "every_n_steps", every_n_steps)
        self.per_parameter = per_parameter
        check_flags(type(self).__name__, per_parameter=self.per_parameter)

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        loop = self.train_loop_obj
        if not self._is_due():
            return
        # Several may have other intervals. Each value counts once.
        due = [one for one in loop.callbacks if isinstance(one, GradientStats) and one._is_due()]
        logs_totals = next(iter(due), self) is self
        logs_each = self.per_parameter and next((one for one in due if one.per_parameter), self) is self
        suffix = f"/optimizer{optimizer_idx}" if isinstance(loop.optimizer, MultiOptimizer) else ""
        gradients = [p.grad for p in self.parameters(optimizer_idx) if p.grad is not None and p.grad.numel()]
        if not gradients:
            return
        dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        norms = _stack(norms_of(dense))
        if logs_totals:
            self._log(f"grad_norm{suffix}", torch.linalg.vector_norm(norms))
            self._log(f"grad_max{suffix}", _stack(norms_of(dense, math.inf)).max())
        if logs_each:
            by_gradient = {id(gradient): norm for gradient, norm in zip(gradients, norms, strict=True)}
            for name, parameter in self.named_parameters(optimizer_idx):
                if id(parameter.grad) in by_gradient:
                    self._log(f"grad_norm/{name}", by_gradient[id(parameter.grad)])

    def _is_due(self) -> bool:
        step = self.train_loop_obj.global_step + 1
        return step % self.every_n_steps == 0 or step == 1

    def _log(self, name: str, value: Tensor) -> None:
        # Equal on all ranks, so no average is needed.
        self.log(name, value, on_step=True, on_epoch=True, sync_dist=False, batch_size=1)


def _stack(values: Iterable[Tensor]) -> Tensor:
    values = list(values)
    return torch.stack([value.to(values[0].device, torch.float32) for value in values])


def norms_of(tensors: Sequence[Tensor], order: float = 2) -> Sequence[Tensor]:
    """Return the norm of each tensor. On a GPU, a few kernels compute all of them.

    ``torch._foreach_norm`` is private, but torch's ``get_total_norm`` uses it (checked in the sources of 2.6 to 2.15).
    Without it, each tensor needs its own kernel.
    """
    if any(map(is_sharded, tensors)):
        return norms_over_ranks(tensors, order)
    if order == math.inf and all(tensor.device.type == "cpu" for tensor in tensors):
        return [_largest(tensor) for tensor in tensors]
    if hasattr(torch, "_foreach_norm"):
        return torch._foreach_norm(list(tensors), order)
    return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]


def which_are_finite(values: Sequence[Tensor]) -> list[bool]:
    """Return a bool for each 0-d tensor: True if it is finite. Waits for the device once."""
    if len({(value.device, value.dtype) for value in values}) == 1:
        return cast("list[bool]", torch.stack(list(values)).isfinite().tolist())
    device = values[0].device
    return cast("list[bool]", torch.stack([value.isfinite().to(device) for value in values]).tolist())


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, or NaN if the tensor contains NaN.

    This is 20 times as fast as torch's norm (2.13).
    """
    low, high = (tensor.abs() if tensor.is_complex() else tensor).aminmax()
    return torch.maximum(low.abs(), high.abs())
