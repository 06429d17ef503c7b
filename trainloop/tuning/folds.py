"""Make folds: the rows that each model of a bag trains on, and the rows that it predicts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainloop.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class Fold:
    """The rows that one model trains on, and the rows that are held out from this model.

    ``torch.utils.data.Subset(data, fold.train)`` selects the training rows.
    """

    index: int
    """Index of the fold, counted from 0."""
    num_folds: int
    """Number of folds of the bag."""
    train: np.ndarray[Any, Any]
    """Numbers of the rows to train on, as int64: in ascending order, or in the order of your own folds."""
    validation: np.ndarray[Any, Any]
    """Numbers of the rows that are held out, in ascending order. Exactly one fold holds out each row, unless you pass
    your own folds."""

    def __repr__(self) -> str:
        return f"Fold({self.index} of {self.num_folds}, train={len(self.train)}, validation={len(self.validation)})"


def class_targets(targets: object) -> np.ndarray[Any, Any] | None:
    """Return the targets as class numbers; None if they are floats, several per row, or rarely repeated values."""
    if targets is None:
        return None
    if hasattr(targets, "detach"):
        targets = targets.detach().cpu()
    values = np.asarray(targets)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "biuUSO":
        return None
    if values.dtype.kind == "O":
        values = values.astype(str)
    _, codes = np.unique(values, return_inverse=True)
    return codes if len(codes) >= 2 * (codes.max(initial=0) + 1) else None


def num_rows(*arrays: Any) -> int | None:
    """Return the number of rows of arrays, tables or lists; None if all of them are None.

    Raises
    ------
    ConfigurationError
        If an argument has no rows, or if the numbers of rows differ.
    """
    given = [each for each in arrays if each is not None]
    try:
        counts = [int(each.shape[0]) if hasattr(each, "shape") else len(each) for each in given]
    except (TypeError, IndexError):
        raise ConfigurationError(
            "data=(x, y) and targets must be arrays, tables or lists, with one item per row."
        ) from None
    if len(set(counts)) > 1:
        raise ConfigurationError(
            f"data=(x, y) and targets must have the same number of rows, but they have {', '.join(map(str, counts))}."
        )
    return counts[0] if counts else None


def make_folds(
    num_samples: int, num_folds: int, *, seed: int, classes: Sequence[int] | np.ndarray[Any, Any] | None = None
) -> list[Fold]:
    """Return folds of nearly equal size, stratified if ``classes`` is given. Each row is held out by one fold.

    Parameters
    ----------
    num_samples : int
        Number of rows of the data.
    num_folds : int
        Number of folds, 2 or more.
    seed : int
        Seed of the shuffle.
    classes : sequence of int, optional
        Class of each row. The folds' numbers of rows of a class then differ by at most one.

    Raises
    ------
    ConfigurationError
        If there are fewer rows than folds.
    """
    if num_samples < num_folds:
        raise ConfigurationError(
            f"num_bag_folds={num_folds} exceeds the number of rows ({num_samples}). Use fewer folds."
        )
    rng = np.random.default_rng([seed, num_folds])
    order = rng.permutation(num_samples)
    if classes is not None:
        # Rows are sorted by class and assigned to the folds in turn. Each class continues at the fold after the last
        # one of the previous class, so the sizes of folds differ by at most one, too.
        order = order[np.argsort(np.asarray(classes)[order], kind="stable")]
    held_by = np.empty(num_samples, dtype=np.int64)
    held_by[order] = np.arange(num_samples) % num_folds
    rows = np.arange(num_samples)
    return [Fold(k, num_folds, rows[held_by != k], rows[held_by == k]) for k in range(num_folds)]


def digest(folds: Sequence[Fold]) -> str:
    """Return a checksum of the folds, to compare them with the folds of a stored search."""
    rows = [repr(part.tolist()).encode() for fold in folds for part in (fold.train, fold.validation)]
    return hashlib.sha256(b"|".join(rows)).hexdigest()


_BLOCK_BYTES = 2**20  # data may fill the memory, or be on a disk only


def described_data(*arrays: Any) -> str | None:
    """Return the number of rows and a checksum of arrays, tables or lists, to compare them with a stored search's.

    The checksum is of their values, also in another process. Of arrays that numpy can't read, only the length counts.
    """
    rows, checksum = num_rows(*arrays), hashlib.sha256()
    if rows is None:
        return None
    for array in arrays:
        for column in [array[name] for name in array.columns] if hasattr(array, "columns") else [array]:
            try:
                values = np.asarray(column.detach().cpu() if hasattr(column, "detach") else column)
            except (TypeError, ValueError):  # ragged lists, bfloat16
                continue
            checksum.update(str(values.shape).encode())
            values = np.atleast_1d(values)
            step = max(1, _BLOCK_BYTES // max(1, values[:1].nbytes))
            for block in (values[begin : begin + step] for begin in range(0, len(values), step)):
                if block.dtype.kind == "O":
                    text = "\0".join(map(_text_of, [*block.reshape(-1).tolist(), ""]))
                    checksum.update(re.sub(r" at 0x[0-9a-fA-F]+", "", text).encode(errors="replace"))
                else:
                    checksum.update(block.tobytes())
    return f"{rows} rows, checksum {checksum.hexdigest()[:16]}"


def _text_of(value: Any) -> str:
    """Return the text of a value; a set's items are in another order in each process."""
    return str(sorted(map(str, value)) if isinstance(value, (set, frozenset)) else value)


def own_folds(given: Any, x: Any, y: Any) -> list[Fold]:
    """Return folds made from the user's splitter or pairs of row numbers.

    Parameters
    ----------
    given : object
        An object with ``split(x, y)``, such as a splitter of scikit-learn; or a sequence of ``(train rows, validation
        rows)``.
    x, y : array_like or None
        The data and its targets, which a splitter needs.

    Raises
    ------
    ConfigurationError
        If ``given`` is neither a splitter nor such a sequence, or does not fit the data.
    """
    length = num_rows(x, y)
    if callable(getattr(given, "split", None)):
        if length is None:
            raise ConfigurationError(
                f"folds={given!r} needs the data to split. Pass data=(x, y) or targets (one per row) to tune, or "
                "folds=list(splitter.split(x, y, groups))."
            )
        try:
            given = list(given.split(np.zeros(length) if x is None else x, y))
        except (TypeError, ValueError) as error:  # such as GroupKFold without groups
            raise ConfigurationError(
                f"folds={given!r} can't split the data: {error} If it needs more than the data and the targets, pass "
                "folds=list(splitter.split(x, y, groups))."
            ) from error
    if isinstance(given, Iterator):  # such as the iterator that a splitter's split returns
        given = list(given)
    if not isinstance(given, (list, tuple)) or len(given) < 2:
        raise ConfigurationError(
            f"folds={given!r:.80}: must be an object with split(x, y), or a list of at least two pairs (rows to train "
            "on, rows to hold out)."
        )
    folds = []
    for index, pair in enumerate(given):
        rows = [np.asarray(part) for part in pair] if isinstance(pair, (list, tuple)) else []
        if len(rows) != 2 or any(part.ndim != 1 or part.dtype.kind not in "iu" or not len(part) for part in rows):
            raise ConfigurationError(
                f"folds[{index}]={pair!r:.80}: must be a pair of arrays of row numbers, (train, validation)."
            )
        train, validation = rows[0].astype(np.int64), np.sort(rows[1].astype(np.int64))
        first, last = min(train.min(), validation[0]), max(train.max(), validation[-1])
        if first < 0 or (length is not None and last >= length):
            raise ConfigurationError(
                f"folds[{index}] contains row {first if first < 0 else last}, but rows are numbered from 0"
                + (f" to {length - 1}." if length else ".")
            )
        both = np.intersect1d(train, validation)
        if len(both):
            raise ConfigurationError(
                f"folds[{index}] trains on row {both[0]} and also holds it out. Remove these rows from one of the two."
            )
        folds.append(Fold(index, len(given), train, validation))
    return folds
