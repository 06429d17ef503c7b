"""Large pieces of memory from one rank to another, authenticated where the run has a key."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from trainloop.distributed.objects import cpu_group, session_here

__all__ = ["Piece", "swap"]

_CHUNK = 16 << 20  # bytes that are under way at a time
_MOST_WORDS = 8
_WORDS = struct.Struct(f"<qqqq{_MOST_WORDS}q")  # which, whether there is one, bytes, words; the words
_DIGEST = 32


class Piece(Protocol):
    """Memory to send, or to fill."""

    def words(self) -> list[int] | None:
        """Up to 8 integers that go before the bytes; ``None``: there is nothing to be sent."""

    def size(self) -> int:
        """Bytes to send."""

    def read(self, place: int, nbytes: int) -> bytes:
        """Some of the bytes to send."""

    def write(self, place: int, data: memoryview) -> None:
        """Take some of the bytes that came."""


class Came(NamedTuple):
    """The result of :func:`swap`."""

    words: list[int]
    size: int


def swap(
    number: int, *, send: tuple[Piece, int] | None = None, receive: tuple[Piece, int] | None = None
) -> Came | None:
    """Send a piece to one rank, and receive one from another at the same time; either may be missing.

    Both ends call it, in the same order as all other swaps between them.

    Parameters
    ----------
    number : int
        Number of this swap, used for no other one of this process group, so that nothing sent before can be sent again.
    send, receive : (Piece, int), optional
        With the rank at the other end.

    Returns
    -------
    Came or None
        What was received, all of it and as it was sent; ``None`` where the other end had nothing, or nothing was asked
        for.

    Raises
    ------
    ConnectionError
        If what came is not what a rank of this run has sent.
    """
    group, rank = cpu_group(), dist.get_rank()
    head = torch.zeros(_WORDS.size + 2 * _DIGEST, dtype=torch.uint8)
    theirs = torch.zeros_like(head)
    out = into = 0
    works: list[Any] = []
    if send is not None:
        piece, to = send
        words = piece.words()
        out = 0 if words is None else piece.size()
        data = _WORDS.pack(number, words is not None, out, len(words or ()), *_padded(words or ()))
        data += _digest(piece, out)
        head.numpy()[:] = memoryview(data + _tag(data, rank, to))
        # Both at once: two ranks that send to each other and wait would wait for ever.
        works.append(dist.isend(head, to, group=group))
    if receive is not None:
        works.append(dist.irecv(theirs, receive[1], group=group))
    for work in works:
        work.wait()
    came: Came | None = None
    expected = b""
    if receive is not None:
        came, expected = _checked(theirs.numpy().tobytes(), number, receive[1], rank)
        into = 0 if came is None else came.size
    digest = hashlib.sha256()
    for place in range(0, max(out, into), _CHUNK):
        works = []
        if send is not None and place < out:
            sent = torch.frombuffer(bytearray(send[0].read(place, min(_CHUNK, out - place))), dtype=torch.uint8)
            works.append(dist.isend(sent, send[1], group=group))
        if receive is not None and place < into:
            chunk = torch.empty(min(_CHUNK, into - place), dtype=torch.uint8)
            works.append(dist.irecv(chunk, receive[1], group=group))
        for work in works:
            work.wait()
        if receive is not None and place < into:
            view = memoryview(chunk.numpy())  # type: ignore[arg-type]  # an array is a buffer
            digest.update(view)
            receive[0].write(place, view)
    if receive is not None and came is not None and digest.digest() != expected:
        raise session_here().stranger(receive[1], "a copy that is not what was announced")
    return came


def _padded(words: Sequence[int]) -> list[int]:
    return [*words, *[0] * (_MOST_WORDS - len(words))]


def _digest(piece: Piece, size: int) -> bytes:
    digest = hashlib.sha256()
    for place in range(0, size, _CHUNK):
        digest.update(piece.read(place, min(_CHUNK, size - place)))
    return digest.digest()


def _tag(data: bytes, sender: int, receiver: int) -> bytes:
    key = session_here().key
    if key is None:
        return bytes(_DIGEST)
    return hmac.digest(key, b"copy %d %d " % (sender, receiver) + data, "sha256")


def _checked(head: bytes, number: int, sender: int, receiver: int) -> tuple[Came | None, bytes]:
    data, tag = head[: _WORDS.size + _DIGEST], head[_WORDS.size + _DIGEST :]
    which, there, size, count, *words = _WORDS.unpack_from(data)
    if not hmac.compare_digest(tag, _tag(data, sender, receiver)) or which != number or size < 0:
        raise session_here().stranger(sender, "the head of a copy that is not the next one of this run")
    return (Came(words[:count], size) if there else None), data[_WORDS.size :]
