"""``trainloop.pretrained`` without its libraries: pictures, models of one's own, and folders that are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset

from trainloop import TrainLoop
from trainloop.errors import ConfigurationError
from trainloop.pretrained import PictureFiles, PictureModel, TextModel, find_picture_model, find_text_model

ROWS, SIZE = 11, 8


class Dim(nn.Module):
    """Two logits of a picture; ``wrapped`` as transformers hands them over."""

    def __init__(self, wrapped: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * SIZE * SIZE, 2)
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Any:
        logits = self.layer(x.flatten(1))
        return type("Output", (), {"logits": logits}) if self.wrapped else logits


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for i in range(ROWS):
        Image.fromarray(rng.integers(0, 255, (13, 17, 3)).astype("uint8")).save(tmp_path / f"{i}.png")
    return [str(tmp_path / f"{i}.png") for i in range(ROWS)]


def test_files_are_read_as_pillow_resizes_them(paths: list[str], tmp_path: Path) -> None:
    files = PictureFiles(paths, SIZE)
    with Image.open(paths[3]) as file:
        expected = np.asarray(file.resize((SIZE, SIZE))).transpose(2, 0, 1)
    assert np.array_equal(files[3], expected)
    several = PictureFiles([[paths[3], ""], ["", paths[3]]], SIZE)
    assert len(several) == 2
    assert np.array_equal(several[1][1], expected)
    assert not several[1][0].any()  # black
    Image.open(paths[0]).convert("L").save(tmp_path / "grey.png")
    assert PictureFiles([tmp_path / "grey.png"], SIZE)[0].shape == (3, SIZE, SIZE)
    column = pytest.importorskip("pandas").Series(paths[:3], index=[2, 1, 0])
    assert np.array_equal(PictureFiles(column, SIZE)[0], PictureFiles(paths, SIZE)[0])
    (tmp_path / "no.png").write_text("no picture")
    for wrong in (tmp_path / "no.png", tmp_path / "nowhere.png"):
        with pytest.raises(ConfigurationError, match=f"the picture '{wrong}' can't be read .*Paths are relative to"):
            PictureFiles([str(wrong)], SIZE)[0]


def test_a_model_trains_as_by_a_hand_written_loop(paths: list[str]) -> None:
    """Transformers' ImageNet constants are the defaults; the mean over a sample's pictures counts."""
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    labels = torch.arange(ROWS) % 2
    pairs = PictureFiles([[paths[i], paths[(i * 3) % ROWS]] for i in range(ROWS)], SIZE)
    torch.manual_seed(0)
    by_hand = Dim()
    model = PictureModel(Dim(wrapped=True), SIZE)
    model.module.load_state_dict(by_hand.state_dict())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.01)
    for first in range(0, ROWS, 4):
        pictures = torch.stack([pairs[i] for i in range(first, min(first + 4, ROWS))])
        logits = sum(by_hand((pictures[:, k].float() / 255 - mean) / std) for k in range(2)) / 2
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, labels[first : first + 4]).backward()
        optimizer.step()
    loader = DataLoader(StackDataset(pairs, labels), batch_size=4)  # type: ignore[arg-type]
    ours = torch.optim.SGD(model.parameters(), lr=0.01)
    tl = TrainLoop(model, loader, None, loader, ours, nn.CrossEntropyLoss(), progress_bar=False)
    tl.fit(num_epochs=1)
    assert torch.allclose(model.module.layer.weight, by_hand.layer.weight, atol=1e-6)
    assert tl.predict_on_test_set()[0].shape == (ROWS, 2)
    one = torch.stack([PictureFiles(paths, SIZE)[i] for i in range(3)])
    assert torch.allclose(model(one), model(one.unsqueeze(1)))


@pytest.mark.parametrize(
    "size", [12, np.int64(12), (3, 12, 12), [12, 12], {"height": 12, "width": 12}, {"shortest_edge": 12}]
)
def test_sizes_as_configurations_write_them(size: Any) -> None:
    assert PictureModel(Dim(), size).size == 12


def test_folders_are_found_by_name_and_those_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINLOOP_MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in ("plain", "of--someone", "of/another"):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        for find in (find_text_model, find_picture_model):
            assert find(name.replace("--", "/")) == str(folder)
            assert find(str(folder)) == str(folder)
    monkeypatch.chdir(tmp_path / "models")
    assert find_text_model("./plain") == str(tmp_path / "models" / "plain")
    fill = str(tmp_path / "models" / "who--knows")
    with pytest.raises(ConfigurationError, match=rf"not on this machine, and could not be downloaded .* into '{fill}'"):
        find_text_model("who/knows")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigurationError, match=r"find_picture_model needs timm, .*'\.\[multimodal\]', with a"):
        find_picture_model("no_such_net")


def test_a_text_model_without_transformers_blames_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINLOOP_MODEL_DIR", str(tmp_path))
    for name in ("transformers", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"TextModel.load needs transformers, .*'\.\[multimodal\]'"):
        TextModel.load("who/knows", num_outputs=2)


@pytest.mark.usefixtures("starts_processes")
def test_to_look_for_a_folder_takes_no_torch() -> None:
    """The process that starts others need not import it."""
    code = "import sys, trainloop.pretrained; print('torch' in sys.modules, 'PIL' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["False", "False"]
    import trainloop.pretrained

    with pytest.raises(AttributeError, match="has no attribute 'SoundModel'"):
        trainloop.pretrained.SoundModel  # noqa: B018
