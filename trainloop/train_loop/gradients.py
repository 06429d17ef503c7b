"""From the losses of a step's micro-batches to its gradients, and from these to the optimizers' steps.

The gradients of a step are those of one mean over all its samples (or units, where ``get_loss`` gives a weight), over
micro-batches and ranks. Backward of each micro-batch adds its part; :meth:`Gradients.complete` does what can be done
only when all parts are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainloop import distributed
from trainloop.devices import has_ranks
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss, optimizers_of, parameters_of, take_step
from trainloop.parallel import TTDistributedDataParallel, reduce_gradients
from trainloop.parallel.shards import clip_gradients, is_sharded, local_part
from trainloop.reduction import sum_rule
from trainloop.train_loop.losses import split_loss
from trainloop.train_loop.trained import TrainedParameters

if TYPE_CHECKING:
    from trainloop.train_loop.training import Training

__all__ = ["Gradients"]


class Gradients:
    """From losses to optimizer steps: which parameters a rank trains, and how their gradients are made.

    Parameters
    ----------
    training : Training
        The run that has the model, criterion and optimizers.

    Attributes
    ----------
    sums : SumRule or None
        Tells which losses are sums over samples; ``None`` where none is.
    optimizers : list of Optimizer
    parameters : list of Tensor
        The model's.
    learned : list of Tensor
        These, and those of the criterion.
    trained : TrainedParameters or None
        In ``ddp``: watches what is frozen or unfrozen.
    shares_buffers : bool
        Whether a step begins with rank 0's buffers on all ranks, as DDP's forward sees to it by itself.
    """

    def __init__(self, training: Training) -> None:
        loop = training.loop
        self._training = training
        self._place = place = training.place
        self._multi_optimizer = loop.optimizer
        self.sums = sum_rule(loop.model, loop.criterion)
        self._ranks = 1 if training.gather is None else loop.world_size
        # A typical batch's weight, the same on all ranks: it keeps weighted losses in the range of plain ones.
        self._nominal_weight = training.feed.global_batch_size or 1
        self.optimizers = optimizers_of(loop.optimizer)
        # Several optimizers make several backwards.
        self.several = self._ranks > 1 and len(self.optimizers) > 1
        self.shares_buffers = place.collective and self._ranks > 1 and next(loop.model.buffers(), None) is not None
        self.trained = TrainedParameters(loop.model, loop.criterion, loop.timeout) if has_ranks(loop.gpu_mode) else None
        self._take_parameters()
        if place.collective:  # into the second step: a copy of a network equals it until then
            place.wrapper.watch_forwards(loop.grad_accumulation + 1)

    def _take_parameters(self) -> None:
        loop = self._training.loop
        self.parameters: list[Tensor] = list(loop.model.parameters())
        # A criterion may learn too (a margin, class weights), and its parameters are in no wrapper.
        beside = loop.criterion.parameters() if isinstance(loop.criterion, nn.Module) else ()
        self.learned: list[Tensor] = [*self.parameters, *beside]
        self._beside: set[int] = set()
        if self._place.collective:  # what the wrapper knows nothing of
            known = {id(p) for p in self._place.wrapper.whole_parameters}
            self._beside = {id(p) for p in self.learned if not is_sharded(p) and id(p) not in known}

    # -- parameters that are frozen, unfrozen or added while ranks train ---------------------------------------------

    def follow_at_epoch_begin(self) -> None:
        """Wrap anew where other parameters train than before. Collective."""
        if self.trained is not None and self.trained.agree():
            self._follow(self.trained)

    def follow_at_step_begin(self) -> None:
        """Wrap anew within an epoch: a rank that sees a change waits for the others."""
        if self.trained is not None and self.trained.changed():
            self.trained.meet()
            self._follow(self.trained)

    def _follow(self, trained: TrainedParameters) -> None:
        trained.note()
        self._take_parameters()
        self._place.wrap_again()

    def check_alike(self) -> None:
        """Check that all ranks have the same weights. Collective in ``ddp``."""
        if self.trained is not None:
            self.trained.check_alike(self._place.wrapper)

    # -- of one micro-batch ------------------------------------------------------------------------------------------

    def scaled(self, loss: Any, weight: Any, scale: float | None, count: int, *, is_sum: bool) -> Any:
        """Scale a micro-batch's loss so that the sum of the gradients, averaged over ranks, is that of the step.

        Parameters
        ----------
        loss, weight
            What ``get_loss`` gave.
        scale : float or None
            The micro-batch's weight by samples, where the step's micro-batches differ in their number.
        count : int
            Micro-batches of the step.
        is_sum : bool
            Whether the loss is a sum over its batch's samples, rather than a mean; :attr:`sums` tells.
        """
        if is_sum:  # micro-batches add up by themselves, ranks are averaged
            return loss if self._ranks == 1 else loss * self._ranks
        if weight is not None:
            if self._ranks == 1 and count == 1:
                return loss  # the mean over the step's units already: multiplied and divided, it would only be rounded
            # A mean over units: made a sum here, divided by all units of the step afterwards.
            return loss * (_like(loss, weight) / self._nominal_weight)
        if scale is not None:
            return loss * scale
        return loss / count if count > 1 else loss

    def backward(self, loss: Tensor | MultiLoss) -> None:
        """Backward of a scaled loss; the parts of a ``MultiLoss`` reach the parameters of their own optimizers."""
        scaler = self._place.scaler
        if isinstance(loss, Tensor):
            scaler.scale(loss).backward()
        elif len(self.optimizers) == 1:
            scaler.scale(loss.total()).backward()
        else:
            loss = loss.assigned_to(self._multi_optimizer).map(scaler.scale)
            for i, optimizer in enumerate(self.optimizers):
                self.backward_into(partial(loss.backward, i), optimizer)

    def backward_into(self, backward: Callable[..., None], optimizer: torch.optim.Optimizer) -> None:
        """``backward(inputs=...)`` of a loss that reaches one optimizer's parameters; those of others keep theirs."""
        own = [p for p in parameters_of(optimizer) if p.requires_grad]
        if not self._place.collective:
            backward(inputs=own)
            return
        # The graph has a unit's whole parameters, which stand for the optimizer's shards: it can't be told the inputs.
        its = {id(p) for p in own}
        others = [(p, p.grad) for p in self.learned if id(p) not in its]
        for p, _ in others:
            p.grad = None
        backward()
        for p, gradient in others:
            p.grad = gradient

    def backward_of_nothing(self, batch: Any) -> None:
        """Forward and backward of a batch that is another rank's, with gradients of zero."""
        place = self._place
        with place.autocast:
            output = place.wrapper.get_loss(batch, self._training.loop.criterion, place.device)
        self.backward(split_loss(output)[0] * 0.0)

    # -- of the step -------------------------------------------------------------------------------------------------

    def complete(
        self, parameters: Sequence[Tensor], weights: list[Any], *, by_hand: bool, ragged: bool
    ) -> Tensor | None:
        """Reduce gradients where backward didn't, and divide them by the step's weight where ``get_loss`` gives one.

        Returns the factor they were multiplied by, ``None`` where it is 1.

        Parameters
        ----------
        parameters : sequence of Tensor
            Whose gradients.
        weights : list
            Of this rank's micro-batches, ``None`` for those without.
        by_hand : bool
            Whether DDP's reducer was kept out of backward.
        ragged : bool
            Whether ranks differ in their number of micro-batches.
        """
        wrapper = self._place.wrapper
        if self._place.collective:
            reduce_gradients([p for p in parameters if id(p) in self._beside])
        elif by_hand:
            reduce_gradients(parameters)
        elif isinstance(wrapper, TTDistributedDataParallel):
            wrapper.check_reduced()
            if self.trained is not None:
                self.trained.reduce_beside()
        if self._ranks == 1 and len(weights) == 1:  # see scaled
            return None
        given = [weight for weight in weights if weight is not None]
        if not given and not ragged:
            return None
        if ragged and not any(n for (n,) in distributed.exchange_ints([len(given)])):
            return None
        if len(given) != len(weights):
            raise ConfigurationError(
                f"get_loss returned (loss, weight) for {len(given)} of {len(weights)} micro-batches of a step. "
                "Return a weight always or never."
            )
        # In float64: token counts of a large global batch are not exact in float32 above 2**24.
        total = self._zero() + sum(given)
        if self._ranks > 1:
            total = distributed.all_reduce(total, "sum")
        # Where all weights are 0 (every token is padding), so are all gradients: only a division by 0 would make NaN.
        factor: Tensor = self._nominal_weight * self._ranks / total.clamp(min=1e-12)
        for parameter in parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor.to(parameter.grad.dtype))
        return factor

    def loss_over_ranks(self, scaled_losses: list[Any], factor: Tensor | None) -> Tensor:
        """A step's loss over all ranks, from this rank's micro-batches; the same bits on every rank."""
        parts = [loss.total() if isinstance(loss, MultiLoss) else loss for loss in scaled_losses]
        if self._ranks == 1 and factor is None:
            return sum(parts[1:], parts[0])  # in the order in which a loop by hand adds them up
        value = self._zero() + sum(part.reshape(()) for part in parts)
        if self._ranks > 1:
            torch.distributed.all_reduce(value)
            value /= self._ranks
        return value if factor is None else value * factor

    def _zero(self) -> Tensor:
        device = self._place.device  # made there: a copy from the CPU would wait for the device
        return torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)

    def show_and_clip(
        self, optimizers: Iterable[tuple[int, torch.optim.Optimizer]], parameters: Sequence[Tensor]
    ) -> None:
        """Complete gradients are unscaled, shown to callbacks, and clipped."""
        training = self._training
        for i, optimizer in optimizers:
            self._place.scaler.unscale_(optimizer)  # before clipping: torch's notes on AMP
            if training.hooks.on_after_gradient_update:
                training.clock.optimizer += perf_counter_ns()  # callers time all but the hooks
                for hook in training.hooks.on_after_gradient_update:
                    hook(i)
                training.clock.optimizer -= perf_counter_ns()
        if training.loop.gradient_clip_norm is not None:
            # torch's own can't stack norms of sharded and whole gradients.
            clip = clip_gradients if self._place.collective else nn.utils.clip_grad_norm_
            clip(parameters, training.loop.gradient_clip_norm)

    def take_steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step each optimizer; with a scaler only if its gradients are finite."""
        scaler = self._place.scaler
        if not scaler.is_enabled():
            for optimizer in optimizers:
                take_step(optimizer)
            return
        for optimizer in optimizers:
            scaler.step(optimizer)
        # Private in torch 2.6 to 2.13, which tell of a skipped step in no other way that does not wait for the device.
        states = scaler._per_optimizer_states
        self._training.loop.found_inf = [
            found for optimizer in optimizers for found in states[id(optimizer)]["found_inf_per_device"].values()
        ]
        scaler.update()


def _like(loss: Tensor | MultiLoss, weight: Any) -> Any:
    """The weight in the loss's precision. (Dividing an integer tensor would give float32.)"""
    if not isinstance(weight, Tensor):
        return weight
    return weight.to(loss.dtype if isinstance(loss, Tensor) else next(iter(loss.values())).dtype)
