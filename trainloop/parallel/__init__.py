"""The two wrappers, of use in any hand-written loop too.

:class:`TTDistributedDataParallel` is a ``DistributedDataParallel``, :class:`TTDataParallel` an ``nn.DataParallel``.
Both send the wrapped model's ``get_loss``, ``get_loss_eval`` and ``get_predictions`` the way they send ``forward``, and
let every other attribute of the model be read and written as if they were not there.

* ``transparent.py``: whose attribute a name is
* ``ddp.py``: the one wrapper, and :func:`reduce_gradients`
* ``dp.py``: the other; ``scatter.py`` cuts a batch for its replicas and puts their results together
"""

from trainloop.parallel.ddp import TTDistributedDataParallel, reduce_gradients
from trainloop.parallel.dp import TTDataParallel

__all__ = ["TTDataParallel", "TTDistributedDataParallel", "reduce_gradients"]
