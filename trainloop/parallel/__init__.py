"""The three wrappers of models. They work in a hand-written loop, too.

:class:`TTDistributedDataParallel` is a ``DistributedDataParallel``, :class:`TTDataParallel` is an ``nn.DataParallel``,
and :class:`TTFullyShardedDataParallel` is a module under ``fully_shard`` (FSDP2). All of them run the wrapped model's
``get_loss``, ``get_loss_eval`` and ``get_predictions`` in the same way as ``forward``. Every other attribute of the
model can be read and written through the wrapper.
"""

from trainloop.parallel.ddp import TTDistributedDataParallel, reduce_gradients
from trainloop.parallel.dp import TTDataParallel
from trainloop.parallel.fsdp import TTFullyShardedDataParallel

__all__ = ["TTDataParallel", "TTDistributedDataParallel", "TTFullyShardedDataParallel", "reduce_gradients"]
