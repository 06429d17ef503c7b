"""Several losses and optimizers in one step: ``MultiLoss`` and ``MultiOptimizer``; helpers for any optimizer."""

from trainloop.optim.losses import MultiLoss
from trainloop.optim.optimizers import MultiOptimizer

__all__ = ["MultiLoss", "MultiOptimizer"]
