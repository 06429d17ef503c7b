"""Determine a sampler's order of indices: its length, how it is drawn, and a checksum to compare it between ranks."""

from __future__ import annotations

import copy
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeGuard, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from trainloop._support.keywords import why_not
from trainloop._support.nested import packed, unpacked
from trainloop._support.rng import derive_seed, without_arrays
from trainloop._support.sharding import IdentityOrder, Order, PermutedOrder
from trainloop._support.user_line import warn
from trainloop.data.batch.randomness import IsolatedRandomState
from trainloop.data.order.columns import SplitBatches
from trainloop.errors import TrainLoopError

T = TypeVar("T")

# Lists of samplers are shorter; lists of indices may be long.
_MOST_ITEMS = 64


def length_of(sized: Any) -> int | None:
    """Return ``len(sized)``; None if that raises an error."""
    try:
        return len(sized)
    except Exception:  # an error of the user's code
        return None


def order_by_position(sampler: Any, key: int | None) -> Order | None:
    """Return the sampler's order if it can be computed at any position; None if the sampler must be iterated.

    Parameters
    ----------
    sampler
        Any iterable of indices.
    key : int or None
        Key of a shuffled order that replaces the sampler's order; None if only the sampler's own order is acceptable.
    """
    if type(sampler) is SequentialSampler:
        return IdentityOrder(len(sampler))
    if type(sampler) is range and sampler.step == 1 and sampler.start == 0:
        return IdentityOrder(len(sampler))
    # With a generator, the user controls the order. If the sampler yields several permutations, or a part of one, it
    # must be iterated.
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.generator is not None or key is None:
        return None
    return PermutedOrder(len(sampler), key) if len(sampler) == len(sampler.data_source) else None


def digest_of(indices: list[Any]) -> int:
    """Return a checksum of indices, or of lists of them; equal on ranks that read the same order."""
    return derive_seed(repr(_plain(indices)))


def _plain(index: Any) -> Any:
    if isinstance(index, (list, tuple)):
        return [_plain(part) for part in index]
    try:
        return operator.index(index)
    except TypeError:
        # The repr of other objects may contain addresses, which differ.
        return index if isinstance(index, str) else type(index).__name__


def rest_of(iterator: Iterator[T]) -> Iterator[T]:
    """Yield the rest of an iterator by ``next`` only: at ``iter``, some iterators start again and return themselves.

    (Speech samplers such as lhotse's do this, and so do litdata's streams.) ``for`` and ``itertools`` call ``iter``.
    """
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def cuts_torchs_order(batches: Any) -> TypeGuard[BatchSampler]:
    """Return True for torch's own batch sampler over its sequential or random sampler: lengths and draws are known."""
    return type(batches) is BatchSampler and type(batches.sampler) in (SequentialSampler, RandomSampler)


def batches_of(sampler: Iterable[T]) -> Iterator[T]:
    """Return ``iter(sampler)``; for torch's ``BatchSampler``, an iterator of the same batches.

    Since torch 2.7, ``BatchSampler`` calls ``iter`` again for each batch: an endless loop if that starts again.
    """
    return iter(sampler) if type(sampler) is not BatchSampler or sampler.drop_last else _cut(sampler)


def _cut(sampler: BatchSampler) -> Iterator[Any]:
    indices = iter(sampler.sampler)
    rest = rest_of(indices) if indices is sampler.sampler else indices
    while batch := [*islice(rest, sampler.batch_size)]:
        yield batch


def read_isolated(iterable: Iterable[Any], at_once: int, seed: int | None) -> Iterator[list[Any]]:
    """Yield lists of ``at_once`` items, drawn under an isolated random state that depends only on the seed.

    Without a seed, the items are drawn from the global generators, like in plain iteration.
    """
    isolated = nullcontext() if seed is None else IsolatedRandomState(seed)
    with isolated:
        iterator = rest_of(batches_of(iterable))
    while True:
        with isolated:
            chunk = list(islice(iterator, at_once))
        if not chunk:
            return
        yield chunk


def parts_of_loader(loader: Any) -> dict[str, Any]:
    """Return a loader, its samplers, the samplers inside these, and the loaders that a loader of the user has."""
    parts: dict[str, Any] = {}
    _add_loader(parts, "loader", loader)
    return parts


def _add_loader(parts: dict[str, Any], name: str, loader: Any) -> None:
    if _is_among(loader, parts):
        return
    parts[name] = loader
    for kind in ("sampler", "batch_sampler"):
        _add_samplers(parts, kind if name == "loader" else f"{name}.{kind}", getattr(loader, kind, None))
    if not isinstance(loader, DataLoader) and not has_state(loader):
        for key, one in _attributes_of(loader).items():
            if isinstance(one, DataLoader) or _is_sampler(one):  # or another loader of the user's own
                _add_loader(parts, f"{name}.{key}", one)


def _is_among(one: Any, parts: Mapping[str, Any]) -> bool:
    return id(one) in map(id, parts.values())


def datasets_of(loader: Any, parts_of_it: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a loader's dataset, and the datasets that it has as ``dataset`` or ``datasets``, by attribute.

    ``parts_of_it``: the result of :func:`parts_of_loader`, if it is known.
    """
    parts: dict[str, Any] = {}
    within = parts_of_loader(loader) if parts_of_it is None else parts_of_it
    loaders = [(name, one) for name, one in within.items() if one is loader or isinstance(one, DataLoader)]
    left = [(f"{name}.dataset".removeprefix("loader."), getattr(one, "dataset", None)) for name, one in loaders]
    while left:
        name, dataset = left.pop()
        if dataset is None or _is_among(dataset, parts):
            continue
        parts[name] = dataset
        several = getattr(dataset, "datasets", None)
        if isinstance(several, (list, tuple, dict)):
            items = several.items() if isinstance(several, dict) else enumerate(several)
            left += [(f"{name}.datasets[{key}]", one) for key, one in items]
        left.append((f"{name}.dataset", getattr(dataset, "dataset", None)))
    return parts


def _add_samplers(parts: dict[str, Any], name: str, sampler: Any) -> None:
    """Add a sampler, and those that it has: as ``sampler``, or as other attributes of a class of the user."""
    if sampler is None or _is_among(sampler, parts):
        return
    parts[name] = sampler
    inner = {"sampler": getattr(sampler, "sampler", None)}
    if not type(sampler).__module__.startswith("torch.") and not has_state(sampler):
        inner.update((key, one) for key, one in _attributes_of(sampler).items() if _is_sampler(one))
    for key, one in inner.items():
        _add_samplers(parts, f"{name}.{key}", one)


def _is_sampler(value: Any) -> bool:
    """Return True for PyTorch's samplers, and objects that can only be iterated, which are samplers within a sampler.

    It is no dataset or loader, though, whose order does not determine that of the sampler.
    """
    if isinstance(value, Sampler):
        return True
    only_iterated = hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__")
    others = (Iterator, Dataset, DataLoader, nn.Module)
    return only_iterated and hasattr(value, "__dict__") and not isinstance(value, others)


def _attributes_of(holder: Any) -> dict[str, Any]:
    """Return an object's attributes, and the samplers, loaders and generators in lists, tuples and dicts among them."""
    found: dict[str, Any] = {}
    for name, value in getattr(holder, "__dict__", {}).items():
        found[name] = value
        found.update(_parts_in(name, value))
    return {name: value for name, value in found.items() if value is not None}


def _parts_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the samplers, loaders and generators in nested lists, tuples and dicts by name.

    Only the first containers and the first items of each are read: the others are data.
    """
    containers = deque([(name, value)] if type(value) in (list, tuple, dict) else [])
    for _ in range(_MOST_ITEMS):
        if not containers:
            return
        name, value = containers.popleft()
        for key, item in islice(value.items() if isinstance(value, dict) else enumerate(value), _MOST_ITEMS):
            if type(item) in (list, tuple, dict):
                containers.append((f"{name}[{key}]", item))
            elif isinstance(item, DataLoader) or _is_sampler(item) or as_generator(item):
                yield f"{name}[{key}]", item


class Generator(Protocol):
    """A random generator, by the methods of torch's generators."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


@dataclass(frozen=True)
class _OfPython:
    own: random.Random

    def get_state(self) -> Any:
        return self.own.getstate()

    def set_state(self, state: Any) -> None:
        self.own.setstate(state)


@dataclass(frozen=True)
class _OfNumpy:
    own: np.random.Generator

    def get_state(self) -> Any:
        return without_arrays(self.own.bit_generator.state)

    def set_state(self, state: Any) -> None:
        self.own.bit_generator.state = state


@dataclass(frozen=True)
class _OfOldNumpy:
    own: np.random.RandomState

    def get_state(self) -> Any:
        return without_arrays(self.own.get_state(legacy=False))

    def set_state(self, state: Any) -> None:
        self.own.set_state(state)


@dataclass(frozen=True)
class _OfState:
    """An own sampler's ``state_dict`` and ``load_state_dict``."""

    own: Any

    def get_state(self) -> Any:
        return packed(copy.deepcopy(self.own.state_dict()))

    def set_state(self, state: Any) -> None:
        self.own.load_state_dict(unpacked(state))


def has_state(thing: Any) -> bool:
    """Return True if an object has the methods ``state_dict()`` and ``load_state_dict``."""
    if thing is None or isinstance(thing, (type, nn.Module)):
        return False
    save, load = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    # Mosaic's and litdata's methods require the number of samples yielded, which only their own loader knows.
    return callable(save) and callable(load) and not why_not(save)


# Most attributes of modules have these types. To ask whether they are generators would take several times as long.
_BUILT_IN = {type(None), bool, int, float, str, list, tuple, set, dict, OrderedDict}


def as_generator(value: Any) -> Generator | None:
    """Return a random generator of Python, numpy or torch, with its state; ``None`` for any other object."""
    if isinstance(value, torch.Generator):
        return value
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _OfPython(value)
    if isinstance(value, np.random.RandomState):
        return _OfOldNumpy(value)
    return _OfNumpy(value) if isinstance(value, np.random.Generator) else None


def generators_of(loader: Any) -> dict[str, Generator]:
    """Return the generators that the user gave a loader, by the attribute that refers to each; each generator once.

    In samplers and loaders of the user's own classes, these are all attributes that are generators of Python, numpy or
    torch; or, if a sampler has the methods ``state_dict`` and ``load_state_dict``, its state. A loader with these
    methods includes its samplers' states in its own.
    """
    loader = loader.loader if isinstance(loader, SplitBatches) else loader
    return _generators_of(loader, parts_of_loader(loader))


def _generators_of(loader: Any, parts: Mapping[str, Any]) -> dict[str, Generator]:
    found: dict[str, Generator] = {}
    for name, holder in parts.items():
        attributes = {name: getattr(holder, "generator", None)}
        if not type(holder).__module__.startswith("torch."):
            if not has_state(holder):
                attributes.update({f"{name}:{key}": value for key, value in _attributes_of(holder).items()})
            elif not has_state(loader) and all(getattr(other, "own", None) is not holder for other in found.values()):
                found[f"{name}:state"] = _OfState(holder)
        _add_generators(found, attributes)
    return found


def _add_generators(found: dict[str, Generator], attributes: Mapping[str, Any]) -> None:
    """Add the generators among attributes that have not been found yet."""
    for key, value in attributes.items():
        generator = None if value is None else as_generator(value)
        if generator is not None and all(generator != other for other in found.values()):
            found[key] = generator


def generators_in(**holders: Any) -> dict[str, Generator]:
    """Return the generators of Python, numpy and torch that are attributes of objects, by path.

    Holders may be modules, with all modules inside them, or dicts and lists of objects.
    """
    found: dict[str, Generator] = {}
    for name, holder in holders.items():
        for path, part in _parts_of(name, holder):
            _add_attributes(found, path, part)
    return found


def _parts_of(name: str, holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, nn.Module):
        for path, part in holder.named_modules():
            yield f"{name}.{path}", part
    elif isinstance(holder, (Mapping, list, tuple)):
        for key, one in holder.items() if isinstance(holder, Mapping) else enumerate(holder):
            yield from _parts_of(f"{name}[{key}]", one)
    else:
        yield f"{name}.", holder


def _add_attributes(found: dict[str, Generator], path: str, part: Any) -> None:
    attributes = getattr(part, "__dict__", {})
    if not _BUILT_IN.issuperset(map(type, attributes.values())):
        own = {f"{path}:{key}": value for key, value in attributes.items() if type(value) not in _BUILT_IN}
        _add_generators(found, own)


def kept_in_checkpoints(states: Mapping[str, Any], plain: Callable[[Any, str], Any], name: str) -> dict[str, Any]:
    """Return the states of generators that a checkpoint can contain; warn of a sampler's own state that it can't."""
    kept = {}
    for key, state in states.items():
        try:
            kept[key] = plain(state, f"{name}: {key}")
        except TrainLoopError as error:
            warn(
                f"{name}: the state_dict() of its {key.removesuffix(':state')} can't be stored in a checkpoint, so a "
                f"resumed run may read another order. The error: {error}"
            )
    return kept


def generator_states(loaders: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the states of each loader's generators, for :func:`set_generator_states`."""
    return [{name: own.get_state() for name, own in generators_of(loader).items()} for loader in loaders]


def set_generator_states(loaders: Iterable[Any], states: Iterable[Mapping[str, Any]]) -> None:
    """Set the states of loaders' generators. A generator without a saved state is not changed."""
    for loader, saved in zip(loaders, states, strict=True):
        set_states(generators_of(loader), saved)


@contextmanager
def generators_restored(loader: Any, modules: Sequence[nn.Module], criterion: Any) -> Iterator[None]:
    """Let a block draw from generators of a loader, its dataset, modules and a criterion without an effect afterwards.

    A sampler that has a state of its own is not changed: it may be within a pass.

    Parameters
    ----------
    loader
    modules : sequence of Module
        All modules of the model and of the criterion, with those inside them.
    criterion
    """
    loader = loader.loader if isinstance(loader, SplitBatches) else loader
    of_loader = parts_of_loader(loader)
    own = {name: one for name, one in _generators_of(loader, of_loader).items() if not isinstance(one, _OfState)}
    plain = [] if isinstance(criterion, nn.Module) else [one for _, one in _parts_of("", criterion)]
    for number, part in enumerate((*datasets_of(loader, of_loader).values(), *modules, *plain)):
        _add_attributes(own, str(number), part)
    before = {name: one.get_state() for name, one in own.items()}
    try:
        yield
    finally:
        set_states(own, before)


def set_states(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Set the states of generators by name. A generator without a saved state is not changed."""
    for name, generator in generators.items():
        if name in states:
            generator.set_state(states[name])
