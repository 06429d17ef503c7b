"""Searches on a real Ray cluster of two nodes: the same scores, lost folds and lost nodes."""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.places import IMPORTS
from kit.programs import wait_until
from kit.tuning_kinds import MakeFailing, make_scaled, rows

from trainloop.errors import ResourceError
from trainloop.resources import ResourceQuota
from trainloop.tuning import tune

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are many

Q = ResourceQuota


class Nodes:
    """A cluster whose head has no CPUs."""

    def __init__(self) -> None:
        from ray._private import ray_constants
        from ray.cluster_utils import Cluster

        ray_constants.ENABLE_RAY_CLUSTER = False  # loopback
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})

    def add(self, num_cpus: int = 1) -> Any:
        return self.cluster.add_node(num_cpus=num_cpus)

    def connect(self) -> None:
        ray.init(address=self.cluster.address, log_to_driver=False)


@pytest.fixture(autouse=True)
def more_time() -> None:
    """Clusters start slowly, and Ray takes its time to see that a node is gone."""
    faulthandler.dump_traceback_later(280, exit=True)  # in place of pytest's, which it ends with the test


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_leave: Callable[..., None]) -> Iterator[Nodes]:
    may_leave("ray", "RAY_", "environment", "signal", "threads", "children", "file descriptors", "shared memory")
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", IMPORTS)
    made = Nodes()
    try:
        yield made
    finally:
        ray.shutdown()
        made.cluster.shutdown()


def search(make_loop: Callable[..., Any], space: dict[str, Any], **changed: Any) -> Any:
    options = {"searcher": "grid", "num_trials": 9, "num_bag_folds": 2, "data": rows(), "seed": 0, "progress": False}
    return tune(make_loop, space, **{**options, "backend": "ray", **changed})


def test_two_nodes_give_the_scores_of_one_machine(nodes: Nodes) -> None:
    nodes.add()
    nodes.add()
    nodes.connect()
    space = {"scale": [0.0, 0.5, 1.0]}
    here, there = search(make_scaled, space, backend="local"), search(make_scaled, space)
    assert there.plan.models_in_parallel == 2
    assert [trial.scores for trial in there.trials] == [trial.scores for trial in here.trials]
    assert there.out_of_fold_predictions.tolist() == here.out_of_fold_predictions.tolist()
    assert there.predict(rows()[0]).tolist() == here.predict(rows()[0]).tolist()
    # two CPUs in the cluster, and no node with both
    with pytest.raises(
        ResourceError, match="One model needs num_cpus=2 and num_gpus=0, but no node of the Ray cluster has both"
    ):
        search(make_scaled, space, per_model=Q(2))
    with pytest.raises(ResourceError, match="the Ray cluster, which has num_cpus=2 and num_gpus=0"):
        search(make_scaled, space, total=Q(3, 0))


def test_a_fold_that_fails_is_lost_alone(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add()
    nodes.add()
    nodes.connect()
    marks = tmp_path / "marks"
    marks.mkdir()
    space = {"do": ["raise", "kill"]}
    found = search(MakeFailing(marks), space, storage=tmp_path / "search")
    assert [trial.state for trial in found.trials] == ["partial", "partial"]
    assert "ValueError: this fold raises" in found.trials[0].errors[1]
    assert "killed by signal SIGKILL" in found.trials[1].errors[1]
    again = search(MakeFailing(marks), space, storage=tmp_path / "search")
    assert [trial.state for trial in again.trials] == ["done", "done"]
    assert len(list(marks.iterdir())) == 6


def test_a_lost_node_s_folds_run_again_elsewhere(nodes: Nodes, tmp_path: Path) -> None:
    first = nodes.add()
    nodes.connect()
    marks = tmp_path / "marks"
    marks.mkdir()

    found: list[Any] = []
    options: dict[str, Any] = {"total": Q(1, 0), "storage": tmp_path / "search"}
    running = threading.Thread(
        target=lambda: found.append(search(MakeFailing(marks), {"do": ["hang"]}, **options)), daemon=True
    )
    running.start()  # beside this thread, in which alone Ray lets nodes be added
    wait_until((marks / "hang-1-0").exists, seconds=120)
    nodes.add()
    nodes.cluster.remove_node(first, allow_graceful=False)
    running.join(timeout=120)
    assert found, "the search did not end"
    (trial,) = found[0].trials
    assert trial.state == "done", trial.errors
    assert (marks / "hang-1-1").exists()


LOCAL = """
import os, subprocess, sys
from kit.tuning_kinds import make_scaled, rows
from trainloop.tuning import tune
def look(params, fold):
    import psutil
    own = {p.pid for p in psutil.Process().parents()}
    for parent in psutil.Process().parents():
        if "raylet" in parent.name():
            found = psutil.Process(parent.ppid()).children(recursive=True)
            for process in [psutil.Process(parent.ppid()), *found]:
                for c in process.net_connections("inet"):
                    if c.status == "LISTEN":
                        print("LISTEN", process.name(), c.laddr.ip, file=open(params["file"], "a"))
    return make_scaled({"scale": 0.5}, fold)
found = tune(look, {"file": [sys.argv[1]]}, num_trials=1, num_bag_folds=2, data=rows(), backend="ray", progress=False)
print(found.trials[0].state, found.trials[0].errors)
import ray
print(ray.is_initialized())
"""


def test_a_cluster_of_its_own_listens_on_loopback_only_and_ends(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": IMPORTS, "TRAINLOOP_LEASE_DIR": str(tmp_path)}
    environ.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", LOCAL, str(tmp_path / "listens")],
        capture_output=True,
        text=True,
        timeout=200,
        env=environ,
    )
    assert done.stdout.splitlines() == ["done {}", "False"], done.stderr
    listens = (tmp_path / "listens").read_text()
    addresses = set(re.findall(r"LISTEN .* (\S+)$", listens, flags=re.MULTILINE))
    assert addresses
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, listens
