"""Inputs that AIToolbox accepts: lists of anything as loaders, and a script's own kinds of optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainloop.optim import MultiOptimizer

__all__ = ["Batches", "OwnOptimizer", "as_loader", "as_optimizer"]


class Batches:
    """A list as a loader, with any items: only ``get_loss`` uses the batches.

    Parameters
    ----------
    items : sequence
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


class OwnOptimizer(torch.optim.Optimizer):
    """An object with ``step()`` and ``zero_grad()`` as a torch optimizer, e.g. one that wraps another and its rate.

    It has every attribute of the object and calls it. Its groups and its state are the object's own, or
    those of the only torch optimizer that the object holds.

    Parameters
    ----------
    inner : object
    parameters : iterable of Tensor
        Parameters that it steps, if neither has groups.
    """

    def __init__(self, inner: Any, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__([{"params": list(parameters)}], {})
        self.inner = inner

    @property  # looked up each time: loading a state creates new ones
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters, with their learning rates."""
        return self._of_inner("param_groups")

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def state(self) -> Any:
        """The state of each parameter."""
        return self._of_inner("state")

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def _of_inner(self, name: str) -> Any:
        inner = self.__dict__.get("inner")
        held = [part for part in getattr(inner, "__dict__", {}).values() if isinstance(part, torch.optim.Optimizer)]
        found = getattr(held[0] if len(held) == 1 else inner, name, None)
        return found if isinstance(found, (dict, list)) else self.__dict__.get(name)

    def step(self, closure: Any = None) -> Any:
        """Call the object's ``step``."""
        return self.inner.step() if closure is None else self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the object's ``zero_grad``."""
        self.inner.zero_grad()

    def state_dict(self) -> Any:
        """Return the object's state; empty if it has none."""
        return self.inner.state_dict() if hasattr(self.inner, "state_dict") else {}

    def check_state(self) -> None:
        """Raise an ``AttributeError``, as in AIToolbox, if the object has no state to save."""
        if not hasattr(self.inner, "state_dict"):
            raise AttributeError(
                f"the optimizer, a {type(self.inner).__name__}, has no state_dict(). Write one, so that checkpoints "
                "can contain it."
            )

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the result of :meth:`state_dict`."""
        if hasattr(self.inner, "load_state_dict"):
            self.inner.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("defaults", "param_groups", "state")}
        return {**own, "inner": self.inner}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def as_loader(loader: Any) -> Any:
    """Return a list or tuple of batches as a loader; any other object unchanged."""
    return Batches(loader) if isinstance(loader, (list, tuple)) else loader


def as_optimizer(optimizer: Any, parameters: Iterable[Tensor] = ()) -> Any:
    """Return an object that can step and clear gradients as a torch optimizer; any other object unchanged."""
    if isinstance(optimizer, (torch.optim.Optimizer, MultiOptimizer, type)):
        return optimizer
    if all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad")):
        return OwnOptimizer(optimizer, parameters)
    return optimizer
