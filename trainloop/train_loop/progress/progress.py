"""Define how far a loop has trained, over all calls of ``fit``."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer


@dataclass
class Progress:
    """How far a loop has trained; only the loop's own code changes it, and callbacks read it from the loop."""

    epoch: int = 0
    """Number of finished epochs, which is also the index of the running epoch, from 0; see ``LoopState.epoch``."""
    global_step: int = 0
    """Number of optimizer steps."""
    total_iteration_idx: int = -1
    """Index of the current or last batch, counted from 0 over all epochs; -1 before the first."""
    last_loss: Tensor | None = None
    """Loss of this process's last batch, on its device; reading it waits for the device."""
    found_inf: list[tuple[Optimizer, Tensor]] = field(default_factory=list)
    """For each optimizer and device of the last step, a tensor that is nonzero if its scaled gradients overflowed."""
    epoch_ends: bool = False
    """True if a callback has ended the running epoch."""
