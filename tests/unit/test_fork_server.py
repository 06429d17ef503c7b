"""The caller's side of the fork server, with the test as the server: its answers late, odd, missing."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trainloop.errors import ConfigurationError
from trainloop.launch import _server_is_ready, fork_server, forked
from trainloop.launch.fork_server import ForkServer, ForkServerError, ServerGoneError
from trainloop.launch.messages import connection_pair, receive, send


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
        close_all(receive(played[0].end))
        pool.submit(server.wait).result(timeout=20)
        played[0].end.send(f"4242 {os.getpid()}".encode())
        assert asking.result(timeout=20) == 4242
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


def test_only_a_server_that_says_why_rules_servers_out(played: list[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fork_server.METHOD_VARIABLE, "auto")
    with ThreadPoolExecutor(1) as pool:
        # Killed while it loads, as by Ctrl-C to a terminal's group in the past: another one serves.
        begun = fork_server.server()
        assert played[0].blocked >= {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        ready = pool.submit(_server_is_ready, "forkserver")
        played[0].exit(-signal.SIGKILL)
        wait_until(lambda: len(played) == 2)
        played[1].end.send(b" ")
        assert ready.result(timeout=20)
        assert fork_server.server() is not begun

        # It can't fork: that is said, and it stays.
        asking = pool.submit(fork_server.server().start, ["-c", "program"], [])
        close_all(receive(played[1].end))
        played[1].end.send(str(OSError(errno.EAGAIN, "Resource temporarily unavailable")).encode())
        with pytest.raises(ForkServerError, match=r"it can't fork: .*Resource temporarily unavailable"):
            asking.result(timeout=20)
        assert fork_server.server().pid
        assert len(played) == 2

        # What it says itself counts until circumstances change.
        fork_server.end_server()
        fork_server.server()
        ready = pool.submit(_server_is_ready, "auto")
        played[2].end.send(b"its threads are many")
        assert not ready.result(timeout=20)
        with pytest.raises(ForkServerError, match="its threads are many"):
            fork_server.server()


def test_a_server_that_still_loads_is_killed_at_the_end(played: list[Played]) -> None:
    fork_server.server()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fork_server.server().wait)
        fork_server.end_server()
        with pytest.raises(ServerGoneError, match=r"it is gone|it ended"):  # a thread that waits does so no longer
            waiting.result(timeout=20)
    assert played[0].returncode == -signal.SIGKILL


def test_a_rank_that_is_killed_at_once_is_a_process_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_served", lambda command, fds: 4242)  # nobody reads what it is told
    process = fork_server.ServedProcess(target=print)
    popen = fork_server._Popen(process)
    assert popen.pid == 4242
    popen.finalizer()


def test_who_asks_for_a_fork_server_by_name_is_never_given_a_spawned_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(command: list[Any], fds: list[int]) -> int:
        raise ServerGoneError("it was killed")

    monkeypatch.setattr(fork_server, "_served", refused)
    monkeypatch.setattr(fork_server, "_spawned", lambda command, fds: 4242)
    process = fork_server.ServedProcess(target=print)
    popen = fork_server._Popen(process)
    assert popen.pid == 4242
    popen.finalizer()
    process.may_spawn = False
    with pytest.raises(ConfigurationError, match=r"start_method='forkserver': .*: it was killed\. Use 'spawn'"):
        fork_server._Popen(process)


def test_a_server_that_can_not_fork_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    assert b"Resource temporarily unavailable" in (forked._fork_for(os.getpid()) or b"")


def test_a_server_of_a_process_with_many_files_open_hears_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.setattr(forked, "_fork_for", lambda caller: None)  # as in the new process
    monkeypatch.setattr(forked, "_objection", str)  # pytest has threads
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ours, theirs = connection_pair()
    with ours, theirs:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
            number = fcntl.fcntl(theirs, fcntl.F_DUPFD, 1500)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with socket.socket(fileno=number) as connection:
            send(ours, b'{"modules": []}')
            assert forked._next_request(connection, os.getppid()) == ({"modules": []}, [])


def close_all(message: tuple[bytes, list[int]] | None) -> None:
    assert message is not None
    for fd in message[1]:
        os.close(fd)


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reached()
