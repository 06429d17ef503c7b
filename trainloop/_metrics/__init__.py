"""Values logged in a loop: kept on their device, read in bulk, averaged over samples and ranks.

Logging only copies a value into a slot on its own device, so that a step never waits for the device.
:meth:`Recorder.compact` reads all slots in one transfer; :meth:`Recorder.exchange_steps` and
:meth:`Recorder.finish_epoch` exchange the ranks' values, whatever each of them logged. An epoch takes a few numbers for
each metric, however long it is.

* ``slots.py``: where values wait on their device
* ``recorder.py``: what one rank logs
* ``reducing.py``: from values to a metric's value of a step and of an epoch
* ``exchange.py``: over all ranks
"""

from trainloop._metrics.exchange import exchange_of
from trainloop._metrics.recorder import Asked, EpochEnd, Recorder, named_losses
from trainloop._metrics.reducing import StepValues, exact_sum, rows_of

__all__ = ["Asked", "EpochEnd", "Recorder", "StepValues", "exact_sum", "exchange_of", "named_losses", "rows_of"]
