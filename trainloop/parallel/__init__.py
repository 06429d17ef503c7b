"""The three wrappers, of use in any hand-written loop too.

:class:`TTDistributedDataParallel` is a ``DistributedDataParallel``, :class:`TTDataParallel` an ``nn.DataParallel``,
:class:`TTFullyShardedDataParallel` a module under ``fully_shard`` (FSDP2).
All of them run the wrapped model's ``get_loss``, ``get_loss_eval`` and ``get_predictions`` like ``forward``, and every
other attribute of the model can be read and written as without the wrapper.

* ``transparent.py``: decides whether a name belongs to the wrapper or the model
* ``ddp.py``: the wrapper for ``ddp``, and :func:`reduce_gradients`
* ``fsdp.py``: the wrapper that shards parameters; ``units.py`` finds the modules that are sharded as a unit,
  ``undoing.py`` removes the sharding
* ``dp.py``: the wrapper with replicas in threads; ``scatter.py`` splits a batch for them and joins their results
"""

from trainloop.parallel.ddp import TTDistributedDataParallel, reduce_gradients
from trainloop.parallel.dp import TTDataParallel
from trainloop.parallel.fsdp import TTFullyShardedDataParallel

__all__ = ["TTDataParallel", "TTDistributedDataParallel", "TTFullyShardedDataParallel", "reduce_gradients"]
