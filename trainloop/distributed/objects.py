"""Exchange bytes, objects and ints between ranks, over the CPU."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from trainloop._support.user_line import warn
from trainloop.distributed.peers import only_trusted_peers
from trainloop.distributed.ranks import (
    exchanges_nothing,
    get_world_size,
    has_group,
    outside_of_graphs,
    refuse_on_one_rank,
)
from trainloop.distributed.wire import BLOCK, SHORT, Form, Message, Session, decoded, encoded
from trainloop.errors import ConfigurationError

T = TypeVar("T")

# Keyed weakly by the default group: after destroy_process_group(), a new default group gets a new entry.
_gloo_beside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()


def backend_of(device_type: str) -> str | None:
    """Return the default group's backend for tensors on this type of device; None if the group has no such backend."""
    # 'cpu:gloo,cuda:nccl'
    config = dist.get_backend_config(None)
    return dict(entry.split(":", 1) for entry in config.split(",")).get(device_type)


def cpu_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks for CPU tensors (None: the default group); the first call may be collective."""
    if backend_of("cpu") is not None:
        return None
    default = dist.group.WORLD
    group = _gloo_beside.get(default)
    if group is None:
        with only_trusted_peers():
            group = _gloo_beside[default] = dist.new_group(backend="gloo")
    return group


def session_here() -> Session:
    """Return the default group's session; the first call is collective."""
    refuse_on_one_rank("a function that exchanges values between ranks")
    default = dist.group.WORLD
    session = _sessions.get(default)
    if session is None:
        session = _sessions[default] = Session(cpu_group())
    return session


def reaches_others(call: str) -> bool:
    """Return :func:`has_group`; if torchrun's processes have no group yet, warn that the call does not reach them."""
    if has_group():
        return True
    if not exchanges_nothing() and os.environ.get("RANK") and os.environ.get("WORLD_SIZE", "1") != "1":
        warn(
            f"{call}() did not wait for the other processes of torchrun, nor exchange values with them, because there "
            "is no process group yet. Call torch.distributed.init_process_group() before it; fit then uses this group.",
            UserWarning,
        )
    return False


def _gather_bytes(
    call: str, form: int, body: bytes | bytearray, dst: int | None = None
) -> list[tuple[Message, memoryview | None]]:
    """Return every rank's message once all ranks have called this function, which therefore acts as a barrier.

    With ``dst``, only rank ``dst`` gets bodies that need a second exchange; on other ranks these bodies are None.
    """
    world_size, group, session = dist.get_world_size(), cpu_group(), session_here()
    receives = dst is None or dist.get_rank() == dst
    first = session.pack(call, form, body)
    firsts = torch.empty(world_size, BLOCK, dtype=torch.uint8, device="cpu")
    dist.all_gather(list(firsts), torch.frombuffer(first, dtype=torch.uint8), group=group)
    blocks = [row.numpy().data for row in firsts]
    messages = [session.unpack(rank, block, call) for rank, block in enumerate(blocks)]
    # Gloo gathers equal lengths only.
    longest = max(0 if message.body is not None else message.size for message in messages)
    bodies = list(torch.empty(world_size if longest and receives else 0, longest, dtype=torch.uint8, device="cpu"))
    if longest:  # the same on every rank
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if len(body) > SHORT:
            mine.numpy()[: len(body)] = np.frombuffer(body, dtype=np.uint8)
        if dst is None:
            dist.all_gather(bodies, mine, group=group)
        else:
            dist.gather(mine, bodies or None, dst=dst, group=group)
    gathered = []
    for rank, message in enumerate(messages):
        content = message.body
        if content is None and receives:
            content = bodies[rank].numpy().data[: message.size]
            session.check_body(message, blocks[rank], content)
        gathered.append((message, content))
    session.next()
    return gathered


def gather_object(obj: T) -> list[T]:
    """Return every rank's object, on every rank.

    Collective: every rank calls it.

    Parameters
    ----------
    obj : object
        Plain data: ``None``, numbers, strings, bytes, arrays, tensors, and lists, tuples, named tuples, sets and dicts
        of these. If the run has a key (see Notes), any picklable object. The objects of ranks may differ in type and
        size.

    Returns
    -------
    list
        Entry r is the object of rank r. The entry of the calling rank is ``obj`` itself; the others are copies.

    Raises
    ------
    UnpicklableError
        On every rank, if the object of any rank can't be sent.
    ConnectionError
        If a message was not sent by a rank of this run.

    Notes
    -----
    With a key, objects are pickled, and a pickle is read only if it is signed with the run's key. Ranks of one user on
    one host always have a key; ranks on several hosts have one if ``TRAINLOOP_KEY`` is set. Without a key, plain data
    is sent in the form that ``torch.load(weights_only=True)`` reads. See ``SECURITY.md``.

    A call takes one exchange for objects of up to 1 KiB, otherwise two. Every rank needs memory for the encoded objects
    of all ranks, each padded to the length of the longest one.
    """
    gathered = _gather_objects("gather_object", obj)
    assert gathered is not None
    return gathered


@outside_of_graphs
def broadcast_object(obj: T, src: int = 0) -> T:
    """Return the object of rank ``src`` on every rank.

    Collective: every rank calls it.

    Parameters
    ----------
    obj : object
        Object to send from rank ``src``, as in :func:`gather_object`; ignored on other ranks.
    src : int
        Global rank of the sender.

    Returns
    -------
    object
        ``obj`` itself on rank ``src``, a copy on the others.

    Raises
    ------
    ConfigurationError
        On every rank, if there is no rank ``src``.
    UnpicklableError
        On every rank, if the object can't be sent.
    ConnectionError
        If the message was not sent by rank ``src`` of this run.
    """
    world_size = get_world_size()
    if not 0 <= src < world_size:
        raise ConfigurationError(f"broadcast_object: src={src!r}: must be a rank from 0 to {world_size - 1}.")
    if not reaches_others("broadcast_object"):
        return obj
    group, session, sends = cpu_group(), session_here(), dist.get_rank() == src
    form, mine = encoded(obj, session) if sends else (Form.RAW, bytearray())
    block = session.pack("broadcast_object", form, mine) if sends else bytearray(BLOCK)
    dist.broadcast(torch.frombuffer(block, dtype=torch.uint8), src, group=group)
    message = session.unpack(src, memoryview(block), "broadcast_object")
    body = message.body
    if body is None:
        buffer = bytearray(mine) if sends else bytearray(message.size)
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src, group=group)
        body = memoryview(buffer)
        session.check_body(message, memoryview(block), body)
    session.next()
    return obj if sends and form != Form.REFUSED else decoded(message, body, session)


def gather_to(obj: T, dst: int = 0) -> list[T] | None:
    """Return the objects of all ranks, on one rank only. Use it for large objects.

    Collective: every rank calls it.

    Parameters
    ----------
    obj : object
        As in :func:`gather_object`.
    dst : int
        The rank that receives the objects.

    Returns
    -------
    list or None
        On rank ``dst``, a list whose entry r is the object of rank r; on other ranks ``None``.

    Raises
    ------
    ConfigurationError, UnpicklableError, ConnectionError
        As in :func:`broadcast_object`.
    """
    world_size = get_world_size()
    if not 0 <= dst < world_size:
        raise ConfigurationError(f"gather_to: dst={dst!r}: must be a rank from 0 to {world_size - 1}.")
    return _gather_objects("gather_to", obj, dst)


@outside_of_graphs
def _gather_objects(call: str, obj: T, dst: int | None = None) -> list[T] | None:
    """Return every rank's object, on every rank or, with ``dst``, only on that rank."""
    if not reaches_others(call):
        return [obj]
    session, me = session_here(), dist.get_rank()
    gathered = _gather_bytes(call, *encoded(obj, session), dst)
    for message, body in gathered:
        if message.form == Form.REFUSED:  # an error of any rank is raised on all ranks
            decoded(message, body, session)
    if dst not in (None, me):
        return None
    return [obj if rank == me else decoded(*entry, session) for rank, entry in enumerate(gathered)]


@outside_of_graphs
def exchange_ints(values: Sequence[int], purpose: str = "exchange_ints") -> list[list[int]]:
    """Return the integers of all ranks, on every rank. This is the cheapest exchange.

    Collective: every rank calls it.

    Parameters
    ----------
    values : sequence of int
        Integers of at most 64 bits. Ranks may pass different numbers of integers.
    purpose : str
        For the package's own exchanges: ranks that exchange for different purposes get an error that names both.

    Returns
    -------
    list of list of int
        Entry r has the values of rank r.

    Raises
    ------
    TypeError
        If a value is no integer.

    Notes
    -----
    A call takes one exchange over Gloo for up to 128 integers, otherwise two.
    """
    integers = [*map(operator.index, values)]  # int() would round
    if not has_group():
        return [integers]
    data = np.asarray(integers, dtype=np.int64).tobytes()
    gathered = _gather_bytes(purpose, Form.RAW, data)
    return [np.frombuffer(body, np.int64).tolist() if body else [] for _, body in gathered]


def names_that_differ(mine: Mapping[str, int]) -> list[str]:
    """Return the names, of all ranks, that have different numbers on ranks, or none on some. Collective."""
    everyone = gather_object(dict(mine))
    known = dict.fromkeys(name for one in everyone for name in one)
    return [name for name in known if len({one.get(name) for one in everyone}) > 1]


@outside_of_graphs
def barrier() -> None:
    """Wait until every rank has called this function.

    Collective: every rank calls it. Only the processes wait for each other; work that is queued on GPUs may still be
    running. Without a process group it returns at once, with a warning if torchrun has started several processes:
    before ``fit`` there is no group, unless the script calls ``torch.distributed.init_process_group``.
    """
    if reaches_others("barrier"):
        _gather_bytes("barrier", Form.RAW, b"")
