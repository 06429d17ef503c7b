"""The checks: each takes the readings and returns one or more lines. They decide and read nothing themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from trainloop.distribution import NAME, REINSTALL, pip_install
from trainloop.doctor.probe import Readings
from trainloop.doctor.shared_objects import missing_library, remedy_for
from trainloop.resources.quota import Limit

__all__ = ["CHECKS", "Check"]

GIB = 2**30
LEAST_SHM = 1 * GIB
"""Below it, workers of a loader that hand on large batches have filled it, in users' reports: Docker gives 64 MiB."""
LEAST_TEMPORARY = 1 * GIB
LEAST_DESCRIPTORS = 1024

Status = Literal["ok", "attention", "problem"]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """Advice; empty if there is nothing to do."""


def check_python(r: Readings) -> Iterator[Check]:
    version = ".".join(map(str, r.python))
    if r.python < (3, 10):
        yield Check("python", "problem", version, "trainloop needs Python 3.10 or newer: make a new environment.")
    elif r.platform != "Linux":
        yield Check(
            "python",
            "attention",
            f"{version} on {r.platform}",
            "trainloop is tested on Linux only.",
        )
    else:
        yield Check("python", "ok", f"{version} on {r.platform}")


def check_distribution(r: Readings) -> Iterator[Check]:
    if r.other_distribution:
        yield Check(NAME, "problem", f"{r.other_distribution} has the same import name", REINSTALL)


def check_requirements(r: Readings) -> Iterator[Check]:
    if r.imports.found is None:
        yield Check("requirements", "problem", r.imports.error, "Python can't start a process: look at its limits.")
        return
    for name, message in r.imports.found.items():
        library = missing_library(message)
        remedy = remedy_for(library) if library else f"pip install --force-reinstall {name.replace('_', '-')}"
        yield Check(f"import {name}", "problem", _line(message), remedy)
    if not r.imports.found:
        yield Check("requirements", "ok", "all can be imported")


def check_extras(r: Readings) -> Iterator[Check]:
    if r.extras:
        there = ", ".join(extra for extra, missing in r.extras.items() if not missing) or "no extra"
        absent = [extra for extra, missing in r.extras.items() if missing]
        how = f"; without {', '.join(absent)} ({pip_install(absent[0])})" if absent else ""
        yield Check("extras", "ok", f"installed: {there}{how}")


def check_torch(r: Readings) -> Iterator[Check]:
    torch = r.torch.found
    if torch is None:
        library = missing_library(r.torch.error)
        if library is not None:
            remedy = remedy_for(library, r.torch_requirements)
        elif "No module named 'torch'" in r.torch.error:
            remedy = "pip install torch"
        elif "numpy" in r.torch.error.lower():
            remedy = "torch and numpy don't fit: pip install --upgrade torch numpy."
        else:
            remedy = "pip install --force-reinstall torch; then python -X faulthandler -c 'import torch' shows where."
        yield Check("import torch", "problem", _line(r.torch.error), remedy)
        return
    built = f"for CUDA {torch['cuda']}" if torch["cuda"] else f"for ROCm {torch['hip']}" if torch["hip"] else "for CPUs"
    version = tuple(int(part) for part in re.findall(r"\d+", torch["version"])[:2])
    if version < (2, 6):
        yield Check("torch", "problem", torch["version"], "trainloop needs torch 2.6 or newer: pip install -U torch.")
    else:
        yield Check("torch", "ok", f"{torch['version']}, built {built}")
    if not torch["distributed"] or not torch.get("gloo"):
        yield Check("ddp", "problem", "this torch has no Gloo", "ddp needs it: install torch's own build for Linux.")


def check_gpus(r: Readings) -> Iterator[Check]:
    torch = r.torch.found
    if torch is None:
        return
    mask = r.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = mask is not None and not mask.strip(" ,").replace("-1", "")
    told = next((text for text in torch["warnings"] if "CUDA" in text or "driver" in text.lower()), "")
    if not torch["cuda"] and not torch["hip"]:
        if r.driver is not None:
            yield Check(
                "gpus",
                "problem",
                f"there is a driver ({r.driver}), but torch is built for CPUs",
                "install a CUDA build: pip uninstall torch, then the line of pytorch.org/get-started for this driver.",
            )
        else:
            yield Check("gpus", "ok", "none, and torch is built for CPUs")
    elif torch["available"]:
        yield from _devices(torch)
    elif hidden:
        yield Check("gpus", "ok", f"CUDA_VISIBLE_DEVICES={mask!r} hides all")
    elif told:
        remedy = "update NVIDIA's driver, or install a torch built for the CUDA version that it has."
        library = missing_library(told)
        yield Check("gpus", "problem", _line(told), remedy_for(library, r.torch_requirements) if library else remedy)
    elif r.driver is None:
        yield Check(
            "gpus",
            "attention",
            "none: no NVIDIA driver is loaded",
            "fine for the CPU; else install the driver, or start the container with GPUs (docker run --gpus all).",
        )
    else:
        yield Check(
            "gpus",
            "problem",
            f"the driver is there ({r.driver}), but torch finds no GPU",
            "look at CUDA_VISIBLE_DEVICES and at /dev/nvidia*; in a container: docker run --gpus all.",
        )


def _devices(torch: dict[str, Any]) -> Iterator[Check]:
    built_for = torch.get("architectures", [])
    numbers = [re.fullmatch(r"sm_(\d+)\d[af]?", arch) for arch in built_for]
    majors = {int(number[1]) for number in numbers if number}
    for index, device in enumerate(torch["devices"]):
        name = f"gpu {index}"
        major, minor = device["capability"]
        found = (
            f"{device['name']}, {device['free'] / GIB:.1f} of {device['total'] / GIB:.1f} GiB free, sm_{major}{minor}"
        )
        if majors and major not in majors and not any(arch.startswith("compute_") for arch in built_for):
            yield Check(
                name,
                "problem",
                f"{found}; torch is built for {', '.join(built_for)}",
                "it has no kernels for this GPU: install a build that has, newer for a new GPU.",
            )
        elif device["free"] < 0.5 * device["total"]:
            yield Check(name, "attention", found, "another process holds its memory: nvidia-smi shows which.")
        else:
            yield Check(name, "ok", found)
    if "cudnn_error" in torch:
        library = missing_library(torch["cudnn_error"])
        remedy = remedy_for(library) if library else "pip install --force-reinstall torch; look at LD_LIBRARY_PATH."
        yield Check("cudnn", "problem", _line(torch["cudnn_error"]), remedy)
    elif torch.get("cudnn"):
        yield Check("cudnn", "ok", str(torch["cudnn"]))
    if not torch.get("nccl") or "nccl_error" in torch:
        yield Check(
            "nccl",
            "problem",
            _line(torch.get("nccl_error", "this torch has none")),
            "ddp on GPUs needs it: reinstall torch, or use fit(backend='gloo').",
        )
    else:
        yield Check("nccl", "ok", torch.get("nccl_version", "there"))
    if len(torch["devices"]) > 1:
        apart = torch["peers"]
        pairs = ", ".join(f"{i} and {j}" for i, j in apart if i < j)
        yield (
            Check("p2p", "ok", "all GPUs reach each other")
            if not apart
            else Check(
                "p2p",
                "attention",
                f"no direct access between {pairs}",
                "ddp works, by way of the host's memory; if it hangs at the start: NCCL_P2P_DISABLE=1.",
            )
        )


def check_cuda_packages(r: Readings) -> Iterator[Check]:
    """Check NVIDIA's packages: torch pins each to one version, but loads any that is installed."""
    wrong = []
    for requirement in r.torch_requirements:
        pinned = re.match(r"(nvidia-[\w-]+)\s*\(?==\s*([\w.]+)", requirement)
        if pinned and "extra ==" not in requirement and "platform" in requirement:
            have = r.versions.get(pinned[1])
            # A package may be missing as its marker excludes it (another processor): that counts only if torch fails.
            if have != pinned[2] and (have is not None or r.torch.found is None):
                wrong.append((f"{pinned[1]}=={pinned[2]}", have or "missing"))
    if wrong:
        listed = ", ".join(f"{need.split('==')[0]} is {have}" for need, have in wrong)
        status: Status = "attention" if r.torch.found is not None else "problem"
        yield Check("cuda packages", status, listed, f"pip install {' '.join(repr(need) for need, _ in wrong)}")


def check_cpus(r: Readings) -> Iterator[Check]:
    if r.resources is None:
        return
    host = r.resources.cpu_limits[0]
    least = min(r.resources.cpu_limits, key=lambda limit: limit.value)
    cpus = r.resources.num_cpus
    found = f"{cpus} of the host's {host.value}" + (f", by {least.source}" if least.value < host.value else "")
    yield Check("cpus", "ok", found)
    threads = r.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cpus:
        yield Check(
            "threads",
            "attention",
            f"OMP_NUM_THREADS={threads} on {cpus} CPUs",
            f"threads will wait for each other: OMP_NUM_THREADS={cpus} or less, in ddp divided by the ranks.",
        )
    elif r.torch.found is not None and not threads and r.torch.found["threads"] > cpus:
        yield Check(
            "threads",
            "attention",
            f"torch takes {r.torch.found['threads']} threads on {cpus} CPUs",
            f"set OMP_NUM_THREADS={cpus}, or give the loop a ResourceQuota(num_cpus={cpus}).",
        )
    yield from _memory(r.resources.memory, list(r.resources.memory_limits))


def _memory(memory: int, limits: list[Limit]) -> Iterator[Check]:
    least = min(limits, key=lambda limit: limit.value)
    found = f"{memory / GIB:.1f} GiB" + (
        f" of the host's {limits[0].value / GIB:.1f}, by {least.source}" if least is not limits[0] else ""
    )
    low = memory < 2 * GIB
    remedy = (
        "each rank takes some 0.3 GiB before any data: raise the container's memory, or start fewer." if low else ""
    )
    yield Check("memory", "attention" if low else "ok", found, remedy)


def check_places(r: Readings) -> Iterator[Check]:
    if r.shm is None:
        yield Check(
            "/dev/shm", "attention", "there is none", "data are shared by files of the temporary folder instead."
        )
    elif r.shm[1] < LEAST_SHM:
        yield Check(
            "/dev/shm",
            "attention",
            f"{r.shm[1] / GIB:.2f} of {r.shm[0] / GIB:.2f} GiB free",
            "loaders with num_workers > 0 hand their batches on through it (Bus error): docker run --shm-size=8g, "
            "or num_workers=0.",
        )
    else:
        yield Check("/dev/shm", "ok", f"{r.shm[1] / GIB:.1f} of {r.shm[0] / GIB:.1f} GiB free")
    folder, free = r.temporary
    low = free < LEAST_TEMPORARY
    yield Check(
        "temporary files",
        "attention" if low else "ok",
        f"{folder}: {free / GIB:.1f} GiB free",
        "data for ranks may go there: set TMPDIR to a larger disk." if low else "",
    )
    soft, hard = r.descriptors
    few = 0 <= soft < LEAST_DESCRIPTORS
    yield Check(
        "file descriptors",
        "attention" if few else "ok",
        f"{soft} (at most {hard})",
        f"loaders' workers use many (Too many open files): ulimit -n {min(65536, hard) if hard > 0 else 65536}."
        if few
        else "",
    )


def check_network(r: Readings) -> Iterator[Check]:
    if r.loopback_error:
        yield Check(
            "loopback",
            "problem",
            r.loopback_error,
            "ranks of one host talk over 127.0.0.1: bring lo up (ip link set lo up), and let no firewall block it.",
        )
    else:
        yield Check("loopback", "ok", "127.0.0.1 answers")
    if r.hostname_error:
        yield Check(
            "host name",
            "attention",
            r.hostname_error,
            "several hosts need it: add this host to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        )
    if r.port_taken:
        port = r.environ.get("MASTER_PORT")
        yield Check(
            "port", "problem", f"MASTER_PORT={port} is taken here", "end who holds it (ss -ltnp), or take another."
        )


def check_launcher(r: Readings) -> Iterator[Check]:
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in wanted if r.environ.get(name)]
    shown = ", ".join(f"{name}={r.environ[name]}" for name in given)
    if len(given) == 4:
        rank, world = r.environ["RANK"], r.environ["WORLD_SIZE"]
        if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
            yield Check(
                "torchrun", "problem", shown, "RANK must be below WORLD_SIZE: mend the launcher, or unset them."
            )
        else:
            yield Check("torchrun", "ok", f"{shown}: fit joins as this rank")
    elif "RANK" in given or "WORLD_SIZE" in given:
        missing = ", ".join(name for name in wanted if name not in given)
        yield Check(
            "torchrun",
            "attention",
            f"{shown}, without {missing}",
            "fit starts its own ranks: set all four to join as one, or unset them.",
        )
    tasks = r.environ.get("SLURM_NTASKS", "")
    if r.environ.get("SLURM_JOB_ID") or tasks:
        cpus, job = r.environ.get("SLURM_CPUS_PER_TASK", ""), r.environ.get("SLURM_JOB_ID", "?")
        found = f"job {job}, {tasks or '1'} tasks, {cpus or '1'} CPUs each"
        if r.environ.get("SLURM_PROCID") and tasks.isdecimal() and int(tasks) > 1:
            found += f": fit joins as rank {r.environ['SLURM_PROCID']}"
        few = not cpus and tasks.isdecimal() and int(tasks) >= 1
        yield Check(
            "slurm",
            "attention" if few else "ok",
            found,
            "without --cpus-per-task each rank has one CPU for itself and its loaders' workers." if few else "",
        )


def _line(text: str) -> str:
    """The text in one line, cut if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:197]}..."


CHECKS: tuple[Callable[[Readings], Iterator[Check]], ...] = (
    check_python,
    check_distribution,
    check_requirements,
    check_extras,
    check_torch,
    check_gpus,
    check_cuda_packages,
    check_cpus,
    check_places,
    check_network,
    check_launcher,
)
