"""Other libraries' restarts: python -m benchmarks.restarts_beside [--lightning PYTHON] [--torchft PYTHON]

Two ranks train 100 steps; rank 1 is killed by SIGKILL after steps 33 and 71. For each kill the output has the number of
steps that are repeated, and the seconds to the first step after it. ``torchrun`` only starts ranks again: its script
resumes from a checkpoint on disk. Checkpoints are written after every 20th step.
With torchft each rank is a replica with its own torchrun; the surviving one waits for the other, and sends its weights.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS, KILLS, CHECKPOINT_EVERY, BATCH = 100, (33, 71), 20, 16
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=9"]


def parts() -> tuple[nn.Module, TensorDataset]:
    """A model, and data for 100 steps of two ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    rows = 2 * BATCH * STEPS
    return model, TensorDataset(torch.randn(rows, 32), torch.randint(10, (rows,)))


def step_done(folder: Path, rank: int, step: int) -> None:
    """Note when rank 0 has done it; kill rank 1 where it is its turn."""
    if rank == 0:
        with (folder / "steps").open("a") as file:
            print(os.getpid(), time.monotonic(), step, file=file)
    killed = folder / f"killed-{step}"
    if rank == 1 and step in KILLS and not killed.exists():
        killed.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


# -- contenders --------------------------------------------------------------------------------------------------------


def trainloop_run(folder: Path) -> None:
    from trainloop import AbstractCallback, TrainLoop, TTBasicModel

    class Steps(AbstractCallback):
        def on_batch_end(self) -> None:
            step_done(folder, self.train_loop_obj.rank, self.train_loop_obj.global_step)

    class Basic(TTBasicModel):
        def __init__(self, layers: nn.Module) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    layers, data = parts()
    model = Basic(layers)
    tl = TrainLoop(
        model,
        DataLoader(data, BATCH),
        optimizer=torch.optim.Adam(model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        gpu_mode="ddp",
        accelerator="cpu",
        devices=2,
        progress_bar=False,
    )
    tl.fit(num_epochs=1, callbacks=[Steps("Steps")], max_restarts=len(KILLS), restart_every_steps=CHECKPOINT_EVERY)


def by_hand(folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, data = parts()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer, criterion, done = torch.optim.Adam(ddp.parameters()), nn.CrossEntropyLoss(), 0
    if (folder / "checkpoint.pt").exists():
        state = torch.load(folder / "checkpoint.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))
    for step, (x, y) in enumerate(loader, start=1):
        if step <= done:
            continue
        optimizer.zero_grad()
        criterion(ddp(x), y).backward()
        optimizer.step()
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step}
            torch.save(state, folder / "checkpoint.part")
            (folder / "checkpoint.part").replace(folder / "checkpoint.pt")
        step_done(folder, rank, step)
    dist.destroy_process_group()


def lightning(folder: Path) -> None:
    import lightning as L
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Module(L.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.criterion = model, nn.CrossEntropyLoss()

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return self.criterion(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    class Steps(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            step_done(folder, trainer.global_rank, trainer.global_step)

    model, data = parts()
    keeper = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=CHECKPOINT_EVERY, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        callbacks=[keeper, Steps()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(model), DataLoader(data, BATCH, shuffle=False), ckpt_path="last")


def torchft_replica(folder: Path) -> None:
    from datetime import timedelta

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    replica, (model, data) = int(os.environ["REPLICA"]), parts()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,  # without the other, steps would be of half the batch
        replica_id=f"replica-{replica}",
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer, criterion = Optimizer(manager, torch.optim.Adam(ddp.parameters())), nn.CrossEntropyLoss()
    rows = DistributedSampler(data, num_replicas=2, rank=replica, shuffle=False)
    batches = list(DataLoader(data, BATCH, sampler=rows))
    while (step := manager.current_step()) < STEPS:
        optimizer.zero_grad()  # here replicas find each other, and the new one gets its weights
        x, y = batches[min(manager.current_step(), STEPS - 1)]
        criterion(ddp(x), y).backward()
        optimizer.step()
        if manager.current_step() > step:
            step_done(folder, replica, manager.current_step())
    manager.shutdown()


def torchft_run(folder: Path) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000, quorum_tick_ms=50)
    command = [sys.executable, *TORCHRUN[:3], "--nproc-per-node=1", "--max-restarts=9", __file__, "--contender"]
    replicas = [
        subprocess.Popen(
            [*command, REPLICA, str(folder)],
            env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "REPLICA": str(replica)},
        )
        for replica in range(2)
    ]
    codes = [replica.wait() for replica in replicas]
    lighthouse.shutdown()
    sys.exit(max(codes))


REPLICA = "torchft, a replica"
CONTENDERS = {
    "trainloop, max_restarts": (trainloop_run, []),
    "torchrun, own resume": (by_hand, TORCHRUN),
    "torchrun, Lightning": (lightning, TORCHRUN),
    "torchft": (torchft_run, []),
}


# -- what came of them -------------------------------------------------------------------------------------------------


def outcome(folder: Path) -> list[tuple[int, float]]:
    """Of each kill the steps done again, and the seconds to the first step after it."""
    found = []
    steps = [line.split() for line in (folder / "steps").read_text().splitlines()]
    for kill in KILLS:
        killed = float((folder / f"killed-{kill}").read_text())
        before = [line for line in steps if float(line[1]) <= killed]
        # Of a process that was started, or one that both ranks did together.
        new = [line for line in steps if line[0] != before[-1][0] or int(line[2]) > kill]
        after = next(line for line in new if float(line[1]) > killed)
        found.append((kill - int(after[2]) + 1, float(after[1]) - killed))
    assert int(steps[-1][2]) == STEPS, f"the run ended after step {steps[-1][2]}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lightning", default=sys.executable, metavar="PYTHON", help="that has it")
    parser.add_argument("--torchft", default=sys.executable, metavar="PYTHON", help="that has it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=CONTENDERS, help="one of them")
    parser.add_argument("--contender", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        name, folder = arguments.contender
        function = torchft_replica if name == REPLICA else CONTENDERS[name][0]
        function(Path(folder))
        return
    rule = f"{'=' * 26} {'=' * 14} {'=' * 12} {'=' * 8}"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    chosen = {name: contender for name, contender in CONTENDERS.items() if arguments.only in (None, name)}
    results: dict[str, list[tuple[int, float]]] = {name: [] for name in chosen}
    for _ in range(arguments.rounds):
        for name, (function, launcher) in chosen.items():
            python = {lightning: arguments.lightning, torchft_run: arguments.torchft}.get(function, sys.executable)
            with tempfile.TemporaryDirectory() as folder:
                command = [python, *launcher, __file__, "--contender", name, folder]
                if launcher:
                    # Else ranks that torchrun (torch 2.13) starts again find the addresses of those before them in its
                    # store, and never meet: pytorch#135712. Those of trainloop have a part of the store for each start.
                    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
                else:  # torchft looks for that store
                    environment.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
                if done.returncode:
                    print(f"{name}: {done.stderr[-2000:]}", file=sys.stderr)
                    continue
                results[name] += outcome(Path(folder))
                print(name, results[name], file=sys.stderr, flush=True)
    print(f"{rule}\n{'survived by':26} {'steps again':14} {'median s':12} {'longest':8}\n{rule}")
    for name, found in results.items():
        again, seconds = zip(*found) if found else ((0,), (0.0,))
        shown = ", ".join(map(str, sorted(set(again))))
        print(f"{name:26} {shown:14} {statistics.median(seconds):<12.2f} {max(seconds):<8.1f}")
    print(rule)


if __name__ == "__main__":
    main()
