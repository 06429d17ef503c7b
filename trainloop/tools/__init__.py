"""Tools for a loop, which are methods of the loop, too. They don't change the loop, its model or random generators.

* :func:`find_lr`: losses for increasing learning rates, and a suggestion
* :func:`find_batch_size`: the largest batch that fits into memory in a training step
* :func:`summary`: layers, parameters, FLOPs, and the memory that a training step needs
"""

from __future__ import annotations

from trainloop.tools.batch_size import BatchSizes, find_batch_size
from trainloop.tools.lr import LearningRates, find_lr
from trainloop.tools.model_summary import Layer, Summary, summary

__all__ = ["BatchSizes", "Layer", "LearningRates", "Summary", "find_batch_size", "find_lr", "summary"]
