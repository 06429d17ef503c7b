"""``tl.evaluate(loader)``: the loss and all logged values, the same in all modes, in and outside of ``fit``."""

from __future__ import annotations

from typing import Any

import pytest
from kit.small_loop import BATCH_SIZE, make_loop
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback

MODES: list[tuple[str, dict[str, Any]]] = [
    (mode, {} if mode == "single" else {"devices": 2}) for mode in ("single", "dp", "ddp", "fsdp")
]


class EvaluatesAtEpochEnd(AbstractCallback):
    def __init__(self, loader: Any) -> None:
        super().__init__("evaluates")
        self.loader = loader
        self.found: dict[str, float] = {}

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        if dataset_info["type"] == "other":
            self.log("evaluations", 1.0)

    def on_epoch_end(self) -> None:
        self.found = self.train_loop_obj.evaluate(self.loader)


@pytest.mark.long
@pytest.mark.parametrize("mode, options", MODES, ids=[mode for mode, _ in MODES])
def test_evaluate_returns_the_loss_and_all_logged_values(mode: str, options: dict[str, Any]) -> None:
    loop = make_loop(gpu_mode=mode, seed=0, **options)
    # On two ranks, the global batch has twice the size: the weights differ from those of one process.
    callback = EvaluatesAtEpochEnd(DataLoader(make_data(33, seed=5), BATCH_SIZE))
    loop.fit(1, callbacks=[callback])
    found = callback.found
    assert found == {
        "loss": pytest.approx(loop.history["val_loss"][-1]),
        "accuracy": pytest.approx(loop.history["val_accuracy"][-1]),
        "evaluations": 1.0,
    }
    assert loop.history["accuracy"] != [found["accuracy"]]  # the training's own value
    assert "evaluations" not in loop.history
    before = loop.history.to_dict()
    assert loop.evaluate(loop.validation_loader) == pytest.approx(found)
    assert loop.history.to_dict() == before
