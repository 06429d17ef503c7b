"""AIToolbox's training history: a dict of lists that accepts numbers, dicts, lists and texts."""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, KeysView, Mapping
from typing import Any

from trainloop.errors import ConfigurationError

__all__ = ["TrainingHistory"]


class TrainingHistory:
    """Results by metric, one per insertion.

    Parameters
    ----------
    has_validation : bool
        Begin with an empty ``val_loss`` in addition to ``loss`` and ``accumulated_loss``.
    strict_content_check : bool
        Raise errors for problems instead of printing them.
    """

    def __init__(self, has_validation: bool = True, strict_content_check: bool = False) -> None:
        names = ["loss", "accumulated_loss", *(["val_loss"] if has_validation else [])]
        self.train_history: dict[str, list[Any]] = {name: [] for name in names}
        self.empty_train_history: dict[str, list[Any]] = {name: [] for name in names}
        self.strict_content_check = strict_content_check

    def insert_single_result_into_history(self, metric_name: str, metric_result: Any) -> None:
        """Append a result."""
        self.train_history.setdefault(metric_name, []).append(metric_result)

    def get_train_history(self) -> dict[str, list[Any]]:
        """Return the dict itself."""
        return self.train_history

    def get_train_history_dict(self, flatten_dict: bool = False) -> dict[str, list[Any]]:
        """Return the dict; with ``flatten_dict`` nested results are separate metrics, ``outer_inner``."""
        if self.train_history == self.empty_train_history:
            self.warn_about_result_data_problem("Train History dict is empty")
        if not flatten_dict:
            return self.train_history
        flat: dict[str, list[Any]] = {}
        for name, results in self.train_history.items():
            if results and all(isinstance(result, dict) for result in results):
                for result in results:
                    for inner, value in _flat(result, name):
                        flat.setdefault(inner, []).append(value)
            else:
                flat[name] = list(results)
        return flat

    def wrap_pre_prepared_history(self, history: dict[str, list[Any]]) -> TrainingHistory:
        """Use this dict."""
        self.train_history = history
        return self

    def qa_check_history_records(self) -> None:
        """Report metrics whose number of results differs from the first one's."""
        lengths = {name: len(results) for name, results in self.train_history.items()}
        first = next(iter(lengths.values()))
        for name, length in lengths.items():
            if length != first:
                self.warn_about_result_data_problem(f"Train history records not of the same size: {name} has {length}")

    def warn_about_result_data_problem(self, msg: str) -> None:
        """Print the message; raise it if the check is strict."""
        if self.strict_content_check:
            raise ConfigurationError(msg)
        print(msg)

    def __getitem__(self, item: str) -> list[Any]:
        return self.train_history[item]

    def __setitem__(self, key: str, value: Any) -> None:
        self.insert_single_result_into_history(key, value)

    def __contains__(self, item: object) -> bool:
        return item in self.train_history

    def __iter__(self) -> Iterator[str]:
        return iter(self.train_history)

    def __len__(self) -> int:
        return len(self.train_history)

    def get(self, metric_name: str, default: Any = None) -> Any:
        """Return a metric's results, if any."""
        return self.train_history.get(metric_name, default)

    def keys(self) -> KeysView[str]:
        """Return the names of metrics."""
        return self.train_history.keys()

    def items(self) -> ItemsView[str, list[Any]]:
        """Return names and results."""
        return self.train_history.items()

    def __add__(self, other: Mapping[str, Any]) -> TrainingHistory:
        return copy.deepcopy(self).__iadd__(other)

    __radd__ = __add__

    def __iadd__(self, other: Mapping[str, Any]) -> TrainingHistory:
        self.add_history_dict(other)
        return self

    def add_history_dict(self, other: Mapping[str, Any]) -> None:
        """Append each result of a dict."""
        if not isinstance(other, dict):
            raise TypeError(f"only a dict of results can be added to a history, not a {type(other).__name__}.")
        for name, result in other.items():
            self.insert_single_result_into_history(name, result)

    def __str__(self) -> str:
        return str(self.train_history)


def _flat(results: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in results.items():
        path = f"{prefix}_{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, path)
        else:
            yield path, value
