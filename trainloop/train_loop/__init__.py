"""The loops: :class:`TrainLoop`, and those that keep an experiment's folder.

* ``loop.py``: :class:`TrainLoop`, its constructor and front doors; ``view.py``: what callbacks read of it;
  ``tracking.py``: the three loops with an experiment
* ``arguments.py``, ``site.py``: what was given, checked; where it runs; ``kinds.py``, ``names.py``: arguments by name
* ``execute.py``: a piece of work, here or in ranks; ``handover.py``: the loop's way to the ranks, its state's way back
* ``run.py``: one rank's running loop; ``training.py``: epochs and steps, top to bottom; ``closure.py`` and
  ``alternating.py``: two further kinds of steps
* ``placement.py``: the model on its device and in its wrapper; ``gradients.py``: from losses to the optimizers' steps;
  ``losses.py``: what ``get_loss`` may give; ``trained.py``: which modules and parameters train
* ``evaluating.py``: loss and predictions over a loader; ``rows.py``: those that outgrow memory; ``predicting.py``:
  where rows go
* ``state.py``: a training as data, for checkpoints
* ``snapshots.py``: a rank's snapshots in memory; ``restarts.py``: whether ranks start again, and from where
* ``display.py``: the bar and the table; ``preflight.py``: checks before a long job
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
