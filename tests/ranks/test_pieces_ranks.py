"""``fit(num_iterations=...)`` in pieces, in all modes: the second call continues in the middle of the epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.small_loop import make_loop

from trainloop import TrainLoop
from trainloop.callbacks import ModelCheckpoint


def state_of(tl: TrainLoop) -> Any:
    return [p.tolist() for p in tl.model.parameters()], tl.history.to_dict(), tl.epoch, tl.global_step


@pytest.mark.parametrize("mode", ["dp", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("ddp", "fsdp"))])
def test_pieces_are_one_run(mode: str, tmp_path: Path) -> None:
    whole, pieces, resumed = (make_loop(shuffle=True, seed=3, gpu_mode=mode, devices=2) for _ in range(3))
    with whole.ranks():
        whole.fit(num_iterations=9)  # in ddp, an epoch has 4 batches
        pieces.fit(num_iterations=5, callbacks=[ModelCheckpoint(tmp_path)])
        resumed.fit(num_iterations=9, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
        for number in (1, 3):
            pieces.fit(num_iterations=number)
    assert state_of(resumed) == state_of(whole)
    assert state_of(pieces) == state_of(whole)
