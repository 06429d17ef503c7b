"""Who is at the other end of a connection that came in while a process group was made."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from trainloop.distributed.peers import only_trusted_peers

CONNECT = """
import encodings.idna, os, socket, sys
os.setgid({uid})
os.setuid({uid})
connection = socket.create_connection(("{host}", {port}))
print("in", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def connected(listener: socket.socket, uid: int) -> Iterator[None]:
    """A process of that user, connected to the listener."""
    host, port = listener.getsockname()[:2]
    code = CONNECT.format(uid=uid, host=host, port=port)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        taken, _ = listener.accept()
        with taken:
            yield
    finally:
        process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_another_user_who_connects_is_named(host: str) -> None:
    with contextlib.ExitStack() as undo:

        def listener() -> socket.socket:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return undo.enter_context(socket.create_server((host, 0), family=family))

        server = listener()
        with only_trusted_peers():
            undo.enter_context(connected(listener(), os.geteuid()))  # a rank
            undo.enter_context(connected(server, 65534))  # one's own server, from before, takes whom it likes
        text = r"user nobody \(uid 65534\) connected to this run's process group .*No data was exchanged"
        with pytest.raises(ConnectionError, match=text), only_trusted_peers():
            undo.enter_context(connected(listener(), 65534))
        then = rf"{text}. Creating the group then failed: Gloo's own error. Start"
        with pytest.raises(ConnectionError, match=then) as caught, only_trusted_peers():
            undo.enter_context(connected(listener(), 65534))
            raise RuntimeError("Gloo's own error.")
        assert caught.value.__suppress_context__  # else it would look like the loss of another rank
        with pytest.raises(RuntimeError, match="no stranger there"), only_trusted_peers():
            raise RuntimeError("no stranger there")
