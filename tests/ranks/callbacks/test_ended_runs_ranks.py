"""A run of several ranks that one rank's callback ended: who asked is told, and the same line does nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.small_loop import make_loop

from trainloop import AbstractCallback, distributed
from trainloop.callbacks import ModelCheckpoint


class OneAsks(AbstractCallback):
    """Rank 1 alone asks, in the middle of the second epoch, with a reason; and each rank tells that it was begun."""

    def __init__(self) -> None:
        super().__init__("one asks")

    def on_train_begin(self) -> None:
        print("begun", flush=True)

    def on_batch_end(self) -> None:
        if self.train_loop_obj.global_step == 6 and distributed.get_rank() == 1:
            self.end_training("rank 1 has seen enough.")


@pytest.mark.usefixtures("events_on_stdout")
def test_an_end_that_one_rank_asked_for(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fit() -> tuple[object, str]:
        tl = make_loop(gpu_mode="ddp", devices=2, seed=1)
        tl.test_loader = tl.validation_loader
        tl.fit(num_epochs=4, callbacks=[OneAsks(), ModelCheckpoint("kept")], resume_from="last")
        weights = {name: value.tolist() for name, value in tl.model.state_dict().items()}
        return (weights, tl.history.rows(), tl.epoch, tl.global_step), capfd.readouterr().out

    first, printed = fit()
    assert "begun" in printed
    assert printed.count("one asks ended training after epoch 2: rank 1 has seen enough.") == 1
    files = {path: os.stat(f"kept/{path}").st_mtime_ns for path in os.listdir("kept")}
    again, printed = fit()
    assert again == first
    assert "begun" not in printed  # no rank was started
    assert printed.startswith("Nothing left to do: one asks ended training after epoch 2")
    assert {path: os.stat(f"kept/{path}").st_mtime_ns for path in os.listdir("kept")} == files
