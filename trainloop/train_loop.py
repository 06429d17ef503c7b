"""The training loop: arguments checked, then epochs, steps, evaluation and predictions, in one process or many.

::

    fit(num_epochs)
        the loop goes to the ranks (ddp), or stays here (single, dp)
        on_multiprocess_start, on_train_begin
        for each epoch
            on_epoch_begin
            for each step: its micro-batches
                for each micro-batch
                    on_batch_begin
                    get_loss, backward
                    after the last: gradients reduced, on_after_gradient_update, clip, step, on_after_optimizer_step
                    on_batch_end
            logs, history, validation between on_evaluation_begin and on_evaluation_end
            on_epoch_end
        test, on_train_end
        state comes back into the caller's own objects
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, cast

from trainloop import arguments as check
from trainloop import distributed, evaluation, loop_state, rng
from trainloop.arguments import FitJob
from trainloop.callbacks.base import AbstractCallback, HookTable
from trainloop.carried import check_carried
from trainloop.data import StepShare, train_feed
from trainloop.ending import End, described, has_work_at_end, nothing_left
from trainloop.errors import ConfigurationError
from trainloop.loop_base import Run
from trainloop.loop_logs import STEPS_BETWEEN_FLUSHES, LoggingLoop
from trainloop.metrics import Recorder
from trainloop.model import TTModel
from trainloop.optim import optimizers_of
from trainloop.parallel import TTDataParallel, TTDistributedDataParallel
from trainloop.reduction import sum_rule
from trainloop.signals import signals
from trainloop.step import kind_of_step
from trainloop.stopping import CHECKPOINT, EARLY_STOP, INTERRUPT, TERMINATE, StopAgreement
from trainloop.trained import TrainedParameters, training_flags

__all__ = ["TrainLoop", "TrainLoopCheckpoint", "TrainLoopCheckpointEndSave", "TrainLoopEndSave"]  # noqa: F822  # see below


class TrainLoop(LoggingLoop):
    """Train a :class:`TTModel` on one device or many, with the same script and the same numbers.

    Parameters
    ----------
    model : TTModel
    train_loader : DataLoader or None
        Its ``batch_size`` is per process. ``None`` for a loop that only predicts or evaluates.
    validation_loader, test_loader : DataLoader, optional
    optimizer : torch.optim.Optimizer or MultiOptimizer, optional
    criterion : callable, optional
        Handed to ``get_loss``.
    collate_batch_pred_fn : callable
        ``(y_batch, collected) -> collected``, called for each batch of predictions and of targets.
    pred_transform_fn : callable
        Turns what was collected into what ``predict_on_*`` returns.
    end_auto_eval : bool or int
        Evaluate at each epoch's end (and on the test set at the end of training), never, or every n epochs.
    gpu_mode : {'single', 'dp', 'ddp'}
        One process and device; replicas in threads; one process a device, started here.
    cuda_device_idx : int, optional
        The GPU of ``single``; the same as ``accelerator='cuda', devices=[idx]``.
    use_amp : bool, {'bf16', 'fp16'} or dict
        Mixed precision; ``True`` is bf16 where the device has it; a dict holds ``GradScaler`` arguments and means fp16.
    accelerator : {'auto', 'cpu', 'gpu', 'cuda', 'mps'}
    devices : int, str or list of int
        See :func:`trainloop.devices.parse_devices`; on the CPU a number of processes (``ddp``) or replicas (``dp``).
    auto_select_gpus : bool
        Take ``devices`` GPUs that no other run uses.
    resources : trainloop.resources.ResourceQuota, optional
        CPUs, GPUs and memory the run may use, enforced while it runs.
    seed : int, optional
        The same seed gives the same batches in the same order in every mode and with any number of ranks.
    timeout : float
        Seconds after which a rank that hangs ends the run.
    progress_bar : bool
        Show a bar and a table of epochs.
    gradient_clip_norm : float, optional
    sync_batchnorm : bool
        BatchNorm over the samples of all ranks.
    compile : bool or dict
        ``torch.compile`` the model; a dict holds its arguments.

    Raises
    ------
    ConfigurationError
        For arguments that can't work.

    Examples
    --------
    >>> tl = TrainLoop(model, train_loader, val_loader, None, optimizer, criterion, gpu_mode="ddp",
    ...                accelerator="cpu", devices=2)                                          # doctest: +SKIP
    >>> model = tl.fit(num_epochs=10)                                                         # doctest: +SKIP
    """

    # -- fit ---------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> TTModel:
        """The same as :meth:`fit`."""
        return self.fit(*args, **kwargs)

    def fit(
        self,
        num_epochs: int = 0,
        num_iterations: int = 0,
        callbacks: list[AbstractCallback] | None = None,
        grad_accumulation: int = 1,
        *,
        num_nodes: int = 1,
        node_rank: int = 0,
        num_gpus: int | None = None,
        dp_model_args: dict[str, Any] | None = None,
        ddp_model_args: dict[str, Any] | None = None,
        in_process_data_load: Any = None,
        backend: str | None = None,
        init_method: str | None = None,
        on_gpu: bool | None = None,
        resume_from: Any = None,
    ) -> TTModel:
        """Train; a second call goes on from the first.

        Parameters
        ----------
        num_epochs, num_iterations : int
            How long: so many epochs, or so many batches. Exactly one is positive. A second call adds as many; with
            ``resume_from``, those that the checkpoint has behind it count.
        callbacks : list of AbstractCallback, optional
        grad_accumulation : int
            Batches whose gradients make one optimizer step. An epoch's last step may have fewer.
        num_nodes, node_rank : int
            Hosts that train together in ``ddp``, and which one this is. Each starts its own ranks.
        num_gpus : int, optional
            GPUs to use, instead of ``devices``; 0 trains on the CPU.
        dp_model_args, ddp_model_args : dict, optional
            Further arguments of :class:`TTDataParallel` and :class:`TTDistributedDataParallel`.
        in_process_data_load : AbstractCallback or list of them, optional
            Their ``on_multiprocess_start`` makes loaders inside each rank and puts them into the loop.
        backend : str, optional
            Of the process group. Default: Gloo on the CPU, NCCL on CUDA.
        init_method : str, optional
            Meeting point of several nodes, ``'tcp://ADDRESS:PORT'``. Default: ``MASTER_ADDR`` and ``MASTER_PORT``.
        on_gpu : bool, optional
            ``False`` trains on the CPU even where there are GPUs.
        resume_from : 'last' or path, optional
            A checkpoint to go on from; ``'last'`` is the newest whole one of the ``ModelCheckpoint`` in ``callbacks``,
            and a fresh start where there is none yet. A run that has ended, as planned or by a callback that would end
            it again, is taken up as it was left, and nothing is done.

        Returns
        -------
        TTModel
            The very model the loop was made with, trained.

        Raises
        ------
        ConfigurationError
            For arguments that can't work, before any process starts.
        UnpicklableError
            If something can't be sent to the ranks of ``ddp``; names it.
        WorkerFailedError
            If a rank fails; names it, with its traceback.
        CheckpointError
            If there is nothing to resume from, or it belongs to something else.
        KeyboardInterrupt, SystemExit
            After Ctrl-C, SIGTERM (143) or SIGUSR1 (138); the model has the weights of the last finished step.
        """
        with signals() as heard:  # from the first line to the last
            if self._run is not None:
                raise ConfigurationError(
                    "fit was called by a callback of the same loop. Make another TrainLoop for it."
                )
            check.check_length(num_epochs, num_iterations)
            data_callbacks = check.check_callbacks(
                [in_process_data_load] if isinstance(in_process_data_load, AbstractCallback) else in_process_data_load,
                "in_process_data_load",
            )
            check.check_fit_parts(
                self.train_loader,
                self.optimizer,
                self.validation_loader if self.end_auto_eval else None,
                self.test_loader if self.end_auto_eval else None,
                made_in_ranks=bool(data_callbacks),
            )
            self.callbacks = [*data_callbacks, *check.check_callbacks(callbacks), *self._own_callbacks()]
            self.num_epochs, self.num_iterations = num_epochs, num_iterations
            self.grad_accumulation = check.check_count(grad_accumulation, "grad_accumulation", 1)
            self._place_run(num_nodes, node_rank, num_gpus, on_gpu, backend, init_method)
            check_carried(self.model, self.gpu_mode)
            check.check_step(self.model, self.optimizer, self._amp, self._devices[0])
            job = FitJob(
                dp_model_args=check.check_wrapper_args(dp_model_args, "dp_model_args", TTDataParallel),
                ddp_model_args=check.check_wrapper_args(ddp_model_args, "ddp_model_args", TTDistributedDataParallel),
                resume=self._checkpoint_to_resume(resume_from),
            )
            self.early_stop = False
            HookTable((), model=self.model)  # a hook of its own that can't be called is an error before ranks start
            for callback in self.callbacks:
                callback.register_train_loop_object(self)
            if job.resume is not None and self._has_nothing_left(job.resume):
                return self.model
            heard.note(self._in_ranks(TrainLoop._train, job))
        heard.end()
        return self.model

    def _own_callbacks(self) -> list[AbstractCallback]:
        """Callbacks that a kind of loop brings along; see :mod:`trainloop.train_loop_tracking`."""
        return []

    def _place_run(self, num_nodes: Any, node_rank: Any, num_gpus: Any, on_gpu: Any, backend: Any, init: Any) -> None:
        """Settle devices, mode and meeting point of the following runs."""
        from trainloop.launch import joined

        self.num_nodes = num_nodes
        self._settle_devices(num_gpus, on_gpu, select=True)
        check.check_meeting_point(num_nodes, node_rank, init, joined=joined() is not None)
        self._node_rank = node_rank
        self._meeting_options = {"backend": check.check_backend(backend), "init_method": init}

    def _checkpoint_to_resume(self, resume_from: Any) -> dict[str, Any] | None:
        if resume_from is None:
            return None
        from trainloop import checkpoint

        if resume_from == "last":
            keepers = [callback for callback in self.callbacks if hasattr(callback, "last_state")]
            if not keepers:
                raise ConfigurationError(
                    "resume_from='last' needs a ModelCheckpoint in callbacks: it knows where checkpoints are. "
                    "Add the one of the first run, or pass a checkpoint's path."
                )
            state = keepers[0].last_state()
        else:
            state = checkpoint.load(resume_from)
        if state is not None:
            loop_state.check_checkpoint(self, state)
        return cast("dict[str, Any] | None", state)

    def _has_nothing_left(self, state: dict[str, Any]) -> bool:
        """Take up a run that has ended already, without starting it again."""
        from trainloop.launch import joined

        why = nothing_left(self, state)
        if why:
            loop_state.load_finished(self, state)
            here = joined()
            if here is None or here.rank == 0:
                print(f"Nothing left to do: {why}", flush=True)
        return bool(why)

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self, stop: StopAgreement, job: FitJob) -> int:
        """This rank's part of ``fit``; returns why it ended, 0 for as planned."""
        with self._own_randomness(job), self._running(stop, job) as run:
            run.recorder = Recorder(rank=self.rank, gather=run.gather, reserved=("val_loss", "test_loss"))
            run.history_epoch = self.epoch
            try:
                with self._listening(run.recorder):
                    self._prepare_training(run, job)
                with self._listening(run.recorder):  # anew: hooks may have changed the model
                    ended_by = self._train_epochs(run)
                run.place.share_buffers()  # where ranks were started by others, each has a model to return
            except BaseException as exception:
                run.progress.end_epoch()
                self._tell_exception(run, exception)
                raise
            finally:
                run.progress.end_epoch()
                run.close()
                self._scaler_state = run.scaler.state_dict()
            return ended_by

    @contextmanager
    def _own_randomness(self, job: FitJob) -> Iterator[None]:
        """A seeded run draws from generators of its own; without a seed, the caller's go on as in any PyTorch loop."""
        seed = self.seed if self.seed is not None or self.gpu_mode != "ddp" else self._shared_seed
        if seed is None:
            yield
            return
        with rng.isolated(rng.derive_seed(seed, "fit", self.epoch, self.rank)):
            yield

    def _prepare_training(self, run: Run, job: FitJob) -> None:
        run.recorder.between_steps(self.global_step + 1)
        for hook in run.hooks.on_multiprocess_start:
            hook()
        check.check_loader(self.train_loader, "train_loader", optional=False)
        if job.resume is not None and job.resume["place"]["seed"] is not None:
            run.seed = job.resume["place"]["seed"]  # the interrupted epoch's order goes on
        run.feed = self._feed(train_feed, self.train_loader, "train_loader")
        run.take_parameters(self.model, self.criterion)
        run.began_with = training_flags(self.model)
        if self.gpu_mode == "ddp":
            run.trained = TrainedParameters(self.model, self.criterion, self.timeout)
        run.optimizers = optimizers_of(self.optimizer)
        run.train_step = kind_of_step(self, run)
        run.sums = sum_rule(self.model, self.criterion)
        # DDP's reducer expects one backward a forward; several optimizers make several.
        run.reduce_by_hand = run.gather is not None and len(run.optimizers) > 1
        run.start_epoch, run.start_iteration = self.epoch, self.total_iteration_idx
        if run.scaler.is_enabled() and self._scaler_state:
            run.scaler.load_state_dict(self._scaler_state)
        run.progress.say(repr(self))
        run.same_callbacks = self._have_same_callbacks(run)
        for hook in run.hooks.on_train_begin:
            hook()
        if job.resume is not None:
            loop_state.load_checkpoint_state(self, job.resume)
            run.progress.say(f"resumed at epoch {self.epoch + 1}, step {self.global_step}")

    def _train_epochs(self, run: Run) -> int:
        while not run.ended and not self._is_done(run):
            ended_by = self._train_epoch(run)
            if not ended_by & ~EARLY_STOP:
                self._finish_epoch(run)
                ended_by |= self._agree_at_epoch_end(run)
            if ended_by & ~EARLY_STOP:
                return self._end_early(run, ended_by)
            if ended_by:
                self._tell_end(run)
                break
        run.history_epoch = max(self.epoch - 1, 0)  # of the last epoch, which an earlier run may have finished
        if self.end_auto_eval and self.test_loader is not None:
            self._auto_evaluate(run, self.test_loader, "test_loader", "test")
        self._call_in_turn(run, "on_train_end")
        run.finished = True
        for callback in self.callbacks if has_work_at_end(self) else ():
            save = getattr(callback, "save_finished", None)
            if save is not None:
                save()
        return 0

    def _tell_end(self, run: Run) -> None:
        """Print who ended training; what only one rank knows, such as the time, is known to it alone."""
        everyone = [self._ends] if run.gather is None else run.gather(self._ends)
        ends = list(dict.fromkeys(End(*end) for theirs in everyone for end in theirs))
        if self.is_global_zero and (run.progress.enabled or any(end.reason for end in ends)):
            print(described(ends, self.epoch), flush=True)

    def _is_done(self, run: Run) -> bool:
        if self.num_epochs:
            return self.epoch >= run.start_epoch + self.num_epochs
        return self.total_iteration_idx >= run.start_iteration + self.num_iterations

    def _train_epoch(self, run: Run) -> int:
        """One pass over the loader, or what is left of it; returns why it was broken off, 0 if it wasn't."""
        run.epoch_finished, run.history_epoch = False, self.epoch
        if run.skip_steps == 0:
            run.epoch_steps = run.epoch_batches = 0
            run.recorder.between_steps(self.global_step + 1)
            for hook in run.hooks.on_epoch_begin:
                hook()
        if run.trained is not None and run.trained.agree():
            run.follow_trained(self.model, self.criterion)
        skip, run.skip_steps, run.epoch_steps = run.skip_steps, 0, run.skip_steps
        last_iteration = run.start_iteration + self.num_iterations if self.num_iterations else None
        first = run.in_eval is None
        run.in_eval = evaluation.begin_training(self.model, run.in_eval or ())
        if first and run.in_eval:
            run.progress.say(evaluation.about_eval_mode(self.model, run.in_eval))
        run.feed.set_epoch(self.epoch)
        total_epochs = run.start_epoch + self.num_epochs if self.num_epochs else 0
        run.progress.begin_epoch(self.epoch, total_epochs, run.feed.num_batches, run.epoch_batches)
        ended_by = 0
        for share in run.feed.steps(self.grad_accumulation, skip):
            if last_iteration is not None:
                share = _at_most(share, last_iteration - self.total_iteration_idx)
            run.train_step(self, run, share)
            if run.epoch_steps % STEPS_BETWEEN_FLUSHES == 0:
                self.flush_logs()
            if perf_counter() >= run.progress.next_look:
                run.progress.look(run.epoch_batches, self._bar_values)
            if self._early_stop:
                run.stop.request(EARLY_STOP)
            ended_by = run.stop.reached()
            if ended_by or (last_iteration is not None and self.total_iteration_idx >= last_iteration):
                break
        return ended_by

    def _finish_epoch(self, run: Run) -> None:
        run.progress.end_epoch()  # before anybody prints
        if run.trained is not None:
            run.trained.check_alike(run.place.wrapper)
        run.recorder.between_steps(self.global_step)
        self._record_epoch(run)
        if self.end_auto_eval and self.validation_loader is not None and (self.epoch + 1) % self.end_auto_eval == 0:
            self._auto_evaluate(run, self.validation_loader, "validation_loader", "validation")
        run.epoch_finished = True
        self._call_in_turn(run, "on_epoch_end")
        self.message_service.end_of_epoch_trigger()
        if run.progress.enabled:
            run.progress.row(self.history.row(self.epoch))
        self.epoch += 1
        run.epoch_finished, run.epoch_steps, run.epoch_batches = False, 0, 0

    def _agree_at_epoch_end(self, run: Run) -> int:
        """Stop after this epoch if a callback of any rank wants it, or a signal came."""
        if run.gather is not None:
            self._early_stop = any(stop for (stop,) in distributed.exchange_ints([int(self._early_stop)]))
        return run.stop.reached() | (EARLY_STOP if self._early_stop else 0)

    def _end_early(self, run: Run, ended_by: int) -> int:
        """Ctrl-C or a signal: a checkpoint where one is wanted, and no more."""
        if ended_by & (TERMINATE | CHECKPOINT):
            for callback in self.callbacks:
                save = getattr(callback, "save_now", None)
                if save is not None:
                    save("SIGTERM" if ended_by & TERMINATE else "SIGUSR1")
        self._tell_exception(run, KeyboardInterrupt() if ended_by & INTERRUPT else SystemExit(143))
        return ended_by

    def _tell_exception(self, run: Run, exception: BaseException) -> None:
        if run.gather is None:  # the others' values can't be had any more
            with suppress(Exception):
                self.flush_logs()
        with self._recording_alone(run):
            for hook in run.hooks.on_exception:
                try:
                    hook(exception)
                except Exception as error:  # must not hide what went wrong first
                    warnings.warn(f"{hook!r} failed while handling {exception!r}: {error!r}", stacklevel=2)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict[str, Any] | None:
        """All that a resumed run needs; for callbacks. Collective: rank 0 gets it, the others ``None``."""
        if self._run is None:
            raise ConfigurationError("checkpoint_state() describes a running fit: call it from a callback.")
        self._publish(self._run, self._run.recorder.exchange_steps())
        return loop_state.checkpoint_state(self)

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`checkpoint_state` was. Collective."""
        loop_state.load_checkpoint_state(self, state)

    def _auto_evaluate(self, run: Run, loader: Any, name: str, kind: str) -> None:
        self._evaluate_here(run, loader, name, kind, losses_into_history=True)

    def preflight(self, **kwargs: Any) -> Any:
        """Look for what would go wrong later, in seconds; see :func:`trainloop.preflight.preflight`."""
        from trainloop.preflight import preflight

        return preflight(self, **kwargs)


def _at_most(share: StepShare, batches: int) -> StepShare:
    """A share cut to the batches that are left, where all are alike; uneven steps are finished."""
    if batches >= len(share.batches) or share.scales is not None:
        return share
    return share._replace(
        batches=share.batches[:batches],
        sizes=share.sizes[:batches],
        total=share.total * batches // len(share.batches),
    )


def __getattr__(name: str) -> Any:
    # The tracking loops build on this module: imported by name, they are found where old scripts look for them.
    if name in __all__:
        from trainloop import tracking_loops

        return getattr(tracking_loops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
