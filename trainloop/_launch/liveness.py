"""Find the rank that hangs, from shared memory that the launching process reads, and from the stacks of ranks.

Each rank writes the number of its last step boundary and its state into shared memory
(:mod:`trainloop._support.stopping`); a change of either is a sign of life. The rules:

* Working ranks may take any time while no rank waits for another: for the first compilation, a
  long evaluation, or a checkpoint that all ranks write.
* A rank waits for up to ``timeout`` seconds in a collective or at a step boundary. It detects the time-out itself.
* A finished rank can't detect that another hangs, so the launching process does. If a rank shows
  no sign of life for ``timeout`` seconds after another has finished, the run ends.
* When all have finished, a process that does not end within ``timeout`` seconds is killed. No result is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Sign(NamedTuple):
    """A rank's state and last boundary, as the launching process reads them."""

    boundary: int
    """Number of step boundaries that the rank has reached."""
    working: bool
    """True until the rank's work has succeeded or failed."""


class Liveness:
    """Measure how long each of a node's ranks has shown no sign of life.

    Parameters
    ----------
    timeout_s : float
        Seconds that others may wait for a rank.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: list[Sign] = []
        self._since: list[float] = []

    def overdue(self, signs: Sequence[Sign], now: float, *, done_elsewhere_since: float | None = None) -> list[int]:
        """Return the local ranks for which finished ranks have waited too long.

        Once all ranks have finished, return the ranks whose processes are still running after the time-out.

        Parameters
        ----------
        signs : sequence of Sign
            Current sign of each local rank.
        now : float
            Current time (monotonic clock).
        done_elsewhere_since : float, optional
            Time at which the ranks of another host had finished.
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
        # While some ranks work, others have waited since the first rank finished. Finished processes need time to end.
        waited_since = min(done_since) if working else max(done_since)
        waited_for = working or range(len(signs))
        return [r for r in waited_for if now - max(self._since[r], waited_since) > self._timeout_s]

    def silent_s(self, local_rank: int, now: float) -> float:
        """Return the seconds since a rank's last sign of life, as of the last check."""
        return now - self._since[local_rank] if self._since else 0.0


_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/trainloop/_support/stopping.py")
_MAY_WAIT = ("/torch/autograd/",)  # the reduction of gradients has no Python frame


def hanging_ranks(stacks: dict[int, str], boundaries: dict[int, int]) -> list[int]:
    """Return the ranks that others waited for before a time-out, as far as they can be determined.

    Parameters
    ----------
    stacks : dict of int to str
        Stacks by :mod:`faulthandler` of the ranks that reported neither a time-out nor the loss of another rank.
    boundaries : dict of int to int
        Number of step boundaries that each rank of this node has reached.
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
    """Return the file of the innermost frame of the main thread, which runs the rank's work."""
    threads = stack.split("hread 0x")
    main = next((text for text in threads if " in run_rank" in text), stack)
    line = next((line for line in main.splitlines() if line.lstrip().startswith("File ")), "")
    return line.split('"')[1] if line.count('"') >= 2 else ""
