"""Ranks without a batch: dummy forward passes that leave no trace, and errors for a model's own exchanges."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from trainloop import distributed
from trainloop._metrics import Recorder
from trainloop._support import rng
from trainloop._support.carried import carried_state_of, load_carried_state
from trainloop._support.nested import stored_items
from trainloop.distributed.tensors import in_borrowed_batch
from trainloop.errors import ConfigurationError
from trainloop.optim.parameters import trained_modules
from trainloop.parallel.sync_batchnorm import CpuSyncBatchNorm

_TORCH_OWN = frozenset(vars(nn.Module()))
_NO_STATE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, Dataset, DataLoader, Tensor)
_MOST_CONTAINERS = 10_000
_MOST_BYTES = 2**26
"""Larger tensors and arrays in objects are data, rather than counts."""


class Idle:
    """A dummy forward pass for a rank that has no batch. It runs another rank's batch, and has no side effects.

    It logs nothing, updates neither BatchNorm statistics nor counts in modules' attributes (such as torchmetrics'
    counts), draws no random numbers and carries no state. Its gradients are zero. The other rank runs the same batch at
    the same time, so all ranks gather the same units. If that batch's loss is infinite or NaN, the gradients of the
    dummy pass may be NaN.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def borrowed_batch(self, batches: list[Any], counts: list[int], i: int) -> Any:
        """If this rank has no ``i``-th batch, return another rank's; ``None`` if this rank has one or no rank has.

        Collective.
        """
        if min(counts) > i:
            return None
        # Rank 0 may have no batch itself.
        source = next(rank for rank, n in enumerate(counts) if n > i)
        mine = i < len(batches)
        theirs = distributed.broadcast_object(batches[i] if mine else None, source)
        return None if mine else theirs

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        """Suppress all side effects of a dummy forward and its backward."""
        run = self._run
        model = run.loop.model
        # A criterion may count or remember samples, too.
        parts = [part for module in trained_modules(model, run.loop.criterion) for part in module.modules()]
        buffers = [(b, b.clone()) for part in parts for b in part.buffers(recurse=False)]
        attributes = [(vars(part), _attributes_of(part)) for part in parts]
        contents = _Contents(parts)
        for _, saved in attributes:
            contents.keep(value for value, _ in saved.values() if not isinstance(value, Tensor))
        contents.keep([run.loop.criterion])
        carried = carried_state_of(model)
        # Synchronized BatchNorm would wait for all ranks; here ranks with a batch normalise among themselves.
        synced = [part for part in parts if isinstance(part, (CpuSyncBatchNorm, nn.SyncBatchNorm))]
        training = [part.training for part in synced]
        for part in synced:
            part.training = False
        try:
            with run.listening(Recorder()), rng.isolated(), in_borrowed_batch():
                yield
        finally:
            for part, flag in zip(synced, training, strict=True):
                part.training = flag
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
                contents.restore()
                for current, saved in attributes:
                    _restore_attributes(current, saved)
            load_carried_state(model, [carried], 0, 1)


def _attributes_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return a module's attributes, except ``nn.Module``'s own, each tensor with a copy."""
    return {name: (value, _copied(value)) for name, value in vars(module).items() if name not in _TORCH_OWN}


def _copied(value: Any) -> Any:
    if type(value) is Tensor:
        # An attribute may refer to gathered parameters, whose memory fsdp frees.
        readable = value.layout == torch.strided and not value.is_meta and value.untyped_storage().nbytes() > 0
        return value.clone() if readable and not value.is_inference() else value
    return value


def _restore_attributes(current: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    for name, (value, before) in saved.items():
        current[name] = value
        _copy_back(value, before)


def _copy_back(value: Any, before: Any) -> None:
    if before is not value and value.untyped_storage().nbytes() > 0 and not torch.equal(value, before):
        value.copy_(before)


class _Contents:
    """The contents of containers and of objects such as meters, however nested, as they were before a dummy forward.

    Tensors and arrays in lists are not copied: lists collect outputs, which nobody changes in place.

    Parameters
    ----------
    modules : iterable of nn.Module
        Modules whose attributes the caller restores.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._elsewhere = {id(module) for module in modules}
        self._kept: dict[int, tuple[Any, Any]] = {}

    def keep(self, values: Iterable[Any]) -> None:
        """Remember the contents of these values, and of what they contain."""
        found = list(values)
        while found and len(self._kept) < _MOST_CONTAINERS:
            value = found.pop()
            if id(value) in self._kept or id(value) in self._elsewhere:
                continue
            if isinstance(value, (list, deque, tuple, set)):
                contents: Any = stored_items(value)
                found.extend(item for item in contents if not isinstance(item, (Tensor, np.ndarray)))
            elif type(value) is Tensor and value.numel() * value.element_size() <= _MOST_BYTES:
                contents = _copied(value)
            elif isinstance(value, np.ndarray):
                if not value.flags.writeable or value.nbytes > _MOST_BYTES:
                    continue
                contents = value.copy()
            elif isinstance(value, dict) or _has_state(value):
                contents = dict(dict.items(value) if isinstance(value, dict) else vars(value))
                found.extend(contents.values())
            else:
                continue
            self._kept[id(value)] = value, contents

    def restore(self) -> None:
        """Undo all changes of contents since :meth:`keep`."""
        for value, before in self._kept.values():
            if isinstance(value, Tensor):
                _copy_back(value, before)
            elif isinstance(value, np.ndarray):
                value[...] = before
            elif isinstance(value, list):
                value[:] = before
            elif isinstance(value, deque):
                value.clear()
                value.extend(before)
            elif not isinstance(value, tuple):
                current = value if isinstance(value, (dict, set)) else vars(value)
                current.clear()
                current.update(before)


def _has_state(value: Any) -> bool:
    """Return True for an object of the user's classes, which may count. Data and torch's own objects don't."""
    if isinstance(value, _NO_STATE) or not hasattr(value, "__dict__"):
        return False
    return isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] not in ("torch", "trainloop")


def padded_batches(
    batches: Iterator[tuple[int, Any, int]], forward: Callable[[Any], Any], idle: Idle
) -> Iterator[tuple[int, Any, int]]:
    """Yield this rank's batches of an evaluation; run a dummy ``forward`` while other ranks have more. Collective."""
    last: Any = None
    while True:
        item = next(batches, None)
        counts = [n for (n,) in distributed.exchange_ints([int(item is not None)])]
        if not any(counts):
            return
        if last is None and not all(counts):  # this rank may never have had a batch; all ranks enter this branch
            last = idle.borrowed_batch([item[1]] if item is not None else [], counts, 0)
        if item is not None:
            last = item[1]
            yield item
        else:
            with idle.without_side_effects():
                forward(last)


class _RefusesExchanges(TorchDispatchMode):
    """Raise an error for a collective of torch with ranks that don't make it, which would wait for them."""

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self, ranks: Iterable[int], evaluates: bool) -> None:
        super().__init__()
        self._ranks, self._evaluates = frozenset(ranks), evaluates

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled: torch refuses those with ``fullgraph=True`` in other modes."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            missing = ", ".join(map(str, self._missing(func, args)))
            if missing:
                remedy = _IN_EVALUATION if self._evaluates else _IN_TRAINING
                name = func.__name__.partition(".")[0].rstrip("_")
                raise ConfigurationError(
                    f"the model exchanges values with all ranks (torch's {name}), but rank {missing} has no samples in "
                    f"this batch, so this rank would wait until the timeout. {remedy}"
                )
        return func(*args, **(kwargs or {}))

    def _missing(self, func: Any, args: tuple[Any, ...]) -> list[int]:
        """Return the ranks of the collective's group that have no batch."""
        if func.__name__.startswith(("send", "recv", "wait", "_wrap")):  # between two ranks, or of an earlier one
            return []
        world: Any = dist.group.WORLD
        if func.namespace == "_c10d_functional" and args[-1] != world.group_name:  # named, not given
            return []
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                with contextlib.suppress(RuntimeError):  # an object of another kind, such as a reduction
                    group = dist.ProcessGroup.unbox(arg)
                    return sorted({*dist.get_process_group_ranks(group)} - self._ranks)
        return sorted({*range(dist.get_world_size())} - self._ranks)


_IN_TRAINING = (
    "Pass drop_last=True to the loader, so that all ranks have batches. If the exchange is for an average over all "
    "ranks, such as one over boxes, return (loss, weight) from get_loss instead: trainloop averages over all ranks."
)
_IN_EVALUATION = (
    "In an evaluation, ranks have different numbers of batches. Use the functions of trainloop.distributed, which are "
    "computed over the batch alone there, or call torch.distributed only if self.training."
)


def refuse_exchanges(ranks: Iterable[int], *, evaluates: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which torch's collectives that need other ranks than these raise an error.

    It costs time for each operation, so it is for batches that some rank does not have. It does not look into compiled
    functions.
    """
    # In the modes of older versions of torch, some operations (flex_attention) are errors.
    knows_all = hasattr(TorchDispatchMode, "supports_higher_order_operators")
    return _RefusesExchanges(ranks, evaluates) if knows_all else nullcontext()
