"""Average the weights (EMA, SWA), also over several fits, and recompute BatchNorm's statistics for the average."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from trainloop import distributed
from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import check_counts, check_flags, choice_of, number_of
from trainloop.callbacks.base import AbstractCallback, keeps_state, logs_nothing, require_loader
from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.optim.optimizers import set_rate
from trainloop.optim.parameters import note_registrations
from trainloop.parallel.sharded.shards import full_tensor, is_sharded, local_shard, shard_like
from trainloop.parallel.sync_batchnorm import BatchNorm

__all__ = ["ExponentialMovingAverage", "StochasticWeightAveraging", "WeightAverage"]


class WeightAverage(AbstractCallback):
    """Base of callbacks that keep an average of the weights; subclasses decide when and how to update it.

    Every rank computes the average itself, from equal weights. Integer parameters and buffers are not averaged. The
    average of 16-bit weights is kept in float32, since 16 bits can't represent its small changes.

    Parameters
    ----------
    apply_on_train_end : bool
        If True, the average replaces the model's weights at the end. Of several averages, the last one does.

    Attributes
    ----------
    average : dict of str to Tensor
        The average, by the parameters' names; available from ``on_train_begin`` on.
    updates : int
        Number of updates so far. Subclasses count them.

    Examples
    --------
    The mean of the weights at each epoch's end::

        class EpochMean(WeightAverage):
            def __init__(self):
                super().__init__(apply_on_train_end=True)

            def on_epoch_end(self):
                def mean(averages, weights, updates):
                    for average, weight in zip(averages, weights):
                        average.lerp_(weight, 1 / (updates + 1))

                self.update(mean)
    """

    def __init__(self, apply_on_train_end: bool) -> None:
        # Runs before callbacks that read the weights or metrics.
        super().__init__(type(self).__name__, execution_order=-50)
        self.apply_on_train_end = apply_on_train_end
        check_flags(type(self).__name__, apply_on_train_end=self.apply_on_train_end)
        self.average: dict[str, Tensor] = {}
        self.updates = 0
        # The weights (and BatchNorm's statistics) that the average replaced at the end.
        self._trained: dict[str, Tensor] | None = None
        # The average's tensors, and the parameters; of sharded tensors, the local shards.
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._widens = False
        self._is_outdated = False  # a parameter is lazy, or was registered since
        self._registrations = ExitStack()

    def reset(self) -> None:
        super().reset()
        self.average, self.updates, self._trained = {}, 0, None

    def on_train_begin(self) -> None:
        self._end_average()  # of a run that was ended without its last hooks
        weights = self.weights()
        self.average = _sharded_like(self.average, weights)
        if self._trained is not None:
            # This is a second fit. If the model still has the average, training continues from the trained weights.
            # Otherwise the user has loaded other weights, and training starts from these.
            same = all(_equal(weights[name], value) for name, value in self.average.items() if name in weights)
            if all(is_same for (is_same,) in distributed.exchange_ints([int(same)])):  # a rank compares only its shards
                self._continue_from(self._trained)
            self._trained = None
        self._find_parameters()
        # Callbacks may add or replace parameters in any hook, also before this callback's.
        self._registrations = note_registrations(self._note_registration)

    def on_epoch_begin(self) -> None:
        self._is_outdated = True  # they may have removed some, too

    def _note_registration(self, *_: Any) -> None:
        self._is_outdated = True

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that are averaged, by name, detached; lazy parameters only once they have a shape."""
        return {name: parameter.detach() for name, parameter in self._parameters().items()}

    def update(self, rule: Callable[[list[Tensor], list[Tensor], int], object] | None = None) -> None:
        """Update the average by a rule, and count the update.

        Parameters
        ----------
        rule : callable, optional
            ``rule(averages, weights, updates)`` changes the tensors of the list ``averages`` in place; functions for
            ``multi_avg_fn`` of ``torch.optim.swa_utils.AveragedModel`` have this form. ``weights`` are the current
            weights, in the precision of the average; ``updates`` is the number of earlier updates. Default: copy the
            weights.
        """
        if self._is_outdated:
            self._find_parameters()
        # Parameters, not their memory: an optimizer, or vector_to_parameters, may give a parameter other memory.
        averages, weights = self._pairs
        if self._widens:
            weights = [weight.detach().to(average.dtype) for average, weight in zip(averages, weights, strict=True)]
        with torch.no_grad():
            (rule or _copy_all)(averages, weights, self.updates)
        self.updates += 1

    def _parameters(self) -> dict[str, Tensor]:
        # named_parameters() yields tied parameters once. Integer parameters can't be averaged.
        named = self.train_loop_obj.model.named_parameters()
        found = {name: p for name, p in named if p.is_floating_point() or p.is_complex()}
        return {name: p for name, p in found.items() if not is_lazy(p)}

    def _find_parameters(self) -> None:
        """Find the parameters of the average. The average of a new or an enlarged parameter begins with its value."""
        parameters = self._parameters()
        self._is_outdated = any(map(is_lazy, self.train_loop_obj.model.parameters()))
        self.average = {
            name: _placed_like(self.average[name], p) if self._has(name, p) else _at_least_float32(p.detach()).clone()
            for name, p in parameters.items()
        }
        # to_local() of a sharded parameter takes long; nobody can give it other memory.
        weights = [local_shard(p) if is_sharded(p) else p for p in parameters.values()]
        self._pairs = (list(map(local_shard, self.average.values())), weights)
        self._widens = any(a.dtype != w.dtype for a, w in zip(*self._pairs, strict=True))

    def _has(self, name: str, parameter: Tensor) -> bool:
        return name in self.average and self.average[name].shape == parameter.shape

    def _before_use(self) -> None:
        """Called before the average is read."""
        self._find_parameters()

    def _end_average(self) -> None:
        self._pairs = ([], [])
        self._registrations.close()

    def _continue_from(self, trained: dict[str, Tensor]) -> None:
        """Copy the weights that the average has replaced into the model."""
        _copy_weights({**dict(self.train_loop_obj.model.named_buffers()), **self.weights()}, trained)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the model for the duration of a ``with`` block. In ``ddp``, use it on every rank."""
        self._before_use()
        weights = self.weights()
        trained = {name: weight.clone() for name, weight in weights.items()}
        _copy_weights(weights, self.average)
        try:
            yield
        finally:
            _copy_weights(weights, trained)

    @logs_nothing
    def on_train_end(self) -> None:
        for other in self.train_loop_obj.callbacks if self.apply_on_train_end else ():
            if isinstance(other, WeightAverage) and other is not self and other._trained is not None:
                self._continue_from(other._trained)  # the other average is in the model, and this one takes its place
                other._trained = None
        self._before_use()
        if self.apply_on_train_end:
            weights = self.weights()
            self._trained = {name: weight.clone() for name, weight in weights.items()}
            _copy_weights(weights, self.average)
        self._end_average()

    def on_exception(self, exception: BaseException) -> None:
        self._end_average()

    def __getstate__(self) -> dict[str, Any]:
        # Tensors are moved to the CPU, because the process that receives them may not have the device.
        trained = None if self._trained is None else _to_cpu(self._trained)
        ended: dict[str, Any] = {"_trained": trained, "_pairs": ([], []), "_registrations": ExitStack()}
        return {**self.__dict__, "average": _to_cpu(self.average), **ended}

    def state_dict(self) -> dict[str, Any]:
        # In a checkpoint from the end of training, the model's weights are the average. What was registered since the
        # last update begins with the next one: rank 0 alone may be asked for the state.
        later = sorted(name for name, p in self._parameters().items() if not self._has(name, p))
        average = {name: value for name, value in self.average.items() if name not in later}
        trained = dict(self._trained or {})
        return {"average": average, "updates": self.updates, "trained": trained, "later": later}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights = self.weights()
        later = set(state.get("later", ()))
        if {*state["average"], *later} != set(weights):
            missing = sorted(set(weights) ^ {*state["average"], *later})
            raise CheckpointError(
                f"{type(self).__name__}: the averaged weights in the checkpoint are those of another model. Each of "
                f"these weights is in only one of the two: {', '.join(missing[:5])}. Resume with the model whose "
                "weights were averaged."
            )
        self.average = _sharded_like(
            {name: _at_least_float32(value).clone() for name, value in state["average"].items()}, weights
        )
        self.updates = state["updates"]
        if state["trained"]:
            self._continue_from(state["trained"])
            if self.train_loop_obj.scaler is None:  # training has already ended
                self._trained = {name: value.clone() for name, value in state["trained"].items()}
        self._find_parameters()
        if later:
            self.average = {name: value for name, value in self.average.items() if name not in later}
            self._is_outdated = True


@dataclass(eq=False, repr=False)
class ExponentialMovingAverage(WeightAverage):
    """Average the weights over steps. When training ends, the model has the averaged weights.

    After each optimizer step that AMP did not skip, ``torch.optim.swa_utils`` updates the average to
    ``decay * average + (1 - decay) * weights``. Every rank computes the average itself, from equal weights. Buffers,
    such as BatchNorm's running statistics, are not averaged: the averaged model has the buffers of the trained model.
    The average of 16-bit weights is kept in float32.

    Its ``execution_order`` is -50, so the average is updated before other callbacks' ``on_after_optimizer_step``. A
    callback that changes the weights in this hook, such as by clamping, needs a lower one to be averaged.

    If training ends before the first update, the model keeps the trained weights, and a warning says so.

    Parameters
    ----------
    decay : float
        Weight of the old average, in [0, 1]; with 0.999 it covers about a thousand steps.
    every_n_steps : int
        Optimizer steps between two updates.
    start_step : int
        Optimizer steps before averaging starts; until then, the average equals the weights.
    warmup : bool or float or callable
        Let the decay grow at the beginning. The decay of an update after ``n`` earlier updates is then
        ``min(decay, 1 - (1 + n) ** -power)``. The power is ``warmup`` (at most 1, a mean of all weights) or, for True,
        2/3, as in timm, diffusers (``use_ema_warmup``) and ema_pytorch. A function takes ``n`` and returns the decay,
        which is limited by ``decay``.
    start_from : {'first', 'initial'}
        Start of the average: ``'first'`` is a copy of the weights at the first update, as in torch's ``AveragedModel``;
        ``'initial'`` are the weights before training, as in DDPM, DINO and timm. With ``start_step``, the average
        always starts from the weights at that step.
    evaluate : bool
        After each epoch, compute the average's loss on the validation set, and record it as ``ema_val_loss``; the parts
        of a ``MultiLoss`` are ``ema_val_loss_<name>``. With several averages, each has its own name, such as
        ``ema_0.99_val_loss``.
    apply_on_train_end : bool
        Leave the averaged weights in the model when training ends, after the evaluation of the test set. (For the
        average, call ``tl.evaluate(test_loader)`` after ``fit``.) Of several averages, the model gets the last one. A
        second ``fit`` with this callback continues from the trained weights, unless you change the model in between;
        without it, from the average.

    Raises
    ------
    ConfigurationError
        For arguments out of range; at ``fit``, if ``evaluate`` is True and there is no validation loader.

    Examples
    --------
    >>> ema = ExponentialMovingAverage(decay=0.99, evaluate=True)
    >>> tl.fit(num_epochs=10, callbacks=[ema, EarlyStopping("ema_val_loss", patience=3)])

    To use the average temporarily during training:

    >>> with ema.applied():
    ...     y_pred, y_true, _ = tl.predict_on_validation_set()
    """

    decay: float = 0.999
    every_n_steps: int = 1
    start_step: int = 0
    evaluate: bool = False
    apply_on_train_end: bool = True
    warmup: bool | float | Callable[[int], float] = False
    start_from: Literal["first", "initial"] = "first"

    def __post_init__(self) -> None:
        super().__init__(self.apply_on_train_end)
        self.decay = number_of("ExponentialMovingAverage", "decay", self.decay, least=0, most=1)
        check_flags(type(self).__name__, evaluate=self.evaluate)
        choice_of("ExponentialMovingAverage", "start_from", self.start_from, "first", "initial")
        if not callable(self.warmup) and not isinstance(self.warmup, bool):
            try:
                self.warmup = number_of("ExponentialMovingAverage", "warmup", self.warmup, least=0, most=1)
            except ConfigurationError:
                raise ConfigurationError(
                    f"ExponentialMovingAverage: warmup={self.warmup!r}: must be True, False, a power above 0 and "
                    "at most 1 (not a number of steps), or a function that takes the number of updates and returns the "
                    "decay."
                ) from None
        check_counts(self, "every_n_steps")
        check_counts(self, "start_step", least=0)
        self.state_key = f"decay {self.decay}"
        self._copies = 0  # updates up to start_step, which copied the weights
        self._metric = "ema_val_loss"

    def on_train_loop_registration(self) -> None:
        if not self.evaluate:
            return
        owner = "ExponentialMovingAverage(evaluate=True)"
        require_loader(self.train_loop_obj, "validation_loader", owner)
        averages = [one for one in self.train_loop_obj.callbacks if isinstance(one, ExponentialMovingAverage)]
        decays = [one.decay for one in averages if one.evaluate]
        self._metric = f"ema_{self.decay}_val_loss" if len(decays) > 1 else "ema_val_loss"
        if decays.count(self.decay) > 1:
            raise ConfigurationError(
                f"{owner}: several averages have decay={self.decay}, so their losses would have the same name. "
                "Evaluate only one of them, or give them different decays."
            )

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        # A skipped step did not change the weights; averaging would count them twice.
        if loop.step_skipped and loop.watch().gradients.skipped_all:
            return
        if loop.global_step <= self.start_step:
            self.update()
            self._copies = self.updates
        elif loop.global_step % self.every_n_steps == 0:
            # By default, like torch's AveragedModel, the first update copies the weights.
            if not self.updates and self.start_from == "first":
                self.update()
            else:
                self.update(get_ema_multi_avg_fn(self._decay_now()))

    def _decay_now(self) -> float:
        n = self.updates - self._copies
        if callable(self.warmup):
            return min(self.decay, float(self.warmup(n)))
        if not self.warmup:
            return self.decay
        return min(self.decay, 1 - (1 + n) ** -(2 / 3 if self.warmup is True else self.warmup))

    def _before_use(self) -> None:
        super()._before_use()
        self._follow_weights()

    def _follow_weights(self) -> None:
        """Before the first update, let the average be the weights."""
        loop = self.train_loop_obj
        follows = not self.updates and self.start_from == "first"  # the first update is still to come
        if follows or 0 < loop.global_step <= self.start_step:
            _copy_weights(self.average, self.weights())

    @logs_nothing
    def on_train_end(self) -> None:
        if self.updates or not self.train_loop_obj.global_step:
            super().on_train_end()
            return
        self._before_use()
        self._end_average()
        if self.train_loop_obj.is_global_zero:
            warn(
                f"ExponentialMovingAverage(every_n_steps={self.every_n_steps}): training ended after "
                f"{self.train_loop_obj.global_step} steps, before the first update, so there is no average. The model "
                "keeps the trained weights. Use a smaller every_n_steps."
            )

    def state_dict(self) -> dict[str, Any]:
        self._follow_weights()
        return {**super().state_dict(), "copies": self._copies, "metric": self._metric}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._copies = state.get("copies", 0)

    @keeps_state  # a copy would be as large as the model
    def on_epoch_end(self) -> None:
        if self.evaluate:
            loop = self.train_loop_obj
            with self.applied():
                loss = loop.evaluate_loss_on_validation_set()
            losses = {"": math.fsum(loss.values()), **loss} if isinstance(loss, dict) else {"": loss}
            for name, value in losses.items():
                loop.insert_metric_result_into_history(f"{self._metric}{name and '_' + name}", value)


def _at_least_float32(tensor: Tensor) -> Tensor:
    """Return 16-bit values in float32, other values unchanged."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() <= 2 else tensor


def _copy_all(averages: list[Tensor], weights: list[Tensor], _: int) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(weight)


def _to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@torch.no_grad()
def _copy_weights(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    for name, target in targets.items():
        if name not in sources:  # added since
            continue
        local_shard(target).copy_(local_shard(shard_like(sources[name], target)))


def _sharded_like(average: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the average, sharded in the same way as the weights."""
    return {name: shard_like(value, weights[name]) if name in weights else value for name, value in average.items()}


def _placed_like(average: Tensor, parameter: Tensor) -> Tensor:
    """Return the average on the parameter's device. Collective if a module that fsdp does not shard took its place."""
    if is_sharded(average) and not is_sharded(parameter):
        average = full_tensor(average)
    return average.to(parameter.device)


def _equal(weight: Tensor, average: Tensor) -> bool:
    return torch.equal(local_shard(weight).cpu(), local_shard(average).to(weight.dtype).cpu())


@dataclass(eq=False, repr=False)
class StochasticWeightAveraging(WeightAverage):
    """Average the end-of-epoch weights of the last part of training, which runs at a constant learning rate.

    From epoch ``start`` on, the weights at the end of each epoch are averaged; an epoch that the end of ``fit`` cuts
    short is not at its end. The learning rate changes to ``swa_lr``
    within ``anneal_epochs`` and stays there, as with torch's ``SWALR``. When training ends, the model has the averaged
    weights. An additional pass over the training set recomputes the BatchNorm statistics, like torch's ``update_bn``
    (but with dropout off, not of layers in evaluation mode, and without batches that have one value per channel).

    Parameters
    ----------
    swa_lr : float, optional
        Learning rate, the same for all parameter groups. If you pass a number, use no other scheduler from epoch
        ``start`` on. ``None`` leaves the rate to the optimizer and its schedulers.
    start : int or float
        Epochs before averaging starts, counted over all calls of ``fit``; a float in (0, 1) is a fraction of the epochs
        of the ``fit`` in which it starts.
    anneal_epochs : int
        Number of epochs over which the learning rate changes to ``swa_lr``.
    anneal_strategy : {'cos', 'linear'}
        Shape of the change.
    update_batchnorm : bool
        At the end, recompute BatchNorm statistics with a pass over the training set. If False, the model keeps the
        statistics of the last trained weights.
    apply_on_train_end : bool
        Leave the average in the model when training ends, after the evaluation of the test set. (For the average, call
        ``tl.evaluate(test_loader)`` after ``fit``.) A second ``fit`` with this callback continues from the trained
        weights, and continues the average; without it, the training continues from the average.

    Raises
    ------
    ConfigurationError
        If an argument is out of range. At ``fit``, if ``start`` is a fraction and ``num_iterations`` is given, or if
        ``update_batchnorm`` is True for a model with BatchNorm in a loop with ``sync_batchnorm``.

    Examples
    --------
    >>> tl.fit(num_epochs=20, callbacks=[StochasticWeightAveraging(swa_lr=0.05, start=0.75)])
    """

    swa_lr: float | None = None
    start: int | float = 0.75
    anneal_epochs: int = 5
    anneal_strategy: str = "cos"
    update_batchnorm: bool = True
    apply_on_train_end: bool = True

    def __post_init__(self) -> None:
        super().__init__(self.apply_on_train_end)
        me = "StochasticWeightAveraging"
        self.swa_lr = number_of(me, "swa_lr", self.swa_lr, above=0, finite=True, optional=True)
        try:
            self.start = start = number_of(me, "start", self.start, least=0)
        except ConfigurationError:
            start = math.nan
        if not isinstance(start, int) and not 0 < start < 1:
            raise ConfigurationError(
                f"{me}: start={self.start!r}: must be an int of 0 or more, or a float between 0 and 1."
            )
        choice_of(me, "anneal_strategy", self.anneal_strategy, "cos", "linear")
        check_counts(self, "anneal_epochs", least=0)
        check_flags(type(self).__name__, update_batchnorm=self.update_batchnorm)
        self.first_rates: list[float] = []
        """Learning rate of each parameter group when averaging started; empty before that."""
        self._begun_epoch: int | None = None
        self._pass: _StatisticsPass | None = None

    def on_train_loop_registration(self) -> None:
        loop = self.train_loop_obj
        if isinstance(self.start, float) and not loop.num_epochs:
            raise ConfigurationError(
                f"StochasticWeightAveraging: start={self.start} is a fraction of num_epochs, but fit was given "
                "num_iterations. Pass start as a number of epochs."
            )
        has_batchnorm = any(isinstance(module, BatchNorm) for module in loop.model.modules())
        if self.update_batchnorm and loop.sync_batchnorm and has_batchnorm:
            raise ConfigurationError(
                "StochasticWeightAveraging(update_batchnorm=True) with sync_batchnorm=True: ranks may have different "
                "numbers of batches in the pass that updates the statistics, and would then hang. Use "
                "update_batchnorm=False, or sync_batchnorm=False."
            )

    def reset(self) -> None:
        super().reset()
        self.first_rates, self._begun_epoch = [], None

    @property
    def start_epoch(self) -> int:
        """Index of the epoch in which the learning rate begins to change."""
        if isinstance(self.start, int):
            return self.start
        if self._begun_epoch is not None:  # a later fit, whose length may be another, continues
            return self._begun_epoch
        run = self.train_loop_obj.watch()
        return (0 if run is None else run.start_epoch) + int(self.start * self.train_loop_obj.num_epochs)

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        loop = self.train_loop_obj
        since = loop.epoch - self.start_epoch
        if since < 0:
            return
        self._begun_epoch = loop.epoch - since
        if self.swa_lr is None:
            return
        groups = loop.optimizer.param_groups
        # A group that was added since begins with its own rate.
        self.first_rates += [float(group["lr"]) for group in groups[len(self.first_rates) :]]
        share = min(1.0, since / self.anneal_epochs) if self.anneal_epochs else 1.0
        if self.anneal_strategy == "cos":
            share = (1 - math.cos(math.pi * share)) / 2
        for group, first in zip(groups, self.first_rates, strict=False):
            set_rate(group, share * self.swa_lr + (1 - share) * first)

    @logs_nothing
    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.epoch < self.start_epoch or loop.cut is not None:  # a cut epoch is not at its end
            return
        self._find_parameters()
        self.update(get_swa_multi_avg_fn() if self.updates else None)

    @logs_nothing
    def on_train_end(self) -> None:
        loop = self.train_loop_obj
        if not self.updates:  # training ended before averaging started
            self._end_average()
            if loop.is_global_zero and loop.global_step:
                within = loop.epoch >= self.start_epoch
                ended = "in the middle of the first epoch to average" if within else "before the first epoch to average"
                remedy = "Train whole epochs" if within else "Use a smaller start, or train for more epochs"
                warn(
                    f"StochasticWeightAveraging(start={self.start}): training ended {ended}, so there is no average "
                    f"yet. The model keeps the trained weights. {remedy}, or continue with another fit."
                )
            return
        super().on_train_end()
        # A layer in evaluation mode has statistics that don't change: those of a teacher or a pretrained part.
        layers = [m for m in loop.model.modules() if isinstance(m, BatchNorm) and m.training]
        norms = [m for m in layers if m.track_running_stats]
        if not (norms and self.apply_on_train_end and self.update_batchnorm):
            return
        self._pass = _StatisticsPass(norms)
        # Graphs were compiled for BatchNorm's other mode. Before dynamo is imported, nothing can be compiled.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            loop.evaluate_model_loss(loop.train_loader)  # calls the two hooks below; the result is not recorded
        self._pass.finish()
        names = {id(buffer): name for name, buffer in loop.model.named_buffers()}
        statistics = {names[id(buffer)]: value for buffer, value in self._pass.replaced()}
        self._trained = {**(self._trained or {}), **statistics}
        self._pass = None

    @logs_nothing
    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        if self._pass is not None:
            self._pass.begin()

    @logs_nothing
    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        if self._pass is not None:
            self._pass.end()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "first_rates": list(self.first_rates), "begun_epoch": self._begun_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.first_rates = list(state["first_rates"])
        self._begun_epoch = state.get("begun_epoch")  # older checkpoints lack it


class _StatisticsPass:
    """Recompute BatchNorm's running statistics in one pass over a dataset, and average them over ranks.

    As with torch's ``update_bn``, each layer counts its own batches: a layer may be called in some batches only, or
    several times for a batch. A layer without a batch on any rank keeps the statistics of the training. A batch with
    one value per channel is left out: ranks read whole batches here, so the last may be smaller than any in training.
    """

    def __init__(self, norms: list[Any]) -> None:
        self.norms = norms
        self.before = [(norm.momentum, norm.training) for norm in norms]
        self.trained = [[buffer.clone() for buffer in _statistics(norm)] for norm in norms]
        self.sums: list[Any] = []
        self.batches: list[int] = []
        self.hooks: list[Any] = []

    def begin(self) -> None:
        for norm in self.norms:
            norm.reset_running_stats()
            norm.momentum = None  # with None, torch averages all batches with equal weights
            self.hooks.append(norm.register_forward_pre_hook(_train_on_several_values, with_kwargs=True))

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()
        # The sums are taken now, because each rank's buffers are restored after the pass.
        for norm, (momentum, training) in zip(self.norms, self.before, strict=True):
            batches = int(norm.num_batches_tracked)
            self.batches.append(batches)
            self.sums.append([norm.running_mean * batches, norm.running_var * batches])
            norm.momentum, norm.training = momentum, training

    def replaced(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each statistic with its value of the training."""
        for norm, trained in zip(self.norms, self.trained, strict=True):
            yield from zip(_statistics(norm), trained, strict=True)

    def finish(self) -> None:
        """Average the statistics over the batches of all ranks. Collective."""
        counts = distributed.all_reduce(self.batches, "sum")
        sums = distributed.all_reduce(self.sums, "sum")
        for norm, trained, batches, (mean, var) in zip(self.norms, self.trained, counts, sums, strict=True):
            new = [mean / batches, var / batches, batches] if batches else trained
            for buffer, value in zip(_statistics(norm), new, strict=True):
                buffer.copy_(value) if isinstance(value, Tensor) else buffer.fill_(value)


def _train_on_several_values(norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # The rest of the model is in evaluation mode, with its dropout off.
    inputs, *_ = (*args, *kwargs.values())  # a subclass may take more, such as a condition
    norm.training = inputs.numel() > inputs.size(1)


def _statistics(norm: Any) -> list[Tensor]:
    return [norm.running_mean, norm.running_var, norm.num_batches_tracked]
