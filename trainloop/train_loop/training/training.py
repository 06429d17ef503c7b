"""Train a model, epoch by epoch and step by step. The code is in the order of execution.

::

    train                        loop over epochs
        _begin_epoch             hooks, modules' modes; returns the epoch's steps
        forward_backward         forward and backward of a step's micro-batches, gradients complete
        step                     the optimizers' step
        _finish_epoch            logs, history, validation

:mod:`~trainloop.train_loop.training.special_steps` has two other kinds of steps: for an optimizer that evaluates the
loss several times, and for a ``get_loss`` that yields its losses.
"""

from __future__ import annotations

import copy
import logging
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from trainloop import distributed
from trainloop._launch.failures import described
from trainloop._metrics import LateRead, Recorder
from trainloop._support.carried import carried_state_of, load_carried_state
from trainloop._support.reduction import ClassLosses, FunctionCall, functional_losses, is_compiled
from trainloop._support.signals import names_of, status_of
from trainloop._support.stopping import EARLY_STOP, END_EPOCH, INTERRUPT, StopAgreement
from trainloop._support.user_line import warn_or_print
from trainloop.callbacks.base import AbstractCallback, HookTable, Saver, identity_of, matched_entries
from trainloop.callbacks.loop import Loop
from trainloop.callbacks.weights.train_schedule import LRScheduler
from trainloop.data import StepBatches, TrainFeed
from trainloop.data.batch.batches import note_batch
from trainloop.data.feed.marks import LoaderMarks
from trainloop.data.loader.generators import generators_read
from trainloop.data.loader.loader_copies import end_workers
from trainloop.data.loader.loaders import refuse_shared_iterator, tell_epoch
from trainloop.devices import has_ranks
from trainloop.errors import CheckpointError
from trainloop.optim.optimizers import all_optimizers, drop_gradients
from trainloop.optim.parameters import criterion_modules, trained_modules
from trainloop.train_loop.arguments.checks import check_loader
from trainloop.train_loop.arguments.options import End, FitJob
from trainloop.train_loop.progress.ending import described_ends, described_signals, has_work_at_end
from trainloop.train_loop.progress.loop_state import LoopState, added_attributes
from trainloop.train_loop.progress.running import Stage
from trainloop.train_loop.progress.timings import StepClock
from trainloop.train_loop.run.idle import refuse_exchanges
from trainloop.train_loop.run.losses import BatchLoss, explain_backward, explain_freed_graph, read_loss, refuse_constant
from trainloop.train_loop.run.placement import Placement, notice_hooks
from trainloop.train_loop.run.run import STEPS_BETWEEN_FLUSHES, Run
from trainloop.train_loop.saving import collect, cut_epochs, load
from trainloop.train_loop.saving.beside import ChangesBeside, warn_of_unlike_tensors
from trainloop.train_loop.training.advice import Advice
from trainloop.train_loop.training.consistency import check_same_on_all_ranks, requested_settings, share_refusals
from trainloop.train_loop.training.gradients import Gradients
from trainloop.train_loop.training.trained import about_eval_mode, begin_training

if TYPE_CHECKING:
    from trainloop.train_loop.saving.restart_checkpoints import RestartCheckpoints

_STEPS_BETWEEN_LOOKS = 16  # at least, for functions of class indices: epochs of one step would pay for each look
_ALONE: AbstractContextManager[Any] = nullcontext()  # around the micro-batches of a run that is not in ranks


class Watch(Protocol):
    """Observer of each forward and backward: a ``FailureRecorder``, or a replay."""

    def forward_begins(self, first: bool) -> None:
        """Called before ``get_loss`` (or its next loss); ``first`` is True at the start of a pass over the step."""

    def backward_ended(self, loss: Any) -> None:
        """Called after the backward of the loss that ``get_loss`` returned; gradients may not be complete yet."""


class Training(Run):
    """A run that trains.

    Parameters
    ----------
    loop, place, stop
        As in :class:`~trainloop.train_loop.run.run.Run`.
    job : FitJob
        Work of this ``fit``.
    """

    trains = True
    step_in_work: StepBatches | None = None
    stage: Stage = "done"
    """What the run is doing."""
    feed: Any
    gradients: Gradients
    step_taken = False
    """True if the optimizer has already stepped when ``backward_ended`` is called, as with a compiled step."""
    losses_stepped = 0
    """Number of losses in the current step for which the optimizer has already stepped."""

    def __init__(self, loop: LoopState, place: Placement, stop: StopAgreement, job: FitJob) -> None:
        super().__init__(loop, place, stop)
        self.recorder = Recorder(rank=loop.rank, exchange=self.exchange, reserved=("val_loss", "test_loss"))
        self.history_epoch = loop.epoch
        self.start_epoch, self.start_iteration = loop.epoch, loop.total_iteration_idx
        self.epoch_batches = 0
        self.epoch_finished = False
        self.ended = False
        """True if this run resumes from a checkpoint that was written after a callback had ended the training."""
        self.finished = False
        """True if all work at the end is done, except for the last checkpoint."""
        self.skip_steps = 0
        """Steps of the next epoch that were done before the loaded checkpoint."""
        self.skip_batches: int | None = None
        self.before_cut: dict[str, Any] | None = None
        self.restarts: RestartCheckpoints | None = None
        """Checkpoints of a run that restarts after failures; ``None`` for other runs."""
        self.savers: list[Saver] = []
        """The callbacks that write checkpoints between steps, on all ranks."""
        self.watch: Watch | None = None
        self.clock: StepClock = StepClock()
        self._late_read = LateRead()
        self.advice = Advice(self)
        self._job = job
        self._in_ranks = has_ranks(loop.gpu_mode)  # even with one rank, the wrapper decides when to reduce gradients
        self._marks: LoaderMarks | None = None
        self._told: tuple[int, list[Any]] = (-1, [])  # the epoch that parts of the loader know
        self._known_callbacks: list[AbstractCallback] = list(loop.callbacks)
        self._checks_backward = False  # True if get_loss must not change gradients
        self.class_losses = ClassLosses()
        self._sees_functions = False  # True if functions are looked for in every step of the epoch
        self._functions: list[FunctionCall] | None = None
        """Calls of functions of class indices in a batch; ``None`` if they needn't be seen, as in most steps."""
        self._looks_again = 0  # the next epoch that begins at or after this step looks for such calls
        self._kept_in_eval: list[torch.nn.Module] | None = None
        self.between_epochs = False
        """True from an epoch's last step until the next epoch begins: failures then lose no step."""
        self._held: dict[str, Any] | None = None  # what a checkpoint of the last finished step needs
        self._cut: dict[str, Any] | None = None  # position in the epoch in which the previous fit ended
        self._changes: ChangesBeside | None = None  # from the beginning of the first epoch on
        self._epoch_ended = False  # a callback has ended the epoch, before the checkpoint that this run resumes from

    def train(self) -> int:
        """Train epoch by epoch; return the reasons why training ended early, or 0 if it ended as planned."""
        loop, display, stop, clock = self.loop, self.display, self.stop, self.clock
        try:
            with self.listening(self.recorder):
                self._prepare()
            with self.listening(self.recorder):  # again: torch._dynamo may have been imported
                ended_by = 0
                while not (ended_by or self.ended or self.is_done()):
                    steps = self._begin_epoch()
                    clock.begin_epoch()
                    self.stage = "data"
                    asked = perf_counter()
                    for batches in steps:
                        clock.data += perf_counter() - asked
                        self.step_in_work = batches
                        self.forward_backward(batches)
                        self.step()
                        self.step_in_work = None
                        if clock.steps == 0:
                            self._after_first_step()
                        for saver in self.savers:
                            saver.save_due()
                        clock.steps += 1
                        clock.samples += batches.total
                        if self.epoch_steps % STEPS_BETWEEN_FLUSHES == 0:
                            self.flush_logs()
                        if perf_counter() >= display.next_look:
                            display.look(self.epoch_batches, self._bar_values, clock.read)
                        if loop.end_requested:
                            stop.request(EARLY_STOP)
                        if loop.progress.epoch_ends:
                            stop.request(END_EPOCH)
                        ended_by = self._reached_boundary()
                        # Read a complete epoch to its end, where samplers may draw numbers for the next epoch.
                        done = loop.progress.total_iteration_idx >= self._last_iteration
                        if ended_by or (done and self.epoch_batches != self.feed.num_batches):
                            break
                        self.stage = "data"
                        asked = perf_counter()
                    else:
                        clock.data += perf_counter() - asked
                    self._note_cut(ended_by)
                    if not ended_by & ~(EARLY_STOP | END_EPOCH):
                        loop.history.begin_row(loop.epoch)
                        self._hold()
                        self._finish_epoch()
                        ended_by = (ended_by | self._agree_at_epoch_end()) & ~END_EPOCH
                self._finish(ended_by)
            self.gradients.follow_optimizers()  # replaced by the last hooks
            self.place.check_parameters()
            if self.place.collective:  # the caller's optimizer has no place for it
                own = collect.own_optimizer_states(loop)
                loop.note(own_optimizer_states=distributed.gather_object(own))
            if self.parallel and loop.run_config.here is None:  # ranks of a launcher keep their callbacks
                states = collect.states_of_callbacks(loop, "rank_state_dict")
                load.keep_rank_states(loop, distributed.gather_object(states))
            added = added_attributes(loop)
            criteria = [part for module in criterion_modules(loop.criterion) for part in module.modules()]
            self.place.make_whole([*loop.callbacks, *all_optimizers(loop.optimizer), *criteria], added)
            loop.note(**added)
            self.place.share_buffers()  # under torchrun each rank returns a model
        except BaseException as exception:
            display.end_epoch()
            if self.step_in_work is not None:
                step = loop.global_step + (self.stage != "done")  # the hooks after the optimizer's step count it
                where = f"In step {step} (epoch {loop.epoch + 1})"
                note_batch(exception, where, self.step_in_work.batches)
            if self.between_epochs:
                loop.history.end_row()
                if isinstance(exception, Exception):
                    self._rescue(exception)
            self._notify_exception(exception)
            raise
        finally:
            display.end_epoch()
            self._close()
        return ended_by

    # -- before and after --------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        loop, resume, restarts = self.loop, self._job.resume, self.restarts
        if restarts is not None:
            resume = restarts.resume_state(resume)
        restart = None if restarts is None else restarts.restart
        self.recorder.between_steps(loop.global_step + 1)
        for hook in self.hooks.on_multiprocess_start:
            hook()
        resume = resume and cut_epochs.continued(loop, resume)
        self._cut = loop.cut if resume is None else None
        begun = resume or self._cut
        if begun is not None and begun["place"]["seed"] is not None:
            self.seed = begun["place"]["seed"]  # continue the interrupted epoch's order
        batches_before = resume["place"].get("batches_before", 0) if resume is not None else 0
        if self._cut is not None:
            loop.progress.epoch, batches_before = self._cut["place"]["epoch"], self._cut["place"]["epoch_batches"]
        loop.note(batches_before=batches_before)
        with share_refusals(enabled=self.parallel):
            self.take_data()
            mine = requested_settings(self, gather=self._job.gather, resume=resume) if self.parallel else {}
        if self.parallel:
            self.of_ranks = check_same_on_all_ranks(mine)
            by_itself = loop.run_config.here is not None or loop.num_nodes > 1  # each script has created the model
            if by_itself and not loop.global_step:
                warn_of_unlike_tensors(loop)
        self.records_evaluations = True
        load.put_own_optimizer_states(loop, loop.own_optimizer_states)
        self.gradients = Gradients(self)
        self.undo.enter_context(self.gradients.noting_registrations())
        self.start_epoch, self.start_iteration = loop.epoch, loop.total_iteration_idx
        self._last_iteration = self._end_in_iterations()
        # Keep the scale that an earlier fit has found; with the initial scale, the first steps would be skipped again.
        if self.place.scaler.is_enabled() and loop.scaler_state:
            self.place.scaler.load_state_dict(loop.scaler_state)
        if restart is None:
            self.display.write(repr(loop))
        loop.note(resumed=resume is not None)
        before = replace(loop.progress)
        if resume is not None:  # hooks that rebuild the model ask where the run resumes
            for name in collect.COUNTERS:
                setattr(loop.progress, name, resume["place"][name])
        self.history_epoch = loop.epoch
        for hook in self.hooks.on_train_begin:
            hook()
        self._follow_callbacks()
        if resume is not None:
            try:
                load.load_checkpoint_state(self, resume, quiet=restart is not None)
            except CheckpointError:
                loop.note(progress=before)
                raise
            self._last_iteration = self._end_in_iterations()
        else:
            load.put_rank_states(loop)
        loop.note(cut=None, callbacks_of_ranks=[])
        if restarts is not None:
            restarts.begin()
        if resume is not None and restart is None:
            self._report_begin(f"resumed at epoch {loop.epoch + 1}, step {loop.global_step}{self._counted_from()}")

    def _counted_from(self) -> str:
        """Return where the length of a resumed ``fit`` counts from, if that is not the beginning of all training."""
        name, what, begun = "num_epochs", "epoch", self.start_epoch
        if self.loop.num_iterations:
            name, what, begun = "num_iterations", "batch", self.start_iteration + 1
        if not begun:
            return ""
        length = f"{name}={getattr(self.loop, name)}"
        return f" ({length} counts from {what} {begun + 1}, the first of the call of fit that wrote the checkpoint)"

    def _report_begin(self, line: str) -> None:
        """Report that the run begins in the middle of an epoch, and what this costs."""
        if self.skip_steps and self.feed.reads_again:
            line += (
                f" (train_loader's stream has no state_dict(), so the {self.skip_steps} steps of this epoch that "
                "are done are read again and discarded)"
            )
        if self.loop.is_global_zero:
            self.display.event(line)

    def _end_in_iterations(self) -> float:
        """Return the iteration after which the training ends; infinity if the length is given in epochs."""
        return self.start_iteration + self.loop.num_iterations if self.loop.num_iterations else math.inf

    def _writes(self) -> bool:
        """Return True if this run writes checkpoints."""
        return bool(self.savers) or self.restarts is not None

    def changed_beside(self) -> dict[str, int]:
        """Return what the training has changed and checkpoints do not contain; warn of what it may depend on."""
        if self._changes is None or not self.loop.is_global_zero:
            return {}
        changed, warning = self._changes.now(between_epochs=self.epoch_finished or not self.epoch_steps)
        self.advice.once("beside", warning)
        return changed

    def _after_first_step(self) -> None:
        """Look at what exists only now; called after the first step of each epoch."""
        self.advice.monitors()
        if self._changes is not None and not self.clock.epochs and self.loop.is_global_zero:
            self._changes.take_first_step()

    # -- what callbacks change ---------------------------------------------------------------------------------------

    def assigned(self, name: str) -> None:
        """Follow an attribute of the loop that was assigned a new value."""
        super().assigned(name)
        if name in ("optimizer", "criterion") and "gradients" in self.__dict__:  # not in on_multiprocess_start
            self.gradients.assigned(name)
            self._looks_again = self.loop.global_step
            for callback in self.loop.callbacks if name == "optimizer" else ():
                if isinstance(callback, LRScheduler):
                    callback.follow_optimizer()
        elif name == "num_iterations":
            self._last_iteration = self._end_in_iterations()

    def observe(self, observer: Watch) -> None:
        """Call an observer around each forward and backward, and record the indices that are read."""
        self.watch = observer
        self.feed.note_indices()

    @property
    def reads_loader(self) -> bool:
        """True if the feed reads the loop's training loader as it is now. If not, the next epoch takes it."""
        marks = self._marks
        return marks is not None and marks.loader is self.loop.train_loader and not marks.changed()

    def take_data(self, epoch: int | None = None) -> None:
        """Read the loop's training loader from now on, if it or a part of it has changed since the last call.

        With ``epoch``, the parts are told the epoch first: their lengths may depend on it.
        """
        loader = self.loop.train_loader
        if epoch is not None:
            if self._marks is None or self._marks.loader is not loader:
                check_loader(loader, "train_loader", optional=False)
            told = self._told[1] if self._told[0] == epoch else []
            self._told = epoch, tell_epoch(loader, epoch, told)
        if self.reads_loader:
            return
        check_loader(loader, "train_loader", optional=False)
        feed = self.feed_of(TrainFeed, loader, "train_loader")  # an error leaves the run with the feed that it has
        if self._marks is not None:
            self.close_feed(self.feed)
            if self._marks.loader is loader:
                end_workers(loader)  # they have copies of what has changed
        self.feed = feed
        if self.watch is not None:
            self.feed.note_indices()
        self._marks = LoaderMarks(loader)

    def _follow_callbacks(self) -> None:
        """Call the hooks of the loop's callbacks from now on, as the list is now; begin with those that are new."""
        loop, known = self.loop, self._known_callbacks
        while (
            self.hooks.outdated()
            or len(loop.callbacks) != len(known)
            or not all(map(operator.is_, loop.callbacks, known))
        ):
            new = [callback for callback in loop.callbacks if all(callback is not other for other in known)]
            self._known_callbacks = known = list(loop.callbacks)
            for callback in new:
                callback.register_train_loop_object(cast(Loop, loop))
            self.hooks = HookTable(known, loop.rank, loop.model, self.place.guarded)
            for hook in HookTable(new, loop.rank).on_train_begin:
                hook()
        self.savers = [callback for callback in known if isinstance(callback, Saver)]

    def is_done(self) -> bool:
        """Return True if neither a step nor the end of a resumed epoch is left."""
        if self.skip_steps:  # the epoch in which this run resumes needs its end, whatever on_resume has assigned
            return False
        if self.loop.num_epochs:
            return self.loop.epoch >= self.start_epoch + self.loop.num_epochs
        return self.loop.total_iteration_idx >= self._last_iteration

    def _finish(self, ended_by: int) -> None:
        """End the training: test, and call the last hooks. After a signal, write a checkpoint instead if one is due."""
        loop = self.loop
        if not ended_by & ~EARLY_STOP:
            if ended_by:
                self._print_end()
            self.advice.skipped(at_end=True)
            if self.between_epochs:
                self._hold()
            self.history_epoch = max(loop.epoch - 1, 0)  # the last epoch; an earlier run may have finished it
            if loop.end_auto_eval and loop.test_loader is not None:
                self.evaluate(loop.test_loader, "test_loader", "test", losses_into_history=True)
            self._call_in_turn("on_train_end")
            if self._changes is not None:
                self._changes.warn_of_ranks()
            loop.history.end_row()
            self.finished = True
            for saver in self.savers if has_work_at_end(loop, self.of_ranks) else ():
                saver.save_finished()
            self._share_attributes()
            return
        if self.clock.steps:  # in the middle of an epoch
            self.clock.end_epoch()
        received = names_of(ended_by)
        writes = [] if received == ["SIGINT"] else self.savers
        if loop.is_global_zero:
            folders = [saver.dirpath for saver in writes]
            line = described_signals(received, loop.global_step, self.history_epoch + 1, folders)
            self.display.event(line, logging.WARNING)
        for saver in writes:
            saver.save_now(received[-1])
        self._notify_exception(KeyboardInterrupt() if ended_by & INTERRUPT else SystemExit(status_of(ended_by)))

    def _print_end(self) -> None:
        """Print the reason why training ended early, which only one rank may know (a time limit, for example)."""
        loop = self.loop
        everyone = distributed.gather_object(loop.ends) if self.parallel else [loop.ends]
        loop.note(ends=list(dict.fromkeys(End(*end) for theirs in everyone for end in theirs)))
        if loop.is_global_zero:
            self.display.event(described_ends(loop.ends, loop.epoch))

    def _share_attributes(self) -> None:
        """Send the attributes that callbacks share from rank 0's copies to all ranks' copies."""
        sharing = [callback for callback in self.loop.callbacks if callback.shared]
        if not self.parallel or not self.of_ranks.shared:
            return
        entries = [{**identity_of(one), "state": {name: getattr(one, name) for name in one.shared}} for one in sharing]
        # As with checkpoints: several may have one name, and a launcher's ranks may have different callbacks.
        for callback, first in matched_entries(sharing, distributed.broadcast_object(entries))[0]:
            for name, value in first["state"].items():
                setattr(callback, name, value)

    def _notify_exception(self, exception: BaseException) -> None:
        if not self.parallel:  # the other ranks' values can't be gathered
            with suppress(Exception):  # no later hook of the step logs
                self.publish(self.recorder.exchange_steps(finished=self.loop.global_step))
        with self._recording_alone():
            for hook in self.hooks.on_exception:
                try:
                    hook(exception)
                except Exception as error:  # this error must not hide the first one
                    name = getattr(hook, "__qualname__", "on_exception")
                    warn_or_print(f"{name} failed ({described(error)}) while handling {described(exception)}")

    def _close(self) -> None:
        """End the loader's persistent workers, and store the timings and the scaler's state in the loop."""
        if "feed" in self.__dict__:
            self.feed.close()
            if self._marks is not None and self._marks.loader is not self.loop.train_loader:
                # Replaced in the last epoch: its workers end now, and not when the garbage collector finds this run.
                self.close_feed(self.feed)
                del self.feed
                self._marks = None
        scaler_state = self.place.scaler.state_dict()
        self.loop.note(timings_of_last_fit=self.clock.timings(), scaler_state=scaler_state)

    # -- an epoch ----------------------------------------------------------------------------------------------------

    def _begin_epoch(self) -> Iterator[StepBatches]:
        """Begin an epoch; return an iterator over its steps, or over the remaining steps of a resumed epoch."""
        loop = self.loop
        self.between_epochs, self._held = False, None
        self.epoch_finished, self.history_epoch = False, loop.epoch
        resumed_at_end = self._epoch_ended = self.skip_steps > 0 and loop.progress.epoch_ends
        loop.progress.epoch_ends = False
        self.stop.clear(END_EPOCH)  # all ranks do so between two exchanges: at the last epoch's end, and below
        self._follow_callbacks()
        if self._changes is None and (self.parallel or self._writes()):
            self._changes = ChangesBeside(loop, writes=self._writes(), parallel=self.parallel)
        # In ranks, the cut has each rank's state. A hook resets it, but this epoch continues.
        carried = None if self.parallel or self._cut is None else copy.deepcopy(carried_state_of(loop.model))
        if self.skip_steps == 0:
            self._call_epoch_begin()
        # This is after the hook, in which callbacks may change everything, and before the first forward.
        continues = self._cut is not None and (not self.parallel or loop.run_config.here is not None)
        generators = generators_read(loop.train_loader) if continues else {}
        states = {name: one.get_state() for name, one in generators.items()}
        of_model = self._follow_hooks()
        if self._kept_in_eval is None:
            self.advice.untrained(averages=self.parallel and not self.place.collective)
        if self._cut is not None:
            cut, self._cut = self._cut, None
            if cut_epochs.load_cut(self, cut):
                if carried:
                    load_carried_state(loop.model, [carried], 0, 1)
                self.feed.keep_generators(states)
                self._report_begin(f"continued in epoch {loop.epoch + 1}, after step {loop.global_step}")
        # A resumed epoch continues the count after the steps that it skips.
        skip, self.skip_steps, self.epoch_steps = self.skip_steps, 0, self.skip_steps
        skip_batches, self.skip_batches = self.skip_batches, None
        first = self._kept_in_eval is None
        self._kept_in_eval = begin_training(loop.model, of_model, self._kept_in_eval or ())
        if first and self._kept_in_eval:
            self.display.write(about_eval_mode(loop.model, self._kept_in_eval))
        self.feed.set_epoch(loop.epoch, told=True)
        total_epochs = self.start_epoch + loop.num_epochs if loop.num_epochs else 0
        self.display.begin_epoch(loop.epoch, total_epochs, self.feed.num_batches, self.epoch_batches)
        # Maybe only its end is left: a callback has ended it in the step after which the checkpoint was written.
        if resumed_at_end or self._batches_left() <= 0:
            return iter(())
        steps: Iterator[StepBatches] = self.feed.steps(
            loop.grad_accumulation, skip, skip_batches=skip_batches, batches_left=self._batches_left
        )
        return steps

    def _call_epoch_begin(self) -> None:
        """Begin an epoch that is not resumed in its middle: count from zero, and call the hooks."""
        self.epoch_steps = self.epoch_batches = 0
        self.recorder.between_steps(self.loop.global_step + 1)
        trains = self.loop.model.training
        hooks = self.hooks.on_epoch_begin
        with self.advice.seeing_draws() if hooks and self.gradients.ranks > 1 else _ALONE:
            for hook in hooks:
                hook()
        if trains and not self.loop.model.training:
            self.advice.eval_undone()
        if self._changes is not None:
            self._changes.find_renewed(has_hooks=bool(hooks))

    def _follow_hooks(self) -> list[nn.Module]:
        """Follow what hooks have changed since the last epoch; return the model's modules. Collective."""
        loop = self.loop
        self.take_data(loop.epoch)
        settings = requested_settings(self, gather=self._job.gather, resume=None) if self.parallel else {}
        self.of_ranks = self.gradients.follow_at_epoch_begin(settings)
        self._checks_backward = self.gradients.combines
        modules = trained_modules(loop.model, loop.criterion)
        of_model, *of_criterion = (list(module.modules()) for module in modules)
        parts = [*of_model, *chain.from_iterable(of_criterion)]
        self.follow_modules(modules, parts)
        # Without the mode of torch's functions in later steps, torch.compile would compile again.
        self._sees_functions = any(map(is_compiled, parts))
        if self._sees_functions:  # a hook may have compiled a module
            notice_hooks(self.undo)
        if self._sees_functions or self._functions is not None or loop.global_step >= self._looks_again:
            self._functions, self._looks_again = [], loop.global_step + _STEPS_BETWEEN_LOOKS
        return of_model

    def follow_modules(self, modules: Sequence[nn.Module], parts: Iterable[nn.Module] | None = None) -> None:
        """Give modules that hooks have put into the model or the criterion what the others got when the run began."""
        self.listen_to_parts(parts)
        if self.place.synced is not None:
            self.place.synced.take(modules)

    def _batches_left(self) -> float:
        """Return the number of micro-batches until the last iteration; infinity if ``fit`` counts epochs."""
        return self._last_iteration - self.loop.progress.total_iteration_idx

    def _hold(self) -> None:
        """Before work that may fail at the end of an epoch, note what a checkpoint of the last step needs. Collective.

        After a failure, ranks can't exchange anything.
        """
        self.between_epochs = not self.place.collective  # the shards of fsdp can't be joined after a failure
        if self.savers and self.between_epochs:
            self._held = cut_epochs.held_before_end(self)

    def _rescue(self, exception: Exception) -> None:
        """Write a checkpoint of the last finished step, after a failure at the end of an epoch."""
        held, self._held = self._held, None
        if held is None or not self.loop.is_global_zero:
            return
        try:
            state = cut_epochs.held_state(self, held)
            paths = [saver.save_held(state) for saver in self.savers] if state is not None else []
        except Exception as error:  # this error must not hide the first one
            warn_or_print(f"no checkpoint could be written ({described(error)}) after {described(exception)}")
            return
        for path in filter(None, paths):
            text = f"The checkpoint {path} has the weights of the last finished step. fit(resume_from='last') continues"
            if hasattr(exception, "add_note"):  # Python 3.11
                exception.add_note(f"{text} with the end of its epoch.")

    def _note_cut(self, ended_by: int) -> None:
        """If the run ends in the middle of the epoch, note the position, from which the next ``fit`` continues.

        An epoch that a callback ends is not continued, nor one whose loader has been replaced.
        """
        loop = self.loop
        if ended_by & ~(EARLY_STOP | END_EPOCH):  # a signal
            cut = self.epoch_steps > 0
        else:
            cut = not (ended_by or self._epoch_ended) and loop.total_iteration_idx >= self._last_iteration
        whole = self.epoch_batches == self.feed.num_batches
        if cut and not whole and self.reads_loader:
            if self.savers and not ended_by:
                self.before_cut = cut_epochs.states_before_cut(self)
            loop.note(cut=cut_epochs.noted_cut(self))

    def _finish_epoch(self) -> None:
        loop = self.loop
        self.stage = "done"
        self.display.end_epoch()  # before other output is printed
        self.feed.end_epoch()
        if self.parallel or self._writes() or self.feed.reads_copy:
            self.advice.once("iterator", self.feed.about_iterator)
        # Check this before spending time on an evaluation and another epoch with different weights on ranks.
        self.gradients.check_same_weights()
        self.recorder.between_steps(loop.global_step)
        losses = self._record_epoch()
        self.clock.end_epoch()  # after the logs are read, when the device has finished the steps
        self.advice.nan(losses)
        self.advice.skipped()
        if loop.end_auto_eval and loop.validation_loader is not None and (loop.epoch + 1) % loop.end_auto_eval == 0:
            self.evaluate(loop.validation_loader, "validation_loader", "validation", losses_into_history=True)
        self.epoch_finished = True
        self._call_in_turn("on_epoch_end")
        if len(self.clock.epochs) == 1 and self._changes is not None:
            self._changes.take_first_epoch(self.changed_beside())
        if self.display.enabled:
            self.display.row(loop.history.row(loop.epoch), self.clock.epochs[-1])
        # Increase it only now: hooks and logs at the end of the epoch still count for that epoch.
        loop.progress.epoch += 1
        self.epoch_finished, self.epoch_steps, self.epoch_batches = False, 0, 0

    def _agree_at_epoch_end(self) -> int:
        """Return the reasons to stop after this epoch: the request of a callback on any rank, or a signal."""
        if self.parallel:
            mine = [int(self.loop.end_requested)]
            self.loop.note(end_requested=any(theirs for (theirs,) in distributed.exchange_ints(mine)))
        # Include signals, since evaluation may have taken long.
        return self._reached_boundary() | (EARLY_STOP if self.loop.end_requested else 0)

    def _eval_feed(self, loader: Any, name: str) -> Any:
        if self.step_in_work is not None:
            refuse_shared_iterator(loader, self.loop.train_loader)
        return super()._eval_feed(loader, name)

    def _reached_boundary(self) -> int:
        """Return the reasons for which all ranks stop here; without one, write a restart checkpoint if it is due."""
        reasons = self.stop.reached()
        if self.restarts is not None:
            self.restarts.at_boundary(reasons)
        return reasons

    # -- a step ------------------------------------------------------------------------------------------------------

    def forward_backward(
        self, step: StepBatches, *, first: bool = True, begun: int = 0, wants_loss: bool = False
    ) -> Tensor | None:
        """Run forward and backward for each micro-batch, then reduce gradients; :meth:`step` calls the last
        ``on_batch_end``.

        Parameters
        ----------
        step : StepBatches
            This rank's micro-batches.
        first : bool
            False for a repetition, which calls no hooks, counts no batches and records no losses.
        begun : int
            Number of micro-batches whose :meth:`begin_batch` has been called.
        wants_loss : bool
            Return the step's loss over all micro-batches and ranks, the same on every rank.
        """
        loop, place, recorder, gradients, watch = self.loop, self.place, self.recorder, self.gradients, self.watch
        batches, sizes, scales, _, counts = step
        if self._in_ranks:
            gradients.begin_step(counts is not None)
        # A rank with fewer micro-batches still calls every hook, since callbacks may exchange values in them.
        count = max(counts) if counts else len(batches)
        whole = gradients.is_whole(count)
        scaled_losses: list[Any] = []
        for i in range(count):
            self.stage = "forward"
            if first and i >= begun:
                self.begin_batch(i, sizes[i] if i < len(batches) else 0)
            if i == 0:
                # As in a hand-written loop. Hooks, evaluations and code before fit may have computed gradients of
                # their own, such as saliencies or the Fisher information.
                for optimizer in gradients.optimizers:
                    drop_gradients(optimizer)
            model, around = self._in_rank(step, i, count) if self._in_ranks else (place.wrapper, _ALONE)
            borrowed = self.idle.borrowed_batch(batches, counts, i) if counts and place.collective else None
            with around:
                if borrowed is not None:
                    with self.idle.without_side_effects():
                        gradients.zero_backward(borrowed)
                elif i < len(batches):
                    if watch is not None:
                        watch.forward_begins(i == 0)
                    if self.expects is not None:
                        self.expects(sizes[i])
                    before = gradients.now() if self._checks_backward else None
                    if self._functions is None and type(place.autocast) is nullcontext:  # without a context
                        output = model.get_loss(batches[i], loop.criterion, place.device)
                    else:
                        with place.autocast, self.seeing_functions():
                            output = model.get_loss(batches[i], loop.criterion, place.device)
                    if before is not None:
                        gradients.refuse_own_backward(before)
                    read = self.checked(read_loss(output, sizes[i], gradients.sums), count)
                    scaled = read.loss
                    if not whole:
                        scale, last = None if scales is None else scales[i], i == count - 1
                        scaled = gradients.scaled(read, scale, count, sizes[i], last=last)
                    self.stage = "backward"
                    try:
                        gradients.backward(scaled)
                    except (RuntimeError, AssertionError) as error:  # FSDP has assertions
                        explain_backward(read.loss, error)
                        explain_freed_graph(error)
                        raise
                    if watch is not None:
                        watch.backward_ended(read.loss)
                    if first:
                        loop.progress.last_loss = recorder.add_loss(*read.shown(sizes[i]))
                    if wants_loss:
                        scaled_losses.append(scaled.detach())
        if self._functions is not None and batches:  # without a batch, this rank has not called get_loss
            self.functions_seen()
        factor = None if whole else gradients.complete(gradients.now_learned())
        return gradients.loss_over_ranks(scaled_losses, factor) if wants_loss else None

    def _in_rank(self, step: StepBatches, i: int, count: int) -> tuple[Any, AbstractContextManager[Any]]:
        """Return what runs ``get_loss`` for a rank's ``i``-th of ``count`` micro-batches, and the context for it."""
        place, later = self.place, self.gradients.weight.reduced_later
        if step.counts is None and not later:
            return place.wrapper, place.gradient_sync(i == count - 1)
        around = place.batchnorm_ranks(step.counts, i)
        return place.model if later else place.wrapper, around if step.counts is None else self.uneven(around, step, i)

    def checked(self, read: BatchLoss, count: int) -> BatchLoss:
        """Return a loss of one of ``count`` micro-batches, after checks."""
        if self.place.collective:
            refuse_constant(read.loss)
        if self._functions is not None:
            self.advice.sums(read, count)
        if self.class_losses.calls:
            self.advice.averages(read, count, self.class_losses.take())
        return read

    @contextmanager
    def uneven(self, around: AbstractContextManager[Any], step: StepBatches, i: int) -> Iterator[None]:
        """Refuse exchanges, and watch counters, in a micro-batch that some rank may not have."""
        ranks = [rank for rank, n in enumerate(step.counts or ()) if n > i]
        refuses = not self.place.collective and len(ranks) < len(step.counts or ())
        with around, refuse_exchanges(ranks) if refuses else _ALONE, self.advice.watching_counters(step, i):
            yield

    def watched_evaluation(self, batches: Iterator[Any], kind: str) -> Iterator[Any]:
        """Return the batches of a pass for losses or predictions; warn of what the pass changes."""
        return self.advice.evaluated(batches, kind)

    @contextmanager
    def seeing_functions(self, *, idle: bool = False) -> Iterator[None]:
        """Attach divisors to the results of functions, as in ``F.cross_entropy(..., label_smoothing=0.1)``.

        ``idle``: the batch is another rank's.
        """
        if self._functions is None:
            yield
            return
        before = len(self._functions)
        roots = () if idle else trained_modules(self.loop.model, self.loop.criterion)
        with functional_losses(self._functions, self.loop.model), self.class_losses.of_libraries(*roots):
            yield
        if not idle:
            self.class_losses.add(self._functions[before:])
            self.gradients.own_weights.calls_class_losses |= len(self._functions) > before

    def functions_seen(self) -> None:
        """Called after a step: later steps of the epoch do without the mode if the graphs contain the divisors."""
        stays = self._sees_functions or any(call.needs_mode for call in self._functions or ())
        self._functions = [] if stays else None

    def begin_batch(self, i: int, size: int, *, ends_last: bool = True) -> None:
        """Begin the ``i``-th micro-batch of a step. It has ``size`` samples: 0 on a rank without this micro-batch.

        With ``ends_last``, the previous micro-batch of the step ends before.
        """
        hooks = self.hooks
        for hook in hooks.on_batch_end if i and ends_last else ():
            hook()
        # Set before the first hook. On a rank without a batch, logs of hooks have weight 0.
        self.recorder.batch_size = size
        if not i:
            self.recorder.step = self.loop.progress.global_step + 1
        self.loop.progress.total_iteration_idx += 1
        self.epoch_batches += 1
        for hook in hooks.on_batch_begin:
            hook()
        if self.gradients.outdated or self.gradients.declared.changed():  # outdated: a module was registered
            self.follow_modules(trained_modules(self.loop.model, self.loop.criterion))
            self.gradients.take_rules()
        if not i and (hooks.in_steps or self.gradients.outdated or self.gradients.trained is not None):
            self.gradients.follow_at_step_begin()

    def step(self) -> None:
        """Step the optimizers and clear gradients; then call the hooks at the end of a step."""
        gradients = self.gradients
        if self.loop.gradient_clip_norm is not None or self.hooks.on_after_gradient_update or gradients.scales:
            gradients.show_and_clip(enumerate(gradients.optimizers), gradients.now_learned())
        gradients.take_steps(gradients.optimizers)
        for optimizer in gradients.optimizers:  # for their memory
            drop_gradients(optimizer)
        self.count_step()
        for hook in self.hooks.on_batch_end:
            hook()

    def count_step(self) -> None:
        """Count an optimizer step."""
        self.stage = "done"
        self.loop.progress.global_step += 1
        self.epoch_steps += 1
        if found := self.loop.progress.found_inf:
            self.advice.note_skipped([of_device for _, of_device in found])
        for hook in self.hooks.on_after_optimizer_step:
            hook()

    # -- logs --------------------------------------------------------------------------------------------------------

    def _bar_values(self) -> dict[str, float]:
        last_loss = self.loop.last_loss
        return self._late_read({**({} if last_loss is None else {"loss": last_loss}), **self.recorder.bar_values()})
