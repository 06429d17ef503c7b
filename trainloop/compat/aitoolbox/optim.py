"""AIToolbox's multiple losses and optimizers, whose ``backward``, ``step`` and ``zero_grad`` a script may override.

They work as in AIToolbox, one optimizer after the other::

    for each micro-batch
        losses = get_loss(...)
        for each optimizer
            losses.backward(i, iteration, scaler)          # gradients of all that the loss depends on
            in the step's last micro-batch
                optimizer.step(i, iteration, scaler)
                optimizer.zero_grad(i, iteration)

So a loss also leaves gradients in parameters of other optimizers, unlike in :class:`trainloop.MultiLoss`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trainloop import optim as core
from trainloop.callbacks.train_schedule import AbstractScheduler
from trainloop.compat.aitoolbox.inputs import as_optimizer
from trainloop.data import StepBatches
from trainloop.errors import ConfigurationError
from trainloop.optim import parameters_of
from trainloop.parallel import reduce_gradients
from trainloop.train_loop.training import Training

if TYPE_CHECKING:
    from trainloop.train_loop.loop import TrainLoop

__all__ = ["MultiLoss", "MultiOptimizer"]


class MultiLoss(core.MultiLoss):
    """Named losses, each with one optimizer.

    Parameters
    ----------
    loss_dict : dict
    loss_optimizer_map : dict, optional
        Index of each loss's optimizer. Default: their order.
    retain_graph_until_last : bool
        Keep the graph for the losses that follow.
    """

    def __init__(  # losses may be floats here, after item(): the core's checks don't fit
        self,
        loss_dict: dict[str, Any],
        loss_optimizer_map: Mapping[str, Any] | None = None,
        retain_graph_until_last: bool = True,
    ) -> None:
        if loss_optimizer_map is not None and len(loss_optimizer_map) != len(loss_dict):
            raise ConfigurationError(
                f"loss_optimizer_map names {list(loss_optimizer_map)}, but the losses are {list(loss_dict)}: give "
                "each loss the index of its optimizer."
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
        """Compute gradients of one optimizer's loss, in every leaf of its graph."""
        loss = amp_grad_scaler.scale(self.loss_dict[self.optimizer_loss_map[optimizer_idx]])
        loss.backward(retain_graph=True if self.retain_graph_until_last and self.loss_backward_remaining > 1 else None)
        self.loss_backward_remaining -= 1

    def map(self, function: Callable[[Any], Any]) -> MultiLoss:
        """Return the losses after ``function``, in the same class, so that overrides are kept."""
        other = copy.copy(self)
        other.loss_dict = {name: function(loss) for name, loss in self.loss_dict.items()}
        return other

    def assigned_to(self, optimizer: core.MultiOptimizer) -> core.MultiLoss:
        """Return the losses as the core's, for an optimizer of the core."""
        return core.MultiLoss(self.loss_dict, self.loss_optimizer_map, self.retain_graph_until_last).assigned_to(
            optimizer
        )

    def item(self) -> MultiLoss:  # type: ignore[override]  # AIToolbox's stays a MultiLoss
        """Return the values as floats."""
        return self.map(lambda loss: loss.item())

    def detach(self) -> MultiLoss:
        """Return the losses without graphs."""
        return self.map(lambda loss: loss.detach())

    def numpy(self) -> MultiLoss:
        """Return the losses as numpy arrays."""
        return self.map(lambda loss: loss.numpy())

    def cpu(self, *args: Any, **kwargs: Any) -> MultiLoss:
        """Return the losses on the CPU."""
        return self.map(lambda loss: loss.cpu(*args, **kwargs))

    def cuda(self, *args: Any, **kwargs: Any) -> MultiLoss:
        """Return the losses on a GPU."""
        return self.map(lambda loss: loss.cuda(*args, **kwargs))

    def to(self, *args: Any, **kwargs: Any) -> MultiLoss:
        """Apply ``Tensor.to`` to each loss."""
        return self.map(lambda loss: loss.to(*args, **kwargs))

    @property
    def device(self) -> dict[str, torch.device]:
        """The device of each loss."""
        return {name: loss.device for name, loss in self.loss_dict.items()}

    def get_loss_dict(self) -> dict[str, Any]:
        """Return the dict itself."""
        return self.loss_dict

    def __setitem__(self, key: str, value: Any) -> None:
        self.loss_dict[key] = value

    def __delitem__(self, key: str) -> None:
        del self.loss_dict[key]


class MultiTraining(Training):
    """Backward, step and ``zero_grad`` of one optimizer after the other; counted as one step."""

    def forward_backward(self, step: StepBatches, **_: Any) -> None:
        """Do all of a step except the work after its last micro-batch."""
        loop, place, recorder = self.loop, self.place, self.recorder
        optimizer: Any = loop.optimizer
        counts = self.micro_batches_of_ranks(step) if step.ragged else None
        count = max(counts) if counts else len(step.batches)
        recorder.step = loop.global_step + 1
        self.gradients.apart, self.gradients.ragged = True, step.ragged
        if self.gather is not None:  # the model itself: DDP's reducer expects one backward per forward
            place.share_buffers()
        for i in range(count):
            self.begin_batch(i, step.sizes[i] if i < len(step.batches) else 0)
            loss = None
            if i < len(step.batches):
                with place.alone(counts, i):
                    loss = self._loss(step, i, count)
            for index in range(len(optimizer)):
                if loss is not None:
                    loss.backward(index, _iteration(loop), place.scaler)
                if i == count - 1:
                    self._take_step(optimizer, index)
        place.scaler.update()

    def step(self) -> None:
        """Do nothing more: the optimizers have already stepped, each after its loss."""
        self.loop.global_step += 1
        self.epoch_steps += 1
        for hook in self.hooks.on_batch_end:
            hook()

    def _loss(self, step: StepBatches, i: int, count: int) -> MultiLoss:
        loop, place = self.loop, self.place
        with place.autocast:
            output = place.evaluated.get_loss(step.batches[i], loop.criterion, place.device)
        if not isinstance(output, MultiLoss):
            raise ConfigurationError(
                f"get_loss returned a {type(output).__name__}: with a MultiOptimizer of aitoolbox it must return a "
                "MultiLoss of aitoolbox, with a loss for each optimizer."
            )
        loop.last_loss = self.recorder.add_loss(output, step.sizes[i])
        loop.__dict__["last_losses"] = output.detach()
        scale = None if step.scales is None else step.scales[i]
        scaled = self.gradients.scaled(output, None, scale, count, step.sizes[i])
        assert isinstance(scaled, MultiLoss)  # map() divides and multiplies it
        return scaled

    def _take_step(self, optimizers: Any, index: int) -> None:
        loop, scaler, optimizer = self.loop, self.place.scaler, optimizers[index]
        parameters = parameters_of(optimizer)
        if self.gather is not None:
            # Including the gradients that other optimizers' losses left: each parameter is averaged once between two
            # steps.
            reduce_gradients(parameters)
        self.gradients.show_and_clip([(index, optimizer)], parameters)
        optimizers.step(index, _iteration(loop), scaler)
        last = index == len(optimizers) - 1
        for hook in self.hooks.on_after_optimizer_step:
            if last or not isinstance(getattr(hook, "__self__", None), AbstractScheduler):  # these count steps
                hook()
        optimizers.zero_grad(index, _iteration(loop))


def _iteration(loop: TrainLoop) -> int:
    """Return the index of the batch in its epoch, if the loop is AIToolbox's."""
    return int(getattr(loop, "iteration", loop.total_iteration_idx))


class MultiOptimizer(core.MultiOptimizer):
    """Several optimizers, each stepped for its loss of a :class:`MultiLoss`; override ``step`` and ``zero_grad``."""

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
