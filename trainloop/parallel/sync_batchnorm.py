"""Let BatchNorm layers normalise over the batches of all ranks, even on the CPU: convert and revert them in place.

``torch.nn.SyncBatchNorm`` rejects the CPU, and its converter replaces modules, which loses their hooks and identity
and can't be undone. Here only a layer's class changes: object, parameters, buffers and hooks remain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from trainloop.distributed.peers import only_trusted_peers
from trainloop.distributed.tensors import copy_from_first
from trainloop.errors import ConfigurationError
from trainloop.parallel.transparent import check_not_lazy

__all__ = ["BatchNorm", "CpuSyncBatchNorm", "SyncedLayers", "convert", "of_this_rank", "participating", "revert"]

_CLASS_BEFORE = "_class_before_sync"
_ALONE = "_normalises_alone"


def convert(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Let every BatchNorm layer in a module normalise over the samples of all ranks, in training.

    Every rank must call this with the module on its final device, before it wraps the module in
    ``DistributedDataParallel``.

    Parameters
    ----------
    module : nn.Module
        Changed in place. Layers on a GPU become ``torch.nn.SyncBatchNorm``, others :class:`CpuSyncBatchNorm`; each
        remains an instance of its former class as well, so the other behaviour of a subclass is kept. InstanceNorm and
        layers that already synchronise are not changed.
    process_group : ProcessGroup, optional
        Default: all ranks.

    Returns
    -------
    nn.Module
        The same object.

    Raises
    ------
    ConfigurationError
        If a layer is lazy and has no shape yet.
    """
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            check_not_lazy(layer, "sync_batchnorm")
    for layer in module.modules():
        if isinstance(layer, BatchNorm) and not isinstance(layer, (nn.SyncBatchNorm, CpuSyncBatchNorm)):
            tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
            on_gpu = bool(tensors) and tensors[0].is_cuda
            before = type(layer)
            layer.__dict__[_CLASS_BEFORE] = before
            layer.__dict__["process_group"] = process_group
            layer.__class__ = _synchronised(before, CudaSyncBatchNorm if on_gpu else CpuSyncBatchNorm)
    return module


def revert(module: nn.Module) -> nn.Module:
    """Undo :func:`convert` in place: layers get their former class back.

    Returns
    -------
    nn.Module
        The same object.
    """
    for layer in module.modules():
        before = layer.__dict__.pop(_CLASS_BEFORE, None)
        if before is not None:
            del layer.__dict__["process_group"]
            layer.__class__ = before
    return module


class SyncedLayers:
    """The BatchNorm layers of several modules that normalise over all ranks, until :meth:`revert`."""

    def __init__(self) -> None:
        self._layers: dict[int, nn.Module] = {}

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers.values())

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Convert the layers of these modules that are not converted yet."""
        for module in modules:
            self._layers.update((id(layer), layer) for layer in _synced_in([convert(module)]))

    def revert(self) -> None:
        """Revert all layers, also those that modules no longer have."""
        for layer in self:
            revert(layer)


def _synced_in(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [layer for module in modules for layer in module.modules() if _CLASS_BEFORE in layer.__dict__]


@contextlib.contextmanager
def participating(modules: Iterable[nn.Module], ranks: Sequence[int]) -> Iterator[None]:
    """Within the context, let the synchronised layers of modules normalise over some ranks only.

    Use it around the forward **and** the backward of a step in which some ranks have no batch left. Collective:
    **every** rank calls it with the same ``ranks``. Ranks that are not in ``ranks`` run nothing inside.

    Parameters
    ----------
    modules : iterable of nn.Module
        Modules that :func:`convert` has converted.
    ranks : sequence of int
        Global ranks that have a batch in this step.

    Notes
    -----
    The first call with given ranks creates a process group of these ranks, for which every rank must make the call.
    (torch can create a group by calls of its members alone, but this fails if some members have created more groups
    before than others, as here.) The group is kept as long as the default group exists.
    """
    layers = _synced_in(modules)
    if not layers or not dist.is_initialized():
        yield
        return
    group = _group_of(tuple(sorted(ranks)))
    before = [layer.__dict__["process_group"] for layer in layers]
    for layer in layers:
        layer.__dict__["process_group"] = group
    try:
        yield
    finally:
        for layer, former in zip(layers, before, strict=True):
            layer.__dict__["process_group"] = former
    if 0 in ranks and len(ranks) < dist.get_world_size():
        # Callbacks of ranks without samples read the statistics of this step, too.
        copy_from_first(buffer for layer in layers for buffer in layer.buffers(recurse=False))


@contextlib.contextmanager
def of_this_rank(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the context, let the synchronised layers of modules normalise over this rank's batch alone.

    In an evaluation, ranks have whole batches, and different numbers of them. Layers in training mode (for adaptation
    at test time, for example) then do what they do in one process.
    """
    layers = [layer for layer in _synced_in(modules) if _ALONE not in layer.__dict__]
    try:
        for layer in layers:  # not by the class, which may be one of fully_shard
            layer.__dict__[_ALONE] = True
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop(_ALONE, None)


_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _group_of(ranks: tuple[int, ...]) -> Any:
    default = dist.group.WORLD
    default_then, group = _groups.get(ranks, (None, None))
    if default_then is not default:
        with only_trusted_peers():
            group = dist.new_group(list(ranks))
        _groups[ranks] = (default, group)
    return group


class CpuSyncBatchNorm(BatchNorm):
    """BatchNorm over the samples of all ranks, with operations that every device has.

    In the forward and the backward, it equals a BatchNorm layer that gets the batches of all ranks as one batch, even
    if ranks have unequal numbers of samples, or no samples. In evaluation, and in one process, it is plain BatchNorm.
    Created by :func:`convert`.

    Notes
    -----
    The forward exchanges ``2 C + 1`` numbers once, the backward ``2 C`` numbers once, for ``C`` channels.
    """

    process_group: dist.ProcessGroup | None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, in the same shape."""
        over_batch = self.training or (self.running_mean is None and self.running_var is None)
        synchronises = self.training and _ALONE not in self.__dict__ and dist.is_available() and dist.is_initialized()
        if not over_batch or not synchronises or dist.get_world_size(self.process_group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the plain mean over all batches
                factor = 1.0 / float(self.num_batches_tracked)
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps, self.process_group)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output


class CudaSyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm, which can also normalise alone."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, in the same shape."""
        return BatchNorm.forward(self, input) if _ALONE in self.__dict__ else super().forward(input)


class _Normalise(torch.autograd.Function):
    """Normalise input over all ranks; return the result, mean, variance, and number of values per channel."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)  # 16-bit sums would lose the variance
        x = input.to(wide)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        channels = x.shape[1]
        count = x.numel() // channels if channels else 0
        mean = x.mean(axes) if count else x.new_zeros(channels)
        deviation = (x - _along(mean, x)).square().sum(axes)
        own = torch.cat([mean, deviation, x.new_tensor([count])])
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, own, group=group)
        # Combine means and deviations of parts (Chan, Golub, LeVeque 1979): a sum of squares would
        # cancel if the mean is large.
        means, deviations, counts = torch.stack(everyone).split([channels, channels, 1], dim=1)
        total = counts.sum()
        if total <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got {int(total)} over all ranks")
        mean = (means * counts).sum(0) / total
        variance = (deviations + counts * (means - mean).square()).sum(0) / total
        inverse = torch.rsqrt(variance + eps)
        normal = (x - _along(mean, x)) * _along(inverse, x)
        output = normal if weight is None else normal * _along(weight.to(wide), x)
        if bias is not None:
            output = output + _along(bias.to(wide), x)
        ctx.save_for_backward(input, weight, mean, inverse, total)
        ctx.group, ctx.axes = group, axes
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = _Normalise._gradients(ctx, grad_output)
        if not torch.is_grad_enabled():
            return *gradients, None, None
        input, weight = ctx.saved_tensors[:2]  # create_graph=True
        once = (
            None if gradient is None else _Once.apply(gradient, grad_output, input, weight) for gradient in gradients
        )
        return *once, None, None

    @staticmethod
    def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse, total = ctx.saved_tensors
        x, grad = input.to(mean.dtype), grad_output.to(mean.dtype)
        normal = (x - _along(mean, x)) * _along(inverse, x)
        sum_grad, sum_grad_normal = grad.sum(ctx.axes), (grad * normal).sum(ctx.axes)
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_grad, sum_grad_normal])
            dist.all_reduce(sums, group=ctx.group)
            mean_grad, mean_grad_normal = (sums / total).chunk(2)
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            grad_input = _along(scale, x) * (grad - _along(mean_grad, x) - normal * _along(mean_grad_normal, x))
            grad_input = grad_input.to(input.dtype)
        # Return only this rank's part, since DDP averages gradients of parameters.
        grad_weight = sum_grad_normal.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sum_grad.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias


class _Once(torch.autograd.Function):
    """A gradient that can't be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *_: Any) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise ConfigurationError(
            "sync_batchnorm=True: a gradient penalty, or another second derivative, can't be computed through a "
            "BatchNorm that normalises over all ranks. Use InstanceNorm, GroupNorm or LayerNorm in this network, or "
            "leave sync_batchnorm out."
        )


def _along(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))


# At module level, so that a model that contains them can be pickled.
class SyncBatchNorm1d(nn.BatchNorm1d, CpuSyncBatchNorm):
    """BatchNorm1d over all ranks."""


class SyncBatchNorm2d(nn.BatchNorm2d, CpuSyncBatchNorm):
    """BatchNorm2d over all ranks."""


class SyncBatchNorm3d(nn.BatchNorm3d, CpuSyncBatchNorm):
    """BatchNorm3d over all ranks."""


class CudaSyncBatchNorm1d(nn.BatchNorm1d, CudaSyncBatchNorm):
    """BatchNorm1d over all ranks, by torch's kernels."""


class CudaSyncBatchNorm2d(nn.BatchNorm2d, CudaSyncBatchNorm):
    """BatchNorm2d over all ranks, by torch's kernels."""


class CudaSyncBatchNorm3d(nn.BatchNorm3d, CudaSyncBatchNorm):
    """BatchNorm3d over all ranks, by torch's kernels."""


_classes: dict[tuple[type, type], type] = {
    (nn.BatchNorm1d, CpuSyncBatchNorm): SyncBatchNorm1d,
    (nn.BatchNorm2d, CpuSyncBatchNorm): SyncBatchNorm2d,
    (nn.BatchNorm3d, CpuSyncBatchNorm): SyncBatchNorm3d,
    (nn.BatchNorm1d, CudaSyncBatchNorm): CudaSyncBatchNorm1d,
    (nn.BatchNorm2d, CudaSyncBatchNorm): CudaSyncBatchNorm2d,
    (nn.BatchNorm3d, CudaSyncBatchNorm): CudaSyncBatchNorm3d,
}


def _synchronised(cls: type, sync: type) -> type:
    """Return the class with another normalisation; a subclass keeps its code around ``super().forward``."""
    if (cls, sync) not in _classes:
        _classes[cls, sync] = type(f"Sync{cls.__name__}", (cls, sync), {"__module__": cls.__module__})
    return _classes[cls, sync]
