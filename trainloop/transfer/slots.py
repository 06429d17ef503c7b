"""Snapshots in memory that outlives their writers: two slots used in turn, each either whole or invalid.

The launching process makes a :class:`SnapshotMemory` and sends it to its ranks, which inherit its files. A snapshot has
one part for each writer, all with the same number; a part is a pickle stream, its buffers, and a head that is written
last. If a writer is killed, its part has no head, and the other slot is still whole::

    words     a status of each rank; then, for each slot and part, its head
    parts     stream | buffers | table of the buffers         one file for each slot and part, as large as it must be
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from trainloop.transfer.device_copies import DeviceCopies
from trainloop.transfer.pages import anonymous_file, write_all
from trainloop.transfer.pickling import IN_STREAM, StatePickler, StateUnpickler, load_device

__all__ = ["Packed", "SnapshotMemory", "Snapshotter", "arrived_classes"]

_SLOTS = 2
_ALL = "*"  # stands for an entry's name
_ALIGNMENT = 64
_CHUNK = 4 << 20  # bytes summed while they are still in the CPU's cache
_NUMBER, _STEP, _SIZE, _STREAM, _COUNT, _CRC, _HEAD_CRC, _HEAD = range(8)  # words of a head; the number comes last


class Packed(NamedTuple):
    """One part, pickled: nothing is copied yet but what is small."""

    stream: bytes
    buffers: list[memoryview]
    alive: list[Any]
    """What the buffers' memory belongs to."""


class SnapshotMemory:
    """Two slots for the parts of a snapshot, and shared words for the launching process and its ranks.

    Parameters
    ----------
    parts : int
        Writers of one snapshot.
    statuses : int
        Number of words that ranks may write at any time.
    """

    def __init__(self, parts: int, statuses: int) -> None:
        self._parts, self._statuses = parts, statuses
        self._words_fd = self._notice_fd = -1
        self._fds: list[int] = []
        try:
            self._words_fd = anonymous_file("snapshots")
            os.ftruncate(self._words_fd, 8 * (statuses + _SLOTS * parts * _HEAD))
            self._notice_fd = anonymous_file("notice")
            for _ in range(_SLOTS * parts):
                self._fds.append(anonymous_file("snapshot"))
        except BaseException:
            self._close_files()
            raise
        self._map()

    def _map(self) -> None:
        self._mapped = mmap.mmap(self._words_fd, 0)
        self._words = memoryview(self._mapped).cast("q")
        self.status = self._words[: self._statuses]
        """Words that ranks write and the launching process reads."""

    def __reduce__(self) -> tuple[Any, ...]:
        popen = get_spawning_popen()
        assert popen is not None
        fds = [popen.DupFd(popen.duplicate_for_child(fd)) for fd in (self._words_fd, self._notice_fd, *self._fds)]
        return _inherited, (self._parts, self._statuses, fds)

    def close(self) -> None:
        """Release everything. No rank may be alive, or start later."""
        self.status.release()
        self._words.release()
        self._mapped.close()
        self._close_files()

    def _close_files(self) -> None:
        for fd in (self._words_fd, self._notice_fd, *self._fds):
            if fd >= 0:
                os.close(fd)

    # -- what ranks are told -----------------------------------------------------------------------------------------

    def give_notice(self, notice: dict[str, Any] | None) -> None:
        """Leave a notice of plain types for ranks that start later; they read it by :meth:`notice`."""
        data = b"" if notice is None else json.dumps(notice).encode()
        os.ftruncate(self._notice_fd, 0)
        write_all(self._notice_fd, memoryview(data), 0)

    def notice(self) -> dict[str, Any] | None:
        """The launching process's latest notice."""
        data = os.pread(self._notice_fd, os.fstat(self._notice_fd).st_size, 0)
        found: dict[str, Any] | None = json.loads(data) if data else None
        return found

    # -- parts -------------------------------------------------------------------------------------------------------

    def _file(self, number: int, part: int) -> int:
        return self._fds[number % _SLOTS * self._parts + part]

    def _head(self, number: int, part: int) -> memoryview:
        begin = self._statuses + (number % _SLOTS * self._parts + part) * _HEAD
        return self._words[begin : begin + _HEAD]

    def write(self, number: int, part: int, step: int, packed: Packed) -> int:
        """Write a part of a snapshot over the snapshot before last; returns its size in bytes.

        Nobody may write snapshot ``number`` before all parts of ``number - 1`` are there.

        Parameters
        ----------
        number : int
            Of the snapshot, counted from 1 over all starts.
        part, step : int
            The writer, and the step at which the part was made.
        packed : Packed
        """
        head, fd = self._head(number, part), self._file(number, part)
        head[_NUMBER] = 0
        place, crc, table = 0, 0, []
        for data in (memoryview(packed.stream), *packed.buffers):
            table.append((place, data.nbytes))
            for begin in range(0, data.nbytes, _CHUNK):
                chunk = data[begin : begin + _CHUNK]
                crc = zlib.crc32(chunk, crc)
                write_all(fd, chunk, place + begin)
            place += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
        entries = np.array(table[1:], np.int64).reshape(-1, 2).tobytes()
        write_all(fd, memoryview(entries), place)
        crc = zlib.crc32(entries, crc)
        os.ftruncate(fd, place + len(entries))  # smaller than the one before, perhaps
        head[_STEP], head[_SIZE], head[_STREAM] = step, place + len(entries), len(packed.stream)
        head[_COUNT], head[_CRC] = len(packed.buffers), crc
        head[_HEAD_CRC] = _head_crc(number, head)
        head[_NUMBER] = number
        return place + len(entries)

    def whole(self) -> dict[int, int]:
        """Number and step of the snapshots with all parts whole, the newest first."""
        found = {}
        for number in sorted({self._head(slot, 0)[_NUMBER] for slot in range(_SLOTS)} - {0}, reverse=True):
            heads = [self._head(number, part) for part in range(self._parts)]
            same = all(
                head[_NUMBER] == number
                and head[_STEP] == heads[0][_STEP]
                and head[_HEAD_CRC] == _head_crc(number, head)
                for head in heads
            )
            if same and all(self._is_whole(number, part) for part in range(self._parts)):
                found[number] = heads[0][_STEP]
        return found

    def forget_all_but(self, number: int) -> None:
        """Invalidate all other snapshots: parts of an unfinished one could be taken for those of a later one."""
        for slot in range(_SLOTS):
            for part in range(self._parts):
                head = self._head(slot, part)
                if head[_NUMBER] != number:
                    head[_NUMBER] = 0

    def _is_whole(self, number: int, part: int) -> bool:
        head, fd = self._head(number, part), self._file(number, part)
        if os.fstat(fd).st_size != head[_SIZE]:
            return False
        crc = 0
        for place, nbytes in [(0, head[_STREAM]), *self._table(number, part)]:
            for begin in range(0, nbytes, _CHUNK):
                crc = zlib.crc32(os.pread(fd, min(_CHUNK, nbytes - begin), place + begin), crc)
        return zlib.crc32(self._table(number, part).tobytes(), crc) == head[_CRC]

    def _table(self, number: int, part: int) -> Any:
        head = self._head(number, part)
        nbytes = 16 * head[_COUNT]
        data = os.pread(self._file(number, part), nbytes, head[_SIZE] - nbytes)
        return np.frombuffer(data, np.int64).reshape(-1, 2)

    def read(
        self,
        number: int,
        part: int,
        known: Sequence[object],
        device: torch.device | None = None,
        classes: Mapping[str, type] | None = None,
    ) -> Any:
        """Load a part of a whole snapshot as objects of this process; the others as in :class:`Snapshotter`."""
        head, fd = self._head(number, part), self._file(number, part)
        stream = os.pread(fd, head[_STREAM], 0)
        # Each buffer in its own memory: the slot will be overwritten, and unused buffers are freed.
        buffers = (_copied(fd, place, nbytes) for place, nbytes in self._table(number, part).tolist())
        with load_device(device):
            return _SnapshotUnpickler(io.BytesIO(stream), known, buffers, classes or {}).load()

    # -- parts as they are, for copies in other memories -----------------------------------------------------------

    def head_of(self, number: int, part: int) -> list[int]:
        """What says that a part is there: words to give to :meth:`end_copy`."""
        return list(self._head(number, part))

    def size_of(self, number: int, part: int) -> int:
        """Bytes of a part."""
        return self._head(number, part)[_SIZE]

    def bytes_of(self, number: int, part: int, place: int, nbytes: int) -> bytes:
        """Some of a part's bytes."""
        return os.pread(self._file(number, part), min(nbytes, self.size_of(number, part) - place), place)

    def begin_copy(self, number: int, part: int) -> None:
        """From now on the part is not there."""
        self._head(number, part)[_NUMBER] = 0

    def put_bytes(self, number: int, part: int, place: int, data: memoryview) -> None:
        """Bytes of a copy."""
        write_all(self._file(number, part), data, place)

    def end_copy(self, number: int, part: int, words: Sequence[int]) -> None:
        """All bytes are there: with its head the part is, too."""
        os.ftruncate(self._file(number, part), words[_SIZE])
        head = self._head(number, part)
        for i in range(1, _HEAD):
            head[i] = words[i]
        head[_NUMBER] = number


def _inherited(parts: int, statuses: int, fds: list[Any]) -> SnapshotMemory:
    memory = object.__new__(SnapshotMemory)
    memory._parts, memory._statuses = parts, statuses
    memory._words_fd, memory._notice_fd, *memory._fds = (fd.detach() for fd in fds)
    memory._map()
    return memory


def _head_crc(number: int, head: memoryview) -> int:
    return zlib.crc32(np.array([number, *head[_STEP:_HEAD_CRC]], np.int64).tobytes())


def _copied(fd: int, place: int, nbytes: int) -> np.ndarray[Any, Any]:
    memory = np.empty(nbytes, np.uint8)
    view, done = memoryview(memory), 0  # type: ignore[arg-type]  # an array is a buffer
    while done < nbytes:
        done += os.preadv(fd, [view[done:]], place + done)
    return memory


# -- what is written ---------------------------------------------------------------------------------------------------


def arrived_classes() -> dict[str, type]:
    """Classes that came to this process by value, and do so in each process with the same payload.

    Their names here are the same in processes of other hosts, whose callers have packed payloads of their own.
    """
    found: dict[str, type] = {}
    for kind in list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values()):
        name = f"{kind.__module__}:{kind.__qualname__}"
        alike = sum(other.partition("#")[0] == name for other in found)
        found[f"{name}#{alike}"] = kind
    return found


class _SnapshotPickler(StatePickler):
    """Pickles state for a reader that may be another process than the one it came from."""

    def __init__(
        self,
        file: Any,
        known: Sequence[object],
        classes: Mapping[str, type],
        callback: Callable[[pickle.PickleBuffer], Any],
        importable: dict[str, bool],
        copies: DeviceCopies | None,
    ) -> None:
        super().__init__(file, known, callback)
        self._device_copies = copies
        self._index.update((id(kind), name) for name, kind in classes.items())
        self._importable = importable

    def is_importable(self, module: ModuleType) -> bool:
        found = self._importable.get(module.__name__)
        if found is None:
            found = self._importable[module.__name__] = super().is_importable(module)
        return found

    def _on_host(self, memory: torch.Tensor) -> torch.Tensor:
        return super()._on_host(memory) if self._device_copies is None else self._device_copies.copy(memory)

    other_side_has_classes = False  # but for those in the index


class _SnapshotUnpickler(StateUnpickler):
    def __init__(self, file: Any, known: Sequence[object], buffers: Iterable[Any], classes: Mapping[str, type]) -> None:
        super().__init__(file, known, buffers)
        self._classes = classes

    def persistent_load(self, pid: int | str) -> object:
        return self._classes[pid] if isinstance(pid, str) else super().persistent_load(pid)


class Snapshotter:
    """Pickles states for :class:`SnapshotMemory`; values that can't be pickled are left out, and seldom tried again.

    Parameters
    ----------
    known : sequence of object
        Travel as references; on the other side they are that side's own, listed in the same order.
    classes : mapping of str to type
        The result of :func:`arrived_classes` right after this process's payload was opened.
    copies : DeviceCopies, optional
        Makes the copies of what is on a GPU; whoever packs begins a set of them. What is packed then no longer changes
        with the state, and is to be written once the copies are there.
    """

    def __init__(
        self, known: Sequence[object], classes: Mapping[str, type], copies: DeviceCopies | None = None
    ) -> None:
        self._known, self._classes, self._copies = known, classes, copies
        self._refused: set[tuple[Any, Any, Any]] = set()
        self._packs, self._next_try = 0, 4
        self._importable: dict[str, bool] = {}  # what was found out of modules, a third of the time of a small pack

    def refused_of(self, state: dict[Any, dict[Any, Any]]) -> list[tuple[Any, Any, Any, Any]]:
        """Section, key, name and value of everything left out of ``state``, as it can't be pickled."""
        found = []
        for section, key, name in self._refused:
            value = state.get(section, {}).get(key)
            if name == _ALL:
                found.append((section, key, "all", value))
            elif isinstance(value, dict) and name in value:
                found.append((section, key, name, value[name]))
        return found

    def pack(
        self,
        state: dict[Any, dict[Any, Any]],
        optional: Sequence[Any] = (),
        omitted: Collection[tuple[Any, Any, Any]] = (),
    ) -> Packed:
        """Pickle ``state``, two levels of dictionaries, with the memory of tensors and arrays beside it.

        Parameters
        ----------
        state : dict of dict
            When loaded, it lists everything missing as (section, key, name) under ``'omitted'``.
        optional : sequence
            Sections from whose dictionaries, and dictionaries inside these, values that can't be pickled are left out.
        omitted : collection of (section, key, name)
            More values to leave out.
        """
        self._packs += 1
        if self._packs == self._next_try:  # less and less often, as each try costs the time of a pack or two
            self._next_try *= 2
            self._refused.clear()
        used = 0 if self._copies is None else self._copies.used
        try:
            return self._packed(_without(state, {*self._refused, *omitted}))
        except Exception:  # whatever a user's __reduce__ raises
            self._refused.update(self._refusing(_without(state, set(omitted)), optional))
            if self._copies is not None:
                self._copies.take_back(used)
            return self._packed(_without(state, {*self._refused, *omitted}))

    def _packed(self, state: Any) -> Packed:
        file = io.BytesIO()
        buffers: list[memoryview] = []
        alive: list[Any] = []

        def keep_out(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            # A copy may only be queued: it can't go into the stream now.
            is_copy = self._copies is not None and self._copies.has(raw)
            if raw.nbytes < IN_STREAM and not is_copy:
                return True
            # The next steps must not change what is written beside them.
            buffers.append(raw if is_copy or self._copies is None else memoryview(bytes(raw)))
            alive.append(buffer)
            return False

        pickler = _SnapshotPickler(file, self._known, self._classes, keep_out, self._importable, self._copies)
        pickler.dump(state)
        return Packed(file.getvalue(), buffers, [*alive, *pickler.copies])

    def _refusing(self, state: dict[Any, dict[Any, Any]], optional: Sequence[Any]) -> set[tuple[Any, Any, Any]]:
        found: set[tuple[Any, Any, Any]] = set()
        for section in optional:
            for key, value in state[section].items():
                if self._can(value):
                    continue
                parts = value.items() if isinstance(value, dict) else ()
                refusing = {(section, key, name) for name, part in parts if not self._can((name, part))}
                found |= refusing or {(section, key, _ALL)}
        return found

    def _can(self, value: Any) -> bool:
        try:
            self._packed(value)
        except Exception:
            return False
        return True


def _without(state: dict[Any, dict[Any, Any]], omitted: set[tuple[Any, Any, Any]]) -> dict[Any, Any]:
    left: dict[Any, Any] = {}
    by_key: dict[tuple[Any, Any], set[Any]] = {}
    for section, key, name in omitted:
        by_key.setdefault((section, key), set()).add(name)
    for section, entries in state.items():
        left[section] = {}
        for key, value in entries.items():
            names = by_key.get((section, key), ())
            if _ALL not in names:
                plain = isinstance(value, dict) and names
                left[section][key] = {n: part for n, part in value.items() if n not in names} if plain else value
    return {**left, "omitted": list(omitted)}
