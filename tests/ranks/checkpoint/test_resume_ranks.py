"""Resumed at any step, with any number of ranks, a run ends with the bits of one that was never interrupted."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import reference
from kit.loops import cpu_loop
from kit.ranks import run_own_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from trainloop import AbstractCallback, TrainLoop, TTBasicModel, checkpoint, distributed
from trainloop.callbacks import ModelCheckpoint
from trainloop.distributed.key import SharedKey

SAMPLES, BATCH = 60, 6  # of three ranks: 3 x 18 and 3 x 2; of four: 2 x 24 and 4 x 3
BUCKET_MB = 0.001  # a bucket holds a thousand bytes: the model has several
UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": BUCKET_MB}


class Net(TTBasicModel):
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


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )


def make(branches: bool, loader: Any = None) -> tuple[Net, TrainLoop]:
    torch.manual_seed(0)
    model = Net(branches)
    tl = cpu_loop(
        model,
        DataLoader(rows(), BATCH, shuffle=True) if loader is None else loader,
        torch.optim.Adam(model.parameters(), 1e-2),
        gpu_mode="ddp",
        seed=3,
    )
    return model, tl


def interrupted_everywhere(folder: str, branches: bool, accumulation: int, ddp_model_args: dict[str, Any]) -> Any:
    """Differences at the end of a run resumed from each checkpoint; and of two fits, the second resumed."""
    options = {"grad_accumulation": accumulation, "ddp_model_args": ddp_model_args}

    def keeper(name: str) -> list[Any]:
        return [ModelCheckpoint(f"{folder}/{name}", every_n_epochs=None, every_n_steps=1, keep=99)]

    def differing(end: Net, undisturbed: Net) -> list[str]:
        after, before = end.state_dict(), undisturbed.state_dict()
        return [name for name in before if not torch.equal(after[name], before[name])]

    warnings.filterwarnings("ignore", message="the checkpoint has state of callbacks")
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


class OnAndOn(IterableDataset[Any]):
    """A stream whose next epoch begins where the one before ended; workers share it out, and add noise."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        data = rows()
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for at in range(self.at + 1, self.at - self.at % SAMPLES + SAMPLES + 1):
            self.at = at
            if self.at % step == first:
                x, y = data[self.at % 37]
                yield x + 0.1 * torch.randn(8), y

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def streams_everywhere(folder: str) -> Any:
    """Differences at the end of a run resumed from each checkpoint, without workers and with persistent ones."""
    warnings.filterwarnings("ignore", message="the checkpoint has state of callbacks")
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    found: dict[str, bool] = {}
    for workers in (0, 2):

        def fit(workers: int = workers, **options: Any) -> dict[str, Tensor]:
            loader = DataLoader(OnAndOn(), BATCH, num_workers=workers, persistent_workers=workers > 0)
            model, tl = make(False, loader)
            tl.fit(num_epochs=2, grad_accumulation=2, **options)
            return model.state_dict()

        keepers = [
            # Workers take a while to start: one place in the second epoch is enough with them.
            ModelCheckpoint(
                f"{folder}/{workers}/steps", every_n_epochs=None, every_n_steps=4 if workers else 1, keep=99
            ),
            ModelCheckpoint(f"{folder}/{workers}/epochs", keep=99),
        ]
        undisturbed = fit(callbacks=keepers)
        distributed.barrier()  # rank 0 writes
        for kind in ("steps", "epochs"):
            for saved in checkpoint.checkpoints(f"{folder}/{workers}/{kind}"):
                found[saved.path] = reference.identical(fit(resume_from=saved.path), undisturbed)
    return found


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


@pytest.mark.long
def test_a_stream_with_a_state_goes_on_from_it_at_any_step(tmp_path: Path) -> None:
    for found in run_own_ranks(streams_everywhere, 2, str(tmp_path), folder=tmp_path):
        assert len(found) > 6
        assert [where for where, identical in found.items() if not identical] == []


class LastSteps(AbstractCallback):
    def __init__(self) -> None:
        super().__init__()
        self.steps: deque[int] = deque(maxlen=2)

    def on_batch_end(self) -> None:
        self.steps.append(self.train_loop_obj.global_step)

    def rank_state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def resumed_on_hosts_without_a_key(folder: str) -> deque[int]:
    SharedKey.key_at = classmethod(lambda cls, place: None)  # type: ignore[method-assign]  # as on two hosts
    for num_epochs, resume_from in ((1, None), (2, folder)):
        last = LastSteps()
        make(False)[1].fit(num_epochs=num_epochs, callbacks=[last, ModelCheckpoint(folder)], resume_from=resume_from)
    return last.steps


def test_ranks_without_a_key_resume_with_their_deques(tmp_path: Path) -> None:
    for steps in run_own_ranks(resumed_on_hosts_without_a_key, 2, str(tmp_path / "run"), folder=tmp_path):
        assert steps == deque([9, 10])
        assert steps.maxlen == 2
