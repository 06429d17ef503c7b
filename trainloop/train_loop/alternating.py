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
from typing import Any

import torch

from trainloop import distributed
from trainloop._support.reduction import divisor_of
from trainloop.data import StepBatches
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiOptimizer, drop_gradients, parameters_of
from trainloop.train_loop.losses import (
    Yielded,
    explain_backward,
    joined_losses,
    per_sample,
    split_yielded,
)
from trainloop.train_loop.training import Training

__all__ = ["AlternatingTraining"]

# Sent to other ranks instead of an optimizer's index: all generators ended, this rank has none, or they differ.
_ENDED, _NONE, _DIFFER = -1, -2, -3


class AlternatingTraining(Training):
    """For each loss that a step's micro-batches yield: backward, and its optimizer's step. Counted as one step."""

    _sizes: list[int]

    def forward_backward(self, step: StepBatches, **_: Any) -> None:
        """Run the micro-batches' generators to their ends, with the optimizers' steps in between."""
        loop, hooks, place, recorder, gradients = self.loop, self.hooks, self.place, self.recorder, self.gradients
        counts = self.micro_batches_of_ranks(step) if step.ragged else None
        count = max(counts) if counts else len(step.batches)
        recorder.step = loop.global_step + 1
        # Where this rank has no batch, what hooks log weighs nothing.
        self._sizes = [*step.sizes, *[0] * (count - len(step.sizes))]
        for recorder.batch_size in self._sizes:
            loop.total_iteration_idx += 1
            self.epoch_batches += 1
            for hook in hooks.on_batch_begin:
                hook()
        # In ddp the model itself: its gradients are reduced by hand, as DDP's reducer expects one backward a forward.
        batches = step.batches
        if counts and place.collective:  # every rank runs as many
            given = [self.idle.given(batches, counts, i) for i in range(count)]
            batches = [*batches, *given[len(batches) :]]
        # Nothing runs yet: a generator begins at its first next().
        generators = [place.evaluated.get_loss(batch, loop.criterion, place.device) for batch in batches]
        shown: list[list[Yielded]] = [[] for _ in step.batches]
        found_inf: list[torch.Tensor] = []
        self.losses_stepped = 0
        while (index := self._backward_of_next(step, generators, counts, shown)) is not None:
            optimizer = gradients.optimizers[index]
            parameters = parameters_of(optimizer) if len(gradients.optimizers) > 1 else gradients.parameters
            gradients.complete(parameters)
            gradients.show_and_clip([(index, optimizer)], parameters)
            gradients.take_steps([optimizer])
            drop_gradients(optimizer)
            self.losses_stepped += 1
            found_inf += loop.found_inf
        loop.found_inf = found_inf
        for size, losses in zip(step.sizes, shown, strict=True):
            loss, weight = joined_losses(losses)
            loop.last_loss = recorder.add_loss(loss, size if weight is None else weight)

    def step(self) -> None:
        """The optimizers have stepped already, each after its loss."""
        self.count_step()
        recorder = self.recorder
        for recorder.batch_size in self._sizes:
            for hook in self.hooks.on_batch_end:
                hook()

    def _backward_of_next(
        self,
        step: StepBatches,
        generators: list[Generator[Any, None, None]],
        counts: list[int] | None,
        shown: list[list[Yielded]],
    ) -> int | None:
        """Backward of each generator's next loss; returns their optimizer's index, None once all ended."""
        sums = self.gradients.sums
        indices: set[int] = set()
        self.gradients.apart, self.gradients.ragged = True, step.ragged
        for i, generator in enumerate(generators):
            if i >= len(step.batches):
                with self.place.alone(counts, i), self.idle.nothing_shows():
                    self._nothing_of(generator)
                continue
            self.recorder.batch_size = step.sizes[i]
            with self.place.alone(counts, i):
                if self.watch is not None:
                    self.watch.forward_begins(i == 0 and not self.losses_stepped)
                with self.place.autocast:
                    item = next(generator, _ENDED)
                if item is _ENDED:
                    indices.add(_ENDED)
                    continue
                yielded = split_yielded(item)
                index = _index_of(self.loop.optimizer, yielded.optimizer)
                indices.add(index)
                is_sum = sums is not None and yielded.weight is None and sums(yielded.loss)
                self.gradients.given.append(yielded.weight is not None)
                if yielded.weight is None:
                    yielded = yielded._replace(weight=divisor_of(yielded.loss))
                self._backward_of(step, i, index, yielded, is_sum)
                if self.watch is not None:
                    self.watch.backward_ended(yielded.loss)
            value = per_sample(yielded.loss, step.sizes[i]) if is_sum else yielded.loss.detach()
            shown[i].append(yielded._replace(loss=value))
        # One exchange for all that may go wrong: a rank that raised alone would leave the others in the next
        # collective.
        mine = _NONE if not indices else indices.pop() if len(indices) == 1 else _DIFFER
        everyone = {mine}
        if self.gather is not None:
            everyone = {index for (index,) in distributed.exchange_ints([mine])}
        everyone.discard(_NONE)
        if len(everyone) > 1 or everyone == {_DIFFER}:
            raise ConfigurationError(
                "the batches of one step (micro-batches, or those of several ranks) yielded losses of different "
                "optimizers at the same place, or not equally many: get_loss must yield the same sequence for all of "
                "them. Let it depend on nothing but what is the same for all, such as the step's number."
            )
        (index,) = everyone
        return None if index == _ENDED else index

    def _backward_of(self, step: StepBatches, i: int, index: int, yielded: Yielded, is_sum: bool) -> None:
        gradients, (_, loss, weight) = self.gradients, yielded
        scale = None if step.scales is None else step.scales[i]
        scaled = gradients.scaled(loss, weight, scale, len(step.batches), step.sizes[i], is_sum=is_sum)
        try:
            self._differentiate(index, scaled)
        except RuntimeError as error:
            explain_backward(loss, error)
            if "a second time" in str(error) or "modified by an inplace operation" in str(error):
                raise ConfigurationError(
                    "get_loss yielded a loss whose graph goes back to before an earlier yield: that graph is used up, "
                    "and the weights it was made with have been stepped. Compute after a yield all that a later loss "
                    f"needs, or detach() what is to be kept. torch says: {error}"
                ) from error
            raise

    def _differentiate(self, index: int, loss: torch.Tensor) -> None:
        """A loss reaches the parameters of its own optimizer: those of others, which it passes through, keep none."""
        optimizers = self.gradients.optimizers
        backward = self.place.scaler.scale(loss).backward
        if len(optimizers) == 1:
            backward()
        elif any(p.requires_grad for p in parameters_of(optimizers[index])):  # torch refuses to differentiate by none
            self.gradients.backward_into(backward, optimizers[index])

    def _nothing_of(self, generator: Generator[Any, None, None]) -> None:
        """The next loss of a batch that is another rank's, with gradients of zero."""
        with self.place.autocast:
            item = next(generator, None)
        if item is not None:
            yielded = split_yielded(item)
            self._differentiate(_index_of(self.loop.optimizer, yielded.optimizer), yielded.loss * 0.0)


_BY_YIELD = (
    "Yield one of these before the loss, as `yield 0, loss`; or name the optimizers, as "
    "MultiOptimizer({'d': ..., 'g': ...}) does for `yield 'd', loss`."
)


def _index_of(multi_optimizer: Any, optimizer: int | str | None) -> int:
    if isinstance(multi_optimizer, MultiOptimizer):
        if optimizer is not None:
            return multi_optimizer.index(optimizer, "a loss that get_loss yielded", _BY_YIELD)
        if len(multi_optimizer) > 1:
            raise ConfigurationError(
                f"get_loss yielded a loss for one of {len(multi_optimizer)} optimizers, and didn't say which: put its "
                "name, or its index, before it, as `yield 'generator', loss`."
            )
    return 0
