"""Send bytes and descriptors of any number over a socket between processes of one user.

The bytes travel as a file without a name: an environment is longer than what a socket accepts at once.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence

from trainloop.transfer.pages import anonymous_file, write_all

__all__ = ["connection_pair", "receive", "send"]

_MOST = 250  # descriptors at once; the kernel takes 253


def connection_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends for :func:`send` and :func:`receive`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection: socket.socket, content: bytes, fds: Sequence[int] = ()) -> None:
    """Send bytes and descriptors; the receiver's descriptors have other numbers."""
    file = anonymous_file("message")
    try:
        write_all(file, memoryview(content), 0)
        all_fds = [file, *fds]
        for i in range(0, len(all_fds), _MOST):
            part = array.array("i", all_fds[i : i + _MOST])
            last = b"1" if i + _MOST >= len(all_fds) else b"0"
            connection.sendmsg([last], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, part)])
    finally:
        os.close(file)


def receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """Receive bytes and descriptors; ``None`` if the other end is closed."""
    fds: list[int] = []
    while True:
        part = array.array("i")
        last, rights, _, _ = connection.recvmsg(1, socket.CMSG_LEN(_MOST * part.itemsize), socket.MSG_CMSG_CLOEXEC)
        for _, _, data in rights:
            part.frombytes(data[: len(data) - len(data) % part.itemsize])
        fds += part
        if not last:
            return None
        if last == b"1":
            break
    with open(fds[0], "rb") as file:
        file.seek(0)
        return file.read(), fds[1:]
