"""The rows of predictions: check, count, join and select them, and move them to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainloop._support.nested import keys_of, map_parts, map_together, parts_of
from trainloop.errors import ConfigurationError
from trainloop.parallel.replicas.gather import are_columns, are_rows, as_rows, is_table, join_arrays, join_tables

Predictions = tuple[Any, Any, Any]


# Kinds of arrays whose rows are joined: type, how to add the axis of rows, how to concatenate.
_ARRAY_KINDS: list[tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (Tensor, torch.atleast_1d, torch.cat),
    (np.ndarray, np.atleast_1d, join_arrays),
]


def check_rows(output: Any, size: int) -> Predictions:
    """Return what ``get_predictions`` returned for a batch of ``size`` samples, with rows that can be joined.

    Raises
    ------
    ConfigurationError
        If the result is invalid, its rows can't be joined, or its parts differ in their numbers of rows.
    """
    if not isinstance(output, tuple) or len(output) != 3:
        what = f"a tuple of length {len(output)}" if isinstance(output, tuple) else f"a {type(output).__name__}"
        raise ConfigurationError(
            f"get_predictions returned {what}. Return (y_pred, y_true, metadata), with {{}} for no metadata."
        )
    y_pred, y_true, metadata = output = as_rows(output)
    for name, y in (("y_pred", y_pred), ("y_true", y_true)):
        _check_kind(name, y)
    counts: dict[str, int] = {}
    for name, y in (("y_pred", y_pred), ("y_true", y_true)):
        found = _counts(name, y)
        if not found and size > 1 and isinstance(y, (Tensor, np.ndarray, np.generic, int, float)):
            raise ConfigurationError(
                f"get_predictions: {name} is a single number for a batch of {size} samples. Return one row for each "
                "sample."
            )
        counts |= found
    # A sample may have several rows. Metadata are then those of the rows or of the samples.
    wrong, allowed = len(set(counts.values())) > 1, {*counts.values(), size}
    for name, count in _counts("metadata", metadata).items() if counts and isinstance(metadata, Mapping) else ():
        if count not in allowed:
            counts[name], wrong = count, True
    if wrong:
        listed = ", ".join(f"{name} has {_number_of(count, 'row')}" for name, count in counts.items())
        raise ConfigurationError(
            f"get_predictions: for a batch of {_number_of(size, 'sample')}, {listed}. Return one row for each sample "
            "in each of them; if samples have other numbers of rows, such as boxes, a list with one item for each "
            "sample."
        )
    return output


def _counts(name: str, value: Any) -> dict[str, int]:
    """Return the number of rows in a column of a batch, by its name; of a dict, those of its entries.

    Rows that can't be counted, as in a tuple of columns, are left out.
    """
    if isinstance(value, Mapping) and not name.startswith("metadata["):  # nested metadata may be settings
        return {k: n for key, part in value.items() for k, n in _counts(f"{name}[{key!r}]", part).items()}
    if isinstance(value, list) or is_table(value) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim):
        return {name: len(value)}
    return {}


def _number_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _check_kind(name: str, value: Any) -> None:
    """Raise an error about an object whose rows can't be joined, such as a set, a sparse matrix or a dataclass."""
    parts = parts_of(value)
    whole = is_dataclass(value) and not isinstance(value, Mapping | tuple)
    if parts is not None and not whole:
        for part in parts if isinstance(value, Mapping | tuple) else ():  # an item of a list may be any object
            _check_kind(name, part)
        return
    known = isinstance(value, (Tensor, np.ndarray, np.generic, str, bytes)) or is_table(value)
    if not known and (whole or hasattr(type(value), "__len__") or hasattr(value, "shape")):
        raise ConfigurationError(
            f"get_predictions returned a {type(value).__module__}.{type(value).__qualname__} in {name}, whose rows "
            "can't be joined with those of other batches. Return a tensor, an array, a table of pandas, a dict of "
            "these, or a list with one item for each sample."
        )


def row_count(output: Predictions, size: int) -> int:
    """Return the number of rows in a batch's predictions; ``size``, its number of samples, if they can't be counted."""
    y_pred = output[0]
    if isinstance(y_pred, (Tensor, np.ndarray)):
        return len(y_pred) if y_pred.ndim else 1
    return len(y_pred) if isinstance(y_pred, list) or is_table(y_pred) else size


def on_cpu(value: Any) -> Any:
    """Return the nested value with its tensors on the CPU, so that predictions don't fill the device."""
    if isinstance(value, Tensor):
        here = value.detach().cpu()
        # A slice would keep the whole tensor alive, and the whole tensor would be sent to the other ranks.
        whole = here.layout is not torch.strided or here.untyped_storage().nbytes() <= here.nbytes
        return here if whole else here.clone()
    if isinstance(value, Mapping):
        value = dict(value)  # a dict is joined by its keys; other ranks may not know a subclass
    return map_parts(on_cpu, value)


def rows_at(value: Any, places: Sequence[int], length: int) -> Any:
    """Return the rows at ``places`` of a value with ``length`` rows; return any other value unchanged."""
    if isinstance(value, Tensor) and value.ndim and len(value) == length:
        return value.index_select(0, torch.as_tensor(places, device=value.device))  # works for sparse tensors, too
    if isinstance(value, np.ndarray) and value.ndim and len(value) == length:
        return value[np.asarray(places)]
    if is_table(value):
        return value.iloc[np.asarray(places)] if len(value) == length else value
    if isinstance(value, list) or (isinstance(value, tuple) and (_has_rows([value]) or are_rows([value], [length]))):
        # Entries of lists of another length may not be rows.
        return [value[i] for i in places] if len(value) == length else value
    return map_parts(lambda part: rows_at(part, places, length), value)


def with_lists_of_rows(batches: list[Any], sizes: Sequence[int]) -> list[Any]:
    """Return a column of all batches with lists in place of tuples of rows; see :func:`.are_rows`."""
    if all(isinstance(batch, tuple) for batch in batches):
        return list(map(list, batches)) if batches and are_rows(batches, sizes) else batches
    if not all(isinstance(batch, Mapping) for batch in batches):
        return batches
    keys = [key for key in keys_of(batches[0]) if all(key in batch for batch in batches)]
    columns = {key: with_lists_of_rows([batch[key] for batch in batches], sizes) for key in keys}
    return [{**batch, **{key: column[i] for key, column in columns.items()}} for i, batch in enumerate(batches)]


def with_tuples_of_columns(batches: list[Any], samples: Sequence[int]) -> list[Any]:
    """Return a column of all batches with tuples in place of lists of columns; see :func:`.are_columns`.

    ``samples`` has the number of samples of each batch.
    """
    return list(map(tuple, batches)) if are_columns(batches, samples) else batches


def join_rows(batches: list[Any], empty: Any = None) -> Any:
    """Join batches of rows; this is the default ``pred_transform_fn``.

    Tensors, arrays and pandas' tables are concatenated, lists chained, dicts, tuples and dataclasses joined entry by
    entry; dtypes are kept.
    Tensors whose rows differ in shape become a list of rows, and so do tuples of rows: tuples that contain text or
    numbers, or differ in length between batches. Values without rows (one number per batch) become a list; among
    batches with rows, such a value is the row of a batch of one sample, as ``squeeze()`` and ``tolist()`` return it.

    Parameters
    ----------
    batches : list
    empty : object, optional
        Result for no batches. Default: a tensor without rows.

    Examples
    --------
    >>> join_rows([{"id": [1, 2]}, {"id": [3]}])
    {'id': [1, 2, 3]}
    """
    if not batches:
        return torch.empty(0, device="cpu") if empty is None else empty
    first = batches[0]
    if all(batch is None for batch in batches):
        return None
    for kind, with_rows, concatenate in _ARRAY_KINDS:
        some: Any = next((batch for batch in batches if isinstance(batch, kind)), None)
        numeric = isinstance(some, Tensor) or (some is not None and some.dtype.kind in "biufcO")
        if some is not None and all(isinstance(batch, kind) or (numeric and _is_number(batch)) for batch in batches):
            # squeeze() removes the rows of a batch of one sample, and calculations turn the result into a number.
            found: list[Any] = [batch if isinstance(batch, kind) else _as_array_like(batch, some) for batch in batches]
            arrays = [batch if batch.ndim else with_rows(batch) for batch in found]
            # Sequences that are padded to the longest of their batch have different lengths in different batches.
            same_shapes = all(array.shape[1:] == arrays[0].shape[1:] for array in arrays)
            return concatenate(arrays) if same_shapes else [row for array in arrays for row in array]
    if all(is_table(batch) for batch in batches):
        return join_tables(batches)
    if all(isinstance(batch, Mapping) for batch in batches):
        keys = dict.fromkeys(key for batch in batches for key in batch)
        return {key: join_rows([batch[key] for batch in batches if key in batch]) for key in keys}
    if isinstance(first, tuple) and not _has_rows(batches):
        return map_together(join_rows, batches)
    if is_dataclass(first) and not isinstance(first, type) and all(type(batch) is type(first) for batch in batches):
        return map_together(join_rows, batches)
    with_axis = [isinstance(batch, (list, tuple)) or getattr(batch, "ndim", 0) > 0 for batch in batches]
    if any(with_axis) and all(has or _is_row(batch) for has, batch in zip(with_axis, batches)):
        return [row for has, batch in zip(with_axis, batches) for row in (batch if has else [batch])]
    return list(batches)  # one value per batch: numbers, text, objects


def _is_number(value: Any) -> bool:
    """Return True for a number of Python or numpy."""
    return isinstance(value, (bool, int, float, complex, np.number, np.bool_))


def _is_row(value: Any) -> bool:
    """Return True for a value without an axis of rows that may be the row of a batch of one sample."""
    return _is_number(value) or isinstance(value, (str, bytes, np.generic, Tensor, np.ndarray))


def _as_array_like(number: Any, array: Any) -> Any:
    """Return a number as a tensor or an array like ``array``; numpy's numbers keep their own type."""
    if isinstance(array, Tensor):
        plain = number.item() if isinstance(number, np.generic) else number
        return torch.as_tensor(plain, dtype=torch.result_type(array, plain), device=array.device)
    return np.asarray(number, dtype=None if isinstance(number, np.generic) else np.result_type(array.dtype, number))


def _has_rows(batches: list[tuple[Any, ...]]) -> bool:
    """Return True if the entries of tuples are rows, rather than columns that contain the rows."""
    if hasattr(batches[0], "_fields"):
        return False
    # A tuple of (name, score) is a row; a tuple of tensors is columns.
    scalars = any(isinstance(item, (str, bytes, int, float)) for batch in batches for item in batch)
    return scalars or any(len(batch) != len(batches[0]) for batch in batches)
