"""A loop's state as data: on its way back from a rank to the caller, and into and out of a checkpoint."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainloop import rng
from trainloop.carried import carried_state_of, load_carried_state, names_of
from trainloop.ending import end_that_holds
from trainloop.errors import CheckpointError
from trainloop.optim import optimizers_of
from trainloop.trained import add_missing_groups, changed_flags, group_names, set_flags

if TYPE_CHECKING:
    from trainloop.loop_base import LoopBase
    from trainloop.train_loop import TrainLoop

__all__ = ["Arrival", "Departure", "checkpoint_state", "load_checkpoint_state"]

COUNTERS = ("epoch", "global_step", "total_iteration_idx", "early_stop", "message_service")
# What every nn.Module has in its __dict__ and torch itself keeps in order.
_MISSING = object()
_TORCH_OWN = frozenset(nn.Module().__dict__) - {"training"} | {"_log_sink", "_log_batch_size", "_compiled_call_impl"}


# -- from a rank back to the caller ------------------------------------------------------------------------------------


def known_objects(loop: LoopBase) -> list[object]:
    """The objects both sides have: what a loop was made of, in an order that is the same on both sides.

    References to them travel as references, so that a callback that comes back still holds the caller's own model.
    """
    found: dict[int, object] = {}

    def add(objects: Iterable[object]) -> None:
        for item in objects:
            if item is not None:
                found.setdefault(id(item), item)

    add([loop, loop.message_service, loop.history])
    for module in _root_modules(loop):
        add(module.modules())
        add(module.parameters())
        add(module.buffers())
    add([loop.optimizer, *optimizers_of(loop.optimizer), loop.criterion])
    for loader in (loop.train_loader, loop.validation_loader, loop.test_loader):
        add([loader, getattr(loader, "dataset", None)])
    for callback in loop.callbacks:
        add([callback])
    return list(found.values())


def _parts(loop: LoopBase) -> dict[str, Any]:
    """What is reached from optimizers, criterion, callbacks and the attributes of modules, by its path."""
    from trainloop.transfer.kept import kept_attributes
    from trainloop.transfer.shared import shared_parts

    roots: dict[str, object] = {"optimizer": loop.optimizer, "criterion": loop.criterion}
    for i, callback in enumerate(loop.callbacks):
        roots.update((f"callbacks.{i}.{name}", value) for name, value in kept_attributes(callback).items())
    roots.update((f"modules.{root}.{i}.{name}", value) for (root, i, name), value in _plain_attributes(loop).items())
    optimizers = [loop.optimizer, *optimizers_of(loop.optimizer)]
    own = [loop.criterion, *optimizers] if not isinstance(loop.criterion, nn.Module) else optimizers
    apart = {id(obj): obj for obj in known_objects(loop) if all(obj is not other for other in own)}
    return shared_parts(roots, apart)


class Departure:
    """The caller's side of a run in ranks: which of the loop's parts are sent, for their contents to come back to."""

    def __init__(self, loop: LoopBase) -> None:
        self._loop = loop
        self._known = known_objects(loop)
        self._parts = _parts(loop)
        self.paths = tuple(self._parts)
        """Of the parts, for :class:`Arrival`: both sides number them alike."""

    def receive(self, data: bytes) -> Any:
        """Put a rank's end state into the caller's own objects; returns the ``result`` that came with it."""
        from trainloop.transfer import load_state
        from trainloop.transfer.shared import put_into

        state = load_state(data, [*self._known, *self._parts.values()])
        _receive(self._loop, state)
        put_into(self._parts, state["parts"])
        return state["result"]


class Arrival:
    """What a loop was when it arrived in a rank, so that at the end only what changed goes back."""

    def __init__(self, loop: LoopBase, paths: Iterable[str] = ()) -> None:
        from trainloop.transfer.shared import dumped_parts

        self._loop = loop
        found = _parts(loop)
        self._parts = {path: found[path] for path in paths if path in found}
        # A part that is not found here keeps its number.
        self._known = [*known_objects(loop), *(found.get(path, object()) for path in paths)]
        self._stateful = [
            (i, name) for i, callback in enumerate(loop.callbacks) for name in _stateful_attributes(callback)
        ]
        # A pickled optimizer loses the mark by which torch's schedulers recognise it, and they would warn about it.
        warnings.filterwarnings("ignore", message=r"Seems like `optimizer\.step\(\)` has been overridden")
        self._attributes = {key: self._dumped(value) for key, value in _plain_attributes(loop).items()}
        self._arrived = dumped_parts(self._parts, self._known)

    def end_state(self, result: Any) -> bytes:
        """The loop's state now, and ``result``, for :func:`receive_end_state` on the caller's side."""
        from trainloop.transfer import dump_state
        from trainloop.transfer.shared import changed_parts

        loop = self._loop
        changed = {}
        for key, value in _plain_attributes(loop).items():
            dumped = self._dumped(value)
            if dumped is None:
                if self._attributes.get(key) is not None:
                    message = f"model attribute {key[2]!r} can't be pickled any more: the caller's stays as it was."
                    warnings.warn(message, stacklevel=2)
            elif dumped != self._attributes.get(key):
                changed[key] = value
        state = {
            "tensors": {key: (t.detach().cpu(), t.requires_grad) for key, t in _tensors(loop)},
            "attributes": changed,
            "parts": changed_parts(self._parts, self._arrived, self._known),
            "history": loop.history.state_dict(),
            "scaler": loop._scaler_state,
            "counters": {name: getattr(loop, name) for name in COUNTERS if name != "message_service"},
            "messages": loop.message_service.__dict__,
            "callbacks": [self._that_can_be_sent(_callback_state(callback), callback) for callback in loop.callbacks],
            "stateful": [getattr(loop.callbacks[i], name).state_dict() for i, name in self._stateful],
            "result": result,
        }
        return dump_state(state, self._known)

    def _that_can_be_sent(self, state: Any, callback: Any) -> Any:
        if not isinstance(state, dict) or self._dumped(state) is not None:
            return state
        can = {name: value for name, value in state.items() if self._dumped(value) is not None}
        lost = ", ".join(str(name) for name in state if name not in can)
        warnings.warn(f"{callback!r}: {lost} can't be pickled any more: the caller's stays as it was.", stacklevel=2)
        return can

    def _dumped(self, value: Any) -> bytes | None:
        from trainloop.transfer import dump_state

        try:
            return dump_state(value, self._known)
        except Exception:  # whatever a user's __reduce__ raises
            return None


def _plain_attributes(loop: LoopBase) -> dict[tuple[int, int, str], Any]:
    """Attributes of the root modules and all in them, by root, place in it, and name."""
    from trainloop.transfer.kept import kept_attributes

    return {
        (root, i, name): value
        for root, top in enumerate(_root_modules(loop))
        for i, module in enumerate(top.modules())
        for name, value in kept_attributes(module).items()
        # What the module itself leaves out of its state, or replaces there, is each process's own.
        if name not in _TORCH_OWN
        and module.__dict__.get(name, _MISSING) is value
        and name not in names_of(module)  # rank 0's columns are not the caller's
    }


def _receive(loop: LoopBase, state: dict[str, Any]) -> None:
    stateful = [(callback, name) for callback in loop.callbacks for name in _stateful_attributes(callback)]
    tensors = dict(_tensors(loop))
    modules = [list(top.modules()) for top in _root_modules(loop)]
    with torch.no_grad():
        for key, (value, requires_grad) in state["tensors"].items():
            own = tensors.get(key)
            if own is not None and own.shape == value.shape and own.dtype == value.dtype:
                own.copy_(value)
                if own.requires_grad != requires_grad:
                    own.requires_grad_(requires_grad)
            elif not requires_grad:  # a buffer that was made or reshaped on the way
                root, path = key
                owner, _, name = path.rpartition(".")
                _root_modules(loop)[root].get_submodule(owner).register_buffer(name, value)
    for (root, i, name), value in state["attributes"].items():
        object.__setattr__(modules[root][i], name, value)
    loop.history.load_state_dict(state["history"])
    loop._scaler_state = state["scaler"]
    for name, value in state["counters"].items():
        setattr(loop, name, value)
    loop.message_service.__dict__.update(state["messages"])
    for (callback, name), saved in zip(stateful, state["stateful"], strict=True):
        getattr(callback, name).load_state_dict(saved)
    for callback, saved in zip(loop.callbacks, state["callbacks"], strict=True):
        if hasattr(callback, "__setstate__"):
            callback.__setstate__(saved)
        else:
            callback.__dict__.update(saved)


def _root_modules(loop: LoopBase) -> list[nn.Module]:
    return [loop.model, *([loop.criterion] if isinstance(loop.criterion, nn.Module) else [])]


def _tensors(loop: LoopBase) -> Iterable[tuple[tuple[int, str], torch.Tensor]]:
    """Parameters and buffers (tied ones once, those that no state dict holds too), by root module and name."""
    for root, module in enumerate(_root_modules(loop)):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield (root, name), tensor


def _stateful_attributes(callback: Any) -> dict[str, Any]:
    """A callback's schedulers, metrics and the like, which take over state and stay the caller's own objects."""
    return {
        name: value
        for name, value in vars(callback).items()
        if name != "train_loop_obj"
        and not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, (Mapping, nn.Module, torch.optim.Optimizer))  # their parts come back
    }


def _callback_state(callback: Any) -> Any:
    get_state = getattr(type(callback), "__getstate__", None)
    if get_state is not None and get_state is not getattr(object, "__getstate__", None):
        return callback.__getstate__()
    return dict(callback.__dict__)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoint_state(loop: TrainLoop) -> dict[str, Any] | None:
    """All that a resumed run needs, as plain types and tensors, on rank 0; ``None`` on the other ranks.

    Collective: all ranks call it, between two steps, with all step logs exchanged. Tensors are the live ones: copy what
    is to outlast the next step.
    """
    from trainloop.checkpoint import plain

    run = loop._run
    if run.trained is not None:
        run.trained.check_alike(run.place.wrapper)
    mine = {
        "rng": rng.capture(),
        "feed": run.feed.state_dict(plain),
        "metrics": run.recorder.state_dict(),
        "carried": carried_state_of(loop.model),
        "inserted": loop.history._take_own(),
        "ends": [tuple(end) for end in loop._ends],
    }
    ranks = [mine] if run.gather is None else run.gather(mine)
    loop.history._put_agreed([theirs.pop("inserted") for theirs in ranks])
    ends = list(dict.fromkeys(tuple(end) for theirs in ranks for end in theirs.pop("ends")))
    if loop.rank != 0:
        return None
    # At the end of training the last epoch is counted already.
    finished, epoch = run.epoch_finished, loop.epoch + run.epoch_finished
    return {
        "versions": {"trainloop": 1, "torch": str(torch.__version__), "python": platform.python_version()},
        "model": loop.model.state_dict(),
        "criterion": loop.criterion.state_dict() if isinstance(loop.criterion, nn.Module) else {},
        "optimizers": [
            {"type": type(optimizer).__name__, "state": optimizer.state_dict()}
            for optimizer in optimizers_of(loop.optimizer)
        ],
        "groups": group_names(loop),
        "flags": changed_flags(run.began_with, loop.model),
        "scaler": run.scaler.state_dict(),
        "callbacks": [
            {"name": callback.callback_name, "type": type(callback).__name__, "state": callback.state_dict()}
            for callback in loop.callbacks
        ],
        "history": loop.history.state_dict(),
        "place": {
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
            "finished": run.finished,
            "ends": [list(end) for end in ends] if finished or run.finished else [],
        },
        "ranks": ranks,
    }


def check_checkpoint(loop: TrainLoop, state: dict[str, Any]) -> None:
    """Whether a checkpoint belongs to this loop's model and optimizers.

    Raises
    ------
    CheckpointError
        That names what differs.
    """
    missing = [key for key in ("model", "optimizers", "place", "ranks", "history") if key not in state]
    if missing:
        raise CheckpointError(f"this is no trainloop checkpoint: it has no {', '.join(missing)}. Pass one of fit's.")
    own = loop.model.state_dict()
    saved = state["model"]
    wrong = [f"{key} is missing in the checkpoint" for key in own if key not in saved]
    wrong += [f"{key} is not in the model" for key in saved if key not in own]
    for key, value in own.items():
        if key in saved and isinstance(value, torch.Tensor) and not _is_lazy(value) and value.shape != saved[key].shape:
            wrong.append(f"{key} is {tuple(value.shape)} in the model, {tuple(saved[key].shape)} in the checkpoint")
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(wrong[:5])}{more}. "
            "Pass the model it was made with, or start without resume_from."
        )
    optimizers = optimizers_of(loop.optimizer)
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    saved_kinds = [saved["type"] for saved in state["optimizers"]]
    if kinds != saved_kinds:
        raise CheckpointError(
            f"the checkpoint was made with {' and '.join(saved_kinds) or 'no optimizer'}, "
            f"the loop has {' and '.join(kinds) or 'none'}. Pass the same optimizer."
        )
    grow = add_missing_groups(loop, state.get("groups"), only_look=True)
    for optimizer, saved, fits in zip(optimizers, state["optimizers"], grow, strict=True):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        saved_sizes = [len(group["params"]) for group in saved["state"]["param_groups"]]
        if sizes != saved_sizes and not fits:
            raise CheckpointError(
                f"the {type(optimizer).__name__} of the checkpoint has parameter groups of {saved_sizes} parameters, "
                f"the loop's has {sizes}. Build it the same way."
            )


def load_checkpoint_state(loop: TrainLoop, state: dict[str, Any]) -> None:
    """Go on where :func:`checkpoint_state` was, with any number of ranks. All ranks call it, with the same state."""
    check_checkpoint(loop, state)
    run, place, ranks = loop._run, state["place"], state["ranks"]
    _check_data(run.feed, place)
    skip_steps = _steps_here(place, run.feed.global_batch_size, loop.grad_accumulation)
    # All that can be refused has been: from here on the loop changes.
    _load_parts(loop, state)
    if run.scaler.is_enabled() and state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    # What on_train_begin has logged again.
    run.recorder.drop({*state["history"]["values"], *(name for saved in ranks for name in saved["metrics"])})
    run.history_epoch = place["epoch"]
    run.start_epoch, run.start_iteration = place["start_epoch"], place["start_iteration"]
    run.epoch_batches = place["epoch_batches"]
    run.skip_steps = skip_steps
    run.ended = not place["epoch_steps"] and bool(end_that_holds(loop, state))
    load_carried_state(loop.model, [saved.get("carried", {}) for saved in ranks], loop.rank, loop.world_size)
    if len(ranks) == loop.world_size:
        mine = ranks[loop.rank]
        run.recorder.load_state_dict(mine["metrics"])
        rng.restore(mine["rng"])
    else:
        # Sums over ranks stay right wherever the parts are; randomness starts anew, at a place of its own.
        if loop.rank == 0:
            own, *others = (saved["metrics"] for saved in ranks)
            run.recorder.load_state_dict(own, others)
        rng.seed_all(rng.derive_seed(place["seed"] or 0, "resumed", loop.global_step, loop.rank))
    run.feed.load_state_dict(ranks[loop.rank if len(ranks) == loop.world_size else 0]["feed"])


def load_finished(loop: TrainLoop, state: dict[str, Any]) -> None:
    """Become what a training left that has ended, in the calling process and without running."""
    _load_parts(loop, state)
    # A callback may have put the weights back that training would go on from.
    loop.model.load_state_dict(state["model"])
    load_carried_state(loop.model, [saved.get("carried", {}) for saved in state["ranks"]], 0, len(state["ranks"]))
    loop._scaler_state = state["scaler"]
    loop._ends = end_that_holds(loop, state)
    loop._early_stop = bool(loop._ends)


def _load_parts(loop: TrainLoop, state: dict[str, Any]) -> None:
    """What is the loop's own, whether or not it runs."""
    loop.model.load_state_dict(state["model"])
    if isinstance(loop.criterion, nn.Module) and state["criterion"]:
        loop.criterion.load_state_dict(state["criterion"])
    set_flags(loop.model, state.get("flags", {}))
    add_missing_groups(loop, state.get("groups"))
    for optimizer, saved in zip(optimizers_of(loop.optimizer), state["optimizers"], strict=True):
        optimizer.load_state_dict(saved["state"])
    loop.history.load_state_dict(state["history"])
    _load_callbacks(loop.callbacks, state["callbacks"])
    for name in ("epoch", "global_step", "total_iteration_idx"):
        setattr(loop, name, state["place"][name])


def _check_data(feed: Any, place: dict[str, Any]) -> None:
    before, now = place["num_samples"], feed.num_samples
    if before is not None and now is not None and before != now:
        raise CheckpointError(
            f"the checkpoint was made with {before} training samples, the loader has {now} now. "
            "Pass the same dataset, or start without resume_from."
        )


def _steps_here(place: dict[str, Any], global_batch_size: int | None, grad_accumulation: int) -> int:
    """Steps of this run that hold the samples the checkpoint's steps held in the epoch it was made in."""
    steps = place["epoch_steps"]
    if not steps or None in (place["global_batch_size"], global_batch_size):
        return steps
    before = place["global_batch_size"] * place["grad_accumulation"]
    now = global_batch_size * grad_accumulation  # type: ignore[operator]  # not None: seen above
    if before * steps % now:
        raise CheckpointError(
            f"the checkpoint lies {steps} steps of {before} samples into its epoch, and this run's steps have {now}: "
            "no step begins there. Choose batch_size x ranks x grad_accumulation as before, "
            "or resume from a checkpoint at an epoch's end."
        )
    return before * steps // now


def _load_callbacks(callbacks: list[Any], saved: list[dict[str, Any]]) -> None:
    """Give each callback the state of the saved one of its type and name, in order where several are alike."""
    left = list(saved)
    for callback in callbacks:
        key = (type(callback).__name__, callback.callback_name)
        found = next((entry for entry in left if (entry["type"], entry["name"]) == key), None)
        if found is not None:
            left.remove(found)
            callback.load_state_dict(found["state"])
    lost = [entry["name"] for entry in left if entry["state"]]
    if lost:
        warnings.warn(
            f"the checkpoint holds state of callbacks that this fit has not: {', '.join(lost)}.", stacklevel=2
        )


def _is_lazy(tensor: torch.Tensor) -> bool:
    return torch.nn.parameter.is_lazy(tensor)
