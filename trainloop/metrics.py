"""Values logged in a loop: kept on their device, read in bulk, averaged over samples and ranks.

A logged value is appended to a list and nothing else, so that a step never waits for the device.
:meth:`Recorder.compact` reads the list in one transfer; :meth:`Recorder.exchange_steps` and
:meth:`Recorder.finish_epoch` tell all ranks everything in one exchange, whatever each of them logged. Epoch values are
sums by ``math.fsum``, which is exact: they do not depend on when logs were read.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainloop.errors import ConfigurationError

__all__ = ["Recorder", "Row", "read_scalars"]

Row = tuple[int, dict[str, float]]
_KINDS = ("mean", "sum", "min", "max")


class Options(NamedTuple):
    """How a metric was asked to be kept: the same at every call."""

    on_step: bool
    on_epoch: bool
    reduce: str
    sync_dist: bool
    rank_zero_only: bool


class _Series:
    """One metric's values on this rank: all of the epoch, and those of steps not yet exchanged."""

    __slots__ = ("exchanged", "name", "options", "steps", "values", "weights")

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self.options = options
        self.steps = array("q")
        self.values = array("d")
        self.weights = array("d")
        self.exchanged = 0  # so many of the values were told to the other ranks as step values

    def new_steps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start = self.exchanged
        self.exchanged = len(self.steps)
        columns = (self.steps[start:], self.values[start:], self.weights[start:])
        return np.array(columns[0], dtype=np.int64), np.array(columns[1]), np.array(columns[2])

    def total(self) -> tuple[float, float]:
        """The epoch's (value, weight) on this rank; the value of a mean is still multiplied by the weight."""
        if self.options.reduce == "mean":
            products = map(float.__mul__, self.values, self.weights)
            return _fsum(products), _fsum(self.weights)
        return _REDUCTIONS[self.options.reduce](self.values), float(len(self.values))


class Recorder:
    """Collects what one rank logs in an epoch, or in one evaluation.

    Parameters
    ----------
    rank : int
    gather : callable, optional
        ``gather(object) -> list`` of every rank's object, on every rank; ``None`` in one process.
    on_step : bool
        Whether metrics logged without ``on_step`` keep their step values (training does, evaluation doesn't).
    prefix : str
        Put before names that don't start with it, as ``val_``.

    Attributes
    ----------
    step : int
        The optimizer step that is running, counted from 1; the loop sets it.
    batch_size : int
        Samples of the batch that is running: the weight of what is logged without one.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        gather: Callable[[Any], list[Any]] | None = None,
        on_step: bool = True,
        prefix: str = "",
        reserved: tuple[str, ...] = (),
    ) -> None:
        self.step = 0
        self.batch_size = 1
        self.rank_zero_only_names: set[str] = set()
        self.bar: dict[str, Tensor | float] = {}
        self._rank = rank
        self._gather = gather
        self._on_step = on_step
        self._prefix = prefix
        self._reserved = reserved
        self._series: dict[str, _Series] = {}
        self._asked: dict[str, tuple[Any, ...]] = {}
        # (series, step, value, weight) of values that are still where they were made
        self._pending: list[tuple[_Series, int, Tensor | float, Tensor | float]] = []

    def series(self, name: str, *, on_step: bool = True, reduce: str = "mean") -> _Series:
        """The loop's own metrics, such as the loss, for :meth:`add`."""
        if name not in self._series:
            self._series[name] = _Series(name, Options(on_step and self._on_step, True, reduce, True, False))
        return self._series[name]

    def add(self, series: _Series, value: Tensor | float, weight: Tensor | float) -> None:
        """Append a value that nobody will change afterwards; the loop's own way, without checks."""
        self._pending.append((series, self.step, value, weight))

    def log(
        self,
        name: str,
        value: Tensor | float,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce: str = "mean",
        sync_dist: bool = True,
        batch_size: int | None = None,
        prog_bar: bool = False,
        rank_zero_only: bool = False,
    ) -> None:
        """What ``TTModel.log`` calls; see there."""
        asked = (on_step, on_epoch, reduce, sync_dist, rank_zero_only)
        if self._asked.get(name) != asked:
            self._register(name, asked)
        if isinstance(value, Tensor):
            if value.ndim and value.numel() != 1:
                raise ConfigurationError(
                    f"log({name!r}, ...): the value has shape {tuple(value.shape)}, but must be a scalar. "
                    "Reduce it first, for instance by .mean()."
                )
            # A result of autograd is new; anything else may be a buffer that the next step changes in place.
            value = value.detach() if value.grad_fn is not None else value.detach().clone()
            if value.ndim:
                value = value.reshape(())
        elif not isinstance(value, float):
            value = _number(name, value)
        if prog_bar:
            self.bar[name] = value
        if rank_zero_only and self._rank != 0:
            return
        key = name if name.startswith(self._prefix) else self._prefix + name
        self._pending.append((self._series[key], self.step, value, batch_size or self.batch_size))

    def _register(self, name: str, asked: tuple[Any, ...]) -> None:
        on_step, on_epoch, reduce, sync_dist, rank_zero_only = asked
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"log({name!r}, ...): the name must be a non-empty text.")
        if name in self._reserved:
            raise ConfigurationError(f"log({name!r}, ...): the loop records {name!r} itself. Choose another name.")
        if reduce not in _KINDS:
            raise ConfigurationError(f"log({name!r}, reduce={reduce!r}): must be 'mean', 'sum', 'min' or 'max'.")
        if name in self._asked:
            labels = ("on_step", "on_epoch", "reduce", "sync_dist", "rank_zero_only")
            before = ", ".join(f"{k}={v!r}" for k, v, w in zip(labels, self._asked[name], asked, strict=True) if v != w)
            now = ", ".join(f"{k}={w!r}" for k, v, w in zip(labels, self._asked[name], asked, strict=True) if v != w)
            raise ConfigurationError(
                f"log({name!r}, {now}): it was logged with {before} before. Use one set of options for a name."
            )
        self._asked[name] = asked
        key = name if name.startswith(self._prefix) else self._prefix + name
        if rank_zero_only:
            self.rank_zero_only_names.add(key)
        options = Options(
            self._on_step if on_step is None else bool(on_step) and self._on_step,
            True if on_epoch is None else bool(on_epoch),
            reduce,
            bool(sync_dist) and not rank_zero_only,
            bool(rank_zero_only),
        )
        if key not in self._series or self._series[key].options != options:
            self._series[key] = _Series(key, options)  # one that is there holds a resumed epoch's values

    def compact(self) -> None:
        """Read all pending values, in one transfer for each dtype and device. Waits for the device; no exchange."""
        pending, self._pending = self._pending, []
        values = read_scalars([entry[2] for entry in pending])
        weights = read_scalars([entry[3] for entry in pending])
        for (series, step, _, _), value, weight in zip(pending, values, weights, strict=True):
            series.steps.append(step)
            series.values.append(value)
            series.weights.append(weight)

    def exchange_steps(self) -> list[Row]:
        """Step values since the last call, over all ranks, one row a step. Collective where there are several ranks."""
        self.compact()
        return _rows(self._everyone(self._new_steps()), self._rank)

    def finish_epoch(self) -> tuple[list[Row], dict[str, float]]:
        """The remaining step rows and the epoch's values, in one exchange; the recorder is empty afterwards.

        Collective where there are several ranks.
        """
        self.compact()
        kept = (s for s in self._series.values() if s.options.on_epoch and len(s.values))
        totals = {s.name: (s.options, *s.total()) for s in kept}
        everyone = self._everyone((self._new_steps(), totals))
        rows = _rows([steps for steps, _ in everyone], self._rank)
        values = _epoch_values([totals for _, totals in everyone], self._rank)
        for series in self._series.values():
            series.__init__(series.name, series.options)  # type: ignore[misc]  # emptied in place: the loop holds them
        return rows, values

    def _new_steps(self) -> dict[str, tuple[Any, ...]]:
        kept = ((s, s.new_steps()) for s in self._series.values() if s.options.on_step)
        return {s.name: (s.options, *columns) for s, columns in kept if len(columns[0])}

    def _everyone(self, mine: Any) -> list[Any]:
        return [mine] if self._gather is None else self._gather(mine)

    def state_dict(self) -> dict[str, Any]:
        """The half-done epoch on this rank, as plain types and tensors. Call after :meth:`exchange_steps`."""
        return {
            s.name: {
                "options": list(s.options),
                "steps": torch.tensor(s.steps, dtype=torch.int64),
                "values": torch.tensor(s.values, dtype=torch.float64),
                "weights": torch.tensor(s.weights, dtype=torch.float64),
            }
            for s in self._series.values()
            if len(s.values)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a half-done epoch; several ranks' states may be loaded one after the other."""
        for name, saved in state.items():
            options = Options(*saved["options"])
            series = self._series.setdefault(name, _Series(name, options))
            series.steps.extend(saved["steps"].tolist())
            series.values.extend(saved["values"].tolist())
            series.weights.extend(saved["weights"].tolist())
            series.exchanged = len(series.steps)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"log({name!r}, {value!r}): the value is a {type(value).__name__}, but must be a number or a 0-d tensor."
        ) from error


def _fsum(values: Any) -> float:
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # fsum refuses inf - inf; IEEE says nan
        return sum(values)


def read_scalars(values: list[Tensor | float]) -> list[float]:
    """Python floats of numbers and 0-d tensors, with one transfer for each dtype and device."""
    result: list[Any] = list(values)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            groups.setdefault((value.dtype, value.device), []).append(i)
    for indices in groups.values():
        for i, number in zip(indices, torch.stack([result[i] for i in indices]).tolist(), strict=True):
            result[i] = float(number)
    return result


_REDUCTIONS: dict[str, Callable[[Any], float]] = {"sum": _fsum, "min": min, "max": max}


def _contributions(everyone: list[dict[str, tuple[Any, ...]]], rank: int) -> dict[str, list[tuple[Any, ...]]]:
    """What counts for each metric here: every rank's entry, or this rank's own where it is not to be exchanged."""
    names = dict.fromkeys(name for entries in everyone for name in entries)
    found = {}
    for name in names:
        entries = [entries[name] for entries in everyone if name in entries]
        options: Options = entries[0][0]
        if options.rank_zero_only:
            entries = [everyone[0][name]]
        elif not options.sync_dist:
            own = everyone[rank if len(everyone) > 1 else 0]
            entries = [own[name]] if name in own else []
        if entries:
            found[name] = entries
    return found


def _rows(everyone: list[dict[str, tuple[Any, ...]]], rank: int) -> list[Row]:
    rows: dict[int, dict[str, float]] = {}
    for name, entries in _contributions(everyone, rank).items():
        options: Options = entries[0][0]
        steps, values, weights = (np.concatenate([entry[i] for entry in entries]) for i in (1, 2, 3))
        for step, value in zip(*_by_step(options.reduce, steps, values, weights), strict=True):
            rows.setdefault(step, {})[name] = value
    return sorted(rows.items())


def _by_step(reduce: str, steps: np.ndarray, values: np.ndarray, weights: np.ndarray) -> tuple[list[int], list[float]]:
    unique, inverse = np.unique(steps, return_inverse=True)
    if len(unique) == len(steps):  # one value a step: nothing to combine, and no rounding
        reduced = values[np.argsort(steps, kind="stable")]
    elif reduce == "mean":
        total = np.bincount(inverse, weights)
        with np.errstate(divide="ignore", invalid="ignore"):
            reduced = np.bincount(inverse, weights * values) / total
    elif reduce == "sum":
        reduced = np.bincount(inverse, values)
    else:
        reduced = np.full(len(unique), np.inf if reduce == "min" else -np.inf)
        (np.minimum if reduce == "min" else np.maximum).at(reduced, inverse, values)
    return unique.tolist(), reduced.tolist()


def _epoch_values(everyone: list[dict[str, tuple[Any, ...]]], rank: int) -> dict[str, float]:
    epoch_values = {}
    for name, entries in _contributions(everyone, rank).items():
        options: Options = entries[0][0]
        values = [value for _, value, _ in entries]
        if options.reduce == "mean":
            weight = _fsum(weight for _, _, weight in entries)
            epoch_values[name] = _fsum(values) / weight if weight else math.nan
        else:
            epoch_values[name] = _REDUCTIONS[options.reduce](values)
    return epoch_values
