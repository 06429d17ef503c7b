"""Hand back what units change in the lists and dicts that they get: ``fully_shard`` gives them copies of these."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from trainloop._support.nested import stored_items

_CONTAINERS = (list, dict, deque)  # and their subclasses that torch copies; others reach the unit itself


class HandsBack:
    """Hooks of a unit, by which its caller's containers get what a forward changes in their copies.

    torch takes arguments apart and puts them together again if any tensor in them requires gradients, to find the end
    of the unit's backward, or if it converts inputs to another dtype.

    Parameters
    ----------
    unit : nn.Module
        A module that ``fully_shard`` has been applied to.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._given: list[Any] = []  # the arguments of each call that has begun: a unit may call itself
        self._pairs: list[list[tuple[Any, Any, list[Any]]]] = []
        self._hooks = [
            unit.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),  # before torch's
            unit.register_forward_pre_hook(self._pair, with_kwargs=True),
            unit.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._given.append((args, kwargs))
            self._pairs.append([])

    def _pair(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._given:
            return
        left = [*zip(self._given[-1][0], args), *((given, kwargs[key]) for key, given in self._given[-1][1].items())]
        while left:
            given, copied = left.pop()
            if given is copied or type(given) is not type(copied):
                continue
            if isinstance(given, _CONTAINERS):
                self._pairs[-1].append((given, copied, _contents(copied)))
            elif isinstance(given, Tensor):
                self._pairs[-1].append((given, copied, []))
            if isinstance(given, (*_CONTAINERS, tuple)):
                left += zip(stored_items(given), stored_items(copied))

    def _end(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._given:
            return
        self._given.pop()
        pairs = self._pairs.pop()
        originals = {id(copied): given for given, copied, _ in pairs}
        for given, copied, before in pairs:
            now = [] if isinstance(given, Tensor) else _contents(copied)
            if len(now) == len(before) and all(one is other for one, other in zip(now, before)):
                continue
            if isinstance(given, dict):
                changed = {key: originals.get(id(value), value) for key, value in copied.items()}
                given.clear()
                given.update(changed)
            else:
                items = [originals.get(id(item), item) for item in copied]
                given.clear()
                given.extend(items)


def _contents(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]
