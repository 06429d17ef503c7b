"""Cache of predictions and losses since the last training step, and AIToolbox's collate functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainloop.errors import ConfigurationError

__all__ = [
    "ModelPredictionStore",
    "append_concat_predictions",
    "append_predictions",
    "keep_list_transf",
    "torch_cat_transf",
]


class ModelPredictionStore:
    """Results by the training iteration of their computation; those of an earlier iteration count as missing.

    It has ``insert_x(result, iteration_idx, force_prediction=False)``, ``get_x(iteration_idx)`` and
    ``has_x(iteration_idx)`` for each ``x`` of ``train``, ``val`` and ``test``, with ``_predictions`` or ``_loss``.

    Parameters
    ----------
    auto_purge : bool
        Drop older results when one of a later iteration is inserted.
    """

    def __init__(self, auto_purge: bool = False) -> None:
        self.do_auto_purge = auto_purge
        self.prediction_store: dict[str, Any] = {"iteration_idx": -1}

    def insert(self, name: str, data: Any, iteration_idx: int, force_prediction: bool = False) -> None:
        """Store a result; raise an error if there is one of the same iteration, unless forced."""
        self.auto_purge(iteration_idx)
        if self.has(name, iteration_idx) and not force_prediction:
            raise ConfigurationError(
                f"there is a {name} of iteration {iteration_idx}: pass force_prediction=True to replace it."
            )
        self.prediction_store[name] = data

    def get(self, name: str, iteration_idx: int) -> Any:
        """Return a result of this iteration; raise an error if there is none."""
        if not self.has(name, iteration_idx):
            raise ConfigurationError(f"there is no {name} of iteration {iteration_idx}: ask whether it has one before.")
        return self.prediction_store[name]

    def has(self, name: str, iteration_idx: int) -> bool:
        """Return True if there is such a result of this iteration."""
        return name in self.prediction_store and self.prediction_store["iteration_idx"] == iteration_idx

    def auto_purge(self, iteration_idx: int) -> None:
        """Drop results older than this iteration, if requested."""
        if self.do_auto_purge and iteration_idx > self.prediction_store["iteration_idx"]:
            self.prediction_store = {"iteration_idx": iteration_idx}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb, _, what = name.partition("_")
        part, _, kind = what.partition("_")
        if verb not in ("insert", "get", "has") or part not in ("train", "val", "test") or kind not in _KINDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        function = getattr(self, verb)
        return lambda *args, **kwargs: function(f"{part}_{_KINDS[kind]}", *args, **kwargs)


# Names of results in methods' names, and in the store.
_KINDS = {"predictions": "pred", "loss": "loss"}


def append_predictions(y_batch: Any, predictions: list[Any]) -> list[Any]:
    """Append the batch's predictions as one item."""
    predictions.append(y_batch)
    return predictions


def append_concat_predictions(y_batch: Any, predictions: list[Any]) -> list[Any]:
    """Append the batch's predictions; of a list, its items."""
    if isinstance(y_batch, list):
        predictions += y_batch
    else:
        predictions.append(y_batch)
    return predictions


def torch_cat_transf(predictions: list[Tensor]) -> Tensor:
    """Return all batches' predictions as one tensor."""
    return torch.cat(predictions)


def keep_list_transf(predictions: list[Any]) -> list[Any]:
    """Return all batches' predictions unchanged."""
    return predictions
