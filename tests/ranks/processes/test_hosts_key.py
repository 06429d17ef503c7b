"""Hosts that share a key: an untrusted process can neither take a host's place nor write anything that is believed."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist
from test_hosts import KEY, free_port, in_threads, leave, meet, store_at

from trainloop._launch import launch
from trainloop._launch.failures import Failure
from trainloop.errors import ConfigurationError


def entry_of(store: dist.Store, node: int) -> tuple[dict[str, Any], str]:
    """Content and signature of a host's entry, once it is there."""
    data, _, signature = store.get(f"host/{node}").decode().rpartition(" ")
    found: dict[str, Any] = json.loads(data)
    return found, signature


def test_hosts_without_the_key_are_refused_and_entries_of_others_are_not_taken_for_a_host(
    capfd: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    outcomes: list[Any] = []
    waiting = threading.Thread(target=lambda: outcomes.append(meet(port, 0, key=KEY)))
    waiting.start()
    with pytest.raises(ConfigurationError, match=r"node 1 has none: set it to the same secret on all hosts"):
        meet(port, 1)
    with pytest.raises(
        ConfigurationError, match=r"did not prove that it has this run's key. Set TRAINLOOP_KEY to the same secret"
    ):
        meet(port, 1, key=b"another" * 5)
    untrusted = store_at(port)
    first, _ = entry_of(untrusted, 0)
    forged = json.dumps({**first, "id": "forged"})
    for signature in ("", "0" * 64, entry_of(untrusted, 0)[1]):
        untrusted.set("host/1", f"{forged} {signature}")
        time.sleep(0.3)
        assert waiting.is_alive()
    one = meet(port, 1, key=KEY)  # whose place nobody has taken
    waiting.join(30)
    assert capfd.readouterr().err.count("Set TRAINLOOP_KEY to the same secret on all hosts. Still waiting.") == 1
    leave(outcomes[0], one)


@pytest.mark.long
def test_an_entry_of_an_earlier_run_is_not_believed() -> None:
    """What a host wrote in one run, replayed in the next one with the same key."""
    port = free_port()
    hosts = in_threads(*({"port": port, "node_rank": node, "key": KEY} for node in (0, 1)))
    store = store_at(port)
    recorded = [store.get(f"host/{node}") for node in range(2)]
    del store
    leave(*hosts)

    # To a node 0: as node 1.
    replay = threading.Thread(target=lambda: store_at(port).set("host/1", recorded[1]))
    replay.start()
    with pytest.raises(ConfigurationError, match="Missing: node_rank 1"):
        meet(port, 0, key=KEY, wait_s=2)
    replay.join()

    # To a node 1: by a store that is not node 0's.
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    content, _, signature = recorded[0].decode().rpartition(" ")
    assert json.loads(content)["hosts"]
    other.set("host/0", f"{content} {signature}")
    with pytest.raises(ConfigurationError, match="it is busy with another run, or still ending an earlier one"):
        meet(other.port, 1, key=KEY, wait_s=5)


@pytest.mark.long
def test_a_program_that_is_not_node_0_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainloop._launch.hosts._CONNECT_S", 2.0)
    monkeypatch.setenv("TRAINLOOP_KEY", "0123456789" * 4)

    def join(port: int) -> None:
        launch(
            lambda stop: None, ranks_per_node=1, num_nodes=2, node_rank=1, timeout_s=20, start_method="spawn",
            init_method=f"tcp://127.0.0.1:{port}",
        )  # fmt: skip

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"node 1 of 2: the program that listens at 127.*{port} is not node 0"
        ):
            join(port)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("host/0", '{"id": "x", "hosts": {"1": "x"}} ' + "0" * 64)
    with pytest.raises(ConfigurationError, match=r"node 1 of 2: node 0 at 127.* did not prove that it has this run's"):
        join(store.port)


def test_entries_without_the_key_are_not_believed_during_a_run() -> None:
    port = free_port()
    zero, one = in_threads({"port": port, "node_rank": 0, "key": KEY}, {"port": port, "node_rank": 1, "key": KEY})
    untrusted = store_at(port)
    entry, signature = entry_of(untrusted, 1)
    lie = asdict(Failure(rank=3, time_ns=1, type="ValueError", message="a lie"))
    deadline = time.monotonic() + 20
    while (failure := zero.failure()) is None:
        assert time.monotonic() < deadline
        untrusted.set("host/1", f"{json.dumps({**entry, 'count': 10**6, 'failed': [1, 1, lie]})} {signature}")
        time.sleep(0.01)
    assert failure.message == "node 1 of 2 was lost: its entry does not carry this run's key"
    leave(zero, one)


def test_one_host_with_a_key_and_node_0_without() -> None:
    port = free_port()
    zero, keyed, right = in_threads(
        {"port": port, "node_rank": 0}, {"port": port, "node_rank": 1, "key": KEY}, {"port": port, "node_rank": 1}
    )
    assert "node 1 has a key (TRAINLOOP_KEY), but node 0 has none: set it to the same secret on all hosts" in str(keyed)
    leave(zero, right)
