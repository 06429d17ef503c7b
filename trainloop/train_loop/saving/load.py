"""Load a checkpoint into a training run, or into a loop with nothing left to do; warn of hooks that a resume skips."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainloop._launch import rank_from_launcher
from trainloop._support import rng
from trainloop._support.carried import load_carried_state
from trainloop._support.scratch import remove_dead
from trainloop._support.user_line import described_names, warn, warn_or_print
from trainloop.callbacks.base import identity_of, matched_entries, overrides_of_user
from trainloop.callbacks.weights.torch_schedulers import OF_SCHEDULES
from trainloop.callbacks.weights.train_schedule import AbstractScheduler
from trainloop.checkpoint.file import bits_of, changed
from trainloop.checkpoint.sharded import (
    StoredTensor,
    empty_buffers,
    fill_empty_buffers,
    fitted,
    load_model,
    load_parameters_beside,
    whole_of,
)
from trainloop.data.loader.generators import set_generator_states, set_states
from trainloop.devices import has_ranks
from trainloop.errors import CheckpointError
from trainloop.optim.optimizers import all_optimizers, inner_optimizers, optimizers_of, parameters_of
from trainloop.optim.parameters import criterion_module, trained_modules
from trainloop.optim.states import load_optimizer_state_dict, saved_groups
from trainloop.parallel.sharded.shards import map_items, map_tensors, state_like
from trainloop.train_loop.progress.ending import end_that_holds
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.progress.running import TrainingRun
from trainloop.train_loop.saving.beside import warn_of_lost
from trainloop.train_loop.saving.collect import COUNTERS, criterion_state, generators_of
from trainloop.train_loop.saving.compatibility import (
    about_criterion,
    about_length,
    check_checkpoint,
    check_own_states,
    done_here,
    in_own_order,
)
from trainloop.train_loop.saving.cut_epochs import continued, load_metrics
from trainloop.train_loop.saving.names import FLAGS, add_missing_groups, plain_name, set_flags, training_flags
from trainloop.train_loop.saving.resume_point import among_ranks

_OWN_STATE = ("load_state_dict", "load_rank_state_dict")


def load_checkpoint_state(run: TrainingRun, state: dict[str, Any], *, quiet: bool = False) -> None:
    """Resume from a :func:`checkpoint_state`, with any number of ranks. All ranks call it, with the same state.

    With ``quiet``, values that differ between the script and the state are not printed.
    """
    loop = run.loop
    state = continued(loop, state)
    check_checkpoint(loop, state)
    place, ranks = state["place"], state["ranks"]
    check_own_states(run, ranks)
    if not _may_restore_data(run):  # otherwise later
        run.take_data(place["epoch"])
        done_here(run, place)
    criterion, wrong = loop.criterion, about_criterion(loop, state)
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
    run.skip_steps, run.skip_batches = done_here(run, place)
    run.epoch_batches = run.skip_batches
    loop.progress.epoch_ends = place.get("epoch_ends", False)
    mine = ranks[loop.rank if same_ranks else 0]
    load_metrics(run, ranks)
    if same_ranks:
        rng.restore(mine["rng"])
    else:
        rng.seed_all(rng.derive_seed(place["seed"] or 0, "resumed", loop.global_step, loop.rank))
    _load_own(loop, state, mine, same_ranks=same_ranks)
    run.feed.load_state_dict(mine["feed"])
    warn_of_lost(loop, state.get("beside", {}), place["epoch"])  # older checkpoints lack this entry
    whole = loop.progress.epoch_ends or run.epoch_batches == run.feed.num_batches
    if run.skip_steps and not whole and loop.is_global_zero:
        _warn_of_begun_epoch(loop)
    if loop.is_global_zero and (text := about_length(run.feed, place)):
        warn(text)


def _may_restore_data(run: TrainingRun) -> bool:
    """Return True if callbacks may replace the loader, or change its dataset, when they resume."""
    with_state = (overrides_of_user(callback, name) for callback in run.loop.callbacks for name in _OWN_STATE)
    return bool(run.hooks.on_resume) or any(with_state)


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


def take_up_finished(loop: LoopState, state: dict[str, Any], why: str) -> None:
    """Load the state of a finished training run in the calling process; ``why`` is from :func:`resume_point`."""
    again = loop.global_step == state["place"]["global_step"] > 0
    beside = dict(state.get("beside", {}))
    if wrong := about_criterion(loop, state):
        beside.pop("tl.criterion", None)
        warn(f"tl.criterion is not the one with which the training ended: {wrong}")
    _load_finished(loop, state)
    # A callback may have replaced the model's weights by those with which training would continue.
    load_model(loop.model, state)
    load_carried_state(loop.model, [saved.get("carried", {}) for saved in state["ranks"]], 0, len(state["ranks"]))
    loop.scaler_state = state["scaler"]
    # Another fit must begin as it would after the training, which returns rank 0's values.
    ranks, mine = state["ranks"], state["ranks"][0]
    own = [saved.get("optimizers") for saved in ranks]
    loop.note(own_optimizer_states=own if any(own) else [])
    _load_rank_states(loop, ranks, same_ranks=True)
    keep_rank_states(loop, [saved.get("callbacks", []) for saved in ranks])
    _load_own(loop, state, mine, same_ranks=True)
    set_generator_states([loop.train_loader], [mine["feed"]["generators"]])
    if loop.seed is None and not has_ranks(loop.gpu_mode):  # other runs leave the caller's generators as they are
        rng.restore(mine["rng"])
    warn_of_lost(loop, beside, state["place"]["epoch"], trains=False)
    cut = state.get("cut")
    loop.note(cut=cut and {key: cut[key] for key in ("place", "ranks", "loop_seed")})
    loop.ends = end_that_holds(loop, state)
    loop.end_requested = bool(loop.ends)
    here = rank_from_launcher()
    if here is not None and has_ranks(loop.gpu_mode):
        loop.process = here
        keepers: list[Any] = [callback for callback in loop.callbacks if hasattr(callback, "share_paths")]
        among_ranks(loop, lambda stop: [keeper.share_paths() for keeper in keepers])
    if here is None or here.rank == 0:
        loop.report(f"Nothing left to do: {why}")
        if again:
            warn(
                f"fit(resume_from=...) trained nothing: this loop has already trained to step {loop.global_step}, "
                "where the checkpoint was written. num_epochs and num_iterations count from the beginning of the call "
                "that wrote it. To train further in this process, leave resume_from out."
            )
    remove_dead()  # folders of a killed training; normally a rank removes them, but none is started here


def _load_finished(loop: LoopState, state: dict[str, Any]) -> None:
    """Load the loop's own parts. If that fails, first call the hooks that prepare the loop where a run resumes.

    They change the structure of the model, or make what a callback loads its state into.
    """
    try:
        check_checkpoint(loop, state)
        _load_parts(loop, state)
        return
    except Exception:
        preparing = [callback for callback in loop.callbacks if overrides_of_user(callback, "on_train_begin")]
        if not preparing:
            raise
    before = {"progress": replace(loop.progress), "resumed": loop.resumed}
    loop.note(resumed=True)
    for name in COUNTERS:
        setattr(loop.progress, name, state["place"][name])
    try:
        for callback in sorted(preparing, key=lambda one: one.execution_order):
            callback.on_train_begin()
        check_checkpoint(loop, state)
        _load_parts(loop, state)
    except Exception:
        loop.note(**before)
        raise


def _load_own(loop: LoopState, state: dict[str, Any], mine: dict[str, Any], *, same_ranks: bool) -> None:
    """Load the last loss and the states of generators outside of the training loader, from a rank's state.

    Older checkpoints lack each of these entries.
    """
    last = mine.get("last_loss")
    loop.progress.last_loss = None if last is None else torch.tensor(last[0], dtype=last[1], device="cpu")
    if same_ranks:
        set_states(generators_of(loop), mine.get("generators", {}))
    if "generators" in state:
        set_generator_states((loop.validation_loader, loop.test_loader), state["generators"])


def _load_parts(loop: LoopState, state: dict[str, Any]) -> None:
    """Load the loop's own parts, whether the loop is running or not."""
    load_model(loop.model, state)
    set_flags(loop.model, state.get("flags", {}))
    recast = _converted(loop.model, state["model"])
    criterion = criterion_module(loop.criterion)
    if criterion is not None and not about_criterion(loop, state):
        if state["criterion"]:
            fill_empty_buffers(criterion, state["criterion"], loop.model.device)
            criterion.load_state_dict({**criterion_state(loop, of_model=True), **state["criterion"]})
        set_flags(criterion, state.get("criterion_flags", {}))  # older checkpoints lack this entry
        recast |= _converted(criterion, state["criterion"])
    add_missing_groups(loop, state.get("groups"))
    of_schedules = _settings_of_other_schedules(loop, state)
    for optimizer, saved in zip(optimizers_of(loop.optimizer), in_own_order(loop, state), strict=True):
        load_optimizer_state_dict(optimizer, saved, lambda p: id(p) in recast)
        # torch's load_state_dict keeps the tensors that it receives, which have the shape of the full parameter.
        for one in (optimizer, *inner_optimizers(optimizer).values()):
            _fit_state(one)
    text = load_parameters_beside(loop, state)
    if text and loop.is_global_zero:
        warn_or_print(text)
    for optimizer, groups in of_schedules:
        for group, own in zip(optimizer.param_groups, groups, strict=False):
            group.update(own)
    loop.history.load_state_dict(state["history"])
    _load_callbacks(loop, whole_of(state["callbacks"]), "load_state_dict")
    for name in COUNTERS:
        setattr(loop.progress, name, state["place"][name])


def _settings_of_other_schedules(
    loop: LoopState, state: dict[str, Any]
) -> list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]]:
    """Return what schedules keep in the groups of their optimizers, if the checkpoint has schedules of other classes.

    These schedules begin again, with their own settings.
    """
    pairs = matched_entries(loop.callbacks, whole_of(state["callbacks"]))[0]
    others = [one for one, entry in pairs if isinstance(one, AbstractScheduler) and not one.fits(entry["state"])]
    optimizers = [one.scheduler.optimizer for one in others if hasattr(one.scheduler, "optimizer")]
    return [
        (one, [{key: group[key] for key in OF_SCHEDULES if key in group} for group in one.param_groups])
        for one in optimizers
    ]


def _converted(module: nn.Module, saved: Mapping[str, Any]) -> set[int]:
    """Return the ids of parameters whose dtype has changed since they were saved; an optimizer's state follows them."""
    before = {name: value.dtype for name, value in saved.items() if hasattr(value, "dtype")}
    return {id(p) for name, p in module.named_parameters() if before.get(plain_name(name), p.dtype) != p.dtype}


def _fit_state(optimizer: torch.optim.Optimizer) -> None:
    """Replace full or not yet read state of the optimizer by this rank's shard."""
    for p, own in optimizer.state.items():
        for key, value in own.items() if isinstance(own, dict) else ():
            own[key] = _placed(value, p)


def _placed(value: Any, p: Any) -> Any:
    if isinstance(value, StoredTensor):
        value = fitted(value, p if value.shape == getattr(p, "shape", None) else None)  # p may be a name
    if isinstance(value, torch.Tensor):
        return state_like(p, value)
    return map_items(value, lambda _, item: _placed(item, p))


def put_own_optimizer_states(loop: LoopState, everyone: list[Any]) -> None:
    """Put the rank's entry of the :func:`own_optimizer_states` of all ranks into the optimizers."""
    if not any(everyone):
        return
    for optimizer, own in zip(all_optimizers(loop.optimizer), everyone[loop.rank], strict=True):
        parameters = parameters_of(optimizer)
        for i, values in own.items():
            for key, value in values.items():
                optimizer.state[parameters[int(i)]][key] = map_tensors(value, torch.Tensor.clone)


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


def keep_rank_states(loop: LoopState, ranks: list[list[dict[str, Any]]]) -> None:
    """Note the states of each rank's callbacks for the next ``fit``, whose ranks begin with rank 0's callbacks."""
    kept: dict[int, tuple[Any, list[dict[str, Any]]]] = {}
    for saved in ranks:
        for callback, entry in matched_entries(loop.callbacks, saved)[0]:
            kept.setdefault(id(callback), (callback, []))[1].append(entry["state"])
    loop.note(callbacks_of_ranks=list(kept.values()))


def put_rank_states(loop: LoopState) -> None:
    """Load this rank's states of the last ``fit`` into callbacks; warn if that had another number of ranks.

    Each rank begins with a copy of rank 0's callback. A callback with another state is left as it is: the user, or its
    ``on_train_begin``, has begun a new one.
    """
    here = {id(callback) for callback in loop.callbacks}
    for callback, states in loop.callbacks_of_ranks:
        if id(callback) not in here or not rng.same_state(callback.rank_state_dict(), states[0]):
            continue
        if len(states) == loop.world_size:
            callback.load_rank_state_dict(states[loop.rank])
        elif loop.is_global_zero:
            warn(
                f"the last fit has left states of {len(states)} ranks for the callback {callback.callback_name}, but "
                f"there are {loop.world_size} ranks now. All of them continue with rank 0's."
            )


def _report_other_criterion(loop: LoopState, state: dict[str, Any]) -> None:
    """Report that ``on_resume`` has assigned a criterion with other values than the checkpoint's."""
    own = criterion_state(loop, of_model=False)
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

    of_schedules = OF_SCHEDULES if _settings_of_other_schedules(loop, state) else ("initial_lr",)
    for optimizer, saved in zip(optimizers_of(loop.optimizer), state["optimizers"], strict=True):
        for own, theirs in zip(optimizer.param_groups, saved_groups(saved), strict=False):
            cycled = ("momentum", "betas") if "base_momentum" in theirs else ()  # by OneCycleLR or CyclicLR
            left_out = {"params", *of_schedules, *cycled}
            for name in (name for name in own if name in theirs and name not in left_out):
                now, before = (_plain_setting(group, name) for group in (own, theirs))
                note(f"{type(optimizer).__name__}'s {name}", before, now, of_script=False)
    for callback, entry in matched_entries(loop.callbacks, state["callbacks"])[0]:
        if hasattr(callback, "other_settings"):
            for what, before, now in callback.other_settings(entry["state"]):
                note(what, before, now, of_script=False)
    other = []
    for prefix, key, module in zip(("", "criterion."), FLAGS, trained_modules(loop.model, loop.criterion)):
        flags = state.get(key, {}).get("requires_grad", {})
        now = training_flags(module)["requires_grad"]
        other += [prefix + name for name, flag in now.items() if flags.get(name, flag) != flag]
    if other:
        found.append(f"requires_grad of {described_names(other)} from the checkpoint (the script has other values)")
    criterion = criterion_module(loop.criterion)
    if criterion is not None and not about_criterion(loop, state):
        own, saved = criterion_state(loop, of_model=False), state["criterion"]
        buffers = [n for n, b in criterion.named_buffers() if n in own and n in saved and b.layout is torch.strided]
        differ = changed(bits_of(saved, buffers), bits_of(own, buffers)) + list(empty_buffers(criterion, saved))
        for names, source, rest in (
            (differ, "checkpoint", "the script has others"),
            ([name for name in own if name not in saved], "script", "the checkpoint has none"),
        ):
            if names:
                found.append(f"the criterion's {described_names(names)} from the {source} ({rest})")
    note("seed", place["seed"], loop.seed, of_script=False)
    if place["seed"] is None and loop.seed is not None:
        found.append(f"seed={loop.seed} from the script (the checkpoint has none)")
    note("grad_accumulation", loop.grad_accumulation, place["grad_accumulation"], of_script=True)
    note("global batch size", run.feed.global_batch_size, place["global_batch_size"], of_script=True)
    return f"Resumed with {', '.join(dict.fromkeys(found))}." if found else ""


def _plain_setting(group: dict[str, Any], name: str) -> Any:
    """Return a setting of a parameter group, as it is shown; ``None`` if it is no plain value."""
    value = group.get(f"initial_{name}", group[name])  # a scheduler changes the rate, and records the initial one
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    plain = value is None or isinstance(value, (bool, int, float, str, tuple))
    return f"{value:g}" if type(value) is float else str(value) if plain else None


def _load_callbacks(loop: LoopState, saved: list[dict[str, Any]], method: str) -> None:
    """Load each callback's state by a method of it."""
    pairs, left = matched_entries(loop.callbacks, saved)
    for callback, entry in pairs:
        getattr(callback, method)(entry["state"])
    if not loop.is_global_zero:  # one rank's warnings are enough
        return
    numbers = Counter((type(callback).__name__, callback.callback_name) for callback in loop.callbacks)
    saved_numbers = Counter((entry["type"], entry["name"]) for entry in saved if entry["state"])
    times: Counter[tuple[str, ...]] = Counter(
        (entry["type"], entry["name"], entry.get("key", ""), entry.get("arguments", "")) for entry in saved
    )
    in_order = set()
    for callback, entry in pairs:
        if times[tuple(identity_of(callback).values())] != 1:  # 0 if its key or its arguments have changed
            in_order.add((entry["type"], entry["name"]))
    for (kind, name), number in saved_numbers.items():
        here = numbers[kind, name]
        if here and here != number and (kind, name) in in_order:
            warn(
                f"the checkpoint has the states of {number} callbacks {name!r} ({kind}), but this fit has {here}. They "
                "are matched in order, so a callback may have the state of another. Pass the same callbacks in the "
                "same order, or give those of one class different names (callback_name)."
            )
    unused = [entry["name"] for entry in left if entry["state"]]
    if unused:
        warn(f"the checkpoint has state of callbacks not in this fit: {', '.join(unused)}. That state is ignored.")
