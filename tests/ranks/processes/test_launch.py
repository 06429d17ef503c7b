"""Starting ranks and joining: what they are, what they return, what the caller keeps."""

from __future__ import annotations

import ast
import asyncio
import atexit
import contextlib
import ctypes
import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from kit.programs import run_script
from kit.ranks import run_ranks

from trainloop._launch import join, launch, rank_from_launcher
from trainloop._launch.joining import first_host, rendezvous_point
from trainloop._launch.script import main_guard
from trainloop._processes.fork_server import METHOD_VARIABLE
from trainloop._support.stopping import StopAgreement
from trainloop.distributed import Rank
from trainloop.errors import ConfigurationError, WorkerFailedError

# -- ranks that launch started -----------------------------------------------------------------------------------------


class Weights:
    """Something of a user's, with a tensor in it."""

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t


def listening_addresses() -> list[str]:
    """Addresses that this process, its parent and all its children listen on, as the kernel writes them."""
    parent = psutil.Process().parent()
    assert parent is not None
    inodes = set()
    for process in [parent, *parent.children(recursive=True)]:
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def facts(weights: Weights, counter: torch.Tensor, value: Any, scale: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    before = weights.t.sum().item()
    weights.t += rank + 1  # this rank's own
    dist.barrier()
    total = torch.ones(1) * weights.t[0]
    dist.all_reduce(total)
    counter[rank] = rank + 5  # in memory that the caller shares on purpose
    with value.get_lock():
        value.value += 1
    dist.barrier()
    return {
        "rank": (rank, dist.get_world_size()),
        "environment": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
        "threads": torch.get_num_threads(),
        "sum before": before,
        "total": scale(total.item()),
        "listening": listening_addresses(),
        "joined": rank_from_launcher(),
        "backend": dist.get_backend(),
        "main": sys.modules["__main__"].__dict__.get("pytest"),
        "signals ignored": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "weights": weights,
        # What libraries want at the end of the server, such as to remove its temporary folders.
        "finalizers": {f.peek()[1].__name__ for f in list(weakref.finalize._registry) if f.atexit},  # type: ignore[attr-defined]
    }


def test_what_a_rank_is_and_sees(tmp_path: Path, may_leave: Callable[..., None]) -> None:
    may_leave("/dev/shm/pym-")  # multiprocessing keeps the memory of shared values for the next ones
    weights = Weights(torch.zeros(100_000))
    counter = torch.zeros(2).share_memory_()
    value = multiprocessing.get_context("spawn").Value("i", 0)
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[index]
    factor = 10
    zero, one = run_ranks(facts, 2, weights, counter, value, lambda x: factor * x, folder=tmp_path)
    assert [zero["rank"], one["rank"]] == [(0, 2), (1, 2)]
    assert one["environment"] == ["1", "1", "2", "2"]
    assert {fact["threads"] for fact in (zero, one)} == {1}
    assert {fact["sum before"] for fact in (zero, one)} == {0.0}
    assert {fact["total"] for fact in (zero, one)} == {30.0}  # ones and twos, times ten
    assert one["joined"] is None
    assert one["backend"] == "gloo"
    assert one["main"] is None  # the script is not run again
    assert not one["signals ignored"]
    assert "_del_library" not in one["finalizers"] or os.environ[METHOD_VARIABLE] == "spawn"
    assert type(one["weights"]) is Weights
    assert one["weights"].t[0] == 2
    # Gloo listens, on loopback only.
    assert zero["listening"]
    assert set(zero["listening"]) <= {"0100007F", "00000000000000000000000001000000"}
    # The caller's own.
    assert weights.t.sum() == 0
    assert counter.tolist() == [0, 0]  # a rank's is its own
    assert value.value == 2
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])


def one_fact(stop: StopAgreement) -> Any:
    return os.getpid(), dist.get_world_size()


@pytest.mark.long
def test_from_a_thread_and_a_running_event_loop() -> None:
    async def cell() -> Any:
        return launch(one_fact, ranks_per_node=1)

    outcomes: list[Any] = [asyncio.run(cell())]
    thread = threading.Thread(target=lambda: outcomes.append(launch(one_fact, ranks_per_node=1)))
    thread.start()
    thread.join()
    assert [world_size for _, world_size in outcomes] == [1, 1]
    assert os.getpid() not in {pid for pid, _ in outcomes}


def nested(stop: StopAgreement) -> None:
    launch(one_fact, ranks_per_node=1)


@pytest.mark.long
def test_ranks_start_no_ranks() -> None:
    with pytest.raises(Exception, match=r"a rank can't start other ranks. Inside a rank, call fit\(\) with gpu"):
        launch(nested, ranks_per_node=1)


class OtherKey(bytes):
    """A key of another library's processes, such as Celery's: it can't be sent."""

    def __reduce__(self) -> Any:
        raise TypeError


def is_daemon(stop: StopAgreement | None) -> bool:
    return multiprocessing.current_process().daemon


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_daemon_starts_ranks_that_are_none(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = OtherKey(multiprocessing.current_process().authkey)
    monkeypatch.setattr(multiprocessing.current_process(), "daemon", True)
    monkeypatch.setitem(multiprocessing.current_process()._config, "authkey", key)  # type: ignore[attr-defined]
    assert launch(is_daemon, ranks_per_node=1, start_method=method) is False  # type: ignore[arg-type]
    assert is_daemon(None)
    assert multiprocessing.current_process().authkey is key


def resources_in_use() -> tuple[int, int, int]:
    process = psutil.Process()
    return process.num_fds(), process.num_threads(), process.memory_info().rss >> 20


@pytest.mark.slow
def test_twenty_launches_leave_no_more_than_one() -> None:
    data = torch.ones(1 << 22)
    work = functools.partial(_ignore, data)
    used = []
    for _ in range(20):
        launch(work, ranks_per_node=1)
        used.append(resources_in_use())
    descriptors, threads, mib = zip(*used, strict=True)
    assert descriptors[-1] == descriptors[0]
    assert threads[-1] == threads[0]
    assert mib[-1] <= mib[3] + 20, mib


def _ignore(data: Any, stop: StopAgreement) -> None:
    assert data is not None


def proportional_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def read_all(data: Any, caller: int, stop: StopAgreement) -> float:
    """Memory of the caller, the ranks and their parent, each page counted once, after both ranks have read all data."""
    data = data if isinstance(data, list) else [data]
    for step in range(50):
        for part in data:
            torch.as_tensor(part[step::50]).sum()
    dist.barrier()
    parent = psutil.Process().parent()  # the fork server, or the caller
    assert parent is not None
    used = sum(map(proportional_mib, {caller, parent.pid, *(process.pid for process in parent.children())}))
    dist.barrier()
    return used


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_a_dataset_is_held_once_by_all(kind: str) -> None:
    size_mib = 256
    data: Any = torch.ones(size_mib << 18) if kind == "tensor" else np.ones(size_mib << 18, np.float32)
    if kind == "list":
        data = list(data.reshape(64, -1))
    tiny = launch(functools.partial(read_all, np.ones(100), os.getpid()), ranks_per_node=2) - size_mib
    assert (launch(functools.partial(read_all, data, os.getpid()), ranks_per_node=2) - tiny) / size_mib < 1.15


LIMITED = """
import resource, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from trainloop._launch import launch

def work(data, stop):
    sums = [x.sum().item() for (x,) in DataLoader(TensorDataset(data), batch_size=64, num_workers=2)]
    return len(sums), sum(sums)

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    import functools
    print(launch(functools.partial(work, torch.ones(64 * 400, 64)), ranks_per_node=2))
"""


@pytest.mark.hosts
def test_with_256_descriptors_and_64_mib_of_shared_memory(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("making a mount namespace needs root")
    script = tmp_path / "script.py"
    script.write_text(LIMITED)
    command = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} {script}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == str((400, 64.0 * 400 * 64)), done.stderr


def prints(stop: StopAgreement) -> None:
    # In one piece, so that the other rank's can't be within it, even with PYTHONUNBUFFERED.
    sys.stdout.write(f"out {dist.get_rank()}\n")
    sys.stderr.write(f"err {dist.get_rank()}\n")
    sys.stderr.write("no end of line")


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("shown", "out"), [("0", {"out 0"}), ("1", {"out 0", "[rank 1] out 1"})])
def test_output_of_ranks(
    shown: str, out: set[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINLOOP_ALL_RANKS_OUTPUT", shown)
    launch(prints, ranks_per_node=2)
    stdout, stderr = capfd.readouterr()
    assert set(stdout.splitlines()) == out
    assert "[rank 1] err 1\n" in stderr
    assert "[rank 1] no end of line\n" in stderr
    assert "err 0\n" in stderr
    assert "[rank 0]" not in stderr


class Held:
    """Garbage that only the collector finds."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.itself, self.note = self, note

    def __del__(self) -> None:
        self.note("deleted")


def leaves_all_to_the_end(notes: Path, raises: bool, stop: StopAgreement) -> None:
    rank = dist.get_rank()

    def note(what: str) -> None:
        (notes / f"{what}-{rank}").touch()

    atexit.register(note, "atexit")
    threading.Thread(target=lambda: (time.sleep(0.5), note("thread"))).start()
    held = Held(note)  # noqa: F841  # a traceback's frame holds it, where there is one
    if rank == 0:
        sys.stdout.write("python ")
        sys.stdout.flush()
        ctypes.CDLL(None).printf(b"native")
    if raises:
        raise ValueError("on purpose")


@pytest.mark.long(but=1)
@pytest.mark.parametrize("how", ["return", "raise"])
def test_the_end_of_a_rank_is_orderly(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    with pytest.raises(WorkerFailedError, match="on purpose") if how == "raise" else contextlib.nullcontext():
        launch(functools.partial(leaves_all_to_the_end, notes, how == "raise"), ranks_per_node=2)
    assert capfd.readouterr().out == "python native"
    wanted = {f"{what}-{rank}" for what in ("atexit", "thread", "deleted") for rank in range(2)}
    assert {path.name for path in notes.iterdir()} == wanted


# -- the guard ---------------------------------------------------------------------------------------------------------

GUARDS = {
    "the usual one": ("if __name__ == '__main__':\n    HERE", True),
    "turned around": ("if '__main__' == __name__:\n    HERE", True),
    "with more to it": ("if __name__ == '__main__' and DEBUG:\n    HERE", True),
    "nested": ("if __name__ == '__main__':\n    for i in range(3):\n        HERE", True),
    "the other branch": ("if __name__ != '__main__':\n    pass\nelse:\n    HERE", True),
    "leaves early": ("if __name__ != '__main__':\n    raise SystemExit\nHERE", True),
    "none": ("import torch\nHERE", False),
    "in a loop": ("for i in range(2):\n    if __name__ == '__main__':\n        HERE", True),
    "in a loop, beside the guard": (
        "for i in range(2):\n    if __name__ == '__main__':\n        pass\n    HERE",
        False,
    ),
    "in a try": ("try:\n    if __name__ == '__main__':\n        HERE\nfinally:\n    pass", True),
    "a conditional expression": ("HERE if __name__ == '__main__' else None", True),
    "the other value of a conditional expression": ("(None if __name__ == '__main__' else\n HERE)", False),
    "and": ("__name__ == '__main__' and HERE", True),
    "after the guard": ("if __name__ == '__main__':\n    pass\nHERE", False),
    "its else": ("if __name__ == '__main__':\n    pass\nelse:\n    HERE", False),
    "about something else": ("if DEBUG == '__main__':\n    HERE", False),
    "one of two": ("if DEBUG or __name__ == '__main__':\n    HERE", False),
    "a chain": ("if '' < __name__ == '__main__':\n    HERE", False),
}


@pytest.mark.parametrize("name", GUARDS)
def test_what_is_a_guard(name: str) -> None:
    text, guarded = GUARDS[name]
    line = next(i for i, part in enumerate(text.splitlines(), start=1) if "HERE" in part)
    assert main_guard._is_guarded(ast.parse(text), line) == guarded


UNGUARDED = """
from trainloop._launch import launch
def work(stop):
    pass
def main():
    launch(work, ranks_per_node=2)
main()
"""


@pytest.mark.long
def test_a_script_without_a_guard_is_told_at_once(tmp_path: Path) -> None:
    done = run_script(tmp_path, UNGUARDED)
    assert done.returncode == 1
    assert "script.py, line 7, starts processes, but is not inside an `if __name__ == '__main__':` block" in done.stderr
    assert "    if __name__ == '__main__':\n        main()" in done.stderr


@pytest.mark.parametrize("edit", ["# a comment\n{}", "def more():\n    pass\n{}", "{}\nmain()\n"])
def test_the_lines_of_a_script_that_was_edited_since_it_started_say_nothing(edit: str) -> None:
    running = compile(UNGUARDED, "script.py", "exec")
    assert main_guard._is_code_of(running, UNGUARDED)
    assert not main_guard._is_code_of(running, edit.format(UNGUARDED))


GUARDED_AND_EDITED = """
from pathlib import Path
from trainloop._launch.script.main_guard import check_main_guard
if __name__ == '__main__':
    text = Path(__file__).read_text()
    Path(__file__).write_text('pass\\n' * 9 + text)
    check_main_guard()
    print('checked')
"""


@pytest.mark.long
def test_a_script_may_be_edited_while_it_runs(tmp_path: Path) -> None:
    done = run_script(tmp_path, GUARDED_AND_EDITED)
    assert (done.returncode, done.stdout) == (0, "checked\n"), done.stderr


def test_a_process_that_imports_the_script_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigurationError, match="The script starts processes, but is not inside"):
        launch(one_fact, ranks_per_node=1)


# -- joining -----------------------------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2"}
JOINED: dict[str, tuple[dict[str, str], Rank | None]] = {
    "torchrun": ({**TORCHRUN, "MASTER_PORT": "1", "GROUP_RANK": "1"}, Rank(5, 8, 1, 4, 1, 2)),
    "by hand": ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, Rank(1, 2, 1, 2, 0, 1)),
    "no rendezvous point": (TORCHRUN, None),
    "nothing": ({}, None),
    "Slurm": ({**SLURM, "SLURM_TASKS_PER_NODE": "2,3"}, Rank(3, 5, 1, 3, 1, 2)),
    "Slurm, short form": (
        {**SLURM, "SLURM_NTASKS": "8", "SLURM_NNODES": "4", "SLURM_TASKS_PER_NODE": "2(x4)"},
        Rank(3, 8, 1, 2, 1, 4),
    ),
    "Slurm, few variables": ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}, Rank(1, 2, 1, 2, 0, 1)),
    "one task": ({**SLURM, "SLURM_NTASKS": "1"}, None),
    "interactive shell": ({**SLURM, "SLURM_JOB_NAME": "bash"}, None),
    "a batch script without srun": ({**SLURM, "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train.sh"}, None),
    "srun": ({**SLURM, "SLURM_JOB_NAME": "train.sh", "SLURM_STEP_ID": "0"}, Rank(3, 5, 1, 3, 1, 2)),
    "torchrun inside Slurm": ({**SLURM, **TORCHRUN, "MASTER_PORT": "1"}, Rank(5, 8, 1, 4, 1, 2)),
}


@pytest.mark.parametrize("name", JOINED)
def test_which_rank_started_this_process(name: str) -> None:
    environ, rank = JOINED[name]
    assert rank_from_launcher(environ) == rank


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK='x' in the environment"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "according to the environment .*, this process is rank 2 of 2, but a rank must be from 0 to 1",
        ),
    ],
)
def test_variables_that_contradict_each_other(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rank_from_launcher(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-09,12],login1", "gpu07"), ("a,b", "a"), ("node1", "node1"), ("n[1,3]-ib", "n1-ib"), ("", "")],
)
def test_the_first_host_of_a_slurm_job(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_where_the_tasks_of_a_slurm_job_meet() -> None:
    job = {"SLURM_NODELIST": "gpu[07-09]", "SLURM_JOB_ID": "123456"}
    point = rendezvous_point(job)
    assert point == rendezvous_point(dict(job))
    assert point.startswith("tcp://gpu07:")
    assert 15000 <= int(point.rpartition(":")[2]) < 35000
    assert rendezvous_point({**job, "SLURM_STEP_ID": "1"}) != point
    assert rendezvous_point({**job, "MASTER_ADDR": "x", "MASTER_PORT": "7"}) == "tcp://x:7"
    assert rendezvous_point({}).startswith("tcp://127.0.0.1:")


def test_joining_where_nobody_started_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"join\(\) was called outside of torchrun and Slurm"):
        join(one_fact)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"local rank 1, but only these devices were chosen: cpu"):
        join(one_fact, devices=[torch.device("cpu")])


JOINS = """
import os, sys, time
import torch, torch.distributed as dist
from trainloop._launch import join, rank_from_launcher

def work(stop):
    t = torch.ones(1) * dist.get_rank()
    dist.all_reduce(t)
    for step in range(1000):
        if step == 3 and dist.get_rank() == 1:
            stop.request(1)
        if reasons := stop.reached():
            break
        dist.barrier()
    return t.item(), step, reasons

if __name__ == "__main__":
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        sys.exit(5)  # the first attempt fails
    first, second = join(work, timeout_s=60), join(work, timeout_s=60)
    assert first[::2] == second[::2], (first, second)
    # At the step of the request, or at the next, if another rank had passed that already.
    assert {first[1], second[1]} <= {3, 4}, (first, second)
    print("JOINED", *first, dist.is_initialized(), flush=True)
"""


@pytest.mark.slow
def test_torchrun_restarts_and_slurm_tasks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(JOINS))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("JOINED")]
    assert len(set(lines)) == 1, done.stderr
    assert len(lines) == 2
    assert lines[0].endswith("1 False")
    tasks = []
    for rank in range(2):
        slurm = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
        job = {"SLURM_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
        environ = {**os.environ, **slurm, **job}
        tasks.append(subprocess.Popen([sys.executable, str(script)], env=environ, stdout=subprocess.PIPE, text=True))
    assert len({task.communicate()[0] for task in tasks}) == 1
    assert [task.returncode for task in tasks] == [0, 0]
