"""Texts and pictures of a table, by transformers' own architectures in tiny configurations, from local folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_electra, tiny_vit

from trainloop.errors import ConfigurationError
from trainloop.tabular import TabularPredictor, get_hyperparameter_config, list_text_presets

transformers = pytest.importorskip("transformers")
pd = pytest.importorskip("pandas")
pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]

WORDS = "good bad warm cold bright dark fine poor the room was and it is".split()


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("TRAINLOOP_MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def rooms(folder: Path, rows: int = 120) -> Any:
    """A remark tells whether a room is warm, a picture whether it is bright."""
    from PIL import Image

    rng = np.random.default_rng(0)
    warm, bright = rng.random(rows) > 0.5, rng.random(rows) > 0.5
    lines = []
    for i in range(rows):
        light = rng.integers(160, 255, (20, 30, 3)) if bright[i] else rng.integers(0, 90, (20, 30, 3))
        Image.fromarray(light.astype("uint8")).save(folder / f"{i}.png")
        kind = " and ".join(rng.choice(WORDS[:2] + WORDS[6:8], 3))
        lines.append((f"the room was {'warm' if warm[i] else 'cold'} and it is {kind}", str(folder / f"{i}.png")))
    frame = pd.DataFrame(lines, columns=["remark", "picture"])
    frame["class"] = np.where(warm, "warm", "cold")
    frame["light"] = np.where(bright, 1.5, -1.5) + rng.normal(0, 0.1, rows)
    frame.loc[:2, "remark"] = None
    frame.loc[3:5, "picture"] = None
    return frame


def test_a_transformer_reads_texts_beside_one_that_sees_pictures(tmp_path: Path) -> None:
    tiny_electra(tmp_path / "models" / "google--electra-small-discriminator", WORDS)
    tiny_vit(tmp_path / "vit")
    data = rooms(tmp_path)
    hyperparameters = get_hyperparameter_config("multimodal")
    hyperparameters["AG_IMAGE_NN"] = {"model": str(tmp_path / "vit"), "learning_rate": 3e-3}
    del hyperparameters["GBM"], hyperparameters["NN_TORCH"]
    training = {"learning_rate": 0.01, "num_epochs": 60, "patience": 30, "batch_size": 16}  # weights are random
    hyperparameters["AG_TEXT_NN"] = [{"presets": "medium_quality_faster_train", **training}]
    text = TabularPredictor("class").fit(
        data[["remark", "picture", "class"]], hyperparameters=hyperparameters, verbosity=0
    )
    assert set(text.model_names) == {"TextPredictor", "ImagePredictor", "WeightedEnsemble_L2"}
    assert (text.predict(data, model="TextPredictor") == data["class"]).mean() > 0.9


def test_a_number_is_seen_in_pictures(tmp_path: Path) -> None:
    tiny_vit(tmp_path / "vit")
    data = rooms(tmp_path)
    settings = {"model": str(tmp_path / "vit"), "learning_rate": 3e-3}
    picture = TabularPredictor("light").fit(
        data[["picture", "light"]], hyperparameters={"AG_IMAGE_NN": settings}, num_cpus=1, verbosity=0
    )
    assert picture.evaluate(data)["r2"] > 0.8
    loaded = TabularPredictor.load(picture.save(tmp_path / "saved"))
    assert np.allclose(loaded.predict(data), picture.predict(data), atol=1e-5)


def test_without_weights_the_preset_and_the_folder_to_fill_are_named(tmp_path: Path) -> None:
    data = rooms(tmp_path)
    for preset in list_text_presets():
        with pytest.raises(
            ConfigurationError, match=rf"text preset '{preset}'.*could not be downloaded.*Put the model's"
        ) as e:
            TabularPredictor("class").fit(data, hyperparameters={"AG_TEXT_NN": [preset]}, verbosity=0)
        assert str(tmp_path / "models") in str(e.value)
