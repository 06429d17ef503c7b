"""Schedules that start with a linear warm-up, from 0 to the optimizer's learning rate.

The curves are the same as those of Hugging Face Transformers' ``get_*_schedule_with_warmup`` functions. All schedules
count optimizer steps.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import number_of
from trainloop.callbacks.weights.train_schedule import LRScheduler
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import set_rate

__all__ = [
    "ConstantWithWarmupScheduler",
    "CosineWithWarmupScheduler",
    "HardRestartsCosineWithWarmupScheduler",
    "LinearWithWarmupScheduler",
]


class _WarmupScheduler(LRScheduler):
    """Base of schedules with a warm-up, followed by a curve over the rest of the training."""

    def __init__(
        self, curve: Any, num_warmup_steps: int, num_training_steps: int | None, last_epoch: int, **kwargs: Any
    ) -> None:
        own = type(self).__name__
        num_warmup_steps = number_of(own, "num_warmup_steps", num_warmup_steps, least=0, finite=True)
        num_training_steps = number_of(own, "num_training_steps", num_training_steps, finite=True, optional=True)
        for name, steps in (("num_warmup_steps", num_warmup_steps), ("num_training_steps", num_training_steps)):
            if steps is not None and 0 < steps < 1:
                raise ConfigurationError(
                    f"{own}: {name}={steps}: must be a number of optimizer steps, not a fraction. Pass, for example, "
                    "round(0.1 * tl.num_optimizer_steps(num_epochs))."
                )
        if num_training_steps is not None and num_training_steps < num_warmup_steps:
            raise ConfigurationError(
                f"{own}: num_training_steps={num_training_steps}: must not be less than "
                f"num_warmup_steps={num_warmup_steps}."
            )
        self.num_warmup_steps = num_warmup_steps
        self.num_training_steps = num_training_steps
        self._factor = partial(_factor, curve, num_warmup_steps)
        # The default length of the curve is that of the training, which is unknown before registration.
        kwargs = {"num_training_steps": num_training_steps, "last_epoch": last_epoch, **kwargs}
        super().__init__(partial(warmup_schedule, self._factor), "step", **kwargs)

    def on_train_loop_registration(self) -> None:
        earlier = self.scheduler
        super().on_train_loop_registration()
        if earlier is self.scheduler and self.num_training_steps is None:  # an earlier fit's, with a shorter curve
            before = float(self.scheduler.optimizer.param_groups[0]["lr"])
            self._follow_curve()
            self._warn_of_jump(before)

    def _warn_of_jump(self, before: float) -> None:
        """Warn if a schedule that had ended is extended."""
        now = self.scheduler.optimizer.param_groups[0]["lr"]
        if before < 0.01 * now and self.scheduler.last_epoch > self.num_warmup_steps:
            warn(
                f"{type(self).__name__}: the schedule had ended in an earlier fit, and is now extended to "
                f"{self._planned_steps()} optimizer steps, so that the learning rate jumps from {before:.3g} to "
                f"{now:.3g}. To avoid this, pass num_training_steps, the number of all calls of fit together, or pass "
                "a new schedule to each call."
            )

    def _follow_curve(self) -> None:
        """Set the rates to those of the curve as it is now; an optimizer may have rates of a shorter training."""
        factor = partial(self._factor, self._made_with()["num_training_steps"])
        self.scheduler.lr_lambdas = [factor] * len(self.scheduler.lr_lambdas)
        for group, rate in zip(self.scheduler.optimizer.param_groups, self.scheduler.base_lrs):
            set_rate(group, rate * factor(self.scheduler.last_epoch))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._follow_curve()  # this run may be longer than the checkpoint's

    def _schedule_length(self) -> tuple[int | None, bool]:
        return self.num_training_steps, True


class ConstantWithWarmupScheduler(_WarmupScheduler):
    """Linear warm-up, then a constant learning rate.

    Parameters
    ----------
    num_warmup_steps : int
        Number of optimizer steps in which the rate rises from 0 to its full value.
    last_epoch : int
        Number of steps already done; -1 if no step has been done. Passed to ``LambdaLR``.
    **kwargs
        Further arguments of :class:`.LRScheduler`, such as ``optimizer_idx``.

    Examples
    --------
    >>> ConstantWithWarmupScheduler(num_warmup_steps=100)
    """

    def __init__(self, num_warmup_steps: int, last_epoch: int = -1, **kwargs: Any) -> None:
        super().__init__(_constant, num_warmup_steps, num_warmup_steps, last_epoch, **kwargs)

    def _schedule_length(self) -> tuple[int | None, bool]:
        return self.num_warmup_steps, False


class LinearWithWarmupScheduler(_WarmupScheduler):
    """Linear warm-up, then a linear decrease to 0.

    Parameters
    ----------
    num_warmup_steps : int
        Number of optimizer steps in which the rate rises from 0 to its full value.
    num_training_steps : int, optional
        Total number of optimizer steps, after which the rate is 0. Default: the number of steps in ``fit``, see
        :meth:`~trainloop.train_loop.TrainLoop.num_optimizer_steps`.
    last_epoch, **kwargs
        As in :class:`ConstantWithWarmupScheduler`.

    Examples
    --------
    >>> LinearWithWarmupScheduler(num_warmup_steps=100)
    """

    def __init__(
        self, num_warmup_steps: int, num_training_steps: int | None = None, last_epoch: int = -1, **kwargs: Any
    ) -> None:
        super().__init__(_linear, num_warmup_steps, num_training_steps, last_epoch, **kwargs)


class CosineWithWarmupScheduler(_WarmupScheduler):
    """Linear warm-up, then a cosine curve.

    Parameters
    ----------
    num_warmup_steps : int
        Number of optimizer steps in which the rate rises from 0 to its full value.
    num_training_steps : int, optional
        Total number of optimizer steps. Default: the number of steps in ``fit``, see
        :meth:`~trainloop.train_loop.TrainLoop.num_optimizer_steps`.
    num_cycles : float
        Number of periods of the cosine after the warm-up; 0.5 decreases to 0 once.
    last_epoch, **kwargs
        As in :class:`ConstantWithWarmupScheduler`.

    Examples
    --------
    >>> CosineWithWarmupScheduler(num_warmup_steps=100)
    """

    def __init__(
        self,
        num_warmup_steps: int,
        num_training_steps: int | None = None,
        num_cycles: float = 0.5,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        num_cycles = number_of(type(self).__name__, "num_cycles", num_cycles, finite=True)
        super().__init__(partial(_cosine, num_cycles), num_warmup_steps, num_training_steps, last_epoch, **kwargs)


class HardRestartsCosineWithWarmupScheduler(_WarmupScheduler):
    """Linear warm-up, then several decreases along a cosine, each from the full rate.

    Parameters
    ----------
    num_warmup_steps : int
        Number of optimizer steps in which the rate rises from 0 to its full value.
    num_training_steps : int, optional
        Total number of optimizer steps. Default: the number of steps in ``fit``, see
        :meth:`~trainloop.train_loop.TrainLoop.num_optimizer_steps`.
    num_cycles : float
        Number of decreases; 1 by default, as in Transformers.
    last_epoch, **kwargs
        As in :class:`ConstantWithWarmupScheduler`.

    Examples
    --------
    >>> HardRestartsCosineWithWarmupScheduler(num_warmup_steps=100, num_cycles=3)
    """

    def __init__(
        self,
        num_warmup_steps: int,
        num_training_steps: int | None = None,
        num_cycles: float = 1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        num_cycles = number_of(type(self).__name__, "num_cycles", num_cycles, finite=True)
        curve = partial(_restarting_cosine, num_cycles)
        super().__init__(curve, num_warmup_steps, num_training_steps, last_epoch, **kwargs)


# Factors are partial objects of module-level functions, because closures can't be pickled. A resumed run uses its own
# arguments. (LambdaLR would load the attributes of other callable objects from the checkpoint.)


def warmup_schedule(factor: Any, optimizer: Optimizer, num_training_steps: int, last_epoch: int) -> LambdaLR:
    return LambdaLR(optimizer, partial(factor, num_training_steps), last_epoch)


def _factor(curve: Any, num_warmup_steps: int, num_training_steps: int, step: int) -> float:
    if step < num_warmup_steps:
        return step / num_warmup_steps
    return max(0.0, curve((step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)))


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(num_cycles: float, progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))


def _restarting_cosine(num_cycles: float, progress: float) -> float:
    return 0.0 if progress >= 1.0 else 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0)))
