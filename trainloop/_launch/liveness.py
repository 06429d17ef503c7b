"""Find the rank that hangs, from what the launching process can read; processes are asked for their stacks only.

Each rank writes the number of its last step boundary and its state into shared memory
(:mod:`trainloop._support.stopping`); a change of either is a sign of life. The rule:

* Working ranks may take any time, as long as no rank waits for another: the first compilation, a
  long evaluation, a checkpoint that all write.
* A rank that waits in a collective or at a step boundary waits ``timeout`` seconds. It notices by itself.
* A rank that is done can't notice that it waits for others. So the launching process counts: a rank that gives
  no sign of life for ``timeout`` seconds after another is done ends the run.
* When all are done, a process that does not end within ``timeout`` seconds is killed; nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Liveness", "Sign", "hanging_ranks"]


class Sign(NamedTuple):
    """What a rank shows from outside: its state and its last boundary."""

    boundary: int
    """The step boundaries it has reached."""
    working: bool
    """True if its work has neither succeeded nor failed yet."""


class Liveness:
    """How long each of a node's ranks has shown no sign of life.

    Parameters
    ----------
    timeout_s : float
        How long a rank may be waited for.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: list[Sign] = []
        self._since: list[float] = []

    def overdue(self, signs: Sequence[Sign], now: float, *, done_elsewhere_since: float | None = None) -> list[int]:
        """Local ranks for which finished ranks have waited too long; once all have finished, those still running.

        Parameters
        ----------
        signs : sequence of Sign
            The present sign of each local rank.
        now : float
            Monotonic clock.
        done_elsewhere_since : float, optional
            When the ranks of another host were done.
        """
        if not self._last:
            self._last, self._since = list(signs), [now] * len(signs)
        for r, sign in enumerate(signs):
            if sign != self._last[r]:
                self._last[r], self._since[r] = sign, now
        done_since = [self._since[r] for r, sign in enumerate(signs) if not sign.working]
        if done_elsewhere_since is not None:
            done_since.append(done_elsewhere_since)
        working = [r for r, sign in enumerate(signs) if sign.working]
        if not done_since:
            return []
        # While somebody works, the first that is done waits; then processes have since the last one's end to close.
        waited_since = min(done_since) if working else max(done_since)
        waited_for = working or range(len(signs))
        return [r for r in waited_for if now - max(self._since[r], waited_since) > self._timeout_s]

    def silent_s(self, local_rank: int, now: float) -> float:
        """Seconds since a rank's last sign of life, as of the last look."""
        return now - self._since[local_rank] if self._since else 0.0


_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/trainloop/_support/stopping.py")
_MAY_WAIT = ("/torch/autograd/",)  # the reduction of gradients has no Python frame of its own


def hanging_ranks(stacks: dict[int, str], boundaries: dict[int, int]) -> list[int]:
    """After a time-out, the ranks that others waited for, as far as that can be told.

    Parameters
    ----------
    stacks : dict of int to str
        As :mod:`faulthandler` writes them, of the ranks that did not report a time-out, or another's loss, themselves.
    boundaries : dict of int to int
        Step boundaries that each rank of this node came to.
    """
    innermost = {rank: _innermost_file(stack) for rank, stack in stacks.items()}
    hanging = [rank for rank, file in innermost.items() if not any(part in file for part in _WAITS)]
    # A rank that is a step ahead waits for the others, whatever its stack looks like.
    behind = [rank for rank in hanging if boundaries.get(rank, 0) == min(boundaries.values(), default=0)]
    surely = [rank for rank in hanging if not any(part in innermost[rank] for part in _MAY_WAIT)]
    for narrower in (behind, surely):
        hanging = [rank for rank in hanging if rank in narrower] or hanging
    return sorted(hanging)


def _innermost_file(stack: str) -> str:
    """File of the innermost frame of the main thread: the one that runs the rank's work."""
    threads = stack.split("hread 0x")
    main = next((text for text in threads if " in run_rank" in text), stack)
    line = next((line for line in main.splitlines() if line.lstrip().startswith("File ")), "")
    return line.split('"')[1] if line.count('"') >= 2 else ""
