"""AIToolbox's losses, optimizers and schedulers, and optimizers that a script defines itself.

A script may override ``backward`` of :class:`MultiLoss`, and ``step`` and ``zero_grad`` of :class:`MultiOptimizer`.
They are called as in AIToolbox, one optimizer after the other::

    for each micro-batch
        losses = get_loss(...)
        for each optimizer
            losses.backward(i, iteration, scaler)          # gradients of all parameters that the loss depends on
            in the step's last micro-batch
                optimizer.step(i, iteration, scaler)
                optimizer.zero_grad(i, iteration)

So, unlike in :class:`trainloop.MultiLoss`, a loss also adds gradients to parameters of other optimizers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from trainloop import optim as core
from trainloop.callbacks.train_schedule import AbstractScheduler, LRScheduler
from trainloop.data import StepBatches
from trainloop.errors import ConfigurationError
from trainloop.optim import parameters_of
from trainloop.parallel import reduce_gradients
from trainloop.train_loop.training import Training

if TYPE_CHECKING:
    pass


def _each(name: str) -> Any:
    """Return a method of :class:`MultiLoss` that calls the method ``name`` of each loss."""

    def method(self: MultiLoss, *args: Any, **kwargs: Any) -> MultiLoss:
        return self.map(lambda loss: getattr(loss, name)(*args, **kwargs))

    return method


class MultiLoss(core.MultiLoss):
    """Named losses, each of which is for one optimizer.

    Parameters
    ----------
    loss_dict : dict
    loss_optimizer_map : dict, optional
        Index of the optimizer of each loss. Default: in the order of the losses.
    retain_graph_until_last : bool
        Keep the graph for the losses that follow.
    """

    def __init__(  # the base class rejects floats, which item() returns
        self,
        loss_dict: dict[str, Any],
        loss_optimizer_map: Mapping[str, Any] | None = None,
        retain_graph_until_last: bool = True,
    ) -> None:
        if loss_optimizer_map is not None and len(loss_optimizer_map) != len(loss_dict):
            raise ConfigurationError(
                f"loss_optimizer_map names {list(loss_optimizer_map)}, but the losses are {list(loss_dict)}. In the "
                "map, give each loss the index of its optimizer."
            )
        self.loss_dict = loss_dict
        self.loss_optimizer_map = (
            {name: i for i, name in enumerate(loss_dict)}
            if loss_optimizer_map is None
            else {str(name): int(index) for name, index in loss_optimizer_map.items()}
        )
        self.optimizer_loss_map = {index: name for name, index in self.loss_optimizer_map.items()}
        self.retain_graph_until_last = retain_graph_until_last
        self.loss_backward_remaining = len(loss_dict)

    def backward(  # type: ignore[override]  # AIToolbox's signature, which scripts override
        self, optimizer_idx: int, iteration: int, amp_grad_scaler: torch.amp.GradScaler
    ) -> None:
        """Compute the gradients of one optimizer's loss for every leaf of its graph."""
        loss = amp_grad_scaler.scale(self.loss_dict[self.optimizer_loss_map[optimizer_idx]])
        loss.backward(retain_graph=True if self.retain_graph_until_last and self.loss_backward_remaining > 1 else None)
        self.loss_backward_remaining -= 1

    def map(self, function: Callable[[Any], Any]) -> MultiLoss:
        """Apply ``function`` to each loss, and return an object of the same class, so that overrides are kept."""
        other = copy.copy(self)
        other.loss_dict = {name: function(loss) for name, loss in self.loss_dict.items()}
        return other

    def assigned_to(self, optimizer: core.MultiOptimizer) -> core.MultiLoss:
        """Return a :class:`trainloop.MultiLoss` with the same losses, for a :class:`trainloop.MultiOptimizer`."""
        return core.MultiLoss(self.loss_dict, self.loss_optimizer_map, self.retain_graph_until_last).assigned_to(
            optimizer
        )

    item, detach, numpy = _each("item"), _each("detach"), _each("numpy")
    cpu, cuda, to = _each("cpu"), _each("cuda"), _each("to")

    @property
    def device(self) -> dict[str, torch.device]:
        """Device of each loss."""
        return {name: loss.device for name, loss in self.loss_dict.items()}

    def get_loss_dict(self) -> dict[str, Any]:
        """Return the dict itself."""
        return self.loss_dict

    def __setitem__(self, key: str, value: Any) -> None:
        self.loss_dict[key] = value

    def __delitem__(self, key: str) -> None:
        del self.loss_dict[key]


class MultiTraining(Training):
    """Training that runs backward, step and ``zero_grad`` for one optimizer after the other, as a single step."""

    def forward_backward(self, step: StepBatches, **_: Any) -> None:
        """Run the backward passes of a step and, in the step's last micro-batch, the optimizers' steps."""
        loop, place, recorder = self.loop, self.place, self.recorder
        optimizer: Any = loop.optimizer
        counts = step.counts
        count = max(counts) if counts else len(step.batches)
        recorder.step = loop.global_step + 1
        self.gradients.reduced_later, self.gradients.ragged = True, counts is not None
        if self.parallel:  # not DDP's wrapper, whose reducer expects one backward per forward
            place.share_buffers()
        for i in range(count):
            self.begin_batch(i, step.sizes[i] if i < len(step.batches) else 0)
            loss = None
            if i < len(step.batches):
                with place.batchnorm_ranks(counts, i):
                    loss = self._loss(step, i, count)
            for index in range(len(optimizer)):
                if loss is not None:
                    loss.backward(index, _iteration(loop), place.scaler)
                if i == count - 1:
                    self._take_step(optimizer, index)
        place.scaler.update()

    def step(self) -> None:
        """Finish the step. The optimizers have already stepped, each after its loss."""
        self.loop.progress.global_step += 1
        self.epoch_steps += 1
        for hook in self.hooks.on_batch_end:
            hook()

    def _loss(self, step: StepBatches, i: int, count: int) -> MultiLoss:
        loop, place = self.loop, self.place
        with place.autocast:
            output = place.evaluated.get_loss(step.batches[i], loop.criterion, place.device)
        if not isinstance(output, MultiLoss):
            raise ConfigurationError(
                f"get_loss returned a {type(output).__name__}. With AIToolbox's MultiOptimizer, return AIToolbox's "
                "MultiLoss with a loss for each optimizer."
            )
        loop.progress.last_loss = self.recorder.add_loss(output, step.sizes[i])
        loop.__dict__["last_losses"] = output.detach()
        scale = None if step.scales is None else step.scales[i]
        scaled = self.gradients.scaled(output, None, scale, count, step.sizes[i])
        assert isinstance(scaled, MultiLoss)  # map() divides and multiplies it
        return scaled

    def _take_step(self, optimizers: Any, index: int) -> None:
        loop, scaler, optimizer = self.loop, self.place.scaler, optimizers[index]
        parameters = parameters_of(optimizer)
        if self.parallel:
            # This includes gradients from the losses of other optimizers. Each parameter is averaged once between two
            # steps.
            reduce_gradients(parameters)
        self.gradients.show_and_clip([(index, optimizer)], parameters)
        optimizers.step(index, _iteration(loop), scaler)
        last = index == len(optimizers) - 1
        for hook in self.hooks.on_after_optimizer_step:
            if last or not isinstance(getattr(hook, "__self__", None), AbstractScheduler):  # schedulers count steps
                hook()
        optimizers.zero_grad(index, _iteration(loop))


def _iteration(loop: Any) -> int:
    """Return the index of the batch in its epoch, if the loop is AIToolbox's."""
    return int(getattr(loop, "iteration", loop.total_iteration_idx))


class MultiOptimizer(core.MultiOptimizer):
    """Several optimizers, each for its own loss of a :class:`MultiLoss`. Override ``step`` and ``zero_grad``."""

    training_class: ClassVar[type[Training]] = MultiTraining

    def __init__(self, optimizer_list: Sequence[torch.optim.Optimizer]) -> None:
        given = isinstance(optimizer_list, (list, tuple))
        super().__init__([as_optimizer(optimizer) for optimizer in optimizer_list] if given else optimizer_list)

    def step(  # type: ignore[override]  # AIToolbox's signature, which scripts override
        self, optimizer_idx: int, iteration: int, amp_grad_scaler: torch.amp.GradScaler
    ) -> None:
        """Step one optimizer."""
        amp_grad_scaler.step(self.optimizer_list[optimizer_idx])

    def zero_grad(self, optimizer_idx: int, iteration: int) -> None:  # type: ignore[override]  # as above
        """Clear the gradients of one optimizer's parameters."""
        self.optimizer_list[optimizer_idx].zero_grad()

    def load_state_dict(self, state_dict_list: Any) -> None:
        """Load the result of ``state_dict``."""
        if not isinstance(state_dict_list, list):
            raise TypeError(f"state_dict_list is a {type(state_dict_list).__name__}: must be a list of state dicts.")
        super().load_state_dict(state_dict_list)


# -- optimizers that a script defines itself ---------------------------------------------------------------------------


def _of_inner(name: str) -> Any:
    """Return a property of :class:`OwnOptimizer` that reads an attribute of the wrapped object.

    If the object contains exactly one torch optimizer, the property reads that optimizer's attribute instead. The
    attribute is looked up at each access, because loading a state replaces it.
    """

    def get(self: OwnOptimizer) -> Any:
        inner = self.__dict__.get("inner")
        held = [part for part in getattr(inner, "__dict__", {}).values() if isinstance(part, torch.optim.Optimizer)]
        found = getattr(held[0] if len(held) == 1 else inner, name, None)
        return found if isinstance(found, (dict, list)) else self.__dict__.get(name)

    return property(get, lambda self, value: self.__dict__.update({name: value}))


class OwnOptimizer(torch.optim.Optimizer):
    """A torch optimizer that wraps an object with ``step()`` and ``zero_grad()``, such as a wrapper that sets the rate.

    It forwards calls and attribute access to the object. Groups and state are read from the object, or from the only
    torch optimizer in the object.

    Parameters
    ----------
    inner : object
    parameters : iterable of Tensor
        Parameters that the object updates. Used if neither the object nor a torch optimizer inside it has groups.
    """

    def __init__(self, inner: Any, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__([{"params": list(parameters)}], {})
        self.inner = inner

    param_groups = _of_inner("param_groups")
    state = _of_inner("state")

    def step(self, closure: Any = None) -> Any:
        """Call the object's ``step``."""
        return self.inner.step() if closure is None else self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the object's ``zero_grad``."""
        self.inner.zero_grad()

    def state_dict(self) -> Any:
        """Return the object's state; empty if the object has no state."""
        return self.inner.state_dict() if hasattr(self.inner, "state_dict") else {}

    def check_state(self) -> None:
        """Raise an ``AttributeError``, as in AIToolbox, if the object has no state to save."""
        if not hasattr(self.inner, "state_dict"):
            raise AttributeError(
                f"the optimizer, a {type(self.inner).__name__}, has no state_dict(). Write one, so that checkpoints "
                "can contain it."
            )

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the result of :meth:`state_dict`."""
        if hasattr(self.inner, "load_state_dict"):
            self.inner.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getstate__(self) -> dict[str, Any]:
        fields = {name: self.__dict__[name] for name in ("defaults", "param_groups", "state")}
        return {**fields, "inner": self.inner}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def as_optimizer(optimizer: Any, parameters: Iterable[Tensor] = ()) -> Any:
    """Wrap an object with ``step`` and ``zero_grad`` as a torch optimizer. Return any other object unchanged."""
    if isinstance(optimizer, (torch.optim.Optimizer, core.MultiOptimizer, type)):
        return optimizer
    if all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad")):
        return OwnOptimizer(optimizer, parameters)
    return optimizer


# -- schedulers --------------------------------------------------------------------------------------------------------


class GeneralLRSchedulerCallback(LRScheduler):
    """A scheduler of a torch scheduler class, which steps once per epoch."""

    train_loop_obj: Any  # AIToolbox's loop, with more attributes

    def __init__(self, scheduler_class: Any, optimizer_idx: int | Optimizer | None = None, **kwargs: Any) -> None:
        super().__init__(scheduler_class, optimizer_idx=optimizer_idx, **kwargs)


class LambdaLRScheduler(GeneralLRSchedulerCallback):
    """Multiply the initial rates by a function of the number of epochs, or of steps."""

    def __init__(
        self,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        execute_epoch_end: bool = True,
        execute_batch_end: bool = False,
        **kwargs: Any,
    ) -> None:
        if bool(execute_epoch_end) == bool(execute_batch_end):
            raise ConfigurationError(
                f"{type(self).__name__}: execute_epoch_end={execute_epoch_end}, execute_batch_end={execute_batch_end}: "
                "exactly one must be True."
            )
        interval = "step" if execute_batch_end else "epoch"
        super().__init__(lr_scheduler.LambdaLR, interval=interval, lr_lambda=lr_lambda, **kwargs)


class StepLRScheduler(GeneralLRSchedulerCallback):
    """Multiply rates by ``gamma`` every ``step_size`` epochs."""

    def __init__(self, step_size: int, **kwargs: Any) -> None:
        super().__init__(lr_scheduler.StepLR, step_size=step_size, **kwargs)


class MultiStepLRScheduler(GeneralLRSchedulerCallback):
    """Multiply rates by ``gamma`` at given epochs."""

    def __init__(self, milestones_list: Sequence[int], **kwargs: Any) -> None:
        super().__init__(lr_scheduler.MultiStepLR, milestones=list(milestones_list), **kwargs)


class ReduceLROnPlateauScheduler(GeneralLRSchedulerCallback):
    """Lower rates when the validation loss stops falling.

    With several losses, use their mean or ``main_multi_loss``.
    """

    def __init__(self, main_multi_loss: str | None = None, **kwargs: Any) -> None:
        super().__init__(lr_scheduler.ReduceLROnPlateau, monitor="val_loss", **kwargs)
        self.main_multi_loss = main_multi_loss

    def on_epoch_end(self) -> None:
        loss = self.train_loop_obj.evaluate_loss_on_validation_set(float_dict_format=True)
        if isinstance(loss, dict):
            loss = sum(loss.values()) / len(loss) if self.main_multi_loss is None else loss[self.main_multi_loss]
        self._step(loss)


class ReduceLROnPlateauMetricScheduler(GeneralLRSchedulerCallback):
    """Lower rates when a metric of the history stops improving."""

    def __init__(self, metric_name: str, **kwargs: Any) -> None:
        # The base class's monitor is not used, because the metric is in train_history.
        super().__init__(lr_scheduler.ReduceLROnPlateau, monitor="loss", **kwargs)
        self.metric_name = metric_name

    def on_epoch_end(self) -> None:
        history = self.train_loop_obj.train_history
        if not history.get(self.metric_name):
            raise ConfigurationError(
                f"ReduceLROnPlateauMetricScheduler: {self.metric_name!r} is not in train_history, which has: "
                f"{', '.join(history)}."
            )
        self._step(float(history[self.metric_name][-1]))
