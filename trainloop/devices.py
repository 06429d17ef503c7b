"""Choose a run's devices: parse requests, resolve mode names, count batches.

Everything down to :func:`find_usable_cuda_devices` is arithmetic on its arguments. Two functions look at the machine:
:func:`resolve` counts devices, :func:`find_usable_cuda_devices` tries them. :func:`visible_devices` and
:func:`child_mask`, of :mod:`trainloop.resources.masks`, are re-exported here.

An index always counts within ``CUDA_VISIBLE_DEVICES``, as torch's own do.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainloop.errors import ConfigurationError, DeviceError
from trainloop.resources import gpus
from trainloop.resources.masks import child_mask, visible_devices

if TYPE_CHECKING:
    import torch

__all__ = [
    "check_num_nodes",
    "child_mask",
    "choose_devices",
    "dp_chunks",
    "effective_batch_size",
    "find_usable_cuda_devices",
    "global_rank",
    "parse_devices",
    "resolve",
    "resolve_mode",
    "visible_devices",
    "world_size",
]

Mode = Literal["single", "dp", "ddp", "fsdp"]
Kind = Literal["cuda", "mps", "cpu"]

_ACCELERATORS = ("auto", "gpu", "cuda", "mps", "cpu")


# -- a request for devices -------------------------------------------------------------------------------------------


def parse_devices(devices: object, count: int) -> list[int]:
    """Indices of the devices that a request means, in the order of the request: rank r gets the r-th.

    Parameters
    ----------
    devices : int, str or sequence of int
        A number (``3``, ``'3'``: the first three), all (``-1``, ``'-1'``, ``'auto'``), or 0-based indices (``[1, 3]``,
        ``'1,3'``, ``'3,'``). A string without a comma is a number, never an index.
    count : int
        Visible devices of the chosen accelerator.

    Returns
    -------
    list of int
        At least one index, each in ``range(count)``, none twice.

    Raises
    ------
    DeviceError
        For every other request, with a correct form in the message.

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
    raise _wrong(devices, f"a {type(devices).__name__} names no devices", count)


def _parse_text(text: str, count: int) -> list[int]:
    if text.strip().lower() == "auto":
        return _first(-1, text, count)
    if "," not in text:
        if not text.strip():
            raise _none_asked(text, count)
        return _first(_number(text, text, count), text, count)
    entries = text.split(",")
    if not entries[-1].strip():  # One trailing comma makes a list; any other gap is a missing number.
        entries.pop()
    if not any(entry.strip() for entry in entries):
        raise _none_asked(text, count)
    return _indices([_number(entry, text, count) for entry in entries], text, count)


def _number(entry: str, given: str, count: int) -> int:
    # int() alone would take '1_0', '+3' and the digits of every script; 18 digits are more than any machine's devices.
    if re.fullmatch(r"-?[0-9]{1,18}", entry.strip()) is None:
        what = f"{_shown(entry)} is no number" if entry.strip() else "a number is missing between two commas"
        raise _wrong(given, what, count)
    return int(entry)


def _first(number: int, given: object, count: int) -> list[int]:
    if number == 0:
        raise _none_asked(given, count)
    if number < -1:
        raise _wrong(given, "a number of devices is 1 or more, or -1 for all", count)
    if count == 0:
        raise _wrong(given, "there is none to use", count)
    if number > count:
        raise _wrong(given, f"that is more than the {count} there {_be(count)}", count)
    return list(range(count if number == -1 else number))


def _indices(entries: Sequence[object], given: object, count: int) -> list[int]:
    indices: list[int] = []
    for entry in entries:
        if not isinstance(entry, Integral) or isinstance(entry, bool):
            raise _wrong(given, f"{_shown(entry)} is a {type(entry).__name__}, an index is an int", count)
        index = int(entry)
        if index < 0:
            raise _wrong(given, f"an index is 0 or more, and -1 means 'all' only alone, not in a list ({index})", count)
        if index >= count:
            raise _wrong(given, f"there is no device {_shown(index)}", count)
        if index in indices:
            raise _wrong(given, f"device {index} is named twice", count)
        indices.append(index)
    if not indices:
        raise _none_asked(given, count)
    return indices


def _none_asked(given: object, count: int) -> DeviceError:
    return _wrong(given, "this asks for no device; to train without a GPU use accelerator='cpu', devices=1", count)


def _wrong(given: object, what: str, count: int) -> DeviceError:
    if count == 0:
        return DeviceError(
            f"devices={_shown(given)}: {what}. No such device is visible here (0 devices). "
            "Use accelerator='cpu', devices=1, or check CUDA_VISIBLE_DEVICES."
        )
    span = "device 0" if count == 1 else f"0 to {count - 1}"
    return DeviceError(
        f"devices={_shown(given)}: {what}. There {_be(count)} {count} device{'s' * (count > 1)} ({span}). "
        f"Give a number (devices={count}), indices (devices=[{count - 1}] or '{count - 1},'), "
        "or devices='auto' for all."
    )


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def _shown(value: object) -> str:
    """``repr`` cut to one line. It may fail: for an int of thousands of digits, or in a user's class."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= 120 else f"{text[:117]}..."


# -- an accelerator and its devices ----------------------------------------------------------------------------------


class DeviceChoice(NamedTuple):
    """Devices by kind and index, before torch is asked for them."""

    kind: Kind
    """Kind of all of them."""
    indices: list[int]
    """In rank order. For ``cpu`` one 0 a process."""
    note: str = ""
    """A hint for the user about the choice; empty if there is none."""


def choose_devices(
    accelerator: object, devices: object, *, cuda: int, mps: bool = False, interactive: bool = False, cores: int = 8
) -> DeviceChoice:
    """The decision of :func:`resolve`, from what the machine has.

    Parameters
    ----------
    accelerator, devices
        As for :func:`resolve`.
    cuda : int
        Visible CUDA devices.
    mps : bool
        Whether there is an Apple GPU.
    interactive : bool
        In a notebook or shell ``devices='auto'`` takes one of several GPUs, because processes and cells mix badly.
    cores : int
        CPU cores this process may use.

    Raises
    ------
    ConfigurationError
        If no accelerator has that name.
    DeviceError
        If the accelerator is absent, or has no such devices.
    """
    name = accelerator.strip().lower() if isinstance(accelerator, str) else None
    if name not in _ACCELERATORS:
        names = ", ".join(repr(known) for known in _ACCELERATORS)
        raise ConfigurationError(f"accelerator={_shown(accelerator)}: must be one of {names}.")
    here = [f"{cuda} CUDA device{'s' * (cuda > 1)}"] * (cuda > 0) + ["mps"] * mps + ["cpu"]
    kind: Kind
    if name == "cpu" or (name == "auto" and not cuda and not mps):
        count = _cpu_processes(devices, cores, found_none=name == "auto")
        note = f"devices={count} on {cores} CPU core{'s' * (cores > 1)}: processes will wait for each other's turn."
        return DeviceChoice("cpu", [0] * count, note if count > cores else "")
    if name in ("auto", "gpu"):
        if not cuda and not mps:
            raise DeviceError(
                f"accelerator={_shown(accelerator)}: no GPU is visible here, only {here[-1]}. "
                "Use accelerator='cpu' or 'auto', or check CUDA_VISIBLE_DEVICES and the CUDA build of torch."
            )
        kind = "cuda" if cuda else "mps"
    elif name == "cuda":
        kind = "cuda"
    else:
        kind = "mps"
    if not (cuda if kind == "cuda" else mps):
        raise DeviceError(
            f"accelerator={_shown(accelerator)}: this machine has none. It has: {', '.join(here)}. "
            f"Use accelerator='{'cuda' if cuda else 'mps' if mps else 'cpu'}', or 'auto' for the best there is."
        )
    indices = parse_devices(devices, cuda if kind == "cuda" else 1)
    if interactive and len(indices) > 1 and isinstance(devices, str) and devices.strip().lower() == "auto":
        note = (
            f"devices='auto' in an interactive session uses one of the {len(indices)} GPUs. "
            f"Use devices={len(indices)} for all of them."
        )
        return DeviceChoice(kind, indices[:1], note)
    return DeviceChoice(kind, indices)


def _cpu_processes(devices: object, cores: int, *, found_none: bool) -> int:
    """On the CPU ``devices`` is a number of processes: there is no device 3 to choose."""
    text = devices.strip().lower() if isinstance(devices, str) else None
    if text == "auto":
        return 1
    number = None
    if text is not None and re.fullmatch(r"-?[0-9]{1,18}", text):
        number = int(text)
    elif isinstance(devices, Integral) and not isinstance(devices, bool):
        number = int(devices)
    if number == -1 and found_none:
        return 1  # 'All the GPUs there are', on a machine without: as 'auto'.
    if number is None or number < 1:
        where = "no GPU is visible, and " if found_none else ""
        raise DeviceError(
            f"devices={_shown(devices)}: {where}on the CPU devices is a number of processes, an int of 1 or more. "
            "Use devices=1 for one process, devices=2 for two; 'auto' is one."
        )
    if number > most_cpu_processes(cores):
        raise DeviceError(
            f"devices={_shown(devices)}: on the CPU that is a number of processes, and there {_be(cores)} {cores} core"
            f"{'s' * (cores > 1)} to use. Use devices={cores}; more than {most_cpu_processes(cores)} are refused."
        )
    return number


def most_cpu_processes(cores: int) -> int:
    """The most CPU processes to allow: far more than is useful, so that a small machine can try out many ranks."""
    return max(64, 8 * cores)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve(accelerator: object = "auto", devices: object = "auto") -> list[torch.device]:
    """Devices that a run uses, in rank order. Creates no CUDA context.

    Parameters
    ----------
    accelerator : {'auto', 'gpu', 'cuda', 'mps', 'cpu'}
        ``auto`` is cuda, then mps, then cpu; ``gpu`` is cuda or mps and never silently the CPU.
    devices : int, str or sequence of int
        See :func:`parse_devices`. For the CPU: a number of processes.

    Returns
    -------
    list of torch.device
        For the CPU one ``torch.device('cpu')`` a process.

    Raises
    ------
    ConfigurationError
        If no accelerator has that name.
    DeviceError
        If the accelerator is absent, or has no such devices.

    Warns
    -----
    UserWarning
        In a notebook or shell, where ``devices='auto'`` takes one of several GPUs; and for more processes than cores.
    """
    import torch

    mps = bool(torch.backends.mps.is_available())
    choice = choose_devices(
        accelerator, devices, cuda=_cuda_count(), mps=mps, interactive=_interactive(), cores=usable_cores()
    )
    if choice.note:
        warnings.warn(choice.note, stacklevel=2)
    if choice.kind == "cpu":
        return [torch.device("cpu") for _ in choice.indices]
    return [torch.device(choice.kind, index) for index in choice.indices]


def _cuda_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)  # IPython and Jupyter set ps1 too


# -- strategies and batches ------------------------------------------------------------------------------------------

_MODES: dict[str, Mode] = {
    "single": "single",
    "dp": "dp",
    "ddp": "ddp",
    "ddp_spawn": "ddp",
    "ddp_notebook": "ddp",
    "ddp_fork": "ddp",
    "fsdp": "fsdp",
    "fsdp2": "fsdp",
}
_REPLACED: dict[str, str] = {
    "ddp2": "it was dropped in Lightning 1.8; use gpu_mode='ddp'",
    "horovod": "use gpu_mode='ddp', under torchrun or Slurm for several machines",
    "ddp_sharded": "use gpu_mode='fsdp', which shards parameters, gradients and the optimizer's state",
    "fsdp_native": "use gpu_mode='fsdp'",
    "deepspeed": "use gpu_mode='fsdp', which shards parameters, gradients and the optimizer's state",
}


def resolve_mode(name: object, num_devices: int, num_nodes: int = 1, *, kind: str | None = None) -> Mode:
    """The mode that a strategy's name stands for.

    Parameters
    ----------
    name : str
        ``'single'``, ``'dp'``, ``'ddp'``, ``'fsdp'``, ``'auto'`` (``single`` for one device and node, else ``ddp``), or
        one of Lightning's names for ``ddp`` in processes: ``'ddp_spawn'``, ``'ddp_notebook'``, ``'ddp_fork'``.
    num_devices, num_nodes : int
        Devices on each node, and nodes.
    kind : str, optional
        Kind of the devices (``torch.device.type``), where it is known: ``mps`` has ``single`` only.

    Raises
    ------
    ConfigurationError
        For a strategy that is not offered, with its replacement, or that can't work on these devices and nodes.
    """
    num_nodes = check_num_nodes(num_nodes)
    if name == "auto":
        mode: Mode = "single" if num_devices == 1 and num_nodes == 1 else "ddp"
    elif isinstance(name, str) and name in _MODES:
        mode = _MODES[name]
    else:
        word = name.strip().lower() if isinstance(name, str) else ""
        # 'ddp_sharded_spawn', 'fsdp_native', 'deepspeed_stage_2' are kinds of the strategies above.
        replaced = next((known for known in _REPLACED if word == known or word.startswith(f"{known}_")), None)
        if replaced is not None:
            raise ConfigurationError(f"gpu_mode={_shown(name)}: {_REPLACED[replaced]}.")
        raise ConfigurationError(f"gpu_mode={_shown(name)}: must be 'single', 'dp', 'ddp', 'fsdp' or 'auto'.")
    if num_nodes > 1 and not has_ranks(mode):
        raise ConfigurationError(
            f"gpu_mode={_shown(name)} with num_nodes={num_nodes}: it works on one node only. "
            "Use gpu_mode='ddp' or 'fsdp'."
        )
    if kind == "mps" and mode != "single":
        raise ConfigurationError(f"gpu_mode={_shown(name)} on mps: an Apple GPU is one device. Use gpu_mode='single'.")
    return mode


def has_ranks(mode: object) -> bool:
    """Whether a mode runs as one process a device."""
    return mode in ("ddp", "fsdp")


def check_num_nodes(num_nodes: object) -> int:
    """``num_nodes``, checked.

    Raises
    ------
    ConfigurationError
        Unless it is an int of 1 or more; no bool, no text.
    """
    if not isinstance(num_nodes, Integral) or isinstance(num_nodes, bool) or num_nodes < 1:
        raise ConfigurationError(f"num_nodes={_shown(num_nodes)}: must be an int of 1 or more, the number of machines.")
    return int(num_nodes)


def world_size(num_devices: int, num_nodes: int = 1) -> int:
    """Ranks of a ``ddp`` or ``fsdp`` run over all nodes."""
    return num_devices * check_num_nodes(num_nodes)


def global_rank(node_rank: int, num_devices: int, local_rank: int) -> int:
    """Global rank of a node's ``local_rank``; every node has the same number of devices."""
    return node_rank * num_devices + local_rank


def effective_batch_size(mode: str, batch_size: int, num_devices: int, num_nodes: int = 1) -> int:
    """Samples of one global batch, for loaders of ``batch_size``.

    ``batch_size`` is per process: ``ddp`` and ``fsdp`` multiply it by their ranks, ``single`` and ``dp`` (which splits
    it) don't.
    Gradient accumulation multiplies the samples of an optimizer step, not this.

    Raises
    ------
    ConfigurationError
        For more than one node in a mode that works on one.
    """
    mode = resolve_mode(mode, num_devices, num_nodes)
    return batch_size * world_size(num_devices, num_nodes) if has_ranks(mode) else batch_size


def dp_chunks(batch_size: int, num_devices: int) -> list[int]:
    """Samples of each device in ``dp``: ``torch.chunk``'s split, which may leave devices idle.

    Examples
    --------
    >>> dp_chunks(7, 2), dp_chunks(9, 4)
    ([4, 3], [3, 3, 3])
    """
    size = -(-batch_size // num_devices)
    return [min(size, batch_size - start) for start in range(0, batch_size, size)] if size else []


# -- trying devices --------------------------------------------------------------------------------------------------


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """GPUs that no other run uses, tried in index order with one tiny tensor each, and leased to this process.

    For several runs on one machine, above all in 'exclusive process' mode. A try creates a CUDA context, so it stops
    as soon as enough are found. GPUs that another trainloop run on this machine has leased are skipped; the lease on
    those returned lasts as long as this process. A second call in the same process may return the same GPUs.

    Parameters
    ----------
    num_devices : int
        How many; -1 for all usable; 0 for none.

    Returns
    -------
    list of int
        Ascending indices.

    Raises
    ------
    DeviceError
        If no GPU is visible, if more are asked than are visible (both before any try), if fewer are usable, with the
        indices of the occupied ones, or if the number isn't one.

    Notes
    -----
    In the default compute mode a busy GPU still takes a tensor, so 'usable' does not mean that nobody else is there.
    GPUs without other users' processes come first where ``nvidia-ml-py`` is installed (``pip install trainloop[gpu]``).
    """
    if not isinstance(num_devices, Integral) or isinstance(num_devices, bool) or num_devices < -1:
        raise DeviceError(
            f"num_devices={_shown(num_devices)}: must be an int: -1 for all usable GPUs, or how many (0 or more)."
        )
    if num_devices == 0:
        return []
    count = _cuda_count()
    if count == 0:
        raise DeviceError(
            f"num_devices={num_devices}: no CUDA device is visible here (0 devices). "
            "Use accelerator='cpu', or check CUDA_VISIBLE_DEVICES and the CUDA build of torch."
        )
    if num_devices > count:
        raise DeviceError(
            f"num_devices={num_devices}: that is more than the {count} CUDA devices visible here. "
            f"Ask for {count} at most, or -1 for all usable."
        )
    return gpus.lease_usable(int(num_devices), count)
