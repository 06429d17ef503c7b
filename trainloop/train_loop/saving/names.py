"""Names of parameters in checkpoints, flags of parameters and modules, and parameter groups of optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainloop.optim.optimizers import optimizers_of
from trainloop.optim.parameters import trained_modules

_WRAPPED = "_checkpoint_wrapped_module"
FLAGS = ("flags", "criterion_flags")
"""Keys in checkpoints of the :func:`training_flags` of the modules that a loop trains: the model, the criterion."""


def plain_name(name: str) -> str:
    """Return a parameter's or module's name without the parts of torch's ``checkpoint_wrapper``, as in a state_dict."""
    return name if _WRAPPED not in name else ".".join(part for part in name.split(".") if part != _WRAPPED)


def training_flags(module: nn.Module) -> dict[str, dict[str, bool]]:
    """Return each parameter's ``requires_grad`` and each module's ``training``, by name."""
    return {
        "requires_grad": {plain_name(name): p.requires_grad for name, p in module.named_parameters()},
        "training": {plain_name(name): part.training for name, part in module.named_modules()},
    }


def set_flags(module: nn.Module, flags: Mapping[str, Mapping[str, bool]]) -> None:
    """Set the flags that :func:`training_flags` returned."""
    requires_grad, training = (
        {plain_name(name): flag for name, flag in flags.get(kind, {}).items()} for kind in ("requires_grad", "training")
    )
    for name, parameter in module.named_parameters():
        if plain_name(name) in requires_grad:
            parameter.requires_grad_(requires_grad[plain_name(name)])
    for name, part in module.named_modules():
        if plain_name(name) in training:
            part.training = training[plain_name(name)]


def _named_parameters(loop: Any) -> list[tuple[nn.Parameter, str]]:
    modules = zip(("model", "criterion"), trained_modules(loop.model, loop.criterion))
    return [(p, f"{root}.{plain_name(name)}") for root, module in modules for name, p in module.named_parameters()]


def plain_group_names(saved: list[list[list[str | None]]]) -> list[list[list[str | None]]]:
    """Return the names that :func:`group_names` returns today, for those in a checkpoint."""
    return [[[name and plain_name(name) for name in group] for group in of_one] for of_one in saved]


def group_names(loop: Any) -> list[list[list[str | None]]]:
    """Return the parameters' names by optimizer and group; ``None`` for a parameter that no known module contains."""
    names = {id(p): name for p, name in _named_parameters(loop)}
    return [
        [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers_of(loop.optimizer)
    ]


def add_missing_groups(loop: Any, saved: list[list[list[str | None]]] | None, *, only_look: bool = False) -> list[bool]:
    """Add the parameters that optimizers got in training; return, for each optimizer, True if its groups then match.

    Parameters
    ----------
    loop : TrainLoop
    saved : list
        Result of :func:`group_names` in the checkpoint's run.
    only_look : bool
        True to change nothing.
    """
    if saved is None:
        return [False] * len(optimizers_of(loop.optimizer))
    parameters = {name: p for p, name in _named_parameters(loop)}
    found = []
    saved = plain_group_names(saved)
    for optimizer, own, theirs in zip(optimizers_of(loop.optimizer), group_names(loop), saved, strict=True):
        fits = len(own) <= len(theirs) and all(mine == group[: len(mine)] for mine, group in zip(own, theirs))
        new = [group[len(own[i]) if i < len(own) else 0 :] for i, group in enumerate(theirs)]
        fits = fits and all(name in parameters for group in new for name in group)
        found.append(fits)
        if only_look or not fits:
            continue
        named = any("param_names" in group for group in optimizer.param_groups)
        for i, group in enumerate(new):
            added = [parameters[name] for name in group if name is not None]
            if i < len(own):
                optimizer.param_groups[i]["params"].extend(added)
            else:
                optimizer.add_param_group({"params": list(zip(group, added, strict=True)) if named else added})
    return found
