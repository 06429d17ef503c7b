"""Batches on the GPU: the next one is copied while the step runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from trainloop.data.batches import move_to


def on_device(items: Iterator[tuple[Any, Any]], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """``(size, batch)`` items with the batch on a GPU; the host waits for nothing.

    Batches are pinned and copied on a stream of their own, one ahead of the one in use.
    """
    copies = torch.cuda.Stream(device)

    def start(item: tuple[Any, Any]) -> tuple[Any, Any, torch.cuda.Event]:
        size, batch = item
        pinned = pin_memory(batch, "cuda")
        with torch.cuda.stream(copies):
            moved = move_to(pinned, device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(copies)
        return size, moved, done

    ahead = None
    for item in items:
        following = start(item)
        if ahead is not None:
            yield _finish(ahead, device)
        ahead = following
    if ahead is not None:
        yield _finish(ahead, device)


def _finish(started: tuple[Any, Any, torch.cuda.Event], device: torch.device) -> tuple[Any, Any]:
    size, batch, done = started
    stream = torch.cuda.current_stream(device)
    stream.wait_event(done)
    # The allocator must not give the memory to the next copy while this stream still reads it.
    _record(batch, stream)
    return size, batch


def _record(batch: Any, stream: torch.cuda.Stream) -> None:
    if isinstance(batch, Tensor):
        if batch.is_cuda:
            batch.record_stream(stream)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _record(value, stream)
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            _record(part, stream)
    elif hasattr(batch, "record_stream"):
        batch.record_stream(stream)
