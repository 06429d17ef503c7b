"""Store predictions that don't fit in memory: each rank writes batches to a file, which is read in order."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainloop._support.platform import read_into
from trainloop.distributed.encoding import dumps, loads
from trainloop.train_loop.run.rows import Predictions, join_rows, on_cpu, row_count, rows_at, with_tuples_of_columns

_BATCHES_CACHED = 64
"""Number of batches kept in memory if rows are read in another order than batches."""


@contextmanager
def rows_folder() -> Iterator[Path]:
    """Create a folder under ``TMPDIR`` for files of rows. It is removed at the end; open files stay readable."""
    path = Path(tempfile.mkdtemp(prefix="trainloop-rows-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_rows(
    folder: Path,
    rank: int,
    batches: Iterator[tuple[int, Any, int]],
    get_predictions: Callable[[Any, int], Predictions],
) -> None:
    """Predict batch by batch into this rank's file.

    Parameters
    ----------
    folder : Path
        The folder of :func:`rows_folder`, the same on all ranks.
    rank : int
    batches, get_predictions
        As in :func:`~trainloop.train_loop.run.evaluating.predictions`.
    """
    places: list[tuple[int, int, int, int]] = []
    with open(folder / f"{rank}.rows", "xb") as file:
        for index, batch, size in batches:
            y_pred, y_true, metadata = on_cpu(get_predictions(batch, size))
            rows = *(with_tuples_of_columns([y], [size])[0] for y in (y_pred, y_true)), metadata
            data = dumps(rows)
            places.append((index, row_count(rows, size), file.tell(), len(data)))
            file.write(data)
    # Written after the rows: RowFiles searches for tables, and so finds only complete files.
    np.save(folder / f"{rank}.npy", np.array(places, np.int64).reshape(-1, 4))


class _Place(NamedTuple):
    file: int
    offset: int
    length: int
    size: int


class RowFiles:
    """The open files that :func:`write_rows` wrote on all ranks.

    Parameters
    ----------
    folder : Path
        Folder of the files; it may be removed afterwards.
    """

    def __init__(self, folder: Path) -> None:
        self._files: list[int] = []
        found: list[tuple[int, _Place]] = []
        for path in sorted(folder.glob("*.npy")):
            number = len(self._files)
            # Open the files now and read them by position: their names may be removed, and readers share no offset.
            self._files.append(os.open(path.with_suffix(".rows"), os.O_RDONLY | getattr(os, "O_BINARY", 0)))
            for index, size, offset, length in np.load(path).tolist():
                found.append((index, _Place(number, offset, length, size)))
        self._places = [place for _, place in sorted(found)]

    @property
    def sizes(self) -> list[int]:
        """Return the number of rows of each batch, in order."""
        return [place.size for place in self._places]

    def read(self, batch_index: int) -> Predictions:
        """Return the batch's ``(y_pred, y_true, metadata)``."""
        place = self._places[batch_index]
        data = bytearray(place.length)
        done = 0
        while done < place.length:
            # One call reads 1 GiB at most.
            done += read_into(self._files[place.file], memoryview(data)[done:], place.offset + done)
        # A pickle written by this run, in a folder that only this user may write to.
        rows: Predictions = loads(memoryview(data))
        return rows

    def close(self) -> None:
        files, self._files = self._files, []
        for file in files:
            with suppress(OSError):
                os.close(file)


class PredictionStream(Iterator[Predictions]):
    """Iterator over predictions, which ``predict_with_model(loader, stream=True)`` returns.

    Each item is ``(y_pred, y_true, metadata)`` of some rows, in the order of the loader. If the loader is not shuffled,
    the items are the batches of ``get_predictions``. If it is shuffled, each item has as many rows as the first batch.
    An item is read from disk when it is requested. The files are already unlinked and need no removal. Their space is
    freed when you close the stream or drop it (for example with ``break``), or when the process ends.

    Parameters
    ----------
    files : RowFiles or None
        Files with the rows; ``None`` if the rank gets no rows.
    order : sequence of int, optional
        Index of each row to yield, counted over all rows in batch order. Default: yield the batches in loader order.
    """

    def __init__(self, files: RowFiles | None, order: Sequence[int] | None = None) -> None:
        self._files = files
        self._items: Iterator[Predictions] = iter(())
        if files is not None:
            self._items = _batches(files) if order is None else _rows_in_order(files, np.asarray(order, np.int64))

    def __next__(self) -> Predictions:
        return next(self._items)

    def __enter__(self) -> PredictionStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Discard the remaining batches, and free their disk space."""
        if self._files is not None:
            self._files.close()
        self._files, self._items = None, iter(())


# These are functions, not methods: if its own iterator referred to a stream, only the garbage collector would free it.


def _batches(files: RowFiles) -> Iterator[Predictions]:
    for i in range(len(files.sizes)):
        yield files.read(i)
    files.close()


def _rows_in_order(files: RowFiles, order: npt.NDArray[np.int64]) -> Iterator[Predictions]:
    sizes = files.sizes
    ends: npt.NDArray[np.int64] = np.cumsum(sizes)
    cached_batches: OrderedDict[int, Predictions] = OrderedDict()
    for start in range(0, len(order), max(1, sizes[0])):
        parts = []
        for row in order[start : start + sizes[0]].tolist():
            i = int(np.searchsorted(ends, row, side="right"))
            if i not in cached_batches:  # batches were shuffled, but some samplers shuffle only nearby rows
                cached_batches[i] = files.read(i)
                if len(cached_batches) > _BATCHES_CACHED:
                    cached_batches.popitem(last=False)
            cached_batches.move_to_end(i)
            parts.append([rows_at(column, [row - (ends[i] - sizes[i])], sizes[i]) for column in cached_batches[i]])
        y_pred, y_true, metadata = (join_rows(list(column)) for column in zip(*parts))
        yield y_pred, y_true, metadata
    files.close()
