"""Memory of in-memory data with two ranks, in units of the dataset: python benchmarks/data_memory.py [--mib 256]

Prints the proportional memory (PSS: k processes that share a page count 1/k of it each) of all processes at step 50,
minus that of the same run with a tiny dataset, as a multiple of the dataset's size. 1.0 means that the dataset is in
memory once; less, that no process has read some of its pages yet.
The hand-written loop starts its ranks with ``torch.multiprocessing.spawn``, and uses a ``DistributedSampler``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from trainloop import AbstractCallback, TrainLoop, TTModel

RANKS, STEP, FEATURES = 2, 50, 64
TINY_MIB = 1


class Arrays(Dataset[Any]):
    """Rows of two numpy arrays."""

    def __init__(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index], self.y[index]


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        loss: Tensor = criterion(self(x), y)
        return loss

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return self(x), y, {}


def make_dataset(kind: str, mib: float) -> Any:
    length = int(mib * 2**20) // (4 * FEATURES + 8)
    x = np.random.default_rng(0).random((length, FEATURES), dtype=np.float32)
    y = np.zeros(length, dtype=np.int64)
    return Arrays(x, y) if kind == "numpy" else TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def summed_pss(root: int) -> int:
    """Bytes of a process and all its descendants, each shared page counted once."""
    total = 0
    process = psutil.Process(root)
    for each in [process, *process.children(recursive=True)]:
        try:
            for line in Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return total


class Measure(AbstractCallback):
    """Measures at step 50, on rank 0; every rank has come as far, since gradients were reduced there."""

    def __init__(self) -> None:
        super().__init__("measure", device_idx_execution=0)
        self.root = os.getpid()
        self.pss = 0

    def on_after_optimizer_step(self) -> None:
        if self.train_loop_obj.global_step == STEP:
            self.pss = summed_pss(self.root)


def with_trainloop(kind: str, mib: float) -> int:
    model, measure = Net(), Measure()
    loop = TrainLoop(
        model,
        DataLoader(make_dataset(kind, mib), 32, shuffle=True),
        None,
        None,
        optim.SGD(model.parameters(), lr=0.01),
        nn.CrossEntropyLoss(),
        gpu_mode="ddp",
        accelerator="cpu",
        devices=RANKS,
        progress_bar=False,
        end_auto_eval=False,
    )
    loop.fit(num_iterations=STEP + 5, callbacks=[measure])
    return measure.pss


def rank_by_hand(rank: int, dataset: Any, folder: str, root: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    model = DistributedDataParallel(Net())
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    loader: Any = DataLoader(dataset, 32, sampler=DistributedSampler(dataset))
    for step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == STEP:
            if rank == 0:
                (Path(folder) / "pss").write_text(str(summed_pss(root)))
            dist.barrier()
            break
    os._exit(0)  # as in ddp.py


def by_hand(kind: str, mib: float) -> int:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_by_hand, (make_dataset(kind, mib), folder, os.getpid()), nprocs=RANKS)
        return int((Path(folder) / "pss").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=256)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        how, kind, mib = args.measure
        print(json.dumps({"trainloop": with_trainloop, "PyTorch": by_hand}[how](kind, float(mib))))
        return

    def pss(how: str, kind: str, mib: float) -> int:
        # A process of its own for each, so that no run inherits the memory of the one before.
        command = [sys.executable, __file__, "--measure", how, kind, str(mib)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
        return int(json.loads(out.splitlines()[-1]))

    print(f"{args.mib:g} MiB, {RANKS} ranks: summed PSS at step {STEP}, above a tiny run, in datasets")
    print(f"{'':10}{'trainloop':>12}{'PyTorch':>12}")
    for kind in ("tensors", "numpy"):
        above = [
            (pss(how, kind, args.mib) - pss(how, kind, TINY_MIB)) / ((args.mib - TINY_MIB) * 2**20)
            for how in ("trainloop", "PyTorch")
        ]
        print(f"{kind:10}{above[0]:12.2f}{above[1]:12.2f}")


if __name__ == "__main__":
    main()
