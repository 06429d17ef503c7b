"""Tools around a loop, each also a method of it; none of them changes the loop, its model or any random generator.

* :func:`find_lr`: losses over a growing learning rate, and a suggestion
* :func:`find_batch_size`: the largest batch that a training step has memory for
* :func:`summary`: layers, parameters, FLOPs, and the memory that a training step takes
"""

from trainloop.tools.batch_size import BatchSizes, find_batch_size
from trainloop.tools.learning_rate import LearningRates, find_lr
from trainloop.tools.model_summary import Layer, Summary, summary

__all__ = ["BatchSizes", "Layer", "LearningRates", "Summary", "find_batch_size", "find_lr", "summary"]
