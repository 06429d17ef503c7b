"""Do a loop's work: in this process, in ranks that are started for it, or as a rank that a launcher has started.

:func:`execute` creates all runs of a :class:`~trainloop.TrainLoop`. In one process, it creates the run here. For
``ddp`` and ``fsdp``, it sends the loop to the ranks, each rank creates a run, and the loop's state is sent back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainloop import _launch as launch
from trainloop import distributed
from trainloop._launch.failures import explain_shared_memory
from trainloop._support import rng
from trainloop._support.keywords import explain_attribute, explain_log
from trainloop._support.output import guarded_output
from trainloop._support.signals import signals, uninterrupted
from trainloop._support.stopping import LocalStop, StopAgreement
from trainloop._support.user_line import warn
from trainloop.data.loader.generators import generator_states, set_generator_states
from trainloop.devices import has_ranks
from trainloop.distributed.ranks import alone
from trainloop.model import yields_losses
from trainloop.optim.optimizers import explain_no_graph, needs_closure, optimizers_of
from trainloop.optim.parameters import modules_beside, trained_modules
from trainloop.parallel.transparent import check_sendable, check_values
from trainloop.resources.enforce import applied, cap_workers, child_environment
from trainloop.train_loop.arguments.options import FitJob
from trainloop.train_loop.arguments.run_config import run_config_under_launcher
from trainloop.train_loop.execution.handover import CallerSide, RankSide, loaders_of, sent_objects
from trainloop.train_loop.execution.restarts import Supervisor
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.run.evaluating import evaluating
from trainloop.train_loop.run.idle import ModuleStates
from trainloop.train_loop.run.losses import explain_batch_of_one, explain_no_criterion, loss_of
from trainloop.train_loop.run.placement import explain_device, placed
from trainloop.train_loop.run.run import Run
from trainloop.train_loop.saving.restart_checkpoints import RestartCheckpoints
from trainloop.train_loop.training.special_steps import AlternatingTraining, ClosureTraining
from trainloop.train_loop.training.training import Training
from trainloop.train_loop.training.whole_step import WholeStepTraining

if TYPE_CHECKING:
    from trainloop.train_loop.progress.restart_folder import RestartFolder


def execute(loop: LoopState, work: Callable[..., Any], *args: Any, job: FitJob | None = None) -> Any:
    """Call ``work(run, *args)`` on a run created in this process or, in ``ddp`` and ``fsdp``, in every rank.

    Parameters
    ----------
    loop : LoopState
        Ranks get a copy of the loop; its state is written back into this object.
    work : callable
        A method of :class:`~trainloop.train_loop.run.run.Run`; it is sent to ranks by name.
    *args
        Further arguments of ``work``.
    job : FitJob, optional
        Options of a training run; without a job, the run can only evaluate and predict.

    Returns
    -------
    object
        Result of ``work`` in this process or, in ``ddp`` and ``fsdp``, on the first of this host's ranks.
    """
    if loop.gpu_mode != "fsdp":
        check_values(loop.model)
    for module in modules_beside(loop.model, loop.criterion):
        check_values(module, "criterion")
    if has_ranks(loop.gpu_mode):
        check_sendable(loop.model, f"gpu_mode={loop.gpu_mode!r}", loop.run_config.devices[0].type)
    if job is not None:
        launch.warn_of_processes_alone(loop.gpu_mode)
    apart = job is not None and (job.restarts is not None or loop.runs_apart)
    if not has_ranks(loop.gpu_mode) and not apart:
        if loop.gpu_mode == "dp":
            _initialize_lazy_parameters(loop)
        stop = LocalStop()
        applied_here = applied(
            loop.options.quota, device=loop.run_config.devices[0], loader_workers=_loader_workers(loop, ranks=1)
        )
        with guarded_output(), alone(True), applied_here, signals(stop), run_here(loop, stop, job) as run:
            return work(run, *args)
    with guarded_output(), alone(False):
        return _in_ranks(loop, work, args, job)


def _in_ranks(loop: LoopState, work: Callable[..., Any], args: tuple[Any, ...], job: FitJob | None) -> Any:
    _initialize_lazy_parameters(loop)
    # Without a seed, ranks still need a common seed. It is derived without a draw, so that the caller's generators
    # remain unchanged.
    loop.drawn_seed = rng.peek_seed()
    config = loop.run_config
    options: dict[str, Any] = {"timeout_s": loop.timeout, "backend": config.backend, "init_method": config.init_method}
    here = launch.rank_from_launcher() if has_ranks(loop.gpu_mode) else None
    if here is not None:
        loop.run_config = config = run_config_under_launcher(config, loop.options.devices, here)
        if job is not None and job.restarts is not None and here.rank == 0:
            warn(
                f"max_restarts={job.restarts.most} has no effect here, because only torchrun or Slurm can restart "
                "these ranks. Use torchrun --max-restarts with a ModelCheckpoint in callbacks and resume_from='last'."
            )
        as_rank = partial(_as_rank, loop, work, args, job, None)
        return launch.join(as_rank, devices=config.devices, **options)
    # Create this before the loop is packed: it records the caller's objects, so that the result can refer to these.
    caller_side = CallerSide(loop)
    # single and dp use a rank only for max_restarts: one process that may die without ending the caller.
    ranks, quota = len(config.devices) if has_ranks(loop.gpu_mode) else 1, loop.options.quota
    restarts = None if job is None or job.restarts is None else Supervisor(loop, job.restarts, ranks, job.resume)
    with restarts or nullcontext() as supervisor, applied(quota, local_rank=None, ranks=ranks):
        data = launch.launch(
            partial(
                _as_rank,
                loop,
                work,
                args,
                job,
                caller_side.paths,
                folder=None if supervisor is None else supervisor.folder,
                caller=None if has_ranks(loop.gpu_mode) else rng.capture(),
            ),
            ranks_per_node=ranks,
            num_nodes=config.num_nodes,
            node_rank=config.node_rank,
            devices=config.devices[:ranks],
            child_env=child_environment(quota, ranks),
            start_method=loop.options.start_method,
            roots=sent_parts(loop),
            known=sent_objects(loop),
            restart_policy=supervisor,
            take_rescued=None if job is None else partial(_receive_rescued, loop, caller_side),
            **options,
        )
    return _receive_state(caller_side, data)


def _receive_state(caller_side: CallerSide, data: Any) -> Any:
    """Write the state of a rank into the caller's objects, and return the work's result."""
    with uninterrupted():  # a mixture of new and old state would be useless
        result, randomness = caller_side.receive(data)
        if randomness is not None:
            rng.restore(randomness)
        return result


def _receive_rescued(loop: LoopState, caller_side: CallerSide, data: Any) -> str:
    """Write the state of the last finished step into the caller's objects; return a sentence about it."""
    _receive_state(caller_side, data)
    return f"Your model has the weights of the last finished step ({loop.global_step})."


def _as_rank(
    loop: LoopState,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    job: FitJob | None,
    paths: tuple[str, ...] | None,
    stop: StopAgreement,
    *,
    folder: RestartFolder | None = None,
    caller: dict[str, Any] | None = None,
) -> Any:
    """Do the work in a rank; return the loop's state, the work's result and, in one process, the random states.

    Parameters
    ----------
    loop, work, args, job
        As in :func:`execute`.
    paths : tuple of str or None
        Paths of the :class:`~trainloop.train_loop.execution.handover.CallerSide`. None if a launcher started the rank:
        then no caller receives the state.
    stop : StopAgreement
    folder : RestartFolder, optional
        Private folder of a run that restarts after failures.
    caller : dict, optional
        The caller's random states, for the one process of ``single`` and ``dp``: a run without a seed uses them.
    """
    # The loop was sent by a process that is not a rank, so it still has the caller's rank attributes.
    loop.process = process = launch.place_here()
    loop.drawn_seed = distributed.broadcast_object(loop.drawn_seed)
    rank_side = None if paths is None else RankSide(loop, paths, sends=process.local_rank == 0)
    if paths is not None:
        # Torch compares the workers with the CPUs of this rank. The caller's process has compared them with the CPUs of
        # the machine when it created the loader.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    ranks = process.local_world_size
    applied_here = applied(
        loop.options.quota,
        local_rank=process.local_rank,
        ranks=ranks,
        device=loop.run_config.devices[process.local_rank],
        loader_workers=_loader_workers(loop, ranks),
    )
    if caller is not None:
        rng.restore(caller)
    with applied_here, run_here(loop, stop, job, joined=paths is None) as run:
        if folder is not None:
            assert isinstance(run, Training)
            assert job is not None
            assert job.restarts is not None
            run.restarts = RestartCheckpoints(run, folder, job.restarts.every)
        try:
            result = work(run, *args)
        except Exception:
            if rank_side is not None and process.local_rank == 0 and getattr(run, "between_epochs", False):
                side = rank_side
                with suppress(Exception):  # the first error is the one to report
                    if run.place.synced is not None:  # the caller gets new layers with the class that they had
                        run.place.synced.revert()
                    launch.rescue_result(lambda: side.end_state((None, None if caller is None else rng.capture())))
            raise
    if rank_side is None:
        return result
    answer = (result, None if caller is None else rng.capture())
    return rank_side.end_state(answer)


@contextmanager
def run_here(loop: LoopState, stop: StopAgreement, job: FitJob | None, *, joined: bool = False) -> Iterator[Run]:
    """Create a run in this process; it is ``loop.running`` in the block. Without ``job``, the run can only evaluate."""
    with _own_randomness(loop, trains=job is not None), placed(loop, job, joined=joined) as place:
        run = Run(loop, place, stop) if job is None else _kind_of_training(loop)(loop, place, stop, job)
        loop.note(running=run)
        try:
            with run.undo:
                yield run
        except TypeError as error:
            if loop.criterion is None:
                explain_no_criterion(error)
            explain_log(error)
            raise
        except AttributeError as error:
            explain_attribute(error, loop.model, loop.callbacks)
            raise
        except ValueError as error:
            explain_batch_of_one(
                error, ranks=run.parallel, replicas=loop.gpu_mode == "dp", synchronized=loop.sync_batchnorm
            )
            raise
        except RuntimeError as error:
            if job is not None and getattr(run, "stage", None) == "step":
                explain_no_graph(error, loop.optimizer)
            explain_device(error, loop.model, loop.criterion, place.device)
            explain_shared_memory(error)
            raise
        finally:
            loop.note(running=None)


def _kind_of_training(loop: LoopState) -> type[Training]:
    own: type[Training] | None = getattr(loop.optimizer, "training_class", None)
    if own is not None:  # an optimizer may define its own kind of step
        return own
    kind, reason = Training, ""
    if yields_losses(loop.model):
        kind, reason = AlternatingTraining, "get_loss yields its losses, and the optimizers step in between"
    elif any(map(needs_closure, optimizers_of(loop.optimizer))):
        kind, reason = ClosureTraining, "the optimizer evaluates the loss several times in a step"
    if not loop.options.compiles_step:
        return kind
    if reason:
        warn(f"compile='step': steps are not compiled, because {reason}.")
        return kind
    return WholeStepTraining


@contextmanager
def _own_randomness(loop: LoopState, *, trains: bool) -> Iterator[None]:
    """Isolate the generators of a run with a seed. A run without a seed uses the caller's, as in any PyTorch loop.

    An evaluation outside of ``fit`` draws from the caller's random state in every mode: in ranks, from a seed that
    depends on this state.
    """
    if not trains:
        here = has_ranks(loop.gpu_mode)
        with rng.isolated(rng.derive_seed(loop.drawn_seed, "evaluation", loop.rank)) if here else nullcontext():
            yield
        return
    seed = loop.seed if loop.seed is not None or not has_ranks(loop.gpu_mode) else loop.drawn_seed
    if seed is None:
        yield
        return
    with rng.isolated(_seed_of_run(loop, seed)):
        yield


def _seed_of_run(loop: LoopState, seed: int) -> int:
    return rng.derive_seed(seed, "fit", loop.epoch, loop.rank)


def sent_parts(loop: LoopState) -> dict[str, Any]:
    """Return the parts of a loop that are sent to ranks, by the names that error messages use."""
    names = ("model", "train_loader", "validation_loader", "test_loader", "optimizer", "criterion", "callbacks")
    return {name: getattr(loop, name) for name in names}


def _loader_workers(loop: LoopState, ranks: int) -> int:
    """Return the number of loader workers of a rank, under the quota."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loader itself will warn
        return max(cap_workers(getattr(one, "num_workers", 0), loop.options.quota, ranks) for one in loaders_of(loop))


def _initialize_lazy_parameters(loop: LoopState) -> None:
    """Initialize lazy modules, also those of the criterion, from a batch before ranks exist, so that all are equal.

    The weights are those that ``single`` draws in its first forward, unless that forward draws other numbers first
    (dropout).
    """
    modules = trained_modules(loop.model, loop.criterion)
    parts = [part for one in modules for part in one.modules()]
    own = [(part, (*part.parameters(recurse=False), *part.buffers(recurse=False))) for part in parts]
    lazy = [part for part, tensors in own if any(map(torch.nn.parameter.is_lazy, tensors))]
    loader = next((loader for loader in loaders_of(loop) if loader is not None), None)
    if not lazy or loader is None:
        return
    # The others must not count this batch, which the training has still to read.
    others = [part for part in parts if part not in lazy]
    states = ModuleStates(others, lazy, model=loop.model, criterion=loop.criterion)
    with untouched(loop), evaluating(*modules), states.in_use():
        batch = next(iter(loader))
        with nullcontext() if loop.seed is None else rng.isolated(_seed_of_run(loop, loop.seed)):
            loss_of(loop.model.get_loss(batch, loop.criterion, loop.model.device), 1)


@contextmanager
def untouched(loop: LoopState) -> Iterator[None]:
    """Restore the global generators and the loaders' generators at the end of the block."""
    loaders = loaders_of(loop)
    before = generator_states(loaders)
    try:
        with rng.isolated():
            yield
    finally:
        set_generator_states(loaders, before)
