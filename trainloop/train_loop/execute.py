"""One piece of work of a loop: done here, in ranks that are started for it, or as a rank that others have started.

:func:`execute` is the only way from a :class:`~trainloop.TrainLoop` to a run: in one process the run is made here; for
``ddp`` the loop is sent to the ranks, each makes a run of its own, and their state comes back.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainloop import distributed, rng
from trainloop.distributed import Rank
from trainloop.model import yields_losses
from trainloop.optim import needs_closure, optimizers_of
from trainloop.resources.enforce import applied, cap_workers, child_environment
from trainloop.signals import signals, uninterrupted
from trainloop.stopping import LocalStop, StopAgreement
from trainloop.train_loop.alternating import AlternatingTraining
from trainloop.train_loop.arguments import FitJob
from trainloop.train_loop.closure import ClosureTraining
from trainloop.train_loop.evaluating import evaluating
from trainloop.train_loop.losses import run_through
from trainloop.train_loop.placement import placed
from trainloop.train_loop.run import Run
from trainloop.train_loop.site import as_launched
from trainloop.train_loop.training import Training

if TYPE_CHECKING:
    from trainloop.train_loop.loop import TrainLoop

__all__ = ["execute", "sent_parts"]


def execute(loop: TrainLoop[Any], work: Callable[..., Any], *args: Any, job: FitJob | None = None) -> Any:
    """What ``work(run, *args)`` returns, on a run made here or, in ``ddp``, on one in every rank.

    Parameters
    ----------
    loop : TrainLoop
        In the ranks a copy, whose state comes back into this one.
    work : callable
        A method of :class:`~trainloop.train_loop.run.Run`; it is sent to ranks by its name.
    *args
        Of ``work``.
    job : FitJob, optional
        What a training is to do; without one the run can only evaluate.
    """
    if loop.gpu_mode != "ddp":
        stop = LocalStop()
        applied_here = applied(
            loop.options.quota, device=loop.site.devices[0], loader_workers=_loader_workers(loop, ranks=1)
        )
        with applied_here, signals(stop), running(loop, stop, job) as run:
            return work(run, *args)
    return _in_ranks(loop, work, args, job)


def _in_ranks(loop: TrainLoop[Any], work: Callable[..., Any], args: tuple[Any, ...], job: FitJob | None) -> Any:
    # Imported here: `import trainloop` is to be cheap, and most programs never start a rank.
    from trainloop import launch
    from trainloop.train_loop.handover import Departure

    _initialize_lazy_parameters(loop)
    loop.drawn_seed = rng.peek_seed()
    departure = Departure(loop)
    as_rank = partial(_as_rank, loop, work, args, job, departure.paths)
    site = loop.site
    options = {"timeout_s": loop.timeout, "backend": site.backend, "init_method": site.init_method}
    here = launch.joined()
    if here is not None:
        loop.site = site = as_launched(site, loop.options.devices, here)
        return launch.join(partial(as_rank, joined=True), devices=site.devices, **options)
    ranks, quota = len(site.devices), loop.options.quota
    with applied(quota, local_rank=None, ranks=ranks):
        data = launch.launch(
            as_rank,
            ranks_per_node=ranks,
            num_nodes=site.num_nodes,
            node_rank=site.node_rank,
            devices=site.devices,
            child_env=child_environment(quota, ranks),
            start_method=loop.options.start_method,
            roots=sent_parts(loop),
            **options,
        )
    with uninterrupted():  # half of the new state and half of the old would be of no use
        return departure.receive(data)


def _as_rank(
    loop: TrainLoop[Any],
    work: Callable[..., Any],
    args: tuple[Any, ...],
    job: FitJob | None,
    paths: tuple[str, ...],
    stop: StopAgreement,
    *,
    joined: bool = False,
) -> Any:
    """In a rank of ``ddp``: do the work; what comes back is the loop's state and the work's result."""
    from trainloop.train_loop.handover import Arrival

    loop.process = process = _process_here()
    loop.drawn_seed = distributed.broadcast_object(loop.drawn_seed)
    arrival = None if joined else Arrival(loop, paths)
    ranks = process.local_world_size
    applied_here = applied(
        loop.options.quota,
        local_rank=process.local_rank,
        ranks=ranks,
        device=loop.site.devices[process.local_rank],
        loader_workers=_loader_workers(loop, ranks),
    )
    with applied_here, running(loop, stop, job) as run:
        result = work(run, *args)
    return result if arrival is None else arrival.end_state(result)


@contextmanager
def running(loop: TrainLoop[Any], stop: StopAgreement, job: FitJob | None) -> Iterator[Run]:
    """A run of this process, for training (``job``) or for evaluation only: ``loop.running`` while it lasts."""
    devices = loop.site.devices if loop.gpu_mode == "dp" else [loop.site.devices[loop.process.local_rank]]
    wrapper_args, over_ranks = None, False
    if job is not None:
        wrapper_args = job.dp_model_args if loop.gpu_mode == "dp" else job.ddp_model_args
        over_ranks = loop.sync_batchnorm and loop.gpu_mode == "ddp" and loop.world_size > 1
    place_of_model = placed(
        loop.model,
        loop.criterion,
        optimizers_of(loop.optimizer),
        mode=loop.gpu_mode,
        devices=devices,
        amp=loop.options.amp,
        wrapper_args=wrapper_args,
        sync_batchnorm_over_ranks=over_ranks,
        compile_args=loop.options.compile_args,
        checkpoint_modules=loop.options.checkpoint_modules if job is not None else None,
    )
    with nullcontext() if job is None else _own_randomness(loop), place_of_model as place:
        loop.running = run = Run(loop, place, stop) if job is None else _kind_of_training(loop)(loop, place, stop, job)
        try:
            with run.undo:
                yield run
        finally:
            loop.running = None


def _kind_of_training(loop: TrainLoop[Any]) -> type[Training]:
    own: type[Training] | None = getattr(loop.optimizer, "training_class", None)
    if own is not None:  # an optimizer may bring its own order of a step
        return own
    if yields_losses(loop.model):
        return AlternatingTraining
    return ClosureTraining if any(map(needs_closure, optimizers_of(loop.optimizer))) else Training


@contextmanager
def _own_randomness(loop: TrainLoop[Any]) -> Iterator[None]:
    """A seeded run draws from generators of its own; without a seed, the caller's go on as in any PyTorch loop."""
    seed = loop.seed if loop.seed is not None or loop.gpu_mode != "ddp" else loop.drawn_seed
    if seed is None:
        yield
        return
    with rng.isolated(rng.derive_seed(seed, "fit", loop.epoch, loop.rank)):
        yield


def _process_here() -> Rank:
    """This process's place, whether it was started by us or by torchrun or Slurm."""
    from trainloop.launch import joined
    from trainloop.launch.rank_process import started_by_launch

    here = None if started_by_launch() else joined()
    if here is not None:
        return here
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    local_rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return Rank(rank, world_size, local_rank, ranks, rank // ranks, world_size // ranks)


def sent_parts(loop: TrainLoop[Any]) -> dict[str, Any]:
    """What is sent to ranks, under the names by which an error speaks of what can't be."""
    names = ("model", "train_loader", "validation_loader", "test_loader", "optimizer", "criterion", "callbacks")
    return {name: getattr(loop, name) for name in names}


def _loader_workers(loop: TrainLoop[Any], ranks: int) -> int:
    """Workers that load beside a rank, under the quota."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loader's own turn to warn comes
        loaders = (loop.train_loader, loop.validation_loader, loop.test_loader)
        return max(cap_workers(getattr(loader, "num_workers", 0), loop.options.quota, ranks) for loader in loaders)


def _initialize_lazy_parameters(loop: TrainLoop[Any]) -> None:
    """Lazy modules take their shapes from a batch; before the ranks start, so that all have the same weights."""
    lazy = [p for p in loop.model.parameters() if torch.nn.parameter.is_lazy(p)]
    loader = next((x for x in (loop.train_loader, loop.validation_loader, loop.test_loader) if x is not None), None)
    if not lazy or loader is None:
        return
    with rng.isolated(), evaluating(loop.model):
        run_through(loop.model.get_loss(next(iter(loader)), loop.criterion, loop.model.device))
