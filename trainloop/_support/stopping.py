"""Stop all ranks at the same step boundary, whatever requested it.

A *boundary* is the place between two optimizer steps. Every rank calls :meth:`StopAgreement.reached` at each one;
a callback, a signal handler or the launching process may call :meth:`StopAgreement.request` at any time.

::

    with signals(stop):                 # Ctrl-C, SIGTERM and SIGUSR1 become requests: trainloop._support.signals
        for step in feed.steps(...):
            train_step(step)
            if stop.reached():          # the same answer on every rank at the same boundary
                break

How ranks agree: at boundary ``s``, each rank votes yes if it has seen a request, and never changes its vote. If all
voted yes, all stop at ``s``; so a request by every rank in the same step (``EarlyStopping``) costs no more steps than
in one process. If some voted no, no rank stops at ``s``. The ranks that voted no will see the request at the next
boundary (or a few later, if they were ahead), and all ranks stop there. Only ranks that voted yes wait for other votes,
so a run without a request never waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from trainloop._support.platform import process_exists

EARLY_STOP = 1
"""A callback or the user requested the end of training."""
INTERRUPT = 2
"""Ctrl-C (SIGINT)."""
TERMINATE = 4
"""SIGTERM: the scheduler or the user ends the job."""
CHECKPOINT = 8
"""SIGUSR1: the job's time is almost up (Slurm's ``--signal=USR1@120``); the same as TERMINATE for the loop."""
END_EPOCH = 16
"""A callback requested the end of the epoch; training continues with the next epoch."""
HANGUP = 32
"""SIGHUP: the terminal was closed, or the connection lost; the same as TERMINATE for the loop."""
NOTICE = 64
"""SIGUSR2 in a job whose scheduler announces the job's end by this signal; the same as CHECKPOINT for the loop."""

_REASONS = (EARLY_STOP, INTERRUPT, TERMINATE, CHECKPOINT, END_EPOCH, HANGUP, NOTICE)
_BITS = 8  # lower bits of a vote, with the reasons seen; the upper bits are the boundary's number


class LocalStop:
    """The agreement for a single process: a request takes effect at the next boundary."""

    def __init__(self) -> None:
        self._reasons = 0

    def request(self, reason: int) -> None:
        """Stop at the next boundary."""
        self._reasons |= reason

    def reached(self) -> int:
        """Return the reasons requested so far, OR-ed."""
        return self._reasons

    def clear(self, reason: int) -> None:
        """Forget requests for a reason that has been served."""
        self._reasons &= ~reason


class State:
    """The state of a rank, in one int64 of shared memory, which only the rank writes."""

    STARTING, RUNNING, DONE, FAILING, FAILED, TIMED_OUT, RESCUING = range(7)


class SharedStop:
    """The agreement for ranks of one node, through a few int64 slots of shared memory.

    The bytes of the first slot are the requested reasons. The second slot is the abort flag. Then each rank has a slot
    for its latest vote. Each slot or byte can change to one value only, or has one writer, and is written atomically,
    so that no locks are needed. The last slots are the :class:`State` of each rank.
    A boundary without a request costs one read and one write.

    Parameters
    ----------
    slots : memoryview
        ``SharedStop.num_slots(world_size)`` zeroed int64 slots (format ``'q'``), mapped by all ranks and the parent.
    rank, world_size : int
        This rank, and the number of ranks that share the slots; the launching process has ``rank=-1`` and only
        requests.
    timeout_s : float
        Seconds that a rank that votes to stop waits for the others to reach the boundary.
    pids : sequence of int, optional
        Process of each rank, if no launching process of this package watches the ranks: a rank then stops waiting for a
        dead process.
    """

    _REQUESTED, _ABORTED, _VOTES = 0, 1, 2

    def __init__(
        self,
        slots: memoryview,
        rank: int,
        world_size: int,
        timeout_s: float = 1800.0,
        pids: Sequence[int] | None = None,
    ) -> None:
        self._slots = slots
        self._pids = pids
        self._reason_bytes = slots.cast("B")
        self._rank = rank
        self._others = [r for r in range(world_size) if r != rank]
        self._slot = self._VOTES + rank
        self._states = self._VOTES + world_size
        self._timeout_s = timeout_s
        self._boundary = 0

    @classmethod
    def num_slots(cls, world_size: int) -> int:
        """Return the number of int64 slots that ``world_size`` ranks need."""
        return cls._VOTES + 2 * world_size

    def request(self, reason: int) -> None:
        """Ask all ranks to stop at the next boundary that all of them reach after seeing the request."""
        for index, known in enumerate(_REASONS):
            if reason & known:
                self._reason_bytes[index] = 1

    def clear(self, reason: int) -> None:
        """Forget requests for a reason that has been served.

        All ranks call it between two exchanges, after their last boundary before the first exchange, and before their
        first request after the second one.
        """
        for index, known in enumerate(_REASONS):
            if reason & known:
                self._reason_bytes[index] = 0

    @property
    def requested(self) -> int:
        """Reasons requested, whether or not the ranks have reached a boundary since."""
        flags = self._reason_bytes
        return sum(reason for index, reason in enumerate(_REASONS) if flags[index])

    def abort(self) -> None:
        """Mark the run as failed, so that ranks stop waiting for votes.

        The launching process calls it; without one, the rank that fails.
        """
        self._slots[self._ABORTED] = 1

    @property
    def aborted(self) -> bool:
        """True if the run has been marked as failed."""
        return bool(self._slots[self._ABORTED])

    @property
    def failed(self) -> bool:
        """True if the run has been marked as failed, or a rank's process (``pids``) has ended before it was done."""
        return self.aborted or any(
            self.state_of(rank) != State.DONE and not process_exists(pid) for rank, pid in enumerate(self._pids or ())
        )

    def set_state(self, state: int) -> None:
        """Set this rank's :class:`State`; a rank that is done reaches no other boundary, and its process may end."""
        self._slots[self._states + self._rank] = state

    def state_of(self, rank: int) -> int:
        """Return a rank's :class:`State`."""
        return self._slots[self._states + rank]

    def boundary_of(self, rank: int) -> int:
        """Return the number of boundaries that a rank has reached: a sign of life that costs the rank nothing."""
        return self._slots[self._VOTES + rank] >> _BITS

    def release(self) -> None:
        """Release the shared memory; nothing else may be called afterwards."""
        self._reason_bytes.release()
        self._slots.release()

    def reached(self) -> int:
        """Return the reasons for which all ranks stop at this boundary, OR-ed; 0 to continue.

        Raises
        ------
        TimeoutError
            If there is a request and a rank does not reach this boundary within ``timeout_s``.
        """
        self._boundary += 1
        slots = self._slots
        # Read all bytes at once, so that the usual case is one read.
        if not slots[self._REQUESTED]:
            slots[self._slot] = self._boundary << _BITS
            return 0
        return self._vote_to_stop()

    def _vote_to_stop(self) -> int:
        boundary, slots = self._boundary, self._slots
        agreed = self.requested
        slots[self._slot] = boundary << _BITS | agreed
        deadline = time.monotonic() + self._timeout_s
        for rank in self._others:
            pause_s = 20e-6
            while (vote := slots[self._VOTES + rank]) >> _BITS < boundary:
                if self.aborted or (
                    self._pids is not None and pause_s >= 1e-3 and not process_exists(self._pids[rank])
                ):
                    raise ConnectionAbortedError("another rank failed while this one waited for it at a step boundary")
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {rank} did not reach step boundary {boundary} within {self._timeout_s:g} s (it is at "
                        f"{vote >> _BITS}). Rank {self._rank} was waiting there to stop training at the same step."
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1e-3)
            # A rank that is past this boundary has decided to continue there.
            reasons = vote & (1 << _BITS) - 1 if vote >> _BITS == boundary else 0
            if not reasons:
                return 0
            agreed |= reasons
        return agreed


class GroupStop:
    """The agreement for ranks without shared memory (several nodes), by a small all-reduce at each boundary.

    The all-reduce of boundary ``s`` runs during step ``s + 1``. A rank that has seen no request reads the outcome at
    the next boundary. A rank that has seen a request waits for the outcome immediately. The rule is the same as in
    :class:`SharedStop`. The all-reduce uses a separate Gloo group, so it never mixes with the loop's exchanges or waits
    for a GPU.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        A Gloo group of all ranks that nothing else uses.
    world_size : int
        Number of ranks in it.
    also : SharedStop, optional
        Agreement of this node's ranks. Requests that signals or the launching process send to it count as requests of
        this rank.
    """

    def __init__(self, group: Any, world_size: int, also: SharedStop | None = None) -> None:
        self._group = group
        self._also = also
        self._world_size = world_size
        self._reasons = 0
        self._pending: tuple[Any, Any] | None = None  # (work, counts) of the previous boundary

    def request(self, reason: int) -> None:
        """Ask all ranks to stop at the next boundary that all of them reach after seeing the request."""
        self._reasons |= reason

    def reached(self) -> int:
        """Return the reasons for which all ranks stop at this boundary, OR-ed; 0 to continue."""
        import torch
        import torch.distributed as dist

        if self._pending is not None:
            self._reasons |= self._outcome()[1]
        if self._also is not None:
            self._reasons |= self._also.requested
        seen = self._reasons
        votes = [int(bool(seen))] + [int(bool(seen & reason)) for reason in _REASONS]
        counts = torch.tensor(votes, dtype=torch.int32, device="cpu")
        self._pending = (dist.all_reduce(counts, group=self._group, async_op=True), counts)
        if not seen:
            return 0
        yes, reasons = self._outcome()
        self._reasons |= reasons
        return reasons if yes == self._world_size else 0

    def clear(self, reason: int) -> None:
        """Forget requests for a reason that has been served; see :meth:`SharedStop.clear`."""
        if self._pending is not None:
            self._reasons |= self._outcome()[1]
        if self._also is not None:
            self._also.clear(reason)
        self._reasons &= ~reason

    def finish(self) -> None:
        """Wait for the exchange in flight; every rank must call this once, before the group is destroyed."""
        if self._pending is not None:
            self._outcome()

    def _outcome(self) -> tuple[int, int]:
        assert self._pending is not None
        work, counts = self._pending
        self._pending = None
        work.wait()
        yes, *by_reason = counts.tolist()
        return yes, sum(reason for reason, count in zip(_REASONS, by_reason, strict=True) if count)


StopAgreement = LocalStop | SharedStop | GroupStop
"""The agreement by which a loop stops all ranks at one boundary.

``request(reason)`` asks all ranks to stop, for one of the constants; any thread of any rank may call it repeatedly.
``clear(reason)`` forgets it, between two exchanges of all ranks.
Every rank calls ``reached()`` at every boundary; it returns the reasons to stop here, OR-ed, or 0 to continue.
"""
