"""Nested tensors and numbers of all ranks: gathered, or reduced to one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainloop.distributed.columns import DTYPES
from trainloop.distributed.objects import backend_of, cpu_group, gather_object
from trainloop.distributed.ranks import get_world_size, has_group
from trainloop.errors import ConfigurationError

_Reduce = Literal["mean", "sum", "min", "max"]
_OPS = {"mean": "SUM", "sum": "SUM", "min": "MIN", "max": "MAX"}


class _Leaf(NamedTuple):
    """One tensor of a nested value, as the other ranks need to know it: plain data."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    device_type: str

    def __str__(self) -> str:
        return f"value{self.path}: {self.dtype.removeprefix('torch.')} of shape {self.shape}"


def _map_leaves(value: Any, leaf: Callable[[Any, str], Any], path: str = "") -> Any:
    """``value`` with ``leaf(item, path)`` in place of every item that is no container; None stays."""
    if value is None:
        return None
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps defaultdict's factory and the like
        for key, item in value.items():
            mapped[key] = _map_leaves(item, leaf, f"{path}[{key!r}]")
        return mapped
    if isinstance(value, (list, tuple)):
        items = [_map_leaves(item, leaf, f"{path}[{i}]") for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return leaf(value, path)


def _as_tensor(value: Any, path: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"value{path} is a tensor of layout {value.layout}; give a dense one (.to_dense())")
        return value.detach().resolve_conj().resolve_neg()
    if isinstance(value, float):  # float64 holds a Python float whole; the default dtype would round it
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, (bool, int)):
        return torch.tensor(value)
    if isinstance(value, complex):
        return torch.tensor(value, dtype=torch.complex128)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return torch.as_tensor(np.asarray(value))
    raise TypeError(
        f"value{path} is of type {type(value).__name__}, not a tensor or a number; "
        "other objects are exchanged by gather_object"
    )


def _leaves(value: Any) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    _map_leaves(value, lambda item, path: found.append((path, _as_tensor(item, path))))
    return found


def _rebuilt(value: Any, tensors: Iterator[Any]) -> Any:
    """``value`` with the given items in place of its leaves, which come in the order of :func:`_leaves`."""
    return _map_leaves(value, lambda _item, _path: next(tensors))


def _agreed(call: str, tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, bool]]:
    """For each path, in one order on all ranks: the common dtype, and whether its device's own backend takes it.

    Raises, on every rank, where ranks called different functions or hold values of different structure or shape: the
    collectives below would hang or mix up memory.
    """
    own: tuple[str, list[_Leaf]] = (
        call,
        [_Leaf(path, tuple(t.shape), str(t.dtype), t.device.type) for path, t in sorted(tensors.items())],
    )
    everyone = _everyone(own, call)
    calls = [theirs[0] for theirs in everyone]
    if len(set(calls)) > 1:
        listed = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(calls))
        raise ValueError(f"ranks are in different exchanges ({listed}). Every rank must make the same calls in order.")
    forms = [[(leaf.path, leaf.shape) for leaf in leaves] for _, leaves in everyone]
    if any(form != forms[0] for form in forms):
        # Of values that are alike but for some leaves, show these only.
        common = set.intersection(*(set(form) for form in forms))
        odd = [[str(leaf) for leaf in leaves if (leaf.path, leaf.shape) not in common] for _, leaves in everyone]
        listed = "; ".join(f"rank {rank}: {', '.join(leaves) or 'nothing'}" for rank, leaves in enumerate(odd))
        raise ValueError(
            f"{call}: the ranks' values differ in structure or shape ({listed}). Every rank must give the same; "
            "pad or cut the tensors to one shape first, or use gather_object, which takes unequal ones."
        )
    agreed: dict[str, tuple[torch.dtype, bool]] = {}
    for same_leaf in zip(*(leaves for _, leaves in everyone), strict=True):
        dtype = functools.reduce(torch.promote_types, (DTYPES[leaf.dtype] for leaf in same_leaf))
        device_types = {leaf.device_type for leaf in same_leaf}
        device_type = device_types.pop() if len(device_types) == 1 else "cpu"
        direct = device_type != "cpu" and backend_of(device_type) not in (None, "gloo")
        agreed[same_leaf[0].path] = (dtype, direct)
    return agreed


def _everyone(own: tuple[str, list[_Leaf]] | str, call: str) -> list[tuple[str, list[_Leaf]]]:
    """What each rank is about to exchange; a rank whose value can't be exchanged gives the reason (str) instead."""
    everyone = gather_object(own)
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise TypeError(f"{call}: on rank {rank} {theirs}.")
    return everyone  # type: ignore[return-value]  # no str is left


def _own_leaves(value: Any, call: str) -> list[tuple[str, Tensor]]:
    try:
        return _leaves(value)
    except TypeError as e:
        _everyone(str(e), call)  # raises, here and on the other ranks
        raise  # pragma: no cover


def all_gather(value: Any) -> Any:
    """Values of all ranks, along a new leading axis of world size, on every rank.

    Collective: every rank calls it.

    Parameters
    ----------
    value : tensor, number, or nested dict, list, tuple, namedtuple of these
        Tensors of any dtype on any device, numpy arrays and scalars, Python numbers. ``None`` stays as it is. Every
        rank must give the same structure and shapes; where dtypes differ, the values are promoted.

    Returns
    -------
    same structure
        Each tensor of shape ``(*s)`` becomes one of shape ``(world_size, *s)``, entry r from rank r, on the device of
        this rank's own; numbers and arrays become CPU tensors, float64 for a Python float. In one process the axis
        has length 1. The result is a copy, and no gradient flows through it.

    Raises
    ------
    ValueError
        On every rank, where ranks give different structures or shapes; the message names those of each rank.
    TypeError
        On every rank, where some rank gives something that is no tensor or number.

    Notes
    -----
    One small exchange of the shapes, then one of all tensors together (one for each kind of device).

    Examples
    --------
    >>> all_gather({"loss": torch.tensor(0.5), "seen": 7})  # in one process
    {'loss': tensor([0.5000]), 'seen': tensor([7])}
    """
    leaves = _own_leaves(value, "all_gather")
    if not has_group():
        return _rebuilt(value, iter([t.clone().unsqueeze(0) for _, t in leaves]))
    tensors = dict(leaves)
    world_size = dist.get_world_size()
    gathered: dict[str, Tensor] = {}
    for direct, batch in _by_route(_agreed("all_gather", tensors)).items():
        # As bytes: one exchange for all dtypes, those too that backends don't know (bool, bfloat16, complex, float8).
        flat = [_routed(tensors[path], direct).to(dtype).reshape(-1).view(torch.uint8) for path, dtype in batch]
        own = torch.cat(flat)
        rows = torch.empty(world_size, own.numel(), dtype=torch.uint8, device=own.device)
        dist.all_gather(list(rows), own, group=None if direct else cpu_group())
        begin = 0
        for (path, dtype), part in zip(batch, flat, strict=True):
            end = begin + part.numel()
            # The clone is aligned for any dtype, which a slice of bytes need not be.
            mine = rows[:, begin:end].clone(memory_format=torch.contiguous_format).flatten().view(dtype)
            gathered[path] = mine.reshape(world_size, *tensors[path].shape).to(tensors[path].device)
            begin = end
    return _rebuilt(value, iter([gathered[path] for path, _ in leaves]))


def all_reduce(value: Any, reduce: _Reduce = "mean") -> Any:
    """Values of all ranks reduced to one, on every rank; the input is left as it is.

    Collective: every rank calls it.

    Parameters
    ----------
    value : tensor, number, or nested dict, list, tuple, namedtuple of these
        As for :func:`all_gather`.
    reduce : 'mean', 'sum', 'min' or 'max'
        Each rank counts once in the mean; weigh by samples by reducing sums and counts.

    Returns
    -------
    same structure
        Tensors of the same shapes and devices, arrays as CPU tensors, and Python numbers for Python numbers. Dtypes
        are kept (promoted where ranks' differ), but for the mean of integers and bools, which is a float of torch's
        default dtype, and the sum of bools, which is an integer. No gradient flows through it. The same bits on every
        rank.

    Raises
    ------
    ConfigurationError
        If ``reduce`` is none of the four names.
    ValueError, TypeError
        As for :func:`all_gather`; also for the 'min' and 'max' of complex numbers.

    Notes
    -----
    One small exchange of the shapes, then one of all tensors of a dtype together. 16-bit floats are summed in float32.

    Examples
    --------
    >>> all_reduce([torch.tensor([1, 2]), 3], "mean")  # in one process
    [tensor([1., 2.]), 3.0]
    """
    if reduce not in _OPS:
        raise ConfigurationError(f"reduce={reduce!r}: must be 'mean', 'sum', 'min' or 'max'.")
    call = f"all_reduce('{reduce}')"
    leaves = _own_leaves(value, call)
    tensors = dict(leaves)
    if has_group():
        agreed = _agreed(call, tensors)
    else:
        agreed = {path: (t.dtype, False) for path, t in leaves}
    for path, (dtype, _) in agreed.items():
        if dtype.is_complex and reduce in ("min", "max"):
            raise TypeError(f"{call}: value{path} is complex, and complex numbers have no order.")
    reduced: dict[str, Tensor] = {}
    batches: dict[tuple[bool, torch.dtype], list[str]] = {}
    for path, (dtype, direct) in agreed.items():
        batches.setdefault((direct, _accumulation_dtype(dtype, reduce)), []).append(path)
    for (direct, accumulated_as), paths in batches.items():
        flat = torch.cat([_routed(tensors[path], direct).to(accumulated_as).reshape(-1) for path in paths])
        if has_group():
            dist.all_reduce(flat, getattr(dist.ReduceOp, _OPS[reduce]), group=None if direct else cpu_group())
        if reduce == "mean":
            flat /= get_world_size()
        for path, part in zip(paths, flat.split([tensors[path].numel() for path in paths]), strict=True):
            reduced[path] = part.reshape(tensors[path].shape)
    paths_in_order = iter([path for path, _ in leaves])

    def like(item: Any, _path: str) -> Any:
        path = next(paths_in_order)
        result, dtype = reduced[path], _result_dtype(agreed[path][0], reduce)
        if isinstance(item, (bool, int, float, complex)):
            # Read in the dtype it was summed in: the default dtype would round it.
            return bool(result) if dtype == torch.bool else result.item()
        return result.to(tensors[path].device, dtype, copy=True)

    return _map_leaves(value, like)


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


def _by_route(agreed: dict[str, tuple[torch.dtype, bool]]) -> dict[bool, list[tuple[str, torch.dtype]]]:
    batches: dict[bool, list[tuple[str, torch.dtype]]] = {}
    for path, (dtype, direct) in agreed.items():
        batches.setdefault(direct, []).append((path, dtype))
    return batches


def _routed(tensor: Tensor, direct: bool) -> Tensor:
    return tensor if direct else tensor.cpu()
