"""Turn loaders of any kind into the batches that one rank trains on and evaluates.

A *source* (``sources.py``, ``indexed.py``) yields a rank's shard of each global batch; its rule (``samplers.py``,
``whole_batches.py``) chooses the shard. Training groups the shards into steps, evaluation does not.

* ``train_feed``: an epoch as optimizer steps, with each rank's shard of every global batch.
* ``eval_feed``: the batches that one process would see, each on one rank.
* :class:`SplitBatches`: each rank takes a block of columns of every batch, for state carried from batch to batch.
* ``count_samples``, ``move_to``: for batches of any shape.
"""

from trainloop.data.batches import count_samples, move_to
from trainloop.data.columns import SplitBatches
from trainloop.data.evaluation import EvalFeed, eval_feed
from trainloop.data.steps import StepBatches
from trainloop.data.train import TrainFeed, train_feed

__all__ = ["SplitBatches"]
