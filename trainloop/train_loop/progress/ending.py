"""Find out why training ended early, and whether any work is left after a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainloop.callbacks.base import HooksOfRanks, matched_entries
from trainloop.train_loop.arguments.options import End
from trainloop.train_loop.progress.loop_state import LoopState


def described_ends(ends: Sequence[End], epoch: int) -> str:
    """Return a line that gives the reason why training ended after ``epoch``, which is counted from 1."""
    names = " and ".join(dict.fromkeys(end.name for end in ends))
    reasons = "; ".join(dict.fromkeys(end.reason for end in ends if end.reason))
    return f"{names} ended training after epoch {epoch}{': ' if reasons else '.'}{reasons}"


def described_signals(names: Sequence[str], step: int, epoch: int, folders: Sequence[str]) -> str:
    """Return a line that says which signals end training after ``step``, and where a checkpoint is written."""
    line = f"{' and '.join(names)} received: training ends after step {step} (epoch {epoch})."
    if folders:
        return f"{line} A checkpoint of this step is written to {' and '.join(folders)}, unless there is one."
    if list(names) == ["SIGINT"]:
        return f"{line} Ctrl-C writes no checkpoint."
    return f"{line} No checkpoint is written, because callbacks has no ModelCheckpoint."


def end_that_holds(loop: LoopState, state: dict[str, Any]) -> list[End]:
    """Return the ends of a checkpoint's run that hold for this ``fit``.

    A callback's end holds if the callback is still present and would end the run again; an assignment to ``early_stop``
    holds in any case. Empty if this ``fit`` asks for more epochs or iterations than that run did.
    """
    place = state["place"]
    if any(getattr(loop, name) > place.get(name, 0) for name in ("num_epochs", "num_iterations")):
        return []
    # An EarlyStopping with more patience than in the last run would continue, so each callback is asked.
    pairs = matched_entries(loop.callbacks, state["callbacks"])[0]
    again = [entry for callback, entry in pairs if callback.ends_again(entry["state"])]

    def is_by(end: End, entry: dict[str, Any]) -> bool:
        parts = {"type": end.kind, "name": end.name, "key": end.key, "arguments": end.arguments}
        return all(value in (None, entry.get(part, "")) for part, value in parts.items())

    ends = [End(*saved) for saved in place.get("ends", ())]
    return [end for end in ends if not end.kind or any(is_by(end, entry) for entry in again)]


def nothing_left(loop: LoopState, state: dict[str, Any]) -> str:
    """Return the reason why no work is left after a checkpoint; an empty string if work is left."""
    place = state["place"]
    has_work = has_work_at_end(loop, HooksOfRanks.of(loop.callbacks))
    if place["epoch_steps"] or (has_work and not place.get("finished", False)):
        return ""
    ends = end_that_holds(loop, state)
    if ends:
        return (
            f"{described_ends(ends, place['epoch']).rstrip('.')}. To continue, ask for more epochs or change callbacks."
        )
    begun, what = (place["start_epoch"], "epoch") if loop.num_epochs else (place["start_iteration"], "iteration")
    done = (place["epoch"] if loop.num_epochs else place["total_iteration_idx"]) - begun
    asked = loop.num_epochs or loop.num_iterations
    return f"{done} of {asked} {what}s are done. To continue, ask fit for more." if done >= asked else ""


def has_work_at_end(loop: LoopState, of_ranks: HooksOfRanks) -> bool:
    """Return True if work follows the last epoch: a test, or hooks of callbacks."""
    return of_ranks.on_train_end or (bool(loop.end_auto_eval) and loop.test_loader is not None)
