"""Shares of one machine that no two runs hold at once: leases on CPUs and GPUs by locked files.

The operating system drops a file lock when its process ends, by whatever cause; a file with a process's number in it
would outlive a SIGKILL. A lease therefore ends with its owner, and nothing has to be cleaned up after one.

* A request is granted whole or not at all, so that two half-served runs can't wait for each other.
* Waiters stand in a queue of numbered tickets, themselves locked files. Only the first in line for a device may take
  it, so that a large request among many small ones is served.
* All decisions fall under one short lock on the folder. Nobody waits for a device while holding that.

Children of a run draw from their parent's lease: :func:`inherit` tells a child so, and it then leases nothing itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainloop.errors import ResourceError

if TYPE_CHECKING:
    import filelock

__all__ = ["Lease", "Request", "acquire", "folder", "inherit", "inherited", "one_at_a_time"]

_POLL_S = (0.02, 0.25)  # a waiter looks again after this long at first, and at most

_inherited = False


class Request(NamedTuple):
    """So many of these."""

    number: int
    """How many, 0 or more."""
    pool: Sequence[str]
    """Names to choose from, best first: ``cpu-3``, ``GPU-<uuid>``. The same device has one name in all runs."""
    least: int | None = None
    """With so many it is content, if there are not ``number``; None: with no fewer."""

    @property
    def enough(self) -> int:
        """The number that satisfies it."""
        return self.number if self.least is None else self.least


class Lease:
    """Devices held until :meth:`release`, the end of a ``with`` block, or the end of the process."""

    def __init__(self, names: dict[str, list[str]], locks: list[filelock.BaseFileLock]) -> None:
        self.names = names
        """Names held, by the kinds of the request."""
        self._locks = locks

    def release(self) -> None:
        """Give the devices back; again does nothing."""
        while self._locks:
            self._locks.pop().release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease({self.names!r}{'' if self._locks else ', released'})"


def folder() -> Path:
    """Where this machine's leases are kept: ``TRAINLOOP_LEASE_DIR``, or one folder that all users share."""
    named = os.environ.get("TRAINLOOP_LEASE_DIR")
    if named:
        return Path(named)
    # Not gettempdir(): TMPDIR differs between two jobs on one node.
    return Path(tempfile.gettempdir() if sys.platform == "win32" else "/tmp") / "trainloop-leases"


def acquire(requests: Mapping[str, Request], *, timeout_s: float | None = None, where: Path | None = None) -> Lease:
    """Wait in line for devices, and hold them all.

    Parameters
    ----------
    requests : mapping of str to Request
        By kind, such as ``cpu`` and ``gpu``; granted together.
    timeout_s : float, optional
        Seconds to wait; 0 takes what is free now or fails; None waits until the devices are there.
    where : Path, optional
        Folder of the leases, if not :func:`folder`'s.

    Raises
    ------
    ResourceError
        At once where a pool is smaller than its request, else when the time is over.
    """
    for kind, request in requests.items():
        if request.enough > len(request.pool):
            raise ResourceError(
                f"{request.enough} of kind {kind!r} can never be had: there are {len(request.pool)} here. "
                "Ask for fewer."
            )
    desk = _Desk(folder() if where is None else where)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    ticket = None
    pause = _POLL_S[0]
    try:
        while True:
            with desk.closed_to_others():
                if ticket is None:
                    ticket = desk.stand_in_line(requests)
                ahead = desk.ahead_of(ticket, requests)
                lease, taken = (None, {}) if ahead else desk.take(requests)
                late = deadline is not None and time.monotonic() >= deadline
                if lease is not None or late:
                    desk.leave_line(ticket)
                    ticket = None
            if lease is not None:
                return lease
            if late:
                raise _refusal(requests, timeout_s, ahead, taken)
            # Waiters that woke together would meet at the desk together again.
            wait = pause * random.uniform(0.8, 1.2)
            time.sleep(wait if deadline is None else max(0.0, min(wait, deadline - time.monotonic())))
            pause = min(2 * pause, _POLL_S[1])
    finally:
        if ticket is not None:  # Interrupted
            with desk.closed_to_others():
                desk.leave_line(ticket)


def _refusal(
    requests: Mapping[str, Request], timeout_s: float | None, ahead: int, taken: Mapping[str, list[str]]
) -> ResourceError:
    wanted = " and ".join(f"{r.enough} of {len(r.pool)} {kind}s" for kind, r in requests.items() if r.number)
    why = [f"{ahead} waiting before this one"] if ahead else []
    why += [f"leased by other runs: {', '.join(names)}" for names in taken.values() if names]
    return ResourceError(
        f"{wanted} were not free within {timeout_s:g} s ({'; '.join(why)}). "
        "Wait longer, ask for fewer, or end another run on this machine."
    )


class _Ticket(NamedTuple):
    number: int
    lock: filelock.BaseFileLock


class _Desk:
    """The folder of locked files. The methods in the middle are called under :meth:`closed_to_others`."""

    def __init__(self, where: Path) -> None:
        self._where = where
        if not where.is_dir():
            where.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # Another user's may be there by now.
                where.chmod(0o1777)

    @contextlib.contextmanager
    def closed_to_others(self) -> Iterator[None]:
        lock = self.lock("desk.lock")
        lock.acquire(timeout=-1, poll_interval=0.005)
        try:
            yield
        finally:
            lock.release()

    def stand_in_line(self, requests: Mapping[str, Request]) -> _Ticket:
        number = 1 + max(self._numbers(), default=0)
        pools = [name for request in requests.values() if request.number for name in request.pool]
        with open(self._pools_file(number), "x") as file:  # 'x': never through a link that somebody left here
            json.dump(pools, file)
        self._pools_file(number).chmod(0o644)
        lock = self.lock(f"ticket-{number}.lock")
        lock.acquire(timeout=0)
        return _Ticket(number, lock)

    def leave_line(self, ticket: _Ticket) -> None:
        self._forget(ticket.number)
        ticket.lock.release()

    def ahead_of(self, ticket: _Ticket, requests: Mapping[str, Request]) -> int:
        """Earlier waiters, still alive, that want one of the same devices."""
        wanted = {name for request in requests.values() if request.number for name in request.pool}
        ahead = 0
        for number in self._numbers():
            if number >= ticket.number:
                continue
            lock = self._try(f"ticket-{number}.lock")
            if lock is not None:  # Its owner is gone.
                self._forget(number)
                lock.release()
            elif wanted.intersection(self._pools_of(number)):
                ahead += 1
        return ahead

    def take(self, requests: Mapping[str, Request]) -> tuple[Lease | None, dict[str, list[str]]]:
        """All of the requests or nothing, and the names that others hold."""
        locks: list[filelock.BaseFileLock] = []
        names: dict[str, list[str]] = {}
        taken: dict[str, list[str]] = {}
        for kind, request in requests.items():
            names[kind], taken[kind] = [], []
            for name in request.pool:
                if len(names[kind]) == request.number:
                    break
                lock = self._try(f"held-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.lock")
                if lock is None:
                    taken[kind].append(name)
                else:
                    locks.append(lock)
                    names[kind].append(name)
        lease = Lease(names, locks)
        if all(len(names[kind]) >= request.enough for kind, request in requests.items()):
            return lease, taken
        lease.release()
        return None, taken

    def _numbers(self) -> list[int]:
        found = (re.fullmatch(r"ticket-([0-9]+)\.(?:lock|json)", name) for name in os.listdir(self._where))
        return sorted({int(match[1]) for match in found if match})

    def _forget(self, number: int) -> None:
        for path in (self._pools_file(number), self._where / f"ticket-{number}.lock"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _pools_file(self, number: int) -> Path:
        return self._where / f"ticket-{number}.json"

    def _pools_of(self, number: int) -> list[str]:
        try:
            return [str(name) for name in json.loads(self._pools_file(number).read_text())]
        except (OSError, ValueError):
            return []

    def _try(self, name: str) -> filelock.BaseFileLock | None:
        import filelock

        lock = self.lock(name)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return None
        return lock

    def lock(self, name: str) -> filelock.BaseFileLock:
        import filelock

        # Readable and writable for all: the next run may be another user's. A lease may end in another thread.
        return filelock.FileLock(str(self._where / name), mode=0o666, thread_local=False)


@contextlib.contextmanager
def one_at_a_time(name: str, where: Path | None = None) -> Iterator[None]:
    """Let one process of this machine at a time run the block, for a choice that takes several steps.

    A machine without a place for locks lets all of them.
    """
    try:
        lock = _Desk(folder() if where is None else where).lock(f"{name}.lock")
        lock.acquire()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        lock.release()


def inherit() -> None:
    """Mark this process as one that works within its parent's lease, and leases nothing itself."""
    global _inherited
    _inherited = True


def inherited() -> bool:
    """Whether this process works within its parent's lease."""
    return _inherited
