"""Write and read checkpoints on disk. They are written atomically, verified when they are read, and can't run code.

A checkpoint is one file::

    body      the output of torch.save (a zip): nested dicts, lists and tuples of tensors, numbers and strings
    info      JSON: the step, the run and the order of writing (CheckpointInfo)
    end mark  lengths and checksums of body and info, a checksum of itself, 8 bytes that name the format

A truncated file has no end mark. A zip may be followed by other bytes, so ``torch.load(path, weights_only=True)`` reads
the file even if trainloop is not installed.

The checksum is CRC-32, which only detects damage. (It is computed at 3.3 GB/s while writing; hardware SHA-256 reaches
1.4 GB/s and BLAKE2b 0.7.) The protection against attackers is ``weights_only=True``: a file that names any code is
rejected before that code is imported.

This module does not depend on the loop: it takes and returns dicts.

========================================================  =====================================================
:func:`save`, :func:`load`, :func:`read_info`             one checkpoint
:func:`checkpoints`, :func:`load_newest`, :func:`best`    the checkpoints of a folder
:func:`save_weights`, :func:`load_weights`                a model's weights alone, in the safetensors format
========================================================  =====================================================
"""

from __future__ import annotations

from trainloop.checkpoint.file import (
    Checkpoint,
    CheckpointInfo,
    best,
    checkpoint_name,
    checkpoints,
    load,
    load_newest,
    load_weights,
    mark_newest,
    read_info,
    save,
    save_weights,
)
from trainloop.checkpoint.plain import HostCopy, plain
from trainloop.checkpoint.storage import Folder, folder

__all__ = [
    "Checkpoint",
    "CheckpointInfo",
    "best",
    "checkpoints",
    "load",
    "load_newest",
    "load_weights",
    "read_info",
    "save",
    "save_weights",
]
