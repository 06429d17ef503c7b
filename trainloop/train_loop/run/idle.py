"""Run dummy forward passes on ranks without a batch, for modes in which each forward is an exchange (``fsdp``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainloop import distributed
from trainloop._metrics import Recorder
from trainloop._support import rng
from trainloop._support.carried import carried_state_of, load_carried_state
from trainloop.optim import trained_modules
from trainloop.parallel.sync_batchnorm import CpuSyncBatchNorm

__all__ = ["Idle", "padded_batches"]

_TORCH_OWN = frozenset(vars(nn.Module()))


class Idle:
    """A dummy forward pass for a rank that has no batch. It runs another rank's batch, and has no side effects.

    It logs nothing, updates neither BatchNorm statistics nor counts in modules' attributes (such as torchmetrics'
    counts), draws no random numbers and carries no state. Its gradients are zero. The other rank runs the same batch at
    the same time, so all ranks gather the same units. If that batch's loss is infinite or NaN, the gradients of the
    dummy pass may be NaN.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def borrowed_batch(self, batches: list[Any], counts: list[int], i: int) -> Any:
        """If this rank has no ``i``-th batch, return another rank's; ``None`` if this rank has one or no rank has.

        Collective.
        """
        if min(counts) > i:
            return None
        # Rank 0 may have no batch itself.
        source = next(rank for rank, n in enumerate(counts) if n > i)
        mine = i < len(batches)
        theirs = distributed.broadcast_object(batches[i] if mine else None, source)
        return None if mine else theirs

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        """Suppress all side effects of a dummy forward and its backward."""
        run = self._run
        model = run.loop.model
        # A criterion may count or remember samples, too.
        parts = [part for module in trained_modules(model, run.loop.criterion) for part in module.modules()]
        buffers = [(b, b.clone()) for part in parts for b in part.buffers(recurse=False)]
        attributes = [(vars(part), _attributes_of(part)) for part in parts]
        carried = carried_state_of(model)
        # Synchronized BatchNorm would wait for all ranks; here ranks with a batch normalise among themselves.
        synced = [part for part in model.modules() if isinstance(part, (CpuSyncBatchNorm, nn.SyncBatchNorm))]
        training = [part.training for part in synced]
        for part in synced:
            part.training = False
        try:
            with run.listening(Recorder()), rng.isolated():
                yield
        finally:
            for part, flag in zip(synced, training, strict=True):
                part.training = flag
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
                for current, saved in attributes:
                    _restore(current, saved)
            load_carried_state(model, [carried], 0, 1)


def _attributes_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return a module's attributes, except ``nn.Module``'s own, each with a copy if it can be changed in place."""
    return {name: (value, _copied(value)) for name, value in vars(module).items() if name not in _TORCH_OWN}


def _copied(value: Any) -> Any:
    if type(value) is Tensor:
        # An attribute may refer to gathered parameters, whose memory fsdp frees.
        readable = value.layout == torch.strided and not value.is_meta and value.untyped_storage().nbytes() > 0
        return value.clone() if readable and not value.is_inference() else value
    return value.copy() if type(value) in (list, dict) else value


def _restore(current: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    for name, (value, before) in saved.items():
        current[name] = value
        if before is value:
            continue
        if type(value) is list:
            value[:] = before
        elif type(value) is dict:
            value.clear()
            value.update(before)
        elif value.untyped_storage().nbytes() > 0 and not torch.equal(value, before):
            value.copy_(before)


def padded_batches(
    batches: Iterator[tuple[int, Any, int]], forward: Callable[[Any], Any], idle: Idle
) -> Iterator[tuple[int, Any, int]]:
    """Yield this rank's batches of an evaluation; run a dummy ``forward`` while other ranks have more. Collective."""
    last: Any = None
    while True:
        item = next(batches, None)
        counts = [n for (n,) in distributed.exchange_ints([int(item is not None)])]
        if not any(counts):
            return
        if last is None and not all(counts):  # this rank may never have had a batch; all ranks enter this branch
            last = idle.borrowed_batch([item[1]] if item is not None else [], counts, 0)
        if item is not None:
            last = item[1]
            yield item
        else:
            with idle.without_side_effects():
                forward(last)
