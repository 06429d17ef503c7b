"""Several optimizers in one step: ``MultiOptimizer``; questions about any optimizer, and those that it contains."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.optim import Optimizer

from trainloop._support.nested import items_of
from trainloop.devices import whole_number
from trainloop.errors import ConfigurationError


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
        if (number := whole_number(which)) is not None and number in range(len(self)):
            return number
        if self.names is not None and which in self.names:
            return self.names.index(which)
        known = f"named {listed(self.names)}" if self.names is not None else "without names"
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


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
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

    def walk(value: Any, path: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found[path] = value
            walk_attributes(value, f"{path}.")
        for i, part in enumerate(items_of(value).values()):
            walk(part, f"{path}.{i}")

    def walk_attributes(outer: Optimizer, path: str) -> None:
        for name, value in vars(outer).items():
            if name not in ("state", "param_groups"):  # of parameters, and large
                walk(value, f"{path}{name}")

    walk_attributes(optimizer, "")
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


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group; a capturable optimizer reads its rate from a tensor on the device."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


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


def explain_no_closure(error: Exception, optimizer: Optimizer) -> None:
    """Raise an error that names ``needs_closure`` if a step without a closure probably failed because of this."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.") or "closure" not in inspect.signature(kind.step).parameters:
        return
    said = re.search("closure|'NoneType' object is not callable", str(error), re.IGNORECASE)
    if said or (isinstance(error, AssertionError) and not str(error)):  # assert closure is not None
        name = kind.__name__
        raise ConfigurationError(
            f"{name}.step failed without a closure ({type(error).__name__}: {error}). If it needs one, as SAM does, "
            f"set needs_closure = True in its class: class Closure{name}({name}): needs_closure = True."
        ) from error


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
