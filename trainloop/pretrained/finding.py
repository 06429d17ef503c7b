"""Find pretrained networks: in a folder, or on the Hugging Face hub; import the libraries that they need."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from trainloop._support.distribution import pip_install
from trainloop.errors import ConfigurationError

_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
_HINTS = {
    "timm": ", with a torchvision of the same build as torch. Pictures need no timm if 'model' is a folder of a "
    "transformers model, or a function that returns a module"
}


def find_text_model(model: str, *, wanted_by: str = "find_text_model") -> str:
    """Return the folder of a transformers model. Download the model if it is not on this machine.

    Parameters
    ----------
    model : str
        A folder, or a name on the Hugging Face hub. A name is searched for in ``$TRAINLOOP_MODEL_DIR`` (by default
        ``~/.cache/trainloop/models``), where ``--`` may replace ``/``, and then on the hub.
    wanted_by : str
        Text at the beginning of the error message.

    Returns
    -------
    str
        A folder with ``config.json``, the weights and the tokenizer.

    Raises
    ------
    ConfigurationError
        If the model is not on this machine and can't be downloaded. The message names the folder to put it in.
    """
    return _local(model) or _fetched(model, model, wanted_by)


def find_picture_model(model: str, *, wanted_by: str = "find_picture_model") -> str:
    """Return the folder of a timm or transformers model for pictures. Download the model if it is not on this machine.

    Parameters
    ----------
    model : str
        A folder, or a timm name (``timm.list_models(pretrained=True)``). A name is searched for as in
        :func:`find_text_model`.
    wanted_by : str
        Text at the beginning of the error message.

    Raises
    ------
    ConfigurationError
        If the model does not exist, or is not on this machine and can't be downloaded.
    """
    if (folder := _local(model)) is not None:
        return folder
    timm = import_library("timm", wanted_by)
    try:
        on_hub = timm.get_pretrained_cfg(model, allow_unregistered=False).hf_hub_id or f"timm/{model}"
    except (RuntimeError, AttributeError) as error:  # the error's type depends on timm's version
        raise ConfigurationError(
            f"{wanted_by}: {model!r} is neither a folder nor a timm name. timm.list_models(pretrained=True) "
            "lists the names."
        ) from error
    return _fetched(model, on_hub, wanted_by)


def import_library(name: str, wanted_by: str) -> Any:
    """Import transformers, timm or PIL. If the import fails, the error contains the cause."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # for example, an incompatible torchvision raises RuntimeError
        raise ConfigurationError(
            f"{wanted_by} needs {name}, which can't be imported here ({type(error).__name__}: {error}): "
            f"{pip_install('multimodal')}{_HINTS.get(name, '')}."
        ) from error


def _models_folder() -> Path:
    return Path(os.environ.get("TRAINLOOP_MODEL_DIR") or Path.home() / ".cache" / "trainloop" / "models")


def _local(model: str) -> str | None:
    models = _models_folder()
    folders = (Path(model).expanduser(), models / model, models / model.replace("/", "--"))
    return next((str(folder.absolute()) for folder in folders if (folder / "config.json").exists()), None)


def _fetched(model: str, on_hub: str, wanted_by: str) -> str:
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(on_hub, allow_patterns=_FILES, etag_timeout=10)
    except Exception as error:
        fill = _models_folder() / model.replace("/", "--")
        cause = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ConfigurationError(
            f"{wanted_by}: the weights of {model!r} are not on this machine, and could not be downloaded ({cause}). "
            f"Put the model's files (config.json, weights, tokenizer) into {str(fill)!r}, or pass the folder that has "
            "them as 'model'."
        ) from error
