"""Code of the fork server's process, and of its forks, which become like spawned interpreters.

See :mod:`trainloop.launch.fork_server` for the side that asks.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, NoReturn

from trainloop.launch.messages import receive
from trainloop.resources.enforce import threads_in

__all__ = ["LAUNCH_VARIABLE", "PLACEHOLDER", "serve"]

LAUNCH_VARIABLE = "TRAINLOOP_LAUNCH"
"""Variable with a launch's token, in the environment of its ranks and of all processes that they start."""

PLACEHOLDER = "-" * 64
"""Replaced by the token in the environment that ``/proc`` shows for a forked process."""

# Modules that a rank of a TrainLoop imports before the user's own; the first takes nearly all of the time.
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.multiprocessing.spawn",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "trainloop.callbacks",
    "trainloop.data",
    "trainloop.launch.rank_process",
    "trainloop.parallel",
    "trainloop.train_loop",
    "trainloop.train_loop.handover",
)
_IDLE_S = 3.0  # then what only some ranks need is loaded, for those to come: no rank waits for it meanwhile
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel")


def serve(fd: int, caller: int) -> None:
    """Load modules, report ready, then fork a process for each request until the caller has ended.

    Returns in the forked processes only, never in the server, and they then end like any interpreter.

    Parameters
    ----------
    fd : int
        The connection's.
    caller : int
        Process number of the caller.
    """
    # All signals are blocked, as in the process that started it.
    shown = _shown_token()
    _load(_PRELOADED)
    connection = socket.socket(fileno=fd)
    try:
        connection.send(_objection().encode() or b" ")
    except OSError:  # the caller did not wait
        os._exit(0)
    # From here on it holds no folder and no terminal of the caller's.
    os.chdir("/")
    _take_descriptors([os.open(os.devnull, os.O_RDWR)] * 3, [0, 1, 2], keep=[fd])
    asked, fds = _next_request(connection, caller)
    connection.close()
    _become(asked, fds, shown)


def _load(names: Sequence[str]) -> None:
    """Import modules for all processes to come."""
    if not names:
        return
    path = list(sys.path)
    for name in names:
        importlib.import_module(name)
    sys.path[:] = path
    gc.collect()
    gc.freeze()  # else a rank's first collection would write to, and so copy, every page with objects


def _objection() -> str:
    """The reason why this process must not be forked; empty if it may."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads - 1} threads were started in it, by what Python or torch load at their start"
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
        if target.startswith(_DEVICES):
            return f"{target} was opened in it, by what Python or torch load at their start"
    return ""


def _next_request(connection: socket.socket, caller: int) -> tuple[dict[str, Any], list[int]]:
    """Returns in a new process, with the request it was forked for. The server stays in here until it ends."""
    watched: list[Any] = [connection]
    try:
        watched.append(os.pidfd_open(caller))  # a fork of the caller may hold the other end of the connection
    except (AttributeError, OSError):
        pass
    later = ["torch._dynamo"]
    while True:
        # select.select would refuse descriptors above 1023.
        readable = wait(watched, _IDLE_S if len(watched) == 1 or later else None)
        if os.getppid() != caller or (connection not in readable and readable):
            os._exit(0)
        if not readable:
            _load([later.pop()] if later else [])
            continue
        request = receive(connection)
        if request is None:
            os._exit(0)
        content, fds = request
        asked = json.loads(content)
        _load([name for name in asked["modules"] if name not in sys.modules])
        answer = _objection().encode() or _fork_for(caller)  # what was loaded since it was ready counts, too
        if answer is None:
            return asked, fds
        for fd in fds:
            os.close(fd)
        try:
            connection.send(answer)
        except OSError:
            os._exit(0)


def _fork_for(caller: int) -> bytes | None:
    """Fork a child of the caller. Returns ``None`` in it; here its number and its parent's, or why it failed."""
    pipes: list[int] = []
    try:
        pipes += os.pipe()
        pipes += os.pipe()
        between = os.fork()
    except OSError as error:
        for fd in pipes:
            os.close(fd)
        return str(error).encode()
    gate, opens, told, tells = pipes
    if between == 0:
        try:
            if os.fork():
                os._exit(0)
        except OSError as error:
            os.write(tells, str(error).encode())
            os._exit(1)
        os.close(opens)
        os.read(gate, 1)  # until the process in between has ended, and the caller has adopted this one
        os.write(tells, f"{os.getpid()} {os.getppid()}".encode())
        if os.getppid() != caller:
            os._exit(1)
        return None
    os.close(gate)
    os.close(tells)
    os.waitpid(between, 0)
    os.close(opens)
    answer = os.read(told, 1024)
    os.close(told)
    return answer or b"the new process was killed at once"


# --------------------------------------------------------------------------------------------------------------------
# The forked process
# --------------------------------------------------------------------------------------------------------------------


def _become(asked: dict[str, Any], fds: list[int], shown: int | None) -> NoReturn:
    """Apply what a spawned process would inherit, and run the program that it would run."""
    os.fchdir(fds[0])
    _take_descriptors(fds[1:], asked["fds"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    if shown is not None:
        token = asked["environment"].get(LAUNCH_VARIABLE, "").encode()
        ctypes.memmove(shown, token[: len(PLACEHOLDER)].ljust(len(PLACEHOLDER), b"\0"), len(PLACEHOLDER))
    if asked["umask"] is not None:
        os.umask(asked["umask"])
    os.sched_setaffinity(0, asked["cpus"])
    _start_streams()
    _set_threads(asked["environment"])
    _seed()
    importlib.invalidate_caches()
    _, program, *arguments = asked["arguments"]
    sys.argv = ["-c", *arguments]
    for number in signal.valid_signals():
        if number in asked["ignored"] and number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is signal.SIG_IGN and number not in _PYTHON_IGNORES:
            # In the state that the caller had when the server started.
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["mask"])
    main = sys.modules["__main__"].__dict__
    for name in [name for name in main if not name.startswith("__") or name == "__warningregistry__"]:
        del main[name]  # the server's own, which the script's names must not meet
    exec(program, main)
    sys.exit()


def _take_descriptors(fds: list[int], numbers: list[int], keep: list[int] | None = None) -> None:
    """Give descriptors these numbers, and close all others except those to keep."""
    keep = keep or []
    above = max([*numbers, *keep, *fds, 2]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for number in range(above):
        if number not in keep:
            try:
                os.close(number)
            except OSError:  # not open
                continue
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
    os.closerange(above, max(moved, default=above) + 1)


def _start_streams() -> None:
    """Make ``sys.stdout`` and the like anew for the present descriptors: a terminal, a file, or closed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, name)
        stream: Any = None
        try:
            os.fstat(number)
        except OSError:
            pass
        else:
            below: Any = io.FileIO(number, mode, closefd=False)
            below.name = f"<{name}>"
            through = getattr(old, "write_through", False)  # PYTHONUNBUFFERED
            if mode == "r":
                below = io.BufferedReader(below)
            elif not through:
                below = io.BufferedWriter(below)
            stream = io.TextIOWrapper(
                below,
                encoding=getattr(old, "encoding", None),
                errors=getattr(old, "errors", None),
                line_buffering=not through and (name == "stderr" or os.isatty(number)),
                write_through=through,
            )
            stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_threads(environment: Mapping[str, str]) -> None:
    """Set the number of threads that the libraries would have read from the environment on loading."""
    import torch

    def number(*names: str) -> int:
        for name in names:
            if (threads := threads_in(environment.get(name, ""))) is not None:
                return threads
        return len(os.sched_getaffinity(0))

    torch.set_num_threads(number("OMP_NUM_THREADS"))
    # numpy's OpenBLAS ends its threads before a fork and makes new ones when it needs them.
    wanted = number("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    with open("/proc/self/maps") as file:
        libraries = set(re.findall(r"(/\S*openblas\S*)$", file.read(), re.MULTILINE))
    for path in libraries:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(ctypes.c_int(wanted))
                break


def _seed() -> None:
    """Seed the generators anew, as in every fresh process; Python's ``random`` does so by itself."""
    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()


def _shown_token() -> int | None:
    """Address of the placeholder within the environment that ``/proc`` shows; ``putenv`` does not change that."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address: int | None = libc.getenv(LAUNCH_VARIABLE.encode())
    if address is None or ctypes.string_at(address, len(PLACEHOLDER)) != PLACEHOLDER.encode():
        return None
    return address
