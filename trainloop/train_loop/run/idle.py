"""Forward passes that leave no trace, as ranks without a batch run them; errors for a model's own exchanges."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from trainloop.data.loader.generators import generators_in, set_states
from trainloop.distributed.tensors import in_borrowed_batch
from trainloop.errors import ConfigurationError
from trainloop.optim.parameters import trained_modules
from trainloop.parallel.sync_batchnorm import CpuSyncBatchNorm

_is_lazy: Callable[[Any], bool] = nn.parameter.is_lazy
_TORCH_OWN = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, FunctionType, MethodType))
_NO_STATE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, Dataset, DataLoader, Tensor)
_MOST_CONTAINERS = 10_000
_MOST_BYTES = 2**26
"""Larger tensors and arrays are data, rather than counts."""
_LARGE_BYTES = 2**20
"""Copies of larger tensors are not kept from a forward until its backward if the tensors stay the same."""


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
        states = ModuleStates(parts, model=model, criterion=run.loop.criterion)
        carried = carried_state_of(model)
        # Synchronized BatchNorm would wait for all ranks; here ranks with a batch normalise among themselves.
        synced = [part for part in parts if isinstance(part, (CpuSyncBatchNorm, nn.SyncBatchNorm))]
        try:
            with states.in_use(), run.listening(Recorder()), rng.isolated(), in_borrowed_batch():
                for part in synced:
                    part.training = False
                yield
        finally:
            load_carried_state(model, [carried], 0, 1)


class ModuleStates:
    """The attributes, buffers and generators of modules as they are now, for a forward that must not change them.

    Parameters
    ----------
    modules : iterable of nn.Module
        Modules, with all modules inside them.
    others : iterable of Tensor and nn.Module
        Tensors that the forward gets, and modules that it may change, which are not kept.
    **holders : object
        The model, a criterion of any kind, and arguments of the forward, whose contents and generators are kept.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[nn.Module | Tensor] = (), **holders: Any) -> None:
        parts = list(modules)
        self._elsewhere: list[nn.Module | Tensor] = [*parts, *others]
        self._holders = list(holders.values())
        self._parts = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
        # Scripted modules take no other buffers, and what is lazy now gets its first values in place.
        scripted = [b for part in parts if isinstance(part, torch.jit.ScriptModule) for b in part.buffers()]
        self._in_place = [*scripted, *(b for part in self._parts for b in part.buffers(recurse=False) if _is_lazy(b))]
        self._attributes = [_own(part) for part in self._parts]
        self._buffers = [dict(part._buffers) for part in self._parts]
        values = [value for own in (*self._attributes, *self._buffers) for value in own.values()]
        tensors = {id(value): (value, _copied(value)) for value in values if isinstance(value, Tensor)}
        self._copies = {key: both for key, both in tensors.items() if both[0] is not both[1]}
        self._contents = self._contents_now()
        self._generators = generators_in(**holders)
        self._of_generators = {name: one.get_state() for name, one in self._generators.items()}

    def _contents_now(self) -> Contents:
        contents = Contents(self._elsewhere)
        values = [value for part in self._parts for value in _own(part).values() if not isinstance(value, Tensor)]
        contents.keep([*values, *self._in_place, *self._holders])
        return contents

    def drop_unchanged(self) -> None:
        """Free the copies of large tensors that are still the same, such as masks. May wait for the device."""
        self._copies = {key: both for key, both in self._copies.items() if not _is_same_large(*both)}
        self._contents.drop_unchanged()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the context, the modules have this state; at its end, they have what they had at its beginning.

        They get copies: tensors that are restored in place would be other ones for autograd.
        """
        before, contents = [dict(vars(part)) for part in self._parts], self._contents_now()
        generators = {name: one.get_state() for name, one in self._generators.items()}
        self._contents.restore()
        copies = {key: copied.clone() for key, (_, copied) in self._copies.items()}
        for part, attributes, buffers in zip(self._parts, self._attributes, self._buffers, strict=True):
            own = {name: copies.get(id(value), value) for name, value in attributes.items()}
            _set(vars(part), {**own, "_buffers": {name: copies.get(id(b), b) for name, b in buffers.items()}})
        set_states(self._generators, self._of_generators)
        try:
            yield
        finally:
            for part, own in zip(self._parts, before, strict=True):
                _set(vars(part), own)
            set_states(self._generators, generators)
            contents.restore()


def _own(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, except ``nn.Module``'s own."""
    return {name: value for name, value in vars(module).items() if name not in _TORCH_OWN}


def _set(attributes: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name in attributes.keys() - values.keys() - _TORCH_OWN:
        del attributes[name]
    attributes.update(values)


def _copied(value: Tensor) -> Tensor:
    """Return a copy of a tensor; the tensor itself if it is a parameter, has a graph, has no values, or is data."""
    if _is_lazy(value) or isinstance(value, nn.Parameter) or value.requires_grad or value.is_meta:
        return value
    if value.is_inference() or value.numel() * value.element_size() > _MOST_BYTES:
        return value
    return value if _is_freed(value) else value.clone()


def _is_freed(value: Tensor) -> bool:
    """Return True for a tensor without memory: an attribute may refer to gathered parameters, which fsdp frees."""
    plain = type(value) is Tensor and value.layout is torch.strided
    return plain and value.numel() > 0 and value.untyped_storage().nbytes() == 0


def _is_same_large(value: Any, copied: Any) -> bool:
    """Return True for a large tensor that is still the same. Waits for the device."""
    if copied is value or not isinstance(value, Tensor) or value.numel() * value.element_size() <= _LARGE_BYTES:
        return False
    # By values, since code such as ``codebook.data.mul_(0.9)`` changes no version.
    return torch.equal(value, copied)


class Contents:
    """The contents of containers and of objects such as meters, however nested, as they were before a forward.

    Tensors and arrays in lists are not copied: lists collect outputs, which nobody changes in place.

    Parameters
    ----------
    elsewhere : iterable of nn.Module and Tensor
        Modules whose attributes the caller restores, and tensors that nobody changes.
    """

    def __init__(self, elsewhere: Iterable[nn.Module | Tensor]) -> None:
        self._elsewhere = {id(one) for one in elsewhere}
        self._kept: dict[int, tuple[Any, Any]] = {}

    def keep(self, values: Iterable[Any]) -> None:
        """Remember the contents of these values, and of what they contain."""
        found = list(values)
        while found and len(self._kept) < _MOST_CONTAINERS:
            value = found.pop()
            if type(value) in _PLAIN or id(value) in self._kept or id(value) in self._elsewhere:
                continue
            if isinstance(value, (list, deque, tuple, set)):
                contents: Any = stored_items(value)
                found.extend(item for item in contents if not isinstance(item, (Tensor, np.ndarray)))
            elif isinstance(value, Tensor):
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

    def drop_unchanged(self) -> None:
        """Free the copies of large tensors that are still the same. May wait for the device."""
        self._kept = {key: kept for key, kept in self._kept.items() if not _is_same_large(*kept)}

    def restore(self) -> None:
        """Undo all changes of contents since :meth:`keep`."""
        for value, before in self._kept.values():
            if isinstance(value, Tensor):
                if before is not value and not _is_freed(value):
                    value.data.copy_(before)  # for autograd, it is still the same
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
    batches: Iterator[tuple[int, Any, int]], forward: Callable[[Any], Any], idle: Idle, wrapper: Any
) -> Iterator[tuple[int, Any, int]]:
    """Yield this rank's batches of an evaluation; run a dummy ``forward`` while other ranks have more. Collective.

    Raises an error if ranks' forwards have gathered different units.
    """
    last: Any = None
    while True:
        item = next(batches, None)
        everyone = distributed.exchange_ints([int(item is not None), wrapper.take_gathered()])
        counts, gathered = map(list, zip(*everyone))
        wrapper.compare_gathered(gathered)
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
