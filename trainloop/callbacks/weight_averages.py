"""Average the weights (EMA, SWA), and recompute BatchNorm's statistics for the average."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from trainloop import distributed
from trainloop.callbacks.base import AbstractCallback, check_counts, logs_nothing, require_loader
from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.parallel.shards import local_shard, shard_like
from trainloop.parallel.sync_batchnorm import BatchNorm

__all__ = ["ExponentialMovingAverage", "StochasticWeightAveraging", "WeightAverage"]


class WeightAverage(AbstractCallback):
    """Base of callbacks that keep an average of the weights; subclasses decide when and how to update it.

    Every rank computes the average itself, from equal weights. Integer parameters and buffers are not averaged.

    Parameters
    ----------
    apply_on_train_end : bool
        If True, the average replaces the model's weights at the end.

    Examples
    --------
    The mean of the weights at each epoch's end::

        class EpochMean(WeightAverage):
            def on_epoch_end(self):
                for name, weight in self._weights().items():
                    self.average[name].lerp_(weight, 1 / (self.updates + 1))
                self.updates += 1
    """

    def __init__(self, apply_on_train_end: bool) -> None:
        # Runs before callbacks that read the weights or metrics.
        super().__init__(type(self).__name__, execution_order=-50)
        self.apply_on_train_end = apply_on_train_end
        self.average: dict[str, Tensor] = {}
        self.updates = 0
        self._trained: dict[str, Tensor] | None = None  # the weights that the average replaced at the end
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])

    def reset(self) -> None:
        super().reset()
        self.average, self.updates, self._trained = {}, 0, None

    def on_train_begin(self) -> None:
        weights = self._weights()
        self.average = _like(self.average, weights)
        if self._trained is not None:
            # This is a second fit. If the model still has the average, training continues from the trained weights.
            # Otherwise the user has loaded other weights, and training starts from these.
            same = all(_equal(weights[name], value) for name, value in self.average.items())
            if all(is_same for (is_same,) in distributed.exchange_ints([int(same)])):  # a rank compares only its shards
                _copy(weights, self._trained)
            self._trained = None
        if not self.average:
            self.average = {name: weight.clone() for name, weight in weights.items()}
        self._pair(weights)

    def _weights(self) -> dict[str, Tensor]:
        # named_parameters() yields tied parameters once. Integer parameters can't be averaged.
        named = self.train_loop_obj.model.named_parameters()
        return {name: parameter.detach() for name, parameter in named if parameter.is_floating_point()}

    def _pair(self, weights: dict[str, Tensor]) -> None:
        self.average = {name: self.average[name].to(weight.device) for name, weight in weights.items()}
        self._pairs = (list(map(local_shard, self.average.values())), list(map(local_shard, weights.values())))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the model for the duration of a ``with`` block. In ``ddp``, use it on every rank."""
        weights = self._weights()
        trained = {name: weight.clone() for name, weight in weights.items()}
        _copy(weights, self.average)
        try:
            yield
        finally:
            _copy(weights, trained)

    @logs_nothing
    def on_train_end(self) -> None:
        if self.apply_on_train_end:
            weights = self._weights()
            self._trained = {name: weight.clone() for name, weight in weights.items()}
            _copy(weights, self.average)
        self._pairs = ([], [])

    def on_exception(self, exception: BaseException) -> None:
        self._pairs = ([], [])

    def __getstate__(self) -> dict[str, Any]:
        # Tensors are moved to the CPU, because the process that receives them may not have the device.
        trained = None if self._trained is None else _to_cpu(self._trained)
        return {**self.__dict__, "average": _to_cpu(self.average), "_trained": trained, "_pairs": ([], [])}

    def state_dict(self) -> dict[str, Any]:
        # In a checkpoint from the end of training, the model's weights are the average.
        return {"average": dict(self.average), "updates": self.updates, "trained": dict(self._trained or {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights = self._weights()
        if set(state["average"]) != set(weights):
            missing = sorted(set(weights) ^ set(state["average"]))
            raise CheckpointError(
                f"{type(self).__name__}: the averaged weights in the checkpoint are those of another model. Each of "
                f"these weights is in only one of the two: {', '.join(missing[:5])}. Resume with the model whose "
                "weights were averaged."
            )
        self.average = _like({name: value.clone() for name, value in state["average"].items()}, weights)
        self.updates = state["updates"]
        if state["trained"]:
            _copy(weights, state["trained"])  # training continues from these weights
            if self.train_loop_obj.scaler is None:  # training has already ended
                self._trained = {name: value.clone() for name, value in state["trained"].items()}
        self._pair(weights)


@dataclass(eq=False, repr=False)
class ExponentialMovingAverage(WeightAverage):
    """Average the weights over steps. When training ends, the model has the averaged weights.

    After each optimizer step that AMP did not skip, ``torch.optim.swa_utils`` updates the average to
    ``decay * average + (1 - decay) * weights``. Every rank computes the average itself, from equal weights. Buffers,
    such as BatchNorm's running statistics, are not averaged: the averaged model has the buffers of the trained model.

    Parameters
    ----------
    decay : float
        Weight of the old average, in [0, 1]; with 0.999 it covers about a thousand steps.
    every_n_steps : int
        Optimizer steps between two updates.
    start_step : int
        Optimizer steps before averaging starts; until then, the average equals the weights.
    evaluate : bool
        After each epoch, compute the average's loss on the validation set, and record it as ``ema_val_loss``.
    apply_on_train_end : bool
        Leave the averaged weights in the model when training ends. A second ``fit`` continues from the trained weights,
        not from the average, unless you change the model in between.

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

    def __post_init__(self) -> None:
        super().__init__(self.apply_on_train_end)
        if not 0.0 <= self.decay <= 1.0:
            raise ConfigurationError(f"ExponentialMovingAverage: decay={self.decay}: must be between 0 and 1.")
        check_counts(self, "every_n_steps")
        check_counts(self, "start_step", least=0)

    def on_train_loop_registration(self) -> None:
        if self.evaluate:
            owner = "ExponentialMovingAverage(evaluate=True)"
            require_loader(self.train_loop_obj, "validation_loader", owner)

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        # A skipped step did not change the weights; averaging would count them twice.
        if loop.step_skipped or loop.global_step % self.every_n_steps:
            return
        averages, weights = self._pairs
        # Like torch's AveragedModel, the first update copies the weights.
        decay = self.decay if self.updates and loop.global_step > self.start_step else 0.0
        with torch.no_grad():
            get_ema_multi_avg_fn(decay)(averages, weights, self.updates)
        self.updates += 1

    def on_epoch_end(self) -> None:
        if self.evaluate:
            loop = self.train_loop_obj
            with self.applied():
                loss = loop.evaluate_loss_on_validation_set()
            for name, value in loss.items() if isinstance(loss, dict) else [("", loss)]:
                loop.insert_metric_result_into_history(f"ema_val_loss{name and '_' + name}", value)


def _to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@torch.no_grad()
def _copy(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    for name, target in targets.items():
        local_shard(target).copy_(local_shard(shard_like(sources[name], target)))


def _like(average: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the average, sharded in the same way as the weights."""
    return {name: shard_like(value, weights[name]) if name in weights else value for name, value in average.items()}


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(local_shard(one).cpu(), local_shard(other).cpu())


@dataclass(eq=False, repr=False)
class StochasticWeightAveraging(WeightAverage):
    """Average the end-of-epoch weights of the last part of training, which runs at a constant learning rate.

    From epoch ``start`` on, the weights at the end of each epoch are averaged. The learning rate changes to ``swa_lr``
    within ``anneal_epochs`` and stays there, as with torch's ``SWALR``. When training ends, the model has the averaged
    weights. An additional pass over the training set recomputes the BatchNorm statistics, like torch's ``update_bn``
    (but with dropout off).

    Parameters
    ----------
    swa_lr : float, optional
        Learning rate, the same for all parameter groups. If you pass a number, use no other scheduler from epoch
        ``start`` on. ``None`` leaves the rate to the optimizer and its schedulers.
    start : int or float
        Epochs before averaging starts; a float in (0, 1) is a fraction of ``num_epochs``.
    anneal_epochs : int
        Number of epochs over which the learning rate changes to ``swa_lr``.
    anneal_strategy : {'cos', 'linear'}
        Shape of the change.
    update_batchnorm : bool
        At the end, recompute BatchNorm statistics with a pass over the training set. If False, the model keeps the
        statistics of the last trained weights.
    apply_on_train_end : bool
        Leave the average in the model when training ends. A second ``fit`` continues from the trained weights, and
        continues the average.

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
        me, swa_lr, start = "StochasticWeightAveraging", self.swa_lr, self.start
        if swa_lr is not None and not (isinstance(swa_lr, (int, float)) and 0 < swa_lr < math.inf):
            raise ConfigurationError(f"{me}: swa_lr={swa_lr!r}: must be a number above 0, or None.")
        if isinstance(start, bool) or not (start >= 0 if isinstance(start, int) else 0 < start < 1):
            raise ConfigurationError(f"{me}: start={start!r}: must be an int of 0 or more, or a float between 0 and 1.")
        if self.anneal_strategy not in ("cos", "linear"):
            raise ConfigurationError(f"{me}: anneal_strategy={self.anneal_strategy!r}: must be 'cos' or 'linear'.")
        check_counts(self, "anneal_epochs", least=0)
        self.first_rates: list[float] = []
        """Learning rate of each parameter group when averaging started; empty before that."""
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
        self.first_rates = []

    @property
    def start_epoch(self) -> int:
        """Index of the epoch in which the learning rate begins to change."""
        if isinstance(self.start, int):
            return self.start
        return int(self.start * self.train_loop_obj.num_epochs)

    def on_epoch_begin(self) -> None:
        loop = self.train_loop_obj
        since = loop.epoch - self.start_epoch
        if since < 0 or self.swa_lr is None:
            return
        groups = loop.optimizer.param_groups
        if not self.first_rates:
            self.first_rates = [float(group["lr"]) for group in groups]
        share = min(1.0, since / self.anneal_epochs) if self.anneal_epochs else 1.0
        if self.anneal_strategy == "cos":
            share = (1 - math.cos(math.pi * share)) / 2
        for group, first in zip(groups, self.first_rates, strict=True):
            rate = share * self.swa_lr + (1 - share) * first
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @logs_nothing
    def on_epoch_end(self) -> None:
        if self.train_loop_obj.epoch < self.start_epoch:
            return
        averages, weights = self._pairs
        with torch.no_grad():
            if self.updates:
                get_swa_multi_avg_fn()(averages, weights, self.updates)
            else:
                for average, weight in zip(averages, weights, strict=True):
                    average.copy_(weight)
        self.updates += 1

    @logs_nothing
    def on_train_end(self) -> None:
        if not self.updates:  # training ended before averaging started
            self._pairs = ([], [])
            return
        super().on_train_end()
        loop = self.train_loop_obj
        norms = [m for m in loop.model.modules() if isinstance(m, BatchNorm) and m.track_running_stats]
        if not (norms and self.apply_on_train_end and self.update_batchnorm):
            return
        self._pass = _StatisticsPass(norms)
        loop.evaluate_model_loss(loop.train_loader)  # calls the two hooks below; the result is not recorded
        self._pass.finish()
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
        return {**super().state_dict(), "first_rates": list(self.first_rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.first_rates = list(state["first_rates"])


class _StatisticsPass:
    """Recompute BatchNorm's running statistics in one pass over a dataset, and average them over ranks."""

    def __init__(self, norms: list[Any]) -> None:
        self.norms = norms
        self.before = [(norm.momentum, norm.training) for norm in norms]
        self.sums: list[Any] = []
        self.batches = 0

    def begin(self) -> None:
        for norm in self.norms:
            norm.reset_running_stats()
            norm.momentum = None  # with None, torch averages all batches with equal weights
            norm.training = True  # the rest of the model is in evaluation mode, with its dropout off

    def end(self) -> None:
        # The sums are taken now, because each rank's buffers are restored after the pass.
        self.batches = int(self.norms[0].num_batches_tracked)
        for norm, (momentum, training) in zip(self.norms, self.before, strict=True):
            self.sums.append([norm.running_mean * self.batches, norm.running_var * self.batches])
            norm.momentum, norm.training = momentum, training

    def finish(self) -> None:
        """Average the statistics over the batches of all ranks. Collective."""
        batches = distributed.all_reduce(self.batches, "sum")
        for norm, (mean, var) in zip(self.norms, distributed.all_reduce(self.sums, "sum"), strict=True):
            norm.running_mean.copy_(mean / batches)
            norm.running_var.copy_(var / batches)
            norm.num_batches_tracked.fill_(batches)
