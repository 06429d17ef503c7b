"""A checkpoint whose tensors are sharded over ranks: a folder into which each rank writes its part.

::

    checkpoint-epoch=0003-step=00000120/
        __0_0.distcp, __1_0.distcp    shards in the format of torch.distributed.checkpoint, one file per rank
        .metadata                     torch's table of these files, for its own readers; a pickle, so never read here
        state.pt                      a single-file checkpoint, with references in place of the sharded tensors; and a
                                      table with the file and bytes of each part, and the files' checksums

``state.pt`` is written last. The folder has a temporary name until then, so a folder with the final name is complete.
Reading needs no process group, and reads only the requested tensors.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainloop._support.user_line import described_names
from trainloop.checkpoint.storage import sync_directory, temporary_name
from trainloop.errors import CheckpointError
from trainloop.optim.parameters import parameters_beside
from trainloop.parallel.sharded.shards import (
    ShardSlice,
    is_sharded,
    map_items,
    shard_like,
    slice_of,
    spread_like,
    with_items,
)

STATE = "state.pt"
MARK = "trainloop.shard"
"""Key of a reference in ``state.pt``; its value is the tensor's name."""
_SHARD_FILE = re.compile(r"__\d+_\d+\.distcp")
_CHUNK = 4 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is still in the files of a sharded checkpoint, and has not been read."""

    folder: str
    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[tuple[str, int, int, tuple[int, ...], tuple[int, ...]], ...]
    """For each part: its file, position and length in the file, and its offsets and sizes in the tensor."""


# -- reading -----------------------------------------------------------------------------------------------------------


def stored_tensors(state: dict[str, Any], path: str) -> dict[str, Any]:
    """Replace each reference in the content of a ``state.pt`` with a :class:`StoredTensor`."""
    table = state["shards"]["tensors"]

    def walk(value: Any) -> Any:
        if isinstance(value, dict) and MARK in value:
            return _stored(table[value[MARK]], path)
        return map_items(value, lambda _, item: walk(item))

    return {key: walk(item) for key, item in state.items() if key != "shards"}


def _stored(entry: dict[str, Any], path: str) -> StoredTensor:
    parts = tuple((name, begin, n, tuple(offsets), tuple(sizes)) for name, begin, n, offsets, sizes in entry["parts"])
    return StoredTensor(path, torch.Size(entry["shape"]), entry["dtype"], parts)


def verify_files(path: str, state: dict[str, Any]) -> None:
    """Check that all files exist and have the sizes and checksums with which they were written.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged. The error names the file.
    """
    for name, (size, crc) in state["shards"]["files"].items():
        full = os.path.join(path, name)
        try:
            found = size_and_checksum(full)
        except OSError:
            found = 0, 0
        if found != (size, crc):
            raise CheckpointError(
                f"{full} is missing or damaged: it has {found[0]} bytes with the checksum {found[1]:08x}, but {size} "
                f"bytes with {crc:08x} were written. Use another checkpoint."
            )


def whole_of(value: Any) -> Any:
    """Replace each :class:`StoredTensor` in a state with the full tensor, read onto the CPU."""
    if isinstance(value, StoredTensor):
        full = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        for (offsets, sizes), part in parts_of(value):
            narrowed(full, offsets, sizes).copy_(part)
        return full
    return map_items(value, lambda _, item: whole_of(item))


def part_of(stored: StoredTensor, like: Any) -> Any:
    """Read this rank's shard of a stored tensor; return a tensor that is sharded like ``like``, without an exchange."""
    offsets, sizes = slice_of(like)
    shard = torch.empty(sizes, dtype=stored.dtype, device="cpu")
    if shard.numel():
        wanted = (offsets, sizes)
        for (begin, length), part in parts_of(stored, wanted):
            if type(part) is not Tensor and (tuple(begin), tuple(length)) == (tuple(offsets), tuple(sizes)):
                shard = part  # of a library's own type (torchao's), which a copy into a plain tensor would lose
                break
            common = _overlap(wanted, (begin, length))
            assert common is not None
            source = narrowed(part, [c - b for c, b in zip(common[0], begin)], common[1])
            narrowed(shard, [c - o for c, o in zip(common[0], offsets)], common[1]).copy_(source)
    return spread_like(shard.to(like.to_local().device), like, stored.shape)


def parts_of(stored: StoredTensor, wanted: ShardSlice | None = None) -> Iterator[tuple[ShardSlice, Tensor]]:
    """Yield the parts of a tensor that overlap the requested slice (default: all), with their offsets and sizes."""
    for name, position, length, offsets, sizes in stored.parts:
        if wanted is not None and _overlap(wanted, (offsets, sizes)) is None:
            continue
        with open(os.path.join(stored.folder, name), "rb") as file:
            file.seek(position)
            data = io.BytesIO(file.read(length))
        yield (offsets, sizes), torch.load(data, map_location="cpu", weights_only=True, mmap=False)


def _overlap(one: ShardSlice, other: ShardSlice) -> ShardSlice | None:
    begins, lengths = [], []
    for begin, length, begin2, length2 in zip(*one, *other, strict=True):
        first, last = max(begin, begin2), min(begin + length, begin2 + length2)
        if first >= last:
            return None
        begins.append(first)
        lengths.append(last - first)
    return tuple(begins), tuple(lengths)


def narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a view of a tensor: the slice that begins at ``offsets`` and has these sizes."""
    for dim, (begin, length) in enumerate(zip(offsets, sizes, strict=True)):
        if length != tensor.size(dim):
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def fitted(value: Any, like: Any) -> Any:
    """Return a checkpoint's tensor with the sharding of ``like``: this rank's shard, or the full tensor."""
    if isinstance(value, StoredTensor):
        return part_of(value, like) if is_sharded(like) else whole_of(value)
    return shard_like(value, like) if isinstance(value, Tensor) and is_sharded(like) else value


def empty_buffers(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the saved buffers that are still None here, and their modules: ``get_loss`` or ``forward`` fills them."""
    modules = dict(module.named_modules(remove_duplicate=False))
    found = {}
    for name in saved:
        path, _, leaf = name.rpartition(".")
        owner = modules.get(path)
        if owner is not None and leaf in owner._buffers and owner._buffers[leaf] is None:
            found[name] = owner
    return found


def fill_empty_buffers(module: nn.Module, saved: Mapping[str, Any], device: torch.device) -> None:
    """Make the :func:`empty_buffers`, so that ``load_state_dict`` gives them the saved values."""
    for name, owner in empty_buffers(module, saved).items():
        value = torch.empty(saved[name].shape, dtype=saved[name].dtype, device=device)
        setattr(owner, name.rpartition(".")[2], value)


def load_model(model: nn.Module, state: dict[str, Any]) -> None:
    """Load a checkpoint's weights into a model, which may be sharded. Excluded weights are left unchanged."""
    saved = state["model"]
    fill_empty_buffers(model, saved, next((t.device for t in model.parameters()), torch.device("cpu")))
    current = model.state_dict()
    left_out = {name: current[name] for name in state.get("left_out", {}) if name in current}
    loaded = {name: fitted(value, current.get(name)) for name, value in saved.items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    try:
        model.load_state_dict(with_items(saved, {**left_out, **loaded}))
    except RuntimeError as error:  # for shapes of buffers, which a module may change while it loads
        raise CheckpointError(
            f"the checkpoint does not fit the model. {error}\nPass a model like that of the checkpoint's run. Register "
            "a buffer that takes its shape in training as None: it then takes that of the checkpoint. To load only a "
            "part of the weights, read them with trainloop.checkpoint.load(path)['model'], remove those that do not "
            "fit, and call model.load_state_dict(weights, strict=False)."
        ) from error
    _keep_objects(model, parameters)


def load_parameters_beside(loop: Any, state: dict[str, Any]) -> str:
    """Load the parameters that only the optimizer has; they are known by their places in its groups.

    Return a warning that names those that the checkpoint or the optimizer lacks; empty if there are none.
    """
    own, saved = parameters_beside(loop.model, loop.criterion, loop.optimizer), whole_of(state.get("parameters", {}))
    found = {name: value for name, value in saved.items() if name in own and own[name].shape == value.shape}
    with torch.no_grad():
        for name, value in found.items():
            own[name].copy_(shard_like(value, own[name]))  # a shard of a module that a callback has replaced, too
    names = [name for name in {**own, **saved} if name not in found]
    if not names:
        return ""
    return (
        f"the checkpoint and this run's optimizer do not both have {described_names(names)}, which the model does not "
        "have, with the same shape. They keep the values that they have. Pass the optimizer the same parameters in the "
        "same order as in the checkpoint's run, or register them in the model."
    )


def _keep_objects(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Undo the replacement of parameters by a module's own loading: the old objects get the new values.

    Optimizers and wrappers hold the objects that the model had before.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, now in model.named_parameters(remove_duplicate=False):
        before = parameters.get(name)
        if before is None or now is before or now.shape != before.shape:
            continue
        with torch.no_grad():
            before.copy_(now)
        module, _, leaf = name.rpartition(".")
        setattr(modules[module], leaf, before)


def size_and_checksum(path: str) -> tuple[int, int]:
    """Return the size and the CRC-32 checksum of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return size, crc


# -- folders -----------------------------------------------------------------------------------------------------------


def new_folder(where: str, name: str, run: str) -> str:
    """Create a folder with a temporary name. If this process is killed, the resumed ``run`` removes the folder."""
    os.makedirs(where, exist_ok=True)
    path = os.path.join(where, temporary_name(name, run))
    os.mkdir(path)
    return path


def publish(temporary: str, path: str) -> None:
    """Rename a complete folder to its final name, which must be unused."""
    # The content must be on the disk before the rename.
    sync_directory(temporary)
    os.rename(temporary, path)
    sync_directory(os.path.dirname(path))


def remove_folder(path: str) -> None:
    """Delete a checkpoint's files, if they still exist. Other files are left alone."""
    names = os.listdir(path) if os.path.isdir(path) else []
    # state.pt is deleted first: without it, the rest is not a checkpoint.
    for name in sorted(names, key=lambda name: name != STATE):
        if name in (STATE, ".metadata") or _SHARD_FILE.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))
    with contextlib.suppress(OSError):
        os.rmdir(path)
