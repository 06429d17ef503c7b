"""Implement what callbacks and users read of a loop and assign to it, its ``repr``, numbers of steps, ``log``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from trainloop._support.keywords import attribute_hint, nearest
from trainloop._support.user_line import warn
from trainloop._transfer.torch_objects import kept_attributes
from trainloop.callbacks.arguments import number_of
from trainloop.callbacks.base import AbstractCallback, identity_of
from trainloop.callbacks.loop import ASSIGNABLE, refusal
from trainloop.data import TrainFeed
from trainloop.data.feed.marks import LoaderMarks
from trainloop.devices import effective_batch_size
from trainloop.distributed import Rank
from trainloop.errors import ConfigurationError
from trainloop.history import History
from trainloop.optim.parameters import own_parameters
from trainloop.train_loop.arguments import checks as check
from trainloop.train_loop.arguments.options import End, Options, Restart
from trainloop.train_loop.arguments.run_config import RunConfig
from trainloop.train_loop.arguments.types import Collate, Transform
from trainloop.train_loop.progress.display import Display
from trainloop.train_loop.progress.progress import Progress
from trainloop.train_loop.progress.timings import StepClock, Timings


class Running(Protocol):
    """What a loop needs of its current run."""

    trains: bool
    """True if the run trains; False if it only evaluates or predicts."""
    parallel: bool
    """True if there are other ranks."""
    sink: Callable[..., None] | None
    """Function that currently receives logs."""
    history_epoch: int
    """Epoch for which values are currently logged."""
    display: Display
    clock: StepClock | None
    """Clock of a training run."""

    @property
    def place(self) -> Any:
        """Placed model, with its ``device`` and ``scaler``."""

    @property
    def rank_zero_only_names(self) -> set[str]:
        """Names of metrics that were logged with ``rank_zero_only``."""

    def flush_logs(self, *, exchange: bool = False) -> None:
        """Read the logs and pass them to ``on_log``; ``exchange``: the history gets the values of all steps so far."""

    def assigned(self, name: str) -> None:
        """Follow an attribute of the loop that was assigned a new value."""


class LoopState:
    """The part of a :class:`~trainloop.TrainLoop` that callbacks read and write: its state, history and logs.

    It outlives each run, and is sent to the ranks and back. :attr:`running` is the current run. The loop's own code
    sees this class, or the protocol :class:`.Loop`, and never ``TrainLoop`` itself.
    """

    model: Any
    train_loader: Any
    validation_loader: Any
    test_loader: Any
    optimizer: Any
    criterion: Any
    collate_batch_pred_fn: Collate
    pred_transform_fn: Transform
    end_auto_eval: int
    seed: int | None
    timeout: float
    progress_bar: bool
    gradient_clip_norm: float | None
    sync_batchnorm: bool
    options: Options
    """The loop's arguments."""
    run_config: RunConfig
    """Mode, devices and nodes of the loop's runs."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.callbacks: list[AbstractCallback] = []
        """Callbacks of the last ``fit``, including those that the loop's class adds."""
        self.history = History()
        """Values of each metric, one per epoch, over all calls of ``fit``: ``loop.history["val_loss"]``."""
        self.end_requested: bool = False
        self.ends: list[End] = []
        """Callbacks that requested the end of training."""
        self.num_epochs = self.num_iterations = 0
        self.grad_accumulation = 1
        self.process = self.run_config.here or Rank()
        """Rank of this process among all processes that train together."""
        self.drawn_seed = 0
        """Seed derived from the caller's generator: ranks must agree on an order even if the user gave no seed."""
        self.predicted_at: tuple[Any, ...] = ()
        """Random state, loader and step of the last call that predicts."""
        self.predicts_again = False
        """True in a call, within ``fit``, that predicts as the last one: the same loader, step and random state."""
        self.scaler_state: dict[str, Any] = {}
        self.restarts: list[Restart] = []
        """Restarts of the last ``fit(max_restarts=...)``, in the process that called it; a rank has an empty list."""
        self.timings_of_last_fit = Timings()
        self.wrapper_args: dict[str, Any] = {}
        """Wrapper arguments of the last ``fit`` (``ddp_model_args``, ...). Evaluation outside of ``fit`` uses them,
        too."""
        self.left_behind = False
        """True after ``fit(gather=False)``: the trained values are only in checkpoints."""
        self.own_optimizer_states: list[Any] = []
        """In ``fsdp``, each rank's optimizer state that is not shaped like the parameters, after the last ``fit``."""
        self.callbacks_of_ranks: list[tuple[Any, list[dict[str, Any]]]] = []
        """Callbacks with a state for each rank (``rank_state_dict``), and these states after the last ``fit``."""
        self.runs_apart = False
        """True to train in a process of its own in ``single``, too, as with ``max_restarts``."""
        self.resumed = False
        """True from ``on_train_begin`` on in a run that resumes from a checkpoint, also after a restart."""
        self.cut: dict[str, Any] | None = None
        """Position within the last epoch, if the last ``fit`` ended in the middle of it; see ``noted_cut``."""
        self.cut_marks: LoaderMarks | None = None
        """Marks of the training loader that :attr:`cut` belongs to; only in the process that calls ``fit``."""
        self.batches_before = 0
        """Batches that earlier calls of ``fit`` have trained in the epoch in which the current one began."""
        self.worker_marks: list[LoaderMarks] = []
        """Marks of the loaders with persistent workers, as they were when the workers started; only in this process."""
        self.running: Running | None = None
        """Current run, while this process trains or evaluates."""

    # -- what may be assigned ----------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign an attribute: checked, and while the loop runs only those of :class:`.Loop` that may change then.

        Raises
        ------
        ConfigurationError
            For an invalid value, for an attribute that can't be assigned now, and for a name that is nearly one of the
            loop's.
        """
        running = self.__dict__.get("running")
        if name in ASSIGNABLE:
            known = name in self.__dict__  # otherwise the constructor assigns it, and has checked it
            if known and running is None and name in _OF_FIT:
                raise ConfigurationError(f"tl.{name} can't be assigned between calls of fit. Pass fit({name}=...).")
            super().__setattr__(name, self._checked_attribute(name, value) if known else value)
            if name == "optimizer":
                self.note(own_optimizer_states=[])
            if running is not None and known:
                running.assigned(name)
        elif name in _OWN or hasattr(type(self), name):
            fixed = isinstance(own := getattr(type(self), name, None), property) and own.fset is None
            if running is not None or fixed:
                raise ConfigurationError(refusal(name, running=not fixed))
            super().__setattr__(name, value)
        else:
            if name not in self.__dict__ and name[0] != "_":
                near = nearest(name, _OWN | ASSIGNABLE, 0.85)
                hint = f"Did you mean tl.{near}?" if near else attribute_hint(name).removeprefix(". ")
                if near or (hint and any(f" {known}" in f" {hint}" for known in ASSIGNABLE)):
                    raise ConfigurationError(f"tl.{name} = ...: the loop has no attribute {name!r}. {hint}")
            super().__setattr__(name, value)

    def _checked_attribute(self, name: str, value: Any) -> Any:
        if name in ("train_loader", "validation_loader", "test_loader"):
            return check.check_loader(value, name)
        if name == "optimizer":
            return check.check_optimizer(value, self.model, self.criterion)
        if name == "criterion":
            return check.check_criterion(value)
        if name == "gradient_clip_norm":
            return check.check_positive(value, name)
        if name == "grad_accumulation":
            return check.check_count(value, name, 1)
        if name in ("num_epochs", "num_iterations"):
            return self._checked_length(name, value)
        if name == "end_auto_eval":
            return check.check_auto_eval(value)
        if name == "callbacks":
            return check.check_callbacks(value)
        if name in ("collate_batch_pred_fn", "pred_transform_fn"):
            return check.check_callable(value, name)
        return value

    def _checked_length(self, name: str, value: Any) -> int:
        if not getattr(self, name):
            other = "num_iterations" if name == "num_epochs" else "num_epochs"
            raise ConfigurationError(
                f"tl.{name} = {value!r}: the length of this fit is given by {other}. Assign tl.{other}."
            )
        return check.check_count(value, name, 1)

    def note(self, **values: Any) -> None:
        """Set attributes that only the loop's own code changes, also while the loop runs."""
        self.__dict__.update(values)

    # -- what users and callbacks read -------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of finished epochs, which is also the index of the running epoch, counted from 0.

        An epoch in whose middle ``fit(num_iterations=...)`` has ended counts as finished, because it was evaluated and
        has a row in the history. If the next call continues this epoch, ``epoch`` is its index again until the end of
        that call or of the epoch.
        """
        return self.progress.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.progress.epoch = epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps, over all calls of ``fit``."""
        return self.progress.global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.progress.global_step = step

    @property
    def total_iteration_idx(self) -> int:
        """Index of the current or last batch, counted from 0 over all epochs; -1 before the first."""
        return self.progress.total_iteration_idx

    @total_iteration_idx.setter
    def total_iteration_idx(self, index: int) -> None:
        self.progress.total_iteration_idx = index

    @property
    def last_loss(self) -> Tensor | None:
        """Loss of this process's last batch, on its device; reading it waits for the device."""
        return self.progress.last_loss

    @last_loss.setter
    def last_loss(self, loss: Tensor | None) -> None:
        self.progress.last_loss = loss

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
        self.note(end_requested=bool(stop))
        if stop:
            self._note_end(End("", "early_stop"))
        else:
            self.note(ends=[])

    def end_training(self, callback: AbstractCallback, reason: str = "") -> None:
        """End training at a callback's request; see :meth:`.AbstractCallback.end_training`."""
        if not isinstance(callback, AbstractCallback):
            raise ConfigurationError(
                f"tl.end_training({callback!r}, ...): the first argument must be the callback that ends training. In a "
                "callback, call self.end_training(reason); elsewhere, assign tl.early_stop = True."
            )
        identity = identity_of(callback)
        self._note_end(End(identity["type"], identity["name"], reason, identity["key"], identity["arguments"]))
        self.note(end_requested=True)

    def end_epoch(self) -> None:
        """End the current epoch after this step, on all ranks; the next epoch begins as usual.

        The epoch's evaluation and its last hooks follow. All ranks end the epoch at the same step; if only some ranks
        call it, this may be one or a few steps later. Between two calls of ``fit(num_iterations=...)``, it ends the
        epoch in which the first call stopped, so that the second call begins a new epoch.

        Raises
        ------
        ConfigurationError
            If no training runs, and the last one was not given in iterations.
        """
        if self.running is None and (self.num_iterations or self.cut is not None):
            self.note(cut=None)
            return
        if self.running is None or not self.running.trains:
            raise ConfigurationError("end_epoch() needs a running fit: call it from a callback.")
        self.progress.epoch_ends = True

    def report(self, text: str, level: int = logging.INFO) -> None:
        """Report an event: print a line above the progress bar on rank 0, or log it.

        With ``progress_bar=False``, and on other ranks, the logger ``trainloop`` gets the line at ``level``. Python
        shows only warnings by default. Handlers of log files get the line in any case.
        """
        display = (
            self.running.display if self.running is not None else Display(self.progress_bar and self.is_global_zero)
        )
        display.event(text, level)

    def watch(self, observer: Any = None) -> Any:
        """Return the current run (``None`` if nothing runs), and let ``observer`` be called for each forward of it."""
        run: Any = self.running
        if run is not None and observer is not None:
            run.observe(observer)
        return run

    def _note_end(self, end: End) -> None:
        if all(end._replace(reason=known.reason) != known for known in self.ends):
            self.ends.append(end)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The ``GradScaler`` during training (disabled unless fp16 is used), otherwise ``None``."""
        return None if self.running is None else self.running.place.scaler

    @property
    def step_skipped(self) -> bool:
        """True if AMP skipped the last optimizer step. Reading it waits for the device if there is a scaler."""
        return any(bool(found.item()) for _, found in self.progress.found_inf)

    @property
    def timings(self) -> Timings:
        """Timings of the current or last ``fit``: ``print(tl.timings)``."""
        clock = None if self.running is None else self.running.clock
        return self.timings_of_last_fit if clock is None else clock.timings()

    @property
    def effective_batch_size(self) -> int | None:
        """Number of samples in a global batch of the training loader; ``None`` if unknown."""
        size = check.loader_batch_size(self.train_loader)
        if size is None:
            return None
        return effective_batch_size(self.gpu_mode, size, self.run_config.num_ranks)

    def num_optimizer_steps(
        self, num_epochs: int | None = None, num_iterations: int | None = None, grad_accumulation: int | None = None
    ) -> int | None:
        """Return the number of optimizer steps of a training run. You can call it before, during and after ``fit``.

        The number is the same on all ranks. In one process without gradient accumulation it is ``len(train_loader) *
        num_epochs``. With several ranks it is smaller, because each step uses a batch on each rank. A call of
        ``fit(num_iterations=...)`` that continues an epoch begins with a new step.

        Parameters
        ----------
        num_epochs, num_iterations, grad_accumulation : int, optional
            As in ``fit``. Default: the arguments of the current or last ``fit``.

        Returns
        -------
        int or None
            ``None`` if the loader has no length, such as a stream, and ``num_iterations`` is not given. With
            ``num_iterations``, the number is then that of one long epoch.

        Raises
        ------
        ConfigurationError
            If an argument is out of range, if there is no ``train_loader``, or if the length of the training is
            unknown.

        Examples
        --------
        >>> tl.num_optimizer_steps(num_epochs=10, grad_accumulation=4)                        # doctest: +SKIP
        390
        """
        epochs = 0 if num_epochs is None else check.check_count(num_epochs, "num_epochs", 0)
        iterations = 0 if num_iterations is None else check.check_count(num_iterations, "num_iterations", 0)
        if epochs and iterations:
            raise ConfigurationError("num_optimizer_steps: pass num_epochs or num_iterations, not both.")
        if grad_accumulation is not None:
            grad_accumulation = check.check_count(grad_accumulation, "grad_accumulation", 1)
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
        feed = TrainFeed(self.train_loader, world_size=ranks, seed=0)
        if feed.num_batches is None:
            return -(-iterations // accumulation) if iterations else None
        lengths = [(epochs, feed.num_batches)]  # how many parts of epochs, of how many batches
        if iterations:
            first = min(iterations, max(feed.num_batches - self._begins_after(), 0))
            epochs, last = divmod(iterations - first, feed.num_batches)
            lengths = [(1, first), (epochs, feed.num_batches), (1, last)]
        return sum(times * -(-batches // accumulation) for times, batches in lengths)

    def _begins_after(self) -> int:
        """Return the number of batches of its first epoch that a ``fit`` in iterations, or the current one, skips."""
        if self.running is not None and self.running.trains:
            return self.batches_before
        return self.cut["place"]["epoch_batches"] if self.cut and self._reads_on() else 0

    def _reads_on(self) -> bool:
        """Return True if the training loader is still the one in whose epoch the last ``fit`` ended."""
        marks = self.cut_marks
        if self.cut is None or self.cut["loop_seed"] != self.seed:
            return False
        return marks is None or (marks.loader is self.train_loader and not marks.changed())

    @property
    def rank_zero_only_metrics(self) -> set[str]:
        """Names of metrics logged with ``rank_zero_only``. Other ranks lack them, so no decision may depend on them."""
        return set() if self.running is None else self.running.rank_zero_only_names

    def __repr__(self) -> str:
        number = sum(p.numel() for p in own_parameters(self.model) if not torch.nn.parameter.is_lazy(p))
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
        me, run = "insert_metric_result_into_history", self.running
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{me}({name!r}, ...): the name must be a non-empty string.")
        number = float(number_of(f"{me}({name!r}, ...)", "value", value, nan=True))
        if run is None or not run.parallel:
            self.history.record(name, number, self.history_epoch)
        else:
            self.history.record_own(name, number, self.history_epoch)

    def flush_logs(self) -> None:
        """Add the values of the steps so far to the history and pass them to ``on_log``. Collective; waits.

        ``on_log`` gets the values of the current step when all of its hooks have run.
        """
        if self.running is not None:
            self.running.flush_logs(exchange=True)

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raise an error for a missing attribute, with a hint if another library's loop has it."""
            if hasattr(type(self), name):  # a property raised an error: raise that error
                return object.__getattribute__(self, name)
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{attribute_hint(name)}")

    def __getstate__(self) -> dict[str, Any]:
        # Process groups, open files and running iterators are valid in this process only.
        here: dict[str, Any] = {"running": None, "cut_marks": None, "worker_marks": []}
        return {**self.__dict__, **here, "progress": replace(self.progress, found_inf=[])}


def added_attributes(loop: LoopState) -> dict[str, Any]:
    """Return the attributes of a loop that callbacks, users and subclasses have added, and that are pickled."""
    own = vars(loop)
    return {
        name: value
        for name, value in kept_attributes(loop).items()
        if name not in _OWN and name not in ASSIGNABLE and own.get(name) is value
    }


# Arguments of fit, which may be assigned only while it runs: each call of fit sets them again.
_OF_FIT = frozenset({"num_epochs", "num_iterations", "grad_accumulation", "callbacks"})
# The loop's own attributes, as far as they are not properties or methods of the class.
_OWN = frozenset(LoopState.__annotations__) | frozenset(
    "callbacks history progress end_requested ends num_epochs num_iterations grad_accumulation process "
    "drawn_seed predicted_at predicts_again scaler_state restarts timings_of_last_fit wrapper_args left_behind "
    "own_optimizer_states callbacks_of_ranks resumed runs_apart cut cut_marks worker_marks running".split()
)
