"""Pretrained networks for text and pictures, from transformers and timm, each as a ``TTModel``.

They predict your own classes or numbers: if the last layer of a model does not fit, it is replaced. Weights are loaded
from a folder, or from the Hugging Face hub. The extra ``multimodal`` installs the libraries.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainloop.pretrained.finding import find_picture_model, find_text_model

if TYPE_CHECKING:
    from trainloop.pretrained.models import PictureFiles, PictureModel, TextModel

__all__ = ["PictureFiles", "PictureModel", "TextModel", "find_picture_model", "find_text_model"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because finding a folder does not need torch.
    if name in __all__:
        return getattr(importlib.import_module("trainloop.pretrained.models"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
