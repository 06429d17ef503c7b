"""Several hosts: processes that meet at an address, on one machine, and in network namespaces of their own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainloop.errors import ConfigurationError
from trainloop.launch import rendezvous
from trainloop.launch.failures import Failure
from trainloop.launch.rendezvous import Rendezvous, rendezvous_point

# -- the rendezvous point ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init_method", "environ", "point"),
    [
        ("tcp://10.0.0.1:29500", {}, ("10.0.0.1", 29500)),
        ("tcp://[fe80::1]:1", {}, ("fe80::1", 1)),
        (None, {"MASTER_ADDR": "node0", "MASTER_PORT": "123"}, ("node0", 123)),
        ("env://", {"MASTER_ADDR": "node0", "MASTER_PORT": "123"}, ("node0", 123)),
        ("tcp://a:5", {"MASTER_ADDR": "node0", "MASTER_PORT": "123"}, ("a", 5)),
    ],
)
def test_the_meeting_point(init_method: str | None, environ: dict[str, str], point: tuple[str, int]) -> None:
    assert rendezvous_point(init_method, environ) == point


@pytest.mark.parametrize(
    ("init_method", "environ", "message"),
    [
        (None, {}, r"MASTER_ADDR='' and MASTER_PORT='': set both on every node"),
        (None, {"MASTER_ADDR": "a"}, r"MASTER_ADDR='a' and MASTER_PORT=''"),
        (None, {"MASTER_ADDR": "a", "MASTER_PORT": "x"}, r"MASTER_ADDR=a and MASTER_PORT=x: must be a host and a port"),
        ("tcp://a", {}, r"init_method='tcp://a': must be a host and a port from 1 to 65535"),
        ("tcp://a:99999", {}, r"such as tcp://10\.0\.0\.1:29500"),
        ("udp://a:1", {}, r"init_method='udp://a:1'"),
    ],
)
def test_a_meeting_point_that_is_none(init_method: str | None, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rendezvous_point(init_method, environ)


KEY = b"k" * 32


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def meet(
    port: int,
    node_rank: int,
    num_nodes: int = 2,
    ranks: int = 2,
    wait_s: float = 20.0,
    key: bytes | None = None,
) -> Rendezvous:
    return Rendezvous(
        ("127.0.0.1", port),
        node_rank=node_rank,
        num_nodes=num_nodes,
        ranks_per_node=ranks,
        wait_s=wait_s,
        key=key,
    )


def in_threads(*calls: dict[str, Any]) -> list[Any]:
    """Outcome of each :func:`meet`, run side by side: a meeting or its error."""
    outcomes: list[Any] = [None] * len(calls)

    def call(i: int) -> None:
        try:
            outcomes[i] = meet(**calls[i])
        except ConfigurationError as error:
            outcomes[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
        time.sleep(0.1)  # in this order, where it matters
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("key", [None, KEY])
def test_hosts_meet_tell_each_other_and_part(key: bytes | None) -> None:
    port = free_port()
    hosts = in_threads(*({"port": port, "node_rank": node, "num_nodes": 3, "key": key} for node in (2, 0, 1)))
    two, zero, one = hosts
    assert zero.store_address == one.store_address == two.store_address
    assert zero.store_address[0] == "127.0.0.1"
    assert {host.interface for host in hosts} == {"lo"}
    failure = Failure(rank=2, time_ns=1, type="ValueError", message="bad")
    one.tell(failure)
    assert zero.wait_for_failure(10) == failure
    assert two.wait_for_failure(10) == failure  # by way of node 0
    for host in hosts:
        host.__exit__()
    assert not [thread for thread in threading.enumerate() if thread.name == "trainloop-hosts"]


def connected_to(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:  # node 0 does not listen yet
            time.sleep(0.05)


# fmt: off
ANYTHING = (b"[]\n", b'{"node_rank": []}\n', b'{"node_rank": null}\n', b"GET / HTTP/1.0\n", b"3\n", b"\xff\n",
            b"[" * 4000 + b"\n", b"x" * 10_000, b'{"node_rank": 1, "num_nodes": 2, "ranks": 2, "nonce": 5}\n{}\n')
# fmt: on


@pytest.mark.parametrize("key", [None, KEY])
def test_strangers_who_say_anything_or_nothing_keep_nobody_from_meeting(key: bytes | None) -> None:
    port = free_port()
    strangers: list[socket.socket] = []
    outcomes: list[Any] = []
    waiting = threading.Thread(target=lambda: outcomes.append(meet(port, 0, key=key)))
    waiting.start()
    for said in (*ANYTHING, *[b""] * 12):
        strangers.append(connected_to(port))
        strangers[-1].sendall(said)
    begin = time.monotonic()
    one = meet(port, 1, key=key)
    waiting.join(30)
    assert time.monotonic() - begin < 10  # and not 5 s for each who says nothing
    (zero,) = outcomes
    assert zero.store_address == one.store_address
    for host in (zero, one):
        host.__exit__()
    for stranger in strangers:
        stranger.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trainloop-host")]


@pytest.mark.long
def test_a_host_that_ends_in_order_is_not_lost() -> None:
    port = free_port()
    zero, one = in_threads({"port": port, "node_rank": 0}, {"port": port, "node_rank": 1})
    one.__exit__()
    assert zero.wait_for_failure(1.5) is None
    zero.__exit__()


def test_a_host_that_goes_away_is_lost() -> None:
    port = free_port()
    zero, one = in_threads({"port": port, "node_rank": 0}, {"port": port, "node_rank": 1})
    one._over.set()
    one._thread.join()
    one._close()  # as the kernel does for a process that was killed
    failure = zero.wait_for_failure(10)
    assert failure.rank == 2
    assert "node 1 of 2 was lost: the connection to it broke" in failure.message
    zero.__exit__()


def test_a_host_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SILENCE_S", 1.0)
    port = free_port()
    zero, one = in_threads({"port": port, "node_rank": 0}, {"port": port, "node_rank": 1})
    monkeypatch.setattr(one, "_send_all", lambda *args, **kwargs: None)
    failure = zero.wait_for_failure(20)
    assert "nothing was heard of it for 1 s: the link was cut, or the host is down" in failure.message
    zero.__exit__()
    one.__exit__()


def test_hosts_that_do_not_come_are_named() -> None:
    port = free_port()
    zero, one = in_threads(
        {"port": port, "node_rank": 0, "num_nodes": 4, "wait_s": 1.5},
        {"port": port, "node_rank": 1, "num_nodes": 4, "wait_s": 5},
    )
    assert f"node 0 of 4 waited 1.5 s at 127.0.0.1:{port}; missing: node_rank 2, 3, came: 1" in str(zero)
    assert f"node 1 of 4 reached node 0 at 127.0.0.1:{port}, which then went away" in str(one)


def test_a_meeting_point_where_nobody_listens() -> None:
    port = free_port()
    with pytest.raises(
        ConfigurationError, match=rf"node 1 of 2 tried for 1 s to reach node 0 at 127.0.0.1:{port}: .*ref"
    ):
        meet(port, 1, wait_s=1.0)


def test_hosts_that_contradict_each_other() -> None:
    port = free_port()
    zero, ranks, taken, right = in_threads(
        {"port": port, "node_rank": 0},
        {"port": port, "node_rank": 1, "ranks": 3},
        {"port": port, "node_rank": 5},
        {"port": port, "node_rank": 1},
    )
    assert "node 1 has num_nodes=2 and 3 ranks, node 0 has num_nodes=2 and 2 ranks" in str(ranks)
    assert "node_rank=5 was taken by another host" in str(taken)
    for host in (zero, right):
        host.__exit__()


def test_a_port_that_is_taken_and_an_address_of_another_host() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        with pytest.raises(ConfigurationError, match=r"node 0 can't listen at 127.*in use. Choose another port"):
            meet(s.getsockname()[1], 0)
    with pytest.raises(ConfigurationError, match=r"node 0 can't listen at 192.0.2.1:5.* Give an address of this host"):
        Rendezvous(("192.0.2.1", 5), node_rank=0, num_nodes=2, ranks_per_node=1, wait_s=1)
    with pytest.raises(ConfigurationError, match=r"can't listen at no.such.host.invalid:5.* Give an address of this"):
        Rendezvous(("no.such.host.invalid", 5), node_rank=0, num_nodes=2, ranks_per_node=1, wait_s=1)


# -- runs --------------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainloop import TrainLoop, TTBasicModel

class Net(TTBasicModel):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)
    def forward(self, x):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        if os.environ.get("FAIL_ON") == str(dist.get_rank()):
            raise ValueError("bad batch")
        open(os.path.join(os.environ["FOLDER"], f"running-{dist.get_rank()}"), "w").close()
        return self.fc(x)

def main():
    nodes, node, ranks = (int(arg) for arg in sys.argv[1:])
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(101, 8, generator=g), torch.randint(0, 3, (101,), generator=g))
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = TrainLoop(model, DataLoader(data, batch_size=8 // (nodes * ranks), shuffle=True), None, None, optimizer,
                     nn.CrossEntropyLoss(), gpu_mode="ddp", accelerator="cpu", devices=ranks, seed=3,
                     progress_bar=False, timeout=60)
    loop.fit(num_epochs=2, num_nodes=nodes, node_rank=node)
    print("WEIGHTS", json.dumps(model.fc.weight.flatten().tolist()))

if __name__ == "__main__":
    main()
"""


def start(
    folder: Path, arguments: Sequence[object], prefix: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return subprocess.Popen(
        [*prefix, sys.executable, str(path), *map(str, arguments)],
        env={**os.environ, "FOLDER": str(folder), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def weights(process: subprocess.Popen[str], timeout_s: float = 100) -> list[float]:
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err
    line = next(line for line in out.splitlines() if line.startswith("WEIGHTS"))
    found: list[float] = json.loads(line.removeprefix("WEIGHTS "))
    return found


@pytest.mark.slow
def test_two_nodes_on_one_machine_agree_with_one_node(tmp_path: Path) -> None:
    meeting_at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TRAINLOOP_KEY": "0123456789" * 4}
    nodes = [start(tmp_path, (2, node, 1), **meeting_at) for node in range(2)]
    first, second = (weights(process) for process in nodes)
    alone = weights(start(tmp_path, (1, 0, 2)))
    assert first == second
    assert first == pytest.approx(alone, abs=1e-6)


@pytest.mark.slow
def test_the_failure_on_one_node_is_told_on_all(tmp_path: Path) -> None:
    meeting_at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "FAIL_ON": "1"}
    nodes = [start(tmp_path, (2, node, 1), **meeting_at) for node in range(2)]
    for process in nodes:
        _, err = process.communicate(timeout=100)
        assert process.returncode == 1
        assert "WorkerFailedError: rank 1 of 2 raised ValueError: bad batch" in err, err


# -- hosts of their own ------------------------------------------------------------------------------------------------


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable: 10.99.0.1 and 10.99.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces needs root and iproute2")
    names = [f"tl{os.getpid()}a", f"tl{os.getpid()}b"]
    try:
        try:
            for name in names:
                run_ip("netns", "add", name)
            run_ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
            for i, name in enumerate(names):
                run_ip("link", "set", name, "netns", name)
                run_ip("-n", name, "link", "set", name, "name", "cable")
                run_ip("-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "cable")
                run_ip("-n", name, "link", "set", "cable", "up")
                run_ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces can't be made here: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on_hosts(folder: Path, hosts: list[str], ranks: int, **environment: str) -> list[subprocess.Popen[str]]:
    meeting_at = {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29500", **environment}
    return [
        start(folder, (2, node, ranks), ["ip", "netns", "exec", host], **meeting_at) for node, host in enumerate(hosts)
    ]


@pytest.mark.hosts
def test_two_hosts_train_one_model(two_hosts: list[str], tmp_path: Path) -> None:
    first, second = (
        weights(process) for process in on_hosts(tmp_path, two_hosts, ranks=2, TRAINLOOP_KEY="0123456789" * 4)
    )
    alone = weights(start(tmp_path, (1, 0, 1)))
    assert first == second
    assert first == pytest.approx(alone, abs=1e-6)


@pytest.mark.hosts
def test_a_cut_cable_ends_both_sides(two_hosts: list[str], tmp_path: Path) -> None:
    nodes = on_hosts(tmp_path, two_hosts, ranks=1, PAUSE="0.3")
    deadline = time.monotonic() + 100
    while not all((tmp_path / f"running-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run_ip("-n", two_hosts[0], "link", "set", "cable", "down")
    for node, process in enumerate(nodes):
        _, err = process.communicate(timeout=rendezvous.SILENCE_S + 30)
        assert process.returncode == 1
        assert f"WorkerFailedError: node {1 - node} of 2 was lost: " in err, err
