"""Choose a run's devices: parse requests, resolve mode names, count the samples of a batch.

As in torch, indices always refer to the devices in ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from trainloop._support.platform import usable_cpus
from trainloop._support.user_line import warn
from trainloop.errors import ConfigurationError, DeviceError
from trainloop.resources import gpus
from trainloop.resources.gpus import visible_devices
from trainloop.resources.quota import is_auto

if TYPE_CHECKING:
    import torch

__all__ = [
    "DeviceChoice",
    "effective_batch_size",
    "find_usable_cuda_devices",
    "parse_devices",
    "resolve",
    "visible_devices",
]

Kind = Literal["cuda", "mps", "cpu"]

_ACCELERATORS = ("auto", "gpu", "cuda", "mps", "cpu")


def is_all(devices: object) -> bool:
    """Return True if ``devices`` requests all devices: ``'auto'``, -1 or ``'-1'``."""
    return requested_number(devices) == -1


def requested_number(devices: object) -> int | None:
    """Return the number of devices that is requested, -1 for all; None if ``devices`` has indices or is not valid."""
    return whole_number(_read_text(devices) if isinstance(devices, str) else devices)


def parse_devices(devices: object, count: int) -> list[int]:
    """Return the indices of the requested devices, in the order of the request. Rank ``r`` gets the ``r``-th device.

    Parameters
    ----------
    devices : int, str or sequence of int
        A number (``3`` or ``'3'`` for the first three), all (``-1``, ``'-1'``, ``'auto'``), or 0-based indices
        (``[1, 3]``, ``'1,3'``, ``'3,'``). A string without a comma is a number of devices, never an index.
    count : int
        Number of visible devices of the chosen accelerator.

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
    visible = whole_number(count)
    if visible is None or visible < 0:
        raise DeviceError(f"count={count!r}: must be the number of visible devices, 0 or more.")
    count = visible
    request = _read_text(devices) if isinstance(devices, str) else devices
    if isinstance(request, Sequence) and not isinstance(request, (str, bytes, bytearray, memoryview)):
        return _indices(request, devices, count)
    number = whole_number(request)
    if number is None:
        if isinstance(request, str) and not request:
            raise _none_requested(devices, count)
        what = "not a number" if isinstance(request, str) else f"a {type(devices).__name__}"
        raise _wrong(devices, f"{shown(request)} is {what}, so it is neither a number nor a list of devices", count)
    if number == 0:
        raise _none_requested(devices, count)
    if number < -1:
        raise _wrong(devices, "a number of devices must be 1 or more, or -1 for all", count)
    if count == 0:
        raise _wrong(devices, "no device is available", count)
    if number > count:
        raise _wrong(devices, f"only {count} {_be(count)} available", count)
    return list(range(count if number == -1 else number))


def _read_text(text: str) -> object:
    """Parse a string to a number or a list of indices.

    Text that is neither is returned unchanged, or as a list item.
    """
    if is_auto(text):
        return -1
    # int() alone would accept '1_0', '+3' and non-ASCII digits. No device number has 18 digits.
    entries = [entry.strip() for entry in text.split(",")]
    found = [int(entry) if re.fullmatch(r"-?[0-9]{1,18}", entry) else entry for entry in entries]
    if len(found) == 1:
        return found[0]
    return found[:-1] if entries[-1] == "" else found  # a trailing comma makes a list


def _indices(entries: Sequence[object], given: object, count: int) -> list[int]:
    if all(isinstance(entry, str) and not entry for entry in entries):
        raise _none_requested(given, count)
    indices: list[int] = []
    for entry in entries:
        index = whole_number(entry)
        if index is None:
            what = "not a number" if isinstance(entry, str) else f"a {type(entry).__name__}"
            found = f"{shown(entry)} is {what}" if entry != "" else "a number is missing between two commas"
            raise _wrong(given, f"{found}, but an index must be an int", count)
        if index < 0:
            raise _wrong(given, f"index {index} is below 0 (-1 means 'all' only by itself, not in a list)", count)
        if index >= count:
            raise _wrong(given, f"there is no device {shown(index)}", count)
        if index in indices:
            raise _wrong(given, f"device {index} is listed twice", count)
        indices.append(index)
    return indices


def _none_requested(given: object, count: int) -> DeviceError:
    return _wrong(given, "no device was requested (to train without a GPU, use accelerator='cpu', devices=1)", count)


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
    """Convert an integer of Python, numpy or another library to an int; return ``None`` for bools and any other value.

    Examples
    --------
    >>> whole_number(2), whole_number(2.0), whole_number(True)
    (2, None, None)
    """
    # Python accepts True as an int, and a tensor with True has __index__. Here, both are mistakes.
    if is_bool(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # raises TypeError for other types
    except Exception:  # a user's class or a tensor of many values may raise anything
        return None


def is_bool(value: object) -> bool:
    """Return True for a bool of Python, numpy or another library, also for a tensor or array of bools."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def shown(value: object) -> str:
    """Return ``repr(value)``, cut to 120 characters, or the type's name if ``repr`` fails (as a user's class may)."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= 120 else f"{text[:117]}..."


# -- an accelerator and its devices ----------------------------------------------------------------------------------


class DeviceChoice(NamedTuple):
    """Chosen devices, as a type and indices instead of ``torch.device`` objects."""

    kind: Kind
    """Type of all devices."""
    indices: list[int]
    """Indices in rank order; for ``cpu``, a 0 for each process."""
    note: str = ""
    """Hint for the user about the choice; empty if there is none."""


def choose_devices(
    accelerator: object, devices: object, *, cuda: int, mps: bool = False, interactive: bool = False, cores: int = 8
) -> DeviceChoice:
    """Choose the devices for :func:`resolve` from a description of the machine.

    Parameters
    ----------
    accelerator, devices
        As for :func:`resolve`.
    cuda : int
        Number of visible CUDA devices.
    mps : bool
        True if there is an Apple GPU.
    interactive : bool
        True in a notebook or shell. ``devices='auto'`` then uses only one of several GPUs, because starting processes
        from notebook cells is fragile.
    cores : int
        Number of CPU cores that this process may use.

    Raises
    ------
    ConfigurationError
        If the accelerator's name is unknown.
    DeviceError
        If the accelerator is missing, or does not have the requested devices.
    """
    name = accelerator.strip().lower() if isinstance(accelerator, str) else None
    if name not in _ACCELERATORS:
        names = ", ".join(repr(known) for known in _ACCELERATORS)
        hint = f" Did you mean {meant}?" if (meant := _as_arguments(accelerator)) else ""
        raise ConfigurationError(f"accelerator={shown(accelerator)}: must be one of {names}.{hint}")
    if meant := _as_arguments(devices):
        raise DeviceError(f"devices={shown(devices)}: must be a number or indices. Did you mean {meant}?")
    best: Kind = "cuda" if cuda else "mps" if mps else "cpu"
    kind = cast(Kind, best if name in ("auto", "gpu") else name)
    if kind == "cpu" and name != "gpu":
        count = _cpu_processes(devices, cores, found_none=name == "auto")
        note = f"devices={count} on {cores} CPU core{'s' * (cores > 1)}: the processes will compete for CPU time."
        return DeviceChoice("cpu", [0] * count, note if count > cores else "")
    if not {"cuda": cuda, "mps": mps, "cpu": 0}[kind]:
        found = [f"{cuda} CUDA device{'s' * (cuda > 1)}"] * (cuda > 0) + ["mps"] * mps + ["cpu"]
        raise DeviceError(
            f"accelerator={shown(accelerator)}: this machine has no such device. It has: {', '.join(found)}. "
            f"Use accelerator='{best}', or 'auto' for the best available; or check CUDA_VISIBLE_DEVICES and the CUDA "
            "build of torch."
        )
    indices = parse_devices(devices, cuda if kind == "cuda" else 1)
    if interactive and len(indices) > 1 and is_auto(devices):
        note = (
            f"devices='auto' in an interactive session uses one of the {len(indices)} GPUs. "
            f"Use devices={len(indices)} for all of them."
        )
        return DeviceChoice(kind, indices[:1], note)
    return DeviceChoice(kind, indices)


def _as_arguments(device: object) -> str:
    """Return the arguments for a torch.device, a device's name, or a list of these; empty for any other value."""
    given = device if isinstance(device, (list, tuple)) else [device]
    found = [re.fullmatch(r"(cpu|cuda|gpu|mps)(?::([0-9]+))?", str(each).strip().lower()) for each in given]
    kinds = {match[1] for match in found if match}
    if not given or None in found or len(kinds) > 1:
        return ""
    kind, indices = kinds.pop(), [int(match[2]) for match in found if match and match[2]]
    return f"accelerator='{kind}'" + (f", devices={indices}" if indices and kind in ("cuda", "gpu") else "")


def _cpu_processes(devices: object, cores: int, *, found_none: bool) -> int:
    """Return the number of processes requested by ``devices`` on the CPU."""
    if is_auto(devices):
        return 1
    number = requested_number(devices)
    if number == -1 and found_none:
        return 1  # -1 requests all GPUs; if there is no GPU, it is the same as 'auto'
    if number is None or number < 1:
        where = "no GPU is visible, and " if found_none else ""
        raise DeviceError(
            f"devices={shown(devices)}: {where}on the CPU, devices is the number of processes (an int of 1 or more). "
            "Use devices=1 for one process, or devices=2 for two. 'auto' means one process."
        )
    most = max(64, 8 * cores)  # may exceed the number of cores, so that small machines can test many ranks
    if number > most:
        raise DeviceError(
            f"devices={shown(devices)}: on the CPU, this is the number of processes. At most {most} are allowed on "
            f"{cores} core{'s' * (cores > 1)}. Use devices={cores}."
        )
    return number


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(usable_cpus())


def resolve(accelerator: object = "auto", devices: object = "auto") -> list[torch.device]:
    """Return the devices that a run uses, in rank order, without creating a CUDA context.

    Parameters
    ----------
    accelerator : {'auto', 'gpu', 'cuda', 'mps', 'cpu'}
        ``auto`` is the first available of cuda, mps and cpu; ``gpu`` is cuda or mps, never the CPU.
    devices : int, str or sequence of int
        See :func:`parse_devices`. For the CPU, the number of processes.

    Returns
    -------
    list of torch.device
        For the CPU, one ``torch.device('cpu')`` per process.

    Raises
    ------
    ConfigurationError
        If the accelerator's name is unknown.
    DeviceError
        If the accelerator is missing, or does not have the requested devices.

    Warns
    -----
    UserWarning
        If there are more processes than cores, or if ``devices='auto'`` uses only one of several GPUs, as it does in a
        notebook or shell.
    """
    import torch

    mps = bool(torch.backends.mps.is_available())
    choice = choose_devices(
        accelerator, devices, cuda=_cuda_count(), mps=mps, interactive=_interactive(), cores=usable_cores()
    )
    if choice.note:
        warn(choice.note)
    if choice.kind == "cpu":
        return [torch.device("cpu") for _ in choice.indices]
    return [torch.device(choice.kind, index) for index in choice.indices]


def _cuda_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)  # IPython and Jupyter set ps1, too


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Find GPUs that no other run uses, lease them to this process, and return their indices.

    Use it if several runs share a machine, especially if its GPUs are in 'exclusive process' mode. The function tries
    GPUs in index order: it creates one small tensor on each, in another process, which then ends, so that this process
    uses no memory of a GPU that its ranks will use. The search stops as soon as enough GPUs are found. GPUs leased by
    another trainloop run on this machine are skipped. The lease lasts until this process ends. A second call in the
    same process may return the same GPUs.

    Parameters
    ----------
    num_devices : int
        Number of GPUs; -1 for all usable ones; 0 for none.

    Returns
    -------
    list of int
        Ascending indices.

    Raises
    ------
    DeviceError
        If fewer GPUs are visible than requested (no GPU is then tried); if fewer are usable (the message lists the
        occupied GPUs); or if ``num_devices`` is not an int.

    Notes
    -----
    In the default compute mode a busy GPU still accepts a tensor, so a usable GPU may have other users. If
    ``nvidia-ml-py`` (the extra ``gpu``) is installed, GPUs without other users' processes are tried first.
    """
    number = whole_number(num_devices)
    if number is None or number < -1:
        raise DeviceError(f"num_devices={shown(num_devices)}: must be -1 for all usable GPUs, or an int of 0 or more.")
    if number == 0:
        return []
    count = _cuda_count()
    if count == 0 or number > count:
        fewer = f"Request at most {count}, use" if count else "Use"
        raise DeviceError(
            f"num_devices={num_devices}: only {count} CUDA device{'s' * (count != 1)} {_be(count)} visible here. "
            f"{fewer} accelerator='cpu', or check CUDA_VISIBLE_DEVICES and the CUDA build of torch."
        )
    return gpus.lease_usable(number, count)


# -- modes -----------------------------------------------------------------------------------------------------------

Mode = Literal["single", "dp", "ddp", "fsdp"]

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
    "ddp2": "Use gpu_mode='ddp'",
    "horovod": "Use gpu_mode='ddp', with torchrun or Slurm for several machines",
    "ddp_sharded": "Use gpu_mode='fsdp', which shards parameters, gradients and the optimizer's state",
    "fsdp_native": "Use gpu_mode='fsdp'",
    "deepspeed": "Use gpu_mode='fsdp', which shards parameters, gradients and the optimizer's state",
}


def resolve_mode(name: object, num_devices: int, num_nodes: int = 1, *, kind: str | None = None) -> Mode:
    """Return the mode for a strategy's name.

    Parameters
    ----------
    name : str
        ``'single'``, ``'dp'``, ``'ddp'``, ``'fsdp'``, ``'auto'`` (``single`` for one device and node, else ``ddp``), or
        one of Lightning's names for ``ddp`` in processes: ``'ddp_spawn'``, ``'ddp_notebook'``, ``'ddp_fork'``.
    num_devices, num_nodes : int
        Number of devices on each node, and number of nodes.
    kind : str, optional
        Type of the devices (``torch.device.type``), if known. ``mps`` supports only ``single``.

    Raises
    ------
    ConfigurationError
        If the strategy is not supported (the message names its replacement), or can't use these devices and nodes.
    """
    num_nodes = check_num_nodes(num_nodes)
    if name == "auto":
        mode: Mode = "single" if num_devices == 1 and num_nodes == 1 else "ddp"
    elif isinstance(name, str) and name in _MODES:
        mode = _MODES[name]
    else:
        word = name.strip().lower() if isinstance(name, str) else ""
        # 'ddp_sharded_spawn', 'fsdp_native', 'deepspeed_stage_2' are variants of the strategies above.
        replaced = next((known for known in _REPLACED if word == known or word.startswith(f"{known}_")), None)
        if replaced is not None:
            raise ConfigurationError(f"gpu_mode={shown(name)}: this strategy is not supported. {_REPLACED[replaced]}.")
        raise ConfigurationError(f"gpu_mode={shown(name)}: must be 'single', 'dp', 'ddp', 'fsdp' or 'auto'.")
    if num_nodes > 1 and not has_ranks(mode):
        raise ConfigurationError(
            f"gpu_mode={shown(name)} with num_nodes={num_nodes}: this mode uses only one node. "
            "Use gpu_mode='ddp' or 'fsdp'."
        )
    if kind == "mps" and mode != "single":
        raise ConfigurationError(f"gpu_mode={shown(name)} on mps: there is only one Apple GPU. Use gpu_mode='single'.")
    return mode


def has_ranks(mode: object) -> bool:
    """Return True if a mode runs one process per device."""
    return mode in ("ddp", "fsdp")


def has_replicas(mode: object, devices: Sequence[object]) -> bool:
    """Return True if threads of one process compute the parts of each batch, each with a replica of the model."""
    return mode == "dp" and len(devices) > 1


def check_num_nodes(num_nodes: object) -> int:
    """Return ``num_nodes`` after checking it.

    Raises
    ------
    ConfigurationError
        If it is not an int of 1 or more. A bool or a string is not accepted.
    """
    number = whole_number(num_nodes)
    if number is None or number < 1:
        raise ConfigurationError(f"num_nodes={shown(num_nodes)}: must be an int of 1 or more (the number of machines).")
    return number


def effective_batch_size(mode: str, batch_size: int, num_devices: int, num_nodes: int = 1) -> int:
    """Return the number of samples in a global batch, for loaders with this ``batch_size``.

    ``batch_size`` is per process: ``ddp`` and ``fsdp`` multiply it by the number of ranks, while ``single`` and ``dp``
    (which splits the batch) do not. Gradient accumulation multiplies the samples of an optimizer step, not of a global
    batch.

    Raises
    ------
    ConfigurationError
        For more than one node in a mode that uses only one.
    """
    mode = resolve_mode(mode, num_devices, num_nodes)
    return batch_size * num_devices * num_nodes if has_ranks(mode) else batch_size
