"""A sign of life of a process that no other rank waits for: whether its main thread gets on.

A single process may take any time for a step, an evaluation or a first compilation. What it may not is stay in one
call for longer than ``timeout`` seconds, or do nothing but wait. So a thread looks now and then where the main thread
is, and counts in a word of shared memory as long as it gets on; the launching process looks at the count. Where native
code keeps the interpreter's lock, nothing can count, which comes to the same.

A thread gets on where it is

* at another instruction than at the last look, or in another call, or
* at the same one, and has run others in between with some work, as a loop does over a call that takes seconds. A loop
  that sleeps, and looks now and then for what never comes, runs others, too, but hardly works.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

__all__ = ["Pulse"]

_LOOKS = 20  # within a time-out
_LONGEST_PAUSE_S = 5.0
_WAITS = ("selectors.py", "threading.py")  # of a loader for its worker; they return now and then to look about
_WORKS = 0.05  # of the time that a thread had the CPU; a loop over time.sleep(0.001) has it for 1 %


class Pulse:
    """Counts as long as a thread gets on.

    Parameters
    ----------
    thread_id : int
        Of the thread that is looked at, as of ``threading.get_ident()``. A thread that is not the main one counts as
        getting on only where it is at another instruction.
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
        self._loop = _Loop() if thread_id == threading.main_thread().ident else None

    def start(self) -> None:
        """Look from now on, in a daemon thread."""
        self.look()
        threading.Thread(target=self._run, name="trainloop-pulse", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def look(self) -> None:
        """Count if the thread gets on, and doesn't wait."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None or frame.f_code.co_filename.endswith(_WAITS):
            return
        # A frame is marked, since it may have the address of one that has gone; a reference would keep its tensors.
        # Without sys.settrace nobody calls what is set here.
        elsewhere = frame.f_trace is not _looked_at or frame.f_lasti != self._instruction
        if elsewhere:
            if frame.f_trace is None:
                frame.f_trace = _looked_at
            self._instruction = frame.f_lasti
        if (self._loop is not None and self._loop.works(elsewhere)) or elsewhere:
            self._count += 1
            self._beat(self._count)

    def _run(self) -> None:
        while not self._over.wait(self._pause_s):
            self.look()


class _Loop:
    """Whether the main thread, seen twice at one instruction, has run others in between."""

    def __init__(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        self._clock = time.pthread_getcpuclockid(main)
        self._sides = list(_SIDES)
        _ask_to_turn()
        self._since, self._cpu_since = time.monotonic(), time.clock_gettime(self._clock)

    def works(self, elsewhere: bool) -> bool:
        """Whether it has, since it was last said to get on, here or because it was ``elsewhere``; and has worked."""
        turned = self._sides != _SIDES
        if turned:
            self._sides = list(_SIDES)
            _ask_to_turn()
        now, cpu_now = time.monotonic(), time.clock_gettime(self._clock)
        works = turned and cpu_now - self._cpu_since > _WORKS * (now - self._since)
        if works or elsewhere:
            self._since, self._cpu_since = now, cpu_now
        return works


_SIDES = [0, 1]  # the main thread turns them round


def _ask_to_turn() -> None:
    """Have the main thread turn :data:`_SIDES` round before one of its next instructions; not within a native call."""
    # The interpreter calls the C function itself: in one of Python's, what a signal's handler raises would be lost.
    api = ctypes.pythonapi
    api.Py_AddPendingCall(api.PyList_Reverse, ctypes.py_object(_SIDES))


def _looked_at(frame: FrameType, event: str, argument: object) -> None:
    return None
