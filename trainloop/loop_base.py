"""A model, its loaders, and the processes it runs in: everything of a loop but the training itself.

:class:`LoopBase` checks what a loop is made of, settles where it runs, runs work here or in the ranks of ``ddp``, and
evaluates and predicts there. :class:`trainloop.TrainLoop` adds ``fit``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainloop import arguments as check
from trainloop import distributed, evaluation, loop_state, rng
from trainloop.arguments import FitJob
from trainloop.callbacks.base import AbstractCallback, HookTable
from trainloop.callbacks.messages import MessageService
from trainloop.data import eval_feed
from trainloop.data.loaders import workers_outlive_signals
from trainloop.data.twins import with_workers
from trainloop.devices import effective_batch_size, find_usable_cuda_devices, resolve_mode
from trainloop.distributed import Rank
from trainloop.ending import End, who_asks
from trainloop.errors import ConfigurationError
from trainloop.history import History
from trainloop.metrics import Recorder, named_losses
from trainloop.model import TTModel
from trainloop.optim import MultiOptimizer, optimizers_of
from trainloop.placement import Placement, placed
from trainloop.progress import Progress
from trainloop.reduction import SumRule, sum_rule
from trainloop.resources.enforce import applied, cap_workers, child_environment, devices_under
from trainloop.signals import signals, uninterrupted
from trainloop.stopping import LocalStop, StopAgreement
from trainloop.trained import TrainedParameters

__all__ = ["LoopBase", "Run"]

# Put before the names of what is logged in an evaluation, by the dataset's type; a user's own type is one itself.
_PREFIXES = {"train": "train_", "validation": "val_", "test": "test_", "other": ""}


@dataclass
class Run:
    """What exists only while a rank trains or evaluates; the loop itself stays small enough to be sent to ranks."""

    place: Placement
    stop: StopAgreement
    hooks: HookTable
    seed: int | None
    gather: Callable[[Any], list[Any]] | None
    progress: Progress
    recorder: Recorder = field(default_factory=Recorder)
    sink: Callable[..., None] | None = None
    """What takes in logs now: that of the training, or of the evaluation inside it."""
    eval_feeds: dict[int, Any] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)
    # of training only
    feed: Any = None
    parameters: list[Tensor] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    reduce_by_hand: bool = False
    train_step: Any = None
    sums: SumRule | None = None
    start_epoch: int = 0
    start_iteration: int = -1
    epoch_steps: int = 0
    epoch_batches: int = 0
    epoch_finished: bool = False
    skip_steps: int = 0
    history_epoch: int = 0
    learned: list[Tensor] = field(default_factory=list)  # parameters, and those of the criterion
    trained: TrainedParameters | None = None  # in ddp
    began_with: dict[str, dict[str, bool]] = field(default_factory=dict)  # flags of parameters and modules
    in_eval: list[nn.Module] | None = None  # modules that the user keeps in evaluation mode
    same_callbacks: bool = True
    ended: bool = False  # by a callback, before the checkpoint that is resumed
    finished: bool = False

    @property
    def scaler(self) -> torch.amp.GradScaler:
        return self.place.scaler

    @property
    def nominal_weight(self) -> int:
        """About what a batch weighs, the same on all ranks: keeps weighted losses in the range of plain ones."""
        return self.feed.global_batch_size or 1

    def take_parameters(self, model: nn.Module, criterion: Any) -> None:
        """What there is to learn now."""
        self.parameters = list(model.parameters())
        beside = criterion.parameters() if isinstance(criterion, nn.Module) else ()
        self.learned = [*self.parameters, *beside]

    def follow_trained(self, model: nn.Module, criterion: Any) -> None:
        """Wrap anew, since other parameters train than before. Collective."""
        assert self.trained is not None
        self.trained.note()
        self.take_parameters(model, criterion)
        self.place.wrap_again()

    def close(self) -> None:
        """End workers that loaders would keep."""
        if self.feed is not None:
            self.feed.close()


class LoopBase:
    """What a loop is made of and where it runs; see :class:`trainloop.TrainLoop` for the arguments."""

    def __init__(
        self,
        model: TTModel,
        train_loader: Any,
        validation_loader: Any = None,
        test_loader: Any = None,
        optimizer: torch.optim.Optimizer | MultiOptimizer | None = None,
        criterion: Any = None,
        collate_batch_pred_fn: Callable[..., Any] = evaluation.keep_all_batches,
        pred_transform_fn: Callable[..., Any] = evaluation.join_rows,
        end_auto_eval: bool | int = True,
        gpu_mode: str = "single",
        cuda_device_idx: int | None = None,
        use_amp: bool | str | dict[str, Any] = False,
        *,
        accelerator: str = "auto",
        devices: Any = "auto",
        auto_select_gpus: bool = False,
        resources: Any = None,
        seed: int | None = None,
        timeout: float = 1800,
        progress_bar: bool = True,
        gradient_clip_norm: float | None = None,
        sync_batchnorm: bool = False,
        compile: bool | dict[str, Any] = False,
    ) -> None:
        self.model = check.check_model(model)
        self.train_loader = check.check_loader(train_loader, "train_loader")
        self.validation_loader = check.check_loader(validation_loader, "validation_loader")
        self.test_loader = check.check_loader(test_loader, "test_loader")
        self.optimizer = check.check_optimizer(optimizer, model)
        self.criterion = check.check_criterion(criterion)
        self.collate_batch_pred_fn = check.check_callable(collate_batch_pred_fn, "collate_batch_pred_fn")
        self.pred_transform_fn = check.check_callable(pred_transform_fn, "pred_transform_fn")
        self.end_auto_eval = check.check_auto_eval(end_auto_eval)
        self.seed = check.check_seed(seed)
        self.timeout = check.check_positive(timeout, "timeout", optional=False)
        self.progress_bar = check.check_bool(progress_bar, "progress_bar")
        self.gradient_clip_norm = check.check_positive(gradient_clip_norm, "gradient_clip_norm")
        self.sync_batchnorm = check.check_bool(sync_batchnorm, "sync_batchnorm")
        self._amp = check.check_amp(use_amp)
        self._compile = check.check_compile(compile)
        self._quota = check.check_quota(resources)
        self._accelerator, self._device_request = check.check_devices(
            gpu_mode, accelerator, devices, cuda_device_idx, check.check_bool(auto_select_gpus, "auto_select_gpus")
        )
        self._auto_select_gpus = auto_select_gpus
        self._gpu_mode = gpu_mode
        self.num_nodes = 1
        self._settle_devices()

        self.callbacks: list[AbstractCallback] = []
        self.message_service = MessageService()
        self.history = History()
        self.epoch = 0
        self.global_step = 0
        self.total_iteration_idx = -1
        self._early_stop = False
        self._ends: list[End] = []
        self.num_epochs = self.num_iterations = 0
        self.grad_accumulation = 1
        self.last_loss: Tensor | None = None
        self._rank = Rank()
        self._shared_seed = 0
        self._found_inf: list[Tensor] = []
        self._scaler_state: dict[str, Any] = {}
        self._node_rank = 0
        self._meeting_options: dict[str, Any] = {}
        self._run: Any = None

    # -- what users and callbacks read -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this process trains; in the caller of ``ddp``, the first rank's device."""
        return self._run.place.device if self._run is not None else self._devices[0]

    @property
    def rank(self) -> int:
        """Global rank of this process; 0 outside of ``ddp``'s ranks."""
        return self._rank.rank

    @property
    def world_size(self) -> int:
        """Processes that train together; 1 in the caller of ``ddp``."""
        return self._rank.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that prints and writes: true in one process of all nodes."""
        return self._rank.rank == 0

    def is_main_process(self) -> bool:
        """The same as :attr:`is_global_zero`."""
        return self.is_global_zero

    @property
    def early_stop(self) -> bool:
        """Whether training is to end after this step; any callback may set it, on any rank."""
        return self._early_stop

    @early_stop.setter
    def early_stop(self, stop: bool) -> None:
        self._early_stop = bool(stop)
        if not stop:
            self._ends = []
        elif (end := who_asks(self)) is not None:
            self._note_end(end)

    def end_training(self, callback: AbstractCallback, reason: str = "") -> None:
        """What :meth:`AbstractCallback.end_training` calls; see there."""
        self._note_end(End(type(callback).__name__, callback.callback_name, reason))
        self._early_stop = True

    def _note_end(self, end: End) -> None:
        if all((end.kind, end.name) != (known.kind, known.name) for known in self._ends):
            self._ends.append(end)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The ``GradScaler`` while training (disabled unless fp16), else ``None``."""
        return None if self._run is None else self._run.scaler

    @property
    def step_skipped(self) -> bool:
        """Whether AMP skipped the last optimizer step. Waits for the device where there is a scaler."""
        return any(bool(found.item()) for found in self._found_inf)

    @property
    def effective_batch_size(self) -> int | None:
        """Samples that all processes together take from the training loader at once; ``None`` if it doesn't say."""
        size = check.loader_batch_size(self.train_loader)
        if size is None:
            return None
        return effective_batch_size(self.gpu_mode, size, len(self._devices), self.num_nodes)

    @property
    def rank_zero_only_metrics(self) -> set[str]:
        """Metrics logged with ``rank_zero_only``: other ranks don't know them, so nothing may depend on them."""
        return set() if self._run is None else self._run.recorder.rank_zero_only_names

    def __repr__(self) -> str:
        number = sum(p.numel() for p in self.model.parameters() if not torch.nn.parameter.is_lazy(p))
        kind = self._devices[0].type
        where = kind if len(self._devices) == 1 else f"{len(self._devices)} x {kind}"
        nodes = f" on each of {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        quota = f", {self._quota}" if self._quota is not None else ""
        return (
            f"TrainLoop({self.gpu_mode} on {where}{nodes}, effective batch {self.effective_batch_size or 'unknown'}, "
            f"{type(self.model).__name__} with {number:,} parameters{quota})"
        )

    # -- one process or many -----------------------------------------------------------------------------------------

    def _settle_devices(self, num_gpus: Any = None, on_gpu: Any = None, *, select: bool = False) -> None:
        """Decide where the following runs are; with ``select``, on GPUs that are free now, which are then leased."""
        found = check.devices_for(self._gpu_mode, self._accelerator, self._device_request, num_gpus, on_gpu)
        if select and self._auto_select_gpus and isinstance(self._device_request, (int, str)):
            if found[0].type != "cuda":
                raise ConfigurationError("auto_select_gpus=True: there is no GPU to select from here. Leave it out.")
            everything = str(self._device_request).strip().lower() in ("auto", "-1")  # all that are free, then
            wanted = -1 if everything and self._gpu_mode != "single" else len(found)
            found = [torch.device("cuda", i) for i in find_usable_cuda_devices(wanted)]
        self._devices = devices_under(self._quota, found, self._device_request)
        self.gpu_mode: str = resolve_mode(
            self._gpu_mode, len(self._devices), self.num_nodes, kind=self._devices[0].type
        )

    def _in_ranks(self, work: Callable[..., Any], *args: Any) -> Any:
        """What ``work(self, stop, *args)`` returns, here or in every rank of ``ddp``; state comes back from there."""
        from trainloop import launch

        if self.gpu_mode != "ddp":
            stop = LocalStop()
            workers = self._loader_workers(1)
            with applied(self._quota, device=self._devices[0], loader_workers=workers), signals(stop):
                return work(self, stop, *args)
        self._initialize_lazy_parameters()
        self._shared_seed = rng.peek_seed()
        departure = loop_state.Departure(self)
        run = partial(_in_rank, self, work, args, departure.paths)
        options = {"timeout_s": self.timeout, **self._meeting_options}
        here = launch.joined()
        if here is not None:
            if self._devices[0].type == "cpu":  # torchrun has decided how many processes there are
                self._devices = [torch.device("cpu")] * here.local_world_size
            return launch.join(partial(run, joined=True), devices=self._devices, **options)
        ranks = len(self._devices)
        with applied(self._quota, local_rank=None, ranks=ranks):
            data = launch.launch(
                run,
                ranks_per_node=ranks,
                num_nodes=self.num_nodes,
                node_rank=self._node_rank,
                devices=self._devices,
                child_env=child_environment(self._quota, ranks),
                roots=self._transfer_roots(),
                **options,
            )
        with uninterrupted():  # half of the new state and half of the old would be of no use
            return departure.receive(data)

    def _loader_workers(self, ranks: int) -> int:
        """Workers that load beside a rank, under the quota."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the loader's own turn to warn comes
            loaders = (self.train_loader, self.validation_loader, self.test_loader)
            return max(cap_workers(getattr(loader, "num_workers", 0), self._quota, ranks) for loader in loaders)

    def _transfer_roots(self) -> dict[str, Any]:
        """Names under which an error speaks of what can't be sent."""
        names = ("model", "train_loader", "validation_loader", "test_loader", "optimizer", "criterion", "callbacks")
        return {name: getattr(self, name) for name in names}

    def _initialize_lazy_parameters(self) -> None:
        """Lazy modules take their shapes from a batch; before the ranks start, so that all have the same weights."""
        lazy = [p for p in self.model.parameters() if torch.nn.parameter.is_lazy(p)]
        loader = next((x for x in (self.train_loader, self.validation_loader, self.test_loader) if x is not None), None)
        if not lazy or loader is None:
            return
        with rng.isolated(), evaluation.evaluating(self.model):
            evaluation.run_through(self.model.get_loss(next(iter(loader)), self.criterion, self.model.device))

    @contextmanager
    def _running(self, stop: StopAgreement, job: FitJob | None) -> Iterator[Run]:
        """The loop placed on this rank's device, for training (``job``) or for evaluation only."""
        parallel = self.gpu_mode == "ddp" and self.world_size > 1
        wrapper_args = None
        if job is not None:
            wrapper_args = job.dp_model_args if self.gpu_mode == "dp" else job.ddp_model_args
        devices = self._devices if self.gpu_mode == "dp" else [self._devices[self._rank.local_rank]]
        with placed(
            self.model,
            self.criterion,
            optimizers_of(self.optimizer),
            mode=self.gpu_mode,
            devices=devices,
            amp=self._amp,
            wrapper_args=wrapper_args,
            sync_batchnorm_over_ranks=self.sync_batchnorm and parallel and job is not None,
            compile_args=self._compile,
        ) as place:
            self._run = Run(
                place=place,
                stop=stop,
                hooks=HookTable(self.callbacks, self.rank, self.model),
                # Ranks must agree on an order even where the user gave no seed; the caller's RNG stays as it is.
                seed=self.seed if self.seed is not None or not parallel else self._shared_seed,
                gather=distributed.gather_object if parallel else None,
                progress=Progress(self.progress_bar and self.is_global_zero),
            )
            try:
                with self._run.undo:
                    yield self._run
            finally:
                self._run = None

    # -- training ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _listening(self, recorder: Recorder) -> Iterator[None]:
        """Whatever the model, callbacks and the loop log goes to this recorder."""
        models = [module for module in self.model.modules() if isinstance(module, TTModel)]
        before = [model.__dict__.get("_log_sink") for model in models]
        # Compiled code leaves its graph for a log; traced into, the growing lists of logs would recompile it each step.
        sink = torch.compiler.disable(recorder.log) if _has_compiled_parts(self.model) else recorder.log
        run = self._run
        run_before, run.sink = run.sink, sink
        for model in models:
            model.__dict__["_log_sink"] = sink
        try:
            yield
        finally:
            run.sink = run_before
            for model, sink in zip(models, before, strict=True):
                model.__dict__["_log_sink"] = sink

    # -- evaluation and predictions ----------------------------------------------------------------------------------

    def evaluate_loss_on_train_set(self) -> float | dict[str, float]:
        """Mean loss over the training set; see :meth:`evaluate_model_loss`."""
        return self._evaluate(self.train_loader, "train_loader", "train")

    def evaluate_loss_on_validation_set(self) -> float | dict[str, float]:
        """Mean loss over the validation set; see :meth:`evaluate_model_loss`."""
        return self._evaluate(self.validation_loader, "validation_loader", "validation")

    def evaluate_loss_on_test_set(self) -> float | dict[str, float]:
        """Mean loss over the test set; see :meth:`evaluate_model_loss`."""
        return self._evaluate(self.test_loader, "test_loader", "test")

    def evaluate_model_loss(self, data_loader: Any) -> float | dict[str, float]:
        """Mean of ``get_loss_eval`` over a loader, each sample once; a dict where the model gives a ``MultiLoss``.

        Outside ``fit`` it runs in the loop's own mode. Inside, all ranks call it together.

        Raises
        ------
        ConfigurationError
            If the loader is missing or has no samples.
        """
        return self._evaluate(data_loader, "data_loader", "other")

    def predict_on_train_set(self) -> evaluation.Predictions:
        """Predictions on the training set; see :meth:`predict_with_model`."""
        return self._predict(self.train_loader, "train_loader", {"type": "train"})

    def predict_on_validation_set(self) -> evaluation.Predictions:
        """Predictions on the validation set; see :meth:`predict_with_model`."""
        return self._predict(self.validation_loader, "validation_loader", {"type": "validation"})

    def predict_on_test_set(self) -> evaluation.Predictions:
        """Predictions on the test set; see :meth:`predict_with_model`."""
        return self._predict(self.test_loader, "test_loader", {"type": "test"})

    def predict_with_model(
        self, data_loader: Any, execute_callbacks: bool = True, dataset_info: dict[str, Any] | None = None
    ) -> evaluation.Predictions:
        """``(y_pred, y_true, metadata)`` of ``get_predictions`` over a loader, one row a sample, in dataset order.

        Outside ``fit`` it runs in the loop's own mode. Inside, all ranks call it together, and all get all rows.

        Parameters
        ----------
        data_loader : DataLoader
        execute_callbacks : bool
            Call their ``on_evaluation_begin``, ``on_after_batch_prediction`` and ``on_evaluation_end``. The model's own
            hooks are called in any case.
        dataset_info : dict, optional
            Handed to those hooks, with ``'pass': 'predictions'`` added. Default: ``{'type': 'other'}``. Inside ``fit``
            what is logged in the pass is recorded under its type, ``type_name``, but for ``'other'``.
        """
        return self._predict(data_loader, "data_loader", dataset_info or {"type": "other"}, execute_callbacks)

    def _evaluate(self, loader: Any, name: str, kind: str) -> float | dict[str, float]:
        check.check_loader(loader, name, optional=False)
        if self._run is not None:
            return self._evaluate_here(self._run, loader, name, kind)
        return cast("float | dict[str, float]", self._outside_fit(LoopBase._evaluate_here, loader, name, kind))

    def _predict(
        self, loader: Any, name: str, dataset_info: dict[str, Any], execute_callbacks: bool = True
    ) -> evaluation.Predictions:
        check.check_loader(loader, name, optional=False)
        args = (loader, name, dataset_info, execute_callbacks)
        if self._run is not None:
            return self._predict_here(self._run, *args)
        return cast("evaluation.Predictions", self._outside_fit(LoopBase._predict_here, *args))

    def _outside_fit(self, function: Callable[..., Any], *args: Any) -> Any:
        """An evaluation in the loop's own mode; a signal that came meanwhile ends the program after it."""
        with signals() as heard:
            result = self._in_ranks(_alone(function), *args)
        heard.end()
        return result

    def _evaluate_here(
        self, run: Run, loader: Any, name: str, kind: str, losses_into_history: bool = False
    ) -> float | dict[str, float]:
        model, device, prefix = run.place.evaluated, run.place.device, _PREFIXES[kind]

        def get_loss(batch: Any) -> Any:
            with run.place.autocast:
                return evaluation.run_through(model.get_loss_eval(batch, self.criterion, device))

        with self._recording(run, prefix) as recorder:
            feed = self._eval_feed(run, loader, name)
            batches = _between_hooks(feed.batches(), run.hooks, recorder, {"type": kind, "pass": "loss"})
            sums = sum_rule(self.model, self.criterion)
            end = evaluation.mean_loss(batches, get_loss, recorder, name, sums)
        losses = named_losses(end.losses, prefix) if losses_into_history else {}
        self._into_history(run, prefix, {**losses, **end.metrics})
        parts = {part: value for part, value in end.losses.items() if part}
        return parts or end.losses[""]

    def _predict_here(
        self, run: Run, loader: Any, name: str, dataset_info: dict[str, Any], execute_callbacks: bool
    ) -> evaluation.Predictions:
        model, device = run.place.evaluated, run.place.device
        hooks = run.hooks if execute_callbacks else HookTable((), model=self.model)
        dataset_info = {**dataset_info, "pass": "predictions"}

        def get_predictions(batch: Any, size: int) -> Any:
            recorder.batch_size = size
            with run.place.autocast:
                output = model.get_predictions(batch, device)
            evaluation.check_rows(output)
            for hook in hooks.on_after_batch_prediction:
                hook(*output, dataset_info)
            return output

        kind = str(dataset_info.get("type", "other"))
        prefix = _PREFIXES.get(kind, f"{kind}_")

        def gather(mine: Any) -> list[Any]:  # what was logged goes along
            end = recorder.finish_epoch(mine)
            self._into_history(run, prefix, end.metrics)
            return end.riders

        with self._recording(run, prefix) as recorder:
            feed = self._eval_feed(run, loader, name)
            return evaluation.predictions(
                _between_hooks(feed.batches(), hooks, recorder, dataset_info),
                get_predictions,
                gather,
                feed.row_order,
                self.collate_batch_pred_fn,
                self.pred_transform_fn,
            )

    @contextmanager
    def _recording(self, run: Run, prefix: str) -> Iterator[Recorder]:
        """Evaluation of the model as rank 0 has it, and what it logs.

        Evaluating changes nothing about the training around it: modes and random numbers go on as if it hadn't been.
        """
        recorder = Recorder(rank=self.rank, gather=run.gather, on_step=False, prefix=prefix)
        buffers = nullcontext() if run.gather is None else _buffers_of_rank_0(self.model)
        with buffers, self._listening(recorder), evaluation.evaluating(self.model), rng.isolated():
            yield recorder

    def _into_history(self, run: Run, prefix: str, values: dict[str, float]) -> None:
        """Values of an evaluation inside a training."""
        if run.feed is not None and prefix:
            for name, value in values.items():
                self.history._append(name, value, run.history_epoch, replace=True)

    def _feed(self, make: Callable[..., Any], loader: Any, name: str) -> Any:
        run = self._run
        loader = self._capped(loader)
        run.undo.enter_context(workers_outlive_signals(loader))
        return make(
            loader,
            rank=self.rank,
            world_size=self.world_size,
            seed=run.seed,
            name=name,
            exchange_ints=None if run.gather is None else distributed.exchange_ints,
            device=run.place.device,
        )

    def _capped(self, loader: Any) -> Any:
        """The loader with as few workers as the quota allows."""
        workers = getattr(loader, "num_workers", 0)
        most = cap_workers(workers, self._quota, self._rank.local_world_size) if workers else 0
        return loader if most == workers else with_workers(loader, most)

    def _eval_feed(self, run: Run, loader: Any, name: str) -> Any:
        if id(loader) not in run.eval_feeds:  # kept for the run, with the workers of loaders that keep theirs
            run.eval_feeds[id(loader)] = self._feed(eval_feed, loader, name)
        return run.eval_feeds[id(loader)]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_run"] = None  # process groups, open files, running iterators: of this process only
        state["_found_inf"] = []
        return state


LoopBase.__init__.__qualname__ = "TrainLoop.__init__"  # what a misspelt argument's TypeError names


class _alone:
    """An evaluation outside of ``fit``, as work for :meth:`TrainLoop._in_ranks`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, loop: LoopBase, stop: StopAgreement, *args: Any) -> Any:
        with loop._running(stop, None) as run:
            return self.function(loop, run, *args)


def _in_rank(
    loop: LoopBase,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    paths: tuple[str, ...],
    stop: Any,
    *,
    joined: bool = False,
) -> Any:
    """In a rank of ``ddp``: do the work; what comes back is the loop's state and the work's result."""
    loop._rank = rank = _rank_here()
    loop._shared_seed = distributed.broadcast_object(loop._shared_seed)
    device = loop._devices[rank.local_rank]
    arrival = None if joined else loop_state.Arrival(loop, paths)
    ranks, workers = rank.local_world_size, loop._loader_workers(rank.local_world_size)
    with applied(loop._quota, local_rank=rank.local_rank, ranks=ranks, device=device, loader_workers=workers):
        result = work(loop, stop, *args)
    return result if arrival is None else arrival.end_state(result)


def _rank_here() -> Rank:
    """This process's place, whether it was started by us or by torchrun or Slurm."""
    from trainloop.launch import joined
    from trainloop.launch.rank_process import started_by_launch

    here = None if started_by_launch() else joined()
    if here is not None:
        return here
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    local_rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return Rank(rank, world_size, local_rank, ranks, rank // ranks, world_size // ranks)


def _between_hooks(batches: Iterable[Any], hooks: HookTable, recorder: Recorder, info: dict[str, Any]) -> Iterator[Any]:
    """An evaluation's batches with the hooks around them: before its logs are exchanged, so that theirs go along."""
    recorder.batch_size = 1  # what a hook logs belongs to no batch
    for hook in hooks.on_evaluation_begin:
        hook(info)
    yield from batches
    recorder.batch_size = 1
    for hook in hooks.on_evaluation_end:
        hook(info)


def _has_compiled_parts(model: nn.Module) -> bool:
    return any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in model.modules())


@contextmanager
def _buffers_of_rank_0(model: nn.Module) -> Iterator[None]:
    """All ranks have rank 0's buffers meanwhile: those of a rank are its own where DDP doesn't broadcast them."""
    buffers = list(model.buffers())
    kept = [buffer.clone() for buffer in buffers] if distributed.get_rank() else []
    for buffer in buffers:
        torch.distributed.broadcast(buffer, 0)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, own in zip(buffers, kept):
                buffer.copy_(own)
