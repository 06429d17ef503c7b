"""What ``hyperparameters`` ask for: each model with its settings, its search space and its shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainloop.errors import ConfigurationError
from trainloop.resources import ResourceQuota
from trainloop.tabular.columns import Columns, Kind
from trainloop.tabular.models import Adapter, Given, GradientBoosting, Linear, OwnEstimator, Trees, check_installed
from trainloop.tabular.presets import HYPERPARAMETERS, named
from trainloop.tabular.weights import picture_settings, text_settings
from trainloop.tuning import Choice, Integers, Uniform

__all__ = ["Shares", "Spec", "parse_hyperparameters", "quota_of"]

_TABLE: tuple[Kind, ...] = ("number", "boolean", "category", "date", "text")


@dataclass(frozen=True)
class _Model:
    """A kind of model that comes with the package."""

    name: str
    reads: tuple[Kind, ...]
    space: Mapping[str, Any]
    """Searched where a search is asked for and no space is given."""
    needs: str | None = None
    gpu: str = "never"
    """``never``, ``asked`` (only where the user asks for GPUs), or ``always`` (where there are some)."""


_FOREST = {"max_features": ["sqrt", 0.5, 0.75, 1.0], "min_samples_leaf": [1, 2, 4, 8]}
_LEARNING = {"learning_rate": Uniform(1e-4, 3e-2, log=True), "weight_decay": Uniform(1e-6, 1e-2, log=True)}
_BOOSTED = {
    "learning_rate": Uniform(0.01, 0.2, log=True),
    "num_leaves": Integers(8, 128, log=True),
    "feature_fraction": Uniform(0.6, 1.0),
    "min_data_in_leaf": Integers(2, 60),
}
MODELS = {
    "LR": _Model("LinearModel", _TABLE, {}),
    "RF": _Model("RandomForest", _TABLE, _FOREST),
    "XT": _Model("ExtraTrees", _TABLE, _FOREST),
    "GBM": _Model("LightGBM", _TABLE, _BOOSTED, needs="lightgbm", gpu="asked"),
    "NN_TORCH": _Model(
        "NeuralNetTorch", _TABLE, {**_LEARNING, "dropout": [0.0, 0.1, 0.2, 0.4]}, needs="torch", gpu="always"
    ),
    "AG_TEXT_NN": _Model("TextPredictor", ("text",), _LEARNING, gpu="always"),
    "AG_IMAGE_NN": _Model("ImagePredictor", ("picture",), _LEARNING, gpu="always"),
}


@dataclass(frozen=True)
class Shares:
    """Figures of a quota, of which None is not given."""

    num_cpus: Any = None
    num_gpus: Any = None
    memory: Any = None

    @classmethod
    def parse(cls, where: str, given: Mapping[str, Any] | None) -> Shares:
        """From ``ag_args_fit``.

        Raises
        ------
        ConfigurationError
            For names that it has not.
        """
        figures = dict(given or {})
        memory = figures.pop("memory_limit", None)
        found = cls(figures.pop("num_cpus", None), figures.pop("num_gpus", None), memory_of(memory))
        if figures:
            raise ConfigurationError(f"{where}={dict(given or {})!r}: takes num_cpus, num_gpus and memory_limit.")
        return found

    def over(self, other: Shares) -> Shares:
        """These figures, and those of ``other`` that are not given here."""
        names = ("num_cpus", "num_gpus", "memory")
        return Shares(*(getattr(other, n) if getattr(self, n) is None else getattr(self, n) for n in names))


def memory_of(limit: Any) -> Any:
    """A memory limit as a quota has it: a number is in GB, as in AutoGluon."""
    if limit is None or limit == "auto" or isinstance(limit, str):
        return None if limit == "auto" else limit
    return f"{limit}GB" if isinstance(limit, (int, float)) and not isinstance(limit, bool) else limit


def quota_of(shares: Shares, *, gpus: bool) -> ResourceQuota | None:
    """The quota that these figures are, with no GPU for a model that can't use any; None where nothing is given."""
    figures = (shares.num_cpus, shares.num_gpus if gpus else 0, shares.memory)
    if shares == Shares() and gpus:
        return None
    return ResourceQuota(*("auto" if figure is None else figure for figure in figures))


@dataclass(frozen=True)
class Spec:
    """One model to train, or one space to search."""

    name: str
    key: Any
    fixed: dict[str, Any]
    space: dict[str, Any]
    shares: Shares
    """Its own, of ``ag_args_fit`` among its settings."""
    bag_shares: Shares = field(default=Shares())
    columns: Columns = field(default=Columns({}, {}))
    """Of those kinds that it reads."""

    def may_use_gpus(self, asked: bool) -> bool:
        """Whether it would use a GPU; ``asked``: whether the user named a number of GPUs."""
        if isinstance(self.key, str):
            gpu = MODELS[self.key].gpu
            return gpu == "always" or (gpu == "asked" and (asked or bool(self.shares.num_gpus)))
        return _is_network(self.key)

    def make(self, given: Given) -> Adapter:
        """The adapter, untrained. Networks are imported here, in the process that trains them."""
        if self.key == "LR":
            return Linear(given)
        if self.key in ("RF", "XT"):
            return Trees(given, extra=self.key == "XT")
        if self.key == "GBM":
            return GradientBoosting(given)
        if not isinstance(self.key, str) and not _is_network(self.key):
            return OwnEstimator(given, made_by=self.key)
        from trainloop.tabular import multimodal, network

        if not isinstance(self.key, str):
            return network.OwnNetwork(given, made_by=self.key)
        makers: dict[str, Callable[[Given], Adapter]] = {
            "NN_TORCH": network.Network,
            "AG_TEXT_NN": multimodal.TextNetwork,
            "AG_IMAGE_NN": multimodal.PictureNetwork,
        }
        return makers[self.key](given)


def _is_network(key: Any) -> bool:
    """Whether a user's class is a factory of networks, and no estimator."""
    if isinstance(key, type) and any(base.__name__ == "TTModel" for base in key.__mro__):
        return True
    return not (hasattr(key, "fit") and hasattr(key, "predict"))


def parse_hyperparameters(
    hyperparameters: Any, columns: Columns, *, searches: bool
) -> tuple[list[Spec], dict[str, str]]:
    """The models to train, and why others are not.

    Parameters
    ----------
    searches : bool
        Whether spaces are searched.

    Raises
    ------
    ConfigurationError
        For models that are not known, settings that can't be, or what is not installed.
    """
    if hyperparameters is None:
        hyperparameters = "default"
    if isinstance(hyperparameters, str):
        hyperparameters = named("hyperparameters", hyperparameters, HYPERPARAMETERS)
    if not isinstance(hyperparameters, Mapping) or not hyperparameters:
        raise ConfigurationError(
            f"hyperparameters={hyperparameters!r}: must map models to settings, e.g. {{'GBM': {{}}, 'NN_TORCH': {{}}}}."
        )
    specs: list[Spec] = []
    skipped: dict[str, str] = {}
    for key, values in hyperparameters.items():
        known = _model_of(key)
        used = Columns({name: kind for name, kind in columns.kinds.items() if kind in known.reads}, {})
        if not used.kinds:
            skipped[known.name] = f"the table has no columns that it reads ({', '.join(known.reads)})"
            continue
        if known.needs:
            check_installed(known.needs, "tabular", repr(key))
        for settings in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(settings, str) and key == "AG_TEXT_NN":
                settings = {"presets": settings}
            if not isinstance(settings, Mapping):
                raise ConfigurationError(
                    f"hyperparameters[{key!r}] has {settings!r}: must be a dict of settings, or a list of such."
                )
            specs.append(_spec(key, known, dict(settings), used, {spec.name for spec in specs}, searches))
    if not specs:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise ConfigurationError(f"no model is left to train ({reasons}). Add models that read these columns.")
    return specs, skipped


def _model_of(key: Any) -> _Model:
    if isinstance(key, str):
        if key not in MODELS:
            raise ConfigurationError(
                f"hyperparameters has the model {key!r}: there are {', '.join(MODELS)}, and classes of your own."
            )
        return MODELS[key]
    if not callable(key):
        raise ConfigurationError(
            f"hyperparameters has the key {key!r}: must be one of {', '.join(MODELS)}, an estimator's class, or a "
            "function or class that makes a TTModel."
        )
    return _Model(getattr(key, "__name__", type(key).__name__), _TABLE, {})


def _spec(key: Any, known: _Model, settings: dict[str, Any], columns: Columns, taken: set[str], searches: bool) -> Spec:
    shares = Shares.parse("ag_args_fit", settings.pop("ag_args_fit", None))
    bag = settings.pop("ag_args_ensemble", None) or {}
    own = settings.pop("ag_args", None) or {}
    given = set(settings)
    if key == "AG_TEXT_NN":
        settings = text_settings(settings)
    elif key == "AG_IMAGE_NN":
        settings = picture_settings(settings)
    space = {name: value for name, value in settings.items() if _is_space(value)}
    if space and not searches:
        raise ConfigurationError(
            f"hyperparameters[{key!r}] has a search space ({', '.join(space)}), and no search is asked for. Give "
            "hyperparameter_tune_kwargs={'num_trials': 10}, or one value; a list that is a value is written as a tuple."
        )
    name = known.name + str(own.get("name_suffix", ""))
    number = 2
    while name in taken:
        name = f"{known.name}{own.get('name_suffix', '')}_{number}"
        number += 1
    fixed = {name: value for name, value in settings.items() if name not in space}
    if searches and not space and own.get("hyperparameter_tune_kwargs", True) is not None:
        space = {name: value for name, value in known.space.items() if name not in given}
        fixed = {name: value for name, value in fixed.items() if name not in space}
    bag_shares = Shares.parse("ag_args_ensemble['ag_args_fit']", bag.get("ag_args_fit"))
    return Spec(name, key, fixed, space, shares, bag_shares, columns)


def _is_space(value: Any) -> bool:
    return isinstance(value, (list, range, Choice, Integers, Uniform)) or hasattr(value, "rvs")
