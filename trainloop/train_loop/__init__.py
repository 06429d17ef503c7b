"""The training loops: :class:`TrainLoop`, and its subclasses that maintain an experiment's folder."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainloop.train_loop.loop import TrainLoop
from trainloop.train_loop.run.row_files import PredictionStream

if TYPE_CHECKING:
    from trainloop.train_loop.tracking import TrainLoopCheckpoint, TrainLoopCheckpointEndSave, TrainLoopEndSave

__all__ = ["PredictionStream", "TrainLoop", "TrainLoopCheckpoint", "TrainLoopCheckpointEndSave", "TrainLoopEndSave"]


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        # Imported on first access, with the callbacks that these loops use: most programs don't need them.
        if name in __all__:
            return getattr(importlib.import_module("trainloop.train_loop.tracking"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
