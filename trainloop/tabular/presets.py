"""Names for plain settings: which models a table gets, and which texts' and pictures' networks there are.

A preset can be printed and changed; an unknown name is an error that lists the known ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trainloop.errors import ConfigurationError

__all__ = [
    "PRESETS",
    "TEXT_PRESETS",
    "get_hyperparameter_config",
    "list_image_models",
    "list_text_presets",
    "named",
]

_LARGE = {
    "learning_rate": 0.03,
    "num_leaves": 128,
    "feature_fraction": 0.9,
    "min_data_in_leaf": 3,
    "ag_args": {"name_suffix": "Large"},
}
_BOOSTING: list[dict[str, Any]] = [{}, {"extra_trees": True, "ag_args": {"name_suffix": "XT"}}, _LARGE]

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

_TEXT: dict[str, Any] = {
    "num_epochs": 10,
    "learning_rate": 1e-4,
    "weight_decay": 1e-3,
    "batch_size": 32,
    "max_length": 128,
}
TEXT_PRESETS: dict[str, dict[str, Any]] = {
    "default": {**_TEXT, "model": "google/electra-base-discriminator"},
    "medium_quality_faster_train": {**_TEXT, "model": "google/electra-small-discriminator"},
    "high_quality": {**_TEXT, "model": "google/electra-base-discriminator"},
    "best_quality": {**_TEXT, "model": "microsoft/deberta-v3-base", "learning_rate": 5e-5, "batch_size": 16},
    "multilingual": {**_TEXT, "model": "microsoft/mdeberta-v3-base", "learning_rate": 5e-5, "batch_size": 16},
}


def named(what: str, name: object, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A copy of the settings of that name, in any case.

    Raises
    ------
    ConfigurationError
        That lists the names.
    """
    if not isinstance(name, str) or name.strip().lower() not in known:
        raise ConfigurationError(f"{what} {name!r} is not known: there are {', '.join(known)}.")
    return copy.deepcopy(known[name.strip().lower()])


def get_hyperparameter_config(config_name: str) -> dict[str, Any]:
    """Hyperparameters of that name, to be changed and given to ``fit``.

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
    """Names for ``hyperparameters['AG_TEXT_NN'] = ['<preset>']``."""
    return list(TEXT_PRESETS)


def list_image_models() -> list[str]:
    """Names for ``hyperparameters['AG_IMAGE_NN'] = {'model': '<model>'}``: timm's models with weights.

    Raises
    ------
    ConfigurationError
        If timm is not installed, or can't be imported.
    """
    return list(import_timm("list_image_models()").list_models(pretrained=True))


def import_timm(wanted_by: str) -> Any:
    """Timm, or the error that says why it is not there."""
    try:
        import timm
    except Exception as error:  # a torchvision that doesn't suit torch raises RuntimeError
        raise ConfigurationError(
            f"{wanted_by} needs timm, which can't be imported here ({type(error).__name__}: {error}): "
            "pip install 'trainloop[multimodal]', with a torchvision of the same build as torch. Pictures need no timm "
            "where 'model' is a folder of a transformers model, or a function that makes a module."
        ) from error
    return timm
