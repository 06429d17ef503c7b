"""Processes with more than 1023 open files, as notebooks and servers are: what they wait for has a high number."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kit.descriptors import all_low_numbers_taken

from trainloop._launch.failures import Failure
from trainloop._launch.hosts import Hosts


@pytest.fixture(autouse=True)
def high_numbers() -> Iterator[None]:
    with all_low_numbers_taken():
        yield


@pytest.mark.long
def test_hosts_hear_each_other_soon_and_write_little(monkeypatch: pytest.MonkeyPatch, may_leave: Any) -> None:
    may_leave("pipe:")  # the first store of a process makes one of libuv, for its life
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        point = free.getsockname()
    hosts: dict[int, Hosts] = {}

    def meet(node: int) -> None:
        hosts[node] = Hosts(point, node_rank=node, num_nodes=2, ranks_per_node=1, wait_s=20)

    threads = [threading.Thread(target=meet, args=(node,)) for node in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    written: list[float] = []
    exchange = Hosts._exchange

    def counted(host: Hosts) -> None:
        written.append(time.monotonic())
        exchange(host)

    monkeypatch.setattr(Hosts, "_exchange", counted)
    began = time.monotonic()
    time.sleep(2.5)
    assert 2 <= len(written) <= 2 * 4 * (time.monotonic() - began + 1)  # four a second and host
    reported = [Failure(rank=node, time_ns=1, type="ValueError", message=f"of node {node}") for node in range(2)]
    for node in range(2):
        hosts[node].report(reported[node])
    received = [hosts[node].wait_for_failure(10) for node in range(2)]
    assert [failure and failure.message for failure in received] == ["of node 1", "of node 0"]
    for node in (1, 0):
        hosts[node].__exit__(None, None, None)
