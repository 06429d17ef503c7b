"""Networks for texts and pictures: transformers and timm architectures as ``TTModel``, with weights from a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainloop.errors import ConfigurationError
from trainloop.model import TTBasicModel, TTModel
from trainloop.tabular.network import NeuralAdapter
from trainloop.tabular.presets import import_timm

__all__ = ["PictureNetwork", "TextNetwork"]

_HELD_BYTES = 2**29  # decoded pictures up to this size stay in memory


def _of_transformers(kind: str, folder: str, num_outputs: int) -> nn.Module:
    import transformers

    module: nn.Module = getattr(transformers, kind).from_pretrained(
        folder, num_labels=num_outputs, ignore_mismatched_sizes=True, local_files_only=True
    )
    return module


class Texts(TTBasicModel):
    """A transformers model that maps tokens to logits."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.module(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


class TextNetwork(NeuralAdapter):
    """A transformers model on all text columns, joined into one text."""

    defaults = {**NeuralAdapter.defaults, "learning_rate": 1e-4, "weight_decay": 1e-3, "num_epochs": 10}
    defaults |= {"patience": 3, "batch_size": 32, "max_length": 128}

    def prepare(self, table: pd.DataFrame) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(self.params["model"], local_files_only=True)

    def build(self) -> TTModel:
        outputs = self.given.target.num_outputs
        return Texts(_of_transformers("AutoModelForSequenceClassification", self.params["model"], outputs))

    def inputs(self, table: pd.DataFrame) -> Sequence[Tensor]:
        separator = f" {self._tokenizer.sep_token or ''} "
        texts = [separator.join(row) for row in table[self.given.columns.of("text")].itertuples(index=False)]
        length = self.params["max_length"]
        tokens = self._tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        return tokens["input_ids"], tokens["attention_mask"]


class Pictures(TTBasicModel):
    """An image model on pixels of 0 to 255. The logits of a row are the mean over its pictures."""

    def __init__(self, module: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.module = module
        self.mean = nn.Buffer(torch.tensor(mean).view(1, -1, 1, 1))
        self.std = nn.Buffer(torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, pictures: Tensor) -> Tensor:
        rows, several = pictures.shape[:2]
        found = self.module((pictures.flatten(0, 1).float() / 255 - self.mean) / self.std)
        logits: Tensor = getattr(found, "logits", found)
        return logits.view(rows, several, -1).mean(dim=1)


class PictureNetwork(NeuralAdapter):
    """A timm or transformers model, or the module that a function of the user returns, on all picture columns."""

    defaults = {**NeuralAdapter.defaults, "learning_rate": 3e-4, "num_epochs": 30, "patience": 5}

    def prepare(self, table: pd.DataFrame) -> None:
        known: dict[str, Any] = {}
        if not callable(self.params["model"]):
            for file in (Path(self.params["model"], name) for name in ("preprocessor_config.json", "config.json")):
                known = {**(json.loads(file.read_text()) if file.exists() else {}), **known}
            known |= known.get("pretrained_cfg", {})

        def one_of(*names: str, default: Any) -> Any:
            return next((each[name] for each in (self.params, known) for name in names if each.get(name)), default)

        size = one_of("size", "input_size", "image_size", default=224)
        size = next(iter(size.values())) if isinstance(size, dict) else size
        self._size = int(size[-1] if isinstance(size, (list, tuple)) else size)
        self._mean_of = one_of("mean", "image_mean", default=(0.485, 0.456, 0.406))  # ImageNet's
        self._std_of = one_of("std", "image_std", default=(0.229, 0.224, 0.225))

    def build(self) -> TTModel:
        outputs, model = self.given.target.num_outputs, self.params["model"]
        if callable(model):
            module = model(outputs)
        elif "model_type" in json.loads(Path(model, "config.json").read_text()):
            module = _of_transformers("AutoModelForImageClassification", model, outputs)
        else:
            module = import_timm("AG_IMAGE_NN").create_model(f"local-dir:{model}", pretrained=True, num_classes=outputs)
        return Pictures(module, self._mean_of, self._std_of)

    def inputs(self, table: pd.DataFrame) -> Sequence[Tensor | Dataset[Any]]:
        files = _Files(table[self.given.columns.of("picture")].to_numpy().tolist(), self._size)
        if len(files) * len(files.paths[0]) * 3 * self._size**2 > _HELD_BYTES:
            return (files,)
        return (torch.stack([files[row] for row in range(len(files))]),)


class _Files(Dataset[Tensor]):
    """Picture files, read on access. A missing picture is black."""

    def __init__(self, paths: list[list[str]], size: int) -> None:
        self.paths = paths
        self._size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> Tensor:
        return torch.stack([self._read(path) for path in self.paths[row]])

    def _read(self, path: str) -> Tensor:
        if not path:
            return torch.zeros(3, self._size, self._size, dtype=torch.uint8)
        from PIL import Image

        try:
            with Image.open(path) as file:
                picture = np.array(file.convert("RGB").resize((self._size, self._size)))
        except OSError as error:
            raise ConfigurationError(
                f"the picture {path!r} can't be read ({error}); paths are taken from {os.getcwd()!r}. "
                "Mend the path, or leave the cell empty."
            ) from error
        return torch.from_numpy(picture).permute(2, 0, 1)
