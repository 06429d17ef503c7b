"""Hosts that are lost and come again: the run goes on with the bits of one that nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts_job import SAME_EVERYWHERE
from survival import Net, Plan, rows, train
from test_hosts import connected_to, free_port, in_threads, meet, two_hosts
from torch.utils.data import DataLoader, TensorDataset

from checkpoints import same
from places import IMPORTS
from trainloop import TrainLoop
from trainloop.errors import ConfigurationError
from trainloop.launch import rendezvous, spawning

__all__ = ["two_hosts"]

JOB = str(Path(__file__).parents[1] / "hosts_job.py")
WAIT_S = 300


class Hosts:
    """Starters of one run, each started again by whoever looks after it when its host has died."""

    def __init__(
        self,
        folder: Path,
        plan: list[Plan],
        *,
        nodes: int,
        ranks: int,
        at: str,
        kind: str = "rows",
        mode: str = "ddp",
    ) -> None:
        self._folder, self._plan, self._nodes, self._ranks = folder, plan, nodes, ranks
        self._kind, self._mode = kind, mode
        host, port = at.rsplit(":", 1)
        self._environment = {
            **os.environ,
            "PYTHONPATH": IMPORTS,
            "OMP_NUM_THREADS": "1",
            "TRAINLOOP_KEY": "0123456789" * 4,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }
        self.deaths = [0] * nodes
        self.said = [""] * nodes

    def run(self, prefixes: Sequence[Sequence[str]]) -> None:
        started = [self._start(node, prefix) for node, prefix in enumerate(prefixes)]
        deadline = time.monotonic() + WAIT_S
        try:
            while any(process is not None for process in started):
                assert time.monotonic() < deadline, "\n\n".join(self._read())
                for node, process in enumerate(started):
                    if process is None or process.poll() is None:
                        continue
                    started[node] = None
                    if process.returncode:
                        assert process.returncode == -signal.SIGKILL, "\n\n".join(self._read())
                        self.deaths[node] += 1
                        started[node] = self._start(node, prefixes[node])
                time.sleep(0.1)
        finally:
            for process in started:
                if process is not None:
                    process.kill()
                    process.wait()
        self.said = self._read()

    def _start(self, node: int, prefix: Sequence[str]) -> subprocess.Popen[bytes] | None:
        command = [*prefix, sys.executable, JOB, str(self._folder), self._nodes, node, self._ranks]
        with open(self._folder / f"said-{node}", "ab") as said:
            return subprocess.Popen(
                [*map(str, command), json.dumps(self._plan), self._kind, self._mode], env=self._environment, stderr=said
            )

    def _read(self) -> list[str]:
        return [(self._folder / f"said-{node}").read_text() for node in range(self._nodes)]


def assert_survived(
    folder: Path, hosts: Hosts, plan: list[Plan], ranks: int, kind: str = "rows", mode: str = "ddp"
) -> None:
    """Each host's caller has what one host with as many ranks gets, undisturbed."""
    seed = None if kind == "batch sampler" else 3
    _, expected = train(folder / "undisturbed", mode, ranks, kind, [], seed)
    died = sum(what == "its host dies" for *_, what in plan)
    assert sum(hosts.deaths) == died
    for node in range(len(hosts.deaths)):
        facts, restarts = torch.load(folder / f"facts-{node}.pt", weights_only=False)
        names = SAME_EVERYWHERE if node else [name for name in facts if name != "drawn next"]
        assert [name for name in names if not same(facts[name], expected[name])] == [], (node, restarts)
        # Of a host that is lost nobody knows which rank went first.
        each = ranks // len(hosts.deaths)
        assert [rank // each for rank, *_ in restarts] == [rank // each for rank, *_ in plan]
    lines = [line for line in "".join(hosts.said).splitlines() if line.startswith("trainloop: rank ")]
    assert len(lines) == len(plan), lines


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_each_host_dies_and_comes_again(tmp_path: Path, mode: str) -> None:
    """The last one; the first one, which the others meet at; and one when the other has done all of its work."""
    plan: list[Plan] = [
        (1, "on_batch_end", 4, "its host dies"),
        (0, "on_batch_end", 8, "its host dies"),
        (1, "at exit", 16, "its host dies"),
    ]
    hosts = Hosts(tmp_path, plan, nodes=2, ranks=1, at=f"127.0.0.1:{free_port()}", mode=mode)
    hosts.run([(), ()])
    assert_survived(tmp_path, hosts, plan, 2, mode=mode)


@pytest.mark.hosts
@pytest.mark.parametrize("kind", ["workers", pytest.param("batch sampler", marks=pytest.mark.slow)])
def test_hosts_with_two_ranks_each_survive(two_hosts: list[str], tmp_path: Path, kind: str) -> None:
    """In networks of their own: a rank is killed, then a host that has both of its ranks' memory."""
    plan: list[Plan] = [(2, "on_batch_end", 4, "SIGKILL"), (1, "on_after_gradient_update", 6, "its host dies")]
    hosts = Hosts(tmp_path, plan, nodes=2, ranks=2, at="10.99.0.1:29500", kind=kind)
    hosts.run([["ip", "netns", "exec", name] for name in two_hosts])
    assert_survived(tmp_path, hosts, plan, 4, kind)


def test_what_hosts_need_to_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    tl = TrainLoop(
        model,
        DataLoader(TensorDataset(*rows())),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        gpu_mode="ddp",
        accelerator="cpu",
        devices=1,
    )
    tcp = {"num_nodes": 2, "max_restarts": 1, "init_method": "tcp://127.0.0.1:1"}
    monkeypatch.delenv("TRAINLOOP_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="Set TRAINLOOP_KEY to the same secret on all hosts"):
        tl.fit(num_epochs=1, **tcp)
    monkeypatch.setenv("TRAINLOOP_KEY", "0123456789" * 4)
    with pytest.raises(ConfigurationError, match="init_method='file:///x': a host that comes again finds"):
        tl.fit(num_epochs=1, **{**tcp, "init_method": "file:///x"})


@pytest.mark.slow
def test_one_that_does_not_go_on_waits_until_the_others_have_ended_their_ranks() -> None:
    """Which takes each of them all of the launcher's time-outs, where a rank ignores SIGTERM."""
    takes_s = spawning._UNWIND_S + spawning._TERMINATE_S + spawning._KILL_S + spawning._HEAR_S + 1.0
    for ends in (0, 1):
        port = free_port()
        met: dict[int, object] = {}

        def come(node: int, ends: int = ends, port: int = port, met: dict[int, object] = met) -> None:
            try:
                if node == ends:
                    met[node] = meet(port, node, wait_s=rendezvous.FAREWELL_S, says={"ends": "enough"})
                else:
                    time.sleep(takes_s)
                    met[node] = meet(port, node, wait_s=5, says={})
            except ConfigurationError as error:
                met[node] = str(error)

        threads = [threading.Thread(target=come, args=(node,)) for node in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert met == dict.fromkeys(range(2), f"node {ends} of 2 does not go on: enough")


def test_one_that_does_not_go_on_tells_the_others() -> None:
    """Whoever it is; and one that came, and was ended before the last one came, may come again."""
    for ends in (0, 1):
        port = free_port()
        says: list[dict[str, Any]] = [{"word": 0}, {"word": 1}]
        says[ends] = {"ends": "enough"}
        outcomes = in_threads(*({"port": port, "node_rank": node, "says": says[node]} for node in (0, 1)))
        assert [str(error) for error in outcomes] == [f"node {ends} of 2 does not go on: enough"] * 2
    port = free_port()
    zero: list[Any] = []
    waiting = threading.Thread(target=lambda: zero.append(meet(port, 0, num_nodes=3, says={"word": 0})))
    waiting.start()
    gone = connected_to(port)
    gone.sendall(b'{"node_rank": 1, "num_nodes": 3, "ranks": 2, "speaks": 1}\n{"word": "of old"}\n')
    time.sleep(0.5)
    gone.close()
    others = in_threads(*({"port": port, "node_rank": n, "num_nodes": 3, "says": {"word": n}} for n in (1, 2)))
    waiting.join(30)
    for host in (*zero, *others):
        assert host.said == [{"word": 0}, {"word": 1}, {"word": 2}]
    assert not others[0].part(0.2)
    assert not zero[0].part(0.2)
    assert others[1].part(20)  # the last one is done
    assert others[0].part(20)
    assert zero[0].part(20)
    for host in (*others, *zero):
        host.__exit__()
