"""Nested quotas: how many trials and folds run at once, with which resources, and on which devices.

This module only computes. The levels are run > trial (one bagged model, or one model) > fold (one model). In
AutoGluon's terms, ``total`` is ``num_cpus``/``num_gpus`` of ``fit``, ``per_bag`` is ``ag_args_ensemble: {ag_args_fit:
...}``, and ``per_model`` is ``ag_args_fit``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from trainloop._support.keywords import refuses_unknown
from trainloop._support.user_line import warn
from trainloop.errors import ResourceError
from trainloop.resources.quota import (
    ResourceQuota,
    Resources,
    as_number,
    as_text,
    checked_count,
    exact,
    format_bytes,
)

__all__ = ["Plan", "hold", "place", "plan"]

_UNBOUNDED = 10**9
_SEARCHED = 16  # largest number of unequal fractions for which all assignments are tried


class PartialQuota(NamedTuple):
    """A quota in exact figures; None for figures that are not given."""

    cpus: int | None
    gpus: Fraction | None
    memory: int | None


class WholeQuota(NamedTuple):
    """A quota in exact figures; only the memory may be unlimited."""

    cpus: int
    gpus: Fraction
    memory: int | None


@dataclass(frozen=True)
class Plan:
    """Numbers of trials and folds that run at once, and their quotas.

    The models that run at once never use more than is reserved for their trials (``cpus_used <= cpus_granted``), and
    the trials never reserve more than ``total``. The same holds for GPUs.
    """

    total: ResourceQuota
    """Resources of the run."""
    num_trials: int
    """Number of trials."""
    num_folds: int
    """Number of folds of each trial; 1 without bagging."""
    trials_in_parallel: int
    """Number of trials that run at once."""
    folds_in_parallel: int
    """Number of folds of one trial that run at once."""
    per_bag: ResourceQuota
    """Quota of one trial, which is reserved even if its folds don't use all of it."""
    per_model: ResourceQuota
    """Quota of one fold, or of the trial's only model."""
    placement: tuple[tuple[int, ...], ...]
    """Devices of each of the models that run at once, as indices into the run's own devices (:func:`place`)."""

    @property
    def models_in_parallel(self) -> int:
        """Number of models that run at once, over all trials."""
        return self.trials_in_parallel * self.folds_in_parallel

    @property
    def cpus_granted(self) -> int:
        """CPUs reserved for the trials that run at once."""
        return self.trials_in_parallel * int(self.per_bag.num_cpus)

    @property
    def gpus_granted(self) -> float:
        """GPUs reserved for the trials that run at once."""
        return as_number(self.trials_in_parallel * exact(self.per_bag.num_gpus))

    @property
    def cpus_used(self) -> int:
        """CPUs used by the models that run at once."""
        return self.models_in_parallel * int(self.per_model.num_cpus)

    @property
    def gpus_used(self) -> float:
        """GPUs used by the models that run at once."""
        return as_number(self.models_in_parallel * exact(self.per_model.num_gpus))

    @property
    def waves(self) -> int:
        """Number of rounds (waves) of models: the rounds of trials, times the rounds of folds in a trial.

        ``tune`` may need fewer rounds, because it gives the slot of a finished trial to the folds of the next one.
        """
        trials = math.ceil(self.num_trials / self.trials_in_parallel)
        return trials * math.ceil(self.num_folds / self.folds_in_parallel)

    def __str__(self) -> str:
        def row(name: str, at_once: int, of: int, quota: ResourceQuota) -> str:
            memory = quota.memory if isinstance(quota.memory, str) else format_bytes(quota.memory)
            return f"{name:<7} {at_once:>7} {of:>5} {quota.num_cpus:>6} {quota.num_gpus:>8.4g}  {memory}"

        return "\n".join(
            (
                "        at once    of   CPUs     GPUs  memory",
                row("run", 1, 1, self.total),
                row("trial", self.trials_in_parallel, self.num_trials, self.per_bag),
                row("model", self.models_in_parallel, self.num_trials * self.num_folds, self.per_model),
                f"granted {self.cpus_granted} CPUs, {self.gpus_granted:.4g} GPUs; "
                f"used {self.cpus_used} CPUs, {self.gpus_used:.4g} GPUs; waves: {self.waves}",
            )
        )


@refuses_unknown
def plan(
    total: ResourceQuota | Resources,
    *,
    num_trials: int = 1,
    num_bag_folds: int = 1,
    per_bag: ResourceQuota | None = None,
    per_model: ResourceQuota | None = None,
    parallel_folds: bool = True,
) -> Plan:
    """Divide a run's resources over its trials and their folds.

    Parameters
    ----------
    total : ResourceQuota or Resources
        Resources of the run. ``num_cpus`` must be a number, such as that of ``resources.available()``; ``num_gpus``
        defaults to 0, because nothing is read from the machine.
    num_trials : int
        Number of trials, 1 or more.
    num_bag_folds : int
        Folds of each trial. 0 and 1 mean one model without bagging; ``per_bag`` is then ignored, with a warning.
    per_bag, per_model : ResourceQuota, optional
        Quota of one trial, and of one model. ``'auto'`` values are computed.
    parallel_folds : bool
        If False, the folds of a trial run one after the other.

    Raises
    ------
    ResourceError
        If a value is invalid, or exceeds the value given at the nearest level above it.

    Examples
    --------
    >>> total, bag, model = ResourceQuota(32, 4), ResourceQuota(10, 2), ResourceQuota(4, 0.5)
    >>> p = plan(total, num_trials=2, num_bag_folds=2, per_bag=bag, per_model=model)
    >>> p.trials_in_parallel, p.folds_in_parallel, p.cpus_used, p.gpus_used
    (2, 2, 16, 2)
    """
    num_trials = checked_count("num_trials", num_trials, least=1)
    num_bag_folds = checked_count("num_bag_folds", num_bag_folds, least=0)
    bagging = num_bag_folds > 1
    if per_bag is not None and not bagging:
        warn(
            f"per_bag is ignored: with num_bag_folds={num_bag_folds}, a trial trains one model. Use per_model instead."
        )
        per_bag = None
    wanted = num_bag_folds if bagging and parallel_folds else 1
    whole = _total(total)
    bag = _figures("per_bag", per_bag)
    model = _figures("per_model", per_model)
    _check_nesting(whole, bag, model)
    if isinstance(total, Resources) and bag.memory is None and model.memory is None:
        whole = whole._replace(memory=None)  # The machine's memory is no request to divide it.

    # Folds come first, then trials: the sooner a trial is done, the sooner the searcher learns from it.
    trials = _trials_at_once(num_trials, wanted, whole, bag, model)
    while True:
        bag_quota = _bag_quota(trials, wanted, whole, bag, model)
        folds = _fitting(wanted, bag_quota, model)
        model_quota = _model_quota(trials, folds, whole, bag_quota, model)
        # A bag of 1.6 GPUs holds two models of 0.6, and 5 GPUs hold three such bags, but not six such models.
        if trials * folds <= hold(whole.gpus, model_quota.gpus):
            break
        trials -= 1
    on_devices = place([model_quota.gpus] * (trials * folds), math.ceil(whole.gpus))
    return Plan(
        total=_quota(whole),
        num_trials=num_trials,
        num_folds=max(num_bag_folds, 1),
        trials_in_parallel=trials,
        folds_in_parallel=folds,
        per_bag=_quota(bag_quota),
        per_model=_quota(model_quota),
        placement=tuple(tuple(devices) for devices in on_devices),
    )


def hold(total_gpus: Fraction, gpus: Fraction) -> int:
    """Return how many requests of size ``gpus`` fit into ``total_gpus``; a fraction is never split across devices.

    Examples
    --------
    >>> hold(Fraction(2), Fraction(6, 10))
    2
    """
    if not gpus:
        return _UNBOUNDED
    if gpus >= 1 or total_gpus < 1:
        return total_gpus // gpus
    devices, rest = divmod(total_gpus, 1)
    return devices * (1 // gpus) + rest // gpus


# -- the rules, in their order -------------------------------------------------------------------------------------


def _figures(level: str, quota: ResourceQuota | None) -> PartialQuota:
    if quota is None:
        return PartialQuota(None, None, None)
    if not isinstance(quota, ResourceQuota):
        raise ResourceError(
            f"{level}={quota!r}: must be a ResourceQuota, e.g. {level}=ResourceQuota(num_cpus=2, num_gpus=0.5)."
        )
    gpus = None if quota.num_gpus == "auto" else exact(quota.num_gpus)
    if level == "per_model" and gpus is not None and gpus > 1 and gpus.denominator != 1:
        raise ResourceError(
            f"per_model num_gpus={quota.num_gpus!r}: one model can use a fraction of one GPU, or whole GPUs. "
            f"Use {math.floor(gpus)} or {math.ceil(gpus)}."
        )
    return PartialQuota(
        None if quota.num_cpus == "auto" else int(quota.num_cpus),
        gpus,
        None if quota.memory == "auto" else int(quota.memory),
    )


def _total(total: ResourceQuota | Resources) -> WholeQuota:
    if isinstance(total, Resources):
        return WholeQuota(total.num_cpus, Fraction(total.num_gpus), total.memory)
    figures = _figures("total", total)
    if figures.cpus is None:
        raise ResourceError(
            f"total={total!r}: a plan needs a number of CPUs, because it reads nothing from the machine (GPUs default "
            "to 0). Pass total=ResourceQuota(num_cpus=...), or trainloop.resources.available() for the whole machine."
        )
    return WholeQuota(figures.cpus, figures.gpus or Fraction(0), figures.memory)


def _check_nesting(total: WholeQuota, bag: PartialQuota, model: PartialQuota) -> None:
    """Check that every given value is within the nearest given one of a higher level."""
    for what, index in (("num_cpus", 0), ("num_gpus", 1), ("memory", 2)):
        above, parent = total[index], "total"
        for level, quota in (("per_bag", bag), ("per_model", model)):
            figure = quota[index]
            if figure is None:
                continue
            if above is not None and figure > above:
                none = " (no GPU granted)" if what == "num_gpus" and not above else ""
                raise ResourceError(
                    f"{level} {what}={as_text(figure)} is more than {what}={as_text(above)} of its parent, "
                    f"{parent}{none}. Lower it to at most {as_text(above)}, or raise {parent}."
                )
            above, parent = figure, level


def _fitting(wanted: int, parent: WholeQuota | PartialQuota, model: PartialQuota) -> int:
    """Return how many models fit at once, up to ``wanted``; a model without given values needs only one CPU."""
    folds = wanted
    if parent.cpus is not None:
        folds = min(folds, parent.cpus // (model.cpus or 1))
    if parent.gpus is not None and model.gpus is not None:
        folds = min(folds, hold(parent.gpus, model.gpus))
    if parent.memory is not None and model.memory is not None:
        folds = min(folds, parent.memory // model.memory)
    assert folds >= 1, "nesting was checked"
    return folds


def _trials_at_once(num_trials: int, wanted: int, total: WholeQuota, bag: PartialQuota, model: PartialQuota) -> int:
    """Return how many bags fit; without a given quota a bag is as many models as fit: folds come first, then trials."""
    parent = WholeQuota(
        total.cpus if bag.cpus is None else bag.cpus,
        total.gpus if bag.gpus is None else bag.gpus,
        total.memory if bag.memory is None else bag.memory,
    )
    folds = _fitting(wanted, parent, model)
    cpus = folds * (model.cpus or 1) if bag.cpus is None else bag.cpus
    trials = min(num_trials, total.cpus // cpus)
    gpus = folds * (model.gpus or Fraction(0)) if bag.gpus is None else bag.gpus
    trials = min(trials, hold(total.gpus, gpus))
    memory = folds * (model.memory or 0) if bag.memory is None else bag.memory
    if total.memory is not None and memory:
        trials = min(trials, total.memory // memory)
    assert trials >= 1, "nesting was checked"
    return trials


def _bag_quota(trials: int, wanted: int, total: WholeQuota, bag: PartialQuota, model: PartialQuota) -> WholeQuota:
    """Return a bag's quota; values not given are what its folds need, at most an equal part of the total."""
    cpus, gpus, memory = bag
    if cpus is None:
        cpus = total.cpus // trials
        cpus = cpus if model.cpus is None else min(cpus, model.cpus * wanted)
    if gpus is None:
        gpus = total.gpus / trials
        gpus = gpus if model.gpus is None else min(gpus, model.gpus * wanted)
    if memory is None and total.memory is not None:
        memory = total.memory // trials
        memory = memory if model.memory is None else min(memory, model.memory * wanted)
    return WholeQuota(cpus, gpus, memory)


def _model_quota(trials: int, folds: int, total: WholeQuota, bag: WholeQuota, model: PartialQuota) -> WholeQuota:
    cpus = bag.cpus // folds if model.cpus is None else model.cpus
    memory = model.memory
    if memory is None and bag.memory is not None:
        memory = bag.memory // folds
    gpus = model.gpus
    if gpus is None:
        # Equal within the bag; a bag's part may span devices (2 GPUs over 3 trials), a model's must not.
        gpus = min(_equal_part(bag.gpus, folds), _equal_part(total.gpus, trials * folds))
    return WholeQuota(cpus, gpus, memory)


def _equal_part(gpus: Fraction, models: int) -> Fraction:
    if gpus < 1:
        return gpus / models
    if models <= gpus:
        return Fraction(gpus // models)
    return Fraction(1, math.ceil(models / gpus))


def _quota(figures: WholeQuota) -> ResourceQuota:
    return ResourceQuota(figures.cpus, as_number(figures.gpus), "auto" if figures.memory is None else figures.memory)


# -- on devices ------------------------------------------------------------------------------------------------------


def place(fractions: Sequence[object], num_gpus: int) -> list[list[int]]:
    """Return the devices of each request: a fraction uses part of one device, a whole number uses that many devices.

    Parameters
    ----------
    fractions : sequence of number
        GPUs of each request: 0, a fraction up to 1, or a whole number.
    num_gpus : int
        Number of devices.

    Returns
    -------
    list of list of int
        Indices of the devices, in the order of the requests; an empty list for a request of 0. As few devices as
        possible are used, with the lowest indices. The same input always gives the same result.

    Raises
    ------
    ResourceError
        If no assignment is possible, or a request is not a valid number of GPUs.

    Notes
    -----
    This is bin packing. For up to 16 requests, and for any number of equal requests, an assignment is found if one
    exists. If there are more requests, they are placed by first fit, largest first, which can use more devices than
    necessary.

    Examples
    --------
    >>> place([0.4, 0.4, 0.3, 0.3, 0.3, 0.3], 2)
    [[0], [1], [0], [0], [1], [1]]
    """
    num_gpus = checked_count("num_gpus", num_gpus, least=0)
    requests = [exact(fraction) for fraction in fractions]
    for request, fraction in zip(requests, fractions):
        if request > 1 and request.denominator != 1:
            raise ResourceError(f"{fraction!r} GPUs for one model: must be a fraction up to 1, or a whole number.")
    # Integers from here on: a device has `full` parts, a request is a whole number of parts.
    full = math.lcm(*(request.denominator for request in requests)) if requests else 1
    sizes = [int(request * full) for request in requests]
    owned = sum(size for size in sizes if size >= full) // full
    parts = [size for size in sizes if 0 < size < full]
    unequal = len(set(parts)) > 1
    if not unequal or len(parts) > _SEARCHED:
        placed = _first_fit(sizes, full, largest_first=unequal)
        if max((device for devices in placed for device in devices), default=-1) < num_gpus:
            return placed
    else:
        for num_devices in range(owned + -(-sum(parts) // full), num_gpus + 1):
            if _fits([full] * (num_devices - owned), parts):
                return _lowest(sizes, num_devices, full)
    raise ResourceError(
        f"{len(requests)} model{'s' * (len(requests) != 1)} with "
        f"{', '.join(as_text(request) for request in requests[:20])} GPUs do not fit on {num_gpus} "
        f"device{'s' * (num_gpus != 1)}, because a fraction is never split. Request smaller fractions, or run fewer "
        "models at once."
    )


def _first_fit(sizes: list[int], full: int, *, largest_first: bool) -> list[list[int]]:
    """Return, in the order of the input, the first device with room for each request."""
    room: list[int] = []
    placed: list[list[int]] = [[] for _ in sizes]
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position] if largest_first else 0):
        size = sizes[position]
        for part in [full] * (size // full) if size >= full else [size] * (size > 0):
            device = next((device for device, left in enumerate(room) if left >= part), len(room))
            if device == len(room):
                room.append(full)
            room[device] -= part
            placed[position].append(device)
    return placed


def _lowest(sizes: list[int], num_devices: int, full: int) -> list[list[int]]:
    """Return the assignment with the lowest indices, in the order of the input; one must exist."""
    room = [full] * num_devices
    placed: list[list[int]] = []
    for position, size in enumerate(sizes):
        later = sizes[position + 1 :]
        owned = sum(other for other in later if other >= full) // full
        parts = [other for other in later if 0 < other < full]
        if size >= full:
            placed.append([device for device, left in enumerate(room) if left == full][: size // full])
            for device in placed[-1]:
                room[device] = 0
        elif size == 0:
            placed.append([])
        else:
            for device in (device for device, left in enumerate(room) if left >= size):
                room[device] -= size
                empty = room.count(full)
                used = [left for left in room if left < full]
                if empty >= owned and _fits(used + [full] * (empty - owned), parts):
                    placed.append([device])
                    break
                room[device] += size
    return placed


def _fits(room: Sequence[int], parts: Sequence[int]) -> bool:
    """Return True if the parts can be distributed over devices with this room: a search, the largest part first."""
    parts = sorted(parts, reverse=True)
    failed: set[tuple[int, tuple[int, ...]]] = set()

    def search(i: int, room: tuple[int, ...]) -> bool:
        if i == len(parts):
            return True
        # Room that is too small for the smallest part is wasted.
        if sum(left for left in room if left >= parts[-1]) < sum(parts[i:]) or (i, room) in failed:
            return False
        for left in sorted({left for left in room if left >= parts[i]}):  # the tightest first; equal ones are one case
            j = room.index(left)
            if search(i + 1, tuple(sorted((*room[:j], left - parts[i], *room[j + 1 :])))):
                return True
            if left == parts[i]:  # an exact fit is at least as good as any other
                break
        failed.add((i, room))
        return False

    return search(0, tuple(sorted(room)))
