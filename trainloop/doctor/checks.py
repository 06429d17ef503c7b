"""The checks of the doctor. Each is a function of :class:`Readings` that yields lines of the report."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trainloop._support.distribution import NAME, REINSTALL, pip_install
from trainloop.doctor.probe import Readings
from trainloop.resources.quota import Limit

__all__ = ["CHECKS", "Check"]

GIB = 2**30
LEAST_SHM = 1 * GIB
"""Minimum free space in ``/dev/shm``, in bytes. Loader workers can fill smaller ones (Docker's default is 64 MiB)."""
LEAST_TEMPORARY = 1 * GIB
LEAST_DESCRIPTORS = 1024
_LISTENERS = {"linux": "ss -ltnp", "darwin": "lsof -iTCP -sTCP:LISTEN", "win32": "netstat -ano"}

# Library names (without "lib") and NVIDIA's packages for them (without "nvidia-"), if the two names are different.
_PACKAGES = {"cudart": "cuda-runtime", "cublaslt": "cublas", "cupti": "cuda-cupti"}
_PACKAGES |= {"nvrtc": "cuda-nvrtc", "nvtoolsext": "nvtx"}

Status = Literal["ok", "attention", "problem"]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """Advice to the user; empty if nothing is wrong."""


def _verdict(name: str, found: str, wrong: bool, remedy: str, status: Status = "attention") -> Check:
    """Return a line with this status and remedy if ``wrong`` is True, otherwise a line with the status ``ok``."""
    return Check(name, status, found, remedy) if wrong else Check(name, "ok", found)


def check_distribution(r: Readings) -> Iterator[Check]:
    if r.other_distribution:
        yield Check(NAME, "problem", f"{r.other_distribution} has the same import name", REINSTALL)


def check_python(r: Readings) -> Iterator[Check]:
    _, minor, micro = r.python
    fixed = {10: 15, 11: 10}.get(minor, 0)
    remedy = (
        f"install Python 3.{minor}.{fixed} or newer: a DataLoader's worker of a rank can hang when it starts "
        "(python/cpython#112275)."
    )
    yield _verdict("python", ".".join(map(str, r.python)), micro < fixed and r.platform != "win32", remedy)


def check_requirements(r: Readings) -> Iterator[Check]:
    found = _line("; ".join(r.conflicts)) or "python -m pip check finds no conflict"
    remedy = "install the packages that are named here; python -m pip check shows the full list."
    yield _verdict("requirements", found, bool(r.conflicts), remedy, "problem")


def check_extras(r: Readings) -> Iterator[Check]:
    if r.extras:
        installed = ", ".join(extra for extra, missing in r.extras.items() if not missing) or "no extra"
        absent = [extra for extra, missing in r.extras.items() if missing]
        hint = f"; without {', '.join(absent)} ({pip_install(absent[0])})" if absent else ""
        yield Check("extras", "ok", f"installed: {installed}{hint}")


def check_torch(r: Readings) -> Iterator[Check]:
    torch = r.torch.found
    if torch is None:
        library = missing_library(r.torch.error)
        if library is not None:
            remedy = remedy_for(library, r.torch_requirements)
        else:
            remedy = "pip install --force-reinstall torch. To see the crash: python -X faulthandler -c 'import torch'."
        yield Check("import torch", "problem", _line(r.torch.error), remedy)
        return
    yield Check("torch", "ok", f"{torch['version']} with {torch['gpus'] or 'no'} GPU{'s' * (torch['gpus'] != 1)}")
    if torch["warnings"]:  # for example, about an old driver
        remedy = "python -m torch.utils.collect_env shows the driver, the GPUs and the build of torch."
        yield Check("gpus", "problem", _line(torch["warnings"][0]), remedy)
    if not torch["gloo"]:
        remedy = "ddp needs Gloo: install an official build of torch."
        yield Check("ddp", "problem", "this build of torch has no Gloo", remedy)


def check_cpus(r: Readings) -> Iterator[Check]:
    if r.resources is None:
        return
    cpus, memory = r.resources.num_cpus, r.resources.memory
    limits, memory_limits = r.resources.cpu_limits, r.resources.memory_limits
    yield Check("cpus", "ok", f"{cpus} of the host's {limits[0].value}{_limited_by(limits)}")
    variable = r.environ.get("OMP_NUM_THREADS", "")
    threads = int(variable) if variable.isdecimal() else r.torch.found["threads"] if r.torch.found else 0
    if threads > cpus:
        remedy = (
            f"threads will compete for CPUs: set OMP_NUM_THREADS={cpus} or less (in ddp, divided by the number of "
            f"ranks), or give the loop a ResourceQuota(num_cpus={cpus})."
        )
        yield Check("threads", "attention", f"{threads} threads on {cpus} CPUs", remedy)
    found = f"{memory / GIB:.1f} GiB of the host's {memory_limits[0].value / GIB:.1f}{_limited_by(memory_limits)}"
    remedy = "each rank needs about 0.3 GiB without data: raise the memory limit, or start fewer ranks."
    yield _verdict("memory", found, memory < 2 * GIB, remedy)


def _limited_by(limits: Sequence[Limit]) -> str:
    """Return a string that names the source of the lowest limit; an empty string if the host itself sets it."""
    least = min(limits, key=lambda limit: limit.value)
    return f", limited by {least.source}" if least.value < limits[0].value else ""


def check_places(r: Readings) -> Iterator[Check]:
    if r.platform != "linux":
        pass  # only Linux has /dev/shm
    elif r.shm is None:
        remedy = "data is shared through files in the temporary folder instead."
        yield Check("/dev/shm", "attention", "does not exist", remedy)
    else:
        total, free = r.shm
        remedy = (
            "loaders with num_workers > 0 send their batches through /dev/shm, and fail with 'Bus error' if it is "
            "full: use docker run --shm-size=8g, or num_workers=0."
        )
        found = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free"
        yield _verdict("/dev/shm", found, free < LEAST_SHM, remedy)
    folder, free = r.temporary
    remedy = "data for ranks may be stored there: set TMPDIR to a larger disk."
    yield _verdict("temporary files", f"{folder}: {free / GIB:.1f} GiB free", free < LEAST_TEMPORARY, remedy)
    if r.descriptors is not None:
        soft, hard = r.descriptors
        most = min(65536, hard) if hard > 0 else 65536
        remedy = f"loaders with many workers may fail with 'Too many open files': run ulimit -n {most}."
        few = 0 <= soft < LEAST_DESCRIPTORS
        yield _verdict("file descriptors", f"{soft} (at most {hard})", few, remedy)


def check_network(r: Readings) -> Iterator[Check]:
    remedy = (
        "ranks of one host connect over 127.0.0.1: bring this interface up (ip link set lo up), and check that no "
        "firewall blocks it."
    )
    found = r.loopback_error or "127.0.0.1 answers"
    yield _verdict("loopback", found, bool(r.loopback_error), remedy, "problem")
    if r.hostname_error:
        remedy = (
            "runs on several hosts need an address: add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME."
        )
        yield Check("host name", "attention", r.hostname_error, remedy)
    if r.port_error:
        listeners = _LISTENERS.get(r.platform, "netstat")
        remedy = f"choose another port from 1024 to 65535, or end the process that uses this one ({listeners})."
        yield Check("port", "problem", f"MASTER_PORT={r.environ.get('MASTER_PORT')} {r.port_error}", remedy)


def check_launcher(r: Readings) -> Iterator[Check]:
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in wanted if r.environ.get(name)]
    shown = ", ".join(f"{name}={r.environ[name]}" for name in given)
    if len(given) == 4:
        rank, world = r.environ["RANK"], r.environ["WORLD_SIZE"]
        wrong = not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world))
        remedy = "RANK must be less than WORLD_SIZE: fix the launcher's settings, or unset both."
        yield _verdict("torchrun", shown + ": fit joins as this rank" * (not wrong), wrong, remedy, "problem")
    elif "RANK" in given or "WORLD_SIZE" in given:
        missing = ", ".join(name for name in wanted if name not in given)
        remedy = "fit starts its own ranks: set all four variables to join as a rank, or unset them."
        yield Check("torchrun", "attention", f"{shown}, without {missing}", remedy)
    tasks = r.environ.get("SLURM_NTASKS", "")
    if r.environ.get("SLURM_JOB_ID") or tasks:
        cpus, job = r.environ.get("SLURM_CPUS_PER_TASK", ""), r.environ.get("SLURM_JOB_ID", "?")
        found = f"job {job}, tasks: {tasks or '1'}, CPUs per task: {cpus or '1'}"
        if r.environ.get("SLURM_PROCID") and tasks.isdecimal() and int(tasks) > 1:
            rank = r.environ["SLURM_PROCID"]
            step = any(name.startswith("SLURM_STEP") for name in r.environ)
            task = rank != "0" or step or not r.environ.get("SLURM_JOB_NAME")
            joins = f"fit joins as rank {rank}"
            found += f": {joins if task else 'srun has not started this process, so fit starts ranks itself'}"
        few = not cpus and tasks.isdecimal() and int(tasks) >= 1
        remedy = "without --cpus-per-task, each rank shares one CPU with its loaders' workers."
        yield _verdict("slurm", found, few, remedy)


def missing_library(message: str) -> str | None:
    """Return the file in a message of the dynamic loader, such as ``libcudnn.so.9``; ``None`` for other messages."""
    found = re.search(
        r"(lib[\w+.-]*?\.so(?:\.\d+)*): (?:cannot open shared object|undefined symbol|version `)", message
    )
    if found is None:  # torch has its own message about NVIDIA's packages, which it preloads
        found = re.search(r"(lib[\w+-]+\.so[\w.*\[\]-]*) not found in the system path", message)
    return None if found is None else found[1]


def remedy_for(library: str, requirements: Sequence[str] = ()) -> str:
    """Return advice for a library that can't be loaded.

    Parameters
    ----------
    library : str
        Name of the file, such as ``libcudnn.so.9``.
    requirements : sequence of str
        Requirements of the installed torch, which include NVIDIA's packages.
    """
    # The suffix of a name such as libcudnn_ops.so.9 is removed, because one package contains all of them.
    stem = library.partition(".so")[0].removeprefix("lib").partition("_")[0].lower()
    if stem in ("cuda", "nvidia-ml"):
        return (
            f"{library} is part of NVIDIA's driver: install the driver, or start the container with GPUs (docker run "
            "--gpus all). On a machine without GPUs, install a CPU build of torch."
        )
    package = rf"nvidia-{re.escape(_PACKAGES.get(stem, stem))}(-cu\d+)?(?![\w-])"
    needed = next((requirement for requirement in requirements if re.match(package, requirement)), None)
    if needed is None:
        return f"find the package that contains {library} (apt-file search {library}), or reinstall torch."
    wanted = re.sub(r"[\s()]|;.*", "", needed)
    return (
        f"pip install '{wanted}', which contains {library}. If it is installed, another copy may be found first: check "
        "LD_LIBRARY_PATH."
    )


def _line(text: str) -> str:
    """Return the text in one line, shortened to 200 characters."""
    return textwrap.shorten(text, 200, placeholder="...")


CHECKS: tuple[Callable[[Readings], Iterator[Check]], ...] = (
    check_distribution,
    check_python,
    check_requirements,
    check_extras,
    check_torch,
    check_cpus,
    check_places,
    check_network,
    check_launcher,
)
