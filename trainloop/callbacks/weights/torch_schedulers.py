"""What torch's schedulers have in common: their lengths and states, also of schedulers within them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from trainloop.devices import whole_number
from trainloop.errors import CheckpointError

# Schedulers of torch that change the rate until a step, and the attribute that contains this step. True: the training
# should end at this step. False: the schedule may end earlier, and the rate then stays.
_LENGTHS = {
    "OneCycleLR": ("total_steps", True),
    "PolynomialLR": ("total_iters", True),
    "CosineAnnealingLR": ("T_max", True),
    "LinearLR": ("total_iters", False),
    "ConstantLR": ("total_iters", False),
    "MultiStepLR": ("milestones", False),
}
OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Settings that schedulers of torch keep in the optimizer's groups."""
# Keys of a state.
_NESTED_KEY = "trainloop: nested schedulers"
CLASS_KEY = "trainloop: class"


def schedule_length(scheduler: Any) -> tuple[int | None, bool]:
    """Return the number of steps until a scheduler of torch ends, or ``None``; and False if it may end earlier."""
    kind = type(scheduler).__name__
    parts, begins = getattr(scheduler, "_schedulers", ()), getattr(scheduler, "_milestones", ())
    if parts and begins:  # SequentialLR
        last, exact = schedule_length(parts[-1])
        return begins[-1] + (last or 0), exact
    attribute, exact = _LENGTHS.get(kind, ("", False))
    length = getattr(scheduler, attribute, None)
    if kind == "MultiStepLR":
        length = max(length or (0,))
    return (None, False) if (number := whole_number(length)) is None else (number, exact)


def is_scheduler(scheduler: Any) -> bool:
    """Return True for a scheduler object, False for a class or a function that makes one."""
    # Duck typing, because not all schedulers derive from torch's base class.
    return not isinstance(scheduler, type) and hasattr(scheduler, "optimizer") and hasattr(scheduler, "step")


def is_plateau(scheduler: Any) -> bool:
    """Return True for torch's ``ReduceLROnPlateau`` or its class."""
    plateau = lr_scheduler.ReduceLROnPlateau
    return issubclass(scheduler, plateau) if isinstance(scheduler, type) else isinstance(scheduler, plateau)


def scheduler_class(scheduler: Any) -> str:
    """Return the name of a scheduler's class, with those of the schedulers that it runs in turn or together."""
    parts = ", ".join(scheduler_class(part) for part in getattr(scheduler, "_schedulers", ()))
    return f"{type(scheduler).__name__}({parts})" if parts else type(scheduler).__name__


def state_fits(scheduler: Any, state: Mapping[str, Any]) -> bool:
    """Return True if a state is of this class of schedulers."""
    return state.get(CLASS_KEY, scheduler_class(scheduler)) == scheduler_class(
        scheduler
    )  # older checkpoints lack this entry


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state with the states of schedulers in its attributes instead of these schedulers.

    A warm-up scheduler often holds the scheduler that follows it, and torch's ``state_dict`` would return this object.
    """
    state = _own_state(scheduler)
    nested = [name for name, value in state.items() if is_scheduler(value) and getattr(scheduler, name, None) is value]
    inner = {name: scheduler_state(state[name]) for name in nested}
    return {**state, **inner, **({_NESTED_KEY: nested} if nested else {}), CLASS_KEY: scheduler_class(scheduler)}


def load_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Load the result of :func:`scheduler_state` into a scheduler, and into those in its attributes."""
    state = dict(state)
    state.pop(CLASS_KEY, None)
    for name in state.pop(_NESTED_KEY, ()):
        inner = getattr(scheduler, name, None)
        if not is_scheduler(inner) or not state_fits(inner, state[name]):
            raise CheckpointError(
                f"the checkpoint has the state of a scheduler in {type(scheduler).__name__}.{name}, but this script's "
                f"has {inner!r}. Pass the scheduler of the checkpoint's run."
            )
        load_scheduler(inner, state[name])
        state[name] = inner
    if hasattr(scheduler, "load_state_dict"):
        scheduler.load_state_dict(state)
    else:
        vars(scheduler).update(state)


def _own_state(scheduler: Any) -> dict[str, Any]:
    """Return what ``state_dict`` returns; of a user's class without it, the attributes, as torch's base class does."""
    if hasattr(scheduler, "state_dict"):
        return dict(scheduler.state_dict())
    attributes = getattr(scheduler, "__dict__", {})
    return {k: v for k, v in attributes.items() if is_scheduler(v) or not (isinstance(v, Optimizer) or callable(v))}


def settings_that_differ(scheduler: Any, state: Any) -> list[tuple[str, Any, Any]]:
    """Compare the arguments of a scheduler, and of the schedulers within it, with those in a state."""
    own = {} if scheduler is None else _own_state(scheduler)
    if not isinstance(state, Mapping) or not isinstance(own, Mapping) or not state_fits(scheduler, state):
        return []
    arguments = set(inspect.signature(type(scheduler).__init__).parameters) - {"last_epoch", "optimizer", "schedulers"}
    names = [name for name in own if name in state and name.lstrip("_") in arguments]
    pairs = {name.lstrip("_"): (_comparable(state[name]), _comparable(own[name])) for name in names}
    kind = type(scheduler).__name__
    found = [(f"{kind}'s {name}", before, now) for name, (before, now) in pairs.items() if before != now]
    parts, states = list(getattr(scheduler, "_schedulers", ())), list(state.get("_schedulers", ()))
    parts += [own.get(name) for name in state.get(_NESTED_KEY, ())]
    states += [state[name] for name in state.get(_NESTED_KEY, ())]
    return found + [one for part, its in zip(parts, states) for one in settings_that_differ(part, its)]


def _comparable(value: Any) -> Any:
    """Return a value that can be compared and shown: a list for a Counter of milestones, None for a tensor."""
    if isinstance(value, (dict, list, tuple)):
        return sorted(value) if isinstance(value, dict) else list(value)
    return value if isinstance(value, (int, float, str)) else None


def restore_counters(scheduler: Any) -> None:
    """Convert ``MultiStepLR``'s milestones back to a Counter, because a checkpoint contains a plain dict."""
    if isinstance(scheduler, lr_scheduler.MultiStepLR):
        scheduler.milestones = Counter(scheduler.milestones)
    for part in getattr(scheduler, "_schedulers", ()):  # in SequentialLR and ChainedScheduler
        restore_counters(part)
