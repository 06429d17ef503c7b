"""One optimizer step: forward and backward for its micro-batches, gradients made complete, the optimizers' steps.

There are three kinds, and :func:`kind_of_step` says once a run which it is: :func:`train_step`, which nearly all models
take; :func:`closure_step` for an optimizer that evaluates the loss as often as it likes; and, in
:mod:`trainloop.alternating`, the steps of one optimizer after another within a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainloop import distributed, evaluation
from trainloop.data import StepShare
from trainloop.errors import ConfigurationError
from trainloop.metrics import Recorder
from trainloop.model import yields_losses
from trainloop.optim import MultiLoss, drop_gradients, needs_closure, parameters_of, take_step
from trainloop.parallel import TTDistributedDataParallel, reduce_gradients

if TYPE_CHECKING:
    from trainloop.loop_base import Run
    from trainloop.train_loop import TrainLoop

__all__ = ["kind_of_step"]

Step = Callable[["TrainLoop", "Run", StepShare], None]


def kind_of_step(loop: TrainLoop, run: Run) -> Step:
    """Which of these functions takes a run's steps."""
    if yields_losses(loop.model):
        from trainloop.alternating import alternating_step

        return alternating_step
    return closure_step if any(map(needs_closure, run.optimizers)) else train_step


def train_step(loop: TrainLoop, run: Run, share: StepShare) -> None:
    """Forward and backward for each micro-batch, then one optimizer step for them all."""
    backward_pass(loop, run, share)
    finish_gradients(loop, run, enumerate(run.optimizers), run.parameters)
    take_steps(loop, run, run.optimizers)
    for optimizer in run.optimizers:
        drop_gradients(optimizer)
    end_step(loop, run)
    for hook in run.hooks.on_batch_end:
        hook()


def closure_step(loop: TrainLoop, run: Run, share: StepShare) -> None:
    """The optimizer gets a closure that runs the step's micro-batches again; only the first time is heard and logged.

    Each time is a whole :func:`backward_pass`: as in a loop by hand, dropout draws anew. Ranks see the same gradients,
    and are told the same loss, so that a line search takes the same way on all of them.
    """
    (optimizer,) = run.optimizers
    first = True

    def closure() -> Tensor:
        nonlocal first
        drop_gradients(optimizer)
        with torch.enable_grad(), nullcontext() if first else loop._listening(Recorder()):
            value = backward_pass(loop, run, share, first=first, wants_loss=True)
            # Not once a step: what clips here must clip each time, or the line search compares unlike gradients.
            finish_gradients(loop, run, enumerate(run.optimizers), run.parameters)
        first = False
        assert value is not None  # as asked for
        return value

    if getattr(optimizer, "needs_closure", False):
        closure()  # its step begins with gradients, and asks for further ones
    optimizer.step(closure)  # type: ignore[arg-type]  # torch says float, and calls float() on what it gets
    drop_gradients(optimizer)
    end_step(loop, run)
    for hook in run.hooks.on_batch_end:
        hook()


def backward_pass(
    loop: TrainLoop, run: Run, share: StepShare, *, first: bool = True, wants_loss: bool = False
) -> Tensor | None:
    """Forward and backward for each micro-batch, gradients reduced; the last ``on_batch_end`` is left to the caller.

    Parameters
    ----------
    loop, run
    share : StepShare
    first : bool
        Not a repetition, so that hooks are called, batches counted and losses recorded.
    wants_loss : bool
        Return the step's loss over all micro-batches and ranks, the same on every rank.
    """
    hooks, place = run.hooks, run.place
    batches, sizes, scales = share.batches, share.sizes, share.scales
    by_hand = share.ragged or run.reduce_by_hand
    if by_hand:
        place.share_buffers()
    counts = None if not share.ragged else [n for (n,) in distributed.exchange_ints([len(batches)])]
    # A rank with fewer micro-batches still goes through every hook, as callbacks may exchange values in them.
    count = len(batches) if counts is None else max(counts)
    weights: list[Any] = []
    scaled_losses: list[Any] = []
    run.recorder.step = loop.global_step + 1
    for i in range(count):
        if first:
            for hook in hooks.on_batch_end if i else ():  # of the micro-batch before
                hook()
            # From its first hook on; where a rank has no batch, what its hooks log weighs nothing.
            run.recorder.batch_size = sizes[i] if i < len(batches) else 0
            loop.total_iteration_idx += 1
            run.epoch_batches += 1
            for hook in hooks.on_batch_begin:
                hook()
            if not i and run.trained is not None and run.trained.changed():
                run.trained.meet()
                run.follow_trained(loop.model, loop.criterion)
        model = place.model if by_hand else place.wrapper
        with place.alone(counts, i) if by_hand else place.gradient_sync(i == count - 1):
            if i < len(batches):
                with place.autocast:
                    output = model.get_loss(batches[i], loop.criterion, place.device)
                loss, weight = (output, None) if isinstance(output, Tensor) else evaluation.split_loss(output)
                summed = run.sums is not None and weight is None and run.sums(loss)
                scale = None if scales is None else scales[i]
                scaled = summed_loss(run, loss) if summed else scaled_loss(run, loss, weight, scale, count)
                try:
                    _backward(loop, run, scaled)
                except RuntimeError:
                    evaluation.explain_backward(loss)
                    raise
                if first:
                    shown = evaluation.per_sample(loss, sizes[i]) if summed else loss
                    loop.last_loss = run.recorder.add_loss(shown, sizes[i] if weight is None else weight)
                weights.append(weight)
                if wants_loss:
                    scaled_losses.append(scaled.detach())
    factor = complete_gradients(run, run.learned, weights, by_hand, share.ragged)
    return loss_over_ranks(run, scaled_losses, factor) if wants_loss else None


def scaled_loss(run: Run, loss: Any, weight: Any, scale: float | None, count: int) -> Any:
    """A micro-batch's loss as it is differentiated: the gradients' sum, averaged over ranks, is that of the step."""
    if weight is not None:
        if run.gather is None and count == 1:
            return loss  # it is the mean over the step's units: multiplied and divided, it would be so but for rounding
        # A mean over units: made a sum here, divided by all units of the step afterwards.
        return loss * (_like(loss, weight) / run.nominal_weight)
    if scale is not None:  # micro-batches that differ in samples
        return loss * scale
    return loss / count if count > 1 else loss


def summed_loss(run: Run, loss: Any) -> Any:
    """A sum over samples as it is differentiated: micro-batches add up by themselves, ranks are averaged."""
    return loss if run.gather is None else loss * distributed.get_world_size()


def _like(loss: Tensor | MultiLoss, weight: Any) -> Any:
    """The weight in the loss's precision: an integer tensor divided becomes float32, whatever the loss is."""
    if not isinstance(weight, Tensor):
        return weight
    return weight.to(loss.dtype if isinstance(loss, Tensor) else next(iter(loss.values())).dtype)


def _backward(loop: TrainLoop, run: Run, loss: Tensor | MultiLoss) -> None:
    if isinstance(loss, Tensor):
        run.scaler.scale(loss).backward()
    elif len(run.optimizers) == 1:
        run.scaler.scale(loss.total()).backward()
    else:
        loss = loss.assigned_to(loop.optimizer).map(run.scaler.scale)
        for i, optimizer in enumerate(run.optimizers):
            loss.backward(i, inputs=[p for p in parameters_of(optimizer) if p.requires_grad])


def complete_gradients(
    run: Run, parameters: Sequence[Tensor], weights: list[Any], by_hand: bool, ragged: bool
) -> Tensor | None:
    """Reduce gradients where backward didn't, and divide them by the step's weight where ``get_loss`` gives one.

    Returns what they were multiplied by, ``None`` where that is 1.
    """
    if by_hand:
        reduce_gradients(parameters)
    elif isinstance(run.place.wrapper, TTDistributedDataParallel):
        run.place.wrapper.check_reduced()
        if run.trained is not None:
            run.trained.reduce_beside()
    if run.gather is None and len(weights) == 1:  # see scaled_loss
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
    total = torch.zeros((), dtype=torch.float64 if run.place.device.type != "mps" else torch.float32)
    total = total.to(run.place.device) + sum(given)
    ranks = 1
    if run.gather is not None:
        total, ranks = distributed.all_reduce(total, "sum"), distributed.get_world_size()
    factor: Tensor = run.nominal_weight * ranks / total.clamp(min=1e-12)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return factor


def loss_over_ranks(run: Run, scaled_losses: list[Any], factor: Tensor | None) -> Tensor:
    """A step's loss from those of its micro-batches here, bit for bit the same on every rank."""
    parts = [loss.total() if isinstance(loss, MultiLoss) else loss for loss in scaled_losses]
    if run.gather is None and factor is None:
        return sum(parts[1:], parts[0])  # in the order in which a loop by hand adds them up
    value = torch.zeros((), dtype=torch.float64 if run.place.device.type != "mps" else torch.float32)
    value = value.to(run.place.device) + sum(part.reshape(()) for part in parts)
    if run.gather is not None:
        torch.distributed.all_reduce(value)
        value /= distributed.get_world_size()
    return value if factor is None else value * factor


def finish_gradients(
    loop: TrainLoop,
    run: Run,
    optimizers: Iterable[tuple[int, torch.optim.Optimizer]],
    parameters: Sequence[Tensor],
) -> None:
    """Complete gradients are unscaled, shown to callbacks, and clipped."""
    for i, optimizer in optimizers:
        run.scaler.unscale_(optimizer)  # before clipping: torch's notes on AMP
        for hook in run.hooks.on_after_gradient_update:
            hook(i)
    if loop.gradient_clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, loop.gradient_clip_norm)


def take_steps(loop: TrainLoop, run: Run, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Each optimizer's step; with a scaler only where its gradients are finite."""
    if not run.scaler.is_enabled():
        for optimizer in optimizers:
            take_step(optimizer)
        return
    for optimizer in optimizers:
        run.scaler.step(optimizer)
    states = run.scaler._per_optimizer_states
    loop._found_inf = [
        found for optimizer in optimizers for found in states[id(optimizer)]["found_inf_per_device"].values()
    ]
    run.scaler.update()


def end_step(loop: TrainLoop, run: Run) -> None:
    """Count the step, and tell callbacks."""
    loop.global_step += 1
    run.epoch_steps += 1
    for hook in run.hooks.on_after_optimizer_step:
        hook()
