"""Objects on their way between processes: models, datasets and callbacks to the ranks, state back.

``pack`` sends any object, defined anywhere, to all ranks of a node through memory they share; ``dump_state`` and
``load_state`` bring state back into the objects that both sides know.
"""

from __future__ import annotations

from trainloop.transfer.payload import Parcel, Payload, pack
from trainloop.transfer.pickling import dump_state, load_device, load_state

__all__ = ["Parcel", "Payload", "dump_state", "load_device", "load_state", "pack"]
