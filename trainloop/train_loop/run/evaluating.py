"""Pass over a whole loader for its loss or predictions: each sample counts once, and all modes give the same result.

Each rank takes whole batches of the sequence that one process would see. Results are joined in the order of this
sequence, so they depend neither on the number of ranks nor on which rank finishes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from trainloop._metrics import EpochEnd, Recorder
from trainloop._support.reduction import FunctionCall, SumRule, functional_losses, graph_of_losses
from trainloop.errors import ConfigurationError
from trainloop.optim.parameters import have_torchs_train, restore_modes, set_modes
from trainloop.train_loop.run.losses import BatchLoss
from trainloop.train_loop.run.rows import (
    Predictions,
    join_rows,
    on_cpu,
    row_count,
    rows_at,
    with_lists_of_rows,
    with_tuples_of_columns,
)

Gather = Callable[[Any], list[Any] | None]

# Each batch logs a few numbers, which would add up over a long loader. Reading the numbers waits for the device.
BATCHES_BETWEEN_READINGS = 128
_NOTHING: AbstractContextManager[Any] = nullcontext()


@contextmanager
def evaluating(*modules: nn.Module, parts: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Switch modules to evaluation mode without gradients; at the end, restore the mode of each.

    ``parts``: all modules, with those inside them, if they are known.
    """
    if parts is None:
        parts = [part for module in modules for part in module.modules()]
    before = [part.training for part in parts]
    only_flags = have_torchs_train(parts)
    try:  # Ctrl-C may interrupt the change of modes
        if only_flags and all(type(module).eval is nn.Module.eval for module in modules):
            set_modes(parts, [False] * len(parts))
        else:
            for module in modules:
                module.eval()
        with torch.no_grad():
            yield
    finally:
        # Predictions may have switched dropout on (Monte Carlo dropout).
        (set_modes if only_flags else restore_modes)(parts, before)


def mean_loss(
    batches: Iterator[tuple[int, Any, int]],
    get_loss: Callable[[Any, SumRule | None], BatchLoss],
    recorder: Recorder,
    name: str,
    sums: SumRule | None = None,
    *,
    weighs: bool = True,
    model: nn.Module | None = None,
    criterion: Any = None,
) -> EpochEnd:
    """Return the mean loss over a loader's samples (over units if the loss has a weight), and the logged values.

    Collective if there are several ranks: one exchange, at the end.

    Parameters
    ----------
    batches : iterator of (batch_index, batch, size)
        This rank's batches.
    get_loss : callable
        ``get_loss(batch, sums)``, as :func:`~trainloop.train_loop.run.losses.loss_of` returns it.
    recorder : Recorder
        An empty recorder; it is empty again afterwards.
    name : str
        Name of the loader, for messages.
    sums : SumRule, optional
        Rule that decides which losses are sums over samples.
    weighs : bool, optional
        False if there is only one batch, so that the weight of its loss need not be known.
    model : nn.Module, optional
        The model that ``get_loss`` calls.
    criterion : object
        The criterion that ``get_loss`` calls. Without one, each batch may call another function, as with several tasks.

    Raises
    ------
    ConfigurationError
        If the loader has no samples at all.
    """
    decides = sums
    calls_functions: list[FunctionCall] = []
    for number, (_, batch, size) in enumerate(batches, start=1):
        recorder.batch_size = size
        # Only a graph shows if get_loss divides the criterion's sum; the first batch's graph decides for all batches.
        looks = weighs and (number == 1 or criterion is None or calls_functions)
        functions = functional_losses(calls_functions, model) if looks else _NOTHING
        needs_graph = number == 1 and not getattr(sums, "certain", True)
        with graph_of_losses(model, criterion) if needs_graph else torch.no_grad(), functions:
            read = get_loss(batch, decides)
        if number == 1 and sums is not None and not read.explicit:
            decides = SumRule(certain=True, known=read.is_sum) if read.is_sum else None
        recorder.add_loss(*read.shown(size))
        if number % BATCHES_BETWEEN_READINGS == 0:
            recorder.compact()
    end = recorder.finish_epoch()
    if not end.losses:
        raise ConfigurationError(f"{name} has no samples, so there is no loss to average. Give it data.")
    return end


def keep_all_batches(y_batch: Any, collected: list[Any]) -> list[Any]:
    """Append the batch; this is the default ``collate_batch_pred_fn``."""
    collected.append(y_batch)
    return collected


def predictions(
    batches: Iterator[tuple[int, Any, int]],
    get_predictions: Callable[[Any, int], Predictions],
    gather: Gather,
    row_order: Callable[[list[int]], Sequence[int] | None],
    collate: Callable[[Any, list[Any]], list[Any]] = keep_all_batches,
    transform: Callable[[list[Any]], Any] = join_rows,
) -> Predictions:
    """Return ``(y_pred, y_true, metadata)`` of a loader, with rows in dataset order, on the ranks that get rows.

    Collective if ``gather`` is: one exchange, at the end.

    Parameters
    ----------
    batches : iterator of (batch_index, batch, size)
        This rank's batches.
    get_predictions : callable
        ``get_predictions(batch, size)`` -> the batch's (y_pred, y_true, metadata).
    gather : callable
        Returns every rank's object as a list, or ``None`` on a rank that gets no rows; called once.
    row_order : callable
        Takes the numbers of rows of all batches, in order; returns the permutation into dataset order, or ``None``.
    collate : callable
        ``collate(y_batch, collected) -> collected``, for each batch of y_pred and of y_true.
    transform : callable
        Takes the collected batches; returns the result.
    """
    mine = []
    for index, batch, size in batches:
        output = get_predictions(batch, size)
        mine.append((index, row_count(output, size), *on_cpu(output), size))
    parts = gather(mine)
    if parts is None:
        return None, None, None
    # Ranks took whole batches in turn, so sorting by batch number restores the order of one process.
    rows = sorted((row for part in parts for row in part), key=lambda row: row[0])
    sizes, samples = [row[1] for row in rows], [row[5] for row in rows]
    columns = [with_tuples_of_columns([row[i] for row in rows], samples) for i in (2, 3)]
    if any(isinstance(one, tuple) and isinstance(row[2], list) for one, row in zip(columns[0], rows)):
        sizes = samples  # the items of y_pred were counted, but they are columns
    *columns, metadata = (with_lists_of_rows(column, sizes) for column in (*columns, [row[4] for row in rows]))
    results: list[Any] = []
    for column in columns:
        collected: list[Any] = []
        for batch in column:
            collected = collate(batch, collected)
        results.append(transform(collected))
    results.append(join_rows(metadata, empty={}))
    order = row_order(sizes)
    y_pred, y_true, metadata = results if order is None else [rows_at(result, order, len(order)) for result in results]
    return y_pred, y_true, metadata
