"""Protect forked children (mainly loader workers) of a process that has, or had, a process group."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading


@functools.cache
def guard_forks() -> None:
    """Prevent forked children of this process from collecting garbage that they inherit.

    If only reference cycles refer to a process group (the reducer of an earlier ``DistributedDataParallel`` keeps one),
    the garbage collector frees it. If this happens in a forked child, Gloo's destructor waits for threads that the fork
    did not copy, and the child hangs: a loader worker never loads, and ranks wait for its batch. Python's own hooks
    after a fork can start a collection. So collection is disabled from before the fork until the child has frozen the
    inherited objects (``gc.freeze``). The child's own objects are collected as usual.

    This applies to the process until it ends, since the end of the last group is unknown. Further calls do nothing.
    """
    if not hasattr(os, "register_at_fork"):  # Windows
        return
    switched_off: set[int] = set()  # by which forking threads; without a lock, which a signal could leave locked

    def before() -> None:
        if gc.isenabled():
            switched_off.add(threading.get_ident())
            gc.disable()
        # In CPython before 3.10.15 and 3.11.10, a child hangs if another thread, such as Gloo's, is creating its Python
        # thread state (python/cpython#112275). This call waits for such a thread, but can't stop one that begins later.
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
