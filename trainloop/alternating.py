"""Steps of one optimizer after another within a batch, for a ``get_loss`` that yields its losses.

::

    def get_loss(self, batch_data, criterion, device):
        ...
        yield "discriminator", detects       # backward, gradients reduced, clipped, the discriminator's step
        ...                                  # here it is the new one
        yield "generator", fools

With several micro-batches in a step their generators run side by side: every micro-batch's first loss, then one
optimizer step for them all, then every second loss. So the step is that of one batch that holds them all.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from trainloop import distributed, evaluation
from trainloop.data import StepShare
from trainloop.errors import ConfigurationError
from trainloop.evaluation import Yielded
from trainloop.optim import MultiOptimizer, drop_gradients, parameters_of
from trainloop.step import complete_gradients, end_step, finish_gradients, scaled_loss, summed_loss, take_steps

if TYPE_CHECKING:
    from trainloop.loop_base import Run
    from trainloop.train_loop import TrainLoop

__all__ = ["alternating_step"]

# Said to other ranks instead of an optimizer's index: the generators have ended, there are none here, they differ.
_ENDED, _NONE, _DIFFER = -1, -2, -3


def alternating_step(loop: TrainLoop, run: Run, share: StepShare) -> None:
    """All that a step's micro-batches yield: for each loss backward and its optimizer's step; counted as one step."""
    hooks, device = run.hooks, run.place.device
    counts = None if not share.ragged else [n for (n,) in distributed.exchange_ints([len(share.batches)])]
    count = len(share.batches) if counts is None else max(counts)
    run.recorder.step = loop.global_step + 1
    sizes = [*share.sizes, *[0] * (count - len(share.sizes))]  # without a batch, what hooks log weighs nothing
    for run.recorder.batch_size in sizes:
        loop.total_iteration_idx += 1
        run.epoch_batches += 1
        for hook in hooks.on_batch_begin:
            hook()
    # In ddp the model itself: its gradients are reduced by hand, as DDP's reducer expects one backward a forward.
    generators = [run.place.evaluated.get_loss(batch, loop.criterion, device) for batch in share.batches]
    shown: list[list[Yielded]] = [[] for _ in generators]
    found_inf: list[torch.Tensor] = []
    while (whose := _backward_of_next(loop, run, share, generators, counts, shown)) is not None:
        index, weights = whose
        optimizer = run.optimizers[index]
        parameters = parameters_of(optimizer) if len(run.optimizers) > 1 else run.parameters
        complete_gradients(run, parameters, weights, by_hand=True, ragged=share.ragged)
        finish_gradients(loop, run, [(index, optimizer)], parameters)
        take_steps(loop, run, [optimizer])
        drop_gradients(optimizer)
        found_inf += loop._found_inf
    loop._found_inf = found_inf
    for size, losses in zip(share.sizes, shown, strict=True):
        loss, weight = evaluation.joined_losses(losses)
        loop.last_loss = run.recorder.add_loss(loss, size if weight is None else weight)
    end_step(loop, run)
    for run.recorder.batch_size in sizes:
        for hook in hooks.on_batch_end:
            hook()


def _backward_of_next(
    loop: TrainLoop,
    run: Run,
    share: StepShare,
    generators: list[Generator[Any, None, None]],
    counts: list[int] | None,
    shown: list[list[Yielded]],
) -> tuple[int, list[Any]] | None:
    """Each generator's next loss, and its backward; their optimizer's index and their weights. None: they ended."""
    indices: set[int] = set()
    weights: list[Any] = []
    for i, generator in enumerate(generators):
        run.recorder.batch_size = share.sizes[i]
        with run.place.alone(counts, i):
            with run.place.autocast:
                item = next(generator, _ENDED)
            if item is _ENDED:
                indices.add(_ENDED)
                continue
            yielded = evaluation.split_yielded(item)
            index = _index_of(loop, yielded.optimizer)
            indices.add(index)
            summed = run.sums is not None and yielded.weight is None and run.sums(yielded.loss)
            _backward(run, share, i, index, yielded, summed)
        weights.append(yielded.weight)
        value = evaluation.per_sample(yielded.loss, share.sizes[i]) if summed else yielded.loss.detach()
        shown[i].append(yielded._replace(loss=value))
    mine = _NONE if not indices else indices.pop() if len(indices) == 1 else _DIFFER
    everyone = {mine}
    if run.gather is not None:
        everyone = {index for (index,) in distributed.exchange_ints([mine])}
    everyone.discard(_NONE)
    if len(everyone) > 1 or everyone == {_DIFFER}:
        raise ConfigurationError(
            "the batches of one step (micro-batches, or those of several ranks) yielded losses of different optimizers "
            "at the same place, or not equally many: get_loss must yield the same sequence for all of them. Let it "
            "depend on nothing but what is the same for all, such as the step's number."
        )
    (index,) = everyone
    return None if index == _ENDED else (index, weights)


def _index_of(loop: TrainLoop, optimizer: int | str | None) -> int:
    if isinstance(loop.optimizer, MultiOptimizer):
        if optimizer is not None:
            return loop.optimizer.index(optimizer, "a loss that get_loss yielded")
        if len(loop.optimizer) > 1:
            raise ConfigurationError(
                f"get_loss yielded a loss for one of {len(loop.optimizer)} optimizers, and didn't say which: put its "
                "name, or its index, before it, as `yield 'generator', loss`."
            )
    return 0


def _backward(run: Run, share: StepShare, i: int, index: int, yielded: Yielded, summed: bool) -> None:
    _, loss, weight = yielded
    scale = None if share.scales is None else share.scales[i]
    scaled = summed_loss(run, loss) if summed else scaled_loss(run, loss, weight, scale, len(share.batches))
    # A loss reaches the parameters of its own optimizer: those of the others, which it passes through, keep none.
    own = None
    if len(run.optimizers) > 1:
        own = [p for p in parameters_of(run.optimizers[index]) if p.requires_grad]
    try:
        if own is None or own:  # torch refuses to differentiate by nothing
            run.scaler.scale(scaled).backward(inputs=own)
    except RuntimeError as error:
        evaluation.explain_backward(loss)
        if "a second time" in str(error) or "modified by an inplace operation" in str(error):
            raise ConfigurationError(
                "get_loss yielded a loss whose graph goes back to before an earlier yield: that graph is used up, and "
                "the weights it was made with have been stepped. Compute after a yield all that a later loss needs, or "
                f"detach() what is to be kept. torch says: {error}"
            ) from error
        raise
