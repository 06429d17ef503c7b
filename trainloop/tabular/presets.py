"""Presets: named settings for ``fit``, for its models, and for networks on text and pictures."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from typing import Any

from trainloop._support.distribution import pip_install
from trainloop.errors import ConfigurationError
from trainloop.pretrained.folders import find_picture_model, find_text_model, import_library

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


def get_hyperparameter_config(config_name: str) -> dict[str, Any]:
    """Return a copy of the named hyperparameters, which you can change and pass to ``fit``.

    Parameters
    ----------
    config_name : {'default', 'light', 'toy', 'multimodal'}

    Raises
    ------
    ConfigurationError
        If the name is unknown. The message lists the known names.
    """
    return named("hyperparameter config", config_name, HYPERPARAMETERS)


def list_text_presets() -> list[str]:
    """Return the names of the presets for ``hyperparameters['AG_TEXT_NN'] = ['<preset>']``."""
    return list(_TEXT_PRESETS)


def list_image_models() -> list[str]:
    """Return the names of timm's pretrained models, for ``hyperparameters['AG_IMAGE_NN'] = {'model': '<model>'}``.

    Raises
    ------
    ConfigurationError
        If timm is not installed, or can't be imported.
    """
    return list(import_library("timm", "list_image_models()").list_models(pretrained=True))


# -- what the user wrote ---------------------------------------------------------------------------------------------


def named(what: str, name: object, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a copy of the named settings, ignoring case; raise for an unknown name, with a list of the known ones."""
    if not isinstance(name, str) or name.strip().lower() not in known:
        raise ConfigurationError(f"{what} {name!r} is not known. Choose one of {', '.join(known)}.")
    return copy.deepcopy(known[name.strip().lower()])


def known_words(where: str, given: Mapping[str, Any] | None, **defaults: Any) -> dict[str, Any]:
    """Return the given settings with defaults filled in. A tuple lists the allowed values, the default first."""
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


def check_installed(module: str, extra: str, wanted_by: str) -> None:
    """Raise an error that names the extra if a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(f"{wanted_by} needs {module}: {pip_install(extra)}, or leave it out.")


def text_settings(params: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a text network, with ``model`` resolved to a folder."""
    preset = params.pop("presets", "default")
    settings = {**named("text preset", preset, _TEXT_PRESETS), **params}
    check_installed("transformers", "multimodal", "AG_TEXT_NN")
    return {**settings, "model": find_text_model(settings["model"], wanted_by=f"text preset {preset!r}")}


def picture_settings(params: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a picture network, with ``model`` resolved to a folder unless it is a function."""
    check_installed("PIL", "multimodal", "AG_IMAGE_NN")
    model = params.get("model", "mobilenetv3_large_100")
    return {
        **params,
        "model": model if callable(model) else find_picture_model(model, wanted_by=f"image model {model!r}"),
    }
