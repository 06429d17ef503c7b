"""Confusion matrices: numbers against scikit-learn's, the picture in TensorBoard, what can't be counted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, Net, make_loop
from sklearn.metrics import confusion_matrix as reference
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainloop.callbacks import ConfusionMatrix, ModelCheckpoint, TensorBoard
from trainloop.callbacks.reports.performance_eval import confusion_matrix
from trainloop.errors import ConfigurationError


def predictions_of(loop: Any) -> tuple[Any, Any]:
    y_pred, y_true, _ = loop.predict_on_validation_set()
    return y_pred.numpy(), y_true.numpy()


def test_numbers_and_picture(tmp_path: Path, may_leave: Any) -> None:
    may_leave("/mpl-data/fonts/")  # matplotlib keeps its fonts open
    matrix = ConfusionMatrix(every_n_epochs=2, class_names=["a", "b"], path=tmp_path / "made" / "matrix.png")
    loop = make_loop()
    loop.fit(num_epochs=3, callbacks=[matrix, TensorBoard(tmp_path / "logs")])
    assert matrix.matrix is not None
    reader = EventAccumulator(str(tmp_path / "logs"))
    reader.Reload()
    [image] = reader.Images("confusion_matrix/validation")
    assert image.step == 2 * STEPS_PER_EPOCH
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert (tmp_path / "made" / "matrix.png").stat().st_size > 1000

    plain = make_loop()
    plain.fit(num_epochs=2)  # as it was when the matrix was taken
    y_pred, y_true = predictions_of(plain)
    assert matrix.matrix.tolist() == reference(y_true, y_pred, labels=range(3)).tolist()
    figure = matrix.draw()
    [axes] = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "2"]  # the third has no name
    assert sum(int(text.get_text()) for text in axes.texts) == 33


def test_a_run_that_has_ended_has_its_matrix_when_it_is_started_again(tmp_path: Path) -> None:
    first, again = ConfusionMatrix(), ConfusionMatrix()
    for matrix in (first, again):
        make_loop().fit(num_epochs=2, callbacks=[matrix, ModelCheckpoint(tmp_path)], resume_from="last")
    assert first.matrix is not None
    assert again.matrix is not None
    assert torch.equal(again.matrix, first.matrix)


def test_scores_and_the_test_set() -> None:
    class Scores(Net):
        def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
            x, y = batch_data
            return self(x.to(device)), y, {}

    loop = make_loop(Scores())
    loop.test_loader = loop.validation_loader
    matrix = ConfusionMatrix("test")
    loop.fit(num_epochs=1, callbacks=[matrix])
    y_pred, y_true = predictions_of(loop)
    assert matrix.matrix is not None
    assert matrix.matrix.tolist() == reference(y_true, y_pred.argmax(1), labels=range(3)).tolist()


@pytest.mark.parametrize("make", [np.array, torch.tensor, list], ids=["numpy", "tensor", "list"])
def test_kinds_of_rows(make: Any) -> None:
    y_pred, y_true = [0, 2, 2, 5], [0, 1, 2, 2]
    expected = reference(y_true, y_pred, labels=range(8))
    assert confusion_matrix(make(y_pred), make(y_true), 8).tolist() == expected.tolist()
    assert confusion_matrix(make([1.0, 0.0]), make([0, 0])).tolist() == [[1, 1], [0, 0]]
    assert confusion_matrix(torch.empty(0), torch.empty(0), 2).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    "y_pred, y_true, words",
    [
        (
            torch.tensor([0.5, 0.2]),
            torch.tensor([0, 1]),
            "predictions are numbers, of which each would count as a class",
        ),
        (torch.tensor([-100, 0]), torch.tensor([0, 1]), "y_pred that get_predictions returned are not classes"),
        (torch.zeros(2, 3, 4), torch.tensor([0, 1]), "predictions have shape (2, 3), but targets have shape (2,)"),
        (["cat", "dog"], torch.tensor([0, 1]), "y_pred that get_predictions returned are not classes"),
        (torch.tensor([0, 1, 1]), torch.tensor([0, 1]), "predictions have shape (3,), but targets have shape (2,)"),
    ],
)
def test_what_cannot_be_counted(y_pred: Any, y_true: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        confusion_matrix(y_pred, y_true)
    assert words in str(error.value)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the loop has no test_loader"):
        make_loop().fit(num_epochs=1, callbacks=[ConfusionMatrix("test")])
    with pytest.raises(ConfigurationError, match="nothing has been predicted yet"):
        ConfusionMatrix().draw()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[plot\]'"):
        make_loop().fit(num_epochs=1, callbacks=[ConfusionMatrix(), TensorBoard(tmp_path)])
    matrix = ConfusionMatrix()  # numbers need no picture
    make_loop().fit(num_epochs=1, callbacks=[matrix])
    assert matrix.matrix is not None
