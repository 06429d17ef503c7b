"""Join what the parts of a batch, or several batches, return: losses, outputs, and rows in tensors, lists and tables.

All functions are pure, and tensors remain on their device.
"""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from collections.abc import Callable, Container, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from trainloop._support.nested import keys_of, map_parts, map_together, parts_of, with_parts
from trainloop._support.reduction import attach_divisor, divisor_of
from trainloop.devices import shown
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss
from trainloop.optim.losses import check_weight, plain_number
from trainloop.parallel.replicas.scatter import is_structure


def combine_losses(losses: Sequence[Any], sizes: Sequence[int], summed: bool | Container[str] = False) -> Any:
    """Combine the losses of a batch's parts into the loss of the whole batch.

    Parameters
    ----------
    losses : sequence
        Each part's result of ``get_loss``: a 0-d tensor, a ``MultiLoss`` or dict of these, or ``(loss, weight)``.
    sizes : sequence of int
        Samples in each part.
    summed : bool or names
        True if losses without a weight are sums over samples; False for means. Of a ``MultiLoss`` that has both, the
        names of the sums.

    Returns
    -------
    same type as each loss
        Sums are added. Means over samples are averaged by ``sizes``. For pairs ``(loss, weight)``, losses are averaged
        by their weights, and weights are added. A loss of a ``MultiLoss`` that some parts lack is averaged over the
        others if it has units of its own, and otherwise counts as zero for these parts.

    Raises
    ------
    ConfigurationError
        If a loss has another form.
    """
    several = next((loss for loss in losses if isinstance(loss, MultiLoss)), None)
    if several is not None and not all(isinstance(loss, MultiLoss) for loss in losses):
        raise ConfigurationError(
            "get_loss returned a MultiLoss for the samples of one replica, and something else for those of another. "
            "Return a MultiLoss for any samples, such as MultiLoss({'loss': loss})."
        )
    if all(isinstance(loss, tuple) and len(loss) == 2 for loss in losses):
        weights = [loss[1] for loss in losses]
        if all(weight is None for weight in weights):  # as if get_loss had returned the loss alone
            return combine_losses([loss[0] for loss in losses], sizes, summed), None
        for weight in weights:
            check_weight(weight)
        weights = list(map(_summable, weights))
        total = sum(weights[1:], weights[0])
        return _mean_loss([loss[0] for loss in losses], weights, total), total
    if summed is True:
        return _mean_loss(losses, [1] * len(losses), 1)
    return _mean_loss(losses, sizes, sum(sizes), over_samples=True, summed=summed or ())


def _summable(weight: Any) -> Any:
    """Return a weight in a dtype in which sums don't overflow: two bools would add up to True."""
    if not isinstance(weight, Tensor):
        return plain_number(weight)
    small = weight.element_size() < 4
    return weight.to(torch.float32 if weight.is_floating_point() else torch.int64) if small else weight


def _mean_loss(
    losses: Sequence[Any],
    weights: Sequence[Any],
    total: Any,
    *,
    over_samples: bool = False,
    of_criterion: bool = False,
    summed: Container[str] = (),
) -> Any:
    first = losses[0]
    if isinstance(first, (MultiLoss, dict)):
        means = {}
        for name in dict.fromkeys(name for loss in losses for name in loss):
            # A part without the loss counts as zero; or not at all, if the loss has weights of its own.
            having = [i for i, loss in enumerate(losses) if name in loss]
            own, of_parts = [losses[i][name] for i in having], [weights[i] for i in having]
            if name in summed:
                means[name] = _mean_loss(own, [1] * len(own), 1)
            else:
                means[name] = _mean_loss(own, of_parts, total, over_samples=over_samples)
        if isinstance(first, dict):
            return means
        of_names = [loss.loss_optimizer_map for loss in losses if loss.loss_optimizer_map is not None]
        names = {name: optimizer for part in of_names for name, optimizer in part.items()} if of_names else None
        return MultiLoss(means, names, first.retain_graph_until_last)
    if any(not isinstance(loss, Tensor) or loss.numel() != 1 for loss in losses):
        raise _wrong_loss(first)
    divisors: list[Any] = [divisor_of(loss) for loss in losses] if over_samples else []
    if any(divisor is not None for divisor in divisors):  # trainloop._support.reduction: means over these
        divisors = [
            weight * (loss.detach() != 0) if divisor is None else divisor  # zero if all targets are ignored
            for loss, weight, divisor in zip(losses, weights, divisors, strict=True)
        ]
        whole = sum(divisors[1:], divisors[0])
        return attach_divisor(_mean_loss(losses, divisors, whole, of_criterion=True), whole)
    # A part of weight 0 (nothing but padding) may have a loss of 0 / 0, whose gradients are NaN, even if they are
    # multiplied by 0. Such a part is left out; any other gives gradients of zero. On a GPU, this waits for the device.
    counted = [
        (loss, weight)
        for loss, weight in zip(losses, weights, strict=True)
        if of_criterion or weight or torch.isfinite(loss)
    ]
    if not counted:  # the result is zero, but still in the graph
        return sum(torch.nan_to_num(loss) * 0.0 for loss in losses)
    return sum(_weighted(loss, weight, total) for loss, weight in counted)


def _weighted(loss: Tensor, weight: Any, total: Any) -> Tensor:
    if not isinstance(weight, Tensor):
        return loss * (weight / total) if weight else torch.nan_to_num(loss) * 0.0
    if not weight.is_floating_point():  # a division of integers has torch's default precision
        weight = weight.to(torch.promote_types(loss.dtype, torch.float32))
    factor = (weight / total).to(loss.dtype)
    # A criterion of which all targets are ignored is 0 / 0, with gradients of 0.
    return torch.where(weight == 0, torch.zeros_like(loss), loss) * torch.where(weight == 0, 0 * factor, factor)


def _wrong_loss(loss: Any) -> ConfigurationError:
    is_tensor = isinstance(loss, Tensor)
    given = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else f"{loss!r}, a {type(loss).__name__}"
    return ConfigurationError(
        f"get_loss returned {given}. Return a 0-d tensor with the mean over the batch's samples, a MultiLoss of such "
        "tensors, or (loss, weight), where loss is a mean over `weight` units."
    )


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def as_rows(value: Any) -> Any:
    """Return predictions whose rows can be joined: lists for generators, packed sequences and nested tensors.

    The items of a packed sequence are in the order of its batch. Other sequences and iterators become lists, too.
    Compressed sparse tensors, which torch can't join, become COO tensors.
    """
    if isinstance(value, PackedSequence):
        return unpack_sequence(value)
    if isinstance(value, Tensor):
        if value.layout in _COMPRESSED:
            return value.to_sparse_coo()
        return list(value.unbind()) if value.is_nested else value
    if isinstance(value, Iterator) or (
        isinstance(value, Sequence | KeysView | ValuesView) and not isinstance(value, str | bytes | list | tuple)
    ):
        return [as_rows(row) for row in value]
    return map_parts(as_rows, value)


def is_table(value: Any) -> bool:
    """Return True for a Series or DataFrame of pandas, which is not imported here."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Series | pandas.DataFrame)


def join_tables(tables: Sequence[Any]) -> Any:
    """Concatenate tables; an index that only numbers the rows of each table is numbered again."""
    pandas = sys.modules["pandas"]
    numbered = all(isinstance(table.index, pandas.RangeIndex) for table in tables)
    return pandas.concat(tables, ignore_index=numbered)


def are_rows(tuples: Sequence[tuple[Any, ...]], sizes: Sequence[int]) -> bool:
    """Return True if the entries of tuples are the rows of batches, rather than columns that contain the rows.

    ``zip(*samples)`` makes tuples of rows. Their entries are of one kind, there is one for each sample in every batch,
    and in some batch they can't be columns, since they have other lengths.

    Parameters
    ----------
    tuples : sequence of tuple
        A tuple of each batch.
    sizes : sequence of int
        Number of samples of each batch.

    Examples
    --------
    >>> are_rows([([1], [2, 3], []), ([4, 5],)], [3, 1])
    True
    >>> are_rows([(torch.zeros(3), torch.zeros(3)), (torch.zeros(1), torch.zeros(1))], [3, 1])
    False
    """
    if hasattr(tuples[0], "_fields") or any(len(rows) != n for rows, n in zip(tuples, sizes, strict=True)):
        return False
    kinds = {(type(row), getattr(row, "ndim", 0)) for rows in tuples for row in rows}
    return len(kinds) == 1 and any(_num_rows(row) != n for rows, n in zip(tuples, sizes) for row in rows)


def are_columns(lists: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return True if the items of lists are columns that contain the rows, rather than the rows of batches.

    ``default_collate`` makes such a list from samples with a tuple of targets. The items are arrays with a row for each
    sample in every batch, and they can't be rows: their number differs from that of the samples, or they differ in
    dtype or in the shape of their rows.

    Parameters
    ----------
    lists : sequence
        What each batch has, of any type.
    sizes : sequence of int
        Number of samples of each batch.

    Examples
    --------
    >>> are_columns([[torch.zeros(3), torch.zeros(3)], [torch.zeros(1), torch.zeros(1)]], [3, 1])
    True
    >>> are_columns([[torch.zeros(3), torch.zeros(4)], [torch.zeros(1), torch.zeros(1)]], [2, 2])
    False
    """
    count = len(lists[0]) if lists and isinstance(lists[0], list) else 0
    if not count or any(not isinstance(columns, list) or len(columns) != count for columns in lists):
        return False
    items = [(column, n) for columns, n in zip(lists, sizes, strict=True) for column in columns]
    if any(not isinstance(column, (Tensor, np.ndarray)) or _num_rows(column) != n for column, n in items):
        return False
    kinds = {(type(column), column.shape[1:], column.dtype) for column in lists[0]}
    return len(kinds) > 1 or any(count != n > 1 for n in sizes)


def _num_rows(column: Any) -> int | None:
    """Return the number of rows of a column; of a dict or tuple, the number that all of its columns have."""
    if isinstance(column, (Tensor, np.ndarray)):
        return len(column) if column.ndim else None
    if isinstance(column, (Mapping, tuple)):
        lengths = {_num_rows(part) for part in (column.values() if isinstance(column, Mapping) else column)}
        return lengths.pop() if len(lengths) == 1 else None
    return len(column) if isinstance(column, list) or is_table(column) else None


def join_arrays(arrays: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate numpy's arrays; the masks of masked arrays are kept."""
    masked: Any = sys.modules.get("numpy.ma")  # numpy imports it when it is first read, in 6 ms
    has_masks = masked is not None and any(isinstance(array, masked.MaskedArray) for array in arrays)
    return (masked if has_masks else np).concatenate(arrays, axis)


def _lacks_rows(value: Any) -> bool:
    """Return True for a number, or a tensor or array without an axis of rows."""
    if isinstance(value, (Tensor, np.ndarray)):
        return not value.ndim
    return isinstance(value, (bool, int, float, complex, np.number, np.bool_))


def _as_row(value: Any, like: Any) -> Any:
    """Return a value that lacks rows as one row, in the form of ``like``."""
    if isinstance(value, Tensor):
        return value[None]
    if isinstance(like, Tensor):
        plain = value.item() if isinstance(value, (np.generic, np.ndarray)) else value
        return torch.as_tensor(plain, dtype=torch.result_type(like, plain), device=like.device)[None]
    return np.atleast_1d(value) if isinstance(like, np.ndarray) else [value]


def rows_of_ones(outputs: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the predictions of parts with one sample each, with an axis of rows where ``squeeze()`` has removed it.

    Numbers in the metadata are rows if ``y_pred`` or ``y_true`` lacks the axis, too, or if they differ between parts.
    """

    def lacks(value: Any) -> bool:
        return any(map(lacks, value.values())) if isinstance(value, Mapping) else _lacks_rows(value)

    def number(value: Any) -> Any:
        return value.item() if isinstance(value, (Tensor, np.ndarray)) else value

    def add(values: Sequence[Any]) -> Sequence[Any]:
        if all(isinstance(value, Mapping) for value in values):
            keys = [key for key in values[0] if all(key in value for value in values)]
            columns = {key: add([value[key] for value in values]) for key in keys}
            return [{**value, **{key: columns[key][i] for key in keys}} for i, value in enumerate(values)]
        if not all(map(_lacks_rows, values)):
            return values
        if squeezed or any(number(value) != number(values[0]) for value in values):
            return [_as_row(value, value if isinstance(value, np.ndarray) else []) for value in values]
        return values

    squeezed = any(map(lacks, outputs[0][:2]))
    return list(zip(*map(add, zip(*outputs, strict=True)), strict=True))


def combine_predictions(parts: Sequence[Any], sizes: Sequence[int], dim: int = 0) -> Any:
    """Join the predictions of a batch's parts into the predictions of the whole batch.

    Tensors and arrays are concatenated, lists are rows and are joined, dicts, tuples and dataclasses are joined by
    entry, and so are lists of :func:`are_columns`; a tuple of plain items is rows, too, and so is one of
    :func:`are_rows`. Other values must be the same for all parts. Rows of different shapes, such as sequences that are
    padded to the longest of their part, become a list.

    Parameters
    ----------
    parts : sequence
    sizes : sequence of int
        Number of samples of each part.
    dim : int
    """
    if any(part is None for part in parts):
        if all(part is None for part in parts):
            return None
        raise ConfigurationError(
            "get_predictions returned None for a part of a batch, and a result for another part. In dp, it runs once "
            "for each part: return None for all of them, or for none."
        )
    like = next((part for part in parts if not _lacks_rows(part)), None)
    if like is not None:  # squeeze() and tolist() remove the rows of a part with one sample
        ones = [size == 1 and _lacks_rows(part) for part, size in zip(parts, sizes, strict=True)]
        parts = [_as_row(part, like) if one else part for part, one in zip(parts, ones)]
    first = parts[0]
    if isinstance(first, Tensor):
        return _concatenated(torch.cat, parts, sizes, dim) if first.ndim else _of_all(parts)
    if is_table(first):
        return join_tables(parts)
    if isinstance(first, np.ndarray):
        return _concatenated(join_arrays, parts, sizes, dim) if first.ndim else _of_all(parts)
    if isinstance(first, Mapping):
        merged = copy.copy(first) if isinstance(first, (dict, UserDict)) else dict(first)
        for key in keys_of(first):
            having = [(part[key], size) for part, size in zip(parts, sizes, strict=True) if key in part]
            merged[key] = combine_predictions([item for item, _ in having], [size for _, size in having], dim)
        for part in parts[1:]:
            merged.update({key: item for key, item in part.items() if key not in merged})
        return merged
    if isinstance(first, list):
        if are_columns(parts, sizes):
            return [combine_predictions(column, sizes, dim) for column in zip(*parts, strict=True)]
        return [row for part in parts for row in part]
    if isinstance(first, tuple):
        holds_columns = any(is_structure(item) or is_table(item) for item in first)
        plain = not hasattr(first, "_fields") and first and not holds_columns
        if plain or are_rows(parts, sizes):
            return tuple(row for part in parts for row in part)
        entries = [combine_predictions(entry, sizes, dim) for entry in zip(*parts, strict=True)]
        return with_parts(first, entries)
    if getattr(first, "ndim", 0):  # an array of another library
        return [row for part in parts for row in part]
    if parts_of(first) is not None and all(type(part) is type(first) for part in parts):  # a dataclass
        return map_together(lambda entries: combine_predictions(entries, sizes, dim), parts)
    return _of_all(parts)


def _of_all(values: Sequence[Any]) -> Any:
    """Return a value that has no rows, so it is one of the whole batch: the same for all parts."""
    first, *others = (value.item() if isinstance(value, (Tensor, np.ndarray)) else value for value in values)
    for other in others:
        if not _is_same(other, first):
            raise ConfigurationError(
                f"gpu_mode='dp': get_predictions returned {shown(first)} without rows for a part of a batch, and "
                f"{shown(other)} for another part. In dp, it runs once for each part, so a value of the whole batch, "
                "such as a mean over its samples, can't be known. Return a row for each sample, or use gpu_mode='ddp' "
                "or 'single'."
            )
    return values[0]


def _is_same(value: Any, other: Any) -> bool:
    try:
        return value is other or bool(value == other) or (value != value and other != other)  # NaN
    except Exception:  # whatever a comparison of a user's objects raises
        return False


def _concatenated(concatenate: Callable[..., Any], arrays: Sequence[Any], sizes: Sequence[int], dim: int) -> Any:
    # Predictions have a row for each sample, even if the tensors of the batch have the samples in another dimension.
    dim = 0 if all(len(array) == size for array, size in zip(arrays, sizes, strict=True)) else dim
    shapes = {(*array.shape[:dim], *array.shape[dim + 1 :]) for array in arrays}
    return concatenate(list(arrays), dim) if len(shapes) == 1 or dim else [row for array in arrays for row in array]


def gather(outputs: Sequence[Any], dim: int = 0, sizes: Sequence[int] = ()) -> Any:
    """Join replicas' outputs as ``nn.DataParallel`` does: concatenate tensors, even inside dicts, lists and tuples.

    0-d tensors become a vector with one entry per replica. With ``sizes``, the number of samples of each part, a list
    with an item for each sample (names, or boxes of pictures) becomes the list of all samples.
    """
    first = outputs[0]
    if isinstance(first, list):
        if dim == 0 and sizes and _are_samples(outputs, sizes):
            return [item for part in outputs for item in part]
        if len({len(part) for part in outputs}) > 1:
            lengths = [len(part) for part in outputs]
            raise ConfigurationError(
                f"TTDataParallel: forward returned lists of lengths {lengths} for parts of {list(sizes)} samples. They "
                "can't be joined: return lists with one item per sample, or of the same length for every part."
            )
    if isinstance(first, Tensor):
        return torch.cat(list(outputs), dim) if first.ndim else torch.stack(list(outputs))
    if first is None:
        return None
    return map_together(lambda parts: gather(parts, dim, sizes), outputs)


def _are_samples(lists: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Return True if lists have an item for each sample, and the items are not columns that contain the samples."""
    if [len(items) for items in lists] != list(sizes) or len({type(item) for items in lists for item in items}) > 1:
        return False
    return any(
        _num_rows(item) != n and not (isinstance(item, Tensor) and item.ndim == 0)
        for items, n in zip(lists, sizes, strict=True)
        for item in items
    )
