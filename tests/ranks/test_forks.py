"""A fork of a process whose process group is garbage: what torch's loaders do in a script that trains twice."""

from __future__ import annotations

import subprocess
import sys

import pytest

from places import ROOT

SCRIPT = """
import gc, multiprocessing, os, sys
import torch.distributed as dist

from trainloop.forks import guard_forks


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
    guard_forks()
    guard_forks()
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


@pytest.mark.parametrize(
    ("guarded", "lines"),
    [
        # It collects its own garbage, and has collection on or off as its parent, which keeps its setting too.
        (True, ["0 True True True", "0 False True False"]),
        # The control: the child hangs in Gloo's destructor.
        (False, ["None True", "None False"]),
    ],
)
def test_a_forked_child_does_not_free_its_parents_process_group(guarded: bool, lines: list[str]) -> None:
    script = SCRIPT.replace("GUARDED", str(guarded))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == lines, done.stderr
