"""GPU names that are the same in every process, the number of other processes on each GPU, and a choice of free GPUs.

An index counts within a process's own mask, and NVML's order differs from CUDA's; only the UUID is the same everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainloop.errors import DeviceError, ResourceError
from trainloop.resources import lease
from trainloop.resources.masks import visible_devices

__all__ = ["lease_usable", "names", "other_processes"]


def names(count: int) -> list[str]:
    """Return the UUIDs of the visible GPUs, in CUDA's order, without creating a context.

    If torch does not know a UUID, the name is the entry of ``CUDA_VISIBLE_DEVICES``, or the index.
    """
    mask = visible_devices()
    found = []
    for index in range(count):
        entry = str(index) if mask is None or index >= len(mask) else mask[index]
        found.append(entry if entry.startswith("MIG-") else _uuid(index) or f"gpu-{entry}")
    return found


def _uuid(index: int) -> str | None:
    import torch

    try:
        uuid = torch.cuda.get_device_properties(index).uuid
    except (AssertionError, AttributeError, RuntimeError):
        return None
    return f"GPU-{uuid}"


def other_processes(names: Sequence[str]) -> dict[str, int]:
    """Return the number of other processes that use each GPU; empty if NVML can't report it.

    Needs ``nvidia-ml-py`` (``pip install 'tt-trainloop[gpu]'``). GPUs are matched by UUID.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver or no permission
        return {}
    found = {}
    try:
        for name in names:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(name)
                processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except pynvml.NVMLError:
                continue
            found[name] = len({process.pid for process in processes} - {os.getpid()})
    finally:
        pynvml.nvmlShutdown()
    return found


_own_leases: dict[str, lease.Lease] = {}  # leases on GPUs by name, until this process ends


def lease_usable(num_devices: int, count: int) -> list[int]:
    """Do the work of :func:`trainloop.devices.find_usable_cuda_devices`, after its argument was checked."""
    found = names(count)
    others = other_processes(found)
    # GPUs that other processes use come last: unusable in exclusive mode, and slow in any other mode.
    candidates = sorted(range(count), key=lambda index: (others.get(found[index], 0) > 0, index))
    # One run chooses at a time: two runs that each hold some GPUs and need more could both fail.
    with lease.one_at_a_time("choosing-gpus"):
        return _first_usable(num_devices, candidates, found)


def _first_usable(num_devices: int, candidates: Sequence[int], names: Sequence[str]) -> list[int]:
    """Lease and return the first ``num_devices`` candidates that work (-1: all); each try may create a context."""
    wanted = len(candidates) if num_devices == -1 else num_devices
    usable: list[int] = []
    occupied: list[int] = []
    leases: dict[str, lease.Lease] = {}
    try:
        for index in candidates:
            if len(usable) == wanted:
                break
            if names[index] not in _own_leases:
                held = _leased(names[index])
                if held is None:
                    occupied.append(index)
                    continue
                leases[names[index]] = held
            if _takes_a_tensor(index):
                usable.append(index)
            else:
                occupied.append(index)
                if names[index] in leases:
                    leases.pop(names[index]).release()
        if not usable or (num_devices != -1 and len(usable) < wanted):
            raise DeviceError(
                f"num_devices={num_devices}: only {len(usable)} of {len(candidates)} GPUs are usable now. Occupied, "
                f"or leased by another run: {sorted(occupied)}. Ask for fewer, or wait until another run ends."
            )
        _own_leases.update(leases)
        leases.clear()
        return sorted(usable)
    finally:
        for held in leases.values():
            held.release()


def _leased(name: str) -> lease.Lease | None:
    """Lease the GPU; return None if another run has leased it, and an empty lease if there is no folder for locks."""
    if lease.inherited():  # The GPUs that this process sees belong to its parent's lease.
        return lease.Lease({}, [])
    try:
        return lease.acquire({"gpu": lease.Request(1, [name])}, timeout_s=0)
    except lease.UnsafeFolderError:
        raise
    except ResourceError:
        return None
    except OSError:
        return lease.Lease({}, [])


def _takes_a_tensor(index: int) -> bool:
    import torch

    try:
        torch.tensor(0.0, device=torch.device("cuda", index))
    except RuntimeError:  # 'busy or unavailable', out of memory, and torch.AcceleratorError
        return False
    return True
