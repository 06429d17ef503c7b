"""Hosts that share a key: who has none can neither take a host's place nor say anything that is believed."""

from __future__ import annotations

import hmac
import json
import socket
import threading
from typing import Any

import pytest
from test_hosts import KEY, connected_to, free_port, in_threads, meet

from trainloop.errors import ConfigurationError
from trainloop.launch import launch
from trainloop.launch.failures import Failure


def proof(key: bytes, hello: dict[str, Any], nonce: str, text: bytes) -> str:
    """By the protocol's description alone."""
    said = json.dumps(["trainloop hosts 1", hello, nonce], sort_keys=True).encode()
    return hmac.new(hmac.new(key, said, "sha256").digest(), text, "sha256").hexdigest()


def test_who_has_no_key_or_another_or_repeats_what_a_host_said_is_sent_away(capfd: pytest.CaptureFixture[str]) -> None:
    port, other = free_port(), free_port()
    outcomes: list[Any] = []
    waiting = threading.Thread(target=lambda: outcomes.append(meet(port, 0, key=KEY)))
    waiting.start()
    with pytest.raises(ConfigurationError, match=r"node 0 has a key \(TRAINLOOP_KEY\), node 1 has none: set it to the"):
        meet(port, 1)
    with pytest.raises(
        ConfigurationError, match=r"did not prove that it has this run's key. Set TRAINLOOP_KEY to the same"
    ):
        meet(port, 1, key=b"another" * 5)

    # What a real host says, to a node 0 that is made here: it proves nothing to another.
    with socket.create_server(("127.0.0.1", other)) as server:
        host: list[Any] = []
        coming = threading.Thread(target=lambda: host.append(meet(other, 1, key=KEY)))
        coming.start()
        accepted = server.accept()[0]
        line = accepted.makefile("rwb")
        first = line.readline()
        nonce = "ab" * 32
        answer = {"nonce": nonce, "proof": proof(KEY, json.loads(first), nonce, b"was there 0 ")}
        line.write(json.dumps(answer).encode() + b"\n")
        line.flush()
        second = line.readline()
        assert json.loads(second) == {"proof": proof(KEY, json.loads(first), nonce, b"came 0 ")}
        store = json.dumps({"store": ["127.0.0.1", 5]}).encode()
        by_hand = proof(KEY, json.loads(first), nonce, b"was there 1 " + store).encode()
        line.write(store + b" " + by_hand + b"\n")
        line.flush()
        coming.join(30)
        assert host[0].store_address == ("127.0.0.1", 5)
        host[0].__exit__()
        line.close()
        accepted.close()
    repeats = connected_to(port)
    repeats.sendall(first + second)
    repeats.settimeout(20)
    with repeats.makefile("rb") as answers:
        heard = answers.read()
    assert heard.count(b"\n") == 1  # the challenge, and no store
    repeats.close()

    one = meet(port, 1, key=KEY)  # whose place nobody has taken
    waiting.join(30)
    told = capfd.readouterr().err
    assert told.count("without proof that it has this run's key, and was sent away") == 3, told
    for end in (outcomes[0], one):
        end.__exit__()


def test_a_node_0_that_is_none_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINLOOP_KEY", "0123456789" * 4)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            connection = server.accept()[0]
            connection.recv(1 << 16)
            connection.sendall(b'{"store": ["127.0.0.1", 5], "nonce": "00", "proof": "00"}\n' * 3)
            connection.recv(1 << 16)
            connection.close()

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(ConfigurationError, match=r"node 1 of 2: what answers at 127.* did not prove"):
            launch(
                lambda stop: None, ranks_per_node=1, num_nodes=2, node_rank=1, timeout_s=20, start_method="spawn",
                init_method=f"tcp://127.0.0.1:{server.getsockname()[1]}",
            )  # fmt: skip
        pretending.join()


def test_what_is_said_during_a_run_without_the_key_is_not_believed() -> None:
    port = free_port()
    zero, one = in_threads({"port": port, "node_rank": 0, "key": KEY}, {"port": port, "node_rank": 1, "key": KEY})
    lie = Failure(rank=3, time_ns=1, type="ValueError", message="a lie").to_json()
    one._peers[0]._socket.sendall(b'{"failed": ' + lie + b"}\n")  # as who has taken over the connection
    failure = zero.wait_for_failure(10)
    assert (
        "node 1 of 2 was lost: the connection to it broke (a line that does not bear this run's key)" in failure.message
    )
    for host in (zero, one):
        host.__exit__()


def test_one_host_with_a_key_and_node_0_without() -> None:
    port = free_port()
    zero, keyed, right = in_threads(
        {"port": port, "node_rank": 0}, {"port": port, "node_rank": 1, "key": KEY}, {"port": port, "node_rank": 1}
    )
    assert "node 1 has a key (TRAINLOOP_KEY), node 0 has none: set it to the same on all hosts" in str(keyed)
    for host in (zero, right):
        host.__exit__()
