"""A run that survives failures, seen from the process that starts its ranks: whether they start again, and from where.

::

    a rank fails                  launch ends the others, and asks Supervisor.failed
      it would only come again      the error, with a word about why the run ends
    hosts meet again              each says what it has seen and kept: Supervisor.says
      all have spoken               a notice in memory, what failed and which snapshot to go on from: Supervisor.agreed
    ranks start again             StopWithSnapshots reads the notice and takes up what it says
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from trainloop.errors import ConfigurationError, ResourceError, WorkerFailedError
from trainloop.launch.failures import Failure, deed_of
from trainloop.optim import optimizers_of
from trainloop.resources.quota import format_bytes
from trainloop.train_loop.copies import parts_of_host
from trainloop.train_loop.going_on import Word, going_on
from trainloop.train_loop.options import RestartOptions
from trainloop.train_loop.signs import failed_in_a_row, get_back, get_status, set_back, set_status, status_words
from trainloop.train_loop.snapshots import Restart, restart_line
from trainloop.transfer.slots import SnapshotMemory

if TYPE_CHECKING:
    from trainloop.train_loop.loop import TrainLoop

__all__ = ["Supervisor"]

_FAILURES_IN_A_ROW = 3  # of making a snapshot; then a checkpoint counts, which has less in it
_fits_over_hosts = itertools.count(1)


class _Struck(NamedTuple):
    """A failure and when it came, to tell whether another is the same."""

    rank: int
    """That is to blame: where one hangs not the rank that told of it."""
    failure: Failure
    step: int
    trains: bool

    def again(self, last: _Struck) -> bool:
        """Whether it is the last one once more, at the same place."""
        a, b = self.failure, last.failure
        if (a.type, a.exitcode, a.timeout, *self[2:]) != (b.type, b.exitcode, b.timeout, *last[2:]):
            return False
        # A bug strikes all ranks, and any of them may be the first to tell; a signal or a lost connection strikes one.
        of_code = a.type is not None and not (a.timeout or a.consequence or b.consequence)
        return self.rank == last.rank or (of_code and a.message == b.message)


class Supervisor:
    """Decides about restarts, and keeps the memory that ranks leave their snapshots in; a context manager.

    Over several hosts each has one of its own. What they decide from, they tell each other before ranks start, and
    all come to the same from the same words.

    Parameters
    ----------
    loop : TrainLoop
        Whose ``restarts`` are written.
    options : RestartOptions
    ranks : int
        Of this host.
    num_nodes, node_rank : int
        Hosts, and which one this is.
    begins_at : int
        Step that the run begins at: the caller's own, or that of the checkpoint it resumes.
    """

    def __init__(
        self,
        loop: TrainLoop[Any],
        options: RestartOptions,
        ranks: int,
        *,
        num_nodes: int = 1,
        node_rank: int = 0,
        begins_at: int | None = None,
    ) -> None:
        check_memory(loop)
        self._loop, self._most, self._ranks = loop, options.most, ranks
        self._num_nodes, self._node_rank = num_nodes, node_rank
        self._begins_at = loop.global_step if begins_at is None else begins_at
        self._fit = next(_fits_over_hosts) if num_nodes > 1 else 0
        self.memory = SnapshotMemory(parts_of_host(ranks, num_nodes), status_words(ranks))
        self._last: _Struck | None = None
        self._struck: tuple[Failure, WorkerFailedError] | None = None
        self._pending: tuple[Restart, int] | None = None
        self._begun_ns = time.monotonic_ns()
        for rank in range(ranks):
            set_status(self.memory, rank, self._begins_at, trains=False)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._note_end_of_restart(None)
        self.memory.close()

    def failed(self, failure: Failure, error: WorkerFailedError) -> WorkerFailedError | None:
        """A rank has failed, and all have ended: ``None`` where they can start again.

        Returns
        -------
        WorkerFailedError or None
            That ends the run, where it would only come again, or restarts are used up.
        """
        self._note_end_of_restart(failure.time_ns)
        rank = error.rank
        local = rank - self._node_rank * self._ranks
        step, trains = get_status(self.memory, local if local in range(self._ranks) else 0)
        struck = _Struck(rank, failure, step, trains)
        done = len(self._loop.restarts)
        if failure.final:
            return error
        if self._last is not None and struck.again(self._last):
            when = f"after step {step}" if trains else f"before the training went on after step {step}"
            return _with_note(error, f"It came again, {when}, so that a further restart would not help.")
        if done == self._most:
            return _with_note(error, f"max_restarts={self._most} {'is' if done == 1 else 'are'} used up.")
        self._last, self._struck = struck, (failure, error)
        return None

    def before_start(self) -> None:
        """See to it that ranks, which are about to start, resume from the right place."""
        self.agreed([self.says()])

    def says(self) -> dict[str, Any]:
        """What the other hosts have to know of this one before ranks start; plain types."""
        word = Word(self._fit, self._begins_at, [list(restart) for restart in self._loop.restarts])
        if self._struck is None:
            return word._asdict()
        failure, error = self._struck
        hangs = failure.timeout and error.rank != failure.rank
        word = word._replace(
            failed=[error.rank, "hangs" if hangs else deed_of(failure)],
            reached=max(get_status(self.memory, r)[0] for r in range(self._ranks)),
            whole=list(self.memory.whole().items()),
            checkpoint=self._checkpoint(),
        )
        return word._asdict()

    def agreed(self, said: Sequence[Mapping[str, Any]]) -> None:
        """All hosts have spoken, and ranks are about to start: see to it that they go on from the right place.

        Raises
        ------
        WorkerFailedError, ConfigurationError
            Where there is none.
        """
        words = [Word(**word) for word in said]
        goes_on = going_on(words)
        if goes_on is None:  # all begin
            return
        if goes_on.problem:
            raise self.error_that_ends(goes_on.problem) or ConfigurationError(goes_on.problem)
        self.memory.forget_all_but(goes_on.number)
        most = max((word.restarts for word in words), key=len)
        known = self._loop.restarts
        known += [Restart(*restart) for restart in most[len(known) :]]  # a host that comes again has none
        failed_ns = self._begun_ns if self._struck is None else self._struck[0].time_ns
        restart = Restart(goes_on.rank, goes_on.cause, goes_on.step, goes_on.steps_repeated, 0.0)
        self._pending = restart, failed_ns
        set_back(self.memory, 0)
        for r in range(self._ranks):
            set_status(self.memory, r, goes_on.step, trains=False)
        self.memory.give_notice(
            {
                "restart": restart._asdict(),
                "failed_ns": failed_ns,
                "limit": f"{self._nth(len(self._loop.restarts) + 1)}.",
                "number": goes_on.number,
                "checkpoint": goes_on.checkpoint,
                "lost": goes_on.lost,
            }
        )

    def error_that_ends(self, why: str) -> WorkerFailedError | None:
        """The error of the failure that can't be survived; ``None`` where there was none here."""
        return None if self._struck is None else _with_note(self._struck[1], why)

    def _checkpoint(self) -> list[Any] | None:
        """Step and path of the newest, if several snapshots in a row could not be made."""
        # A snapshot follows on each checkpoint, and has more in it: attributes of modules and of callbacks without a
        # state_dict. So the one before is better than a newer checkpoint, unless it grows old.
        if failed_in_a_row(self.memory) < _FAILURES_IN_A_ROW:
            return None
        # This very run's: what is newest in some folder may be another's.
        keepers = [callback for callback in self._loop.callbacks if hasattr(callback, "own_checkpoints")]
        own = max((found[-1] for keeper in keepers if (found := keeper.own_checkpoints())), default=None)
        return None if own is None else list(own)

    def _note_end_of_restart(self, failed_ns: int | None) -> None:
        """The last restart is over: training went on, or failed again before it did."""
        if self._pending is None:
            return
        (restart, begun_ns), self._pending = self._pending, None
        back_ns = get_back(self.memory)
        end_ns = back_ns or failed_ns or time.monotonic_ns()
        restart = restart._replace(seconds=(end_ns - begun_ns) / 1e9)
        self._loop.restarts.append(restart)
        if not back_ns and failed_ns and self._node_rank == 0:  # no rank came as far as to say it
            limit = f"{self._nth(len(self._loop.restarts))} failed, too."
            print(restart_line(restart, limit), file=sys.stderr, flush=True)

    def _nth(self, number: int) -> str:
        return f"Restart {number}" if self._most < 0 else f"Restart {number} of {self._most}"


def check_memory(loop: TrainLoop[Any]) -> None:
    """Whether the run's quota has room for two snapshots.

    Raises
    ------
    ResourceError
        If they alone would take all of it.
    """
    quota = loop.options.quota
    if quota is None or quota.memory == "auto":
        return
    needed = 2 * _snapshot_bytes(loop)
    if needed >= int(quota.memory):
        raise ResourceError(
            f"max_restarts keeps two snapshots in memory, {format_bytes(needed)} of weights and optimizer state, but "
            f"the quota has memory={format_bytes(int(quota.memory))} for the whole run. Raise it, or use a "
            "ModelCheckpoint and resume_from='last' instead of max_restarts."
        )


def _snapshot_bytes(loop: TrainLoop[Any]) -> int:
    """Bytes of weights, buffers and optimizer state, as far as they can be known before the first step."""
    modules = [module for module in (loop.model, loop.criterion) if isinstance(module, nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return sum(tensor.nbytes for tensor in tensors) + sum(map(_state_bytes, optimizers_of(loop.optimizer)))


def _state_bytes(optimizer: Optimizer) -> int:
    """What an optimizer holds; before its first step, what a copy of it holds after one, of a small parameter."""
    held = sum(t.nbytes for state in optimizer.state.values() for t in _tensors_in(state))
    total = 0
    for group in optimizer.param_groups if not held else ():
        probe = nn.Parameter(torch.zeros(64))
        probe.grad = torch.zeros(64)
        twin = copy.copy(optimizer)
        twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [probe]}]
        with contextlib.suppress(Exception):  # of an optimizer that needs more than that
            type(optimizer).step(twin)
        own = sum(t.nbytes for t in _tensors_in(twin.state[probe]) if t.numel() == probe.numel())
        total += own * sum(parameter.nbytes for parameter in group["params"]) // probe.nbytes
    return held or total


def _tensors_in(state: Any) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)] if isinstance(state, dict) else []


def _with_note(error: WorkerFailedError, note: str) -> WorkerFailedError:
    """The error with one more sentence in its first line."""
    first, newline, rest = error.message.partition("\n")
    message = f"{first} {note}{newline}{rest}"
    return WorkerFailedError(message, rank=error.rank, exitcode=error.exitcode, traceback=error.traceback)
