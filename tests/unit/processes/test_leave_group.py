"""The end of a process group: its threads end, or are idle, before the interpreter ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainloop._support import forks
from trainloop._support.forks import guard_process, wait_for_gloo
from trainloop.distributed.ranks import leave_group
from trainloop.parallel import TTDistributedDataParallel


class Cycle:
    def __init__(self) -> None:
        self.me = self


def gloo_threads() -> int:
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has just ended
            names.append(task.read_text().strip())
    return names.count("pt_gloo_runloop")


@pytest.fixture
def threads_before() -> Iterator[int]:
    # An earlier test may have left a group's threads to the garbage collector.
    before = gloo_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(100):  # a thread names itself when it first runs
        if gloo_threads() > before:
            break
        time.sleep(0.05)
    if gloo_threads() == before:
        dist.destroy_process_group()
        pytest.skip("Gloo's threads have no name in this torch, or the system shows none")
    yield before
    assert not dist.is_initialized()


def test_a_group_ends_with_its_threads_where_garbage_refers_to_it(threads_before: int) -> None:
    garbage = Cycle()
    garbage.__dict__["group"] = dist.group.WORLD
    del garbage
    leave_group()
    assert gloo_threads() <= threads_before


def test_a_released_wrapper_keeps_no_group(threads_before: int) -> None:
    wrapper = TTDistributedDataParallel(nn.Linear(2, 1))
    wrapper(torch.ones(1, 2)).sum().backward()
    wrapper.release()
    leave_group()
    assert gloo_threads() <= threads_before


@pytest.fixture
def busy() -> Iterator[dict[str, bool]]:
    """Whether a thread with the name of Gloo's is at work, for the first 50 ms."""
    state = {"now": True}

    def runs_on() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
        named.set()
        data, end = bytes(2**22), time.monotonic() + 0.05
        while time.monotonic() < end:
            hashlib.sha256(data)  # without the interpreter's lock
        state["now"] = False

    named = threading.Event()
    thread = threading.Thread(target=runs_on)
    thread.start()
    named.wait()
    yield state
    thread.join()


def test_the_exit_waits_for_threads_that_are_busy(busy: dict[str, bool]) -> None:
    wait_for_gloo()
    assert not busy["now"]


def test_a_guarded_process_waits_at_its_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    guard_process.__wrapped__()
    assert registered == [wait_for_gloo]


@pytest.mark.skipif(not forks._CHILDREN_MAY_HANG, reason="this Python forks safely beside threads that begin or end")
def test_a_fork_waits_for_them_too(busy: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_REST_BEFORE_FORK_S", 2.0)  # a slow machine
    guard_process()
    child = os.fork()
    if not child:
        os._exit(0)
    assert not busy["now"]
    os.waitpid(child, 0)


def test_a_failed_rank_aborts_all_groups_of_torch_2_6(threads_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument, 2.6.0 aborts the default group only, which stays half registered."""
    aborted = []

    def abort_as_in_2_6(group: dist.ProcessGroup | None = None) -> None:
        aborted.append(group)
        if group == dist.group.WORLD:
            dist.destroy_process_group()
        else:
            dist.distributed_c10d._world.pg_map.clear()
            dist.distributed_c10d._world.pg_backend_config.clear()

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort_as_in_2_6)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    group = dist.group.WORLD
    leave_group(failed=True)
    leave_group(failed=True)
    assert aborted == [group]
