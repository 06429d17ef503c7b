"""Stopping at one boundary: the same on all ranks, whoever asked and when; and signals that become requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from trainloop._support.signals import ReceivedSignals, rank_signals, signals, uninterrupted
from trainloop._support.stopping import (
    CHECKPOINT,
    EARLY_STOP,
    HANGUP,
    INTERRUPT,
    NOTICE,
    TERMINATE,
    GroupStop,
    LocalStop,
    SharedStop,
    StopAgreement,
)

Plan = dict[tuple[int, int], int]
"""Reasons by (rank, boundary) before which that rank asks for them."""


def shared(world_size: int, timeout_s: float = 20.0) -> list[SharedStop]:
    slots = memoryview(bytearray(8 * SharedStop.num_slots(world_size))).cast("q")
    return [SharedStop(slots, rank, world_size, timeout_s) for rank in range(world_size)]


def run(stop: StopAgreement, rank: int, plan: Plan, steps: int, delays: dict[int, float] | None = None) -> Any:
    """Boundary and reasons at which this rank stopped; ``None`` if it came to the end."""
    for boundary in range(1, steps + 1):
        if delays:
            time.sleep(delays.get(rank, 0))
        if (rank, boundary) in plan:
            stop.request(plan[rank, boundary])
        if reasons := stop.reached():
            return boundary, reasons
    return None


def run_all(stops: list[Any], plan: Plan, steps: int, delays: dict[int, float] | None = None) -> list[Any]:
    with ThreadPoolExecutor(len(stops)) as pool:
        return list(pool.map(lambda rank: run(stops[rank], rank, plan, steps, delays), range(len(stops))))


@pytest.fixture
def grouped() -> Iterator[Callable[[int], list[GroupStop]]]:
    """Agreements over Gloo groups of threads, which share no memory."""
    made: list[Any] = []

    def make(world_size: int) -> list[GroupStop]:
        store = dist.HashStore()
        with ThreadPoolExecutor(world_size) as pool:
            groups = list(
                pool.map(
                    lambda rank: dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=20)),
                    range(world_size),
                )
            )
        made.extend(groups)
        return [GroupStop(_Direct(group), world_size) for group in groups]

    yield make
    made.clear()


class _Direct:
    """A raw process group with the one call that an agreement makes of torch.distributed."""

    def __init__(self, group: Any) -> None:
        self.group = group


@pytest.fixture(autouse=True)
def raw_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    everyday = dist.all_reduce

    def all_reduce(tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if isinstance(group, _Direct):
            return group.group.allreduce([tensor])
        return everyday(tensor, group=group, async_op=async_op)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)


# -- all ranks at one boundary -----------------------------------------------------------------------------------------


def test_one_process_stops_at_the_next_boundary() -> None:
    assert run(LocalStop(), 0, {(0, 4): EARLY_STOP | TERMINATE}, 10) == (4, EARLY_STOP | TERMINATE)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_without_a_request_nobody_stops_or_waits(world_size: int) -> None:
    assert [run(stop, rank, {}, 50) for rank, stop in enumerate(shared(world_size))] == [None] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_what_all_ask_for_holds_at_once(world_size: int) -> None:
    plan = {(rank, 7): EARLY_STOP for rank in range(world_size)}
    assert run_all(shared(world_size), plan, 20) == [(7, EARLY_STOP)] * world_size


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_rank_that_lags_or_leads_stops_with_the_others(slow_rank: int) -> None:
    # Both sleep: a rank that never gives the interpreter away may be at its end before the other one asks.
    outcomes = run_all(shared(2), {(1, 3): INTERRUPT}, 1000, delays={slow_rank: 0.002, 1 - slow_rank: 0.0001})
    assert len(set(outcomes)) == 1
    boundary, reasons = outcomes[0]
    assert reasons == INTERRUPT
    assert boundary < 1000


plans = st.dictionaries(
    st.tuples(st.integers(0, 2), st.integers(1, 30)), st.sampled_from([1, 2, 4, 8, 5, 15]), min_size=1, max_size=5
)


@settings(max_examples=60)
@given(plan=plans, delays=st.dictionaries(st.integers(0, 2), st.sampled_from([0.0, 0.0002, 0.001]), max_size=3))
def test_any_requests_at_any_speed_have_one_outcome(plan: Plan, delays: dict[int, float]) -> None:
    outcomes = run_all(shared(3), plan, 400, delays)
    assert len(set(outcomes)) == 1, outcomes
    asked = 0
    for reasons in plan.values():
        asked |= reasons
    if outcomes[0] is not None:
        assert outcomes[0][1] & ~asked == 0


def test_the_launching_process_asks_and_gives_up() -> None:
    slots = memoryview(bytearray(8 * SharedStop.num_slots(2))).cast("q")
    parent, zero, one = SharedStop(slots, -1, 2), SharedStop(slots, 0, 2), SharedStop(slots, 1, 2)
    parent.request(TERMINATE | CHECKPOINT)
    assert parent.requested == TERMINATE | CHECKPOINT
    assert run_all([zero, one], {}, 5) == [(1, TERMINATE | CHECKPOINT)] * 2
    parent.abort()
    assert zero.aborted
    with pytest.raises(ConnectionAbortedError, match="another rank failed while this one waited"):
        zero.reached()
    for stop in (one, zero, parent):
        stop.release()


def test_a_rank_that_never_comes_is_named() -> None:
    zero, one = shared(2, timeout_s=0.2)
    one.reached()
    zero.reached()
    zero.request(EARLY_STOP)
    with pytest.raises(TimeoutError, match=r"rank 1 did not reach step boundary 2 within 0.2 s \(it is at 1\). Rank 0"):
        zero.reached()


def test_a_boundary_costs_next_to_nothing() -> None:
    """Under 5 microseconds of this process's own time, so that a busy machine changes nothing."""
    stop = shared(8)[3]
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        for _ in range(20_000):
            stop.reached()
        best = min(best, (time.thread_time() - start) / 20_000)
    assert best < 5e-6, best


def test_ranks_without_shared_memory_stop_at_one_boundary(grouped: Callable[[int], list[GroupStop]]) -> None:
    all_ask = {(rank, 7): EARLY_STOP for rank in range(3)}
    stops = grouped(3)
    assert run_all(stops, all_ask, 20) == [(7, EARLY_STOP)] * 3
    stops = grouped(3)
    assert run_all(stops, {(2, 4): TERMINATE}, 20) == [(5, TERMINATE)] * 3
    for stop in stops:
        stop.finish()
    assert run_all(grouped(2), {}, 20) == [None] * 2


# -- signals -----------------------------------------------------------------------------------------------------------


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, TERMINATE), (signal.SIGHUP, HANGUP)])
def test_signals_become_requests_and_the_users_handlers_run(number: signal.Signals, reason: int) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(number)
        stop = LocalStop()
        with signals(stop):
            send(number)
        assert stop.reached() == reason
        assert seen == [number]
        assert signal.getsignal(number) is mine
    finally:
        signal.signal(number, before)


def test_what_the_users_handler_raises_waits_for_the_end() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
    stop, done = LocalStop(), False
    try:
        with pytest.raises(SystemExit, match="7"), signals(stop):
            send(signal.SIGUSR1)
            done = True
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done
    assert stop.reached() == CHECKPOINT


@pytest.mark.parametrize("job", [None, "SUBMITIT_EXECUTOR", "LSB_JOBID", "SGE_TASK_ID"])
def test_sigusr2_is_a_request_only_in_jobs_that_announce_their_end_by_it(
    job: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SUBMITIT_EXECUTOR", "LSB_JOBID", "SGE_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    if job is not None:
        monkeypatch.setenv(job, "1")
    stop, seen = LocalStop(), []
    before = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    try:
        with signals(stop) as received:
            send(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert seen == [signal.SIGUSR2]  # the user's own handler runs in any case
    assert (stop.reached(), received.reasons) == ((0, 0) if job is None else (NOTICE, NOTICE))


def test_the_first_ctrl_c_waits_and_the_second_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    stop = LocalStop()
    with pytest.raises(KeyboardInterrupt), signals(stop):
        send(signal.SIGINT)
        assert stop.reached() == INTERRUPT
        send(signal.SIGINT)
        raise AssertionError("not reached")
    line = "\nInterrupted: training stops after this step. Press Ctrl-C again to stop at once.\n"
    assert capsys.readouterr().err == line
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_at_once_a_ctrl_c_raises_where_it_strikes_or_after_what_must_be_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), signals(at_once=True), signals(LocalStop()):
            send(signal.SIGINT)
            raise AssertionError("not reached")
    done = False
    with pytest.raises(KeyboardInterrupt), signals(at_once=True):
        with uninterrupted():
            send(signal.SIGINT)
            done = True
        raise AssertionError("not reached")
    assert done
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("number", "own", "status"), [("SIGTERM", None, 143), ("SIGUSR1", None, 138), ("SIGINT", 7, 7)]
)
def test_at_once_the_users_handler_runs_first(number: str, own: int | None, status: int) -> None:
    seen: list[int] = []

    def handler(number: int, frame: object) -> None:
        seen.append(number)
        if own is not None:
            sys.exit(own)

    before = signal.signal(getattr(signal, number), handler)
    done = 0
    try:
        with pytest.raises(SystemExit, match=str(status)), signals(at_once=True) as received:
            send(getattr(signal, number))
            raise AssertionError("not reached")
        with pytest.raises(SystemExit, match=str(status)), signals(at_once=True), uninterrupted():
            send(getattr(signal, number))
            done = 1
    finally:
        signal.signal(getattr(signal, number), before)
    assert received.reasons
    assert (len(seen), done) == (2, 1)


def test_a_rank_that_is_ended_twice_finishes_its_finally_blocks() -> None:
    """The system and the rank's own watch both tell that the parent is gone, in any order and at any time."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    stop, done = LocalStop(), False
    try:
        with pytest.raises(ZeroDivisionError), rank_signals(stop, ended=lambda: True, end=ZeroDivisionError):
            try:
                send(signal.SIGTERM)
                raise AssertionError("not reached")
            finally:
                send(signal.SIGTERM)
                done = True
        for number in before:  # only the process's own end is left to do
            send(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert done
    assert stop.reached() == 0


def test_contexts_for_one_stop_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    stop = LocalStop()
    with signals(stop), signals(stop):
        send(signal.SIGINT)
    assert capsys.readouterr().err.count("Interrupted: ") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    stop = LocalStop()
    try:
        with signals(stop):
            assert signal.getsignal(number) is signal.SIG_IGN
            send(number)
    finally:
        signal.signal(number, before)
    assert stop.reached() == 0


def test_a_rank_ignores_what_its_starter_ignores() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    stop = LocalStop()
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        with rank_signals(stop, ended=lambda: False, end=ZeroDivisionError):
            send(signal.SIGHUP)
            assert stop.reached() == 0
            send(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stop.reached() == TERMINATE


def test_other_threads_install_nothing() -> None:
    handlers: list[Any] = []

    def work() -> None:
        with signals(LocalStop()):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]


IN_A_FORK = """
import os, signal, sys, time
from trainloop._support import signals as module
module._SAME_SIGNAL_S = float(sys.argv[3])
with module.signals() as received:
    pid = os.fork()
    if pid == 0:
        for _ in range(int(sys.argv[1])):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            time.sleep(0.01)
        os._exit(0)
    if sys.argv[2] == "group":
        time.sleep(1)  # in native code, say: its handler runs late
        os.kill(os.getpid(), signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), received.reasons)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("times", "who", "outcome"),
    [
        pytest.param(1, "group", ["0", "4"], id="the whole group's"),
        pytest.param(2, "group", ["-15", "4"], id="the group's, then its own"),
        pytest.param(1, "worker", ["-15", "0"], id="its own"),
    ],
)
def test_a_forked_worker_outlives_the_groups_signals(times: int, who: str, outcome: list[str]) -> None:
    command = [sys.executable, "-c", IN_A_FORK, str(times), who, "0.3" if who == "worker" else "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == outcome
    assert done.stderr == ""


# -- contexts inside contexts, as launch's in fit's --------------------------------------------------------------------


def test_what_was_heard_before_ranks_are_there_is_told_to_them() -> None:
    stop = LocalStop()
    with signals() as received:
        send(signal.SIGTERM)
        with signals(stop) as inner:
            assert inner is received
            assert stop.reached() == TERMINATE
            send(signal.SIGUSR1)
            assert stop.reached() == TERMINATE | CHECKPOINT
        send(signal.SIGINT)
    assert stop.reached() == TERMINATE | CHECKPOINT
    assert received.reasons == TERMINATE | CHECKPOINT | INTERRUPT


@pytest.mark.parametrize(
    ("reasons", "end"),
    [
        (INTERRUPT | TERMINATE, KeyboardInterrupt),
        (12, SystemExit(143)),
        (HANGUP, SystemExit(143)),
        (8, SystemExit(138)),
    ],
)
def test_how_a_signal_ends_fit(reasons: int, end: Any) -> None:
    received = ReceivedSignals()
    received.raise_if_any()
    received.note(reasons)
    with pytest.raises(end if isinstance(end, type) else type(end)) as caught:
        received.raise_if_any()
    assert getattr(caught.value, "code", None) == getattr(end, "code", None)


def test_a_reason_that_is_no_signal_is_no_end() -> None:
    received = ReceivedSignals()
    received.note(EARLY_STOP)
    received.raise_if_any()


def test_the_second_ctrl_c_waits_for_what_must_not_be_half_done() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), signals():
        with uninterrupted():
            send(signal.SIGINT)
            send(signal.SIGINT)
            done = True
        raise AssertionError("not reached")
    assert done
