"""Write a checkpoint whose tensors are sharded over ranks: each rank writes its part, in parallel, without exchanges.

The folder's layout is in :mod:`~trainloop.checkpoint.sharded`. Ranks communicate through the folder itself: each rank
writes a report when its part is written, and rank 0 reads the reports. So threads can write checkpoints during a
training without interfering with its exchanges.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from trainloop import distributed
from trainloop.checkpoint.file import save
from trainloop.checkpoint.plain import plain
from trainloop.checkpoint.sharded import MARK, STATE, new_folder, publish, size_and_checksum
from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.parallel.sharded.shards import (
    ShardSlice,
    is_first_replica,
    is_sharded,
    local_shard,
    map_items,
    slice_of,
    unlike_on_ranks,
    without_terms,
)

_REPORTED = ".reported-by-{}"
_FAILED = ".failed-by-{}-"  # followed by the reason: a full disk still has room for file names, but not for content
_MAX_REASON = 180  # bytes; a name may have 255


def check_offered(location: str, *, safetensors: bool) -> None:
    """Raise an error if sharded checkpoints don't support an option or the folder.

    Raises
    ------
    ConfigurationError
        If the option or the folder is not supported. The error names an alternative.
    """
    if safetensors:
        raise ConfigurationError(
            "ModelCheckpoint(safetensors=True) with gpu_mode='fsdp' is not supported. Write the file afterwards: "
            "python -m trainloop checkpoint export FOLDER model.safetensors."
        )
    if "://" in location:
        raise ConfigurationError(
            f"ModelCheckpoint({location!r}) with gpu_mode='fsdp': all ranks write into one folder, which must be on a "
            "disk that they share. Pass its path."
        )


class FolderWriting:
    """Write a state with sharded tensors into a folder, which is renamed when it is complete.

    All ranks construct the object together, and then each calls :meth:`write`. That method communicates only through
    the folder, so it can run in a thread during a training.

    Parameters
    ----------
    where, name, run : str
        As in :func:`new_folder`.
    state : dict
        State to write. On ranks other than 0, only its shards are used.
    write_as : callable
        Function that rank 0 calls once all parts are written. Its argument is a function of the folder's final name and
        a ``CheckpointInfo``, which completes the folder.
    copy : callable, optional
        Function that copies nested tensors and plain values. Needed if the state may change before :meth:`write` ends.
    wait_s : float
        Seconds that rank 0 waits for the part of another rank.
    """

    def __init__(
        self,
        where: str,
        name: str,
        run: str,
        state: Any,
        write_as: Callable[[Callable[[str, Any], None]], None],
        *,
        copy: Callable[[Any], Any] | None = None,
        wait_s: float = 1800.0,
    ) -> None:
        self._where, self._write_as, self._wait_s = where, write_as, wait_s
        self._rank, self._world_size = distributed.get_rank(), distributed.get_world_size()
        self._given_up = threading.Event()
        self._problem: Exception | None = None
        self._state, self._shards = take_shards(state)
        unlike = about_unlike_shards(self._shards)
        if not unlike:
            self._shards = {name: without_terms(shard) for name, shard in self._shards.items()}
        parts = {name: local_shard(shard) for name, shard in self._shards.items() if is_first_replica(shard)}
        self._parts = {name: part for name, part in parts.items() if part.numel()}
        folder = ""
        if distributed.is_global_zero():
            try:
                folder = new_folder(where, name, run)
            except OSError as error:
                self._problem = error
        self._folder = distributed.broadcast_object(folder)
        seen = distributed.exchange_ints([int(bool(self._folder) and _folder_exists(self._folder))])
        blind = [rank for rank, (sees,) in enumerate(seen) if not sees]
        if blind and self._folder:
            self._problem = OSError(
                f"{self._folder} can't be seen by rank {', '.join(map(str, blind))}: the folder must be on a disk that "
                "all ranks share"
            )
        if unlike:
            self._problem = CheckpointError(f"The checkpoint can't be written: {unlike}")
        if self._problem is not None:
            self._remove()
            self._folder = ""
        if copy is not None and self._folder:
            try:
                self._state, self._parts = copy([self._state if self._rank == 0 else None, self._parts])
            except BaseException:  # such as a state that can't be written
                self._remove()
                raise

    def write(self) -> Exception | None:
        """Write this rank's part to the disk. Rank 0 then waits for all parts and renames the folder.

        Returns
        -------
        Exception or None
            On rank 0, the error of any rank; None if all parts were written. After an error, the folder is removed.
        """
        if not self._folder:
            return self._problem
        error: Exception | None = None
        report: dict[str, Any] = {}
        try:
            slices = {name: slice_of(self._shards[name]) for name in self._parts}
            report = _write_parts(self._folder, self._parts, slices, self._rank)
        except Exception as problem:  # such as a full disk
            error = problem
        if self._rank:
            _report_to_rank_zero(self._folder, self._rank, report, error)
            return None
        try:
            if error is not None:
                raise error
            self._publish(report)
        except Exception as problem:  # such as a state that can't be written
            self._remove()
            return problem
        return None

    def give_up(self) -> None:
        """Make rank 0 stop waiting for ranks that may have ended."""
        self._given_up.set()

    def _remove(self) -> None:
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _publish(self, mine: dict[str, Any]) -> None:
        everyone = [mine, *(self._wait_for(rank) for rank in range(1, self._world_size))]
        table: dict[str, dict[str, Any]] = {"files": {}, "tensors": {}}
        for name, shard in self._shards.items():
            parts = [report["parts"][name] for report in everyone if name in report["parts"]]
            table["tensors"][name] = {"shape": list(shard.shape), "dtype": shard.dtype, "parts": parts}
        for report in everyone:
            table["files"].update(report["files"])
        _write_metadata(self._folder, table["tensors"])

        def put(name: str, info: Any) -> None:
            missing = set(table["files"]).difference(os.listdir(self._folder))
            if missing:  # for example, another process has deleted files
                raise OSError(
                    f"rank 0 can't see {', '.join(sorted(missing))} in {self._folder}, although other ranks wrote them"
                )
            save(os.path.join(self._folder, STATE), {**self._state, "shards": table}, info)
            publish(self._folder, os.path.join(self._where, name))

        self._write_as(put)

    def _wait_for(self, rank: int) -> dict[str, Any]:
        reported_by, failed_by = _REPORTED.format(rank), _FAILED.format(rank)
        deadline = time.monotonic() + self._wait_s
        while reported_by not in (names := os.listdir(self._folder)):
            for name in names:
                if name.startswith(failed_by):
                    raise OSError(f"rank {rank}: {unquote(name.removeprefix(failed_by))}")
            if self._given_up.wait(0.005):
                raise OSError(f"rank {rank} has not written its part of {self._folder}")
            if time.monotonic() > deadline:
                raise OSError(f"rank {rank} has not written its part of {self._folder} within {self._wait_s:g} s")
        path = os.path.join(self._folder, reported_by)
        with open(path) as file:
            report: dict[str, Any] = json.load(file)
        os.unlink(path)
        return report


def _report_to_rank_zero(folder: str, rank: int, report: dict[str, Any], error: Exception | None) -> None:
    """Write this rank's report or error for rank 0, atomically."""
    path = os.path.join(folder, _REPORTED.format(rank))
    if error is None:
        try:
            with open(f"{path}.new", "w") as file:
                json.dump(report, file)
            os.rename(f"{path}.new", path)
            return
        except OSError as problem:
            error = problem
    with contextlib.suppress(OSError):  # rank 0 may have given up and removed the folder
        reason = quote(f"{type(error).__name__}: {error}", safe=" :'")[:_MAX_REASON]
        with open(os.path.join(folder, _FAILED.format(rank) + reason), "w"):
            pass


def _folder_exists(folder: str) -> bool:
    with contextlib.suppress(OSError):
        os.listdir(os.path.dirname(folder))  # makes a network file system refresh its cache
    return os.path.isdir(folder)


def _write_parts(folder: str, tensors: dict[str, Tensor], slices: dict[str, ShardSlice], rank: int) -> dict[str, Any]:
    """Write this rank's parts of tensors into one file, in the format of torch's distributed checkpoint.

    Returns
    -------
    dict
        Report for rank 0, in JSON types: size and checksum of the file, and the location of each part by its tensor's
        name.
    """
    if not tensors:
        return {"files": {}, "parts": {}}
    name = f"__{rank}_0.distcp"
    path = os.path.join(folder, name)
    parts = {}
    with open(path, "wb") as file:
        for tensor_name, part in tensors.items():
            begin = file.tell()
            torch.save(plain(part.cpu()), file)
            parts[tensor_name] = [name, begin, file.tell() - begin, *map(list, slices[tensor_name])]
        file.flush()
        os.fsync(file.fileno())
    return {"files": {name: size_and_checksum(path)}, "parts": parts}


def _write_metadata(folder: str, tensors: dict[str, Any]) -> None:
    """Write the table that torch's own readers need."""
    # The classes of the table's entries are private in all versions up to 2.13.
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    described: dict[str, Any] = {}
    results = []
    for name, entry in tensors.items():
        chunks = []
        for path, position, length, offsets, sizes in entry["parts"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            index = MetadataIndex(name, torch.Size(offsets))
            results.append(WriteResult(index, length, _StorageInfo(path, position, length)))
        properties = TensorProperties(dtype=entry["dtype"])
        described[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
    names = {name: (name,) for name in tensors}
    writer = FileSystemWriter(folder, sync_files=True)
    writer.finish(Metadata(described, planner_data=names), [results])


def about_unlike_shards(shards: Mapping[str, Tensor]) -> str:
    """Return an explanation if ranks have shards of other tensors in a state, otherwise ``''``. Collective."""
    names = unlike_on_ranks({name: [shard] for name, shard in shards.items()})
    if not names:
        return ""
    return (
        f"gpu_mode='fsdp': {', '.join(names[:3])} of the state is a sharded tensor on some ranks only, so parts of it "
        "are missing. A callback's state_dict() has to return the same tensors on every rank."
    )


def take_shards(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Replace the sharded tensors in a state with references. Return the state, and the tensors by name."""
    shards: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            if not is_sharded(value):
                return value
            while path in shards:  # as with the keys 1 and '1' in one dict
                path += "'"
            shards[path] = value.detach()
            return {MARK: path}
        return map_items(value, lambda key, item: walk(item, f"{path}.{key}" if path else str(key)))

    return walk(state, ""), shards
