"""Values logged in a loop: kept on their device, read in bulk, averaged over samples and ranks.

A logged value is copied into a slot on its own device and nothing else, so that a step never waits for the device.
:meth:`Recorder.compact` reads all slots in one transfer; :meth:`Recorder.exchange_steps` and
:meth:`Recorder.finish_epoch` tell all ranks everything in one exchange, whatever each of them logged. What is kept of
an epoch is a few numbers a metric, however long it is.
"""

from trainloop.metrics.recorder import Asked, EpochEnd, Recorder, named_losses
from trainloop.metrics.reducing import StepValues, exact_sum, rows_of

__all__ = ["Asked", "EpochEnd", "Recorder", "StepValues", "exact_sum", "named_losses", "rows_of"]
