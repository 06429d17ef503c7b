"""Ranks that others started: an own mp.spawn, torchrun with restarts, submitit, Slurm's variables, Ray Train."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import world_job
from torch.nn import functional as F
from torch.utils.data import DataLoader
from world_rows import items

from trainloop.distributed import all_reduce

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
HERE = Path(__file__).parent
TIMEOUT_S = 240


@pytest.fixture(autouse=True)
def found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", str(HERE.parent.parent))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def assert_trained(folder: Path) -> None:
    """The end of two ranks, as one process with batches twice as large by hand."""
    end = torch.load(folder / "end.pt", weights_only=True)
    model, optimizer = world_job.make()
    for _ in range(world_job.EPOCHS):
        for batch in DataLoader(items(world_job.SAMPLES), 2 * world_job.BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
    assert end["world size"] == 2
    assert end["truth"].tolist() == [row["y"] for row in items(11).items]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(end["model"][name], value, rtol=0, atol=1e-9)


def own_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world_job.run(folder)
    assert all_reduce(torch.ones(()), "sum").item() == 2  # the group is still the caller's
    dist.destroy_process_group()


def test_own_spawn_with_a_process_group(folder: Path) -> None:
    mp.spawn(own_rank, (str(folder),), nprocs=2)
    assert_trained(folder)


def test_torchrun_restarts_what_was_killed(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, str(HERE / "world_job.py"), str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr  # the first attempt
    assert_trained(folder)


def test_slurm_variables(folder: Path) -> None:
    """As ``srun --ntasks=2`` sets them for each task."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NODELIST": "127.0.0.1",
           "SLURM_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}  # fmt: skip
    tasks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "world_job.py"), str(folder)],
            env={**os.environ, **job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [task.wait(TIMEOUT_S) for task in tasks] == [0, 0]
    assert_trained(folder)


def as_submitit_task(folder: str) -> None:
    from submitit.helpers import TorchDistributedEnvironment

    torch.set_num_threads(1)
    TorchDistributedEnvironment().export()
    world_job.run(folder)


def test_submitit(folder: Path) -> None:
    from submitit import LocalExecutor

    executor = LocalExecutor(folder / "log")
    executor.update_parameters(tasks_per_node=2, timeout_min=4)
    executor.submit(as_submitit_task, str(folder)).results()
    assert_trained(folder)


def as_ray_worker(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    world_job.run(config["folder"])


def test_ray_train(folder: Path, may_leave: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    may_leave("ray", "RAY", "Thread", "thread", "signal handlers", "file descriptors", "shared memory")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(
            as_ray_worker,
            train_loop_config={"folder": str(folder)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(folder / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    assert_trained(folder)


def as_worker_of_two_nodes(config: dict[str, Any]) -> None:
    import ray

    (Path(config["folder"]) / f"node-{ray.get_runtime_context().get_node_id()}").touch()
    as_ray_worker(config)


def test_ray_train_on_two_nodes(folder: Path, may_leave: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of a local cluster, a worker on each; and the example's own script on the same cluster."""
    may_leave("ray", "RAY", "Thread", "thread", "signal handlers", "file descriptors", "shared memory")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    monkeypatch.setenv("TRAINLOOP_KEY", "a key of more than sixteen characters")
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        TorchTrainer(
            as_worker_of_two_nodes,
            train_loop_config={"folder": str(folder)},
            scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
            run_config=RunConfig(storage_path=str(folder / "ray")),
        ).fit()
        ray.shutdown()
        script = str(Path(__file__).parents[2] / "examples" / "launchers" / "on_ray_train.py")
        done = subprocess.run(
            [sys.executable, script, "--workers", "2", "--epochs", "2", "--storage", str(folder / "example")],
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert len(list(folder.glob("node-*"))) == 2
    assert_trained(folder)
    assert done.returncode == 0, done.stderr
    assert "steps: 32" in done.stdout  # 500 rows in batches of 16 on 2 workers, twice
