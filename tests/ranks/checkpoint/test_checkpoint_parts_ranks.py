"""Checkpoints that leave out frozen parts of a model, written and read by ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.checkpoints import Distilled, distilled_loop

from trainloop import checkpoint
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import CheckpointError


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_ranks_leave_out_a_teacher_and_resume(tmp_path: Path, mode: str) -> None:
    options = {"gpu_mode": mode, "devices": 2}
    whole = distilled_loop(**options)
    whole.fit(num_epochs=2)
    distilled_loop(**options).fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path, exclude="teacher")])
    again = distilled_loop(Distilled(seed=7), **options)
    again.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path, exclude="teacher")], resume_from="last")
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    state = checkpoint.load(checkpoint.checkpoints(tmp_path)[-1].path)
    assert set(state["model"]) == {"student.weight", "student.bias"}
    other = distilled_loop(Distilled(teacher_seed=2), **options)
    if mode == "ddp":  # in fsdp shapes are compared, and no values
        with pytest.raises(CheckpointError, match=r"does not contain teacher\.0\.weight"):
            other.fit(num_epochs=3, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
