"""Results of a host's ranks, in one file that all ranks map and that the reader frees piece by piece.

::

    head        offsets of stream and table, written last
    room        full tensors; several ranks write their shards into them
    buffers     the memory of other tensors and arrays of the result
    stream      the result's pickle
    table       offset and bytes of each buffer in the stream's order, including room

Space is returned to the system as soon as it is read, so that a large result never exists twice.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainloop._support.platform import read_into
from trainloop._transfer.pages import punch_hole, write_all
from trainloop._transfer.pickling import StatePickler, explained_rebuilding, load_device

_HEAD = 4  # int64s: offset and size of the stream, offset of the table, number of its entries
_ALIGNMENT = 64


class ResultFile:
    """The file of one result; each rank and the reader have an instance for the same file.

    Parameters
    ----------
    fd : int
        Descriptor of a file that is empty, or whose last result was read.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = 8 * _HEAD
        self._rooms: dict[tuple[int, int], int] = {}  # offset in the file, by address and size in bytes

    # -- in ranks ------------------------------------------------------------------------------------------------------

    def room_for(self, kinds: Iterable[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        """Return tensors of zeros in the file. Ranks of one host that make the same calls in order get the same memory.

        If local rank 0's result contains such tensors, they are not copied.
        """
        begin = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        places, end = [], begin
        for shape, dtype in kinds:
            end += -end % _ALIGNMENT
            nbytes = shape.numel() * dtype.itemsize
            places.append((end - begin, nbytes, shape, dtype))
            end += nbytes
        # Extend the file by writing one byte at the end of the room: truncating it could remove data that other ranks
        # have written.
        write_all(self._fd, memoryview(b"\0"), end)
        self._end = end + 1
        mapped = mmap.mmap(self._fd, end + 1 - begin, offset=begin)
        tensors = []
        for place, nbytes, shape, dtype in places:
            if not nbytes:
                tensors.append(torch.empty(shape, dtype=dtype, device="cpu"))
                continue
            # Each tensor has a separate storage, since storages are pickled as a whole.
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=place)
            self._rooms[raw.data_ptr(), nbytes] = begin + place
            tensors.append(raw.view(dtype).view(shape))
        return tensors

    def write(self, result: object) -> None:
        """Write the result; only local rank 0 calls this.

        All ranks write their shards to the room before the reader starts.
        """
        stream = io.BytesIO()
        table: list[tuple[int, int]] = []

        def keep_out(buffer: pickle.PickleBuffer) -> None:
            raw = buffer.raw()
            address = int(np.frombuffer(raw, np.uint8).__array_interface__["data"][0])
            place = self._rooms.pop((address, raw.nbytes), None)  # used once: reading frees the memory
            table.append((self._append(raw) if place is None else place, raw.nbytes))

        StatePickler(stream, (), keep_out).dump(result)
        entries = np.array(table, np.int64).reshape(-1, 2)
        stream_at = self._append(stream.getbuffer())
        table_at = self._append(memoryview(entries.tobytes()))
        head = np.array([stream_at, stream.getbuffer().nbytes, table_at, len(table)], np.int64)
        write_all(self._fd, memoryview(head.tobytes()), 0)

    def _append(self, data: memoryview) -> int:
        place = self._end + -self._end % _ALIGNMENT
        write_all(self._fd, data, place)
        self._end = place + data.nbytes
        return place

    # -- in the process that started the ranks -------------------------------------------------------------------------

    def is_complete(self) -> bool:
        """Return True if a result was written and has not been read yet."""
        head = bytearray(8 * _HEAD)
        return read_into(self._fd, memoryview(head), 0) == len(head) and any(head)

    def read(self) -> Any:
        """Return the result, with its tensors on the CPU. The file is emptied, but not truncated: ranks may map it."""
        stream_at, size, table_at, count = np.frombuffer(self._read_and_free(0, 8 * _HEAD), np.int64).tolist()
        table = np.frombuffer(self._read_and_free(table_at, 16 * count), np.int64).reshape(-1, 2).tolist()
        stream = self._read_and_free(stream_at, size)
        buffers = (self._read_and_free(place, nbytes) for place, nbytes in table)
        with load_device(None), explained_rebuilding():
            result = pickle.loads(stream, buffers=buffers)
        punch_hole(self._fd, 0, os.fstat(self._fd).st_size)
        return result

    def _read_and_free(self, place: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, offset = memoryview(data), place
        while view.nbytes:
            got = read_into(self._fd, view, offset)
            if not got:
                raise EOFError(f"the ranks' result ends {view.nbytes} bytes early")
            view, offset = view[got:], offset + got
        punch_hole(self._fd, place, nbytes)
        return data
