"""Steps of an optimizer that evaluates the loss several times: ``optimizer.step(closure)``."""

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
    """Pass the optimizer a closure that runs the step's micro-batches each time; only the first run is logged.

    Each run is a whole :meth:`Training.forward_backward`: as in a hand-written loop, dropout draws new masks. All ranks
    get the same gradients and the same loss, so a line search takes the same decisions on all of them.
    """

    _batches: StepBatches

    def forward_backward(self, step: StepBatches, **_: Any) -> None:
        """Store the batches; the optimizer's step runs them."""
        self._batches = step

    def step(self) -> None:
        """Step the optimizer, which evaluates the closure as often as it needs to."""
        gradients = self.gradients
        (optimizer,) = gradients.optimizers
        forward_backward = super().forward_backward
        first = True

        def closure() -> Tensor:
            nonlocal first
            drop_gradients(optimizer)
            # Optimizers call their closure under no_grad. Repetitions log into a recorder that is never read.
            with torch.enable_grad(), nullcontext() if first else self.listening(Recorder()):
                value = forward_backward(self._batches, first=first, wants_loss=True)
                # In every run, not once per step: else a line search would compare clipped with unclipped gradients.
                gradients.show_and_clip(enumerate(gradients.optimizers), gradients.parameters)
            first = False
            assert value is not None  # because of wants_loss
            return value

        if getattr(optimizer, "needs_closure", False):
            closure()  # its step needs gradients at the start, and then calls the closure again
        optimizer.step(closure)  # type: ignore[arg-type]  # annotated as float; torch calls float() on it
        drop_gradients(optimizer)
        self.count_step()
        for hook in self.hooks.on_batch_end:
            hook()
