"""Find out which users are at the other ends of this process's connections, on the same host.

Gloo's listeners are open to every user of the host, and its protocol asks nobody who they are: a process that connects
before a rank does takes the rank's place, in gradients too. It has to stay connected, and the kernel knows the owner of
each end of a local connection. So the connections that came in while a process group was made are looked up.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from trainloop._support.platform import user_id, user_name

__all__ = ["DisturbedStartError", "no_strangers", "owners_are_known"]

_ESTABLISHED, _LISTEN = "01", "0A"
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


class DisturbedStartError(ConnectionError):
    """An untrusted connection before any work was done: the start may be repeated."""


class _Socket(NamedTuple):
    local: str
    remote: str
    state: str
    uid: int
    inode: int


def owners_are_known() -> bool:
    """Return True if this host's kernel tells the owners of connections, which :func:`no_strangers` needs."""
    return os.access("/proc/self/fd", os.R_OK) and any(os.access(table, os.R_OK) for table in _TABLES)


@contextlib.contextmanager
def no_strangers(kind: type[ConnectionError] = ConnectionError) -> Iterator[None]:
    """A context in which to make a process group: another user's connection to it raises an error that says so.

    Parameters
    ----------
    kind : type
        Class of the error.

    Sees connections between processes of one host (of one network namespace) on Linux; does nothing elsewhere. The
    user's own servers, which listened before, may be connected to by anybody.

    Raises
    ------
    ConnectionError
        That names the user; also in place of the group's own error, which would not say what happened.
    """
    # What listened before is the user's own, a server that anybody may connect to.
    before = _own_sockets()
    try:
        yield
    except Exception as error:
        _check(before, kind, error)
        raise
    _check(before, kind)


def _check(before: set[int], kind: type[ConnectionError], cause: Exception | None = None) -> None:
    strangers = _strangers(_own_sockets() - before)
    if strangers:
        users = " and ".join(sorted({_user(uid) for uid in strangers}))
        then = "" if cause is None else f" It then failed: {cause}"
        # Without the cause: it would look like the loss of another rank.
        raise kind(
            f"{users} connected to this run's process group while it was created, but only its ranks may (seen by the "
            f"run's own process {os.getpid()}, at {time.strftime('%H:%M:%S')}). Nothing was exchanged.{then} Start the "
            "run again; if somebody does that on purpose, in a container with its own network. See SECURITY.md."
        ) from None


def _strangers(own: set[int]) -> list[int]:
    """Other users that connected to the listeners among these sockets."""
    sockets = _sockets() if own else []  # once: the kernel takes some milliseconds to list them
    listeners = {_port(s.local) for s in sockets if s.state == _LISTEN and s.inode in own}
    owners = {(s.local, s.remote): s.uid for s in sockets}
    taken = [s for s in sockets if s.state != _LISTEN and _port(s.local) in listeners]
    others = [owners.get((s.remote, s.local)) for s in taken if s.inode]
    # Root may look into every process anyway.
    return [uid for uid in others if uid is not None and uid not in (user_id(), 0)]


def _own_sockets() -> set[int]:
    """This process's sockets, by the numbers under which the kernel lists them."""
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/self/fd/{name}")
                if stat.S_ISSOCK(found.st_mode):
                    inodes.add(found.st_ino)
    return inodes


def _sockets() -> list[_Socket]:
    """TCP sockets of this network namespace, as the kernel lists them; none where it doesn't."""
    sockets = []
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table) as file:
            next(file, None)
            for line in file:
                fields = line.split()
                local, remote = _address(fields[1]), _address(fields[2])
                sockets.append(_Socket(local, remote, fields[3], int(fields[7]), int(fields[9])))
    return sockets


def _address(text: str) -> str:
    """An address; one that an IPv6 socket shows as a mapped IPv4 address, as plain IPv4."""
    return text.removeprefix("0000000000000000FFFF0000")


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _user(uid: int) -> str:
    name = user_name(uid)
    return f"another user (uid {uid})" if name is None else f"user {name} (uid {uid})"
