"""Torch's blocks that hold in one thread: function modes, dispatch modes, hooks of saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch  # the public classes are documented by this name
from torch.utils._device import DeviceContext

from trainloop.errors import ConfigurationError


class Block(NamedTuple):
    """A block that surrounds a call."""

    value: Any
    """The mode, or torch's object for hooks."""
    again: Callable[[], AbstractContextManager[Any]]
    """Function that returns a context in which the block holds in another thread, too."""


def surrounding_blocks() -> list[Block]:
    """Return the blocks that surround this call, from outside to inside.

    torch has no public way to read them, and code that runs elsewhere would silently not be affected by them.
    """
    found = []
    for mode in overrides._get_current_function_mode_stack():
        found.append(Block(mode, partial(_pushed, mode, overrides)))
    for mode in dispatch._get_current_dispatch_mode_stack():
        found.append(Block(mode, partial(_pushed, mode, dispatch)))
    read = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # since torch 2.8
    hooks = None if read is None else read(True)
    if hooks is not None:
        block = torch.autograd.graph.saved_tensors_hooks(*hooks)
        found.append(Block(block, lambda: block))
    return found


def refuse_blocks() -> None:
    """Raise an error if a block surrounds this call that other processes would not be in."""
    # The default device is a mode, too, but other processes get it as a setting.
    blocks = [block.value for block in surrounding_blocks() if not isinstance(block.value, DeviceContext)]
    if blocks:
        raise ConfigurationError(
            f"processes would be started within {type(blocks[-1]).__name__}, which has an effect in this process only. "
            "Use it where they compute: in the model's get_loss or forward, or from a callback's on_train_begin to its "
            "on_train_end."
        )


@contextmanager
def _pushed(mode: Any, stack: Any) -> Iterator[None]:
    """Apply a mode without its ``__enter__``: torch's ``FlopCounterMode`` would begin to count again."""
    stack._push_mode(mode)
    try:
        yield
    finally:
        stack._pop_mode()
