"""Determine the resources that this process may use, from the affinity, cgroups, Slurm, memory and visible GPUs.

``os.cpu_count`` returns the CPUs of the host even inside a container, and of the whole node inside a job step.
Therefore all limits are read, and the lowest applies. A cgroup's limit applies to its descendants, so every ancestor is
read.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from trainloop._support import platform
from trainloop.resources.gpus import visible_devices
from trainloop.resources.quota import Limit, Resources

_CPU_VARIABLES = ("SLURM_CPUS_PER_TASK", "LOKY_MAX_CPU_COUNT", "TRAINLOOP_NUM_CPUS")


def available(
    *,
    root: str | os.PathLike[str] = "/",
    cpu_count: int | None = None,
    affinity: Collection[int] | int | None = None,
    environ: Mapping[str, str] | None = None,
    memory: int | None = None,
    num_gpus: int | None = None,
) -> Resources:
    """Return the resources that this process may use, without creating a CUDA context.

    Parameters
    ----------
    root : path
        Replacement for ``/``: ``proc/self/cgroup`` and ``sys/fs/cgroup`` are read below it.
    cpu_count : int, optional
        Replacement for the machine's number of CPUs. If ``affinity`` is not passed, the process may use all of them.
    affinity : collection of int, or int, optional
        Replacement for the CPUs of the affinity mask, or their number.
    environ : mapping, optional
        Replacement for ``os.environ``.
    memory : int, optional
        Replacement for the machine's memory, in bytes.
    num_gpus : int, optional
        Replacement for the number of visible GPUs.

    Returns
    -------
    Resources
        For each resource, the lowest of all limits, and at least 1 CPU. ``print`` it to see which limits apply.

    Notes
    -----
    ``SLURM_CPUS_PER_TASK``, ``LOKY_MAX_CPU_COUNT`` and ``TRAINLOOP_NUM_CPUS`` can lower the count, never raise it.
    """
    environ = os.environ if environ is None else environ
    groups = _Cgroups(Path(root))

    cpus: list[Limit] = []
    if cpu_count is not None:
        cpus.append(Limit(cpu_count, "the machine (cpu_count)"))
    # If cpu_count or affinity is passed, it replaces the machine's values.
    elif affinity is None:
        cpus.append(Limit(os.cpu_count() or 1, "the machine (os.cpu_count)"))
        if mask := platform.affinity():
            cpus.append(Limit(len(mask), "the affinity mask"))
    if affinity is not None:
        allowed = affinity if isinstance(affinity, int) else len(set(affinity))
        cpus.append(Limit(allowed, "the affinity mask (affinity)"))
    cpus.extend(groups.cpu_limits())
    for name in _CPU_VARIABLES:
        value = _positive(environ.get(name))
        if value is not None:
            cpus.append(Limit(value, f"{name}={value}"))

    sizes = [Limit(physical_memory(), "the machine") if memory is None else Limit(memory, "the machine (memory)")]
    sizes.extend(groups.memory_limits())
    mebibytes = _positive(environ.get("SLURM_MEM_PER_NODE"))
    if mebibytes is not None:
        sizes.append(Limit(mebibytes * 2**20, f"SLURM_MEM_PER_NODE={mebibytes}"))

    gpus = Limit(_visible_gpus(), _gpu_source(environ)) if num_gpus is None else Limit(num_gpus, "num_gpus")
    return Resources(
        num_cpus=max(1, min(limit.value for limit in cpus)),
        num_gpus=gpus.value,
        memory=min(limit.value for limit in sizes),
        cpu_limits=tuple(cpus),
        gpu_limits=(gpus,),
        memory_limits=tuple(sizes),
    )


def _positive(text: str | None) -> int | None:
    """Return ``text`` as a positive int; None for any other text, which is ignored."""
    if text is None or re.fullmatch(r"[0-9]{1,18}", text.strip()) is None:
        return None
    return int(text) or None


def physical_memory() -> int:
    """Return the machine's memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().total)


def _visible_gpus() -> int:
    # If there is no driver, torch is not imported: the import takes seconds, and the result would be 0.
    if visible_devices() == [] or ("torch" not in sys.modules and not _may_have_gpu()):
        return 0
    import torch

    return torch.cuda.device_count()


def _may_have_gpu() -> bool:
    """Return False if torch can't find a GPU, because the driver's library (CUDA) or device (ROCm) is missing."""
    if not sys.platform.startswith("linux") or os.path.exists("/dev/kfd"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _gpu_source(environ: Mapping[str, str]) -> str:
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    return "the machine (torch.cuda.device_count)" if mask is None else f"CUDA_VISIBLE_DEVICES={mask}"


class _Cgroups:
    """Limits of the process's cgroup and of all its ancestors, in both versions of cgroups."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # Path of the process's group, by controller (version 1) or '' (version 2).
        self._groups: dict[str, PurePosixPath] = {}
        # If the file can't be read, the process's group is assumed to be the root.
        listing = _text_or_none(root / "proc/self/cgroup") or "0::/\n1:cpu,cpuset,memory:/"
        for line in listing.splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            for controller in controllers.split(","):
                self._groups[controller] = PurePosixPath(path or "/")

    def cpu_limits(self) -> Iterator[Limit]:
        for folder in self._folders(""):
            yield from _limit(folder / "cpu.max", _cpus_of_quota)
            yield from _limit(folder / "cpuset.cpus.effective", _cpus_of_set)
        for folder in self._folders("cpu"):
            # Version 1 has two files for the two numbers that version 2 has in one.
            period = _text_or_none(folder / "cpu.cfs_period_us") or ""
            yield from _limit(folder / "cpu.cfs_quota_us", _cpus_of_quota, after=f" {period}")
        for folder in self._folders("cpuset"):
            yield from _limit(folder / "cpuset.cpus", _cpus_of_set)

    def memory_limits(self) -> Iterator[Limit]:
        for folder in self._folders(""):
            yield from _limit(folder / "memory.max", _positive)
        for folder in self._folders("memory"):
            yield from _limit(folder / "memory.limit_in_bytes", _bytes_of_v1)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folder of the group and of each ancestor up to the mount. ``controller`` is '' in version 2."""
        if controller not in self._groups:
            return
        path = self._groups[controller].parts[1:]
        if ".." in path:  # The process is outside its cgroup namespace, so only the mount can be read.
            path = ()
        for mount in self._mounts(controller):
            # In a container, the path may be the host's, and only its last parts exist below the mount.
            inside = next((path[i:] for i in range(len(path)) if mount.joinpath(*path[i:]).is_dir()), ())
            for depth in range(len(inside), -1, -1):
                yield mount.joinpath(*inside[:depth])

    def _mounts(self, controller: str) -> list[Path]:
        names = (".", "unified") if not controller else (controller, "cpu,cpuacct")[: 1 + (controller == "cpu")]
        return [self._root / "sys/fs/cgroup" / name for name in names]


def _text_or_none(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _limit(path: Path, parse: Callable[[str], int | None], after: str = "") -> Iterator[Limit]:
    """Yield the limit in a file; yield nothing if the file is missing or malformed, or contains no limit."""
    text = _text_or_none(path)
    if text is None:
        return
    text += after
    value = parse(text)
    if value is not None:
        yield Limit(value, f"{path} ({' '.join(text.split())})")


def _cpus_of_quota(text: str) -> int | None:
    """Return the number of CPUs for a string ``quota period`` (microseconds), rounded up to whole CPUs."""
    match = re.fullmatch(r"\s*([0-9]{1,18})\s+([0-9]{1,18})\s*", text)
    if match is None or int(match[1]) == 0 or int(match[2]) == 0:
        return None
    return -(-int(match[1]) // int(match[2]))


def _cpus_of_set(text: str) -> int | None:
    """Return the number of CPUs in a list such as ``0-3,8``; None for an empty list, which means the parent's CPUs."""
    if re.fullmatch(r"\s*[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*\s*", text) is None:
        return None
    cpus: set[int] = set()
    for span in text.strip().split(","):
        first, _, last = span.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return len(cpus) or None


def _bytes_of_v1(text: str) -> int | None:
    value = _positive(text)
    # In version 1, 'no limit' is the largest multiple of the page size.
    return None if value is None or value >= 2**62 else value
