"""Runs that are struck at random and have to survive: ``make soak-restarts ARGS='--failures 1000 --seed 1'``.

A trial is one ``fit(max_restarts=-1)`` of :mod:`survival` with 1, 2 or 3 ranks, one kind of loader, a plan of strikes
at places in ranks, and a thread that kills ranks at any moment besides. Then all that is known of the run must equal,
bit for bit, what the same run gives that nobody strikes and that has no restarts; and no process, descriptor or shared
memory may be left.

Prints a table by kind of failure, and exits with 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import survival
import torch

from checkpoints import same
from trainloop.launch.fork_server import end_server

PLACES = [*survival.Strikes.PLACES, "on_multiprocess_start", "snapshot", "snapshot is half written", "state_dict",
          "checkpoint is half written", "at exit"]  # fmt: skip
ACTS = ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "exits", "sys.exit", "raises", "out of memory",
        "loses its connections"]  # fmt: skip
RARE = ["hangs", "hangs in native code"]  # each takes a time-out
GRACE_S = 10.0


class Killer(threading.Thread):
    """Kills ranks from outside, at moments that have nothing to do with what they are at."""

    def __init__(self, folder: Path, rng: random.Random, kills: int) -> None:
        super().__init__(name="killer", daemon=True)
        self.folder, self.rng, self.kills = folder, rng, kills
        self.over = threading.Event()

    def run(self) -> None:
        last: Any = None
        while self.kills and not self.over.wait(self.rng.uniform(0.05, 2.5)):
            pids = sorted(self.folder.glob("pid-[0-9]*"))
            if not pids:
                continue
            # No strike that a plan may hold: twice the same at one step ends a run.
            path, number = self.rng.choice(pids), self.rng.choice([signal.SIGILL, signal.SIGFPE])
            if (path.name, number) == last:
                continue
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), number)
                path.unlink()
                last, self.kills = (path.name, number), self.kills - 1


class Soak:
    """Trial after trial, and what came of them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.expected: dict[Any, Any] = {}
        self.restarts: list[Any] = []
        self.wrong: list[str] = []
        self.trials = 0

    def trial(self) -> None:
        number = self.trials = self.trials + 1
        rng = random.Random(f"{self.seed}-{number}")
        ranks, kind = rng.choice([1, 2, 2, 3, 3]), rng.choice(list(survival.LOADERS))
        mode, seed = ("ddp" if ranks > 1 else rng.choice(["single", "dp"])), rng.choice([None, 3])
        if ranks == 1 and kind == "workers":
            seed = 3  # what persistent workers draw without one is not survived: docs/guides/runs_that_survive.rst
        key = (mode, ranks, kind, seed)
        if key not in self.expected:
            self.expected[key] = survival.train(
                self.root / f"undisturbed-{number}", mode, max(ranks, 1), kind, [], seed
            )[1]
        acts = [*ACTS, "a worker dies"] if "worker" in kind else ACTS
        chosen = [
            *rng.sample(acts, rng.randint(2, 6)),
            *([rng.choice(RARE)] if ranks > 1 and rng.random() < 0.2 else ()),
        ]
        plan = [(rng.randrange(ranks), rng.choice(PLACES), rng.randrange(17), act) for act in chosen]
        folder = self.root / str(number)
        folder.mkdir()
        every = rng.choice([1, 2, 3, 5, None])
        killer = Killer(folder, rng, rng.randint(0, 4))
        killer.start()
        what = f"trial {number}: {mode} {ranks} {kind!r} seed={seed} every={every} plan={plan}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tl, facts = survival.train(
                    folder, mode, ranks, kind, plan, seed, max_restarts=-1, restart_every_steps=every
                )
        except Exception as error:
            self.wrong.append(f"{what}: {error!r}")
            print(self.wrong[-1], flush=True)
            return
        finally:
            killer.over.set()
            killer.join()
        differing = [name for name in facts if not same(facts[name], self.expected[key][name])]
        if differing:
            self.wrong.append(f"{what}: differs in {', '.join(differing)}; restarts {tl.restarts}")
            print(self.wrong[-1], flush=True)
        self.restarts += tl.restarts
        shutil.rmtree(folder)

    def left(self, before: tuple[int, int], lasting: list[psutil.Process]) -> None:
        """What is left of all of them."""
        end_server("the soak is over")
        deadline = time.monotonic() + GRACE_S
        while (children := others(lasting)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.wrong += [f"left: process {child}" for child in children]
        gc.collect()
        now = count()
        if now[0] > before[0]:
            self.wrong.append(f"left: {now[0] - before[0]} file descriptors")
        if now[1] > before[1]:
            self.wrong.append(f"left: {now[1] - before[1]} files in /dev/shm")

    def table(self) -> str:
        """By kind of failure: how many, and how long it took to go on."""
        kinds: dict[str, list[Any]] = defaultdict(list)
        for restart in self.restarts:
            kinds[re.sub(r"(raised \w+).*|, before.*", r"\1", restart.cause)].append(restart)
        kinds["all"] = self.restarts
        lines = [f"{'rank ...':44} {'times':>6} {'median s':>9} {'longest':>8} {'steps again':>12}"]
        for kind, found in sorted(kinds.items(), key=lambda item: len(item[1])):
            seconds = [restart.seconds for restart in found] or [0.0]
            steps = [restart.steps_repeated for restart in found] or [0]
            lines.append(
                f"{kind[:44]:44} {len(found):6} {statistics.median(seconds):9.2f} {max(seconds):8.1f} "
                f"{statistics.median(steps):12g}"
            )
        return "\n".join(lines)


def others(lasting: list[psutil.Process]) -> list[psutil.Process]:
    """Processes that this one has started, but for some."""
    return [child for child in psutil.Process().children(recursive=True) if child not in lasting]


def count() -> tuple[int, int]:
    """Descriptors of this process, and files in shared memory that look like its own."""
    shared = [name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name or f"_{os.getpid()}_" in name]
    return psutil.Process().num_fds(), len(shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many, whatever has come by then")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    survival.TIMEOUT_S = 20.0
    root = Path(tempfile.mkdtemp(prefix="soak-restarts-"))
    soak, begin = Soak(root, arguments.seed), time.monotonic()
    resource_tracker.ensure_running()  # it lives as long as this process
    before, lasting = count(), psutil.Process().children()
    while len(soak.restarts) < arguments.failures and time.monotonic() - begin < 60 * arguments.minutes:
        soak.trial()
        print(f"{soak.trials} runs, {len(soak.restarts)} failures, {len(soak.wrong)} wrong", flush=True)
    soak.left(before, lasting)
    shutil.rmtree(root)
    print(f"\n{soak.trials} runs of 1 to 3 ranks, {time.monotonic() - begin:.0f} s, seed {arguments.seed}\n")
    print(soak.table())
    print("\n".join(["", *soak.wrong]) if soak.wrong else "\nall ended with the bits of an undisturbed run")
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
