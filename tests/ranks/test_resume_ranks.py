"""Resumed at any step, with any number of ranks, a run ends with the bits of one that was never interrupted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import reference
from ranks import run_own_ranks
from trainloop import TrainLoop, TTModel, checkpoint, distributed
from trainloop.callbacks import ModelCheckpoint

SAMPLES, BATCH = 60, 6  # of three ranks: 3 x 18 and 3 x 2; of four: 2 x 24 and 4 x 3
BUCKET_MB = 0.001  # a bucket holds a thousand bytes: the model has several
UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": BUCKET_MB}


class Net(TTModel):
    """All that could tell a resumed step from one in the middle: statistics, random numbers, unused parameters."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 32))
        self.head = nn.Linear(32, 3)
        self.extra = nn.Linear(32, 3) if branches else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(x)
        if self.extra is not None and x[0, 0] > 0:  # not in all steps, nor on all ranks
            return self.head(hidden) + self.extra(hidden)
        return self.head(hidden)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        return criterion(self(x), y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data[0]), batch_data[1], {}


def make(branches: bool) -> tuple[Net, TrainLoop]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )
    model = Net(branches)
    tl = TrainLoop(
        model,
        DataLoader(data, BATCH, shuffle=True),
        optimizer=torch.optim.Adam(model.parameters(), 1e-2),
        criterion=nn.CrossEntropyLoss(),
        gpu_mode="ddp",
        accelerator="cpu",
        seed=3,
        progress_bar=False,
    )
    return model, tl


def interrupted_everywhere(folder: str, branches: bool, accumulation: int, ddp_model_args: dict[str, Any]) -> Any:
    """What differs at the end of a run resumed from each checkpoint; and of two fits, the second resumed."""
    options = {"grad_accumulation": accumulation, "ddp_model_args": ddp_model_args}

    def keeper(name: str) -> list[Any]:
        return [ModelCheckpoint(f"{folder}/{name}", every_n_epochs=None, every_n_steps=1, keep=99)]

    def differing(end: Net, undisturbed: Net) -> list[str]:
        after, before = end.state_dict(), undisturbed.state_dict()
        return [name for name in before if not torch.equal(after[name], before[name])]

    warnings.filterwarnings("ignore", message="the checkpoint holds state of callbacks")
    undisturbed, tl = make(branches)
    tl.fit(num_epochs=2, callbacks=keeper("whole"), **options)
    found: dict[str, list[str]] = {}
    distributed.barrier()  # rank 0 writes
    for saved in checkpoint.checkpoints(f"{folder}/whole"):
        resumed, tl = make(branches)
        tl.fit(num_epochs=2, resume_from=saved.path, **options)
        found[saved.path] = differing(resumed, undisturbed)
    # Two fits; and the second of them resumed, in the middle of its epoch.
    twice, tl = make(branches)
    tl.fit(num_epochs=1, **options)
    tl.fit(num_epochs=1, callbacks=keeper("second"), **options)
    distributed.barrier()
    resumed, tl = make(branches)
    tl.fit(num_epochs=1, resume_from=checkpoint.checkpoints(f"{folder}/second")[0].path, **options)
    found["the second of two"] = differing(resumed, twice)
    return found, undisturbed.state_dict()


KINDS: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "plain": (False, 1, {}),
    "unused, accumulated, buckets": (True, 2, UNUSED),
    "accumulated, buckets": (False, 2, {"bucket_cap_mb": BUCKET_MB}),
    "static, buckets": (False, 1, {"static_graph": True, "bucket_cap_mb": BUCKET_MB}),
}


@pytest.mark.parametrize(
    "kind, world_size",
    [
        # Of two numbers the order can't matter: three ranks are the fewest that show it.
        pytest.param(kind, ranks, marks=() if (kind, ranks) == ("plain", 3) else pytest.mark.slow)
        for kind in KINDS
        for ranks in (1, 2, 3, 4)
    ],
)
def test_resumed_at_any_step_it_ends_with_the_same_bits(tmp_path: Path, kind: str, world_size: int) -> None:
    everyone = run_own_ranks(interrupted_everywhere, world_size, str(tmp_path), *KINDS[kind], folder=tmp_path)
    for found, weights in everyone:
        assert len(found) > 2
        assert {where: names for where, names in found.items() if names} == {}
        assert reference.identical(weights, everyone[0][1])
