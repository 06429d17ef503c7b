"""Send work to ranks: over a connection to each rank, with the file descriptors that the work refers to."""

from __future__ import annotations

import contextlib
import errno
import mmap
import multiprocessing
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from multiprocessing import connection, reduction
from typing import Any

from trainloop._launch.output import Targets
from trainloop._support.platform import set_affinity
from trainloop._support.scratch import Scratch
from trainloop._transfer import PayloadHandle
from trainloop._transfer.pages import path_of
from trainloop.distributed import Rank
from trainloop.resources.enforce import set_variable

LAUNCH_VARIABLE = "TRAINLOOP_LAUNCH"
"""Variable with a launch's token, in the environment of its ranks and of all processes that they start."""

_AT_ONCE = 200  # descriptors per message; Linux allows 253
_OPENED = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
_IN_FLIGHT_S = 60.0  # time for other ranks to receive descriptors: Linux limits a user's descriptors in flight


@dataclass(frozen=True)
class RunSpec:
    """The settings of a launch's ranks: the same in all their starts, and for all work that they get."""

    first: Rank
    """This node's local rank 0."""
    devices: tuple[str, ...]
    backend: str
    timeout_s: float
    num_threads: int | None
    """Threads of each rank, which sets them itself, too: MKL's variable takes precedence when torch is loaded."""
    store: tuple[str, int, str] | None = None
    """Host, port and prefix of the store for ranks of several nodes; ``None`` on one node, where they use a file."""
    interface: str | None = None
    """Network interface for Gloo; ``None`` for Gloo's choice."""
    init_method: str | None = None
    """A ``file://`` rendezvous point of several nodes, given by the user."""
    key: bytes | None = field(default=None, repr=False)
    """Key with which ranks sign their messages; see :mod:`trainloop.distributed.key`."""
    outlives_work: bool = False
    """True if a rank waits for more work after the first."""

    def rank_of(self, local_rank: int) -> Rank:
        """Return the global and local rank of one of this node's ranks."""
        return replace(self.first, rank=self.first.rank + local_rank, local_rank=local_rank)


@dataclass(frozen=True)
class StartFiles:
    """The files of one start of a launch's ranks: descriptors, as numbered in the process that holds this object."""

    slots_fd: int
    """The int64 slots that ranks and the launching process share."""
    store_fd: int
    result_fd: int
    output_fd: int
    """Descriptor to which ranks write what the caller passes to its streams and handlers; -1 for none."""
    record_fds: tuple[int, ...]
    """A file for the failure of each local rank."""
    stack_fds: tuple[int, ...]
    scratch: Scratch
    """Folder for sockets and temporary files of multiprocessing, for all processes of this launch."""
    caller_fd: int = -1
    """Descriptor of the caller's process (``pidfd_open``); -1 if the system has no pidfds."""

    def descriptors(self, local_rank: int) -> list[int]:
        """Return the descriptors that a rank needs."""
        own = [self.slots_fd, self.store_fd, self.result_fd, self.scratch.lock_fd, self.output_fd, self.caller_fd]
        own += [self.record_fds[local_rank], self.stack_fds[local_rank]]
        return [fd for fd in dict.fromkeys(own) if fd >= 0]

    def numbered(self, received: Mapping[int, int]) -> StartFiles:
        """Return the files with the numbers that the descriptors have in a rank; -1 if it did not receive one."""

        def here(value: Any) -> Any:
            if isinstance(value, Scratch):
                return value._replace(lock_fd=here(value.lock_fd))
            return tuple(map(here, value)) if isinstance(value, tuple) else received.get(value, -1)

        return StartFiles(*(here(getattr(self, one.name)) for one in fields(self)))

    def map_slots(self) -> mmap.mmap:
        """Map the int64 slots of the stop agreement."""
        return mmap.mmap(self.slots_fd, 0)


@dataclass(frozen=True)
class Task:
    """What ranks do, and the state of the caller with which they do it; ranks that are kept get one after another."""

    handle: PayloadHandle
    fds: tuple[int, ...]
    """Descriptors of the payload, and of the files that the payload refers to."""
    settings: bytes
    """The caller's :func:`~trainloop._launch.script.settings.dumped_settings`."""
    modules: bytes
    """The caller's :func:`~trainloop._launch.script.module_state.dumped_modules`."""
    targets: Targets
    """The caller's streams and loggers that need the ranks' output."""
    main: tuple[str | None, str | None]
    """File and module name of the running script; see :func:`~trainloop._launch.script.main_guard.main_place`."""


@dataclass(frozen=True)
class Work:
    """A task for ranks, and the changes of the caller's state since the previous task."""

    run: RunSpec
    files: StartFiles
    task: Task
    environment: dict[str, str | None]
    """Changed environment variables; ``None`` removes one."""
    folder: str | None = None
    """The caller's current folder; ``None`` to keep the rank's."""
    cpus: list[int] | None = None
    """The caller's CPUs; ``None`` if unchanged since the previous work."""

    def send_over(self, line: connection.Connection, descriptors: list[int]) -> None:
        """Send the work to a rank."""
        if sys.platform == "win32":  # ranks open files by their paths there
            line.send_bytes(pickle.dumps((self, {fd: path_of(fd) for fd in descriptors})))
            return
        line.send_bytes(pickle.dumps((self, descriptors)))
        with _socket_of(line) as stream:
            for i in range(0, len(descriptors), _AT_ONCE):
                _send_descriptors(stream, descriptors[i : i + _AT_ONCE])

    def apply(self) -> None:
        """Apply the caller's current folder, environment and CPUs to this rank."""
        # Apply only the caller's changes, to keep variables that the rank's own code and libraries have set.
        for name, value in self.environment.items():
            set_variable(name, value)
        if self.folder is not None:
            os.chdir(self.folder)
        if self.cpus is not None:
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(OSError):  # the rank has just ended
                    set_affinity(self.cpus, int(thread))


def _send_descriptors(stream: socket.socket, descriptors: list[int]) -> None:
    if sys.platform == "win32":
        return
    deadline = time.monotonic() + _IN_FLIGHT_S
    while True:
        try:
            reduction.sendfds(stream, descriptors)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def next_work(line: connection.Connection) -> tuple[Work, dict[int, int]] | None:
    """Wait in a rank for more work; return the work, and this process's descriptors by the sender's numbers.

    Return ``None`` if the caller has ended or closed the connection.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Wait for the sentinel too: a fork of the caller may keep the connection's other end open.
    if line not in connection.wait([line, parent.sentinel]):
        return None
    received: dict[int, int] = {}
    try:
        work: Work
        work, descriptors = pickle.loads(line.recv_bytes())
        if sys.platform == "win32":
            return work, {fd: os.open(path, _OPENED) for fd, path in descriptors.items()}
        with _socket_of(line) as stream:
            for i in range(0, len(descriptors), _AT_ONCE):
                some = descriptors[i : i + _AT_ONCE]
                received.update(zip(some, reduction.recvfds(stream, len(some)), strict=True))
    except (EOFError, OSError):  # the caller has ended
        return None
    for fd in received.values():
        os.set_inheritable(fd, False)  # not for programs that user code starts
    return work, received


@contextlib.contextmanager
def _socket_of(line: connection.Connection) -> Iterator[socket.socket]:
    if sys.platform == "win32":
        raise NotImplementedError
    with socket.fromfd(line.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        yield stream
