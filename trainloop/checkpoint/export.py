"""Write a model's weights from any checkpoint to one file; only a rank's part of one tensor is in memory at a time."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

import torch
from torch import Tensor

from trainloop._support.platform import absolute_path
from trainloop.checkpoint.file import load_with_path, read_info
from trainloop.checkpoint.sharded import StoredTensor, narrowed, parts_of
from trainloop.checkpoint.storage import put_in_place, temporary_name
from trainloop.errors import CheckpointError, ConfigurationError

# Names of the dtypes in the safetensors format.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export(checkpoint: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Write the weights in a checkpoint to a file in the safetensors format. The package safetensors is not needed.

    Parameters
    ----------
    checkpoint : str or path
        A checkpoint: a file, or the folder of a sharded checkpoint. In a folder of checkpoints, the newest one is used.
    path : str or path
        File to write. An existing file is replaced when the new one is complete.

    Returns
    -------
    int
        Size of the file in bytes.

    Raises
    ------
    CheckpointError
        If there is no complete checkpoint, or it has a tensor that the format does not support.
    ConfigurationError
        If the file can't be written, or is a checkpoint.
    """
    return export_from(checkpoint, path)[0]


def export_from(checkpoint: str | os.PathLike[str], path: str | os.PathLike[str]) -> tuple[int, str]:
    """Do the work of :func:`export`; return the size of the file, and the path of the checkpoint that was read."""
    source, state = load_with_path(checkpoint, whole=False)
    model = state.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, (Tensor, StoredTensor)) for value in model.values()):
        raise CheckpointError(f"{os.fspath(checkpoint)} has no model weights. Pass a checkpoint that fit wrote.")
    for name, value in model.items():
        if value.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} has dtype {value.dtype}, which safetensors does not support. Use torch.save instead."
            )
    # The header with the offsets of all tensors is written first. So only a part of one tensor is in memory at a time.
    # Tensors with the largest elements are first, so that all tensors are aligned.
    header: dict[str, Any] = {}
    end = 0
    model = dict(sorted(model.items(), key=lambda item: -item[1].dtype.itemsize))
    for name, value in model.items():
        begin, end = end, end + value.shape.numel() * value.dtype.itemsize
        header[name] = {"dtype": _DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # Tensors must start at a multiple of 8 bytes, and the format allows spaces at the end of the header.
    text += b" " * (-len(text) % 8)
    target = absolute_path(path)
    if os.path.isfile(target) and _is_checkpoint(target):
        raise ConfigurationError(f"{target} is a checkpoint, which the weights would replace. Choose another path.")
    temporary = os.path.join(os.path.dirname(target), temporary_name(os.path.basename(target), "export"))
    try:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
            if hasattr(os, "posix_fallocate"):  # without it, a full disk would be a signal (SIGBUS), not an error
                os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
        _write_tensors(temporary, 8 + len(text), end, model)
        put_in_place(temporary, target)
    except OSError as error:
        raise ConfigurationError(f"{target} can't be written: {error.strerror}. Choose another path.") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return 8 + len(text) + end, source


def _is_checkpoint(path: str) -> bool:
    try:
        read_info(path)
    except (CheckpointError, OSError):
        return False
    return True


def _write_tensors(path: str, start: int, size: int, model: dict[str, Any]) -> None:
    """Write the tensors, part by part, into the last ``size`` bytes of a file, which begin at ``start``."""
    room = torch.from_file(path, shared=True, size=start + size, dtype=torch.uint8)[start:]
    for value in model.values():
        length = value.shape.numel() * value.dtype.itemsize
        target, room = room[:length].view(value.dtype).view(value.shape), room[length:]
        if isinstance(value, StoredTensor):
            for (offsets, sizes), part in parts_of(value):
                narrowed(target, offsets, sizes).copy_(part)
        else:
            target.copy_(value)
