"""Collect the state of a training run for checkpoints, and load it into another run."""

from __future__ import annotations

import copy
import io
import logging
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainloop import checkpoint, distributed
from trainloop._launch import join, rank_from_launcher
from trainloop._support import rng
from trainloop._support.carried import carried_state_of, load_carried_state
from trainloop._support.scratch import remove_dead
from trainloop._support.user_line import warn, warn_or_print
from trainloop.callbacks.base import matched_entries, overrides_of_user
from trainloop.checkpoint import plain
from trainloop.checkpoint.file import bits_of, changed
from trainloop.checkpoint.sharded import StoredTensor, fitted, load_model, whole_of
from trainloop.data.order.orders import (
    Generator,
    generator_states,
    generators_in,
    kept_in_checkpoints,
    set_generator_states,
    set_states,
)
from trainloop.devices import has_ranks
from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.optim import (
    all_optimizers,
    criterion_module,
    gather_divided_states,
    in_order_of,
    inner_optimizers,
    load_optimizer_state_dict,
    optimizer_state_dict,
    optimizers_of,
    parameters_of,
    saved_groups,
    with_group_settings,
)
from trainloop.parallel.shards import gathered, is_sharded, map_tensors
from trainloop.train_loop.arguments.checks import short
from trainloop.train_loop.progress.ending import end_that_holds, nothing_left
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.progress.running import TrainingRun
from trainloop.train_loop.training.trained import (
    add_missing_groups,
    described_names,
    group_names,
    plain_group_names,
    plain_name,
    set_flags,
    training_flags,
)

__all__ = [
    "COUNTERS",
    "check_checkpoint",
    "checkpoint_state",
    "checkpoint_to_resume",
    "described_differences",
    "continued",
    "held_before_end",
    "held_state",
    "load_checkpoint_state",
    "load_cut",
    "noted_cut",
    "own_optimizer_states",
    "put_own_optimizer_states",
    "resume_point",
    "states_before_cut",
    "states_of_ranks",
    "whole_state",
    "take_up_finished",
]


_OWN_STATE = ("load_state_dict", "load_rank_state_dict")
COUNTERS = ("epoch", "global_step", "total_iteration_idx")
"""Attributes of a loop's progress that checkpoints contain, under the same names."""


def checkpoint_state(run: TrainingRun, *, keep_shards: bool = False) -> dict[str, Any] | None:
    """Return everything that a resumed run needs, as plain types and tensors, on rank 0; ``None`` on other ranks.

    Collective: all ranks must call it between two steps. It exchanges step logs. The tensors are the model's and the
    optimizers' own, so copy them if they must not change in the next step.
    """
    state = whole_state(run, states_of_ranks(run))
    if state is not None and run.place.collective and not keep_shards:
        state = map_tensors(state, gathered)
    return state if keep_shards or distributed.is_global_zero() else None


def states_of_ranks(run: TrainingRun, *, check: bool = True) -> list[dict[str, Any]] | None:
    """Return the per-rank states, for :func:`whole_state`, on rank 0; ``None`` on the other ranks. Collective.

    Without ``check``, it is not checked that all ranks have the same weights.
    """
    loop = run.loop
    run.publish(run.recorder.exchange_steps())
    gather_divided_states(loop.optimizer)
    if check:  # a checkpoint has rank 0's weights: ranks with different weights would not resume with their own
        run.gradients.check_same_weights()
    mine = {
        **_position(run),
        "carried": carried_state_of(loop.model),
        "ends": [tuple(end) for end in loop.ends],
        "callbacks": _callback_states(loop, "rank_state_dict"),
        "optimizers": own_optimizer_states(loop),
        "generators": {name: own.get_state() for name, own in _generators(loop).items()},
    }
    loop.history.put_agreed(run.exchange({}, attachment=loop.history.take_own()).attachments)
    return distributed.gather_to(mine) if run.parallel else [mine]


def _generators(loop: LoopState) -> dict[str, Generator]:
    optimizers = {f"optimizer{i}": optimizer for i, optimizer in enumerate(optimizers_of(loop.optimizer))}
    return generators_in(model=loop.model, criterion=loop.criterion, **optimizers)


def _position(run: TrainingRun) -> dict[str, Any]:
    """Return this rank's position in the training data, with its random states and the epoch's logs so far."""
    last = run.loop.last_loss
    return {
        # A rank without a batch in its first step after a resume shows callbacks the previous step's loss.
        "last_loss": None if last is None else [last.item(), last.dtype],
        "rng": rng.capture(),
        "feed": run.feed.state_dict(plain, ended=run.loop.progress.epoch_ends),
        "metrics": run.recorder.state_dict(),
    }


def noted_cut(run: TrainingRun) -> dict[str, Any]:
    """Return the state from which the next ``fit`` continues an epoch that the end of this one cuts short. Collective.

    Call it before the end of the epoch is recorded. The loop keeps it as its ``cut``. The model and the optimizers are
    not in it: they keep the values that they have.
    """
    loop = run.loop
    run.publish(run.recorder.exchange_steps())
    mine = _position(run)
    if run.parallel:  # a rank that is started later gets the columns of its predecessor
        mine["carried"] = carried_state_of(loop.model)
    ranks = distributed.gather_object(mine) if run.parallel else [mine]
    return {"place": _place(run), "ranks": ranks, "loop_seed": loop.seed}


def states_before_cut(run: TrainingRun) -> dict[str, Any]:
    """Return what hooks at an epoch's end change: the states of callbacks, and settings of the optimizers' groups.

    A checkpoint at the end of an epoch that is cut short contains both, so that a run that resumes in that epoch has
    not done its end.
    """
    loop = run.loop
    # A copy of an average is as large as the model. This callback only evaluates its average at an epoch's end.
    fixed = "ExponentialMovingAverage"
    changing = [
        callback.uses_hook("on_epoch_end") and all(kind.__name__ != fixed for kind in type(callback).__mro__)
        for callback in loop.callbacks
    ]
    here = run.place.collective or loop.is_global_zero
    states = _callback_states(loop, "state_dict") if here else []
    kept = [map_tensors(one, _copy) if changes else None for one, changes in zip(states, changing)]
    groups = [
        [{key: map_tensors(value, _copy) for key, value in group.items() if key != "params"} for group in one]
        for one in (optimizer.param_groups for optimizer in optimizers_of(loop.optimizer))
    ]
    return {"callbacks": kept, "groups": groups}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def own_optimizer_states(loop: LoopState) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Return this rank's state of sharded parameters that is not sharded like them, by optimizer and parameter.

    A factored optimizer has, for each shard, statistics of its rows and columns. They are different on each rank, and
    can't be joined. The list is empty if there is no such state, as in all modes but ``fsdp``.
    """
    found: list[dict[str, dict[str, torch.Tensor]]] = []
    for optimizer in all_optimizers(loop.optimizer):
        own: dict[str, dict[str, torch.Tensor]] = {}
        for i, p in enumerate(parameters_of(optimizer)):
            state = optimizer.state.get(p) if is_sharded(p) else None
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.ndim and not is_sharded(value):
                    own.setdefault(str(i), {})[key] = value.detach()
        found.append(own)
    return found if any(found) else []


def put_own_optimizer_states(loop: LoopState, everyone: list[Any]) -> None:
    """Put the rank's entry of the :func:`own_optimizer_states` of all ranks into the optimizers."""
    if not any(everyone):
        return
    for optimizer, own in zip(all_optimizers(loop.optimizer), everyone[loop.rank], strict=True):
        parameters = parameters_of(optimizer)
        for i, values in own.items():
            for key, value in values.items():
                optimizer.state[parameters[int(i)]][key] = value.clone()


def _check_own_states(run: TrainingRun, ranks: list[dict[str, Any]]) -> None:
    if any(saved.get("optimizers") for saved in ranks) and (
        not run.place.collective or len(ranks) != run.loop.world_size
    ):
        raise CheckpointError(
            f"the checkpoint has the optimizer's state of shards on {len(ranks)} ranks of fsdp, which is not shaped "
            "like the parameters (as of factored optimizers), so it can't be divided in another way. Resume in fsdp "
            f"with {len(ranks)} ranks."
        )


def whole_state(run: TrainingRun, ranks: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Return the state with the per-rank parts, without an exchange; its tensors may be sharded.

    It is ``None`` on ranks that have no part of the state. In ``fsdp``, each rank has its shards.
    """
    if ranks is None and not run.place.collective:
        return None
    loop = run.loop
    state = {**_common_state(run), "callbacks": _callback_states(loop, "state_dict")}
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
        "ranks": ranks,
    }


def _criterion_state(loop: Any, *, of_model: bool) -> dict[str, Any]:
    """Return the criterion's own tensors or, if it holds the model, those of the model, which the model's state has."""
    criterion = criterion_module(loop.criterion)
    if criterion is None:
        return {}
    models = {id(tensor) for tensor in loop.model.state_dict(keep_vars=True).values()}
    kept = criterion.state_dict(keep_vars=True)
    return {name: t for name, t in criterion.state_dict().items() if (id(kept[name]) in models) == of_model}


def _common_state(run: TrainingRun) -> dict[str, Any]:
    """Return the part of a training run's state that is the same on all ranks; its tensors are not copied."""
    loop = run.loop
    return {
        "model": loop.model.state_dict(),
        "criterion": _criterion_state(loop, of_model=False),
        "optimizers": [optimizer_state_dict(optimizer) for optimizer in optimizers_of(loop.optimizer)],
        "groups": group_names(loop),
        "flags": training_flags(loop.model),
        "scaler": run.place.scaler.state_dict(),
        "generators": [
            kept_in_checkpoints(states, plain, name)
            for name, states in zip(
                ("validation_loader", "test_loader"),
                generator_states((loop.validation_loader, loop.test_loader)),
                strict=True,
            )
        ],
        "place": _place(run),
    }


def _place(run: TrainingRun) -> dict[str, Any]:
    """Return how far a training run has come, and the settings that determine the rest of its epoch."""
    loop = run.loop
    # At the end of training the last epoch has already been counted.
    finished, epoch = run.epoch_finished, loop.epoch + run.epoch_finished
    return {
        "start_epoch": run.start_epoch,
        "start_iteration": run.start_iteration,
        "epoch": epoch,
        "epoch_steps": 0 if finished else run.epoch_steps,
        "epoch_batches": 0 if finished else run.epoch_batches,
        "global_step": loop.global_step,
        "total_iteration_idx": loop.total_iteration_idx,
        "grad_accumulation": loop.grad_accumulation,
        "global_batch_size": run.feed.global_batch_size,
        "num_samples": run.feed.num_samples,
        "seed": run.seed,
        "num_epochs": loop.num_epochs,
        "num_iterations": loop.num_iterations,
        "epoch_ends": loop.progress.epoch_ends and not finished,
        "finished": run.finished,
        "ends": [],
    }


def _callback_states(loop: LoopState, method: str) -> list[dict[str, Any]]:
    """Return each callback's state, under the name by which another run identifies the callback."""
    states = [
        {
            "name": callback.callback_name,
            "type": type(callback).__name__,
            "key": callback.state_key,
            "state": getattr(callback, method)(),
        }
        for callback in loop.callbacks
        # Most callbacks have no per-rank state.
        if method == "state_dict" or callback.uses_hook(method)
    ]
    return states if method == "state_dict" else [plain(one, f"{one['type']}.{method}()") for one in states]


def _load_rank_states(loop: LoopState, ranks: list[dict[str, Any]], *, same_ranks: bool) -> None:
    """Load this rank's states of callbacks; warn if they were saved by another number of ranks."""
    saved = [one.get("callbacks", []) for one in ranks]
    if same_ranks:
        _load_callbacks(loop, saved[loop.rank], "load_rank_state_dict")
        return
    names = ", ".join(dict.fromkeys(entry["name"] for entry in saved[0] if entry["state"]))
    if names and loop.is_global_zero:
        warn(
            f"the checkpoint has states of {len(ranks)} ranks for the callback {names}, but there are "
            f"{loop.world_size} ranks now. Per-rank state can't be loaded, so this callback begins without it."
        )


def resume_point(loop: LoopState, resume_from: Any) -> tuple[dict[str, Any] | None, str]:
    """Return the state that ``fit(resume_from=...)`` names, and the reason if nothing is left to do after it.

    The state is ``None`` for a fresh start. Under a launcher, rank 0 reads and decides, and sends both results to the
    other ranks. If each rank read the checkpoint itself, a rank might do so before rank 0 has written the checkpoint,
    or in a folder that only rank 0's host has.
    """
    if resume_from is None:
        return None, ""

    here = rank_from_launcher() if has_ranks(loop.gpu_mode) else None
    if here is None or here.world_size == 1:
        return _read_point(loop, resume_from)
    return _among_ranks(loop, lambda stop: _state_of_rank_zero(loop, resume_from))


def _among_ranks(loop: LoopState, function: Callable[[Any], Any]) -> Any:
    """Call a function in the process group of a launcher's ranks."""

    return join(function, init_method=loop.run_config.init_method, timeout_s=loop.timeout)


def _read_point(loop: LoopState, resume_from: Any) -> tuple[dict[str, Any] | None, str]:
    state = checkpoint_to_resume(loop, resume_from)
    return state, "" if state is None or continues_in(loop, state) else nothing_left(loop, state)


def _state_of_rank_zero(loop: LoopState, resume_from: Any) -> tuple[dict[str, Any] | None, str]:
    """Return, on all ranks, the state that rank 0 reads, and the reason if nothing is left to do. Collective."""
    state: dict[str, Any] | None = None
    # In fsdp, the state refers to files, and each rank reads its part of the files.
    in_files = loop.gpu_mode == "fsdp"
    keepers: list[Any] = [callback for callback in loop.callbacks if hasattr(callback, "last_state")]
    answer: dict[str, Any] = {}
    if distributed.is_global_zero():
        try:
            state, why = _read_point(loop, resume_from)
        except Exception as error:
            distributed.broadcast_object({"error": f"{type(error).__name__}: {error}"})
            raise
        data = io.BytesIO()
        if state is not None and not in_files:
            torch.save(state, data)
        answer = {"why": why, "state": data.getvalue(), "places": [getattr(one, "place", "") for one in keepers]}
    answer = distributed.broadcast_object(answer)
    if distributed.is_global_zero():
        return state, answer["why"]
    if "error" in answer:
        raise CheckpointError(f"rank 0 could not resume with resume_from={resume_from!r}: {answer['error']}")
    for keeper, place in zip(keepers, answer["places"], strict=True):
        if place:
            keeper.place = place
    if in_files:
        return checkpoint_to_resume(loop, resume_from), answer["why"]
    if answer["state"]:
        state = torch.load(io.BytesIO(answer["state"]), map_location="cpu", weights_only=True)
    return state, answer["why"]


def checkpoint_to_resume(loop: LoopState, resume_from: Any) -> dict[str, Any] | None:
    """Return the state that ``fit(resume_from=...)`` names, checked against the model; ``None`` for a fresh start."""
    if (
        not isinstance(resume_from, (str, os.PathLike))
        or not isinstance(os.fspath(resume_from), str)
        or not resume_from
    ):
        raise ConfigurationError(
            f"resume_from={short(resume_from)}: must be 'last' (the newest checkpoint of the ModelCheckpoint in "
            "callbacks), the path or URL of a checkpoint as str or Path, or None for a fresh start."
        )
    whole = loop.gpu_mode != "fsdp"  # in fsdp, each rank reads its part
    if resume_from == "last":
        keepers: list[Any] = [callback for callback in loop.callbacks if hasattr(callback, "last_state")]
        if not keepers:
            raise ConfigurationError(
                "resume_from='last' needs a ModelCheckpoint in callbacks, to know which folder to search. "
                "Add the ModelCheckpoint of the first run, or pass a checkpoint's path."
            )
        state = keepers[0].last_state(whole=whole)
        if state is None:
            loop.report(f"resume_from='last': no checkpoint in {keepers[0].dirpath} yet. Training starts from scratch.")
    else:
        state = checkpoint.load(resume_from, whole=whole)
    if state is not None and not _callbacks_may_fit_model(loop):
        check_checkpoint(loop, state)
    return state


def _callbacks_may_fit_model(loop: LoopState) -> bool:
    """Return True if the user's callbacks may change the model before the checkpoint is loaded.

    Then the checkpoint is compared with the model after these hooks, and not before.
    """
    return any(
        overrides_of_user(callback, name)
        for callback in loop.callbacks
        for name in ("on_multiprocess_start", "on_train_begin")
    )


def check_checkpoint(loop: LoopState, state: dict[str, Any]) -> None:
    """Raise an error unless a checkpoint fits this loop's model and optimizers.

    Raises
    ------
    CheckpointError
        If it doesn't fit; the message names the difference.
    """
    missing = [key for key in ("model", "optimizers", "place", "ranks", "history") if key not in state]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {', '.join(missing)}, so fit did not write it. Pass one that fit wrote."
        )
    own = loop.model.state_dict()
    saved = state["model"]
    left_out = state.get("left_out", {})
    # A module may change the shapes of its buffers in load_state_dict, as in quantization-aware training.
    buffers = {name for name, _ in loop.model.named_buffers()}
    compared = {name: None if name in buffers else value for name, value in own.items()}
    wrong = described_differences(compared, saved, "checkpoint", left_out)
    if wrong and not _loads(loop.model, saved):
        compiled = any("_orig_mod." in name for name in {*own} ^ {*saved})
        raise CheckpointError(
            f"the checkpoint belongs to another model: {wrong}. Pass the model of the checkpoint's run, or start "
            "without resume_from. If a callback changed the model in that run, it must do so again in on_train_begin, "
            "where tl.resumed is True and tl.epoch is the epoch to resume in."
            + " Names with _orig_mod come from torch.compile(module); module.compile() keeps the names."
            * compiled
        )
    _check_left_out(own, left_out)
    optimizers = optimizers_of(loop.optimizer)
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    saved_kinds = [saved["type"] for saved in state["optimizers"]]
    if kinds != saved_kinds:
        raise CheckpointError(
            f"the checkpoint was made with {' and '.join(saved_kinds) or 'no optimizer'}, but the loop has "
            f"{' and '.join(kinds) or 'none'}. Pass the same optimizer."
        )
    # Groups that a callback added in training are added again; nothing changes before all checks.
    grow = add_missing_groups(loop, state.get("groups"), only_look=True)
    for optimizer, saved, fits in zip(optimizers, state["optimizers"], grow, strict=True):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        saved_sizes = [len(group["params"]) for group in saved_groups(saved)]
        # The parts of a state_dict of the user's own may be anything; its load_state_dict checks them.
        if sizes != saved_sizes and not fits and "param_groups" in saved["state"]:
            raise CheckpointError(
                f"the parameter groups of {type(optimizer).__name__} have {saved_sizes} parameters in the checkpoint, "
                f"but {sizes} in the loop. Create the optimizer with the same groups."
            )
    _in_own_order(loop, state)  # raises an error for other parameters


def _loads(model: nn.Module, saved: Mapping[str, Any]) -> bool:
    """Return True if a copy of the model loads the values, because its modules create what they load."""
    if any(map(is_sharded, (*model.parameters(), *saved.values()))) or any(
        isinstance(value, StoredTensor) for value in saved.values()
    ):
        return False
    try:
        loaded = copy.deepcopy(model)
        loaded.load_state_dict(saved)
    except Exception:  # of any module's own code; the error about the differences says more
        return False
    return not described_differences(loaded.state_dict(), saved, "checkpoint")


def _in_own_order(loop: LoopState, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the saved states of the optimizers, with the parameters of each group in the order of the loop's group.

    A script may have another order in each process, for example if it collects the parameters in sets.

    Raises
    ------
    CheckpointError
        If a group has other parameters.
    """
    optimizers, saved, groups = optimizers_of(loop.optimizer), state["optimizers"], state.get("groups")
    if groups is None:  # older checkpoints lack the names
        return list(saved)
    found = []
    groups = plain_group_names(groups)
    for optimizer, one, own, theirs in zip(optimizers, saved, group_names(loop), groups, strict=True):
        known = all(None not in group and len(set(group)) == len(group) for group in (*own, *theirs))
        if own == theirs or not known or list(map(len, own)) != list(map(len, theirs)):
            found.append(one)
            continue
        kind = type(optimizer).__name__
        for i, (mine, other) in enumerate(zip(own, theirs)):
            here, there = ([str(name) for name in a if name not in b] for a, b in ((mine, other), (other, mine)))
            if here:
                raise CheckpointError(
                    f"group {i} of {kind} has {described_names(here)}, but in the checkpoint it has "
                    f"{described_names(there)} instead. Create the optimizer with the same groups, in the same order."
                )
        contains_others = "inner" in one or "param_groups" not in one["state"]
        ordered = one if contains_others else in_order_of(one, own, theirs)
        if contains_others or _has_joint_state(optimizer, ordered["state"]):
            raise CheckpointError(
                f"the parameters of {kind} have another order than in the checkpoint, where {theirs[0][0]} is the "
                "first, and its state can't be put into another order. Create the optimizer with the same order."
            )
        found.append(ordered)
    return found


def _has_joint_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> bool:
    """Return True if a saved tensor has more elements than its parameter, as the flat gradients of LBFGS have."""
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    sizes = {key: p.numel() for key, p in zip(keys, parameters_of(optimizer), strict=True)}
    return any(
        math.prod(getattr(value, "shape", ())) > sizes.get(key, math.inf)
        for key, own in saved["state"].items()
        for value in (own.values() if isinstance(own, dict) else ())
    )


def described_differences(
    own: Mapping[str, Any], saved: Mapping[str, Any], of: str, left_out: Mapping[str, Any] | None = None
) -> str:
    """Describe how names and shapes of a model's tensors differ from saved tensors; return '' if they agree."""
    wrong = [f"{key} is missing in the {of}" for key in own if key not in saved and key not in (left_out or {})]
    wrong += [f"{key} is not in the model" for key in saved if key not in own]
    for key, value in own.items():
        if key not in saved or not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
            continue
        if value.shape != saved[key].shape:
            wrong.append(
                f"{key} has shape {tuple(value.shape)} in the model, but {tuple(saved[key].shape)} in the {of}"
            )
    more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
    return "; ".join(wrong[:5]) + more


def _check_left_out(own: dict[str, Any], left_out: dict[str, Any]) -> None:
    """Raise an error if tensors that the checkpoint leaves out have other values than in the checkpoint's run."""
    if not left_out:
        return

    now = bits_of(own, [name for name in left_out if name in own])
    wrong = [name for name, (shape, _) in left_out.items() if name not in now or now[name][0] != shape]
    wrong += changed(left_out, now)
    if wrong:
        raise CheckpointError(
            f"the checkpoint does not contain {wrong[0]}, and this model's values of it are not those of the run that "
            f"wrote the checkpoint (differing tensors: {len(wrong)}). Before fit, load the values that the "
            "checkpoint's run began with."
        )


def load_checkpoint_state(run: TrainingRun, state: dict[str, Any], *, quiet: bool = False) -> None:
    """Resume from a :func:`checkpoint_state`, with any number of ranks. All ranks call it, with the same state.

    With ``quiet``, values that differ between the script and the state are not printed.
    """
    loop = run.loop
    state = continued(loop, state)
    check_checkpoint(loop, state)
    place, ranks = state["place"], state["ranks"]
    _check_own_states(run, ranks)
    if not run.hooks.on_resume:  # otherwise later: the hook may replace the loader
        run.take_data(place["epoch"])
        _steps_here(run, place)
    criterion, wrong = loop.criterion, _about_criterion(loop, state)
    if wrong and not run.hooks.on_resume:
        raise CheckpointError(wrong)
    # All checks have passed: from here on the loop changes.
    if loop.is_global_zero and not quiet and (text := _about_other_values(run, state)):
        loop.report(text, logging.WARNING)
    _load_parts(loop, state)
    if run.place.scaler.is_enabled() and state["scaler"]:
        run.place.scaler.load_state_dict(state["scaler"])
    # on_train_begin has logged these again
    run.recorder.drop({*state["history"]["values"], *(name for saved in ranks for name in saved["metrics"])})
    run.history_epoch = place["epoch"]
    run.start_epoch, run.start_iteration = place["start_epoch"], place["start_iteration"]
    run.epoch_batches = place["epoch_batches"]
    run.ended = not place["epoch_steps"] and bool(end_that_holds(loop, state))
    load_carried_state(loop.model, [saved.get("carried", {}) for saved in ranks], loop.rank, loop.world_size)
    same_ranks = len(ranks) == loop.world_size
    put_own_optimizer_states(loop, [saved.get("optimizers") for saved in ranks])
    _load_rank_states(loop, ranks, same_ranks=same_ranks)
    for hook in run.hooks.on_resume:
        hook()
    if loop.criterion is not criterion:
        _report_other_criterion(loop, state)
    elif wrong:
        raise CheckpointError(wrong)
    run.take_data(place["epoch"])
    run.skip_steps = _steps_here(run, place)
    if place.get("cut"):
        _skip_cut(run, place)
    loop.progress.epoch_ends = place.get("epoch_ends", False)
    mine = ranks[loop.rank if same_ranks else 0]
    last = mine.get("last_loss")  # older checkpoints lack this entry
    loop.progress.last_loss = None if last is None else torch.tensor(last[0], dtype=last[1], device="cpu")
    _load_metrics(run, ranks)
    if same_ranks:
        rng.restore(mine["rng"])
        set_states(_generators(loop), mine.get("generators", {}))  # older checkpoints lack this entry
    else:
        rng.seed_all(rng.derive_seed(place["seed"] or 0, "resumed", loop.global_step, loop.rank))
    if "generators" in state:  # missing in older checkpoints
        set_generator_states((loop.validation_loader, loop.test_loader), state["generators"])
    run.feed.load_state_dict(mine["feed"])
    whole = loop.progress.epoch_ends or run.epoch_batches == run.feed.num_batches
    if run.skip_steps and not whole and loop.is_global_zero:
        _warn_of_begun_epoch(loop)


def _warn_of_begun_epoch(loop: LoopState) -> None:
    """Warn of the user's ``on_epoch_begin``, which is not called for an epoch that is resumed in the middle."""
    skipped = {
        type(callback).__name__: None
        for callback in loop.callbacks
        if overrides_of_user(callback, "on_epoch_begin")
        and not any(overrides_of_user(callback, name) for name in ("on_resume", *_OWN_STATE))
    }
    if skipped:
        warn_or_print(
            f"epoch {loop.epoch + 1} is resumed in the middle, so that on_epoch_begin of "
            f"{described_names(list(skipped))} is not called for it. If the hook sets something for the epoch (a rate, "
            "a flag, a loader, a criterion), the rest of the epoch is trained without it: write on_resume = "
            "on_epoch_begin in the class. If it sets nothing, an on_resume that does nothing ends this warning."
        )


def _load_metrics(run: TrainingRun, ranks: list[dict[str, Any]]) -> None:
    """Continue the logs of an epoch from its beginning."""
    loop = run.loop
    if len(ranks) == loop.world_size:
        run.recorder.load_state_dict(ranks[loop.rank]["metrics"])
    elif loop.rank == 0:  # sums over ranks don't depend on which rank has which part
        own, *others = (saved["metrics"] for saved in ranks)
        run.recorder.load_state_dict(own, others)


# -- an epoch that the end of a fit has cut short ----------------------------------------------------------------------


def continues_in(loop: LoopState, state: dict[str, Any]) -> bool:
    """Return True if a checkpoint was written at the end of a cut epoch, and this ``fit`` goes further in it."""
    cut = state.get("cut")
    if cut is None:
        return False
    place = cut["place"]
    if loop.num_epochs:
        return loop.num_epochs > place["epoch"] - place["start_epoch"]
    return loop.num_iterations > place["total_iteration_idx"] - place["start_iteration"]


def continued(loop: LoopState, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state in which the cut epoch continues, if this ``fit`` goes further in it; else ``state`` itself."""
    if not continues_in(loop, state):
        return state
    return _with_states(state, state["cut"])


def _with_states(state: dict[str, Any], cut: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the place and the states that were noted before the end of its epoch."""
    before = [_before_end(now, kept) for now, kept in zip(state["callbacks"], cut["callbacks"], strict=True)]
    # If a hook at the end of the epoch has added a group, the numbers of groups differ, and nothing is replaced.
    optimizers = [
        with_group_settings(saved, groups) for saved, groups in zip(state["optimizers"], cut["groups"], strict=True)
    ]
    ranks = [{**saved, **own} for saved, own in zip(state["ranks"], cut["ranks"], strict=True)]
    place = {**cut["place"], "cut": cut["place"]["epoch_steps"] > 0}
    merged = {**state, "place": place, "callbacks": before, "optimizers": optimizers, "ranks": ranks}
    merged.pop("cut", None)
    return merged


def _before_end(now: dict[str, Any], kept: dict[str, Any] | None) -> dict[str, Any]:
    """Return a callback's state before the end of the epoch, with the weights that training continues from.

    At the end of training, an average of the weights replaces them in the model, and keeps them as ``trained``.
    """
    if kept is None or not now.get("state", {}).get("trained"):
        return kept or now
    return {**kept, "state": {**kept["state"], "trained": now["state"]["trained"]}}


def held_before_end(run: TrainingRun) -> dict[str, Any]:
    """Return all that a checkpoint of this moment needs besides tensors, for :func:`held_state`. Collective."""
    ranks = states_of_ranks(run, check=False)
    return {"place": _place(run), "ranks": ranks, **states_before_cut(run)}


def held_state(run: TrainingRun, held: dict[str, Any]) -> dict[str, Any] | None:
    """Return the checkpoint's state of the moment of :func:`held_before_end`, on rank 0. Not collective.

    No step may have been taken since.
    """
    state = whole_state(run, held["ranks"])
    return None if state is None else _with_states(state, {**held, "ranks": state["ranks"]})


def load_cut(run: TrainingRun, cut: dict[str, Any]) -> bool:
    """Continue the epoch that the previous ``fit`` has cut short, at its next batch.

    Return False if the loader has changed, so that there is no such batch. All ranks call it, with the same ``cut``.
    """
    loop, place, ranks = run.loop, cut["place"], cut["ranks"]
    if not _skip_cut(run, place):
        return False
    same_ranks = len(ranks) == loop.world_size
    if "carried" in ranks[0]:
        load_carried_state(loop.model, [saved["carried"] for saved in ranks], loop.rank, loop.world_size)
    _load_metrics(run, ranks)
    mine = ranks[loop.rank if same_ranks else 0]
    if run.seed is not None:  # without a seed, the caller's generators go on, as in a hand-written loop
        if same_ranks:
            rng.restore(mine["rng"])
        else:
            rng.seed_all(rng.derive_seed(run.seed, "resumed", loop.global_step, loop.rank))
    run.feed.load_state_dict(mine["feed"])
    return True


def _skip_cut(run: TrainingRun, place: dict[str, Any]) -> bool:
    """Skip the batches of a cut epoch, whose last step may be shorter; return False if no batch begins there."""
    feed, batches = run.feed, place["epoch_batches"]
    before, now = place["global_batch_size"], feed.global_batch_size
    lengths = place["num_samples"], feed.num_samples
    if None not in lengths and lengths[0] != lengths[1]:
        return False
    if None not in (before, now):
        if before * batches % now:
            return False
        batches = before * batches // now
    run.skip_steps, run.skip_batches, run.epoch_batches = place["epoch_steps"], batches, batches
    return True


def take_up_finished(loop: LoopState, state: dict[str, Any], why: str) -> None:
    """Load the state of a finished training run in the calling process; ``why`` is from :func:`resume_point`."""
    again = loop.global_step == state["place"]["global_step"] > 0
    if wrong := _about_criterion(loop, state):
        warn(f"tl.criterion is not the one with which the training ended: {wrong}")
    _load_parts(loop, state)
    # A callback may have replaced the model's weights by those with which training would continue.
    load_model(loop.model, state)
    load_carried_state(loop.model, [saved.get("carried", {}) for saved in state["ranks"]], 0, len(state["ranks"]))
    loop.scaler_state = state["scaler"]
    cut = state.get("cut")
    loop.note(cut=cut and {key: cut[key] for key in ("place", "ranks", "loop_seed")})
    loop.ends = end_that_holds(loop, state)
    loop.end_requested = bool(loop.ends)
    here = rank_from_launcher()
    if here is not None and has_ranks(loop.gpu_mode):
        loop.process = here
        keepers: list[Any] = [callback for callback in loop.callbacks if hasattr(callback, "share_paths")]
        _among_ranks(loop, lambda stop: [keeper.share_paths() for keeper in keepers])
    if here is None or here.rank == 0:
        loop.report(f"Nothing left to do: {why}")
        if again:
            warn(
                f"fit(resume_from=...) trained nothing: this loop has already trained to step {loop.global_step}, "
                "where the checkpoint was written. num_epochs and num_iterations count from the beginning of the call "
                "that wrote it. To train further in this process, leave resume_from out."
            )
    remove_dead()  # folders of a killed training; normally a rank removes them, but none is started here


def _load_parts(loop: LoopState, state: dict[str, Any]) -> None:
    """Load the loop's own parts, whether the loop is running or not."""
    load_model(loop.model, state)
    criterion = criterion_module(loop.criterion)
    if criterion is not None and state["criterion"] and not _about_criterion(loop, state):
        criterion.load_state_dict({**_criterion_state(loop, of_model=True), **state["criterion"]})
    set_flags(loop.model, state.get("flags", {}))
    add_missing_groups(loop, state.get("groups"))
    before = {name: value.dtype for name, value in state["model"].items() if hasattr(value, "dtype")}
    # A state of a model whose dtype has changed since follows it.
    recast = {id(p) for name, p in loop.model.named_parameters() if before.get(plain_name(name), p.dtype) != p.dtype}
    for optimizer, saved in zip(optimizers_of(loop.optimizer), _in_own_order(loop, state), strict=True):
        load_optimizer_state_dict(optimizer, saved, lambda p: id(p) in recast)
        # torch's load_state_dict keeps the tensors that it receives, which have the shape of the full parameter.
        for one in (optimizer, *inner_optimizers(optimizer).values()):
            _fit_state(one)
    loop.history.load_state_dict(state["history"])
    _load_callbacks(loop, whole_of(state["callbacks"]), "load_state_dict")
    for name in COUNTERS:
        setattr(loop.progress, name, state["place"][name])


def _fit_state(optimizer: torch.optim.Optimizer) -> None:
    """Replace full or not yet read state of the optimizer by this rank's shard."""
    for p, own in optimizer.state.items():
        for key, value in own.items() if isinstance(own, dict) else ():
            if isinstance(value, StoredTensor) or (isinstance(value, torch.Tensor) and value.ndim):
                own[key] = fitted(value, p if value.shape == p.shape else None)


def _check_data(feed: Any, place: dict[str, Any]) -> None:
    before, now = place["num_samples"], feed.num_samples
    if place["epoch_steps"] and before is not None and now is not None and before != now:
        raise CheckpointError(
            f"the checkpoint was written in the middle of an epoch of {before} training samples, but the loader has "
            f"{now} now, so the rest of that epoch can't be read. Pass the same dataset, assign it in a callback's "
            "on_resume, or resume from a checkpoint at an epoch's end, where the dataset may have another length."
        )


def _about_criterion(loop: LoopState, state: dict[str, Any]) -> str:
    """Return an error's text if a checkpoint has other tensors of a criterion than the loop's, else ''."""
    criterion = criterion_module(loop.criterion)
    if criterion is None or not state["criterion"]:
        return ""
    # As for models: a module may change the shapes of its buffers in load_state_dict.
    buffers = {name for name, _ in criterion.named_buffers()}
    own = {name: None if name in buffers else value for name, value in criterion.state_dict().items()}
    saved = {**_criterion_state(loop, of_model=True), **state["criterion"]}
    wrong = described_differences(own, saved, "checkpoint")
    return wrong and (
        f"the checkpoint belongs to another criterion: {wrong.replace('the model', 'tl.criterion')}. If a callback "
        "assigned tl.criterion in the checkpoint's run, it must do so again: in on_resume, or in on_train_begin if the "
        "training changes its tensors. Otherwise, pass the criterion of the checkpoint's run. To train with another "
        "criterion, load the model's weights (trainloop.checkpoint.load_weights), and start without resume_from."
    )


def _report_other_criterion(loop: LoopState, state: dict[str, Any]) -> None:
    """Report that ``on_resume`` has assigned a criterion with other values than the checkpoint's."""
    own = _criterion_state(loop, of_model=False)
    other = [name for name, value in state["criterion"].items() if name in own and not torch.equal(own[name], value)]
    if other and loop.is_global_zero:
        loop.report(
            f"on_resume has assigned a criterion with other values than in the checkpoint: {described_names(other)}. "
            "If the training changes these values, assign the criterion in on_train_begin.",
            logging.WARNING,
        )


def _about_other_values(run: TrainingRun, state: dict[str, Any]) -> str:
    """Return a line that names the values that differ between script and checkpoint; empty if none differs."""
    loop, place, found = run.loop, state["place"], []

    def note(what: str, used: Any, other: Any, *, of_script: bool) -> None:
        if None not in (used, other) and used != other:
            used_of, other_of = ("script", "checkpoint") if of_script else ("checkpoint", "script")
            found.append(f"{what}={used} from the {used_of} (the {other_of} has {other})")

    for optimizer, saved in zip(optimizers_of(loop.optimizer), state["optimizers"], strict=True):
        for own, theirs in zip(optimizer.param_groups, saved_groups(saved), strict=False):
            for name in ("lr", "weight_decay"):
                # A scheduler changes the rate itself, and records the initial one.
                now, before = (group.get(f"initial_{name}", group.get(name, 0.0)) for group in (own, theirs))
                note(f"{type(optimizer).__name__}'s {name}", f"{float(before):g}", f"{float(now):g}", of_script=False)
    for callback, entry in matched_entries(loop.callbacks, state["callbacks"])[0]:
        if hasattr(callback, "other_settings"):
            for what, before, now in callback.other_settings(entry["state"]):
                note(what, before, now, of_script=False)
    flags = state.get("flags", {}).get("requires_grad", {})
    now = training_flags(loop.model)["requires_grad"]
    other = [name for name, flag in now.items() if flags.get(name, flag) != flag]
    if other:
        found.append(f"requires_grad of {described_names(other)} from the checkpoint (the script has other values)")
    note("seed", place["seed"], loop.seed, of_script=False)
    note("grad_accumulation", loop.grad_accumulation, place["grad_accumulation"], of_script=True)
    note("global batch size", run.feed.global_batch_size, place["global_batch_size"], of_script=True)
    return f"Resumed with {', '.join(dict.fromkeys(found))}." if found else ""


def _steps_here(run: TrainingRun, place: dict[str, Any]) -> int:
    """Return the number of this run's steps that have the samples of the checkpoint's steps in its epoch."""
    _check_data(run.feed, place)
    steps, global_batch_size = place["epoch_steps"], run.feed.global_batch_size
    grad_accumulation = run.loop.grad_accumulation
    if place.get("cut"):
        samples = (place["global_batch_size"] or 0) * place["epoch_batches"]
        if global_batch_size and samples % global_batch_size:
            raise CheckpointError(
                f"the checkpoint was written after {samples} samples of its epoch, but this run's batches have "
                f"{global_batch_size} samples over all ranks, so no batch begins at that point. Choose batch_size x "
                "ranks as before, or resume from a checkpoint at an epoch's end."
            )
        return steps
    if not steps or None in (place["global_batch_size"], global_batch_size):
        return steps
    before = place["global_batch_size"] * place["grad_accumulation"]
    now = global_batch_size * grad_accumulation
    if before * steps % now:
        raise CheckpointError(
            f"the checkpoint was written after {steps} steps of {before} samples in its epoch, but this run's steps "
            f"have {now} samples, so no step begins at that point. Choose batch_size x ranks x grad_accumulation as "
            "before, or resume from a checkpoint at an epoch's end."
        )
    return before * steps // now


def _load_callbacks(loop: LoopState, saved: list[dict[str, Any]], method: str) -> None:
    """Load each callback's state by a method of it."""
    pairs, left = matched_entries(loop.callbacks, saved)
    for callback, entry in pairs:
        getattr(callback, method)(entry["state"])
    if not loop.is_global_zero:  # one rank's warnings are enough
        return
    numbers = Counter((type(callback).__name__, callback.callback_name) for callback in loop.callbacks)
    saved_numbers = Counter((entry["type"], entry["name"]) for entry in saved if entry["state"])
    for (kind, name), number in saved_numbers.items():
        here = numbers[kind, name]
        if here and here != number and max(here, number) > 1:
            warn(
                f"the checkpoint has the states of {number} callbacks {name!r} ({kind}), but this fit has {here}. They "
                "are matched in order, so a callback may have the state of another. Pass the same callbacks in the "
                "same order, or give those of one class different names (callback_name)."
            )
    unused = [entry["name"] for entry in left if entry["state"]]
    if unused:
        warn(f"the checkpoint has state of callbacks not in this fit: {', '.join(unused)}. That state is ignored.")
