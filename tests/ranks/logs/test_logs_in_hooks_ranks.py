"""Values that callbacks log and insert on several ranks: one on all of them, by a stated rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.sharded_models import FSDP
from kit.small_loop import STEPS_PER_EPOCH, make_loop

from trainloop import AbstractCallback, distributed
from trainloop.callbacks import EarlyStopping


class Logs(AbstractCallback):
    """Each rank logs and inserts something else, or nothing."""

    def on_train_begin(self) -> None:
        self.log("begin", distributed.get_rank())

    def on_batch_end(self) -> None:
        self.log("steps", 1.0, reduce="max")

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        self.log("evaluated", 10.0 * distributed.get_rank())

    def on_epoch_end(self) -> None:
        loop, rank = self.train_loop_obj, distributed.get_rank()
        self.log("score", float(rank + loop.epoch))
        self.log("total", float(rank), reduce="sum")
        if rank == 1:
            self.log("of_rank_1", 5.0)
            loop.insert_metric_result_into_history("inserted_by_1", 7.0)
        loop.insert_metric_result_into_history("inserted", float(rank))
        loop.insert_metric_result_into_history("twice", 1.0)
        loop.insert_metric_result_into_history("twice", 2.0 + rank)
        loop.insert_metric_result_into_history("equal", 0.1)

    def on_train_end(self) -> None:
        self.log("end", distributed.get_rank())


class OfRankZero(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("of rank 0", device_idx_execution=0)

    def on_epoch_end(self) -> None:
        self.log("restricted", 3.0)


class Reads(AbstractCallback):
    """The history that each rank finds after the callbacks before."""

    def on_epoch_end(self) -> None:
        everyone = distributed.gather_object(dict(self.train_loop_obj.history))
        self.same = all(theirs == everyone[0] for theirs in everyone)
        self.found = everyone[0]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_log_and_insert_what_they_like(ranks: int) -> None:
    reads, stopping = Reads(), EarlyStopping("score", mode="max", patience=3)
    tl = make_loop(gpu_mode="ddp", devices=ranks)
    tl.fit(num_epochs=2, callbacks=[Logs(), OfRankZero(), reads, stopping])
    mean = (ranks - 1) / 2
    expected = {
        "begin": [mean],
        "steps": [1.0, 1.0],
        "val_evaluated": [10 * mean] * 2,
        "score": [mean, mean + 1],
        "total": [float(sum(range(ranks)))] * 2,
        "of_rank_1": [5.0] * 2,
        "inserted_by_1": [7.0] * 2,
        "inserted": [mean] * 2,
        "twice": [1.0, 2.0 + mean] * 2,
        "equal": [0.1] * 2,
        "restricted": [3.0] * 2,
    }
    assert reads.same
    assert {name: reads.found[name] for name in expected} == expected
    assert stopping.best == mean + 1
    # And in the caller's process, with what the end of training added.
    assert {name: tl.history[name] for name in (*expected, "end")} == {**expected, "end": [mean]}
    assert tl.history.epochs("end") == [1]
    assert tl.history.epochs("begin") == [0]
    assert len(tl.history.steps("steps")) == 2 * -(-101 // (16 * ranks)) <= 2 * STEPS_PER_EPOCH


class LogsShards(AbstractCallback):
    """In fsdp, gradients and parameters are DTensors, and so are their norms."""

    def on_after_gradient_update(self, optimizer_idx: int) -> None:
        model = self.train_loop_obj.model
        self.log("clipped", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1), on_step=True)
        self.log("largest", model.fc.weight.grad.abs().max())

    def on_epoch_end(self) -> None:
        norm = self.train_loop_obj.model.fc.weight.detach().norm()
        self.train_loop_obj.insert_metric_result_into_history("norm", norm)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", FSDP])
def test_norms_of_shards_are_logged_as_those_of_one_process(mode: str) -> None:
    alone, ranks = make_loop(), make_loop(gpu_mode=mode, devices=2)
    alone.fit(num_epochs=1, grad_accumulation=2, callbacks=[LogsShards()])
    ranks.fit(num_epochs=1, callbacks=[LogsShards()])
    assert ranks.history["norm"] == pytest.approx(alone.history["norm"], rel=1e-4)
    for name in ("largest", "clipped"):
        assert ranks.history.steps(name) == pytest.approx(alone.history.steps(name), rel=1e-4), name
