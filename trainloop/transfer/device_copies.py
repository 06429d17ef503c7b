"""Copies of GPUs' memory that the host does not wait for."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

__all__ = ["DeviceCopies"]

_ALIGNMENT = 64
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class DeviceCopies:
    """Copies of tensors in pinned memory of the host, the same each time: one set of them at a time.

    A copy is queued on its device's current stream. What is queued there later, such as the next step, so can't change
    what is copied, and the host goes on at once; it reads the copy after :meth:`wait`. What has no room in the memory
    that :meth:`reserve` has found is copied while the host waits: the first set, and one that has grown.

    Parameters
    ----------
    device : torch.device
        Whose time for them :meth:`wait` tells. They may be of other devices, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: mmap.mmap | None = None
        self._used = 0
        self._made: dict[int, Tensor] = {}
        self._begin = torch.cuda.Event(enable_timing=True)
        self._ends: dict[torch.device, torch.cuda.Event] = {}

    def begin(self) -> None:
        """Begin a new set, in the memory of the one before, which nobody may need any more."""
        self.wait()  # one that was given up may still be under way
        self._used = 0
        self._made.clear()
        self._begin.record(torch.cuda.current_stream(self._device))

    def copy(self, tensor: Tensor) -> Tensor:
        """A tensor on the host: one of a GPU is there once :meth:`wait` has returned, others are as by ``cpu()``."""
        if not tensor.is_cuda or not tensor.nbytes:
            return tensor.cpu()
        place = self._used
        self._used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._pinned is None or self._used > len(self._pinned) or not tensor.is_contiguous():
            copy = tensor.cpu()
        else:
            # Over its own bytes alone: whoever pickles a tensor takes all of its storage.
            room = torch.frombuffer(self._pinned, dtype=torch.uint8, count=tensor.nbytes, offset=place)
            copy = room.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            end = self._ends.setdefault(tensor.device, torch.cuda.Event(enable_timing=True))
            end.record(torch.cuda.current_stream(tensor.device))
        self._made[copy.data_ptr()] = copy
        return copy

    def has(self, memory: memoryview) -> bool:
        """Whether it is the memory of a copy, which nobody else writes to."""
        return memory.nbytes > 0 and np.frombuffer(memory, np.uint8).ctypes.data in self._made

    @property
    def used(self) -> int:
        """Bytes of this set so far."""
        return self._used

    def take_back(self, used: int) -> None:
        """Use the memory again of copies made since so many bytes were :attr:`used`."""
        self.wait()  # those of several devices are in no order
        self._used = used

    def wait(self) -> float:
        """Until the copies are there, in any thread; returns the seconds that the device took for them."""
        for end in self._ends.values():
            end.synchronize()
        own = self._ends.get(self._device)
        self._ends.clear()
        return 0.0 if own is None else self._begin.elapsed_time(own) / 1e3

    def reserve(self) -> None:
        """Let go of this set, and find pinned memory for a next one as large. It takes long: not between steps.

        In a thread of its own, since CUDA tells a thread that asks for too much so once more, by its next call.
        """
        self._made.clear()
        room = 0 if self._pinned is None else len(self._pinned)
        if self._used > room:
            self.close()  # frees the old memory first
            self._pinned = _pinned(self._used + self._used // 64)

    def close(self) -> None:
        """Give the pinned memory back."""
        self.wait()
        self._made.clear()
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(_address(self._pinned))
            self._pinned = None


def _pinned(nbytes: int) -> mmap.mmap | None:
    """Pinned memory, or ``None`` where there is not as much; the host then waits for each copy."""
    # Not torch's own, which takes the next power of two of bytes, and keeps them for the life of the process.
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    memory.madvise(mmap.MADV_DONTFORK)  # a loader's worker that is forked has not to have it, too
    if int(torch.cuda.cudart().cudaHostRegister(_address(memory), nbytes, _PORTABLE)):
        return None
    return memory


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
