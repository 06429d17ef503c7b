"""``tl.evaluate(loader)``: the loss and all logged values, the same in all modes, in and outside of ``fit``."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from kit.loops import cpu_loop
from kit.small_loop import BATCH_SIZE, make_loop
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, TensorDataset

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel, TTModel

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


class Draws(TTBasicModel):
    """Its predictions are random, as with Monte Carlo dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return torch.rand(len(batch_data[0])), batch_data[1], {}


class ShowsInputs(Draws):
    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return batch_data[0], batch_data[1], {}


class Repeats(AbstractCallback):
    def on_epoch_end(self) -> None:
        first, second = (self.train_loop_obj.predict_on_validation_set()[0] for _ in range(2))
        assert torch.equal(first, second)


class Jittered(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with an augmentation that draws from the generator of the given library."""

    def __init__(self, library: str) -> None:
        self.library = library

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = {"torch": lambda: float(torch.rand(())), "numpy": np.random.random, "python": random.random}
        return torch.full((6,), drawn[self.library]()), torch.zeros((), dtype=torch.long)


def loop_of(model: TTModel, data: Dataset[Any], mode: str, options: dict[str, Any], workers: int = 0) -> TrainLoop[Any]:
    train, validation, test = (DataLoader(data, 5, num_workers=workers) for _ in range(3))
    sgd = optim.SGD(model.parameters(), lr=0.1)
    return cpu_loop(model, train, sgd, validation_loader=validation, test_loader=test, gpu_mode=mode, **options)


@pytest.mark.long
@pytest.mark.filterwarnings("always:get_predictions draws")
@pytest.mark.parametrize("mode, options", MODES, ids=[mode for mode, _ in MODES])
def test_passes_draw_from_the_callers_random_state_and_repeated_ones_within_fit_warn(
    mode: str, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    data = TensorDataset(torch.randn(10, 6), torch.zeros(10, dtype=torch.long))
    loop = loop_of(Draws(), data, mode, options)
    rows = []
    for seed in (1, 2, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        rows.append(loop.predict_on_test_set()[0])
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[3])  # Monte Carlo dropout outside of fit
    in_ranks = mode in ("ddp", "fsdp")  # rank 0 prints its warnings
    assert "draws the same ones" not in capfd.readouterr().err
    with nullcontext() if in_ranks else pytest.warns(UserWarning, match="draws the same ones as the last call"):
        loop.fit(1, callbacks=[Repeats()])
    assert ("draws the same ones as the last call" in capfd.readouterr().err) == in_ranks
    loop.predict_on_validation_set()
    assert "draws the same ones" not in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("library", ["torch", "numpy", "python"])
@pytest.mark.parametrize("mode, options", MODES, ids=[mode for mode, _ in MODES])
def test_repeated_passes_over_random_transforms_differ_as_in_a_hand_written_loop(
    mode: str, options: dict[str, Any], library: str
) -> None:
    for workers in (0, 1):
        loop = loop_of(ShowsInputs(), Jittered(library), mode, options, workers)
        first, second = (loop.predict_on_test_set()[0] for _ in range(2))
        assert not (first == second).any()
        assert loop.evaluate_loss_on_test_set() != loop.evaluate_loss_on_test_set()
