"""A bag of models as one predictor, which can be saved and loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainloop.tuning import fitting
from trainloop.tuning.storage import read_checked, write_checked

__all__ = ["BaggedPredictor"]

_WHAT = ("bagged predictor", 1)


class BaggedPredictor:
    """The models of a bag's folds, predicting together.

    Parameters
    ----------
    models : sequence of object, or callable
        ``TTModel`` s, or estimators with ``predict``; all of one kind. A callable returns them when they are first
        needed: models may be large, and need libraries that take seconds to import.
    """

    def __init__(self, models: Sequence[Any] | Callable[[], Sequence[Any]]) -> None:
        self._models = models if callable(models) else list(models)

    @property
    def models(self) -> list[Any]:
        """The models."""
        if callable(self._models):
            self._models = list(self._models())
        return self._models

    def __getstate__(self) -> dict[str, Any]:
        return {"_models": self.models}

    def predict(self, data: Any) -> Any:
        """Mean over the models, a row for each row of ``data``.

        Parameters
        ----------
        data : DataLoader, Dataset or array
            For a ``TTModel`` a loader or dataset whose batches its ``get_predictions`` takes; for an estimator its
            ``x``.

        Returns
        -------
        numpy.ndarray
            The mean if predictions are floats (logits, probabilities, numbers). For classes the most frequent one,
            the lowest of equally frequent ones. If models were trained on different classes, probabilities have a
            sorted column for each class that any of them knows; a model's probability of unknown classes is 0.
        """
        predictions = [fitting.predict_with(model, data) for model in self.models]
        return fitting.combine(predictions, [fitting.classes_of(model) for model in self.models])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the models into one file, whole or not at all."""
        write_checked(Path(path), *_WHAT, self.models, "models")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, trusted: bool = False) -> BaggedPredictor:
        """Read what :meth:`save` wrote.

        The file has pickled objects, which can execute arbitrary code when they are read. So the file and its folder
        must belong to this user or to root, and not be writable by others.

        Parameters
        ----------
        path : path
        trusted : bool
            Skip the check of who may have written the file, for one from a source that you trust.

        Raises
        ------
        CheckpointError
            If the file is absent, damaged, something else, or of another version; the message says which.
        ConfigurationError
            If others may have written it.
        """
        return cls(read_checked(Path(path), *_WHAT, "BaggedPredictor.save()", trusted=trusted))

    def __len__(self) -> int:
        return len(self.models)

    def __repr__(self) -> str:
        kinds = sorted({type(model).__name__ for model in self.models})
        return f"BaggedPredictor({len(self.models)} of {', '.join(kinds)})"
