"""Send objects between processes: models, datasets and callbacks to the ranks, and their state back.

``pack`` sends any object, defined anywhere, to all ranks of a node through shared memory. ``pack_state`` and
``unpack_state`` send state back into objects that both sides have, through a ``ResultFile``.
"""

from __future__ import annotations

from trainloop._transfer.payload import Payload, PayloadHandle, pack
from trainloop._transfer.pickling import (
    PackedState,
    load_device,
    pack_state,
    unpack_state,
)

__all__ = [
    "PackedState",
    "PayloadHandle",
    "Payload",
    "load_device",
    "pack",
    "pack_state",
    "unpack_state",
]
