"""Loss and predictions over a whole loader, each sample once, the same in every mode.

Each rank takes whole batches of the sequence one process would see; what they gave is put together in that order, so
that neither the number of ranks nor the order in which they finish shows in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainloop.errors import ConfigurationError
from trainloop.metrics import EpochEnd, Recorder
from trainloop.optim import MultiLoss

__all__ = ["Predictions", "evaluating", "join_rows", "keep_all_batches", "mean_loss", "predictions"]

Predictions = tuple[Any, Any, Any]
Gather = Callable[[Any], list[Any]]

# What a batch logs is a few numbers, which would add up over a long loader; reading them waits for the device.
BATCHES_BETWEEN_READINGS = 128


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module is in the mode it was in, frozen ones included."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def mean_loss(
    batches: Iterator[tuple[int, Any, int]], get_loss: Callable[[Any], Any], recorder: Recorder, name: str
) -> EpochEnd:
    """Mean loss over all samples of a loader (over all units where the loss comes with a weight), and what was logged.

    Collective where there are several ranks: one exchange, at the end.

    Parameters
    ----------
    batches : iterator of (batch_index, batch, size)
        This rank's batches.
    get_loss : callable
        ``get_loss(batch)`` -> loss, ``(loss, weight)`` or MultiLoss.
    recorder : Recorder
        An empty one; emptied again.
    name : str
        Of the loader, for messages.

    Raises
    ------
    ConfigurationError
        If the loader has no samples at all.
    """
    for number, (_, batch, size) in enumerate(batches, start=1):
        recorder.batch_size = size
        loss, weight = split_loss(get_loss(batch))
        recorder.add_loss(loss, size if weight is None else weight)
        if number % BATCHES_BETWEEN_READINGS == 0:
            recorder.compact()
    end = recorder.finish_epoch()
    if not end.losses:
        raise ConfigurationError(f"{name} has no samples, so there is no loss to average. Give it data.")
    return end


def predictions(
    batches: Iterator[tuple[int, Any, int]],
    get_predictions: Callable[[Any, int], Predictions],
    gather: Gather | None,
    row_order: Callable[[list[int]], Sequence[int] | None],
    collate: Callable[[Any, list[Any]], list[Any]] | None = None,
    transform: Callable[[list[Any]], Any] | None = None,
) -> Predictions:
    """``(y_pred, y_true, metadata)`` of a whole loader, rows in dataset order, on every rank.

    Collective where ``gather`` is given.

    Parameters
    ----------
    batches : iterator of (batch_index, batch, size)
        This rank's batches.
    get_predictions : callable
        ``get_predictions(batch, size)`` -> the batch's (y_pred, y_true, metadata).
    gather : callable, optional
        Every rank's object as a list, on every rank.
    row_order : callable
        From the sizes of all batches in order to the permutation that puts rows into dataset order, or ``None``.
    collate : callable, optional
        ``collate(y_batch, collected) -> collected``, for each batch of y_pred and of y_true. Default: append.
    transform : callable, optional
        From what was collected to what is returned. Default: rows of tensors, arrays, lists and nested ones joined.
    """
    mine = [(index, size, *on_cpu(get_predictions(batch, size))) for index, batch, size in batches]
    everyone = [mine] if gather is None else gather(mine)
    rows = sorted((row for part in everyone for row in part), key=lambda row: row[0])
    sizes = [row[1] for row in rows]
    collected: list[Any] = []
    for column in (2, 3):
        values: list[Any] = []
        for row in rows:
            values = [*values, row[column]] if collate is None else collate(row[column], values)
        collected.append(join_rows(values) if transform is None else transform(values))
    collected.append(join_rows([row[4] for row in rows], empty={}))
    order = row_order(sizes)
    if order is not None:
        collected = [_reordered(value, order) for value in collected]
    return collected[0], collected[1], collected[2]


def keep_all_batches(y_batch: Any, collected: list[Any]) -> list[Any]:
    """The usual ``collate_batch_pred_fn``: append the batch."""
    collected.append(y_batch)
    return collected


def split_loss(output: Any) -> tuple[Any, Any]:
    """A loss and its weight, ``None`` where ``get_loss`` gave no weight."""
    if isinstance(output, tuple):
        if len(output) != 2:
            raise ConfigurationError(
                f"get_loss returned a tuple of {len(output)}: return a loss, or (loss, weight), for instance with the "
                "number of tokens the loss is a mean over."
            )
        return output
    if not isinstance(output, (Tensor, MultiLoss)):
        raise ConfigurationError(
            f"get_loss returned a {type(output).__name__}: return a 0-d tensor, (loss, weight) or a MultiLoss."
        )
    return output, None


def join_rows(batches: list[Any], empty: Any = None) -> Any:
    """Batches of rows as one: tensors and arrays concatenated, lists chained, dicts and tuples by their entries.

    Tensors whose rows differ in shape become a list of rows. Dtypes are kept.

    Examples
    --------
    >>> join_rows([{"id": [1, 2]}, {"id": [3]}])
    {'id': [1, 2, 3]}
    """
    if not batches:
        return torch.empty(0) if empty is None else empty
    first = batches[0]
    if all(batch is None for batch in batches):
        return None
    if isinstance(first, Tensor):
        if first.ndim == 0:
            return torch.stack(batches)
        if all(batch.shape[1:] == first.shape[1:] for batch in batches):
            return torch.cat(batches)
        return [row for batch in batches for row in batch]
    if isinstance(first, np.ndarray):
        if first.ndim == 0:
            return np.stack(batches)
        if all(batch.shape[1:] == first.shape[1:] for batch in batches):
            return np.concatenate(batches)
        return [row for batch in batches for row in batch]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for batch in batches for key in batch)
        joined = {key: join_rows([batch[key] for batch in batches if key in batch]) for key in keys}
        return joined if type(first) is not dict or joined or empty is None else empty
    if isinstance(first, tuple):
        parts = [join_rows(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, list):
        return [row for batch in batches for row in batch]
    return list(batches)  # one value a batch: numbers, text, objects


def on_cpu(value: Any) -> Any:
    """The same nested value with its tensors on the CPU, so that predictions don't fill the device."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [on_cpu(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [on_cpu(item) for item in value]
    return value


def _reordered(value: Any, order: Sequence[int]) -> Any:
    """Rows in another order, where the value has as many rows; else as it is."""
    if isinstance(value, Tensor) and value.ndim and len(value) == len(order):
        return value[torch.as_tensor(order)]
    if isinstance(value, np.ndarray) and value.ndim and len(value) == len(order):
        return value[np.asarray(order)]
    if isinstance(value, list) and len(value) == len(order):
        return [value[i] for i in order]
    if isinstance(value, Mapping):
        return {key: _reordered(item, order) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_reordered(item, order) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
