"""Snapshots of what is on GPUs: copied in its turn between two steps, and written while the next ones are done."""

from __future__ import annotations

import os
import signal
import threading
import time
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
from trainloop.transfer.device_copies import DeviceCopies
from trainloop.transfer.slots import Packed, SnapshotMemory, Snapshotter

pytestmark = pytest.mark.gpu

GPUS = min(2, torch.cuda.device_count()) or 1


def test_copies_are_of_their_turn_and_their_memory_is_given_back() -> None:
    device, memory = torch.device("cuda", 0), SnapshotMemory(parts=1, statuses=1)
    copies = DeviceCopies(device)
    snapshotter = Snapshotter((), {}, copies)
    weight = torch.zeros(16 << 20, device=device)
    others = [
        weight[: 1 << 10].view(32, 32),  # shares its memory
        torch.zeros(33, 65, device=device, dtype=torch.bfloat16).t(),
        torch.zeros((), device=device, dtype=torch.float64),
        torch.zeros(0, 5, device=device),
        torch.zeros(3000),
        np.zeros(3000),
    ]
    state = {"it": {"is": [weight, *others]}, "user's": {"a lock": {"": threading.Lock()}}}
    for number in (1, 2, 3):
        copies.begin()
        if number == 3:  # it has grown
            others.append(torch.zeros(1 << 18, device=device))
            state["it"]["is"] = [weight, *others]
        packed = snapshotter.pack(state, ["user's"])
        pinned = copies._pinned is not None
        assert pinned == (number > 1)
        for tensor in (weight, *others[1:]):
            tensor += 1  # the next step
        assert (copies.wait() > 0) == pinned
        memory.write(number, 0, number, packed)
        first, view, *rest = memory.read(number, 0, ())["it"]["is"]
        assert first.eq(number - 1).all()
        assert first[1].data_ptr() == view.flatten()[1].data_ptr()
        for found, of in zip(rest, others[1:], strict=True):
            assert found.shape == of.shape
            assert found.dtype == of.dtype
            assert (found == (0 if of is others[-1] and number == 3 else number - 1)).all()
        del packed
        copies.reserve()
        on_device = [t.untyped_storage() for t in (weight, *others) if isinstance(t, torch.Tensor) and t.is_cuda]
        whole = sum({storage.data_ptr(): storage.nbytes() for storage in on_device}.values())
        assert whole <= len(copies._pinned or b"") <= 1.02 * whole + (1 << 10)
    torch_pins = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    assert torch_pins < weight.nbytes, "not torch's, which has powers of two of bytes and keeps them"
    copies.close()
    assert copies._pinned is None
    memory.close()


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


class KilledBesideWrites(Averages):
    """Snapshots are written once a further step has been done. The last rank is killed twice.

    First in the midst of the second one's write, then after the tenth step.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def strike(self, name: str) -> None:
        struck = self.folder / name
        if self.train_loop_obj.rank == self.train_loop_obj.world_size - 1 and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_begin(self) -> None:
        loop, write = self.train_loop_obj, SnapshotMemory.write

        def late(memory: SnapshotMemory, number: int, part: int, step: int, packed: Packed) -> int:
            deadline = time.monotonic() + 60
            while loop.global_step == step and time.monotonic() < deadline:
                time.sleep(0.001)
            (self.folder / f"{step} beside {loop.global_step}").touch()
            if step == 8:
                write(memory, number, part, step, packed._replace(buffers=[]))
                memory.begin_copy(number, part)  # a part of it is there, without its head
                self.strike("in the midst of a write")
            return write(memory, number, part, step, packed)

        SnapshotMemory.write = late  # type: ignore[method-assign]  # of a process of its own

    def on_batch_begin(self) -> None:
        if self.train_loop_obj.global_step == 10:
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
def test_a_write_beside_the_next_step_holds_nothing_of_it(
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

    averages, killed = Averages(), KilledBesideWrites(tmp_path)
    undisturbed, survived = trained(averages), trained(killed, max_restarts=2, restart_every_steps=4)
    assert [restart.step for restart in survived.restarts] == [4, 8]
    assert survived.restarts[0].steps_repeated in (4, 5)  # the ninth step may not have been told of
    assert survived.restarts[1].steps_repeated == 2
    assert {"4 beside 5", "8 beside 9"} <= {path.name for path in tmp_path.iterdir()}
    for own, other in zip(survived.model.state_dict().values(), undisturbed.model.state_dict().values(), strict=True):
        assert torch.equal(own.cpu(), other.cpu())  # one has come from another process, without its device
    assert survived.history.to_dict() == undisturbed.history.to_dict()
    assert torch.equal(killed.steps, averages.steps)
    assert np.array_equal(killed.seen, averages.seen)
