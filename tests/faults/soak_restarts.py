"""Runs that are struck at random and have to survive: ``make soak-restarts ARGS='--failures 1000 --seed 1'``.

A trial is one ``fit(max_restarts=-1)`` of :mod:`survival` with 1, 2 or 3 ranks, one kind of loader, a plan of strikes
at places in ranks, and a thread that kills ranks at any moment besides. Then all that is known of the run must equal,
bit for bit, what the same run gives that nobody strikes and that has no restarts; and no process, descriptor or shared
memory may be left.

Prints a table by kind of failure, and exits with 1 where something was wrong. With ``--log FILE`` it may be run in
pieces (``--minutes 4``): each goes on after the trials that the file holds, and the table is of all of them.
``--only 7`` runs one trial again; its line then counts instead of the earlier one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
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
import traceback
import warnings
from collections import defaultdict
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import torch
from kit import survival
from kit.checkpoints import same

from trainloop._launch.spawning import server_modules
from trainloop._processes.fork_server import begin_server
from trainloop.train_loop.execution.restarts import Restart

PLACES = [*survival.Strikes.PLACES, "on_multiprocess_start", "restart checkpoint is half written", "state_dict",
          "checkpoint is half written", "at exit"]  # fmt: skip
ACTS = ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "exits", "sys.exit", "raises", "out of memory",
        "loses its connections"]  # fmt: skip
RARE = ["hangs", "hangs in native code"]  # each takes a time-out; nobody waits for a process that trains alone
KILLS = [signal.SIGILL, signal.SIGFPE]
GRACE_S = 10.0


class Killer(threading.Thread):
    """Kills ranks from outside, at moments that have nothing to do with what they are at."""

    def __init__(self, folder: Path, rng: random.Random, kills: int) -> None:
        super().__init__(name="killer", daemon=True)
        self.folder, self.rng, self.kills = folder, rng, kills
        self.over = threading.Event()

    def run(self) -> None:
        last: dict[str, signal.Signals] = {}
        while self.kills and not self.over.wait(self.rng.uniform(0.05, 2.5)):
            pids = sorted(self.folder.glob("pid-[0-9]*"))
            if not pids:
                continue
            # No strike that a plan may hold; each rank's in turn, as twice the same at one step ends a run. Not only
            # unlike the last of all: that one may have struck a rank that was about to be ended, which nobody sees.
            path = self.rng.choice(pids)
            number = next(kind for kind in self.rng.sample(KILLS, 2) if kind != last.get(path.name))
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), number)
                path.unlink()
                last[path.name], self.kills = number, self.kills - 1


class Soak:
    """Trial after trial, and what came of them."""

    def __init__(self, root: Path, seed: int, log: Path | None = None) -> None:
        self.root, self.seed, self.log = root, seed, log
        self.expected: dict[Any, Any] = {}
        self.trials: dict[int, dict[str, Any]] = {}
        self.left_over: list[str] = []
        if log is not None and log.exists():
            for trial in map(json.loads, log.read_text().splitlines()):
                if trial["seed"] == seed:
                    self.trials[trial["number"]] = trial

    @property
    def restarts(self) -> list[Restart]:
        """Of all trials."""
        return [Restart(*restart) for trial in self.trials.values() for restart in trial["restarts"]]

    @property
    def wrong(self) -> list[str]:
        """Trials with another end, and what was left behind."""
        found = (f"{trial['what']}: {trial['wrong']}" for trial in self.trials.values() if trial["wrong"])
        return [*found, *self.left_over]

    def trial(self, number: int) -> None:
        begin = time.monotonic()
        what, wrong, restarts = self.outcome(number)
        seconds = time.monotonic() - begin
        result = {"seed": self.seed, "number": number, "what": what, "wrong": wrong, "restarts": restarts}
        self.trials[number] = {**result, "seconds": round(seconds, 1)}
        if wrong:
            print(f"trial {number}: {what}: {wrong}", flush=True)
        if self.log is not None:
            with self.log.open("a") as file:
                print(json.dumps(self.trials[number]), file=file)

    def outcome(self, number: int) -> tuple[str, str, list[Restart]]:
        """One trial: what was done, what was wrong with its end, and its restarts."""
        rng = random.Random(f"{self.seed}-{number}")
        ranks, kind = rng.choice([1, 2, 2, 3, 3]), rng.choice(list(survival.LOADERS))
        mode, seed = ("ddp" if ranks > 1 else rng.choice(["single", "dp"])), rng.choice([None, 3])
        if kind == "workers" and mode != "ddp":
            seed = 3  # without one, workers that replace persistent ones draw other numbers
        key = (mode, ranks, kind, seed)
        if key not in self.expected:
            self.expected[key] = survival.train(
                self.root / f"undisturbed-{number}", mode, max(ranks, 1), kind, [], seed
            )[1]
        acts = [*ACTS, "a worker dies"] if "worker" in kind else ACTS
        chosen = [
            *rng.sample(acts, rng.randint(2, 6)),
            *([rng.choice(RARE)] if rng.random() < 0.2 and ranks > 1 else ()),
        ]
        plan = [(rng.randrange(ranks), rng.choice(PLACES), rng.randrange(17), act) for act in chosen]
        # The loop warns of an error in writing a ModelCheckpoint's file and trains on: that file is missing then.
        plan = [s for s in plan if s[1] != "checkpoint is half written" or s[-1] not in ("raises", "out of memory")]
        if any(act == "loses its connections" for *_, act in plan):
            # Gloo aborts by it: both at one step would be the same failure twice, which ends a run.
            plan = [strike for strike in plan if strike[-1] != "SIGABRT"]
        folder = self.root / str(number)
        folder.mkdir()
        every = rng.choice([1, 2, 3, 5, None])
        killer = Killer(folder, rng, rng.randint(0, 4))
        killer.start()
        what = f"{mode} {ranks} {kind!r} seed={seed} every={every} plan={plan}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tl, facts = survival.train(
                    folder, mode, ranks, kind, plan, seed, max_restarts=-1, restart_every_steps=every
                )
        except Exception:
            return what, traceback.format_exc(), []
        finally:
            killer.over.set()
            killer.join()
        differing = [name for name in facts if not same(facts[name], self.expected[key][name])]
        wrong = f"differs in {', '.join(differing)}; restarts {tl.restarts}" if differing else ""
        shutil.rmtree(folder)
        return what, wrong, tl.restarts

    def left(self, before: tuple[int, int], lasting: list[psutil.Process]) -> None:
        """What is left of all of them."""
        deadline = time.monotonic() + GRACE_S
        while (children := others(lasting)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.left_over += [f"left: process {child}" for child in children]
        gc.collect()
        now = count()
        if now[0] > before[0]:
            self.left_over.append(f"left: {now[0] - before[0]} file descriptors")
        if now[1] > before[1]:
            self.left_over.append(f"left: {now[1] - before[1]} files in /dev/shm")

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
    """Descriptors of this process, and files in shared memory that look like its own, or of runs that restart."""
    marks = (f"-{os.getpid()}-", f"_{os.getpid()}_", "trainloop-tmp-")
    shared = [name for name in os.listdir("/dev/shm") if any(mark in name for mark in marks)]
    return psutil.Process().num_fds(), len(shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many, whatever has come by then")
    parser.add_argument("--log", type=Path, help="file of JSON lines, a trial each, to go on from")
    parser.add_argument("--only", type=int, help="number of the one trial to run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    survival.TIMEOUT_S = 20.0
    root = Path(tempfile.mkdtemp(prefix="soak-restarts-"))
    soak, begin = Soak(root, arguments.seed, arguments.log), time.monotonic()
    resource_tracker.ensure_running()  # these two live as long as this process
    begin_server(server_modules())
    before, lasting = count(), psutil.Process().children()
    if arguments.only is not None:
        soak.trial(arguments.only)
    else:
        while len(soak.restarts) < arguments.failures and time.monotonic() - begin < 60 * arguments.minutes:
            soak.trial(max(soak.trials, default=0) + 1)
            print(f"{len(soak.trials)} runs, {len(soak.restarts)} failures, {len(soak.wrong)} wrong", flush=True)
    soak.left(before, lasting)
    shutil.rmtree(root)
    seconds = sum(trial["seconds"] for trial in soak.trials.values())
    print(f"\n{len(soak.trials)} runs of 1 to 3 ranks, {seconds:.0f} s, seed {arguments.seed}\n")
    print(soak.table())
    print("\n".join(["", *soak.wrong]) if soak.wrong else "\nall ended with the bits of an undisturbed run")
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
