"""AIToolbox's base classes for a script's own classes that read and write experiments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = [
    "AbstractExperimentSaver",
    "AbstractLocalModelLoader",
    "AbstractLocalModelSaver",
    "AbstractLocalResultsSaver",
    "AbstractModelSaver",
    "AbstractResultsSaver",
]


class AbstractLocalModelLoader(ABC):
    """Reads models from the local disk, for example as ``custom_local_loader_class`` of a callback."""

    @abstractmethod
    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Read an experiment's model."""


class AbstractLocalModelSaver(ABC):
    """Writes models to the local disk."""

    @abstractmethod
    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        """Write the model; return ``(file name, path)``."""


class AbstractModelSaver(ABC):
    """Writes models to a cloud."""

    @abstractmethod
    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        """Write the model; return ``(path with the bucket, time stamp, local path)``."""


class AbstractLocalResultsSaver(ABC):
    """Writes results to the local disk."""

    @abstractmethod
    def save_experiment_results(self, *args: Any, **kwargs: Any) -> Any:
        """Write all results to one file; return ``[path among the results, local path]`` of each."""

    @abstractmethod
    def save_experiment_results_separate_files(self, *args: Any, **kwargs: Any) -> Any:
        """Write each result to a separate file."""


class AbstractResultsSaver(ABC):
    """Writes results to a cloud."""

    @abstractmethod
    def save_experiment_results(self, *args: Any, **kwargs: Any) -> Any:
        """Write results; return ``(path of the main file, with the bucket, time stamp)``."""


class AbstractExperimentSaver(ABC):
    """Writes a model and its results."""

    @abstractmethod
    def save_experiment(self, *args: Any, **kwargs: Any) -> Any:
        """Write both; return the paths."""
