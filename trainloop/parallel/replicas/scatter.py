"""Split a batch into parts for replicas, in dicts, lists and objects, too.

All functions are pure, and tensors remain on their device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainloop._support.nested import keys_of, map_parts, own_attributes, parts_of, with_parts
from trainloop.errors import ConfigurationError


def chunk_sizes(length: int, num_chunks: int) -> list[int]:
    """Return the sizes of the parts that ``torch.chunk`` makes: 7 samples in 2 parts are 4 and 3, in 8 parts 7 times 1.

    Examples
    --------
    >>> chunk_sizes(7, 2), chunk_sizes(5, 4), chunk_sizes(0, 2)
    ([4, 3], [2, 2, 1], [0])
    """
    size = max(-(-length // num_chunks), 1)
    return [min(size, length - begin) for begin in range(0, length, size)] or [0]


def batch_length(value: Any, dim: int = 0) -> int | None:
    """Return the number of samples in a batch; None if unknown.

    It is the length of the batch's first tensor or array, or else of its first list of plain items.
    """
    return _first_length(value, lambda item: _length_along(item, dim)) or _first_length(value, _list_length)


def scatter(
    value: Any, num_chunks: int, dim: int = 0, length: int | None = None, others: set[int] | None = None
) -> list[Any]:
    """Split a nested value along the batch into the parts that ``torch.chunk`` makes (maybe fewer than requested).

    Tensors and arrays with one row per sample are cut, and so are lists and tuples with one item per sample. All other
    values are passed to every part unchanged: other tensors (e.g. class weights), scalars, modules and devices.

    Parameters
    ----------
    value : nested dicts, lists, tuples, namedtuples, dataclasses
    num_chunks : int
    dim : int
        Dimension of the samples in tensors and arrays.
    length : int, optional
        Number of samples in ``value``, if the caller knows it. Default: :func:`batch_length`, and then tensors in a
        list are columns, as for ``nn.DataParallel``, even if there are as many as samples.
    others : set of int, optional
        Numbers of the tensors that do not have one row per sample. Those that have another length in this batch are
        added, so that a later batch of this form is not cut if the lengths happen to be equal.

    Returns
    -------
    list
        One part if nothing can be cut.

    Raises
    ------
    NotDivisibleError
        If a tensor is sparse or nested. With ``length`` also if a tensor has another number of rows, if a list may
        contain samples or columns, or if an object of another class may contain samples.

    Examples
    --------
    >>> boxes = [[1, 2, 3], [1, 2, 3, 4], [1], [2, 2]]
    >>> [part["boxes"] for part in scatter({"x": torch.zeros(4, 2), "boxes": boxes}, 2)]
    [[[1, 2, 3], [1, 2, 3, 4]], [[1], [2, 2]]]
    """
    known = length is not None
    if length is None:
        length = batch_length(value, dim)
    if not length:
        return [value]
    cut = _Cut(length, dim, known, set() if others is None else others)
    sizes = chunk_sizes(length, num_chunks)
    ends = np.cumsum(sizes).tolist()
    chunks = [cut(value, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    if known and cut.whole and len(chunks) > 1:
        raise NotDivisibleError(f"it has tensors of another length: {', '.join(dict.fromkeys(cut.whole))}")
    if cut.uncut and len(chunks) > 1:
        raise NotDivisibleError(f"it contains {', '.join(dict.fromkeys(cut.uncut))}, which can't be divided")
    if known and not cut.found and len(chunks) > 1:
        raise NotDivisibleError(f"it has neither tensors nor lists of this length, but is a {type(value).__name__}")
    return chunks if cut.found else [value]


class NotDivisibleError(ConfigurationError):
    """A batch can't be divided among replicas, because it is not known which parts belong to which sample."""


class _Cut:
    """Cut a nested value of ``length`` samples.

    ``found`` is True once there was anything to cut. ``whole`` has the shapes of tensors that are not cut because of
    their length; ``uncut`` names other parts that can't be cut.
    """

    def __init__(self, length: int, dim: int, known: bool, others: set[int]) -> None:
        self.length, self.dim, self._known, self._others = length, dim, known, others
        self._number = 0  # of the next tensor
        self.found = False
        self.whole: list[str] = []
        self.uncut: list[str] = []

    def __call__(self, value: Any, begin: int, end: int) -> Any:
        self._number = 0
        return self._cut_part(value, begin, end, top=True)

    def _cut_part(self, item: Any, begin: int, end: int, top: bool = False) -> Any:
        if isinstance(item, PackedSequence):
            raise ConfigurationError(
                "gpu_mode='dp' can't split a PackedSequence into parts for replicas. Let collate_fn return padded "
                "sequences and their lengths, and pack them in get_loss, or use gpu_mode='ddp'."
            )
        if isinstance(item, (Tensor, np.ndarray)):
            number, self._number = self._number, self._number + 1
            if _length_along(item, self.dim) != self.length or number in self._others:
                if item.ndim:
                    self._others.add(number)
                    self.whole.append(str(tuple(item.shape)))
                return item
            if isinstance(item, Tensor) and (item.is_nested or item.layout != torch.strided):
                self.uncut.append(f"a {'nested' if item.is_nested else 'sparse'} tensor")
                return item
            if (
                self._known
                and type(item) not in (Tensor, np.ndarray)
                and any(map(self._of_rows, own_attributes(item).values()))
            ):
                self.uncut.append(f"a {type(item).__name__} whose attributes may belong to its rows")
                return item
            self.found = True
            if isinstance(item, np.ndarray):
                return item.take(range(begin, end), self.dim)
            # From data: an in-place change of one part must not make autograd reject what it has saved of another part.
            return (item if item.requires_grad else item.data).narrow(self.dim, begin, end - begin)
        shape = getattr(item, "shape", None)
        if isinstance(shape, tuple) and shape[self.dim : self.dim + 1] == (self.length,) and parts_of(item) is not None:
            self.found = True  # a container that can be indexed as a tensor, such as a tensordict
            return item[(slice(None),) * self.dim + (slice(begin, end),)]
        if _is_list(item) and len(item) == self.length and not self._has_others(item) and self._has_samples(item, top):
            self.found = True
            return with_parts(item, item[begin:end])
        if self._known and parts_of(item) is None and self._may_have_samples(item):
            self.uncut.append(f"a {type(item).__name__}")
            return item
        return map_parts(lambda part: self._cut_part(part, begin, end), item)

    def _has_others(self, item: Any) -> bool:
        """Return True if tensors in the next item had other lengths than their batches, in this batch or earlier."""
        return self._known and not self._others.isdisjoint(range(self._number, self._number + _count_tensors(item)))

    def _may_have_samples(self, item: Any) -> bool:
        """Return True for an object that is no container, but may have tensors, or one item per sample."""
        if item is None or isinstance(item, (str, bytes, bool, int, float, np.generic)):
            return False
        if callable(getattr(item, "to", None)) or any(map(_has_tensors, own_attributes(item).values())):
            return True
        return isinstance(item, Sized) and len(item) == self.length

    def _has_samples(self, items: Sequence[Any], top: bool) -> bool:
        """Return True if a list of the batch's length has one item per sample, False if its items are columns.

        A DataLoader makes a list ``[x, y]`` of pairs, which is not a list of two samples, and ``[x, [a, b]]`` of nested
        pairs. Samples are alike: they have the same types, keys and numbers of dimensions. Columns have one row per
        sample.
        """
        if not any(map(is_structure, items)):
            return True
        rows = [self._has_rows(item) for item in items]
        alike = len({form_of(item) for item in items if not (isinstance(item, (list, tuple)) and not item)}) <= 1
        if not self._known:  # as for nn.DataParallel, tensors in a list are columns
            return alike and not all(rows) and not any(map(_has_tensors, items))
        lengths = {_length_along(item, self.dim) for item in items}
        top_is_columns = top and lengths == {self.length}
        # Inputs and labels of another loader in the batch have as many rows as each other.
        may_be_columns = not alike and not top and not any(rows) and len(lengths) == 1 and None not in lengths
        if may_be_columns or (
            alike and not top_is_columns and (all(rows) or (top and (any(rows) or type(items) is tuple)))
        ):
            raise NotDivisibleError(
                f"a {type(items).__name__} of {self.length} items may contain the batch's {self.length} samples or "
                "columns with one row per sample"
            )
        return (alike and not all(rows)) or not (alike or top or any(rows))

    def _has_rows(self, item: Any) -> bool:
        """Return True if a value has one row per sample, or a part with one."""
        length = _length_along(item, self.dim)
        if length is not None:
            return length == self.length
        if isinstance(item, (list, tuple)) and not any(map(is_structure, item)):
            return len(item) == self.length
        return any(map(self._has_rows, parts_of(item) or ()))

    def _of_rows(self, value: Any) -> bool:
        """Return True if an attribute of a tensor may have one item for each of the tensor's rows."""
        if isinstance(value, (list, tuple)) and len(value) == self.length:
            return True
        return self._has_rows(value) or any(map(self._of_rows, parts_of(value) or ()))


def _count_tensors(item: Any) -> int:
    if isinstance(item, (Tensor, np.ndarray)):
        return 1
    return sum(map(_count_tensors, parts_of(item) or ()))


def _has_tensors(item: Any) -> bool:
    return _length_along(item, 0) is not None or any(map(_has_tensors, parts_of(item) or ()))


def form_of(item: Any) -> Any:
    """Return what samples of one dataset have in common: types, keys, numbers of dimensions, dtypes."""
    if isinstance(item, (list, tuple)):  # of any length: a sample's boxes, or its tokens
        return type(item), frozenset(form_of(part) if is_structure(part) else None for part in item)
    if isinstance(item, (Tensor, np.ndarray)):
        return item.ndim, str(item.dtype)
    return type(item), frozenset(keys_of(item)) if isinstance(item, Mapping) else None


def _length_along(item: Any, dim: int) -> int | None:
    """Return the length of a tensor or array along the batch's dimension; None for other values."""
    if isinstance(item, Tensor) and item.is_nested:
        return int(item.size(0)) if dim == 0 else None
    return item.shape[dim] if isinstance(item, (Tensor, np.ndarray)) and -item.ndim <= dim < item.ndim else None


def _list_length(item: Any) -> int | None:
    """Return the length of a list with one item per sample; None for other values, including lists of lists or tensors.

    A DataLoader makes a list ``[x, y]`` of pairs, which is not a list of two samples. So if the items of a list can be
    cut, they are cut, and the list is not.
    """
    return len(item) if _is_list(item) and item and not any(map(is_structure, item)) else None


def _is_list(item: Any) -> bool:
    """Return True for a list of any class or a tuple; other tuples, such as shapes and named tuples, are structures."""
    return isinstance(item, list) or type(item) is tuple


def is_structure(item: Any) -> bool:
    """Return True for what has rows or contains other values, rather than being one value."""
    return _length_along(item, 0) is not None or isinstance(item, (list, tuple, Mapping))


def _first_length(value: Any, length: Callable[[Any], int | None]) -> int | None:
    """Return the first length that is known, of a value or of its parts, depth first."""
    own = length(value)
    if own is not None:
        return own
    lengths = (_first_length(part, length) for part in parts_of(value) or ())
    return next((found for found in lengths if found is not None), None)
