"""Read batches of an in-memory ``TensorDataset`` by one indexing call per batch instead of one per sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.dataloader import default_collate

from trainloop.data.order.orders import batches_of, rest_of

_BATCHES_AT_ONCE = 256


class TensorRows:
    """Rows of a ``TensorDataset``, or of (nested) ``Subset`` of one, collated as ``default_collate`` would.

    Parameters
    ----------
    dataset : Dataset
    tensors : tuple of Tensor
        Tensors of the dataset: contiguous, on the CPU, without gradients.
    rows : Tensor or None
        For a subset, the row of each of its indices; None for the full dataset.
    pinned : bool
        Return batches in pinned memory, from which a GPU can copy while the host continues.
    """

    def __init__(
        self, dataset: Dataset[Any], tensors: tuple[Tensor, ...], rows: Tensor | None, pinned: bool = False
    ) -> None:
        self._dataset = dataset
        self._tensors = tensors
        self._rows = rows
        self._pinned = pinned

    @classmethod
    def of(cls, loader: Any) -> TensorRows | None:
        """Return the rows of a loader's dataset; None if the loader does not just index these rows."""
        pinned = _pins(loader)
        if not loads_batches_here(loader, pinned=pinned) or loader.collate_fn is not default_collate:
            return None
        if default_collate_fn_map[Tensor].__module__ != default_collate.__module__:  # the script's own
            return None
        dataset, rows = loader.dataset, None
        while type(dataset) is Subset:
            indices = dataset.indices
            if not isinstance(indices, (list, range, tuple, np.ndarray, Tensor)):  # a pandas column finds by labels
                return None
            try:
                inner = torch.as_tensor(list(indices) if isinstance(indices, range) else indices, device="cpu")
            except (TypeError, ValueError, RuntimeError):
                return None
            if inner.dtype != torch.int64 or inner.dim() != 1:
                return None
            # Negative indices count from the end. For indices out of range, the dataset raises its own error.
            length = len(dataset.dataset)  # type: ignore[arg-type]  # an indexed dataset has a length
            if inner.numel() and not -length <= int(inner.min()) <= int(inner.max()) < length:
                return None
            inner = torch.where(inner < 0, inner + length, inner)
            rows = inner if rows is None else inner.index_select(0, rows)
            dataset = dataset.dataset
        if type(dataset) is not TensorDataset or not all(map(_is_plain_tensor, dataset.tensors)):
            return None
        return cls(loader.dataset, dataset.tensors, rows, pinned)

    def slice(self, start: int, stop: int) -> list[Tensor]:
        """Return a copy of the rows ``start`` to ``stop`` as a batch."""
        if self._rows is None:
            parts = [tensor[start:stop] for tensor in self._tensors]
            return [part.pin_memory() if self._pinned else part.clone() for part in parts]
        index = self._rows[start:stop]
        return self._pinned_rows(index) if self._pinned else [part.index_select(0, index) for part in self._tensors]

    def take(self, indices: Tensor, batch_size: int) -> Iterator[list[Tensor]]:
        """Yield the indexed rows (int64 indices, not negative) in batches; the last batch may be shorter."""
        tensors, rows, pinned = self._tensors, self._rows, self._pinned
        at_once = batch_size * _BATCHES_AT_ONCE
        # In blocks: split() of a whole epoch would create a view for each batch at once.
        for start in range(0, len(indices), at_once):
            chunk = indices[start : start + at_once]
            for index in (chunk if rows is None else rows.index_select(0, chunk)).split(batch_size):
                yield self._pinned_rows(index) if pinned else [tensor.index_select(0, index) for tensor in tensors]

    def take_list(self, found: Iterable[Any]) -> list[Tensor]:
        """Return the batch for the indices that a batch sampler has yielded."""
        indices: Any = found if isinstance(found, (np.ndarray, Tensor)) else list(found)
        if self._rows is None and self._are_consecutive(indices):  # the usual case of an evaluation
            return self.slice(indices[0], indices[-1] + 1)
        try:
            index = torch.as_tensor(indices, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            index = None
        if index is None or index.dtype != torch.int64 or index.dim() != 1:  # slices, or tuples of a row and a column
            batch = default_collate([self._dataset[one] for one in indices])
        else:
            # Not index_select: negative indices count from the end, like in the dataset.
            rows = index if self._rows is None else self._rows[index]
            batch = [tensor[rows] for tensor in self._tensors]
        return [tensor.pin_memory() for tensor in batch] if self._pinned else batch

    def _are_consecutive(self, indices: Any) -> bool:
        if {*map(type, indices)} != {int} or indices[0] < 0:  # a sampler may yield tensors
            return False
        consecutive = range(indices[0], indices[0] + len(indices))
        return consecutive.stop <= min(tensor.shape[0] for tensor in self._tensors) and indices == [*consecutive]

    def _pinned_rows(self, index: Tensor) -> list[Tensor]:
        batch = []
        for tensor in self._tensors:
            rows = torch.empty((len(index), *tensor.shape[1:]), dtype=tensor.dtype, device="cpu", pin_memory=True)
            batch.append(torch.index_select(tensor, 0, index, out=rows))
        return batch


def _is_plain_tensor(tensor: Tensor) -> bool:
    # For other tensors, index_select could differ from stacked rows in values, strides or autograd.
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _pins(loader: Any) -> bool:
    """Return True if a loader copies its batches into the memory from which CUDA copies fastest."""
    return (
        getattr(loader, "pin_memory", None) is True
        and not getattr(loader, "pin_memory_device", "")
        and torch.cuda.is_available()
    )


def loads_batches_here(loader: Any, *, pinned: bool = False) -> bool:
    """Return True if this process itself collates each batch from the indices that ``batch_sampler`` yields.

    ``pinned``: the caller copies batches into pinned memory where the loader would.
    """
    return (
        type(loader) is DataLoader
        and not loader.num_workers
        and (pinned or not loader.pin_memory)
        and not loader.timeout
        and loader.batch_sampler is not None
    )


def draw_base_seed(loader: DataLoader[Any]) -> None:
    """Draw the workers' base seed as ``iter(loader)`` does: before other draws, and even without workers."""
    generator = loader.generator
    # Without a generator, torch draws on its default device.
    device = None if generator is None else generator.device
    torch.empty((), dtype=torch.int64, device=device).random_(generator=generator)


def loader_batches(rows: TensorRows, loader: DataLoader[Any], first: int = 0) -> Iterator[list[Tensor]]:
    """Return one epoch of a loader: the same batches and the same random draws as ``iter(loader)``.

    Parameters
    ----------
    rows : TensorRows
        ``TensorRows.of(loader)``.
    loader : DataLoader
        A loader with any batch sampler.
    first : int
        Index of the first batch; those before it are not read.
    """
    batch_sampler: Any = loader.batch_sampler
    batches_of_indices = batches_of(batch_sampler)  # first, like torch: a user's sampler may draw here
    draw_base_seed(loader)
    if type(batch_sampler) is BatchSampler:
        sampler: Any = batch_sampler.sampler
        size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
        if type(sampler) is SequentialSampler:
            length = len(sampler)
            stop = length - length % size if drop_last else length
            for start in range(first * size, stop, size):
                yield rows.slice(start, min(start + size, stop))
            return
        # Several permutations, or a part of one, are left to the sampler.
        one = type(sampler) is RandomSampler and sampler.num_samples == len(sampler.data_source)
        if one and not sampler.replacement:
            yield from _shuffled(rows, sampler, size, drop_last, first)
            return
    for indices in islice(rest_of(batches_of_indices), first, None):
        yield rows.take_list(indices)


def _shuffled(
    rows: TensorRows, sampler: RandomSampler, size: int, drop_last: bool, first: int
) -> Iterator[list[Tensor]]:
    generator = sampler.generator
    if generator is None:
        # device=None: on the default device, as torch's sampler draws it
        seed = int(torch.empty((), dtype=torch.int64, device=None).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    length = sampler.num_samples
    order = torch.randperm(length, generator=generator, device=generator.device).cpu()
    stop = length - length % size
    yield from rows.take(order[first * size : stop], size)
    # RandomSampler draws another permutation when it is read beyond its end, which advances the user's generator.
    if sampler.generator is not None:
        torch.randperm(length, generator=generator, device=generator.device)
    if stop < length and not drop_last:
        yield from rows.take(order[max(stop, first * size) :], size)
