"""Lease CPUs and GPUs of one machine by locked files, so that no two runs hold the same device.

The operating system releases a file lock when its process ends, whatever the cause; a file with a process ID would
outlive a SIGKILL. A lease therefore ends with its owner, and nothing has to be cleaned up.

* A request is granted completely or not at all: two partly served runs could wait for each other.
* Waiting runs are in a queue of numbered tickets, which are locked files, too. Only the first in the queue for a device
  may lease it, so a large request among many small ones is served.
* All decisions of a user are made under one short lock on the user's folder. No process waits for a device while
  it holds this lock.
* Each user has a private folder, whose owner and mode are checked: nobody else can put links there. Runs of different
  users see each other's leases, since they can see which files are locked. A run first locks a device, then looks for
  locks of other users: two runs that want it at the same moment may both release it, but never both keep it.

Children of a run use their parent's lease: after :func:`inherit`, a process leases nothing itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainloop._support.platform import fcntl, user_id, user_name
from trainloop._support.user_line import warn
from trainloop.errors import ResourceError

if TYPE_CHECKING:
    import filelock

__all__ = ["Lease", "Request", "UnsafeFolderError", "acquire", "folder", "inherit", "inherited", "one_at_a_time"]

_POLL_S = (0.02, 0.25)  # first and longest interval between two checks of a waiting run
_DAY_S = 86400.0
_DESK_S = 60.0  # longest wait for the folder's lock, which is normally held for moments only

_FOLDER = "trainloop-leases-"  # followed by the user ID

_inherited = False


class UnsafeFolderError(ResourceError):
    """Another user can write to this user's folder of leases."""


class Request(NamedTuple):
    """Request for a number of devices from a pool."""

    number: int
    """Number of devices, 0 or more."""
    pool: Sequence[str]
    """Names to choose from, best first: ``cpu-3``, ``GPU-<uuid>``. The same device has one name in all runs."""
    least: int | None = None
    """Smallest number that is enough, if fewer than ``number`` are free; None: ``number`` itself."""

    @property
    def enough(self) -> int:
        """The number of devices that satisfies the request."""
        return self.number if self.least is None else self.least


class Lease:
    """Devices held until :meth:`release`, the end of a ``with`` block, or the end of the process."""

    def __init__(self, names: dict[str, list[str]], locks: list[filelock.BaseFileLock]) -> None:
        self.names = names
        """Names of the devices held, by kind."""
        self._locks = locks

    def release(self) -> None:
        """Release the devices; a second call does nothing."""
        while self._locks:
            self._locks.pop().release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease({self.names!r}{'' if self._locks else ', released'})"


def folder() -> Path:
    """Return the parent of all users' lease folders: ``TRAINLOOP_LEASE_DIR``, or a folder that all users share."""
    named = os.environ.get("TRAINLOOP_LEASE_DIR")
    if named:
        return Path(named)
    # Not gettempdir(): TMPDIR differs between two jobs on one node.
    return Path("/tmp")


def acquire(requests: Mapping[str, Request], *, timeout_s: float | None = None, where: Path | None = None) -> Lease:
    """Wait for devices, and lease them all.

    Parameters
    ----------
    requests : mapping of str to Request
        Requests by kind, such as ``cpu`` and ``gpu``; granted together.
    timeout_s : float, optional
        Seconds to wait; with 0 they must be free now; a day by default.
    where : Path, optional
        The folder to use in place of :func:`folder`.

    Raises
    ------
    ResourceError
        At once if a pool is smaller than its request, or if another user created this user's folder; otherwise after
        the time-out. It names the processes that hold the devices.
    """
    for kind, request in requests.items():
        # At once: waiting would not help.
        if request.enough > len(request.pool):
            raise ResourceError(
                f"{request.enough} of kind {kind!r} cannot be granted: there are {len(request.pool)} here. "
                "Ask for fewer."
            )
    if fcntl is None:
        warn("CPUs and GPUs are not leased on Windows: separate the runs on this machine with devices= and num_cpus=.")
        return Lease({kind: list(request.pool[: request.number]) for kind, request in requests.items()}, [])
    desk = _Desk(folder() if where is None else where)
    timeout_s = _DAY_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    ticket = None
    pause = _POLL_S[0]
    try:
        while True:
            with desk.closed_to_others():
                if ticket is None:
                    ticket = desk.stand_in_line(requests)
                ahead = desk.ahead_of(ticket, requests)
                lease, taken = (None, {}) if ahead else desk.take(requests)
                late = time.monotonic() >= deadline
                if lease is not None or late:
                    desk.leave_line(ticket)
                    ticket = None
            if lease is not None:
                return lease
            if late:
                raise _refusal(requests, timeout_s, ahead, taken, desk)
            # A random delay: processes that wake at the same time would collide again.
            wait = pause * random.uniform(0.8, 1.2)
            time.sleep(max(0.0, min(wait, deadline - time.monotonic())))
            pause = min(2 * pause, _POLL_S[1])
    finally:
        if ticket is not None:  # Interrupted
            with desk.closed_to_others():
                desk.leave_line(ticket)


def _refusal(
    requests: Mapping[str, Request], timeout_s: float, ahead: int, taken: Mapping[str, list[str]], desk: _Desk
) -> ResourceError:
    wanted = " and ".join(f"{r.enough} of {len(r.pool)} {kind}s" for kind, r in requests.items() if r.number)
    why = [f"runs waiting before this one: {ahead}"] if ahead else []
    why += [f"leased by other runs: {', '.join(names)}" for names in taken.values() if names]
    holders = dict.fromkeys(holder for names in taken.values() for name in names for holder in desk.holders(name))
    why += [f"held by {', '.join(holders)}"] if holders else []
    return ResourceError(
        f"{wanted} were not free {f'within {timeout_s:g} s' if timeout_s else 'at once'} ({'; '.join(why)}). "
        "Wait longer, request fewer, or end another run on this machine."
    )


class _Ticket(NamedTuple):
    number: int
    lock: filelock.BaseFileLock


class _Desk:
    """This user's folder of locked files. The methods in the middle are called under :meth:`closed_to_others`."""

    def __init__(self, base: Path) -> None:
        self._base = base
        base.mkdir(parents=True, exist_ok=True)
        self._where = base / f"{_FOLDER}{user_id()}"
        with contextlib.suppress(FileExistsError):
            self._where.mkdir(mode=0o755)
        found = os.lstat(self._where)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != user_id():
            what = "folder" if stat.S_ISDIR(found.st_mode) else "link or file"
            raise UnsafeFolderError(
                f"leases are stored in {str(self._where)!r}, but there is a {what} of {_user(found.st_uid)}, who "
                "could change them. Have it removed, or set TRAINLOOP_LEASE_DIR to a folder that you own."
            )
        if stat.S_IMODE(found.st_mode) != 0o755:  # made by mkdir under the umask; others may read it, not write
            self._where.chmod(0o755)

    @contextlib.contextmanager
    def closed_to_others(self) -> Iterator[None]:
        import filelock

        lock = self.lock("desk.lock", mode=0o600)
        try:
            lock.acquire(timeout=_DESK_S, poll_interval=0.005)
        except filelock.Timeout:
            holders = ", ".join(_holders(self._where / "desk.lock")) or "an unknown process"
            raise ResourceError(
                f"the leases in {str(self._where)!r} were locked for {_DESK_S:g} s by {holders}, which normally takes "
                "moments. End it, or set TRAINLOOP_LEASE_DIR to another folder."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def stand_in_line(self, requests: Mapping[str, Request]) -> _Ticket:
        # Under the folder's lock: no two waiting runs get the same number.
        number = 1 + max(self._numbers(), default=0)
        pools = [name for request in requests.values() if request.number for name in request.pool]
        with open(self._pools_file(number), "x") as file:  # 'x' never follows a link
            json.dump(pools, file)
        self._pools_file(number).chmod(0o644)
        lock = self.lock(f"ticket-{number}.lock", mode=0o600)
        lock.acquire(timeout=0)
        return _Ticket(number, lock)

    def leave_line(self, ticket: _Ticket) -> None:
        self._forget(ticket.number)
        ticket.lock.release()

    def ahead_of(self, ticket: _Ticket, requests: Mapping[str, Request]) -> int:
        """Return the number of earlier waiting runs, still alive, that want one of the same devices."""
        wanted = {name for request in requests.values() if request.number for name in request.pool}
        ahead = 0
        for number in self._numbers():
            if number >= ticket.number:
                continue
            lock = self._try(f"ticket-{number}.lock")
            if lock is not None:  # its owner has ended
                self._forget(number)
                lock.release()
            elif wanted.intersection(self._pools_of(number)):
                ahead += 1
        return ahead

    def take(self, requests: Mapping[str, Request]) -> tuple[Lease | None, dict[str, list[str]]]:
        """Lease all requested devices or none; return also the names that others hold."""
        locks: list[filelock.BaseFileLock] = []
        names: dict[str, list[str]] = {}
        taken: dict[str, list[str]] = {}
        for kind, request in requests.items():
            names[kind], taken[kind] = [], []
            for name in request.pool:
                if len(names[kind]) == request.number:
                    break
                lock = self._try(_held(name))
                if lock is not None and any(_is_locked(path) for path in self._of_others(name)):
                    lock.release()
                    lock = None
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

    def lock(self, name: str, mode: int = 0o644) -> filelock.BaseFileLock:
        import filelock

        # Other users may only see that a device is held. A lease may end in another thread.
        return filelock.FileLock(str(self._where / name), mode=mode, thread_local=False)

    def holders(self, device: str) -> list[str]:
        """Return the processes that hold a device, of this user and of others, as far as the system reports them."""
        paths = [self._where / _held(device), *self._of_others(device)]
        return [holder for path in paths for holder in _holders(path)]

    def _of_others(self, device: str) -> Iterator[Path]:
        """Yield a device's file in the folder of each other user, if that user really owns the folder."""
        for path in self._base.glob(f"{_FOLDER}*"):
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                own = path == self._where or path.name != f"{_FOLDER}{found.st_uid}"
                if not own and stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o022:
                    yield path / _held(device)


def _held(device: str) -> str:
    return f"held-{re.sub(r'[^A-Za-z0-9_.-]', '_', device)}.lock"


def _is_locked(path: Path) -> bool:
    """Return True if a process holds the lock of another user's file; write nothing and follow no link."""
    if fcntl is None:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a shared lock, so that two processes may look at once
    except OSError:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    finally:
        os.close(fd)
    return False


def _holders(path: Path) -> list[str]:
    """Return ``process 4711 of user ann (python train.py)`` for each process that has locked the file (Linux only)."""
    holders = []
    with contextlib.suppress(OSError):
        inode = os.lstat(path).st_ino
        with open("/proc/locks") as file:
            # 1: FLOCK  ADVISORY  WRITE 4711 08:01:131090 0 EOF. The device is not always that of stat().
            rows = [
                fields for line in file if (fields := line.split())[1] in ("FLOCK", "POSIX") and fields[3] == "WRITE"
            ]
        for pid in {int(fields[4]) for fields in rows if fields[5].rpartition(":")[2] == str(inode)} - {os.getpid()}:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            short = command if len(command) <= 80 else f"{command[:77]}..."
            status = Path(f"/proc/{pid}/status").read_text()
            user = next(int(line.split()[2]) for line in status.splitlines() if line.startswith("Uid:"))
            holders.append(f"process {pid} of {_user(user)} ({short})")
    return holders


def _user(uid: int) -> str:
    return f"user {user_name(uid) or uid}"


@contextlib.contextmanager
def one_at_a_time(name: str, where: Path | None = None) -> Iterator[None]:
    """Let only one process of this user at a time run the block, for a choice of several steps.

    If there is no folder for locks, or after waiting for a minute, the block runs anyway.
    """
    if fcntl is None:
        yield
        return
    try:
        import filelock

        lock = _Desk(folder() if where is None else where).lock(f"{name}.lock", mode=0o600)
        lock.acquire(timeout=_DESK_S)
    except (OSError, ResourceError, filelock.Timeout):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def inherit() -> None:
    """Make this process use its parent's lease and lease nothing itself."""
    global _inherited
    _inherited = True


def inherited() -> bool:
    """Return True if this process uses its parent's lease."""
    return _inherited
