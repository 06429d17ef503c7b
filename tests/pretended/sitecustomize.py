"""Pretend to be macOS or Windows: take away what only Linux (or POSIX) has, from each Python that starts.

::

    PRETEND_PLATFORM=darwin PYTHONPATH=tests/pretended python script.py
    PRETEND_PLATFORM=win32  PYTHONPATH=tests/pretended python script.py

Torch and the standard library are imported first, as they are built for Linux. Then the functions, modules, signals and
files that the other system lacks are gone, and ``sys.platform`` is its name. Code that calls them, or reads ``/proc``,
``/sys`` or ``/dev/shm``, fails as it would there. Libraries with an implementation for each system (psutil,
threadpoolctl, filelock, multiprocessing) keep theirs for Linux. Processes start by ``spawn``. On "win32" a file that
this process has open can be neither replaced nor deleted. CONTRIBUTING.rst lists what this cannot show.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import io
import mmap
import multiprocessing.connection
import multiprocessing.context
import os
import platform
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PRETENDED = os.environ.get("PRETEND_PLATFORM")
LIBRARIES = """asyncio concurrent.futures inspect logging.handlers pickle selectors subprocess tempfile threading
    multiprocessing.dummy multiprocessing.forkserver multiprocessing.heap multiprocessing.managers multiprocessing.pool
    multiprocessing.popen_fork multiprocessing.popen_forkserver multiprocessing.popen_spawn_posix multiprocessing.queues
    multiprocessing.reduction multiprocessing.resource_sharer multiprocessing.resource_tracker
    multiprocessing.shared_memory multiprocessing.sharedctypes multiprocessing.spawn multiprocessing.synchronize
    multiprocessing.util numpy psutil torch torch.distributed torch.multiprocessing torch.utils.data cloudpickle
    filelock tqdm threadpoolctl""".split()
OF_CALLERS = """torch._dynamo torch.distributed.fsdp torch.distributed.tensor torch.utils.tensorboard tensorboard
    PIL.Image sklearn pytest""".split()  # too slow for each rank
NOT_ON_MACOS: dict[types.ModuleType, str] = {
    os: """memfd_create sched_getaffinity sched_setaffinity pidfd_open posix_fadvise posix_fallocate eventfd splice
        copy_file_range getrandom MFD_CLOEXEC setresuid getxattr setxattr O_TMPFILE O_PATH pipe2 unshare setns""",
    signal: "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT pidfd_send_signal",
    mmap: "MAP_POPULATE MAP_DENYWRITE MAP_EXECUTABLE MAP_STACK",
    socket: "SO_PEERCRED SO_DOMAIN SO_PROTOCOL",
}
NOT_ON_WINDOWS: dict[types.ModuleType, str] = {
    os: """fork forkpty register_at_fork geteuid getuid getgid getegid setsid getsid killpg getpgid getpgrp mkfifo
        sysconf posix_spawn waitid WNOHANG uname getloadavg fchmod fchown chown O_DIRECTORY O_NOFOLLOW O_CLOEXEC
        O_NONBLOCK pread pwrite preadv pwritev statvfs nice sched_yield sendfile wait3 wait4 getpriority""",
    signal: """pthread_sigmask SIGKILL SIGUSR1 SIGUSR2 SIGHUP SIGCHLD SIGQUIT SIGALRM SIGSTOP SIGCONT SIGTSTP SIGPIPE
        SIGBUS SIG_BLOCK SIG_SETMASK SIG_UNBLOCK sigwait sigpending pthread_kill setitimer siginterrupt alarm pause""",
    mmap: "PROT_READ PROT_WRITE PROT_EXEC MAP_SHARED MAP_PRIVATE MAP_ANON MAP_ANONYMOUS",
    socket: "AF_UNIX socketpair send_fds recv_fds SCM_RIGHTS CMSG_LEN CMSG_SPACE",
}
POSIX_MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "tty", "pty", "syslog")
LINUX_ONLY = ("/proc", "/sys", "/dev/shm")
LINUX_CALLS = """prctl mremap syscall sched_setaffinity sched_getaffinity memfd_create malloc_trim mallopt unshare setns
    eventfd pidfd_open""".split()
EXEMPT = ("psutil", "resource_tracker", "threadpoolctl", "multiprocessing", "sitecustomize")


def take_away(names: dict[types.ModuleType, str]) -> None:
    for owner, listed in names.items():
        for name in listed.split():
            if hasattr(owner, name):
                delattr(owner, name)


def is_linux_only(path: Any) -> bool:
    try:
        text = os.fsdecode(os.fspath(path))
    except TypeError:
        return False
    return any(text == root or text.startswith(f"{root}/") for root in LINUX_ONLY)


def is_exempt() -> bool:
    caller = sys._getframe(2).f_code.co_filename
    return any(name in caller for name in EXEMPT)


def without_linux_files(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, int) and is_linux_only(path) and not is_exempt():
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *args, **kwargs)

    return guarded


class Sys(types.ModuleType):
    """The module ``sys`` for libraries that run as on Linux."""

    platform = "linux"

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(sys, name, value)


def keep_libraries() -> None:
    """Give libraries copies of what is taken away, to run as on Linux; let processes start by spawn by default."""
    copies: dict[str, Any] = {"sys": Sys("sys")}
    for module in (os, signal, socket, mmap):
        copies[module.__name__] = types.ModuleType(module.__name__)
        copies[module.__name__].__dict__.update(module.__dict__)
    copies["socket"].socketpair = partial(socket.socketpair, socket.AF_UNIX)
    shutil.disk_usage = types.FunctionType(  # type: ignore[assignment]
        shutil.disk_usage.__code__, {**vars(shutil), "os": copies["os"]}
    )
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("multiprocessing", "filelock", "subprocess"):
            for attribute, copy in copies.items():
                if isinstance(getattr(module, attribute, None), types.ModuleType):
                    setattr(module, attribute, copy)
    default: Any = multiprocessing.context._default_context  # type: ignore[attr-defined]
    default._default_context = default.get_context("spawn")


def refuse_changes_of_open_files() -> None:
    """As Windows does: no name of a file that is open, or mapped, can be given to another or deleted."""
    listdir, readlink, opened = os.listdir, os.readlink, builtins.open

    def open_here() -> set[str]:
        found = set()
        for number in listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.add(readlink(f"/proc/self/fd/{number}"))
        with opened("/proc/self/maps") as file:
            return found.union(line.split(None, 5)[-1].strip() for line in file)

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*paths: Any, **kwargs: Any) -> Any:
            by_tempfile = sys._getframe(1).f_code.co_filename == tempfile.__file__  # has other means on Windows
            names = {os.path.realpath(path) for path in paths if not isinstance(path, int)}
            if not by_tempfile and names & open_here():
                raise PermissionError(13, "The process cannot access the file because it is being used", str(paths[0]))
            return function(*paths, **kwargs)

        return guarded

    for name in ("replace", "rename", "unlink", "remove"):
        setattr(os, name, guard(getattr(os, name)))
    shutil._use_fd_functions = False  # type: ignore[attr-defined]


class NoPosixModules:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name in POSIX_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class WithoutLinuxCalls(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name in LINUX_CALLS:
            raise AttributeError(f"{name}: symbol not found")
        return super().__getattr__(name)


def pretend(system: str) -> None:
    """Make this process one of ``system``, ``darwin`` or ``win32``."""
    sysconfig.get_config_vars()
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    is_rank = "--multiprocessing-fork" in sys.orig_argv
    for name in LIBRARIES + ([] if is_rank else OF_CALLERS):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    keep_libraries()
    if system == "win32":
        refuse_changes_of_open_files()
    take_away(NOT_ON_MACOS)
    builtins.open = io.open = without_linux_files(builtins.open)  # type: ignore[assignment]
    for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink"):
        setattr(os, name, without_linux_files(getattr(os, name)))
    exists, access = os.path.exists, os.access
    os.access = lambda path, mode, **kwargs: not is_linux_only(path) and access(path, mode, **kwargs)  # type: ignore[assignment]
    os.path.exists = lambda path: not (is_linux_only(path) and not is_exempt()) and exists(path)  # type: ignore[assignment]
    ctypes.CDLL = WithoutLinuxCalls  # type: ignore[misc]
    if system == "win32":
        take_away(NOT_ON_WINDOWS)
        for name in POSIX_MODULES:
            sys.modules.pop(name, None)
        io._WindowsConsoleIO = type("_WindowsConsoleIO", (), {})  # type: ignore[attr-defined]  # for pytest
        torch_signals: Any = sys.modules["torch.utils.data._utils.signal_handling"]
        torch_signals.IS_WINDOWS = True
        sys.meta_path.insert(0, NoPosixModules)  # type: ignore[arg-type]
    platform.system = lambda: {"darwin": "Darwin", "win32": "Windows"}[system]
    sys.platform = system


if PRETENDED in ("darwin", "win32") and Path(__file__).parent.name == "pretended":
    pretend(PRETENDED)
