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
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from kit.programs import wait_until

from trainloop._launch import hosts as hosts_module
from trainloop._launch.failures import Failure
from trainloop._launch.hosts import Hosts
from trainloop.distributed.addresses import rendezvous_point
from trainloop.errors import ConfigurationError

# -- the rendezvous point ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init_method", "environ", "point"),
    [
        ("tcp://10.0.0.1:29500", {}, ("10.0.0.1", 29500)),
        ("tcp://[fe80::1]:1", {}, ("fe80::1", 1)),
        (None, {"MASTER_ADDR": "node0", "MASTER_PORT": "123"}, ("node0", 123)),
        ("env://", {"MASTER_ADDR": "node0", "MASTER_PORT": "123"}, ("node0", 123)),
        ("tcp://a:5", {"MASTER_ADDR": "node0", "MASTER_PORT": "123"}, ("a", 5)),
        (None, {"MASTER_ADDR": "[::1]", "MASTER_PORT": "123"}, ("::1", 123)),
    ],
)
def test_the_meeting_point(init_method: str | None, environ: dict[str, str], point: tuple[str, int]) -> None:
    assert rendezvous_point(init_method, environ) == point


@pytest.mark.parametrize(
    ("init_method", "environ", "message"),
    [
        (None, {}, r"MASTER_ADDR='' and MASTER_PORT='' do not name one. Set both on every node"),
        (None, {"MASTER_ADDR": "a"}, r"MASTER_ADDR='a' and MASTER_PORT=''"),
        (
            None,
            {"MASTER_ADDR": "a", "MASTER_PORT": "x"},
            r"MASTER_ADDR=a and MASTER_PORT=x: must name a host and a port",
        ),
        ("tcp://a", {}, r"init_method='tcp://a': must name a host and a port \(1 to 65535\)"),
        ("tcp://[::1", {}, r"init_method='tcp://\[::1': must name a host and a port"),
        ("tcp://a:99999", {}, r"such as tcp://10\.0\.0\.1:29500"),
        ("udp://a:1", {}, r"init_method='udp://a:1'"),
    ],
)
def test_a_meeting_point_that_is_none(init_method: str | None, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rendezvous_point(init_method, environ)


KEY = b"k" * 32

# libuv, which torch's store uses, opens two descriptors once in a process: not what a test leaves behind.
dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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
) -> Hosts:
    return Hosts(
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


@pytest.mark.long
@pytest.mark.parametrize("key", [None, KEY])
def test_hosts_meet_report_failures_and_leave(key: bytes | None) -> None:
    port = free_port()
    hosts = in_threads(*({"port": port, "node_rank": node, "num_nodes": 3, "key": key} for node in (2, 0, 1)))
    two, zero, one = hosts
    assert {host.store_address for host in hosts} == {("127.0.0.1", port)}
    assert {host.interface for host in hosts} == {"lo"}
    assert not [host.failure() for host in hosts if host.failure() is not None]
    failure = Failure(rank=2, time_ns=1, type="ValueError", message="bad")
    one.report(failure)
    for host in (zero, two):  # node 0 repeats it
        received = host.wait_for_failure(10)
        assert received is not None
        assert received == replace(failure, time_ns=received.time_ns)
        assert abs(received.time_ns - time.monotonic_ns()) < 20e9, "by the clock of this host"
    assert one.failure() is None
    assert not zero.leave(0.1)
    assert not two.leave(1.0)
    assert one.leave(10)
    assert two.leave(10)
    assert zero.leave(10)
    leave(*hosts)


def leave(*hosts: Hosts) -> None:
    threads = [threading.Thread(target=host.__exit__, args=(None, None, None)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not [thread for thread in threading.enumerate() if thread.name == "trainloop-hosts"]


def connected_to(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:  # node 0 does not listen yet
            time.sleep(0.05)


# fmt: off
ANYTHING = (b"[]\n", b'{"node_rank": []}\n', b"GET / HTTP/1.0\n", b"3\n", b"\xff\n", b"[" * 4000 + b"\n", b"x" * 10_000)
ENTRIES = ("", "3", "[]", "{", "null", '{"id": 5} ', "[" * 9000, '{"id": "", "facts": {}, "failed": 1} 0', "\xff x")
# fmt: on


@pytest.mark.parametrize("key", [None, KEY])
def test_untrusted_processes_that_send_anything_or_nothing_keep_nobody_from_meeting(key: bytes | None) -> None:
    """To the port of the store, and, as they can write into it, as entries of hosts."""
    port = free_port()
    connections: list[socket.socket] = []
    outcomes: list[Any] = []
    waiting = threading.Thread(target=lambda: outcomes.append(meet(port, 0, key=key)))
    waiting.start()
    for sent in (*ANYTHING, *[b""] * 12):
        connections.append(connected_to(port))
        connections[-1].sendall(sent)
    untrusted = store_at(port)
    for entry in ENTRIES:
        untrusted.set("host/1", entry)
        time.sleep(0.15)
    begin = time.monotonic()
    one = meet(port, 1, key=key)
    waiting.join(30)
    assert time.monotonic() - begin < 10
    leave(*outcomes, one)
    for connection in connections:
        connection.close()


def store_at(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.mark.long
def test_a_host_that_ends_in_order_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "SILENCE_S", 1.0)
    port = free_port()
    zero, one = in_threads({"port": port, "node_rank": 0}, {"port": port, "node_rank": 1})
    assert not one.leave(0.1)
    assert zero.leave(10)
    assert one.leave(10)
    one.__exit__(None, None, None)
    assert zero.wait_for_failure(3) is None
    leave(zero)


@pytest.mark.long
def test_the_next_run_meets_at_the_same_port_at_once() -> None:
    """A host may leave a run and come to the next one before node 0 has left the first."""
    port = free_port()

    def run(node: int) -> None:
        for _ in range(3):
            with meet(port, node) as host:
                while not host.leave(0.1):
                    pass
            if node == 0:
                time.sleep(0.3)
            done.append(node)

    done: list[int] = []
    threads = [threading.Thread(target=run, args=(node,)) for node in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [0, 0, 0, 1, 1, 1]


HOST = """
import sys, time
from trainloop._launch.hosts import Hosts
host = Hosts(("127.0.0.1", int(sys.argv[1])), node_rank=int(sys.argv[2]), num_nodes=2, ranks_per_node=2, wait_s=30)
print("met", flush=True)
time.sleep(1000)
"""


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_a_host_that_is_killed_is_lost(node: int) -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", HOST, str(port), str(node)], stdout=subprocess.PIPE) as other:
        here = meet(port, 1 - node, wait_s=30)
        assert other.stdout is not None
        assert other.stdout.readline() == b"met\n"
        assert here.failure() is None
        other.kill()
        failure = here.wait_for_failure(10)
    assert failure is not None
    assert failure.rank == 2 * node
    assert f"node {node} of 2 was lost: {'it sent nothing for' if node else 'the connection to it failed'}" in (
        failure.message
    )
    leave(here)


@pytest.mark.long
def test_a_host_that_falls_silent_is_lost_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "SILENCE_S", 1.5)
    port = free_port()
    zero, one, two = in_threads(*({"port": port, "node_rank": node, "num_nodes": 3} for node in range(3)))
    monkeypatch.setattr(one, "_exchange", lambda: None)
    wait_until(lambda: zero.failure() is not None and two.failure() is not None, seconds=20)
    for host in (zero, two):
        failure = host.failure()
        assert failure is not None
        assert failure.rank == 2
        assert "s (the link was cut, or the host is down)" in failure.message
    leave(zero, one, two)


def test_a_host_that_leaves_before_its_work_is_done_has_failed_for_the_others() -> None:
    port = free_port()
    zero, one, two = in_threads(*({"port": port, "node_rank": node, "num_nodes": 3} for node in range(3)))
    two.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    for host in (zero, one):
        failure = host.wait_for_failure(10)
        assert failure is not None
        assert failure.message == "node 2 of 3 has ended its run: KeyboardInterrupt"
    leave(zero, one)


def test_the_next_run_after_a_failure_does_not_join_the_old_one() -> None:
    """The host that failed is in its next run before node 0 has heard of it."""
    port = free_port()
    zero, one = in_threads({"port": port, "node_rank": 0}, {"port": port, "node_rank": 1})
    one.report(Failure(rank=2, time_ns=1, type="ValueError", message="boom"))
    one.__exit__(ValueError, ValueError("boom"), None)
    next_runs: list[Hosts] = []
    threads = [threading.Thread(target=lambda: next_runs.append(meet(port, 1)))]
    threads[0].start()
    failure = zero.wait_for_failure(10)
    assert failure is not None
    assert failure.message == "boom"
    leave(zero)
    threads.append(threading.Thread(target=lambda: next_runs.append(meet(port, 0))))
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert len(next_runs) == 2
    leave(*next_runs)


def test_a_store_that_closes_before_it_is_read_is_that_of_an_earlier_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 has reached the store of a run that is just ending."""
    read, closed = hosts_module._Entries.get, []

    def get(self: Any, node: int) -> Any:
        if node == 0 and not closed:
            closed.append(node)
            raise RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed.")
        return read(self, node)

    monkeypatch.setattr(hosts_module._Entries, "get", get)
    port = free_port()
    zero, one = in_threads({"port": port, "node_rank": 0}, {"port": port, "node_rank": 1})
    assert closed
    leave(zero, one)


def test_hosts_that_do_not_connect_are_named() -> None:
    port = free_port()
    zero, one = in_threads(
        {"port": port, "node_rank": 0, "num_nodes": 4, "wait_s": 1.5},
        {"port": port, "node_rank": 1, "num_nodes": 4, "wait_s": 5},
    )
    missing = f"node 0 of 4 waited 1.5 s at 127.0.0.1:{port} for the other nodes. Missing: node_rank 2, 3. Connected: 1"
    assert missing in str(zero)
    assert f"node 0 of 4 has ended its run: {missing}" in str(one)


def test_a_rendezvous_point_where_nobody_listens() -> None:
    with socket.socket() as taken:  # so that no other program listens there meanwhile
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"node 1 of 2 could not connect to node 0 at 127.0.0.1:{port} within 1 s .*ref"
        ):
            meet(port, 1, wait_s=1.0)


def test_hosts_that_contradict_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    zero, ranks, taken, right = in_threads(
        {"port": port, "node_rank": 0},
        {"port": port, "node_rank": 1, "ranks": 3},
        {"port": port, "node_rank": 5},
        {"port": port, "node_rank": 1},
    )
    assert "node 1 has num_nodes=2 (ranks per node: 3), but node 0 has num_nodes=2 (ranks per node: 2)" in str(ranks)
    assert "node_rank=5 is used by another host" in str(taken)
    leave(zero, right)
    printed = capfd.readouterr().err
    assert (
        printed.count(
            "num_nodes=2 (ranks per node: 2), but node 1 has num_nodes=2 (ranks per node: 3): both numbers must be"
        )
        == 1
    )
    assert "Still waiting." in printed


def test_a_port_that_is_taken_and_an_address_of_another_host() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        with pytest.raises(ConfigurationError, match=r"node 0 can't listen at 127.*in use. Choose another port"):
            meet(s.getsockname()[1], 0)
    with pytest.raises(ConfigurationError, match=r"node 0 can't listen at 192.0.2.1:5.* Use an address of this host"):
        Hosts(("192.0.2.1", 5), node_rank=0, num_nodes=2, ranks_per_node=1, wait_s=1)
    with pytest.raises(ConfigurationError, match=r"can't listen at no.such.host.invalid:5.* Use an address of this"):
        Hosts(("no.such.host.invalid", 5), node_rank=0, num_nodes=2, ranks_per_node=1, wait_s=1)


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
        _, err = process.communicate()
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
    wait_until(lambda: all((tmp_path / f"running-{rank}").exists() for rank in range(2)), seconds=100)
    run_ip("-n", two_hosts[0], "link", "set", "cable", "down")
    for node, process in enumerate(nodes):
        _, err = process.communicate(timeout=hosts_module.SILENCE_S + 30)
        assert process.returncode == 1
        assert f"WorkerFailedError: node {1 - node} of 2 was lost: " in err, err
