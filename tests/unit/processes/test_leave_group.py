"""The end of a process group: its threads end, or are idle, before the interpreter ends."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainloop.distributed.ranks import leave_group, release_last_work
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


def test_the_exit_waits_for_threads_that_are_busy() -> None:
    state = {"busy": True}

    def runs_on() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
        named.set()
        data, end = bytes(2**24), time.monotonic() + 0.3
        while time.monotonic() < end:
            hashlib.sha256(data)  # without the interpreter's lock
        state["busy"] = False

    named = threading.Event()
    thread = threading.Thread(target=runs_on)
    thread.start()
    named.wait()
    release_last_work()
    assert not state["busy"]
    thread.join()


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
