"""NCCL in a run that is lost: nobody waits for a collective that never ends.

A collective of Gloo raises as soon as a neighbour has gone. One of NCCL goes on for ever on the device where the ranks
share a machine, and the host waits for the device in native code, where no handler of Python's runs: such a rank could
only be killed, after all the time that the launching process gives it to unwind.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from trainloop.distributed.ranks import leave_group

__all__ = ["Unblocking"]

_LOOK_S = 0.2
_OWN_ERROR_S = 0.5  # until this rank's own error has arrived, and for its main thread to unwind where nothing holds it


class Unblocking:
    """Ends NCCL's collectives once the run is lost, from a thread of its own.

    Parameters
    ----------
    lost : callable
        Whether it is: the handler of SIGTERM then raises.
    """

    def __init__(self, lost: Callable[[], bool]) -> None:
        self._lost = lost
        self._over = threading.Event()

    def start(self) -> None:
        """Look from now on, in a daemon thread."""
        threading.Thread(target=self._run, name="trainloop-unblocking", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def _run(self) -> None:
        while not self._lost():
            if self._over.wait(_LOOK_S):
                return
        if self._over.wait(_OWN_ERROR_S):
            return
        # Before the collectives end: what these leave on the device are no gradients, and the main thread would go on
        # with them, to a step and to a checkpoint. With the signal pending it goes on with the handler.
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._over.wait(_OWN_ERROR_S):
            leave_group(failed=True)
