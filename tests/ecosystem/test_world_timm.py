"""timm's own architectures in ``trainloop.tabular``: its tiny test models, from a folder, and without a network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from trainloop.errors import ConfigurationError
from trainloop.tabular import TabularPredictor, list_image_models

timm = pytest.importorskip("timm")
pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("TRAINLOOP_MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def striped(folder: Path, rows: int = 60) -> pd.DataFrame:
    """Pictures with stripes across or down; some rows have no picture."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(rows):
        across = bool(rng.random() > 0.5)
        stripes = np.tile((np.arange(48) // 6 % 2 * 200)[:, None], (1, 48)) + rng.integers(0, 50, (48, 48))
        Image.fromarray((stripes if across else stripes.T).astype("uint8")).save(folder / f"{i}.png")
        lines.append((str(folder / f"{i}.png"), "across" if across else "down"))
    frame = pd.DataFrame(lines, columns=["picture", "class"])
    frame.loc[:1, "picture"] = None
    return frame


def test_timm_models_learn_from_local_folders(tmp_path: Path) -> None:
    """Both in one fit: a process imports torch and timm once, which takes longer than the training."""
    data, models = striped(tmp_path), []
    for name, options in (("test_resnet", {}), ("test_vit", {"img_size": 32})):
        network = timm.create_model(name, num_classes=10, **options)
        timm.models.save_for_hf(network, tmp_path / "models" / name, model_args=options)
        models.append({"model": name, "size": 32, "learning_rate": 3e-3, "num_epochs": 12, "batch_size": 8})
    predictor = TabularPredictor("class").fit(data, hyperparameters={"AG_IMAGE_NN": models}, verbosity=0)
    assert predictor.model_names == ["ImagePredictor", "ImagePredictor_2", "WeightedEnsemble_L2"]
    for name in predictor.model_names:
        assert predictor.evaluate(data, model=name)["accuracy"] > 0.9, name
    loaded = TabularPredictor.load(predictor.save(tmp_path / "saved"))
    assert np.allclose(loaded.predict_proba(data), predictor.predict_proba(data), atol=1e-5)


def test_names_are_timm_s_and_weights_that_are_not_here_name_the_folder_to_fill(tmp_path: Path) -> None:
    names = list_image_models()
    assert names[:10] == timm.list_models(pretrained=True)[:10]
    data = striped(tmp_path, 4)
    for model in (names[0], "mobilenetv3_large_100"):
        with pytest.raises(
            ConfigurationError, match=f"image model '{model}'.*could not be downloaded.*Put the"
        ) as caught:
            TabularPredictor("class").fit(data, hyperparameters={"AG_IMAGE_NN": {"model": model}}, verbosity=0)
        assert str(tmp_path / "models" / model) in str(caught.value)
    with pytest.raises(ConfigurationError, match="'no_such_net' is neither a folder nor a timm name"):
        TabularPredictor("class").fit(data, hyperparameters={"AG_IMAGE_NN": {"model": "no_such_net"}}, verbosity=0)
