"""``trainloop.pretrained`` with transformers' and timm's own architectures, trained here and by a hand-written loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_electra, tiny_vit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop
from trainloop.pretrained import PictureModel, TextModel

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]

TEXTS = [f"the room was {word} and {other}" for word in ("warm", "cold", "") for other in ("fine", "dark", "fine fine")]
LABELS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make_electra(folder: Path) -> None:
    pytest.importorskip("transformers")
    words = sorted({word for text in TEXTS for word in text.split()})
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    tiny_electra(folder, words, width=8, **no_dropout)


def trained(folder: Path, **modes: Any) -> nn.Module:
    torch.manual_seed(0)
    model = TextModel.load(str(folder), num_outputs=3).double()
    loader = DataLoader(TensorDataset(*model.tokens(TEXTS), LABELS), batch_size=4 // modes.get("devices", 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tl = TrainLoop(model, loader, None, None, optimizer, nn.CrossEntropyLoss(), progress_bar=False, **modes)
    return tl.fit(num_epochs=2)


def test_texts_train_as_by_a_hand_written_loop_in_one_process_and_in_two(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make_electra(tmp_path / "electra")
    torch.manual_seed(0)
    by_hand = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "electra", num_labels=3, ignore_mismatched_sizes=True
    )
    by_hand = by_hand.double().train()
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "electra")(TEXTS, padding=True, return_tensors="pt")
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    for _ in range(2):
        for first in range(0, len(TEXTS), 4):
            part = {name: tokens[name][first : first + 4] for name in ("input_ids", "attention_mask")}
            optimizer.zero_grad()
            nn.functional.cross_entropy(by_hand(**part).logits, LABELS[first : first + 4]).backward()
            optimizer.step()
    for modes in ({}, {"gpu_mode": "ddp", "accelerator": "cpu", "devices": 2}):
        for name, weight in trained(tmp_path / "electra", **modes).module.named_parameters():  # type: ignore[union-attr]
            assert torch.allclose(weight, by_hand.get_parameter(name), atol=1e-9), (modes, name)


def test_long_texts_are_cut_and_the_last_layer_is_new(tmp_path: Path) -> None:
    make_electra(tmp_path / "electra")
    model = TextModel.load(str(tmp_path / "electra"), num_outputs=7).eval()
    ids, mask = model.tokens(["fine " * 50, "fine"], max_length=10)
    assert ids.shape == mask.shape == (2, 10)
    assert mask.sum(dim=1).tolist() == [10, 3]
    assert model(ids, mask).shape == (2, 7)


def test_pictures_are_normalised_as_the_model_s_own_configuration_says(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    pytest.importorskip("transformers")
    own = timm.create_model("test_resnet", num_classes=10)
    timm.models.save_for_hf(own, tmp_path / "resnet")
    expected = timm.data.resolve_data_config(own.pretrained_cfg)
    model = PictureModel.load(str(tmp_path / "resnet"), num_outputs=4)
    assert model.size == expected["input_size"][-1]
    assert model.mean.flatten().tolist() == pytest.approx(expected["mean"])
    assert model.std.flatten().tolist() == pytest.approx(expected["std"])
    assert model(torch.zeros(2, 3, model.size, model.size, dtype=torch.uint8)).shape == (2, 4)
    vit = tiny_vit(tmp_path / "vit")
    said = {"size": {"height": 16, "width": 16}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(said))
    model = PictureModel.load(str(tmp_path / "vit"), num_outputs=2, std=(0.5, 0.5, 0.5)).eval()
    assert model.size == 16
    pixels = torch.randint(0, 255, (2, 3, 16, 16), dtype=torch.uint8)
    vit.load_state_dict(model.module.state_dict())
    scaled = (pixels / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / 0.5
    assert torch.allclose(model(pixels), vit.eval()(scaled).logits, atol=1e-6)
