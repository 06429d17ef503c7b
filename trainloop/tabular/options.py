"""The arguments of ``TabularPredictor.fit`` for all models together, checked before anything is learnt."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from trainloop.errors import ConfigurationError
from trainloop.resources import ResourceQuota, available
from trainloop.resources.enforce import applied, check_quota
from trainloop.tabular.presets import PRESETS, named

__all__ = ["Options", "below", "quota"]

_SEARCH = {"searcher": "random", "scheduler": "local", "num_trials": 10}


@dataclass(frozen=True)
class Options:
    """What a fit was asked for, and has."""

    hyperparameters: Any
    folds: int
    share: ResourceQuota
    """Of a model, where it has none of its own."""
    bag: ResourceQuota
    gpus_asked: bool
    division: Mapping[str, Any]
    """Of ``plan`` and ``tune`` alike: ``total`` in figures, ``num_bag_folds``, ``parallel_folds``."""
    searches: bool
    search: Mapping[str, Any]
    """Of ``tune``: ``searcher``, ``num_trials``, ``backend``."""
    limits_cpus: bool

    @classmethod
    def parse(
        cls,
        run: Mapping[str, Any],
        *,
        hyperparameters: Any,
        time_limit: Any,
        num_bag_folds: Any,
        ag_args_fit: Mapping[str, Any] | None,
        ag_args_ensemble: Mapping[str, Any] | None,
        hyperparameter_tune_kwargs: str | Mapping[str, Any] | None,
        presets: str | Mapping[str, Any] | None,
    ) -> Options:
        """Of the arguments by their names; ``run``: num_cpus, num_gpus and memory_limit."""
        preset = {**(named("preset", presets, PRESETS) if isinstance(presets, str) else presets or {})}
        hyperparameters = preset.pop("hyperparameters", None) if hyperparameters is None else hyperparameters
        folds = preset.pop("num_bag_folds", 0) if num_bag_folds is None else num_bag_folds
        if preset:
            raise ConfigurationError(f"presets has {', '.join(preset)}: takes hyperparameters and num_bag_folds.")
        if isinstance(folds, bool) or not isinstance(folds, int) or folds < 0:
            raise ConfigurationError(f"num_bag_folds={folds!r}: must be an int of 0 or more.")
        if time_limit is not None and not (isinstance(time_limit, (int, float)) and time_limit > 0):
            raise ConfigurationError(f"time_limit={time_limit!r}: must be a number of seconds above 0, or None.")
        ensemble = {"ag_args_fit": None, "fold_fitting_strategy": "parallel_local", **(ag_args_ensemble or {})}
        strategy = ensemble["fold_fitting_strategy"]
        if len(ensemble) > 2 or strategy not in ("parallel_local", "sequential_local"):
            raise ConfigurationError(
                f"ag_args_ensemble={dict(ag_args_ensemble or {})!r}: takes 'ag_args_fit', and 'fold_fitting_strategy', "
                "which is 'parallel_local' or 'sequential_local'."
            )
        if folds <= 1 and ensemble["ag_args_fit"]:
            warnings.warn("ag_args_ensemble is ignored: without num_bag_folds there are no bags.", stacklevel=3)
        share = quota("ag_args_fit", ag_args_fit)
        bag = quota("ag_args_ensemble['ag_args_fit']", ensemble["ag_args_fit"])
        total, share, bag, gpus_asked = _granted(quota("fit", run), share, bag)
        parallel = strategy == "parallel_local"
        return cls(
            hyperparameters,
            folds,
            share,
            bag,
            gpus_asked,
            division={"total": total, "num_bag_folds": folds, "parallel_folds": parallel},
            searches=hyperparameter_tune_kwargs is not None,
            search=_search(hyperparameter_tune_kwargs),
            limits_cpus=run["num_cpus"] != "auto",
        )

    def within(self) -> AbstractContextManager[None]:
        """The quota holds in this process, too; not while the models train, which have it then."""
        return applied(ResourceQuota(self.division["total"].num_cpus)) if self.limits_cpus else nullcontext()


def quota(where: str, given: Mapping[str, Any] | None) -> ResourceQuota:
    """``ag_args_fit`` as a quota, with ``auto`` for what is not given; a memory limit is in GB, as in AutoGluon."""
    figures = {"num_cpus": "auto", "num_gpus": "auto", "memory_limit": "auto", **(given or {})}
    if len(figures) > 3:
        raise ConfigurationError(f"{where}={dict(given or {})!r}: takes num_cpus, num_gpus and memory_limit.")
    cpus: Any
    gpus: Any
    cpus, gpus, memory = ("auto" if figure is None else figure for figure in figures.values())
    number = isinstance(memory, (int, float)) and not isinstance(memory, bool)
    return ResourceQuota(cpus, gpus, f"{memory}GB" if number else memory)


def below(own: ResourceQuota, other: ResourceQuota) -> ResourceQuota:
    """``own`` figures, and those of ``other`` where they are ``auto``."""
    pairs = ((getattr(own, name), getattr(other, name)) for name in ("num_cpus", "num_gpus", "memory"))
    return ResourceQuota(*(theirs if mine == "auto" else mine for mine, theirs in pairs))


def _search(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of ``tune``; it checks their values itself."""
    words = {**_SEARCH, **({"searcher": given} if isinstance(given, str) else given or {})}
    if len(words) > len(_SEARCH) or words["scheduler"] not in ("local", "ray"):
        raise ConfigurationError(
            f"hyperparameter_tune_kwargs={given!r}: takes searcher ('random', 'grid', 'optuna'), scheduler "
            "('local', 'ray') and num_trials."
        )
    searcher = "random" if words["searcher"] == "auto" else words["searcher"]
    return {"searcher": searcher, "num_trials": words["num_trials"], "backend": words["scheduler"]}


def _granted(
    run: ResourceQuota, share: ResourceQuota, bag: ResourceQuota
) -> tuple[ResourceQuota, ResourceQuota, ResourceQuota, bool]:
    """What all models together have, in figures; shares without GPUs where there is none to be had."""
    machine = available()
    asked = any(each.num_gpus not in ("auto", 0) for each in (run, share, bag))
    if asked and not machine.num_gpus:
        warnings.warn(
            f"num_gpus={run.num_gpus!r}: no GPU is visible here, so all models train on the CPU. Check "
            "CUDA_VISIBLE_DEVICES and the driver, or ask for num_gpus=0 to silence this.",
            stacklevel=4,
        )
        run, share, bag = (replace(each, num_gpus="auto") for each in (run, share, bag))
        run = replace(run, num_gpus=0)
        asked = False
    # A run may hold one and a half GPUs, which its models share.
    whole: Any = "auto" if run.num_gpus == "auto" else math.ceil(run.num_gpus)
    check_quota(replace(run, num_gpus=whole), machine=machine)
    cpus = machine.num_cpus if run.num_cpus == "auto" else run.num_cpus
    gpus = machine.num_gpus if run.num_gpus == "auto" else run.num_gpus
    return ResourceQuota(cpus, gpus, run.memory), share, bag, asked
