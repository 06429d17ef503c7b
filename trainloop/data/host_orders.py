"""Orders that are drawn as a whole, such as a weighted sampler's: once on each host, in memory that its ranks share.

The first rank of a host draws into a file without a name, of which the others read their own part. All take over the
state that the sampler's generator has afterwards, as if each had drawn. A rank that can't open the file draws itself.

Ranks that somebody else started, or callbacks on each rank, may have made samplers that would not draw alike: all ranks
of the run compare what they would draw from, before anyone takes another's order for its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainloop.distributed.hosts import neighbourhood
from trainloop.rng import derive_seed

if TYPE_CHECKING:
    from trainloop.data.steps import ExchangeInts

__all__ = ["HostOrders", "OrderToDraw"]

_LEAST = 1 << 16  # indices; fewer are drawn in the time of an exchange
_HEADER = 4  # words: the nonce, the order's length, the bytes of the generator's state, none


class OrderToDraw(NamedTuple):
    """An order, and how a sampler draws it."""

    length: int
    draw: Callable[[Tensor], object]
    """Writes it into an int64 tensor of that length."""
    generator: torch.Generator | None
    """The sampler's own, if it has one."""
    numbers: tuple[int, ...]
    """What is drawn of, and how: with equal ones, weights and states of generators, ranks draw the same."""
    weights: Tensor | None = None

    def fingerprint(self) -> int:
        """A checksum of all that the order will depend on."""
        parts = [self.length, *self.numbers]
        if self.weights is not None:
            parts.append(zlib.crc32(self.weights.detach().cpu().contiguous().numpy().data))
        state = torch.get_rng_state() if self.generator is None else self.generator.get_state()
        return derive_seed("order", *parts, zlib.crc32(state.numpy().data))

    def drawn(self) -> Tensor:
        """The order, drawn in this process."""
        order = torch.empty(self.length, dtype=torch.int64)
        self.draw(order)
        return order


class HostOrders:
    """One rank's part in drawing orders together with the other ranks of its host.

    Parameters
    ----------
    rank : int
    exchange_ints : callable
        A collective exchange of integers, of all ranks.
    check : callable
        Takes every rank's checksum of what it would draw from; raises where they differ.
    """

    def __init__(self, rank: int, exchange_ints: ExchangeInts, check: Callable[[list[list[int]]], None]) -> None:
        self._rank = rank
        self._exchange = exchange_ints
        self._check = check
        self._leader: int | None = None

    @contextmanager
    def drawn(self, order: OrderToDraw) -> Iterator[Tensor]:
        """The order; not to be kept. Collective, at its begin and at its end, where it is long enough to share."""
        if order.length < _LEAST:
            yield order.drawn()
            return
        if self._leader is None:
            here = derive_seed("host", neighbourhood())
            self._leader = [host for (host,) in self._exchange([here])].index(here)
        leads, fingerprint = self._leader == self._rank, order.fingerprint()
        with _written(order) if leads else _nothing_written() as (memory, place):
            said = self._exchange([fingerprint, *place])
            self._check([theirs[:1] for theirs in said])
            if not leads:
                memory = _opened(said[self._leader][1:], order)
            found = order.drawn() if memory is None else _order_in(memory, order, take_state=not leads)
            yield found
            self._exchange([])  # all have read what they need


@contextmanager
def _written(order: OrderToDraw) -> Iterator[tuple[memoryview | None, list[int]]]:
    """Draw into a file; gives its memory, and where others find it."""
    from trainloop.transfer.pages import anonymous_file  # `import trainloop` is to be cheap

    state_size = 0 if order.generator is None else order.generator.get_state().numel()
    fd = anonymous_file("order")
    try:
        os.ftruncate(fd, _size(order.length, state_size))
        memory = memoryview(mmap.mmap(fd, 0))
        header = np.frombuffer(memory, np.int64, _HEADER)
        header[:3] = secrets.randbits(62), order.length, state_size
        order.draw(_order_of(memory, order.length))
        if order.generator is not None:
            state = order.generator.get_state().numpy()
            np.frombuffer(memory, np.uint8)[-state_size:] = state
        yield memory, [os.getpid(), fd, int(header[0])]
    finally:
        os.close(fd)


@contextmanager
def _nothing_written() -> Iterator[tuple[memoryview | None, list[int]]]:
    yield None, []


def _opened(place: list[int], order: OrderToDraw) -> memoryview | None:
    pid, fd, nonce = place
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/fd/{fd}", "rb", buffering=0) as file:
        # A private mapping: pages are shared as long as nobody writes, and torch takes no memory that is read-only.
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        found, length, state_size, _ = np.frombuffer(memory, np.int64, _HEADER).tolist()
        if (found, length) == (nonce, order.length) and len(memory) == _size(length, state_size):
            return memory
    return None


def _order_in(memory: memoryview, order: OrderToDraw, *, take_state: bool) -> Tensor:
    state_size = int(np.frombuffer(memory, np.int64, _HEADER)[2])
    if take_state and order.generator is not None and state_size:
        order.generator.set_state(torch.from_numpy(np.frombuffer(memory, np.uint8)[-state_size:].copy()))
    return _order_of(memory, order.length)


def _order_of(memory: memoryview, length: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(memory, np.int64, length, offset=8 * _HEADER))


def _size(length: int, state_size: int) -> int:
    return 8 * (_HEADER + length) + state_size
