"""Combine a bag of models into one predictor, which can be saved and loaded."""

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
    """One predictor that combines the models of a bag.

    Parameters
    ----------
    models : sequence of object, or callable
        ``TTModel`` s, or estimators with ``predict``, all of one kind; or a callable that returns them. It is called
        when the models are first needed, because models may be large and their libraries may take seconds to import.
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
        """Return the mean prediction of the models, with a row for each row of ``data``.

        Parameters
        ----------
        data : DataLoader, Dataset or array
            For a ``TTModel``, a loader or dataset whose batches its ``get_predictions`` accepts; for an estimator,
            its ``x``.

        Returns
        -------
        numpy.ndarray
            The mean if predictions are floats (logits, probabilities, numbers). If they are classes, the most frequent
            class; in a tie, the lowest one. If models were trained on different classes, probabilities have a column
            for each class that any model knows, sorted. A model gives 0 to classes that it does not know.
        """
        predictions = [fitting.predict_with(model, data) for model in self.models]
        return fitting.combine(predictions, [fitting.classes_of(model) for model in self.models])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the models into one file, atomically."""
        write_checked(Path(path), *_WHAT, self.models, "models")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, trusted: bool = False) -> BaggedPredictor:
        """Read a predictor from a file that :meth:`save` wrote.

        The file contains pickled objects, which can execute arbitrary code when they are read. Therefore it is read
        only if nobody else could have written it: you or root must own the file and its folder, and other users must
        not be able to write to them.

        Parameters
        ----------
        path : path
            File that :meth:`save` wrote.
        trusted : bool
            Skip the check of owner and mode, for a file from a source that you trust.

        Raises
        ------
        CheckpointError
            If the file is missing, damaged, not a predictor, or from an incompatible version.
        ConfigurationError
            If other users could have written the file.
        """
        return cls(read_checked(Path(path), *_WHAT, "BaggedPredictor.save()", trusted=trusted))

    def __len__(self) -> int:
        return len(self.models)

    def __repr__(self) -> str:
        kinds = sorted({type(model).__name__ for model in self.models})
        return f"BaggedPredictor({len(self.models)} of {', '.join(kinds)})"
