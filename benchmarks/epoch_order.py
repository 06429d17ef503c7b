"""Time and memory until the first batch of a shuffled epoch, and of one entered in its middle, by the dataset's size.

    python benchmarks/epoch_order.py [--sizes 1000000 100000000 10000000000]

Each figure is measured in a separate process: seconds, and the growth of the peak resident set, from the request for
the order to the first 32 indices of rank 1 of 2. torch's ``DistributedSampler`` builds the order as a Python list, with
about 45 bytes an index at its peak, and for the middle of an epoch it builds the whole order, too. It is left out if
less than twice this memory is free.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

BATCH_SIZE = 32
LIST_BYTES = 45  # of each index, while DistributedSampler makes its list


class Sized:
    """A dataset of which nothing but the length matters."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def ours(length: int, first_batch: int) -> Iterator[Any]:
    from torch.utils.data import RandomSampler

    from trainloop.data.order.samplers import ShardSampler

    dataset = Sized(length)
    sampler = ShardSampler(
        RandomSampler(dataset), dataset, batch_size=BATCH_SIZE, rank=1, world_size=2, drop_last=False, seed=0
    )
    indices, _ = next(sampler.batches(first_batch))
    yield from indices


def torchs(length: int, first_batch: int) -> Iterator[Any]:
    from torch.utils.data.distributed import DistributedSampler

    sampler: Any = DistributedSampler(Sized(length), num_replicas=2, rank=1)  # type: ignore[arg-type]
    return islice(iter(sampler), first_batch * BATCH_SIZE, None)


def measure(which: str, length: int, first_batch: int) -> dict[str, float]:
    # Import, and allocate what torch and numpy allocate once, before the clock starts.
    list(islice({"ours": ours, "torch": torchs}[which](100, 0), BATCH_SIZE))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    indices = list(islice({"ours": ours, "torch": torchs}[which](length, first_batch), BATCH_SIZE))
    seconds = time.perf_counter() - start
    assert len(set(indices)) == BATCH_SIZE
    return {"seconds": seconds, "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def main() -> None:
    import psutil

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**6, 10**8, 10**10])
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure[0], int(args.measure[1]), int(args.measure[2]))))
        return
    print(f"{'samples':>14}  {'first batch':24}  {'trainloop':>22}  {'DistributedSampler':>22}")
    for length in args.sizes:
        for name, first_batch in (("of the epoch", 0), ("in its middle", length // (4 * BATCH_SIZE))):
            cells = []
            for which in ("ours", "torch"):
                if which == "torch" and length * LIST_BYTES * 2 > psutil.virtual_memory().available:
                    cells.append(f"needs {length * LIST_BYTES / 2**30:.0f} GiB")
                    continue
                command = [sys.executable, __file__, "--measure", which, str(length), str(first_batch)]
                facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                cells.append(f"{facts['seconds']:8.4f} s {facts['mib']:7.1f} MiB")
            print(f"{length:14,}  {name:24}  {cells[0]:>22}  {cells[1]:>22}")


if __name__ == "__main__":
    main()
