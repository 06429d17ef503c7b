"""One rank's logs: the values of steps and the totals of an epoch, recorded, and exchanged together."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import compress
from operator import mul
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from trainloop._metrics.exchange import Exchange, Gathered
from trainloop._metrics.reducing import (
    REDUCTIONS,
    Options,
    StepValues,
    epoch_value,
    exact_sum,
    reduced,
)
from trainloop._metrics.slots import Slots, number_in
from trainloop.errors import ConfigurationError


class LogCall(NamedTuple):
    """The options of ``TTModel.log``, as passed."""

    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce: str = "mean"
    sync_dist: bool = True
    prog_bar: bool = False
    rank_zero_only: bool = False


class EpochEnd(NamedTuple):
    """The result of :meth:`Recorder.finish_epoch`, over all ranks."""

    steps: StepValues
    losses: dict[str, float]
    """The loop's loss by the name ``''``, and the losses of a ``MultiLoss`` by their names."""
    metrics: dict[str, float]
    """The logged metrics."""
    attachments: list[Any]
    """Each rank's attachment; one entry if all sent the same."""


# Beside the total of a loss: the samples of batches that may have no units.
_EMPTY = "\0empty"
_COUNT = Options(on_step=False, on_epoch=True, reduce="sum", shared=True, part=None)


class _Series:
    """One metric on this rank: pending values in slots, step values to be exchanged, and the epoch's totals so far."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self.options = options
        self.asked: LogCall | None = None
        self.pending: list[tuple[int, Tensor | float, Tensor | float]] = []  # step, value, weight; tensors are slots
        self.latest = math.nan
        self.clear()

    def clear(self) -> None:
        """Begin an epoch."""
        # Machine numbers: 24 bytes per value, and no objects for the garbage collector to traverse.
        self.steps, self.values, self.weights = array("q"), array("d"), array("d")
        self.count = 0
        self.total: list[float] = []
        self.weight: list[float] = []
        self.empty = 0
        """Samples of batches whose loss is zero and a mean over samples. If other batches' losses have units, these
        batches have none: ``get_loss`` returns zero if all targets are ignored."""

    def settle(self, numbers: Mapping[int, float]) -> None:
        """Process pending values; ``numbers`` maps a slot's id to the slot's value."""
        pending, self.pending = self.pending, []
        steps, kept_values, kept_weights = zip(*pending)
        values: list[Any] = list(map(numbers.get, map(id, kept_values), kept_values))
        weights: list[Any] = list(map(numbers.get, map(id, kept_weights), kept_weights))
        self.latest = values[-1]
        of_steps = weights
        if self.options.part is not None:
            if any(type(weight) is not int for weight in kept_weights):
                self.options = self.options._replace(units=True)
            empty = [type(weight) is int and not value for value, weight in zip(values, kept_weights)]
            if any(empty):
                self.empty += sum(compress(weights, empty))
                of_steps = [-weight if is_empty else weight for weight, is_empty in zip(weights, empty)]
        if self.options.on_step:
            if min(steps) > 0:
                self.steps.extend(steps)
                self.values.extend(values)
                self.weights.extend(of_steps)
            else:
                self._settle_outside(steps, values, of_steps)
        if self.options.on_epoch:
            if self.options.reduce == "mean":
                if not all(weights):  # a value without weight does not count, not even NaN, the mean over no samples
                    values = [value for value, weight in zip(values, weights) if weight]
                    weights = [weight for weight in weights if weight]
                values = list(map(mul, values, weights))
                self.weight = exact_sum([*self.weight, *weights])
            self.total = reduced(self.options.reduce, [*self.total, *values])
            self.count += len(pending)

    def _settle_outside(self, steps: Sequence[int], values: Sequence[float], weights: Sequence[float]) -> None:
        """Process step values. Values logged between steps are step values only if ``on_step`` was requested."""
        wanted = self.asked is not None and (bool(self.asked.on_step) or self.asked.on_epoch is False)
        for step, value, weight in zip(steps, values, weights):
            if step > 0 or wanted:
                self.steps.append(abs(step))
                self.values.append(value)
                self.weights.append(weight)

    def new_steps(self, unfinished: int, again: int) -> tuple[Options, Any, Any, Any]:
        """Return the values of steps but the ``unfinished`` one; keep this step's, and those to return ``again``."""
        columns = np.array(self.steps, np.int64), np.array(self.values), np.array(self.weights)
        if not unfinished and not again:
            self.steps, self.values, self.weights = array("q"), array("d"), array("d")
            return (self.options, *columns)
        kept = columns[0] == (unfinished or again)
        self.steps, self.values, self.weights = (
            array(code, column[kept].tolist()) for code, column in zip("qdd", columns, strict=True)
        )
        return self.options, *(column[columns[0] != unfinished] for column in columns)


class Recorder:
    """Collect the logs of one rank in an epoch, or in one evaluation.

    Parameters
    ----------
    rank : int
    exchange : Exchange, optional
        Exchange of logs between ranks. Default: no other ranks.
    on_step : bool
        True to keep step values (in training, not in evaluation).
    prefix : str
        Prefix for names that don't start with it, such as ``val_``.
    reserved : tuple of str
        Names that can't be logged, in addition to the loss's name, because the loop uses them.

    Attributes
    ----------
    step : int
        Current optimizer step, counted from 1; set by the loop. Negative between two steps: a value logged
        then is a value of the epoch, and of that step only if ``on_step`` was requested.
    batch_size : int
        Samples of the current batch: the default weight of logged values. Set by the loop.
    rank_zero_only_names : set of str
    open_step : int
        Step whose values the last exchange has returned before all of its hooks had run; 0 if none. The next exchange
        returns them again, with those logged in between.
    again : int
        Step whose values the last exchange has returned again; 0 if none.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        exchange: Exchange | None = None,
        on_step: bool = True,
        prefix: str = "",
        reserved: tuple[str, ...] = (),
    ) -> None:
        self.step = 0
        self.batch_size = 1
        self.rank_zero_only_names: set[str] = set()
        self._rank = rank
        self._exchange = exchange or Gathered()
        self.open_step = self.again = 0
        self._exchanged_step = 0
        self._on_step = on_step
        self._prefix = prefix
        self._reserved = reserved
        self._series: dict[str, _Series] = {}
        self._logged: dict[str, _Series] = {}  # by the name that log was called with
        self._parts: dict[str, _Series] = {}
        self._finished: dict[str, list[Any]] = {}  # all ranks' entries of the last finished epoch
        self._slots: dict[torch.device, Slots] = {}
        self._registering = threading.Lock()
        self._part("")  # the first metric, so that tables show it first

    # -- in the step ---------------------------------------------------------------------------------------------------

    def log(self, name: str, value: Tensor | float, asked: LogCall, batch_size: Tensor | float | None = None) -> None:
        """Record a value for :meth:`.TTModel.log`. Thread-safe, since replicas call it from their threads.

        Parameters
        ----------
        asked : LogCall, or a tuple with the same items
        """
        # The usual case first: a known name with the same options; at most two comparisons.
        series = self._logged.get(name) if type(name) is str else None
        if series is None or series.asked != asked:
            series = self._register(name, value, LogCall(*asked))
        if isinstance(value, Tensor):
            try:
                kept = float(value.item()) if type(value) is Tensor and value.is_cpu else self._kept(value)
            except RuntimeError as error:
                if value.numel() == 1:
                    raise
                raise ConfigurationError(
                    f"log({name!r}, ...): the value has shape {tuple(value.shape)}, but must be a scalar. "
                    "Reduce it first, for example with .mean()."
                ) from error
        else:
            kept = value if type(value) is float else _number(name, value)
        weight = self.batch_size if batch_size is None else self._weight(name, batch_size)
        series.pending.append((self.step, kept, weight))

    def add_loss(
        self, loss: Tensor | Mapping[str, Tensor], weight: Tensor | float | Mapping[str, Tensor | float]
    ) -> Tensor:
        """Record the loop's loss, and its parts if it is a ``MultiLoss``; return the total, detached and 0-d.

        ``weight`` may have a weight for each part. The epoch's total is then the sum of the parts' means.
        """
        if not isinstance(loss, Tensor):
            for part, value in loss.items():
                of_part = weight[part] if isinstance(weight, Mapping) else weight
                self._add(self._parts.get(part) or self._part(part), value, of_part)
            loss = cast("Tensor", loss.total())  # type: ignore[attr-defined]  # MultiLoss is in a higher layer
        if not isinstance(weight, (int, float)):  # asked first: to ask for a Mapping takes ten times as long
            if isinstance(weight, Mapping):
                weight, whole_of_parts = self.batch_size, self._parts[""]
                whole_of_parts.options = whole_of_parts.options._replace(on_epoch=False)
            elif isinstance(weight, Tensor):  # otherwise a number of numpy
                weight = self._kept(weight)
        whole = loss.detach()
        if whole.ndim:
            whole = whole.reshape(())
        # The usual case first.
        kept = float(whole.item()) if type(whole) is Tensor and whole.is_cpu else self._kept(whole)
        self._parts[""].pending.append((self.step, kept, weight))
        return whole

    def _add(self, series: _Series, value: Tensor, weight: Tensor | float) -> None:
        if isinstance(weight, Tensor):
            weight = self._kept(weight)
        series.pending.append((self.step, self._kept(value), weight))

    def _weight(self, name: str, weight: Any) -> Tensor | float:
        if type(weight) is int and weight >= 0:
            return weight
        if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
            return self._kept(weight)
        try:
            if 0 <= weight < math.inf:
                return float(weight)
        except (TypeError, ValueError, RuntimeError):
            pass
        raise ConfigurationError(f"log({name!r}, batch_size={weight!r}): must be a number of samples, 0 or more.")

    def _kept(self, value: Tensor) -> Tensor | float:
        """Return the number in a tensor, or its slot on a device, which would have to be waited for."""
        return number_in(value) if value.is_cpu else self._slots_on(value.device).keep(value)

    def _slots_on(self, device: torch.device) -> Slots:
        return self._slots.get(device) or self._slots.setdefault(device, Slots(device))

    # -- once for each metric ------------------------------------------------------------------------------------------

    def _part(self, part: str) -> _Series:
        key = next(iter(named_losses({part: 0.0}, self._prefix)))
        if key in self._series and self._series[key].options.part is None:
            raise ConfigurationError(_is_loop_loss(key))
        options = Options(self._on_step, True, "mean", True, part)
        series = self._series.setdefault(key, _Series(key, options))
        return self._parts.setdefault(part, series)

    def _register(self, name: str, value: Any, asked: LogCall) -> _Series:
        """Return the series of a name that is logged for the first time, or with options that differ from before."""
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"log({name!r}, ...): the name must be a non-empty string.")
        with self._registering:
            before = self._logged.get(name)
            if before is not None and before.asked == asked:  # another thread has registered it
                return before
            self._check(name, value, asked, before)
            key = ("" if name.startswith(self._prefix) else self._prefix) + name  # plain text of an enum's member
            options = self._options(asked)
            series = self._series.get(key)
            if (series is not None and series.options.part is not None) or key in self._reserved:
                raise ConfigurationError(_is_loop_loss(name))
            if series is not None:
                self._check_sole(name, series)
            if series is None or series.options != options:  # otherwise the epoch continues from a checkpoint
                series = self._series[key] = _Series(key, options)
            series.asked = asked
            if asked.rank_zero_only:
                self.rank_zero_only_names.add(key)
            self._logged[name] = series
            return series

    def _check(self, name: str, value: Any, asked: LogCall, before: _Series | None) -> None:
        for option in ("on_step", "on_epoch", "sync_dist", "prog_bar", "rank_zero_only"):
            flag = getattr(asked, option)
            if flag is not None and not isinstance(flag, bool):
                raise ConfigurationError(f"log({name!r}, {option}={flag!r}): must be True or False.")
        if asked.reduce not in REDUCTIONS:
            raise ConfigurationError(f"log({name!r}, reduce={asked.reduce!r}): must be 'mean', 'sum', 'min' or 'max'.")
        if isinstance(value, Tensor) and value.is_complex():
            raise ConfigurationError(
                f"log({name!r}, ...): the value is complex. Log its real part or its absolute value."
            )
        if before is not None:
            earlier, asked_now = before.asked._asdict() if before.asked else {}, asked._asdict()
            changed = [option for option in asked_now if asked_now[option] != earlier[option]]
            raise ConfigurationError(
                f"log({name!r}, {', '.join(f'{option}={asked_now[option]!r}' for option in changed)}): this metric was "
                f"logged with {', '.join(f'{option}={earlier[option]!r}' for option in changed)} before. Use the same "
                "options in all calls with this name."
            )

    def _check_sole(self, name: str, series: _Series) -> None:
        """Raise an error if another name is recorded as the same metric: 'acc' and 'val_acc' in a validation."""
        other = next((known for known, one in self._logged.items() if one is series and known != name), None)
        if other is not None:
            raise ConfigurationError(
                f"log({name!r}, ...): {other!r} has been logged in this evaluation, too, and both names are recorded "
                f"as {series.name!r}. Choose another name for one of them, or log only one of them."
            )

    def _options(self, asked: LogCall) -> Options:
        recorded = not asked.rank_zero_only or self._rank == 0
        return Options(
            on_step=recorded and self._on_step and (asked.on_step is None or bool(asked.on_step)),
            on_epoch=recorded and (asked.on_epoch is None or bool(asked.on_epoch)),
            reduce=asked.reduce,
            shared=bool(asked.sync_dist) and not asked.rank_zero_only,
            part=None,
        )

    # -- between steps -------------------------------------------------------------------------------------------------

    def between_steps(self, step: int) -> None:
        """Mark that no step is running; values logged with ``on_step=True`` then belong to ``step``."""
        self.step, self.batch_size = -step, 1

    @property
    def has_logs(self) -> bool:
        """True if anything was logged since the last epoch was finished."""
        return any(series.pending or series.count or series.steps for series in self._series.values())

    @property
    def names(self) -> list[str]:
        """Names of the metrics that have been logged or recorded."""
        return list(self._series)

    def drop(self, names: Container[str]) -> None:
        """Drop the values that were logged by these names since the last epoch was finished."""
        for series in self._series.values():
            if series.name in names:
                series.pending.clear()
                series.clear()

    # -- reading and exchanging ----------------------------------------------------------------------------------------

    def bar_values(self) -> dict[str, Tensor | float]:
        """Return the latest value on this rank of each metric logged with ``prog_bar``, on its device."""
        shown = [series for series in self._series.values() if series.asked is not None and series.asked.prog_bar]
        return {s.name: s.pending[-1][1] if s.pending else s.latest for s in shown}

    def compact(self) -> None:
        """Read all slots, in one transfer per device. It waits for devices, but not for other ranks."""
        numbers: dict[int, float] = {}
        for slots in self._slots.values():
            # One transfer per device, for all metrics and steps: each transfer waits for the device.
            numbers.update(slots.read())
        for series in self._series.values():
            if series.pending:
                series.settle(numbers)

    def exchange_steps(self, *, finished: int | None = None, complete: bool = True) -> StepValues:
        """Return step values since the last call, over all ranks. Collective if there are several ranks.

        If no step has begun since the last exchange, which all ranks know, nothing is exchanged or returned.

        Parameters
        ----------
        finished : int, optional
            The last step that was taken: values of a later one are returned when it is taken, too. Default: the current
            step.
        complete : bool
            False if hooks may log more values of the ``finished`` step: its values are returned now and, with what is
            logged later, at the next exchange.
        """
        self.compact()
        step = abs(self.step)
        unfinished = step if finished is not None and step > finished else 0
        newest = unfinished - 1 if unfinished else self.step
        if newest == self._exchanged_step and not self.open_step:
            self.again = 0
            return {}
        self._exchanged_step = newest
        return self._exchange(self._new_steps(unfinished, 0 if complete else finished or 0)).steps

    def finish_epoch(self, attachment: Any = None, *, late: bool = False) -> EpochEnd:
        """Exchange logs once; return the remaining step values and the epoch's values, and empty the recorder.

        Collective if there are several ranks.

        Parameters
        ----------
        attachment : object
            Object to send to all ranks with the logs.
        late : bool
            True if the logs since the last call belong to the same epoch: their metrics, over the whole epoch, are
            returned.
        """
        self.compact()
        steps, epoch, attachments = self._exchange(self._new_steps(), self._totals(), attachment)
        if late:
            # Means over the epoch are recomputed from all parts: a mean of means would be another value.
            epoch = {name: _joined(name, self._finished.get(name, []), entries) for name, entries in epoch.items()}
            self._finished.update(epoch)
        else:
            self._finished = epoch
        losses, metrics = {}, {}
        for name, entries in epoch.items():
            part = entries[0][0].part
            if name.endswith(_EMPTY):
                continue
            if name + _EMPTY in epoch and any(options.units for options, *_ in entries):
                entries = [*entries, (entries[0][0], [], [-epoch_value(epoch[name + _EMPTY])])]
            if part is None:
                metrics[name] = epoch_value(entries)
            elif all(options.on_epoch for options, *_ in entries):
                losses[part] = epoch_value(entries)
        if losses and "" not in losses:  # parts with different weights
            losses = {"": math.fsum(losses.values()), **losses}
        for series in self._series.values():
            series.clear()
        self._exchanged_step = self.step
        return EpochEnd(steps, losses, metrics, attachments)

    def _new_steps(self, unfinished: int = 0, again: int = 0) -> dict[str, Any]:
        self.again, self.open_step = self.open_step, (0 if unfinished else again)
        found = {s.name: s.new_steps(unfinished, self.open_step) for s in self._series.values() if s.steps}
        return {name: entry for name, entry in found.items() if len(entry[1])}  # all may be of the unfinished step

    def _totals(self) -> dict[str, Any]:
        counted = [s for s in self._series.values() if s.count]
        whole = self._parts[""]
        if counted and not whole.options.on_epoch and whole not in counted:
            counted.append(whole)  # without a value: other ranks are not to count theirs
        empty = {s.name + _EMPTY: (_COUNT, [float(s.empty)], list[float]()) for s in counted if s.empty}
        return {**{s.name: (s.options, s.total, s.weight) for s in counted}, **empty}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the unfinished epoch, as plain types. Call it after :meth:`exchange_steps`."""
        return {
            s.name: {"options": list(s.options), "count": s.count, "total": s.total, "weight": s.weight}
            | ({"empty": s.empty} if s.empty else {})
            for s in self._series.values()
            if s.count or (s is self._parts[""] and not s.options.on_epoch)
        }

    def load_state_dict(self, own: dict[str, Any], others: Iterable[dict[str, Any]] = ()) -> None:
        """Continue an unfinished epoch.

        Parameters
        ----------
        own : dict
            The :meth:`state_dict` of this rank.
        others : iterable of dict
            States of ranks that no longer exist: their shared values are added to this rank's.
        """
        for i, state in enumerate((own, *others)):
            for name, saved in state.items():
                options = Options(*saved["options"])
                if i and not options.shared:
                    continue
                series = self._series.setdefault(name, _Series(name, options))
                if options.part is not None:
                    self._parts[options.part] = series
                series.count += saved["count"]
                series.total = reduced(options.reduce, [*series.total, *saved["total"]])
                series.weight = exact_sum([*series.weight, *saved["weight"]])
                series.empty += saved.get("empty", 0)
                now = series.options
                series.options = now._replace(
                    units=now.units or options.units, on_epoch=now.on_epoch and options.on_epoch
                )


def _joined(name: str, before: list[Any], entries: list[Any]) -> list[Any]:
    if before and not before[0][0].agree(entries[0][0]):
        raise ConfigurationError(
            f"log({name!r}, ...): this metric was logged with other options before, on another rank. Use the same "
            "options in all calls with this name."
        )
    return [*before, *entries]


def named_losses(losses: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Return losses by their names in the history."""
    return {f"{prefix}loss" if part == "" else f"{prefix}loss_{part}": value for part, value in losses.items()}


def _is_loop_loss(name: str) -> str:
    return f"log({name!r}, ...): the loop records {name!r} itself. Choose another name."


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except OverflowError as error:
        raise ConfigurationError(
            f"log({name!r}, ...): the value is an int that is larger than all floats. Log its logarithm, for example."
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"log({name!r}, {value!r}): the value is a {type(value).__name__}, but must be a number or a 0-d tensor."
            f"{_advice(value)}"
        ) from error


def _advice(value: Any) -> str:
    """Return what to log instead of a value that is no number; an empty string if unknown."""
    if isinstance(value, Mapping):
        return " Log each of its values under its own name."
    if callable(getattr(value, "update", None)) and callable(getattr(value, "compute", None)):
        return (
            " Update the metric in each batch, and log the result of its compute() once at the end: in "
            "on_evaluation_end, or for training in a callback's on_epoch_end. Or pass the metric to "
            "ModelPerformanceEvaluation."
        )
    return ""
