"""Define two other kinds of steps: for a ``get_loss`` that yields its losses, and for optimizers that need a closure.

A ``get_loss`` that yields its losses steps one optimizer after another within a batch::

    def get_loss(self, batch_data, criterion, device):
        ...
        yield "discriminator", detects       # backward, reduce and clip gradients, step the discriminator
        ...                                  # here the discriminator has its new weights
        yield "generator", fools

With several micro-batches in a step, their generators run side by side: the first loss of every micro-batch, one
optimizer step for all first losses, then the second losses. The result equals that of one batch with all these samples.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trainloop import distributed
from trainloop._metrics import Recorder
from trainloop.data import StepBatches
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiOptimizer
from trainloop.optim.optimizers import drop_gradients, parameters_of
from trainloop.train_loop.run.losses import (
    BatchLoss,
    Yielded,
    explain_backward,
    joined_losses,
    read_yielded,
)
from trainloop.train_loop.training.training import Training

# Sent to other ranks instead of optimizers' indices if all generators have ended, if this rank has no generator, or if
# its generators yielded losses for different optimizers.
_ENDED, _NONE, _DIFFER = (-1,), (-2,), (-3,)


class AlternatingTraining(Training):
    """Run backward and an optimizer's step for each loss that micro-batches yield; all of this counts as one step."""

    _sizes: list[int]

    def forward_backward(self, step: StepBatches, **_: Any) -> None:
        """Run the micro-batches' generators to their ends, with the optimizers' steps in between."""
        loop, place, recorder, gradients = self.loop, self.place, self.recorder, self.gradients
        counts = step.counts
        count = max(counts) if counts else len(step.batches)
        self.stage = "forward"
        # If this rank has no batch, values that hooks log have weight 0.
        self._sizes = [*step.sizes, *[0] * (count - len(step.sizes))]
        for i, size in enumerate(self._sizes):
            self.begin_batch(i, size, ends_last=False)
        # In ddp, the wrapper is not used: DDP's reducer expects one backward per forward.
        batches = step.batches
        if counts and place.collective:  # every rank must run the same number of forwards
            borrowed = [self.idle.borrowed_batch(batches, counts, i) for i in range(count)]
            batches = [*batches, *borrowed[len(batches) :]]
        # Nothing runs yet: a generator starts at its first next().
        generators = []
        for batch, size in zip(batches, self._sizes):  # a rank may have fewer batches than the step
            if self.expects is not None:
                self.expects(size)
            generators.append(place.evaluated.get_loss(batch, loop.criterion, place.device))
        shown: list[list[Yielded]] = [[] for _ in step.batches]
        found_inf: list[tuple[torch.optim.Optimizer, torch.Tensor]] = []
        self.losses_stepped = 0
        for optimizer in gradients.optimizers:
            drop_gradients(optimizer)
        gradients.weight.reduced_later, gradients.weight.ragged = True, counts is not None
        while (indices := self._backward_of_next(step, generators, counts, shown)) is not None:
            optimizers = [gradients.optimizers[i] for i in indices]
            several = len(gradients.optimizers) > 1
            parameters = [p for o in optimizers for p in parameters_of(o)] if several else gradients.now_learned()
            gradients.complete(parameters)
            gradients.show_and_clip(zip(indices, optimizers, strict=True), parameters)
            gradients.take_steps(optimizers)
            for optimizer in optimizers:
                drop_gradients(optimizer)
            self.losses_stepped += 1
            found_inf += loop.progress.found_inf
        if self._functions is not None and step.batches:
            self.functions_seen()
        loop.progress.found_inf = found_inf
        for size, losses in zip(step.sizes, shown, strict=True):
            loop.progress.last_loss = recorder.add_loss(*joined_losses(losses, size).shown(size))

    def step(self) -> None:
        """Finish the step; the optimizers have already stepped, each after its loss."""
        self.count_step()
        recorder, progress = self.recorder, self.loop.progress
        progress.total_iteration_idx -= len(self._sizes)
        for recorder.batch_size in self._sizes:
            progress.total_iteration_idx += 1
            for hook in self.hooks.on_batch_end:
                hook()

    def _backward_of_next(
        self,
        step: StepBatches,
        generators: list[Generator[Any, None, None]],
        counts: list[int] | None,
        shown: list[list[Yielded]],
    ) -> tuple[int, ...] | None:
        """Run backward of each generator's next loss; return its optimizers' indices, or None once all have ended."""
        seen: set[tuple[int, ...]] = set()
        self.gradients.share_buffers()  # each loss has its own forward
        for i, generator in enumerate(generators):
            if i >= len(step.batches):
                with self.place.batchnorm_ranks(counts, i), self.idle.without_side_effects():
                    self._zero_backward(generator)
                continue
            self.recorder.batch_size = step.sizes[i]
            self.stage = "forward"
            around = self.place.batchnorm_ranks(counts, i)
            with around if counts is None else self.uneven(around, step, i):
                if self.watch is not None:
                    self.watch.forward_begins(i == 0 and not self.losses_stepped)
                before = self.gradients.now() if self._checks_backward else None
                with self.place.autocast, self.seeing_functions():
                    item = next(generator, _ENDED)
                if before is not None:
                    self.gradients.refuse_own_backward(before)
                if item is _ENDED:
                    seen.add(_ENDED)
                    self.class_losses.take()  # of calls after the last loss
                    continue
                size = step.sizes[i]
                optimizer, read = read_yielded(item, size, self.gradients.sums)
                read = self.checked(read, len(step.batches))
                indices = _indices_of(self.loop.optimizer, optimizer)
                seen.add(indices)
                self._backward_of(step, i, indices, read)
                if self.watch is not None:
                    self.watch.backward_ended(read.loss)
            mean = read._replace(loss=read.shown(size)[0].detach(), is_sum=False)
            shown[i].append(Yielded(optimizer, mean))
        self.recorder.batch_size = self._sizes[-1]  # for hooks: the last micro-batch, which this rank may not have
        # Exchange all errors at once: if one rank raised alone, the other ranks would wait for it in the next
        # collective.
        mine = _NONE if not seen else seen.pop() if len(seen) == 1 else _DIFFER
        everyone = {mine}
        if self.parallel:
            everyone = set(map(tuple, distributed.exchange_ints(mine)))
        everyone.discard(_NONE)
        if len(everyone) > 1 or everyone == {_DIFFER}:
            raise ConfigurationError(
                "for the batches of one step (micro-batches, or batches of several ranks), get_loss yielded losses for "
                "different optimizers at the same position, or different numbers of losses. Make the sequence of "
                "losses depend only on values that are the same for all batches, such as the step's number."
            )
        (found,) = everyone
        return None if found == _ENDED else found

    def _backward_of(self, step: StepBatches, i: int, indices: tuple[int, ...], read: BatchLoss) -> None:
        scale = None if step.scales is None else step.scales[i]
        scaled = self.gradients.scaled(read, scale, len(step.batches), step.sizes[i])
        self.stage = "backward"
        try:
            self._differentiate(indices, scaled)
        except (RuntimeError, AssertionError) as error:  # FSDP has assertions
            explain_backward(read.loss, error)
            if "a second time" in str(error) or "modified by an inplace operation" in str(error):
                raise ConfigurationError(
                    "get_loss yielded a loss whose graph begins before an earlier yield. That graph has been freed, "
                    "and an optimizer has changed weights in it. After each yield, compute everything that the next "
                    f"loss needs, or detach() the tensors that you computed before it. torch says: {error}"
                ) from error
            raise

    def _differentiate(self, indices: tuple[int, ...], loss: torch.Tensor) -> None:
        """Compute a loss's gradients for the parameters of the loss's optimizers only."""
        chosen = [self.gradients.optimizers[i] for i in indices]
        backward = self.place.scaler.scale(loss).backward
        if len(self.gradients.optimizers) == 1:
            backward()
        elif any(p.requires_grad for o in chosen for p in parameters_of(o)):  # each pass has its own forward
            self.gradients.backward_into(backward, *chosen)

    def _zero_backward(self, generator: Generator[Any, None, None]) -> None:
        """Run the next loss of another rank's batch, with zero gradients."""
        with self.place.autocast:
            item = next(generator, None)
        if item is not None:
            optimizer, read = read_yielded(item, 1)
            self.gradients.own_weights.agree(read.loss, None)
            self._differentiate(_indices_of(self.loop.optimizer, optimizer), read.loss * 0.0)


_BY_YIELD = (
    "Yield one of these before the loss, as in `yield 0, loss`, or name the optimizers, for example "
    "MultiOptimizer({'d': ..., 'g': ...}) for `yield 'd', loss`."
)


def _indices_of(multi_optimizer: Any, which: int | str | tuple[int | str, ...] | None) -> tuple[int, ...]:
    if isinstance(multi_optimizer, MultiOptimizer):
        if which is not None:
            names = which if isinstance(which, tuple) else (which,)
            found = {multi_optimizer.index(name, "a loss that get_loss yielded", _BY_YIELD) for name in names}
            return tuple(sorted(found))
        if len(multi_optimizer) > 1:
            raise ConfigurationError(
                f"get_loss yielded a loss without saying which of {len(multi_optimizer)} optimizers it is for. Yield "
                "the optimizer's name or index before the loss, as in `yield 'generator', loss`."
            )
    return (0,)


# -- optimizers that evaluate the loss several times -------------------------------------------------------------------


class ClosureTraining(Training):
    """Pass the optimizer a closure that runs the step's micro-batches each time; only the first run is logged.

    Each run is a whole :meth:`Training.forward_backward`: as in a hand-written loop, dropout draws new masks. All ranks
    get the same gradients and the same loss, so a line search takes the same decisions on all of them.
    """

    _batches: StepBatches

    def forward_backward(self, step: StepBatches, **_: Any) -> None:
        """Call the first hooks: they may change settings, which the optimizer reads before it runs the batches."""
        self._batches = step
        self.stage = "forward"
        self.begin_batch(0, step.sizes[0] if step.batches else 0)

    def step(self) -> None:
        """Step the optimizer, which evaluates the closure as often as it needs to."""
        gradients = self.gradients
        (optimizer,) = gradients.optimizers
        forward_backward = super().forward_backward
        first = True

        def closure() -> Tensor:
            nonlocal first
            # Optimizers call their closure under no_grad. Repetitions log into a recorder that is never read.
            with torch.enable_grad(), nullcontext() if first else self.listening(Recorder()):
                value = forward_backward(self._batches, first=first, begun=1, wants_loss=True)
                # Clip in every run: otherwise a line search would compare clipped with unclipped gradients.
                gradients.show_and_clip(enumerate(gradients.optimizers), gradients.now_learned())
            first = False
            self.stage = "step"
            assert value is not None  # because of wants_loss
            return value

        if getattr(optimizer, "needs_closure", False):
            closure()  # this optimizer's step needs gradients at the start, and then calls the closure again
        with self.place.stepping(optimizer):
            optimizer.step(closure)  # type: ignore[arg-type]  # annotated as float; torch calls float() on it
        drop_gradients(optimizer)
        self.count_step()
        for hook in self.hooks.on_batch_end:
            hook()
