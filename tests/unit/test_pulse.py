"""Whether a thread gets on, as another sees it."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from functools import partial

import pytest

from trainloop.launch.failures import Failure, deed_of, worker_failed_error
from trainloop.launch.liveness import Liveness, Sign
from trainloop.launch.pulse import Pulse


class Steps:
    """A thread that goes from one blocking call to the next, all from one line."""

    def __init__(self, block: Callable[[], object]) -> None:
        self.block, self.over = block, False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.over:
            self.call()

    def call(self) -> None:
        self.block()


@pytest.fixture
def lock() -> threading.Lock:
    """Held: whoever acquires it stays in native code."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def beats_of(steps: Steps) -> tuple[Pulse, list[int]]:
    beats: list[int] = []
    assert steps.thread.ident is not None
    return Pulse(steps.thread.ident, 1.0, beats.append), beats


def looks(pulse: Pulse, times: int) -> None:
    for _ in range(times):
        time.sleep(0.01)
        pulse.look()


def test_a_thread_in_one_call_does_not_get_on(lock: threading.Lock) -> None:
    steps = Steps(lock.acquire)
    pulse, beats = beats_of(steps)
    looks(pulse, 20)
    assert 1 <= len(beats) <= 2, beats  # at the first look it may not have been there yet
    seen = len(beats)
    lock.release()  # the next call, from the same instruction of a frame like it
    looks(pulse, 20)
    assert len(beats) == seen + 1 or len(beats) == seen + 2, beats
    steps.over = True
    lock.release()
    steps.thread.join()


def test_a_thread_that_only_waits_does_not_get_on() -> None:
    """As for a worker's batch: it wakes now and then, finds nothing, and waits on."""
    event = threading.Event()
    steps = Steps(lambda: event.wait(0.02))
    pulse, beats = beats_of(steps)
    looks(pulse, 20)
    assert len(beats) < 10, beats
    steps.over = True
    steps.thread.join()


def test_a_thread_that_works_gets_on() -> None:
    steps = Steps(lambda: sum(range(1000)))
    pulse, beats = beats_of(steps)
    looks(pulse, 20)
    assert len(beats) > 10
    assert beats == sorted(set(beats))
    steps.over = True
    steps.thread.join()


def beats_while(block: Callable[[], object], times: int, pause_s: float, most_looks: int = 10_000) -> list[int]:
    """How often it was said that this thread gets on, which calls ``block`` some times from one instruction.

    Until so many looks have been taken: a machine that is busy takes its time.
    """
    beats: list[int] = []
    pulse, over = Pulse(threading.get_ident(), 1.0, beats.append), threading.Event()

    def look() -> None:
        for _ in range(most_looks):
            if over.wait(pause_s):
                return
            pulse.look()
        over.set()

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(times):
            block()
            if over.is_set():
                break
    finally:
        over.set()
        looker.join()
    return beats


def test_a_loop_over_a_long_call_gets_on() -> None:
    """Each look finds it in that call, of which there is always another."""
    data = bytes(8 << 20)
    begin = time.monotonic()
    zlib.crc32(data)  # without the interpreter's lock
    call_s = time.monotonic() - begin
    beats = beats_while(partial(zlib.crc32, data), 100_000, 2 * call_s, most_looks=60)
    assert len(beats) >= 5, beats  # of a machine that is busy; without looking for a loop it is 2 at most
    # But not within one such call, nor where it calls nothing but sleep.
    assert len(beats_while(partial(zlib.crc32, bytes(40 * len(data))), 1, 2 * call_s)) <= 2
    assert len(beats_while(partial(time.sleep, 0.005), 100, 0.02)) <= 4


def test_a_lone_process_without_a_pulse_is_overdue() -> None:
    liveness = Liveness(10)
    assert liveness.overdue([Sign(0, True, 0)], 0) == []
    assert liveness.overdue([Sign(0, True, 0)], 100) == []  # it is starting: nobody counts yet
    assert liveness.overdue([Sign(0, True, 1)], 101) == []
    assert liveness.overdue([Sign(0, True, 2)], 110) == []
    assert liveness.overdue([Sign(0, True, 2)], 120) == []
    assert liveness.overdue([Sign(0, True, 2)], 120.1) == [0]


def test_what_is_said_of_it() -> None:
    failure = Failure(rank=0, time_ns=0, type=None, timeout=True)
    error = worker_failed_error(failure, world_size=1, ended=[], hanging=[0], timeout_s=8)
    assert str(error).startswith("rank 0 of 1 hangs: for 8 s it was in one call, or waited")
    assert deed_of(failure) == "hangs"
