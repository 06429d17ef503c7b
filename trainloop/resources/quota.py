"""Describe the resources of a machine, and the quota of a run, as plain values.

GPUs are counted exactly, because floats would give wrong results: ``1 // 0.1`` is 9, but ten models with 0.1 GPUs each
fit on one GPU. :func:`exact` converts a float to the intended fraction, and all arithmetic here uses fractions.
"""

from __future__ import annotations

import math
import re
from dataclasses import astuple, dataclass, field
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Literal, NamedTuple

from trainloop._support.keywords import refuses_unknown
from trainloop.errors import ResourceError

Auto = Literal["auto"]


def is_auto(devices: object) -> bool:
    """Return True for ``devices='auto'``: all devices, or fewer if the mode, a quota or a launcher uses fewer."""
    return isinstance(devices, str) and devices.strip().lower() == "auto"


_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


class Limit(NamedTuple):
    """One limit on a resource, and where the limit comes from."""

    value: int
    """Number of CPUs, GPUs or bytes."""
    source: str
    """File, variable or call that the limit was read from."""


@dataclass(frozen=True)
class Resources:
    """Resources that this process may use. Print the object to see which limits apply."""

    num_cpus: int
    """Number of CPUs, at least 1."""
    num_gpus: int
    """Number of visible GPUs."""
    memory: int
    """Main memory in bytes."""
    cpu_limits: tuple[Limit, ...] = field(default=(), compare=False, repr=False)
    """All limits of the CPUs; the lowest one applies."""
    gpu_limits: tuple[Limit, ...] = field(default=(), compare=False, repr=False)
    """All limits of the GPUs."""
    memory_limits: tuple[Limit, ...] = field(default=(), compare=False, repr=False)
    """All limits of the memory; the lowest one applies."""

    def __str__(self) -> str:
        lines = []
        for name, value, limits in (
            ("CPUs", str(self.num_cpus), self.cpu_limits),
            ("GPUs", str(self.num_gpus), self.gpu_limits),
            ("memory", format_bytes(self.memory), self.memory_limits),
        ):
            decided = min(limits, key=lambda limit: limit.value, default=None)
            lines.append(f"{name:<7} {value:>10}" + (f"  decided by {decided.source}" if decided else ""))
            for limit in limits:
                if limit is not decided:
                    shown = format_bytes(limit.value) if name == "memory" else str(limit.value)
                    lines.append(f"{'':<7} {shown:>10}  {limit.source}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ResourceQuota:
    """The resources that a run, a bag of models or one model may use. Immutable and comparable.

    Parameters
    ----------
    num_cpus : int or 'auto'
        Number of CPUs, 1 or more, for all processes of the run together, including ``DataLoader`` workers.
    num_gpus : number or 'auto'
        Number of GPUs, 0 or more. For one model, a fraction of one device or a whole number.
    memory : int, str or 'auto'
        Number of bytes, or a string such as ``'512MiB'`` or ``'1.5GB'``; stored as bytes.

    Raises
    ------
    ResourceError
        For any other value.
    """

    num_cpus: int | Auto = "auto"
    num_gpus: float | Auto = "auto"
    memory: int | str = "auto"

    def __post_init__(self) -> None:
        if self.num_cpus != "auto":
            object.__setattr__(self, "num_cpus", checked_count("num_cpus", self.num_cpus, 1, ", or 'auto' for all"))
        if self.num_gpus != "auto":
            exact(self.num_gpus)
        if self.memory != "auto":
            object.__setattr__(self, "memory", parse_memory(self.memory))

    def filled(self, other: ResourceQuota) -> ResourceQuota:
        """Return this quota, with the values of ``other`` in place of ``'auto'``."""
        return ResourceQuota(*(b if a == "auto" else a for a, b in zip(astuple(self), astuple(other))))


ResourceQuota.__init__ = refuses_unknown(ResourceQuota.__init__)  # type: ignore[method-assign]


def exact(num_gpus: object) -> Fraction:
    """Return the intended number of GPUs as an exact fraction.

    Parameters
    ----------
    num_gpus : number
        A finite number, 0 or more.

    Returns
    -------
    Fraction
        ``0.1`` and ``1 - 0.9`` are 1/10, ``1 / 3`` is 1/3, even in single precision; ``0.334`` is 334/1000.

    Raises
    ------
    ResourceError
        If ``num_gpus`` is negative, not finite, or not a number.
    """
    if isinstance(num_gpus, Real) and not isinstance(num_gpus, bool):
        if isinstance(num_gpus, Rational):
            meant = Fraction(int(num_gpus.numerator), int(num_gpus.denominator))
            if meant >= 0:
                return meant
        elif math.isfinite(value := float(num_gpus)) and value >= 0:
            simple = Fraction(value).limit_denominator(1024)
            # Fractions with denominators up to 1024 are 1e-6 apart. A single-precision float is within 3e-8 of the
            # intended one.
            if abs(simple - Fraction(value)) <= Fraction(1, 10**7) and (simple or not value):
                return simple
            return Fraction(repr(value))  # the decimal number as written
    raise ResourceError(
        f"num_gpus={num_gpus!r}: must be a finite number of 0 or more (0.5 is half of one GPU, 2 are two GPUs), "
        "or 'auto' for all visible ones."
    )


def check_one_model(name: str, num_gpus: object) -> None:
    """Raise ResourceError if one model can't use this number of GPUs, such as 1.5. ``'auto'`` is accepted."""
    if num_gpus == "auto":
        return
    gpus = exact(num_gpus)
    if gpus > 1 and gpus.denominator != 1:
        raise ResourceError(
            f"{name}={num_gpus!r}: one model can use a fraction of one GPU, or whole GPUs. "
            f"Use {math.floor(gpus)} or {math.ceil(gpus)}."
        )


def as_number(fraction: Fraction) -> float:
    """Return an int if the fraction is whole, otherwise the nearest float. :func:`exact` is the inverse."""
    return int(fraction) if fraction.denominator == 1 else float(fraction)


def as_text(figure: int | Fraction) -> str:
    """Return :func:`as_number` as text."""
    return f"{as_number(Fraction(figure)):.12g}"


def checked_count(name: str, value: object, least: int, also: str = "") -> int:
    """Return ``value`` as an int. Raise ResourceError unless it is an int (not a bool) of at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ResourceError(f"{name}={value!r}: must be an int of {least} or more{also}.")
    return int(value)


def parse_memory(memory: object) -> int:
    """Return ``memory`` in bytes.

    Parameters
    ----------
    memory : number or str
        Number of bytes, or a number with a unit: ``B``, ``kB`` to ``PB`` (powers of 1000), or ``KiB`` to ``PiB``
        (powers of 1024). The case of the unit is ignored.

    Raises
    ------
    ResourceError
        If ``memory`` is less than one byte, not finite, not a number, or has an unknown unit.
    """
    size: Fraction | None = None
    if isinstance(memory, str):
        match = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-z]+)", memory.strip().lower())
        if match and match[2] in _UNITS:
            size = Fraction(match[1]) * _UNITS[match[2]]
    elif isinstance(memory, Real) and not isinstance(memory, bool) and math.isfinite(memory):
        size = Fraction(float(memory)) if not isinstance(memory, Integral) else Fraction(int(memory))
    if size is None or size < 1:
        raise ResourceError(
            f"memory={memory!r}: must be a number of bytes (1 or more), text with a unit such as '512MiB' or '1.5GB', "
            "or 'auto' for no limit."
        )
    return int(size)


def format_bytes(size: int) -> str:
    """Return ``size`` as text, in the largest binary unit for which the number is 1 or more."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"
