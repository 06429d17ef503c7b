"""A disk that is full costs a checkpoint, not the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.checkpoints import in_small_tmpfs

FULL_DISK = """
import os, sys, warnings
sys.path.insert(0, "tests")
import torch
from kit.checkpoints import StandIn, steps
from trainloop import checkpoint
from trainloop.callbacks.checkpoints.checkpoint import ModelCheckpoint
where = sys.argv[1]
for async_save in (False, True):
    keeper = ModelCheckpoint(where, every_n_steps=1, every_n_epochs=None, keep=None, async_save=async_save)
    loop = StandIn(keeper, size=400)  # 640 kB each: three fit
    keeper.on_train_begin()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            loop.step()
        keeper._finish_writing()
        whole = steps(where)
        os.remove(keeper.last_path)
        loop.step()
        keeper.on_train_end()
    print(whole, steps(where), len(caught), sorted(f for f in os.listdir(where) if f.endswith(".tmp")))
    print(caught[0].category.__name__, caught[0].message)
    print(checkpoint.load_newest(where)[1]["model"]["weight"].unique().tolist())
    for name in os.listdir(where):
        os.remove(os.path.join(where, name))
"""


@pytest.mark.long
def test_training_goes_on_with_a_full_disk(tmp_path: Path) -> None:
    done = in_small_tmpfs(FULL_DISK, tmp_path, megabytes=2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    for counts, warning, newest in (lines[:3], lines[3:]):  # synchronous, in a thread
        assert counts == "[1, 2, 3] [1, 2, 7] 3 []"
        assert warning.startswith("RuntimeWarning the checkpoint of step 4 could not be written to ")
        assert "No space left on device" in warning
        assert "Training continues. Newest complete checkpoint: " in warning
        assert "step=00000003.pt" in warning
        assert newest == "[7.0]"
