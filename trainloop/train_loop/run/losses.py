"""Read what ``get_loss`` returns or yields: a loss, maybe with a weight; explain torch's errors about a step.

This module separates a loss from its weight, and rejects it if it can't be differentiated.
:mod:`trainloop.train_loop.training.gradients` computes the gradients.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainloop._support.reduction import SumRule, divisor_of
from trainloop.data.batch.batches import note_batch
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss
from trainloop.optim.losses import check_weight, plain_number, split_yielded, weighed
from trainloop.parallel.sharded.misuse import explain_sharded, used_outside_of_forward
from trainloop.parallel.sharded.shards import is_sharded


class BatchLoss(NamedTuple):
    """The loss of a batch, and what it weighs in a mean over batches."""

    loss: Any
    """The loss, or a :class:`MultiLoss`."""
    units: Any = None
    """Units over which the loss is a mean: what ``get_loss`` returned as its weight, or the divisor of the criterion
    (:mod:`trainloop._support.reduction`); a dict for those parts of a ``MultiLoss`` that have units of their own.
    ``None``: the batch's samples."""
    explicit: bool = False
    """True if ``get_loss`` returned the weight."""
    is_sum: bool | frozenset[str] = False
    """True if the loss is a sum over the batch's samples, rather than a mean; the names of those parts of a
    ``MultiLoss`` that are, if others are means."""

    def shown(self, size: int) -> tuple[Any, Any]:
        """Return the mean loss of a batch of ``size`` samples, and its weight, for the history.

        The weight is an int if it is the number of samples, and otherwise a float or a tensor.
        """
        loss = self.loss
        if self.is_sum is True:
            loss = loss.detach() / max(size, 1)
        elif self.is_sum:
            loss = loss.detach().map(lambda part: part / max(size, 1), self.is_sum)
        if isinstance(self.units, dict):
            return loss, {name: _as_units(self.units[name]) if name in self.units else size for name in loss}
        units = self.units
        return loss, size if units is None else float(units) if type(units) is int else units


def _as_units(number: Any) -> Any:
    return float(number) if type(number) is int else number


def read_loss(output: Any, size: int, sums: SumRule | None = None) -> BatchLoss:
    """Return what ``get_loss`` returned for a batch of ``size`` samples.

    Parameters
    ----------
    output : Tensor, MultiLoss or tuple
        A loss, or ``(loss, weight)``.
    size : int
    sums : SumRule, optional
        Decides whether a loss is a sum over samples.
    """
    if isinstance(output, Tensor):
        loss = output
        if loss.numel() != 1:
            _check_scalar(loss)
    else:
        loss, weight = split_loss(output)
        if weight is not None:
            return BatchLoss(weighed(loss, weight), weight, True)
    is_sum = sums is not None and sums(loss)
    units = divisor_of(loss) if isinstance(loss, Tensor) else weights_of_parts(loss)
    return BatchLoss(loss, units, False, is_sum)


def split_loss(output: Any) -> tuple[Any, Any]:
    """Return a loss and its weight; the weight is ``None`` if ``get_loss`` returned no weight."""
    if isinstance(output, tuple):
        if len(output) != 2:
            raise ConfigurationError(
                f"get_loss returned a tuple of length {len(output)}. Return a loss, or (loss, weight), where weight "
                "is, for example, the number of tokens."
            )
        loss, weight = output
        if weight is not None:
            check_weight(weight)
            weight = plain_number(weight)
        if weight is not None and isinstance(loss, MultiLoss) and loss.weighted:
            raise ConfigurationError(
                "get_loss returned (MultiLoss, weight), but the MultiLoss already has weights for "
                f"{', '.join(loss.weighted)}. Return the MultiLoss alone, or give it losses without weights."
            )
    else:
        loss, weight = output, None
    # A method that returns super().get_loss(...), which contains a yield.
    if isinstance(loss, Generator):
        raise ConfigurationError(
            "get_loss returned a generator, but does not contain yield itself. Write it with yield, for example `yield "
            "from super().get_loss(...)`."
        )
    if not isinstance(loss, (Tensor, MultiLoss)):
        raise ConfigurationError(
            f"get_loss returned a {type(loss).__name__}{' as the loss' if weight is not None else ''}. "
            "Return a 0-d tensor, (loss, weight) or a MultiLoss. To skip a batch, return (loss, 0) with a loss of zero "
            "that is computed from the model's output, such as output.sum() * 0."
        )
    _check_scalar(loss)
    return loss, weight


def weights_of_parts(losses: MultiLoss) -> dict[str, Any] | None:
    """Return the weights of the losses that have their own; ``None`` if all are means over samples."""
    divisors = {name: divisor_of(loss) for name, loss in losses.items()}
    return {name: divisor for name, divisor in divisors.items() if divisor is not None} or None


def _check_scalar(loss: Any) -> None:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ConfigurationError(
            f"get_loss returned a tensor of shape {tuple(loss.shape)}. Return a 0-d loss, for example its .mean()."
        )


@contextmanager
def explained_evaluation(batch: Any) -> Iterator[None]:
    """Add to an error in an evaluation the batch's shapes, and to an error about the loss how to fix it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigurationError) and str(error).startswith(("get_loss returned", "get_loss yielded")):
            error.args = (f"{error} {_IN_EVALUATION}",)
        elif isinstance(error, RuntimeError) and "does not require grad" in str(error):
            error.args = (f"{error}. {_NEEDS_GRADIENTS}",)
        elif isinstance(error, RuntimeError) and "requires grad" in str(error) and torch.is_grad_enabled():
            error.args = (f"{error} {_HAS_GRAPH}",)
        else:
            note_batch(error, "In an evaluation", [batch])
        raise


_BEFORE = "tl.preflight() finds this in seconds, before an epoch of training."
_IN_EVALUATION = (
    "This was in an evaluation, where the model is in eval() mode and get_loss_eval is called (by default, get_loss). "
    f"If the model returns something else in this mode, write a get_loss_eval that returns a loss. {_BEFORE}"
)
_NEEDS_GRADIENTS = (
    "An evaluation runs under torch.no_grad(). If get_loss_eval or get_predictions needs gradients, compute them "
    f"within `with torch.enable_grad():`. {_BEFORE}"
)
_HAS_GRAPH = (
    "This was in the first batch of an evaluation, which has a graph if the criterion has reduction='sum': the graph "
    "shows if get_loss_eval divides the sum. Declare it in the model's class (loss_reduction = 'sum' or, if get_loss "
    "and get_loss_eval divide the criterion's sum, 'mean'): then evaluations have no graph. Or call detach()."
)


def refuse_constant(loss: Any) -> None:
    """Raise an error for a loss of ``fsdp`` that depends on no gathered parameter: a constant, or one of shards.

    Backward of such a loss exchanges nothing: the other ranks would wait for this one.
    """
    parts = loss.values() if isinstance(loss, MultiLoss) else (loss,)
    if any(is_sharded(part) for part in parts):
        raise used_outside_of_forward("get_loss returned a loss that is a DTensor.")
    if all(part.requires_grad and part.grad_fn is None for part in parts):
        raise ConfigurationError(
            "gpu_mode='fsdp': get_loss returned a loss that does not depend on the model's parameters. The other ranks "
            "would wait for this rank's part of their gradients. To skip a batch, call the model as well, and return "
            "(output.sum() * 0, 0)."
        )


def explain_backward(loss: Any, error: Exception) -> None:
    """Called after an error of backward: raise an error about ``get_loss`` if its loss can't be differentiated."""
    _check_scalar(loss)
    explain_sharded(error)
    if isinstance(loss, Tensor) and not loss.requires_grad:
        raise ConfigurationError(
            "get_loss returned a loss without a graph, so it can't be differentiated. Compute it from the model's "
            "output, without .detach(), .item() or torch.no_grad(), with parameters that require gradients."
        )


def explain_freed_graph(error: Exception) -> None:
    """Called after an error of backward: raise an error about ``get_loss`` if its graph was freed by an earlier one."""
    if "a second time" in str(error):
        raise ConfigurationError(
            "the loss depends on the graph of an earlier batch, which has been freed: each batch has its own backward "
            "pass, also with grad_accumulation. If an attribute keeps a tensor from batch to batch, such as a hidden "
            "state, detach() it at the end of get_loss. To differentiate through several batches, let the loader yield "
            "them as one. (Or get_loss itself has called backward() of a loss that it returns: the loop does this.) "
            f"torch says: {error}"
        ) from error


def explain_no_criterion(error: TypeError) -> None:
    """If ``get_loss`` called None, add to the error's text that the loop has no criterion."""
    text = str(error)
    if "'NoneType' object is not callable" not in text:
        return
    # A thread of dp raises a new error, whose text has the original traceback.
    called = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if called & {"get_loss", "get_loss_eval"} or "in get_loss" in text:
        # Python 3.10 has no add_note.
        error.args = (
            f"{text}. get_loss was given criterion=None, since the loop has no criterion. If get_loss called it, "
            "pass TrainLoop(criterion=nn.CrossEntropyLoss()).",
        )


def explain_batch_of_one(error: ValueError, *, ranks: bool, replicas: bool, synchronized: bool) -> None:
    """Add a remedy to torch's error about a BatchNorm that got one sample.

    Parameters
    ----------
    ranks, replicas : bool
        True if several ranks, or several replicas, have parts of a batch.
    synchronized : bool
        True if BatchNorm's statistics are those of all ranks.
    """
    if "Expected more than 1 value per channel when training" not in str(error):
        return
    part, also = "", ""
    if replicas:
        part = ", or the part of it that a replica gets"
        also = ", or gpu_mode='ddp' with sync_batchnorm=True to compute the statistics over all devices"
    elif ranks and not synchronized:
        part = ", or the part of it that a rank gets"
        also = ", or TrainLoop(sync_batchnorm=True) to compute the statistics over all ranks"
    error.args = (
        f"{error}. In training, BatchNorm can't compute statistics of a batch with one sample. The last batch of an "
        f"epoch may be this small{part}. Use DataLoader(drop_last=True) to leave that batch out{also}.",
    )


# -- a get_loss that yields its losses ---------------------------------------------------------------------------------


class Yielded(NamedTuple):
    """One loss of a ``get_loss`` that yields its losses."""

    optimizer: int | str | tuple[int | str, ...] | None
    """Name or index of the loss's optimizer, or several of them; ``None`` if there is only one."""
    read: BatchLoss


def read_yielded(item: Any, size: int, sums: SumRule | None = None) -> Yielded:
    """Read an item that ``get_loss`` yielded: a loss or ``(loss, weight)``, maybe after its optimizers' names."""
    optimizer, item = split_yielded(item)
    read = read_loss(item, size, sums)
    if not isinstance(read.loss, Tensor):
        raise ConfigurationError(
            "get_loss yielded a MultiLoss. Yield the losses one by one, each after its optimizer's name, as in `yield "
            "'generator', loss`, or return the MultiLoss."
        )
    return Yielded(optimizer, read)


def joined_losses(losses: Sequence[Yielded], size: int) -> BatchLoss:
    """Return the losses that one batch of ``size`` samples yielded, averaged for each optimizer, with their units.

    The units are ``None`` if no loss has any, and a dict if there are losses for several optimizers.
    """
    groups: dict[str | None, list[Tensor]] = {}
    weights: dict[str | None, Any] = {}
    summed: set[Any] = set()
    for which, read in losses:
        optimizer = "_and_".join(map(str, which)) if isinstance(which, tuple) else None if which is None else str(which)
        groups.setdefault(optimizer, []).append(read.loss.reshape(()))
        if read.units is not None:
            weights.setdefault(optimizer, read.units)
        if read.is_sum:
            summed.add(optimizer)
    if not groups:
        raise ConfigurationError(
            "get_loss yielded no loss for a batch. It contains yield, so it must yield at least one per batch."
        )
    # Use mean(): a division would look like the division of a sum over samples; see trainloop._support.reduction.
    means = {optimizer: torch.stack(group).mean() for optimizer, group in groups.items()}
    if None not in means:
        is_sum = frozenset(summed) if len(summed) < len(means) else True
        return BatchLoss(MultiLoss(means), weights or None, False, is_sum)  # type: ignore[arg-type]  # None isn't in it
    if len(means) > 1:
        names = ", ".join(repr(name) for name in means if name is not None)
        raise ConfigurationError(
            f"get_loss yielded some losses with an optimizer ({names}), and others without one. Put the optimizer's "
            "name or index before each loss, as in `yield 'generator', loss`, or before none."
        )
    return BatchLoss(means[None], weights.get(None), False, bool(summed))


def loss_of(output: Any, size: int, sums: SumRule | None = None) -> BatchLoss:
    """Return the loss of a batch of ``size`` samples; run a ``get_loss`` that yields to its end."""
    if not isinstance(output, Generator):
        return read_loss(output, size, sums)
    yielded = [read_yielded(item, size, sums) for item in output]
    with torch.enable_grad():  # in an evaluation, a loss may have a graph
        joined = joined_losses(yielded, size)
    return joined if sums is None or sums.known is None else joined._replace(is_sum=sums.known)
