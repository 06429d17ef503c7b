"""Values logged in a loop: kept on their device, read in bulk, averaged over samples and ranks.

A logged value is copied into a slot on its own device and nothing else, so that a step never waits for the device.
:meth:`Recorder.compact` reads all slots in one transfer; :meth:`Recorder.exchange_steps` and
:meth:`Recorder.finish_epoch` tell all ranks everything in one exchange, whatever each of them logged.

An epoch's sums are exact (:func:`exact_sum`), so its values depend neither on when logs were read nor on how samples
were spread over ranks; what is kept of an epoch is a few numbers a metric, however long it is.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainloop.errors import ConfigurationError

__all__ = ["Asked", "EpochEnd", "Recorder", "Row", "StepValues", "exact_sum", "named_losses", "rows_of"]

Row = tuple[int, dict[str, float]]
StepValues = dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]
"""Steps, ascending, and the value of each, by metric."""

_REDUCTIONS = ("mean", "sum", "min", "max")


class Asked(NamedTuple):
    """The options of ``TTModel.log``, as they were passed."""

    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce: str = "mean"
    sync_dist: bool = True
    prog_bar: bool = False
    rank_zero_only: bool = False


class Options(NamedTuple):
    """What becomes of a metric's values; sent to the other ranks along with them."""

    on_step: bool
    on_epoch: bool
    reduce: str
    shared: bool
    """Over all ranks; else this rank keeps its own."""
    part: str | None
    """Of the loop's own loss: the part's name, empty for the whole. ``None``: a metric that the user logs."""


class EpochEnd(NamedTuple):
    """What :meth:`Recorder.finish_epoch` found, over all ranks."""

    steps: StepValues
    losses: dict[str, float]
    """The loop's own loss under ``''``, and its parts under their names."""
    metrics: dict[str, float]
    """What was logged."""
    riders: list[Any]
    """What each rank sent along."""


def exact_sum(values: Iterable[float]) -> list[float]:
    """Floats whose sum is exactly that of ``values``: the rounded sum, what it lacks, what that lacks, ...

    Mostly one or two, and none for 0. Sums of parts can be added up to those of the whole, in any order.

    Examples
    --------
    >>> exact_sum([1e16, 1.0, 1.0, 1.0])
    [1.0000000000000004e+16, -1.0]
    """
    values = list(values)
    try:
        rest = math.fsum(values)
        parts: list[float] = []
        while rest and math.isfinite(rest):
            parts.append(rest)
            rest = math.fsum([*values, *(-part for part in parts)])
        return [rest] if rest else parts
    except (OverflowError, ValueError):  # fsum refuses inf - inf, and sums that are too large on the way
        return [sum(values)]


class _Series:
    """One metric on this rank: what is still in slots, step values not yet exchanged, and the epoch so far."""

    __slots__ = (
        "asked",
        "count",
        "latest",
        "name",
        "options",
        "pending",
        "steps",
        "total",
        "values",
        "weight",
        "weights",
    )

    def __init__(self, name: str, options: Options, asked: Asked | None = None) -> None:
        self.name = name
        self.options = options
        self.asked = asked
        self.pending: list[tuple[int, Tensor | float, Tensor | float]] = []  # step, value, weight; tensors are slots
        self.latest = math.nan
        self.clear()

    def clear(self) -> None:
        """Begin an epoch."""
        # Machine numbers: 24 bytes a value, and no objects for the garbage collector to walk.
        self.steps, self.values, self.weights = array("q"), array("d"), array("d")
        self.count = 0
        self.total: list[float] = []
        self.weight: list[float] = []

    def settle(self, numbers: Mapping[int, float]) -> None:
        """Take in what is pending; ``numbers`` holds those in slots, by the slot's id."""
        pending, self.pending = self.pending, []
        values = [numbers[id(value)] if isinstance(value, Tensor) else value for _, value, _ in pending]
        weights = [numbers[id(weight)] if isinstance(weight, Tensor) else weight for _, _, weight in pending]
        self.latest = values[-1]
        if self.options.on_step:
            self.steps.extend([step for step, _, _ in pending])
            self.values.extend(values)
            self.weights.extend(weights)
        if self.options.on_epoch:
            if self.options.reduce == "mean":
                # Nothing weighs nothing, even where it is nan: the mean over no samples.
                values = [value * weight for value, weight in zip(values, weights, strict=True) if weight]
                self.weight = exact_sum([*self.weight, *weights])
            self.total = _reduced(self.options.reduce, [*self.total, *values])
            self.count += len(pending)

    def new_steps(self) -> tuple[Options, Any, Any, Any]:
        columns = (np.array(self.steps, np.int64), np.array(self.values), np.array(self.weights))
        self.steps, self.values, self.weights = array("q"), array("d"), array("d")
        return self.options, *columns


class _Slots:
    """Numbers of one device, kept there as float64 until they are read all at once.

    A slot is a 0-d view of a block of memory: keeping a value is one copy, and allocates nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._free: Iterator[Tensor] = iter(())
        self._growing = threading.Lock()

    def keep(self, value: Tensor) -> Tensor:
        """A slot with the value as it is now. To be called by any thread."""
        if value.requires_grad:
            value = value.detach()
        slot = next(self._free, None)
        if slot is None:
            slot = self._grown()
        try:
            return slot.copy_(value)
        except RuntimeError:  # asking first for what is nearly always so would cost every value
            if not value.ndim or value.numel() != 1:
                raise
            return slot.copy_(value.reshape(()))

    def _grown(self) -> Tensor:
        with self._growing:
            slot = next(self._free, None)  # another thread may have been here
            if slot is None:
                dtype = torch.float32 if self._device.type == "mps" else torch.float64
                with torch.inference_mode(False):  # else the slots could be used in that mode only
                    block = torch.empty(max(256, len(self._slots)), dtype=dtype, device=self._device)
                    slots = block.unbind()
                self._blocks.append(block)
                self._slots.extend(slots)
                self._free = iter(slots)
                slot = next(self._free)
            return slot

    def read(self) -> dict[int, float]:
        """The number in each slot that is taken, by the slot's id; all are free afterwards. Waits for the device."""
        taken = len(self._slots) - length_hint(self._free)
        if not taken:
            return {}
        flat = self._blocks[0] if len(self._blocks) == 1 else torch.cat(self._blocks)
        numbers = flat[:taken].tolist()
        self._free = iter(self._slots)
        return dict(zip(map(id, self._slots), numbers))


class Recorder:
    """Collects what one rank logs in an epoch, or in one evaluation.

    Parameters
    ----------
    rank : int
    gather : callable, optional
        ``gather(object) -> list`` of every rank's object, on every rank; ``None`` in one process.
    on_step : bool
        Whether step values are kept (training does, evaluation doesn't).
    prefix : str
        Put before names that don't start with it, as ``val_``.
    reserved : tuple of str
        Names with a meaning of their own, besides that of the loss, which nobody may log.

    Attributes
    ----------
    step : int
        The optimizer step that is running, counted from 1; the loop sets it.
    batch_size : int
        Samples of the batch that is running: the weight of what is logged without one. The loop sets it.
    rank_zero_only_names : set of str
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
        self._rank = rank
        self._gather = gather
        self._on_step = on_step
        self._prefix = prefix
        self._reserved = reserved
        self._series: dict[str, _Series] = {}
        self._logged: dict[str, _Series] = {}  # by the name that log was called with
        self._parts: dict[str, _Series] = {}
        self._slots: dict[torch.device, _Slots] = {}
        self._cpu = self._slots_on(torch.device("cpu"))
        self._registering = threading.Lock()
        self._part("")  # the first metric, so that tables show it first

    # -- in the step ---------------------------------------------------------------------------------------------------

    def log(self, name: str, value: Tensor | float, asked: Asked, batch_size: Tensor | float | None = None) -> None:
        """What ``TTModel.log`` calls; see there. Replicas call it from their threads.

        Parameters
        ----------
        asked : Asked, or a tuple of the same
        """
        series = self._logged.get(name)
        if series is None or series.asked != asked:
            series = self._register(name, value, Asked(*asked))
        if isinstance(value, Tensor):
            try:
                value = self._kept(value)
            except RuntimeError as error:
                if value.numel() == 1:
                    raise
                raise ConfigurationError(
                    f"log({name!r}, ...): the value has shape {tuple(value.shape)}, but must be a scalar. "
                    "Reduce it first, for instance by .mean()."
                ) from error
        elif type(value) is not float:
            value = _number(name, value)
        weight = self.batch_size if batch_size is None else self._weight(name, batch_size)
        series.pending.append((self.step, value, weight))

    def add_loss(self, loss: Tensor | Mapping[str, Tensor], weight: Tensor | float) -> Tensor:
        """Record the loop's own loss, and its parts where it is a ``MultiLoss``; returns the whole, detached, 0-d."""
        if isinstance(loss, Mapping):
            for part, value in loss.items():
                self._add(self._parts.get(part) or self._part(part), value, weight)
            loss = loss.total()  # type: ignore[attr-defined]  # of MultiLoss, which stands above this module
        loss = loss.detach()
        if loss.ndim:
            loss = loss.reshape(())
        self._add(self._parts[""], loss, weight)
        return loss

    def _add(self, series: _Series, value: Tensor, weight: Tensor | float) -> None:
        if isinstance(weight, Tensor):
            weight = self._kept(weight)
        series.pending.append((self.step, self._kept(value), weight))

    def _weight(self, name: str, weight: Any) -> Tensor | float:
        if type(weight) is int and weight >= 0:
            return weight
        if isinstance(weight, Tensor) and weight.numel() == 1:
            return self._kept(weight)
        try:
            if weight >= 0:
                return float(weight)
        except (TypeError, ValueError, RuntimeError):
            pass
        raise ConfigurationError(f"log({name!r}, batch_size={weight!r}): must be a number of samples, 0 or more.")

    def _kept(self, value: Tensor) -> Tensor:
        return (self._cpu if value.is_cpu else self._slots_on(value.device)).keep(value)

    def _slots_on(self, device: torch.device) -> _Slots:
        return self._slots.get(device) or self._slots.setdefault(device, _Slots(device))

    # -- once for each metric ------------------------------------------------------------------------------------------

    def _part(self, part: str) -> _Series:
        key = f"{self._prefix}loss_{part}" if part else f"{self._prefix}loss"
        if key in self._series and self._series[key].options.part is None:
            raise ConfigurationError(_is_the_loops_own(key))
        options = Options(self._on_step, True, "mean", True, part)
        series = self._series.setdefault(key, _Series(key, options))
        return self._parts.setdefault(part, series)

    def _register(self, name: str, value: Any, asked: Asked) -> _Series:
        """The series of a name that is logged for the first time, or with other options than before."""
        with self._registering:
            before = self._logged.get(name)
            if before is not None and before.asked == asked:  # by another thread
                return before
            self._check(name, value, asked, before)
            key = name if name.startswith(self._prefix) else self._prefix + name
            options = self._options(asked)
            series = self._series.get(key)
            if (series is not None and series.options.part is not None) or key in self._reserved:
                raise ConfigurationError(_is_the_loops_own(name))
            if series is None or series.options != options:  # else the epoch of a checkpoint goes on
                series = self._series[key] = _Series(key, options)
            series.asked = asked
            if asked.rank_zero_only:
                self.rank_zero_only_names.add(key)
            self._logged[name] = series
            return series

    def _check(self, name: Any, value: Any, asked: Asked, before: _Series | None) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"log({name!r}, ...): the name must be a non-empty text.")
        if asked.reduce not in _REDUCTIONS:
            raise ConfigurationError(f"log({name!r}, reduce={asked.reduce!r}): must be 'mean', 'sum', 'min' or 'max'.")
        if isinstance(value, Tensor) and value.is_complex():
            raise ConfigurationError(
                f"log({name!r}, ...): the value is complex. Log its real part or its absolute value."
            )
        if before is not None:
            then, now = before.asked._asdict() if before.asked else {}, asked._asdict()
            differing = [option for option in now if now[option] != then[option]]
            raise ConfigurationError(
                f"log({name!r}, {', '.join(f'{option}={now[option]!r}' for option in differing)}): it was logged with "
                f"{', '.join(f'{option}={then[option]!r}' for option in differing)} before. "
                "Use one set of options for a name."
            )

    def _options(self, asked: Asked) -> Options:
        recorded = not asked.rank_zero_only or self._rank == 0
        return Options(
            on_step=recorded and self._on_step and (asked.on_step is None or bool(asked.on_step)),
            on_epoch=recorded and (asked.on_epoch is None or bool(asked.on_epoch)),
            reduce=asked.reduce,
            shared=bool(asked.sync_dist) and not asked.rank_zero_only,
            part=None,
        )

    # -- every now and then --------------------------------------------------------------------------------------------

    def bar_values(self) -> dict[str, float]:
        """The newest value on this rank of each metric logged with ``prog_bar``. Waits for the device."""
        shown = [series for series in self._series.values() if series.asked is not None and series.asked.prog_bar]
        return {s.name: float(s.pending[-1][1]) if s.pending else s.latest for s in shown}

    def compact(self) -> None:
        """Read all that is in slots, in one transfer for each device. Waits for the device; no exchange."""
        numbers: dict[int, float] = {}
        for slots in self._slots.values():
            numbers.update(slots.read())
        for series in self._series.values():
            if series.pending:
                series.settle(numbers)

    def exchange_steps(self) -> StepValues:
        """Step values since the last call, over all ranks. Collective where there are several ranks."""
        self.compact()
        own, shared = self._new_steps()
        return _by_step([*self._everyone(shared)], own)

    def finish_epoch(self, rider: Any = None) -> EpochEnd:
        """The remaining step values and the epoch's, in one exchange; the recorder is empty afterwards.

        Collective where there are several ranks.

        Parameters
        ----------
        rider : object
            Sent along to all ranks.
        """
        self.compact()
        own_steps, shared_steps = self._new_steps()
        logged = [s for s in self._series.values() if s.count]
        own, shared = (
            {s.name: (s.options, s.total, s.weight) for s in logged if s.options.shared is x} for x in (False, True)
        )
        everyone = self._everyone((shared_steps, shared, rider))
        totals = [*((name, entries) for name, entries in _by_name([theirs for _, theirs, _ in everyone]).items())]
        totals += [(name, [entry]) for name, entry in own.items()]
        losses, metrics = {}, {}
        for name, entries in totals:
            part, value = entries[0][0].part, _epoch_value(entries)
            if part is None:
                metrics[name] = value
            else:
                losses[part] = value
        for series in self._series.values():
            series.clear()
        steps = _by_step([theirs for theirs, _, _ in everyone], own_steps)
        return EpochEnd(steps, losses, metrics, [theirs for _, _, theirs in everyone])

    def _new_steps(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Step values that stay on this rank, and those for all."""
        new = [s for s in self._series.values() if s.steps]
        own, shared = ({s.name: s.new_steps() for s in new if s.options.shared is x} for x in (False, True))
        return own, shared

    def _everyone(self, mine: Any) -> list[Any]:
        return [mine] if self._gather is None else self._gather(mine)

    def state_dict(self) -> dict[str, Any]:
        """The half-done epoch on this rank, as plain types. Call after :meth:`exchange_steps`."""
        return {
            s.name: {"options": list(s.options), "count": s.count, "total": s.total, "weight": s.weight}
            for s in self._series.values()
            if s.count
        }

    def load_state_dict(self, own: dict[str, Any], others: Iterable[dict[str, Any]] = ()) -> None:
        """Go on with a half-done epoch.

        Parameters
        ----------
        own : dict
            What :meth:`state_dict` gave on this rank.
        others : iterable of dict
            States of ranks that are no more: what they had to share is added to this one's.
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
                series.total = _reduced(options.reduce, [*series.total, *saved["total"]])
                series.weight = exact_sum([*series.weight, *saved["weight"]])


def named_losses(losses: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Losses by the names that they have in the history."""
    return {f"{prefix}loss_{part}" if part else f"{prefix}loss": value for part, value in losses.items()}


def rows_of(steps: StepValues) -> list[Row]:
    """Step values as one row a step."""
    rows: dict[int, dict[str, float]] = {}
    for name, (indices, values) in steps.items():
        for step, value in zip(indices.tolist(), values.tolist(), strict=True):
            rows.setdefault(step, {})[name] = value
    return sorted(rows.items())


def _is_the_loops_own(name: str) -> str:
    return f"log({name!r}, ...): the loop records {name!r} itself. Choose another name."


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"log({name!r}, {value!r}): the value is a {type(value).__name__}, but must be a number or a 0-d tensor."
        ) from error


def _reduced(reduce: str, values: list[float]) -> list[float]:
    """The values as fewer with the same sum, least or greatest; reducing some first makes no difference."""
    if reduce in ("mean", "sum"):
        return exact_sum(values)
    # Not Python's min and max: they let nan pass or not depending on where it stands.
    return [float(np.min(values) if reduce == "min" else np.max(values))] if values else []


def _by_name(everyone: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Each metric's entries, in the order of ranks; the names in an order that is the same on all ranks.

    Raises, then on every rank, where ranks logged one name with different options.
    """
    found: dict[str, list[Any]] = {}
    first: dict[str, int] = {}
    for rank, entries in enumerate(everyone):
        for name, entry in entries.items():
            known = found.setdefault(name, [])
            if known and known[0][0] != entry[0]:
                ours, theirs = known[0][0]._asdict(), entry[0]._asdict()
                differing = [option for option in ours if ours[option] != theirs[option]]
                raise ConfigurationError(
                    f"log({name!r}, ...): rank {first[name]} logs it with "
                    f"{', '.join(f'{option}={ours[option]!r}' for option in differing)}, rank {rank} with "
                    f"{', '.join(f'{option}={theirs[option]!r}' for option in differing)}. "
                    "Use one set of options for a name."
                )
            first.setdefault(name, rank)
            known.append(entry)
    return found


def _by_step(everyone: list[dict[str, Any]], own: dict[str, Any]) -> StepValues:
    found = _by_name(everyone)
    found.update((name, [entry]) for name, entry in own.items())
    return {
        name: _reduced_by_step(
            entries[0][0].reduce, *(np.concatenate([entry[i] for entry in entries]) for i in (1, 2, 3))
        )
        for name, entries in found.items()
    }


def _reduced_by_step(
    reduce: str, steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    first = int(steps.min())
    places = steps - first  # steps of one flush lie close together: no need to sort
    counts = np.bincount(places)
    if reduce == "mean":
        with np.errstate(divide="ignore", invalid="ignore"):
            products = np.where(weights == 0, 0.0, values * weights)
            reduced = np.bincount(places, products) / np.bincount(places, weights)
        lone = (counts[places] == 1) & (weights > 0)
        reduced[places[lone]] = values[lone]  # as it was logged: multiplying and dividing may round
    elif reduce == "sum":
        reduced = np.bincount(places, values, len(counts))
    else:
        reduced = np.full(len(counts), np.inf if reduce == "min" else -np.inf)
        (np.minimum if reduce == "min" else np.maximum).at(reduced, places, values)
    present = np.flatnonzero(counts)
    return present + first, reduced[present]


def _epoch_value(entries: list[tuple[Options, list[float], list[float]]]) -> float:
    reduce = entries[0][0].reduce
    total = _rounded(_reduced(reduce, [part for _, parts, _ in entries for part in parts]))
    if reduce != "mean":
        return total
    weight = _rounded(exact_sum(part for _, _, parts in entries for part in parts))
    return total / weight if weight else math.nan


def _rounded(exact: list[float]) -> float:
    return exact[0] if exact else 0.0
