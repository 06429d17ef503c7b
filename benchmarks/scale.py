"""The cost of exchanges by the number of ranks, in bytes and in time: python -m benchmarks.scale [--ranks 2 4 ...]

And the time and memory until ranks of a host have their parts of a weighted epoch's order, and what a user's own
sampler costs each rank.

Ranks are processes of this machine that talk over Gloo, forked from one that has everything imported, so that 64 of
them fit into it. They share its cores: times show how a cost grows, and which of two ways is quicker, not the cost on a
cluster. Bytes are those that one rank, the busiest, sends and receives, by the algorithms that Gloo uses; they are the
same on a cluster. Writes ``docs/design/scale_measured.txt``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler, WeightedRandomSampler

from benchmarks.pages import provenance
from trainloop import distributed
from trainloop._metrics import LogCall, Recorder
from trainloop._metrics.exchange import Gathered, Summed
from trainloop._support import rng
from trainloop._support.stopping import GroupStop
from trainloop.data.order.samplers import ShardSampler

OUT = Path(__file__).parent.parent / "docs" / "design" / "scale_measured.txt"
METRICS, STEPS = 10, 128
TIMES = 7


class Traffic:
    """Bytes that the busiest rank sends and receives, of calls of ``torch.distributed``."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        others = self.world_size - 1
        sizes: dict[str, Callable[..., int]] = {
            "all_reduce": lambda tensor, *_, **__: 4 * tensor.nbytes * others // self.world_size,  # a ring, twice
            "all_gather": lambda _, tensor, *__, **___: 2 * tensor.nbytes * others,
            "gather": lambda tensor, *_, **__: tensor.nbytes * others,  # the bytes that its receiver gets
            "broadcast": lambda tensor, *_, **__: 2 * tensor.nbytes,
        }
        originals = {name: getattr(dist, name) for name in sizes}

        def counting(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.bytes += sizes[name](*args, **kwargs)
                return originals[name](*args, **kwargs)

            return call

        for name in sizes:
            setattr(dist, name, counting(name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)


Operation = tuple[Callable[[], Any], Callable[[], Any]]
"""What makes ready, and what is measured."""


def flush_with(exchange: Any, rank: int) -> Operation:
    recorder = Recorder(rank=rank, exchange=exchange)

    def log() -> None:
        for step in range(recorder.step + 1, recorder.step + 1 + STEPS):
            recorder.step, recorder.batch_size = step, 32
            for i in range(METRICS):
                recorder.log(f"metric {i}", torch.tensor(0.1 * rank + step), LogCall())
        recorder.compact()

    return log, recorder.exchange_steps


def epoch_with(exchange: Any, rank: int) -> Operation:
    recorder = Recorder(rank=rank, exchange=exchange)

    def log() -> None:
        recorder.step += 1
        for i in range(METRICS):
            recorder.log(f"metric {i}", 0.1 * rank, LogCall(on_step=False))

    return log, recorder.finish_epoch


def operations(rank: int) -> dict[str, Operation]:
    stop = GroupStop(dist.new_group(backend="gloo"), dist.get_world_size())
    state, gathered = rng.capture(), Gathered(distributed.gather_object)
    flush = f"flush of {METRICS} metrics x {STEPS} steps"

    def nothing() -> None: ...

    return {
        f"{flush}, gathered": flush_with(gathered, rank),
        # Each with a table of its own: one that they shared would have the metrics of both.
        f"{flush}, summed": flush_with(Summed(distributed), rank),
        f"epoch of {METRICS} metrics, gathered": epoch_with(gathered, rank),
        f"epoch of {METRICS} metrics, summed": epoch_with(Summed(distributed), rank),
        "random states to rank 0": (nothing, lambda: distributed.gather_to(state)),
        "exchange_ints": (nothing, lambda: distributed.exchange_ints([1, 2])),
        "stop agreement over hosts, a step": (nothing, stop.reached),
        "barrier": (nothing, distributed.barrier),
    }


def of_rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    traffic = Traffic(world_size)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size
    )
    found: dict[str, Any] = {"process group": {"seconds": time.perf_counter() - begin, "bytes": 0}}
    begin = time.perf_counter()
    with traffic.counted():
        distributed.barrier()
    found["first exchange (key, nonces)"] = {"seconds": time.perf_counter() - begin, "bytes": traffic.bytes}
    for name, (prepare, work) in operations(rank).items():
        prepare()
        work()  # names registered, memory there
        seconds = []
        for _ in range(TIMES):
            prepare()
            distributed.barrier()
            traffic.bytes = 0
            begin = time.perf_counter()
            with traffic.counted():
                work()
            seconds.append(time.perf_counter() - begin)
        found[name] = {"seconds": statistics.median(seconds), "bytes": traffic.bytes}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    distributed.barrier()
    dist.destroy_process_group()


def measured(world_size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for process in in_ranks(of_rank, world_size, folder):
            process.join()
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        return found


def in_ranks(work: Callable[..., None], world_size: int, folder: str, *arguments: Any) -> list[Any]:
    """Start ranks, forked from this process."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=work, args=(rank, world_size, folder, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    return ranks


def own_order(rank: int, world_size: int, folder: str, number: int, ready: Any, done: Any) -> None:
    """Draw a weighted order of ``number`` rows, and keep a rank's indices of it."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    weights = torch.from_file(f"{folder}/weights", size=number, shared=True, dtype=torch.float64)
    sampler = WeightedRandomSampler(weights, number)
    shard = ShardSampler(sampler, None, batch_size=32, rank=rank, world_size=world_size, drop_last=False, seed=0)
    distributed.barrier()
    ready.wait()
    batches = shard.batches()
    next(batches)
    done.wait()
    dist.destroy_process_group()


def order_cost(world_size: int, number: int) -> tuple[float, float]:
    """Seconds until all ranks have their part, and by how many bytes the host's memory has grown at its peak."""
    context = multiprocessing.get_context("fork")
    ready, done = context.Barrier(world_size + 1), context.Barrier(world_size + 1)
    with tempfile.TemporaryDirectory() as folder:
        torch.from_file(f"{folder}/weights", size=number, shared=True, dtype=torch.float64).uniform_(0.5, 1)
        ranks = in_ranks(own_order, world_size, folder, number, ready, done)
        ready.wait()
        begin, before, peak = time.perf_counter(), proportional(ranks), 0
        while done.n_waiting < world_size:
            peak = max(peak, proportional(ranks))
            time.sleep(0.02)
        seconds = time.perf_counter() - begin
        done.wait()
        for process in ranks:
            process.join()
    return seconds, peak - before


def proportional(ranks: list[Any]) -> int:
    """Bytes of memory of some processes, what they share counted once."""
    total = 0
    for process in ranks:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        total += next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def order_table(ranks: list[int], number: int) -> list[str]:
    lines = [f".. csv-table:: A weighted epoch of {number:,} rows: until each rank has its part"]
    lines += ['   :header: ranks of a host,"time, memory of the host"', ""]
    for world_size in ranks:
        seconds, size = order_cost(world_size, number)
        lines.append(f'   {world_size},"{seconds:.3g} s, {human(size)}"')
    return [*lines, ""]


class Counting(Sampler[int]):
    """A sampler of a user's own that is as quick as can be."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._number))


def own_sampler_cost(world_size: int, number: int = 1 << 20) -> float:
    """Seconds of a rank for each index of a user's own sampler, its batches of 32 included."""
    shard = ShardSampler(Counting(number), None, batch_size=32, rank=0, world_size=world_size, drop_last=False, seed=0)
    seconds = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        for _ in shard.batches():
            pass
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) / number


def own_sampler_table() -> list[str]:
    """For numbers of ranks of which one is simulated: it exchanges nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines = [".. csv-table:: A custom sampler with batches of 32: nanoseconds per index, on each rank"]
    lines += ["   :header: ranks,ns", ""]
    lines += [f"   {ranks},{own_sampler_cost(ranks) * 1e9:.0f}" for ranks in (2, 8, 64, 1024)]
    torch.set_num_threads(threads)
    return [*lines, ""]


def human(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000 or unit == "MB":
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:,.0f} {unit}"
        size /= 1000
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--rows", type=int, default=1 << 24, help="of a weighted sampler (2^24, torch's most)")
    given = parser.parse_args()
    numbers = given.ranks
    found = {number: measured(number) for number in numbers}
    columns = ",".join(f"{number} ranks" for number in numbers)
    lines = [".. Written by python -m benchmarks.scale", "", provenance(), ""]
    for title, key in (("Milliseconds, all ranks on these cores", "seconds"), ("Bytes of the busiest rank", "bytes")):
        lines += [f".. csv-table:: {title}", f"   :header: operation,{columns}", ""]
        for name in found[numbers[0]]:
            values = [found[number][name][key] for number in numbers]
            if any(values):
                shown = [f"{value * 1e3:.3g}" if key == "seconds" else human(value) for value in values]
                lines.append(f'   "{name}",' + ",".join(f'"{value}"' for value in shown))
        lines.append("")
    lines += order_table([number for number in numbers if number <= 8], given.rows)
    lines += own_sampler_table()
    OUT.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
