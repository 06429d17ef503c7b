"""A sign of life of a process that no other rank waits for: whether its main thread gets on.

A single process may take any time for a step, an evaluation or a first compilation. What it may not is stay in one
call for longer than ``timeout`` seconds, or do nothing but wait. So a thread looks now and then where the main thread
is, and counts in a word of shared memory as long as it gets on; the launching process looks at the count. Where native
code keeps the interpreter's lock, nothing can count, which comes to the same.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["Pulse"]

_LOOKS = 20  # within a time-out
_LONGEST_PAUSE_S = 5.0
_WAITS = ("selectors.py", "threading.py")  # of a loader for its worker; they return now and then to look about


class Pulse:
    """Counts as long as a thread gets on.

    Parameters
    ----------
    thread_id : int
        Of the thread that is looked at, as of ``threading.get_ident()``.
    timeout_s : float
        How long it may stay where it is.
    beat : callable
        Called with the count, from another thread.
    """

    def __init__(self, thread_id: int, timeout_s: float, beat: Callable[[int], None]) -> None:
        self._thread_id, self._beat = thread_id, beat
        self._pause_s = min(timeout_s / _LOOKS, _LONGEST_PAUSE_S)
        self._count, self._instruction = 0, -1
        self._over = threading.Event()

    def start(self) -> None:
        """Look from now on, in a daemon thread."""
        self.look()
        threading.Thread(target=self._run, name="trainloop-pulse", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def look(self) -> None:
        """Count if the thread is at another instruction than at the last look, or in another call, and doesn't wait."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None or frame.f_code.co_filename.endswith(_WAITS):
            return
        # A frame is marked, since it may have the address of one that has gone; a reference would keep its tensors.
        # Without sys.settrace nobody calls what is set here.
        if frame.f_trace is not _looked_at or frame.f_lasti != self._instruction:
            if frame.f_trace is None:
                frame.f_trace = _looked_at
            self._instruction = frame.f_lasti
            self._count += 1
            self._beat(self._count)

    def _run(self) -> None:
        while not self._over.wait(self._pause_s):
            self.look()


def _looked_at(frame: FrameType, event: str, argument: object) -> None:
    return None
