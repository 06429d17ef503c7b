"""AIToolbox's plots of a history and of gradients, and the table of a history."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trainloop._support.distribution import pip_install
from trainloop.errors import ConfigurationError

__all__ = ["GradientPlotter", "TrainingHistoryPlotter", "TrainingHistoryWriter"]


def _save_figures(figures: Iterable[tuple[str, Any]], folder: str, name: str, file_format: str) -> list[list[str]]:
    """Write ``folder/name/<figure>.png``, or all in ``folder/name.pdf``; return ``[path in folder, path]`` of each."""
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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(f"plots need matplotlib: {pip_install('plot')}.") from error
    return Figure(figsize=(10, 8))


class TrainingHistoryPlotter:
    """Plots each metric that has more than one number."""

    def __init__(self, experiment_results_local_path: str) -> None:
        self.experiment_results_local_path = experiment_results_local_path

    def generate_report(
        self, training_history: Any, plots_folder_name: str = "plots", file_format: str = "png"
    ) -> list[list[str]]:
        """Write plots; return ``[path among the results, local path]`` of each file."""
        figures = self.generate_plots(training_history)
        return _save_figures(figures, self.experiment_results_local_path, plots_folder_name, file_format)

    @staticmethod
    def generate_plots(training_history: Any) -> Iterator[tuple[str, Any]]:
        """Yield each metric's name and figure."""
        for name, results in training_history.get_train_history_dict(flatten_dict=True).items():
            if len(results) > 1 and all(
                isinstance(value, (int, float)) or hasattr(value, "__float__") for value in results
            ):
                figure = _figure()
                axes = figure.add_subplot()
                axes.plot(range(len(results)), [float(value) for value in results], marker="o")
                axes.set(title=name, xlabel="Epoch", ylabel=name)
                yield name, figure


class GradientPlotter:
    """Plots a histogram of each layer's gradients."""

    def __init__(self, experiment_grad_results_local_path: str) -> None:
        self.experiment_grad_results_local_path = experiment_grad_results_local_path

    def generate_report(
        self,
        model_layer_gradients: Sequence[Any],
        grad_plots_folder_name: str = "grad_plots",
        file_format: str = "png",
    ) -> list[list[str]]:
        """Write plots; return paths as in :class:`TrainingHistoryPlotter`."""
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
    """Appends a history's last results to a text or a table."""

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
        """Append the results; return ``(path among the results, local path)``."""
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
