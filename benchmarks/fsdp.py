"""Memory and time of a step where a model is sharded: python -m benchmarks.fsdp

Each rank's own memory is read by the kernel's proportional count (PSS), after training steps, less what it was before
the model: parameters, gradients and the state of AdamW. Beside it DDP's, and a step by hand with torch's fully_shard.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from trainloop import AbstractCallback, TrainLoop, TTModel
from trainloop.callbacks import ModelCheckpoint

WIDTH, BLOCKS, BATCH, STEPS = 768, 24, 8, 12


class Model(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return self(batch_data).square().mean()

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        return self(batch_data), batch_data, {}


def private_bytes() -> int:
    """This process's PSS, but for the code it has mapped."""
    with open("/proc/self/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Pss:"))


class Watch(AbstractCallback):
    """PSS of all ranks after training, and seconds of a step but the first three; kept on rank 0."""

    def __init__(self) -> None:
        super().__init__("watch")
        self.bytes: list[int] = []
        self.times: list[float] = []

    def on_after_optimizer_step(self) -> None:
        self.times.append(time.perf_counter())
        if self.train_loop_obj.global_step == STEPS - 1:
            self.bytes = [int(b) for b in self.train_loop_obj.model.all_gather(private_bytes())]


def with_trainloop(mode: str, ranks: int, model: nn.Module | None = None, folder: str | None = None) -> Watch:
    torch.manual_seed(0)
    model = Model() if model is None else model
    watch = Watch()
    loop = TrainLoop(
        model,
        torch.utils.data.DataLoader(torch.randn(STEPS * BATCH * ranks, WIDTH), batch_size=BATCH),
        optimizer=torch.optim.AdamW(model.parameters(), foreach=True),
        gpu_mode=mode,
        accelerator="cpu",
        devices=ranks,
        progress_bar=False,
    )
    keeper = [] if folder is None else [ModelCheckpoint(folder)]
    loop.fit(num_epochs=1, callbacks=[watch, *keeper])
    return watch


def _by_hand(rank: int, ranks: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "get_loss")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    times = []
    for _ in range(STEPS):
        model.get_loss(torch.randn(BATCH, WIDTH), None, None).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    if rank == 0:
        torch.save(times, f"{folder}/times")
    dist.destroy_process_group()


def by_hand(ranks: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_by_hand, (ranks, folder), ranks)
        found: list[float] = torch.load(f"{folder}/times")
        return found


def step_s(times: list[float]) -> float:
    """Median time between two steps, the first three left out."""
    between = sorted(b - a for a, b in pairwise(times[3:]))
    return between[len(between) // 2]


class Small(Model):
    """As much of everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 1), nn.Tanh()), nn.Sequential(nn.Linear(WIDTH, 1))])


def main(ranks_to_try: tuple[int, ...] = (1, 2, 4)) -> None:
    megabytes = sum(p.numel() * p.element_size() for p in Model().parameters()) / 2**20
    print(f"{megabytes:.0f} MiB of parameters, AdamW, {torch.__version__}, {os.cpu_count()} cores")
    for ranks in ranks_to_try:
        base = {mode: with_trainloop(mode, ranks, Small()).bytes for mode in ("ddp", "fsdp")}
        found = {mode: with_trainloop(mode, ranks) for mode in ("ddp", "fsdp")}
        held = {
            mode: max(b - a for a, b in zip(base[mode], watch.bytes, strict=True)) / 2**20
            for mode, watch in found.items()
        }
        ours, theirs = step_s(found["fsdp"].times), step_s(by_hand(ranks))
        with tempfile.TemporaryDirectory() as folder:
            with_trainloop("fsdp", ranks, folder=folder)
            (newest,) = (entry.path for entry in os.scandir(folder) if entry.is_dir())
            parts = [e.stat().st_size / 2**20 for e in os.scandir(newest) if e.name.endswith(".distcp")]
        print(
            f"{ranks} ranks: ddp {held['ddp']:.0f} MiB a rank, fsdp {held['fsdp']:.0f} "
            f"({held['fsdp'] / held['ddp']:.2f}); "
            f"step {1e3 * ours:.0f} ms, by hand {1e3 * theirs:.0f} ({ours / theirs:.2f}); "
            f"written by each {min(parts):.0f} to {max(parts):.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or (1, 2, 4))
