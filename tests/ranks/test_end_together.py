"""Ranks of a launcher that are told to end do so together: it kills whoever is left once the first has gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ranks import run_own_ranks
from small_loop import make_loop
from trainloop import AbstractCallback, checkpoint, distributed
from trainloop.callbacks import ModelCheckpoint


class Warned(AbstractCallback):
    """One rank hears that the job's time is over."""

    def on_batch_end(self) -> None:
        if self.train_loop_obj.rank == 1 and self.train_loop_obj.global_step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


def end_early(folder: str) -> tuple[object, list[str]]:
    if distributed.get_rank() == 0:
        write = checkpoint.save

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(1.0)  # as to a network disk
            return write(*args, **kwargs)

        checkpoint.save = slowly  # type: ignore[assignment]
    loop = make_loop(validation=False, gpu_mode="ddp", devices=2, seed=1)
    with pytest.raises(SystemExit) as ended:
        loop.fit(5, callbacks=[Warned(), ModelCheckpoint(folder, every_n_epochs=None)])
    return ended.value.code, sorted(path.name for path in Path(folder).glob("*.pt"))


def test_no_rank_ends_before_the_checkpoint_is_whole(tmp_path: Path) -> None:
    for status, found in run_own_ranks(end_early, 2, str(tmp_path / "checkpoints"), folder=tmp_path):
        assert status == 138
        assert len(found) == 1
