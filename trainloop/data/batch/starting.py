"""Start to read a loader, with its workers; an error names the part of the loader that can't be sent to them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

from trainloop._support.signals import started
from trainloop.data.batch.stops import guard_stop_iteration
from trainloop.errors import UnpicklableError

_FUNCTIONS = ("collate_fn", "worker_init_fn")


def start_reading(loader: Any, name: str) -> Iterator[Any]:
    """Return the batches of a loader, whose workers start now; see :func:`.guard_stop_iteration`."""
    return guard_stop_iteration(started_with_workers(loader, name), name)


def started_with_workers(loader: Any, name: str) -> Iterator[Any]:
    """Return ``iter(loader)``.

    Raises
    ------
    UnpicklableError
        If the loader starts its workers as new processes, and can't send them its dataset or one of its functions.
    """
    workers = getattr(loader, "num_workers", 0)
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    if not workers or (method := context.get_start_method()) == "fork":
        return started(loader)
    for part in _FUNCTIONS:  # first: a start that fails half-way leaves queues behind
        _check_picklable(part, getattr(loader, part, None), name, workers, method)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error when attempting")  # the error below says more
            return started(loader)
    except (pickle.PicklingError, AttributeError, TypeError):
        _check_picklable("dataset", getattr(loader, "dataset", None), name, workers, method)
        raise


def _check_picklable(part: str, value: Any, name: str, workers: int, method: str) -> None:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # locks and queues raise others, but can be sent
        without = ", or leave out multiprocessing_context" if hasattr(os, "fork") else ""
        raise UnpicklableError(
            f"{name}: its {part} can't be pickled ({error}). The loader starts its workers by {method!r} "
            f"(num_workers={workers}), so it must send them its dataset and functions. Define functions and classes at "
            f"the top level of a module, instead of a lambda or a nested function, or pass num_workers=0{without}."
        ) from error
