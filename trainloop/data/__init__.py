"""Read, from any kind of loader, the batches that one rank trains on or evaluates. Public: :class:`SplitBatches`."""

# A *source* (sources.py, indexed.py) yields a rank's shard of each global batch; its rule (samplers.py,
# whole_batches.py) chooses the shard. Training groups the shards into steps, evaluation does not.

from trainloop.data.batch.batches import count_samples, move_to
from trainloop.data.feed.evaluation import EvalFeed
from trainloop.data.feed.steps import StepBatches
from trainloop.data.feed.train import TrainFeed
from trainloop.data.order.columns import SplitBatches

__all__ = ["SplitBatches"]
