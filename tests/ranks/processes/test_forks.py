"""A fork of a process whose process group is garbage: what torch's loaders do in a script that trains twice."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kit.places import ROOT

SCRIPT = """
import gc, multiprocessing, os, sys
import torch.distributed as dist

from trainloop._support.forks import guard_process


class Cycle:
    def __init__(self):
        self.me = self


def child(queue):
    gc.collect()
    kept = gc.isenabled()
    Cycle()
    queue.put((kept, gc.collect() > 0))


gc.set_threshold(10**9)  # the child is the first that collects
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if GUARDED:
    guard_process()
    guard_process()
garbage = Cycle()
garbage.group = dist.group.WORLD
dist.destroy_process_group()
del garbage
for enabled in (True, False):
    (gc.enable if enabled else gc.disable)()
    queue = multiprocessing.SimpleQueue()
    process = multiprocessing.get_context("fork").Process(target=child, args=(queue,), daemon=True)
    process.start()
    process.join(20 if GUARDED else 3)
    print(process.exitcode, *(queue.get() if process.exitcode == 0 else ()), gc.isenabled())
    process.kill()
sys.stdout.flush()
os._exit(0)
"""


def lines_of(guarded: bool) -> list[str]:
    script = SCRIPT.replace("GUARDED", str(guarded))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_forked_child_does_not_free_its_parents_process_group() -> None:
    # It collects its own garbage, and has collection on or off as its parent, which keeps its setting too.
    assert lines_of(guarded=True) == ["0 True True True", "0 False True False"]


@pytest.mark.long
def test_without_the_guard_it_hangs_or_crashes_there() -> None:
    lines = lines_of(guarded=False)
    assert len(lines) == 2
    assert [line for line in lines if line.startswith("0 ")] == []
