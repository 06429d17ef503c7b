"""Several losses and optimizers in one step: ``MultiLoss`` and ``MultiOptimizer``; helpers for any optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import is_
from typing import Any

import numpy as np
import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from trainloop._support.nested import map_parts, parts_of
from trainloop._support.reduction import attach_divisor, attached_divisor
from trainloop.errors import ConfigurationError

__all__ = ["MultiLoss", "MultiOptimizer"]


class MultiLoss(Mapping[str, Tensor]):
    """Named losses of one batch, each for one optimizer of a :class:`MultiOptimizer`.

    A loss gives gradients only to the parameters of its own optimizer. For example, a generator's loss leaves no
    gradient in the discriminator that it passes through. With a single optimizer, the losses are added up.

    Parameters
    ----------
    loss_dict : mapping of str to 0-d Tensor or tuple
        A loss, or ``(loss, weight)`` for a loss that is a mean over ``weight`` units, such as boxes or tokens.
    loss_optimizer_map : mapping of str to int or str, optional
        Index or name of the optimizer of each loss; several losses may share an optimizer. Default: a loss is for the
        optimizer with the same name. In that case, several optimizers must have names (see :class:`MultiOptimizer`).
    retain_graph_until_last : bool
        Keep the autograd graph until the last loss, because losses often share parts of it.

    Raises
    ------
    ConfigurationError
        If there are no losses, if a value is not a loss, or if the names in the map are not those of the losses; in the
        first step, if there are several optimizers and it isn't clear which of them a loss is for.

    Examples
    --------
    >>> w = torch.ones(2, requires_grad=True)
    >>> losses = MultiLoss({"a": w.sum(), "b": 3 * w.sum()}, {"a": 0, "b": 1})
    >>> losses.item()
    {'a': 2.0, 'b': 6.0}
    """

    def __init__(
        self,
        loss_dict: Mapping[str, Tensor | tuple[Tensor, Any]],
        loss_optimizer_map: Mapping[str, int | str] | None = None,
        retain_graph_until_last: bool = True,
    ) -> None:
        if not isinstance(loss_dict, Mapping) or not loss_dict:
            raise ConfigurationError(f"loss_dict={loss_dict!r}: must be a dict with at least one named loss.")
        losses = {name: _with_weight(name, loss) for name, loss in loss_dict.items()}
        if loss_optimizer_map is not None and not isinstance(loss_optimizer_map, Mapping):
            raise ConfigurationError(f"loss_optimizer_map={loss_optimizer_map!r}: must be a dict, or None.")
        if loss_optimizer_map is not None and loss_optimizer_map.keys() != loss_dict.keys():
            raise ConfigurationError(
                f"loss_optimizer_map names {list(loss_optimizer_map)}, but the losses are {list(loss_dict)}. In the "
                "map, give each loss the index or the name of its optimizer."
            )
        self.loss_dict = losses
        self.weighted = tuple(name for name, loss in loss_dict.items() if isinstance(loss, tuple))
        self.loss_optimizer_map = None if loss_optimizer_map is None else dict(loss_optimizer_map)
        self.retain_graph_until_last = retain_graph_until_last

    def __getitem__(self, name: str) -> Tensor:
        return self.loss_dict[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.loss_dict)

    def __len__(self) -> int:
        return len(self.loss_dict)

    def assigned_to(self, optimizer: MultiOptimizer) -> MultiLoss:
        """Return the same losses, each with the index of its optimizer.

        Raises
        ------
        ConfigurationError
            If a loss is for no optimizer, or could be for several.
        """
        named = self.loss_optimizer_map
        if named is None:
            if optimizer.names is None:
                raise ConfigurationError(
                    f"get_loss returned the losses {_listed(self)} for {len(optimizer)} optimizers, but not which "
                    "loss belongs to which optimizer. Give MultiLoss a map, "
                    f"loss_optimizer_map={ {name: i for i, name in enumerate(self)} }, or name the optimizers after "
                    f"the losses: MultiOptimizer({{{', '.join(f'{name!r}: ...' for name in self)}}})."
                )
            named = {name: name for name in self}
        indices: dict[str, int | str] = {
            name: optimizer.index(which, f"loss {name!r}", _BY_MAP) for name, which in named.items()
        }
        return self if indices == self.loss_optimizer_map else self._like(self.loss_dict, indices)

    def map(self, function: Callable[[Tensor], Tensor]) -> MultiLoss:
        """Return the same losses, with ``function`` applied to each."""
        losses = {name: attach_divisor(function(loss), attached_divisor(loss)) for name, loss in self.loss_dict.items()}
        return self._like(losses, self.loss_optimizer_map)

    def _like(self, losses: dict[str, Tensor], loss_optimizer_map: Mapping[str, int | str] | None) -> MultiLoss:
        alike = MultiLoss(losses, loss_optimizer_map, self.retain_graph_until_last)
        alike.weighted = self.weighted
        return alike

    def __truediv__(self, divisor: Any) -> MultiLoss:
        return self.map(lambda loss: loss / divisor)

    def __mul__(self, factor: Any) -> MultiLoss:
        return self.map(lambda loss: loss * factor)

    __rmul__ = __mul__

    def detach(self) -> MultiLoss:
        """Return the losses, detached from their graphs."""
        return self.map(Tensor.detach)

    def item(self) -> dict[str, float]:
        """Return the values as Python floats. This waits for the device."""
        return {name: loss.item() for name, loss in self.loss_dict.items()}

    def total(self) -> Tensor:
        """Sum of all losses."""
        first, *others = self.values()
        return sum(others, first)

    def for_optimizer(self, optimizer_idx: int) -> Tensor | None:
        """Return the sum of one optimizer's losses, or ``None`` if there are no losses for this optimizer."""
        indices = self._indices()
        losses = [loss for name, loss in self.loss_dict.items() if indices[name] == optimizer_idx]
        return sum(losses[1:], losses[0]) if losses else None

    def backward(self, optimizer_idx: int | None = None, inputs: Sequence[Tensor] | None = None) -> None:
        """Compute the gradients of one optimizer's losses, or of the sum of all losses.

        Parameters
        ----------
        optimizer_idx : int, optional
            Optimizer whose losses are differentiated. Default: the sum of all losses.
        inputs : sequence of Tensor, optional
            Tensors that get gradients. Default: every leaf of the graph.
        """
        loss = self.total() if optimizer_idx is None else self.for_optimizer(optimizer_idx)
        if loss is None or (inputs is not None and not inputs):  # torch refuses an empty list of inputs
            return
        last = optimizer_idx is None or optimizer_idx == max(self._indices().values())
        loss.backward(
            retain_graph=self.retain_graph_until_last and not last, inputs=None if inputs is None else list(inputs)
        )

    def _indices(self) -> dict[str, int]:
        indices = {name: which for name, which in (self.loss_optimizer_map or {}).items() if isinstance(which, int)}
        if len(indices) < len(self):
            raise ConfigurationError(
                f"the losses {_listed(self)} have loss_optimizer_map={self.loss_optimizer_map}. To select one "
                "optimizer's losses, pass a map with the index of each loss's optimizer, or call "
                "assigned_to(optimizer) first."
            )
        return indices

    def __repr__(self) -> str:
        whose = self.loss_optimizer_map
        return (
            f"MultiLoss({', '.join(name if whose is None else f'{name} -> optimizer {whose[name]}' for name in self)})"
        )


class MultiOptimizer:
    """Several optimizers that step together, each for its own losses of a :class:`MultiLoss`.

    Parameters
    ----------
    optimizer_list : mapping of str to torch.optim.Optimizer, or sequence of torch.optim.Optimizer
        Optimizers of disjoint sets of parameters. If they are in a mapping, a loss is for the optimizer with the same
        name.

    Attributes
    ----------
    optimizer_list : list of torch.optim.Optimizer
    names : tuple of str or None
        Names of the optimizers, in order; ``None`` if a sequence was given.

    Examples
    --------
    >>> g, d = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    >>> both = MultiOptimizer({"g": torch.optim.Adam(g.parameters()), "d": torch.optim.SGD(d.parameters(), lr=0.1)})
    >>> both["d"] is both[1]
    True
    """

    def __init__(self, optimizer_list: Mapping[str, Optimizer] | Sequence[Optimizer]) -> None:
        self.names: tuple[str, ...] | None = None
        optimizers: list[Optimizer] = []
        if isinstance(optimizer_list, Mapping):
            self.names, optimizers = tuple(optimizer_list), list(optimizer_list.values())
            if not all(isinstance(name, str) for name in self.names):
                raise ConfigurationError(f"optimizer_list has the names {list(self.names)}: each must be a string.")
        elif isinstance(optimizer_list, (list, tuple)):
            optimizers = list(optimizer_list)
        if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
            raise ConfigurationError(
                f"optimizer_list={optimizer_list!r}: must be a list of torch optimizers, or a dict of them by name."
            )
        seen: dict[int, int] = {}
        for i, optimizer in enumerate(optimizers):
            for parameter in parameters_of(optimizer):
                # Otherwise each optimizer would clear the parameter's gradient before the other one steps.
                if seen.setdefault(id(parameter), i) != i:
                    raise ConfigurationError(
                        f"optimizers {seen[id(parameter)]} and {i} share a parameter of shape "
                        f"{tuple(parameter.shape)}: give each parameter to one optimizer."
                    )
        self.optimizer_list = optimizers

    def index(self, which: int | str, whose: str = "which", way_out: str = "Give one of these.") -> int:
        """Return the index of the optimizer with this name or index.

        Raises
        ------
        ConfigurationError
            If there is no such optimizer. The message begins with ``whose`` and ends with ``way_out``.
        """
        if isinstance(which, int) and not isinstance(which, bool) and which in range(len(self)):
            return which
        if self.names is not None and which in self.names:
            return self.names.index(which)
        known = f"named {_listed(self.names)}" if self.names is not None else "without names"
        raise ConfigurationError(
            f"{whose} is for optimizer {which!r}, but there are {len(self)} optimizers (counted from 0, {known}). "
            f"{way_out}"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers, one after the other."""
        return [group for optimizer in self.optimizer_list for group in optimizer.param_groups]

    def step(self, optimizer_idx: int | str | None = None) -> None:
        """Step one optimizer, or all optimizers."""
        for optimizer in self._chosen(optimizer_idx):
            optimizer.step()

    def zero_grad(self, optimizer_idx: int | str | None = None, set_to_none: bool = True) -> None:
        """Clear the gradients of one optimizer's parameters, or of all parameters."""
        for optimizer in self._chosen(optimizer_idx):
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return a list with each optimizer's state dict."""
        return [optimizer.state_dict() for optimizer in self.optimizer_list]

    def load_state_dict(self, state_dict_list: Sequence[dict[str, Any]]) -> None:
        """Load a state that :meth:`state_dict` returned."""
        if len(state_dict_list) != len(self.optimizer_list):
            raise ConfigurationError(
                f"got {len(state_dict_list)} state dicts for {len(self.optimizer_list)} optimizers: pass one for each."
            )
        for optimizer, state in zip(self.optimizer_list, state_dict_list, strict=True):
            optimizer.load_state_dict(state)

    def _chosen(self, optimizer_idx: int | str | None) -> list[Optimizer]:
        return self.optimizer_list if optimizer_idx is None else [self[optimizer_idx]]

    def __len__(self) -> int:
        return len(self.optimizer_list)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizer_list)

    def __getitem__(self, optimizer_idx: int | str) -> Optimizer:
        if isinstance(optimizer_idx, str):
            return self.optimizer_list[self.index(optimizer_idx, f"[{optimizer_idx!r}]")]
        return self.optimizer_list[optimizer_idx]

    def __repr__(self) -> str:
        inside = self.optimizer_list if self.names is None else dict(zip(self.names, self.optimizer_list, strict=True))
        return f"MultiOptimizer({inside!r})"


_BY_MAP = "Give one of these, for example with MultiLoss(..., loss_optimizer_map={'the loss': 0})."


def explain_no_graph(error: RuntimeError, optimizer: Any) -> None:
    """Raise an explanation if an optimizer's step failed because it differentiates gradients, as AdaHessian does."""
    # The second one is AdaHessian's own check of the gradients.
    if not any(words in str(error) for words in ("does not require grad and does not have a grad_fn", "create_graph")):
        return
    names = ", ".join(type(one).__name__ for one in optimizers_of(optimizer))
    raise ConfigurationError(
        f"{names}.step() differentiates something without a graph. If these are gradients, as in AdaHessian: the loop "
        "calls backward without create_graph=True, which would keep each step's memory. In get_loss, compute what the "
        "optimizer needs from torch.autograd.grad(loss, parameters, create_graph=True), and keep it where the step can "
        "read it, such as in p.hessian (in ddp, its mean over ranks: distributed.all_reduce(value, 'mean')). "
        f"torch says: {error}"
    ) from error


def _with_weight(name: str, loss: Any) -> Tensor:
    """Return a loss of a MultiLoss; a weight that came with it is attached, like the divisor of a criterion."""
    weight = None
    if name is None or name == "":
        raise ConfigurationError(f"loss_dict has a loss with the name {name!r}. Give it a name, such as 'classes'.")
    if isinstance(loss, tuple) and len(loss) == 2:
        loss, weight = loss
    number = isinstance(weight, (int, float, np.generic)) and not isinstance(weight, bool)
    if not isinstance(loss, Tensor) or not (
        weight is None or number or (isinstance(weight, Tensor) and weight.numel() == 1)
    ):
        raise ConfigurationError(
            f"loss_dict[{name!r}]={loss if weight is None else (loss, weight)!r}: must be a 0-d tensor, like the "
            "result of a criterion, or (loss, weight), where weight is a number or a 0-d tensor, such as the number of "
            "boxes that the loss is a mean over."
        )
    if isinstance(weight, Tensor):
        weight = weight.item() if weight.is_cpu and not torch.compiler.is_compiling() else weight.detach().reshape(())
    return attach_divisor(loss if weight is None else weighed(loss, weight), weight)


def weighed(loss: Any, weight: Any) -> Any:
    """Return a loss that counts nothing if its weight is 0, as a step of one batch doesn't divide by the weight.

    Tensors aren't read: on a GPU, this would wait.
    """
    if isinstance(weight, Tensor):
        return loss * (weight.detach().reshape(()) != 0)
    check_weight(weight)
    return loss if weight else loss * 0.0


def check_weight(weight: Any) -> None:
    """Raise ConfigurationError for a weight of a loss that is no 0-d tensor and no number from 0 on."""
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return
    if not isinstance(weight, (int, float, np.generic)):
        given = f"tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ConfigurationError(
            f"get_loss returned (loss, weight) with a {given} as the weight. The weight must be a number or a 0-d "
            "tensor, for example the number of tokens. To keep a model's output, store it in an attribute."
        )
    number: Any = weight
    if not 0 <= number < math.inf:
        raise ConfigurationError(
            f"get_loss returned a loss with the weight {weight}. A weight is the number of units that the loss is a "
            "mean over: 0 or more. To change the sign or the size of a loss, multiply the loss."
        )


def split_yielded(item: Any) -> tuple[int | str | tuple[int | str, ...] | None, Any]:
    """Split what ``get_loss`` yields into the loss's optimizer (or several), which may be left out, and the loss."""
    if isinstance(item, tuple) and len(item) == 2:
        names = item[0] if isinstance(item[0], (tuple, list)) else item[:1]
        if names and all(isinstance(name, (str, int)) for name in names):
            return names[0] if len(names) == 1 else tuple(names), item[1]
    return None, item


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names))


def optimizers_of(optimizer: Optimizer | MultiOptimizer | None) -> list[Optimizer]:
    """Return the torch optimizers as a list: the optimizer itself, or the optimizers of a :class:`MultiOptimizer`."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, MultiOptimizer) else [optimizer]


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that an optimizer contains, by the path of attributes, as SAM and Lookahead contain one."""
    found: dict[str, Optimizer] = {}
    seen = {id(optimizer)}

    def walk(outer: Optimizer, path: str) -> None:
        for name, value in vars(outer).items():
            parts = value if isinstance(value, (list, tuple)) else value.values() if type(value) is dict else (value,)
            for i, part in enumerate(parts):
                if isinstance(part, Optimizer) and id(part) not in seen:
                    seen.add(id(part))
                    own = f"{path}{name}" if part is value else f"{path}{name}.{i}"
                    found[own] = part
                    walk(part, f"{own}.")

    walk(optimizer, "")
    return found


def all_optimizers(optimizer: Optimizer | MultiOptimizer | None) -> list[Optimizer]:
    """Return the optimizers of :func:`optimizers_of`, each followed by the optimizers that it contains."""
    return [each for one in optimizers_of(optimizer) for each in (one, *inner_optimizers(one).values())]


def note_steps_elsewhere(optimizer: Optimizer | MultiOptimizer | None) -> None:
    """Note that ``step`` was not called on this object, but in a rank or in compiled code.

    Otherwise, torch's schedulers would warn that they step before their optimizer. Only this warning reads the mark.
    """
    for one in optimizers_of(optimizer):
        one._opt_called = True  # type: ignore[attr-defined]


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
    # torch's load_state_dict replaces both.
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


def criterion_module(criterion: Any) -> nn.Module | None:
    """Return a criterion as one module: itself, or a module of all modules in its dicts and lists, by their keys.

    ``None`` if it contains no modules.
    """
    if isinstance(criterion, nn.Module):
        return criterion
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(criterion, Mapping):
        entries = criterion.items()
    elif isinstance(criterion, (list, tuple)):
        entries = enumerate(criterion)
    whole = nn.Module()
    for key, part in entries:
        module = criterion_module(part)
        if module is not None:
            whole.add_module(f"[{key}]".replace(".", "_"), module)  # with brackets, it is no name of nn.Module's own
    return whole if whole._modules else None


def criterion_modules(criterion: Any) -> list[nn.Module]:
    """Return the modules of a criterion: itself, or the modules in its dicts and lists."""
    whole = criterion_module(criterion)
    return [] if whole is None else [whole]


def trained_modules(model: nn.Module, criterion: Any) -> list[nn.Module]:
    """Return all modules that a loop trains: the model, and the criterion if it is a module or contains modules."""
    return [model, *criterion_modules(criterion)]


def named_trained_parameters(
    model: nn.Module, criterion: Any, optimizer: Optimizer | MultiOptimizer | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, parameter)`` for all parameters that a loop trains, each once.

    First the model's, then the criterion's, whose names begin with ``criterion.``, then those that only the optimizer
    has, such as an unknown of an equation beside the network.
    """
    seen: set[int] = set()
    prefix = ""
    for module in trained_modules(model, criterion):
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + name, parameter
        prefix = "criterion."
    stepped = [tensor for one in optimizers_of(optimizer) for tensor in parameters_of(one)]
    for i, tensor in enumerate(stepped):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield f"parameter {i} of the optimizer", tensor


def note_registrations(note: Callable[[nn.Module, str, Any], None]) -> ExitStack:
    """Call ``note(module, name, value)`` when a module registers a parameter or another module: torch's public hooks.

    Closing the result, or leaving it as a context, ends this.
    """
    undo = ExitStack()
    undo.callback(register_module_parameter_registration_hook(note).remove)
    undo.callback(register_module_module_registration_hook(note).remove)
    return undo


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a module, even if its class overrides ``parameters`` (to return a part, for example)."""
    return [parameter for _, parameter in module.named_parameters()]


def trained_parameters(
    model: nn.Module, criterion: Any, optimizer: Optimizer | MultiOptimizer | None = None
) -> list[Tensor]:
    """Return all parameters that a loop trains, in the order of :func:`named_trained_parameters`."""
    return [parameter for _, parameter in named_trained_parameters(model, criterion, optimizer)]


def explain_sparse(model: nn.Module, criterion: Any, optimizer: Optimizer | MultiOptimizer | None, what: str) -> None:
    """Called after an error of clipping: raise an error that names the parameter if a gradient is sparse."""
    for name, parameter in named_trained_parameters(model, criterion, optimizer):
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ConfigurationError(
                f"{what}: the gradient of {name} is sparse, and torch can't clip sparse gradients. Use sparse=False in "
                "its embedding, or clip the other gradients yourself in a callback's on_after_gradient_update."
            )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def drop_gradients(optimizer: Optimizer) -> None:
    """Clear gradients like ``optimizer.zero_grad()``, but without the overhead of torch's profiler annotation.

    If the optimizer's ``zero_grad`` was overridden or replaced, that method is called.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's ``step`` requires a closure: the argument has no default, as in LBFGS.

    Some optimizers need a closure although the argument has a default, as in many implementations of sharpness-aware
    minimisation (SAM). For these, set an attribute ``needs_closure = True`` on the optimizer or its class.
    """
    if getattr(optimizer, "needs_closure", False):
        return True
    try:
        _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is p.empty and p.kind in kinds for p in parameters)


def is_watched(optimizer: Optimizer) -> bool:
    """Return True if each step must call hooks, or a wrapper of ``step`` other than the wrapper of a scheduler."""
    return bool(
        ("step" in vars(optimizer) and not is_scheduled(optimizer))
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def is_scheduled(optimizer: Optimizer) -> bool:
    """Return True if ``step`` has only a torch scheduler's wrapper, which just records that a step was taken."""
    step = vars(optimizer).get("step")
    if step is None or not hasattr(step, "_wrapped_by_lr_sched"):
        return False
    wrapped = getattr(step, "__func__", step).__wrapped__  # otherwise, there is another wrapper
    return getattr(wrapped, "__func__", wrapped) is type(optimizer).step
