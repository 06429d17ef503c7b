"""Ranks that share a model are those of the mesh, not all of the process group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from trainloop.parallel import TTFullyShardedDataParallel


def stage() -> list[float]:
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    model = nn.BatchNorm1d(2)
    nn.init.constant_(model.weight, rank + 1.0)
    assert model.running_mean is not None
    model.running_mean.fill_(rank + 1.0)
    wrapper = TTFullyShardedDataParallel(model, mesh=mesh)
    wrapper.share_buffers()
    return [*wrapper.module.weight.full_tensor().tolist(), *wrapper.module.running_mean.tolist()]


@pytest.mark.long
def test_each_pipeline_stage_keeps_its_own_weights_and_buffers(tmp_path: Path) -> None:
    assert run_ranks(stage, 2, folder=tmp_path) == [[1.0] * 4, [2.0] * 4]
