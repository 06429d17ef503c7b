"""Ranks of several hosts that fail: all of them start again, and end with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from kit.checkpoints import same
from kit.hosts_job import SAME_EVERYWHERE
from kit.places import IMPORTS
from kit.survival import Net, Plan, rows, train
from test_hosts import free_port, two_hosts
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop
from trainloop._support import scratch
from trainloop.errors import ConfigurationError

__all__ = ["two_hosts"]

JOB = str(Path(__file__).parents[1] / "kit" / "hosts_job.py")
WAIT_S = 200


def start(
    folder: Path,
    plan: list[Plan],
    at: str,
    ranks: int,
    prefixes: Sequence[Sequence[str]] = ((), ()),
    kind: str = "rows",
) -> list[subprocess.Popen[str]]:
    """The launching processes of two hosts."""
    address, port = at.rsplit(":", 1)
    environment = {**os.environ, "PYTHONPATH": IMPORTS, "OMP_NUM_THREADS": "1", "MASTER_ADDR": address}
    environment |= {"MASTER_PORT": port, "TRAINLOOP_KEY": "0123456789" * 4}
    started = []
    for node, prefix in enumerate(prefixes):
        command = [*prefix, sys.executable, JOB, str(folder), "2", str(node), str(ranks), json.dumps(plan), kind, "ddp"]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    return started


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    return process.returncode, err


def assert_survived(folder: Path, hosts: list[subprocess.Popen[str]], plan: list[Plan], ranks: int, kind: str) -> None:
    ends = [end_of(host) for host in hosts]
    assert [status for status, _ in ends] == [0, 0], ends
    _, expected = train(folder / "undisturbed", "ddp", ranks, kind, [], 3)
    for node in range(2):
        facts, restarts = torch.load(folder / f"facts-{node}.pt", weights_only=False)
        names = SAME_EVERYWHERE if node else [name for name in facts if name != "drawn next"]
        assert [name for name in names if not same(facts[name], expected[name])] == [], (node, restarts)
        assert [rank for rank, *_ in restarts] == [rank for rank, *_ in plan]
    printed = [line for _, err in ends for line in err.splitlines() if line.startswith("trainloop: rank ")]
    assert len(printed) == len(plan), printed


PLAN: list[Plan] = [(1, "on_batch_end", 4, "SIGKILL"), (0, "on_after_gradient_update", 9, "SIGKILL")]


@pytest.mark.long
def test_killed_ranks_of_two_hosts_start_again(tmp_path: Path) -> None:
    """One of the host without the checkpoints, then one of the host that has them."""
    hosts = start(tmp_path, PLAN, f"127.0.0.1:{free_port()}", ranks=1)
    assert_survived(tmp_path, hosts, PLAN, 2, "rows")


@pytest.mark.hosts
def test_killed_ranks_of_two_hosts_with_networks_of_their_own_start_again(two_hosts: list[str], tmp_path: Path) -> None:
    plan: list[Plan] = [(2, "on_batch_end", 4, "SIGKILL"), (1, "on_after_gradient_update", 6, "raises")]
    prefixes = [["ip", "netns", "exec", name] for name in two_hosts]
    hosts = start(tmp_path, plan, "10.99.0.1:29500", 2, prefixes, kind="workers")
    assert_survived(tmp_path, hosts, plan, 4, "workers")


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_a_lost_host_ends_the_run_with_what_to_do(tmp_path: Path, node: int) -> None:
    plan: list[Plan] = [(node, "on_batch_end", 4, "its host dies")]
    hosts = start(tmp_path, plan, f"127.0.0.1:{free_port()}", ranks=1)
    hosts[node].wait(WAIT_S)
    assert hosts[node].returncode == -signal.SIGKILL
    scratch.remove_dead()  # its checkpoints, as the next run does
    status, err = end_of(hosts[1 - node])
    end_of(hosts[node])
    assert status == 1
    assert f"node {node} of 2 was lost" in err
    assert "Start all hosts again, with a ModelCheckpoint on storage that all hosts share and resume_from='last'" in err
    scratch.remove_dead()  # if a rank still had it the first time


def test_runs_whose_ranks_only_a_launcher_can_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    tl = TrainLoop(
        model,
        DataLoader(TensorDataset(*rows())),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        gpu_mode="ddp",
        accelerator="cpu",
        devices=1,
    )
    with pytest.raises(
        ConfigurationError, match=r"num_nodes=2 and init_method='file:///x': .* torchrun --max-restarts"
    ):
        tl.fit(num_epochs=1, num_nodes=2, max_restarts=1, init_method="file:///x")
