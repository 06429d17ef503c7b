"""Ranks that start from an interpreter which has imported torch already.

A spawned rank takes seconds of CPU time until its first step, nearly all of them for importing torch. Here a *warm*
interpreter has done that once. Asked to spawn, it forks twice, so that the new process is a child of whoever asked;
gives it the environment, folder, descriptors, signal mask and CPUs that a spawned one inherits; and runs the program
that ``multiprocessing`` wrote for a fresh interpreter. From there on all is as it is for users: the pickled start, the
payload, ``__main__`` anew, the end. Two of them take turns, since ranks differ in their hash seeds and addresses.

Where the start itself is the subject, or a process is found by its command line, a test asks for ``cold_start``.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import util
from typing import Any, NoReturn

__all__ = ["WarmInterpreters"]

_PRELOADED = (
    "numpy",
    "psutil",
    "pytest",  # tests' modules, where ranks' functions stand, import it
    "torch",
    "torch._dynamo",  # by DDP; it takes longer than all others together
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
)
_MAX_FDS = 250  # of one message, says the kernel
_PR_SET_CHILD_SUBREAPER = 36
# What a process inherits and no warm interpreter can be told: where it differs, a cold one starts.
_LIMITS = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_STACK")
_IGNORABLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(getattr(resource, name)) for name in _LIMITS]


# -- the side that asks ------------------------------------------------------------------------------------------------


class WarmInterpreters:
    """Two of them, started at their first use; ``with warm.serving():`` makes ``multiprocessing`` spawn from them."""

    def __init__(self) -> None:
        self._servers: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._turn = 0
        self._lock = threading.Lock()
        self._limits = _limits()
        self._environment = dict(os.environ)  # not that of the launch which happens to be the first
        self._cold = util.spawnv_passfds
        self._libc = ctypes.CDLL(None, use_errno=True)

    @property
    def pids(self) -> set[int]:
        """Of the interpreters, which are no test's own."""
        return {process.pid for process, _ in self._servers}

    @property
    def fds(self) -> set[int]:
        """Of the connections to them."""
        return {connection.fileno() for _, connection in self._servers}

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Within, what ``multiprocessing`` spawns comes from a warm interpreter."""
        util.spawnv_passfds = self._spawn
        try:
            yield
        finally:
            util.spawnv_passfds = self._cold

    def close(self) -> None:
        """End them."""
        for process, connection in self._servers:
            connection.close()
            process.wait(timeout=20)
        self._servers = []

    def _spawn(self, path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        fds = sorted({0, 1, 2, *passfds})
        if not self._can_serve(list(args), fds):
            return self._cold(path, args, passfds)
        with self._lock:
            if not self._servers:
                self._servers = [_start_server(self._environment) for _ in range(2)]
            self._turn = (self._turn + 1) % len(self._servers)
            connection = self._servers[self._turn][1]
            request = {
                "arguments": args[args.index("-c") :],
                "fds": fds,
                "environment": dict(os.environ),
                "folder": os.getcwd(),
                "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
                "cpus": sorted(os.sched_getaffinity(0)),
            }
            # The second fork's parent has ended then, and its child becomes that of the next subreaper above.
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                _send(connection, json.dumps(request).encode(), fds)
                pid = int(_receive(connection)[0])
            finally:
                self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return pid

    def _can_serve(self, args: list[Any], fds: list[int]) -> bool:
        return (
            "--multiprocessing-fork" in args
            and args[1 : args.index("-c")] == subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            and len(fds) <= _MAX_FDS
            and _limits() == self._limits
            and not any(signal.getsignal(number) is signal.SIG_IGN for number in _IGNORABLE)
        )


def _start_server(environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    paths = os.pathsep.join([os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))])
    environment = {**environment, "PYTHONPATH": os.pathsep.join([paths, environment.get("PYTHONPATH", "")])}
    with theirs:
        code = f"import warm; warm._serve({theirs.fileno()})"
        process = subprocess.Popen(
            # named as what it will be, for those who look at command lines
            [sys.executable, *flags, "-c", code, "--multiprocessing-fork"],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    return process, ours


# -- messages: a length, the bytes, descriptors beside the length ------------------------------------------------------


def _send(connection: socket.socket, message: bytes, fds: Sequence[int] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([struct.pack("q", len(message))], rights)
    connection.sendall(message)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    head, rights, _, _ = connection.recvmsg(8, socket.CMSG_LEN(_MAX_FDS * fds.itemsize))
    if not head:
        raise EOFError
    for _, _, data in rights:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    message = b""
    while len(message) < struct.unpack("q", head)[0]:
        message += connection.recv(1 << 20)
    return message, list(fds)


# -- the warm interpreter ----------------------------------------------------------------------------------------------


def _serve(fd: int) -> None:
    import importlib

    path = list(sys.path)
    for name in _PRELOADED:
        importlib.import_module(name)
    sys.path[:] = path
    gc.collect()
    gc.freeze()  # or each collection in a rank visits all of these modules, and so copies their pages
    with socket.socket(fileno=fd) as connection:
        while True:
            try:
                message, fds = _receive(connection)
            except (EOFError, ConnectionResetError, KeyboardInterrupt):
                return
            asked = json.loads(message)
            told, tell = os.pipe()
            between = os.fork()
            if between == 0:
                child = os.fork()
                if child:
                    os.write(tell, str(child).encode())
                    os._exit(0)
                break
            os.waitpid(between, 0)
            _send(connection, os.read(told, 20))
            for each in (told, tell, *fds):
                os.close(each)
    _run(asked, fds)


def _run(asked: dict[str, Any], fds: list[int]) -> NoReturn:
    """Become the process that was asked for."""
    import numpy as np

    first_free = max(asked["fds"]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, first_free) for fd in fds]
    os.closerange(3, first_free)
    for fd, number in zip(moved, asked["fds"], strict=True):
        os.dup2(fd, number)
    os.closerange(first_free, max(moved) + 1)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    os.sched_setaffinity(0, asked["cpus"])
    np.random.seed()  # random does it by itself after a fork
    _, program, *arguments = asked["arguments"]
    sys.argv = ["-c", *arguments]
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["mask"])
    exec(program, sys.modules["__main__"].__dict__)
    sys.exit()
