"""Where the weights of texts' and pictures' networks are, found before any process starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainloop.errors import ConfigurationError
from trainloop.tabular.models import check_installed
from trainloop.tabular.presets import TEXT_PRESETS, import_timm, named

__all__ = ["picture_settings", "text_settings"]

_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors"]
_DEFAULT_PICTURES = "mobilenetv3_large_100"


def models_folder() -> Path:
    """Where models are looked for by name: ``$TRAINLOOP_MODEL_DIR``, or a folder of this user's cache."""
    return Path(os.environ.get("TRAINLOOP_MODEL_DIR") or Path.home() / ".cache" / "trainloop" / "models")


def text_settings(params: dict[str, Any]) -> dict[str, Any]:
    """Settings of a text network, with ``model`` a folder.

    Raises
    ------
    ConfigurationError
        If there is no such preset, or its weights are not here and can't be fetched.
    """
    preset = params.pop("presets", "default")
    settings = {**named("text preset", preset, TEXT_PRESETS), **params}
    check_installed("transformers", "multimodal", "AG_TEXT_NN")
    settings["model"] = str(_folder_of(settings["model"], settings["model"], f"text preset {preset!r}"))
    return settings


def picture_settings(params: dict[str, Any]) -> dict[str, Any]:
    """Settings of a picture network, with ``model`` a folder or a function.

    Raises
    ------
    ConfigurationError
        If there is no such model, or its weights are not here and can't be fetched.
    """
    check_installed("PIL", "multimodal", "AG_IMAGE_NN")
    model = params.get("model", _DEFAULT_PICTURES)
    if callable(model):
        return params
    where = _local(model)
    if where is None:
        timm = import_timm(f"AG_IMAGE_NN with model={model!r}")
        known = timm.get_pretrained_cfg(model, allow_unregistered=False)
        if known is None:
            raise ConfigurationError(
                f"AG_IMAGE_NN model={model!r} is neither a folder nor a model of timm. list_image_models() has "
                "the names."
            )
        where = _folder_of(model, known.hf_hub_id or f"timm/{model}", f"image model {model!r}")
    return {**params, "model": str(where)}


def _local(model: str) -> Path | None:
    here = models_folder()
    for folder in (Path(model).expanduser(), here / model, here / model.replace("/", "--")):
        if (folder / "config.json").exists():
            return folder.absolute()
    return None


def _folder_of(model: str, on_hub: str, wanted_by: str) -> Path:
    found = _local(model)
    if found is not None:
        return found
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(on_hub, allow_patterns=_PATTERNS, etag_timeout=10))
    except Exception as error:
        fill = models_folder() / model.replace("/", "--")
        cause = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ConfigurationError(
            f"{wanted_by}: the weights of {model!r} are not on this machine, and could not be fetched ({cause}). Put "
            f"the model's files (config.json, weights, tokenizer) into {str(fill)!r}, or give the folder that has "
            "them as 'model'."
        ) from error
