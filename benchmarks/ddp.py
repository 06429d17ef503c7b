"""The cost of a step and of a start with Gloo ranks, by their number: python -m benchmarks.ddp"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import others, work
from benchmarks.timing import BY_HAND, Table, interleaved
from trainloop import AbstractCallback, TrainLoop

RANKS = 2


class Clock(AbstractCallback):
    """Seconds of the second epoch on rank 0; the first one warms up."""

    def __init__(self) -> None:
        super().__init__("clock")
        self.seconds = 0.0

    def on_epoch_begin(self) -> None:
        self.begin = time.perf_counter()

    def on_epoch_end(self) -> None:
        self.seconds = time.perf_counter() - self.begin


def make_loop(model: Any, batches: int, ranks: int = RANKS) -> TrainLoop[Any]:
    return TrainLoop(
        model,
        work.loader_of(work.data_for(model, batches * ranks)),
        optimizer=others.sgd(model),
        criterion=others.CRITERION,
        gpu_mode="ddp",
        accelerator="cpu",
        devices=ranks,
        progress_bar=False,
    )


def with_trainloop(model: Any, batches: int, ranks: int = RANKS) -> float:
    clock = Clock()
    make_loop(model, batches, ranks).fit(num_epochs=2, callbacks=[clock])
    return clock.seconds


def _rank(rank: int, world_size: int, folder: str, model: nn.Module, batches: int, epochs: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    data = work.data_for(model, batches * world_size)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank)
    loader = DataLoader(data, batch_size=work.BATCH, sampler=sampler)
    wrapped = DistributedDataParallel(model)
    optimizer = others.sgd(wrapped)
    seconds = 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        work.train_by_hand(wrapped, loader, optimizer, 1, torch.device("cpu"))
        seconds = time.perf_counter() - begin
    if rank == 0:
        with open(os.path.join(folder, "seconds"), "w") as file:
            file.write(str(seconds))
    dist.destroy_process_group()


def by_hand(model: nn.Module, batches: int, epochs: int = 2, ranks: int = RANKS) -> tuple[float, float]:
    """Seconds of the last epoch, and of all from the call to its return."""
    while True:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                mp.spawn(_rank, (ranks, folder, model, batches, epochs), nprocs=ranks)
            except mp.ProcessExitedException as error:
                # Seldom (torch 2.13), a rank's last thread outlives the interpreter after all work, and aborts it.
                if error.signal_name != "SIGABRT":
                    raise
                print("a rank of the hand-written loop aborted at its end: once more", flush=True)
                continue
            with open(os.path.join(folder, "seconds")) as file:
                return float(file.read()), time.perf_counter() - begin


def step_by_hand(model: nn.Module, batches: int, ranks: int = RANKS) -> float:
    return by_hand(model, batches, ranks=ranks)[0]


def started_by_hand(model: nn.Module) -> float:
    return by_hand(model, 1, 1)[1]


def started_by_trainloop(model: Any) -> float:
    begin = time.perf_counter()
    make_loop(model, 1).fit(num_epochs=1)
    return time.perf_counter() - begin


def tables(rounds: int = 7) -> list[Table]:
    torch.set_num_threads(1)
    step = interleaved(
        {
            BY_HAND: partial(step_by_hand, work.MLP(), 500),
            "trainloop": partial(with_trainloop, work.MLP(), 500),
            "trainloop, 10 metrics": partial(with_trainloop, work.Logging(), 500),
        },
        Table(
            "DDP, two ranks",
            "The MLP with Gloo on the CPU: 500 steps of the second epoch, measured on rank 0. Each run starts its own\n"
            "ranks.",
            steps=500,
            aims={"trainloop": 1.0, "trainloop, 10 metrics": 1.1},
        ),
        rounds=rounds,
    )
    start = interleaved(
        {BY_HAND: partial(started_by_hand, work.MLP()), "trainloop": partial(started_by_trainloop, work.MLP())},
        Table(
            "Start-up, two ranks",
            "The time from the call to its return, with one training step. ``PyTorch`` is a bare ``mp.spawn`` with\n"
            "the same work.",
            unit="ms",
            in_process=False,
            aims={"trainloop": 1.1},
        ),
        rounds=rounds,
    )
    others_ranks = [
        interleaved(
            {
                BY_HAND: partial(step_by_hand, work.MLP(), 200, ranks),
                "trainloop": partial(with_trainloop, work.MLP(), 200, ranks),
                "trainloop, 10 metrics": partial(with_trainloop, work.Logging(), 200, ranks),
            },
            Table(
                f"DDP, {'one rank' if ranks == 1 else f'{ranks} ranks'}",
                "As above, with 200 steps and 3 rounds." + " The four ranks share two cores." * (ranks == 4),
                steps=200,
            ),
            rounds=min(rounds, 3),
        )
        for ranks in (1, 4)
    ]
    return [step, *others_ranks, start]


if __name__ == "__main__":
    tables()
