"""Training whose logs go as sums, as they do above 64 ranks: the history of one whose logs are gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.small_loop import make_loop

from trainloop import AbstractCallback, distributed
from trainloop._metrics import exchange
from trainloop.callbacks import ModelCheckpoint


class Logs(AbstractCallback):
    """Logs of every kind, from hooks of steps, epochs and evaluations."""

    def __init__(self, most_that_gather: int) -> None:
        super().__init__("logs")
        self.most_that_gather = most_that_gather

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # in the rank, before its run is made
        exchange.MOST_THAT_GATHER = self.most_that_gather

    def on_train_begin(self) -> None:
        self.log("begin", distributed.get_rank())
        sums = isinstance(self.train_loop_obj.running.exchange, exchange.Summed)  # type: ignore[union-attr]
        assert sums == (self.most_that_gather < 2)

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        step, rank = self.train_loop_obj.global_step, distributed.get_rank()
        for reduce in ("mean", "sum", "min", "max"):
            self.log(reduce, 0.1 * step + rank / 3, reduce=reduce, batch_size=rank + 1)
        if step % 2:
            self.log(f"of_rank_{rank}", 0.7)
        self.log("own", float(rank), sync_dist=False)

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        self.log("evaluated", 10.0 * distributed.get_rank())

    def on_epoch_end(self) -> None:
        loop, rank = self.train_loop_obj, distributed.get_rank()
        if rank:
            self.log("late", 5.0)
        loop.insert_metric_result_into_history("inserted", float(rank))
        loop.insert_metric_result_into_history("same", 0.1)
        rows = loop.predict_with_model(loop.validation_loader, rows_to="all")[0]
        loop.insert_metric_result_into_history("rows", len(rows))


def trained(folder: Path, most_that_gather: int, resume_from: Path | None = None) -> Any:
    tl = make_loop(gpu_mode="ddp", devices=2, seed=1)
    saves = ModelCheckpoint(folder, every_n_epochs=None, every_n_steps=3, keep=10)
    tl.fit(num_epochs=2, callbacks=[Logs(most_that_gather), saves], resume_from=resume_from)
    return tl.history


@pytest.mark.long
def test_the_same_history_by_sums_as_by_gathering(tmp_path: Path) -> None:
    gathered = trained(tmp_path / "gathered", 8)
    reduced = trained(tmp_path / "reduced", 1)
    # And from the middle of an epoch: half of its sums are in the checkpoint.
    first = sorted((tmp_path / "reduced").glob("checkpoint-*.pt"))[0]
    resumed = trained(tmp_path / "resumed", 1, resume_from=first)
    assert {"begin", "mean", "of_rank_0", "of_rank_1", "own", "late", "inserted", "same", "rows"} <= set(reduced)
    for one in (reduced, resumed):
        assert one.to_dict() == gathered.to_dict()
        assert set(one.step_names) == set(gathered.step_names)
        for name in gathered.step_names:
            assert one.steps(name) == gathered.steps(name), name
            assert one.step_indices(name) == gathered.step_indices(name), name
