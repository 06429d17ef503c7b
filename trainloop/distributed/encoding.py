"""Encode objects as bytes: pickled between ranks that share a key, else in the safe form of ``torch.load``.

A pickle is a program: its writer can execute code in the process that reads it. So :func:`dumps` and
:func:`loads` are for messages that are signed with the run's key, and for a process's own files. Without a key,
:func:`encode` uses ``torch.save``, and :func:`decode` reads with ``weights_only=True``, which builds numbers, text,
containers and tensors; numpy's arrays and scalars, frozensets and named tuples are allowed in addition.
"""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals


class NotPlain(TypeError):
    """The object can't be read without executing code. The error names a class or function that reading it needs."""


class Malformed(ValueError):
    """The bytes were not written by :func:`encode`."""


# Functions that rebuild arrays and scalars, as pickles name them; numpy's documentation has no public names for them.
_OF_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    np.empty(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
    type(np.dtype("i4,f8")),
    bytes,
    frozenset,
]


def dumps(obj: Any) -> bytes:
    """Return a pickle of any object; accelerator tensors are loaded on the reader's current device of that type."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def loads(data: bytes | memoryview) -> Any:
    """Return the object that :func:`dumps` pickled. Call it only with bytes from a trusted writer."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        # torch pickles a storage with torch.save, which takes 100 us.
        whole = obj.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = whole.reshape(-1)
        if flat.stride() != (1,):  # a tensor with one element may have any stride
            flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
        data = flat.view(torch.uint8).numpy()
        return _tensor, (data, whole.dtype, tuple(whole.shape), obj.device.type, obj.requires_grad)


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], device: str, requires_grad: bool) -> Tensor:
    tensor = torch.from_numpy(data).view(dtype).reshape(shape).to(device)
    return tensor.requires_grad_(requires_grad)


def encode(obj: Any) -> bytes:
    """Return plain data as bytes.

    Plain data is ``None``, numbers, text and bytes; lists, tuples, named tuples, sets, dicts and OrderedDicts of plain
    data; numpy's arrays and scalars; tensors.

    Raises
    ------
    NotPlain
        If ``obj`` contains anything else.
    """
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    _allowed(buffer)
    return buffer.getvalue()


def decode(data: bytes | memoryview) -> Any:
    """Return the object that :func:`encode` encoded.

    Raises
    ------
    Malformed
        If :func:`encode` did not write the bytes. No function that the bytes name has been called.
    """
    buffer = io.BytesIO(data)
    try:
        with (
            safe_globals(_allowed(buffer)),
            torch.sparse.check_sparse_tensor_invariants(True),
            warnings.catch_warnings(),
        ):
            # PyTorch 2.15 warns although it validates these invariants, as requested.
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
            return torch.load(buffer, map_location=_storage_here, weights_only=True, mmap=False)
    except Exception as error:  # torch's and pickle's errors are of many types
        raise Malformed(f"bytes that are not plain data ({type(error).__name__})") from error


def _allowed(buffer: io.BytesIO) -> list[Any]:
    """Return the globals to allow for these bytes; raise NotPlain if the bytes need other globals."""
    buffer.seek(0)
    allowed = list(_OF_NUMPY)
    with safe_globals(allowed):
        others = get_unsafe_globals_in_checkpoint(buffer)
    for name in others:
        module, _, qualname = name.rpartition(".")
        found = getattr(sys.modules.get(module), qualname, None)  # nothing is imported
        # The constructor that collections.namedtuple generates runs no user code.
        made = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
        if not made or not found.__new__.__module__.startswith("namedtuple_"):
            raise NotPlain(f"of type {name}")
        allowed.append(found)
    buffer.seek(0)
    return allowed


def _storage_here(storage: Any, location: str) -> Any:
    """Return a tensor's storage on this process's current device of the writer's type."""
    kind = location.partition(":")[0]
    return storage if kind == "cpu" else storage.to(kind)
