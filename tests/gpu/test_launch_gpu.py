"""Ranks on GPUs: started after CUDA was used, each on its own device, or several on one."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainloop._launch import keeping, launch
from trainloop._support.stopping import StopAgreement

pytestmark = pytest.mark.gpu


def on_device(model: nn.Module, optimizer: Any, stop: StopAgreement) -> dict[str, Any]:
    x = torch.ones(1, 300, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    on_cpu = torch.ones(1)
    dist.all_reduce(on_cpu)
    return {
        "device": str(next(model.parameters()).device),
        "current": torch.cuda.current_device(),
        "sums": (total.item(), on_cpu.item()),
        "backend": dist.get_backend(torch.distributed.group.WORLD),
        "tied": optimizer.param_groups[0]["params"][0] is next(model.parameters()),
        "stopped": stop.reached(),
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_start_after_cuda_was_used(ranks: int) -> None:
    """One rank uses NCCL; two that share a GPU can't, and use Gloo."""
    model = nn.Linear(300, 300).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 300, device="cuda")).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    devices = [torch.device("cuda", 0)] * ranks
    fact = launch(functools.partial(on_device, model, optimizer), ranks_per_node=ranks, devices=devices)
    assert fact["device"] == "cuda:0"
    assert fact["sums"] == (ranks, ranks)
    assert ("nccl" in fact["backend"]) == (ranks == 1)
    assert fact["tied"]
    assert torch.equal(model.weight, before)


def raises_on_gpu(stop: StopAgreement) -> None:
    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")


def test_a_gpu_out_of_memory_is_explained() -> None:
    with pytest.raises(Exception, match=r"(?s)rank 0 of 1 raised OutOfMemoryError.*Hint: the GPU's memory ran out"):
        launch(raises_on_gpu, ranks_per_node=1, devices=[torch.device("cuda", 0)])


def test_pinned_memory_stays_where_it_is() -> None:
    torch.ones(1, device="cuda")
    pinned = torch.ones(1 << 20).pin_memory()
    fact = launch(functools.partial(_sum, pinned), ranks_per_node=1)
    assert fact == 1 << 20
    assert pinned.is_pinned()
    assert pinned.cuda(non_blocking=True).sum().item() == 1 << 20


def _sum(t: torch.Tensor, stop: StopAgreement) -> float:
    return t.sum().item()


def fill(stop: StopAgreement) -> tuple[int, int]:
    reserved = torch.cuda.memory_reserved()
    torch.ones(64 << 20, dtype=torch.uint8, device="cuda").sum().item()
    return os.getpid(), reserved


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_kept_ranks_keep_the_memory_of_their_gpu(method: str) -> None:
    with keeping():
        facts = [
            launch(fill, ranks_per_node=1, devices=[torch.device("cuda", 0)], start_method=method) for _ in range(2)
        ]
    assert facts[0][0] == facts[1][0]
    assert facts[0][1] == 0
    assert facts[1][1] >= 64 << 20
