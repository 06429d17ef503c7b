"""Train plain PyTorch models on one device or many, without rewriting anything.

>>> from trainloop import TrainLoop, TTModel
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainloop.callbacks.base import AbstractCallback
    from trainloop.model import ModelWrap, TTBasicModel, TTModel
    from trainloop.optim import MultiLoss, MultiOptimizer
    from trainloop.parallel import TTDataParallel, TTDistributedDataParallel, TTFullyShardedDataParallel
    from trainloop.train_loop import (
        TrainLoop,
        TrainLoopCheckpoint,
        TrainLoopCheckpointEndSave,
        TrainLoopEndSave,
    )

__version__ = "0.2.0"

# Public names and their modules. Each module is imported on first access to a name. A script imports only what it uses.
_HOMES = {
    "AbstractCallback": "trainloop.callbacks.base",
    "ModelWrap": "trainloop.model",
    "MultiLoss": "trainloop.optim",
    "MultiOptimizer": "trainloop.optim",
    "TTBasicModel": "trainloop.model",
    "TTDataParallel": "trainloop.parallel",
    "TTDistributedDataParallel": "trainloop.parallel",
    "TTFullyShardedDataParallel": "trainloop.parallel",
    "TTModel": "trainloop.model",
    "TrainLoop": "trainloop.train_loop",
    "TrainLoopCheckpoint": "trainloop.train_loop",
    "TrainLoopCheckpointEndSave": "trainloop.train_loop",
    "TrainLoopEndSave": "trainloop.train_loop",
}

__all__ = [
    "AbstractCallback",
    "ModelWrap",
    "MultiLoss",
    "MultiOptimizer",
    "TTBasicModel",
    "TTDataParallel",
    "TTDistributedDataParallel",
    "TTFullyShardedDataParallel",
    "TTModel",
    "TrainLoop",
    "TrainLoopCheckpoint",
    "TrainLoopCheckpointEndSave",
    "TrainLoopEndSave",
]


# Packages whose classes users expect here, as in other libraries.
_OTHERS = "callbacks resources schedulers result_package checkpoint history errors tabular tuning".split()

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
            globals()[name] = value
            return value
        message = f"module 'trainloop' has no attribute {name!r}"
        home = _home_of(name) if name[:1].isupper() else None
        if home is None:
            raise AttributeError(message)
        message = f"{message}. Use: from {home} import {name}"
        # Python replaces an AttributeError of "from trainloop import ..." by an ImportError without its message.
        importing = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise (ImportError if importing else AttributeError)(message)


def _home_of(name: str) -> str | None:
    """Return the module that has a public class of this name; ``None`` if there is none."""
    modules = (f"trainloop.{other}" for other in _OTHERS)
    return next((home for home in modules if name in importlib.import_module(home).__all__), None)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
