"""Define search spaces and searchers: random, grid, and Optuna's samplers.

The parameters of a trial depend only on the seed and the trial's number (with Optuna, on earlier scores, too). They do
not depend on the backend or on the order in which trials end.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainloop.devices import is_bool, whole_number
from trainloop.errors import ConfigurationError
from trainloop.extending import check_flags, import_extra

_ENUMERABLE = 1_000_000  # in spaces with at most this many settings, a random search tries no setting twice


@dataclass(frozen=True)
class Choice:
    """One of several values of any type. A list, tuple or range in a space is converted to a ``Choice``."""

    values: Sequence[Any]
    """The values, in the order of the grid."""

    def sample(self, rng: np.random.Generator) -> Any:
        """Return one of the values, each with equal probability."""
        return self.values[int(rng.integers(len(self.values)))]


@dataclass(frozen=True)
class Uniform:
    """A float between two bounds."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    log: bool = False
    """True if the logarithm of the value is uniform, which suits learning rates."""

    def __post_init__(self) -> None:
        _check_bounds(self, 0.0)

    def sample(self, rng: np.random.Generator) -> float:
        """Return a number between the bounds, uniform on a linear or logarithmic scale."""
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
            return min(max(value, self.low), self.high)
        return float(rng.uniform(self.low, self.high))


@dataclass(frozen=True)
class Integers:
    """An int between two bounds, both included."""

    low: int
    """Smallest value."""
    high: int
    """Largest value."""
    log: bool = False
    """True if the scale is logarithmic, so that every order of magnitude is equally likely."""

    def __post_init__(self) -> None:
        _check_bounds(self, 1)

    def sample(self, rng: np.random.Generator) -> int:
        """Return an int from ``low`` to ``high``, both included, uniform on a linear or logarithmic scale."""
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
            return min(max(round(value), self.low), self.high)
        return int(rng.integers(self.low, self.high, endpoint=True))


@dataclass(frozen=True)
class _Distribution:
    """A distribution of scipy, sampled with its ``rvs``."""

    frozen: Any

    def sample(self, rng: np.random.Generator) -> Any:
        value = self.frozen.rvs(random_state=rng)
        return value.item() if isinstance(value, np.generic) else value


Dimension = Choice | Uniform | Integers | _Distribution


def _check_bounds(dimension: Uniform | Integers, above: float) -> None:
    whole = isinstance(dimension, Integers)
    low, high = _bound(dimension.low, whole), _bound(dimension.high, whole)
    if low is None or high is None or low > high:
        kind = "ints" if whole else "finite numbers"
        raise ConfigurationError(f"{dimension}: low and high must be {kind}, and low must not exceed high.")
    check_flags(type(dimension).__name__, log=dimension.log)
    vars(dimension).update(low=low, high=high)  # plain numbers, as in the parameters of a trial
    if dimension.log and (dimension.low < above or dimension.low <= 0):
        raise ConfigurationError(f"{dimension}: with log=True, both bounds must be positive. Raise low above 0.")


def _bound(value: Any, whole: bool) -> float | None:
    """Return a bound as an int or a float; None if it is not a finite number, or not an int but has to be one."""
    if (number := whole_number(value)) is not None:
        return number
    if is_bool(value) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    exact = float(value)
    return exact if not whole else int(exact) if exact.is_integer() else None


def parse_space(space: Mapping[str, Any]) -> dict[str, Dimension]:
    """Return the dimensions of a search space, by the name of the parameter.

    Parameters
    ----------
    space : mapping of str to list, tuple, range, array or distribution
        A distribution is :class:`Uniform`, :class:`Integers`, :class:`Choice`, or one of ``scipy.stats``.

    Raises
    ------
    ConfigurationError
        If a value is of any other type. The message names the parameter.
    """
    if not isinstance(space, Mapping):
        raise ConfigurationError(
            f"space={space!r}: must map names to lists, ranges or distributions, e.g. "
            "space={'lr': Uniform(1e-4, 1e-1, log=True), 'width': [32, 64]}."
        )
    dimensions: dict[str, Dimension] = {}
    for name, values in space.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"space has the name {name!r}: names of parameters must be strings.")
        if isinstance(values, Choice):
            values = values.values
        if isinstance(values, np.ndarray):
            values = values.tolist()
        if isinstance(values, (Uniform, Integers)):
            dimensions[name] = values
        elif hasattr(values, "rvs"):
            dimensions[name] = _Distribution(values)
        elif isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
            if not values:
                raise ConfigurationError(f"space[{name!r}] is empty. Give at least one value, or remove the name.")
            dimensions[name] = Choice(values)
        else:
            raise ConfigurationError(
                f"space[{name!r}]={values!r}: must be a list, a range or a distribution. For one fixed value write "
                f"[{values!r}]."
            )
    return dimensions


class Searcher(Protocol):
    """Object that proposes parameters, and may learn from scores."""

    def propose(self, number: int) -> dict[str, Any] | None:
        """Return the parameters of trial ``number``, or None (or raise StopIteration) if the space is exhausted."""
        ...

    def tell(self, number: int, params: Mapping[str, Any], score: float | None) -> None:
        """Receive the score of a trial; None if the trial failed. A resumed search reports its earlier trials, too."""
        ...


def make_searcher(searcher: Any, space: Mapping[str, Any], *, seed: int, mode: str) -> Searcher:
    """Return the searcher for a name or an Optuna sampler.

    Raises
    ------
    ConfigurationError
        If there is no such searcher, if the searcher can't search this space, or if Optuna is not installed.
    """
    dimensions = parse_space(space)
    if searcher in ("random", "grid"):
        return _Listed(dimensions, seed, in_order=searcher == "grid")
    if searcher == "optuna" or hasattr(searcher, "sample_relative"):
        return OptunaSearcher(dimensions, None if searcher == "optuna" else searcher, seed, mode)
    if hasattr(searcher, "propose") and hasattr(searcher, "tell"):
        return searcher
    raise ConfigurationError(
        f"searcher={searcher!r}: must be 'random', 'grid', 'optuna', an Optuna sampler, or an object with "
        "propose(number) and tell(number, params, score)."
    )


class _Listed:
    """Propose the settings of a grid, in order or shuffled. If the space can't be listed, sample at random."""

    def __init__(self, dimensions: dict[str, Dimension], seed: int, *, in_order: bool) -> None:
        self._dimensions = dimensions
        self._seed = seed
        self._order: Sequence[int] | None = None
        self.num_settings: float = math.inf
        unlisted = [name for name, dimension in dimensions.items() if not isinstance(dimension, Choice)]
        size = math.prod(len(d.values) for d in dimensions.values() if isinstance(d, Choice))
        if in_order and unlisted:
            raise ConfigurationError(
                f"space[{unlisted[0]!r}]={dimensions[unlisted[0]]!r} is not a list: searcher='grid' accepts only lists "
                "and ranges. List its values, or use searcher='random'."
            )
        if in_order:
            self._order, self.num_settings = range(size), size
        elif not unlisted and size <= _ENUMERABLE:
            self._order, self.num_settings = np.random.default_rng(seed).permutation(size).tolist(), size

    def propose(self, number: int) -> dict[str, Any] | None:
        if self._order is None:
            rng = np.random.default_rng([self._seed, number])
            return {name: dimension.sample(rng) for name, dimension in self._dimensions.items()}
        return self._setting_at(self._order[number]) if number < self.num_settings else None

    def _setting_at(self, index: int) -> dict[str, Any]:
        """Return the setting with this index in the grid. The last parameter varies fastest."""
        params = {}
        for name, dimension in reversed(self._dimensions.items()):
            assert isinstance(dimension, Choice)
            index, position = divmod(index, len(dimension.values))
            params[name] = dimension.values[position]
        return {name: params[name] for name in self._dimensions}

    def tell(self, number: int, params: Mapping[str, Any], score: float | None) -> None:
        pass


class OptunaSearcher:
    """Propose parameters from Optuna, and report scores to it.

    A choice is sampled by index, so its values may have any type.
    """

    def __init__(self, dimensions: dict[str, Dimension], sampler: Any, seed: int, mode: str) -> None:
        self._optuna = optuna = import_extra("optuna", "searcher='optuna'", "optuna")
        self._dimensions = dimensions
        self.num_settings = math.inf if dimensions else 1
        self._distributions: dict[str, Any] = {}
        ranges = {Uniform: optuna.distributions.FloatDistribution, Integers: optuna.distributions.IntDistribution}
        for name, dimension in dimensions.items():
            if isinstance(dimension, Choice):
                self._distributions[name] = optuna.distributions.CategoricalDistribution(range(len(dimension.values)))
            elif isinstance(dimension, (Uniform, Integers)):
                self._distributions[name] = ranges[type(dimension)](dimension.low, dimension.high, log=dimension.log)
            else:
                raise ConfigurationError(
                    f"space[{name!r}]: Optuna can't sample a scipy distribution. Use Uniform, Integers or a list, "
                    "or searcher='random'."
                )
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(
                direction="minimize" if mode == "min" else "maximize",
                sampler=sampler,
            )
        finally:
            optuna.logging.set_verbosity(before)
        self._open: dict[int, Any] = {}
        self._indices: dict[int, dict[str, int]] = {}  # of the choices, by trial
        self._seed = seed if sampler is None else None
        self._next = 0

    def propose(self, number: int) -> dict[str, Any] | None:
        # A resumed search starts with a new sampler, which must not repeat its first proposals.
        if self._seed is not None:
            seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
            self._study.sampler = self._optuna.samplers.TPESampler(seed=seed)
        elif number != self._next:
            self._study.sampler.reseed_rng()
        self._next = number + 1
        return self._ask_study(number)

    def _ask_study(self, number: int) -> dict[str, Any]:
        self._open[number] = proposed = self._study.ask(self._distributions)
        chosen = proposed.params.items()
        self._indices[number] = {name: at for name, at in chosen if isinstance(self._dimensions[name], Choice)}
        return {name: self._value(name, chosen) for name, chosen in proposed.params.items()}

    def choices(self, number: int) -> dict[str, int]:
        """Return the indices of a trial's choices, which a resumed search needs: values may be equal to no other."""
        return self._indices.get(number, {})

    def restore(self, number: int, indices: Mapping[str, int]) -> None:
        """Receive the result of :meth:`choices` for a trial of an earlier run."""
        self._indices[number] = dict(indices)

    def _value(self, name: str, chosen: Any) -> Any:
        dimension = self._dimensions[name]
        return dimension.values[chosen] if isinstance(dimension, Choice) else chosen

    def tell(self, number: int, params: Mapping[str, Any], score: float | None) -> None:
        failed = score is None or math.isnan(score)
        state = self._optuna.trial.TrialState.FAIL if failed else self._optuna.trial.TrialState.COMPLETE
        if number not in self._open:  # the trial is from an earlier run
            chosen = {}
            indices = self._indices.get(number, {})
            for name, value in params.items():
                dimension = self._dimensions[name]
                if isinstance(dimension, Choice):
                    value = indices[name] if name in indices else _index_of(value, dimension.values)
                    if value is None or value >= len(dimension.values):
                        return  # the search was stored by an earlier version, and the value can't be recognised
                chosen[name] = value
            self._study.enqueue_trial(chosen)
            self._ask_study(number)
        self._study.tell(self._open.pop(number), None if failed else score, state=state)


def _index_of(value: Any, values: Sequence[Any]) -> int | None:
    """Return the index of a value among choices of the same type; None if it is equal to none of them."""
    for i, other in enumerate(values):
        with contextlib.suppress(Exception):  # arrays have no single truth value
            if type(other) is type(value) and bool(other == value):
                return i
    return None
