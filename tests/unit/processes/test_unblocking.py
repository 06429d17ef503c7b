"""A rank that waits for NCCL in native code when the run is lost: its signal is pending before the collectives end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

from trainloop._launch import rank_process
from trainloop._launch.liveness import Liveness, Sign
from trainloop._launch.rank_process import RankTerminated
from trainloop._support.signals import ends_by_sigterm, signals
from trainloop._support.stopping import TERMINATE, LocalStop, SharedStop, State


def test_the_handler_is_to_run_before_the_collective_that_is_aborted_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    lost, aborted = threading.Event(), threading.Event()
    monkeypatch.setattr(rank_process, "_LOOK_S", 0.01)
    monkeypatch.setattr(rank_process, "_OWN_ERROR_S", 0.05)
    monkeypatch.setattr(
        os, "kill", lambda pid, number: order.append(f"{signal.Signals(number).name} to {pid == os.getpid()}")
    )

    def leave_group(*, failed: bool) -> None:
        order.append(f"abort, failed={failed}")
        aborted.set()

    monkeypatch.setattr(rank_process, "leave_group", leave_group)
    with rank_process.unblocking(lost.is_set):
        assert not aborted.wait(0.1)
        lost.set()
        assert aborted.wait(10)
    assert order == ["SIGTERM to True", "abort, failed=True"]


def test_a_rank_that_is_done_before_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "_LOOK_S", 0.01)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("it was over"))
    before = set(threading.enumerate())
    with rank_process.unblocking(lambda: True):
        pass
    assert set(threading.enumerate()) <= before


def test_a_rank_that_has_gone_before_it_was_done_has_failed() -> None:
    slots = memoryview(bytearray(8 * SharedStop.num_slots(2))).cast("q")
    gone = subprocess.Popen(["true"])
    gone.wait()
    own, other = (SharedStop(slots, rank, 2, pids=[os.getpid(), gone.pid]) for rank in (0, 1))
    assert own.failed
    other.request(TERMINATE)
    own._slots[own._slot] = 1 << 8 | TERMINATE
    assert other.reached() == TERMINATE
    other.set_state(State.DONE)
    assert not own.failed
    assert own.reached() == TERMINATE  # its vote is still there
    other.abort()
    assert own.failed


def test_sigterm_ends_a_launcher_s_rank_at_once_only_if_the_run_has_failed() -> None:
    failed, stop = threading.Event(), LocalStop()
    with signals() as received:
        assert not ends_by_sigterm()
        with signals(stop, ended=failed.is_set, end=RankTerminated):
            assert ends_by_sigterm()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.reached() == received.reasons == TERMINATE
            failed.set()
            with pytest.raises(RankTerminated, match="another rank has failed"):
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                raise LookupError
            except LookupError:
                os.kill(os.getpid(), signal.SIGTERM)  # what unwinds is not interrupted
        os.kill(os.getpid(), signal.SIGTERM)


def test_silence_is_counted_from_the_last_sign_of_life() -> None:
    liveness = Liveness(timeout_s=10)
    assert liveness.silent_s(0, now=5) == 0
    liveness.overdue([Sign(1, True), Sign(1, True)], now=5)
    liveness.overdue([Sign(1, True), Sign(2, True)], now=7)
    assert [liveness.silent_s(r, now=8) for r in (0, 1)] == [3, 1]
