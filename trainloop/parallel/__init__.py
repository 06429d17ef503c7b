"""The three wrappers, of use in any hand-written loop too.

:class:`TTDistributedDataParallel` is a ``DistributedDataParallel``, :class:`TTDataParallel` an ``nn.DataParallel``,
:class:`TTFullyShardedDataParallel` a module under ``fully_shard`` (FSDP2).
All send the wrapped model's ``get_loss``, ``get_loss_eval`` and ``get_predictions`` the way they send ``forward``, and
let every other attribute of the model be read and written as if the wrapper were not there.

* ``transparent.py``: decides whether a name belongs to the wrapper or the model
* ``ddp.py``: the one wrapper, and :func:`reduce_gradients`
* ``fsdp.py``: the one that shards parameters; ``units.py`` tells which modules are sharded as one,
  ``undoing.py`` takes the sharding off
* ``dp.py``: the one with replicas in threads; ``scatter.py`` cuts a batch for them and puts their results together
"""

from trainloop.parallel.ddp import TTDistributedDataParallel, reduce_gradients
from trainloop.parallel.dp import TTDataParallel
from trainloop.parallel.fsdp import TTFullyShardedDataParallel

__all__ = ["TTDataParallel", "TTDistributedDataParallel", "TTFullyShardedDataParallel", "reduce_gradients"]
