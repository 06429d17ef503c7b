"""State that a process inherits from the one that starts it: read, to compare it or to give it to a fork, or set."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import spawn
from typing import Any

from trainloop.signals import REASON_OF_SIGNAL

__all__ = [
    "circumstances",
    "ignored_signals",
    "interpreter_flags",
    "own_cpus",
    "own_lines",
    "signals_blocked",
    "taken_at_start",
    "umask",
    "variables_set",
]

# Variables that each rank sets anew, or that no import of the server reads: they need no other server.
_NOT_AT_IMPORT = (
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK "
    "MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME PWD OLDPWD SHLVL _ COLUMNS LINES "
    "TORCHINDUCTOR_CACHE_DIR"
).split()
_NOT_AT_IMPORT_PREFIXES = ("TRAINLOOP_", "PYTEST_", "WANDB_", "MLFLOW_", "RAY_", "TUNE_", "SLURM_", "JUPYTER_", "JPY_")
# Lines of /proc/self/status about inherited state that a running process can't change.
_INHERITED = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Mems_allowed_list", "NSpid")


def circumstances() -> list[Any]:
    """All inherited state that a process can't change later, for comparing the server's with this process's."""
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
    """This interpreter's options, for another one."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def own_cpus() -> list[int]:
    """CPUs that this process may run on; none if the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def own_lines(name: str) -> list[str]:
    """Lines of a file in ``/proc/self``; none if it does not exist."""
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
    """State that a process inherits when it starts and keeps: umask, blocked and ignored signals."""
    status = own_lines("status")
    return [umask(status), signal.pthread_sigmask(signal.SIG_BLOCK, []), ignored_signals(status)]


def umask(status: list[str]) -> int | None:
    """The umask from the lines of ``/proc/self/status``; other ways to read it would set it."""
    return next((int(line[6:], 8) for line in status if line.startswith("Umask:")), None)


def ignored_signals(status: list[str]) -> list[int]:
    """Ignored signals from the lines of ``/proc/self/status``, with those from before Python started."""
    mask = next((int(line.split()[1], 16) for line in status if line.startswith("SigIgn:")), 0)
    return [number for number in range(1, signal.NSIG) if mask >> (number - 1) & 1]


@contextlib.contextmanager
def variables_set(environment: dict[str, str]) -> Iterator[None]:
    """Set environment variables, for processes that are started in the context."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals, for processes that are started in the context: they unblock them once they can handle them."""
    numbers = [getattr(signal, name) for name in REASON_OF_SIGNAL if hasattr(signal, name)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
