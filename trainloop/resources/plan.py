"""Plan trials and folds: check the quota of each level; how many run at once, their shares and devices.

The levels are run > trial (a bag of models, or one model) > fold (one model). In AutoGluon's terms, ``total`` is
``num_cpus``/``num_gpus`` of ``fit``, ``per_bag`` is ``ag_args_ensemble: {ag_args_fit: ...}``, and ``per_model`` is
``ag_args_fit``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

from trainloop._support.keywords import refuses_unknown
from trainloop._support.user_line import warn
from trainloop.errors import ResourceError
from trainloop.resources.quota import (
    ResourceQuota,
    Resources,
    as_number,
    as_text,
    check_one_model,
    checked_count,
    exact,
    format_bytes,
)

_NAMES = ("num_cpus", "num_gpus", "memory")
_UNBOUNDED = 10**9
_MAX_SEARCHED = 16  # largest number of unequal fractions for which all assignments are tried


Figures = dict[str, Fraction]
"""A quota as exact numbers, by the names in ``ResourceQuota``. Resources that are not limited are absent."""


@dataclass(frozen=True)
class Plan:
    """Numbers of trials and folds that run at once, and their quotas.

    The models that run at once never use more CPUs than are reserved for their trials (``cpus_used <= cpus_granted``),
    and the trials never reserve more than ``total``. The same is true for GPUs.
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

        ``tune`` may need fewer rounds, because folds of the next trial use the free slots of a trial.
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
    """Divide the resources of a run among its trials and their folds.

    Parameters
    ----------
    total : ResourceQuota or Resources
        Resources of the run. ``num_cpus`` must be a number, such as that of ``resources.available()``; ``num_gpus``
        defaults to 0, because nothing is read from the machine.
    num_trials : int
        Number of trials, 1 or more.
    num_bag_folds : int
        Number of folds of each trial. 0 and 1 mean one model without bagging; ``per_bag`` is then ignored, with a
        warning.
    per_bag, per_model : ResourceQuota, optional
        Quota of one trial, and of one model. ``'auto'`` values are computed.
    parallel_folds : bool
        If False, the folds of a trial run one after the other.

    Raises
    ------
    ResourceError
        If a value is invalid, or exceeds the value that was given at the next higher level.

    Examples
    --------
    >>> total, bag, model = ResourceQuota(32, 4), ResourceQuota(10, 2), ResourceQuota(4, 0.5)
    >>> p = plan(total, num_trials=2, num_bag_folds=2, per_bag=bag, per_model=model)
    >>> p.trials_in_parallel, p.folds_in_parallel, p.cpus_used, p.gpus_used
    (2, 2, 16, 2)
    """
    num_trials = checked_count("num_trials", num_trials, least=1)
    num_bag_folds = checked_count("num_bag_folds", num_bag_folds, least=0)
    if not isinstance(parallel_folds, bool):
        raise ResourceError(f"parallel_folds={parallel_folds!r}: must be True or False.")
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
    if isinstance(total, Resources) and "memory" not in bag | model:
        del whole["memory"]  # Memory is divided only on request.

    # Folds have priority over trials, because the searcher learns from a trial only once it is done: trials run at once
    # if each has as many folds at once as it would have alone.
    need = {"num_cpus": Fraction(1), **model}
    alone = folds = _fitting(wanted, _share_of_bag(whole, 1, model, wanted) | bag, need)
    trials = _fitting(num_trials, whole, _times(need, folds) | bag)
    while True:
        bag_quota = _share_of_bag(whole, trials, model, wanted) | bag
        folds = _fitting(wanted, bag_quota, need)
        # All models of a bag get the same number of GPUs. A bag may span devices (2 GPUs for 3 trials), a model may
        # not.
        gpus = min(_equal_part(bag_quota["num_gpus"], folds), _equal_part(whole["num_gpus"], trials * folds))
        model_quota = _divided(bag_quota, folds) | {"num_gpus": gpus} | model
        # Bags may fit although their models don't. For example, a bag of 1.6 GPUs has room for two models of 0.6 GPUs,
        # and 5 GPUs have room for three such bags, but not for six such models.
        if folds == alone and trials * folds <= hold(whole["num_gpus"], model_quota["num_gpus"]):
            break
        trials -= 1
    on_devices = place([model_quota["num_gpus"]] * (trials * folds), math.ceil(whole["num_gpus"]))
    return Plan(
        total=_as_quota(whole),
        num_trials=num_trials,
        num_folds=max(num_bag_folds, 1),
        trials_in_parallel=trials,
        folds_in_parallel=folds,
        per_bag=_as_quota(bag_quota),
        per_model=_as_quota(model_quota),
        placement=tuple(tuple(devices) for devices in on_devices),
    )


def hold(total_gpus: Fraction, gpus: Fraction) -> int:
    """Return how many requests of ``gpus`` GPUs fit into ``total_gpus``. No fraction is split over devices.

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


# -- the rules that plan applies -----------------------------------------------------------------------------------


def _figures(level: str, quota: ResourceQuota | None) -> Figures:
    if quota is None:
        return {}
    if not isinstance(quota, ResourceQuota):
        raise ResourceError(
            f"{level}={quota!r}: must be a ResourceQuota, e.g. {level}=ResourceQuota(num_cpus=2, num_gpus=0.5)."
        )
    if level == "per_model":
        check_one_model("per_model num_gpus", quota.num_gpus)
    return {name: exact(value) for name, value in asdict(quota).items() if value != "auto"}


def _total(total: ResourceQuota | Resources) -> Figures:
    if isinstance(total, Resources):
        return {name: Fraction(getattr(total, name)) for name in _NAMES}
    figures = _figures("total", total)
    if "num_cpus" not in figures:
        raise ResourceError(
            f"total={total!r}: a plan needs a number of CPUs, because it reads nothing from the machine (GPUs default "
            "to 0). Pass total=ResourceQuota(num_cpus=...), or trainloop.resources.available() for the whole machine."
        )
    return {"num_gpus": Fraction(0), **figures}


def _check_nesting(total: Figures, bag: Figures, model: Figures) -> None:
    """Raise ResourceError if a given value exceeds the value that was given at the next higher level."""
    for what in _NAMES:
        above, parent = total.get(what), "total"
        for level, figure in (("per_bag", bag.get(what)), ("per_model", model.get(what))):
            if figure is None:
                continue
            if above is not None and figure > above:
                none = " (no GPU granted)" if what == "num_gpus" and not above else ""
                raise ResourceError(
                    f"{level} {what}={as_text(figure)} is more than {what}={as_text(above)} of its parent, "
                    f"{parent}{none}. Lower it to at most {as_text(above)}, or raise {parent}."
                )
            above, parent = figure, level


def _share_of_bag(total: Figures, trials: int, model: Figures, models: int) -> Figures:
    """Return what a bag of so many models may use if so many trials run at once."""
    return _least(_divided(total, trials), _times(model, models))


def _fitting(wanted: int, parent: Figures, need: Figures) -> int:
    """Return how often ``need`` fits into the parent's resources, at most ``wanted``."""
    found = wanted
    for name in parent.keys() & need.keys():
        if name == "num_gpus":
            found = min(found, hold(parent[name], need[name]))
        else:
            found = min(found, parent[name] // need[name])
    assert found >= 1, "nesting was checked"
    return found


def _times(figures: Figures, number: int) -> Figures:
    return {name: figure * number for name, figure in figures.items()}


def _divided(figures: Figures, number: int) -> Figures:
    """Divide each figure by a number. CPUs and bytes are rounded down to integers."""
    return {name: f / number if name == "num_gpus" else Fraction(f // number) for name, f in figures.items()}


def _least(one: Figures, other: Figures) -> Figures:
    """Return the smaller figure for each name in ``one``."""
    return {name: min(figure, other.get(name, figure)) for name, figure in one.items()}


def _equal_part(gpus: Fraction, models: int) -> Fraction:
    if gpus < 1:
        return gpus / models
    if models <= gpus:
        return Fraction(gpus // models)
    return Fraction(1, math.ceil(models / gpus))


def _as_quota(figures: Figures) -> ResourceQuota:
    return ResourceQuota(**{name: as_number(figure) for name, figure in figures.items()})  # type: ignore[arg-type]


# -- on devices ------------------------------------------------------------------------------------------------------


def place(fractions: Sequence[object], num_gpus: int) -> list[list[int]]:
    """Return the devices of each request. A fraction uses part of one device; a whole number uses that many devices.

    Parameters
    ----------
    fractions : sequence of number
        Number of GPUs of each request: 0, a fraction up to 1, or a whole number.
    num_gpus : int
        Number of devices.

    Returns
    -------
    list of list of int
        Indices of the devices of each request, in order; an empty list for a request of 0. As few devices as possible
        are used, with the lowest indices. The same input always gives the same result.

    Raises
    ------
    ResourceError
        If no assignment is possible, or a request is not a valid number of GPUs.

    Notes
    -----
    This is bin packing. For up to 16 requests, and for any number of equal requests, an assignment is found if one
    exists. If there are more requests, each is placed on the first device with enough room, the largest first. This can
    use more devices than necessary.

    Examples
    --------
    >>> place([0.4, 0.4, 0.3, 0.3, 0.3, 0.3], 2)
    [[0], [1], [0], [0], [1], [1]]
    """
    num_gpus = checked_count("num_gpus", num_gpus, least=0)
    if isinstance(fractions, (str, bytes, Mapping)) or not isinstance(fractions, Iterable):
        raise ResourceError(f"place: fractions={fractions!r}: must be a list of numbers of GPUs.")
    fractions = list(fractions)
    requests = [exact(fraction) for fraction in fractions]
    for fraction in fractions:
        check_one_model("place: num_gpus", fraction)
    # All sizes are now integers. A device has `full` units, and each request needs units of one or several devices.
    full = math.lcm(*(request.denominator for request in requests))
    sizes = [int(request * full) for request in requests]
    needs = [[full] * (size // full) if size >= full else [size] * (size > 0) for size in sizes]
    flat = [size for parts in needs for size in parts]
    fractional = [size for size in flat if size < full]
    if len(set(fractional)) > 1 and len(fractional) <= _MAX_SEARCHED:
        for num_devices in range(-(-sum(flat) // full), num_gpus + 1):
            if _fits([full] * num_devices, flat):
                return _lowest(needs, num_devices, full)
    else:
        placed = _first_fit(needs, full, largest_first=len(set(fractional)) > 1)
        if max((device for devices in placed for device in devices), default=-1) < num_gpus:
            return placed
    raise ResourceError(
        f"{len(requests)} model{'s' * (len(requests) != 1)} with "
        f"{', '.join(as_text(request) for request in requests[:20])} GPUs do not fit on {num_gpus} "
        f"device{'s' * (num_gpus != 1)}, because a fraction is never split. Request smaller fractions, or run fewer "
        "models at once."
    )


def _first_fit(needs: list[list[int]], full: int, *, largest_first: bool) -> list[list[int]]:
    """Place each part of each request on the first device with room, and return the devices of each request."""
    room: list[int] = []
    placed: list[list[int]] = [[] for _ in needs]
    for position in sorted(range(len(needs)), key=lambda position: -sum(needs[position]) if largest_first else 0):
        for part in needs[position]:
            device = next((device for device, left in enumerate(room) if left >= part), len(room))
            if device == len(room):
                room.append(full)
            room[device] -= part
            placed[position].append(device)
    return placed


def _lowest(needs: list[list[int]], num_devices: int, full: int) -> list[list[int]]:
    """Return the assignment with the lowest indices, in the order of the requests. An assignment must exist."""
    room = [full] * num_devices
    later = [part for parts in needs for part in parts]
    placed: list[list[int]] = []
    for parts in needs:
        placed.append([])
        for part in parts:
            later.pop(0)
            for device in (device for device, left in enumerate(room) if left >= part):
                room[device] -= part
                if _fits(room, later):
                    placed[-1].append(device)
                    break
                room[device] += part
    return placed


def _fits(room: Sequence[int], parts: Sequence[int]) -> bool:
    """Return True if the parts fit on devices with this room. All assignments are tried, the largest part first."""
    parts = sorted(parts, reverse=True)
    failed: set[tuple[int, tuple[int, ...]]] = set()

    def search(i: int, room: tuple[int, ...]) -> bool:
        if i == len(parts):
            return True
        # Room that is too small for the smallest part can't be used.
        if sum(left for left in room if left >= parts[-1]) < sum(parts[i:]) or (i, room) in failed:
            return False
        for left in sorted({left for left in room if left >= parts[i]}):  # least room first; equal rooms once
            j = room.index(left)
            if search(i + 1, tuple(sorted((*room[:j], left - parts[i], *room[j + 1 :])))):
                return True
            if left == parts[i]:  # an exact fit is at least as good as any other
                break
        failed.add((i, room))
        return False

    return search(0, tuple(sorted(room)))
