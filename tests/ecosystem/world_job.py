"""A job whose ranks somebody else starts; ``python world_job.py FOLDER`` is one rank of it.

Each rank trains in ``ddp`` with whoever it was started with; rank 0 writes the weights to ``FOLDER/end.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from kit.loops import cpu_loop
from torch import nn, optim
from torch.utils.data import DataLoader
from world_rows import Rows, items

from trainloop.callbacks import AbstractCallback, ModelCheckpoint

SAMPLES, BATCH, EPOCHS = 37, 8, 2
KILLED_AFTER = 4  # steps, in the first attempt of a job that is restarted


class Net(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(6, 3)


def make() -> tuple[Net, optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().double()
    return model, optim.Adam(model.parameters(), lr=0.01)


class KilledOnce(AbstractCallback):
    """SIGKILL to the last rank of the first attempt."""

    def __init__(self) -> None:
        super().__init__("KilledOnce")

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "1"))
        if attempt == 0 and loop.global_step == KILLED_AFTER and loop.rank == loop.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: str) -> None:
    model, optimizer = make()
    tl = cpu_loop(
        model,
        DataLoader(items(SAMPLES), BATCH),
        optimizer,
        None,
        validation_loader=DataLoader(items(11), 3),
        gpu_mode="ddp",
        seed=3,
        timeout=60,
    )
    keeper = ModelCheckpoint(f"{folder}/checkpoints", every_n_epochs=None, every_n_steps=1)
    tl.fit(EPOCHS, callbacks=[KilledOnce(), keeper], resume_from="last")
    truth = tl.predict_on_validation_set()[1]
    if tl.is_main_process():
        torch.save({"model": model.state_dict(), "world size": tl.world_size, "truth": truth}, Path(folder, "end.pt"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(sys.argv[1])
