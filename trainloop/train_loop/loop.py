"""The constructor and the public methods of the training loop. The attributes that callbacks read are in loop_state.py.

::

    fit(num_epochs)
        send the loop to the ranks (ddp, fsdp), or keep it here (single, dp)
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
        write the state back into the caller's objects

A :class:`TrainLoop` is sent to the ranks. The placed model, hooks and recorders exist only while a rank works. They are
attributes of a :class:`~trainloop.train_loop.run.run.Run` or, in training, a
:class:`~trainloop.train_loop.training.training.Training`, which
:func:`~trainloop.train_loop.execution.execute.execute` creates.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

from trainloop._launch import keeping, rank_from_launcher
from trainloop._metrics import EpochEnd, named_losses
from trainloop._support import rng
from trainloop._support.carried import check_carried
from trainloop._support.keywords import refuses_unknown
from trainloop._support.signals import names_of, signals
from trainloop.callbacks.arguments import dict_of
from trainloop.callbacks.base import AbstractCallback, HookTable, warn_of_misnamed_hooks
from trainloop.callbacks.weights.train_schedule import warn_of_rates_left
from trainloop.data.feed.marks import LoaderMarks
from trainloop.data.loader.loaders import check_trains
from trainloop.devices import check_num_nodes, has_ranks, has_replicas
from trainloop.distributed import Rank
from trainloop.errors import ConfigurationError
from trainloop.parallel import TTDataParallel, TTDistributedDataParallel, TTFullyShardedDataParallel
from trainloop.train_loop.arguments import checks as check
from trainloop.train_loop.arguments.options import FitJob, Options
from trainloop.train_loop.arguments.run_config import check_backend, check_rendezvous_point, run_config_of
from trainloop.train_loop.arguments.types import (
    Accelerator,
    Amp,
    Collate,
    Devices,
    GpuMode,
    Loader,
    ModelT,
    Modules,
    Optimizers,
    StartMethod,
    Transform,
)
from trainloop.train_loop.execution.execute import execute
from trainloop.train_loop.execution.fsdp_checks import check_shardable
from trainloop.train_loop.execution.predicting import predict
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.run.evaluating import keep_all_batches
from trainloop.train_loop.run.recompute import chosen_modules
from trainloop.train_loop.run.rows import Predictions, join_rows
from trainloop.train_loop.run.run import Run
from trainloop.train_loop.saving import collect, load
from trainloop.train_loop.saving.resume_point import resume_point
from trainloop.train_loop.training.training import Training

if TYPE_CHECKING:
    import torch

    from trainloop.resources import ResourceQuota
    from trainloop.tools import BatchSizes, LearningRates, Summary
    from trainloop.tools.preflight import PreflightReport
    from trainloop.tools.replay import Replay


class TrainLoop(LoopState, Generic[ModelT]):
    """Train a :class:`TTModel` on one device or many, with the same script and the same results.

    Parameters
    ----------
    model : TTModel
        The model to train. A plain ``nn.Module`` needs :class:`~trainloop.TTBasicModel` or
        :class:`~trainloop.ModelWrap` around it.
    train_loader : DataLoader or None
        Training batches. ``batch_size`` is per process. ``None`` for a loop that only predicts or evaluates.
    validation_loader : DataLoader, optional
        Evaluated after each epoch, to record ``val_loss`` and the metrics that the model logs.
    test_loader : DataLoader, optional
        Evaluated once, when training ends.
    optimizer : torch.optim.Optimizer or MultiOptimizer, optional
        Optimizer of the model's parameters. Not needed for a loop that only predicts or evaluates.
    criterion : callable, optional
        Passed to ``get_loss``.
    collate_batch_pred_fn : callable
        ``(y_batch, collected) -> collected``, called for each batch of predictions and of targets.
    pred_transform_fn : callable
        Converts the collected batches into the result of ``predict_on_*``.
    end_auto_eval : bool or int
        ``True``: evaluate after each epoch, and on the test set when training ends. ``False``: never. ``n``: after
        every n-th epoch.
    gpu_mode : {'single', 'dp', 'ddp', 'fsdp', 'auto'}
        ``'single'``: one process on one device. ``'dp'``: one process with a replica for each device, each in a thread.
        ``'ddp'``: one process for each device, started by ``fit``, each with a copy of the model. ``'fsdp'``: like
        ``'ddp'``, but parameters, gradients and optimizer state are sharded over the processes. ``'auto'``: ``'ddp'``
        if there are several devices, otherwise ``'single'``.
    cuda_device_idx : int, optional
        Index of the GPU for ``'single'``. Equivalent to ``accelerator='cuda', devices=[idx]``.
    use_amp : bool, {'bf16', 'fp16'} or dict
        Mixed precision. ``True``: bf16 if the device supports it, otherwise fp16. A dict: fp16, with the dict as
        arguments of ``GradScaler``.
    accelerator : {'auto', 'cpu', 'gpu', 'cuda', 'mps'}
        Kind of device. ``'auto'`` uses GPUs if there are any.
    devices : int, str or list of int
        Number of devices, or their indices; see :func:`trainloop.devices.parse_devices`. On the CPU, the number of
        processes (in ``'dp'``, of replicas).
    auto_select_gpus : bool
        Choose GPUs that no other run uses; ``devices`` sets their number.
    resources : trainloop.resources.ResourceQuota, optional
        CPUs, GPUs and memory that the run may use. The limits are enforced while it runs.
    seed : int, optional
        Seed for the order of samples in each epoch, and for the random generators. With the same seed, the global
        batches are the same in every mode and with any number of ranks.
    timeout : float
        Seconds after which the run ends with an error if a rank hangs.
    progress_bar : bool
        Show a progress bar, and a table with a row for each epoch.
    gradient_clip_norm : float, optional
        Maximum norm of the gradient of all parameters together. A larger gradient is scaled down to it before each
        step.
    sync_batchnorm : bool
        Compute the statistics of BatchNorm layers over the samples of all ranks. In ``'dp'`` with several devices, this
        is an error.
    compile : bool, 'step' or dict
        ``True``: compile the model with ``torch.compile``. A dict: the same, with these arguments. ``'step'``: compile
        forward, loss, backward, clipping and the optimizer's step into one graph (only in ``'single'``; if this is not
        possible, a warning gives the reason and steps are not compiled).
    start_method : {'auto', 'forkserver', 'spawn'}
        How ``'ddp'`` and ``'fsdp'`` start their processes: forked from a server that has imported torch once, or as
        fresh interpreters. ``'auto'``: the environment variable ``TRAINLOOP_START_METHOD`` if it is set, otherwise
        ``'forkserver'`` if the platform supports it.
    checkpoint_modules : class, str, callable or list of them, optional
        Gradient checkpointing: these modules keep only their inputs, and recompute their activations in the backward
        pass. This saves memory, takes about a third more time, and does not change the results. Pass classes
        (``nn.TransformerEncoderLayer``), names (``'encoder.layers.*'``), or a function ``(name, module) -> bool``.

    Raises
    ------
    ConfigurationError
        For invalid arguments.

    Examples
    --------
    >>> tl = TrainLoop(model, train_loader, val_loader, None, optimizer, criterion, gpu_mode="ddp",
    ...                accelerator="cpu", devices=2)                                          # doctest: +SKIP
    >>> model = tl.fit(num_epochs=10)                                                         # doctest: +SKIP
    """

    @refuses_unknown(others=lambda: {"fit": TrainLoop.fit})
    def __init__(
        self,
        model: ModelT,
        train_loader: Loader | None,
        validation_loader: Loader | None = None,
        test_loader: Loader | None = None,
        optimizer: Optimizers | None = None,
        criterion: Any = None,
        collate_batch_pred_fn: Collate = keep_all_batches,
        pred_transform_fn: Transform = join_rows,
        end_auto_eval: bool | int = True,
        gpu_mode: GpuMode = "single",
        cuda_device_idx: int | None = None,
        use_amp: Amp = False,
        *,
        accelerator: Accelerator = "auto",
        devices: Devices = "auto",
        auto_select_gpus: bool = False,
        resources: ResourceQuota | None = None,
        seed: int | None = None,
        timeout: float = 1800,
        progress_bar: bool = True,
        gradient_clip_norm: float | None = None,
        sync_batchnorm: bool = False,
        compile: bool | Literal["step"] | dict[str, Any] = False,
        start_method: StartMethod = "auto",
        checkpoint_modules: Modules | Sequence[Modules] | None = None,
    ) -> None:
        self.model: ModelT = check.check_model(model)
        self.train_loader: Any = check.check_loader(train_loader, "train_loader")
        self.validation_loader: Any = check.check_loader(validation_loader, "validation_loader")
        self.test_loader: Any = check.check_loader(test_loader, "test_loader")
        self.optimizer: Any = check.check_optimizer(optimizer, model, criterion)
        self.criterion: Any = check.check_criterion(criterion)
        self.collate_batch_pred_fn = check.check_callable(collate_batch_pred_fn, "collate_batch_pred_fn")
        self.pred_transform_fn = check.check_callable(pred_transform_fn, "pred_transform_fn")
        self.end_auto_eval = check.check_auto_eval(end_auto_eval)
        self.seed = check.check_seed(seed)
        self.timeout = check.check_positive(timeout, "timeout", optional=False)
        self.progress_bar = check.check_bool(progress_bar, "progress_bar")
        self.gradient_clip_norm = check.check_positive(gradient_clip_norm, "gradient_clip_norm")
        self.sync_batchnorm = check.check_bool(sync_batchnorm, "sync_batchnorm")
        amp, compile_args = check.check_amp(use_amp), check.check_compile(compile)
        quota = check.check_quota(resources)
        accelerator, devices = check.check_devices(
            gpu_mode, accelerator, devices, cuda_device_idx, check.check_bool(auto_select_gpus, "auto_select_gpus")
        )
        if checkpoint_modules is not None:
            chosen_modules(model, checkpoint_modules)  # raises an error here rather than in the ranks
        self.options = Options(
            gpu_mode,
            accelerator,
            devices,
            auto_select_gpus,
            amp,
            compile_args,
            quota,
            check.check_start_method(start_method),
            isinstance(compile, str),
            checkpoint_modules,
        )
        self.run_config = run_config_of(self.options)
        super().__init__()

    # -- fit ---------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> ModelT:
        """Call :meth:`fit`."""
        return self.fit(*args, **kwargs)

    @refuses_unknown(others=lambda: {"TrainLoop": TrainLoop.__init__})
    def fit(
        self,
        num_epochs: int = 0,
        num_iterations: int = 0,
        callbacks: Sequence[AbstractCallback] | None = None,
        grad_accumulation: int = 1,
        *,
        num_nodes: int = 1,
        node_rank: int = 0,
        num_gpus: int | None = None,
        dp_model_args: dict[str, Any] | None = None,
        ddp_model_args: dict[str, Any] | None = None,
        fsdp_model_args: dict[str, Any] | None = None,
        gather: bool = True,
        in_process_data_load: AbstractCallback | Sequence[AbstractCallback] | None = None,
        backend: str | None = None,
        init_method: str | None = None,
        on_gpu: bool | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        max_restarts: int = 0,
        restart_every_steps: int | None = None,
    ) -> ModelT:
        """Train the model. A second call continues where the first call ended.

        Parameters
        ----------
        num_epochs, num_iterations : int
            Length of the training, in epochs or in batches; pass exactly one. A second call trains for this length
            again. If the first call ended in the middle of an epoch, a second call with ``num_iterations`` continues
            that epoch with the next batch, while one with ``num_epochs`` begins a new epoch, as does any call after
            :meth:`end_epoch` or a change of the training loader. With ``resume_from``, it is the length of the whole
            call of ``fit`` that wrote the checkpoint, including the part before the checkpoint, but not earlier calls.
        callbacks : list of AbstractCallback, optional
            Callbacks of this training. Hooks are called in the order of the callbacks' ``execution_order``, and for
            equal values in the order of this list.
        grad_accumulation : int
            Number of batches whose gradients are accumulated for one optimizer step. The last step of an epoch may have
            fewer.
        num_nodes, node_rank : int
            Number of hosts that train together in ``ddp`` or ``fsdp``, and the index of this host. Each host starts its
            own ranks.
        num_gpus : int, optional
            Number of GPUs to use if the loop was created with ``devices='auto'``, in all modes except ``'single'``; 0
            trains on the CPU. Ignored if the loop was created with other ``devices``.
        dp_model_args, ddp_model_args, fsdp_model_args : dict, optional
            Additional arguments of :class:`TTDataParallel`, :class:`TTDistributedDataParallel` and
            :class:`TTFullyShardedDataParallel`. Evaluation and prediction after ``fit`` use the same arguments.
        gather : bool
            Pass ``False`` in ``fsdp`` if the model does not fit into the memory of one host. The trained weights are
            then only in the checkpoints of a ``ModelCheckpoint``, and the returned model is unchanged. Training,
            evaluation and prediction raise an error until you resume from a checkpoint. Alternatively, load a
            checkpoint into a model, and create another loop with that model.
        in_process_data_load : AbstractCallback or list of them, optional
            Callbacks whose ``on_multiprocess_start`` creates the loaders inside each rank and assigns these to the
            loop.
        backend : str, optional
            Backend of the process group. Default: Gloo on the CPU, NCCL on CUDA.
        init_method : str, optional
            Rendezvous address for runs on several hosts, ``'tcp://ADDRESS:PORT'``. Default: the environment variables
            ``MASTER_ADDR`` and ``MASTER_PORT``.
        on_gpu : bool, optional
            ``True``: raise an error if there is no GPU. ``False``: train on the CPU even if there is a GPU.
        resume_from : 'last' or path, optional
            Checkpoint to resume from. ``'last'``: the newest valid checkpoint of the ``ModelCheckpoint`` in
            ``callbacks`` (of all folders, if there are several), or a fresh start if there is no checkpoint yet. If the
            checkpoint's run has ended (as planned, or because of a callback that would end it again), its results are
            loaded and nothing is trained.
        max_restarts : int
            Number of failures that the run survives; -1 for any number. If a rank is killed, crashes, exits, raises,
            hangs or loses a loader worker, all ranks are restarted from a checkpoint that the run writes for this
            purpose into a private folder. The run ends with the same results as an uninterrupted one. In ``'single'``
            and ``'dp'``, the loop runs in a separate process if this argument is not 0. Over several hosts, a launcher
            (torchrun, Slurm, Kubernetes) restarts the ranks, and this argument is an error.
        restart_every_steps : int, optional
            Steps between two checkpoints for restarts. By default, the interval is chosen so that writing takes at most
            1 % of the time.

        Returns
        -------
        TTModel
            The trained model, which is the object that was passed to the loop.

        Raises
        ------
        ConfigurationError
            For arguments that can't work; raised before any process starts.
        UnpicklableError
            If an object can't be sent to the ranks. The message names the object.
        WorkerFailedError
            If a rank fails. The message names the rank and contains its traceback. Your objects are unchanged.
            But if it fails at the end of an epoch in ``ddp``, they have the state of the last step.
        CheckpointError
            If there is no checkpoint to resume from, or if it doesn't fit the loop.
        KeyboardInterrupt, SystemExit
            After Ctrl-C, or after a SIGTERM or SIGHUP (exit code 143), SIGUSR1 (138) or a job's SIGUSR2 (140). The
            model then has the weights of the last finished step. Rank 0 prints a line with the signal, the step and
            the checkpoint's folder.
        """
        with signals() as received:  # from the first line to the last
            if self.running is not None:
                raise ConfigurationError(
                    "fit was called by a callback of the same loop. Create another TrainLoop for the inner training."
                )
            length = check.check_length(num_epochs, num_iterations)
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
            self.note(
                callbacks=[*data_callbacks, *check.check_callbacks(callbacks), *self.own_callbacks()],
                num_epochs=length[0],
                num_iterations=length[1],
                grad_accumulation=check.check_count(grad_accumulation, "grad_accumulation", 1),
                resumed=False,
            )
            num_nodes = check_num_nodes(num_nodes)
            self.run_config = run_config_of(self.options, num_gpus, on_gpu, num_nodes, select=True)
            node_rank = check_rendezvous_point(num_nodes, node_rank, init_method)
            backend = check_backend(backend, self.run_config)
            self.run_config = replace(self.run_config, node_rank=node_rank, backend=backend, init_method=init_method)
            self.process = self.run_config.here or Rank()  # for callbacks' on_train_loop_registration
            restarts = check.check_restarts(max_restarts, restart_every_steps, num_nodes)
            check_carried(self.model, self.gpu_mode)
            if self.sync_batchnorm and has_replicas(self.gpu_mode, self.run_config.devices):
                raise ConfigurationError(
                    "sync_batchnorm=True with gpu_mode='dp': replicas can't exchange statistics, so BatchNorm would "
                    "normalise each part of a batch by itself. Use gpu_mode='ddp', or leave sync_batchnorm out."
                )
            check.check_step(self.model, self.optimizer, self.options.amp, self.run_config.devices[0])
            check.check_bool(gather, "gather")
            wrapper_args = {
                "dp": check.check_wrapper_args(dp_model_args, "dp_model_args", TTDataParallel),
                "ddp": check.check_wrapper_args(ddp_model_args, "ddp_model_args", TTDistributedDataParallel),
                "fsdp": check.check_wrapper_args(fsdp_model_args, "fsdp_model_args", TTFullyShardedDataParallel),
            }.get(self.gpu_mode, {})
            if self.gpu_mode == "fsdp":
                check_shardable(self, gather=gather, wrapper_args=wrapper_args)
            elif not gather:
                raise ConfigurationError(
                    f"gather=False with gpu_mode={self.gpu_mode!r}: only 'fsdp' supports it. Leave gather out."
                )
            if not self.num_iterations or not self._reads_on():
                self.note(cut=None)
            resume, nothing_left = resume_point(self, resume_from)
            job = FitJob(gather=gather, resume=resume, restarts=restarts)
            if resume is None:
                self._check_has_values("fit")
            self.restarts = []
            self.early_stop = False
            HookTable((), model=self.model)  # raises an error for an invalid hook of the model before ranks start
            warn_of_misnamed_hooks(self.callbacks, self.model)
            if resume is None and self.global_step:
                warn_of_rates_left(self.optimizer, self.callbacks)
            for callback in self.callbacks:
                self.register_callback(callback)
            if resume is not None and nothing_left:
                load.take_up_finished(self, resume, nothing_left)
                self.left_behind = False
                received.raise_if_any()
                return self.model
            # Ranks of a launcher compare their loaders first, and data callbacks create the loaders in the ranks.
            if has_ranks(self.gpu_mode) and not data_callbacks and rank_from_launcher() is None:
                check_trains(self.train_loader, self.run_config.num_ranks, "train_loader")
            self.wrapper_args = wrapper_args
            ended_by: int = execute(self, Training.train, job=job)
            late = names_of(received.reasons & ~ended_by)
            received.note(ended_by)
            self.note(cut_marks=None if self.cut is None else LoaderMarks(self.train_loader))
            self.left_behind = not gather
        if late and self.is_global_zero:
            self.report(
                f"{' and '.join(late)} received after the last step: the training is complete.", logging.WARNING
            )
        received.raise_if_any()
        return self.model

    def register_callback(self, callback: AbstractCallback) -> None:
        """Give a callback access to the loop. ``fit`` calls this for each callback, and subclasses may override it."""
        check.check_callbacks([callback])
        callback.register_train_loop_object(self)

    def own_callbacks(self) -> list[AbstractCallback]:
        """Return the callbacks that a subclass adds; see :mod:`trainloop.train_loop.tracking`."""
        return []

    # -- evaluation and predictions ----------------------------------------------------------------------------------

    def evaluate_loss_on_train_set(self) -> float | dict[str, float]:
        """Return the mean loss over the training set; see :meth:`evaluate_model_loss`."""
        return self._loss(self.train_loader, "train_loader", "train")

    def evaluate_loss_on_validation_set(self) -> float | dict[str, float]:
        """Return the mean loss over the validation set; see :meth:`evaluate_model_loss`."""
        return self._loss(self.validation_loader, "validation_loader", "validation")

    def evaluate_loss_on_test_set(self) -> float | dict[str, float]:
        """Return the mean loss over the test set; see :meth:`evaluate_model_loss`."""
        return self._loss(self.test_loader, "test_loader", "test")

    def evaluate_model_loss(self, data_loader: Any) -> float | dict[str, float]:
        """Return the mean of ``get_loss_eval`` over a loader's samples, each counted once; a dict for a ``MultiLoss``.

        Outside ``fit``, the evaluation runs in the loop's own mode. Inside ``fit``, all ranks must call this method.

        Raises
        ------
        ConfigurationError
            If the loader is missing or has no samples.
        """
        return self._loss(data_loader, "data_loader", "other")

    def evaluate(self, data_loader: Any) -> dict[str, float]:
        """Return the mean loss over a loader, and everything that the model and the callbacks log meanwhile, by name.

        The loss is ``'loss'``; for a ``MultiLoss``, its parts are ``'loss_<part>'``. Logged values have the names that
        they are logged with. Nothing is recorded in the history. Outside ``fit``, the evaluation runs in the loop's own
        mode. Inside ``fit``, all ranks must call this method.

        Raises
        ------
        ConfigurationError
            If the loader is missing or has no samples.

        Examples
        --------
        >>> tl.evaluate(test_loader)                                                          # doctest: +SKIP
        {'loss': 0.21, 'accuracy': 0.93}
        """
        end = self._evaluate(data_loader, "data_loader", "other")
        return {**named_losses(end.losses), **end.metrics}

    def predict_on_train_set(self) -> Predictions:
        """Return predictions on the training set; see :meth:`predict_with_model`."""
        return cast("Predictions", self._predict(self.train_loader, "train_loader", {"type": "train"}))

    def predict_on_validation_set(self) -> Predictions:
        """Return predictions on the validation set; see :meth:`predict_with_model`."""
        return cast("Predictions", self._predict(self.validation_loader, "validation_loader", {"type": "validation"}))

    def predict_on_test_set(self) -> Predictions:
        """Return predictions on the test set; see :meth:`predict_with_model`."""
        return cast("Predictions", self._predict(self.test_loader, "test_loader", {"type": "test"}))

    def predict_with_model(
        self,
        data_loader: Any,
        execute_callbacks: bool = True,
        dataset_info: dict[str, Any] | None = None,
        *,
        stream: bool = False,
        rows_to: str | None = None,
    ) -> Any:
        """Return ``(y_pred, y_true, metadata)`` for a whole loader, with a row for each sample.

        If the loader reads each sample of its dataset once, rows are in the dataset's order, even if it shuffles.
        Otherwise, they are in the loader's order.

        Outside ``fit``, the prediction runs in the loop's own mode. Inside ``fit``, all ranks must call this method.

        Parameters
        ----------
        data_loader : DataLoader
        execute_callbacks : bool
            Call ``on_evaluation_begin``, ``on_after_batch_prediction`` and ``on_evaluation_end`` of the callbacks. The
            hooks of the model are always called.
        dataset_info : dict, optional
            Passed to these hooks, with ``'pass': 'predictions'`` added. Default: ``{'type': 'other'}``. Inside ``fit``,
            values logged in the pass are recorded as ``<type>_<name>``, unless the type is ``'other'``.
        stream : bool
            Return an iterator that yields ``(y_pred, y_true, metadata)`` batch by batch, for predictions that do not
            fit in memory: see :class:`~trainloop.train_loop.PredictionStream`. The entire pass runs first, and stores
            its rows on disk (in ``TMPDIR``). ``collate_batch_pred_fn`` and ``pred_transform_fn`` are not called. This
            works on one node only.
        rows_to : {'main', 'all'}, optional
            Ranks that get the rows: rank 0 only, or all. Other ranks get ``(None, None, None)``, or an empty iterator.
            Inside ``fit`` and under torchrun, the default is all ranks. Otherwise only rank 0 collects the rows, for
            the calling process.
        """
        info = dict_of("predict_with_model", "dataset_info", dataset_info) or {"type": "other"}
        return self._predict(data_loader, "data_loader", info, execute_callbacks, stream=stream, rows_to=rows_to)

    def _loss(self, loader: Any, name: str, kind: str) -> float | dict[str, float]:
        losses = self._evaluate(loader, name, kind).losses
        # A plain loss has the empty name; the losses of a MultiLoss have their own names.
        parts = {part: value for part, value in losses.items() if part}
        return parts or losses[""]

    def _evaluate(self, loader: Any, name: str, kind: str) -> EpochEnd:
        check.check_loader(loader, name, optional=False)
        if self.running is None:
            check.check_not_empty(loader, name)
        return cast("EpochEnd", self._run_now(Run.evaluate, loader, name, kind))

    def _predict(self, loader: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return predict(self, self._run_now, loader, name, *args, **kwargs)

    def _run_now(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do the work in the current run; if there is no run, start a run in the loop's own mode."""
        if self.running is not None:
            return work(self.running, *args)
        self._check_has_values("evaluate_*" if work is Run.evaluate else "predict_*")
        with signals(at_once=True) as received:  # there is no state yet to save
            result = execute(self, work, *args)
            rng.advance()  # as reading a loader does: the next pass draws other numbers
        received.raise_if_any()
        return result

    def _check_has_values(self, who: str) -> None:
        """Raise an error if the trained values were not written into the model (``fit(gather=False)``)."""
        if self.left_behind:
            raise ConfigurationError(
                f"{who}: the model still has its initial values. The trained values are only in the checkpoint, "
                "because fit was called with gather=False. Continue with fit(resume_from='last'), or load the "
                "checkpoint into the model of another TrainLoop: "
                "model.load_state_dict(trainloop.checkpoint.load(folder)['model'])."
            )

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint_state(self, *, keep_shards: bool = False) -> dict[str, Any] | None:
        """Return everything that a resumed run needs, on rank 0; ``None`` on other ranks. For callbacks. Collective.

        In ``fsdp`` the state has full tensors. With ``keep_shards``, each rank gets its shards instead.
        """
        return collect.checkpoint_state(self._training("checkpoint_state"), keep_shards=keep_shards)

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Resume from the result of :meth:`checkpoint_state`. Collective."""
        load.load_checkpoint_state(self._training("load_checkpoint_state"), state)

    def _training(self, method: str) -> Training:
        if not isinstance(self.running, Training):
            raise ConfigurationError(f"{method}() needs a running fit: call it from a callback.")
        return self.running

    # -- tools -------------------------------------------------------------------------------------------------------

    def find_lr(self, **kwargs: Any) -> LearningRates:
        """Return the losses for increasing learning rates, and a suggestion; see :func:`trainloop.tools.find_lr`."""
        from trainloop.tools import find_lr

        return find_lr(self, **kwargs)

    def find_batch_size(self, **kwargs: Any) -> BatchSizes:
        """Return the largest batch size that fits into memory; see :func:`trainloop.tools.find_batch_size`."""
        from trainloop.tools import find_batch_size

        return find_batch_size(self, **kwargs)

    def summary(self, batch: Any = None, *, depth: int = 3) -> Summary:
        """Return layers, parameters, FLOPs and the memory of a training step; see :func:`trainloop.tools.summary`."""
        from trainloop.tools import summary

        return summary(self, batch, depth=depth)

    def preflight(self, **kwargs: Any) -> PreflightReport:
        """Find problems that would stop a long run; see :func:`trainloop.tools.preflight.preflight`."""
        from trainloop.tools.preflight import preflight

        return preflight(self, **kwargs)

    def replay(
        self,
        path: str | os.PathLike[str],
        *,
        detect: Literal["nan"] | None = None,
        device: str | torch.device | None = None,
        trusted: bool = False,
    ) -> Replay:
        """Repeat, in this process, a step that a :class:`.FailureRecorder` has recorded; see
        :func:`trainloop.tools.replay.replay`.

        Parameters
        ----------
        path : str or path
            File that the :class:`.FailureRecorder` wrote.
        detect : {'nan'}, optional
            With ``'nan'``, find the first module and the first backward function with a value that is not finite.
        device : str or torch.device, optional
            Device of the replay. Default: the loop's first device.
        trusted : bool
            Unpickle a batch that is not plain data. Unpickling can execute arbitrary code, so do this only for files
            that you trust.
        """
        from trainloop.tools.replay import replay

        return replay(self, path, detect=detect, device=device, trusted=trusted)

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Keep ranks and their process group running between the calls in a ``with`` block.

        The first ``fit``, ``predict_*`` or ``evaluate_*`` in the block starts the ranks. Further calls run in the same
        processes: nothing is started or imported again, and the process group and GPU memory are kept. The ranks end
        when the block ends. Each call sends the ranks what you have changed: the loop, its model, loaders and
        callbacks, the environment, and code in notebook cells. If a call fails, the ranks end, and the next call starts
        new ones. New ranks are started, too, if a call needs a different number of ranks or other devices. Calls of
        other loops in the block use the ranks, too. With several nodes, with ``max_restarts``, or under a launcher,
        ranks end after each call.

        The workers of loaders start and end with each call, even with ``persistent_workers=True``.

        Examples
        --------
        >>> with tl.ranks():                                                                  # doctest: +SKIP
        ...     for fold in folds:
        ...         tl.train_loader, tl.validation_loader = fold
        ...         tl.fit(num_epochs=1)
        ...         print(tl.evaluate_loss_on_validation_set())
        """

        with keeping() if has_ranks(self.gpu_mode) else nullcontext():
            yield
