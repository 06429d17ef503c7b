"""Where a run goes on after a failure: decided from what its hosts say, by each of them alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from trainloop.train_loop.copies import beyond_help

__all__ = ["GoingOn", "Word", "going_on"]


class Word(NamedTuple):
    """What a host says before its ranks start; plain types."""

    fit: int
    """Which run this is of those that its process has had."""
    begins_at: int
    """Step that the run begins at."""
    restarts: list[list[Any]]
    """Those so far, as lists."""
    failed: list[Any] | None = None
    """Rank that failed first, and its deed; ``None`` where this process has seen no failure: it begins."""
    reached: int = 0
    """Most steps that a rank here has done."""
    whole: Sequence[tuple[int, int]] = ()
    """Number and step of the snapshots that are whole here."""
    checkpoint: list[Any] | None = None
    """Step and path of one that may be newer."""


class GoingOn(NamedTuple):
    """What follows from all hosts' words."""

    rank: int
    """That failed first."""
    cause: str
    step: int
    """To go on from."""
    steps_repeated: int
    number: int
    """Of the snapshot; 0: none."""
    checkpoint: str
    """Path of the one to be taken instead; empty: none."""
    lost: list[int]
    """Hosts whose memory was lost: they came again, or came late."""
    problem: str = ""
    """Why there is no going on."""


def going_on(words: Sequence[Word]) -> GoingOn | None:
    """Where to go on from; ``None`` where no host has seen a failure, so that the run begins.

    Parameters
    ----------
    words : sequence of Word
        Of each host, by its rank among them.
    """
    struck = [word for word in words if word.failed is not None]
    if not struck:
        return None
    lost = [node for node, word in enumerate(words) if word.failed is None]
    whole = [dict(word.whole) for word in struck]
    number = max(set(whole[0]).intersection(*whole), default=0)
    step = whole[0][number] if number else struck[0].begins_at
    checkpoints = [word.checkpoint for word in struck if word.checkpoint is not None]
    newest, path = max(map(tuple, checkpoints), default=(step, ""))
    if newest > step:
        step, number = newest, 0
    else:
        path = ""
    assert struck[0].failed is not None
    rank, cause = struck[0].failed
    again = max((word.reached for word in struck), default=step) - step
    return GoingOn(rank, cause, step, max(again, 0), number, path, lost, _problem(words, lost, number, path))


def _problem(words: Sequence[Word], lost: Sequence[int], number: int, path: str) -> str:
    fits = [word.fit for word in words]
    if len(set(fits)) > 1:
        who = ", ".join(f"node {node} its {fit}." for node, fit in enumerate(fits))
        return (
            f"The hosts are not in the same fit ({who}): a host that comes again runs the script from its beginning, "
            "so only a script's first fit over several hosts can have it back."
        )
    if number and (gone := beyond_help(lost, len(words))):
        names = f"node{'' if len(gone) == 1 else 's'} {', '.join(map(str, gone))}"
        return (
            f"Too many hosts were lost at once: what was of {names} alone was kept on the next one, which is lost, "
            "too. Start all of them again, with a ModelCheckpoint in callbacks and resume_from='last'."
        )
    begins = [word.begins_at for word in words]
    if not number and not path and len(set(begins)) > 1:
        return (
            f"There is no snapshot yet, and the hosts begin at different steps ({', '.join(map(str, begins))}), since "
            "a checkpoint was made in between. Start all of them again, with resume_from='last'."
        )
    return ""
