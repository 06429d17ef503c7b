"""Encode values as bytes that hold no code: reading them builds data, and calls nothing that they name.

A pickle is a program: whoever may write one runs code in the process that reads it. Here the bytes hold numbers, text,
containers, arrays and tensors; lengths, shapes and dtypes are checked before use. Named tuples are the only classes:
looked up among loaded ones, and built as tuples without running their code.

Values are stored in columns: at every depth, the values of one kind in a list become one array of numbers, one text and
so on. A million rows of ragged lists cost a few calls and not a few millions, and the bytes of arrays are copied once
each way.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from trainloop.distributed.columns import CODECS, NAMED_TUPLE, Codec, Malformed, NotPlain, accelerators

__all__ = ["Malformed", "NotPlain", "decode", "encode"]

_MAX_DEPTH = 100
_REPEATED = 0x80
_CODES = {codec.kind: code for code, codec in CODECS.items() if codec.kind is not None}
_CONTAINERS = frozenset({8, 10, 11, 12, 13, 14, 15, 16, NAMED_TUPLE})
_KINDS_BY_THEMSELVES = frozenset(_CODES) - {np.ndarray, np.generic, Tensor}


def encode(value: Any) -> bytearray:
    """A value of plain data as bytes.

    Plain are ``None``, bool, int, float, complex, str, bytes, bytearray; list, tuple, named tuple, set, frozenset, dict
    and OrderedDict of plain values; numpy arrays (of plain objects too) and scalars; tensors, dense and sparse. An
    instance of a class derived from one of these is not plain.

    Raises
    ------
    NotPlain
        If it holds anything else.
    """
    writer = Writer()
    writer.column([value], 0)
    return bytearray().join(writer.parts)


def decode(data: memoryview, *, trusted: bool = False) -> Any:
    """The inverse of :func:`encode`; an accelerator's tensors go to this process's current device of that type.

    Parameters
    ----------
    data : memoryview
        The bytes.
    trusted : bool
        Whether the writer is known, so that a named tuple's module may be imported.

    Raises
    ------
    Malformed
        If the bytes are anything else.
    """
    reader = Reader(data, trusted)
    try:
        (value,) = reader.column(1, 0)
    except Malformed:
        raise
    except Exception as error:  # from numpy or torch, for sizes that contradict each other
        raise Malformed(f"{type(error).__name__}: {error}") from error
    if reader.left:
        raise Malformed(f"{reader.left} bytes too many")
    return value


class Writer:
    """Bytes in the making; nothing is joined before the end."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def number(self, value: int) -> None:
        self.parts.append(value.to_bytes(8, "little"))

    def numbers(self, values: Any, dtype: str) -> None:
        self.memory(np.asarray(values, dtype))

    def memory(self, array: np.ndarray[Any, Any]) -> None:
        if array.nbytes:
            self.parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self.number(len(data))
        self.parts.append(data)

    def shapes(self, shapes: Sequence[Sequence[int]]) -> None:
        self.numbers([len(shape) for shape in shapes], "u1")
        self.numbers(list(itertools.chain.from_iterable(shapes)), "<i8")

    def column(self, values: list[Any], depth: int) -> None:
        """Write values of any kinds: first the order of kinds, then each kind's values together."""
        if depth > _MAX_DEPTH:  # or the value holds itself
            raise NotPlain("nested too deeply")
        found: dict[Any, int] = {}
        types = set(map(type, values))
        if len(types) == 1 and types <= _KINDS_BY_THEMSELVES:
            found[types.pop()] = 0
        else:
            order = [found.setdefault(_kind_of(value), len(found)) for value in values]
        self.parts.append(len(found).to_bytes(2, "little") if len(found) < 1 << 16 else _too_many(found))
        if len(found) == 1:
            self._of_one_kind(next(iter(found)), values, depth)
            return
        members: list[list[Any]] = [[] for _ in found]
        for index, value in zip(order, values, strict=True):
            members[index].append(value)
        self.numbers(order, "<u2")
        for kind, those in zip(found, members, strict=True):
            self._of_one_kind(kind, those, depth)

    def _of_one_kind(self, kind: Any, values: list[Any], depth: int) -> None:
        base = kind[0] if isinstance(kind, tuple) else kind
        code = _CODES.get(base, NAMED_TUPLE)
        places: dict[int, int] = {}
        if code in _CONTAINERS and len(values) > 1:
            # A list that occurs in many places is written once: otherwise a small value could take forever.
            order = [places.setdefault(id(value), len(places)) for value in values]
        if 0 < len(places) < len(values):
            self.parts.append(bytes([code | _REPEATED]))
            self.number(len(places))
            self.numbers(order, "<i8")
            by_place = dict(zip(order, values, strict=True))
            values = [by_place[place] for place in range(len(places))]
        else:
            self.parts.append(bytes([code]))
        CODECS[code].write(self, values, depth)


class Reader:
    """Reads what a :class:`Writer` wrote. Every value takes at least a byte, so few bytes can't claim much memory."""

    def __init__(self, data: memoryview, trusted: bool) -> None:
        self._data = data
        self._place = 0
        self.trusted = trusted

    @property
    def left(self) -> int:
        return len(self._data) - self._place

    def take(self, size: int) -> memoryview:
        if not 0 <= size <= self.left:
            raise Malformed(f"{size} bytes announced, {self.left} left")
        self._place += size
        return self._data[self._place - size : self._place]

    def number(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def numbers(self, count: int, dtype: Any) -> np.ndarray[Any, Any]:
        """A view of the bytes, which need not be aligned."""
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise Malformed("an array of pointers")
        data = self.take(count * dtype.itemsize)
        return np.frombuffer(data, dtype) if count else np.empty(0, dtype)

    def sizes(self, count: int) -> list[int]:
        sizes: list[int] = self.numbers(count, "<i8").tolist()
        if sizes and (min(sizes) < 0 or sum(sizes) > self.left):
            raise Malformed("lengths beyond the data")
        return sizes

    def text(self) -> str:
        return str(self.take(self.number()), "utf-8", "surrogatepass")

    def shapes(self, count: int) -> list[tuple[int, ...]]:
        dimensions = self.numbers(count, "u1").tolist()
        sizes = iter(self.numbers(sum(dimensions), "<i8").tolist())
        return [tuple(itertools.islice(sizes, n)) for n in dimensions]

    def column(self, count: int, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH or count > self.left:
            raise Malformed("nested too deeply" if depth > _MAX_DEPTH else f"{count} values in {self.left} bytes")
        kinds = int.from_bytes(self.take(2), "little")
        if kinds == 1:
            return self._of_one_kind(count, depth)
        order = self.numbers(count, "<u2")
        members = [iter(self._of_one_kind(n, depth)) for n in np.bincount(order, minlength=kinds).tolist()]
        return [next(members[index]) for index in order.tolist()]

    def _of_one_kind(self, count: int, depth: int) -> list[Any]:
        code = self.take(1)[0]
        if not code & _REPEATED:
            return self._codec(code).read(self, count, depth)
        different = self.number()
        order = self.numbers(count, "<i8").tolist()
        if different > count:
            raise Malformed(f"{different} different ones among {count}")
        values = self._codec(code & ~_REPEATED).read(self, different, depth)
        return [values[place] for place in order]

    def _codec(self, code: int) -> Codec:
        codec = CODECS.get(code)
        if codec is None:
            raise Malformed(f"a kind of number {code}")
        return codec


def _too_many(kinds: dict[Any, int]) -> bytes:
    raise NotPlain(f"{len(kinds)} kinds of values in one place")


def _kind_of(value: Any) -> Any:
    """The kind of a value, by which values share a column: its type, and the dtype if it has one."""
    kind = type(value)
    if kind is np.ndarray:
        return kind, value.dtype
    if kind is Tensor:
        here = value.is_cpu or value.device.type in accelerators()
        if value.is_quantized or value.is_nested or not here:
            raise NotPlain(f"a tensor of another kind: {value.dtype}, {value.device}, {value.layout}")
        return kind, value.dtype, value.device.type, value.layout, value.requires_grad
    if kind in _CODES:
        return kind
    if isinstance(value, np.generic):
        return np.generic, value.dtype
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind
    raise NotPlain(f"of type {kind.__module__}.{kind.__qualname__}")
