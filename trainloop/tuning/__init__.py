"""Search parameters and train bags of models, under resource quotas that are enforced.

:func:`tune` is the entry point. ``trainloop.resources.plan`` shows beforehand how many models ``tune`` would run in
parallel.
"""

from __future__ import annotations

from trainloop.tuning.fitting import EstimatorLoop
from trainloop.tuning.folds import Fold
from trainloop.tuning.result import BaggedPredictor, Trial, TuneResult
from trainloop.tuning.running.search import tune
from trainloop.tuning.running.worker import seconds_left
from trainloop.tuning.space import Choice, Integers, Uniform

__all__ = [
    "BaggedPredictor",
    "Choice",
    "EstimatorLoop",
    "Fold",
    "Integers",
    "Trial",
    "TuneResult",
    "Uniform",
    "seconds_left",
    "tune",
]
