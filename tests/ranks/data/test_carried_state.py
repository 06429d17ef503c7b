"""State carried from chunk to chunk: any number of ranks equals the hand-written loop, and so does what is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.columns_model import chunks, make_model, train_by_hand
from kit.loops import cpu_loop
from torch import optim

from trainloop import TrainLoop
from trainloop.callbacks import ModelCheckpoint
from trainloop.data import SplitBatches

COLUMNS, LENGTH, EPOCHS, LR = 7, 33, 2, 0.5  # 7 columns on 2 ranks: 4 and 3; 7 chunks, the last of 3 steps in time


def fit(ranks: int, folder: Path, resume_from: Any = None, **kwargs: Any) -> tuple[Any, TrainLoop]:
    model = make_model()
    loop = cpu_loop(
        model,
        SplitBatches(chunks(COLUMNS, LENGTH), dim=1),
        optim.SGD(model.parameters(), lr=LR),
        validation_loader=SplitBatches(chunks(COLUMNS, 12, seed=1), dim=1),
        gpu_mode="single" if ranks == 1 else "ddp",
        devices=ranks,
        seed=5,
        timeout=60,
    )
    keeper = ModelCheckpoint(folder, every_n_epochs=None, every_n_steps=1, keep=100)
    loop.fit(num_epochs=EPOCHS, callbacks=[keeper], resume_from=resume_from, **kwargs)
    return model, loop


@pytest.mark.long
def test_columns_stay_on_their_rank(tmp_path: Path) -> None:
    by_hand = make_model()
    losses, val_losses = train_by_hand(by_hand, chunks(COLUMNS, LENGTH), chunks(COLUMNS, 12, seed=1), EPOCHS, LR)
    single, single_loop = fit(1, tmp_path / "1")
    model, loop = fit(2, tmp_path / "2")
    for of_run, of_loop in ((single, single_loop), (model, loop)):
        assert of_loop.history["loss"] == pytest.approx(losses, abs=1e-9)
        assert of_loop.history["val_loss"] == pytest.approx(val_losses, abs=1e-9)
        torch.testing.assert_close(list(of_run.parameters()), list(by_hand.parameters()), rtol=0, atol=1e-9)
    assert model.hidden is None  # rank 0's columns are no state of the caller's

    # In the middle of the second epoch: the hidden state of both ranks goes on.
    paths = sorted((tmp_path / "2").iterdir())
    middle = paths[9]
    again, _ = fit(2, tmp_path / "again", resume_from=middle)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    alone, _ = fit(1, tmp_path / "alone", resume_from=middle)
    torch.testing.assert_close(list(alone.parameters()), list(by_hand.parameters()), rtol=0, atol=1e-9)
