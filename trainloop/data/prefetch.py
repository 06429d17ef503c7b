"""Batches on the GPU: the next one is copied while the step runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainloop.data.batches import move_to, pin, record_use


def on_device(items: Iterator[tuple[Any, Any]], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """``(size, batch)`` items with the batch on a GPU, without the host waiting for anything.

    Each batch is pinned and copied on a stream of its own, while the one before is in use.

    Parameters
    ----------
    items : iterator of (size, batch)
        Batches of any shape, on the CPU, or partly or wholly on the GPU already.
    device : torch.device
        A CUDA device.
    """
    copies = torch.cuda.Stream(device)

    def start(item: tuple[Any, Any]) -> tuple[Any, Any, torch.cuda.Event]:
        size, batch = item
        # Batches that a loader's own code put on the GPU are complete on the stream that code ran on.
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
        # Else the allocator gives the memory to the next copy as soon as Python lets go, while this stream still reads.
        record_use(batch, stream)
        return size, batch

    ahead = None
    for item in items:
        # Started before the batch in hand is handed out, so that this copy runs beside that batch's step.
        following = start(item)
        if ahead is not None:
            yield finish(ahead)
        ahead = following
    if ahead is not None:
        yield finish(ahead)
