"""Note where the end of a fit, or a failure after it, cuts an epoch short, and continue from there."""

from __future__ import annotations

from typing import Any

import torch

from trainloop import distributed
from trainloop._support import rng
from trainloop._support.carried import carried_state_of, load_carried_state
from trainloop._support.user_line import described_names
from trainloop.checkpoint.file import bits_of
from trainloop.checkpoint.plain import for_file, from_file
from trainloop.data.loader.generators import set_states
from trainloop.errors import CheckpointError
from trainloop.optim.optimizers import optimizers_of
from trainloop.optim.states import with_group_settings
from trainloop.parallel.sharded.shards import map_tensors
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.progress.running import TrainingRun
from trainloop.train_loop.saving.beside import is_plain_tensor
from trainloop.train_loop.saving.collect import (
    callback_states,
    common_state,
    flags_of,
    generator_states_of,
    generators_of,
    place_of,
    position,
    states_of_ranks,
    whole_state,
)
from trainloop.train_loop.saving.compatibility import batches_here


def noted_cut(run: TrainingRun) -> dict[str, Any]:
    """Return the state from which the next ``fit`` continues an epoch that the end of this one cuts short. Collective.

    Call it before the end of the epoch is recorded. The loop keeps it as its ``cut``. The model and the optimizers are
    not in it: they keep the values that they have.
    """
    loop = run.loop
    run.flush_logs(exchange=True)
    mine = position(run)
    if run.parallel:  # a rank that is started later gets the columns and the generators of its predecessor
        mine |= {"carried": carried_state_of(loop.model), "generators": generator_states_of(loop)}
    ranks = from_file(distributed.gather_object(for_file(mine))) if run.parallel else [mine]
    return {"place": place_of(run), "ranks": ranks, "loop_seed": loop.seed}


def states_before_cut(run: TrainingRun) -> dict[str, Any]:
    """Return what hooks at an epoch's end change: states of callbacks, settings of the optimizers' groups, and flags.

    A checkpoint at the end of an epoch that is cut short contains these, so that a run that resumes in that epoch has
    not done its end.
    """
    loop = run.loop
    changing = [
        callback.uses_hook("on_epoch_end") and not hasattr(callback.on_epoch_end, "keeps_state")
        for callback in loop.callbacks
    ]
    here = run.place.collective or loop.is_global_zero
    states = callback_states(loop, "state_dict") if here else []
    kept = [map_tensors(one, _copied_tensor) if changes else None for one, changes in zip(states, changing)]
    groups = [
        [{key: map_tensors(value, _copied_tensor) for key, value in group.items() if key != "params"} for group in one]
        for one in (optimizer.param_groups for optimizer in optimizers_of(loop.optimizer))
    ]
    return {"callbacks": kept, "groups": groups, "flags": flags_of(loop)}


def _copied_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


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
    changed_later = {"place": place, "callbacks": before, "optimizers": optimizers, "ranks": ranks}
    merged = {**state, **changed_later, **cut.get("flags", {})}  # older checkpoints lack flags here
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
    values = run.loop.history.lengths()
    bits = {} if ranks is None else _bits_of_tensors(common_state(run))
    return {"place": place_of(run), "ranks": ranks, "values": values, "bits": bits, **states_before_cut(run)}


def _bits_of_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return the bits of all tensors that a step may change, by name."""
    criterion = {f"criterion.{name}": value for name, value in state["criterion"].items()}
    named = {**state["model"], **criterion, **state["parameters"]}
    own: list[torch.Tensor] = []
    map_tensors([{**one, "state": {**one["state"], "param_groups": None}} for one in state["optimizers"]], own.append)
    of_optimizers = {str(i): value for i, value in enumerate(own)}
    bits, others = (
        bits_of(of, [name for name, value in of.items() if is_plain_tensor(value)]) for of in (named, of_optimizers)
    )
    return {**bits, "the optimizers' state": others}


def held_state(run: TrainingRun, held: dict[str, Any]) -> dict[str, Any] | None:
    """Return the checkpoint's state of the moment of :func:`held_before_end`, on rank 0. Not collective.

    No step may have been taken since.

    Raises
    ------
    CheckpointError
        If tensors are others than at that moment, and no callback has the earlier weights in its state.
    """
    state = whole_state(run, held["ranks"])
    if state is None:
        return None
    bits, now = held["bits"], _bits_of_tensors(state)
    averaged = any(callback["state"].get("trained") for callback in state["callbacks"])
    left_out = state["model"] if averaged else ()
    others = [name for name in {**bits, **now} if bits.get(name) != now.get(name) and name not in left_out]
    if others:
        raise CheckpointError(
            f"since the last step, an evaluation or a hook at the epoch's end has changed {described_names(others)}, "
            "so that a run could not resume from that step"
        )
    for values in (state["history"]["values"], state["history"]["epochs"]):  # without those of the epoch's end
        values.update({name: values[name][:number] for name, number in held["values"].items()})
        for name in values.keys() - held["values"].keys():
            del values[name]
    state["history"]["row"] = None
    return _with_states(state, {**held, "ranks": state["ranks"]})


def load_cut(run: TrainingRun, cut: dict[str, Any]) -> bool:
    """Continue the epoch that the previous ``fit`` has cut short, at its next batch.

    Return False if the loader has changed, so that there is no such batch. All ranks call it, with the same ``cut``.
    """
    loop, place, ranks = run.loop, cut["place"], cut["ranks"]
    lengths, batches = (place["num_samples"], run.feed.num_samples), batches_here(run.feed, place)
    if batches is None or (None not in lengths and lengths[0] != lengths[1]):
        return False
    run.skip_steps, run.skip_batches, run.epoch_batches = place["epoch_steps"], batches, batches
    same_ranks = len(ranks) == loop.world_size
    if "carried" in ranks[0]:
        load_carried_state(loop.model, [saved["carried"] for saved in ranks], loop.rank, loop.world_size)
    load_metrics(run, ranks)
    mine = ranks[loop.rank if same_ranks else 0]
    if same_ranks:
        set_states(generators_of(loop), mine.get("generators", {}))
    if run.seed is not None:  # without a seed, the caller's generators continue, as in a hand-written loop
        if same_ranks:
            rng.restore(mine["rng"])
        else:
            rng.seed_all(rng.derive_seed(run.seed, "resumed", loop.global_step, loop.rank))
    run.feed.load_state_dict(mine["feed"])
    return True


def load_metrics(run: TrainingRun, ranks: list[dict[str, Any]]) -> None:
    """Continue the logs of an epoch from its beginning."""
    loop = run.loop
    if len(ranks) == loop.world_size:
        run.recorder.load_state_dict(ranks[loop.rank]["metrics"])
    elif loop.rank == 0:  # sums over ranks don't depend on which rank has which part
        own, *others = (saved["metrics"] for saved in ranks)
        run.recorder.load_state_dict(own, others)
