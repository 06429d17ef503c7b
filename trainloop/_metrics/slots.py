"""Memory on a device for logged tensors, until they are read in bulk; numbers of the CPU are read at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

_FIRST = 4


def number_in(value: Tensor) -> float:
    """Return the number in a tensor with one element. It waits if the tensor is on a device."""
    if type(value) is not Tensor and hasattr(value, "full_tensor"):  # a DTensor has it
        value = value.full_tensor()
    return float(value.item())


class Slots:
    """Numbers on one device, kept there as float64 until they are read all at once.

    A slot is a 0-d view of a block of memory: storing a value is one copy without an allocation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._free: Iterator[Tensor] = iter(())
        self._growing = threading.Lock()

    def keep(self, value: Tensor) -> Tensor:
        """Copy a value into a slot. Thread-safe."""
        if value.requires_grad:
            value = value.detach()
        slot = next(self._free, None)
        if slot is None:
            slot = self._grown()
        try:
            return slot.copy_(value)
        except (RuntimeError, AssertionError):  # copying nearly always works, and a check would cost time
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor has it
            if whole is value and (not value.ndim or value.numel() != 1):
                raise
            return slot.copy_(whole.reshape(()))

    def _grown(self) -> Tensor:
        with self._growing:
            slot = next(self._free, None)  # another thread may have refilled it
            if slot is None:
                dtype = torch.float32 if self._device.type == "mps" else torch.float64
                with torch.inference_mode(False):  # slots created in inference mode could be used in that mode only
                    # Small at first: an evaluation of a few batches has few values, and each slot costs a microsecond.
                    block = torch.empty(max(_FIRST, len(self._slots)), dtype=dtype, device=self._device)
                    slots = block.unbind()
                self._blocks.append(block)
                self._slots.extend(slots)
                self._free = iter(slots)
                slot = next(self._free)
            return slot

    def read(self) -> dict[int, float]:
        """Read and free all used slots; return their numbers by the slot's id. Waits for the device."""
        taken = len(self._slots) - length_hint(self._free)
        if not taken:
            return {}
        flat = self._blocks[0] if len(self._blocks) == 1 else torch.cat(self._blocks)
        numbers = flat[:taken].tolist()
        self._free = iter(self._slots)
        return dict(zip(map(id, self._slots), numbers))


class LateRead:
    """Read numbers of a GPU without a wait: a call returns the numbers whose copies an earlier call has queued."""

    def __init__(self) -> None:
        self._read: dict[str, float] = {}
        self._queued: tuple[list[str], Tensor, list[Any]] | None = None

    def __call__(self, values: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Return the newest known numbers; values that are not on a GPU are read at once."""
        if self._queued is not None and all(event.query() for event in self._queued[2]):
            names, numbers, _ = self._queued
            self._read, self._queued = dict(zip(names, numbers.tolist(), strict=True)), None
        on_gpu = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.is_cuda}
        if on_gpu and self._queued is None:
            self._queued = self._copies(on_gpu)
        return {
            name: self._read[name] if name in on_gpu else float(value)
            for name, value in values.items()
            if name not in on_gpu or name in self._read
        }

    def _copies(self, values: Mapping[str, Tensor]) -> tuple[list[str], Tensor, list[Any]]:
        numbers = torch.empty(len(values), dtype=torch.float64, device="cpu", pin_memory=True)
        for number, value in zip(numbers, values.values(), strict=True):
            # Converted on the GPU: a copy to another dtype waits.
            number.copy_(value.detach().reshape(()).to(numbers.dtype), non_blocking=True)
        events = []
        for device in {value.device for value in values.values()}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return list(values), numbers, events
