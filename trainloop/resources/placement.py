"""Assign models to devices: with exact bin packing for a few requests, and with first fit for many."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainloop.errors import ResourceError
from trainloop.resources.quota import as_text, checked_count, exact

__all__ = ["place"]

_SEARCHED = 16  # largest number of unequal fractions for which all assignments are tried


def place(fractions: Sequence[object], num_gpus: int) -> list[list[int]]:
    """Return the devices of each request: a fraction uses a part of one device, a whole number that many devices.

    Parameters
    ----------
    fractions : sequence of number
        GPUs of each request: 0, a fraction up to 1, or a whole number.
    num_gpus : int
        Number of devices.

    Returns
    -------
    list of list of int
        Indices of the devices, in the order of the requests; an empty list for a request of 0. As few devices as
        possible are used, with the lowest indices. The same input always gives the same result.

    Raises
    ------
    ResourceError
        If there is no possible assignment, or a request is not a number of GPUs.

    Notes
    -----
    This is bin packing. For up to 16 requests, and for any number of equal requests, an assignment is found if one
    exists. More requests are placed by first fit, the largest first, which can use more devices than necessary.

    Examples
    --------
    >>> place([0.4, 0.4, 0.3, 0.3, 0.3, 0.3], 2)
    [[0], [1], [0], [0], [1], [1]]
    """
    num_gpus = checked_count("num_gpus", num_gpus, least=0)
    requests = [exact(fraction) for fraction in fractions]
    for request, fraction in zip(requests, fractions):
        if request > 1 and request.denominator != 1:
            raise ResourceError(f"{fraction!r} GPUs for one model: must be a fraction up to 1, or a whole number.")
    # Integers from here on: a device has `full` parts, a request is a whole number of parts.
    full = math.lcm(*(request.denominator for request in requests)) if requests else 1
    sizes = [int(request * full) for request in requests]
    owned = sum(size for size in sizes if size >= full) // full
    parts = [size for size in sizes if 0 < size < full]
    unequal = len(set(parts)) > 1
    if not unequal or len(parts) > _SEARCHED:
        placed = _first_fit(sizes, full, largest_first=unequal)
        if max((device for devices in placed for device in devices), default=-1) < num_gpus:
            return placed
    else:
        for num_devices in range(owned + -(-sum(parts) // full), num_gpus + 1):
            if _fits([full] * (num_devices - owned), parts):
                return _lowest(sizes, num_devices, full)
    raise ResourceError(
        f"{len(requests)} requests of {', '.join(as_text(request) for request in requests[:20])} GPUs do not fit "
        f"on {num_gpus} device{'s' * (num_gpus != 1)}: a fraction is never split over devices. "
        "Request smaller fractions, or run fewer models at once."
    )


def _first_fit(sizes: list[int], full: int, *, largest_first: bool) -> list[list[int]]:
    """Return, in the order of the input, the first device with room for each request."""
    room: list[int] = []
    placed: list[list[int]] = [[] for _ in sizes]
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position] if largest_first else 0):
        size = sizes[position]
        for part in [full] * (size // full) if size >= full else [size] * (size > 0):
            device = next((device for device, left in enumerate(room) if left >= part), len(room))
            if device == len(room):
                room.append(full)
            room[device] -= part
            placed[position].append(device)
    return placed


def _lowest(sizes: list[int], num_devices: int, full: int) -> list[list[int]]:
    """Return the assignment with the lowest indices, in the order of the input; one must exist."""
    room = [full] * num_devices
    placed: list[list[int]] = []
    for position, size in enumerate(sizes):
        later = sizes[position + 1 :]
        owned = sum(other for other in later if other >= full) // full
        parts = [other for other in later if 0 < other < full]
        if size >= full:
            placed.append([device for device, left in enumerate(room) if left == full][: size // full])
            for device in placed[-1]:
                room[device] = 0
        elif size == 0:
            placed.append([])
        else:
            for device in (device for device, left in enumerate(room) if left >= size):
                room[device] -= size
                empty = room.count(full)
                used = [left for left in room if left < full]
                if empty >= owned and _fits(used + [full] * (empty - owned), parts):
                    placed.append([device])
                    break
                room[device] += size
    return placed


def _fits(room: Sequence[int], parts: Sequence[int]) -> bool:
    """Return True if the parts can be distributed over devices with this room: a search, the largest part first."""
    parts = sorted(parts, reverse=True)
    failed: set[tuple[int, tuple[int, ...]]] = set()

    def search(i: int, room: tuple[int, ...]) -> bool:
        if i == len(parts):
            return True
        # Room that is too small for the smallest part is wasted.
        if sum(left for left in room if left >= parts[-1]) < sum(parts[i:]) or (i, room) in failed:
            return False
        for left in sorted({left for left in room if left >= parts[i]}):  # the tightest first; equal ones are one case
            j = room.index(left)
            if search(i + 1, tuple(sorted((*room[:j], left - parts[i], *room[j + 1 :])))):
                return True
            if left == parts[i]:  # an exact fit is at least as good as any other
                break
        failed.add((i, room))
        return False

    return search(0, tuple(sorted(room)))
