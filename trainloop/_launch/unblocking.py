"""Abort NCCL collectives once the run has failed, so that no rank blocks forever.

A Gloo collective raises as soon as a neighbour has gone. On one machine, an NCCL collective keeps running on the
device, and the host waits for it in native code, where no Python signal handler runs. Such a rank could only be
killed, after the whole time that the launching process gives it to unwind.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from trainloop.distributed.ranks import leave_group

__all__ = ["Unblocking"]

_LOOK_S = 0.2
_OWN_ERROR_S = 0.5  # time for this rank's own error to arrive, and for its main thread to unwind if it is not blocked


class Unblocking:
    """Abort NCCL's collectives once the run has failed, from a separate thread.

    Parameters
    ----------
    run_failed : callable
        Returns True if the run has failed: the handler of SIGTERM then raises.
    """

    def __init__(self, run_failed: Callable[[], bool]) -> None:
        self._run_failed = run_failed
        self._over = threading.Event()

    def start(self) -> None:
        """Start to check, in a daemon thread."""
        threading.Thread(target=self._run, name="trainloop-unblocking", daemon=True).start()

    def stop(self) -> None:
        """Stop checking."""
        self._over.set()

    def _run(self) -> None:
        while not self._run_failed():
            if self._over.wait(_LOOK_S):
                return
        if self._over.wait(_OWN_ERROR_S):
            return
        # Before the collectives end: they leave invalid gradients on the device, with which the main thread would
        # continue, to a step and a checkpoint. With the signal pending, it continues with the handler.
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._over.wait(_OWN_ERROR_S):
            leave_group(failed=True)
