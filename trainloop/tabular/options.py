"""The arguments of ``TabularPredictor.fit`` that concern all models, validated before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from trainloop.resources import ResourceQuota, available
from trainloop.resources.enforce import applied
from trainloop.resources.quota import checked_count
from trainloop.tabular.presets import PRESETS, known_words, named
from trainloop.tabular.specs import quota
from trainloop.tuning.slots import machine_total

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """The validated arguments of one ``fit``."""

    hyperparameters: Any
    folds: int
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
    limits_cpus: bool

    @classmethod
    def parse(
        cls,
        run: Mapping[str, Any],
        *,
        hyperparameters: Any,
        num_bag_folds: Any,
        ag_args_fit: Any,
        ag_args_ensemble: Any,
        hyperparameter_tune_kwargs: Any,
        presets: Any,
    ) -> Options:
        """Validate the arguments of ``fit``. ``run`` holds num_cpus, num_gpus and memory_limit."""
        words = named("preset", presets, PRESETS) if isinstance(presets, str) else presets
        preset = known_words("presets", words, hyperparameters=None, num_bag_folds=0)
        folds = checked_count("num_bag_folds", preset["num_bag_folds"] if num_bag_folds is None else num_bag_folds, 0)
        strategies = ("parallel_local", "sequential_local")
        ensemble = known_words("ag_args_ensemble", ag_args_ensemble, ag_args_fit=None, fold_fitting_strategy=strategies)
        if folds <= 1 and ensemble["ag_args_fit"]:
            warnings.warn("ag_args_ensemble is ignored: without num_bag_folds there are no bags.", stacklevel=3)
        words = hyperparameter_tune_kwargs
        words = {"searcher": words} if isinstance(words, str) else words
        defaults: dict[str, Any] = {"searcher": "random", "scheduler": ("local", "ray"), "num_trials": 10}
        search = known_words("hyperparameter_tune_kwargs", words, **defaults)
        of_bag = quota("ag_args_ensemble['ag_args_fit']", ensemble["ag_args_fit"])
        shares = [quota("fit", run), quota("ag_args_fit", ag_args_fit), of_bag]
        gpus_asked = any(share.num_gpus not in ("auto", 0) for share in shares)
        if gpus_asked and not available().num_gpus:
            warnings.warn(
                f"num_gpus={run['num_gpus']!r}: no GPU is visible here, so all models train on the CPU. Check "
                "CUDA_VISIBLE_DEVICES and the driver, or ask for num_gpus=0 to silence this.",
                stacklevel=3,
            )
            shares = [replace(share, num_gpus=0) for share in shares]
        return cls(
            preset["hyperparameters"] if hyperparameters is None else hyperparameters,
            folds,
            share=shares[1],
            bag=shares[2],
            gpus_asked=gpus_asked,
            division={
                "total": machine_total(shares[0]),
                "num_bag_folds": folds,
                "parallel_folds": ensemble["fold_fitting_strategy"] == strategies[0],
            },
            searches=hyperparameter_tune_kwargs is not None,
            search={
                "searcher": "random" if search["searcher"] == "auto" else search["searcher"],
                "num_trials": search["num_trials"],
                "backend": search["scheduler"],
            },
            limits_cpus=run["num_cpus"] != "auto",
        )

    def within(self) -> AbstractContextManager[None]:
        """Limit this process to the quota too. Not for use while models train, since they hold the whole quota."""
        return applied(ResourceQuota(self.division["total"].num_cpus) if self.limits_cpus else None)
