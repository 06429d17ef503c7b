"""Collect the state of a training run for a checkpoint."""

from __future__ import annotations

import platform
from typing import Any

import torch

from trainloop import distributed
from trainloop._support import rng
from trainloop._support.carried import carried_state_of
from trainloop._support.rng import Generator
from trainloop.callbacks.base import identity_of
from trainloop.checkpoint import plain
from trainloop.checkpoint.plain import for_file, from_file
from trainloop.checkpoint.sharded_writing import about_unlike_shards, take_shards
from trainloop.data.loader.generators import generator_states, generators_in, kept_in_checkpoints
from trainloop.data.loader.loader_copies import persistent_workers
from trainloop.errors import CheckpointError
from trainloop.optim.optimizers import all_optimizers, optimizers_of, parameters_of
from trainloop.optim.parameters import criterion_module, parameters_beside, trained_modules
from trainloop.optim.states import gather_divided_states, optimizer_state_dict
from trainloop.parallel.sharded.shards import gathered, is_sharded, map_tensors
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.progress.running import TrainingRun
from trainloop.train_loop.saving.names import FLAGS, group_names, training_flags

COUNTERS = ("epoch", "global_step", "total_iteration_idx")
"""Attributes of a loop's progress that checkpoints contain, under the same names."""


def checkpoint_state(run: TrainingRun, *, keep_shards: bool = False) -> dict[str, Any] | None:
    """Return everything that a resumed run needs, as plain types and tensors, on rank 0; ``None`` on other ranks.

    Collective: all ranks must call it between two steps. It exchanges step logs. The tensors are the model's and the
    optimizers' own, so copy them if they must not change in the next step.
    """
    state = whole_state(run, states_of_ranks(run))
    if state is not None and run.place.collective and not keep_shards:
        unlike = about_unlike_shards(take_shards(state)[1])
        if unlike:
            raise CheckpointError(unlike)
        state = map_tensors(state, gathered)
    return state if keep_shards or distributed.is_global_zero() else None


def states_of_ranks(run: TrainingRun, *, check: bool = True) -> list[dict[str, Any]] | None:
    """Return the per-rank states, for :func:`whole_state`, on rank 0; ``None`` on the other ranks. Collective.

    Without ``check``, it is not checked that all ranks have the same weights.
    """
    loop = run.loop
    run.flush_logs(exchange=True)
    gather_divided_states(loop.optimizer)
    if check:  # a checkpoint has rank 0's weights: ranks with different weights would not resume with their own
        run.gradients.check_same_weights()
    mine = {
        **position(run),
        "carried": carried_state_of(loop.model),
        "ends": [tuple(end) for end in loop.ends],
        "callbacks": callback_states(loop, "rank_state_dict"),
        "optimizers": own_optimizer_states(loop),
        "generators": generator_states_of(loop),
    }
    loop.history.put_agreed(run.exchange({}, attachment=loop.history.take_own()).attachments)
    # Without a key, ranks that a launcher started exchange neither deques nor defaultdicts.
    return from_file(distributed.gather_to(for_file(mine))) if run.parallel else [mine]


def generators_of(loop: LoopState) -> dict[str, Generator]:
    optimizers = {f"optimizer{i}": optimizer for i, optimizer in enumerate(optimizers_of(loop.optimizer))}
    return generators_in(model=loop.model, criterion=loop.criterion, **optimizers)


def generator_states_of(loop: LoopState) -> dict[str, Any]:
    return {name: own.get_state() for name, own in generators_of(loop).items()}


def position(run: TrainingRun) -> dict[str, Any]:
    """Return this rank's position in the training data, with its random states and the epoch's logs so far."""
    last = run.loop.last_loss
    return {
        # A rank without a batch in its first step after a resume shows callbacks the previous step's loss.
        "last_loss": None if last is None else [last.item(), last.dtype],
        "rng": rng.capture(),
        "feed": _feed_state(run),
        "metrics": run.recorder.state_dict(),
    }


def _feed_state(run: TrainingRun) -> dict[str, Any]:
    """Return the state of the training data from which the run continues.

    At an epoch's end, this is the loader that a callback has assigned for the next epoch: its generators have states of
    their own, and it has not been read.
    """
    loader = run.loop.train_loader
    state = run.feed.state_dict(plain, ended=run.loop.progress.epoch_ends)
    if not run.epoch_finished or run.reads_loader:
        return state
    generators = kept_in_checkpoints(generator_states([loader])[0], plain, "train_loader")
    return {**state, "generators": generators, "workers": persistent_workers(loader) is not None, "position": None}


def own_optimizer_states(loop: LoopState) -> list[dict[str, dict[str, Any]]]:
    """Return this rank's state of sharded parameters that is not sharded like them, by optimizer and parameter.

    A factored optimizer has, for each shard, statistics of its rows and columns, maybe in lists. They are different on
    each rank, and can't be joined. The list is empty if there is no such state, as in all modes but ``fsdp``.
    """
    found: list[dict[str, dict[str, Any]]] = []
    for optimizer in all_optimizers(loop.optimizer):
        own: dict[str, dict[str, Any]] = {}
        for i, p in enumerate(parameters_of(optimizer)):
            state = optimizer.state.get(p) if is_sharded(p) else None
            for key, value in state.items() if isinstance(state, dict) else ():
                tensors: list[torch.Tensor] = []
                map_tensors(value, tensors.append)
                if any(tensor.ndim for tensor in tensors) and not any(map(is_sharded, tensors)):
                    own.setdefault(str(i), {})[key] = map_tensors(value, torch.Tensor.detach)
        found.append(own)
    return found if any(found) else []


def whole_state(run: TrainingRun, ranks: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Return the state with the per-rank parts, without an exchange; its tensors may be sharded.

    It is ``None`` on ranks that have no part of the state. In ``fsdp``, each rank has its shards.
    """
    if ranks is None and not run.place.collective:
        return None
    loop = run.loop
    state = {**common_state(run), "callbacks": callback_states(loop, "state_dict")}
    if loop.cut is not None and run.before_cut is not None:
        state["cut"] = {**loop.cut, **run.before_cut}
    if ranks is None:
        return state
    ends = list(dict.fromkeys(tuple(end) for theirs in ranks for end in theirs.pop("ends")))
    if not state["place"]["epoch_steps"]:
        state["place"]["ends"] = [list(end) for end in ends]
    return {
        "versions": {"trainloop": 1, "torch": str(torch.__version__), "python": platform.python_version()},
        **state,
        "history": loop.history.state_dict(),
        "beside": run.changed_beside(),
        "ranks": ranks,
    }


def criterion_state(loop: Any, *, of_model: bool) -> dict[str, Any]:
    """Return the criterion's own tensors or, if it holds the model, those of the model, which the model's state has."""
    criterion = criterion_module(loop.criterion)
    if criterion is None:
        return {}
    models = {id(tensor) for tensor in loop.model.state_dict(keep_vars=True).values()}
    kept = criterion.state_dict(keep_vars=True)
    return {name: t for name, t in criterion.state_dict().items() if (id(kept[name]) in models) == of_model}


def common_state(run: TrainingRun) -> dict[str, Any]:
    """Return the part of a training run's state that is the same on all ranks; its tensors are not copied."""
    loop = run.loop
    return {
        "model": loop.model.state_dict(),
        "criterion": criterion_state(loop, of_model=False),
        "optimizers": [optimizer_state_dict(optimizer) for optimizer in optimizers_of(loop.optimizer)],
        "groups": group_names(loop),
        "parameters": {
            name: p.detach() for name, p in parameters_beside(loop.model, loop.criterion, loop.optimizer).items()
        },
        **flags_of(loop),
        "scaler": run.place.scaler.state_dict(),
        "generators": [
            kept_in_checkpoints(states, plain, name)
            for name, states in zip(
                ("validation_loader", "test_loader"),
                generator_states((loop.validation_loader, loop.test_loader)),
                strict=True,
            )
        ],
        "place": place_of(run),
    }


def flags_of(loop: LoopState) -> dict[str, Any]:
    return dict(zip(FLAGS, map(training_flags, trained_modules(loop.model, loop.criterion))))


def place_of(run: TrainingRun) -> dict[str, Any]:
    """Return how far a training run has come, and the settings that determine the rest of its epoch."""
    loop = run.loop
    # At the end of training the last epoch has already been counted.
    finished, epoch = run.epoch_finished, loop.epoch + run.epoch_finished
    return {
        "start_epoch": run.start_epoch,
        "start_iteration": run.start_iteration,
        "batches_before": loop.batches_before,
        "epoch": epoch,
        "epoch_steps": 0 if finished else run.epoch_steps,
        "epoch_batches": 0 if finished else run.epoch_batches,
        "global_step": loop.global_step,
        "total_iteration_idx": loop.total_iteration_idx,
        "grad_accumulation": loop.grad_accumulation,
        "global_batch_size": run.feed.global_batch_size,
        "loader_batches": run.feed.loader_batches,
        "num_batches": run.feed.num_batches,
        "num_samples": run.feed.num_samples,
        "seed": run.seed,
        "num_epochs": loop.num_epochs,
        "num_iterations": loop.num_iterations,
        "epoch_ends": loop.progress.epoch_ends and not finished,
        "finished": run.finished,
        "ends": [],
    }


def callback_states(loop: LoopState, method: str) -> list[dict[str, Any]]:
    """Return each callback's state for a checkpoint: see :func:`states_of_callbacks`."""
    states = states_of_callbacks(loop, method)
    return states if method == "state_dict" else [plain(one, f"{one['type']}.{method}()") for one in states]


def states_of_callbacks(loop: LoopState, method: str) -> list[dict[str, Any]]:
    """Return each callback's state, under the name by which another run identifies the callback."""
    return [
        {**identity_of(callback), "state": getattr(callback, method)()}
        for callback in loop.callbacks
        # Most callbacks have no per-rank state.
        if method == "state_dict" or callback.uses_hook(method)
    ]
