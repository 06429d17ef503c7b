"""Losses of a ``MultiLoss`` with weights of their own: ranks agree on them; scale and unscale them, add gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainloop import distributed
from trainloop._support.reduction import has_class_criteria
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss
from trainloop.parallel import TTDistributedDataParallel
from trainloop.train_loop.progress.running import TrainingRun
from trainloop.train_loop.training.step_weight import TINY, Converted, StepWeight, as_factor


class _Part:
    """Gradients of one loss of a ``MultiLoss`` in a step, and the sum of the loss's weights so far."""

    def __init__(self) -> None:
        self.weight: Any = 0.0
        self.gradients: dict[Tensor, Tensor] = {}

    def take(self, parameters: Iterable[Tensor]) -> None:
        """Add the gradients of parameters, and clear these."""
        for parameter in parameters:
            if parameter.grad is not None:
                before = self.gradients.get(parameter)
                self.gradients[parameter] = parameter.grad if before is None else before + parameter.grad
                parameter.grad = None


class OwnWeights:
    """The losses of a ``MultiLoss`` that are means over other units than samples, each over its own.

    A common factor after backward, as of :class:`StepWeight`, would not be enough for several of them. In a step of one
    batch on each rank, they are scaled before backward; otherwise each has separate gradients, which :meth:`join` adds
    up.

    Parameters
    ----------
    run : TrainingRun
    weight : StepWeight
        The weight of the whole step.
    ranks : int
        Number of ranks whose gradients are averaged.
    optimizers_of : callable
        Returns the index of the optimizer of each loss of a ``MultiLoss``; nothing if there is only one optimizer.

    Attributes
    ----------
    names : dict or None
        Names of the losses that have had their own weights on any rank, each with the index of its optimizer if there
        are several. ``None``: ranks have not agreed yet.
    agrees : bool
        True if ranks agree on new names in each micro-batch, as the first batch of a rank had a ``MultiLoss``.
    separated : bool
        True if losses have had separate gradients, which DDP does not reduce.
    calls_class_losses : bool
        True if ``get_loss`` has called a loss of class indices while the run looked for such calls.
    parts, joined : dict
        By name: the losses with separate gradients of the current step; those of the last step that was completed.
    """

    def __init__(
        self, run: TrainingRun, weight: StepWeight, ranks: int, optimizers_of: Callable[[Any], Mapping[str, Any]]
    ) -> None:
        self._run, self._place, self._weight, self._ranks = run, run.place, weight, ranks
        self._optimizers_of = optimizers_of
        self.names: dict[str, int | None] | None = None
        self.agrees = self.separated = self.calls_class_losses = False
        self.parts: dict[str, _Part] = {}
        self.joined: dict[str, _Part] = {}
        # Losses of the current step that have had no weights of their own until now, with their weights by samples.
        self._averaged: dict[str, list[tuple[Tensor, float]]] = {}

    def end_step(self) -> None:
        """Begin the next step."""
        self.joined, self.parts, self._averaged = self.parts, {}, {}

    def agree(self, loss: Any, weight: Any) -> None:
        """Agree with the other ranks on the losses of a ``MultiLoss`` that have their own weights.

        Batches may differ: one has a class loss, another one only a mean over samples, or another task. Collective in
        the first batch, and in each batch if that of any rank has a ``MultiLoss``.
        """
        several = isinstance(loss, MultiLoss)
        own = weight if isinstance(weight, dict) else {}
        if self._ranks > 1 and self._weight.ragged and not self._place.collective:  # some ranks may not call this
            return
        new = [name for name in own if name not in (self.names or ())]
        if self.names is None:
            flags = [weight is not None and not own, bool(new), self.calls_class_losses, several]
            told = distributed.exchange_ints(flags) if self._ranks > 1 else [flags]
            weighted, any_new, called, self.agrees = (any(column) for column in zip(*told))
            # Later, the first loss with units may be one of some ranks only. DDP carries the units; only on GPUs, where
            # reading them would wait, a class loss that the first batch calls is taken to be what get_loss returns.
            late = self._ranks > 1 and not all(theirs[3] for theirs in told) and self._may_weigh()
            late = late and (self._place.collective or not called)
            self._weight.always_weighted = self._weight.weighted = weighted or late
            self.names = {}
        elif self._ranks > 1 and self.agrees:
            any_new = any(theirs for (theirs,) in distributed.exchange_ints([len(new)]))
        elif new and self._ranks > 1:
            raise ConfigurationError(
                "get_loss returned a MultiLoss whose losses have weights of their own (class weights or targets that "
                f"are not ignored: {', '.join(new)}), but one loss for the first batch. Other ranks can't know of it "
                "in time. Return a MultiLoss for every batch, such as MultiLoss({'loss': loss})."
            )
        else:
            any_new = bool(new)
        if any_new:
            which = self._optimizers_of(loss)
            found = {name: which.get(name) for name in new}
            for theirs in distributed.gather_object(found) if self._ranks > 1 else [found]:
                self.names.update(theirs)

    def _may_weigh(self) -> bool:
        """Return True if a later batch may call a loss of class indices: without a criterion, maybe a function."""
        loop = self._run.loop
        return loop.criterion is None or has_class_criteria(loop.model, loop.criterion)

    def expect_all(self) -> None:
        """Let a rank without a batch run a backward for each of the losses, as the others do."""
        for name in self.names or ():
            self.parts.setdefault(name, _Part())

    def note_averages(self, losses: MultiLoss, share: float) -> None:
        """Note losses of a micro-batch that are means over samples; ``share`` is their weight."""
        for name, loss in losses.items():
            self._averaged.setdefault(name, []).append((loss.detach(), share))

    def scaled(self, loss: Any, own: dict[str, Any], share: float, size: int, *, at_once: bool) -> Any:
        """Scale each loss of a ``MultiLoss`` by its own weight, in ``own``.

        A batch that lacks one of these losses has none of the loss's units. Losses without own weights are means over
        samples. ``at_once``: the step has no such losses in other micro-batches, and ranks exchange the weights before
        backward. Otherwise, each loss gets separate gradients, which :meth:`join` adds up.
        """
        step = self._weight
        losses: Mapping[str, Tensor] = loss if isinstance(loss, MultiLoss) else {}
        names = dict.fromkeys((*(self.names or ()), *own))
        per_unit = share / max(size, 1)
        units = {
            # A loss of zero that has no units now has none: get_loss returns it if all targets are ignored.
            name: (step.exact(own[name]) if name in own else size * (1 - step.is_zero(losses[name]))) * per_unit
            for name in names
            if name in losses
        }
        if at_once:
            step.add(share)
            mine = torch.stack([step.zero() + units.get(name, 0) for name in names])
            sums = mine + torch.stack([self._averaged_weight(name) for name in names])
            sums = distributed.all_reduce(sums, "mean") if self._ranks > 1 else sums
            factors = dict(zip(names, mine / sums.clamp(min=TINY)))
        else:
            if not step.ragged and isinstance(self._place.wrapper, TTDistributedDataParallel):
                # DDP's reducer would reduce the sum of these gradients.
                self.separated = step.reduced_later = True
            factors = {}
            for name in names:  # on all ranks, since they agree on what is usual
                usual = step.usual(name, own.get(name, size) if name in losses else 0, size)
                part = self.parts.setdefault(name, _Part())
                if name in units:
                    factors[name] = units[name] / usual
                    part.weight = part.weight + factors[name]
        if not losses:
            return loss * share
        return _times(loss, {name: factors.get(name, share) for name in losses})

    def _averaged_weight(self, name: str) -> Tensor:
        """Return the weight by samples of a loss's earlier micro-batches in the step; zeros have no units."""
        step = self._weight
        return sum((of * (1 - step.is_zero(loss)) for loss, of in self._averaged.get(name, ())), step.zero())

    def join(self) -> None:
        """Add up the parts' gradients, each divided by its weight over all ranks. Collective."""
        if self._ranks > 1:
            names = self.names or {}
            if self._weight.ragged:  # a rank without a batch may not know the names
                names = dict.fromkeys(name for names in distributed.gather_object(list(self.parts)) for name in names)
            self.parts = {name: self.parts.get(name) or _Part() for name in names}
        step = self._weight
        earlier = {name: self._averaged_weight(name) / step.usual_units.get(name, 1.0) for name in self.parts}
        weights = torch.stack([earlier[name] + part.weight for name, part in self.parts.items()])
        if self._ranks > 1:
            weights = distributed.all_reduce(weights, "mean")
        for part, weight in zip(self.parts.values(), weights.clamp(min=TINY)):
            part.weight = weight
            like = Converted(weight)
            for parameter, gradient in part.gradients.items():
                divided = gradient / like(gradient)
                parameter.grad = divided if parameter.grad is None else parameter.grad + divided
            part.gradients.clear()

    def unscaled(self, loss: Any) -> Any:
        """Return a scaled loss of the last step, divided by the joined weights of its parts."""
        if not isinstance(loss, MultiLoss):
            return loss
        return _times(loss, {name: 1 / part.weight for name, part in self.joined.items()})


def _times(losses: MultiLoss, factors: Mapping[str, Any]) -> MultiLoss:
    """Multiply each loss by its own factor, if it has one."""
    scaled = {name: loss * as_factor(factors[name], loss) if name in factors else loss for name, loss in losses.items()}
    return MultiLoss(scaled, losses.loss_optimizer_map, losses.retain_graph_until_last)
