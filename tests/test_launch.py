"""Starting ranks: what they are, what they return, what the caller keeps."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from ranks import run_ranks


def facts(extra: int) -> tuple[int, int, int, float]:
    t = torch.ones(1) * (dist.get_rank() + extra)
    dist.all_reduce(t)
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), t.item()


def test_each_rank_returns_its_own(tmp_path: Path) -> None:
    assert run_ranks(facts, 2, 10, folder=tmp_path) == [(0, 2, 1, 21.0), (1, 2, 1, 21.0)]
