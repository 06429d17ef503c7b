"""Run a loop on one rank: evaluate, predict, record and flush logs, with the placed model, hooks and feeds.

A :class:`Run` exists only while its process works for a loop. Its subclass
:class:`~trainloop.train_loop.training.training.Training` trains.

A value that a hook logs is recorded for the hook's epoch. Hooks of steps log into the epoch that is being recorded. At
the end of the epoch, all ranks exchange their logs. Then the epoch's last hooks are called, one callback after another.
The logs of each callback are exchanged before the next callback is called, so the next callback finds them in the
history.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainloop import distributed
from trainloop._launch.rank_process import started_by_launch
from trainloop._metrics import EpochEnd, Recorder, StepValues, exchange_of, named_losses, rows_of
from trainloop._support import rng
from trainloop._support.reduction import SumRule, class_criteria, sum_rule
from trainloop._support.stopping import StopAgreement
from trainloop._support.user_line import warn, warn_or_print
from trainloop.callbacks.base import HooksOfRanks, HookTable
from trainloop.data import EvalFeed
from trainloop.data.feed.marks import LoaderMarks
from trainloop.data.loader.generators import generators_restored
from trainloop.data.loader.loader_copies import end_workers, keeps_workers, with_workers
from trainloop.data.loader.loaders import Shared, check_shared, workers_outlive_signals
from trainloop.devices import has_ranks
from trainloop.distributed.ranks import whole_batch
from trainloop.distributed.tensors import copy_from_first
from trainloop.model import TTModel
from trainloop.optim.parameters import modules_beside, move_to, trained_modules
from trainloop.parallel.sync_batchnorm import of_this_rank
from trainloop.resources.enforce import cap_workers
from trainloop.train_loop.progress.display import Display
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.progress.timings import StepClock
from trainloop.train_loop.run.evaluating import evaluating, mean_loss, predictions
from trainloop.train_loop.run.idle import Idle, padded_batches, refuse_exchanges
from trainloop.train_loop.run.losses import BatchLoss, explained_evaluation, loss_of
from trainloop.train_loop.run.placement import Placement
from trainloop.train_loop.run.row_files import PredictionStream, RowFiles, rows_folder, write_rows
from trainloop.train_loop.run.rows import Predictions, check_rows

# Steps between two readings of the logs: a reading waits for the device, and ranks exchange their logs.
STEPS_BETWEEN_FLUSHES = 128
# Until step values are exchanged, they occupy memory twice.
MOST_STEPS_BETWEEN_EXCHANGES = 32 * STEPS_BETWEEN_FLUSHES

_NOTHING: AbstractContextManager[Any] = nullcontext()  # around a batch of an evaluation
_KEPT_FEEDS = 8  # of evaluations of loaders that are not the loop's own
# Prefixes of names logged in an evaluation, by the dataset's type; a user-defined type is used as the prefix itself.
_PREFIXES = {"train": "train_", "validation": "val_", "test": "test_", "other": ""}


class Run:
    """A loop at work in this process.

    Parameters
    ----------
    loop : LoopState
        The loop; in a started rank, the rank's copy.
    place : Placement
        The model as this rank runs it.
    stop : StopAgreement
        Agreement of all ranks on when to stop.
    """

    trains = False
    step_in_work: Any = None
    """In a training, the step's batches, from their arrival until its last hook has run."""

    def __init__(self, loop: LoopState, place: Placement, stop: StopAgreement) -> None:
        self.parallel = has_ranks(loop.gpu_mode) and loop.world_size > 1
        """True if there are other ranks; False for the only rank of a group, as under a launcher with one process."""
        self.loop = loop
        self.place = place
        self.expects = place.expects
        self.stop = stop
        self.hooks = HookTable(loop.callbacks, loop.rank, loop.model, place.guarded)
        # Ranks must agree on an order even if the user gave no seed. The caller's RNG is not changed.
        self.seed = loop.seed if loop.seed is not None or not self.parallel else loop.drawn_seed
        self.exchange = exchange_of(distributed, loop.world_size if self.parallel else 1)
        """Exchange of logs for all recorders; it remembers the metrics that ranks share."""
        # Only rank 0 has a bar: bars of several ranks would overwrite each other on one terminal.
        self.display = Display(loop.progress_bar and loop.is_global_zero)
        self.recorder = Recorder()
        self.sink: Callable[..., None] | None = None
        self._sink_of_parts: Callable[..., None] | None = None
        self._heard: list[tuple[nn.Module, Any]] = []  # modules that log, each with its sink before
        """Function that currently receives logs: a method of the training's or an evaluation's recorder."""
        self.history_epoch = max(loop.epoch - 1, 0)
        """Epoch for which values are currently logged; outside of training, the last epoch."""
        self.records_evaluations = False
        """True if values of evaluations are written to the history, as in training."""
        self._own_values: dict[str, int] = {}  # for each value of an epoch's own evaluation, the last such epoch
        self.epoch_steps = 0
        """Steps since the epoch began."""
        self.undo = ExitStack()
        """Stack of contexts that is closed when the run ends."""
        self.idle = Idle(self)
        self._around_batch: AbstractContextManager[Any] = _NOTHING
        self._eval_feeds: dict[int, tuple[LoaderMarks, Any, int]] = {}
        """Feeds of evaluations, and the epoch of their last use, by the id of the loader; the last one used is last."""
        self._open_feeds: dict[Any, ExitStack] = {}
        """What ends with a feed, by the feed."""
        self.undo.callback(self._close_feeds)
        self.of_ranks = HooksOfRanks.of(loop.callbacks)
        self._passes = 0
        """Evaluations and predictions that are in progress: a hook of one may begin another one."""

    @property
    def _in_hooks(self) -> bool:
        """True if what is called now is called by a hook: in a training, or in another pass."""
        return self.trains or self._passes > 0

    # -- what callbacks change ---------------------------------------------------------------------------------------

    clock: StepClock | None = None
    """Clock of a training run; ``None`` in other runs."""

    def assigned(self, name: str) -> None:
        """Follow an attribute of the loop that was assigned a new value; see :class:`.Loop` for the moments."""
        if name == "criterion":
            for module in modules_beside(self.loop.model, self.loop.criterion):
                move_to(module, self.place.device)

    @property
    def rank_zero_only_names(self) -> set[str]:
        """Names of metrics that were logged with ``rank_zero_only``."""
        return self.recorder.rank_zero_only_names

    # -- data --------------------------------------------------------------------------------------------------------

    def feed_of(self, make: Callable[..., Any], loader: Any, name: str) -> Any:
        """Return this rank's part of a loader, with no more workers than the quota allows."""
        loop = self.loop
        self._end_outdated_workers(loader)
        workers = getattr(loader, "num_workers", 0)
        # A quota is for the whole run, so each rank gets its share of the workers.
        allowed = cap_workers(workers, loop.options.quota, loop.process.local_world_size) if workers else 0
        if allowed != workers:
            loader = with_workers(loader, allowed)
        with ExitStack() as opened:
            opened.enter_context(workers_outlive_signals(loader))
            feed = make(
                loader,
                rank=loop.rank,
                world_size=loop.world_size,
                seed=self.seed,
                name=name,
                exchange_ints=distributed.exchange_ints if self.parallel else None,
                device=self.place.device,
            )
            opened.callback(feed.close)
            self._open_feeds[feed] = opened.pop_all()
        return feed

    def close_feed(self, feed: Any) -> None:
        """Close a feed of :meth:`feed_of`, and forget it, so that a loader that the user has replaced is freed."""
        self._open_feeds.pop(feed).close()

    def _close_feeds(self) -> None:
        while self._open_feeds:
            self._open_feeds.popitem()[1].close()
        self._eval_feeds.clear()
        own = self._own_loaders()
        self.loop.note(worker_marks=[m for m in self.loop.worker_marks if any(m.loader is one for one in own)])

    def _trains_with(self, loader: Any) -> bool:
        """Return True if a training reads this very loader, and no copy: it may need its workers in this epoch."""
        return any(feed.loader is loader for feed in self._open_feeds if not isinstance(feed, EvalFeed))

    def _own_loaders(self) -> tuple[Any, ...]:
        return self.loop.train_loader, self.loop.validation_loader, self.loop.test_loader

    def _end_outdated_workers(self, loader: Any) -> None:
        """End a loader's persistent workers if it has changed since an earlier call of ``fit``, in which they started.

        They have copies of the dataset as it was.
        """
        if self._trains_with(loader):  # the training ends them at the next epoch
            return
        loop, own = self.loop, self._own_loaders()
        known = [marks for marks in loop.worker_marks if any(marks.loader is one for one in own)]
        if any(marks.loader is loader and marks.changed() for marks in known):
            end_workers(loader)
        if keeps_workers(loader) and any(loader is one for one in own):
            known = [*(marks for marks in known if marks.loader is not loader), LoaderMarks(loader)]
        loop.note(worker_marks=known)

    def _eval_feed(self, loader: Any, name: str) -> Any:
        """Return the feed of an evaluation; it is kept, with its persistent workers, until its loader changes.

        It is also kept only while its loader is in use, since callbacks may make a new loader for each evaluation.
        """
        kept = self._eval_feeds.pop(id(loader), None)
        if kept is not None and kept[0].changed():
            self.close_feed(kept[1])
            if not self._trains_with(loader):
                end_workers(loader)
            kept = None
        if kept is None:
            self._forget_feeds()
            # The marks refer to the loader, so that no other object gets its id.
            marks, feed = LoaderMarks(loader), self.feed_of(EvalFeed, loader, name)
        else:
            marks, feed, _ = kept
        self._eval_feeds[id(loader)] = marks, feed, self.loop.epoch
        if self.parallel:  # in each pass: a loader may have changed on one rank only
            everyone = distributed.exchange_ints(feed.shared, "the beginning of an evaluation")
            check_shared([Shared(*theirs) for theirs in everyone], name)
        return feed

    def _forget_feeds(self) -> None:
        """Close feeds of loaders that are not the loop's own: the oldest, and those not used since the last epoch."""
        own, epoch = self._own_loaders(), self.loop.epoch
        others = [key for key, (marks, *_) in self._eval_feeds.items() if all(marks.loader is not one for one in own)]
        unused = sum(self._eval_feeds[key][2] < epoch - 1 for key in others)  # these are the first ones
        for key in others[: max(unused, len(others) - _KEPT_FEEDS)]:
            self.close_feed(self._eval_feeds.pop(key)[1])

    def shared_of(self, loader: Any, name: str) -> Shared:
        """Return the properties of a loader that must be equal on all ranks; the caller must compare them."""
        loop = self.loop
        return EvalFeed(loader, rank=loop.rank, world_size=loop.world_size, seed=self.seed, name=name).shared

    # -- evaluation and predictions ----------------------------------------------------------------------------------

    def evaluate(self, loader: Any, name: str, kind: str, losses_into_history: bool = False) -> EpochEnd:
        """Return the mean losses over a loader, and the logged values; see :meth:`trainloop.TrainLoop.evaluate`."""
        device, prefix = self.place.device, _PREFIXES[kind]
        model = self.place.evaluated

        def get_loss(batch: Any, sums: SumRule | None = None) -> BatchLoss:
            if self.expects is not None:
                self.expects(recorder.batch_size)
            with self.place.autocast, whole_batch(), explained_evaluation(batch), self._around_batch:
                loss = loss_of(model.get_loss_eval(batch, self.loop.criterion, device), recorder.batch_size, sums)
            if self.place.collective and torch.is_grad_enabled():
                model.reshard_units()  # no backward follows that would free the parameters
            return loss

        info = {"type": kind, "pass": "loss"}
        with self._evaluation(prefix, self.hooks, info) as recorder:
            feed = self._eval_feed(loader, name)
            own = self._refusing_exchanges(feed, feed.batches(self._padded(get_loss)))
            batches = _before_hooks(self.watched_evaluation(own, "loss"), self.hooks, recorder, info)
            trained, criterion = self.loop.model, self.loop.criterion
            # Otherwise the loss of the batch is the mean. In dp, replicas have parts of it.
            weighs = self.loop.gpu_mode == "dp" or not feed.is_one_batch
            with class_criteria(trained, criterion) if weighs else _NOTHING:
                rule = sum_rule(trained, criterion)
                end = mean_loss(
                    batches, get_loss, recorder, name, rule, weighs=weighs, model=trained, criterion=criterion
                )
        losses = named_losses(end.losses, prefix) if losses_into_history else {}
        self._into_history(prefix, {**losses, **end.metrics}, own=losses_into_history)
        return end

    def predict(
        self, loader: Any, name: str, dataset_info: dict[str, Any], execute_callbacks: bool, rows_to: str | None = None
    ) -> Predictions:
        """Return predictions over a loader; see :meth:`trainloop.TrainLoop.predict_with_model`."""
        loop, by_hook = self.loop, self._in_hooks
        with self._predicting(loader, name, dataset_info, execute_callbacks) as (feed, batches, get_predictions, end):

            def gather(mine: Any) -> list[Any] | None:
                receivers = self._receivers(rows_to, by_hook=by_hook)
                if len(receivers) == loop.world_size and self.exchange.carries_objects:
                    return end(mine)  # the logs are exchanged with the rows
                end()
                return self._gathered_at(mine, receivers)

            return predictions(
                batches, get_predictions, gather, feed.row_order, loop.collate_batch_pred_fn, loop.pred_transform_fn
            )

    def predict_into(
        self, folder: Path, loader: Any, name: str, dataset_info: dict[str, Any], execute_callbacks: bool
    ) -> Any:
        """Write predictions over a loader to files, for :class:`RowFiles`; return the order of rows on every rank."""
        with self._predicting(loader, name, dataset_info, execute_callbacks) as (feed, batches, get_predictions, end):
            write_rows(folder, self.loop.rank, batches, get_predictions)
            end()
            distributed.barrier()  # all ranks have written their files
            files = RowFiles(folder)
            order = feed.row_order(files.sizes)
            files.close()
            return None if order is None else np.asarray(order, np.int64)

    def predict_stream(
        self, loader: Any, name: str, dataset_info: dict[str, Any], execute_callbacks: bool, rows_to: str | None
    ) -> PredictionStream:
        """Return an iterator over a loader's predictions, which is empty on ranks that get no rows."""
        first = distributed.is_global_zero()
        with rows_folder() if first else nullcontext() as own:
            folder = Path(distributed.broadcast_object(str(own)))
            order = self.predict_into(folder, loader, name, dataset_info, execute_callbacks)
            receives = self.loop.rank in self._receivers(rows_to, by_hook=self._in_hooks)
            files = RowFiles(folder) if receives else None
            distributed.barrier()  # all ranks have opened the files, whose names are removed now
        return PredictionStream(files, order if receives else None)

    @contextmanager
    def _predicting(
        self, loader: Any, name: str, dataset_info: dict[str, Any], execute_callbacks: bool
    ) -> Iterator[tuple[Any, Iterator[Any], Callable[[Any, int], Any], Callable[..., list[Any]]]]:
        """Yield this rank's feed, its batches, a function that predicts a batch, and a function that exchanges logs."""
        model, device = self.place.evaluated, self.place.device
        # The model's own hooks are always called.
        hooks = self.hooks if execute_callbacks else HookTable((), model=self.loop.model)
        dataset_info = {**dataset_info, "pass": "predictions"}

        again = self.loop.predicts_again and self.loop.is_global_zero

        def forward(batch: Any) -> Any:
            nonlocal again
            before = rng.read(only_torch=True) if again else None
            with self.place.autocast, whole_batch(), explained_evaluation(batch), self._around_batch:
                output = model.get_predictions(batch, device)
            if before is not None and rng.drew(before):
                (warn_or_print if self.parallel else warn)(_SAME_DRAWS)
            again = False
            return output

        def get_predictions(batch: Any, size: int) -> Any:
            recorder.batch_size = size
            if self.expects is not None:
                self.expects(size)
            output = forward(batch)
            output = check_rows(output, size)  # check here, where the batch is known
            for hook in hooks.on_after_batch_prediction:
                hook(*output, dataset_info)
            return output

        def end(mine: Any = None) -> list[Any]:
            found = recorder.finish_epoch(mine)
            self._into_history(prefix, found.metrics)
            return found.attachments

        kind = str(dataset_info.get("type", "other"))
        prefix = _PREFIXES.get(kind, f"{kind}_")
        with self._evaluation(prefix, hooks, dataset_info) as recorder:
            feed = self._eval_feed(loader, name)
            own = self._refusing_exchanges(feed, feed.batches(self._padded(forward)))
            batches = _before_hooks(self.watched_evaluation(own, "predictions"), hooks, recorder, dataset_info)
            yield feed, batches, get_predictions, end

    def watched_evaluation(self, batches: Iterator[Any], kind: str) -> Iterator[Any]:
        """Return the batches of a pass for losses or predictions; a training watches what the pass changes."""
        return batches

    def _refusing_exchanges(self, feed: EvalFeed, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; exchanges of the model in one that some rank does not have are errors."""
        if not self.parallel or self.place.collective:
            yield from batches
            return
        try:
            for item in batches:
                ranks = feed.ranks_beside(item[0])
                self._around_batch = _NOTHING if ranks is None else refuse_exchanges(ranks, evaluates=True)
                yield item
        finally:
            self._around_batch = _NOTHING

    def _padded(self, forward: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Iterator[Any]] | None:
        """If a forward is an exchange, return a function by which all ranks run the same number of forwards."""
        if not self.place.collective or not self.parallel:
            return None
        return partial(padded_batches, forward=forward, idle=self.idle, wrapper=self.place.wrapper)

    def _receivers(self, rows_to: str | None, *, by_hook: bool) -> Sequence[int]:
        """Return the ranks that get all rows of predictions; all of them if a hook predicts, on each rank."""

        ranks = range(self.loop.world_size)
        if rows_to == "main":
            return ranks[:1]
        if rows_to == "all" or by_hook or not started_by_launch():
            return ranks
        return ranks[:: self.loop.process.local_world_size]  # each sends the result to its launching process

    def _gathered_at(self, mine: Any, receivers: Sequence[int]) -> list[Any] | None:
        if not self.parallel:
            return [mine]
        if len(receivers) == self.loop.world_size:
            return distributed.gather_object(mine)
        parts = [distributed.gather_to(mine, rank) for rank in receivers]
        return next((part for part in parts if part is not None), None)

    @contextmanager
    def _evaluation(self, prefix: str, hooks: HookTable, info: dict[str, Any]) -> Iterator[Recorder]:
        """Yield a recorder for an evaluation of rank 0's model, after hooks; meanwhile, it receives all logs.

        The training around the evaluation is not affected: modules' modes and random states are restored, also those of
        generators of the model, and of the training loader, which an evaluation may read.
        """
        # A criterion may have dropout, statistics or a memory, too.
        modules = trained_modules(self.loop.model, self.loop.criterion)
        parts = [part for module in modules for part in module.modules()]
        # A separate recorder, since the training's recorder may be in the middle of an epoch.
        recorder = Recorder(rank=self.loop.rank, exchange=self.exchange, on_step=False, prefix=prefix)
        buffers = _buffers_of_rank_0(parts) if self.parallel else nullcontext()
        loop = self.loop
        own: AbstractContextManager[None] = nullcontext()
        if self.trains:
            own = generators_restored(loop.train_loader, parts, loop.criterion)
        layers = of_this_rank(modules) if loop.sync_batchnorm else nullcontext()
        modes = evaluating(*modules, parts=parts)
        passes, self._passes = self._passes, self._passes + 1
        recorder.batch_size = 1  # a hook's logs are not logs of a batch
        try:
            with buffers, self.listening(recorder, parts), layers, modes, rng.isolated(), own:
                for hook in hooks.on_evaluation_begin:
                    hook(info)
                further: list[nn.Module] = []
                if hooks.on_evaluation_begin:  # a hook may have assigned a criterion, or a part of the model
                    known = set(map(id, parts))
                    now = [p for m in trained_modules(loop.model, loop.criterion) for p in m.modules()]
                    # The plain module is the one around a dict of criteria.
                    further = [part for part in now if id(part) not in known and type(part) is not nn.Module]
                    self.listen_to_parts(further)
                with (
                    evaluating(*further) if further else _NOTHING,
                    _buffers_of_rank_0(further) if further and self.parallel else _NOTHING,
                ):
                    yield recorder
        finally:
            self._passes = passes

    def _into_history(self, prefix: str, values: dict[str, float], *, own: bool = False) -> None:
        """Record the values of an evaluation, if it is part of training.

        ``own``: the evaluation is the epoch's own, whose values those of a hook's evaluation don't replace: the hook
        may have put other weights into the model.
        """
        if self.records_evaluations and prefix:
            epoch = self.history_epoch
            for name, value in values.items():
                if own:
                    self._own_values[name] = epoch
                if own or self._own_values.get(name) != epoch:
                    self.loop.history.record(name, value, epoch, replace=True)

    # -- logs --------------------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, recorder: Recorder, parts: Iterable[nn.Module] | None = None) -> Iterator[None]:
        """Send all values that the model, the callbacks and the loop log to this recorder.

        ``parts``: all modules of the model and of the criterion, if they are known.
        """
        before = self.sink, self._sink_of_parts, self._heard
        # Don't import torch._dynamo here, which takes a second: before its import, nothing can be compiled.
        self.sink = partial(_log_outside_of_graphs(), recorder) if "torch._dynamo" in sys.modules else recorder.log
        self._sink_of_parts, self._heard = self.sink_of_parts(recorder), []
        try:
            self.listen_to_parts(parts)
            yield
        finally:
            for part, sink in self._heard:
                part.__dict__["_log_sink"] = sink
            self.sink, self._sink_of_parts, self._heard = before

    def sink_of_parts(self, recorder: Recorder) -> Callable[..., None] | None:
        """Return the function that modules call to log a value."""
        return self.sink

    def listen_to_parts(self, parts: Iterable[nn.Module] | None = None) -> None:
        """Listen to modules, too, that hooks have put into the model or the criterion since :meth:`listening` began."""
        if parts is None:
            parts = [p for module in trained_modules(self.loop.model, self.loop.criterion) for p in module.modules()]
        for part in parts:
            # By the class: isinstance asks an ABC, which takes ten times as long. And through __dict__:
            # nn.Module.__setattr__ first searches parameters, modules and buffers.
            if TTModel in type(part).__mro__ and part.__dict__.get("_log_sink") is not self._sink_of_parts:
                self._heard.append((part, part.__dict__.get("_log_sink")))
                part.__dict__["_log_sink"] = self._sink_of_parts

    def flush_logs(self, *, exchange: bool = False) -> None:
        """Read the logs and pass them to ``on_log``. Collective. Waits for the device.

        With ``exchange``, the history gets the values of all steps so far in any case.
        """
        # If any rank has a hook, all ranks exchange here. Without hooks, an occasional exchange is enough.
        if exchange or self.of_ranks.on_log or self.epoch_steps % MOST_STEPS_BETWEEN_EXCHANGES == 0:
            # A hook may ask within a step, of which only some micro-batches are done, or later hooks log more.
            complete = self.step_in_work is None
            self.publish(self.recorder.exchange_steps(finished=self.loop.global_step, complete=complete))
        else:
            self.recorder.compact()

    def share_logs(self) -> None:
        """Exchange all values of steps so far, so that the history of every rank has them. Collective; waits."""
        self.flush_logs(exchange=True)
        self.loop.history.put_agreed(self.exchange({}, attachment=self.loop.history.take_own()).attachments)

    def publish(self, steps: StepValues) -> None:
        """Add step values to the history and, on rank 0, pass them to ``on_log``."""
        self.loop.history.record_steps(steps, self.recorder.again)
        if steps and self.loop.is_global_zero and self.hooks.on_log:
            rows = [row for row in rows_of(steps) if row[0] != self.recorder.open_step]  # it comes once, when complete
            for hook in self.hooks.on_log if rows else ():
                hook(rows)

    def _record_epoch(self, *, late: bool = False) -> dict[str, float]:
        """Put the logs since the beginning of the epoch (``late``: since the last call) into the history. Collective.

        Return the losses among these logs.
        """
        history = self.loop.history
        end = self.recorder.finish_epoch(history.take_own(), late=late)
        self.publish(end.steps)
        losses = named_losses(end.losses)
        for name, value in {**losses, **end.metrics}.items():
            history.record(name, value, self.history_epoch, replace=True)
        history.put_agreed(end.attachments)
        return losses

    def _call_in_turn(self, name: str) -> None:
        """Call a hook that runs after its epoch was recorded; each callback sees the logs of earlier callbacks."""
        for hook, may_log in self.hooks.in_turn(name):
            if hook is not None:
                hook()
            if may_log and self.of_ranks.alike:
                self._record_late()
        # Ranks with different callbacks can't exchange after each callback: do one exchange after all callbacks.
        if not self.of_ranks.alike:
            self._record_late()

    def _record_late(self) -> None:
        logged = self.recorder.has_logs or self.loop.history.has_own
        if self.parallel:
            logged = any(theirs for (theirs,) in distributed.exchange_ints([int(logged)], "the end of a hook"))
        if logged:
            self._record_epoch(late=True)

    @contextmanager
    def _recording_alone(self) -> Iterator[None]:
        """Record this rank's logs into its own history, without an exchange: the other ranks may have ended."""
        recorder = Recorder(rank=self.loop.rank, on_step=False)
        with self.listening(recorder):
            yield
        for name, value in recorder.finish_epoch().metrics.items():
            self.loop.history.record(name, value, self.history_epoch, replace=True)


@cache
def _log_outside_of_graphs() -> Callable[..., None]:
    """Return ``Recorder.log``, at whose calls compiled code breaks its graph.

    Tracing the growing lists of logs would recompile it at each step.
    """
    log: Callable[..., None] = torch.compiler.disable(Recorder.log)
    return log


def _before_hooks(batches: Iterable[Any], hooks: HookTable, recorder: Recorder, info: dict[str, Any]) -> Iterator[Any]:
    """Yield an evaluation's batches, and call its last hooks. Their logs are exchanged with the batches' logs."""
    yield from batches
    recorder.batch_size = 1
    for hook in hooks.on_evaluation_end:
        hook(info)


@contextmanager
def _buffers_of_rank_0(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block, all ranks use rank 0's buffers of these modules; a buffer that a hook changes keeps the change.

    (Buffers differ between ranks if DDP doesn't broadcast them.)
    """
    buffers = list({id(b): b for part in parts for b in part.buffers(recurse=False)}.values())
    kept = [buffer.clone() for buffer in buffers] if distributed.get_rank() else []
    copy_from_first(buffers)
    versions = [buffer._version for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, own, version in zip(buffers, kept, versions):
                if buffer._version == version:
                    buffer.copy_(own)


_SAME_DRAWS = (
    "get_predictions draws random numbers, and this call draws the same ones as the last call, since evaluations "
    "within fit leave the random state unchanged. If you compare or average several passes (Monte Carlo dropout), draw "
    "all samples in get_predictions, or call torch.manual_seed with another seed before each pass."
)
