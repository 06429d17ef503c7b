"""Lease CPUs and GPUs of one machine by locked files, so that no two runs use the same device.

The operating system releases a file lock when its process ends for any reason, even by SIGKILL. So a lease ends with
its process, and nothing has to be cleaned up.

* A request is granted completely or not at all: two runs that had only some of their devices could wait for each other.
* All decisions of a user are made under one short lock on the user's folder. No process waits for a device while it has
  this lock. Waiting runs try again at random intervals; the first one that finds its devices free gets them.
* A locked file contains a line about the process that holds the lock, for error messages.
* Each user has a private folder. Its owner and mode are checked, so that no other user can put links there. Runs of
  different users see each other's leases, because they can see which files are locked. A run first locks a device, then
  looks for locks of other users. Two runs that want a device at the same time may both release it, but never both keep
  it.

Children of a run use their parent's lease. After :func:`inherit`, a process leases nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainloop._support.platform import fcntl, user_id, user_name
from trainloop._support.user_line import warn
from trainloop.errors import ResourceError

if TYPE_CHECKING:
    import filelock

_POLL_S = (0.02, 0.25)  # first and longest interval between two attempts of a waiting run
_DAY_S = 86400.0
_LOCK_TIMEOUT_S = 60.0  # longest wait for the folder's lock, which is normally held for milliseconds

_FOLDER = "trainloop-leases-"  # the user ID is appended
_UNKNOWN = "an unknown process"

_inherited = False


class UnsafeFolderError(ResourceError):
    """This user's lease folder is not a folder, or another user owns it."""


class Request(NamedTuple):
    """Request for a number of devices from a pool."""

    number: int
    """Number of devices, 0 or more."""
    pool: Sequence[str]
    """Names of devices to choose from, best first: ``cpu-3``, ``GPU-<uuid>``. A device has one name in all runs."""
    least: int | None = None
    """Number of devices that is enough if fewer than ``number`` are free; None if all ``number`` devices are needed."""

    @property
    def enough(self) -> int:
        """Smallest number of devices that satisfies the request."""
        return self.number if self.least is None else self.least


class Lease(contextlib.ExitStack):
    """Leased devices, until :meth:`close`, the end of a ``with`` block, or the end of the process."""

    def __init__(self, names: dict[str, list[str]], locks: list[filelock.BaseFileLock]) -> None:
        super().__init__()
        self.names = names
        """Names of the leased devices, by kind."""
        for lock in locks:
            self.callback(lock.release)


def folder() -> Path:
    """Return the parent of all users' lease folders: ``TRAINLOOP_LEASE_DIR``, or a folder that all users share."""
    named = os.environ.get("TRAINLOOP_LEASE_DIR")
    if named:
        return Path(named)
    # Not tempfile.gettempdir(), because TMPDIR can differ between two jobs on one node.
    return Path("/tmp")


def acquire(requests: Mapping[str, Request], *, timeout_s: float | None = None, where: Path | None = None) -> Lease:
    """Wait for devices, and lease them all.

    Parameters
    ----------
    requests : mapping of str to Request
        Requests by kind, such as ``cpu`` and ``gpu``; all are granted together.
    timeout_s : float, optional
        Seconds to wait; with 0 the devices must be free now. Default: a day.
    where : Path, optional
        Folder to use instead of :func:`folder`.

    Raises
    ------
    ResourceError
        Immediately if a pool is smaller than its request, or if another user owns this user's folder; otherwise after
        the time-out. The error names the processes that have leased the devices.
    """
    for kind, request in requests.items():
        # Raised immediately, because waiting would not help.
        if request.enough > len(request.pool):
            raise ResourceError(
                f"{request.enough} {kind}s cannot be granted: this process may use only "
                f"{len(request.pool)}. Request fewer."
            )
    if fcntl is None:
        warn("CPUs and GPUs are not leased on Windows. Give each run its own devices= and num_cpus=.")
        return Lease({kind: list(request.pool[: request.number]) for kind, request in requests.items()}, [])
    leases = _LeaseFolder(folder() if where is None else where)
    timeout_s = _DAY_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    pause = _POLL_S[0]
    while True:
        with leases.locked():
            lease, taken = leases.take(requests)
        if lease is not None:
            return lease
        if time.monotonic() >= deadline:
            raise _refusal(requests, timeout_s, taken)
        # The delay is random, because processes that wake at the same time would collide again.
        wait = pause * random.uniform(0.8, 1.2)
        time.sleep(max(0.0, min(wait, deadline - time.monotonic())))
        pause = min(2 * pause, _POLL_S[1])


def _refusal(
    requests: Mapping[str, Request], timeout_s: float, taken: Mapping[str, Mapping[str, str]]
) -> ResourceError:
    wanted = " and ".join(f"{r.enough} of {len(r.pool)} {kind}s" for kind, r in requests.items() if r.number)
    names = "; ".join(f"{kind}s {', '.join(holders)}" for kind, holders in taken.items() if holders)
    holders = ", ".join(dict.fromkeys(holder for holders in taken.values() for holder in holders.values()))
    return ResourceError(
        f"{wanted} could not be leased {f'within {timeout_s:g} s' if timeout_s else 'at once'}, because other runs "
        f"have leased {names} ({holders}). Wait longer, request fewer, or end another run on this machine."
    )


class _LeaseFolder:
    """This user's folder of lock files."""

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
                f"leases can't be stored in {str(self._where)!r}: it is a {what} of {_user(found.st_uid)}, but must be "
                "your own folder, so that nobody else can change leases. Have it removed, or set TRAINLOOP_LEASE_DIR."
            )
        self._where.chmod(0o755)  # mkdir applies the umask; others may read, but not write

    @contextlib.contextmanager
    def locked(self, name: str = "desk") -> Iterator[None]:
        """Return a context that only one process of this user can be in at a time."""
        lock = self._lock_of(f"{name}.lock", mode=0o600, timeout_s=_LOCK_TIMEOUT_S)
        if lock is None:
            raise ResourceError(
                f"the leases in {str(self._where)!r} were locked for {_LOCK_TIMEOUT_S:g} s by "
                f"{_holder(self._where / f'{name}.lock') or _UNKNOWN}. A lock is normally held only for a moment. End "
                "that process, or set TRAINLOOP_LEASE_DIR to another folder."
            )
        try:
            self._write_holder(f"{name}.lock")
            yield
        finally:
            lock.release()

    def take(self, requests: Mapping[str, Request]) -> tuple[Lease | None, dict[str, dict[str, str]]]:
        """Lease all requested devices or none. Return the holder of each unavailable device, too, by kind and name."""
        locks: list[filelock.BaseFileLock] = []
        names: dict[str, list[str]] = {}
        taken: dict[str, dict[str, str]] = {}
        for kind, request in requests.items():
            names[kind], taken[kind] = [], {}
            for name in request.pool:
                if len(names[kind]) == request.number:
                    break
                lock = self._lock_of(_lock_name(name))
                if lock is None:
                    taken[kind][name] = _holder(self._where / _lock_name(name)) or _UNKNOWN
                elif holder := next(filter(None, map(_holder, self._of_others(name))), None):
                    lock.release()
                    taken[kind][name] = holder
                else:
                    locks.append(lock)
                    names[kind].append(name)
        lease = Lease(names, locks)
        if all(len(names[kind]) >= request.enough for kind, request in requests.items()):
            for name in (name for of_kind in names.values() for name in of_kind):
                self._write_holder(_lock_name(name))
            return lease, taken
        lease.close()
        return None, taken

    def _lock_of(self, name: str, *, mode: int = 0o644, timeout_s: float = 0) -> filelock.BaseFileLock | None:
        """Lock a file and return the lock; None if the lock was not free in time.

        Other users may only read the file.
        """
        import filelock

        lock = filelock.FileLock(str(self._where / name), mode=mode, thread_local=False)  # any thread may release it
        try:
            lock.acquire(timeout=timeout_s, poll_interval=0.005)
        except filelock.Timeout:
            return None
        return lock

    def _write_holder(self, name: str) -> None:
        """Write a line about this process into a file that the process has locked."""
        command = " ".join(sys.orig_argv)
        short = command if len(command) <= 80 else f"{command[:77]}..."
        with contextlib.suppress(OSError):  # on a full disk, errors do not name the holder
            (self._where / name).write_text(f"process {os.getpid()} of {_user(user_id())} ({short})", encoding="utf-8")

    def _of_others(self, device: str) -> Iterator[Path]:
        """Yield the path of a device's lock in each folder that is named after another user and owned by this user."""
        for path in self._base.glob(f"{_FOLDER}*"):
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                skip = path == self._where or path.name != f"{_FOLDER}{found.st_uid}"
                if not skip and stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o022:
                    yield path / _lock_name(device)


def _lock_name(device: str) -> str:
    return f"held-{re.sub(r'[^A-Za-z0-9_.-]', '_', device)}.lock"


def _holder(path: Path) -> str | None:
    """Return a line about the process that has locked a file; None if it is not locked.

    Links are not followed, and nothing is written.
    """
    if fcntl is None:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two processes can check at once
    except OSError:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        # Another user may have written the text, so control characters are removed.
        text = os.read(fd, 200).decode(errors="replace")
        return "".join(c if c.isprintable() else "?" for c in text) or _UNKNOWN
    finally:
        os.close(fd)
    return None


def _user(uid: int | None) -> str:
    return f"user {uid if uid is None else user_name(uid) or uid}"


@contextlib.contextmanager
def one_at_a_time(name: str, where: Path | None = None) -> Iterator[None]:
    """Return a context that only one process of this user can be in at a time, for a choice that takes several steps.

    If there is no folder for locks, or the lock is not free within a minute, the block runs without the lock.
    """
    if fcntl is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ResourceError):
            stack.enter_context(_LeaseFolder(folder() if where is None else where).locked(name))
        yield


def inherit() -> None:
    """Let this process use its parent's lease, and lease nothing itself."""
    global _inherited
    _inherited = True


def inherited() -> bool:
    """Return True if this process uses its parent's lease."""
    return _inherited
