"""Turn loaders of any kind into the batches that one rank trains on and evaluates.

A *source* (``sources.py``, ``indexed.py``) yields a rank's part of each global batch; its rule (``samplers.py``,
``whole_batches.py``) chooses the part. Training groups the parts into steps, evaluation does not.

* ``train_feed``: an epoch as optimizer steps, each rank's part of every global batch in them.
* ``eval_feed``: the batches that one process would see, each on one rank.
* :class:`SplitBatches`: each rank takes its own columns of every batch, for state carried from batch to batch.
* ``count_samples``, ``move_to``: of batches of any shape.
"""

from trainloop.data.batches import count_samples, move_to
from trainloop.data.columns import SplitBatches
from trainloop.data.evaluation import EvalFeed, eval_feed
from trainloop.data.steps import StepBatches
from trainloop.data.train import TrainFeed, train_feed

__all__ = ["SplitBatches"]
