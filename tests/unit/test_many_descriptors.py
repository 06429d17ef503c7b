"""Processes with more than 1023 open files, as notebooks and servers are: what they wait for has a high number."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from descriptors import all_low_numbers_taken

from trainloop.launch.failures import Failure
from trainloop.launch.lines import Line
from trainloop.launch.rendezvous import Rendezvous


@pytest.fixture(autouse=True)
def high_numbers() -> Iterator[None]:
    with all_low_numbers_taken():
        yield


def test_a_line_is_over_when_the_other_side_has_gone_and_not_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line(socket.create_connection(server.getsockname()))
        other, _ = server.accept()
    assert line.fileno() > 1023
    assert not line.is_over()
    other.close()
    deadline = time.monotonic() + 10
    while not line.is_over() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert line.is_over()
    line.close()


@pytest.mark.long
def test_hosts_hear_each_other_at_once_and_say_little(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        point = free.getsockname()
    hosts: dict[int, Rendezvous] = {}

    def meet(node: int) -> None:
        hosts[node] = Rendezvous(point, node_rank=node, num_nodes=2, ranks_per_node=1, wait_s=20)

    threads = [threading.Thread(target=meet, args=(node,)) for node in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    sent: list[float] = []
    send = Line.send

    def counted(line: Line, message: dict[str, Any]) -> None:
        sent.append(time.monotonic())
        send(line, message)

    monkeypatch.setattr(Line, "send", counted)
    began = time.monotonic()
    time.sleep(2.5)
    assert 2 <= len(sent) <= 2 * (time.monotonic() - began + 2)  # a sign of life a second, and no answers to those
    told = [Failure(rank=node, time_ns=1, type="ValueError", message=f"of node {node}") for node in range(2)]
    for node in range(2):
        hosts[node].tell(told[node])
    assert [hosts[node].wait_for_failure(10) for node in range(2)] == [told[1], told[0]]
    for node in range(2):
        hosts[node].__exit__()
