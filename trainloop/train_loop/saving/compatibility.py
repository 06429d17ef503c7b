"""Check that a checkpoint fits the model, the optimizers, the criterion and the data of a loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainloop._support.user_line import described_names
from trainloop.checkpoint.file import bits_of, changed
from trainloop.checkpoint.sharded import StoredTensor, empty_buffers
from trainloop.errors import CheckpointError
from trainloop.optim.optimizers import optimizers_of, parameters_of
from trainloop.optim.parameters import criterion_module
from trainloop.optim.states import in_order_of, saved_groups
from trainloop.parallel.sharded.shards import is_sharded
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.progress.running import TrainingRun
from trainloop.train_loop.saving.collect import criterion_state
from trainloop.train_loop.saving.names import add_missing_groups, group_names, plain_group_names


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
    compared |= dict.fromkeys(empty_buffers(loop.model, saved))
    wrong = described_differences(compared, saved, "checkpoint", left_out)
    if wrong and not _loads(loop.model, saved):
        compiled = any("_orig_mod." in name for name in {*own} ^ {*saved})
        raise CheckpointError(
            f"the checkpoint belongs to another model: {wrong}. Pass the model of the checkpoint's run, or start "
            "without resume_from. If a callback changed the model in that run, it must do so again in on_train_begin, "
            "where tl.resumed is True and tl.epoch is the epoch to resume in. If the first forward pass creates a "
            "part, call the model once before fit."
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
            f"{' and '.join(kinds) or 'none'}. Pass the same optimizer. If a callback replaced it, it must do "
            "so again in on_train_begin, where tl.resumed is True and tl.epoch is the epoch to resume in."
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
    in_own_order(loop, state)  # raises an error for other parameters


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


def in_own_order(loop: LoopState, state: Mapping[str, Any]) -> list[dict[str, Any]]:
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


def check_own_states(run: TrainingRun, ranks: list[dict[str, Any]]) -> None:
    if any(saved.get("optimizers") for saved in ranks) and (
        not run.place.collective or len(ranks) != run.loop.world_size
    ):
        raise CheckpointError(
            f"the checkpoint has the optimizer's state of shards on {len(ranks)} ranks of fsdp, which is not shaped "
            "like the parameters (as of factored optimizers), so it can't be divided in another way. Resume in fsdp "
            f"with {len(ranks)} ranks."
        )


def about_criterion(loop: LoopState, state: dict[str, Any]) -> str:
    """Return an error's text if a checkpoint has other tensors of a criterion than the loop's, else ''."""
    criterion = criterion_module(loop.criterion)
    if criterion is None or not state["criterion"]:
        return ""
    saved = {**criterion_state(loop, of_model=True), **state["criterion"]}
    own = {**criterion.state_dict(), **dict.fromkeys(empty_buffers(criterion, saved))}
    wrong = described_differences(own, saved, "checkpoint")
    if not wrong or _loads(criterion, saved):  # as for models, a module may change the shapes of its buffers
        return ""
    return (
        f"the checkpoint belongs to another criterion: {wrong.replace('the model', 'tl.criterion')}. If a callback "
        "assigned tl.criterion in the checkpoint's run, it must do so again: in on_resume, or in on_train_begin if the "
        "training changes its tensors. Otherwise, pass the criterion of the checkpoint's run. To train with another "
        "criterion, load the model's weights (trainloop.checkpoint.load_weights), and start without resume_from."
    )


def _is_whole(place: dict[str, Any]) -> bool:
    """Return True if all batches of the epoch at a place had been read, so that another length does not matter."""
    return place["epoch_batches"] == place.get("num_batches")


def _check_data(feed: Any, place: dict[str, Any]) -> None:
    before, now = place["num_samples"], feed.num_samples
    if place["epoch_steps"] and not _is_whole(place) and None not in (before, now) and before != now:
        raise CheckpointError(
            f"the checkpoint was written in the middle of an epoch of {before} training samples, but the loader has "
            f"{now} now, so the rest of that epoch can't be read. Pass the same dataset, restore it in a callback's "
            "on_resume or load_state_dict, or resume from a checkpoint at an epoch's end, where the dataset may have "
            "another length."
        )


def _sizes(feed: Any, place: dict[str, Any]) -> tuple[int, int, str]:
    """Return the sizes of the micro-batches of a place's run and of this feed, over all ranks, and their unit."""
    before, now = place["global_batch_size"], feed.global_batch_size
    if None not in (before, now):
        return before, now, "samples"
    # Batches of a sampler of the user's own, for example; older checkpoints lack their number.
    return place.get("loader_batches", feed.loader_batches), feed.loader_batches, "batches"


def about_length(feed: Any, place: dict[str, Any]) -> str:
    """Return a warning's text if an epoch of another length than the feed's had begun at a place, else ''.

    Only lengths in samples are known exactly, and :func:`done_here` compares these.
    """
    before, now, unit = _sizes(feed, place)
    theirs, own = place.get("num_batches"), feed.num_batches
    counted = None not in (place["num_samples"], feed.num_samples)
    if counted or theirs is None or own is None or not place["epoch_batches"] or _is_whole(place):
        return ""
    if before * theirs > now * (own - 1) and now * own > before * (theirs - 1):
        return ""
    return (
        f"train_loader has up to {now * own} {unit} in an epoch, but had up to {before * theirs} in the one that was "
        f"begun when the checkpoint was written. This run continues after {before * place['epoch_batches']} {unit}: if "
        "batches now have other samples, some samples of this epoch are read twice, or not at all. Resume with the "
        "same batches, or from a checkpoint at an epoch's end."
    )


def batches_here(feed: Any, place: dict[str, Any]) -> int | None:
    """Return how many of this feed's batches have what was read of an epoch at a place; None if none begins there."""
    if feed.num_batches is not None and _is_whole(place):
        whole: int = feed.num_batches  # all were read, and the last ones may be smaller
        return whole
    before, now, _ = _sizes(feed, place)
    done: int = before * place["epoch_batches"]
    return None if done % now else done // now


def done_here(run: TrainingRun, place: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of this run's steps and batches that have the samples of the checkpoint's in its epoch."""
    feed, steps, accumulation = run.feed, place["epoch_steps"], run.loop.grad_accumulation
    _check_data(feed, place)
    batches = batches_here(feed, place)
    # After a step of fewer batches, at the end of an earlier fit, the steps of the same run don't begin at multiples.
    other = accumulation != place["grad_accumulation"] or batches != place["epoch_batches"]
    if batches is not None and (place.get("cut") or not other):
        return steps, batches
    if batches is None or (batches % accumulation and batches != feed.num_batches):
        before, now, unit = _sizes(feed, place)
        raise CheckpointError(
            f"the checkpoint was written after {before * place['epoch_batches']} {unit} of its epoch, but this run's "
            f"steps have {now * accumulation} {unit} over all ranks, so no step begins at that point. Choose "
            "batch_size x ranks x grad_accumulation as before, or resume from a checkpoint at an epoch's end."
        )
    return -(-batches // accumulation), batches
