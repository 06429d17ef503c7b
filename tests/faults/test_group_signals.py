"""Signals to all processes of a job at once, loaders' workers included, and in the last moments of ``fit``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import soak


def wait_for_a_checkpoint(job: soak.Job) -> None:
    deadline = time.monotonic() + soak.PATIENCE_S
    while not list((job.where / "checkpoints").glob("*.pt")):
        assert job.process.poll() is None, job.said()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ends_with"), [("SIGTERM", "143"), ("SIGHUP", "143"), ("SIGINT", "-2"), ("SIGUSR1", "138")]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_to_the_whole_group_ends_with_a_checkpoint(
    ranks: int, number: str, ends_with: str, tmp_path: Path
) -> None:
    job = soak.Job(tmp_path, "struck", ranks=ranks, workers=2)
    wait_for_a_checkpoint(job)
    os.killpg(job.process.pid, getattr(signal, number))
    assert job.wait() == ends_with, job.said()
    assert "WorkerFailedError" not in job.said()
    assert job.left() == []
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith(("pymp-", "trainloop-"))]
    again = soak.Job(tmp_path, "resumed", ranks=ranks, workers=2)
    assert again.wait() == "0", again.said()


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; the job inherits it
    try:
        job = soak.Job(tmp_path, "left alone", ranks=2, workers=2)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for_a_checkpoint(job)
    os.killpg(job.process.pid, signal.SIGHUP)
    assert job.wait() == "0", job.said()
    assert job.left() == []


@pytest.mark.slow
def test_a_signal_while_state_comes_back_ends_fit_when_all_of_it_is_there(tmp_path: Path) -> None:
    job = soak.Job(tmp_path, "struck", ranks=2, workers=0, place="coming back")
    assert job.wait() == "143", job.said()
    assert job.left() == []
