"""What ``hyperparameters`` ask for: each model with its settings, its search space and its shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from trainloop.errors import ConfigurationError
from trainloop.resources import ResourceQuota
from trainloop.tabular.columns import Columns, Kind
from trainloop.tabular.models import Adapter, Estimator, Given
from trainloop.tabular.options import quota
from trainloop.tabular.presets import HYPERPARAMETERS, check_installed, named, picture_settings, text_settings
from trainloop.tuning import Choice, Integers, Uniform

__all__ = ["Spec", "parse_hyperparameters"]


@dataclass(frozen=True)
class _Model:
    """A kind of model."""

    name: str
    maker: Any
    """``module:name`` below this package: networks are imported in the process that trains them."""
    reads: tuple[Kind, ...] = ("number", "boolean", "category", "date", "text")
    space: Mapping[str, Any] = field(default_factory=dict)
    """Searched where a search is asked for and no space is given."""
    needs: str = "sklearn"
    gpu: str = "never"
    """``never``, ``asked`` (only where the user asks for GPUs), or ``always`` (where there are some)."""


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
    "NN_TORCH": _Model("NeuralNetTorch", "network:Network", space=_NETWORK, needs="torch", gpu="always"),
    "AG_TEXT_NN": _Model("TextPredictor", "multimodal:TextNetwork", ("text",), _LEARNING, gpu="always"),
    "AG_IMAGE_NN": _Model("ImagePredictor", "multimodal:PictureNetwork", ("picture",), _LEARNING, gpu="always"),
}


@dataclass(frozen=True)
class Spec:
    """One model to train, or one space to search."""

    name: str
    model: _Model
    fixed: dict[str, Any]
    space: dict[str, Any]
    share: ResourceQuota
    """Its own, of ``ag_args_fit`` among its settings."""
    bag: ResourceQuota
    columns: Columns
    """Of those kinds that it reads."""

    def make(self, given: Given) -> Adapter:
        """The adapter, untrained."""
        maker = self.model.maker
        if isinstance(maker, str):
            made: Adapter = resolve_name(f"trainloop.tabular.{maker}")(given)
        elif self.model.gpu == "never":
            made = Estimator(given, maker)
        else:
            made = resolve_name("trainloop.tabular.network:OwnNetwork")(given, maker)
        return made


def parse_hyperparameters(asked: Any, columns: Columns, *, searches: bool) -> tuple[list[Spec], dict[str, str]]:
    """The models to train, and why others are not; ``searches``: whether spaces are searched."""
    if asked is None or isinstance(asked, str):
        asked = named("hyperparameters", asked or "default", HYPERPARAMETERS)
    if not isinstance(asked, Mapping) or not asked:
        raise ConfigurationError(
            f"hyperparameters={asked!r}: must map models to settings, e.g. {{'GBM': {{}}, 'NN_TORCH': {{}}}}."
        )
    specs: list[Spec] = []
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
                    f"hyperparameters[{key!r}] has {settings!r}: must be a dict of settings, or a list of such."
                )
            specs.append(_spec(key, model, dict(settings), used, {spec.name for spec in specs}, searches))
    if not specs:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise ConfigurationError(f"no model is left to train ({reasons}). Add models that read these columns.")
    return specs, skipped


def _model_of(key: Any) -> _Model:
    if isinstance(key, str) and key in MODELS:
        return MODELS[key]
    if isinstance(key, str) or not callable(key):
        raise ConfigurationError(
            f"hyperparameters has the model {key!r}: there are {', '.join(MODELS)}, an estimator's class, and a "
            "function or class that makes a TTModel."
        )
    network = any(base.__name__ == "TTModel" for base in getattr(key, "__mro__", ()))
    estimator = not network and hasattr(key, "fit") and hasattr(key, "predict")
    return _Model(getattr(key, "__name__", type(key).__name__), key, gpu="never" if estimator else "always")


def _spec(key: Any, model: _Model, settings: dict[str, Any], columns: Columns, taken: set[str], searches: bool) -> Spec:
    share = quota("ag_args_fit", settings.pop("ag_args_fit", None))
    bag = quota("ag_args_ensemble['ag_args_fit']", (settings.pop("ag_args_ensemble", None) or {}).get("ag_args_fit"))
    own = settings.pop("ag_args", None) or {}
    space = {name: value for name, value in settings.items() if _is_space(value)}
    if space and not searches:
        raise ConfigurationError(
            f"hyperparameters[{key!r}] has a search space ({', '.join(space)}), and no search is asked for. Give "
            "hyperparameter_tune_kwargs={'num_trials': 10}, or one value; a list that is a value is written as a tuple."
        )
    if searches and not space and own.get("hyperparameter_tune_kwargs", True) is not None:
        space = {name: value for name, value in model.space.items() if name not in settings}
    complete = {"AG_TEXT_NN": text_settings, "AG_IMAGE_NN": picture_settings}.get(key, dict)
    fixed = {name: value for name, value in complete(settings).items() if name not in space}
    name = base = model.name + own.get("name_suffix", "")
    number = 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return Spec(name, model, fixed, space, share, bag, columns)


def _is_space(value: Any) -> bool:
    return isinstance(value, (list, range, Choice, Integers, Uniform)) or hasattr(value, "rvs")
