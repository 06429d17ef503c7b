"""Validate the arguments of ``TabularPredictor.fit``: presets, the options of all models, and each model's settings."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import numbers
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trainloop._support.distribution import pip_install
from trainloop._support.keywords import name_of, nearest, unwrapped
from trainloop.devices import is_bool
from trainloop.errors import ConfigurationError
from trainloop.extending import warn
from trainloop.model import TTModel
from trainloop.pretrained.finding import find_picture_model, find_text_model, import_library
from trainloop.resources import ResourceQuota, available
from trainloop.resources.quota import checked_count
from trainloop.tabular.columns import Columns, Kind
from trainloop.tabular.models import (
    Adapter,
    Estimator,
    Given,
    GradientBoosting,
    extra_trees,
    forest,
    forest_class,
    linear,
    linear_class,
)
from trainloop.tabular.network import Network, NeuralAdapter, OwnNetwork, PictureNetwork, TextNetwork
from trainloop.tuning import Choice, Integers, Uniform
from trainloop.tuning.running.local import machine_total
from trainloop.tuning.space import make_searcher

# -- presets ---------------------------------------------------------------------------------------------------------

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


# -- settings from the user ------------------------------------------------------------------------------------------


def named(what: str, name: object, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a copy of the named settings, ignoring case. If the name is unknown, the error lists the known names."""
    if not isinstance(name, str) or name.strip().lower() not in known:
        raise ConfigurationError(f"{what} {name!r} is not known. Choose one of {', '.join(known)}.")
    return copy.deepcopy(known[name.strip().lower()])


def known_words(where: str, given: Mapping[str, Any] | None, **defaults: Any) -> dict[str, Any]:
    """Return the given settings with defaults filled in. If a default is a tuple, it lists the allowed values.

    The first allowed value is the default.
    """
    choices = {name: value for name, value in defaults.items() if isinstance(value, tuple)}
    found = {name: value[0] if name in choices else value for name, value in defaults.items()}
    fits = given is None or (isinstance(given, Mapping) and given.keys() <= defaults.keys())
    if fits:
        found |= {name: value for name, value in (given or {}).items() if value is not None}
    if not fits or any(found[name] not in those for name, those in choices.items()):
        takes = [f"{name} (one of {choices[name]})" if name in choices else name for name in defaults]
        raise ConfigurationError(f"{where}={given!r}: must be a dict with some of these keys: {', '.join(takes)}.")
    return found


# -- packages and weights, which are found before any process starts -------------------------------------------------


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


# -- all models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Validated arguments of ``fit`` that apply to all models."""

    hyperparameters: Any
    share: ResourceQuota
    """Default quota of one model, from ``ag_args_fit``."""
    bag: ResourceQuota
    """Default quota of one bag, from ``ag_args_ensemble['ag_args_fit']``."""
    gpus_asked: bool
    division: Mapping[str, Any]
    """Arguments for both ``plan`` and ``tune``: ``total``, ``num_bag_folds`` and ``parallel_folds``."""
    searches: bool
    search: Mapping[str, Any]
    """Arguments for ``tune`` alone: ``searcher``, ``num_trials`` and ``backend``."""
    process_quota: ResourceQuota | None
    """Quota of the user's process; None if unlimited. Must not be applied while models train, which use it all."""
    deadline: float | None
    """``time.monotonic()`` at which the models must end, before ``end``; None without a time limit."""
    end: float | None
    """``time.monotonic()`` at which ``fit`` must end; None without a time limit."""


def parse_options(
    run: Mapping[str, Any],
    *,
    hyperparameters: Any,
    num_bag_folds: Any,
    time_limit: Any,
    ag_args_fit: Any,
    ag_args_ensemble: Any,
    search: Any,
    presets: Any,
) -> Options:
    """Validate the arguments of ``fit``. ``run`` contains num_cpus, num_gpus and memory_limit."""
    began, is_number = time.monotonic(), isinstance(time_limit, numbers.Real) and not is_bool(time_limit)
    if time_limit is not None and not (is_number and time_limit > 0):
        raise ConfigurationError(f"time_limit={time_limit!r}: must be a number of seconds above 0, or None.")
    presets = named("preset", presets, PRESETS) if isinstance(presets, str) else presets
    preset = known_words("presets", presets, hyperparameters=None, num_bag_folds=0)
    folds = checked_count("num_bag_folds", preset["num_bag_folds"] if num_bag_folds is None else num_bag_folds, 0)
    strategies = ("parallel_local", "sequential_local")
    ensemble = known_words("ag_args_ensemble", ag_args_ensemble, ag_args_fit=None, fold_fitting_strategy=strategies)
    if folds <= 1 and ensemble["ag_args_fit"]:
        warn("ag_args_ensemble is ignored, because without num_bag_folds there are no bags.")
    searches, search = search is not None, {"searcher": search} if isinstance(search, str) else search
    backends = ("local", "ray")
    search = known_words("hyperparameter_tune_kwargs", search, searcher="random", scheduler=backends, num_trials=10)
    searcher = "random" if search["searcher"] == "auto" else search["searcher"]
    make_searcher(searcher, {}, seed=0, mode="max")  # rejects an invalid searcher, even if no search is requested
    of_bag = _quota_of_models("ag_args_ensemble['ag_args_fit']", ensemble["ag_args_fit"])
    shares = [_quota_of_models("fit", run), _quota_of_models("ag_args_fit", ag_args_fit), of_bag]
    gpus_asked = any(share.num_gpus not in ("auto", 0) for share in shares)
    if gpus_asked and not available().num_gpus:
        warn(
            f"num_gpus={run['num_gpus']!r}: no GPU is visible here, so all models train on the CPU. Check "
            "CUDA_VISIBLE_DEVICES and the driver, or pass num_gpus=0 to silence this warning."
        )
        shares = [replace(share, num_gpus=0) for share in shares]
    total, share, bag = machine_total(shares[0]), *shares[1:]
    parallel = ensemble["fold_fitting_strategy"] == strategies[0]
    num_trials = checked_count("num_trials", search["num_trials"], 1)
    return Options(
        preset["hyperparameters"] if hyperparameters is None else hyperparameters,
        share,
        bag,
        gpus_asked,
        {"total": total, "num_bag_folds": folds, "parallel_folds": parallel},
        searches,
        {"searcher": searcher, "num_trials": num_trials, "backend": search["scheduler"]},
        process_quota=None if run["num_cpus"] == "auto" else ResourceQuota(total.num_cpus),
        deadline=None if time_limit is None else began + 0.95 * time_limit,
        end=None if time_limit is None else began + time_limit,
    )


def _quota_of_models(where: str, given: Mapping[str, Any] | None) -> ResourceQuota:
    """Return a quota for ``num_cpus``, ``num_gpus`` and ``memory_limit``, which in AutoGluon is a number of GB."""
    figures = known_words(where, given, num_cpus="auto", num_gpus="auto", memory_limit="auto")
    memory = figures["memory_limit"]
    in_gb = isinstance(memory, numbers.Real) and not is_bool(memory)
    return ResourceQuota(figures["num_cpus"], figures["num_gpus"], f"{memory}GB" if in_gb else memory)


# -- each model ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """A kind of model, which is selected by a key of ``hyperparameters``."""

    name: str
    make: Callable[[Given], Adapter]
    """Function that returns the untrained adapter."""
    reads: tuple[Kind, ...] = ("number", "boolean", "category", "date", "text")
    space: Mapping[str, Any] = field(default_factory=dict)
    """The default search space."""
    needs: str = "sklearn"
    gpu: str = "never"
    """When the model uses a GPU: ``never``, ``asked`` (if the user requests GPUs), or ``always`` (if there is one)."""
    settings: Callable[[str], set[str] | None] = lambda _problem: None
    """Function that returns the names of its settings for a type of problem; None if any name may be a setting."""


def _parameters(make: Callable[..., Any]) -> set[str] | None:
    """Return the names of the parameters of a function or a class; None if it takes any, or they are not known."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return None
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return None if takes_any else set(parameters)


def _names(*names: str, of: type[NeuralAdapter]) -> Callable[[str], set[str]]:
    """Return a function that returns the names of a network's settings."""
    return lambda _problem: {*names, *of.defaults}


_FOREST = {"max_features": ["sqrt", 0.5, 0.75, 1.0], "min_samples_leaf": [1, 2, 4, 8]}
_LEARNING = {"learning_rate": Uniform(1e-4, 3e-2, log=True), "weight_decay": Uniform(1e-6, 1e-2, log=True)}
_NETWORK = {**_LEARNING, "dropout": [0.0, 0.1, 0.2, 0.4]}
_BOOSTED = {
    "learning_rate": Uniform(0.01, 0.2, log=True),
    "num_leaves": Integers(8, 128, log=True),
    "feature_fraction": Uniform(0.6, 1.0),
    "min_data_in_leaf": Integers(2, 60),
}
MODELS = {
    "LR": _Model("LinearModel", linear, settings=lambda problem: _parameters(linear_class(problem))),
    "RF": _Model("RandomForest", forest, space=_FOREST, settings=lambda problem: _parameters(forest_class(problem))),
    "XT": _Model(
        *("ExtraTrees", extra_trees),
        space=_FOREST,
        settings=lambda problem: _parameters(forest_class(problem, "ExtraTrees")),
    ),
    "GBM": _Model("LightGBM", GradientBoosting, space=_BOOSTED, needs="lightgbm", gpu="asked"),
    "NN_TORCH": _Model("NeuralNetTorch", Network, space=_NETWORK, gpu="always", settings=_names(of=Network)),
    "AG_TEXT_NN": _Model(
        *("TextPredictor", TextNetwork, ("text",), _LEARNING),
        gpu="always",
        settings=_names("presets", "model", "max_length", of=TextNetwork),
    ),
    "AG_IMAGE_NN": _Model(
        *("ImagePredictor", PictureNetwork, ("picture",), _LEARNING),
        gpu="always",
        settings=_names("model", "size", "mean", "std", of=PictureNetwork),
    ),
}


@dataclass(frozen=True)
class Spec:
    """One model to train, or one model whose settings are searched."""

    name: str
    model: _Model
    fixed: dict[str, Any]
    space: dict[str, Any]
    share: ResourceQuota
    """Quota of this model, from its ``ag_args_fit``."""
    bag: ResourceQuota
    """Quota of this model's bag, from its ``ag_args_ensemble['ag_args_fit']``."""
    columns: Columns
    """Columns that the model can use."""


def parse_hyperparameters(
    asked: Any, columns: Columns, problem: str, *, searches: bool
) -> tuple[list[Spec], dict[str, str]]:
    """Return the models to train, and the reason for each skipped model. Search spaces need ``searches=True``."""
    if asked is None or isinstance(asked, str):
        asked = named("hyperparameters", asked or "default", HYPERPARAMETERS)
    if not isinstance(asked, Mapping) or not asked:
        raise ConfigurationError(
            f"hyperparameters={asked!r}: must map models to settings, e.g. {{'GBM': {{}}, 'NN_TORCH': {{}}}}."
        )
    specs: dict[str, Spec] = {}
    skipped: dict[str, str] = {}
    for key, values in asked.items():
        model = _model_of(key)
        used = columns.only(model.reads)
        if not used.kinds:
            skipped[model.name] = f"the table has no columns that this model reads ({', '.join(model.reads)})"
            continue
        check_installed(model.needs, "tabular", repr(key))
        for settings in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(settings, str) and key == "AG_TEXT_NN":
                settings = {"presets": settings}
            if not isinstance(settings, Mapping):
                raise ConfigurationError(
                    f"hyperparameters[{key!r}]={values!r}: must be a dict of settings, or a list of such dicts."
                )
            spec = _validated_spec(key, model, dict(settings), used, problem, specs, searches)
            specs[spec.name] = spec
    if not specs:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise ConfigurationError(f"no model is left to train ({reasons}). Add models that read these columns.")
    return list(specs.values()), skipped


def _model_of(key: Any) -> _Model:
    if isinstance(key, str) and key in MODELS:
        return MODELS[key]
    if isinstance(key, str) or not callable(key):
        raise ConfigurationError(
            f"hyperparameters has the unknown model {key!r}. Use one of {', '.join(MODELS)}, an estimator's class, or "
            "a function or class that makes a TTModel."
        )
    name, kind = name_of(key), unwrapped(key)
    known = _parameters(key)
    if hasattr(kind, "fit") and hasattr(kind, "predict") and not (isinstance(kind, type) and issubclass(kind, TTModel)):
        return _Model(name, partial(Estimator, make=key), settings=lambda _problem: known)
    known = known and known | set(NeuralAdapter.defaults)
    return _Model(name, partial(OwnNetwork, make=key), gpu="always", settings=lambda _problem: known)


def _check_names(key: Any, settings: Mapping[str, Any], known: set[str] | None, problem: str) -> None:
    """Raise an error about a setting that the model does not have: it would have no effect, or end the model."""
    if known is None:
        return
    for name in settings:
        if name not in known:
            close = nearest(str(name), sorted(known))
            meant = f" (did you mean {close!r}?)" if close else ""
            shown = repr(key) if isinstance(key, str) else name_of(key)
            raise ConfigurationError(
                f"hyperparameters[{shown}] has the setting {name!r}{meant}, but for a {problem} problem, the settings "
                f"of this model are {', '.join(sorted(known))}."
            )


def _validated_spec(
    key: Any,
    model: _Model,
    settings: dict[str, Any],
    columns: Columns,
    problem: str,
    taken: Mapping[str, Spec],
    searches: bool,
) -> Spec:
    share = _quota_of_models("ag_args_fit", settings.pop("ag_args_fit", None))
    bag = _quota_of_models(
        "ag_args_ensemble['ag_args_fit']", (settings.pop("ag_args_ensemble", None) or {}).get("ag_args_fit")
    )
    ag_args = settings.pop("ag_args", None) or {}
    _check_names(key, settings, model.settings(problem), problem)
    space = {name: value for name, value in settings.items() if _is_space(value)}
    if space and not searches:
        raise ConfigurationError(
            f"hyperparameters[{key!r}] has a search space ({', '.join(space)}), but no search is requested. Pass "
            "hyperparameter_tune_kwargs={'num_trials': 10}, or a single value. If that value is a list, write it as "
            "a tuple."
        )
    if searches and not space and ag_args.get("hyperparameter_tune_kwargs", True) is not None:
        space = {name: value for name, value in model.space.items() if name not in settings}
    complete = {"AG_TEXT_NN": text_settings, "AG_IMAGE_NN": picture_settings}.get(key, dict)
    fixed = {name: value for name, value in complete(settings).items() if name not in space}
    base = model.name + ag_args.get("name_suffix", "")
    names = [base, *(f"{base}_{number}" for number in range(2, len(taken) + 2))]
    return Spec(next(name for name in names if name not in taken), model, fixed, space, share, bag, columns)


def _is_space(value: Any) -> bool:
    return isinstance(value, (list, range, Choice, Integers, Uniform)) or hasattr(value, "rvs")
