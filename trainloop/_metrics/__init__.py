"""Values logged in a loop: kept on their device, read in bulk, averaged over samples and ranks.

Logging only copies a value into a slot on its own device, so that a step never waits for the device.
:meth:`Recorder.compact` reads all slots in one transfer; :meth:`Recorder.exchange_steps` and
:meth:`Recorder.finish_epoch` exchange the ranks' values, whatever each rank has logged. An epoch takes a few numbers
for each metric, independent of its length.

* ``slots.py``: slots for values on their device
* ``recorder.py``: the logs of one rank
* ``reducing.py``: reduces values to a metric's value of a step and of an epoch
* ``exchange.py``: exchanges over all ranks
"""

from trainloop._metrics.exchange import exchange_of
from trainloop._metrics.recorder import EpochEnd, LogCall, Recorder, named_losses
from trainloop._metrics.reducing import StepValues, exact_sum, rows_of
from trainloop._metrics.slots import LateRead

__all__ = [
    "LogCall",
    "EpochEnd",
    "LateRead",
    "Recorder",
    "StepValues",
    "exact_sum",
    "exchange_of",
    "named_losses",
    "rows_of",
]
