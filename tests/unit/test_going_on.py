"""Where a run goes on after a failure, from what its hosts say."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainloop.train_loop.going_on import GoingOn, Word, going_on

FRESH = Word(1, 0, [])


def struck(*whole: int, **other: Any) -> Word:
    """A host that has seen rank 2 fail, and has these snapshots, whose step is ten times their number."""
    word = Word(1, 0, [], failed=[2, "exited"], reached=57, whole=[(number, 10 * number) for number in whole])
    return word._replace(**other)


@pytest.mark.parametrize(
    ("words", "step", "number", "lost"),
    [
        ([struck(5, 4)], 50, 5, []),
        ([struck()], 0, 0, []),
        ([struck(5, 4), struck(4, 3)], 40, 4, []),  # one was being written
        ([struck(5, 4), struck(5)], 50, 5, []),  # the next one was being written
        ([struck(5, 4), struck(5, 4), FRESH], 50, 5, [2]),
        ([FRESH, struck(5, 4), struck(4)], 40, 4, [0]),
        ([FRESH, struck(5), FRESH, struck(5)], 50, 5, [0, 2]),
        ([struck(), FRESH, FRESH], 0, 0, [1, 2]),  # nothing is lost by it
    ],
)
def test_from_the_newest_that_all_have(words: list[Word], step: int, number: int, lost: list[int]) -> None:
    assert going_on(words) == GoingOn(2, "exited", step, 57 - step, number, "", lost)


def test_who_has_seen_no_failure_begins() -> None:
    assert going_on([FRESH, FRESH]) is None


def test_a_checkpoint_where_it_is_newer() -> None:
    found = going_on([struck(5, checkpoint=[55, "there"]), struck(5)])
    assert found is not None
    assert (found.step, found.number, found.checkpoint, found.steps_repeated) == (55, 0, "there", 2)
    found = going_on([struck(5, checkpoint=[50, "there"])])
    assert found is not None
    assert (found.number, found.checkpoint) == (5, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([struck(5), FRESH, FRESH], "what was of node 1 alone was kept on the next one, which is lost, too"),
        ([FRESH, struck(5), FRESH], "what was of node 2 alone was kept on the next one"),
        ([struck(5), FRESH._replace(fit=2)], r"not in the same fit \(node 0 its 1., node 1 its 2.\)"),
        ([struck(), FRESH._replace(begins_at=20)], r"the hosts begin at different steps \(0, 20\)"),
    ],
)
def test_why_there_is_no_going_on(words: list[Word], said: str) -> None:
    found = going_on(words)
    assert found is not None
    assert re.search(said, found.problem)
