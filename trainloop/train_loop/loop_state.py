"""Define the loop's attributes that callbacks and users read: its progress, its devices, and its logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainloop._support.keywords import attribute_hint
from trainloop._support.user_line import warn
from trainloop.callbacks.base import AbstractCallback
from trainloop.callbacks.messages import MessageService
from trainloop.data import TrainFeed
from trainloop.devices import effective_batch_size
from trainloop.distributed import Rank
from trainloop.errors import ConfigurationError
from trainloop.history import History
from trainloop.train_loop.arguments import loader_batch_size
from trainloop.train_loop.ending import End, requesting_callback
from trainloop.train_loop.options import Options
from trainloop.train_loop.run_config import RunConfig
from trainloop.train_loop.timings import StepClock, Timings

if TYPE_CHECKING:
    from trainloop.train_loop.restarts import Restart
    from trainloop.train_loop.run import Run

__all__ = ["LoopState"]


class LoopState:
    """The part of a :class:`~trainloop.TrainLoop` that callbacks read and write: its state, history and logs.

    It outlives each run, and is sent to the ranks and back. :attr:`running` is the current run.
    """

    model: Any
    train_loader: Any
    options: Options
    """The loop's arguments."""
    run_config: RunConfig
    """Mode, devices and nodes of the loop's runs."""

    def __init__(self) -> None:
        self.callbacks: list[AbstractCallback] = []
        """Callbacks of the last ``fit``, including those that the loop's class adds."""
        self.message_service = MessageService()
        """Service through which callbacks exchange messages."""
        self.history = History()
        """Values of each metric, one per epoch, over all calls of ``fit``: ``loop.history["val_loss"]``."""
        self.epoch: int = 0
        """Number of finished epochs, which is also the index of the running epoch, counted from 0."""
        self.global_step: int = 0
        """Number of optimizer steps, over all calls of ``fit``."""
        self.total_iteration_idx: int = -1
        """Index of the current or last batch, counted from 0 over all epochs; -1 before the first."""
        self.end_requested: bool = False
        self.ends: list[End] = []
        """Callbacks that requested the end of training."""
        self.num_epochs = self.num_iterations = 0
        self.grad_accumulation = 1
        self.last_loss: Tensor | None = None
        """Loss of this process's last batch, on its device; reading it waits for the device."""
        self.process = Rank()
        """Rank of this process among all processes that train together."""
        self.drawn_seed = 0
        """Seed derived from the caller's generator: ranks must agree on an order even if the user gave no seed."""
        self.found_inf: list[Tensor] = []
        """For each device of the last step, a tensor that is nonzero if its scaled gradients overflowed."""
        self.scaler_state: dict[str, Any] = {}
        self.restarts: list[Restart] = []
        """Restarts of the last ``fit(max_restarts=...)``, in the process that called it; a rank has an empty list."""
        self.timings_of_last_fit = Timings()
        self.wrapper_args: dict[str, Any] = {}
        """Wrapper arguments of the last ``fit`` (``ddp_model_args``, ...). Evaluation outside of ``fit`` uses them,
        too."""
        self.left_behind = False
        """True after ``fit(gather=False)``: the trained values are only in checkpoints."""
        self.running: Run | None = None
        """Current run, while this process trains or evaluates."""

    # -- what users and callbacks read -------------------------------------------------------------------------------

    @property
    def gpu_mode(self) -> str:
        """``'single'``, ``'dp'``, ``'ddp'`` or ``'fsdp'``."""
        return self.run_config.mode

    @property
    def site(self) -> RunConfig:
        """Former name of :attr:`run_config`."""
        warn("tl.site is now called tl.run_config, which has the same attributes.", DeprecationWarning)
        return self.run_config

    @property
    def num_nodes(self) -> int:
        """Number of hosts that train together."""
        return self.run_config.num_nodes

    @property
    def device(self) -> torch.device:
        """Device on which this process trains; in a process that only starts ranks, the device of rank 0."""
        return self.running.place.device if self.running is not None else self.run_config.devices[0]

    @property
    def rank(self) -> int:
        """Global rank of this process; 0 outside of ranks."""
        return self.process.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train together; 1 in the process that calls ``fit``."""
        return self.process.world_size

    @property
    def is_global_zero(self) -> bool:
        """True in only one process across all nodes, which is the process that prints and writes files."""
        return self.process.rank == 0

    def is_main_process(self) -> bool:
        """Return :attr:`is_global_zero`."""
        return self.is_global_zero

    @property
    def early_stop(self) -> bool:
        """True if training will end after this step; any callback may set it, on any rank."""
        return self.end_requested

    @early_stop.setter
    def early_stop(self, stop: bool) -> None:
        self.end_requested = bool(stop)
        if not stop:
            self.ends = []
        elif (end := requesting_callback(self)) is not None:
            self._note_end(end)

    def end_training(self, callback: AbstractCallback, reason: str = "") -> None:
        """End training at a callback's request; see :meth:`.AbstractCallback.end_training`."""
        self._note_end(End(type(callback).__name__, callback.callback_name, reason))
        self.end_requested = True

    def _note_end(self, end: End) -> None:
        if all((end.kind, end.name) != (known.kind, known.name) for known in self.ends):
            self.ends.append(end)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The ``GradScaler`` during training (disabled unless fp16 is used), otherwise ``None``."""
        return None if self.running is None else self.running.place.scaler

    @property
    def step_skipped(self) -> bool:
        """True if AMP skipped the last optimizer step. Reading it waits for the device if there is a scaler."""
        return any(bool(found.item()) for found in self.found_inf)

    @property
    def timings(self) -> Timings:
        """Timings of the current or last ``fit``: ``print(tl.timings)``."""
        clock = getattr(self.running, "clock", None)
        return clock.timings() if isinstance(clock, StepClock) else self.timings_of_last_fit

    @property
    def effective_batch_size(self) -> int | None:
        """Number of samples in a global batch of the training loader; ``None`` if unknown."""
        size = loader_batch_size(self.train_loader)
        if size is None:
            return None
        return effective_batch_size(self.gpu_mode, size, len(self.run_config.devices), self.num_nodes)

    def num_optimizer_steps(
        self, num_epochs: int | None = None, num_iterations: int | None = None, grad_accumulation: int | None = None
    ) -> int | None:
        """Return the number of optimizer steps of a training run. You can call it before, during and after ``fit``.

        The number is the same on all ranks. In one process without gradient accumulation it is ``len(train_loader) *
        num_epochs``. With several ranks it is smaller, because each step uses a batch on each rank.

        Parameters
        ----------
        num_epochs, num_iterations, grad_accumulation : int, optional
            As in ``fit``. Default: the arguments of the current or last ``fit``.

        Returns
        -------
        int or None
            ``None`` if the loader has no length, such as a stream.

        Raises
        ------
        ConfigurationError
            If there is no ``train_loader``, or the length of the training is unknown.

        Examples
        --------
        >>> tl.num_optimizer_steps(num_epochs=10, grad_accumulation=4)                        # doctest: +SKIP
        390
        """
        epochs, iterations = num_epochs or 0, num_iterations or 0
        if not epochs and not iterations:
            epochs, iterations = self.num_epochs, self.num_iterations
        if self.train_loader is None or not (epochs or iterations):
            missing = (
                "train_loader is None. Pass TrainLoop(train_loader=...)"
                if self.train_loader is None
                else "the length of the training is not known. Pass num_epochs or num_iterations"
            )
            raise ConfigurationError(f"num_optimizer_steps: {missing}.")
        accumulation = grad_accumulation or self.grad_accumulation
        ranks = self.world_size if self.running is not None else self.run_config.num_ranks
        # This feed only computes the number; it is never read.
        feed = TrainFeed(self.train_loader, world_size=ranks, seed=0, exchange_ints=lambda values: [values] * ranks)
        if feed.num_batches is None:
            return -(-iterations // accumulation) if iterations else None
        rest = 0
        if iterations:
            epochs, rest = divmod(iterations, feed.num_batches)
        return epochs * -(-feed.num_batches // accumulation) + -(-rest // accumulation)

    @property
    def rank_zero_only_metrics(self) -> set[str]:
        """Names of metrics logged with ``rank_zero_only``. Other ranks lack them, so no decision may depend on them."""
        return set() if self.running is None else self.running.recorder.rank_zero_only_names

    def __repr__(self) -> str:
        number = sum(p.numel() for p in self.model.parameters() if not torch.nn.parameter.is_lazy(p))
        devices, quota = self.run_config.devices, self.options.quota
        where = devices[0].type if len(devices) == 1 else f"{len(devices)} x {devices[0].type}"
        precision = self.options.amp.described(devices[0])
        nodes = f" on each of {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return (
            f"TrainLoop({self.gpu_mode} on {where}{nodes}{precision}, effective batch "
            f"{self.effective_batch_size or 'unknown'}, {type(self.model).__name__} with {number:,} "
            f"parameters{f', {quota}' if quota is not None else ''})"
        )

    # -- logs --------------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Tensor | float,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce: str = "mean",
        sync_dist: bool = True,
        batch_size: Tensor | float | None = None,
        prog_bar: bool = False,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a metric from anywhere in a running loop, with the arguments of :meth:`.TTModel.log`.

        Raises
        ------
        ConfigurationError
            As in :meth:`.TTModel.log`; also if no run is in progress, because there would be no epoch for the value.
        """
        run = self.running
        if run is None or run.sink is None:
            raise ConfigurationError(
                f"log({name!r}, ...): nothing is running, so there is no epoch to log for. Call it in a callback's "
                "hook. After fit, use insert_metric_result_into_history, which adds a value to the last epoch."
            )
        run.sink(name, value, (on_step, on_epoch, reduce, sync_dist, prog_bar, rank_zero_only), batch_size)

    @property
    def history_epoch(self) -> int:
        """Index of the epoch, counted from 0, for which new values are logged; between epochs, the last epoch."""
        return self.running.history_epoch if self.running is not None else max(self.epoch - 1, 0)

    def insert_metric_result_into_history(self, name: str, value: float) -> None:
        """Append a value to the history of a metric, for the current epoch (outside ``fit``, the last epoch).

        The value is in the history immediately. In ``ddp``, ranks exchange inserted values at the end of the hook (for
        hooks within an epoch, at the end of the epoch), and the value becomes the mean over the ranks that inserted a
        value. If a rank inserts several values with one name, the first values of all ranks are averaged, then the
        second values, and so on. :meth:`log` can reduce in other ways.
        """
        run = self.running
        if run is None or not run.parallel:
            self.history.record(name, float(value), self.history_epoch)
        else:
            self.history.record_own(name, float(value), self.history_epoch)

    def flush_logs(self) -> None:
        """Read the logs and pass them to ``on_log``. Collective. Waits for the device."""
        if self.running is not None:
            self.running.flush_logs()

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raise an error for a missing attribute, with a hint if another library's loop has it."""
            if hasattr(type(self), name):  # a property raised an error: raise that error
                return object.__getattribute__(self, name)
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{attribute_hint(name)}")

    def __getstate__(self) -> dict[str, Any]:
        # Process groups, open files and running iterators are valid in this process only.
        return {**self.__dict__, "running": None, "found_inf": []}
