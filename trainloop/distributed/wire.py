"""Messages between ranks, which are verified before their content is used.

A process of another user can take a rank's place at a Gloo connection, since listeners on loopback accept every local
user. So a message contains its sender and its number, and both are checked before its size is used and before it is
decoded. If the run has a key (:mod:`trainloop.distributed.key`), a message is signed with HMACs under a key of this
process group only: without the key, no process can create, change, repeat or reflect a message. Only such messages may
contain pickles.

::

    head   magic 4 | call 1 | form 1 | rank 4 | number 8 | size 8    kind, sender, number and length
           tag of the body 32                                       zeros if the body is in the first block
           tag of the head 32                                       of the above, and of the body if it follows here
    body   in the first block if it is short, else in a second exchange
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainloop.distributed.encoding import Malformed, NotPlain, decode, dumps, encode, loads
from trainloop.distributed.key import KEY_VARIABLE, SharedKey, new_key, run_key
from trainloop.errors import ConfigurationError, UnpicklableError
from trainloop.resources.machine import physical_memory

_FIELDS = struct.Struct("<4sBBIQQ")
_TAG = 32
_HEAD = _FIELDS.size + 2 * _TAG
_MAGIC = b"tlx1"

SHORT = 1024
"""Bodies of up to this many bytes need one exchange instead of two: the ints of a training step, and the description of
most nested values. It affects latency only."""

BLOCK = _HEAD + SHORT
"""Number of bytes of the first exchange."""

CALLS = (
    *("the start", "gather_object", "broadcast_object", "exchange_ints", "barrier", "gather_to"),
    *("the beginning of an evaluation", "the end of a hook"),
)
"""Functions that exchange messages, and the purposes of the loop's calls of ``exchange_ints`` that users can mix up."""

SAME_CALLS = (
    "Every rank must make the same calls in the same order. The usual causes are code under `if rank == 0:`, and a "
    "rank without samples in an epoch's last batch, which doesn't call get_loss: for a loss over the rows of all "
    "ranks, pass drop_last=True to the loader. A callback such as ModelCheckpoint must run on every rank, too, and in "
    "fsdp each unit of the model: not an expert that only some ranks' samples use (fsdp_model_args={'shard': [Block]})."
)


class Form:
    """The encoding of a body."""

    RAW, PLAIN, PICKLE, REFUSED = range(4)


@dataclass(frozen=True)
class Message:
    """The verified head of a message."""

    rank: int
    call: str
    form: int
    size: int
    tag: bytes
    body: memoryview | None
    """The body, if it arrived with the head."""


def encoded(obj: object, session: Session) -> tuple[int, bytes | bytearray]:
    """Return the form and bytes of an object; if it can't be sent, REFUSED and the reason, cut to ``SHORT`` bytes.

    It never raises: a rank that raised here would leave the others waiting in the exchange.
    """
    try:
        if session.key is not None:
            return Form.PICKLE, dumps(obj)
        try:
            return Form.PLAIN, encode(obj)
        except NotPlain as what:
            return Form.REFUSED, (
                f"contains an object {what}, which needs a pickle, and without a key the sender of a pickle can't be "
                "verified. Exchange plain data (numbers, strings, arrays, tensors, lists and dicts of these), or set "
                f"{KEY_VARIABLE} to the same secret on every host"
            ).encode()
    except Exception as error:
        reason = (
            f"can't be pickled ({type(obj).__name__}: {type(error).__name__}: {error}). Exchange plain data (numbers, "
            "strings, tensors, dicts of these) instead"
        )
        return Form.REFUSED, reason.encode("utf-8", "replace")[:SHORT]


def decoded(message: Message, body: memoryview | None, session: Session) -> Any:
    """Return the object that a message contains; the message's tags must already be verified."""
    assert body is not None  # only ranks that receive the body call this
    if message.form == Form.REFUSED:
        reason = bytes(body).decode("utf-8", "replace")
        raise UnpicklableError(f"{message.call}: the object of rank {message.rank} {reason}.")
    if message.form == Form.PICKLE and session.key is not None:
        return loads(body)
    if message.form != Form.PLAIN:
        raise session.untrusted_error(message.rank, f"data of an unknown format ({message.form}) in {message.call}")
    try:
        return decode(body)
    except Malformed as error:
        raise session.untrusted_error(message.rank, str(error)) from error


class Session:
    """The key and the sequence number of one process group's messages.

    Collective: every rank creates it, at the group's first exchange.

    Parameters
    ----------
    group : ProcessGroup, optional
        A group for CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._number = 0
        self._largest = physical_memory()
        key, group_key = run_key(), None
        # Nonces of all ranks go into the key, so messages of another group or run are invalid here.
        hellos = _gathered(os.urandom(31) + bytes([key is not None]), group)
        with_key = [hello[-1] == 1 for hello in hellos]
        if any(have != with_key[0] for have in with_key):
            without = ", ".join(str(rank) for rank, have in enumerate(with_key) if not have)
            raise ConfigurationError(
                f"only some of the {self._world_size} ranks have a key. Ranks without one: {without}. Set "
                f"{KEY_VARIABLE} to the same secret for all ranks, or for none. If it was set that way, another "
                "program has connected as a rank."
            )
        if key is None:
            key = self._shared_key(group) if self._world_size > 1 else new_key()
        if key is not None:
            group_key = hmac.digest(key, b"trainloop session\0" + b"".join(hellos), "sha256")
        self.key = group_key
        """Key that only the ranks of this group know; ``None`` if the run has no key."""
        if key is not None:
            self._confirm(group)

    def _shared_key(self, group: dist.ProcessGroup | None) -> bytes | None:
        """Return a key from rank 0, if all ranks are processes of one user on one host."""
        shared = SharedKey() if self._rank == 0 else None
        try:
            place = struct.pack("<qq", *(shared.place if shared is not None else (0, -1)))
            first = _gathered(place, group)[0]
            key = shared.key if shared is not None else SharedKey.key_at(struct.unpack("<qq", first))
            # The second exchange makes rank 0 keep the file until all ranks have read it.
            return key if all(found == b"\1" for found in _gathered(bytes([key is not None]), group)) else None
        finally:
            if shared is not None:
                shared.close()

    def _confirm(self, group: dist.ProcessGroup | None) -> None:
        """Check that all ranks have the same key; a later failure of one rank would leave other ranks waiting."""
        assert self.key is not None
        confirmations = _gathered(hmac.digest(self.key, b"c%d" % self._rank, "sha256"), group)
        for rank, confirmation in enumerate(confirmations):
            if not self._is_tag(confirmation, hmac.digest(self.key, b"c%d" % rank, "sha256")):
                raise self.untrusted_error(rank, "a response that was not signed with this run's key")

    def pack(self, call: str, form: int, body: bytes | bytearray) -> bytearray:
        """Return the first block of this rank's next message; a longer body follows."""
        short = len(body) <= SHORT
        fields = _FIELDS.pack(_MAGIC, CALLS.index(call), form, self._rank, self._number, len(body))
        block = bytearray(BLOCK)
        block[: _FIELDS.size] = fields
        if not short:
            block[_FIELDS.size : _FIELDS.size + _TAG] = self._body_tag(fields, body)
        else:
            block[_HEAD : _HEAD + len(body)] = body
        block[_HEAD - _TAG : _HEAD] = self._head_tag(memoryview(block), len(body) if short else 0)
        return block

    def unpack(self, rank: int, block: memoryview, call: str) -> Message:
        """Verify a rank's first block and return its message.

        Raises
        ------
        ConnectionError
            If the block is not that rank's next message.
        """
        magic, number_of_call, form, sender, number, size = _FIELDS.unpack_from(block)
        if magic != _MAGIC:
            what = f"bytes that are not a message ({bytes(block[:8]).hex(' ')} ...)"
            # In fsdp on CPUs, the exchanges of parameters use the same connections.
            mixed = f"Or another rank exchanges tensors, while this rank called another exchange ({call}). {SAME_CALLS}"
            raise self.untrusted_error(rank, what, mixed)
        if not self._is_tag(block[_HEAD - _TAG : _HEAD], self._head_tag(block, size if size <= SHORT else 0)):
            raise self.untrusted_error(rank, "a message that was not signed with this run's key")
        if sender != rank or number_of_call >= len(CALLS):
            raise self.untrusted_error(rank, f"a message of rank {sender}")
        if number != self._number or CALLS[number_of_call] != call:
            raise self._out_of_step(rank, CALLS[number_of_call], number, call)
        if size > self._largest:
            raise self.untrusted_error(rank, f"a message larger than this machine's memory ({size} bytes)")
        tag = bytes(block[_FIELDS.size : _FIELDS.size + _TAG])
        body = block[_HEAD : _HEAD + size] if size <= SHORT else None
        return Message(rank=rank, call=call, form=form, size=size, tag=tag, body=body)

    def check_body(self, message: Message, block: memoryview, body: memoryview) -> None:
        """Verify that the body of a second exchange is the one that the message announced."""
        if not self._is_tag(message.tag, self._body_tag(block[: _FIELDS.size], body)):
            raise self.untrusted_error(message.rank, "data that was not signed with this run's key")

    def next(self) -> None:
        """Count an exchange: the messages of all ranks have arrived."""
        self._number += 1

    def _head_tag(self, block: memoryview, size: int) -> bytes:
        if self.key is None:
            return bytes(_TAG)
        # 'h' and 'b' prevent that a body's tag is used as a head's.
        return hmac.digest(self.key, b"h" + block[: _HEAD - _TAG] + block[_HEAD : _HEAD + size], "sha256")

    def _body_tag(self, fields: bytes | memoryview, body: bytes | bytearray | memoryview) -> bytes:
        if self.key is None:
            return bytes(_TAG)
        mac = hmac.new(self.key, b"b", "sha256")
        mac.update(fields)
        mac.update(body)
        return mac.digest()

    def _is_tag(self, tag: bytes | memoryview, expected: bytes) -> bool:
        return self.key is None or hmac.compare_digest(bytes(tag), expected)

    def _out_of_step(self, rank: int, theirs: str, number: int, mine: str) -> Exception:
        return ValueError(
            f"ranks called different exchanges (rank {self._rank}: exchange {self._number + 1} was {mine}; rank "
            f"{rank}: exchange {number + 1} was {theirs}). {SAME_CALLS}"
        )

    def untrusted_error(self, rank: int, what: str, or_else: str = "") -> ConnectionError:
        """Return the error for bytes that rank ``rank`` did not send; ``or_else`` is another possible cause."""
        also = "" if self.key is None else f", or {KEY_VARIABLE} is not the same on all hosts"
        other_cause = f" {or_else}" if or_else else ""
        return ConnectionError(
            f"rank {self._rank} of {self._world_size} got {what} instead of a valid message from rank {rank}. Another "
            f"program has connected to this run, or the data was damaged{also}. The data was not used. See "
            f"SECURITY.md.{other_cause}"
        )


def _gathered(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return every rank's bytes, all of the same length."""
    rows = torch.empty(dist.get_world_size(), len(data), dtype=torch.uint8, device="cpu")
    dist.all_gather(list(rows), torch.frombuffer(bytearray(data), dtype=torch.uint8), group=group)
    return [row.numpy().tobytes() for row in rows]
