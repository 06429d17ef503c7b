"""Kinds of loaders trained on and evaluated by real ranks: ``python loaders_job.py WORLD_SIZE FOLDER NAME,NAME,...``.

Rank ``r`` leaves what it saw and what came out in ``FOLDER/r.pt``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from kit.loader_kinds import FEATURES, KINDS, WORKER_KINDS, Kind, Rows, Stream, indices, make_rows, parts
from trainloop import TrainLoop, TTModel
from trainloop.errors import ConfigurationError

BATCH_SIZE = 4
SEED = 3


class Linear(TTModel):
    """Remembers which rows it was trained on, batch for batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, 1, dtype=torch.float64)
        with torch.no_grad():
            self.fc.weight.fill_(0.1)
            self.fc.bias.zero_()
        self.seen: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y.squeeze(-1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        if self.training:
            self.seen.append(indices(batch_data))
        x, y, _ = parts(batch_data)
        loss: Tensor = criterion(self(x), y)
        return loss

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y, i = parts(batch_data)
        return self(x), y, {"index": i}


def run_kind(kind: Kind, world_size: int, gpu_mode: str) -> dict[str, Any]:
    """Train on and evaluate one kind of loader; in one process on the global batches of ``world_size`` ranks."""
    grad_accumulation, batch_size = 1, BATCH_SIZE
    if gpu_mode == "single":
        if kind.unit == "sample":
            batch_size *= world_size
        else:
            grad_accumulation = world_size
    model = Linear()
    loop = make_loop(model, kind.make(batch_size), kind.make(BATCH_SIZE), world_size, gpu_mode)
    # Each pass over a loader with workers starts them anew: one of each sort is enough.
    workers = kind in WORKER_KINDS
    loop.fit(num_epochs=1 if workers else 2, grad_accumulation=grad_accumulation)
    y_pred, y_true, metadata = loop.predict_on_test_set()
    return {
        "seen": model.seen,
        "weights": [p.detach().clone() for p in model.parameters()],
        "loss": list(loop.history["loss"]),
        "test_loss": None if workers else loop.evaluate_loss_on_test_set(),
        "y_pred": y_pred,
        "y_true": y_true,
        "index": metadata["index"],
    }


class Tokens(Linear):
    """Its loss is a mean over tokens, of which each row has another number."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y, i = parts(batch_data)
        tokens = i % 5 + 1
        return (tokens * (self(x) - y) ** 2).sum() / tokens.sum(), tokens.sum()


class OwnStream(Stream):
    """A stream that is this rank's own already: 10 batches on rank 0, 7 on rank 1."""

    is_distributed = True

    def __iter__(self) -> Iterator[Any]:
        rows = make_rows(68)
        start, stop = ((0, 40), (40, 68))[torch.distributed.get_rank()]
        for index in range(start, stop):
            yield tuple(column[index] for column in rows)


def make_loop(model: Linear, train_loader: Any, test_loader: Any, world_size: int, gpu_mode: str) -> TrainLoop:
    return TrainLoop(
        model,
        train_loader,
        None,
        test_loader,
        optim.SGD(model.parameters(), lr=0.05),
        nn.MSELoss(),
        gpu_mode=gpu_mode,
        accelerator="cpu",
        devices=1 if gpu_mode == "single" else world_size,
        seed=SEED,
        progress_bar=False,
        end_auto_eval=False,
    )


def run_tokens(world_size: int, gpu_mode: str, batch_size: int, grad_accumulation: int) -> list[Tensor]:
    """Weights after 3 epochs of 101 rows, in global batches of ``world_size * batch_size``."""
    model = Tokens()
    size = batch_size * (world_size if gpu_mode == "single" else 1)
    make_loop(model, DataLoader(Rows(101), size, shuffle=True), None, world_size, gpu_mode).fit(
        num_epochs=3, grad_accumulation=grad_accumulation
    )
    return [p.detach().clone() for p in model.parameters()]


def evaluate_rows(length: int, world_size: int, gpu_mode: str) -> tuple[list[int], float | str]:
    """Indices of the rows that were predicted, and the test loss or its error."""
    loop = make_loop(Linear(), None, DataLoader(Rows(length), BATCH_SIZE), world_size, gpu_mode)
    try:
        loss: float | str = loop.evaluate_loss_on_test_set()  # type: ignore[assignment]  # one loss, not a MultiLoss
    except ConfigurationError as error:
        return [], str(error)
    return loop.predict_on_test_set()[2]["index"].tolist(), loss


def run_edges(world_size: int) -> dict[str, Any]:
    streamed = Linear()
    if world_size == 2:
        make_loop(streamed, DataLoader(OwnStream(), 4), None, world_size, "ddp").fit(num_epochs=1)
    return {
        "evaluated": {length: evaluate_rows(length, world_size, "ddp") for length in LENGTHS},
        "tokens": {shape: run_tokens(world_size, "ddp", *shape) for shape in SHAPES},
        "streamed": streamed.seen,
    }


LENGTHS = (101, 100, 1, 0)
SHAPES = ((4, 1), (10, 1), (4, 4), (7, 4))
"""Batch sizes and accumulation: of 101 rows, the last shares of 2 or 3 ranks are short, or empty, or both."""


def rank_main(rank: int, world_size: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")  # as ranks do that trainloop starts with few descriptors
    facts: dict[str, Any] = {}
    for number, name in enumerate(names):
        store = f"file://{folder}/store-{number}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        facts.update(run_in_group([name]))
        torch.distributed.destroy_process_group()
    torch.save(facts, Path(folder) / f"{rank}.pt")


def run_in_group(names: list[str]) -> dict[str, Any]:
    """What came out of kinds of loaders in the process group that is open."""
    world_size = torch.distributed.get_world_size()
    kinds = {kind.name: kind for kind in KINDS if kind.name in names}
    edges = {"edges": run_edges(world_size)} if "edges" in names else {}
    return {**edges, **{name: run_kind(kind, world_size, "ddp") for name, kind in kinds.items()}}


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world_size, folder, names = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
    torch.multiprocessing.spawn(rank_main, (world_size, folder, names), nprocs=world_size)
