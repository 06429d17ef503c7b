"""The loops: :class:`TrainLoop`, and those that keep an experiment's folder.

Its files are on the map in ``CONTRIBUTING.rst``, with the way of a batch. Begin with ``loop.py``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainloop.train_loop.loop import TrainLoop
from trainloop.train_loop.rows import PredictionStream

if TYPE_CHECKING:
    from trainloop.train_loop.tracking import TrainLoopCheckpoint, TrainLoopCheckpointEndSave, TrainLoopEndSave

__all__ = ["PredictionStream", "TrainLoop", "TrainLoopCheckpoint", "TrainLoopCheckpointEndSave", "TrainLoopEndSave"]


if not TYPE_CHECKING:  # with it, every name would be right

    def __getattr__(name: str) -> Any:
        # Imported when first asked for, with the callbacks that do their work: most programs need none of them.
        if name in __all__:
            return getattr(importlib.import_module("trainloop.train_loop.tracking"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
