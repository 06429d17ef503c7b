"""Enforce a quota on CPUs, threads, GPU memory and main memory of this process and its children.

Only :func:`applied` changes the process. It undoes all changes at the end of its block, even after an exception. The
functions above it only compute the limits.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from trainloop._support import platform
from trainloop._support.user_line import warn
from trainloop.errors import ResourceError
from trainloop.resources import lease
from trainloop.resources.machine import available
from trainloop.resources.quota import ResourceQuota, Resources, check_one_model, exact, format_bytes, is_auto

if TYPE_CHECKING:
    import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


# -- limits that follow from a quota --------------------------------------------------------------------------------


def check_quota(quota: ResourceQuota, *, ranks: int = 1, machine: Resources | None = None) -> None:
    """Raise an error if this machine can't meet a run's quota.

    Parameters
    ----------
    quota : ResourceQuota
        Quota of the run on this node, for all its ranks together.
    ranks : int
        Number of processes that train on this node.
    machine : Resources, optional
        Replacement for the result of :func:`~trainloop.resources.available`.

    Raises
    ------
    ResourceError
        If the quota exceeds what is available (it is never reduced silently), has fewer CPUs than ranks, or has a
        number of GPUs that one model can't use, such as 1.5.
    """
    if not isinstance(quota, ResourceQuota):
        raise ResourceError(
            f"resources={quota!r}: must be a ResourceQuota, e.g. resources=ResourceQuota(num_cpus=2, num_gpus=0.5)."
        )
    machine = available() if machine is None else machine
    for name, what, sources in (
        ("num_cpus", "number of CPUs", machine.cpu_limits),
        ("num_gpus", "number of visible GPUs", machine.gpu_limits),
        ("memory", "memory", machine.memory_limits),
    ):
        requested, limit = getattr(quota, name), getattr(machine, name)
        if requested != "auto" and exact(requested) > limit:
            show = format_bytes if name == "memory" else str
            decisive = min(sources, default=(0, "what is available"))[1]
            raise ResourceError(
                f"{name}={show(requested)} exceeds the {what} that this process may use ({show(limit)}, limited by "
                f"{decisive}). Request at most {show(limit)}, or 'auto'. print(trainloop.resources.available()) shows "
                "all limits."
            )
    if quota.num_cpus != "auto" and quota.num_cpus < ranks:
        raise ResourceError(
            f"num_cpus={quota.num_cpus} is too few for {ranks} ranks: each rank needs at least one CPU. Request at "
            f"least {ranks}, or start fewer ranks."
        )
    check_one_model("num_gpus", quota.num_gpus)


def devices_under(
    quota: ResourceQuota | None, devices: list[torch.device], asked: object, argument: str = "devices"
) -> list[torch.device]:
    """Return the run's devices, limited to the quota's GPUs.

    Parameters
    ----------
    quota : ResourceQuota or None
        Quota of the run on this node.
    devices : list of torch.device
        The devices that :func:`trainloop.devices.resolve` chose.
    asked : object
        The user's ``devices``. ``'auto'`` is adapted to the quota; an explicit request must not exceed it.
    argument : str
        Name of the argument that ``asked`` is from, for the error.

    Returns
    -------
    list of torch.device
        At most the quota's number of GPUs (a fraction counts as one GPU); the CPU if the quota has no GPU.

    Raises
    ------
    ResourceError
        If more GPUs were requested explicitly.
    """
    if quota is None or quota.num_gpus == "auto" or devices[0].type == "cpu":
        return devices
    most = math.ceil(exact(quota.num_gpus))
    if len(devices) <= most:
        return devices
    if not is_auto(asked):
        raise ResourceError(
            f"{argument}={asked!r} requests {len(devices)} GPUs, but the quota has num_gpus={quota.num_gpus}. Use "
            f"devices='auto', or ResourceQuota(num_gpus={len(devices)})."
        )
    import torch

    return devices[:most] or [torch.device("cpu")]


def cpu_shares(quota: ResourceQuota | None, ranks: int, cpus: Sequence[int] | None = None) -> list[list[int]]:
    """Return disjoint lists of CPUs, one for each rank. The first ranks may have one CPU more than the others.

    Parameters
    ----------
    quota : ResourceQuota or None
        Quota of the run on this node. Without a quota, all CPUs are divided.
    ranks : int
        Number of processes that train on this node.
    cpus : sequence of int, optional
        CPUs to divide. Default: this process's affinity mask.

    Returns
    -------
    list of list of int
        One list for each rank. If there are fewer CPUs than ranks, every rank gets all of them.
    """
    usable = list(platform.usable_cpus() if cpus is None else cpus)
    if quota is not None and quota.num_cpus != "auto":
        usable = usable[: quota.num_cpus]
    if len(usable) < ranks:
        return [usable] * ranks
    share, rest = divmod(len(usable), ranks)
    starts = [rank * share + min(rank, rest) for rank in range(ranks + 1)]
    return [usable[starts[rank] : starts[rank + 1]] for rank in range(ranks)]


def _threads(quota: ResourceQuota | None, ranks: int) -> int:
    """Return the number of CPUs of one rank. In a container, this number may be lower than the affinity mask allows."""
    cpus = available().num_cpus if quota is None or quota.num_cpus == "auto" else quota.num_cpus
    return max(1, cpus // ranks)


def child_environment(
    quota: ResourceQuota | None, ranks: int = 1, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return environment variables with the number of threads, for child processes of a run.

    They must be set before a child's interpreter starts, because OpenMP reads them once.

    Parameters
    ----------
    quota : ResourceQuota or None
        Quota of the run on this node. Without a quota, all CPUs are divided, and a lower number of threads that was
        set with ``torch.set_num_threads`` is kept.
    ranks : int
        Number of processes that train on this node.
    environ : mapping, optional
        Replacement for ``os.environ``. If it has a lower value, that value is kept.

    Returns
    -------
    dict of str to str
        ``OMP_NUM_THREADS``, ``MKL_NUM_THREADS`` and ``OPENBLAS_NUM_THREADS``.
    """
    threads, torch = _threads(quota, ranks), sys.modules.get("torch")
    if torch is not None and (quota is None or quota.num_cpus == "auto"):
        threads = min(threads, torch.get_num_threads())
    return _thread_variables(threads, os.environ if environ is None else environ)


def threads_in(variable: str) -> int | None:
    """Return the number of threads in a value of ``OMP_NUM_THREADS`` or the like; ``None`` if the value is invalid."""
    # OpenMP accepts a list, with one number for each level of nesting.
    found = re.fullmatch(r"\s*([1-9][0-9]{0,8})\s*(,.*)?", variable)
    return None if found is None else int(found[1])


def _thread_variables(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    values = {}
    for name in THREAD_VARIABLES:
        current = threads_in(environ.get(name, ""))
        values[name] = environ[name] if current is not None and current <= threads else str(threads)
    return values


def cap_workers(num_workers: int | Literal["auto"], quota: ResourceQuota | None, ranks: int = 1) -> int:
    """Return a ``DataLoader``'s number of workers, lowered so that each worker and the main process has a CPU.

    Parameters
    ----------
    num_workers : int or 'auto'
        The loader's number of workers; ``'auto'`` for one worker per CPU, except the main process's CPU.
    quota : ResourceQuota or None
        Quota of the run on this node. Without a quota, or with ``num_cpus='auto'``, a number is returned unchanged.
    ranks : int
        Number of processes that train on this node, each with its own workers.

    Returns
    -------
    int
        Number of workers. With one CPU, the number is 0, so the main process loads the data.

    Warns
    -----
    UserWarning
        If the number was lowered.
    """
    if num_workers == "auto":
        return _threads(quota, ranks) - 1
    if quota is None or quota.num_cpus == "auto":
        return num_workers
    most = _threads(quota, ranks) - 1
    if num_workers <= most:
        return num_workers
    warn(
        f"num_workers={num_workers} is lowered to {most}: the quota has {most + 1} CPU{'s' * (most > 0)} for each "
        "rank, and the rank's main process uses one. For more workers, raise the quota's num_cpus."
    )
    return most


# -- applying a quota ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def applied(
    quota: ResourceQuota | None,
    *,
    local_rank: int | None = 0,
    ranks: int = 1,
    device: torch.device | None = None,
    loader_workers: int = 0,
) -> Iterator[None]:
    """Return a context that limits this process to its share of the quota, and undoes all changes at its end.

    Parameters
    ----------
    quota : ResourceQuota or None
        Quota of the run on this node. Without one, ranks of ``ddp`` divide the machine; a single process changes
        nothing.
    local_rank : int or None
        Rank whose share is applied. None for a process that starts ``ranks`` other processes and only waits: it gets
        the CPUs of all ranks, which inherit and divide them.
    ranks : int
        Number of processes that train on this node.
    device : torch.device, optional
        Device that this process trains on. A quota of a fraction of a GPU limits torch's allocator on this device.
    loader_workers : int
        Number of ``DataLoader`` workers. The number of threads of this process is lowered by this number.

    Raises
    ------
    ResourceError
        If the machine can't meet the quota, or the process already uses more memory than the quota allows.

    Notes
    -----
    CPUs that no other trainloop run has leased are chosen first, and leased during the block. If too few are free,
    other CPUs are shared. The fraction of a GPU limits torch's caching allocator, but not the CUDA context or other
    libraries; only MIG and MPS isolate processes completely. The memory limit applies to this process's private memory
    (``RLIMIT_DATA``, Linux): allocations beyond it fail. Each child has the same limit.
    """
    if quota is None and ranks == 1:
        yield
        return
    if quota is not None:
        check_quota(quota, ranks=ranks)
    threads = _threads(quota, ranks)  # computed before the affinity reduces the available CPUs
    with contextlib.ExitStack() as undo:
        share = _set_affinity(quota, local_rank, ranks, undo)
        if local_rank is not None:
            if quota is None or quota.num_cpus == "auto":
                _set_threads(threads, undo, at_most=True)
            else:
                _set_threads(max(1, share - loader_workers), undo)
            if quota is not None:
                _limit_gpu_memory(quota, device, undo)
                _limit_memory(quota, ranks, undo)
        yield


def _set_affinity(quota: ResourceQuota | None, local_rank: int | None, ranks: int, undo: contextlib.ExitStack) -> int:
    """Bind this process to its CPUs, and return their number."""
    before = platform.usable_cpus()
    cpus = before
    if local_rank is not None and ranks > 1:
        # The process that started this rank has bound itself to the run's CPUs, and this rank inherited them.
        cpus = cpu_shares(quota, ranks, before)[local_rank]
    elif quota is not None and quota.num_cpus != "auto":
        cpus = free_cpus(quota.num_cpus, before, undo)
        if not platform.affinity():
            warn(f"num_cpus={quota.num_cpus} limits only threads, because this system can't bind processes to CPUs.")
    if cpus != before:
        undo.callback(_restore_affinity, before, cpus, _thread_ids())
        platform.set_affinity(cpus)
    return len(cpus)


def _thread_ids() -> set[int]:
    """Return the IDs of this process's threads."""
    with contextlib.suppress(OSError):  # the system has no /proc
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()


def _restore_affinity(before: Sequence[int], narrow: Sequence[int], threads_before: set[int]) -> None:
    """Restore the affinity of this thread, and of threads that were started since the affinity was changed.

    Threads of OpenMP and autograd inherit the affinity of the thread that starts them.
    """
    platform.set_affinity(before)
    for thread in _thread_ids() - threads_before:
        with contextlib.suppress(OSError):  # the thread has ended
            if platform.affinity(thread) == sorted(narrow):
                platform.set_affinity(before, thread)


def free_cpus(number: int, allowed: list[int], undo: contextlib.ExitStack) -> list[int]:
    """Return ``number`` CPUs, and lease the free ones among them until ``undo`` runs.

    If too few are free, other CPUs are shared, beginning with the last ones.
    """
    free: list[int] = []
    if not lease.inherited():
        pool = [f"cpu-{cpu}" for cpu in allowed]
        # ResourceError if all are leased, OSError if there is no folder for locks. Training is possible in both cases.
        with contextlib.suppress(ResourceError, OSError):
            held = undo.enter_context(lease.acquire({"cpu": lease.Request(number, pool, least=1)}, timeout_s=0))
            free = [allowed[pool.index(name)] for name in held.names["cpu"]]
    shared = [cpu for cpu in reversed(allowed) if cpu not in free]
    return sorted(free + shared[: number - len(free)])


def _set_threads(threads: int, undo: contextlib.ExitStack, *, at_most: bool = False) -> None:
    # torch is not imported here: it reads the environment when it is imported, and a scikit-learn fold may not need it.
    torch = sys.modules.get("torch")
    if at_most and torch is not None:  # If no number was requested, a lower current one is kept.
        threads = min(threads, torch.get_num_threads())
    before = 0 if torch is None else torch.get_num_threads()
    values = _thread_variables(threads, os.environ)
    # threadpoolctl sets KMP_DUPLICATE_LIB_OK when it is imported.
    for name in (*values, "KMP_DUPLICATE_LIB_OK"):
        undo.callback(set_variable, name, os.environ.get(name))
    os.environ.update(values)
    try:
        import threadpoolctl
    except ImportError:
        pass
    else:
        undo.enter_context(threadpoolctl.threadpool_limits(threads))
    if torch is not None:
        undo.callback(torch.set_num_threads, before)
        torch.set_num_threads(threads)


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable; ``None`` removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _limit_gpu_memory(quota: ResourceQuota, device: torch.device | None, undo: contextlib.ExitStack) -> None:
    if device is None or device.type != "cuda" or quota.num_gpus == "auto":
        return
    fraction = exact(quota.num_gpus)
    # Whole GPUs have no limit, because no other run shares them.
    if not 0 < fraction < 1:
        return
    import torch

    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(float(fraction), device)
    undo.callback(torch.cuda.set_per_process_memory_fraction, before, device)


def _limit_memory(quota: ResourceQuota, ranks: int, undo: contextlib.ExitStack) -> None:
    """Limit this process's memory to its share of the quota.

    RLIMIT_DATA counts reserved pages, too, and an idle interpreter has reserved many. So the limit is the current
    reservation plus the unused part of the share.
    """
    resource = platform.resource
    if quota.memory == "auto":
        return
    if not sys.platform.startswith("linux") or resource is None:
        warn(f"memory={format_bytes(int(quota.memory))} is not enforced: only Linux can limit a process's memory.")
        return
    import psutil

    share = int(quota.memory) // ranks
    usage = psutil.Process().memory_info()
    if usage.rss > share:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise ResourceError(
            f"memory={format_bytes(share)}{each}: this process already uses {format_bytes(usage.rss)}. Request more "
            "memory, or load less before training."
        )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = usage.data + share - usage.rss
    if before[0] == resource.RLIM_INFINITY or limit < before[0]:
        undo.callback(resource.setrlimit, resource.RLIMIT_DATA, before)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
