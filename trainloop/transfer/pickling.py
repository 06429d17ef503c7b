"""Pickling what ``pickle`` can't name, with the data of arrays and tensors beside the stream.

Classes and functions of ``__main__``, notebook cells and closures travel by value (cloudpickle). The bytes of numpy
arrays and of torch storages travel as protocol 5's out-of-band buffers, so that whoever reads decides where they live.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing.connection
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

__all__ = ["Pickler", "dump_state", "load_device", "load_state"]

_loading = threading.local()


@contextlib.contextmanager
def load_device(device: torch.device | None) -> Iterator[None]:
    """While unpickling in this context, tensors that were on a CUDA device are put on ``device`` (``None``: the CPU)."""
    before = getattr(_loading, "device", None)
    _loading.device = device
    try:
        yield
    finally:
        _loading.device = before


def _storage_from_buffer(buffer: Any, on_accelerator: bool) -> torch.UntypedStorage:
    """A storage over ``buffer``'s own memory, or a copy on the rank's device."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        storage = torch.UntypedStorage(0)
    elif isinstance(buffer, bytearray):
        # In the stream, hence small: a copy, which can be resized as torch's own storages can.
        storage = torch.UntypedStorage(view.nbytes)
        torch.empty(0, dtype=torch.uint8).set_(storage).copy_(torch.frombuffer(buffer, dtype=torch.uint8))  # type: ignore[call-overload]
    else:
        storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    device = getattr(_loading, "device", None)
    if on_accelerator and device is not None and device.type != "cpu":
        moved = torch.empty(0, dtype=torch.uint8).set_(storage).to(device)  # type: ignore[call-overload]
        return moved.untyped_storage()
    return storage


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _storage_bytes(storage: torch.UntypedStorage) -> np.ndarray[Any, Any]:
    """The storage's memory as bytes, without a copy where it is on the CPU."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().numpy()  # type: ignore[call-overload]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, plus storages as buffers, and things that cloudpickle would quietly change, refused.

    Parameters
    ----------
    file : file object
        Receives the stream.
    buffer_callback : callable, optional
        As in :class:`pickle.Pickler`: takes each buffer, and returns whether it goes into the stream instead.
    """

    def __init__(self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.main_names: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        """How ``obj`` is pickled; ``NotImplemented`` for the usual way."""
        if isinstance(obj, torch.UntypedStorage):
            return self._reduce_storage(obj)
        if isinstance(obj, torch.storage.TypedStorage):
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        return super().reducer_override(obj)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type == "meta":
            return _meta_storage, (storage.nbytes(),)
        return _storage_from_buffer, (pickle.PickleBuffer(_storage_bytes(storage)), storage.device.type != "cpu")


def _meta_storage(nbytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes, device="meta")


# --------------------------------------------------------------------------------------------------------------------
# The way back: state whose objects both sides know
# --------------------------------------------------------------------------------------------------------------------


class _StatePickler(Pickler):
    def __init__(self, file: Any, known: Sequence[object]) -> None:
        super().__init__(file)
        self._index = {id(obj): i for i, obj in enumerate(known)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._index.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            # A class that came here by value must not go back as a second class of the same name.
            tracker_id = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            if tracker_id is not None:
                return _tracked_class, (tracker_id,)
        return super().reducer_override(obj)


class _StateUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, known: Sequence[object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, pid: int) -> object:
        return self._known[pid]


def _tracked_class(tracker_id: str) -> type:
    found: type | None = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if found is None:
        raise pickle.UnpicklingError("a class that was sent to the ranks no longer exists in the process that sent it")
    return found


def dump_state(state: object, known: Sequence[object] = ()) -> bytes:
    """Pickle ``state``; the objects in ``known`` travel as references to their index.

    On the other side they are that side's own objects, if it lists its copies in the same order: a model's callbacks,
    say, whose state comes back into the very objects the user made.

    Parameters
    ----------
    state : object
        Anything that can be pickled; classes and functions of ``__main__`` and closures too.
    known : sequence of objects
        Compared by identity.
    """
    file = io.BytesIO()
    _StatePickler(file, known).dump(state)
    return file.getvalue()


def load_state(data: bytes, known: Sequence[object] = ()) -> Any:
    """What :func:`dump_state` was given, with this side's ``known`` in the places of the other's. Tensors on the CPU."""
    with load_device(None):
        return _StateUnpickler(io.BytesIO(data), known).load()
