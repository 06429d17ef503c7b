"""A checkpoint's file under kills and a full disk: the earlier one stays whole, and nothing else is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from kit.checkpoints import in_small_tmpfs
from kit.places import ROOT

from trainloop import checkpoint
from trainloop.checkpoint import folder

FULL_DISK = """
import errno, os, sys, torch
from trainloop import checkpoint
where = sys.argv[1]
small = {"w": torch.zeros(1000)}
checkpoint.save(where + "/checkpoint-epoch=0000-step=00000001.pt", small)
for size in (3_000_000, 900_000, 2_000_000):  # in the zip's first record, and in a later one
    try:
        checkpoint.save(where + "/checkpoint-epoch=0000-step=00000002.pt", {"v": small["w"], "w": torch.zeros(size)})
        print("written", size)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        print("full", size, os.listdir(where))
checkpoint.load(where + "/checkpoint-epoch=0000-step=00000001.pt")
checkpoint.save(where + "/checkpoint-epoch=0000-step=00000003.pt", small)
print("then", sorted(os.listdir(where)))
"""


@pytest.mark.long
def test_a_full_disk_leaves_the_earlier_whole_and_nothing_else(tmp_path: Path) -> None:
    done = in_small_tmpfs(FULL_DISK, tmp_path, megabytes=3)
    assert done.returncode == 0, done.stderr
    first = "checkpoint-epoch=0000-step=00000001.pt"
    assert done.stdout.splitlines() == [
        f"full 3000000 ['{first}']",
        f"full 900000 ['{first}']",
        f"full 2000000 ['{first}']",
        f"then ['{first}', 'checkpoint-epoch=0000-step=00000003.pt']",
    ]
    assert "unexpected pos" not in done.stderr


WRITER = """
import os, sys, torch
from trainloop import checkpoint
from trainloop.checkpoint import CheckpointInfo
from trainloop.checkpoint import folder
where, first = sys.argv[1], int(sys.argv[2])
state = {"w": torch.zeros(250_000), "v": torch.zeros(1000), "n": 0}
os.write(1, b"ready\\n")
for i in range(first, first + 10_000):
    state["w"].fill_(i); state["v"].fill_(i); state["n"] = i
    info = CheckpointInfo(step=i, stamp=i, run="r")
    name = checkpoint.checkpoint_name(info)
    checkpoint.save(os.path.join(where, name), state, info)
    checkpoint.mark_newest(folder(where), name, run="r")
    old = checkpoint.checkpoint_name(CheckpointInfo(step=i - 2))
    folder(where).remove(old)
"""


@pytest.mark.long
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_kill_during_the_write_always_leaves_a_whole_one(kills: int, tmp_path: Path) -> None:
    """Kills spread over the 1 to 3 ms that a write of 1 MB takes; each writer goes on where the last one was."""
    rng = random.Random(0)
    first, before, leftovers = 1, 0, 0
    # One start of Python and torch for all: the writer forks before each round, and the fork is killed.
    code = (
        "import os, signal, sys\n"
        f"code = compile({WRITER!r}, 'writer', 'exec')\n"
        "import torch, trainloop.checkpoint\n"
        "torch.set_num_threads(1)\n"
        "for line in sys.stdin:\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        sys.argv[2] = line.strip()\n"
        "        exec(code, {})\n"
        "        os._exit(0)\n"
        "    os.write(1, b'%d\\n' % pid)\n"
        "    os.waitpid(pid, 0)\n"
        "    os.write(1, b'gone\\n')\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    try:
        for round_ in range(kills):
            print(first, file=starter.stdin, flush=True)
            said = [starter.stdout.readline().strip() for _ in range(2)]
            pid = int(next(line for line in said if line != "ready"))
            if round_ == 0:
                while not checkpoint.checkpoints(tmp_path):  # there has to be a first one
                    time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
            assert starter.stdout.readline() == "gone\n"
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = checkpoint.load_newest(tmp_path)
            assert found is not None
            state = found[1]
            assert state["w"].eq(state["n"]).all()
            assert state["v"].eq(state["n"]).all()
            assert state["n"] >= before, "an older one than before the kill"
            before = state["n"]
            first = before + 1
            leftovers += len(list(tmp_path.glob(".*.tmp")))
            folder(tmp_path).remove_unfinished("someone else")
            folder(tmp_path).remove_unfinished("r")
            assert not list(tmp_path.glob(".*.tmp"))
    finally:
        starter.stdin.close()
        starter.wait(20)
        starter.stdout.close()
    assert leftovers >= kills // 5, "the kills did not hit the writes"


WRITES_AND_WAITS = """
import sys, time
from trainloop.checkpoint import folder
def write(file):
    file.write(b"half")
    file.flush()
    print("half", flush=True)
    time.sleep(1000)
folder(sys.argv[1]).write("checkpoint.pt", write, writer="another-run")
"""


@pytest.mark.long
def test_what_a_killed_process_of_any_run_left_goes_and_nothing_else(tmp_path: Path) -> None:
    others = [".x.pt.run-b.0123abcd.tmp", ".checkpoint.pt.run.0123456789abcdef0123.tmp", ".swp.tmp", "mine.tmp"]
    for name in others:  # of an older version, of another host, of other programs
        (tmp_path / name).touch()
    command = [sys.executable, "-c", WRITES_AND_WAITS, str(tmp_path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"half\n"
        assert len(os.listdir(tmp_path)) == len(others) + 2
        writers[0].kill()
        writers[0].wait()
        folder(tmp_path).remove_dead()
        assert len(os.listdir(tmp_path)) == len(others) + 1, "the living one's stays, the dead one's goes"
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    folder(tmp_path).remove_dead()
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    folder(tmp_path / "none").remove_dead()
