"""Find out which users of this host are connected to this process.

Gloo's listeners accept every user of the host, and its protocol has no authentication: a process that connects before
a rank does takes the rank's place, including in the reduction of gradients. Such a process must stay connected, and the
kernel knows the owner of each end of a local connection. So this module looks up the connections that were made while a
process group was created.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from trainloop._support.platform import user_id, user_name

_ESTABLISHED, _LISTEN = "01", "0A"
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


class DisturbedStartError(ConnectionError):
    """An untrusted process connected before any work was done, so the start may be repeated."""


class _Socket(NamedTuple):
    local: str
    remote: str
    state: str
    uid: int
    inode: int


@contextlib.contextmanager
def only_trusted_peers(kind: type[ConnectionError] = ConnectionError) -> Iterator[None]:
    """Return a context in which to create a process group; it raises an error if another user connects to the group.

    Parameters
    ----------
    kind : type
        Class of the error.

    It detects connections between processes of one host (one network namespace) on Linux; elsewhere it does nothing.
    Any user may connect to the user's servers that were listening before.

    Raises
    ------
    ConnectionError
        If another user has connected. The error names the user, and replaces the group's own error.
    """
    # A socket that was listening before is a server of the user, to which any process may connect.
    before = _own_sockets()
    try:
        yield
    except Exception as error:
        _refuse_other_users(before, kind, error)
        raise
    _refuse_other_users(before, kind)


def _refuse_other_users(before: set[int], kind: type[ConnectionError], cause: Exception | None = None) -> None:
    uids = _untrusted_users(_own_sockets() - before)
    if uids:
        users = " and ".join(sorted({_user(uid) for uid in uids}))
        then = "" if cause is None else f" Creating the group then failed: {str(cause).rstrip('.')}."
        # Raise without the cause, which would look like the loss of another rank.
        raise kind(
            f"{users} connected to this run's process group while it was being created, but only the run's ranks may "
            f"connect (seen by the run's process {os.getpid()} at {time.strftime('%H:%M:%S')}). No data was "
            f"exchanged.{then} Start the run again. If somebody connects on purpose, start the run in a container with "
            "its own network. See SECURITY.md."
        ) from None


def _untrusted_users(own: set[int]) -> list[int]:
    """Return the other users that connected to the listeners among these sockets."""
    sockets = _sockets() if own else []  # read once, since listing sockets takes the kernel some milliseconds
    listeners = {_port(s.local) for s in sockets if s.state == _LISTEN and s.inode in own}
    owners = {(s.local, s.remote): s.uid for s in sockets}
    taken = [s for s in sockets if s.state != _LISTEN and _port(s.local) in listeners]
    others = [owners.get((s.remote, s.local)) for s in taken if s.inode]
    # Root is allowed, since it can read every process in any case.
    return [uid for uid in others if uid is not None and uid not in (user_id(), 0)]


def _own_sockets() -> set[int]:
    """Return the inodes of this process's sockets, by which the kernel lists them."""
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/self/fd/{name}")
                if stat.S_ISSOCK(found.st_mode):
                    inodes.add(found.st_ino)
    return inodes


def _sockets() -> list[_Socket]:
    """Return the TCP sockets of this network namespace, as the kernel lists them; empty if it does not."""
    sockets = []
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table) as file:
            next(file, None)
            for line in file:
                fields = line.split()
                local, remote = _plain_address(fields[1]), _plain_address(fields[2])
                sockets.append(_Socket(local, remote, fields[3], int(fields[7]), int(fields[9])))
    return sockets


def _plain_address(text: str) -> str:
    """Return an address; a mapped IPv4 address of an IPv6 socket is returned as plain IPv4."""
    return text.removeprefix("0000000000000000FFFF0000")


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _user(uid: int) -> str:
    name = user_name(uid)
    return f"another user (uid {uid})" if name is None else f"user {name} (uid {uid})"
