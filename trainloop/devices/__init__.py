"""Choose a run's devices: parse requests, resolve mode names, count batches.

``requests.py`` and ``modes.py`` are arithmetic on their arguments. Two functions
here look at the machine: :func:`resolve` counts devices, :func:`find_usable_cuda_devices` tries them.
:func:`visible_devices`, of ``trainloop.resources.masks``, is re-exported.

An index always counts within ``CUDA_VISIBLE_DEVICES``, as torch's own do.
"""

from __future__ import annotations

import os
import sys
from numbers import Integral
from typing import TYPE_CHECKING

from trainloop._support.platform import affinity
from trainloop._support.user_line import warn
from trainloop.devices.modes import (
    check_num_nodes,
    dp_chunks,
    effective_batch_size,
    global_rank,
    has_ranks,
    resolve_mode,
    world_size,
)
from trainloop.devices.requests import (
    DeviceChoice,
    choose_devices,
    most_cpu_processes,
    parse_devices,
    shown,
    whole_number,
)
from trainloop.errors import DeviceError
from trainloop.resources import gpus
from trainloop.resources.masks import child_mask, visible_devices

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


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(affinity()) or os.cpu_count() or 1


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
        For the CPU one ``torch.device('cpu')`` per process.

    Raises
    ------
    ConfigurationError
        If no accelerator has that name.
    DeviceError
        If the accelerator is absent, or has no such devices.

    Warns
    -----
    UserWarning
        In a notebook or shell, if ``devices='auto'`` uses one of several GPUs; and for more processes than cores.
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
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)  # IPython and Jupyter set ps1 too


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """GPUs that no other run uses, tried in index order with one tiny tensor each, and leased to this process.

    For several runs on one machine, above all in 'exclusive process' mode. A try creates a CUDA context, so it stops
    as soon as enough are found. GPUs that another trainloop run on this machine has leased are skipped; the lease on
    those returned lasts as long as this process. A second call in the same process may return the same GPUs.

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
        If no GPU is visible, if more are asked than are visible (both before any try), if fewer are usable, with the
        indices of the occupied ones, or if the number isn't one.

    Notes
    -----
    In the default compute mode a busy GPU still accepts a tensor, so 'usable' does not mean that it has no other user.
    GPUs without other users' processes come first if ``nvidia-ml-py`` is installed (the extra ``gpu``).
    """
    if not isinstance(num_devices, Integral) or isinstance(num_devices, bool) or num_devices < -1:
        raise DeviceError(
            f"num_devices={shown(num_devices)}: must be an int: -1 for all usable GPUs, or their number (0 or more)."
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
            f"num_devices={num_devices}: only {count} CUDA devices are visible here. "
            f"Ask for at most {count}, or -1 for all usable ones."
        )
    return gpus.lease_usable(int(num_devices), count)
