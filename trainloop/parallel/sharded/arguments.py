"""Hand back what units change in the lists and dicts that they get: ``fully_shard`` gives them copies of these."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import torch
from torch import nn

from trainloop._support.nested import own_attributes, stored_items


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
        # Of each call that has begun, as a unit may call itself: its arguments, and what torch has copied, each with
        # the copy and the copy's items.
        self._calls: list[tuple[Any, list[tuple[Any, Any, dict[Any, Any]]]]] = []
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
            self._calls.append(((args, kwargs), []))

    def _pair(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self._calls:
            return
        arguments, copies = self._calls[-1]
        left = [(arguments, (args, kwargs))]
        while left:
            given, copied = left.pop()
            if given is not copied:
                items, originals = _items(copied), _items(given)
                copies.append((given, copied, items))
                left += [(originals[key], item) for key, item in items.items() if key in originals]

    def _end(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._calls:
            return
        _, copies = self._calls.pop()
        originals = {id(copied): given for given, copied, _ in copies}
        for given, copied, before in copies:
            now = _items(copied)
            if list(now) != list(before) or any(now[key] is not before[key] for key in now):
                _fill(given, {key: originals.get(id(item), item) for key, item in now.items()})


def _items(value: Any) -> dict[Any, Any]:
    """Return the items of what torch takes apart, by key, index or attribute; empty for all else, such as tensors."""
    if isinstance(value, dict):
        return dict(value.items())
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(stored_items(value)))
    return own_attributes(value) if dataclasses.is_dataclass(value) else {}


def _fill(container: Any, items: dict[Any, Any]) -> None:
    if isinstance(container, (dict, list, deque)):
        container.clear()
        container.update(items) if isinstance(container, dict) else container.extend(items.values())
    else:
        for name, value in items.items():
            setattr(container, name, value)
