"""The arguments of ``TabularPredictor.fit``, validated: the options of all models, and each model's settings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

from trainloop._support.user_line import warn
from trainloop.errors import ConfigurationError
from trainloop.resources import ResourceQuota, available
from trainloop.resources.quota import checked_count
from trainloop.tabular.columns import Columns, Kind
from trainloop.tabular.models import Adapter, Given
from trainloop.tabular.presets import (
    HYPERPARAMETERS,
    PRESETS,
    check_installed,
    known_words,
    named,
    picture_settings,
    text_settings,
)
from trainloop.tuning import Choice, Integers, Uniform
from trainloop.tuning.local import machine_total
from trainloop.tuning.space import make_searcher

__all__ = ["Options", "Spec", "parse_hyperparameters", "parse_options"]

# -- all models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The arguments for all models."""

    hyperparameters: Any
    share: ResourceQuota
    """``ag_args_fit``: the default quota of one model."""
    bag: ResourceQuota
    """``ag_args_ensemble['ag_args_fit']``: the default quota of one bag."""
    gpus_asked: bool
    division: Mapping[str, Any]
    """Arguments for both ``plan`` and ``tune``: ``total``, ``num_bag_folds`` and ``parallel_folds``."""
    searches: bool
    search: Mapping[str, Any]
    """Arguments for ``tune`` alone: ``searcher``, ``num_trials`` and ``backend``."""
    own: ResourceQuota | None
    """The quota of the user's process. Don't apply it while models train, since they hold all of it."""
    deadline: float | None
    """The end of the models' time, on the monotonic clock. Work after them takes time, too."""
    end: float | None
    """The end of the whole time."""


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
    """Validate the arguments of ``fit``. ``run`` holds num_cpus, num_gpus and memory_limit."""
    began, is_number = time.monotonic(), isinstance(time_limit, (int, float)) and not isinstance(time_limit, bool)
    if time_limit is not None and not (is_number and time_limit > 0):
        raise ConfigurationError(f"time_limit={time_limit!r}: must be a number of seconds above 0, or None.")
    presets = named("preset", presets, PRESETS) if isinstance(presets, str) else presets
    preset = known_words("presets", presets, hyperparameters=None, num_bag_folds=0)
    folds = checked_count("num_bag_folds", preset["num_bag_folds"] if num_bag_folds is None else num_bag_folds, 0)
    strategies = ("parallel_local", "sequential_local")
    ensemble = known_words("ag_args_ensemble", ag_args_ensemble, ag_args_fit=None, fold_fitting_strategy=strategies)
    if folds <= 1 and ensemble["ag_args_fit"]:
        warn("ag_args_ensemble is ignored: without num_bag_folds there are no bags.")
    searches, search = search is not None, {"searcher": search} if isinstance(search, str) else search
    backends = ("local", "ray")
    search = known_words("hyperparameter_tune_kwargs", search, searcher="random", scheduler=backends, num_trials=10)
    searcher = "random" if search["searcher"] == "auto" else search["searcher"]
    make_searcher(searcher, {}, seed=0, mode="max")  # rejects an invalid searcher, also if nothing is searched
    of_bag = _quota("ag_args_ensemble['ag_args_fit']", ensemble["ag_args_fit"])
    shares = [_quota("fit", run), _quota("ag_args_fit", ag_args_fit), of_bag]
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
        own=None if run["num_cpus"] == "auto" else ResourceQuota(total.num_cpus),
        deadline=None if time_limit is None else began + 0.95 * time_limit,
        end=None if time_limit is None else began + time_limit,
    )


def _quota(where: str, given: Mapping[str, Any] | None) -> ResourceQuota:
    """Return ``num_cpus``, ``num_gpus`` and ``memory_limit`` (numbers are GB, as in AutoGluon) as a quota."""
    figures = known_words(where, given, num_cpus="auto", num_gpus="auto", memory_limit="auto")
    memory = figures["memory_limit"]
    in_gb = isinstance(memory, (int, float)) and not isinstance(memory, bool)
    return ResourceQuota(figures["num_cpus"], figures["num_gpus"], f"{memory}GB" if in_gb else memory)


# -- each model ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """A key of ``hyperparameters``."""

    name: str
    maker: str
    """Constructs the adapter. Given as ``module:name``, because only a model's own process imports torch."""
    reads: tuple[Kind, ...] = ("number", "boolean", "category", "date", "text")
    space: Mapping[str, Any] = field(default_factory=dict)
    """The default search space."""
    needs: str = "sklearn"
    gpu: str = "never"
    """``never``, ``asked`` (if the user asks for GPUs), or ``always`` (if there are any)."""

    own: Any = None
    """The user's class or function, which is passed to the adapter."""

    def make(self, given: Given) -> Adapter:
        """Return the adapter, untrained."""
        make = resolve_name(f"trainloop.tabular.{self.maker}")
        made: Adapter = make(given) if self.own is None else make(given, self.own)
        return made


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
    "LR": _Model("LinearModel", "models:linear"),
    "RF": _Model("RandomForest", "models:forest", space=_FOREST),
    "XT": _Model("ExtraTrees", "models:extra_trees", space=_FOREST),
    "GBM": _Model("LightGBM", "models:GradientBoosting", space=_BOOSTED, needs="lightgbm", gpu="asked"),
    "NN_TORCH": _Model("NeuralNetTorch", "network:Network", space=_NETWORK, gpu="always"),
    "AG_TEXT_NN": _Model("TextPredictor", "network:TextNetwork", ("text",), _LEARNING, gpu="always"),
    "AG_IMAGE_NN": _Model("ImagePredictor", "network:PictureNetwork", ("picture",), _LEARNING, gpu="always"),
}


@dataclass(frozen=True)
class Spec:
    """One model to train, or one model whose settings are searched."""

    name: str
    model: _Model
    fixed: dict[str, Any]
    space: dict[str, Any]
    share: ResourceQuota
    """``ag_args_fit`` of this model."""
    bag: ResourceQuota
    """``ag_args_ensemble['ag_args_fit']`` of this model."""
    columns: Columns
    """The columns that the model can use."""

    def __str__(self) -> str:
        return self.name


def parse_hyperparameters(asked: Any, columns: Columns, *, searches: bool) -> tuple[list[Spec], dict[str, str]]:
    """Return the models to train, and the reasons why others are skipped. ``searches`` allows search spaces."""
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
            skipped[model.name] = f"the table has no columns that it reads ({', '.join(model.reads)})"
            continue
        check_installed(model.needs, "tabular", repr(key))
        for settings in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(settings, str) and key == "AG_TEXT_NN":
                settings = {"presets": settings}
            if not isinstance(settings, Mapping):
                raise ConfigurationError(
                    f"hyperparameters[{key!r}] has {settings!r}: must be a dict of settings, or a list of these."
                )
            spec = _spec(key, model, dict(settings), used, specs, searches)
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
    name = getattr(key, "__name__", type(key).__name__)
    network = any(base.__name__ == "TTModel" for base in getattr(key, "__mro__", ()))
    if hasattr(key, "fit") and hasattr(key, "predict") and not network:
        return _Model(name, "models:Estimator", own=key)
    return _Model(name, "network:OwnNetwork", own=key, gpu="always")


def _spec(
    key: Any, model: _Model, settings: dict[str, Any], columns: Columns, taken: Mapping[str, Spec], searches: bool
) -> Spec:
    share = _quota("ag_args_fit", settings.pop("ag_args_fit", None))
    bag = _quota("ag_args_ensemble['ag_args_fit']", (settings.pop("ag_args_ensemble", None) or {}).get("ag_args_fit"))
    own = settings.pop("ag_args", None) or {}
    space = {name: value for name, value in settings.items() if _is_space(value)}
    if space and not searches:
        raise ConfigurationError(
            f"hyperparameters[{key!r}] has a search space ({', '.join(space)}), but no search is requested. Pass "
            "hyperparameter_tune_kwargs={'num_trials': 10}, or one value; write a list that is one value as a tuple."
        )
    if searches and not space and own.get("hyperparameter_tune_kwargs", True) is not None:
        space = {name: value for name, value in model.space.items() if name not in settings}
    complete = {"AG_TEXT_NN": text_settings, "AG_IMAGE_NN": picture_settings}.get(key, dict)
    fixed = {name: value for name, value in complete(settings).items() if name not in space}
    base = model.name + own.get("name_suffix", "")
    names = [base, *(f"{base}_{number}" for number in range(2, len(taken) + 2))]
    return Spec(next(name for name in names if name not in taken), model, fixed, space, share, bag, columns)


def _is_space(value: Any) -> bool:
    return isinstance(value, (list, range, Choice, Integers, Uniform)) or hasattr(value, "rvs")
