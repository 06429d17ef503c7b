"""The caller's side of the fork server, with the test as the server: its answers late, odd, missing."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trainloop.launch import fork_server
from trainloop.launch.fork_server import ForkServer, ServerGoneError
from trainloop.launch.messages import receive


class Played:
    """In place of the server's process."""

    started: list[Played] = []

    def __init__(self, command: list[str], *, pass_fds: list[int], **options: Any) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self.end = socket.socket(fileno=os.dup(pass_fds[0]))
        self.started.append(self)

    def poll(self) -> int | None:
        return self.returncode

    wait = communicate = lambda self, timeout=None: self.returncode

    def kill(self) -> None:
        self.exit(-signal.SIGKILL)

    def exit(self, returncode: int) -> None:
        self.returncode = returncode
        self.end.close()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Played]]:
    fork_server.end_server()
    monkeypatch.setattr(Played, "started", [])
    monkeypatch.setattr(fork_server.subprocess, "Popen", Played)
    yield Played.started
    for each in Played.started:
        each.exit(0)
    fork_server.end_server()


def test_several_threads_wait_for_one_server(played: list[Played]) -> None:
    server = ForkServer()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.wait) for _ in range(2)]
        played[0].end.send(b" ")
        for each in waiting:
            each.result(timeout=20)
        # What it answers later is for who has asked.
        asking = pool.submit(server.start, ["-c", "program"], [])
        message = receive(played[0].end)
        assert message is not None
        pool.submit(server.wait).result(timeout=20)
        played[0].end.send(f"4242 {os.getpid()}".encode())
        assert asking.result(timeout=20) == 4242
    for fd in message[1]:
        os.close(fd)
    played[0].exit(0)
    server.close()


def test_a_server_that_does_not_answer_is_gone(played: list[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer()
    monkeypatch.setattr(fork_server, "_LOAD_S", 0.01)
    with pytest.raises(ServerGoneError, match=r"has not answered for 0\.01 s"):
        server.wait()
    played[0].end.send(b" ")
    server.wait()
    monkeypatch.setattr(fork_server, "_ANSWER_S", 0.01)
    with pytest.raises(ServerGoneError, match=r"has not answered for 0\.01 s"):
        server.start(["-c", "program"], [])
    played[0].exit(0)
    server.close()
