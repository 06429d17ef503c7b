"""AIToolbox's training history, a dict of lists of any values, with plots, tables, and plots of gradients."""

from __future__ import annotations

import copy
import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainloop._support.distribution import import_extra
from trainloop.errors import ConfigurationError


class StrictCheck:
    """Base class of the history and of result packages, which prints problems or raises errors about them."""

    strict_content_check: bool

    def warn_about_result_data_problem(self, msg: str) -> None:
        """Print the message; if the check is strict, raise an error with this message instead."""
        if self.strict_content_check:
            raise ConfigurationError(msg)
        print(msg)


class TrainingHistory(StrictCheck, Mapping[str, list[Any]]):
    """Results of each metric: a list with one result for each insertion.

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

    __setitem__ = insert_single_result_into_history

    def get_train_history(self) -> dict[str, list[Any]]:
        """Return the dict itself, not a copy."""
        return self.train_history

    def get_train_history_dict(self, flatten_dict: bool = False) -> dict[str, list[Any]]:
        """Return the dict. With ``flatten_dict``, nested results become separate metrics named ``outer_inner``."""
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
        """Replace the results with this dict, and return the history."""
        self.train_history = history
        return self

    def qa_check_history_records(self) -> None:
        """Report metrics that do not have the same number of results as the first metric."""
        lengths = {name: len(results) for name, results in self.train_history.items()}
        first = next(iter(lengths.values()))
        for name, length in lengths.items():
            if length != first:
                self.warn_about_result_data_problem(f"Train history records not of the same size: {name} has {length}")

    def __getitem__(self, item: str) -> list[Any]:
        return self.train_history[item]

    def __iter__(self) -> Iterator[str]:
        return iter(self.train_history)

    def __len__(self) -> int:
        return len(self.train_history)

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


# -- plots and tables --------------------------------------------------------------------------------------------------


def _save_figures(figures: Iterable[tuple[str, Any]], folder: str, name: str, file_format: str) -> list[list[str]]:
    """Write each figure to ``folder/name/<figure>.png``, or all figures to ``folder/name.pdf``.

    Return ``[path in folder, path]`` for each file.
    """
    if file_format == "pdf":
        from matplotlib.backends.backend_pdf import PdfPages

        path = os.path.join(folder, f"{name}.pdf")
        with PdfPages(path) as pages:
            for _, figure in figures:
                pages.savefig(figure)
        return [[f"{name}.pdf", path]]
    if file_format != "png":
        raise ConfigurationError(f"file_format={file_format!r}: must be 'png' or 'pdf'.")
    os.makedirs(os.path.join(folder, name), exist_ok=True)
    saved = []
    for figure_name, figure in figures:
        file_name = os.path.join(name, f"{figure_name}.png")
        figure.savefig(os.path.join(folder, file_name))
        saved.append([file_name, os.path.join(folder, file_name)])
    return saved


def _figure() -> Any:
    return import_extra("matplotlib.figure", "A plot", "plot").Figure(figsize=(10, 8))


class TrainingHistoryPlotter:
    """Plot each metric that has more than one number."""

    def __init__(self, experiment_results_local_path: str) -> None:
        self.experiment_results_local_path = experiment_results_local_path

    def generate_report(
        self, training_history: Any, plots_folder_name: str = "plots", file_format: str = "png"
    ) -> list[list[str]]:
        """Write plots, and return ``[path in the results, local path]`` for each file."""
        figures = self.generate_plots(training_history)
        return _save_figures(figures, self.experiment_results_local_path, plots_folder_name, file_format)

    @staticmethod
    def generate_plots(training_history: Any) -> Iterator[tuple[str, Any]]:
        """Yield each metric's name and figure."""
        for name, results in training_history.get_train_history_dict(flatten_dict=True).items():
            if len(results) > 1 and all(hasattr(value, "__float__") for value in results):
                figure = _figure()
                axes = figure.add_subplot()
                axes.plot(range(len(results)), [float(value) for value in results], marker="o")
                axes.set(title=name, xlabel="Epoch", ylabel=name)
                yield name, figure


class GradientPlotter:
    """Plot a histogram of each layer's gradients."""

    def __init__(self, experiment_grad_results_local_path: str) -> None:
        self.experiment_grad_results_local_path = experiment_grad_results_local_path

    def generate_report(
        self,
        model_layer_gradients: Sequence[Any],
        grad_plots_folder_name: str = "grad_plots",
        file_format: str = "png",
    ) -> list[list[str]]:
        """Write plots, and return paths as in :class:`TrainingHistoryPlotter`."""
        figures = self.generate_dist_plots(model_layer_gradients)
        return _save_figures(figures, self.experiment_grad_results_local_path, grad_plots_folder_name, file_format)

    @staticmethod
    def generate_dist_plots(model_layer_gradients: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Yield each layer's name and figure."""
        for i, gradients in enumerate(model_layer_gradients):
            if gradients is not None:
                figure = _figure()
                axes = figure.add_subplot()
                axes.hist(gradients, bins=100)
                axes.set(title=f"Gradients of layer {i}", xlabel="Gradient")
                yield f"layer_{i}", figure


class TrainingHistoryWriter:
    """Append the last results of a history to a text file or a table."""

    def __init__(self, experiment_results_local_path: str | None) -> None:
        self.experiment_results_local_path = experiment_results_local_path
        self.metric_name_cols: list[str] | None = None

    def generate_report(
        self,
        training_history: Any,
        epoch: int,
        file_name: str,
        results_folder_name: str = "",
        file_format: str = "txt",
    ) -> tuple[str, str]:
        """Append the results, and return ``(path in the results, local path)``."""
        if file_format not in ("txt", "tsv", "csv"):
            raise ConfigurationError(f"file_format={file_format!r}: must be 'txt', 'tsv' or 'csv'.")
        folder = os.path.join(str(self.experiment_results_local_path), results_folder_name)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, file_name)
        results = training_history.get_train_history_dict(flatten_dict=True)
        last = {name: values[-1] for name, values in results.items() if values}
        if file_format == "txt":
            with open(path, "a") as file:
                file.write(f"{'=' * 28}\nEpoch: {epoch}\n{'=' * 28}\n")
                file.writelines(f"{name}:\t{value}\n" for name, value in last.items())
                file.write("\n\n")
        else:
            self._append_row(path, epoch, last, "\t" if file_format == "tsv" else ",")
        return os.path.join(results_folder_name, file_name), path

    def _append_row(self, path: str, epoch: int, last: dict[str, Any], delimiter: str) -> None:
        with open(path, "a", newline="") as file:
            writer = csv.writer(file, delimiter=delimiter)
            if self.metric_name_cols is None or set(last) != set(self.metric_name_cols):
                if self.metric_name_cols is not None:
                    writer.writerow(["NEW_METRICS_DETECTED"])
                self.metric_name_cols = list(last)
                writer.writerow(["Epoch", *self.metric_name_cols])
            writer.writerow([epoch, *(last[name] for name in self.metric_name_cols)])
