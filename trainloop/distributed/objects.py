"""Bytes, objects and ints of all ranks, over the CPU."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from trainloop.distributed.ranks import get_world_size, has_group
from trainloop.errors import ConfigurationError, UnpicklableError

T = TypeVar("T")

# Held weakly by the default group: destroy_process_group() and a new start make a new one.
_gloo_beside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def backend_of(device_type: str) -> str | None:
    """Name of the default group's backend for tensors on such a device, None if it has none."""
    # 'cpu:gloo,cuda:nccl'
    config = dist.get_backend_config(None)
    return dict(entry.split(":", 1) for entry in config.split(",")).get(device_type)


def cpu_group() -> dist.ProcessGroup | None:
    """Group for CPU tensors over all ranks (None is the default group); the first call may be collective."""
    if backend_of("cpu") is not None:
        return None
    default = dist.group.WORLD
    group = _gloo_beside.get(default)
    if group is None:
        group = _gloo_beside[default] = dist.new_group(backend="gloo")
    return group


# Objects up to this many bytes need one exchange instead of two: it covers the ints of a training step and the
# description of most nested values. A latency matter only, so any figure is right.
_FIRST_BYTES = 1024


def _gather_bytes(data: bytes) -> list[bytes]:
    """Bytes of every rank, on every rank. Returns once all ranks have called it, hence also a barrier."""
    world_size, group = dist.get_world_size(), cpu_group()
    first = np.zeros(8 + _FIRST_BYTES, dtype=np.uint8)
    first[:8] = np.frombuffer(len(data).to_bytes(8, "little"), dtype=np.uint8)
    first[8 : 8 + len(data)] = np.frombuffer(data[:_FIRST_BYTES], dtype=np.uint8)
    firsts = torch.empty(world_size, first.size, dtype=torch.uint8)
    dist.all_gather(list(firsts), torch.from_numpy(first), group=group)
    sizes = [int.from_bytes(bytes(row[:8].tolist()), "little") for row in firsts]
    gathered = [row[8 : 8 + size].numpy().tobytes() for row, size in zip(firsts, sizes, strict=True)]
    rest_size = max(sizes) - _FIRST_BYTES
    if rest_size > 0:  # the same on every rank
        rest = torch.zeros(rest_size, dtype=torch.uint8)
        tail = np.frombuffer(data[_FIRST_BYTES:], dtype=np.uint8)
        rest.numpy()[: tail.size] = tail
        rests = torch.empty(world_size, rest_size, dtype=torch.uint8)
        dist.all_gather(list(rests), rest, group=group)
        gathered = [
            head + row[: max(size - _FIRST_BYTES, 0)].numpy().tobytes()
            for head, row, size in zip(gathered, rests, sizes, strict=True)
        ]
    return gathered


def _pickled(obj: object) -> bytes:
    """The object's pickle after a 0, or after a 1 the reason why there is none; never raises.

    A rank that raised here would leave the others waiting in the exchange, so the reason travels instead.
    """
    try:
        return b"\0" + pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as e:
        return b"\1" + f"{type(obj).__name__}: {type(e).__name__}: {e}".encode()


def _unpickled(data: bytes, rank: int, function: str) -> Any:
    if data[:1] == b"\1":
        raise UnpicklableError(
            f"{function}: the object of rank {rank} can't be pickled ({data[1:].decode()}). "
            "Exchange plain data (numbers, strings, tensors, dicts of these) instead."
        )
    return pickle.loads(data[1:])


def gather_object(obj: T) -> list[T]:
    """Every rank's object, on every rank.

    Collective: every rank calls it.

    Parameters
    ----------
    obj : object
        Anything that pickles; ranks' objects may differ in type and size.

    Returns
    -------
    list
        Entry r is rank r's object. This rank's own entry is ``obj`` itself, the others are copies.

    Raises
    ------
    UnpicklableError
        On every rank, where the object of any rank does not pickle.

    Notes
    -----
    One exchange for objects whose pickles are up to 1 KiB, else two. Every rank holds the pickles of all ranks at
    once, padded to the longest.
    """
    if not has_group():
        return [obj]
    gathered = _gather_bytes(_pickled(obj))
    objects = [_unpickled(data, rank, "gather_object") for rank, data in enumerate(gathered)]
    objects[dist.get_rank()] = obj
    return objects


def broadcast_object(obj: T, src: int = 0) -> T:
    """The object of one rank, on every rank.

    Collective: every rank calls it.

    Parameters
    ----------
    obj : object
        What rank ``src`` sends; ignored on the others. Anything that pickles.
    src : int
        Global rank of the sender.

    Returns
    -------
    object
        ``obj`` itself on rank ``src``, a copy elsewhere.

    Raises
    ------
    ConfigurationError
        On every rank, where there is no rank ``src``.
    UnpicklableError
        On every rank, where the object does not pickle.
    """
    world_size = get_world_size()
    if not 0 <= src < world_size:
        raise ConfigurationError(f"broadcast_object: src={src!r}: must be a rank, 0 to {world_size - 1}.")
    if not has_group():
        return obj
    group, sends = cpu_group(), dist.get_rank() == src
    data = _pickled(obj) if sends else b""
    size = torch.tensor([len(data)])
    dist.broadcast(size, src, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if sends:
        buffer.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    dist.broadcast(buffer, src, group=group)
    received = _unpickled(data if sends else buffer.numpy().tobytes(), src, "broadcast_object")
    return obj if sends else received


def exchange_ints(values: Sequence[int]) -> list[list[int]]:
    """Every rank's integers, on every rank: the cheapest exchange there is.

    Collective: every rank calls it.

    Parameters
    ----------
    values : sequence of int
        At most 64 bits each. Ranks may give different numbers of them.

    Returns
    -------
    list of list of int
        Entry r holds what rank r gave.

    Notes
    -----
    One exchange over Gloo for up to 128 integers, else two.
    """
    if not has_group():
        return [[int(value) for value in values]]
    data = np.asarray(values, dtype=np.int64).tobytes()
    return [np.frombuffer(gathered, dtype=np.int64).tolist() for gathered in _gather_bytes(data)]


def barrier() -> None:
    """Wait until every rank has called this.

    Collective: every rank calls it. Processes wait for each other, GPUs don't: work queued on them may still run.
    """
    if has_group():
        _gather_bytes(b"")
