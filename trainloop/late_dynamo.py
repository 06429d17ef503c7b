"""Put off the import of ``torch._dynamo`` until something compiles: it takes 1.3 seconds of CPU time in each process.

torch imports it only to tell it what to keep out of compiled graphs: at the first call of an optimizer's methods (its
constructor calls one), in each optimizer's step, and in the constructor of ``DistributedDataParallel``. Before it has
been imported nothing can be compiling, so these do without it. Once anybody has imported it, torch does as ever.

This is the one place that reaches into torch for that. Versions of torch that are made otherwise import it as before.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

__all__ = ["DYNAMO", "GRADED", "keep_off", "keeping_off"]

DYNAMO = "torch._dynamo"
_CACHE = "__dynamo_disable"  # where torch keeps, at a function, what dynamo has made of it at its first call


def keep_off() -> None:
    """Let methods of optimizers and of DDP that keep out of compiled graphs run without it while there are none."""
    off = torch._disable_dynamo(_nothing).__code__
    for method in (*vars(Optimizer).values(), *vars(DistributedDataParallel).values()):
        while isinstance(method, FunctionType) and hasattr(method, "__wrapped__"):
            inner = method.__wrapped__
            if method.__code__ is off and isinstance(inner, FunctionType):
                vars(inner).setdefault(_CACHE, _direct(method, inner))
            method = inner


def _nothing() -> None: ...


def _direct(method: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if DYNAMO not in sys.modules:
            return inner(*args, **kwargs)
        if vars(inner).get(_CACHE) is call:
            vars(inner).pop(_CACHE, None)  # torch puts its own there, now and for good; another thread may have done so
        return method(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch marks its own
    return call


_make_graded = getattr(torch_optimizer, "_use_grad_for_differentiable", None)
GRADED = _make_graded(_nothing).__code__ if _make_graded is not None else None
"""The code that torch puts around the step of its optimizers; ``__wrapped__`` is the step itself.

It sets the mode of gradients, to ``defaults["differentiable"]``, and ends dynamo's graphs, which is nothing outside of
compiled code.
"""


class _StandIn:
    """Answers the one question of DDP's constructor; for all else there is the real module."""

    def __init__(self, name: str, **answers: Any) -> None:
        self._name = name
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


@contextlib.contextmanager
def keeping_off() -> Iterator[None]:
    """Within, ``DistributedDataParallel`` is made without importing it, with the value that its setting begins with."""
    if DYNAMO in sys.modules:
        yield
        return
    utils = _StandIn(f"{DYNAMO}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in = _StandIn(DYNAMO, utils=utils)
    torch._dynamo = stand_in  # type: ignore[assignment]
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is stand_in:  # else it was imported meanwhile
            del torch._dynamo


keep_off()
