"""Send one object to all ranks of a node, as a pickle stream and arrays in one file that every rank maps."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from typing import Any, NamedTuple

import numpy as np
import torch

from trainloop._transfer.pages import PAGE, MovedPages, anonymous_file, close_file, memory_at, write_all
from trainloop._transfer.pickling import Pickler, explained_rebuilding, load_device, noting_classes
from trainloop._transfer.unpicklable import explain
from trainloop.errors import UnpicklableError

_MOVED = 64 << 10  # bytes; memory of at least this size is shared in place
_MOST_MOVED = 8192  # each takes one or two mappings; Linux allows a process 65530
_ALIGNMENT = 64


@dataclass(frozen=True)
class PayloadHandle:
    """Handle with which a rank opens the payload; small and picklable."""

    fd: int
    """The sender's descriptor of the payload's file."""
    size: int
    """Bytes of the file."""
    stream_size: int
    """Bytes of the pickle stream, which is at the beginning of the file."""
    table: tuple[int, int]
    """Offset and number of the buffers' entries, each of which has offset, bytes, and 1 if the buffer is read-only."""

    def open(self, device: torch.device | None = None, received: Mapping[int, int] | None = None) -> Any:
        """Return the object. Its arrays are in the mapped file: shared until they are written to, then private.

        Named classes and functions of the sender's ``__main__`` are added to this process's ``__main__``, so
        that ordinary pickles between this process and its DataLoader workers find them.

        Parameters
        ----------
        device : torch.device, optional
            Destination of tensors that were on a CUDA device.
        received : mapping of int to int, optional
            This process's descriptors by the sender's numbers, if they were sent rather than inherited.
        """
        # Copy on write: a rank's writes (for example to parameters) stay private.
        fd = (received or {}).get(self.fd, self.fd)
        mapped = mmap.mmap(fd, self.size, access=mmap.ACCESS_COPY)
        view = memoryview(mapped)
        place, count = self.table
        entries = np.frombuffer(mapped, dtype=np.int64, count=3 * count, offset=place).reshape(count, 3).tolist()
        buffers = (
            view[place : place + nbytes].toreadonly() if readonly else view[place : place + nbytes]
            for place, nbytes, readonly in entries
        )
        with load_device(device), noting_classes(), _numbered(received or {}), explained_rebuilding():
            obj, names = pickle.loads(view[: self.stream_size], buffers=buffers)
        define_in_main(names)
        return obj


_sent_to_main: set[str] = set()


def define_in_main(names: Mapping[str, Any]) -> None:
    """Add definitions of the sender's ``__main__`` to this process's; it keeps those of its own."""
    main = sys.modules["__main__"].__dict__
    for name, definition in names.items():
        if name not in main or name in _sent_to_main:  # the newest definitions of a script or cell
            main[name] = definition
            _sent_to_main.add(name)
    # The compiler looks for the globals of these functions there, too, and watches whether they change.
    parts = [part for one in names.values() for part in (vars(one).values() if isinstance(one, type) else (one,))]
    for function in parts:
        scope = getattr(function, "__globals__", main)
        if scope is not main and scope.get("__name__") == "__main__":
            main["__getattr__"] = functools.partial(_value_in, scope)
            break


def _value_in(scope: Mapping[str, Any], name: str) -> Any:
    try:
        return scope[name]
    except KeyError:
        raise AttributeError(f"module '__main__' has no attribute {name!r}") from None


class LateNames:
    """The definitions of ``__main__`` that a pickler has sent by value; the pickler must pickle this object last."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names  # no reference to the pickler, whose memo refers to this object

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._names),)


class Payload(NamedTuple):
    """The sender's side of a payload."""

    handle: PayloadHandle
    """The handle that ranks receive."""
    descriptors: list[int]
    """Descriptors that the ranks need, including the payload's."""
    shared_in_place: int
    """Bytes of the sender's own arrays that the ranks map, without a copy."""


@contextlib.contextmanager
def pack(obj: object, *, roots: dict[str, object] | None = None, large: Sequence[object] = ()) -> Iterator[Payload]:
    """Pickle ``obj`` into a file that any number of ranks of this node can map, in the block.

    There, large arrays and tensors of ``obj`` exist only once, in the file, which this process and the ranks map. They
    keep identity, type, values and writability. The ranks must have ended at the end of the block.

    Parameters
    ----------
    obj : object
        The object to send.
    roots : dict of str to object, optional
        Objects by the names that paths in an :class:`UnpicklableError` start with; by default the attributes of
        ``obj``.
    large : sequence of objects
        Values of variables that are not sent with their modules: functions by value that use them bring them.

    Raises
    ------
    UnpicklableError
        If a part of ``obj`` can't be sent; the message has the part's path, its type and a remedy.
    """
    fd = anonymous_file("payload")
    with contextlib.ExitStack() as undo:
        undo.callback(close_file, fd)
        with pickled_for_spawning() as descriptors:
            # The buffers are the owners of the memory that is mapped.
            stream_size, buffers, copies = _pickled(obj, fd, {"": obj} if roots is None else roots, large)
        pages = MovedPages(fd)
        undo.callback(pages.restore)
        handle = _lay_out(fd, stream_size, buffers, copies, pages)
        yield Payload(handle, [fd, *descriptors], pages.nbytes)


def _pickled(
    obj: object, fd: int, roots: dict[str, object], large: Sequence[object]
) -> tuple[int, list[pickle.PickleBuffer], list[np.ndarray[Any, Any]]]:
    """Write the pickle stream; return its size, the buffers beside it, and the copies among these."""
    buffers: list[pickle.PickleBuffer] = []
    with open(fd, "wb", closefd=False, buffering=1 << 20) as file:
        pickler = Pickler(file, buffers.append)
        pickler.large = frozenset(map(id, large))
        try:
            pickler.dump((obj, LateNames(pickler.main_names)))
        except Exception as error:  # whatever a user's __reduce__ or __getstate__ raises
            raise UnpicklableError(explain(roots, error)) from error
        return file.tell(), buffers, pickler.copies


def _lay_out(
    fd: int,
    stream_size: int,
    buffers: list[pickle.PickleBuffer],
    copies: list[np.ndarray[Any, Any]],
    pages: MovedPages,
) -> PayloadHandle:
    """Write the buffers behind the stream; memory that several buffers share is written once."""
    count = len(buffers)
    raw = [buffer.raw() for buffer in buffers]
    begin = np.fromiter((_address_in_memory(view) for view in raw), np.int64, count)
    nbytes = np.fromiter((view.nbytes for view in raw), np.int64, count)
    region_of, first, last = _regions(begin, begin + nbytes)
    sizes = last - first
    unmoved = {copy.__array_interface__["data"][0] for copy in copies}
    # The largest first: the number of mappings is limited, and large regions gain most.
    large = np.flatnonzero(sizes >= _MOVED)
    moved = set(large[np.argsort(sizes[large])[::-1][:_MOST_MOVED]].tolist())
    place = stream_size
    places = np.empty(len(first), np.int64)
    for i, (address, size) in enumerate(zip(first.tolist(), sizes.tolist(), strict=True)):
        if i in moved and address not in unmoved and not _pinned(address, size):
            place += (address - place) % PAGE
            pages.write(address, size, place)
        else:
            place += -place % _ALIGNMENT
            write_all(fd, memory_at(address, size), place)
        places[i] = place
        place += size
    place += -place % _ALIGNMENT
    readonly = np.fromiter((view.readonly for view in raw), np.int64, count)
    entries = np.stack([places[region_of] + begin - first[region_of], nbytes, readonly], axis=1)
    write_all(fd, memoryview(entries.tobytes()), place)
    size = place + entries.nbytes
    os.ftruncate(fd, max(size, 1))
    return PayloadHandle(fd, max(size, 1), stream_size, (place, count))


def _regions(begin: Any, end: Any) -> tuple[Any, Any, Any]:
    """Join overlapping spans; return each span's region, and each region's begin and end."""
    if not len(begin):
        return begin, begin, end
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(end[order])
    starts = np.concatenate([[True], begin[order][1:] >= reach[:-1]])
    region_of = np.empty(len(begin), np.int64)
    region_of[order] = np.cumsum(starts) - 1
    last = np.append(np.flatnonzero(starts)[1:], len(begin)) - 1
    return region_of, begin[order][starts], reach[last]


def _address_in_memory(view: memoryview) -> int:
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _pinned(address: int, nbytes: int) -> bool:
    """Return True if the memory is pinned, so that a GPU uses its physical address."""
    if not torch.cuda.is_initialized():
        return False
    return torch.frombuffer(memory_at(address, nbytes), dtype=torch.uint8).is_pinned()


# --------------------------------------------------------------------------------------------------------------------
# Locks, queues and connections
# --------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pickled_for_spawning() -> Iterator[list[int]]:
    """Allow pickling of multiprocessing's own objects; yield the descriptors that processes must inherit for them."""
    before = get_spawning_popen()
    spawning = _CollectedDescriptors()
    set_spawning_popen(spawning)  # type: ignore[arg-type]  # it has the attributes that they use
    try:
        yield spawning.fds
    finally:
        set_spawning_popen(before)


class _CollectedDescriptors:
    """Replaces the ``Popen`` object of a process that is being spawned; collects the descriptors to inherit."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def DupFd(self, fd: int) -> _Descriptor:
        return _Descriptor(fd)

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return fd


_own_numbers: Mapping[int, int] = {}


@contextlib.contextmanager
def _numbered(received: Mapping[int, int]) -> Iterator[None]:
    global _own_numbers
    before, _own_numbers = _own_numbers, received
    try:
        yield
    finally:
        _own_numbers = before


@dataclass(frozen=True)
class _Descriptor:
    fd: int

    def detach(self) -> int:
        return _own_numbers.get(self.fd, self.fd)
