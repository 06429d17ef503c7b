"""Bytes and descriptors between processes: any length, any number, and an end that is told."""

from __future__ import annotations

import os
import resource
import threading

from trainloop.launch.messages import connection_pair, receive, send


def test_long_messages_with_many_descriptors_arrive() -> None:
    ours, theirs = connection_pair()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = min(600, (soft - 100) // 2)
    files = [os.memfd_create(f"file-{i}") for i in range(number)]
    content = os.urandom(5 << 20)
    received: list[int] = []
    try:
        sender = threading.Thread(target=send, args=(ours, content, files))
        sender.start()
        message = receive(theirs)
        sender.join()
        assert message is not None
        arrived, received = message
        assert arrived == content
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in received]
        assert names == [f"/memfd:file-{i} (deleted)" for i in range(number)]
        assert not set(received) & set(files)
        assert not any(map(os.get_inheritable, received))
        send(theirs, b"")
        assert receive(ours) == (b"", [])
    finally:
        for fd in (*files, *received):
            os.close(fd)
        theirs.close()
    assert receive(ours) is None
    ours.close()
