"""Read, from any kind of loader, the batches that one rank trains on or evaluates. Public: :class:`SplitBatches`."""

# A *source* (sources.py, indexed.py) yields a rank's shard of each global batch; its rule (samplers.py,
# whole_batches.py) chooses the shard. Training groups the shards into steps, evaluation does not.

from trainloop.data.batches import count_samples, move_to
from trainloop.data.columns import SplitBatches
from trainloop.data.evaluation import EvalFeed
from trainloop.data.steps import StepBatches
from trainloop.data.train import TrainFeed

__all__ = ["SplitBatches"]
