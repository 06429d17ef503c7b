"""Write a rank's checkpoints for restarts into the run's private folder, and resume from the newest one."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from typing import Any

from trainloop import checkpoint, distributed
from trainloop._launch.failures import described
from trainloop._support.user_line import warn
from trainloop.callbacks.checkpoints.run_checkpoints import RunCheckpoints, error_of
from trainloop.checkpoint import CheckpointInfo, Folder
from trainloop.checkpoint.sharded_writing import FolderWriting
from trainloop.train_loop.arguments.options import Restart
from trainloop.train_loop.progress.restart_folder import RestartFolder, restart_line
from trainloop.train_loop.progress.running import TrainingRun
from trainloop.train_loop.saving.collect import states_of_ranks, whole_state
from trainloop.train_loop.saving.resume_point import checkpoint_to_resume

logger = logging.getLogger("trainloop")

SHARE_OF_TIME = 0.01
"""Maximum share of time for restart checkpoints, unless the user sets how often they are written."""
_RUN = "restarts"  # part of the names of unfinished files, by which each start removes the files of the previous start


class RestartCheckpoints:
    """Write a run's checkpoints between steps; if a rank fails, the ranks resume from the newest one.

    Parameters
    ----------
    run : TrainingRun
    folder : RestartFolder
    every : int, optional
        Steps between two checkpoints; ``None`` to limit their cost to :data:`SHARE_OF_TIME`.
    """

    def __init__(self, run: TrainingRun, folder: RestartFolder, every: int | None) -> None:
        self._run, self._every = run, every
        self._sharded = run.place.collective
        self._files = RunCheckpoints(checkpoint.folder(folder.checkpoints), None, with_weights=False)
        self._files.run = _RUN
        if run.loop.is_global_zero:
            self._files.remove_unfinished()
        self._order = folder.order()
        self._progress = folder.progress()
        self._row = 1 + run.loop.process.local_rank
        self._resumes = self._order is not None  # True until the first step is done
        self._pause = every or 1
        self._failed = 0  # checkpoints in a row that could not be written
        self._warned = False
        self._last_step = self._next = 0
        self._written_at = self._cost_s = 0.0

    @property
    def restart(self) -> Restart | None:
        """The restart by which this process was started; ``None`` for the first start."""
        return None if self._order is None else self._order.restart

    # -- at boundaries -----------------------------------------------------------------------------------------------

    def at_boundary(self, reasons: int) -> None:
        """Write a checkpoint if one is due and the ranks have no ``reasons`` to stop. Collective."""
        run = self._run
        step = run.loop.global_step
        self._progress[self._row, 0] = step
        if self._resumes:
            self._report_restart()
        # At an epoch's end, ranks have agreed on whether to end; within an epoch, they have not agreed, so they
        # continue.
        if step >= self._next and not reasons and (run.epoch_steps or not run.loop.end_requested):
            self._save_and_agree(step)

    def _report_restart(self) -> None:
        """After the first step since a restart, print a line, and report the time to the launching process."""
        self._resumes = False
        assert self._order is not None
        if self._row == 1:
            self._progress[0, 0] = now = time.monotonic_ns()
            if self._run.loop.is_global_zero:
                restart = self._order.restart._replace(seconds=(now - self._order.failed_ns) / 1e9)
                logger.warning(restart_line(restart, self._order.limit))

    def _save_and_agree(self, step: int) -> None:
        begin = time.perf_counter()
        problem = self._write_for_restart(step)
        mine = [int(problem is not None), int(1e9 * self._cost_s), int(1e9 * (begin - self._written_at))]
        # After this exchange all ranks have written, and decide from the same numbers.
        failed, costs, pauses = zip(*distributed.exchange_ints(mine))
        if problem and not self._warned:
            self._warned = True
            warn(
                f"max_restarts: no checkpoint could be written after step {step} ({problem}). Until one is written, a "
                "failure repeats more steps.",
                RuntimeWarning,
            )
        self._failed = self._failed + 1 if any(failed) else 0
        if self._every is None:
            # The rank that arrived last did not wait for others, so its time is the previous checkpoint's cost for all
            # ranks.
            self._pause = steps_between(min(costs), max(pauses) / max(step - self._last_step, 1))
        soon = 2**self._failed - 1 if self._failed else self._pause
        self._last_step, self._next = step, step + min(self._pause, soon)
        self._written_at = time.perf_counter()
        self._cost_s = self._written_at - begin

    def _write_for_restart(self, step: int) -> str | None:
        """Write a checkpoint. On failure, return this rank's reason, or ``''`` if only other ranks failed. Collective.

        An error in a user's ``state_dict``, or lack of disk space, does not end the training.
        """
        run, loop = self._run, self._run.loop
        state, problem = None, None
        ranks = states_of_ranks(run)
        try:
            state = whole_state(run, ranks)
        except Exception as raised:
            problem = described(raised)
        # If all ranks write, a rank that can't write would leave the others waiting.
        if self._sharded and any(theirs for (theirs,) in distributed.exchange_ints([int(problem is not None)])):
            return problem or ""
        if state is None:
            return problem
        info = CheckpointInfo(loop.history_epoch, step, _RUN, reason="restart")
        folder, write_as = self._files.folder, partial(self._files.write_as, info, keep=1, in_folder=self._sharded)
        if self._sharded:
            name = checkpoint.checkpoint_name(info)
            error = FolderWriting(folder.location, name, _RUN, state, write_as, wait_s=loop.timeout).write()
        else:
            put = partial(_save_undurably, folder, state)
            error = error_of(partial(write_as, put))
        return None if error is None else described(error)

    # -- resuming ----------------------------------------------------------------------------------------------------

    def resume_state(self, job_resume: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the state from which this start resumes: after a failure, the state in the newest checkpoint."""
        if self._order is None or not self._order.checkpoint:
            return job_resume
        return checkpoint_to_resume(self._run.loop, self._order.checkpoint)

    def begin(self) -> None:
        """Start training from the loaded state; after a failure, call ``on_restart``. Collective."""
        run, loop = self._run, self._run.loop
        self._last_step, self._next = loop.global_step, loop.global_step + self._pause
        self._progress[self._row] = loop.global_step, 1
        restart = self.restart
        if restart is not None:
            for hook in run.hooks.on_restart:
                hook(restart)
            if run.ended or run.is_done():  # no further step
                self._report_restart()
        self._written_at = time.perf_counter()


def _save_undurably(folder: Folder, state: dict[str, Any], name: str, info: CheckpointInfo) -> None:
    checkpoint.save(folder.path(name), state, info, durable=False)


def steps_between(cost: float, step: float) -> int:
    """Return how many steps between checkpoints limit their cost; ``cost`` and ``step`` have the same unit."""
    return max(1, math.ceil(cost / SHARE_OF_TIME / max(step, 1)))
