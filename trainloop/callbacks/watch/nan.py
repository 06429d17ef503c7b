"""End training when values are NaN or infinite, and report where they first occurred."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainloop._support.nested import tensors_of
from trainloop.callbacks.arguments import check_flags, count_of
from trainloop.callbacks.base import logs_nothing
from trainloop.callbacks.monitor import Monitor
from trainloop.callbacks.weights.gradient import GradientCallbackBase, norms_of, which_are_finite
from trainloop.optim.parameters import note_registrations
from trainloop.parallel.sharded.shards import local_shard

__all__ = ["NonFinite", "TerminateOnNaN"]


@dataclass(frozen=True)
class NonFinite:
    """Location of the first NaN or infinity that :class:`TerminateOnNaN` found.

    Examples
    --------
    >>> guard = TerminateOnNaN()
    >>> tl.fit(num_epochs=10, callbacks=[guard])
    >>> guard.found.step, guard.found.parameters
    (1234, ('encoder.0.weight',))
    """

    epoch: int
    """Index of the epoch."""
    step: int
    """Optimizer step, counted from 1 as in logs."""
    what: str
    """Description of what was not finite."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters whose gradients were not finite in that step, in the order of the model's parameters."""

    def __str__(self) -> str:
        return f"{self.what} in step {self.step} (epoch {self.epoch + 1})"


class TerminateOnNaN(GradientCallbackBase):
    """Stop training when the loss, a gradient or a metric becomes NaN or infinite, and name the step and the parameter.

    The loss of each micro-batch and the largest gradient of each parameter stay on their device and are checked every
    few steps, so that the loop does not wait for a GPU in between. The report still names the first bad step. Gradients
    that AMP finds infinite are ignored, because AMP skips that step and lowers its scale.

    Parameters
    ----------
    monitor : str
        Metric in ``history`` that is checked after each epoch, in addition.
    check_every_n_steps : int, optional
        Steps between two checks. Default: 1 on the CPU, 50 on other devices.
    gradients : bool
        Check gradients, too, which costs one pass over all gradients in each step. If False, the report can't name a
        parameter.

    Attributes
    ----------
    found : NonFinite or None
        The values that ended training; None if all values were finite.

    Examples
    --------
    >>> guard = TerminateOnNaN()
    >>> tl.fit(num_epochs=10, callbacks=[guard])
    Training ends: the gradient of 'encoder.0.weight' is not finite in step 1234 (epoch 2).
    >>> guard.found.parameters
    ('encoder.0.weight',)
    """

    def __init__(self, monitor: str = "loss", check_every_n_steps: int | None = None, gradients: bool = True) -> None:
        super().__init__("TerminateOnNaN", execution_order=98)
        self.monitor = monitor
        self.check_every_n_steps = count_of("TerminateOnNaN", "check_every_n_steps", check_every_n_steps, optional=True)
        self.gradients = gradients
        check_flags(type(self).__name__, gradients=self.gradients)
        self.found: NonFinite | None = None
        self._metric = Monitor(monitor, "min", owner="TerminateOnNaN", judges=False)  # the mode is not used
        self._every = 1
        self._parameters: dict[int, list[tuple[str, Tensor]]] = {}
        self._registrations = ExitStack()
        self._forget_values()

    def _forget_values(self) -> None:
        self._values: list[Tensor] = []
        self._sources: list[tuple[int, str | None]] = []  # step and parameter of each value; None for the loss
        self._gradients_from = 0  # index in both lists at which the current step's gradients begin
        self._steps = 0
        self._step_done = False

    def on_train_loop_registration(self) -> None:
        self._metric.check(self.train_loop_obj)

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        self.found = None
        self._metric.begin(loop)
        self._end_registrations()
        self._registrations = note_registrations(lambda *_: self._parameters.clear())
        self._forget_values()
        self._every = self.check_every_n_steps or (1 if loop.device.type == "cpu" else 50)

    def on_epoch_begin(self) -> None:
        self._parameters = {}  # callbacks may have given the optimizer other parameters

    def on_train_end(self) -> None:
        self._end_registrations()

    def on_exception(self, exception: BaseException) -> None:
        self._end_registrations()

    def _end_registrations(self) -> None:
        self._parameters = {}
        self._registrations.close()

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        if not self.gradients:
            return
        loop = self.train_loop_obj
        if optimizer_idx == 0:
            self._gradients_from = len(self._values)
        names, gradients = [], []
        if optimizer_idx not in self._parameters:
            self._parameters[optimizer_idx] = self.named_parameters(optimizer_idx)
        for name, parameter in self._parameters[optimizer_idx]:
            gradient = parameter.grad
            # Each rank checks its shard of a sharded gradient. If a rank finds NaN, training ends on all ranks.
            shard = None if gradient is None else local_shard(gradient)
            if shard is not None and shard.numel():  # a rank's shard of a small parameter may be empty
                names.append(name)
                gradients.append(shard._values() if shard.is_sparse else shard)
        if gradients:
            # The largest absolute value of a finite gradient never overflows, unlike its sum of squares.
            self._values += norms_of(gradients, math.inf)
            self._sources += [(loop.global_step + 1, name) for name in names]

    def on_after_optimizer_step(self) -> None:
        if self.train_loop_obj.step_skipped:
            del self._values[self._gradients_from :], self._sources[self._gradients_from :]
        self._gradients_from = len(self._values)
        self._steps += 1
        self._step_done = True

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        # The step that includes this batch. global_step already counts this step if this was the step's last batch.
        step = loop.global_step + (not self._step_done)
        for loss in tensors_of(loop.last_loss):
            self._values.append(loss)
            self._sources.append((step, None))
        if self._step_done:
            self._step_done = False
            if self._steps >= self._every:
                self._check_values()

    @logs_nothing
    def on_epoch_end(self) -> None:
        self._check_values()
        value = self._metric.new_value(self.train_loop_obj)
        if value is not None and not math.isfinite(value) and self.found is None:
            loop = self.train_loop_obj
            self._report_and_end(NonFinite(loop.epoch, loop.global_step, f"{self.monitor} is {value}"))

    def _check_values(self) -> None:
        values, sources = self._values, self._sources
        self._forget_values()
        if not values or self.found is not None:
            return
        # This is the only wait for the device, once per `check_every_n_steps`.
        bad = [source for source, ok in zip(sources, which_are_finite(values), strict=True) if not ok]
        if not bad:
            return
        step = min(step for step, _ in bad)
        parameters = tuple(dict.fromkeys(name for its_step, name in bad if its_step == step and name is not None))
        what = describe_not_finite(loss=(step, None) in bad, gradients=parameters)
        self._report_and_end(NonFinite(self.train_loop_obj.epoch, step, what, parameters))

    def _report_and_end(self, found: NonFinite) -> None:
        loop = self.train_loop_obj
        self.found = found
        self.end_training()
        # Gradients are equal on all ranks, so rank 0 reports them. A loss is reported by the rank that computed it.
        if loop.is_main_process() or not found.parameters:
            where = "" if loop.world_size == 1 or found.parameters else f" on rank {loop.rank}"
            loop.report(f"Training ends: {found}{where}.", logging.WARNING)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_values=[], _sources=[], _gradients_from=0, _parameters={}, _registrations=ExitStack())
        return state

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._metric.load_state_dict(state["metric"])


def describe_not_finite(*, loss: bool, gradients: Sequence[str]) -> str:
    """Return a message that names the loss and gradients that are not finite; an empty string if all are finite."""
    found = ["the loss is not finite"] if loss else []
    if gradients:
        more = f" (and of {len(gradients) - 1} more)" if len(gradients) > 1 else ""
        found.append(f"the gradient of {gradients[0]!r}{more} is not finite")
    return "; ".join(found)
