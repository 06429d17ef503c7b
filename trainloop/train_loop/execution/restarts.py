"""In the process that starts the ranks, decide if ranks restart after a failure, and from which checkpoint.

::

    a rank fails          launch ends the others, and calls Supervisor.error_that_ends_run
      it would recur        the error, with a note that explains why the run ends
    ranks restart         Supervisor.before_start names the newest checkpoint in the run's private folder
                          in each rank, RestartCheckpoints resumes from it (train_loop/training/restart_checkpoints.py)
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from trainloop import checkpoint
from trainloop._launch.failures import Failure, describe_failure, with_note
from trainloop._support import scratch
from trainloop.checkpoint import Checkpoint
from trainloop.errors import WorkerFailedError
from trainloop.optim.optimizers import optimizers_of
from trainloop.optim.parameters import own_parameters, trained_modules
from trainloop.parallel.sharded.shards import bytes_of
from trainloop.resources.machine import available
from trainloop.train_loop.arguments.options import Restart, RestartOptions
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.progress.restart_folder import RestartFolder, RestartOrder, restart_line

logger = logging.getLogger("trainloop")

_ROOM = 3  # two checkpoints, and the files of the run itself
_SHARE_OF_MEMORY = 0.5  # maximum share of the run's memory limit for these files


class _SeenFailure(NamedTuple):
    """A failure and the step at which it occurred, for the comparison with the next failure."""

    rank: int
    """Rank that caused the failure. After a hang, this is the rank that hangs, not the rank that reported the hang."""
    failure: Failure
    step: int
    trains: bool

    def recurs_in(self, other: _SeenFailure) -> bool:
        """Return True if ``other`` is the same failure at the same step."""
        a, b = self.failure, other.failure
        if (a.type, a.exitcode, a.timeout, *self[2:]) != (b.type, b.exitcode, b.timeout, *other[2:]):
            return False
        # A bug occurs on all ranks, and any rank may report it first; a signal or a lost connection affects one rank.
        of_code = a.type is not None and not (a.timeout or a.consequence or b.consequence)
        return self.rank == other.rank or (of_code and a.message == b.message)


class Supervisor:
    """Decides about restarts, and owns the private folder of the run; a context manager.

    Parameters
    ----------
    loop : LoopState
        Loop whose ``restarts`` are recorded.
    options : RestartOptions
    ranks : int
        Number of ranks.
    resume : dict, optional
        State of the checkpoint that the first start resumes.
    """

    def __init__(
        self, loop: LoopState, options: RestartOptions, ranks: int, resume: dict[str, Any] | None = None
    ) -> None:
        self._loop, self._most, self._ranks = loop, options.most, ranks
        self._begins_at: int = loop.global_step if resume is None else resume["place"]["global_step"]
        # A ModelCheckpoint that continues the resumed run's series writes under that run's name.
        states = [saved["state"] for saved in resume["callbacks"]] if resume is not None else []
        self._runs = [str(state["run"]) for state in states if isinstance(state, dict) and "run" in state]
        self._begun_ns = time.time_ns()
        self._last_failure: _SeenFailure | None = None
        self._pending: tuple[Restart, int] | None = None
        self._scratch = scratch.temporary_folder(memory_bytes=_room_in_memory(loop))
        self.folder = RestartFolder(self._scratch.path)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._record_restart(None)
        scratch.remove(self._scratch)

    def error_that_ends_run(self, failure: Failure, error: WorkerFailedError) -> WorkerFailedError | None:
        """Return the error that ends the run; ``None`` if the ranks will restart.

        All ranks have ended before this call.
        """
        self._record_restart(failure.time_ns)
        step, trains = map(int, self.folder.progress()[1 + error.rank])
        seen = _SeenFailure(error.rank, failure, step, bool(trains))
        done = len(self._loop.restarts)
        if failure.final:
            return error
        if self._last_failure is not None and self._last_failure.recurs_in(seen):
            when = f"after step {step}" if trains else f"before training was resumed after step {step}"
            return with_note(error, f"The same failure occurred again {when}, so another restart would not help.")
        if done == self._most:
            return with_note(error, f"All restarts have been used (max_restarts={self._most}).")
        self._last_failure = seen
        return None

    def before_start(self) -> None:
        """Write, for the ranks that are about to start, where they begin."""
        if self._last_failure is None:
            self.folder.begin(self._ranks, self._begins_at, None)
            return
        rank, failure = self._last_failure.rank, self._last_failure.failure
        reached = int(self.folder.progress()[1:, 0].max())
        # Of two checkpoints at the same step, use the later one, which may have been written after the epoch's end.
        step, _, path = max(self._checkpoints(), default=(self._begins_at, 0, ""))
        cause = "hangs" if failure.timeout and rank != failure.rank else describe_failure(failure)
        restart = Restart(rank, cause, step, max(reached - step, 0), 0.0)
        self._pending = restart, failure.time_ns
        limit = f"{self._nth(len(self._loop.restarts) + 1)}."
        self.folder.begin(self._ranks, step, RestartOrder(restart, failure.time_ns, limit, path))

    def _checkpoints(self) -> Iterator[tuple[int, int, str]]:
        """Yield step, time and path of each complete checkpoint that this run has written."""
        for one in checkpoint.checkpoints(self.folder.checkpoints):
            if one.info is not None:
                yield one.info.step, one.info.stamp, one.path
        found: list[Checkpoint] = []
        for callback in self._loop.callbacks:
            own = getattr(callback, "own_checkpoints", None)
            if own is not None:
                with contextlib.suppress(Exception):  # unreachable folder: the private checkpoints remain
                    found += own(self._runs)
        for one in found:
            if one.info is not None and one.info.stamp >= self._begun_ns:
                yield one.info.step, one.info.stamp, one.path

    def _record_restart(self, failed_ns: int | None) -> None:
        """Record the last restart, once training was resumed, or has failed again before it was resumed."""
        if self._pending is None:
            return
        (restart, begun_ns), self._pending = self._pending, None
        resumed_ns = int(self.folder.progress()[0, 0])
        end_ns = resumed_ns or failed_ns or time.monotonic_ns()
        restart = restart._replace(seconds=(end_ns - begun_ns) / 1e9)
        self._loop.restarts.append(restart)
        if not resumed_ns and failed_ns:  # no rank ran long enough to print
            limit = f"{self._nth(len(self._loop.restarts))} failed, too."
            logger.warning(restart_line(restart, limit))

    def _nth(self, number: int) -> str:
        return f"Restart {number}" if self._most < 0 else f"Restart {number} of {self._most}"


def _room_in_memory(loop: LoopState) -> int:
    """Return how many bytes of memory the private folder needs; 0 if the run is not allowed that much memory."""
    modules = trained_modules(loop.model, loop.criterion)
    weights = sum(bytes_of(tensor) for module in modules for tensor in (*own_parameters(module), *module.buffers()))
    states = [state for optimizer in optimizers_of(loop.optimizer) for state in optimizer.state.values()]
    held = sum(
        bytes_of(t) for state in states if isinstance(state, dict) for t in state.values() if isinstance(t, Tensor)
    )
    needed = _ROOM * (weights + (held or 2 * weights))  # before the first step, assume the size of Adam's state
    quota = loop.options.quota
    limit = available().memory if quota is None or quota.memory == "auto" else int(quota.memory)
    return needed if needed <= _SHARE_OF_MEMORY * limit else 0
