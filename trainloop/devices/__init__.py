"""Choose a run's devices: parse requests, resolve mode names, count the samples of a batch.

Indices always refer to ``CUDA_VISIBLE_DEVICES``, like torch's.
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
    """Return the number of cores that this process may use."""
    return len(affinity()) or os.cpu_count() or 1


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
        For the CPU one ``torch.device('cpu')`` per process.

    Raises
    ------
    ConfigurationError
        If the accelerator's name is unknown.
    DeviceError
        If the accelerator is missing, or has no such devices.

    Warns
    -----
    UserWarning
        In a notebook or shell, if ``devices='auto'`` uses only one of several GPUs; and if there are more processes
        than cores.
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

    This is for several runs on one machine, especially in 'exclusive process' mode. The function tries GPUs in index
    order, with one tiny tensor on each, which creates a CUDA context. The search stops as soon as enough GPUs are
    found. GPUs that another trainloop run on this machine has leased are skipped. The lease lasts until this process
    ends. A second call in the same process may return the same GPUs.

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
        If fewer GPUs are visible than requested (before any GPU is tried); if fewer are usable (the message has the
        indices of the occupied ones); or if ``num_devices`` is not an int.

    Notes
    -----
    In the default compute mode a busy GPU still accepts a tensor, so a usable GPU may have other users. If
    ``nvidia-ml-py`` (the extra ``gpu``) is installed, GPUs without other users' processes are tried first.
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
