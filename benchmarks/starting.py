"""The cost of starting ranks: whole scripts, second calls, ranks that stay up, memory: python -m benchmarks.starting

Beside two hand-written loops with ``mp.spawn`` and, where they are installed, Lightning (``ddp_spawn``) and Accelerate
(``debug_launcher``, which forks the script: for those that have used no threads and no GPU). Each script trains
one step on 2 or 8 ranks. CPU seconds are of all its processes, from the first import to the end, and mean the same on a
busy machine; seconds are the median of interleaved rounds.

The caller of the first hand-written script makes the same model and optimizer as the caller of ``TrainLoop``, as with
any library whose loop takes them. The second one makes them only in its ranks, so that it imports less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import readme
from benchmarks.pages import HERE, Page, Size, heading, parser, size_of
from benchmarks.timing import BY_HAND, Table, interleaved, restructured

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

IN_RANKS = (
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

IN_CALLER = IN_RANKS.replace(
    "    with tempfile", "    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)\n    with tempfile"
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


LIMIT_S = 120
"""Seconds for a script, which takes a tenth of them."""


def run(script: str, *arguments: str, **environment: str) -> tuple[float, float, dict[str, Any]]:
    """Seconds, CPU seconds and what a script printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script)
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent), **environment}
        command = [sys.executable, str(path), *arguments]
        process = subprocess.Popen(command, env={**os.environ, **here}, stdout=subprocess.PIPE, start_new_session=True)
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, json.loads(printed.splitlines()[-1])


OTHER = "PyTorch, made in the ranks"


def whole_script(ranks: int, size: Size) -> Table:
    """Whole scripts in turn; their seconds, and the CPU seconds of all their processes."""
    scripts = {
        BY_HAND: (IN_CALLER, "spawn"),
        OTHER: (IN_RANKS, "spawn"),
        "trainloop, fork server": (TRAINLOOP, "forkserver"),
        "trainloop, spawn": (TRAINLOOP, "spawn"),
    }
    for library, name, script in (("lightning", "Lightning, spawn", LIGHTNING), ("accelerate", FORKS, ACCELERATE)):
        if importlib.util.find_spec(library) is not None:
            scripts[name] = script, "spawn"

    def once(script: str, method: str) -> tuple[float, float]:
        while True:
            try:
                return run(script, str(ranks), TRAINLOOP_START_METHOD=method)[:2]
            except subprocess.SubprocessError as error:  # seldom, ranks of a hand-written loop abort or hang at the end
                print(f"once more: {error}", flush=True)

    note = (
        f"``PyTorch`` is a bare ``mp.spawn`` whose caller makes the same model and optimizer; ``{OTHER}`` makes\n"
        "them only there. CPU time does not include that of the fork server."
    )
    table = Table(
        f"The whole script, {'two' if ranks == 2 else ranks} ranks",
        note,
        unit="s",
        own_process=False,
        aims={"trainloop, fork server": 0.95},
    )
    return interleaved({name: partial(once, *script) for name, script in scripts.items()}, table, size, warm_up=0)


FORKS = "Accelerate, fork"


def further_calls(ranks: int, whole: Table) -> list[str]:
    """A second call, a call inside ``tl.ranks()``, and the memory of idle ranks; one run with each start method."""
    found = {method: run(TRAINLOOP, str(ranks), "more", TRAINLOOP_START_METHOD=method)[2] for method in METHODS}
    base = whole.median(BY_HAND)
    rows = [("measurement", *(f"{name} {unit}" for name in METHODS.values() for unit in ("s", "ratio")))]
    memory = [("MB", *METHODS.values())]
    for what, value in found["spawn"].items():
        if isinstance(value, list):
            seconds = [found[method][what][0] for method in METHODS]
            rows.append((what, *(f(s) for s in seconds for f in ("{:.2f}".format, lambda s: f"{s / base:.3f}"))))
        else:
            memory.append((what.removeprefix("MB "), *(f"{found[method][what]:.0f}" for method in METHODS)))
    title = f"Further calls and memory, {'two' if ranks == 2 else ranks} ranks"
    note = (
        "Ratios are to the whole script of ``PyTorch``. The aims are 0.15 for a second call, and 0.02 inside\n"
        "``tl.ranks()``."
    )
    return [restructured(title, note, rows), restructured(f"Memory of {ranks} idle ranks", "Megabytes.", memory)]


MOST_OF_MANY_RANKS = 3
"""Rounds of more than two ranks: each takes a minute and a half on two cores."""
METHODS = {"forkserver": "fork server", "spawn": "spawn"}


def main() -> None:
    made = parser(__doc__, rounds=9)
    made.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (2 8)")
    arguments = made.parse_args()
    size = size_of(arguments)
    page = Page("STARTING", "Starting ranks: measured", "python -m benchmarks.starting")
    lines: list[str] = []
    for ranks in arguments.ranks or ([2] if size.tiny else [2, 8]):
        table = whole_script(ranks, size if ranks == 2 else size.at_most(MOST_OF_MANY_RANKS))
        other = dataclasses.replace(
            table,
            title=f"{table.title}, compared with the second script",
            note=f"The same times, relative to ``{OTHER}``.",
            base=OTHER,
            aims={},
        )
        lines += [heading(f"{ranks} ranks"), table.text(), other.text(), *further_calls(ranks, table)]
    fewer = size.at_most(MOST_OF_MANY_RANKS).rounds
    note = (
        "It measures a script that trains one\nstep on CPU ranks, from the first import to the end of the script: "
        f"medians of {size.rounds} interleaved rounds\n(with more than two ranks, {fewer}). Lightning's strategy is "
        "``ddp_spawn``. Accelerate's ``debug_launcher`` forks\nthe script, which works only if the script has not used "
        "threads or a GPU."
    )
    page.write(arguments.out, size, note, lines)
    if arguments.out == HERE:
        readme.write()


if __name__ == "__main__":
    main()
