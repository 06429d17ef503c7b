"""Save and restore the random generators that users gave to loaders, samplers, datasets, modules and criteria."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from trainloop._support.nested import leaves_of, packed, unpacked
from trainloop._support.rng import Generator, as_generator
from trainloop._support.user_line import warn
from trainloop.data.loader.parts import attributes_of, datasets_of, has_state, parts_of_loader
from trainloop.errors import TrainLoopError

# Most attributes of modules have these types. To ask whether they are generators would take several times as long.
_BUILT_IN = {type(None), bool, int, float, str, list, tuple, set, dict, OrderedDict, partial, FunctionType, MethodType}


@dataclass(frozen=True)
class _OfState:
    """An own sampler's ``state_dict`` and ``load_state_dict``."""

    own: Any

    def get_state(self) -> Any:
        return packed(copy.deepcopy(self.own.state_dict()))

    def set_state(self, state: Any) -> None:
        self.own.load_state_dict(unpacked(state))


def generators_of(loader: Any) -> dict[str, Generator]:
    """Return the generators that the user gave a loader, by the attribute that refers to each; each generator once.

    In samplers and loaders of the user's own classes, these are all attributes that are generators of Python, numpy or
    torch; or, if a sampler has the methods ``state_dict`` and ``load_state_dict``, its state. A loader with these
    methods includes its samplers' states in its own.
    """
    return _generators_of(parts_of_loader(loader))


def _generators_of(parts: Mapping[str, Any]) -> dict[str, Generator]:
    found: dict[str, Generator] = {}
    whole = parts["loader"]
    for name, holder in parts.items():
        attributes = {name: getattr(holder, "generator", None)}
        if not type(holder).__module__.startswith("torch."):
            if not has_state(holder):
                attributes.update({f"{name}:{key}": value for key, value in attributes_of(holder).items()})
            elif not has_state(whole) and all(getattr(other, "own", None) is not holder for other in found.values()):
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
    """Return the generators of Python, numpy and torch among objects and their attributes, by path.

    Holders may be modules, with all modules inside them, or consist of such modules and objects, as a criterion may.
    """
    found: dict[str, Generator] = {}
    for name, holder in holders.items():
        for path, part in _parts_of(name, holder):
            _add_attributes(found, path, part)
    return found


def _parts_of(name: str, holder: Any) -> Iterator[tuple[str, Any]]:
    for path, part in leaves_of(holder, name):
        inner = part.named_modules() if isinstance(part, nn.Module) else [("", part)]
        yield from ((f"{path}.{name}", one) for name, one in inner)


def _add_attributes(found: dict[str, Generator], path: str, part: Any) -> None:
    if not isinstance(part, nn.Module):
        _add_generators(found, {path: part})
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


def generators_of_datasets(loader: Any) -> dict[str, Generator]:
    """Return the generators that are attributes of a loader's datasets."""
    return _of_datasets(parts_of_loader(loader))


def _of_datasets(parts: Mapping[str, Any]) -> dict[str, Generator]:
    found: dict[str, Generator] = {}
    for number, part in enumerate(datasets_of(parts).values()):
        _add_attributes(found, str(number), part)
    return found


def generators_read(loader: Any) -> dict[str, Generator]:
    """Return the generators from which a pass over a loader draws: its own, and its datasets'.

    A sampler that has a state of its own is left out: it may be within a pass.
    """
    parts = parts_of_loader(loader)
    own = {name: one for name, one in _generators_of(parts).items() if not isinstance(one, _OfState)}
    return {**own, **_of_datasets(parts)}


@contextmanager
def generators_restored(loader: Any, modules: Sequence[nn.Module], criterion: Any) -> Iterator[None]:
    """Let a block draw from the generators that a loader, modules and a criterion have, without an effect afterwards.

    Parameters
    ----------
    loader
    modules : sequence of Module
        All modules of the model and of the criterion, with those inside them.
    criterion
    """
    own = generators_read(loader)
    plain = [] if isinstance(criterion, nn.Module) else [one for _, one in _parts_of("", criterion)]
    for number, part in enumerate((*modules, *plain)):
        _add_attributes(own, f"part {number}", part)
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
