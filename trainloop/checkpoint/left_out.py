"""Parts of a model that checkpoints leave out: frozen ones, which the script creates again with the same values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from trainloop.parallel.shards import bit_sums, is_sharded, with_items

__all__ = ["Bits", "bits_of", "changed", "names_under", "without"]

Bits = dict[str, Any]
"""Shape and bit sum of each tensor that is left out; None in place of the sum if it is sharded."""


def names_under(names: Iterable[str], parts: Sequence[str]) -> list[str]:
    """Return the names that equal one of the parts, or are within one: ``teacher`` includes ``teacher.fc.weight``."""
    return [name for name in names if any(name == part or name.startswith(f"{part}.") for part in parts)]


def bits_of(model: Mapping[str, Any], names: Sequence[str]) -> Bits:
    """Return shapes and bit sums of tensors of a model's ``state_dict()``, to compare them later. Reads each once."""
    plain = [name for name in names if isinstance(model[name], Tensor) and not is_sharded(model[name])]
    sums = dict(zip(plain, bit_sums([model[name] for name in plain]) if plain else []))
    return {name: [list(getattr(model[name], "shape", ())), sums.get(name)] for name in names}


def changed(noted: Bits, now: Bits) -> list[str]:
    """Return the names whose values differ, as far as both are known."""
    return [n for n, (_, bits) in noted.items() if n in now and None not in (bits, now[n][1]) and bits != now[n][1]]


def without(state: dict[str, Any], left_out: Bits) -> dict[str, Any]:
    """Return a checkpoint's state without these tensors of its model, but with their names."""
    model = {name: value for name, value in state["model"].items() if name not in left_out}
    return {**state, "model": with_items(state["model"], model), "left_out": left_out}
