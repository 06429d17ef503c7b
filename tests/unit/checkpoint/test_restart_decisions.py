"""Whether a run restarts, how often it writes checkpoints for that, and where they are."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop, TTBasicModel, checkpoint
from trainloop._launch.failures import Failure
from trainloop._support import scratch
from trainloop.callbacks import ModelCheckpoint
from trainloop.checkpoint import CheckpointInfo
from trainloop.errors import WorkerFailedError
from trainloop.resources import ResourceQuota
from trainloop.train_loop.arguments.options import RestartOptions
from trainloop.train_loop.execution.restarts import Supervisor
from trainloop.train_loop.saving.restart_checkpoints import steps_between


class Wide(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(500, 500)


def make_loop(**options: Any) -> TrainLoop:
    model = Wide()
    data = DataLoader(TensorDataset(torch.zeros(4, 500), torch.zeros(4)), 2)
    return TrainLoop(model, data, optimizer=optim.SGD(model.parameters(), 0.1), accelerator="cpu", **options)


def raised(rank: int, text: str = "always", **kind: Any) -> Failure:
    return Failure(rank, 1, "LookupError", text, exitcode=1, **kind)


KILLED = [Failure(rank, 1, None, exitcode=-9) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("failures", "recurs"),
    [
        ([raised(0), raised(1)], True),
        ([raised(0), raised(0, "of another text")], True),
        ([raised(0), raised(1, "of another text")], False),
        ([raised(0, consequence=True), raised(1, consequence=True)], False),
        (KILLED, False),
        ([KILLED[0], KILLED[0]], True),
    ],
    ids=str,
)
def test_a_bug_of_all_ranks_is_known_whichever_reports_it_first(failures: list[Failure], recurs: bool) -> None:
    final = None
    with Supervisor(make_loop(), RestartOptions(-1, None), 2) as supervisor:
        supervisor.before_start()
        for failure in failures:
            final = supervisor.error_that_ends_run(
                failure, WorkerFailedError("It failed.", rank=failure.rank, exitcode=1)
            )
            supervisor.before_start()
    assert (final is not None) == recurs
    if final is not None:
        note = "The same failure occurred again before training was resumed after step 0, so another restart would not"
        assert final.message == f"It failed. {note} help."


def test_restarts_that_are_used_up_and_failures_that_would_recur() -> None:
    error = WorkerFailedError("It failed.", rank=0, exitcode=1)
    with Supervisor(make_loop(), RestartOptions(1, None), 1) as supervisor:
        supervisor.before_start()
        assert supervisor.error_that_ends_run(raised(0, final=True), error) is error
        assert supervisor.error_that_ends_run(raised(0), error) is None
        supervisor.before_start()
        final = supervisor.error_that_ends_run(KILLED[0], error)
        assert final is not None
        assert final.message == "It failed. All restarts have been used (max_restarts=1)."


def test_the_newest_whole_checkpoint_of_this_run_is_taken(tmp_path: Path) -> None:
    """Of two of the same step the later one; none of another run, and none from before."""
    loop, keeper = make_loop(), ModelCheckpoint(tmp_path)
    loop.note(callbacks=[keeper])
    resumed = {"place": {"global_step": 2}, "callbacks": [{"state": {"run": "resumed"}}, {"state": {}}]}
    before = time.time_ns()

    def save(folder: str, step: int, run: str, stamp: int | None = None) -> str:
        info = CheckpointInfo(0, step, run, time.time_ns() if stamp is None else stamp)
        path = os.path.join(folder, checkpoint.checkpoint_name(info, version=len(os.listdir(tmp_path)) + 1))
        checkpoint.save(path, {}, info)
        return path

    def taken() -> tuple[int, str]:
        assert (
            supervisor.error_that_ends_run(next(failures), WorkerFailedError("It failed.", rank=0, exitcode=1)) is None
        )
        supervisor.before_start()
        order = supervisor.folder.order()
        assert order is not None
        return order.restart.step, order.checkpoint

    failures = iter([raised(0, str(number)) if number % 2 else KILLED[0] for number in range(9)])
    with Supervisor(loop, RestartOptions(-1, None), 1, resumed) as supervisor:
        supervisor.before_start()
        assert supervisor.folder.order() is None
        save(str(tmp_path), 9, "of another run")
        save(str(tmp_path), 8, "resumed", before)
        assert taken() == (2, "")
        own = supervisor.folder.checkpoints
        first = save(own, 4, "restarts")
        assert taken() == (4, first)
        second = save(str(tmp_path), 4, "resumed")
        assert taken() == (4, second)
        third = save(str(tmp_path), 5, keeper._checkpoints.run)
        assert taken() == (5, third)
        os.truncate(third, os.path.getsize(third) - 1)
        assert taken() == (4, second)


@pytest.mark.parametrize(("cost", "step", "steps"), [(6, 3, 200), (30, 3, 1000), (4, 1000, 1), (4, 0, 400)])
def test_checkpoints_are_as_seldom_as_their_cost_asks(cost: int, step: float, steps: int) -> None:
    assert steps_between(cost, step) == steps


def folder_of(**options: Any) -> str:
    with Supervisor(make_loop(**options), RestartOptions(1, None), 1) as supervisor:
        path = supervisor.folder.path
        status = os.stat(path)
        assert stat.S_IMODE(status.st_mode) == 0o700
        assert status.st_uid == os.getuid()
    assert not os.path.exists(path)
    return os.path.dirname(path)


def test_they_are_in_memory_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", str(memory))
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(disk))
    nbytes = 3 * 3 * sum(parameter.nbytes for parameter in Wide().parameters())
    usage = {"free": 3 * nbytes, "total": 4 * nbytes}
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda path: SimpleNamespace(**usage))
    assert folder_of() == str(memory)
    assert folder_of(resources=ResourceQuota(memory=2 * nbytes)) == str(memory)
    assert folder_of(resources=ResourceQuota(memory=2 * nbytes - 1)) == str(disk)
    usage["free"] -= 1  # less than half would stay free
    assert folder_of() == str(disk)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EBADF])
def test_a_folder_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(fd: int, operation: int) -> None:
        assert fd not in refused, "asked again"
        refused.append(fd)
        raise OSError(code, os.strerror(code))

    refused: list[int] = []
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(scratch, "_LONGEST_SOCKET", 1000)  # else folders in /tmp are looked at, if tmp_path is long
    monkeypatch.setattr(scratch.fcntl, "flock", refuse)
    folder = scratch.temporary_folder()
    assert os.listdir(tmp_path) == [os.path.basename(folder.path)]
    refused.clear()
    scratch.remove_dead()  # it may be a living process's
    assert refused
    assert os.path.isdir(folder.path)
    scratch.remove(folder)
    assert not os.listdir(tmp_path)


def test_no_folder_stays_where_none_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="open files"):
        patch.setattr(scratch.os, "open", refuse)
        scratch.temporary_folder()
    assert not os.listdir(tmp_path)


def test_the_next_start_removes_what_a_killed_process_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, too; a folder of a living process stays."""
    monkeypatch.setattr(scratch, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda path: SimpleNamespace(free=2, total=2))
    on_disk, in_memory = (scratch.temporary_folder(memory_bytes=nbytes) for nbytes in (0, 1))
    assert Path(in_memory.path).parent == tmp_path
    assert Path(on_disk.path).parent != tmp_path
    scratch.remove_dead()
    for folder in (on_disk, in_memory):
        assert os.path.isdir(folder.path)
        os.close(folder.lock_fd)  # as the end of the process does
    scratch.remove_dead()
    assert not any(os.path.exists(folder.path) for folder in (on_disk, in_memory))
