"""Use transformers and timm architectures for text and pictures as ``TTModel``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainloop.devices import whole_number
from trainloop.errors import ConfigurationError
from trainloop.model import TTBasicModel
from trainloop.pretrained.finding import find_picture_model, find_text_model, import_library


class TextModel(TTBasicModel):
    """A transformers model that predicts a score for each class, or numbers, from texts.

    Its batches are ``(input_ids, attention_mask, target)``. :meth:`tokens` returns the first two.

    Parameters
    ----------
    module : nn.Module
        A transformers model whose result has ``logits``.
    tokenizer : callable
        Tokenizer of the model.

    Examples
    --------
    >>> model = TextModel.load("google/electra-small-discriminator", num_outputs=2)  # doctest: +SKIP
    >>> data = TensorDataset(*model.tokens(texts), labels)  # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # doctest: +SKIP
    >>> tl = TrainLoop(model, DataLoader(data, 32), None, None, optimizer, nn.CrossEntropyLoss())  # doctest: +SKIP
    """

    def __init__(self, module: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.module = module
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, model: str, num_outputs: int) -> TextModel:
        """Load a model and its tokenizer.

        Parameters
        ----------
        model : str
            A folder that ``save_pretrained`` wrote, or a name on the hub (:func:`find_text_model`).
        num_outputs : int
            Number of classes, or of numbers to predict.
        """
        transformers = import_library("transformers", "TextModel.load")  # first, for a clear error without it
        folder = find_text_model(model, wanted_by="TextModel.load")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(_of_transformers("AutoModelForSequenceClassification", folder, num_outputs), tokenizer)

    def tokens(self, texts: Sequence[str], max_length: int = 128) -> tuple[Tensor, Tensor]:
        """Return token ids and attention mask, each of shape (texts, longest length). Long texts are truncated."""
        found = self.tokenizer(list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        return found["input_ids"], found["attention_mask"]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits, of shape (texts, num_outputs)."""
        logits: Tensor = self.module(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


class PictureModel(TTBasicModel):
    """A network that predicts a score for each class, or numbers, from pictures with pixels from 0 to 255.

    Its batches are ``(pictures, target)``. A sample may consist of several pictures; their outputs are averaged.

    Parameters
    ----------
    module : nn.Module
        Module that maps pictures of shape (n, 3, size, size) to logits of shape (n, num_outputs), or to an object with
        ``logits``.
    size : int
        Width and height of the pictures. If it is a shape or a mapping, as in model configurations, its last value is
        used.
    mean, std : sequence of float
        Mean and standard deviation of each channel, for values from 0 to 1. Defaults: the values of ImageNet.

    Examples
    --------
    >>> model = PictureModel.load("mobilenetv3_large_100", num_outputs=2)  # doctest: +SKIP
    >>> data = StackDataset(PictureFiles(paths, model.size), labels)  # doctest: +SKIP
    """

    def __init__(
        self,
        module: nn.Module,
        size: int | Sequence[int] | Mapping[str, int] = 224,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
    ) -> None:
        super().__init__()
        self.module = module
        sides = list(size.values()) if isinstance(size, Mapping) else size
        side = whole_number(sides)
        self.size = int(sides[-1]) if side is None else side  # type: ignore[index]
        self.mean = nn.Buffer(torch.tensor(mean).view(1, -1, 1, 1))
        self.std = nn.Buffer(torch.tensor(std).view(1, -1, 1, 1))

    @classmethod
    def load(cls, model: str, num_outputs: int, **settings: Any) -> PictureModel:
        """Load a model, and the size, mean and std of the pictures that it was trained on.

        Parameters
        ----------
        model : str
            A folder that ``save_pretrained`` of transformers or ``save_for_hf`` of timm wrote, or a timm name
            (:func:`find_picture_model`).
        num_outputs : int
            Number of classes, or of numbers to predict.
        **settings
            ``size``, ``mean`` and ``std``. Default: the values in the model's configuration.
        """
        folder = find_picture_model(model, wanted_by="PictureModel.load")
        known = _configuration(Path(folder))
        if "model_type" in known:
            module = _of_transformers("AutoModelForImageClassification", folder, num_outputs)
        else:
            timm = import_library("timm", f"PictureModel.load of {folder!r}")
            module = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=num_outputs)
        names = {
            "size": ("size", "input_size", "image_size"),
            "mean": ("mean", "image_mean"),
            "std": ("std", "image_std"),
        }
        for name, keys in names.items():
            settings.setdefault(name, next((known[key] for key in keys if known.get(key)), None))
        return cls(module, **{name: value for name, value in settings.items() if value is not None})

    def forward(self, pictures: Tensor) -> Tensor:
        """Return logits of shape (n, num_outputs), for pictures of shape (n, 3, size, size) or (n, several, 3, ...)."""
        several = pictures.unsqueeze(1) if pictures.dim() == 4 else pictures
        found = self.module((several.flatten(0, 1).float() / 255 - self.mean) / self.std)
        logits: Tensor = getattr(found, "logits", found)
        return logits.view(*several.shape[:2], -1).mean(dim=1)


class PictureFiles(Dataset[Tensor]):
    """A dataset of picture files, which are read on access. An empty path yields a black picture.

    Parameters
    ----------
    paths : sequence of str, or of sequences of str
        One or several paths for each sample.
    size : int
        Width and height to resize pictures to.

    Raises
    ------
    ConfigurationError
        On access, if a file can't be read.
    """

    def __init__(self, paths: Sequence[str] | Sequence[Sequence[str]], size: int = 224) -> None:
        self.paths = list(paths)  # a pandas column finds rows by their labels, not by their places
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        """Return RGB values as bytes, of shape (3, size, size), or (several, 3, size, size)."""
        paths = self.paths[index]
        if isinstance(paths, (str, os.PathLike)):
            return self._load_picture(os.fspath(paths))
        return torch.stack([self._load_picture(path) for path in paths])

    def _load_picture(self, path: str) -> Tensor:
        if not path:
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8)
        image = import_library("PIL.Image", "PictureFiles")
        try:
            with image.open(path) as file:
                picture = np.array(file.convert("RGB").resize((self.size, self.size)))
        except OSError as error:
            raise ConfigurationError(
                f"the picture {path!r} can't be read ({error}). Paths are relative to {os.getcwd()!r}. Fix the path, "
                "or leave it empty for a black picture."
            ) from error
        return torch.from_numpy(picture).permute(2, 0, 1)


def _configuration(folder: Path) -> dict[str, Any]:
    """Return the configuration in a model's folder."""
    known: dict[str, Any] = {}
    for file in (folder / name for name in ("preprocessor_config.json", "config.json")):
        known = {**(json.loads(file.read_text()) if file.exists() else {}), **known}
    return known | known.get("pretrained_cfg", {})


def _of_transformers(kind: str, folder: str, num_outputs: int) -> nn.Module:
    auto = getattr(import_library("transformers", f"the model in {folder!r}"), kind)
    module: nn.Module = auto.from_pretrained(
        folder, num_labels=num_outputs, ignore_mismatched_sizes=True, local_files_only=True
    )
    return module
