"""Gather or reduce nested tensors and numbers over all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainloop._support.nested import parts_of, paths_of, with_parts
from trainloop.distributed.objects import backend_of, cpu_group, gather_object, reaches_others
from trainloop.distributed.ranks import get_world_size, has_group, outside_of_graphs, with_value
from trainloop.distributed.wire import SAME_CALLS
from trainloop.errors import ConfigurationError

_Reduce = Literal["mean", "sum", "min", "max"]
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_OPS = {"mean": "SUM", "sum": "SUM", "min": "MIN", "max": "MAX"}
_BUCKET_BYTES = 32 * 2**20
_LARGEST = 2**63 - 1


class _Leaf(NamedTuple):
    """Description of one tensor in a nested value, as plain data for the other ranks."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    device_type: str
    has_gradient: bool = False

    def __str__(self) -> str:
        gradient = " with a gradient" if self.has_gradient else ""
        return f"value{self.path}: {self.dtype.removeprefix('torch.')} of shape {self.shape}{gradient}"


def _map_leaves(value: Any, leaf: Callable[[Any, str], Any], path: str = "") -> Any:
    """Return ``value`` with every item that is not a container replaced by ``leaf(item, path)``; None is kept."""
    if value is None:
        return None
    parts = parts_of(value)
    if parts is None:
        return leaf(value, path)
    return with_parts(
        value, [_map_leaves(p, leaf, path + step) for p, step in zip(parts, paths_of(value), strict=True)]
    )


def _as_tensor(value: Any, path: str, summands: int) -> Tensor:
    """Return a leaf as a tensor; Python integers must fit into 64 bits, also the sum of ``summands`` of this size."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"value{path} is a tensor of layout {value.layout}. Pass a dense tensor (.to_dense())")
        return value.detach().resolve_conj().resolve_neg()
    if isinstance(value, float):  # exactly as float64; the conversion to the default dtype would round it
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    if isinstance(value, (bool, int)):
        if not -_LARGEST - 1 <= value * summands <= _LARGEST:
            raise TypeError(
                f"value{path} is {value}, of which the {'sum' if summands > 1 else 'value'} may not fit into 64 bits. "
                "Pass a float, or use gather_object, which accepts all integers"
            )
        return torch.tensor(value, device="cpu")
    if isinstance(value, complex):
        return torch.tensor(value, dtype=torch.complex128, device="cpu")
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        # torch accepts neither negative strides nor another byte order.
        return torch.as_tensor(np.asarray(value, value.dtype.newbyteorder("="), order="C"), device="cpu")
    raise TypeError(
        f"value{path} is of type {type(value).__name__}, not a tensor or a number. Use gather_object for other objects"
    )


class _Agreed(NamedTuple):
    """Description of one leaf that all ranks have agreed on."""

    dtype: torch.dtype
    """The common dtype."""
    direct: bool
    """True if the device's own backend can exchange it."""
    shapes: list[tuple[int, ...]]
    """Shape on each rank."""


def _agreed_exchanges(
    call: str, tensors: dict[str, Tensor], with_gradient: Collection[str] = (), *, rows_may_differ: bool = False
) -> dict[str, _Agreed]:
    """Agree on the exchange of each path, in the same order on all ranks.

    Raises on every rank if ranks called different functions, or if their values differ in structure or shape: the
    collectives below would hang or mix up memory.
    """
    own: tuple[str, list[_Leaf]] = (
        call,
        [
            _Leaf(path, tuple(t.shape), str(t.dtype), t.device.type, path in with_gradient)
            for path, t in sorted(tensors.items())
        ],
    )
    everyone = _everyone(own, call)
    calls = [theirs[0] for theirs in everyone]
    if len(set(calls)) > 1:
        listed = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(calls))
        raise ValueError(f"ranks called different exchanges ({listed}). {SAME_CALLS}")
    first = int(rows_may_differ)
    forms = [[(leaf.path, leaf.shape[first:], leaf.has_gradient) for leaf in leaves] for _, leaves in everyone]
    if any(form != forms[0] for form in forms):
        # If the values differ in only a few leaves, show only these.
        common = set.intersection(*(set(form) for form in forms))
        odd = [
            [str(leaf) for leaf, form in zip(leaves, rank_forms, strict=True) if form not in common]
            for (_, leaves), rank_forms in zip(everyone, forms, strict=True)
        ]
        listed = "; ".join(f"rank {rank}: {', '.join(leaves) or 'nothing'}" for rank, leaves in enumerate(odd))
        raise ValueError(
            f"{call}: the ranks' values differ in structure or shape ({listed}). Every rank must pass the same "
            "structure and shapes. If only the first axis differs, as in an uneven last batch, use all_gather(value, "
            "concat=True). Otherwise pad or cut the tensors to one shape, or use gather_object, which accepts "
            "different shapes."
        )
    agreed: dict[str, _Agreed] = {}
    for same_leaf in zip(*(leaves for _, leaves in everyone), strict=True):
        # An empty batch often has another dtype than other batches: float32 instead of int64.
        dtype = functools.reduce(torch.promote_types, (_DTYPES[leaf.dtype] for leaf in same_leaf))
        device_types = {leaf.device_type for leaf in same_leaf}
        device_type = device_types.pop() if len(device_types) == 1 else "cpu"
        direct = device_type != "cpu" and backend_of(device_type) not in (None, "gloo")
        agreed[same_leaf[0].path] = _Agreed(dtype, direct, [tuple(leaf.shape) for leaf in same_leaf])
    return agreed


def _everyone(own: tuple[str, list[_Leaf]] | str, call: str) -> list[tuple[str, list[_Leaf]]]:
    """Return each rank's description of its value, or a string with the reason why that value can't be exchanged."""
    # A rank with an error calls this, too; otherwise the other ranks would keep waiting here.
    everyone = gather_object(own)
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise TypeError(f"{call}: on rank {rank}, {theirs}.")
        if not (isinstance(theirs, tuple) and len(theirs) == 2 and isinstance(theirs[0], str)):
            raise ValueError(
                f"ranks called different exchanges (this rank: {call}; rank {rank}: gather_object, maybe by the loop "
                f"itself, at the end of an epoch or an evaluation). {SAME_CALLS}"
            )
    return everyone  # type: ignore[return-value]  # no str is left


def in_replica() -> AbstractContextManager[None]:
    """In the block, exchanges of tensors raise an error: this thread has one replica's part of a batch (``dp``)."""
    return with_value(_replica, True)


def in_borrowed_batch() -> AbstractContextManager[None]:
    """In the block, exchanges raise an error: this rank has no samples and repeats another rank's (``fsdp``)."""
    return with_value(_borrowed, True)


def noting_exchanges(calls: list[str]) -> AbstractContextManager[None]:
    """In the block, append the name of each exchange of tensors to the list."""
    return with_value(_noted, calls)


_replica: ContextVar[bool] = ContextVar("replica", default=False)
_borrowed: ContextVar[bool] = ContextVar("borrowed", default=False)
_noted: ContextVar[list[str] | None] = ContextVar("noted", default=None)


def _own_tensors(value: Any, call: str, summands: int = 1) -> dict[str, Tensor]:
    """Return the leaves of this rank's value as tensors without a gradient, by path."""
    if (noted := _noted.get()) is not None:
        noted.append(call)
    if _replica.get():
        raise ConfigurationError(
            f"{call} in gpu_mode='dp': each replica has only a part of the batch, and replicas can't exchange values, "
            "so the result would be that of the part. Use gpu_mode='ddp' (or 'single'), which gives the result of the "
            "whole batch."
        )
    if _borrowed.get() and has_group():
        raise ConfigurationError(
            f"{call} in get_loss: this rank has no samples in the epoch's last batch, and in fsdp it repeats another "
            "rank's samples, which would count twice. Pass drop_last=True to the loader, or another batch_size."
        )
    found: dict[str, Tensor] = {}
    try:
        _map_leaves(value, lambda item, path: found.update({path: _as_tensor(item, path, summands)}))
    except TypeError as e:
        _everyone(str(e), call)  # raises, here and on the other ranks
    return found


@outside_of_graphs
def all_gather(value: Any, *, concat: bool = False) -> Any:
    """Gather the values of all ranks on every rank, along a new first axis; gradients flow back through it.

    Collective: every rank calls it.

    Parameters
    ----------
    value : tensor, number, or nested dict, list, tuple, namedtuple of these
        Tensors of any dtype on any device, numpy arrays and scalars, or Python numbers. ``None`` is returned unchanged.
        Every rank must pass the same structure and shapes. If dtypes differ, the values are promoted.
    concat : bool
        Join the values along their first axis instead of a new one. The length of this axis may differ between ranks,
        as in an uneven last batch.

    Returns
    -------
    same structure
        Each tensor of shape ``(*s)`` becomes one of shape ``(world_size, *s)`` on the device of this rank's tensor;
        entry r is from rank r. Numbers and arrays become CPU tensors, with dtype float64 for a Python float. In one
        process the new axis has length 1. With ``concat``, tensors of shape ``(n_r, *s)`` become one of shape ``(n_0 +
        n_1 + ..., *s)``, in the order of ranks, and numbers become a vector. The result is a copy.

    Raises
    ------
    ValueError
        On every rank, if ranks pass different structures or shapes, or if tensors require a gradient on some ranks
        only. The message says what each rank passed.
    TypeError
        On every rank, if a rank passes an object that is not a tensor or number, or an integer of more than 64 bits.

    Notes
    -----
    A call takes one small exchange for the shapes, then one for each tensor.

    The gradient of a tensor is the sum of the gradients of all ranks' losses with respect to this tensor. Therefore
    every rank must run the backward, which all-reduces a tensor of the gathered size. The loss needs no factor for the
    number of ranks, because ``DistributedDataParallel`` divides the sum by that number. This is true for a loss over
    all gathered rows, and for a mean loss that compares the rank's own rows with all rows. If no gradient is needed,
    for example for metrics, pass ``value.detach()``.

    Examples
    --------
    >>> all_gather({"loss": torch.tensor(0.5), "seen": 7})  # in one process
    {'loss': tensor([0.5000]), 'seen': tensor([7])}
    >>> all_gather(torch.ones(3, 2), concat=True).shape
    torch.Size([3, 2])
    """
    call = "all_gather(concat=True)" if concat else "all_gather"
    tensors = _own_tensors(value, call)
    if concat:
        tensors = {path: t.reshape(1) if t.ndim == 0 else t for path, t in tensors.items()}
    sources = _with_gradient(value)
    gathered: dict[str, Tensor] = {}
    if not reaches_others("all_gather"):
        for path, own in tensors.items():
            source = sources[path].reshape(own.shape) if path in sources else own
            gathered[path] = source.clone() if concat else source.clone().unsqueeze(0)
        return _map_leaves(value, lambda _item, path: gathered[path])
    rank = dist.get_rank()
    agreed = _agreed_exchanges(call, tensors, sources, rows_may_differ=concat)
    for path, (dtype, direct, shapes) in agreed.items():
        parts = _exchanged(_routed(tensors[path], direct).to(dtype), shapes, direct)
        gathered[path] = (torch.cat(parts) if concat else torch.stack(parts)).to(tensors[path].device)
        if path in sources:
            rows = [shape[0] if concat else 1 for shape in shapes]
            where = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
            gathered[path] = _Flow.apply(sources[path], [gathered[path]], where, direct)
    return _map_leaves(value, lambda _item, path: gathered[path])


def _exchanged(own: Tensor, shapes: list[tuple[int, ...]], direct: bool) -> list[Tensor]:
    """Return each rank's tensor. Tensors are exchanged as bytes, so that any dtype works."""
    flat = own.reshape(-1).view(torch.uint8)
    lengths = [math.prod(shape) * own.dtype.itemsize for shape in shapes]
    padded = flat.new_zeros(max(lengths))  # Gloo and NCCL gather equal shapes only
    padded[: flat.numel()] = flat
    rows = padded.new_empty(len(shapes), padded.numel())
    dist.all_gather(list(rows), padded, group=None if direct else cpu_group())
    # The clone is aligned for any dtype; a slice of bytes may not be.
    return [
        row[:length].clone().view(own.dtype).reshape(shape)
        for row, length, shape in zip(rows, lengths, shapes, strict=True)
    ]


def _with_gradient(value: Any) -> dict[str, Tensor]:
    """Return the tensors through which a gradient flows back, by path."""
    found: dict[str, Tensor] = {}

    def look(item: Any, path: str) -> None:
        if isinstance(item, Tensor) and item.requires_grad:
            found[path] = item

    if torch.is_grad_enabled():
        _map_leaves(value, look)
    return found


class _Flow(torch.autograd.Function):
    """Autograd function from this rank's part to the gathered tensors."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, gathered: list[Tensor], where: slice, direct: bool) -> Tensor:
        ctx.shape, ctx.dtype, ctx.where, ctx.direct = own.shape, own.dtype, where, direct
        return gathered[0]  # in a list, so that autograd doesn't treat it as an input passed through

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        wide = _routed(gradient, ctx.direct).to(_accumulation_dtype(gradient.dtype, "sum"))
        # Autograd may use the gradient elsewhere, and all_reduce works in place.
        total = wide.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=None if ctx.direct else cpu_group())
        own = total[ctx.where].reshape(ctx.shape)
        return own.to(gradient.device, ctx.dtype), None, None, None


@outside_of_graphs
def all_reduce(value: Any, reduce: _Reduce = "mean") -> Any:
    """Reduce the values of all ranks to one value, and return it on every rank. The input is not changed.

    Collective: every rank calls it.

    Parameters
    ----------
    value : tensor, number, or nested dict, list, tuple, namedtuple of these
        As in :func:`all_gather`.
    reduce : 'mean', 'sum', 'min' or 'max'
        The reduction. In a mean, each rank counts once. To weight by samples, reduce sums and counts separately. NaN on
        any rank gives NaN.

    Returns
    -------
    same structure
        Tensors keep their shapes and devices, arrays become CPU tensors, and Python numbers stay Python numbers. Dtypes
        are kept (or promoted, if they differ between ranks), with two exceptions: the mean of integers and bools is a
        float of torch's default dtype, and the sum of bools is an integer. The result is bit-identical on every rank,
        and no gradient flows through it.

    Raises
    ------
    ConfigurationError
        If ``reduce`` is not one of the four names.
    ValueError, TypeError
        As in :func:`all_gather`; also for the 'min' and 'max' of complex numbers, and for Python integers of which the
        sum may not fit into 64 bits.

    Notes
    -----
    A call takes one small exchange for the shapes, then one for each tensor. 16-bit floats are summed in float32.

    Examples
    --------
    >>> all_reduce([torch.tensor([1, 2]), 3], "mean")  # in one process
    [tensor([1., 2.]), 3.0]
    """
    if reduce not in _OPS:
        raise ConfigurationError(f"reduce={reduce!r}: must be 'mean', 'sum', 'min' or 'max'.")
    call = f"all_reduce('{reduce}')"
    tensors = _own_tensors(value, call, get_world_size() if reduce == "sum" else 1)
    if reaches_others("all_reduce"):
        agreed = _agreed_exchanges(call, tensors)
    else:
        agreed = {path: _Agreed(t.dtype, False, [tuple(t.shape)]) for path, t in tensors.items()}
    for path, (dtype, *_) in agreed.items():
        if dtype.is_complex and reduce in ("min", "max"):
            raise TypeError(f"{call}: value{path} is complex, and complex numbers have no order.")
    reduced: dict[str, Tensor] = {}
    for path, (dtype, direct, _) in agreed.items():
        own = _routed(tensors[path], direct).to(_accumulation_dtype(dtype, reduce))
        total = own.clone(memory_format=torch.contiguous_format)
        if has_group():
            reduce_in_place(total, reduce, None if direct else cpu_group())
        reduced[path] = total / get_world_size() if reduce == "mean" else total

    def like(item: Any, path: str) -> Any:
        result, dtype = reduced[path], _result_dtype(agreed[path].dtype, reduce)
        if isinstance(item, (bool, int, float, complex)):
            # Read it in the sum's dtype: converting it to the default dtype would round it.
            return bool(result) if dtype == torch.bool else result.item()
        return result.to(tensors[path].device, dtype, copy=True)

    return _map_leaves(value, like)


def reduce_in_place(tensor: Tensor, reduce: Literal["sum", "mean", "min", "max"], group: Any) -> None:
    """Replace a contiguous tensor by its reduction over the ranks of a group (``'mean'``: by its sum). Collective.

    A NaN of any rank makes a minimum or maximum NaN, as in torch's functions. In backends, it depends on the rank.
    """
    op = getattr(dist.ReduceOp, _OPS[reduce])
    if op == dist.ReduceOp.SUM or not tensor.is_floating_point():
        dist.all_reduce(tensor, op, group=group)
        return
    missing, sign = tensor.isnan(), 1 if reduce == "max" else -1
    both = torch.stack([(sign * tensor).masked_fill(missing, -torch.inf), missing.to(tensor.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    tensor.copy_((sign * both[0]).masked_fill(both[1] > 0, torch.nan))


def _accumulation_dtype(dtype: torch.dtype, reduce: str) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return torch.float64 if reduce == "mean" else torch.int64


def _result_dtype(dtype: torch.dtype, reduce: str) -> torch.dtype:
    if dtype.is_complex or dtype.is_floating_point:
        return dtype
    if reduce == "mean":
        return torch.get_default_dtype()
    return torch.int64 if dtype == torch.bool and reduce == "sum" else dtype


def _routed(tensor: Tensor, direct: bool) -> Tensor:
    return tensor if direct else tensor.cpu()


def buckets(tensors: Iterable[Tensor], sent: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Iterator[Any]:
    """Yield the tensors in lists whose ``sent`` tensors have one dtype and device, about 32 MiB each."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((sent(tensor).dtype, tensor.device), []).append(tensor)
    for same_kind in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in same_kind:
            bucket.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def copy_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite tensors of any strides with the values of the group's first rank. Collective.

    Each dtype needs one exchange per 32 MiB. (NCCL refuses tensors that are not contiguous, and Gloo ignores strides.)
    """
    is_first = dist.get_rank(group) == 0
    for bucket in buckets(tensor.detach() for tensor in tensors):
        alone = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0].view(-1) if alone else torch.cat([tensor.reshape(-1) for tensor in bucket])
        # As bytes: not every version of Gloo sends each dtype, such as complex numbers.
        sent = flat.view(torch.uint8) if flat.numel() else flat
        dist.broadcast(sent, 0 if group is None else dist.get_global_rank(group, 0), group=group)
        if not (alone or is_first):
            for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(values.view(tensor.shape))
