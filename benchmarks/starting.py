"""The cost of starting ranks: whole scripts, second calls, ranks that stay up, memory: python -m benchmarks.starting

Beside a hand-written loop with ``mp.spawn`` and, where they are installed, Lightning (``ddp_spawn``) and Accelerate
(``debug_launcher``, which forks the script: for those that have used no threads and no GPU). Each script trains
one step on 2 or 8 ranks. CPU seconds are of all its processes, from the first import to the end, and mean the same on a
busy machine; seconds are the median of interleaved rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = """
import json, os, sys, tempfile, time
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS = int(sys.argv[1])

def make():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16 * RANKS, 64), torch.randint(10, (16 * RANKS,)))
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), data
"""

BY_HAND = (
    MODEL
    + """
import torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def rank_main(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    module, data = make()
    model, criterion = DistributedDataParallel(module), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=16, sampler=DistributedSampler(data, RANKS, rank)):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        torch.save(module.state_dict(), f"{folder}/weights")
    dist.destroy_process_group()

if __name__ == "__main__":
    module, data = make()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=RANKS)
        module.load_state_dict(torch.load(f"{folder}/weights"))
    print(json.dumps({}))
"""
)

TRAINLOOP = (
    MODEL
    + """
from trainloop import TrainLoop, TTBasicModel

class Model(TTBasicModel):
    def __init__(self, module):
        super().__init__()
        self.module = module
    def forward(self, x):
        return self.module(x)

def processes():
    import psutil
    return psutil.Process().children(recursive=True)

def cpu_seconds():
    import psutil
    times = [process.cpu_times() for process in (psutil.Process(), *processes())]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)

def timed(found, what, call):
    begin, cpu = time.perf_counter(), cpu_seconds()
    call()
    found[what] = [time.perf_counter() - begin, cpu_seconds() - cpu]

if __name__ == "__main__":
    module, data = make()
    tl = TrainLoop(
        Model(module), DataLoader(data, batch_size=16), optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(), gpu_mode="ddp", accelerator="cpu", devices=RANKS, progress_bar=False,
    )
    found = {}
    if len(sys.argv) == 2:
        tl.fit(num_epochs=1)
    else:
        tl.fit(num_epochs=1)
        timed(found, "second call", lambda: tl.fit(num_epochs=1))
        with tl.ranks():
            tl.fit(num_epochs=1)
            timed(found, "inside tl.ranks()", lambda: tl.fit(num_epochs=1))
            served = lambda p: "multiprocessing.forkserver" in str(p.cmdline())
            ranks = [p for p in processes() if "resource_tracker" not in str(p.cmdline())]
            ranks = [p for p in ranks if not served(p) or served(p.parent())]  # without the server itself
            assert len(ranks) == RANKS
            memory = [p.memory_full_info() for p in ranks]
            found["MB private"] = sum(m.uss for m in memory) / 1e6
            found["MB proportional"] = sum(m.pss for m in memory) / 1e6
    print(json.dumps(found))
"""
)

LIGHTNING = (
    MODEL
    + """
import lightning

class Model(lightning.LightningModule):
    def __init__(self, module):
        super().__init__()
        self.module, self.criterion = module, nn.CrossEntropyLoss()
    def training_step(self, batch, index):
        return self.criterion(self.module(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.module.parameters(), lr=0.1)

if __name__ == "__main__":
    module, data = make()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp_spawn", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model(module), DataLoader(data, batch_size=16))
    print(json.dumps({}))
"""
)

ACCELERATE = (
    MODEL
    + """
from accelerate import Accelerator, debug_launcher

def rank_main(folder):
    accelerator = Accelerator(cpu=True)
    module, data = make()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(module, optimizer, DataLoader(data, batch_size=16))
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(criterion(model(x), y))
        optimizer.step()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/weights")

if __name__ == "__main__":
    module, data = make()
    with tempfile.TemporaryDirectory() as folder:
        debug_launcher(rank_main, (folder,), num_processes=RANKS)
        module.load_state_dict(torch.load(f"{folder}/weights"))
    print(json.dumps({}))
"""
)


def run(script: str, *arguments: str, **environment: str) -> tuple[float, float, dict[str, Any]]:
    """Seconds, CPU seconds and what a script printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script)
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent), **environment}
        done = subprocess.run(
            [sys.executable, str(path), *arguments], env={**os.environ, **here}, stdout=subprocess.PIPE, check=True
        )
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="ranks (2 8)")
    given = parser.parse_args()
    for ranks in given.ranks:
        contenders = {
            "PyTorch": (BY_HAND, "spawn"),
            "trainloop, spawn": (TRAINLOOP, "spawn"),
            "trainloop, forkserver": (TRAINLOOP, "forkserver"),
        }
        for name, script in {"lightning": LIGHTNING, "accelerate": ACCELERATE}.items():
            if importlib.util.find_spec(name) is not None:
                contenders[name] = script, "spawn"
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for _ in range(given.rounds):
            for name, (script, method) in contenders.items():
                try:
                    times[name].append(run(script, str(ranks), TRAINLOOP_START_METHOD=method)[:2])
                # At times the ranks of a hand-written loop abort as they end.
                except subprocess.CalledProcessError as error:
                    print(f"  {name} failed once: {error}")
        times = {name: found for name, found in times.items() if found}
        wall, cpu = (statistics.median(t[i] for t in times["PyTorch"]) for i in (0, 1))
        print(f"{ranks} ranks, whole script, seconds and CPU seconds, with their ratios to the hand-written one:")
        for name, found in times.items():
            own_wall, own_cpu = (statistics.median(t[i] for t in found) for i in (0, 1))
            print(f"  {name:24} {own_wall:7.2f} {own_cpu:7.2f}   {own_wall / wall:.2f} {own_cpu / cpu:.2f}", flush=True)
        for method in ("spawn", "forkserver"):
            more = run(TRAINLOOP, str(ranks), "more", TRAINLOOP_START_METHOD=method)[2]
            for what, value in more.items():
                if isinstance(value, list):
                    ratios = f"{value[0] / wall:.3f} {value[1] / cpu:.3f}"
                    print(f"  {what + ', ' + method:30} {value[0]:7.2f} {value[1]:7.2f}   {ratios}", flush=True)
                else:
                    print(f"  {what + ', ' + method:30} {value:7.0f}", flush=True)


if __name__ == "__main__":
    main()
