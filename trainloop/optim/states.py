"""States of optimizers for checkpoints: with contained optimizers, with their dtypes, with groups in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainloop._support.nested import map_parts, parts_of
from trainloop.optim.optimizers import MultiOptimizer, inner_optimizers, optimizers_of


def gather_divided_states(optimizer: Optimizer | MultiOptimizer | None) -> None:
    """Collect on rank 0 the states that optimizers divide over ranks, such as ``ZeroRedundancyOptimizer``. Collective.

    The next ``state_dict`` on rank 0 is then that of all ranks. Other optimizers are left alone.
    """
    for one in optimizers_of(optimizer):
        if divides_state(one):
            one.consolidate_state_dict()  # type: ignore[attr-defined]


def divides_state(optimizer: Optimizer) -> bool:
    """Return True if each rank has a part of the optimizer's state, so that all ranks must prepare ``state_dict``."""
    return callable(getattr(optimizer, "consolidate_state_dict", None))


def optimizer_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state for a checkpoint, with the states of the optimizers that it contains."""
    # An optimizer that divides its state over ranks contains one for this rank's part.
    contained = {} if divides_state(optimizer) else inner_optimizers(optimizer)
    inner = {path: one for path, one in contained.items() if one.state is not optimizer.state}
    state = {"type": type(optimizer).__name__, "state": optimizer.state_dict()}
    return {**state, "inner": {path: one.state_dict() for path, one in inner.items()}} if inner else state


def load_optimizer_state_dict(
    optimizer: Optimizer, saved: Mapping[str, Any], recast: Callable[[Tensor], bool] | None = None
) -> None:
    """Load the result of :func:`optimizer_state_dict`; groups and states that optimizers share stay shared.

    Tensors keep the dtype in which they were saved, such as float32 copies of bf16 weights. The exceptions are those of
    parameters for which ``recast`` returns True: they get the parameter's dtype, as in torch.
    """
    inner = inner_optimizers(optimizer)
    groups = [one for one in inner.values() if _shares_groups(one, optimizer)]
    states = [one for one in inner.values() if one.state is optimizer.state]
    shared = _shared_groups(optimizer, inner.values())
    before = optimizer.param_groups, optimizer.state
    settings = [dict(group) for group in optimizer.param_groups]
    states_before = {path: one.state for path, one in inner.items()}
    optimizer.load_state_dict(saved["state"])
    _restore_dtypes(optimizer, saved["state"], recast)
    # A wrapper may have passed its state on to the optimizer within it, without taking over what that one has now.
    if optimizer.param_groups is before[0]:
        optimizer.param_groups = next((one.param_groups for one in groups), optimizer.param_groups)
    if optimizer.state is before[1]:
        optimizer.state = next((one.state for one in states), optimizer.state)
    for path, state in saved.get("inner", {}).items():
        if path in inner and inner[path].state is states_before[path]:  # else the wrapper has loaded it
            inner[path].load_state_dict(state)
            _restore_dtypes(inner[path], state, recast)
    # torch's load_state_dict replaces both. What the saved groups lack is the script's, such as OneCycleLR's "max_lr".
    for group, of_script in zip(optimizer.param_groups, settings, strict=False):
        group.update({name: value for name, value in of_script.items() if name not in group})
    for one in groups:
        one.param_groups = optimizer.param_groups
    for one in states:
        one.state = optimizer.state
    for one, own, i in shared:
        if len(optimizer.param_groups) > i and len(one.param_groups) > own:
            one.param_groups[own] = optimizer.param_groups[i]


def _restore_dtypes(optimizer: Optimizer, saved: Any, recast: Callable[[Tensor], bool] | None) -> None:
    """Give the tensors of a loaded state their saved dtypes; torch casts them to that of the parameter."""
    if not isinstance(saved, Mapping) or not saved.keys() >= {"state", "param_groups"}:
        return  # the optimizer has its own format
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, p in zip(indices, parameters, strict=False):
        if p in optimizer.state and index in saved["state"] and not (recast is not None and recast(p)):
            optimizer.state[p] = _with_dtypes(optimizer.state[p], saved["state"][index])


def _with_dtypes(loaded: Any, saved: Any) -> Any:
    """Return a loaded value in which each tensor whose dtype has changed is replaced by the saved tensor."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if type(loaded) is dict and isinstance(saved, Mapping):
        loaded.update({key: _with_dtypes(value, saved[key]) for key, value in loaded.items() if key in saved})
    elif type(loaded) is list and isinstance(saved, list) and len(loaded) == len(saved):
        loaded[:] = map(_with_dtypes, loaded, saved)
    return loaded


def _shared_groups(optimizer: Optimizer, inner: Iterable[Optimizer]) -> list[tuple[Optimizer, int, int]]:
    """Return the groups that an optimizer shares with others, such as the groups of several optimizers in one list.

    Each is ``(other optimizer, its index there, its index here)``.
    """
    here = {id(group): i for i, group in enumerate(optimizer.param_groups)}
    return [
        (one, own, here[id(group)]) for one in inner for own, group in enumerate(one.param_groups) if id(group) in here
    ]


def saved_groups(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups in a result of :func:`optimizer_state_dict`.

    An optimizer that contains others may have a ``state_dict`` of its own, with the groups in the others' states.
    """
    return [group for state in _states_with_groups(saved["state"]) for group in state["param_groups"]]


def with_group_settings(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a result of :func:`optimizer_state_dict` with other settings in its parameter groups.

    The result equals ``saved`` if it has another number of groups.
    """
    changed = {**saved, **{key: _copied(saved[key]) for key in ("state", "inner") if key in saved}}
    for part in (changed["state"], changed.get("inner")):
        states = _states_with_groups(part)
        if sum(len(state["param_groups"]) for state in states) == len(groups):
            settings = iter(groups)
            for state in states:
                state["param_groups"] = [{**group, **next(settings)} for group in state["param_groups"]]
    return changed


def in_order_of(
    saved: Mapping[str, Any], names: Sequence[list[Any]], saved_names: Sequence[list[Any]]
) -> dict[str, Any]:
    """Return a result of :func:`optimizer_state_dict` with the parameters of each group in another order.

    Torch identifies parameters by their positions. ``names`` and ``saved_names`` are the names in each group, in the
    order to return and in the order of ``saved``.
    """
    groups = []
    for group, own, theirs in zip(saved["state"]["param_groups"], names, saved_names, strict=True):
        order = [theirs.index(name) for name in own]
        listed = {key: [group[key][i] for i in order] for key in ("params", "param_names") if key in group}
        groups.append({**group, **listed})
    return {**saved, "state": {**saved["state"], "param_groups": groups}}


def _states_with_groups(state: Any) -> list[dict[str, Any]]:
    """Return the dicts with ``param_groups`` in nested dicts and lists, outermost first."""
    if isinstance(state, dict) and isinstance(state.get("param_groups"), list):
        return [state]
    return [found for part in parts_of(state) or () for found in _states_with_groups(part)]


def _copied(state: Any) -> Any:
    """Copy nested containers, but not what they contain."""
    return map_parts(_copied, state)


def _shares_groups(one: Optimizer, other: Optimizer) -> bool:
    return len(one.param_groups) == len(other.param_groups) and all(map(is_, one.param_groups, other.param_groups))
