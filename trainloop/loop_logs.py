"""What a loop records: logs of steps and epochs, and the history that they become.

What is logged in a hook belongs to the epoch whose hook it is. Hooks of steps log into the epoch that is being
recorded. At its end all ranks exchange what they logged; then come its last hooks, callback by callback, and what one
of them has logged is exchanged before the next is called, so that it finds it in the history.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from trainloop import distributed
from trainloop.callbacks.base import overrides
from trainloop.errors import ConfigurationError
from trainloop.loop_base import LoopBase, Run
from trainloop.metrics import Recorder, StepValues, named_losses, rows_of

__all__ = ["STEPS_BETWEEN_FLUSHES", "LoggingLoop"]

# Steps between two readings of the logs: they wait for the device, and ranks exchange what they logged.
STEPS_BETWEEN_FLUSHES = 128
# Step values are held twice until they are exchanged.
MOST_STEPS_BETWEEN_EXCHANGES = 32 * STEPS_BETWEEN_FLUSHES


class LoggingLoop(LoopBase):
    """A loop that records; see :class:`trainloop.TrainLoop`."""

    def log(
        self,
        name: str,
        value: Tensor | float,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce: str = "mean",
        sync_dist: bool = True,
        batch_size: Tensor | float | None = None,
        prog_bar: bool = False,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a metric from anywhere in a running loop: :meth:`trainloop.TTModel.log` without the model.

        Raises
        ------
        ConfigurationError
            As there; and where nothing is running, so that there is no epoch it could belong to.
        """
        run = self._run
        if run is None or run.sink is None:
            raise ConfigurationError(
                f"log({name!r}, ...): nothing is running, so there is no epoch to log for. Call it in a hook, from "
                "on_multiprocess_start on; insert_metric_result_into_history adds to the last epoch after fit."
            )
        run.sink(name, value, (on_step, on_epoch, reduce, sync_dist, prog_bar, rank_zero_only), batch_size)

    @property
    def history_epoch(self) -> int:
        """The epoch, counted from 0, whose row what is logged now goes into; between epochs the last one."""
        return int(self._run.history_epoch) if self._run is not None else max(self.epoch - 1, 0)

    def insert_metric_result_into_history(self, name: str, value: float) -> None:
        """Append a value to the history of a metric, for the running epoch (outside ``fit``: the last one).

        It is there at once. In ``ddp`` ranks exchange what they inserted when the hook is over (inside an epoch: at its
        end): the value becomes the mean over the ranks that inserted one, on all ranks. Of several values of one name
        the first ones make one mean, the second ones another. :meth:`log` has other ways to reduce.
        """
        run = self._run
        if run is None:
            self.history._append(name, float(value), self.history_epoch)
        elif run.gather is None:
            self.history._append(name, float(value), run.history_epoch)
        else:
            self.history._insert(name, float(value), run.history_epoch)

    def flush_logs(self) -> None:
        """Read what was logged and hand it to ``on_log``. Collective; waits for the device."""
        run = self._run
        if run is None:
            return
        # The same answer on all ranks: hooks of one rank make all exchange. Without hooks, now and then is enough.
        heard = any(overrides(callback, "on_log") for callback in self.callbacks)
        if heard or run.epoch_steps % MOST_STEPS_BETWEEN_EXCHANGES == 0:
            self._publish(run, run.recorder.exchange_steps())
        else:
            run.recorder.compact()

    def _publish(self, run: Run, steps: StepValues) -> None:
        self.history._extend_steps(steps)
        if steps and self.is_global_zero and run.hooks.on_log:
            rows = rows_of(steps)
            for hook in run.hooks.on_log:
                hook(rows)

    def _bar_values(self) -> dict[str, float]:
        loss = {} if self.last_loss is None else {"loss": float(self.last_loss)}
        return {**loss, **self._run.recorder.bar_values()}

    # -- at an epoch's end -------------------------------------------------------------------------------------------

    def _record_epoch(self, run: Run, *, late: bool = False) -> None:
        """What was logged since the epoch began (``late``: since this was called) into the history. Collective."""
        end = run.recorder.finish_epoch(self.history._take_own(), late=late)
        self._publish(run, end.steps)
        for name, value in {**named_losses(end.losses), **end.metrics}.items():
            self.history._append(name, value, run.history_epoch, replace=True)
        self.history._put_agreed(end.riders)

    def _call_in_turn(self, run: Run, name: str) -> None:
        """Call a hook that comes after its epoch was recorded; each callback finds what those before it logged."""
        for hook, may_log in run.hooks.in_turn(name):
            if hook is not None:
                hook()
            if may_log and run.same_callbacks:
                self._record_late(run)
        if not run.same_callbacks:
            self._record_late(run)

    def _record_late(self, run: Run) -> None:
        logged = run.recorder.has_logs or self.history._has_own
        if run.gather is not None:
            logged = any(theirs for (theirs,) in distributed.exchange_ints([int(logged)]))
        if logged:
            self._record_epoch(run, late=True)

    def _have_same_callbacks(self, run: Run) -> bool:
        """Whether ranks can take turns: under torchrun each makes its own callbacks. Collective."""
        if run.gather is None:
            return True
        turns = [len(run.hooks.in_turn(name)) for name in ("on_epoch_end", "on_train_end")]
        return all(theirs == turns for theirs in distributed.exchange_ints(turns))

    @contextmanager
    def _recording_alone(self, run: Run) -> Iterator[None]:
        """What this rank logs goes into its history without an exchange: the others may be gone."""
        recorder = Recorder(rank=self.rank, on_step=False)
        with self._listening(recorder):
            yield
        for name, value in recorder.finish_epoch().metrics.items():
            self.history._append(name, value, run.history_epoch, replace=True)
