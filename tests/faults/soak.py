"""Short fits that are disturbed at random, and what has to hold afterwards: ``make soak ARGS='--trials 300 --seed 1'``.

A trial is one training (:func:`job`) with 1, 2 or 3 CPU ranks that a disturbance strikes: an exception, a hang or a
death at one place of one rank; a signal to the caller, to a rank, to a loader's worker or to the whole group, at any
moment; or a storm of kills, each followed by a new start. Then:

* the outcome is a documented one, and the right rank is named;
* resumed, the run ends with the bits of one that nobody disturbed (the control group);
* no process, no shared memory, no temporary file is left.

Prints a table, and exits with 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

TIMEOUT_S = 6.0  # of the jobs' own collectives
PATIENCE_S = 150.0  # for a job to end; a starved machine starts three ranks in half a minute
GONE_S = 12.0  # for its processes to follow
MARK = "TRAINLOOP_SOAK"  # in the environment of all processes of a trial
PLACES = ("getitem", "get_loss", "on_train_begin", "on_epoch_begin", "on_batch_begin", "on_after_gradient_update",
          "on_after_optimizer_step", "on_batch_end", "on_epoch_end", "on_train_end", "state_dict")  # fmt: skip
ACTS = ("raises", "hangs", "hangs in native code", "SIGKILL", "SIGABRT", "SIGSEGV", "exits")
SIGNALS = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 138}


# -- the job, in a process of its own ----------------------------------------------------------------------------------


def act(what: str) -> None:
    if what == "raises":
        raise LookupError("the soak's own")
    if what == "hangs":
        time.sleep(1000)
    elif what == "hangs in native code":
        while True:  # a signal ends the call
            ctypes.PyDLL(None).sleep(1000)  # with Python's lock held
    elif what == "exits":
        os._exit(3)
    else:
        os.kill(os.getpid(), getattr(signal, what))
        time.sleep(1000)


def job(where: str, ranks: int, workers: int, place: str = "", on_rank: int = 0, what: str = "", at: int = 0) -> None:
    """Train, from the newest checkpoint on; write what came out to ``where/end.pt``."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from trainloop import AbstractCallback, TrainLoop, TTBasicModel
    from trainloop.callbacks import ModelCheckpoint
    from trainloop.distributed import get_rank

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> Any:
            if place == "getitem" and get_rank() == on_rank and index % 7 == at:
                act(what)
            generator = torch.Generator().manual_seed(index)
            time.sleep(0.002)
            return torch.randn(6, generator=generator) + 0.1 * torch.randn(6), index % 3

    class Net(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
            )

        def forward(self, x: Any) -> Any:
            return self.layers(x)

        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            if place == "get_loss" and get_rank() == on_rank and self.training:
                act(what)
            return super().get_loss(batch_data, criterion, device)

    def hook(name: str) -> Any:
        def run(self: Any, *args: Any) -> Any:
            if place == name and get_rank() == on_rank and self.train_loop_obj.global_step >= first:
                act(what)
            return {} if name == "state_dict" else None

        return run

    first = 0 if place == "on_train_begin" else at % 3  # step
    names = [name for name in PLACES if name.startswith("on_") or name == "state_dict"]
    Strikes = type("Strikes", (AbstractCallback,), {name: hook(name) for name in names})

    class Tells(AbstractCallback):
        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            if place == "coming back" and "RANK" not in os.environ:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_begin(self) -> None:
            Path(where, f"rank-{get_rank()}").write_text(str(os.getpid()))

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = 6 // ranks
    tl = TrainLoop(
        model,
        DataLoader(Rows(), batch, shuffle=True, num_workers=workers),
        DataLoader(Rows(), batch),
        None,
        optimizer,
        nn.CrossEntropyLoss(),
        gpu_mode="ddp" if ranks > 1 else "single",
        accelerator="cpu",
        devices=ranks,
        seed=3,
        timeout=TIMEOUT_S,
        progress_bar=False,
    )
    keeper = ModelCheckpoint(f"{where}/checkpoints", every_n_epochs=None, every_n_steps=1, keep=2)
    tl.fit(num_epochs=2, callbacks=[Tells("tells"), Strikes("strikes"), keeper], resume_from="last")
    Path(where, "returned").touch()
    torch.save([model.state_dict(), optimizer.state_dict(), tl.history.to_dict()], f"{where}/end.tmp")
    os.replace(f"{where}/end.tmp", f"{where}/end.pt")


# -- a trial -----------------------------------------------------------------------------------------------------------


class Job:
    """One start of the job, in a session of its own."""

    def __init__(self, where: Path, name: str, **spec: Any) -> None:
        self.where, self.name = where, name
        for path in where.glob("rank-*"):
            path.unlink()
        (where / "tmp").mkdir(exist_ok=True)
        environment = {**os.environ, MARK: str(where), "TMPDIR": str(where / "tmp"), "OMP_NUM_THREADS": "1"}
        with open(where / "output", "ab") as output:
            output.write(f"--- {spec}\n".encode())
            self.begin = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--job", json.dumps({"where": str(where), **spec})],
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def wait(self) -> str:
        """Its exit code as text, or ``hangs``."""
        try:
            return str(self.process.wait(PATIENCE_S))
        except subprocess.TimeoutExpired:
            return "hangs"

    def said(self) -> str:
        return (self.where / "output").read_bytes()[self.begin :].decode(errors="replace")

    def processes(self) -> dict[int, str]:
        """What lives of this trial: pid to command line."""
        found = {}
        mark = f"{MARK}={self.where}".encode()
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            try:
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def ranks(self) -> dict[int, int]:
        """Rank to pid, of those that have begun to train."""
        found = {}
        for path in self.where.glob("rank-*"):
            if text := path.read_text():
                found[int(path.name.partition("-")[2])] = int(text)
        return found

    def workers(self) -> list[int]:
        """Loaders' workers: forked by a process that trains, with its command line."""
        trains = set(self.ranks().values())
        found = []
        for pid in self.processes():
            try:
                parent = int(re.findall(r"PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[0])
            except (OSError, IndexError):
                continue
            if parent in trains and pid not in trains:
                found.append(pid)
        return found

    def left(self) -> list[str]:
        """What is left once it has ended, after a moment's patience; processes are then killed."""
        deadline = time.monotonic() + GONE_S
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in alive:
            _kill(pid, signal.SIGKILL)
        lines = [f"process {command[:80]}" for command in alive.values()]
        pids = {self.process.pid, *self.ranks().values()}
        for name in os.listdir("/dev/shm"):
            if any(name.startswith((f"sem.mp-{pid}-", f"torch_{pid}_")) for pid in pids):
                lines.append(f"shared memory {name}")
                os.unlink(f"/dev/shm/{name}")
        return lines


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Trial:
    """One disturbance of one training, and what was wrong about what followed."""

    def __init__(self, root: Path, number: int, seed: int, kind: str) -> None:
        self.rng = random.Random(f"{seed}-{number}")
        self.where = root / str(number)
        self.where.mkdir()
        self.kind = kind
        self.ranks = self.rng.choice([1, 2, 2, 3])
        self.workers = self.rng.choice([0, 0, 1, 2])
        self.what = ""
        self.early = False  # the last signal came before training began
        self.wrong: list[str] = []

    def run(self, control: dict[int, bytes]) -> None:
        getattr(self, f"_{self.kind}")()
        if not (self.where / "end.pt").exists():
            last = self._start("resumed")
            self._expect(last, last.wait(), "0")
        end = self.where / "end.pt"
        if not end.exists():
            self.wrong.append("never ended")
        elif self.ranks in control and digest(end) != control[self.ranks]:
            self.wrong.append("other bits")
        left = [path.name for path in (self.where / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
        left += [path.name for path in (self.where / "checkpoints").glob(".*.tmp")]
        self.wrong += [f"left: {name}" for name in left]

    def _start(self, name: str, **spec: Any) -> Job:
        return Job(self.where, name, ranks=self.ranks, workers=self.workers, **spec)

    def _expect(self, job: Job, outcome: str, *expected: str, says: str = "") -> None:
        if outcome not in expected:
            self.wrong.append(f"{job.name}: ended with {outcome}, not {' or '.join(expected)}")
        if outcome == "hangs":
            _kill(job.process.pid, signal.SIGKILL)
            job.process.wait()
        elif says and not re.search(says, job.said()):
            self.wrong.append(f"{job.name}: does not say {says!r}")
        self.wrong += job.left()

    def _control(self) -> None:
        self.what = "nothing"

    def _fault(self) -> None:
        """Something happens at one place of one rank: it is to blame."""
        rank, place = self.rng.randrange(self.ranks), self.rng.choice(PLACES)
        if place == "state_dict":
            rank = 0  # the others' is not asked for
        what = self.rng.choice(ACTS if self.ranks > 1 else ("raises", "SIGKILL", "SIGABRT", "exits"))
        if place == "getitem":
            self.workers = 0  # else it is the worker that it happens to
        self.what = f"{what} in {place}"
        job = self._start("struck", place=place, on_rank=rank, what=what, at=self.rng.randrange(7))
        outcome = job.wait()
        if self.ranks == 1:
            died = {"raises": "1", "exits": "3", "SIGKILL": "-9", "SIGABRT": "-6"}[what]
            self._expect(job, outcome, died)
            return
        who = f"rank {rank} of {self.ranks}"
        says = {
            "raises": f"WorkerFailedError: {who} raised LookupError",
            "exits": f"WorkerFailedError: {who} ended without an error, with exit code 3",
        }.get(what, f"WorkerFailedError: {who} was killed by signal {what}")
        if what.startswith("hangs"):
            says = f"(?s)WorkerFailedError: {who} hangs.*Python stack of rank {rank}:.*in act"
        self._expect(job, outcome, "1", says=says)

    def _signal(self) -> None:
        """A signal at any moment, to anybody."""
        number = self.rng.choice([*SIGNALS, *SIGNALS, "SIGKILL"])
        to = self.rng.choice(["caller", "rank", "worker", "group"])
        self.what = f"{number} to the {to}"
        job = self._start("struck")
        hit = self._strike(job, number, to)
        outcome = job.wait()
        self._expect(job, outcome, *self._documented(hit, number, to))

    def _documented(self, hit: bool, number: str, to: str) -> list[str]:
        """How a job may end after such a signal."""
        expected = ["0"]
        if hit:
            expected += [str(SIGNALS.get(number, -9)), "-2"] if number != "SIGKILL" else ["-9"]
            # Before fit and after it, Python's own handlers are there.
            if self.early or (self.where / "returned").exists():
                expected.append(f"-{int(getattr(signal, number))}")
            # A dead rank or worker is an error; a worker's SIGTERM that nobody else got ends the worker.
            if number == "SIGKILL" or to == "worker":
                expected.append("1")
        return list(dict.fromkeys(expected))

    def _storm(self) -> None:
        """Killed and started anew, again and again."""
        times = self.rng.randint(2, 4)
        self.what = f"{times} kills"
        for i in range(times):
            if (self.where / "end.pt").exists():
                return
            job = self._start(f"start {i}")
            number, to = (
                self.rng.choice(["SIGKILL", "SIGKILL", "SIGTERM"]),
                self.rng.choice(["caller", "rank", "group"]),
            )
            hit = self._strike(job, number, to)
            outcome = job.wait()
            self._expect(job, outcome, *self._documented(hit, number, to))

    def _strike(self, job: Job, number: str, to: str) -> bool:
        """Send a signal after a random time; whether there was anybody to send it to."""
        if self.rng.random() < 0.8:  # else while it starts
            while not job.ranks() and job.process.poll() is None:
                time.sleep(0.005)
        time.sleep(self.rng.random() * 1.5)
        value, self.early = getattr(signal, number), not job.ranks()
        if job.process.poll() is not None:
            return False
        if to == "group":
            os.killpg(job.process.pid, value)
            return True
        ranks = job.ranks() if self.ranks > 1 else {}
        chosen = {"rank": list(ranks.values()), "worker": job.workers()}.get(to, [])
        return _kill(self.rng.choice(sorted(chosen)) if chosen else job.process.pid, value)


def digest(path: Path) -> bytes:
    """The bits of all that came out."""
    import hashlib

    import torch

    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(torch.load(path, weights_only=False))
    return found.digest()


def soak(trials: int, seed: int, keep: bool = False) -> int:
    """Run them, print the table; how many went wrong."""
    root = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # short: sockets lie in it
    control: dict[int, bytes] = {}
    table: Counter[tuple[str, str]] = Counter()
    bad = 0
    draw = random.Random(seed)
    kinds = ["control"] * 3 + [draw.choice(["fault", "signal", "storm"]) for _ in range(trials)]
    for number, kind in enumerate(kinds):
        trial = Trial(root, number, seed, kind)
        if number < 3:
            trial.ranks = number + 1
        trial.run(control)
        if number < 3 and (trial.where / "end.pt").exists():
            control[trial.ranks] = digest(trial.where / "end.pt")
        outcome = "wrong" if trial.wrong else "right"
        table[f"{kind}, {trial.ranks} rank{'s' * (trial.ranks > 1)}", outcome] += 1
        what = f"{trial.what}; {trial.ranks} ranks, {trial.workers} workers"
        print(
            f"{number:4d} {kind:8s} {outcome}  {what}" + "".join(f"\n       {line}" for line in trial.wrong), flush=True
        )
        bad += bool(trial.wrong)
        if not trial.wrong and not keep:
            shutil.rmtree(trial.where)
    print(f"\n{'trials':24s} {'right':>6s} {'wrong':>6s}")
    for row in sorted({row for row, _ in table}):
        print(f"{row:24s} {table[row, 'right']:6d} {table[row, 'wrong']:6d}")
    print(f"{'all':24s} {len(kinds) - bad:6d} {bad:6d}")
    if bad or keep:
        print(f"outputs of what went wrong: {root}")
    else:
        shutil.rmtree(root)
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the folders of trials that went right, too")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job(**json.loads(arguments.job))
    else:
        sys.exit(bool(soak(arguments.trials, arguments.seed, arguments.keep)))
