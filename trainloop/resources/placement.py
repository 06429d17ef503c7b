"""Assign models to devices: exact bin packing, pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from trainloop.errors import ResourceError
from trainloop.resources.quota import as_text, checked_count, exact

__all__ = ["place"]

_SEARCHED = 16  # largest number of requests for which the search is not bounded
_SEARCH_STEPS = 200_000


def place(fractions: Sequence[object], num_gpus: int) -> list[list[int]]:
    """Return the devices of each request: a fraction uses one device, a whole n uses n exclusively; sums are at most 1.

    Parameters
    ----------
    fractions : sequence of number
        GPUs of each request: 0, a fraction up to 1, or a whole number.
    num_gpus : int
        Number of devices.

    Returns
    -------
    list of list of int
        In the order of the input; an empty list for a request of 0. Uses the fewest devices, then the lowest indices;
        the same input gives the same result.

    Raises
    ------
    ResourceError
        If there is no such assignment, or a request is not a number of GPUs.

    Notes
    -----
    Bin packing. If an assignment exists, it is found for up to 16 requests, and for any number of equal requests.
    Beyond that the search ends after a bounded number of steps, and devices are numbered in the order of the input.

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
    least = owned + -(-sum(parts) // full)
    # Finding the lowest needs a search for each request; with many, some would end without an answer.
    finds_lowest = len(parts) <= _SEARCHED or len(set(parts)) == 1
    for num_devices in range(least, num_gpus + 1):
        empty = [0] * (num_devices - owned)
        if finds_lowest:
            if _packs(empty, parts, full):
                return _lowest(sizes, num_devices, full)
        elif (rooms := _packing(empty, parts, full)) is not None:
            return _as_packed(sizes, rooms, full)
    raise ResourceError(
        f"{len(requests)} requests of {', '.join(as_text(request) for request in requests[:20])} GPUs do not fit "
        f"on {num_gpus} device{'s' * (num_gpus != 1)}: a fraction is never split over devices. "
        "Request smaller fractions, or run fewer at once."
    )


def _lowest(sizes: list[int], num_devices: int, full: int) -> list[list[int]]:
    """Return the assignment with the lowest indices, in the order of the input; one must exist."""
    loads = [0] * num_devices
    placed: list[list[int]] = []
    for position, size in enumerate(sizes):
        if size == 0:
            placed.append([])
            continue
        if size >= full:
            devices = [device for device, load in enumerate(loads) if load == 0][: size // full]
            for device in devices:
                loads[device] = full
            placed.append(devices)
            continue
        later = sizes[position + 1 :]
        owned = sum(other for other in later if other >= full) // full
        parts = [other for other in later if 0 < other < full]
        for device in range(num_devices):
            if loads[device] + size > full:
                continue
            loads[device] += size
            empty = loads.count(0)
            open_loads = [load for load in loads if load] + [0] * (empty - owned)
            if empty >= owned and _packs(open_loads, parts, full):
                placed.append([device])
                break
            loads[device] -= size
        else:
            raise AssertionError("an assignment exists")
    return placed


def _as_packed(sizes: list[int], rooms: list[int], full: int) -> list[list[int]]:
    """Return the assignment of :func:`_packing`; devices are numbered by the first request on each."""
    left: list[int] = []  # on each device that holds parts
    device_of: dict[int, int] = {}
    largest_first = sorted((i for i, size in enumerate(sizes) if 0 < size < full), key=lambda i: -sizes[i])
    for i, room in zip(largest_first, rooms, strict=True):
        if room == full:
            left.append(full)
        device_of[i] = left.index(room)
        left[device_of[i]] -= sizes[i]
    numbers = itertools.count()
    number_of: dict[int, int] = {}
    placed = []
    for i, size in enumerate(sizes):
        if i in device_of:
            if device_of[i] not in number_of:
                number_of[device_of[i]] = next(numbers)
            placed.append([number_of[device_of[i]]])
        else:
            placed.append(list(itertools.islice(numbers, size // full)))
    return placed


def _packs(loads: Sequence[int], parts: Sequence[int], full: int) -> bool:
    """Return True if ``parts`` fit into the space that ``loads`` leave."""
    if len(set(parts)) == 1:  # Trials and folds request equal shares, and may be many.
        return sum((full - load) // parts[0] for load in loads) >= len(parts)
    return _packing(loads, parts, full) is not None


def _packing(loads: Sequence[int], parts: Sequence[int], full: int) -> list[int] | None:
    """Return, for each of ``parts``, largest first, the space on its device; None if no packing is found."""
    parts = sorted(parts, reverse=True)
    room = sorted(full - load for load in loads)
    taken = _best_fit(list(room), parts)
    if taken is not None:
        return taken
    taken = []
    left = [0]
    for part in reversed(parts):
        left.append(left[-1] + part)
    left.reverse()  # left[i]: the sum of parts[i:]
    failed: set[tuple[int, tuple[int, ...]]] = set()
    steps = math.inf if len(parts) <= _SEARCHED else _SEARCH_STEPS

    def search(i: int, room: tuple[int, ...]) -> bool:
        nonlocal steps
        if i == len(parts):
            return True
        steps -= 1
        # Space smaller than the smallest part is wasted.
        if steps < 0 or sum(r for r in room if r >= parts[-1]) < left[i] or (i, room) in failed:
            return False
        tried = -1
        for j, r in enumerate(room):
            if r >= parts[i] and r != tried:  # Devices with equal space are one case.
                tried = r
                taken.append(r)
                if search(i + 1, tuple(sorted((*room[:j], r - parts[i], *room[j + 1 :])))):
                    return True
                taken.pop()
                if r == parts[i]:  # Nothing fills a gap better than an exact fit.
                    break
        failed.add((i, room))
        return False

    return taken if search(0, tuple(room)) else None


def _best_fit(room: list[int], parts: Sequence[int]) -> list[int] | None:
    """Pack by best fit, largest first; this finds most packings at once."""
    taken = []
    for part in parts:
        tightest = min((r for r in room if r >= part), default=None)
        if tightest is None:
            return None
        taken.append(tightest)
        room[room.index(tightest)] -= part
    return taken
