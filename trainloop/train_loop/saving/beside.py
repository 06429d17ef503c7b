"""Find what a training changes beside its checkpoints: values in modules, callbacks, optimizers and datasets."""

from __future__ import annotations

import functools
import os
import zlib
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from io import IOBase
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from trainloop._support.carried import names_of
from trainloop._support.keywords import name_of
from trainloop._support.nested import entries_of, leaves_of
from trainloop._support.rng import as_generator
from trainloop._support.user_line import described_names, warn_or_print
from trainloop.callbacks.base import AbstractCallback
from trainloop.data.loader.generators import generators_of
from trainloop.data.loader.loaders import is_stream
from trainloop.data.loader.parts import has_state
from trainloop.data.order.columns import SplitBatches
from trainloop.data.order.orders import length_of
from trainloop.distributed.objects import names_that_differ
from trainloop.model import OF_LOGS
from trainloop.optim.optimizers import all_optimizers, optimizers_of
from trainloop.optim.parameters import criterion_modules, named_trained_parameters, trained_parameters
from trainloop.parallel.sharded.shards import bit_sums
from trainloop.train_loop.progress.loop_state import LoopState, added_attributes
from trainloop.train_loop.saving.script_values import script_values

_DEEPEST, _MOST_PARTS, _MOST_HIDDEN, _MOST_ITEMS = 3, 64, 16, 1000
_MOST_BYTES, _SMALL_BYTES = 2**20, 4096  # larger arrays are not compared; of a dataset, larger images are not
_LIBRARIES = ("torch", "torchmetrics", "builtins", "trainloop")  # metrics train nothing; the others save what they need
_SETTINGS = ("gradient_clip_norm", "grad_accumulation", "end_auto_eval", "num_epochs", "num_iterations")
_SCHEDULERS = "torch.optim.lr_scheduler"
_OF_CALLBACKS = frozenset({"callback_name", "execution_order", "device_idx_execution", "train_loop_obj"})
_OF_OPTIMIZERS = frozenset({"defaults", "state", "param_groups", "step", "_opt_called"})
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_HOW = (
    "If the training depends on this, save it: in a module, as a buffer or by get_extra_state; in a callback, by "
    "state_dict and load_state_dict (for a dataset, by rank_state_dict). A count of steps can follow from "
    "tl.global_step; samples, from set_epoch and the index, or from the global generators of Python, numpy and torch."
)


def forward_hooks_of(module: nn.Module) -> list[Any]:
    """Return the functions that are called before and after the forward of a module."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _computed_weights(module: nn.Module) -> list[str]:
    """Return the names of weights that torch's spectral_norm, weight_norm and prune compute in each forward."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    tensors = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    return [name for name in tensors if f"{name}_orig" in own or {f"{name}_g", f"{name}_v"} <= own]


class Beside:
    """Checksums of attributes that checkpoints do not contain, as they are now, by path.

    These are plain values, tensors, arrays, random generators, values that processes share (``multiprocessing.Value``),
    states of optimizers that are not the loop's, containers of these, and the same in plain objects. An iterator always
    counts as changed. Left out are what checkpoints mostly contain, attributes of a callback, optimizer, sampler or
    stream with a ``state_dict`` and of libraries, and a dataset's containers, which mostly are caches.

    Parameters
    ----------
    loop : LoopState
    saved : set of str, optional
        The result of :func:`saved_names`; ``None`` to look only at what does not come back from ranks: the data.
    of_rank : bool
        Look only at what comes back with one rank's values: the model and the criterion, with the states of metrics.
    """

    def __init__(self, loop: LoopState, saved: set[str] | None, *, of_rank: bool = False) -> None:
        self._of_rank = of_rank
        self.values: dict[str, int] = {}
        self._kinds: dict[str, Any] = {}  # of those that a training mostly continues from: neither records nor caches
        self._data: set[str] = set()
        self.of_epochs: set[str] = set()
        """Names of whole numbers of objects that have ``set_epoch``."""
        optimizers = (loop.optimizer, *all_optimizers(loop.optimizer))
        self._seen = {id(one) for one in (loop, loop.model, *optimizers, loop.criterion, *loop.callbacks)}
        if of_rank:
            self._add_modules(loop, None)
            return
        seen: set[int] = set()
        for name in ("train_loader", "validation_loader", "test_loader"):
            self._add_data(name, getattr(loop, name), seen, trains=name == "train_loader")
        if saved is not None:
            self._add_modules(loop, saved)
            self._add_others(loop)
            for path, own in script_values(loop, self._has_other_optimizer).items():
                self._add(path, own.value, _kind_of_value(own.value) if self._has_other_optimizer(own.value) else None)
                self._add_attributes(path, own.value, only_lost=True, depth=1)

    def changed_since(self, before: Beside) -> dict[str, int]:
        """Return the values that were different in ``before``."""
        return {path: shown for path, shown in self.values.items() if before.values.get(path, shown) != shown}

    def complete(self, later: Beside) -> None:
        """Add the values that have come into being ``later``, in hooks or in the first step.

        Before, there may have been ``None`` or an empty container. What reading adds to data is mostly a cache.
        """
        nothing = (None, *map(_checksum, (None, [], set())))
        late = {path: shown for path, shown in later.values.items() if path not in later._data}
        self.values |= {path: shown for path, shown in late.items() if self.values.get(path) in nothing}

    def about(self, before: Beside) -> str:
        """Return a warning about what has changed since ``before``, if the training mostly depends on it; else ''."""
        if not (names := self.continued(before)):
            return ""
        back = ", and it does not come back from ranks" if self._data & {*names} else ""
        return (
            f"the training changes {described_names(names)}. Checkpoints do not contain this{back}, so that a resumed "
            f"run begins with the value of the script. {_HOW}"
        )

    def continued(self, before: Beside) -> list[str]:
        """Return the names of the values that have changed since ``before`` and a training mostly continues from.

        A cache often has had no value, or one of another shape. A rank's values may also be other numbers, as sums.
        """
        return [
            name
            for name in self.changed_since(before)
            if (_continues(self._kinds[name], before._kinds.get(name)) if name in self._kinds else self._of_rank)
        ]

    def tensors(self) -> dict[str, int]:
        """Return the values that are tensors of modules, which a training mostly uses."""
        return {name: value for name, value in self.values.items() if type(self._kinds.get(name)) is tuple}

    def _add(self, path: str, value: Any, kind: Any = None) -> None:
        with suppress(Exception):  # of whatever methods the value's class has
            inside = [one for _, one in leaves_of(value, "")] if self._of_rank else []
            if any(as_generator(one) is not None or _is_iterator(one) for one in inside):  # ranks draw other numbers
                return
            checksum = _checksum(value)
            if checksum is not None:
                self.values[path] = checksum
                if kind is not None:
                    self._kinds[path] = kind

    def _add_modules(self, loop: LoopState, saved: set[str] | None) -> None:
        modules = [("", loop.model), *(("criterion", module) for module in criterion_modules(loop.criterion))]
        for _, whole in modules:
            self._seen |= {id(part) for part in (*whole.modules(), *whole.parameters(), *whole.buffers())}
        self._seen |= {id(p) for p in trained_parameters(loop.model, loop.criterion, loop.optimizer)}
        for prefix, whole in modules:
            for name, buffer in whole.named_buffers(prefix):
                if saved is not None and name not in saved:
                    self._add(name, buffer, _kind_of_value(buffer))
            for path, part in whole.named_modules(prefix=prefix):
                if any(map(is_lazy, part.parameters(recurse=False))):  # the first forward sets in_features and others
                    continue
                saves = type(part).get_extra_state is not nn.Module.get_extra_state  # all or a part of its attributes
                without = {"training", *OF_LOGS, *names_of(part), *_computed_weights(part)}
                self._add_attributes(path, part, without=without, only_lost=saves)
                for hook in forward_hooks_of(part):
                    self._add_attributes(f"{path}.{type(hook).__name__}".lstrip("."), hook)
        for path, part in leaves_of(loop.criterion, "criterion"):
            if not isinstance(part, nn.Module):
                self._add_attributes(path, part)

    def _add_others(self, loop: LoopState) -> None:
        settings = {name: getattr(loop, name) for name in _SETTINGS}
        # Without its module, since __main__ has another name in ranks.
        criterion = name_of(loop.criterion)
        for name, value in {**settings, "criterion": criterion, **added_attributes(loop)}.items():
            self._add(f"tl.{name}", value)
        for i, optimizer in enumerate(optimizers := optimizers_of(loop.optimizer)):
            if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
                name = "optimizer" if len(optimizers) == 1 else f"optimizer {i}"
                self._add_attributes(name, optimizer, without=_OF_OPTIMIZERS)
        for callback in loop.callbacks:
            if type(callback).state_dict is AbstractCallback.state_dict and not callback.uses_hook("rank_state_dict"):
                self._add_attributes(callback.callback_name, callback, without=_OF_CALLBACKS, only_lost=True)

    def _add_attributes(
        self, path: str, part: Any, *, without: Collection[str] = (), only_lost: bool = False, depth: int = 0
    ) -> None:
        """Add the attributes of an object of the user's, and of objects in them of the same package, or schedulers.

        With ``only_lost``, only a resumed run names them, as their owner may save them or be a record.
        Objects of the user's may raise any error, or change in another thread: no advice may end a training, and none
        of them hides the others.
        """
        with suppress(Exception):
            self._add_all(path, part, without, only_lost, depth)

    def _add_all(self, path: str, part: Any, without: Collection[str], only_lost: bool, depth: int) -> None:
        packages = {cls: _package(cls) for cls in type(part).__mro__}
        package = packages[type(part)]
        of_torch = package == "torch" and isinstance(part, nn.Module)  # its public settings: a rate of dropout
        if "torchmetrics" in packages.values():
            for name, value in getattr(part, "metric_state", {}).items() if self._of_rank else ():
                self._add(f"{path}.{name}", value, _kind_of_value(value))
            return
        if package in _LIBRARIES and not of_torch and (self._of_rank or not depth):
            return
        inherited = {name for cls, its in packages.items() if its in _LIBRARIES for name in _names_used(cls)}
        kinds = reversed(type(part).__mro__) if package not in _LIBRARIES else ()
        counts = {name: value for cls in kinds for name, value in vars(cls).items() if type(value) in (int, float)}
        for name, value in [*{**counts, **getattr(part, "__dict__", {})}.items()]:
            of_library = package in _LIBRARIES or name in inherited
            if name in without or name.startswith("__") or (name[0] == "_" and of_library) or self._has_seen(value):
                continue
            where = f"{path}.{name}" if path else name
            with suppress(Exception):
                is_saved = (
                    not depth and (not only_lost or isinstance(part, nn.Module)) and as_generator(value) is not None
                )
                if not is_saved:
                    self._add(where, value, None if only_lost else _kind_of_value(value))
                self._add_within(where, value, package, only_lost, depth)

    def _has_seen(self, value: Any) -> bool:
        """Return True for parameters, buffers and optimizers, and a container of some: checkpoints contain them."""
        return any(isinstance(one, (Tensor, Optimizer)) and id(one) in self._seen for one in _parts_of(value))

    def _has_other_optimizer(self, value: Any) -> bool:
        return not self._has_seen(value) and any(isinstance(one, Optimizer) for one in _parts_of(value))

    def _add_within(self, where: str, value: Any, package: str, only_lost: bool, depth: int) -> None:
        if isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_HIDDEN and depth < _DEEPEST:
            for key, one in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
                self._add_within(f"{where}[{key!r}]", one, package, only_lost, depth + 1)
        elif id(value) not in self._seen and hasattr(value, "__dict__"):
            self._seen.add(id(value))
            if isinstance(value, nn.Module):  # of a callback, or hidden in a list or an object
                for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
                    if id(tensor) not in self._seen:
                        self._add(f"{where}.{inner}", tensor.detach(), None if only_lost else tuple(tensor.shape))
            elif depth < 2 and not callable(value) and type(value).__module__.startswith((package, _SCHEDULERS)):
                self._add_attributes(where, value, only_lost=only_lost, depth=depth + 1)

    def _add_data(self, whole: str, loader: Any, seen: set[int], *, trains: bool) -> None:
        """Add attributes of a loader, its dataset, samplers and functions; with workers, only of what is read here.

        ``whole``: the loader's name. ``seen``: ids of what the loaders before it contain. ``trains``: the loader is the
        training's; the position of a stream that an evaluation reads is not saved.
        """
        loader = loader.loader if isinstance(loader, SplitBatches) else loader
        dataset = getattr(loader, "dataset", None)
        if has_state(loader) or (trains and is_stream(loader) and has_state(dataset)):
            seen.add(id(dataset))
            return
        most = len(seen) + _MOST_PARTS
        seen |= {id(getattr(own, "own", own)) for own in generators_of(loader).values()}  # their states are saved
        parts = [(whole, loader, 0), (f"{whole}.dataset", dataset, 0)]  # the last one first
        if getattr(loader, "num_workers", 0):
            seen.add(id(dataset))
            parts = [(f"{whole}.{name}", getattr(loader, name, None), 1) for name in ("sampler", "batch_sampler")]
            for where, part in (("dataset", dataset), ("collate_fn", getattr(loader, "collate_fn", None))):
                for name, value in getattr(part, "__dict__", {}).items():
                    if isinstance(value, SynchronizedBase):  # workers change it for all processes
                        self._add(f"{whole}.{where}.{name}", value)
        while parts and len(seen) < most:
            path, part, depth = parts.pop()
            with suppress(Exception):
                parts += self._add_part_of_data(path, part, depth, seen)

    def _add_part_of_data(self, path: str, part: Any, depth: int, seen: set[int]) -> list[tuple[str, Any, int]]:
        """Add an object's attributes, unless it is among those ``seen``; return the objects in them."""
        if id(part) in seen or isinstance(part, (type, nn.Module, ModuleType)):
            return []
        seen.add(id(part))
        if isinstance(part, (list, tuple, dict, *_FUNCTIONS)):
            inside = entries_of(part)
            held = [one for one in inside.values() if as_generator(one) is not None and id(one) not in seen]
            if held:
                self._add(path, held, "data")
                self._data.add(path)
            caches = () if isinstance(part, (list, tuple)) else (Tensor, np.ndarray)  # arrays in others mostly are
            parts = [(f"{path}[{name}]", one, depth) for name, one in inside.items() if not isinstance(one, caches)]
            return parts if len(inside) <= 16 else []
        if isinstance(part, (Tensor, np.ndarray)):
            if _is_small(part):
                self._add(path, part, "data")
                self._data.add(path)
            return []
        inner: list[tuple[str, Any, int]] = []
        with suppress(Exception):
            for name, value in list(getattr(part, "__dict__", {}).items()):
                where = f"{path}.{name}"
                if id(value) in seen:
                    continue
                if (compared := _of_data(part, name, value)) is not None:
                    self._add(where, *compared)
                    self._data.add(where)
                    if type(value) is int and hasattr(part, "set_epoch"):
                        self.of_epochs.add(where)
                if depth <= _DEEPEST and (hasattr(value, "__dict__") or isinstance(value, (list, tuple, dict))):
                    inner.append((where, value, depth + 1))
        return inner


class ChangesBeside:
    """What a training changes that its checkpoints do not contain, from the beginning of its first epoch on.

    Create it when the first epoch begins; in ``fsdp``, on all ranks.

    Parameters
    ----------
    loop : LoopState
    writes : bool
        True if the training writes checkpoints. Otherwise, only what does not come back from ranks is compared.
    parallel : bool
        True if there are several ranks.
    """

    def __init__(self, loop: LoopState, *, writes: bool, parallel: bool) -> None:
        self._loop = loop
        self._saved = saved_names(loop) if writes else None
        self._before = Beside(loop, self._saved)
        self._of_rank = Beside(loop, None, of_rank=True) if parallel else None
        self._begun: Beside | None = None  # after the hooks there
        self._by_first_epoch: dict[str, int] = {}
        self._renewed: set[str] = set()  # of these values, those that each epoch sets back, such as a meter

    def now(self, *, between_epochs: bool) -> tuple[dict[str, int], str]:
        """Return what has changed, and a warning about what the training may depend on, or ''.

        Between epochs, what each epoch sets back is not among the changes.
        """
        now = Beside(self._loop, self._saved)
        changed = now.changed_since(self._before)
        left_out = self._renewed if between_epochs else ()
        return {path: shown for path, shown in changed.items() if path not in left_out}, now.about(self._before)

    def take_first_step(self) -> None:
        """Take what exists only since the first step."""
        now = Beside(self._loop, self._saved)
        if self._begun is not None:
            self._before.complete(self._begun)
            self._begun.values = {**now.values, **self._begun.values}  # a hook may empty them in each epoch
        self._before.complete(now)

    def take_first_epoch(self, changed: dict[str, int]) -> None:
        """Note what the first epoch has changed."""
        self._by_first_epoch = changed

    def find_renewed(self, *, has_hooks: bool) -> None:
        """After the hooks at the beginning of an epoch, find what they set back: a resumed epoch begins with it, too.

        They leave it as in the first epoch. (A flag that they toggle is as it was before them, but not after them.)
        """
        changed, self._by_first_epoch = self._by_first_epoch, {}
        if self._saved is None or not (changed or has_hooks):
            return
        if changed:
            now = Beside(self._loop, self._saved).changed_since(self._begun or self._before)
            self._renewed = changed.keys() - now
        elif self._begun is None:
            self._begun = Beside(self._loop, self._saved)

    def warn_of_ranks(self) -> None:
        """Warn, on rank 0, about values of the model that ranks have changed differently. Collective."""
        if self._of_rank is None:
            return
        now = Beside(self._loop, None, of_rank=True)
        odd = names_that_differ({name: now.values[name] for name in now.continued(self._of_rank)})
        if odd and self._loop.is_global_zero:
            warn_or_print(
                f"the training has changed the attributes {described_names(odd)} differently on each rank, as each has "
                "a part of the samples. After fit, your model has the values of one rank only. For a mean over all "
                "samples, call self.log. Call compute() of a metric of torchmetrics in a hook, where it reads all "
                "ranks. Otherwise, combine the ranks' values in the model's on_train_end "
                "(trainloop.distributed.all_reduce)."
            )


def saved_names(loop: LoopState) -> set[str]:
    """Return the names that checkpoints contain, also those of buffers that are still None.

    In ``fsdp``, all ranks call it, since it shards what is gathered.
    """
    names = set()
    for prefix, whole in (("", loop.model), *(("criterion", module) for module in criterion_modules(loop.criterion))):
        names |= {f"{prefix}.{name}".lstrip(".") for name in whole.state_dict()}
        for path, part in whole.named_modules(prefix=prefix):
            empty = {name for name, buffer in part._buffers.items() if buffer is None}
            names |= {f"{path}.{name}".lstrip(".") for name in empty - part._non_persistent_buffers_set}
    return names


def warn_of_lost(loop: LoopState, saved: Mapping[str, int], epoch: int, *, trains: bool = True) -> None:
    """Warn of values that a resumed run does not have: those that differ from the time of the checkpoint.

    In ``fsdp``, all ranks call it. ``epoch`` is that in which the run resumes: ``set_epoch`` sets it, and a checkpoint
    from an epoch's end was written while the data had the one before. Missing values count unless the run had ended.
    """
    now = Beside(loop, saved_names(loop)) if saved else None
    if now is None:
        return
    values = now.values if trains else {**saved, **now.values}
    before = _checksum(epoch - 1)
    lost = [
        path
        for path, checksum in saved.items()
        if values.get(path) != checksum and not (path in now.of_epochs and checksum == before)
    ]
    if lost and loop.is_global_zero:
        warn_or_print(
            f"the checkpoint does not contain {described_names(lost)}, which the training had changed. This run "
            f"continues with other values. {_HOW}"
        )


def _of_data(part: Any, name: str, value: Any) -> tuple[Any, str | None] | None:
    """Return what to compare of an attribute of data, and its kind; ``None`` for data themselves and caches."""
    is_cache = isinstance(value, (list, dict)) and hasattr(part, "__getitem__")
    if is_cache and _are_labels(value, part):
        return np.array(value), "data"
    of_stream = isinstance(value, list) and isinstance(part, IterableDataset)  # inherits __getitem__
    # Of plain values too in a deque, such as moves and results of games; a deque is hardly a cache of samples.
    plain = (tuple, list, dict) if isinstance(value, deque) else ()
    samples = isinstance(value, (list, deque)) and any(isinstance(x, plain) or _is_sample(x) for x in islice(value, 10))
    if (samples and not is_cache) or (of_stream and (samples or not value)):
        # Samples that the training collects, such as a replay buffer.
        return [len(value), *islice(value, 2), *islice(reversed(value), 2)], "pool"
    if as_generator(value) is not None:
        return value, "data"
    if _is_iterator(value):
        return value, None
    of_library = isinstance(part, DataLoader) or _package(type(part)) in _LIBRARIES
    if (name[0] == "_" and of_library) or is_cache or _are_arrays(value) or not _is_small(value):
        return None
    return value, "data" if isinstance(value, (float, Tensor, np.ndarray)) else None  # ints mostly count what is read


def _are_labels(values: Any, dataset: Any) -> bool:
    """Return True for a list with one number for each sample; a cache has nothing, or samples."""
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in islice(values, 10)):
        return False
    return 0 < len(values) <= _MOST_BYTES // 8 and len(values) == length_of(dataset)


def _are_arrays(values: Any) -> bool:
    """Return True for a tuple of tensors or arrays, such as a ``TensorDataset`` has: each is compared by itself."""
    return isinstance(values, tuple) and any(isinstance(value, (Tensor, np.ndarray)) for value in values)


def warn_of_unlike_tensors(loop: LoopState) -> None:
    """Warn, on rank 0, about tensors that a launcher's ranks have drawn differently. Collective, before training.

    Parameters and buffers are not among them, since rank 0's are sent to all ranks.
    """
    unlike = names_that_differ(Beside(loop, saved_names(loop)).tensors())
    sent = {name for name, _ in named_trained_parameters(loop.model, loop.criterion, loop.optimizer)}
    odd = [name for name in unlike if name not in sent]
    if odd and loop.is_global_zero:
        warn_or_print(
            f"the tensors {described_names(odd)} differ between ranks, as each rank has created the model for itself. "
            "Register them as buffers, which are sent from rank 0 to all ranks, or call torch.manual_seed before the "
            "model is created. Ignore this if each rank should have its own values."
        )


def _kind_of_value(value: Any) -> Any:
    """Return the kind of a value that a training mostly uses later: a count itself, a tensor's shape, or a pool."""
    if isinstance(value, (list, deque)) and any(map(_is_sample, islice(value, 10))):
        return "pool"
    if any(isinstance(one, Optimizer) for one in _parts_of(value)):
        return Optimizer
    return value if type(value) is int else tuple(value.shape) if is_plain_tensor(value) else None


def _is_sample(value: Any) -> bool:
    """Return True for a tensor or an array, and for a tuple, list or dict that contains one."""
    return any(isinstance(part, (Tensor, np.ndarray)) for part in _parts_of(value))


def _parts_of(value: Any) -> list[Any]:
    """Return the first items of a tuple, list or dict; or else the value itself."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return [*islice(parts, 10)]


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


@functools.cache
def _names_used(cls: type) -> frozenset[str]:
    """Return the names that the methods of a library's class use, such as ``_flat_weights`` of an LSTM."""
    methods = [method for method in vars(cls).values() if isinstance(method, FunctionType)]
    return frozenset(name for method in methods for name in method.__code__.co_names)


def _continues(now: Any, before: Any) -> bool:
    """Return True for the kinds of a count that has grown, of a pool, and of equal shapes: caches mostly differ."""
    return now > before if type(now) is type(before) is int else now in ("pool", before)


def _checksum(value: Any) -> int | None:
    shown = _shown(value, [_MOST_ITEMS])
    return None if shown is None else zlib.crc32(repr(shown).encode())


def _shown(value: Any, left: list[int], depth: int = 2) -> Any:
    """Return what shows a change of a value, in this process and in another one; ``None`` for other objects.

    ``left`` is the number of items that may still be read.
    """
    if isinstance(value, (str, bytes)) and len(value) > _MOST_ITEMS:
        return [len(value), value[:_MOST_ITEMS], value[-_MOST_ITEMS:]]
    if isinstance(value, int):
        return hex(value)
    if value is None or isinstance(value, (float, complex, str, bytes, np.generic)):
        return repr(value)
    if isinstance(value, Tensor):
        return [tuple(value.shape), bit_sums([value])] if is_plain_tensor(value) else None
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes()) if value.nbytes <= _MOST_BYTES and value.dtype.kind in "biufc" else None
    if (generator := as_generator(value)) is not None:
        state = generator.get_state()
        return repr(state.tolist() if isinstance(state, Tensor) else state)
    if isinstance(value, SynchronizedBase):
        return bytes(value.get_obj())
    if isinstance(value, Optimizer):
        return _shown([*value.state.values()], left, 3)
    if _is_iterator(value):
        left_over = getattr(value, "__length_hint__", None)  # an iterator of a list, for example
        return left_over() if left_over is not None else os.urandom(8)  # nothing else shows its position
    if depth and isinstance(value, (*_FUNCTIONS, SimpleNamespace)):
        value = entries_of(value)
    if not depth or not isinstance(value, (list, tuple, deque, dict, set, frozenset)):
        return None
    items = list(islice(value, left[0]))
    left[0] -= len(items)
    if isinstance(value, (set, frozenset)):  # in any order
        return [len(value), sum(zlib.crc32(repr(_shown(item, left, 1)).encode()) for item in items)]
    if isinstance(value, dict):
        return [len(value), [(_shown(key, left, 1), _shown(value[key], left, depth - 1)) for key in items]]
    return [len(value), [_shown(item, left, depth - 1) for item in items]]


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__") and not isinstance(value, IOBase)


def _is_small(value: Any) -> bool:
    """Return True for a plain value, a small array or tensor on the CPU, and a container of at most 1000 items.

    Labels and tables have at most two dimensions, and may be larger than images, which may be a cache.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        most = _SMALL_BYTES if value.ndim > 2 else _MOST_BYTES
        return value.nbytes <= most and (isinstance(value, np.ndarray) or (is_plain_tensor(value) and value.is_cpu))
    if isinstance(value, (list, tuple, dict, set, deque)):
        return len(value) <= _MOST_ITEMS
    return isinstance(value, (int, float, str, np.generic, SynchronizedBase))


def is_plain_tensor(value: Any) -> bool:
    """Return True for a tensor with bits that can be compared, and outside of a graph."""
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.grad_fn is not None:
        return False
    if value.is_nested or value.is_quantized or value.is_meta:
        return False
    return value.untyped_storage().nbytes() >= value.nbytes  # otherwise expanded, or with its memory freed
