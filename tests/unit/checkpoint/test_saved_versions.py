"""Saved predictors of other versions: the error says which version wrote the file, and what to do."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import trainloop
from trainloop.errors import CheckpointError
from trainloop.tabular import TabularPredictor
from trainloop.tuning import BaggedPredictor, storage


class Mean:
    def predict(self, x: Any) -> Any:
        return [0.5] * len(x)


def file_of(path: Path, head: str, body: bytes) -> None:
    """As ``save`` writes it."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(f"{head}\n{hashlib.sha256(body).hexdigest()}\n".encode() + body)
    os.chmod(path, 0o600)


def test_a_file_says_which_version_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "__version__", "7.8.9.dev1+local")
    BaggedPredictor([Mean()]).save(tmp_path / "bag")
    assert (tmp_path / "bag").read_bytes().startswith(b"trainloop bagged predictor 1 by 7.8.9.dev1+local\n")
    # a later version of the same layout reads it
    monkeypatch.undo()
    assert BaggedPredictor.load(tmp_path / "bag").predict([1, 2]).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "head, what",
    [
        ("trainloop tabular predictor 2", "was written by an earlier version of trainloop in file layout 2, but "),
        ("trainloop tabular predictor 99 by 9.1", r"was written by trainloop 9\.1 in file layout 99, but "),
    ],
)
def test_another_layout_names_its_version_and_is_not_read(head: str, what: str, tmp_path: Path) -> None:
    file_of(tmp_path / "p" / "predictor.pkl", head, b"not to be unpickled")
    with pytest.raises(
        CheckpointError, match=what + f"trainloop {trainloop.__version__} reads only .*Load it with the"
    ):
        TabularPredictor.load(tmp_path / "p")


def test_a_class_that_is_gone_is_told_with_the_version(tmp_path: Path) -> None:
    body = pickle.dumps([Mean()]).replace(b"Mean", b"Gone")
    for head, by in (
        ("trainloop bagged predictor 1 by 0.0.9", r"trainloop 0\.0\.9"),
        ("trainloop bagged predictor 1", "an earlier version of trainloop"),
    ):
        file_of(tmp_path / "bag", head, body)
        with pytest.raises(CheckpointError, match=rf"was written by {by}, and .*AttributeError.*Gone.*Load it with"):
            BaggedPredictor.load(tmp_path / "bag")


@pytest.mark.parametrize("head", ["trainloop bagged predictor", "trainloop tabular predictor 1", "", "x" * 300])
def test_something_else_is_no_predictor(head: str, tmp_path: Path) -> None:
    file_of(tmp_path / "bag", head, b"")
    with pytest.raises(CheckpointError, match="is not a bagged predictor"):
        BaggedPredictor.load(tmp_path / "bag")
