"""Ranks that raise, exit, are killed, hang: what the caller is told, and what is left afterwards."""

from __future__ import annotations

import ctypes
import functools
import json
import linecache
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from kit.programs import wait_until
from torch.utils.data import DataLoader, Dataset

from trainloop._launch import failures, launch
from trainloop._launch.failures import (
    Failure,
    failure_of,
    first_failure,
    hint,
    read_record,
    read_text,
    worker_failed_error,
    write_record,
)
from trainloop._processes import fork_server as processes
from trainloop._support.stopping import StopAgreement
from trainloop.errors import WorkerFailedError

ENDS_WITHIN_S = 10.0


# -- faults: each runs on one rank, in a step of its own ---------------------------------------------------------------


def raises(rank: int) -> None:
    raise ValueError(f"bad batch on rank {rank}")


def exits_with_3(rank: int) -> None:
    os._exit(3)


def exits_early(rank: int) -> None:
    os._exit(0)


def leaves_by_sys_exit(rank: int) -> None:
    sys.exit(4)


def is_killed(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(rank: int) -> None:
    ctypes.string_at(0)


def exceeds_memory_limit(rank: int) -> None:
    limit = psutil.Process().memory_info().vms + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(1 << 30, dtype=torch.uint8).fill_(1)


def exceeds_memory_limit_in_numpy(rank: int) -> None:
    limit = psutil.Process().memory_info().vms + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    np.ones(1 << 30, dtype=np.uint8)


class KillsItsWorker(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class RaisesInWorker(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("sample 5 is missing")
        return index


def loses_its_worker(rank: int) -> None:
    list(DataLoader(KillsItsWorker(), num_workers=1))


def has_a_worker_that_raises(rank: int) -> None:
    list(DataLoader(RaisesInWorker(), num_workers=1))


def keeps_a_worker_and_is_killed(rank: int) -> None:
    iterator = iter(DataLoader(RaisesInWorker(), num_workers=1, batch_size=1, prefetch_factor=1))
    next(iterator)
    os.kill(os.getpid(), signal.SIGKILL)


# fault, rank, (exit code, what the message holds, what the traceback holds)
FAULTS: list[tuple[Callable[[int], None], int, int, str, str]] = [
    (
        raises,
        1,
        1,
        r"rank 1 of 2 raised ValueError: bad batch on rank 1 .*; rank 0 was ended because of it\.",
        "raise Val",
    ),
    (
        raises,
        0,
        1,
        r"rank 0 of 2 raised ValueError: bad batch on rank 0 .*; rank 1 was ended because of it\.",
        "raise Val",
    ),
    (exits_with_3, 1, 3, r"rank 1 of 2 ended without an error, with exit code 3, before its work was done; rank 0", ""),
    (exits_early, 1, 0, r"rank 1 of 2 ended without an error, with exit code 0, before its work was done; rank 0", ""),
    (leaves_by_sys_exit, 0, 4, r"rank 0 of 2 ended itself with exit code 4 \(SystemExit", "sys.exit(4)"),
    (is_killed, 0, -9, r"rank 0 of 2 was killed by signal SIGKILL; rank 1 .*\n.*memory", ""),
    (is_killed, 1, -9, r"rank 1 of 2 was killed by signal SIGKILL; rank 0 .*\n.*memory", ""),
    (
        crashes,
        1,
        -11,
        r"(?s)rank 1 of 2 was killed by signal SIGSEGV.*native code.*Python stack of rank 1:.*in crashes",
        "",
    ),
    (exceeds_memory_limit, 1, 1, r"(?s)rank 1 of 2 raised RuntimeError.*\nHint: memory ran out", "fill_(1)"),
    (exceeds_memory_limit_in_numpy, 0, 1, r"(?s)rank 0 of 2 raised .*MemoryError.*\nHint: memory ran out", "np.ones"),
    (
        loses_its_worker,
        1,
        1,
        r"(?s)rank 1 of 2 raised .*\nHint: a DataLoader worker",
        "dataloader.py",
    ),
    (has_a_worker_that_raises, 0, 1, r"(?s)rank 0 of 2 raised KeyError: ", "sample 5 is missing"),
    (keeps_a_worker_and_is_killed, 1, -9, r"rank 1 of 2 was killed by signal SIGKILL", ""),
]


def train_until_fault(stop: StopAgreement, *, fault: Callable[[int], None], on_rank: int, folder: str) -> None:
    """Steps that exchange, as training does; at a random one of them, something happens on one rank."""
    rank = dist.get_rank()
    at_step = int.from_bytes(os.urandom(1), "big") % 20
    try:
        for step in range(1_000_000):
            dist.all_reduce(torch.ones(100))
            if rank == on_rank and step == at_step:
                Path(folder, "failed-at").write_text(str(time.time()))
                fault(rank)
            stop.reached()
    finally:
        Path(folder, f"finally-{rank}").touch()


def started_processes(pid: int) -> set[int]:
    """Processes that belong to a launch of process ``pid``, its ranks' orphans included."""
    found = set()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            order = json.loads(environment.get(processes.SERVER_VARIABLE, "{}"))
            forked = order.get("caller") == pid and process.pid != server
            if forked or environment.get("TRAINLOOP_LAUNCH", "").startswith(f"{pid}-"):
                found.add(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def fault_cases() -> Iterator[Any]:
    """Each fault once, some of them by default; and each 20 times."""
    for fault, on_rank, *expected in FAULTS:
        name = f"{fault.__name__} on rank {on_rank}"
        always = (fault, on_rank) in [(raises, 1), (is_killed, 0), (exits_with_3, 1)]
        yield pytest.param(fault, on_rank, *expected, 1, id=name, marks=[] if always else pytest.mark.slow)
        yield pytest.param(fault, on_rank, *expected, 20, id=f"{name}, 20 times", marks=pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize(("fault", "on_rank", "exitcode", "message", "traceback", "repeats"), list(fault_cases()))
def test_the_first_failure_ends_all(
    fault: Callable[[int], None],
    on_rank: int,
    exitcode: int,
    message: str,
    traceback: str,
    repeats: int,
    tmp_path: Path,
) -> None:
    for _ in range(repeats):
        work = functools.partial(train_until_fault, fault=fault, on_rank=on_rank, folder=str(tmp_path))
        with pytest.raises(WorkerFailedError) as caught:
            launch(work, ranks_per_node=2, timeout_s=60)
        ended_s = time.time() - float((tmp_path / "failed-at").read_text())
        error = caught.value
        assert re.search(message, str(error)), str(error)
        assert (error.rank, error.exitcode) == (on_rank, exitcode)
        assert traceback in error.traceback
        if "worker" not in fault.__name__:  # there it counts from the start of the workers
            assert ended_s < ENDS_WITHIN_S
        assert (tmp_path / f"finally-{1 - on_rank}").exists()
        assert not started_processes(os.getpid())
        for file in tmp_path.iterdir():
            file.unlink()


# -- hangs -------------------------------------------------------------------------------------------------------------


def waits_forever() -> None:
    threading.Event().wait()


def one_hangs(stop: StopAgreement) -> None:
    if dist.get_rank() == 1:
        waits_forever()
    dist.all_reduce(torch.ones(1))


def one_collective_too_many(stop: StopAgreement) -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(1), src=1)  # rank 1 does not know
    else:
        waits_forever()


def one_is_stopped(stop: StopAgreement) -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def one_misses_the_boundary(stop: StopAgreement) -> None:
    stop.reached()
    if dist.get_rank() == 1:
        waits_forever()
    stop.request(1)
    stop.reached()


HANGS: dict[str, tuple[Callable[[StopAgreement], None], str]] = {
    "outside of collectives": (one_hangs, "in waits_forever"),
    "a collective on one rank only": (one_collective_too_many, "in waits_forever"),
    "a stopped process": (one_is_stopped, "stopped"),
    "at a step boundary": (one_misses_the_boundary, "in waits_forever"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [n if n == "a collective on one rank only" else pytest.param(n, marks=pytest.mark.slow) for n in HANGS]
)
def test_a_hang_shows_who_waits_for_whom(name: str) -> None:
    function, stack = HANGS[name]
    timeout_s = 3.0
    started = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        launch(function, ranks_per_node=2, timeout_s=timeout_s)
    message = str(caught.value)
    assert re.search(r"rank 1 of 2 hangs: rank 0 waited 3 s for it", message), message
    assert (caught.value.rank, caught.value.exitcode) == (1, None)
    waiting, hanging = message.split("Python stack of rank 0:")[1].split("Python stack of rank 1:")
    assert f"in {function.__name__}" in waiting
    assert stack in hanging, message
    assert "TrainLoop(timeout=seconds)" in message
    assert time.monotonic() - started < timeout_s + 60
    assert not started_processes(os.getpid())


def one_hangs_and_one_is_slow_to_tell(stop: StopAgreement) -> None:
    if dist.get_rank() == 1:
        waits_forever()
    if dist.get_rank() == 2:
        lines = linecache.getlines  # of which the text of a traceback is made

        def slowly(*args: Any) -> list[str]:
            time.sleep(1.5)
            return lines(*args)

        linecache.getlines = slowly
    dist.all_reduce(torch.ones(1))


@pytest.mark.long
def test_a_rank_that_is_slow_to_tell_its_error_does_not_hang() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        launch(one_hangs_and_one_is_slow_to_tell, ranks_per_node=3, timeout_s=3)
    assert re.search(r"rank 1 of 3 hangs: ranks 0, 2 waited 3 s for it", str(caught.value)), str(caught.value)


def both_wait_for_the_other(stop: StopAgreement) -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)
    else:
        dist.recv(torch.ones(1), src=0)


@pytest.mark.slow
def test_ranks_that_wait_for_each_other() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        launch(both_wait_for_the_other, ranks_per_node=2, timeout_s=3)
    message = str(caught.value)
    assert "all ranks wait for each other" in message
    assert message.count("in both_wait_for_the_other") >= 2, message


# -- the parent --------------------------------------------------------------------------------------------------------

SCRIPT = """
import ctypes, os, signal, sys, threading, time
import torch, torch.distributed as dist
from trainloop._support import stopping
from trainloop._launch import launch

def work(stop):
    folder = sys.argv[1]
    open(os.path.join(folder, f"pid-{dist.get_rank()}"), "w").write(str(os.getpid()))
    try:
        while True:
            dist.all_reduce(torch.ones(10))
            reasons = stop.reached()
            if reasons:
                open(os.path.join(folder, f"asked-{dist.get_rank()}"), "w").close()
                return reasons
            time.sleep(float(sys.argv[2]))
    finally:
        open(os.path.join(folder, f"finally-{dist.get_rank()}"), "w").close()
        if os.environ.get("STUCK_RANK") == str(dist.get_rank()):
            time.sleep(1)
            ctypes.PyDLL(None).sleep(200)  # with the interpreter's lock

if __name__ == "__main__":
    for _ in range(int(os.environ.get("PARENT_THREADS", 0))):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    method = os.environ.get("START_METHOD", "auto")
    print("reasons", launch(work, ranks_per_node=2, timeout_s=60, start_method=method), flush=True)
"""


class Running:
    """The script above in a session of its own, with both ranks at work."""

    def __init__(self, folder: Path, pause_s: float = 0.01, script: str = SCRIPT) -> None:
        self.folder = folder
        path = folder / "script.py"
        path.write_text(textwrap.dedent(script))
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.process = subprocess.Popen(
            [sys.executable, str(path), str(folder), str(pause_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until(lambda: all((folder / f"pid-{rank}").exists() for rank in range(2)), self.process, seconds=100)
        time.sleep(0.2)
        self.pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(2)]

    def end(self, timeout_s: float = ENDS_WITHIN_S) -> tuple[str, str]:
        """What it wrote, once it has ended."""
        try:
            return self.process.communicate(timeout=timeout_s)
        finally:
            for pid in [self.process.pid, *self.pids]:
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)

    def wait_for_ranks(self) -> None:
        wait_until(lambda: not any(map(psutil.pid_exists, self.pids)), seconds=ENDS_WITHIN_S)


@pytest.mark.long
@pytest.mark.parametrize("repeats", [1, pytest.param(6, marks=pytest.mark.slow)])  # ten seconds each
def test_a_killed_parent_takes_its_ranks_along(repeats: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads end one after another, the one that started the ranks among the first."""
    monkeypatch.setenv("STUCK_RANK", "1")
    monkeypatch.setenv("PARENT_THREADS", "50")
    for i in range(repeats):
        monkeypatch.setenv("START_METHOD", "spawn" if i % 2 else "auto")
        (tmp_path / str(i)).mkdir()
        # Both ranks are between two collectives then: rank 0 could not leave one that waits for the stuck rank 1.
        running = Running(tmp_path / str(i), pause_s=1.0)
        os.kill(running.process.pid, signal.SIGKILL)
        running.wait_for_ranks()
        running.end()
        left = {path.name for path in running.folder.iterdir()}
        assert {"finally-0", "finally-1"} <= left
        assert not left & {"asked-0", "asked-1"}, "its death is no request to stop training"


@pytest.mark.long
@pytest.mark.parametrize("repeats", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_one_ctrl_c_stops_all_at_a_step(repeats: int, tmp_path: Path) -> None:
    for i in range(repeats):
        (tmp_path / str(i)).mkdir()
        running = Running(tmp_path / str(i))
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does
        out, err = running.end()
        assert out == "reasons 2\n"
        assert err.strip() == "Interrupted: training stops after this step. Press Ctrl-C again to stop at once."
        assert running.process.returncode == 0


@pytest.mark.slow
def test_the_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    running = Running(tmp_path, pause_s=1000)
    os.killpg(running.process.pid, signal.SIGINT)
    time.sleep(0.5)
    os.killpg(running.process.pid, signal.SIGINT)
    out, err = running.end()
    assert out == ""
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1, err  # the parent's own
    assert (tmp_path / "finally-0").exists()
    assert (tmp_path / "finally-1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["parent", "rank 1", "all"])
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, 4), (signal.SIGUSR1, 8)])
def test_a_request_by_signal_reaches_all_ranks(to: str, number: int, reason: int, tmp_path: Path) -> None:
    running = Running(tmp_path)
    targets = {"parent": [running.process.pid], "rank 1": [running.pids[1]]}
    for pid in targets.get(to, [running.process.pid, *running.pids]):
        os.kill(pid, number)
    out, err = running.end()
    assert (out, err) == (f"reasons {reason}\n", "")


# -- which failure came first: decided without processes ---------------------------------------------------------------


def record(rank: int, time_ns: int, **fields: Any) -> Failure:
    return Failure(rank=rank, time_ns=time_ns, type=fields.pop("type", "ValueError"), **fields)


def lost_neighbour() -> RuntimeError:
    return RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:1")


def test_a_lost_neighbour_is_never_the_cause() -> None:
    try:
        try:
            raise lost_neighbour()
        except RuntimeError as error:
            raise ValueError("the exchange failed") from error
    except ValueError as error:
        wrapped = failure_of(error, 0)
    assert failure_of(lost_neighbour(), 0).consequence
    assert wrapped.consequence
    assert not failure_of(RuntimeError("Connection closed by peer, says the user's own server"), 0).consequence
    first = first_failure([record(0, 1, consequence=True), record(1, 9, type=None, exitcode=-9)])
    assert (first.rank, first.exitcode) == (1, -9)


def test_the_earliest_of_several_causes() -> None:
    assert first_failure([record(0, 7), record(2, 3), record(1, 5)]).rank == 2
    assert first_failure([record(0, 7, consequence=True), record(1, 3, consequence=True)]).rank == 1


def test_a_record_is_read_once_it_is_whole(tmp_path: Path) -> None:
    failure = record(1, 5, message="x\nü" * 3000, traceback="a\nb\n", exitcode=1, timeout=True)
    fd = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT)
    try:
        write_record(fd, failure)
        whole = read_text(fd)
        for part in (0, 1, 4096, len(whole) - 1):  # what a reader may see while the rank writes
            os.ftruncate(fd, part)
            assert read_record(fd) is None
        os.pwrite(fd, whole, 0)
        assert read_record(fd) == failure
    finally:
        os.close(fd)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_without_text() -> None:
    assert failure_of(Unprintable(), 0).message == "<its text can't be computed>"


HINTS = {
    "OutOfMemoryError: CUDA out of memory. Tried to allocate": "the GPU's memory ran out",
    "AcceleratorError: CUDA error: out of memory": "the GPU's memory ran out",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`": "the GPU's memory ran out",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "the GPU's memory ran out",
    "RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED": "the GPU's memory ran out",
    "DistBackendError: ncclUnhandledCudaError: Last error:\nFailed to CUDA calloc 8 bytes": "the GPU's memory ran out",
    "DistBackendError: ncclUnhandledCudaError: Last error:\nCuda failure 2 'out of memory'": "the GPU's memory ran out",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "The usual cause is",
    "RuntimeError: GET was unable to find an engine to execute this computation": "The usual cause is",
    "DistBackendError: ncclUnhandledCudaError: Call to CUDA function failed.": "The usual cause is",
    "DistBackendError: ncclSystemError: Error while creating shared memory segment /a": "shared memory ran",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED": "memory ran out: use a smaller",
    "RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.": "memory ran out",
    "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried": "memory ran out",
    "MemoryError: ": "memory ran out",
    "RuntimeError: The server socket has failed. EADDRINUSE: Address already in use": "the port is in use",
    "OSError: [Errno 24] Too many open files": "file descriptors ran out",
    "RuntimeError: unable to write to file </torch_1>: unable to mmap 8 bytes from shared memory": "shared memory ran",
    "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error.": "shared memory ran out",
    "ConnectionResetError: in data/dataloader.py: ConnectionResetError": "a DataLoader worker died",
    "RuntimeError: Expected to have finished reduction in the prior iteration": "find_unused_parameters",
    "RuntimeError: Expected to mark a variable ready only once.": "use_reentrant=False",
    "RuntimeError: Expected sparse gradient to be defined.": "sparse=False",
    "RuntimeError: Expected variable to have sparse gradient.": "a penalty on its weights",
    "OSError: x\n  sl = _multiprocessing.SemLock(\nOSError: [Errno 28] No space left on device": "/dev/shm must",
    "RuntimeError: gloo/transport/tcp/device.cc:84] Unable to find address for: lo": "ip link set lo up",
    "RuntimeError: op.preamble.length <= op.nbytes. 20 vs 12": "different collectives",
    "RuntimeError: torch/distributed/distributed_c10d.py: pair.cc: Connection reset by peer": "concat=True",
}


@pytest.mark.parametrize("text", HINTS)
def test_hints_where_the_cause_is_known(text: str) -> None:
    kind, _, message = text.partition(": ")
    failure = record(0, 0, type=kind, message=message)
    assert HINTS[text] in hint(failure)
    assert "Hint: " in str(worker_failed_error(failure, world_size=2, ended=[1]))


@pytest.mark.parametrize("words", ["size mismatch for bank: copying a param", "shape mismatch: indexing tensors"])
def test_errors_of_one_rank_have_no_hint_about_the_others(words: str) -> None:
    assert hint(record(0, 0, type="RuntimeError", message=words)) == ""


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [(-9, "memory ran out"), (-7, "shared memory ran out"), (-11, "native code crashed"), (-15, ""), (3, "")],
)
def test_hints_for_a_death_without_words(exitcode: int, words: str) -> None:
    advice = hint(record(0, 0, type=None, exitcode=exitcode))
    assert words in advice
    assert bool(advice) == bool(words)


@pytest.mark.parametrize("death", [{"timeout": True}, {"type": None, "exitcode": -6}])
def test_ranks_that_differ_inside_of_a_unit_of_fsdp_are_told_what_must_be_the_same(death: dict[str, Any]) -> None:
    failure = record(1, 0, **death)
    stack = 'File "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 5, in foreach_reduce'
    assert "the same blocks on every rank" in hint(failure, [stack])
    assert (
        "the same blocks on every rank"
        in worker_failed_error(failure, world_size=2, ended=[0], stacks={1: stack}).message
    )
    assert "blocks" not in hint(failure, ["File main.py"])


def test_an_abort_in_a_collective_names_the_usual_cause() -> None:
    # Gloo aborts the process if another rank sends more than this one expects.
    stack = 'File "torch/distributed/distributed_c10d.py", line 4287 in all_gather'
    assert "passed different shapes" in hint(record(1, 0, type=None, exitcode=-6), [stack])
    assert "passed different shapes" not in hint(record(1, 0, type=None, exitcode=-11), [stack])
    assert "passed different shapes" not in hint(record(1, 0, type=None, exitcode=-6), ["File main.py"])


@pytest.mark.parametrize("level", ["DETAIL", "INFO"])
def test_a_crash_of_torch_at_its_highest_level_of_debugging_names_the_variable(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    advice = hint(record(1, 0, type=None, exitcode=-11))
    assert ("TORCH_DISTRIBUTED_DEBUG=DETAIL" in advice) == (level == "DETAIL")


def test_the_text_of_exit_codes() -> None:
    assert [failures.exit_text(code) for code in (None, 0, 3, -9, -64, -200)] == [
        "no exit code",
        "exit code 0",
        "exit code 3",
        "signal SIGKILL",
        "signal SIGRTMAX",
        "signal 200",
    ]


def test_all_ranks_that_were_ended_are_named() -> None:
    message = worker_failed_error(record(2, 0, message="a\nb"), world_size=4, ended=[0, 1, 3]).message
    assert message == (
        "rank 2 of 4 raised ValueError: a ... (its traceback follows); ranks 0, 1, 3 were ended because of it."
    )
