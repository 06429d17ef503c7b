"""Memory that several processes map: unnamed files, and arrays whose pages are replaced by a file mapping."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterable

from trainloop._support.platform import write_at

PAGE = mmap.PAGESIZE
_CHUNK = 32 << 20  # maximum number of bytes that exist twice while memory is moved
_MAP_COUNT_MARGIN = 8192  # number of mappings left for everything else

_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x02, 0x10, 0x20
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_MADV_DONTNEED = 4
_PRESENT_AND_OF_FILE = 0b101  # top bits of an entry of /proc/<pid>/pagemap: present, not swapped out, page of a file
_PAGES_AT_ONCE = 1 << 17
_READ_WRITE = 0x1 | 0x2


def anonymous_file(name: str) -> int:
    """Return a descriptor of an empty unnamed file, which disappears when all processes that use it have ended.

    The file is in memory if the system supports that (``memfd_create``: not counted against ``/dev/shm``, which is 64
    MiB in many containers), otherwise it is an unlinked temporary file. Programs inherit the descriptor only if it is
    passed to them. On Windows, the file has a name, by which ranks open it, until :func:`close_file`.

    Parameters
    ----------
    name : str
        Name for ``/proc/<pid>/maps`` to show.
    """
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # forbidden by a sandbox's filter
            return os.memfd_create(f"trainloop-{name}", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=f"trainloop-{name}-")
    if sys.platform == "win32":
        _paths[fd] = path
    else:
        os.unlink(path)
    return fd


_paths: dict[int, str] = {}


def close_file(fd: int) -> None:
    """Close the descriptor that :func:`anonymous_file` returned."""
    os.close(fd)
    if path := _paths.pop(fd, ""):
        with contextlib.suppress(OSError):  # a rank that has not ended still has it open
            os.unlink(path)


def path_of(fd: int) -> str:
    """Return the path of a file that :func:`anonymous_file` created in this process; Windows only."""
    return _paths[fd]


def write_all(fd: int, data: memoryview, place: int) -> None:
    """Write bytes at an offset of a file, in as many calls as necessary."""
    while data.nbytes:
        written = write_at(fd, data, place)
        data, place = data[written:], place + written


def punch_hole(fd: int, place: int, nbytes: int) -> None:
    """Return the memory or disk space of a part of a file to the system; the part reads as zeros afterwards.

    If the system does not support this, the file keeps the space until it is closed.
    """
    libc = _libc() if sys.platform == "linux" else None
    if libc is not None and nbytes:
        libc.fallocate(fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, place, nbytes)


def trim() -> None:
    """Return freed memory to the system; glibc's malloc would keep it for later use by this process."""
    libc = _libc() if sys.platform == "linux" else None
    with contextlib.suppress(AttributeError):  # another C library
        if libc is not None:
            libc.malloc_trim(0)


def evict_clean_pages(spans: Iterable[tuple[int, int]]) -> int:
    """Evict clean pages of mapped files from this process's memory; the files keep their contents.

    The next access maps them again. Pages that were written to are kept, since they exist in no file (the mapping is
    private), and so is memory that is not part of a file. No other thread may write to the pages meanwhile.

    Parameters
    ----------
    spans : iterable of (int, int)
        Addresses and lengths in bytes; only pages that are entirely within a span are evicted.

    Returns
    -------
    int
        Bytes that were evicted.
    """
    import numpy as np  # keeps `import trainloop` fast

    if sys.platform != "linux":
        return 0
    libc = _libc()
    if libc is None:
        return 0
    evicted = 0
    # A sandbox may lack this file, and a process may have no permission to read it.
    with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for address, nbytes in spans:
            end = (address + nbytes) // PAGE
            for first in range(-(-address // PAGE), end, _PAGES_AT_ONCE):
                pages = min(_PAGES_AT_ONCE, end - first)
                entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * pages, 8 * first), np.uint64)
                clean = np.pad(entries >> np.uint64(61) == _PRESENT_AND_OF_FILE, 1)
                for begin, after in np.flatnonzero(clean[1:] != clean[:-1]).reshape(-1, 2).tolist():
                    length = PAGE * (after - begin)
                    if libc.madvise(PAGE * (first + begin), length, _MADV_DONTNEED) == 0:
                        evicted += length
    return evicted


class MovedPages:
    """Replace memory pages of this process by a file mapping at the same addresses.

    An array that is sent to the ranks would exist twice: here, and in the file that they map. So its whole pages
    are written to the file, and the file is mapped over them: the same address, the same values, one copy. The mapping
    is private: as before, only this process and its forked children see its later writes. :meth:`restore` puts ordinary
    memory back.

    Only private, anonymous, unlocked memory is moved: the heap, and large arrays that ``malloc`` maps. No other Python
    thread may run meanwhile, because its writes would be lost. Any other memory remains where it is, and the file has a
    second copy.

    Parameters
    ----------
    fd : int
        Descriptor of the file; it must remain open until :meth:`restore`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._moved: list[tuple[int, int, int]] = []  # address, bytes, place in the file
        movable = sys.platform == "linux" and not _locked_memory() and not _other_threads()
        self._libc = _libc() if movable else None
        self._starts, self._ends = _movable_memory() if self._libc is not None else ([], [])
        self._left = _free_mappings() if self._libc is not None else 0

    @property
    def nbytes(self) -> int:
        """Bytes that are currently shared in place."""
        return sum(nbytes for _, nbytes, _ in self._moved)

    def write(self, address: int, nbytes: int, place: int) -> bool:
        """Write memory to the file, and share its whole pages in place if that is possible.

        Parameters
        ----------
        address, nbytes : int
            The memory.
        place : int
            Offset in the file. Unless it equals ``address`` modulo the page size, nothing is shared.

        Returns
        -------
        bool
            True if the whole pages are shared in place.
        """
        first = -(-address // PAGE) * PAGE
        last = (address + nbytes) // PAGE * PAGE
        # Only whole pages can be mapped, and only at the same offset within the page.
        if place % PAGE != address % PAGE or first >= last or not self._may_move(first, last):
            write_all(self._fd, memory_at(address, nbytes), place)
            return False
        write_all(self._fd, memory_at(address, first - address), place)
        write_all(self._fd, memory_at(last, address + nbytes - last), place + last - address)
        # A piece that is mapped in the middle of a mapping splits it into three.
        self._left -= 2
        for begin in range(first, last, _CHUNK):
            length = min(_CHUNK, last - begin)
            there = place + begin - address
            write_all(self._fd, memory_at(begin, length), there)
            self._mmap(begin, length, _MAP_PRIVATE | _MAP_FIXED, self._fd, there)
            self._moved.append((begin, length, there))
        return True

    def restore(self) -> None:
        """Put ordinary memory back, with the current contents. The ranks must have ended: the file is emptied."""
        while self._moved:
            address, nbytes, place = self._moved.pop()
            # Fill the new pages first, then move them over the old ones: the contents are readable at any moment.
            fresh = self._mmap(0, nbytes, _MAP_PRIVATE | _MAP_ANONYMOUS, -1, 0)
            ctypes.memmove(fresh, address, nbytes)
            assert self._libc is not None
            if self._libc.mremap(fresh, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == _FAILED:
                raise OSError(ctypes.get_errno(), "memory that was shared with the ranks can't be restored")
            punch_hole(self._fd, place, nbytes)

    def _may_move(self, first: int, last: int) -> bool:
        if self._left < 2:
            return False
        index = bisect.bisect_right(self._starts, first) - 1
        return index >= 0 and last <= self._ends[index]

    def _mmap(self, address: int, nbytes: int, flags: int, fd: int, place: int) -> int:
        assert self._libc is not None
        result: int = self._libc.mmap(address, nbytes, _READ_WRITE, flags, fd, place)
        if result == _FAILED:
            raise OSError(ctypes.get_errno(), f"{nbytes} bytes of memory can't be mapped")
        return result


_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
        size, off = ctypes.c_size_t, ctypes.c_long
        libc.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, off]
        libc.mremap.argtypes = [ctypes.c_void_p, size, size, ctypes.c_int, ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, size, ctypes.c_int]
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, off, off]
    except (OSError, AttributeError):
        return None
    return libc


def memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _movable_memory() -> tuple[list[int], list[int]]:
    """Return starts and ends of this process's private anonymous mappings, with adjacent mappings joined."""
    starts: list[int] = []
    ends: list[int] = []
    try:
        with open("/proc/self/maps") as file:
            lines = file.read().splitlines()
    except OSError:
        return [], []
    for line in lines:
        span, permissions, _, _, inode, *name = line.split(None, 5)
        ordinary = not name or name[0] == "[heap]" or name[0].startswith("[anon")
        if permissions != "rw-p" or inode != "0" or not ordinary:
            continue
        start, end = (int(x, 16) for x in span.split("-"))
        if ends and ends[-1] == start:
            ends[-1] = end
        else:
            starts.append(start)
            ends.append(end)
    return starts, ends


def _locked_memory() -> bool:
    """Return True if this process has locked memory (mlock); a device may use its physical address."""
    try:
        with open("/proc/self/status") as file:
            return any(line.startswith("VmLck:") and int(line.split()[1]) for line in file)
    except OSError:
        return True


def _other_threads() -> bool:
    """Return True if another Python thread runs that may write into the data of this one."""
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    # Progress bars, TensorBoard's writers and fsspec have threads that write only into their own objects.
    return any(
        not thread.name.startswith(("trainloop-", "fsspecIO"))
        and not type(thread).__module__.startswith(("tqdm.", "tensorboard."))
        for thread in others
    )


def _free_mappings() -> int:
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            most = int(file.read())
        with open("/proc/self/maps") as file:
            return most - sum(1 for _ in file) - _MAP_COUNT_MARGIN
    except (OSError, ValueError):
        return 0
