"""Named semaphores of ranks that were killed: found by their launch, or by the next one, and removed without a word."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop

from trainloop._launch import launch
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import WorkerFailedError


def makes_semaphores_and_dies(folder: str, stop: Any) -> None:
    import joblib.externals.loky.backend as loky  # what scikit-learn imports; it renames all of a process's semaphores

    assert loky._make_name().startswith(f"/loky-{os.getpid()}-")
    queue = multiprocessing.get_context("spawn").Queue()
    names = [str(queue._rlock._semlock.name), str(queue._sem._semlock.name)]  # type: ignore[attr-defined]
    assert all(Path(f"/dev/shm/sem.{name[1:]}").exists() for name in names)
    Path(folder, f"names-{torch.distributed.get_rank()}").write_text("\n".join(names))
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_semaphores_of_killed_ranks_are_removed_whatever_a_library_calls_them(
    start_method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    work = functools.partial(makes_semaphores_and_dies, str(tmp_path))
    with pytest.raises(WorkerFailedError, match="was killed by signal SIGKILL"):
        launch(work, ranks_per_node=2, start_method=start_method)  # type: ignore[arg-type]
    names = [name for path in tmp_path.glob("names-*") for name in path.read_text().split()]
    assert len(names) == 4
    assert not [name for name in names if Path(f"/dev/shm/sem.{name[1:]}").exists()]
    assert "KeyError" not in capfd.readouterr().err


NEXT_LAUNCH = """
from multiprocessing import resource_tracker
from trainloop._support.scratch import scratch_folder
with scratch_folder("of-the-next"):
    pass
resource_tracker._resource_tracker._stop()  # it has said all then
"""


def test_the_next_launch_removes_those_of_one_that_is_dead_as_a_whole(tmp_path: Path) -> None:
    token = f"dead-{os.getpid()}"
    folder = tmp_path / "trainloop-mp-dead"
    folder.mkdir()
    (folder / f"launch-{token}").touch()
    left, others = (Path(f"/dev/shm/sem.mp-{name}-abc") for name in (token, f"another-{os.getpid()}"))
    try:
        left.write_bytes(bytes(32))
        others.write_bytes(bytes(32))
        done = subprocess.run(
            [sys.executable, "-c", NEXT_LAUNCH],
            env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert not left.exists()
        assert others.exists()
        assert list(tmp_path.iterdir()) == []
    finally:
        left.unlink(missing_ok=True)
        others.unlink()


def test_a_start_that_has_nothing_left_to_do_removes_them_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = ModelCheckpoint(folder / "checkpoints")
    make_loop(Net()).fit(1, callbacks=[keeper])
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (folder / "trainloop-mp-dead").mkdir()
    (folder / "trainloop-mp-dead" / "launch-of-the-dead").touch()
    make_loop(Net()).fit(1, callbacks=[keeper], resume_from="last")
    assert not (folder / "trainloop-mp-dead").exists()
