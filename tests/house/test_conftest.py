"""The check that nothing is left behind sees what it is there to see."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import torch
from kit.places import IMPORTS

import conftest


def _leave_environment() -> Callable[[], object]:
    os.environ["TRAINLOOP_LEFT"] = "1"
    return lambda: os.environ.pop("TRAINLOOP_LEFT")


def _leave_thread() -> Callable[[], object]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-thread")
    thread.start()
    return lambda: (stop.set(), thread.join())


def _leave_child() -> Callable[[], object]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return lambda: child.communicate(b"\n")


def _leave_descriptor() -> Callable[[], object]:
    read, write = os.pipe()
    return lambda: (os.close(read), os.close(write))


def _leave_shared_memory() -> Callable[[], object]:
    block = shared_memory.SharedMemory(create=True, size=16)
    return lambda: (block.close(), block.unlink())


def _leave_semaphore() -> Callable[[], object]:
    context = multiprocessing.get_context("spawn")
    semaphore = [context.Semaphore()]
    return lambda: (semaphore.clear(), gc.collect())


def _leave_threads_setting() -> Callable[[], object]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    return lambda: torch.set_num_threads(before)


def _leave_folder() -> Callable[[], object]:
    before = os.getcwd()
    os.chdir("/")
    return lambda: os.chdir(before)


@pytest.mark.parametrize(
    "leave, word",
    [
        (_leave_environment, "environment: TRAINLOOP_LEFT was None, is '1'"),
        (_leave_thread, "threads: left-thread"),
        (_leave_child, "children: pid"),
        (_leave_descriptor, "file descriptors: "),
        (_leave_shared_memory, "shared memory: psm_"),
        (_leave_semaphore, "shared memory: sem."),
        (_leave_threads_setting, "torch threads: was"),
        (_leave_folder, "current folder: was"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",  # the same in each process of pytest-xdist
)
def test_sees_what_a_test_leaves(leave: Callable[[], Callable[[], object]], word: str) -> None:
    before = conftest._state()
    mend = leave()
    try:
        lines = conftest.left_behind(before, conftest._state())
    finally:
        mend()
    assert any(line.startswith(word) for line in lines), lines
    assert conftest.left_behind(before, conftest._state()) == []


def test_what_another_program_leaves_meanwhile_is_not_ours() -> None:
    """Its semaphores lie beside ours, held by nobody once it was killed."""
    code = """
import multiprocessing, os, signal
from multiprocessing import resource_tracker
semaphores = [multiprocessing.get_context("spawn").Semaphore() for _ in range(3)]
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # it would clear up
print(*(semaphore._semlock.name for semaphore in semaphores), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    before = conftest._state()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    paths = [Path("/dev/shm", f"sem.{name[1:]}") for name in done.stdout.split()]
    try:
        assert len([path for path in paths if path.exists()]) == 3
        assert conftest.left_behind(before, conftest._state()) == []
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


SUITE = """
import os, subprocess, sys

def test_waits():
    hangs = "def stuck(): import time; time.sleep(50)\\nstuck()"
    assert subprocess.run([sys.executable, "-c", hangs]).returncode == 0

def test_runs():
    pass

def test_leaves():
    os.environ["TRAINLOOP_LEFT"] = "1"

def test_is_allowed(may_leave):
    os.environ["TRAINLOOP_LEFT"] = "2"
    may_leave("TRAINLOOP_LEFT")
"""


@pytest.mark.long
def test_what_hangs_fails_with_its_stack_what_leaves_something_fails_and_the_others_run(tmp_path: Path) -> None:
    """One pytest for both, since it imports torch: a suite of its own under this suite's conftest."""
    (tmp_path / "conftest.py").write_text(Path(conftest.__file__).read_text())
    (tmp_path / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path]
    time_out = f"--override-ini=faulthandler_timeout={conftest._LAST_WORDS_S + 2}"
    environment = {**os.environ, "PYTHONPATH": IMPORTS}
    done = subprocess.run([*command, time_out, tmp_path], capture_output=True, text=True, timeout=110, env=environment)
    said = done.stdout
    assert "test_waits runs for 2 s; ended: pid" in said, said
    assert "stuck (<string>:1)" in said
    assert "TRAINLOOP_LEFT was None, is '1'" in said
    # What was left is found at the test's end, hence an error and not a failure.
    assert "1 failed, 3 passed, 1 error" in said, said
