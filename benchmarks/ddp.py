"""The cost of a step with Gloo ranks, by their number: python -m benchmarks.ddp"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import others, work
from benchmarks.pages import Size
from benchmarks.timing import BY_HAND, Table, interleaved
from trainloop import AbstractCallback, TrainLoop

RANKS = 2


class Clock(AbstractCallback):
    """Seconds and CPU seconds of the second epoch on rank 0; the first one warms up."""

    shared = ("seconds", "cpu_seconds")

    def __init__(self) -> None:
        super().__init__("clock")
        self.seconds = self.cpu_seconds = 0.0

    def on_epoch_begin(self) -> None:
        self.begin, self.cpu_begin = time.perf_counter(), time.process_time()

    def on_epoch_end(self) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter() - self.begin, time.process_time() - self.cpu_begin


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


def with_trainloop(model: Any, batches: int, ranks: int = RANKS) -> tuple[float, float]:
    clock = Clock()
    make_loop(model, batches, ranks).fit(num_epochs=2, callbacks=[clock])
    return clock.seconds, clock.cpu_seconds


def _rank(rank: int, world_size: int, folder: str, model: nn.Module, batches: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    data = work.data_for(model, batches * world_size)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank)
    loader = DataLoader(data, batch_size=work.BATCH, sampler=sampler)
    wrapped = DistributedDataParallel(model)
    optimizer = others.sgd(wrapped)
    seconds = cpu_seconds = 0.0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        work.train_by_hand(wrapped, loader, optimizer, 1, torch.device("cpu"))
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    if rank == 0:
        with open(os.path.join(folder, "seconds"), "w") as file:
            file.write(f"{seconds} {cpu_seconds}")
    dist.barrier()
    os._exit(0)  # seldom (torch 2.13), a thread of Gloo outlives the interpreter after all work: it aborts, or hangs


def by_hand(model: nn.Module, batches: int, ranks: int = RANKS) -> tuple[float, float]:
    """Seconds and CPU seconds of the second epoch on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, folder, model, batches), nprocs=ranks)
        with open(os.path.join(folder, "seconds")) as file:
            seconds, cpu_seconds = map(float, file.read().split())
    return seconds, cpu_seconds


def tables(size: Size) -> list[Table]:
    torch.set_num_threads(1)
    note = (
        "The MLP with Gloo on the CPU: {} steps of the second epoch, measured on rank 0. Each run starts its own\n"
        "ranks. CPU time is of rank 0."
    )
    two = of_ranks(RANKS, size, "two ranks", note, 500, aims={"trainloop": 0.70, "trainloop, 10 metrics": 1.1})
    if size.tiny:
        return [two]
    few = size.at_most(3)
    note = "As above, with {} steps and 3 rounds."
    one = of_ranks(1, few, "one rank", note, 200)
    return [two, one, of_ranks(4, few, "4 ranks", note + " The four ranks share two cores.", 200)]


def of_ranks(ranks: int, size: Size, title: str, note: str, steps: int, **aims: Any) -> Table:
    steps = size.steps(steps)
    contenders: dict[str, Callable[[], tuple[float, float]]] = {
        BY_HAND: partial(by_hand, work.MLP(), steps, ranks),
        "trainloop": partial(with_trainloop, work.MLP(), steps, ranks),
        "trainloop, 10 metrics": partial(with_trainloop, work.Logging(), steps, ranks),
    }
    table = Table(f"DDP, {title}", note.format(steps), steps=steps, own_process=False, **aims)
    return interleaved(contenders, table, size, warm_up=0)


if __name__ == "__main__":
    tables(Size(7))
