"""Forked children of a process that has, or had, a process group: loaders' workers above all."""

from __future__ import annotations

import functools
import gc
import os
import threading

__all__ = ["guard_forks"]


@functools.cache
def guard_forks() -> None:
    """From now on, children that this process forks never collect the garbage that they inherit.

    A process group that only reference cycles hold (the reducer of an earlier ``DistributedDataParallel`` keeps one) is
    freed by the garbage collector. Where that runs in a forked child, Gloo's destructor waits for threads that the fork
    did not copy, and the child hangs: a loader's worker that never loads, and ranks that wait for its batch. Python's
    own hooks after a fork are enough to start a collection, so it is off from before the fork until the child has
    frozen what it inherited (``gc.freeze``). What the child makes itself is collected as ever.

    For the whole process and for good, as no one can tell when the last group is gone. Once is enough, more do nothing.
    """
    if not hasattr(os, "register_at_fork"):  # Windows
        return
    switched_off: set[int] = set()  # by which threads that are forking; no lock, which a signal could leave taken

    def before() -> None:
        if gc.isenabled():
            switched_off.add(threading.get_ident())
            gc.disable()

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
