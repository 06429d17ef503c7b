"""Batches on the GPU: the next one is copied while the step runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainloop.data.batches import move_to, pin, record_use


def on_device(items: Iterator[tuple[Any, Any]], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield ``(size, batch)`` items with the batch on a GPU, without making the host wait.

    Each batch is pinned and copied on a separate stream, while the previous one is in use.

    Parameters
    ----------
    items : iterator of (size, batch)
        Batches of any shape, on the CPU, or partly or wholly on the GPU.
    device : torch.device
        A CUDA device.
    """
    copies = torch.cuda.Stream(device)

    def start(item: tuple[Any, Any]) -> tuple[Any, Any, torch.cuda.Event]:
        size, batch = item
        # Batches that a loader's own code put on the GPU are complete on the stream of that code.
        copies.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copies):
            moved = move_to(pin(batch), device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(copies)
        return size, moved, copied

    def finish(started: tuple[Any, Any, torch.cuda.Event]) -> tuple[Any, Any]:
        size, batch, copied = started
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copied)
        # Otherwise the allocator reuses the memory when Python frees it, although this stream still reads it.
        record_use(batch, stream)
        return size, batch

    ahead = None
    for item in items:
        # Started before the present batch is yielded, so that the copy runs during that batch's step.
        following = start(item)
        if ahead is not None:
            yield finish(ahead)
        ahead = following
    if ahead is not None:
        yield finish(ahead)
