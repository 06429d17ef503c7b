"""Stopping at one step: all ranks end at the same step boundary, whoever asked for it and why.

A *boundary* is the place between two optimizer steps. Every rank calls :meth:`StopAgreement.reached` at each one;
anybody (a callback, a signal handler, the launching process) calls :meth:`StopAgreement.request` at any time.

::

    with signals(stop):                 # Ctrl-C, SIGTERM and SIGUSR1 become requests: trainloop._support.signals
        for step in feed.steps(...):
            train_step(step)
            if stop.reached():          # the same answer on every rank at the same boundary
                break

How ranks agree. At boundary ``s`` each rank votes: has it seen a request? Its vote never changes afterwards. Where
all voted yes, all stop at ``s``; so a request made by every rank in the same step (``EarlyStopping``) costs no step
more than in one process. Where some voted no, nobody stops at ``s``; those have seen the request at the next boundary
(or a few later, if they were ahead), and all stop there. Only ranks that voted yes wait for others' votes, so a run
without a request never waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from trainloop._support.platform import process_exists

__all__ = [
    "CHECKPOINT",
    "EARLY_STOP",
    "INTERRUPT",
    "TERMINATE",
    "GroupStop",
    "LocalStop",
    "SharedStop",
    "StopAgreement",
]

EARLY_STOP = 1
"""A callback or the user asked for the end of training."""
INTERRUPT = 2
"""Ctrl-C (SIGINT)."""
TERMINATE = 4
"""SIGTERM: the scheduler or the user ends the job."""
CHECKPOINT = 8
"""SIGUSR1: the job's time is nearly over (Slurm's ``--signal=USR1@120``); the same as TERMINATE for the loop."""

_REASONS = (EARLY_STOP, INTERRUPT, TERMINATE, CHECKPOINT)
_BITS = 8  # of a vote's word that hold the reasons seen; the rest holds the boundary's number


class StopAgreement(Protocol):
    """The agreement by which a loop stops all ranks at one boundary."""

    def request(self, reason: int) -> None:
        """Ask all ranks to stop, for ``reason`` (one of the constants). Any rank, any thread, any number of times."""

    def reached(self) -> int:
        """Reasons for which all ranks stop here, OR-ed; 0 to go on. Collective: every rank, at every boundary."""


class LocalStop:
    """The agreement of one process with itself: a request holds at the next boundary."""

    def __init__(self) -> None:
        self._reasons = 0

    def request(self, reason: int) -> None:
        """Stop at the next boundary."""
        self._reasons |= reason

    def reached(self) -> int:
        """The reasons asked for so far, OR-ed."""
        return self._reasons


class SharedStop:
    """Ranks of one node agree through a few words of shared memory.

    The words, 64 bits each: one whose bytes are the reasons requested, one the abort flag, then one a rank for its
    latest vote. Each word or byte has one value it can be changed to, or one writer, and is written at once; no locks.
    A boundary without a request costs one read and one write.

    Parameters
    ----------
    words : memoryview
        ``SharedStop.num_words(world_size)`` zeroed words of format ``'q'``, mapped by all ranks (and by the parent).
    rank, world_size : int
        This rank among those that share the words; the launching process takes ``rank=-1`` and only requests.
    timeout_s : float
        How long a rank that votes to stop waits for the others to come to the boundary.
    pids : sequence of int, optional
        Process of each rank, where no launching process watches them: a rank that waits for a dead one gives up.
    """

    _REQUESTED, _ABORTED, _VOTES = 0, 1, 2

    def __init__(
        self,
        words: memoryview,
        rank: int,
        world_size: int,
        timeout_s: float = 1800.0,
        pids: Sequence[int] | None = None,
    ) -> None:
        self._words = words
        self._pids = pids
        self._reason_bytes = words.cast("B")
        self._rank = rank
        self._others = [r for r in range(world_size) if r != rank]
        self._slot = self._VOTES + rank
        self._timeout_s = timeout_s
        self._boundary = 0

    @classmethod
    def num_words(cls, world_size: int) -> int:
        """Words that ``world_size`` ranks need."""
        return cls._VOTES + world_size

    def request(self, reason: int) -> None:
        """Ask all ranks to stop at the next boundary that all of them reach with the request in sight."""
        for index, known in enumerate(_REASONS):
            if reason & known:
                self._reason_bytes[index] = 1

    @property
    def requested(self) -> int:
        """Reasons that somebody asked for, whether or not the ranks have come to a boundary since."""
        flags = self._reason_bytes
        return sum(reason for index, reason in enumerate(_REASONS) if flags[index])

    def abort(self) -> None:
        """Tell the ranks that the run is lost: whoever waits for a vote gives up. The launching process calls it."""
        self._words[self._ABORTED] = 1

    @property
    def aborted(self) -> bool:
        """True if the launching process has given the run up."""
        return bool(self._words[self._ABORTED])

    def boundary_of(self, rank: int) -> int:
        """The number of boundaries a rank has reached: a sign of life that costs the rank nothing."""
        return self._words[self._VOTES + rank] >> _BITS

    def release(self) -> None:
        """Let go of the shared memory; nothing else may be called afterwards."""
        self._reason_bytes.release()
        self._words.release()

    def reached(self) -> int:
        """Reasons for which all ranks stop at this boundary, OR-ed; 0 to go on.

        Raises
        ------
        TimeoutError
            If a request is there and some rank does not come to this boundary within ``timeout_s``.
        """
        self._boundary += 1
        words = self._words
        # The whole word at once: the usual case is one read.
        if not words[self._REQUESTED]:
            words[self._slot] = self._boundary << _BITS
            return 0
        return self._vote_to_stop()

    def _vote_to_stop(self) -> int:
        boundary, words = self._boundary, self._words
        agreed = self.requested
        words[self._slot] = boundary << _BITS | agreed
        deadline = time.monotonic() + self._timeout_s
        for rank in self._others:
            pause_s = 20e-6
            while (vote := words[self._VOTES + rank]) >> _BITS < boundary:
                if self.aborted or (
                    self._pids is not None and pause_s >= 1e-3 and not process_exists(self._pids[rank])
                ):
                    raise ConnectionAbortedError("another rank failed while this one waited for it at a step boundary")
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {rank} did not reach step boundary {boundary} within {self._timeout_s:g} s "
                        f"(it is at {vote >> _BITS}); rank {self._rank} waited there to stop training with it."
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1e-3)
            # A rank beyond this boundary has left it with the decision to go on.
            reasons = vote & (1 << _BITS) - 1 if vote >> _BITS == boundary else 0
            if not reasons:
                return 0
            agreed |= reasons
        return agreed


class GroupStop:
    """Ranks that share no memory (several nodes) agree through a small all-reduce at each boundary.

    The all-reduce of boundary ``s`` runs behind step ``s + 1``: a rank that has seen no request reads its outcome at
    the next boundary, one that has seen a request waits for it at once. The rule is that of :class:`SharedStop`.
    It goes through a Gloo group of its own, so it never mixes with the loop's exchanges or waits for a GPU.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        A Gloo group of all ranks that nothing else uses.
    world_size : int
        Ranks in it.
    also : SharedStop, optional
        Requests of this node, by signals or its launching process, which count as this rank's own.
    """

    def __init__(self, group: Any, world_size: int, also: SharedStop | None = None) -> None:
        self._group = group
        self._also = also
        self._world_size = world_size
        self._reasons = 0
        self._pending: tuple[Any, Any] | None = None  # (work, counts) of the boundary before

    def request(self, reason: int) -> None:
        """Ask all ranks to stop at the next boundary that all of them reach with the request in sight."""
        self._reasons |= reason

    def reached(self) -> int:
        """Reasons for which all ranks stop at this boundary, OR-ed; 0 to go on."""
        import torch
        import torch.distributed as dist

        if self._pending is not None:
            self._reasons |= self._outcome()[1]
        if self._also is not None:
            self._reasons |= self._also.requested
        seen = self._reasons
        votes = [int(bool(seen))] + [int(bool(seen & reason)) for reason in _REASONS]
        counts = torch.tensor(votes, dtype=torch.int32)
        self._pending = (dist.all_reduce(counts, group=self._group, async_op=True), counts)
        if not seen:
            return 0
        yes, reasons = self._outcome()
        self._reasons |= reasons
        return reasons if yes == self._world_size else 0

    def finish(self) -> None:
        """Wait for the exchange in flight; every rank calls it once, before the group is destroyed."""
        if self._pending is not None:
            self._outcome()

    def _outcome(self) -> tuple[int, int]:
        assert self._pending is not None
        work, counts = self._pending
        self._pending = None
        work.wait()
        yes, *by_reason = counts.tolist()
        return yes, sum(reason for reason, count in zip(_REASONS, by_reason, strict=True) if count)
