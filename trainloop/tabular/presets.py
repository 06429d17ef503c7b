"""Presets: named settings for ``fit``, for its models, and for networks on texts and pictures."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainloop.errors import ConfigurationError

__all__ = ["PRESETS", "get_hyperparameter_config", "known_words", "list_image_models", "list_text_presets", "named"]

_LARGE = {"learning_rate": 0.03, "num_leaves": 128, "feature_fraction": 0.9, "min_data_in_leaf": 3}
_BOOSTING: list[dict[str, Any]] = [
    {},
    {"extra_trees": True, "ag_args": {"name_suffix": "XT"}},
    {**_LARGE, "ag_args": {"name_suffix": "Large"}},
]
HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"LR": {}, "RF": {}, "XT": {}, "GBM": {}, "NN_TORCH": {}},
    "light": {"LR": {}, "RF": {"n_estimators": 100, "max_depth": 15}, "GBM": {}, "NN_TORCH": {"num_epochs": 50}},
    "toy": {"LR": {}, "GBM": {"num_boost_round": 10}, "NN_TORCH": {"num_epochs": 5}},
    "multimodal": {
        "NN_TORCH": {},
        "GBM": _BOOSTING,
        "AG_TEXT_NN": {"presets": "medium_quality_faster_train"},
        "AG_IMAGE_NN": {},
    },
}
PRESETS: dict[str, dict[str, Any]] = {
    "medium_quality": {},
    "good_quality": {"num_bag_folds": 5, "hyperparameters": "light"},
    "high_quality": {"num_bag_folds": 5},
    "best_quality": {"num_bag_folds": 8},
}
_LARGE_TEXT = {"learning_rate": 5e-5, "batch_size": 16}
_TEXT_PRESETS: dict[str, dict[str, Any]] = {
    "default": {"model": "google/electra-base-discriminator"},
    "medium_quality_faster_train": {"model": "google/electra-small-discriminator"},
    "high_quality": {"model": "google/electra-base-discriminator"},
    "best_quality": {"model": "microsoft/deberta-v3-base", **_LARGE_TEXT},
    "multilingual": {"model": "microsoft/mdeberta-v3-base", **_LARGE_TEXT},
}
_PICTURES = "mobilenetv3_large_100"


def get_hyperparameter_config(config_name: str) -> dict[str, Any]:
    """A copy of the named hyperparameters, to be changed and passed to ``fit``.

    Parameters
    ----------
    config_name : {'default', 'light', 'toy', 'multimodal'}

    Raises
    ------
    ConfigurationError
        If there is no such name; the message lists them.
    """
    return named("hyperparameter config", config_name, HYPERPARAMETERS)


def list_text_presets() -> list[str]:
    """Names of the presets for ``hyperparameters['AG_TEXT_NN'] = ['<preset>']``."""
    return list(_TEXT_PRESETS)


def list_image_models() -> list[str]:
    """Names of timm's pretrained models, for ``hyperparameters['AG_IMAGE_NN'] = {'model': '<model>'}``.

    Raises
    ------
    ConfigurationError
        If timm is not installed, or can't be imported.
    """
    return list(import_timm("list_image_models()").list_models(pretrained=True))


# -- what the user wrote ---------------------------------------------------------------------------------------------


def named(what: str, name: object, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A copy of the named settings. Case is ignored; an unknown name is an error that lists the known ones."""
    if not isinstance(name, str) or name.strip().lower() not in known:
        raise ConfigurationError(f"{what} {name!r} is not known: there are {', '.join(known)}.")
    return copy.deepcopy(known[name.strip().lower()])


def known_words(where: str, given: Mapping[str, Any] | None, **defaults: Any) -> dict[str, Any]:
    """The given settings with defaults filled in. A tuple lists the allowed values, the default first."""
    choices = {name: value for name, value in defaults.items() if isinstance(value, tuple)}
    found = {name: value[0] if name in choices else value for name, value in defaults.items()}
    fits = given is None or (isinstance(given, Mapping) and given.keys() <= defaults.keys())
    if fits:
        found |= {name: value for name, value in (given or {}).items() if value is not None}
    if not fits or any(found[name] not in those for name, those in choices.items()):
        takes = [f"{name} {choices[name]}" if name in choices else name for name in defaults]
        raise ConfigurationError(f"{where}={given!r}: takes {', '.join(takes[:-1])} and {takes[-1]}.")
    return found


# -- what is installed, and weights, found before any process starts -------------------------------------------------


def import_timm(wanted_by: str) -> Any:
    """Import timm. The error says why it can't be imported."""
    try:
        import timm
    except Exception as error:  # a torchvision that doesn't suit torch raises RuntimeError
        raise ConfigurationError(
            f"{wanted_by} needs timm, which can't be imported here ({type(error).__name__}: {error}): "
            "pip install 'trainloop[multimodal]', with a torchvision of the same build as torch. Pictures need no timm "
            "where 'model' is a folder of a transformers model, or a function that makes a module."
        ) from error
    return timm


def check_installed(module: str, extra: str, wanted_by: str) -> None:
    """Raise an error that names the extra if a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(f"{wanted_by} needs {module}: pip install 'trainloop[{extra}]', or leave it out.")


def text_settings(params: dict[str, Any]) -> dict[str, Any]:
    """The settings of a text network, with ``model`` resolved to a folder."""
    preset = params.pop("presets", "default")
    settings = {**named("text preset", preset, _TEXT_PRESETS), **params}
    check_installed("transformers", "multimodal", "AG_TEXT_NN")
    return {**settings, "model": _folder_of(settings["model"], settings["model"], f"text preset {preset!r}")}


def picture_settings(params: dict[str, Any]) -> dict[str, Any]:
    """The settings of a picture network, with ``model`` resolved to a folder unless it is a function."""
    check_installed("PIL", "multimodal", "AG_IMAGE_NN")
    model, on_hub = params.get("model", _PICTURES), ""
    if callable(model):
        return params
    if _local(model) is None:
        timm = import_timm(f"AG_IMAGE_NN with model={model!r}")
        try:
            on_hub = timm.get_pretrained_cfg(model, allow_unregistered=False).hf_hub_id or f"timm/{model}"
        except (RuntimeError, AttributeError) as error:  # it depends on timm's version
            raise ConfigurationError(
                f"AG_IMAGE_NN model={model!r} is neither a folder nor a model of timm. list_image_models() has the "
                "names."
            ) from error
    return {**params, "model": _folder_of(model, on_hub, f"image model {model!r}")}


def _models_folder() -> Path:
    return Path(os.environ.get("TRAINLOOP_MODEL_DIR") or Path.home() / ".cache" / "trainloop" / "models")


def _local(model: str) -> str | None:
    here = _models_folder()
    folders = (Path(model).expanduser(), here / model, here / model.replace("/", "--"))
    return next((str(folder.absolute()) for folder in folders if (folder / "config.json").exists()), None)


def _folder_of(model: str, on_hub: str, wanted_by: str) -> str:
    if (found := _local(model)) is not None:
        return found
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(
            on_hub, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"], etag_timeout=10
        )
    except Exception as error:
        fill = _models_folder() / model.replace("/", "--")
        cause = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ConfigurationError(
            f"{wanted_by}: the weights of {model!r} are not on this machine, and could not be fetched ({cause}). Put "
            f"the model's files (config.json, weights, tokenizer) into {str(fill)!r}, or give the folder that has "
            "them as 'model'."
        ) from error
