"""Protect forked children (mainly loader workers) of a process that has, or had, a process group; wait for Gloo."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
import threading
import time
from pathlib import Path

_REST_S = 2.0  # longest wait for Gloo's threads at exit
_REST_BEFORE_FORK_S = 0.1  # and before a fork: an exchange may take longer
# CPython before 3.10.15 and 3.11.10 (python/cpython#112275).
_CHILDREN_MAY_HANG = sys.version_info < (3, 10, 15) or (3, 11) <= sys.version_info < (3, 11, 10)


@functools.cache
def guard_process() -> None:
    """Protect a process that has, or had, a process group: at forks, and at exit, where it waits for Gloo's threads.

    Forked children don't collect garbage that they inherit. If only reference cycles refer to a process group (the
    reducer of an earlier ``DistributedDataParallel`` keeps one), the garbage collector frees it. If this happens in a
    forked child, Gloo's destructor waits for threads that the fork did not copy, and the child hangs: a loader worker
    never loads, and ranks wait for its batch. Python's own hooks after a fork can start a collection. So collection is
    disabled from before the fork until the child has frozen the inherited objects (``gc.freeze``). The child's own
    objects are collected as usual.

    This applies to the process until it ends, since the end of the last group is unknown. Further calls do nothing.
    """
    atexit.register(wait_for_gloo)
    if not hasattr(os, "register_at_fork"):  # Windows
        return
    switched_off: set[int] = set()  # by which forking threads; without a lock, which a signal could leave locked

    def before() -> None:
        if gc.isenabled():
            switched_off.add(threading.get_ident())
            gc.disable()
        if _CHILDREN_MAY_HANG:
            # A child hangs if another thread is creating or deleting its Python thread state. Gloo's threads do so
            # after an exchange, to destroy tensors. The second call waits for any other thread's.
            wait_for_gloo(_REST_BEFORE_FORK_S)
            sys._current_frames()

    def after_in_parent() -> None:
        if threading.get_ident() in switched_off:
            switched_off.remove(threading.get_ident())
            gc.enable()

    def after_in_child() -> None:
        gc.freeze()
        if switched_off:
            switched_off.clear()
            gc.enable()

    os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)


def wait_for_gloo(at_most_s: float = _REST_S) -> None:
    """Wait until the threads of all Gloo groups are idle; called at exit, and before forks.

    After an exchange, a thread destroys the exchanged tensors, which may have Python objects. This needs the GIL. A
    thread that requests the GIL while the interpreter shuts down aborts the process (torch 2.6 to 2.15).
    """
    deadline = time.monotonic() + at_most_s
    busy = bool(_states_of_gloo())
    while busy and time.monotonic() < deadline:
        time.sleep(0.005)  # releases the GIL for waiting threads, which seem to sleep
        busy = any(state != "S" for state in _states_of_gloo())


def _states_of_gloo() -> list[str]:
    """Return the states of Gloo's threads in this process: ``S`` if a thread sleeps."""
    states = []
    for stat in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            name, _, state = stat.read_text().rpartition(") ")
            if "(pt_gloo_" in name:
                states.append(state[0])
    return states
