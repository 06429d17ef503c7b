"""Restarts of ranks on GPUs: from checkpoints of what is there, with the numbers of an undisturbed run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.checkpoint import file

pytestmark = pytest.mark.gpu

GPUS = min(2, torch.cuda.device_count()) or 1


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 3))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Averages(AbstractCallback):
    """Holds what changes with each step, in memory of the host."""

    def __init__(self) -> None:
        super().__init__("averages")
        self.steps, self.seen = torch.zeros(3000), np.zeros(3000)

    def on_after_optimizer_step(self) -> None:
        self.steps.lerp_(torch.tensor(float(self.train_loop_obj.global_step)), 0.1)
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.seen = state["steps"], state["seen"].numpy()


class Killed(Averages):
    """The first rank is killed in the middle of a write, and the last one after the tenth step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def strike(self, name: str) -> None:
        struck = self.folder / name
        if not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_begin(self) -> None:
        write = file._write_with_checksums

        def half(target: Any, body: Any, info: Any) -> None:
            if info.step == 8:
                target.write(b"half")
                target.flush()
                self.strike("in the middle of a write")
                target.seek(0)
            write(target, body, info)

        file._write_with_checksums = half

    def on_batch_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 10 and loop.rank == loop.world_size - 1:
            self.strike("after a write")


@pytest.mark.parametrize(
    "mode, optimizer, arguments",
    [
        pytest.param("single", {"capturable": True}, {}, id="single"),
        pytest.param("ddp", {"fused": True}, {}, id="ddp"),
        pytest.param("fsdp", {}, {}, id="fsdp"),
        pytest.param(
            "fsdp", {}, {"fsdp_model_args": {"offload_policy": CPUOffloadPolicy()}}, id="fsdp, state on the host"
        ),
    ],
)
def test_a_run_on_gpus_restarts_with_the_numbers_of_an_undisturbed_one(
    mode: str, optimizer: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    def trained(callback: Averages, **options: Any) -> TrainLoop:
        model = Net()
        loop = TrainLoop(
            model,
            DataLoader(make_data(), 8, shuffle=True),
            optimizer=optim.AdamW(model.parameters(), 1e-2, **optimizer),
            criterion=nn.CrossEntropyLoss(),
            gpu_mode=mode,
            accelerator="cuda",
            devices=1 if mode == "single" else GPUS,
            progress_bar=False,
            seed=1,
        )
        loop.fit(num_epochs=2, callbacks=[callback], **options, **arguments)
        return loop

    averages, killed = Averages(), Killed(tmp_path)
    undisturbed, restarted = trained(averages), trained(killed, max_restarts=2, restart_every_steps=4)
    assert [restart.step for restart in restarted.restarts] == [4, 8]
    assert restarted.restarts[1].steps_repeated == 2
    for own, other in zip(restarted.model.state_dict().values(), undisturbed.model.state_dict().values(), strict=True):
        assert torch.equal(own.cpu(), other.cpu())  # one has come from another process, without its device
    assert restarted.history.to_dict() == undisturbed.history.to_dict()
    assert torch.equal(killed.steps, averages.steps)
    assert np.array_equal(killed.seen, averages.seen)
