"""Tools with ranks: over all of them, and with one that the kernel ends."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from kit.small_loop import make_loop
from torch import Tensor, nn

from trainloop import TTBasicModel


class Killed(TTBasicModel):
    """Ended by the kernel where a batch has more than 20 samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.fc(x)


@pytest.mark.long
def test_tools_run_over_ranks_and_leave_no_trace() -> None:
    arguments: dict[str, Any] = {"gpu_mode": "ddp", "devices": 2, "seed": 3}
    loop = make_loop(Killed(), **arguments)
    before, state = loop.model.fc.weight.detach().clone(), torch.get_rng_state()
    assert loop.find_batch_size(smallest=20).suggestion == 20  # of a rank; 40 end one
    rates = {"smallest": 1e-4, "largest": 0.1, "steps": 10}
    found = loop.find_lr(**rates)
    assert torch.equal(loop.model.fc.weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert loop.global_step == 0
    # One process that is fed the ranks' global batches sees the same losses.
    alone = make_loop(Killed(), seed=3)
    alone.train_loader = torch.utils.data.DataLoader(loop.train_loader.dataset, 32)
    alone.model.forward = alone.model.fc.forward  # type: ignore[method-assign]  # 32 samples would end this process
    assert found.losses == pytest.approx(alone.find_lr(**rates).losses, rel=1e-5)


@pytest.mark.long
def test_the_largest_batch_of_a_distributed_sampler_is_its_shard() -> None:
    loop = make_loop(gpu_mode="ddp", devices=2)
    data = loop.train_loader.dataset
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)
    loop.train_loader = torch.utils.data.DataLoader(data, 16, sampler=sampler)
    found = loop.find_batch_size(smallest=len(data), steps=2)
    assert {*found.tried} == {len(sampler)}


@pytest.mark.long
def test_a_batch_size_for_one_process_is_tried_without_ddp(capfd: pytest.CaptureFixture[str]) -> None:
    class Unused(Killed):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(2, 2)

    assert make_loop(Unused()).find_batch_size(smallest=10).suggestion == 20
    assert make_loop().find_batch_size(smallest=50, largest=50).suggestion == 50
    assert "DDP" not in capfd.readouterr().err
