"""Time to start two ranks, against ``torch.multiprocessing.spawn`` with the same work: python -m benchmarks.startup

Both join a Gloo group over a file, exchange once, and leave. The bare one does what a tutorial does, and no more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from trainloop.launch import launch
from trainloop.stopping import StopAgreement

RANKS = 2


def work(stop: StopAgreement | None = None) -> None:
    """One exchange."""
    dist.all_reduce(torch.ones(1))


def bare_rank(rank: int, path: str) -> None:
    """A rank of a hand-written start."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(path, RANKS), rank=rank, world_size=RANKS)
    work()
    dist.destroy_process_group()


def bare() -> None:
    """The hand-written start."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(bare_rank, args=(os.path.join(folder, "store"),), nprocs=RANKS)


def trainloop() -> None:
    """This project's."""
    launch(work, ranks_per_node=RANKS)


def seconds(start: Callable[[], None]) -> float:
    """One start, from the call to its return."""
    begin = time.perf_counter()
    start()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    rounds = parser.parse_args().rounds
    seconds(bare)  # the file cache
    times = [(seconds(bare), seconds(trainloop)) for _ in range(rounds)]
    by_hand, here = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(mine / theirs for theirs, mine in times)
    print(f"start of {RANKS} ranks: mp.spawn {by_hand:.2f} s, launch {here:.2f} s, ratio {ratio:.3f} ({rounds} rounds)")


if __name__ == "__main__":
    main()
