"""What a process takes over from the one that starts it: read, to be compared or to be taken on by a forked one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from multiprocessing import spawn
from typing import Any

__all__ = ["circumstances", "ignored_signals", "interpreter_flags", "own_cpus", "own_lines", "taken_at_start", "umask"]

# Each rank sets these anew, or they mean nothing to what the server imports: no reason for another server.
_NOT_AT_IMPORT = (
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK "
    "MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME PWD OLDPWD SHLVL _ COLUMNS LINES"
).split()
_NOT_AT_IMPORT_PREFIXES = ("TRAINLOOP_", "PYTEST_", "WANDB_", "MLFLOW_", "RAY_", "TUNE_", "SLURM_", "JUPYTER_", "JPY_")
# Lines of /proc/self/status with what is inherited, and can't be taken on by a process that runs.
_INHERITED = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Mems_allowed_list", "NSpid")


def circumstances() -> list[Any]:
    """All that a process takes over for good when it is started, to be compared with what this one has later."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_AT_IMPORT and not name.startswith(_NOT_AT_IMPORT_PREFIXES)
    }
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    names = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "time_for_children", "user", "uts")
    return [
        environment,
        list(sys.path),
        [spawn.get_executable(), *interpreter_flags()],
        [line for line in own_lines("status") if line.startswith(_INHERITED)],
        [own_lines(name) for name in ("cgroup", "oom_score_adj")],
        [_link(f"/proc/self/{name}") for name in ("root", *(f"ns/{name}" for name in names))],
        limits,
        [os.getsid(0), os.getpgrp(), os.getpriority(os.PRIO_PROCESS, 0), _scheduler(0)],
    ]


_scheduler = getattr(os, "sched_getscheduler", int)  # not on macOS


def interpreter_flags() -> list[str]:
    """Of this process, for another interpreter."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def own_cpus() -> list[int]:
    """That this process may run on; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def own_lines(name: str) -> list[str]:
    """Of a file of ``/proc/self``; none where it does not exist."""
    try:
        with open(f"/proc/self/{name}") as file:
            return file.read().splitlines()
    except OSError:  # not on this kernel
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def taken_at_start() -> list[Any]:
    """What each process takes over as it is at that moment, and keeps: umask, blocked and ignored signals."""
    status = own_lines("status")
    return [umask(status), signal.pthread_sigmask(signal.SIG_BLOCK, []), ignored_signals(status)]


def umask(status: list[str]) -> int | None:
    """In the lines of ``/proc/self/status``; it can't be read otherwise without being set."""
    return next((int(line[6:], 8) for line in status if line.startswith("Umask:")), None)


def ignored_signals(status: list[str]) -> list[int]:
    """In the lines of ``/proc/self/status``: also those that Python was started with."""
    mask = next((int(line.split()[1], 16) for line in status if line.startswith("SigIgn:")), 0)
    return [number for number in range(1, signal.NSIG) if mask >> (number - 1) & 1]
