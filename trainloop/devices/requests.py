"""Parse and resolve requests for devices. The results depend only on the arguments, not on the machine."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from numbers import Integral
from typing import Literal, NamedTuple

from trainloop.errors import ConfigurationError, DeviceError

__all__ = ["DeviceChoice", "choose_devices", "most_cpu_processes", "parse_devices", "shown", "whole_number"]

Kind = Literal["cuda", "mps", "cpu"]

_ACCELERATORS = ("auto", "gpu", "cuda", "mps", "cpu")


def parse_devices(devices: object, count: int) -> list[int]:
    """Return the indices of the requested devices, in the order of the request: rank r gets the r-th.

    Parameters
    ----------
    devices : int, str or sequence of int
        A number (``3`` or ``'3'`` for the first three), all (``-1``, ``'-1'``, ``'auto'``), or 0-based indices (``[1,
        3]``, ``'1,3'``, ``'3,'``). A string without a comma is a number, never an index.
    count : int
        Visible devices of the chosen accelerator.

    Returns
    -------
    list of int
        At least one index, all different, each in ``range(count)``.

    Raises
    ------
    DeviceError
        For any other request; the message shows a correct form.

    Examples
    --------
    >>> parse_devices("3", count=4), parse_devices("3,", count=4)
    ([0, 1, 2], [3])
    """
    if isinstance(devices, str):
        return _parse_text(devices, count)
    if isinstance(devices, Integral) and not isinstance(devices, bool):
        return _first(int(devices), devices, count)
    if isinstance(devices, Sequence) and not isinstance(devices, (bytes, bytearray, memoryview)):
        return _indices(devices, devices, count)
    raise _wrong(devices, f"a {type(devices).__name__} is not a number or list of devices", count)


def _parse_text(text: str, count: int) -> list[int]:
    if text.strip().lower() == "auto":
        return _first(-1, text, count)
    if "," not in text:
        if not text.strip():
            raise _none_requested(text, count)
        return _first(_number(text, text, count), text, count)
    entries = text.split(",")
    if not entries[-1].strip():  # One trailing comma makes a list; any other empty entry is a missing number.
        entries.pop()
    if not any(entry.strip() for entry in entries):
        raise _none_requested(text, count)
    return _indices([_number(entry, text, count) for entry in entries], text, count)


def _number(entry: str, given: str, count: int) -> int:
    # int() alone would accept '1_0', '+3' and digits of all scripts; no machine has a device number of 18 digits.
    if re.fullmatch(r"-?[0-9]{1,18}", entry.strip()) is None:
        what = f"{shown(entry)} is not a number" if entry.strip() else "a number is missing between two commas"
        raise _wrong(given, what, count)
    return int(entry)


def _first(number: int, given: object, count: int) -> list[int]:
    if number == 0:
        raise _none_requested(given, count)
    if number < -1:
        raise _wrong(given, "a number of devices must be 1 or more, or -1 for all", count)
    if count == 0:
        raise _wrong(given, "no device is available", count)
    if number > count:
        raise _wrong(given, f"only {count} {_be(count)} available", count)
    return list(range(count if number == -1 else number))


def _indices(entries: Sequence[object], given: object, count: int) -> list[int]:
    indices: list[int] = []
    for entry in entries:
        if not isinstance(entry, Integral) or isinstance(entry, bool):
            raise _wrong(given, f"{shown(entry)} is a {type(entry).__name__}, but an index must be an int", count)
        index = int(entry)
        if index < 0:
            raise _wrong(given, f"an index is 0 or more; -1 means 'all' only by itself, not in a list ({index})", count)
        if index >= count:
            raise _wrong(given, f"there is no device {shown(index)}", count)
        if index in indices:
            raise _wrong(given, f"device {index} is listed twice", count)
        indices.append(index)
    if not indices:
        raise _none_requested(given, count)
    return indices


def _none_requested(given: object, count: int) -> DeviceError:
    return _wrong(given, "no device was requested; to train without a GPU, use accelerator='cpu', devices=1", count)


def _wrong(given: object, what: str, count: int) -> DeviceError:
    if count == 0:
        return DeviceError(
            f"devices={shown(given)}: {what}. No device is visible here. "
            "Use accelerator='cpu', devices=1, or check CUDA_VISIBLE_DEVICES."
        )
    span = "device 0" if count == 1 else f"0 to {count - 1}"
    return DeviceError(
        f"devices={shown(given)}: {what}. There {_be(count)} {count} device{'s' * (count > 1)} ({span}). "
        f"Pass a number (devices={count}), indices (devices=[{count - 1}] or '{count - 1},'), "
        "or devices='auto' for all."
    )


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def whole_number(value: object) -> int | None:
    """Return a value as an int, including ints of numpy and other libraries; ``None`` for anything else and for bools.

    Examples
    --------
    >>> whole_number(2), whole_number(2.0), whole_number(True)
    (2, None, None)
    """
    # Python accepts True as an int, torch a tensor of it; here both are mistakes.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # raises TypeError for other types
    except Exception:  # a user's class or a tensor of many values may raise anything
        return None


def shown(value: object) -> str:
    """Return ``repr`` cut to one line; or the type, if ``repr`` fails (a very large int, a user's class)."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= 120 else f"{text[:117]}..."


# -- an accelerator and its devices ----------------------------------------------------------------------------------


class DeviceChoice(NamedTuple):
    """Devices as a type and indices, without ``torch.device`` objects."""

    kind: Kind
    """Type of all devices."""
    indices: list[int]
    """Indices in rank order; for ``cpu``, a 0 for each process."""
    note: str = ""
    """Hint for the user about the choice; empty if there is none."""


def choose_devices(
    accelerator: object, devices: object, *, cuda: int, mps: bool = False, interactive: bool = False, cores: int = 8
) -> DeviceChoice:
    """Decide for :func:`resolve`, from a description of the machine.

    Parameters
    ----------
    accelerator, devices
        As for :func:`resolve`.
    cuda : int
        Number of visible CUDA devices.
    mps : bool
        True if there is an Apple GPU.
    interactive : bool
        True in a notebook or shell: ``devices='auto'`` then uses one of several GPUs, since processes and cells don't
        mix well.
    cores : int
        CPU cores this process may use.

    Raises
    ------
    ConfigurationError
        If the accelerator's name is unknown.
    DeviceError
        If the accelerator is missing, or has no such devices.
    """
    name = accelerator.strip().lower() if isinstance(accelerator, str) else None
    if name not in _ACCELERATORS:
        names = ", ".join(repr(known) for known in _ACCELERATORS)
        hint = f" Did you mean {meant}?" if (meant := _as_arguments(accelerator)) else ""
        raise ConfigurationError(f"accelerator={shown(accelerator)}: must be one of {names}.{hint}")
    if meant := _as_arguments(devices):
        raise DeviceError(f"devices={shown(devices)}: must be a number or indices. Did you mean {meant}?")
    here = [f"{cuda} CUDA device{'s' * (cuda > 1)}"] * (cuda > 0) + ["mps"] * mps + ["cpu"]
    kind: Kind
    if name == "cpu" or (name == "auto" and not cuda and not mps):
        count = _cpu_processes(devices, cores, found_none=name == "auto")
        note = f"devices={count} on {cores} CPU core{'s' * (cores > 1)}: the processes will compete for CPU time."
        return DeviceChoice("cpu", [0] * count, note if count > cores else "")
    if name in ("auto", "gpu"):
        if not cuda and not mps:
            raise DeviceError(
                f"accelerator={shown(accelerator)}: no GPU is visible here, only {here[-1]}. "
                "Use accelerator='cpu' or 'auto', or check CUDA_VISIBLE_DEVICES and the CUDA build of torch."
            )
        kind = "cuda" if cuda else "mps"
    elif name == "cuda":
        kind = "cuda"
    else:
        kind = "mps"
    if not (cuda if kind == "cuda" else mps):
        raise DeviceError(
            f"accelerator={shown(accelerator)}: this machine has no such device. It has: {', '.join(here)}. "
            f"Use accelerator='{'cuda' if cuda else 'mps' if mps else 'cpu'}', or 'auto' for the best available."
        )
    indices = parse_devices(devices, cuda if kind == "cuda" else 1)
    if interactive and len(indices) > 1 and isinstance(devices, str) and devices.strip().lower() == "auto":
        note = (
            f"devices='auto' in an interactive session uses one of the {len(indices)} GPUs. "
            f"Use devices={len(indices)} for all of them."
        )
        return DeviceChoice(kind, indices[:1], note)
    return DeviceChoice(kind, indices)


def _as_arguments(device: object) -> str:
    """Return the arguments equivalent to a torch.device, its name, or a list of them; empty for anything else."""
    given = device if isinstance(device, (list, tuple)) else [device]
    found = [re.fullmatch(r"(cpu|cuda|gpu|mps)(?::([0-9]+))?", str(each).strip().lower()) for each in given]
    kinds = {match[1] for match in found if match}
    if not given or None in found or len(kinds) > 1:
        return ""
    kind, indices = kinds.pop(), [int(match[2]) for match in found if match and match[2]]
    return f"accelerator='{kind}'" + (f", devices={indices}" if indices and kind in ("cuda", "gpu") else "")


def _cpu_processes(devices: object, cores: int, *, found_none: bool) -> int:
    """Return the number of processes that ``devices`` means on the CPU, where devices have no indices."""
    text = devices.strip().lower() if isinstance(devices, str) else None
    if text == "auto":
        return 1
    number = None
    if text is not None and re.fullmatch(r"-?[0-9]{1,18}", text):
        number = int(text)
    elif isinstance(devices, Integral) and not isinstance(devices, bool):
        number = int(devices)
    if number == -1 and found_none:
        return 1  # 'All GPUs' on a machine without any: like 'auto'.
    if number is None or number < 1:
        where = "no GPU is visible, and " if found_none else ""
        raise DeviceError(
            f"devices={shown(devices)}: {where}on the CPU, devices is the number of processes, an int of 1 or more. "
            "Use devices=1 for one process, devices=2 for two; 'auto' means one."
        )
    if number > most_cpu_processes(cores):
        raise DeviceError(
            f"devices={shown(devices)}: on the CPU, this is the number of processes, but there {_be(cores)} {cores} "
            "core"
            f"{'s' * (cores > 1)} available. Use devices={cores}; more than {most_cpu_processes(cores)} are refused."
        )
    return number


def most_cpu_processes(cores: int) -> int:
    """Return the largest number of CPU processes to allow: many, so that small machines can try out many ranks."""
    return max(64, 8 * cores)
