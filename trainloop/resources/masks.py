"""Masks of CUDA devices: read ``CUDA_VISIBLE_DEVICES`` like CUDA, and compose it for child processes.

This is a separate module because both ``machine.py`` and :mod:`trainloop.devices` use it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from trainloop.errors import DeviceError, ResourceError

__all__ = ["child_mask", "visible_devices"]


def visible_devices(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``, as CUDA reads them.

    Parameters
    ----------
    environ : mapping, optional
        Replaces ``os.environ``.

    Returns
    -------
    list of str or None
        Ordinals or UUIDs in their order; an empty list if all devices are hidden; None if no device is hidden. Like
        CUDA, it ends the list before a negative entry and before the first entry of a different kind. If an entry is
        repeated, the list is empty.
    """
    text = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries: list[str] = []
    for entry in text.split(","):
        name = _mask_entry(entry, text)
        if name is None:
            break
        if name in entries:
            return []
        entries.append(name)
    return entries


def _mask_entry(entry: str, text: str) -> str | None:
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):  # The first entry sets the kind of all.
            return entry if entry.startswith(prefix) else None
    # The driver reads ordinals like C's strtoul: '1gpu2' is 1.
    number = re.match(r"[+-]?[0-9]+", entry.strip())
    if number is None or int(number[0]) < 0:
        return None
    return str(int(number[0]))


def child_mask(indices: Sequence[int], visible: Sequence[str] | None) -> str:
    """Return the ``CUDA_VISIBLE_DEVICES`` of a child that gets some of this process's devices.

    Parameters
    ----------
    indices : sequence of int
        Devices of the child, counted within this process's own mask.
    visible : sequence of str or None
        This process's mask, from :func:`visible_devices`.

    Returns
    -------
    str
        Composed with the parent's: under ``4,5,7``, device 1 is ``5``. Empty if the child gets no device.

    Raises
    ------
    DeviceError
        If the parent can't see a device.
    ResourceError
        If the child would get two MIG instances: a process can use only one.
    """
    if visible is None:
        return ",".join(str(index) for index in indices)
    for index in indices:
        if not 0 <= index < len(visible):
            raise DeviceError(
                f"device {index} was chosen for a child process, but {len(visible)} are visible here "
                f"(CUDA_VISIBLE_DEVICES={','.join(visible)}). Choose among these, counted from 0."
            )
    names = [visible[index] for index in indices]
    if len(names) > 1 and any(name.startswith("MIG-") for name in names):
        raise ResourceError(
            f"{len(names)} MIG instances were chosen for one process ({', '.join(names)}), which can use only one. "
            "Request one device per process, and start more processes."
        )
    return ",".join(names)
