"""Steps of an optimizer that evaluates the loss as often as it likes: ``optimizer.step(closure)``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trainloop._metrics import Recorder
from trainloop.data import StepBatches
from trainloop.optim import drop_gradients
from trainloop.train_loop.training import Training

__all__ = ["ClosureTraining"]


class ClosureTraining(Training):
    """The optimizer gets a closure that runs the step's micro-batches each time; only the first run is logged.

    Each run is a whole :meth:`Training.forward_backward`: as in a loop by hand, dropout draws anew. All ranks get the
    same gradients and the same loss, so that a line search does the same on all of them.
    """

    _batches: StepBatches

    def forward_backward(self, step: StepBatches, **_: Any) -> None:
        """Keep the batches; the optimizer's step runs them."""
        self._batches = step

    def step(self) -> None:
        """Step the optimizer, which evaluates the closure as often as it likes."""
        gradients = self.gradients
        (optimizer,) = gradients.optimizers
        forward_backward = super().forward_backward
        first = True

        def closure() -> Tensor:
            nonlocal first
            drop_gradients(optimizer)
            # Optimizers call their closure under no_grad. Repetitions log into a recorder that nobody reads.
            with torch.enable_grad(), nullcontext() if first else self.listening(Recorder()):
                value = forward_backward(self._batches, first=first, wants_loss=True)
                # In every run, not once a step: otherwise a line search would compare clipped gradients with others.
                gradients.show_and_clip(enumerate(gradients.optimizers), gradients.parameters)
            first = False
            assert value is not None  # as asked for
            return value

        if getattr(optimizer, "needs_closure", False):
            closure()  # its step begins with gradients, and asks for further ones
        optimizer.step(closure)  # type: ignore[arg-type]  # torch says float, and calls float() on what it gets
        drop_gradients(optimizer)
        self.count_step()
        for hook in self.hooks.on_batch_end:
            hook()
