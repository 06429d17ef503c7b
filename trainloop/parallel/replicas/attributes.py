"""Keep what the replicas of a model have set or counted alike; compare bits to detect what each has changed."""

from __future__ import annotations

import copy
import operator
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainloop._support.nested import map_parts, parts_of
from trainloop.errors import ConfigurationError
from trainloop.parallel.replicas.references import refers_to, with_copies
from trainloop.parallel.sharded.shards import bit_sums, dense_parts


class WatchedTensors:
    """Find buffers and parameters that ``get_loss`` changes: a replica computes them from its part of the batch.

    BatchNorm's statistics are those of the first part, as in ``nn.DataParallel``. A value that is the same on all
    replicas, such as a count of steps, is right.

    Parameters
    ----------
    module : nn.Module
    replicas : list of nn.Module
    values : bool
        Compare the values' bits, too. Versions of tensors do not show changes through ``.data``.
    """

    def __init__(self, module: nn.Module, replicas: list[nn.Module], values: bool = False) -> None:
        self._parts = dict(module.named_modules())  # before the call, which may give other names to parts
        self._copies = [dict(replica.named_modules()) for replica in replicas]
        self._before = {
            (path, name): (tensor, tensor._version)
            for path, part in self._parts.items()
            if not hasattr(part, "track_running_stats") and not isinstance(part, torch.jit.ScriptModule)
            for name, tensor in [*part._buffers.items(), *part._parameters.items()]
            if tensor is not None
        }
        self._bits = self._bits_now() if values else {}

    def _bits_now(self) -> dict[tuple[str, str], list[int]]:
        """Return checksums of the watched tensors."""
        watched = ((key, tensor) for key, (tensor, _) in self._before.items() if not tensor.is_nested)
        dense = [(key, part) for key, tensor in watched for part in dense_parts(tensor)]
        found: dict[tuple[str, str], list[int]] = {}
        for (key, _), bits in zip(dense, bit_sums([part for _, part in dense]), strict=True):
            found.setdefault(key, []).append(bits)
        return found

    def check(self) -> None:
        """Raise an error if the first replica has changed or replaced a tensor, unless all replicas have equal values.

        Raises
        ------
        ConfigurationError
            The message names the tensor.
        """
        if not self._before:
            return
        now = self._bits_now() if self._bits else {}
        for (path, name), (tensor, version) in self._before.items():
            own = [getattr(copies.get(path), name, None) for copies in self._copies]
            is_buffer = name in self._parts[path]._buffers
            replaced = isinstance(own[0], Tensor) and _place_of(own[0]) != _place_of(tensor)
            changed = tensor._version != version or now.get((path, name)) != self._bits.get((path, name))
            if not replaced and not changed:
                continue
            first: Any = own[0]
            same = is_buffer and all(isinstance(t, Tensor) and torch.equal(t.to(first.device), first) for t in own)
            if same and replaced:  # a table that grows with the longest batch, for example
                setattr(self._parts[path], name, first.detach())
            elif not same:
                shown = f"{path}.{name}" if path else name
                raise ConfigurationError(
                    f"gpu_mode='dp': get_loss changes {shown}, but each replica has only a part of the batch, so "
                    f"{'the change would be lost' if replaced else 'the change would be that of the first part'}. Use "
                    "gpu_mode='ddp' or 'single', or change it in a callback's on_after_optimizer_step."
                )


_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def _place_of(tensor: Tensor) -> list[int]:
    return [part.data_ptr() for part in dense_parts(tensor)]


class RegisteredParts:
    """Find what a method registers in replicas of a module; keep what is the same for all of them.

    A buffer may be computed at the first forward, also one that was registered as None, and a module of the model may
    get another name (``self.head = self.heads[task]``). A new module or parameter would be lost, with what the
    optimizer is to train.

    Parameters
    ----------
    module : nn.Module
    replicas : list of nn.Module
    """

    def __init__(self, module: nn.Module, replicas: list[nn.Module]) -> None:
        self._modules = dict(module.named_modules())
        self._replicas = [dict(replica.named_modules()) for replica in replicas]
        self._before = {
            path: (dict(part._modules), _present(part._parameters), _present(part._buffers))
            for path, part in self._replicas[0].items()
            if not isinstance(part, torch.jit.ScriptModule)
        }
        self._paths = [{id(part): path for path, part in parts.items()} for parts in self._replicas]

    def keep(self) -> list[str]:
        """Register these parts in the module; return the names of buffers that differ between replicas, and are lost.

        Raises
        ------
        ConfigurationError
            If a new module or parameter is registered, or one is removed; the message names it.
        """
        lost = []
        for path, (modules, parameters, buffers) in self._before.items():
            part, copies = self._modules[path], [parts[path] for parts in self._replicas]
            first, prefix = copies[0], f"{path}." if path else ""
            for name, child in first._modules.items():
                if name not in modules or child is not modules[name]:
                    part._modules[name] = self._own(prefix + name, [copy._modules.get(name) for copy in copies])
            for name in [*(modules.keys() - first._modules.keys()), *(parameters ^ _present(first._parameters))]:
                raise _lost_part(prefix + name)
            for name in buffers ^ _present(first._buffers):
                own = [copy._buffers.get(name) for copy in copies]
                if not all(_same_value(other, own[0]) for other in own):
                    lost.append(prefix + name)
                elif name not in first._buffers:
                    delattr(part, name)
                elif name in part._buffers:
                    setattr(part, name, own[0])
                else:
                    part.register_buffer(name, own[0], persistent=name in first.state_dict())
        return lost

    def _own(self, name: str, children: list[nn.Module | None]) -> nn.Module | None:
        """Return the module's own part for one that each replica has registered as ``name``."""
        paths = {paths.get(id(child)) for child, paths in zip(children, self._paths)}
        if len(paths) == 1 and None not in paths:
            return self._modules[paths.pop()]
        if any(child is not children[0] for child in children):
            raise _lost_part(name)
        return children[0]


def _present(named: Mapping[str, Tensor | None]) -> set[str]:
    """Return the names of tensors; those of a module may be None."""
    return {name for name, tensor in named.items() if tensor is not None}


def _lost_part(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"gpu_mode='dp': {name} is registered, replaced or removed while the model runs, but each replica is a copy "
        "for one call, so that the change would be lost. Make it before fit (call the model once, if the first forward "
        "pass creates parameters) or in a callback, or use gpu_mode='ddp' or 'single'."
    )


class ChangedMeanwhile:
    """Find attributes of a model or a criterion that hooks change while its replicas are in the middle of a method."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._before = {
            path: {name: (value, _copied(value) if _has_numbers(value) else value) for name, value in own.items()}
            for path, part in _modules_of(module).items()
            if (own := getattr(part, "__dict__", {}))
        }

    def put(self, replica: Any, newer: Any) -> None:
        """Give the replica these attributes of a newer one; it keeps what the method itself has set."""
        parts, news = _modules_of(replica), _modules_of(newer)
        for path, part in _modules_of(self._module).items():
            if path not in self._before or path not in parts:
                continue
            for name in (vars(part).keys() & vars(news[path]).keys()) - _OF_ANY_MODULE:
                value, content = self._before[path].get(name, (_MISSING, None))
                now = vars(part)[name]
                if now is not value or (_has_numbers(now) and now != content):
                    vars(parts[path])[name] = vars(news[path])[name]


class SetAttributes:
    """Find the attributes that a method sets in replicas of a model or a criterion; keep those that all set alike.

    A count of steps is the same in all replicas, and so is what pruning computes before each forward (``weight``, from
    a parameter and a mask, which the next call of ``torch.nn.utils.prune`` reads from the module). What a replica
    computes from its part of the batch is lost.

    A replica is a shallow copy, but gets its own copy of a dict or list of numbers, also of a nested one: if all
    replicas changed one, it would count each step several times. A dict or list that refers to parts of the module
    refers to those of the replica in its copy. Other objects are shared; ``shared_changes`` names those that are
    changed in place.
    """

    def __init__(self, module: Any, replicas: list[Any]) -> None:
        self._modules = _modules_of(module)
        self._replicas = [_modules_of(replica) for replica in replicas]
        self._shared: list[tuple[str, Any, Any]] = []  # name, object, its content
        self._before = {path: dict(getattr(part, "__dict__", {})) for path, part in self._replicas[0].items()}
        # Path, name, object, its items, copies, and what differs in each copy: items of the object and of the copy.
        self._containers: list[tuple[str, str, Any, Any, list[Any], list[list[tuple[Any, Any]]]]] = []
        copied: list[dict[int, Any]] = [{} for _ in replicas]  # one container may have several names
        for path, part in self._modules.items():
            own = getattr(part, "__dict__", {})
            for name in own.keys() - _OF_ANY_MODULE:
                if _has_numbers(value := own[name]) and path in self._replicas[0]:
                    holders = [parts[path].__dict__ for parts in self._replicas]
                    for held, memo in zip(holders, copied, strict=True):
                        if held.get(name) is value:
                            held[name] = copy.deepcopy(value, memo)
                    copies = [held.get(name) for held in holders]
                    self._containers.append((path, name, value, copy.deepcopy(value), copies, [[] for _ in copies]))
                    self._before[path].pop(name, None)
                elif self._refers_to_copies(path, name, value):
                    copies = [parts[path].__dict__.get(name) for parts in self._replicas]
                    pairs = [
                        [(own, parts[at]) for at, own in self._modules.items() if at in parts]
                        for parts in self._replicas
                    ]
                    for of_one, its in zip(pairs, copies, strict=True):
                        of_one += _pairs(value, its)
                    self._containers.append((path, name, value, _copied(value), copies, pairs))
                elif (content := _content_of(value)) is not None:
                    self._shared.append((f"{path}.{name}" if path else name, value, content))

    def _refers_to_copies(self, path: str, name: str, value: Any) -> bool:
        """Return True if the replicas have a dict or list of their own because it refers to their parts."""
        if not isinstance(value, (dict, list)) or path not in self._replicas[0]:
            return False
        is_own = self._replicas[0][path].__dict__.get(name) is not value
        return is_own and refers_to(value, set(map(id, self._modules.values())))

    def keep(self) -> list[str]:
        """Set the module's attributes; return the names of those that had such a value, or None, and are lost."""
        lost = []
        for path, before in self._before.items():
            part = self._modules.get(path)
            own = [getattr(parts[path], "__dict__", {}) for parts in self._replicas]
            for name, first in own[0].items() if part is not None else ():
                # a class may have its first value
                old = before[name] if name in before else getattr(type(part), name, _MISSING)
                was_value = old is None or isinstance(old, (Tensor, int, float))  # a sum may begin with 0
                if first is old or not (_is_plain_value(first) or (isinstance(first, Tensor) and was_value)):
                    continue
                same = all(_same_value(other.get(name), first) for other in own[1:])
                if same and not _counts_samples(old, first, before.get("_log_batch_size", 1)):
                    vars(part)[name] = first
                elif (old is None or _is_state(old)) and (_is_state(first) or isinstance(old, (int, float))):
                    # A sum of losses may have their graph; begun as a number, it is no cache of this forward's output.
                    lost.append(f"{path}.{name}" if path else name)
        return lost + self._keep_containers()

    def shared_changes(self) -> list[str]:
        """Return the names of tensors, arrays and containers that replicas share and have changed in place."""
        return [name for name, value, before in self._shared if _differs(_content_of(value), before)]

    def _keep_containers(self) -> list[str]:
        """Write the numbers of the replicas' dicts and lists into those of the module."""
        lost, done = [], set[int]()
        for path, name, value, before, copies, pairs in self._containers:
            own = [parts[path].__dict__.get(name) for parts in self._replicas]
            into = [{id(item): its for item, its in of_one} for of_one in pairs]
            named = [
                with_copies(one, {id(its): item for item, its in of_one}, {})
                for one, of_one in zip(own, pairs, strict=True)
            ]
            # A new object is not among the copies.
            if not _keep_items(value, before, named, done) and all(map(operator.is_, own, copies)):
                lost.append(f"{path}.{name}" if path else name)
            for one, its_value, items in zip(copies, named, into, strict=True):
                if type(one) is type(value) and not _equal(its_value, value):  # a generator continues with them
                    _set_items(one, with_copies(_copied(value), items, {}))
        return lost


def _pairs(value: Any, other: Any, depth: int = 3) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a container with those of a copy that differ, also of the containers in it."""
    if depth and isinstance(value, (dict, list)) and type(value) is type(other):
        for item, its in zip(parts_of(value) or (), parts_of(other) or (), strict=False):
            yield from _pairs(item, its, depth - 1)
    elif value is not other:
        yield value, other


def _copied(value: Any, depth: int = 3) -> Any:
    """Return a copy of a container and the containers in it, with the same items."""
    return map_parts(partial(_copied, depth=depth - 1), value) if depth and isinstance(value, (dict, list)) else value


_MISSING = object()  # an attribute that did not exist before; new ones are usually caches


def _keep_items(value: Any, before: Any, own: list[Any], done: set[int]) -> bool:
    """Write what all replicas have changed alike into ``value``, or what they append; return False if they differ."""
    if any(type(one) is not type(value) for one in own):
        return False
    if all(_equal(one, before) for one in own) or id(value) in done:
        return True
    if all(_equal(one, own[0]) for one in own):
        _set_items(value, own[0])
        return True
    done.add(id(value))
    if isinstance(value, list):
        are_longer = all(_equal(one[: len(before)], before) for one in own)
        for one in own if are_longer else ():  # each part's results, in order
            value.extend(one[len(before) :])
        return are_longer
    kept = True
    for key in {key: None for one in own for key in one}:
        items = [one.get(key, _MISSING) for one in own]
        found = [item for item in items if item is not _MISSING]
        if len(found) == 1 and key not in before:  # of a sample that only this part has
            value[key] = found[0]
        elif all(_equal(item, items[0]) for item in items):
            value[key] = _updated(value.get(key), items[0])
        else:
            is_container = isinstance(value.get(key), (dict, list))
            kept &= is_container and _keep_items(value[key], before[key], items, done)
    return kept


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except RecursionError:  # lists that contain themselves
        return True
    except (RuntimeError, ValueError):  # tensors or arrays of several numbers
        return False


def _set_items(container: Any, like: Any) -> None:
    """Give a container these items; containers in it stay the same objects."""
    if isinstance(container, list):
        container[:] = [*map(_updated, container, like), *like[len(container) :]]
        return
    for key in container.keys() - like.keys():
        del container[key]
    for key, item in like.items():
        container[key] = _updated(container.get(key), item)


def _updated(old: Any, item: Any) -> Any:
    if type(old) is type(item) and isinstance(item, (dict, list)):
        _set_items(old, item)
        return old
    return item


def _content_of(value: Any) -> Any:
    """Return what shows whether a tensor, an array, a deque of numbers, or a dict's or list's numbers have changed."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes()) if value.nbytes <= 65_536 and value.dtype != object else None
    if isinstance(value, deque):
        return list(value) if len(value) <= 1000 and all(map(_is_plain_value, value)) else None
    if (isinstance(value, dict) or (isinstance(value, list) and value)) and len(value) <= 1000:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        content = {key: (item, _content_of(item)) for key, item in items if _is_state(item)}
        return content if content or not value else None
    return None


def _differs(now: Any, before: Any) -> bool:
    """Return True if a content has changed. New items of a dict or list are no change, except numbers in an empty dict.

    Nor is another tensor in the place of one: usually, it is what the last forward has computed.
    """
    if not isinstance(before, dict):
        return bool(now != before)
    now = now or {}
    if not before:
        return any(_is_number(item) for item, _ in now.values())
    for key, (old, content) in before.items():
        new, its_content = now.get(key, (old, content))
        if its_content != content if new is old else _is_number(old) and not _equal(new, old):
            return True
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value


def _modules_of(value: Any) -> dict[str, Any]:
    """Return the modules of a model or criterion by path; a criterion that is no module is its only part."""
    return dict(value.named_modules()) if isinstance(value, nn.Module) else {"": value}


def _has_numbers(value: Any) -> bool:
    """Return True for a dict or list of at most 1,000 numbers, such as counts, and for any Counter.

    Text, tuples and other dicts and lists may be among the numbers. An empty one may be meant for anything, except a
    Counter and a ``defaultdict`` of numbers.
    """
    counts = isinstance(value, Counter) or (isinstance(value, defaultdict) and value.default_factory in (int, float))
    leaves = list(islice(_leaves(value, 3), None if counts else 1001)) if isinstance(value, (dict, list)) else [None]
    if not all(map(_is_plain_value, leaves)):
        return False
    return counts or (len(leaves) <= 1000 and any(isinstance(leaf, (int, float)) for leaf in leaves))


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    """Yield the items of a dict or list, and those of the dicts, lists and tuples in it."""
    if depth and isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item, depth - 1)
    elif isinstance(value, tuple):
        yield from value
    else:
        yield value


def _is_plain_value(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str))


def _is_state(value: Any) -> bool:
    """Return True for a number, or a tensor that is no part of a graph."""
    if isinstance(value, Tensor):
        return not (value.requires_grad or value.grad_fn)
    return value is not None and _is_plain_value(value)


def _counts_samples(old: Any, value: Any, size: int) -> bool:
    """Return True if a number has grown by the number of samples of a part, so that other parts are missing."""
    numbers = isinstance(value, (int, float)) and isinstance(old, (int, float))
    return size > 1 and numbers and bool(value - old == size)


def _same_value(value: Any, first: Any) -> bool:
    if type(value) is not type(first):
        return False
    if isinstance(first, Tensor):
        return torch.equal(value.to(first.device), first)
    return bool(value == first) or value != value  # NaN


def explain_replica(error: Exception) -> None:
    """Raise an explanation if ``get_loss`` freezes or copies parameters of a replica; return for other causes."""
    if isinstance(error, RuntimeError) and "requires_grad flags of leaf variables" in str(error):
        raise ConfigurationError(
            "gpu_mode='dp': get_loss changes requires_grad of a parameter, but the parameters of a replica are copies, "
            "whose flags can't change. For gradients of inputs only, call torch.autograd.grad(output, inputs), which "
            "leaves the gradients of parameters unchanged. Otherwise, use gpu_mode='ddp' or 'single', or set the flags "
            f"in a callback. torch says: {error}"
        ) from error
    if isinstance(error, RuntimeError) and "support the deepcopy protocol" in str(error):
        raise ConfigurationError(
            "gpu_mode='dp': get_loss calls copy.deepcopy with a tensor that has a graph, or with a module: a replica's "
            "parameters are such tensors. Copy detached tensors, and call the module with them by "
            f"torch.func.functional_call, or use gpu_mode='ddp' or 'single'. torch says: {error}"
        ) from error
