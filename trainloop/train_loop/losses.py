"""The results of ``get_loss``: a loss, a loss with its weight, or losses that it yields one by one.

A loss is told apart from its weight here, and refused where it can't be differentiated;
:mod:`trainloop.train_loop.gradients` makes gradients of it.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainloop._support.reduction import divisor_of
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss
from trainloop.parallel.misuse import explain_sharded

__all__ = [
    "ONE_SAMPLE",
    "Yielded",
    "explain_batch_of_one",
    "explain_backward",
    "explain_no_criterion",
    "joined_losses",
    "per_sample",
    "run_through",
    "split_loss",
    "split_yielded",
    "weights_of_parts",
]


def per_sample(loss: Any, size: int) -> Any:
    """The mean, for the history, of a loss that is a sum over ``size`` samples."""
    return loss.detach() / max(size, 1)


def split_loss(output: Any) -> tuple[Any, Any]:
    """A loss and its weight, ``None`` where ``get_loss`` gave no weight."""
    if isinstance(output, tuple):
        if len(output) != 2:
            raise ConfigurationError(
                f"get_loss returned a tuple of {len(output)}: return a loss, or (loss, weight), for instance with the "
                "number of tokens the loss is a mean over."
            )
        loss, weight = output
    else:
        loss, weight = output, None
    # A subclass that returns super().get_loss(...) of a get_loss with yield in it.
    if isinstance(loss, Generator):
        raise ConfigurationError(
            "get_loss returned a generator, but is none itself, so that it was called as any other method. Write it "
            "with yield: `yield from super().get_loss(...)`, for instance."
        )
    if not isinstance(loss, (Tensor, MultiLoss)):
        raise ConfigurationError(
            f"get_loss returned a {type(loss).__name__}{' as the loss' if weight is not None else ''}: "
            "return a 0-d tensor, (loss, weight) or a MultiLoss."
        )
    _check_scalar(loss)
    return loss, weight


def weights_of_parts(losses: MultiLoss, size: int) -> dict[str, Any] | None:
    """Return the weight of each loss, ``None`` if all are means over their ``size`` samples."""
    divisors = {name: divisor_of(loss) for name, loss in losses.items()}
    if all(divisor is None for divisor in divisors.values()):
        return None
    return {name: size if divisor is None else divisor for name, divisor in divisors.items()}


def _check_scalar(loss: Any) -> None:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ConfigurationError(
            f"get_loss returned a tensor of shape {tuple(loss.shape)}: return a 0-d loss, for instance its .mean()."
        )


def explain_backward(loss: Any, error: RuntimeError) -> None:
    """After an error of backward: raise one that names ``get_loss`` where its loss can't be differentiated."""
    _check_scalar(loss)
    explain_sharded(error)
    if isinstance(loss, Tensor) and not loss.requires_grad:
        raise ConfigurationError(
            "get_loss returned a loss without a graph, so there is nothing to differentiate: compute it from the "
            "model's output, without .detach(), .item() or torch.no_grad(), with parameters that require gradients."
        )


def explain_no_criterion(error: TypeError) -> None:
    """Add to the text of a call of None inside ``get_loss`` that the loop was made without a criterion."""
    text = str(error)
    if "'NoneType' object is not callable" not in text:
        return
    # From a thread of dp comes an error of its own, with the first one's traceback in its text.
    called = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if called & {"get_loss", "get_loss_eval"} or "in get_loss" in text:
        # Python 3.10 has no add_note.
        error.args = (
            f"{text}. get_loss was given criterion=None, as the loop was made without one: if that is what it called, "
            "pass TrainLoop(criterion=nn.CrossEntropyLoss()).",
        )


def explain_batch_of_one(error: ValueError) -> None:
    """Add to torch's text about a BatchNorm that got one sample how to avoid such a batch."""
    if "Expected more than 1 value per channel when training" in str(error):
        error.args = (f"{error}. {ONE_SAMPLE}",)


ONE_SAMPLE = (
    "A BatchNorm in training can't take statistics of a batch of one sample, as an epoch's last batch may be, and with "
    "several ranks or replicas a rank's share of it. DataLoader(drop_last=True) leaves that batch out; "
    "TrainLoop(sync_batchnorm=True) takes the statistics over all ranks."
)


# -- a get_loss that yields its losses ---------------------------------------------------------------------------------


class Yielded(NamedTuple):
    """One loss of a ``get_loss`` that yields them."""

    optimizer: int | str | None
    """Name or index of its optimizer; ``None`` where there is only one."""
    loss: Any
    """A tensor."""
    weight: Any
    """``None`` where ``get_loss`` gave none."""


def split_yielded(item: Any) -> Yielded:
    """Split what a ``get_loss`` yielded: a loss or ``(loss, weight)``, alone or after its optimizer's name or index."""
    optimizer = None
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], (str, int)):
        optimizer, item = item
    loss, weight = split_loss(item)
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            "get_loss yielded a MultiLoss: yield the losses one by one, each behind its optimizer's name, as "
            "`yield 'generator', loss`; or return the MultiLoss."
        )
    return Yielded(optimizer, loss, weight)


def joined_losses(losses: Sequence[Yielded]) -> tuple[Tensor | MultiLoss, Any]:
    """The losses that one batch yielded, as one with its weight: the mean of each optimizer's, by its name or index."""
    groups: dict[int | str | None, list[Tensor]] = {}
    for optimizer, loss, _ in losses:
        groups.setdefault(optimizer, []).append(loss.reshape(()))
    if not groups:
        raise ConfigurationError(
            "get_loss yielded no loss for a batch. It is a generator, as there is a yield in it: yield one at least."
        )
    # By mean(): a division would look as if a sum over samples had been made a mean; see trainloop._support.reduction.
    means = {optimizer: torch.stack(group).mean() for optimizer, group in groups.items()}
    weight = next((weight for *_, weight in losses if weight is not None), None)
    if None not in means:
        return MultiLoss({str(optimizer): mean for optimizer, mean in means.items()}), weight
    if len(means) > 1:
        names = ", ".join(repr(name) for name in means if name is not None)
        raise ConfigurationError(
            f"get_loss yielded losses for optimizers {names}, and some that say for none. Put the optimizer's name or "
            "index before each, `yield 'generator', loss`, or before none."
        )
    return means[None], weight


def run_through(output: Any) -> Any:
    """The loss that ``get_loss`` returned; a generator is run to its end, and its losses become one with its weight."""
    if not isinstance(output, Generator):
        return output
    loss, weight = joined_losses([split_yielded(item) for item in output])
    return loss if weight is None else (loss, weight)
