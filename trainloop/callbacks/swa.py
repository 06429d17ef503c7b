"""Stochastic weight averaging (Izmailov et al., arXiv:1803.05407), with ``torch.optim.swa_utils``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from trainloop import distributed
from trainloop.callbacks.base import logs_nothing
from trainloop.callbacks.ema import WeightAverage
from trainloop.errors import ConfigurationError
from trainloop.parallel.sync_batchnorm import BatchNorm

__all__ = ["StochasticWeightAveraging"]


class StochasticWeightAveraging(WeightAverage):
    """Average the weights at the end of epochs, over the last part of training, at a constant learning rate.

    From epoch ``start`` on, the weights at the end of each epoch are averaged. The learning rate changes to ``swa_lr``
    within ``anneal_epochs`` and stays there, as with torch's ``SWALR``. The trained model ends with the average. A pass
    over the training set recomputes BatchNorm statistics, like torch's ``update_bn`` (but with dropout off).

    Parameters
    ----------
    swa_lr : float, optional
        Learning rate, the same for all parameter groups. With a number, use no other scheduler from ``start`` on.
        ``None`` leaves the rate to the optimizer and its schedulers.
    start : int or float
        Epochs before averaging starts; a float in (0, 1) is a fraction of ``num_epochs``.
    anneal_epochs : int
        Epochs in which the learning rate changes to ``swa_lr``.
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
        ``update_batchnorm`` is True, the model has BatchNorm and the loop uses ``sync_batchnorm``.

    Examples
    --------
    >>> tl.fit(num_epochs=20, callbacks=[StochasticWeightAveraging(swa_lr=0.05, start=0.75)])
    """

    def __init__(
        self,
        swa_lr: float | None = None,
        start: int | float = 0.75,
        anneal_epochs: int = 5,
        anneal_strategy: str = "cos",
        update_batchnorm: bool = True,
        apply_on_train_end: bool = True,
    ) -> None:
        super().__init__(apply_on_train_end)
        me = "StochasticWeightAveraging"
        if swa_lr is not None and not (isinstance(swa_lr, (int, float)) and 0 < swa_lr < math.inf):
            raise ConfigurationError(f"{me}: swa_lr={swa_lr!r}: must be a number above 0, or None.")
        if isinstance(start, bool) or not (start >= 0 if isinstance(start, int) else 0 < start < 1):
            raise ConfigurationError(f"{me}: start={start!r}: must be an int of 0 or more, or a float between 0 and 1.")
        if isinstance(anneal_epochs, bool) or not isinstance(anneal_epochs, int) or anneal_epochs < 0:
            raise ConfigurationError(f"{me}: anneal_epochs={anneal_epochs!r}: must be an int of 0 or more.")
        if anneal_strategy not in ("cos", "linear"):
            raise ConfigurationError(f"{me}: anneal_strategy={anneal_strategy!r}: must be 'cos' or 'linear'.")
        self.swa_lr = swa_lr
        self.start = start
        self.anneal_epochs = anneal_epochs
        self.anneal_strategy = anneal_strategy
        self.update_batchnorm = update_batchnorm
        self.first_rates: list[float] = []
        """Learning rates when averaging started."""
        self._pass: _StatisticsPass | None = None

    def on_train_loop_registration(self) -> None:
        loop = self.train_loop_obj
        if isinstance(self.start, float) and not loop.num_epochs:
            raise ConfigurationError(
                f"StochasticWeightAveraging(start={self.start}) is a fraction of num_epochs, but fit was given "
                "num_iterations. Pass start as a number of epochs."
            )
        has_batchnorm = any(isinstance(module, BatchNorm) for module in loop.model.modules())
        if self.update_batchnorm and loop.sync_batchnorm and has_batchnorm:
            raise ConfigurationError(
                "StochasticWeightAveraging(update_batchnorm=True) with sync_batchnorm=True: ranks have different "
                "numbers of batches in the pass that updates the statistics. Use update_batchnorm=False, or "
                "sync_batchnorm=False."
            )

    @property
    def start_epoch(self) -> int:
        """Return the epoch, counted from 0, at whose start the learning rate begins to change."""
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
        loop.evaluate_model_loss(loop.train_loader)  # calls the two hooks below; its result is not recorded
        self._pass.take_over()
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
    """Recompute running statistics from each rank's batches in one pass over a dataset."""

    def __init__(self, norms: list[Any]) -> None:
        self.norms = norms
        self.before = [(norm.momentum, norm.training) for norm in norms]
        self.sums: list[Any] = []
        self.batches = 0

    def begin(self) -> None:
        for norm in self.norms:
            norm.reset_running_stats()
            norm.momentum = None  # in torch, None means an equal mean over batches
            norm.training = True  # the rest of the model is in evaluation mode, with its dropout off

    def end(self) -> None:
        # Now, since the ranks' own buffers are restored after the pass.
        self.batches = int(self.norms[0].num_batches_tracked)
        for norm, (momentum, training) in zip(self.norms, self.before, strict=True):
            self.sums.append([norm.running_mean * self.batches, norm.running_var * self.batches])
            norm.momentum, norm.training = momentum, training

    def take_over(self) -> None:
        """Average the statistics over all ranks' batches. Collective."""
        batches = distributed.all_reduce(self.batches, "sum")
        for norm, (mean, var) in zip(self.norms, distributed.all_reduce(self.sums, "sum"), strict=True):
            norm.running_mean.copy_(mean / batches)
            norm.running_var.copy_(var / batches)
            norm.num_batches_tracked.fill_(batches)
