"""A checkpoint whose tensors were spread over ranks: a folder that each rank writes its part of.

::

    checkpoint-epoch=0003-step=00000120/
        __0_0.distcp, __1_0.distcp    what torch.distributed.checkpoint writes, a file a rank
        .metadata                     its table of them, for torch's own readers; a pickle, and so never read here
        state.pt                      a checkpoint as of one process, in which each of these tensors is a reference; and
                                      which bytes of which file are which part of it, with the files' checksums

``state.pt`` comes last, into a folder of a temporary name that then gets its own: what has the name is whole. Reading
needs no process group, and no more of the tensors than are asked for.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainloop import distributed
from trainloop.checkpoint.storage import sync_directory, temporary_name
from trainloop.distributed.objects import cpu_group
from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.parallel.shards import is_sharded, map_items, shard_like, spread_like, with_items

__all__ = [
    "STATE",
    "StoredTensor",
    "check_offered",
    "fitted",
    "load_model",
    "narrowed",
    "new_folder",
    "parts_of",
    "publish",
    "remove_folder",
    "stored_tensors",
    "take_shards",
    "verify_files",
    "whole_of",
    "write_folder",
]

STATE = "state.pt"
_MARK = "trainloop.shard"
_OWN = re.compile(r"__\d+_\d+\.distcp")
_CHUNK = 4 << 20

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a tensor begins in each dimension, and how long it is."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies in the files of a checkpoint."""

    folder: str
    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[tuple[str, int, int, tuple[int, ...], tuple[int, ...]], ...]
    """For each part: file, place and length in it; where it begins in each dimension, and how long it is."""


# -- writing -----------------------------------------------------------------------------------------------------------


def take_shards(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """A state with references in the place of its sharded tensors, and these by the names that the references have."""
    shards: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            if not is_sharded(value):
                return value
            shards[path] = value.detach()
            return {_MARK: path}
        return map_items(value, lambda key, item: walk(item, f"{path}.{key}" if path else str(key)))

    return walk(state, ""), shards


def check_offered(location: str, **given: bool) -> None:
    """Refuse what a checkpoint of many ranks' parts can't be.

    Raises
    ------
    ConfigurationError
        Saying what to do instead.
    """
    instead = {
        "async_save": "Each rank writes its part only: leave it out",
        "safetensors": "Make the file afterwards: python -m trainloop checkpoint export FOLDER model.safetensors",
    }
    for name, value in given.items():
        if value:
            raise ConfigurationError(
                f"ModelCheckpoint({name}=True) with gpu_mode='fsdp': not offered. {instead[name]}."
            )
    if "://" in location:
        raise ConfigurationError(
            f"ModelCheckpoint({location!r}) with gpu_mode='fsdp': all ranks write into one folder, which must be "
            "on a disk that they share. Give a path."
        )


def write_folder(
    where: str, name: str, run: str, state: Any, write_as: Callable[[Callable[[str, Any], None]], None]
) -> Exception | None:
    """A state with sharded tensors, into a folder that gets its name when it is whole. Collective.

    Parameters
    ----------
    where, name, run : str
        As in :func:`new_folder`.
    state : dict
        Rank 0's state is written; of the others only their shards.
    write_as : callable
        On rank 0 it calls its argument with the folder's name and a ``CheckpointInfo``.

    Returns
    -------
    Exception or None
        The error; nothing is left of the folder then.
    """
    from trainloop.checkpoint.file import save  # it reads folders by means of this module

    state, shards = take_shards(state)
    folder, problem, table = "", None, None
    if distributed.is_global_zero():
        try:
            folder = new_folder(where, name, run)
        except OSError as error:
            problem = error
    folder = distributed.broadcast_object(folder)
    if not folder:
        return problem

    def put(name: str, info: Any) -> None:
        assert table is not None
        missing = set(table["files"]).difference(os.listdir(folder))
        if missing:  # a disk that ranks don't share, or somebody who cleans up
            raise OSError(
                f"{', '.join(sorted(missing))} of {folder}, which a rank has written, can't be seen by rank 0"
            )
        save(os.path.join(folder, STATE), {**state, "shards": table}, info)
        publish(folder, os.path.join(where, name))

    try:
        table = write_shards(folder, shards)
        if table is not None:
            write_as(put)
    except Exception as error:  # a full disk, or a state that can't be written
        if distributed.is_global_zero():
            shutil.rmtree(folder, ignore_errors=True)
        return error
    return None


def write_shards(path: str, shards: dict[str, Tensor]) -> dict[str, Any] | None:
    """Each rank's part of the tensors into files of its own, on the disk when this returns. Collective.

    Parameters
    ----------
    path : str
        Path of an existing folder.
    shards : dict
        With the same names on all ranks.

    Returns
    -------
    dict or None
        On rank 0 the table that belongs into the state, ``None`` on the others.

    Raises
    ------
    OSError
        On every rank, where one could not write.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    problem = ""
    files: dict[str, tuple[int, int]] = {}
    metadata: Any = None
    try:
        # One file a rank: its checksum is taken as soon as it is there.
        writer = FileSystemWriter(path, single_file_per_rank=True, sync_files=True)
        metadata = dcp.save(shards, storage_writer=writer, process_group=cpu_group())
        own = f"__{distributed.get_rank()}_"
        for name in sorted(os.listdir(path)):
            if name.startswith(own):
                files[name] = _size_and_checksum(os.path.join(path, name))
    except Exception as error:  # DCP wraps what a rank raised
        problem = f"{type(error).__name__}: {error}"
    gathered = distributed.gather_object((files, problem))
    problems = [text for _, text in gathered if text]
    if problems:
        raise OSError(problems[0])
    if distributed.get_rank():
        return None
    everything = {name: list(entry) for theirs, _ in gathered for name, entry in theirs.items()}
    return {"files": everything, "tensors": _table(metadata)}


def _table(metadata: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        name: {"shape": list(one.size), "dtype": one.properties.dtype, "parts": []}
        for name, one in metadata.state_dict_metadata.items()
    }
    for index, place in metadata.storage_data.items():
        chunks = metadata.state_dict_metadata[index.fqn].chunks
        chunk = next(c for c in chunks if index.offset is None or c.offsets == index.offset)
        part = [place.relative_path, place.offset, place.length, list(chunk.offsets), list(chunk.sizes)]
        tensors[index.fqn]["parts"].append(part)
    return tensors


def _size_and_checksum(path: str) -> tuple[int, int]:
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return size, crc


# -- reading -----------------------------------------------------------------------------------------------------------


def stored_tensors(state: dict[str, Any], path: str) -> dict[str, Any]:
    """The content of a ``state.pt`` with a :class:`StoredTensor` in the place of each reference."""
    table = state["shards"]["tensors"]

    def walk(value: Any) -> Any:
        if isinstance(value, dict) and _MARK in value:
            return _stored(table[value[_MARK]], path)
        return map_items(value, lambda _, item: walk(item))

    return {key: walk(item) for key, item in state.items() if key != "shards"}


def _stored(entry: dict[str, Any], path: str) -> StoredTensor:
    parts = tuple((name, at, n, tuple(offsets), tuple(sizes)) for name, at, n, offsets, sizes in entry["parts"])
    return StoredTensor(path, torch.Size(entry["shape"]), entry["dtype"], parts)


def verify_files(path: str, state: dict[str, Any]) -> None:
    """That all files are there, whole, with the checksums that they were written with.

    Raises
    ------
    CheckpointError
        Naming one that is not.
    """
    for name, (size, crc) in state["shards"]["files"].items():
        full = os.path.join(path, name)
        try:
            found = _size_and_checksum(full)
        except OSError as error:
            raise CheckpointError(f"{full}: {error.strerror}. Use another checkpoint.") from error
        if found != (size, crc):
            raise CheckpointError(
                f"{full} is damaged: it has {found[0]} bytes with the checksum {found[1]:08x}, written were {size} "
                f"with {crc:08x}. Use another checkpoint."
            )


def whole_of(value: Any) -> Any:
    """A state with each :class:`StoredTensor` in it read as a whole, on the CPU."""
    if isinstance(value, StoredTensor):
        full = torch.empty(value.shape, dtype=value.dtype)
        for (offsets, sizes), part in parts_of(value):
            narrowed(full, offsets, sizes).copy_(part)
        return full
    return map_items(value, lambda _, item: whole_of(item))


def part_of(stored: StoredTensor, like: Any) -> Any:
    """A tensor spread as ``like`` is, of which only the parts are read that this rank needs. No exchange."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # public in no version to 2.13

    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    mine = torch.empty(sizes, dtype=stored.dtype)
    if mine.numel():
        wanted = (tuple(offsets), tuple(sizes))
        for (begin, length), part in parts_of(stored, wanted):
            common = _overlap(wanted, (begin, length))
            assert common is not None
            source = narrowed(part, [c - b for c, b in zip(common[0], begin)], common[1])
            narrowed(mine, [c - o for c, o in zip(common[0], offsets)], common[1]).copy_(source)
    return spread_like(mine.to(like.to_local().device), like, stored.shape)


def parts_of(stored: StoredTensor, wanted: Box | None = None) -> Iterator[tuple[Box, Tensor]]:
    """The parts of a tensor, one after the other, with their places in it; only those that overlap what is wanted."""
    for name, at, length, offsets, sizes in stored.parts:
        if wanted is not None and _overlap(wanted, (offsets, sizes)) is None:
            continue
        with open(os.path.join(stored.folder, name), "rb") as file:
            file.seek(at)
            data = io.BytesIO(file.read(length))
        yield (offsets, sizes), torch.load(data, map_location="cpu", weights_only=True)


def _overlap(one: Box, other: Box) -> Box | None:
    begins, lengths = [], []
    for begin, length, begin2, length2 in zip(*one, *other, strict=True):
        first, last = max(begin, begin2), min(begin + length, begin2 + length2)
        if first >= last:
            return None
        begins.append(first)
        lengths.append(last - first)
    return tuple(begins), tuple(lengths)


def narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The box of a tensor that begins there and is so long, sharing its memory."""
    for dim, (begin, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


def fitted(value: Any, like: Any) -> Any:
    """A tensor of a checkpoint as one in memory is spread: this rank's part where that is sharded."""
    if isinstance(value, StoredTensor):
        return part_of(value, like) if is_sharded(like) else whole_of(value)
    return shard_like(value, like) if isinstance(value, Tensor) and is_sharded(like) else value


def load_model(model: nn.Module, state: dict[str, Any]) -> None:
    """A checkpoint's weights into a model, spread as its own are."""
    own = model.state_dict()
    model.load_state_dict(with_items(state, {name: fitted(value, own.get(name)) for name, value in state.items()}))


# -- folders -----------------------------------------------------------------------------------------------------------


def new_folder(where: str, name: str, run: str) -> str:
    """Make a folder of a temporary name, which a resumed ``run`` finds and removes where this one is killed."""
    os.makedirs(where, exist_ok=True)
    path = os.path.join(where, temporary_name(name, run))
    os.mkdir(path)
    return path


def publish(temporary: str, path: str) -> None:
    """Give a folder that is whole its name, in the place of one that may have it."""
    # What was written into it must be there before its name says so.
    sync_directory(temporary)
    if os.path.isdir(path):
        remove_folder(path)
    os.rename(temporary, path)
    sync_directory(os.path.dirname(path))


def remove_folder(path: str) -> None:
    """Delete a checkpoint, which is none any more from the first moment on; what is not its own stays."""
    # state.pt first: without it nothing takes the rest for a checkpoint.
    for name in sorted(os.listdir(path), key=lambda name: name != STATE):
        if name in (STATE, ".metadata") or _OWN.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))
    with contextlib.suppress(OSError):
        os.rmdir(path)
