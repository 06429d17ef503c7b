"""The training loop as callbacks and users read it: how far it has come, where it runs, and what is logged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainloop.callbacks.base import AbstractCallback
from trainloop.callbacks.messages import MessageService
from trainloop.data import train_feed
from trainloop.devices import effective_batch_size, has_ranks
from trainloop.distributed import Rank
from trainloop.errors import ConfigurationError
from trainloop.history import History
from trainloop.train_loop.arguments import loader_batch_size
from trainloop.train_loop.ending import End, who_asks
from trainloop.train_loop.names import attribute_hint
from trainloop.train_loop.options import Options
from trainloop.train_loop.site import Site
from trainloop.train_loop.timings import StepClock, Timings

if TYPE_CHECKING:
    from trainloop.train_loop.restarts import Restart
    from trainloop.train_loop.run import Run
    from trainloop.train_loop.sharded import LeftBehind

__all__ = ["LoopView"]


class LoopView:
    """The part of a :class:`~trainloop.TrainLoop` that callbacks read, and write to: its state, its history, its logs.

    It outlasts runs, and goes to ranks and back; :attr:`running` is the present run.
    """

    model: Any
    train_loader: Any
    options: Options
    """The loop's arguments."""
    site: Site
    """Mode, devices and nodes of its runs."""

    def __init__(self) -> None:
        self.callbacks: list[AbstractCallback] = []
        """Callbacks of the last ``fit``, with those that the kind of loop brings along."""
        self.message_service = MessageService()
        """Where callbacks leave messages for each other."""
        self.history = History()
        """Each metric's values, one an epoch, over all calls of ``fit``: ``loop.history["val_loss"]``."""
        self.epoch: int = 0
        """Epochs that are finished; while one runs, its number counted from 0."""
        self.global_step: int = 0
        """Optimizer steps taken, over all calls of ``fit``."""
        self.total_iteration_idx: int = -1
        """The batch, counted from 0 over all epochs, that is or was the last one; -1 before the first."""
        self.asked_to_end: bool = False
        self.ends: list[End] = []
        """The callbacks that asked for the end of training."""
        self.num_epochs = self.num_iterations = 0
        self.grad_accumulation = 1
        self.last_loss: Tensor | None = None
        """Loss of this process's last batch, on its device; reading it waits for the device."""
        self.process = Rank()
        """This process's place among all that train together."""
        self.drawn_seed = 0
        """Drawn from the caller's generator: ranks must agree on an order even where the user gave no seed."""
        self.found_inf: list[Tensor] = []
        """For each device of the last step, whether its scaled gradients overflowed."""
        self.scaler_state: dict[str, Any] = {}
        self.restarts: list[Restart] = []
        """Restarts of the last ``fit(max_restarts=...)``, in the process that called it; a rank has an empty list."""
        self.timings_of_last_fit = Timings()
        self.fsdp_model_args: dict[str, Any] = {}
        """Arguments of ``fit`` for the wrapper of ``fsdp``; evaluation outside of ``fit`` has the same units."""
        self.left_behind: LeftBehind | None = None
        """After ``fit(gather=False)``, the parameters that have no trained values yet."""
        self.running: Run | None = None
        """The present run, while this process trains or evaluates."""

    # -- what users and callbacks read -------------------------------------------------------------------------------

    @property
    def gpu_mode(self) -> str:
        """``'single'``, ``'dp'``, ``'ddp'`` or ``'fsdp'``."""
        return self.site.mode

    @property
    def num_nodes(self) -> int:
        """Hosts that train together."""
        return self.site.num_nodes

    @property
    def device(self) -> torch.device:
        """The device on which this process trains; in the caller of ``ddp``, the first rank's."""
        return self.running.place.device if self.running is not None else self.site.devices[0]

    @property
    def rank(self) -> int:
        """Global rank of this process; 0 outside of ``ddp``'s ranks."""
        return self.process.rank

    @property
    def world_size(self) -> int:
        """Processes that train together; 1 in the caller of ``ddp``."""
        return self.process.world_size

    @property
    def is_global_zero(self) -> bool:
        """True if this is the process that prints and writes: true in one process of all nodes."""
        return self.process.rank == 0

    def is_main_process(self) -> bool:
        """The same as :attr:`is_global_zero`."""
        return self.is_global_zero

    @property
    def early_stop(self) -> bool:
        """True if training is to end after this step; any callback may set it, on any rank."""
        return self.asked_to_end

    @early_stop.setter
    def early_stop(self, stop: bool) -> None:
        self.asked_to_end = bool(stop)
        if not stop:
            self.ends = []
        elif (end := who_asks(self)) is not None:
            self._note_end(end)

    def end_training(self, callback: AbstractCallback, reason: str = "") -> None:
        """See :meth:`.AbstractCallback.end_training`, which calls it."""
        self._note_end(End(type(callback).__name__, callback.callback_name, reason))
        self.asked_to_end = True

    def _note_end(self, end: End) -> None:
        if all((end.kind, end.name) != (known.kind, known.name) for known in self.ends):
            self.ends.append(end)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The ``GradScaler`` while training (disabled unless fp16), else ``None``."""
        return None if self.running is None else self.running.place.scaler

    @property
    def step_skipped(self) -> bool:
        """True if AMP skipped the last optimizer step. Waits for the device where there is a scaler."""
        return any(bool(found.item()) for found in self.found_inf)

    @property
    def timings(self) -> Timings:
        """Where the time of the last ``fit`` went, or of the one that is running: ``print(tl.timings)``."""
        clock = getattr(self.running, "clock", None)
        return clock.timings() if isinstance(clock, StepClock) else self.timings_of_last_fit

    @property
    def effective_batch_size(self) -> int | None:
        """Samples that all processes together take from the training loader at once; ``None`` if it doesn't say."""
        size = loader_batch_size(self.train_loader)
        if size is None:
            return None
        return effective_batch_size(self.gpu_mode, size, len(self.site.devices), self.num_nodes)

    def num_optimizer_steps(
        self, num_epochs: int | None = None, num_iterations: int | None = None, grad_accumulation: int | None = None
    ) -> int | None:
        """Return the number of optimizer steps of a training, for schedules; call it before, in or after ``fit``.

        It is the same on all ranks: ``len(train_loader) * num_epochs`` in one process, less with several ranks, as each
        step then takes a batch of each.

        Parameters
        ----------
        num_epochs, num_iterations, grad_accumulation : int, optional
            As for ``fit``. Default: those of the running or last ``fit``.

        Returns
        -------
        int or None
            ``None`` if the loader has no length, as a stream.

        Raises
        ------
        ConfigurationError
            If there is no ``train_loader``, or nothing says how long the training is.

        Examples
        --------
        >>> tl.num_optimizer_steps(num_epochs=10, grad_accumulation=4)                        # doctest: +SKIP
        390
        """
        epochs, iterations = num_epochs or 0, num_iterations or 0
        if not epochs and not iterations:
            epochs, iterations = self.num_epochs, self.num_iterations
        if self.train_loader is None or not (epochs or iterations):
            missing = "train_loader is None" if self.train_loader is None else "there was no fit yet"
            raise ConfigurationError(
                f"num_optimizer_steps: {missing}. Give the loop a train_loader, and say num_epochs or num_iterations."
            )
        accumulation = grad_accumulation or self.grad_accumulation
        ranks = len(self.site.devices) * self.site.num_nodes if has_ranks(self.gpu_mode) else 1
        if self.running is not None:
            ranks = self.world_size
        # Of a feed that is never read.
        feed = train_feed(self.train_loader, world_size=ranks, seed=0, exchange_ints=lambda values: [values] * ranks)
        if feed.num_batches is None:
            return -(-iterations // accumulation) if iterations else None
        rest = 0
        if iterations:
            epochs, rest = divmod(iterations, feed.num_batches)
        return epochs * -(-feed.num_batches // accumulation) + -(-rest // accumulation)

    @property
    def rank_zero_only_metrics(self) -> set[str]:
        """Metrics logged with ``rank_zero_only``: other ranks don't know them, so nothing may depend on them."""
        return set() if self.running is None else self.running.recorder.rank_zero_only_names

    def __repr__(self) -> str:
        number = sum(p.numel() for p in self.model.parameters() if not torch.nn.parameter.is_lazy(p))
        devices, quota = self.site.devices, self.options.quota
        where = devices[0].type if len(devices) == 1 else f"{len(devices)} x {devices[0].type}"
        precision = self.options.amp.described(devices[0])
        nodes = f" on each of {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return (
            f"TrainLoop({self.gpu_mode} on {where}{nodes}{precision}, "
            f"effective batch {self.effective_batch_size or 'unknown'}, "
            f"{type(self.model).__name__} with {number:,} parameters{f', {quota}' if quota is not None else ''})"
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
        """Record a metric from anywhere in a running loop: :meth:`.TTModel.log` without the model.

        Raises
        ------
        ConfigurationError
            As :meth:`.TTModel.log`; and if nothing is running, so that the value would belong to no epoch.
        """
        run = self.running
        if run is None or run.sink is None:
            raise ConfigurationError(
                f"log({name!r}, ...): nothing is running, so there is no epoch to log for. Call it in a hook, from "
                "on_multiprocess_start on; insert_metric_result_into_history adds to the last epoch after fit."
            )
        run.sink(name, value, (on_step, on_epoch, reduce, sync_dist, prog_bar, rank_zero_only), batch_size)

    @property
    def history_epoch(self) -> int:
        """The epoch, counted from 0, whose row what is logged now goes into; between epochs the last one."""
        return self.running.history_epoch if self.running is not None else max(self.epoch - 1, 0)

    def insert_metric_result_into_history(self, name: str, value: float) -> None:
        """Append a value to the history of a metric, for the running epoch (outside ``fit``: the last one).

        It is there at once. In ``ddp`` ranks exchange what they inserted when the hook is over (inside an epoch: at its
        end): the value becomes the mean over the ranks that inserted one, on all ranks. Of several values of one name
        the first ones make one mean, the second ones another. :meth:`log` has other ways to reduce.
        """
        run = self.running
        if run is None or run.gather is None:
            self.history.record(name, float(value), self.history_epoch)
        else:
            self.history.record_own(name, float(value), self.history_epoch)

    def flush_logs(self) -> None:
        """Read what was logged and hand it to ``on_log``. Collective; waits for the device."""
        if self.running is not None:
            self.running.flush_logs()

    if not TYPE_CHECKING:  # with it, every name would be right

        def __getattr__(self, name: str) -> Any:
            """Raise for a missing attribute, with a hint if another library's loop has it."""
            if hasattr(type(self), name):  # a property raised: show its own error
                return object.__getattribute__(self, name)
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{attribute_hint(name)}")

    def __getstate__(self) -> dict[str, Any]:
        # Process groups, open files, running iterators: of this process only.
        return {**self.__dict__, "running": None, "found_inf": []}
