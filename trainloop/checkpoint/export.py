"""One file of a model's weights out of any checkpoint, with no more in memory than a rank's part of one tensor."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

import torch
from torch import Tensor

from trainloop.checkpoint.file import load
from trainloop.checkpoint.sharded import StoredTensor, narrowed, parts_of
from trainloop.checkpoint.storage import temporary_name
from trainloop.errors import CheckpointError, ConfigurationError

__all__ = ["export"]

# The names that the safetensors format has for them.
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
    """Write the model of a checkpoint in the safetensors format, which needs no package to be written.

    Parameters
    ----------
    checkpoint : str or path
        A checkpoint, a file or the folder of a sharded one; a folder of checkpoints stands for the newest.
    path : str or path
        File to make; one of that name is replaced when the new one is whole.

    Returns
    -------
    int
        Bytes of the file.

    Raises
    ------
    CheckpointError
        If there is no whole checkpoint, or it holds a tensor that the format has no place for.
    ConfigurationError
        If the file can't be made.
    """
    model = load(checkpoint, whole=False).get("model")
    if not isinstance(model, dict) or not all(isinstance(value, (Tensor, StoredTensor)) for value in model.values()):
        raise CheckpointError(f"{os.fspath(checkpoint)} holds no model's weights alone. Pass one of fit's checkpoints.")
    # The header first, as it has every tensor's place: so no more than a part of a tensor is in memory at a time.
    header: dict[str, Any] = {}
    end = 0
    for name, value in model.items():
        if value.dtype not in _DTYPES:
            raise CheckpointError(f"{name} is of {value.dtype}, which the safetensors format has no name for.")
        begin, end = end, end + value.shape.numel() * value.dtype.itemsize
        header[name] = {"dtype": _DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # The format allows spaces there; tensors are to begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    target = os.path.abspath(os.path.expanduser(os.fspath(path)))
    temporary = os.path.join(os.path.dirname(target), temporary_name(os.path.basename(target), "export"))
    try:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        for name, value in model.items():
            _write(temporary, 8 + len(text) + header[name]["data_offsets"][0], value)
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigurationError(f"{target} can't be written: {error.strerror}. Choose another place.") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return 8 + len(text) + end


def _write(path: str, place: int, value: Any) -> None:
    """A tensor, part by part, into a file that has room for it there."""
    numel = value.shape.numel()
    if not numel:
        return
    size = value.dtype.itemsize
    whole = torch.from_file(path, shared=True, size=place + numel * size, dtype=torch.uint8)
    flat = whole[place:]
    aligned = flat.storage_offset() % size == 0
    parts = parts_of(value) if isinstance(value, StoredTensor) else [(((0,) * value.ndim, tuple(value.shape)), value)]
    for (offsets, sizes), part in parts:
        rows = flat.view(value.dtype).view(value.shape) if aligned else None
        if rows is None:  # eight bytes' places hold any dtype but where odd ones came before
            full = flat.clone().view(value.dtype).view(value.shape)
            narrowed(full, offsets, sizes).copy_(part)
            flat.copy_(full.reshape(-1).view(torch.uint8))
        else:
            narrowed(rows, offsets, sizes).copy_(part)
