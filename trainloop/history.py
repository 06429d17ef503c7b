"""Store the history of a run: the values of each metric by epoch and, if the metric was logged per step, by step."""

from __future__ import annotations

import os
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from trainloop._metrics import StepValues
from trainloop._support.distribution import import_extra
from trainloop._support.platform import absolute_path
from trainloop.errors import ConfigurationError

__all__ = ["History"]


class History(Mapping[str, list[float]]):
    """Read-only mapping from a metric's name to its per-epoch values.

    Examples
    --------
    >>> history = History()
    >>> history.record("loss", 0.5, epoch=0)
    >>> history["loss"], history.steps("loss")
    ([0.5], [])
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._epochs: dict[str, list[int]] = {}
        # Steps are in arrays, so that a step takes 16 bytes, and the garbage collector has no objects to traverse.
        self._step_indices: dict[str, array[int]] = {}
        self._step_values: dict[str, array[float]] = {}
        self._unagreed: dict[str, list[int]] = {}
        """Indices of per-rank values that have not been averaged over ranks yet, by metric. Only the loop sets them."""
        self._row: dict[str, Any] | None = None
        """The values of the last epoch's end: between two lengths of each metric."""

    def __getitem__(self, name: str) -> list[float]:
        try:
            return list(self._values[name])
        except KeyError:
            raise KeyError(f"{name!r} is not in the history, which has: {', '.join(self._values) or 'none'}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def steps(self, name: str) -> list[float]:
        """Return the step-level values of a metric, in order; an empty list if the metric has none."""
        return list(self._step_values.get(name, ()))

    def step_indices(self, name: str) -> list[int]:
        """Return the optimizer step, counted from 1, of each value of :meth:`steps`."""
        return list(self._step_indices.get(name, ()))

    def epochs(self, name: str) -> list[int]:
        """Return the epoch, counted from 0, of each value of a metric; an empty list if the metric has no values."""
        return list(self._epochs.get(name, ()))

    @property
    def step_names(self) -> list[str]:
        """Metrics that have step-level values."""
        return list(self._step_values)

    def to_dict(self) -> dict[str, list[float]]:
        """Return a copy as plain lists, for JSON or pandas."""
        return {name: list(values) for name, values in self._values.items()}

    def to_dataframe(self) -> Any:
        """Return a table of pandas with a row for each epoch, as in :meth:`rows`; NaN where a metric has no value.

        Raises
        ------
        ConfigurationError
            If pandas is missing.
        """
        return import_extra("pandas", "history.to_dataframe", "tabular").DataFrame(self.rows())

    def plot(self, path: str | None = None) -> Any:
        """Plot every metric over epochs. Training, validation and test values of a metric share a panel.

        Parameters
        ----------
        path : str, optional
            File to write; its suffix sets the format. Default: no file.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ConfigurationError
            If there is nothing to plot, or matplotlib is missing.
        """
        if not self._values:
            raise ConfigurationError("history is empty: nothing to plot. Call fit first.")
        Figure = import_extra("matplotlib.figure", "history.plot", "plot").Figure
        from matplotlib.ticker import MaxNLocator

        _let_notebook_show(Figure)
        panels: dict[str, list[str]] = {}
        for name in self._values:
            panels.setdefault(re.sub("^(train|val|test)_", "", name), []).append(name)
        columns = min(len(panels), 3)
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(5 * columns, 3.5 * rows), layout="constrained")
        for i, (title, names) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, columns, i)
            for name in names:
                epochs = [epoch + 1 for epoch in self._epochs[name]]
                axes.plot(epochs, self._values[name], marker="o", markersize=3, label=name)
            axes.set(title=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend(frameon=False)
            axes.grid(alpha=0.3)
        if path is not None:
            is_path = isinstance(path, (str, os.PathLike))  # or an open file
            figure.savefig(absolute_path(path) if is_path else path, dpi=150)
        return figure

    def rows(self) -> list[dict[str, float]]:
        """Return a dict for each epoch, with ``epoch`` (counted from 1) and the epoch's value of each metric."""
        rows: dict[int, dict[str, float]] = {}
        for name, values in self._values.items():
            for epoch, value in zip(self._epochs[name], values, strict=True):
                rows.setdefault(epoch, {"epoch": 0})[name] = value
        for epoch, row in rows.items():
            row["epoch"] = epoch + 1  # even if a metric has that name
        return [rows[epoch] for epoch in sorted(rows)]

    def row(self, epoch: int) -> dict[str, float]:
        """Return the row of one epoch, counted from 0, as in :meth:`rows`."""
        found: dict[str, float] = {"epoch": epoch + 1}
        for name, epochs in self._epochs.items():
            i = bisect_right(epochs, epoch) - 1
            if i >= 0 and epochs[i] == epoch:
                found[name] = self._values[name][i]
        found["epoch"] = epoch + 1
        return found

    def __repr__(self) -> str:
        return format_table(self.rows()) if self._values else "History(empty)"

    def _repr_html_(self) -> str:
        return html_table(self.rows())

    # -- called only by the loop -------------------------------------------------------------------------------------

    def record(self, name: str, value: float, epoch: int, *, replace: bool = False) -> None:
        """Add the value of an epoch. With ``replace``, a second value in the same epoch replaces the first."""
        values, epochs = self._values.setdefault(name, []), self._epochs.setdefault(name, [])
        if replace and epochs and epochs[-1] == epoch:
            values[-1] = value
        else:
            values.append(value)
            epochs.append(epoch)

    def begin_row(self, epoch: int) -> None:
        """Begin the values of an epoch's end. They replace those of an earlier end of this epoch.

        That is the end of a ``fit`` that has cut the epoch, or one that has failed.
        """
        for name, (begin, end) in self._replaced(epoch).items():
            del self._values[name][begin:end], self._epochs[name][begin:end]
            own = self._unagreed.get(name, ())
            if own:
                self._unagreed[name] = [i - (end - begin) if i >= end else i for i in own]
            if not self._values[name]:  # only this epoch had values
                del self._values[name], self._epochs[name]
        self._row = {"epoch": epoch, "begins": self.lengths(), "ends": None}

    def _replaced(self, epoch: int) -> dict[str, tuple[int, int]]:
        """Return the range of values of each metric that another end of this epoch replaces."""
        before = self._row
        if before is None or before["epoch"] != epoch:
            return {}
        return {name: (before["begins"].get(name, 0), end) for name, end in (before["ends"] or self.lengths()).items()}

    def num_kept(self, name: str, epoch: int) -> int:
        """Return the number of values of a metric that the end of this epoch will not replace."""
        begin, end = self._replaced(epoch).get(name, (0, 0))
        return len(self._values.get(name, ())) - (end - begin)

    def end_row(self) -> None:
        """End the values of an epoch's end. Values that are added after ``fit`` stay if the epoch continues."""
        if self._row is not None and self._row["ends"] is None:
            self._row["ends"] = self.lengths()

    def lengths(self) -> dict[str, int]:
        """Return the number of values of each metric."""
        return {name: len(values) for name, values in self._values.items()}

    def record_own(self, name: str, value: float, epoch: int) -> None:
        """Add this rank's value for an epoch. Later, the value is averaged with the values of other ranks."""
        self._unagreed.setdefault(name, []).append(len(self._values.get(name, ())))
        self.record(name, value, epoch)

    @property
    def has_own(self) -> bool:
        """True if there are per-rank values that have not been averaged over ranks yet."""
        return bool(self._unagreed)

    def take_own(self) -> dict[str, list[tuple[int, float]]]:
        """Remove and return the per-rank values that have not been averaged yet, with their epochs."""
        taken = {}
        for name, indices in self._unagreed.items():
            values, epochs = self._values[name], self._epochs[name]
            taken[name] = [(epochs[i], values[i]) for i in indices]
            for i in reversed(indices):
                del values[i], epochs[i]
        self._unagreed = {}
        return taken

    def put_agreed(self, everyone: Sequence[Mapping[str, Sequence[tuple[int, float]]]]) -> None:
        """Average the results of :meth:`take_own` over ranks, value by value, and add the means to the history."""
        for name in dict.fromkeys(name for of_rank in everyone for name in of_rank):
            for same in zip_longest(*(of_rank[name] for of_rank in everyone if name in of_rank)):
                entries = [entry for entry in same if entry is not None]
                self.record(name, _mean([value for _, value in entries]), entries[0][0])

    def record_steps(self, steps: StepValues, again: int = 0) -> None:
        """Add step values; a value of the step ``again`` replaces the one that the metric has for it."""
        for name, (indices, values) in steps.items():
            if name not in self._step_values:
                self._step_indices[name], self._step_values[name] = array("q"), array("d")
            own_indices, own_values = self._step_indices[name], self._step_values[name]
            if again and own_indices and own_indices[-1] == again == indices[0]:
                own_indices.pop()
                own_values.pop()
            own_indices.frombytes(indices.tobytes())
            own_values.frombytes(values.tobytes())

    def state_dict(self) -> dict[str, Any]:
        """Return the full history as plain types and tensors."""
        return {
            "values": self.to_dict(),
            "epochs": {name: list(epochs) for name, epochs in self._epochs.items()},
            "step_indices": {name: _as_tensor(a, torch.int64) for name, a in self._step_indices.items()},
            "step_values": {name: _as_tensor(a, torch.float64) for name, a in self._step_values.items()},
            "row": None if self._row is None else dict(self._row),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the content with a state that :meth:`state_dict` returned."""
        self._unagreed = {}
        self._values = {name: list(values) for name, values in state["values"].items()}
        self._epochs = {name: list(epochs) for name, epochs in state["epochs"].items()}
        self._step_indices = {name: array("q", t.tolist()) for name, t in state["step_indices"].items()}
        self._step_values = {name: array("d", t.tolist()) for name, t in state["step_values"].items()}
        row = state.get("row")  # older checkpoints lack this entry
        self._row = None if row is None else dict(row)
        self.end_row()  # values that are added now are none of its


def _mean(values: Sequence[float]) -> float:
    # Equal values stay exact; computing a mean could round them.
    return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table for notebooks."""
    from html import escape  # its table of entities takes 3 ms of "import trainloop"

    names, *lines = _cells(rows)
    parts = ["".join(f"<th>{escape(name)}</th>" for name in names)]
    parts += ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines]
    return f"<table>{''.join(f'<tr>{part}</tr>' for part in parts)}</table>"


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as an aligned text table, with columns in the order in which they first appear."""
    lines = _cells(rows)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of a table, as a list of lines. The first line is the header."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    text = "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


def _let_notebook_show(figure_type: type) -> None:
    """Make notebooks show figures as pictures. By default, they do so only after a cell has imported pyplot."""
    shell = sys.modules["IPython"].get_ipython() if "ipykernel" in sys.modules and "IPython" in sys.modules else None
    if shell is None or any(figure_type in formatter for formatter in shell.display_formatter.formatters.values()):
        return
    from IPython.core.pylabtools import select_figure_formats

    select_figure_formats(shell, {"png"})


def _as_tensor(values: array[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu") if len(values) else torch.empty(0, dtype=dtype, device="cpu")
