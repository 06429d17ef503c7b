"""Short fits that are disturbed at random, and what has to hold afterwards: ``make soak ARGS='--trials 300 --seed 1'``.

A trial is one training (``soak_job.py``) with 1 to 4 CPU ranks that a disturbance strikes: an exception, a hang or a
death at one place of one rank, in its first start or as it resumes; a signal to the caller, to a rank, to a loader's
worker or to the whole group, at any moment from the start to the way back; a storm of kills, each followed by a new
start; or a disk that fills up (needs root). Then:

* the outcome is a documented one, and the right rank is named;
* resumed, the run ends with the bits of one that nobody disturbed (the control group);
* no process, no shared memory, no temporary file is left.

Prints a table, and exits with 1 where something was wrong. ``--results FILE`` keeps each trial's outcome there, so that
a run may be made in pieces (``--first``, ``--only``), and ``--report FILE`` writes the table of all of them.
"""

from __future__ import annotations

import argparse
import contextlib
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import soak_report
from soak_job import ACTS, PLACES

TIMEOUT_S = (
    6.0  # of the jobs' own collectives, at least; as long as undisturbed jobs take to start, where that is longer
)
PATIENCE_S = 400.0  # for a job to end; a starved machine starts three ranks in half a minute
GONE_S = 30.0  # for its processes to follow
MARK = "TRAINLOOP_SOAK"  # in the environment of all processes of a trial
SIGNALS = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 138}
MOST_RANKS = 4
JOB = Path(__file__).with_name("soak_job.py")

start_s: dict[int, float] = {}
"""By number of ranks: how long an undisturbed job took until it trained."""


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
                [sys.executable, str(JOB), json.dumps({"where": str(where), **spec})],
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

    def _keep_stack(self, pid: int) -> None:
        """What a process that should have ended is doing, beside its trial's output."""
        py_spy = Path(sys.executable).with_name("py-spy")
        if py_spy.exists():
            said = subprocess.run([py_spy, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True)
            (self.where / f"stack-{pid}").write_text(said.stdout + said.stderr)

    def left(self) -> list[str]:
        """What is left once it has ended, after a moment's patience; processes are then killed."""
        deadline = time.monotonic() + GONE_S
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        lines = [f"process {command[:80]}" for command in alive.values()]
        for pid in alive:
            self._keep_stack(pid)
            _kill(pid, signal.SIGKILL)
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
        self.ranks = self.rng.choice([1, 2, 2, 3, 4])
        self.workers = self.rng.choice([0, 0, 1, 2])
        self.what = ""
        self.early = False  # the last signal came before training began
        self.wrong: list[str] = []
        self.last: Job | None = None

    def run(self, control: dict[int, bytes]) -> None:
        getattr(self, f"_{self.kind.replace(' ', '_')}")()
        if not (self.where / "end.pt").exists():
            last = self._start("resumed")
            self._expect(last, last.wait(), "0")
        end = self.where / "end.pt"
        if not end.exists():
            self.wrong.append("never ended")
        elif self.ranks in control and digest(end) != control[self.ranks]:
            self.wrong.append("other bits")
        if self.last is not None and self.last.process.returncode < 0:
            # It was killed after its work was done, when signals are the program's own affair again: the next launch
            # on this machine removes its folder.
            clean = "from trainloop._support.scratch import remove_dead; remove_dead()"
            environment = {**os.environ, "TMPDIR": str(self.where / "tmp")}
            subprocess.run([sys.executable, "-c", clean], env=environment, check=True)
        left = [path for path in (self.where / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
        self.wrong += [f"left: {path.name}" for path in left]
        self._left_files(self.where / "checkpoints")

    def _left_files(self, checkpoints: Path) -> None:
        self.wrong += [f"left: {path.name}" for path in checkpoints.glob(".*.tmp")]

    def _start(self, name: str, **spec: Any) -> Job:
        timeout = max([TIMEOUT_S, *start_s.values()]) if self.kind != "control" else 300.0
        self.last = Job(self.where, name, ranks=self.ranks, workers=self.workers, timeout=timeout, **spec)
        return self.last

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
        begin = time.monotonic()
        job = self._start("undisturbed")
        while not job.ranks() and job.process.poll() is None:
            time.sleep(0.01)
        start_s[self.ranks] = time.monotonic() - begin
        self._expect(job, job.wait(), "0")

    def _fault(self) -> None:
        """Something happens at one place of one rank: it is to blame."""
        rank, place = self.rng.randrange(self.ranks), self.rng.choice(PLACES)
        if place in ("state_dict", "on_log"):
            rank = 0  # the others' is not asked for
        what = self.rng.choice(ACTS if self.ranks > 1 else ("raises", "SIGKILL", "SIGABRT", "exits"))
        if place == "getitem":
            self.workers = 0  # else it is the worker that it happens to
        self.what = f"{what} in {place}"
        if place == "load_state_dict" or self.rng.random() < 0.3:
            self.what += ", on resuming"
            killed = self._start("killed", place="on_batch_end", what="SIGKILL", at=2)
            self._expect(killed, killed.wait(), "1" if self.ranks > 1 else "-9")
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
        if self.ranks > 1 and self.rng.random() < 0.15:
            self.what = f"{number} to the caller while state comes back"
            job = self._start("struck", place="coming back", what=number)
            self._expect(job, job.wait(), *self._documented(True, number, "caller"))
            return
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

    def _full_disk(self) -> None:
        """The checkpoints' file system fills up in training, and there is room again for the next start."""
        self.what = "nothing but"
        checkpoints = self.where / "checkpoints"
        checkpoints.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(checkpoints)], check=True)
        try:
            job = self._start("struck")
            while not job.ranks() and job.process.poll() is None:
                time.sleep(0.005)
            time.sleep(self.rng.random())
            filler = checkpoints / "filler"
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            number, to = self.rng.choice(["", *SIGNALS, "SIGKILL"]), self.rng.choice(["caller", "rank", "group"])
            expected = ["0"]
            if number:
                self.what = f"{number} to the {to} and"
                expected = self._documented(self._strike(job, number, to), number, to)
            self.what += " a full disk"
            self._expect(job, job.wait(), *expected)
            filler.unlink()
            if not (self.where / "end.pt").exists():
                last = self._start("resumed")
                self._expect(last, last.wait(), "0")
            self._left_files(checkpoints)
        finally:
            subprocess.run(["umount", "--lazy", str(checkpoints)], check=True)

    def _strike(self, job: Job, number: str, to: str) -> bool:
        """Send a signal after a random time; whether there was anybody to send it to."""
        if self.rng.random() < 0.8:
            while not job.ranks() and job.process.poll() is None:
                time.sleep(0.005)
            time.sleep(self.rng.random() * 1.5)
        else:  # while it starts
            time.sleep(self.rng.random() * start_s.get(self.ranks, 3.0))
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


def kinds(trials: int, seed: int) -> list[str]:
    """Of each trial; the first ones are of the control group, one for each number of ranks."""
    draw = random.Random(seed)
    weighted = ["fault"] * 4 + ["signal"] * 4 + ["storm"] * 3 + ["full disk"] * _can_mount()
    return ["control"] * MOST_RANKS + [draw.choice(weighted) for _ in range(trials)]


def _can_mount() -> bool:
    """Whether file systems can be mounted that this process and its children alone see; if so, from now on."""
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(new_mounts) == 0 and libc.mount(b"none", b"/", None, private | recursive, None) == 0


def soak(arguments: argparse.Namespace) -> int:
    """Run them, print the table; how many went wrong."""
    root = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # short: sockets lie in it
    control: dict[int, bytes] = {}
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=JOB.parent)
    drawn = kinds(arguments.trials, arguments.seed)
    results: list[dict[str, Any]] = []

    def one(number: int) -> None:
        trial = Trial(root, number, arguments.seed, drawn[number])
        if number < MOST_RANKS:
            trial.ranks = number + 1
        begin = time.monotonic()
        trial.run(control)
        if number < MOST_RANKS and (trial.where / "end.pt").exists():
            control[trial.ranks] = digest(trial.where / "end.pt")
        result = {
            "number": number, "kind": trial.kind, "ranks": trial.ranks, "workers": trial.workers, "what": trial.what,
            "wrong": trial.wrong, "seconds": round(time.monotonic() - begin, 1), "seed": arguments.seed,
            "commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        results.append(result)
        if arguments.results:
            with open(arguments.results, "a") as file:
                file.write(json.dumps(result) + "\n")
        text = f"{number:4d} {trial.kind:9s} {'wrong' if trial.wrong else 'right'}  {trial.what}; {trial.ranks} ranks, "
        print(f"{text}{trial.workers} workers" + "".join(f"\n       {line}" for line in trial.wrong), flush=True)
        if not trial.wrong and not arguments.keep:
            shutil.rmtree(trial.where)

    for number in range(MOST_RANKS):
        one(number)
    chosen = [int(part) for part in arguments.only.split(",")] if arguments.only else range(len(drawn))
    chosen = [number for number in chosen if number >= max(arguments.first, MOST_RANKS)]
    with ThreadPoolExecutor(arguments.together) as pool:
        list(pool.map(one, chosen))
    bad = sum(bool(result["wrong"]) for result in results)
    print("\n" + "\n".join(soak_report.table(results)))
    if bad or arguments.keep:
        print(f"outputs of what went wrong: {root}")
    else:
        shutil.rmtree(root)
    if arguments.report:
        kept = [json.loads(line) for line in Path(arguments.results).read_text().splitlines()]
        Path(arguments.report).write_text(soak_report.page(kept))
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=1, help="trials at the same time")
    parser.add_argument("--first", type=int, default=0, help="number of the first one; the controls always run")
    parser.add_argument("--only", default="", help="numbers, as 17,23")
    parser.add_argument("--keep", action="store_true", help="keep the folders of trials that went right, too")
    parser.add_argument("--results", help="append each outcome to this file, a line of JSON each")
    parser.add_argument("--report", help="write the table of all in the results' file to this one")
    given = parser.parse_args()
    if given.report and not given.results:
        parser.error("--report tells of what is in the file of --results: give that, too")
    sys.exit(bool(soak(given)))
