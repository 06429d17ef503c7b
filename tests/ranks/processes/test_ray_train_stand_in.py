"""What Ray Train does with the example for it: a group that is made, its variables, and a thread that trains."""

from __future__ import annotations

import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import torch.distributed as dist
from kit.places import ROOT
from kit.ranks import run_own_ranks


def as_ray_worker(epochs: int) -> Any:
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size, NODE_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # nobody may meet there: the group exists
    reports: list[Any] = []
    ray, ray_train = types.ModuleType("ray"), types.ModuleType("ray.train")
    ray.train, ray_train.report = ray_train, lambda metrics, checkpoint: reports.append(metrics)  # type: ignore[attr-defined]
    ray_train.Checkpoint = types.SimpleNamespace(from_directory=str)  # type: ignore[attr-defined]
    sys.modules["ray"], sys.modules["ray.train"] = ray, ray_train
    sys.path.insert(0, str(ROOT / "examples" / "launchers"))
    from on_ray_train import train

    worker = threading.Thread(target=train, args=({"epochs": epochs},))
    worker.start()
    worker.join()
    return reports, dist.is_initialized()


def test_a_worker_of_ray_train_joins_the_group_that_ray_made(tmp_path: Path) -> None:
    (first, there), (second, _) = run_own_ranks(as_ray_worker, 2, 2, folder=tmp_path)
    assert there  # it is Ray's to end
    assert first == second
    assert [report["steps"] for report in first] == [2 * -(-500 // 32)]
    assert first[0]["loss"] < 0.6
