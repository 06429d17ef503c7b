"""Split batches by columns: each rank reads every batch, and takes a block of the batch's columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from trainloop._support.nested import map_parts, parts_of
from trainloop._support.sharding import shard_sizes
from trainloop._support.signals import started
from trainloop.devices import whole_number
from trainloop.errors import ConfigurationError


class SplitBatches:
    """A loader whose batches are split over the ranks by columns, so that each column always stays on the same rank.

    In ``ddp`` a loader's batches, or the samples of each global batch, are distributed to the ranks in turn. This is
    wrong for a model that carries state from batch to batch (truncated backpropagation through time), because the state
    after a chunk of the sequence is needed for the next chunk. With this class, every rank reads every batch, in order,
    and takes the same block of columns from each batch. With any number of ranks, the training is then the same as in
    one process.

    Parameters
    ----------
    loader : iterable of batches
        A ``DataLoader`` or another object that can be iterated repeatedly. Each batch contains the columns of all
        ranks.
    dim : int
        Dimension of the columns, in every tensor and array of a batch: 1 for chunks shaped ``(time, column)``, 0
        for ``(column, time)``. One-dimensional tensors (such as lengths) and lists must have an entry for each column.
        Numbers, strings and 0-d tensors are passed to all ranks.

    Raises
    ------
    ConfigurationError
        If the loader can't be iterated or ``dim`` is not a dimension; in training, if the tensors of a batch have
        different numbers of columns.

    Notes
    -----
    Columns count as samples: losses are weighted by the number of columns. If ``n`` columns are split over ``w`` ranks,
    the first ``n % w`` ranks have one more column than the others. Each rank loads whole batches, so use this for data
    that is cheap to load.

    Examples
    --------
    >>> chunks = [(torch.zeros(35, 20), torch.zeros(35, 20)) for _ in range(3)]  # (time, column)
    >>> [data.shape for data, target in SplitBatches(chunks, dim=1)][0]
    torch.Size([35, 20])
    """

    def __init__(self, loader: Iterable[Any], dim: int = 1) -> None:
        if isinstance(loader, Iterator) or not hasattr(loader, "__iter__"):
            raise ConfigurationError(
                f"SplitBatches(loader={loader!r}): must be a DataLoader, or another iterable whose __iter__ starts "
                "from the first batch each time."
            )
        number = whole_number(dim)
        if number is None or number < 0:
            raise ConfigurationError(f"SplitBatches(dim={dim!r}): must be an int of 0 or more (the column dimension).")
        self.loader = loader
        self.dim = number

    def __iter__(self) -> Iterator[Any]:
        return started(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # raises the loader's error if it has no length

    @property
    def num_workers(self) -> int:
        """Number of workers of the loader, on each rank."""
        return getattr(self.loader, "num_workers", 0)

    def columns(self, batch: Any) -> int:
        """Return the number of columns of a batch.

        Raises
        ------
        ConfigurationError
            If the batch has no columns, or its tensors have different numbers of columns.
        """
        counts = dict(_counts(batch, self.dim))
        if len(counts) != 1 or None in counts:
            found = ", ".join(counts.values()) or "no tensor"
            raise ConfigurationError(
                f"SplitBatches(dim={self.dim}) can't split this batch by columns: it contains {found}. All tensors "
                f"must have the same number of columns, in dimension {self.dim} or in their only dimension. For "
                "example, give a target the shape of its input, and flatten it in get_loss."
            )
        (columns,) = counts
        assert columns is not None  # checked above
        return columns

    def sizes(self, columns: int, world_size: int) -> tuple[int | None, ...]:
        """Return how many columns of a batch each rank gets; None for a rank without a part."""
        return shard_sizes(columns, world_size)

    def part(self, batch: Any, columns: int, rank: int, world_size: int) -> Any:
        """Return one rank's columns of a batch."""
        # Return the same batch object, without a copy.
        if world_size == 1:
            return batch
        sizes = self.sizes(columns, world_size)
        start = sum(size or 0 for size in sizes[:rank])
        return _narrowed(batch, self.dim, slice(start, start + (sizes[rank] or 0)))


def _axis(part: Any, dim: int) -> int | None:
    """Return the dimension of the columns in a tensor or array; None if it has no dimensions."""
    return None if part.ndim == 0 else 0 if part.ndim == 1 else dim


def _counts(batch: Any, dim: int) -> Iterator[tuple[int | None, str]]:
    """Yield each batch part's number of columns (None without the dimension), and a description of the part."""
    if isinstance(batch, (Tensor, np.ndarray)):
        axis = _axis(batch, dim)
        if axis is not None:
            yield (
                batch.shape[axis] if axis < batch.ndim else None,
                f"a {type(batch).__name__} of shape {tuple(batch.shape)}",
            )
    elif _is_column(batch):
        yield len(batch), f"a list of {len(batch)}"
    else:
        for part in parts_of(batch) or ():
            yield from _counts(part, dim)


def _is_column(part: Any) -> bool:
    """Return True if a part of a batch is a list with one value for each column."""
    inner = (Tensor, np.ndarray, Mapping, tuple, list)
    return isinstance(part, list) and bool(part) and not any(isinstance(value, inner) for value in part)


def _narrowed(batch: Any, dim: int, block: slice) -> Any:
    if isinstance(batch, (Tensor, np.ndarray)):
        axis = _axis(batch, dim)
        if axis is None:
            return batch
        part = batch[(slice(None),) * axis + (block,)]
        # Contiguous like whole batches, so that view(-1) works.
        return part.contiguous() if isinstance(part, Tensor) else np.ascontiguousarray(part)
    if _is_column(batch):
        return batch[block]
    return map_parts(lambda part: _narrowed(part, dim, block), batch)
