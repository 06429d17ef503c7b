"""Slots for logged values on their device, until they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from operator import length_hint

import torch
from torch import Tensor

__all__ = ["Slots"]


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
        except RuntimeError:  # copying nearly always works, and a check would cost time for every value
            if not value.ndim or value.numel() != 1:
                raise
            return slot.copy_(value.reshape(()))

    def _grown(self) -> Tensor:
        with self._growing:
            slot = next(self._free, None)  # another thread may have refilled it
            if slot is None:
                dtype = torch.float32 if self._device.type == "mps" else torch.float64
                with torch.inference_mode(False):  # slots created in inference mode could be used in that mode only
                    block = torch.empty(max(256, len(self._slots)), dtype=dtype, device=self._device)
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
