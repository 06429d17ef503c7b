"""Write and read a column of each kind of plain data; see :mod:`trainloop.distributed.encoding`.

Each kind has ``write(writer, values, depth)`` and ``read(reader, count, depth)``, and a number in ``CODECS``.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainloop.distributed.encoding import Reader, Writer

__all__ = ["CODECS", "DTYPES", "NAMED_TUPLE", "Codec", "Malformed", "NotPlain", "accelerators"]

NAMED_TUPLE = 20
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_COMPRESSED = {
    str(layout): layout for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


class NotPlain(TypeError):
    """The value holds something else than plain data."""


class Malformed(ValueError):
    """The bytes do not come from :func:`~trainloop.distributed.encoding.encode`."""


def accelerators() -> list[str]:
    """Device types, besides the CPU, that this process has: one or none."""
    try:
        here = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where it was made for one and there is none; later ones return None
        return []
    return [] if here is None else [here.type]


def _write_none(w: Writer, values: list[Any], depth: int) -> None:
    w.parts.append(bytes(len(values)))


def _read_none(r: Reader, count: int, depth: int) -> list[Any]:
    r.take(count)
    return [None] * count


def _write_bool(w: Writer, values: list[Any], depth: int) -> None:
    w.numbers(values, "u1")


def _read_bool(r: Reader, count: int, depth: int) -> list[Any]:
    return (r.numbers(count, "u1") != 0).tolist()


def _write_int(w: Writer, values: list[Any], depth: int) -> None:
    try:
        numbers = np.array(values, "<i8")
    except OverflowError:
        w.parts.append(b"\1")
        _write_bytes(w, [value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True) for value in values], depth)
    else:
        w.parts.append(b"\0")
        w.memory(numbers)


def _read_int(r: Reader, count: int, depth: int) -> list[Any]:
    if r.take(1)[0]:
        return [int.from_bytes(data, "little", signed=True) for data in _read_bytes(r, count, depth)]
    return r.numbers(count, "<i8").tolist()


def _write_float(w: Writer, values: list[Any], depth: int) -> None:
    w.numbers(values, "<f8")


def _read_float(r: Reader, count: int, depth: int) -> list[Any]:
    return r.numbers(count, "<f8").tolist()


def _write_complex(w: Writer, values: list[Any], depth: int) -> None:
    w.numbers(values, "<c16")


def _read_complex(r: Reader, count: int, depth: int) -> list[Any]:
    return r.numbers(count, "<c16").tolist()


def _write_str(w: Writer, values: list[Any], depth: int) -> None:
    w.text("".join(values))
    w.numbers(list(map(len, values)), "<i8")


def _read_str(r: Reader, count: int, depth: int) -> list[Any]:
    text = r.text()
    lengths = r.numbers(count, "<i8")
    if count and (lengths.min() < 0 or lengths.max() > len(text)):  # so that the sum of them can't overflow
        raise Malformed("a text's length")
    ends = np.cumsum(lengths).tolist()
    return [text[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def _write_bytes(w: Writer, values: list[Any], depth: int) -> None:
    w.numbers(list(map(len, values)), "<i8")
    w.parts.extend(values)


def _read_bytes(r: Reader, count: int, depth: int) -> list[Any]:
    return [bytes(r.take(size)) for size in r.sizes(count)]


def _read_bytearray(r: Reader, count: int, depth: int) -> list[Any]:
    return [bytearray(r.take(size)) for size in r.sizes(count)]


def _write_sequence(w: Writer, values: list[Any], depth: int) -> None:
    w.numbers(list(map(len, values)), "<i8")
    _write_items(w, list(itertools.chain.from_iterable(values)), len(values), depth)


def _write_items(w: Writer, items: list[Any], rows: int, depth: int) -> None:
    """Write items of equally long rows position by position: those at one position are mostly of one kind."""
    width = len(items) // rows if rows > 1 and len(items) % rows == 0 else 0
    # Rows such as (name, score) would otherwise be columns of mixed kinds, with a few bytes for each change.
    by_position = 1 < width <= 64 and len(set(map(type, items))) > 1
    w.parts.append(bytes([by_position]))
    if by_position:
        items = [item for position in range(width) for item in items[position::width]]
    w.column(items, depth + 1)


def _read_items(r: Reader, count: int, rows: int, depth: int) -> list[Any]:
    by_position = r.take(1)[0]
    items = r.column(count, depth + 1)
    return [item for row in range(rows) for item in items[row::rows]] if by_position else items


def _reader_of(build: Callable[[list[Any]], Any]) -> Callable[[Reader, int, int], list[Any]]:
    def read(r: Reader, count: int, depth: int) -> list[Any]:
        sizes = r.sizes(count)
        items = _read_items(r, sum(sizes), count, depth)
        ends = itertools.accumulate(sizes)
        return [build(items[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    return read


def _write_dict(w: Writer, values: list[Any], depth: int) -> None:
    keys = list(map(list, values))
    alike = len(keys) > 1 and _all_text(keys) and all(mine == keys[0] for mine in keys)
    w.numbers(list(map(len, keys)), "<i8")
    w.column([keys[0] if alike else list(itertools.chain.from_iterable(keys))], depth + 1)
    _write_items(w, list(itertools.chain.from_iterable(value.values() for value in values)), len(values), depth)


def _all_text(rows: list[list[Any]]) -> bool:
    """Whether all are texts, for which equality means the same (1 == True, and comparing tensors gives a tensor)."""
    return set(map(type, itertools.chain.from_iterable(rows))) == {str}


def _dict_reader(build: Callable[[Iterable[tuple[Any, Any]]], Any]) -> Callable[[Reader, int, int], list[Any]]:
    def read(r: Reader, count: int, depth: int) -> list[Any]:
        sizes = r.sizes(count)
        (keys,) = r.column(1, depth + 1)
        values = _read_items(r, sum(sizes), count, depth)
        alike = count > 1 and len(keys) != len(values)
        if len(keys) != (sizes[0] if alike else len(values)):
            raise Malformed("keys without values")
        ends = itertools.accumulate(sizes)
        return [
            build(zip(keys if alike else keys[end - size : end], values[end - size : end], strict=True))
            for end, size in zip(ends, sizes, strict=True)
        ]

    return read


def _write_named_tuple(w: Writer, values: list[Any], depth: int) -> None:
    kind = type(values[0])
    if _loaded(kind.__module__, kind.__qualname__) is not kind:
        raise NotPlain(f"of type {kind.__qualname__}, which is not found in its module {kind.__module__}")
    w.text(kind.__module__)
    w.text(kind.__qualname__)
    _write_sequence(w, values, depth)


def _read_named_tuple(r: Reader, count: int, depth: int) -> list[Any]:
    module, name = r.text(), r.text()
    if r.trusted and module not in sys.modules:
        importlib.import_module(module)
    kind = _loaded(module, name)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)):
        raise Malformed(f"{module}.{name} is no named tuple that this rank has loaded: import its module at the top")
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]  # seen above
    rows = _reader_of(tuple)(r, count, depth)
    if any(len(row) != len(fields) for row in rows):
        raise Malformed(f"a {name} of another length")
    return [tuple.__new__(kind, row) for row in rows]


def _loaded(module: str, name: str) -> Any:
    """The object of a dotted name in a loaded module, looked up without calling any of its code."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if isinstance(found, types.ModuleType):  # a lazy module's __getattribute__ would load it
            found = object.__getattribute__(found, "__dict__").get(part)
        else:
            found = type.__getattribute__(found, "__dict__").get(part) if isinstance(found, type) else None
    return found


def _write_array(w: Writer, values: list[Any], depth: int) -> None:
    dtype = values[0].dtype
    w.shapes([value.shape for value in values])
    _write_dtype(w, dtype, depth)
    if dtype.kind == "O":
        w.column(list(itertools.chain.from_iterable(value.reshape(-1).tolist() for value in values)), depth + 1)
    else:
        for value in values:
            w.memory(value)


def _read_array(r: Reader, count: int, depth: int) -> list[Any]:
    shapes = r.shapes(count)
    sizes = [_size_of(shape) for shape in shapes]
    dtype = _read_dtype(r, depth)
    if dtype is None:
        objects = iter(r.column(sum(sizes), depth + 1))
        return [_object_array(list(itertools.islice(objects, n)), shape) for n, shape in zip(sizes, shapes)]
    return [r.numbers(n, dtype).reshape(shape).copy() for n, shape in zip(sizes, shapes)]


def _object_array(items: list[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), object)
    for i, item in enumerate(items):  # array[:] = items would take lists of one length for rows
        array[i] = item
    return array.reshape(shape)


def _write_scalar(w: Writer, values: list[Any], depth: int) -> None:
    dtype = values[0].dtype
    if dtype.kind == "O":
        raise NotPlain("a numpy scalar of an object")
    _write_dtype(w, dtype, depth)
    w.memory(np.array(values, dtype))


def _read_scalar(r: Reader, count: int, depth: int) -> list[Any]:
    dtype = _read_dtype(r, depth)
    if dtype is None or (dtype.itemsize == 0 and count):
        raise Malformed("a scalar without a size")
    return list(r.numbers(count, dtype).copy())


def _write_dtype(w: Writer, dtype: np.dtype[Any], depth: int) -> None:
    if dtype.kind == "O":
        w.text("")
        return
    if dtype.hasobject or dtype.metadata or dtype.itemsize == 0:
        raise NotPlain(f"of dtype {dtype}")
    description = np.lib.format.dtype_to_descr(dtype)
    if np.lib.format.descr_to_dtype(description) != dtype:  # another library's dtype arrives as bytes
        raise NotPlain(f"of dtype {dtype}")
    if isinstance(description, str):
        w.text(description)
    else:
        w.text("[]")
        w.column([description], depth + 1)


def _read_dtype(r: Reader, depth: int) -> np.dtype[Any] | None:
    """``None`` for objects."""
    text = r.text()
    if not text:
        return None
    description: Any = r.column(1, depth + 1)[0] if text == "[]" else text
    dtype = np.dtype(np.lib.format.descr_to_dtype(description))
    if dtype.hasobject or dtype.itemsize == 0:
        raise Malformed(f"an array of dtype {dtype}")
    return dtype


def _write_tensor(w: Writer, values: list[Any], depth: int) -> None:
    first = values[0]
    w.text(str(first.dtype))
    w.text(first.device.type)
    w.text(str(first.layout))
    w.parts.append(bytes([first.requires_grad]))
    if first.layout is torch.strided:
        w.shapes([value.shape for value in values])
        for value in values:
            flat = value.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
            if flat.stride(-1) != 1:  # torch calls a single element contiguous, even one out of many
                flat = flat.clone(memory_format=torch.contiguous_format)
            w.memory(flat.view(torch.uint8).numpy())
        return
    parts: list[Any] = []
    for value in values:
        here = value.detach()
        if here.layout is torch.sparse_coo:
            parts.append((here._indices().cpu(), here._values().cpu(), tuple(here.shape), here.is_coalesced()))
        elif str(here.layout) in _COMPRESSED:
            by_row = here.layout in (torch.sparse_csr, torch.sparse_bsr)
            outer, inner = (
                (here.crow_indices(), here.col_indices()) if by_row else (here.ccol_indices(), here.row_indices())
            )
            parts.append((outer.cpu(), inner.cpu(), here.values().cpu(), tuple(here.shape)))
        else:
            raise NotPlain(f"a tensor of layout {here.layout}")
    w.column(parts, depth + 1)


def _read_tensor(r: Reader, count: int, depth: int) -> list[Any]:
    dtype, device_type, layout, requires_grad = DTYPES[r.text()], r.text(), r.text(), bool(r.take(1)[0])
    if device_type not in ("cpu", *accelerators()):
        raise Malformed(f"a tensor on {device_type!r}, which this process does not have")
    tensors: list[Tensor] = []
    if layout == str(torch.strided):
        for shape in r.shapes(count):
            data = r.numbers(
                _size_of(shape) * dtype.itemsize, "u1"
            ).copy()  # aligned, which a slice of bytes may not be
            tensors.append(
                torch.from_numpy(data).view(dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)
            )
    else:
        for parts in r.column(count, depth + 1):
            # Check the invariants: an index out of range would later read other memory.
            if layout == str(torch.sparse_coo):
                indices, values, size, coalesced = parts
                sparse = torch.sparse_coo_tensor(indices, values, size, is_coalesced=coalesced, check_invariants=True)
            else:
                outer, inner, values, size = parts
                sparse = torch.sparse_compressed_tensor(
                    outer, inner, values, size, layout=_COMPRESSED[layout], check_invariants=True
                )
            tensors.append(sparse)
    return [tensor.to(device_type).requires_grad_(requires_grad) for tensor in tensors]


def _size_of(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        if n < 0:
            raise Malformed(f"a shape of {shape}")
        size *= n
    return size


class Codec(NamedTuple):
    kind: Any
    write: Callable[[Writer, list[Any], int], None]
    read: Callable[[Reader, int, int], list[Any]]


CODECS = {
    0: Codec(type(None), _write_none, _read_none),
    1: Codec(bool, _write_bool, _read_bool),
    2: Codec(int, _write_int, _read_int),
    3: Codec(float, _write_float, _read_float),
    4: Codec(complex, _write_complex, _read_complex),
    5: Codec(str, _write_str, _read_str),
    6: Codec(bytes, _write_bytes, _read_bytes),
    7: Codec(bytearray, _write_bytes, _read_bytearray),
    8: Codec(np.ndarray, _write_array, _read_array),
    9: Codec(np.generic, _write_scalar, _read_scalar),
    10: Codec(Tensor, _write_tensor, _read_tensor),
    11: Codec(list, _write_sequence, _reader_of(list)),
    12: Codec(tuple, _write_sequence, _reader_of(tuple)),
    13: Codec(set, _write_sequence, _reader_of(set)),
    14: Codec(frozenset, _write_sequence, _reader_of(frozenset)),
    15: Codec(dict, _write_dict, _dict_reader(dict)),
    16: Codec(OrderedDict, _write_dict, _dict_reader(OrderedDict)),
    NAMED_TUPLE: Codec(None, _write_named_tuple, _read_named_tuple),
}
