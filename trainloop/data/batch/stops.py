"""Detect a ``StopIteration`` of a dataset or a collate function that is not the end of the loader.

``for batch in loader`` treats it as the loader's end, in one process and from workers alike. The epoch ends early,
without an error. In ``ddp`` it ends on one rank only, and the other ranks wait for that rank.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

T = TypeVar("T")

_TORCH = os.path.dirname(torch.__file__)


def guard_stop_iteration(batches: Iterator[T], name: str) -> Iterator[T]:
    """Yield the iterator's batches up to its own end; raise an error for any other ``StopIteration``.

    Parameters
    ----------
    batches : iterator
        Batches of a loader.
    name : str
        The user's name for the loader.

    Raises
    ------
    RuntimeError
        If there is another ``StopIteration``; the message has the line that raised it.
    """
    while True:
        try:
            batch = next(batches)
        except StopIteration as stop:
            if _is_of_loading(stop):
                raise slipped_out(stop, name) from stop
            return
        yield batch


def slipped_out(stop: StopIteration, name: str) -> RuntimeError:
    """Return the error for a ``StopIteration`` of the user's code, like the one that Python raises in a generator."""
    frames = traceback.extract_tb(stop.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_TORCH)]
    at = (own or frames)[-1]
    # A worker's exception is re-raised with the worker's traceback as its text.
    where = str(stop) if "Original Traceback" in str(stop) else f"{at.filename}:{at.lineno}, in {at.name}: {at.line}"
    return RuntimeError(
        f"{name}: its dataset or collate function raised StopIteration, which would end the epoch on this rank only, "
        "as if there were no more data. The usual cause is a next() without a default. Catch StopIteration there, and "
        f"raise another error or restart the iterator. Raised at: {where}"
    )


def _is_of_loading(stop: StopIteration) -> bool:
    """Return True if a frame fetched samples or re-raised a worker's exception: a loader never ends there."""
    frames = [frame for frame, _ in traceback.walk_tb(stop.__traceback__)]
    if any(frame.f_code in (_MapDatasetFetcher.fetch.__code__, ExceptionWrapper.reraise.__code__) for frame in frames):
        return True
    # A stream's own end occurs before there is anything to collate, or is raised by this frame.
    streams = [frame for frame in frames[:-1] if frame.f_code is _IterableDatasetFetcher.fetch.__code__]
    return any("data" in frame.f_locals for frame in streams)
