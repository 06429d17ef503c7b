"""Memory, steps and checkpoints of a model that is sharded: python -m benchmarks.fsdp

memory
    Proportional memory (PSS) of a rank that has gradients and AdamW's state, minus that of the same run with a tiny
    model, in ``fsdp`` and ``ddp``, with trainloop and with a hand-written loop.
step
    Time of a step, alternating with a hand-written loop (torch's ``fully_shard``) step by step in the same ranks: the
    difference between runs, more than a tenth, is the same for both.
others
    Time of a step in runs of their own, with Accelerate's and Lightning's FSDP if they are installed and support the
    CPU; else their error. The order of the turns changes.
save
    Seconds and bytes of one checkpoint, compared with ``torch.distributed.checkpoint`` alone: the bytes that each rank
    writes, and the largest growth of a rank's memory.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.pages import HERE, Page, Size, parser, size_of
from benchmarks.timing import BY_HAND, restructured
from trainloop import AbstractCallback, TrainLoop, TTModel
from trainloop._transfer.pages import trim
from trainloop.callbacks import ModelCheckpoint

# Few steps: with more ranks than cores each of a step's three exchanges a block costs a turn of the scheduler.
WIDTH, BLOCKS, BATCH, STEPS = 768, 24, 8, 8
TIMED = 24  # a median over 4 steps, and one order of turns, gave 0.85 to 1.35 where nothing differed


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(TTModel):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return self(batch_data).square().mean()

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        return self(batch_data), batch_data, {}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=True)


def loader(ranks: int = 1, steps: int = STEPS) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(torch.randn(steps * BATCH * ranks, WIDTH), batch_size=BATCH)


def settled_pss() -> tuple[int, int]:
    """Bytes in use, and those besides that are freed already: gathered units leave holes in glibc's heap."""
    before = pss()
    trim()
    return (after := pss()), before - after


def pss() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Pss:"))


def step_ms(times: list[float]) -> float:
    """Median time between two steps, the first three left out."""
    return 1e3 * statistics.median(b - a for a, b in pairwise(times[3:]))


# -- with trainloop ----------------------------------------------------------------------------------------------------


class Watch(AbstractCallback):
    """Times of rank 0's steps, and before the last one the memory of all ranks."""

    def __init__(self, steps: int) -> None:
        super().__init__("watch")
        self.steps = steps
        self.times: list[float] = []
        self.bytes: list[int] = []
        self.kept_by_malloc = 0

    def on_after_gradient_update(self) -> None:
        if self.train_loop_obj.global_step == self.steps - 1:
            used, self.kept_by_malloc = settled_pss()
            self.bytes = [int(b) for b in self.train_loop_obj.model.all_gather(used)]

    def on_after_optimizer_step(self) -> None:
        self.times.append(time.perf_counter())


class Beside(AbstractCallback):
    """Time a step of the loop and one of a hand-written loop with its own model on the same ranks, in turns."""

    def __init__(self) -> None:
        super().__init__("beside")
        self.ours: list[float] = []
        self.by_hand: list[float] = []
        self._ended = 0.0

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        self._model = _sharded(loop.world_size)
        self._optimizer = adam(self._model)
        self._batches = iter(loader(steps=TIMED))

    def on_after_optimizer_step(self) -> None:
        began = time.perf_counter()
        if self._ended:
            self.ours.append(began - self._ended)
        self._model(next(self._batches)).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._ended = time.perf_counter()
        self.by_hand.append(self._ended - began)

    def on_train_end(self) -> None:
        del self._model, self._optimizer, self._batches


class Saving(ModelCheckpoint):
    """Times its one checkpoint, at the end of training, on every rank."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()
        with growth() as facts:
            super()._save_checkpoint(*args, **kwargs)
            dist.barrier()
        everyone = self.train_loop_obj.model.all_gather(torch.tensor([facts["seconds"], facts["bytes"]]))
        self.seconds, self.grown = (float(value) for value in everyone.max(0).values)


def with_trainloop(
    mode: str, ranks: int, width: int = WIDTH, callbacks: list[Any] | None = None, steps: int = STEPS
) -> Watch:
    model, watch = Model(width), Watch(steps)
    loop = TrainLoop(
        model,
        loader(ranks, steps),
        optimizer=adam(model),
        gpu_mode=mode,
        accelerator="cpu",
        devices=ranks,
        progress_bar=False,
    )
    loop.fit(num_epochs=1, callbacks=[watch, *(callbacks or [])])
    return watch


@contextmanager
def growth() -> Any:
    """Seconds, and the most bytes that this process's own memory grows by meanwhile."""

    def own() -> int:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

    over, facts, begin = threading.Event(), {"bytes": 0, "seconds": 0.0}, own()

    def watch() -> None:
        while not over.wait(0.002):
            facts["bytes"] = max(facts["bytes"], own() - begin)

    thread = threading.Thread(target=watch)
    thread.start()
    started = time.perf_counter()
    try:
        yield facts
    finally:
        facts["seconds"] = time.perf_counter() - started
        over.set()
        thread.join()


# -- PyTorch alone, and others -----------------------------------------------------------------------------------------


def steps(
    model: nn.Module, optimizer: Any, backward: Callable[[Any], Any] | None = None, number: int = TIMED
) -> list[float]:
    times = []
    for batch in loader(steps=number):
        loss = model(batch).square().mean()
        loss.backward() if backward is None else backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    return times


def _in_group(rank: int, work: Callable[[int, int, str], Any], ranks: int, folder: str) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29591")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    result = work(rank, ranks, folder)
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.barrier()
    os._exit(0)  # seldom a thread of Gloo outlives the interpreter, and aborts


def in_group(work: Callable[[int, int, str], Any], ranks: int) -> Any:
    """What rank 0's ``work(rank, ranks, folder)`` returns."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_in_group, (work, ranks, folder), ranks)
        return torch.load(f"{folder}/result")


def _sharded(ranks: int, width: int = WIDTH) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model(width)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def held_by_hand(mode: str, width: int, rank: int, ranks: int, folder: str) -> tuple[list[int], int]:
    """As :class:`Watch` has it: each rank's bytes, and what rank 0's malloc keeps besides."""
    model = _sharded(ranks, width) if mode == "fsdp" else Model(width)
    wrapper = model if mode == "fsdp" else nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adam(model)
    batches = list(loader(steps=3))
    for batch in batches:
        wrapper(batch).square().mean().backward()
        if batch is not batches[-1]:
            optimizer.step()
            optimizer.zero_grad()
    used, free = settled_pss()
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(everyone, torch.tensor([used]))
    return [int(one) for one in everyone], free


def step_by_hand(rank: int, ranks: int, folder: str) -> list[float]:
    model = _sharded(ranks)
    return steps(model, adam(model))


def step_by_accelerate(rank: int, ranks: int, folder: str) -> list[float]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = Model()
    model, optimizer = accelerator.prepare(model, adam(model))
    if not any(hasattr(p, "device_mesh") for p in model.parameters()):
        raise RuntimeError(f"Accelerator(cpu=True, fsdp_plugin=...) made a {type(model).__name__}, nothing is sharded")
    return steps(model, optimizer, accelerator.backward)


def step_by_lightning(rank: int, ranks: int, folder: str) -> list[float]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def parallelize(model: Any, mesh: Any) -> Any:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(Model())
    optimizer = fabric.setup_optimizers(adam(model))
    return steps(model, optimizer, fabric.backward)


def step_by_lightning_fsdp(rank: int, ranks: int, folder: str) -> list[float]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="fsdp")
    fabric.launch()
    model, optimizer = fabric.setup(*(lambda model: (model, adam(model)))(Model()))
    return steps(model, optimizer, fabric.backward)


def saved_by_hand(rank: int, ranks: int, folder: str) -> tuple[float, float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = _sharded(ranks)
    optimizer = adam(model)
    steps(model, optimizer, number=STEPS)
    dist.barrier()
    with growth() as facts:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/saved")
    facts_of_all = [torch.zeros(2) for _ in range(ranks)]
    dist.all_gather(facts_of_all, torch.tensor([facts["seconds"], facts["bytes"]]))
    seconds, grown = torch.stack(facts_of_all).max(0).values.tolist()
    return seconds, grown


# -- tables ------------------------------------------------------------------------------------------------------------


def memory(size: Size) -> str:
    def ours(mode: str, ranks: int, width: int) -> tuple[list[int], int]:
        watch = with_trainloop(mode, ranks, width=width, steps=3)
        return watch.bytes, watch.kept_by_malloc

    def by_hand(mode: str, ranks: int, width: int) -> tuple[list[int], int]:
        found: tuple[list[int], int] = in_group(partial(held_by_hand, mode, width), ranks)
        return found

    rows = [("ranks", "MiB", "ddp", "free", "fsdp", "free", "ratio", "smallest to largest", "aim")]
    for ranks in (2,) if size.tiny else (1, 2, 4):
        for name, measured in {"trainloop": ours, BY_HAND: by_hand}.items():
            held: dict[str, list[float]] = {"ddp": [], "fsdp": []}
            free: dict[str, list[float]] = {"ddp": [], "fsdp": []}
            for _ in range(size.rounds):
                for mode in held:
                    (base, _), (found, left) = measured(mode, ranks, 1), measured(mode, ranks, WIDTH)
                    held[mode].append(max(b - a for a, b in zip(base, found, strict=True)) / 2**20)
                    free[mode].append(left / 2**20)
            ratios = [sharded / whole for sharded, whole in zip(held["fsdp"], held["ddp"], strict=True)]
            figures = (f"{statistics.median(one[mode]):.0f}" for mode in held for one in (held, free))
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            aim = "0.30" if ranks == 4 and name == "trainloop" else ""
            rows.append((str(ranks), name, *figures, f"{statistics.median(ratios):.3f}", spread, aim))
            print(rows[-1], flush=True)
    note = (
        f"MiB of the rank that has the most; medians of {size.rounds} runs. ``free`` is the memory that rank 0 had\n"
        "freed but that glibc's malloc kept; it is not included. The model has "
        f"{sum(p.numel() * p.element_size() for p in Model().parameters()) / 2**20:.0f} MiB of parameters."
    )
    return restructured("Memory of a rank", note, rows)


def step(size: Size) -> str:
    rows = [("run", "trainloop ms", f"{BY_HAND} ms", "median of the pairs", "quartiles", "aim")]
    for number in range(1, size.rounds + 1):
        beside = Beside()
        with_trainloop("fsdp", 2, callbacks=[beside], steps=TIMED)
        both = list(zip(beside.ours[3:], beside.by_hand[4:], strict=True))
        ours, by_hand = (1e3 * statistics.median(times) for times in zip(*both, strict=True))
        low, middle, high = statistics.quantiles([one / other for one, other in both])
        rows.append((str(number), f"{ours:.0f}", f"{by_hand:.0f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", "1.05"))
        print(rows[-1], flush=True)
    note = "A step of trainloop and one of a hand-written loop with ``fully_shard`` take turns in the same ranks."
    return restructured("A step, two ranks", note, rows)


def others(size: Size) -> str:
    kinds: dict[str, Callable[[], list[float]]] = {
        BY_HAND: lambda: in_group(step_by_hand, 2),
        "trainloop": lambda: with_trainloop("fsdp", 2, steps=TIMED).times,
        "Accelerate": lambda: in_group(step_by_accelerate, 2),
        "Fabric, ModelParallelStrategy": lambda: in_group(step_by_lightning, 2),
        "Fabric, strategy='fsdp'": lambda: in_group(step_by_lightning_fsdp, 2),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    errors: dict[str, str] = {}
    for i in range(size.rounds):
        for name in list(kinds)[:: -1 if i % 2 else 1]:
            try:
                found[name].append(step_ms(kinds[name]()))
            except Exception as error:  # whatever another library raises
                errors[name] = str(error).strip().splitlines()[-1].replace("`", "'")
                del kinds[name]
    rows = [("loop", "ms a step", "ratio", "smallest to largest")]
    for name in kinds:
        ratios = [own / hand for own, hand in zip(found[name], found[BY_HAND], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append((name, f"{statistics.median(found[name]):.0f}", f"{statistics.median(ratios):.2f}", spread))
        print(rows[-1], flush=True)
    note = f"Medians of {size.rounds} runs of {TIMED} steps. Runs differ by more than the libraries do."
    for name, text in errors.items():
        print(f"{name}: {text}", flush=True)
        note += f"\n{name} does not run here: {text}"
    return restructured("A step by other libraries, two ranks", note, rows)


def save(size: Size) -> str:
    rows = [("by", "ranks", "seconds", "a rank grows by MiB", "each rank writes MiB")]
    for ranks in (2,) if size.tiny else (2, 4):
        ours, by_hand, parts = [], [], [0.0]
        for _ in range(size.rounds):
            with tempfile.TemporaryDirectory() as folder:
                keeper = Saving(folder, every_n_epochs=None)
                with_trainloop("fsdp", ranks, callbacks=[keeper])
                parts = [file.stat().st_size / 2**20 for file in Path(folder).rglob("*.distcp")]
                ours.append((keeper.seconds, keeper.grown))
            by_hand.append(in_group(saved_by_hand, ranks))
        writes = {"trainloop": f"{min(parts):.0f} to {max(parts):.0f} of {sum(parts):.0f}"}
        for name, runs in {"trainloop": ours, "torch.distributed.checkpoint": by_hand}.items():
            seconds, grown = (statistics.median(values) for values in zip(*runs, strict=True))
            rows.append((name, str(ranks), f"{seconds:.2f}", f"{grown / 2**20:.0f}", writes.get(name, "")))
            print(rows[-1], flush=True)
    note = (
        f"Medians of {size.rounds} runs. trainloop also computes a checksum of each file, and gives the checkpoint\n"
        "its name only when all files are complete."
    )
    return restructured("A checkpoint of weights and optimizer state", note, rows)


PARTS: dict[str, Callable[[Size], str]] = {"memory": memory, "step": step, "others": others, "save": save}


def main() -> None:
    made = parser(__doc__, rounds=3)
    made.add_argument("--only", nargs="+", choices=PARTS, help="parts of the page, into another folder (all)")
    arguments = made.parse_args()
    if arguments.only and arguments.out == HERE:
        made.error("--only: the page has all parts. Pass --out FOLDER, to keep the page.")
    size = size_of(arguments)
    warnings.filterwarnings("ignore", message="devices=")
    page = Page("FSDP", "Models larger than a device: measured", "python -m benchmarks.fsdp")
    note = (
        f"The model has {BLOCKS}\nblocks of linear layers of size {WIDTH} in float32, and is trained with AdamW on CPU "
        "ranks."
    )
    page.write(arguments.out, size, note, [PARTS[name](size) for name in arguments.only or PARTS])


if __name__ == "__main__":
    main()
