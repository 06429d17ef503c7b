"""Choose the modules of a model that are sharded as units, from the module tree only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainloop._support.keywords import why_not
from trainloop.errors import ConfigurationError
from trainloop.optim.parameters import own_parameters


def units_of(module: nn.Module, shard: Any = None) -> list[tuple[str, nn.Module]]:
    """Return the modules that are separate units, with their names. The root unit, which has the rest, is not listed.

    Parameters
    ----------
    module : nn.Module
        The whole model.
    shard : type, sequence of types or callable, optional
        Classes of modules, or a predicate ``module -> bool`` or ``(name, module) -> bool``. Default: the repeated
        blocks of a model, which are members of one class in a ``ModuleList`` or ``Sequential``. Empty: none.

    Returns
    -------
    list of (str, nn.Module)
        Inner units come first, since units must be sharded in this order. A block that shares a parameter or a
        submodule with a module outside of it is not a unit: it is part of the next enclosing unit that contains all
        users of the parameter, or of the root.

    Raises
    ------
    ConfigurationError
        If ``shard`` has another type, or matches no module.
    """
    chosen = _repeated_blocks(module) if shard is None else _matching(module, shard)
    users, parents = _modules_by_parameter(module), _parents(module)
    units = []
    for name, unit in chosen:
        inside = {id(part) for part in unit.modules()}
        inner = [part for part in unit.modules() if part is not unit and own_parameters(part)]
        if all(users[id(p)] <= inside for p in own_parameters(unit)) and all(parents[id(p)] <= inside for p in inner):
            units.append((name, unit))
    return sorted(units, key=lambda item: -item[0].count("."))


def check_parameters(unit: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Check that a unit's own trainable parameters have one dtype, and that none has a class of its own.

    Raises
    ------
    ConfigurationError
        If the dtypes differ; the error names a parameter of each dtype. If a parameter's class is lost with sharding.
    """
    for name, p in parameters.items():
        if type(p) is not nn.Parameter and issubclass(type(p), nn.Parameter):
            raise ConfigurationError(
                f"TTFullyShardedDataParallel: {name} of {unit} is a {type(p).__name__}, a subclass of nn.Parameter. "
                "Its shards would be plain parameters, and what the model or an optimizer does for this class (as "
                "geoopt's optimizers do for ManifoldParameter) would be left out. Use 'ddp', or an nn.Parameter."
            )
    found: dict[torch.dtype, str] = {}
    for name, p in parameters.items():
        if p.requires_grad:
            found.setdefault(p.dtype, name)
    if len(found) > 1:
        shown = " and ".join(f"{name}: {dtype}" for dtype, name in found.items())
        raise ConfigurationError(
            f"TTFullyShardedDataParallel: {unit} is sharded as one unit, but its parameters have several dtypes "
            f"({shown}), whose gradients can't be reduced together. Convert them to one dtype (model.to(dtype)), or "
            "pass modules of one dtype each as shard=."
        )


def _repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []

    def look(name: str, part: nn.Module) -> None:
        members = list(part.named_children())  # a module that is listed twice is yielded once
        counts: Counter[type] = Counter()
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            counts.update(type(member) for _, member in members if _can_be_unit(member))
        for own_name, member in members:
            path = f"{name}.{own_name}" if name else own_name
            if counts[type(member)] > 1 and _can_be_unit(member):
                # Don't search inside this module: small units would mean many small exchanges.
                found.append((path, member))
            else:
                look(path, member)

    look("", module)
    # A block in several places is listed once, by its first name.
    return list({id(unit): (name, unit) for name, unit in reversed(found)}.values())[::-1]


def _matching(module: nn.Module, shard: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(shard, (list, tuple, set, frozenset)) and not shard:
        return []  # the model is one unit
    matches = _matcher(shard)
    found = [(name, part) for name, part in module.named_modules() if name and matches(name, part)]
    if not found:
        classes = ", ".join(dict.fromkeys(type(part).__name__ for name, part in module.named_modules() if name))
        raise ConfigurationError(
            f"shard={_shown_shard(shard)} matches no module of {type(module).__name__}. The classes of its submodules "
            f"are {classes}."
        )
    for name, part in found:
        if not _has_forward(part):
            raise ConfigurationError(
                f"shard={_shown_shard(shard)} matches {name}, a {type(part).__name__}, which has no forward in which "
                "to gather its parameters. Pass the class of its members."
            )
    return [(name, part) for name, part in found if _can_be_unit(part)]


def _matcher(shard: Any) -> Callable[[str, nn.Module], bool]:
    classes = tuple(shard) if isinstance(shard, (list, tuple, set, frozenset)) else (shard,)
    if all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        return lambda name, part: isinstance(part, classes)
    if callable(shard) and not isinstance(shard, (type, nn.Module)):
        # Inspect the signature instead of calling it: an error inside must not look like a wrong argument count.
        takes_name = not why_not(shard, "", nn.Module())
        return lambda name, part: bool(shard(name, part) if takes_name else shard(part))
    raise ConfigurationError(
        f"shard={shard!r}: must be a module class, a list of module classes, a function (module -> bool), or None for "
        "the repeated blocks of the model."
    )


def _modules_by_parameter(module: nn.Module) -> dict[int, set[int]]:
    users: dict[int, set[int]] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), set()).add(id(part))
    return users


def _parents(module: nn.Module) -> dict[int, set[int]]:
    parents: dict[int, set[int]] = {}
    for part in module.modules():
        for child in part.children():
            parents.setdefault(id(child), set()).add(id(part))
    return parents


def _can_be_unit(part: nn.Module) -> bool:
    return _has_forward(part) and bool(own_parameters(part))


def _has_forward(part: nn.Module) -> bool:
    # A plain container's forward is never called, so FSDP's hooks would not run.
    return not (isinstance(part, (nn.ModuleList, nn.ModuleDict)) and type(part).forward is nn.Module.forward)


def _shown_shard(shard: Any) -> str:
    if isinstance(shard, (list, tuple, set, frozenset)):
        return f"[{', '.join(map(_shown_shard, shard))}]"
    return getattr(shard, "__name__", repr(shard))
