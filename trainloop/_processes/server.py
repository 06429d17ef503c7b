"""Prepare the fork server: ``multiprocessing`` imports this module in the server, before the server's first fork.

Other code of the program may start processes from the same server, so its forks have the environment, signals,
numbers of threads and random seeds that they would have without this package.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import weakref
from typing import Any

from trainloop._processes.fork_server import SERVER_VARIABLE, open_standard_descriptors, set_threads
from trainloop._support.platform import set_blocked_signals
from trainloop.resources.enforce import set_variable

started_with: dict[str, str] | None = None
"""The caller's environment when the server started; ``None`` if the server was not started by this package."""

_is_server = False


def _prepare(order: dict[str, Any]) -> None:
    global started_with, _is_server
    # A fork replaces its descriptors 1 and 2 by the caller's, so no other open file may have these numbers.
    open_standard_descriptors()
    sys.path[:] = order["path"]
    for name in order["modules"]:
        # The process that needs the module will raise. A missing shared library is an OSError, not an ImportError.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for name, value in order["environment"].items():
        set_variable(name, value)
    del os.environ[SERVER_VARIABLE]
    started_with = dict(os.environ)
    gc.collect()
    gc.freeze()  # otherwise the first collection of a fork would write to, and so copy, every page with objects
    _is_server = True
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=lambda: _in_fork(order["mask"]))


def _in_fork(signal_mask: list[int]) -> None:
    global _is_server
    if not _is_server:  # a fork of a fork
        return
    _is_server = False
    set_blocked_signals(signal_mask)  # the server blocks the signal that Ctrl-C sends to the whole group
    set_threads()
    # They belong to the server's end: a fork would remove its temporary folders, and take torch's libraries apart.
    for ending in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        ending.atexit = False
    # Python's own generator is seeded by Python in a fork.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


if SERVER_VARIABLE in os.environ:
    _prepare(json.loads(os.environ[SERVER_VARIABLE]))
