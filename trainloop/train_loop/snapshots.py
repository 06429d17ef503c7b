"""A rank's snapshots: what they hold, when they are made, and how a rank that is started again goes on from one.

A snapshot is a checkpoint's content and, since it need not outlive the script, what only a process started from the
same payload can take back: attributes of callbacks and modules, and the objects in these. Weights and optimizers are
written by a host's first rank for all of them, the rest by each rank for itself.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from trainloop import distributed
from trainloop.checkpoint.background import BackgroundWrite, error_of
from trainloop.launch.failures import described
from trainloop.optim import optimizers_of
from trainloop.parallel.shards import gathered, map_tensors
from trainloop.stopping import StopAgreement
from trainloop.train_loop import handover
from trainloop.train_loop import state as run_state
from trainloop.train_loop.copies import Copies
from trainloop.train_loop.signs import failed_in_a_row, set_back, set_failed_in_a_row, set_status, step_word
from trainloop.train_loop.snapshot_parts import (
    FUNCTIONS,
    OF_A_PROCESS,
    attributes,
    own_attributes,
    owner_text,
    put_attributes,
    put_into_datasets,
)
from trainloop.transfer.device_copies import DeviceCopies
from trainloop.transfer.slots import Packed, SnapshotMemory, Snapshotter, arrived_classes
from trainloop.user_line import warn

if TYPE_CHECKING:
    from trainloop.train_loop.handover import Arrival
    from trainloop.train_loop.training import Training

__all__ = ["Restart", "StopWithSnapshots", "restart_line", "steps_between"]

SHARE_OF_TIME = 0.01
"""What snapshots may cost, where nobody says how often to make them."""

_Part = dict[str, dict[Any, Any]]
_NEEDED = ("rank", "buffers")  # of a rank's part; from the other sections what can't be pickled is left out


class Restart(NamedTuple):
    """One restart of a run: what ``tl.restarts`` lists, and ``on_restart`` gets."""

    rank: int
    """Global rank that failed first."""
    cause: str
    """What it did, or what was done to it: ``was killed by signal SIGKILL``."""
    step: int
    """Optimizer step after which training went on."""
    steps_repeated: int
    """Steps after it that had been done already."""
    seconds: float
    """From the failure until a step more than :attr:`step` was done, or until the next failure."""


class _WriteBeside:
    """The write of a snapshot in a thread, once the copies of what is on the device are there."""

    def __init__(self, copies: DeviceCopies, write: Callable[[], None], step: int) -> None:
        self._took = took = [0.0, 0.0]
        write_then = partial(_write_beside, copies, write, took)
        # A rank that fails has not to wait for its device: the snapshot before this one is whole.
        self._background = BackgroundWrite(partial(error_of, write_then), step, name="snapshot", abandoned=True)

    def result(self) -> tuple[str | None, float, float]:
        """Waits for it: what went wrong; the seconds that the device copied, and those until all was written."""
        error = self._background.wait()
        copying_s, whole_s = self._took
        return None if error is None else described(error), copying_s, whole_s


# Not a method: a memoryview that others have views of crashes Python 3.11 where a cycle of references holds it.
def _write_beside(copies: DeviceCopies, write: Callable[[], None], took: list[float]) -> None:
    begin = time.perf_counter()
    took[0] = copies.wait()
    write()
    copies.reserve()
    took[1] = time.perf_counter() - begin


class _Begun(NamedTuple):
    """A snapshot that is written, or that a thread writes; not yet agreed on."""

    step: int
    since_s: float
    """From the one before."""
    writing_s: float
    """What the steps waited for it, exchanges left out."""
    whole_s: float
    """The same with exchanges."""
    problem: str | None
    """What kept this rank from it; empty: others could not."""
    beside: _WriteBeside | None


class StopWithSnapshots:
    """A run's :class:`~trainloop.stopping.StopAgreement` that makes snapshots at boundaries, where one is due.

    Parameters
    ----------
    run : Training
        Whose ``stop`` it stands for.
    arrival : Arrival
        What the loop was when it came here.
    memory : SnapshotMemory
    every : int, optional
        Steps between two; ``None``: as seldom as the time that they take asks for.
    """

    def __init__(self, run: Training, arrival: Arrival, memory: SnapshotMemory, every: int | None) -> None:
        self._run, self._memory, self._every = run, memory, every
        self._stop: StopAgreement = run.stop
        self._arrival = arrival
        self._classes = arrived_classes()
        # On CUDA what is on the device is copied and written beside the next steps; on the CPU these would change it.
        self._device_copies = DeviceCopies(run.place.device) if run.place.device.type == "cuda" else None
        self._snapshotter = Snapshotter(arrival.known, self._classes, self._device_copies)
        self._begun: _Begun | None = None
        self._steps_beside = 1
        self._local_rank = run.loop.process.local_rank
        self._copies = Copies(memory, run.loop.process) if run.loop.process.num_nodes > 1 else None
        # Functions that came with the loop are the same in a process that is started again; copies would not be.
        self._functions = {
            (section, key, name): value
            for section, entries in attributes(run.loop, arrival).items()
            for key, content in entries.items()
            for name, value in (content.items() if isinstance(content, dict) else ())
            if isinstance(value, FUNCTIONS)
        }
        self._status, self._mine = memory.status, step_word(self._local_rank)
        self._number = 0
        self._failed_in_a_row = failed_in_a_row(memory)
        self._failed = self._told_omitted = False
        self._omitted: list[str] = []
        self._pause = every or 1
        self._last_step, self._next = run.loop.global_step, run.loop.global_step + self._pause
        self._made_at, self._whole_s = time.perf_counter(), 0.0
        notice = memory.notice()
        self.restart: Restart | None = None
        """Why this process was started in another's place."""
        self._failed_ns = 0
        self._limit = ""
        if notice is not None:
            self.restart, self._failed_ns = Restart(**notice["restart"]), notice["failed_ns"]
            self._limit, self._number = notice["limit"], notice["number"]
        self._tells = self.restart is not None and self._local_rank == 0

    # -- at boundaries -----------------------------------------------------------------------------------------------

    def request(self, reason: int) -> None:
        """As of the agreement itself."""
        self._stop.request(reason)

    def reached(self) -> int:
        """As of the agreement itself; makes a snapshot where the run goes on. Collective."""
        reasons = self._stop.reached()
        run = self._run
        step = self._status[self._mine] = run.loop.global_step
        if self._tells:
            self._tell()
        # At an epoch's end ranks have agreed on its being the last; in its midst they have not, and go on.
        goes_on = not reasons and (run.epoch_steps or not run.loop.asked_to_end)
        if goes_on and (step >= self._next or run.checkpointed):
            if self._begun is not None:
                self._finish(self._begun)
            if step >= self._next or run.checkpointed:
                self._make(step)
        return reasons

    def close(self) -> None:
        """Nobody writes to the memory any more; what only snapshots needed is given back."""
        if self._begun is not None and self._begun.beside is not None:
            self._begun.beside.result()
        if self._device_copies is not None:
            self._device_copies.close()

    def _tell(self) -> None:
        """Once the first step is done: a line, and for the launching process the time."""
        self._tells = False
        assert self.restart is not None
        now = time.monotonic_ns()
        set_back(self._memory, now)
        if self._run.loop.is_global_zero:
            restart = self.restart._replace(seconds=(now - self._failed_ns) / 1e9)
            print(restart_line(restart, self._limit), file=sys.stderr)

    def _make(self, step: int) -> None:
        run = self._run
        clock = time.perf_counter()
        run.checkpointed = False
        run.publish(run.recorder.exchange_steps())
        ready = time.perf_counter()
        problem, beside = self._try_to_write(step)
        done = time.perf_counter()
        begun = _Begun(step, clock - self._made_at, done - ready, done - clock, problem, beside)
        if self._device_copies is None:
            self._finish(begun)
        else:
            self._begun, self._next = begun, step + min(self._pause, self._steps_beside)
        self._made_at = time.perf_counter()

    def _finish(self, begun: _Begun) -> None:
        """Agree on whether all have written, and on what is next. Collective."""
        clock, step, problem, copying_s, beside_s = time.perf_counter(), begun.step, begun.problem, 0.0, 0.0
        self._begun = None
        if begun.beside is not None:
            problem, copying_s, beside_s = begun.beside.result()
        written = problem is None
        if self._copies is not None and not self._copies.spread(self._number + 1, written=written):
            problem = problem or "no copy of it on the next host"
        seconds = begun.writing_s + copying_s + time.perf_counter() - clock, self._whole_s, begun.since_s, beside_s
        mine = [*(int(1e9 * s) for s in seconds), int(problem is not None)]
        # All ranks have written when this is over; and all go by the same numbers.
        writing, whole, since, besides, errors = zip(*distributed.exchange_ints(mine))
        self._failed_in_a_row = self._failed_in_a_row + 1 if any(errors) else 0
        set_failed_in_a_row(self._memory, self._failed_in_a_row)
        if any(errors):
            if problem and not self._failed:
                self._failed = True
                warn(
                    f"no snapshot could be made after step {step} ({problem}): a failure before the next one "
                    "costs more steps.",
                    RuntimeWarning,
                )
        else:
            self._number += 1
            self._tell_omitted()
        step_ns = max(since) / max(step - self._last_step, 1)
        if self._every is None:
            self._pause = steps_between(writing, whole, step_ns)
        self._steps_beside = math.ceil(max(besides) / max(step_ns, 1)) or 1
        # One that could not be made is tried again soon: until then a failure costs more steps.
        soon = self._pause if not self._failed_in_a_row else 2**self._failed_in_a_row - 1
        self._last_step, self._next = step, step + min(self._pause, soon)
        self._whole_s = begun.whole_s + copying_s + time.perf_counter() - clock

    def _tell_omitted(self) -> None:
        """Once, what can't be pickled: after a restart it is not what it was."""
        if self._omitted and not self._told_omitted and self._run.loop.is_global_zero:
            self._told_omitted = True
            warn(
                f"max_restarts: snapshots leave out what can't be pickled: {', '.join(sorted(self._omitted))}. After a "
                "restart these are as on_train_begin leaves them. Restore them in on_restart, or leave them out of "
                "__getstate__.",
                RuntimeWarning,
            )

    # -- what it holds -----------------------------------------------------------------------------------------------

    def _try_to_write(self, step: int) -> tuple[str | None, _WriteBeside | None]:
        """Write this rank's parts, or begin to; or return what of its own kept it from that, if anything. Collective.

        What fails here is a user's ``__getstate__``, or memory: the run itself is well.
        """
        problem: str | None = None
        mine: _Part = {}
        common: _Part = {}
        copies = self._device_copies
        if copies is not None:
            copies.begin()
        try:
            mine, common = self._mine_now(), self._common_now()
        except Exception as error:
            problem = described(error)
        if self._run.place.collective:
            # All ranks gather, or none: one that went on without it would meet the others in another exchange. What
            # fails in the midst of gathering is not caught, since there others wait for this rank.
            if any(failed for (failed,) in distributed.exchange_ints([int(bool(problem))])):
                return problem or "", None
            to_cpu = partial(gathered, on_host=Tensor.cpu if copies is None else copies.copy)
            mine = map_tensors(mine, partial(to_cpu, keeps=True))
            common = map_tensors(common, partial(to_cpu, keeps=self._local_rank == 0))
        if problem is None:
            try:
                packed = self._packed(mine, common)
                write = partial(_write_parts, self._memory, self._number + 1, step, packed)
                if copies is not None:
                    return None, _WriteBeside(copies, write, step)
                write()
            except Exception as error:
                problem = described(error)
        return problem, None

    def _mine_now(self) -> _Part:
        """This rank's own part. No exchange, but for what a callback's ``state_dict`` does."""
        run, loop = self._run, self._run.loop
        return {
            "rank": {
                **run_state.rank_state(run, lambda value, _: value),
                "history": loop.history.state_dict(),
                "own values": loop.history.unagreed,
                "callbacks": run_state.callback_states(loop),
                "last_loss": None if loop.last_loss is None else loop.last_loss.detach(),
                "columns": run.progress.columns,
                "messages": loop.message_service.__dict__,
                "pause": self._pause,
            },
            "buffers": {key: tensor.detach() for key, tensor in handover.buffers_of(loop)},
            "stateful": {
                (i, name): getattr(callback, name).state_dict()
                for i, callback in enumerate(self._arrival.callbacks)
                for name in handover.stateful_attributes(callback)
            },
            **attributes(loop, self._arrival),
        }

    def _common_now(self) -> _Part:
        """What is common to all ranks, as far as this one has a part in it. No exchange."""
        run = self._run
        if self._local_rank and not run.place.collective:
            return {}
        own = {str(i): own_attributes(optimizer) for i, optimizer in enumerate(optimizers_of(run.loop.optimizer))}
        return {"state": run_state.common_state(run), "optimizers": own}

    def _packed(self, mine: _Part, common: _Part) -> list[tuple[int, Packed]]:
        """The parts that this rank has to write."""
        loop = self._run.loop
        unchanged = {
            (section, key, name)
            for (section, key, name), function in self._functions.items()
            if isinstance(content := mine[section].get(key), dict) and content.get(name) is function
        }
        optional = [section for section in mine if section not in _NEEDED]
        packed = [(1 + self._local_rank, self._snapshotter.pack(mine, optional, unchanged))]
        if not self._told_omitted:
            self._omitted = [
                f"{name} of {owner_text(loop, self._arrival, section, key)}"
                for section, key, name, value in self._snapshotter.refused_of(mine)
                if not isinstance(value, (*OF_A_PROCESS, *FUNCTIONS))
            ]
        if self._local_rank == 0:
            packed.append((0, self._snapshotter.pack(common, ("optimizers",))))
        return packed

    # -- going on from it --------------------------------------------------------------------------------------------

    def resumed(self, job_resume: dict[str, Any] | None) -> dict[str, Any] | None:
        """What this run goes on from: after a failure the snapshot that was told of, as a checkpoint's state."""
        notice = self._memory.notice()
        loop = self._run.loop
        self._mine_read: dict[str, Any] | None = None
        if notice is None:
            return job_resume
        if notice["checkpoint"]:
            return run_state.checkpoint_to_resume(loop, notice["checkpoint"])
        if not notice["number"]:
            return job_resume
        if notice["lost"]:
            assert self._copies is not None
            self._copies.give_back(notice["number"], notice["lost"])
            distributed.barrier()  # the ranks of a host read what one of them was given
        device = self._run.place.device
        common, mine = (
            self._memory.read(notice["number"], part, self._arrival.known, device, self._classes)
            for part in (0, 1 + self._local_rank)
        )
        self._mine_read, self._optimizers_read = mine, common["optimizers"]
        rank = mine["rank"]
        return {
            **common["state"],
            "callbacks": rank["callbacks"],
            "history": rank["history"],
            # This rank reads its own only.
            "ranks": [rank] * loop.world_size,
        }

    def take_up(self, resume: dict[str, Any] | None) -> None:
        """Go on from what :meth:`resumed` gave, after ``on_train_begin``; then ``on_restart``. Collective."""
        run, loop, mine = self._run, self._run.loop, self._mine_read
        if mine is not None:
            put_attributes(loop, self._arrival, mine)
            for i, optimizer in enumerate(optimizers_of(loop.optimizer)):
                vars(optimizer).update(self._optimizers_read.get(str(i), {}))
        if resume is not None:
            run_state.load_checkpoint_state(run, resume)
        if mine is not None:
            handover.put_tensors(loop, {key: (value, False) for key, value in mine["buffers"].items()})
            rank = mine["rank"]
            loop.history.unagreed = rank["own values"]
            loop.last_loss = rank["last_loss"]
            loop.message_service.__dict__.update(rank["messages"])
            run.progress.columns = rank["columns"]
            # Without a seed the epoch's batches are read again up to here, which draws from a dataset's own generator.
            run.feed.after_rereading = partial(put_into_datasets, loop, copy.deepcopy(mine["datasets"]))
            if self._every is None:
                self._pause = rank["pause"]
        self._mine_read = None
        self._last_step, self._next = loop.global_step, loop.global_step + self._pause
        self._made_at = time.perf_counter()
        set_status(self._memory, self._local_rank, loop.global_step, trains=True)
        if self.restart is not None:
            for hook in run.hooks.on_restart:
                hook(self.restart)
            if self._tells and (run.ended or run.is_done()):  # there is no further step
                self._tell()


def _write_parts(memory: SnapshotMemory, number: int, step: int, packed: list[tuple[int, Packed]]) -> None:
    for part, content in packed:
        memory.write(number, part, step, content)


def steps_between(writing: Sequence[float], whole: Sequence[float], step: float) -> int:
    """Steps from one snapshot to the next for which their share of the time is as meant.

    Parameters
    ----------
    writing : sequence of float
        How long each rank wrote at this one, exchanges left out.
    whole : sequence of float
        How long all of the last one took each rank, waiting for others and exchanges included; 0 if there was none.
    step : float
        How long a step takes.
    """
    # The rank that came last has waited for no other to come: what it lost, all have lost.
    cost = max(*writing, min(whole))
    return max(1, math.ceil(cost / SHARE_OF_TIME / max(step, 1)))


def restart_line(restart: Restart, limit: str) -> str:
    """What is printed about it."""
    steps = f"{restart.steps_repeated} step{'' if restart.steps_repeated == 1 else 's'}"
    return (
        f"trainloop: rank {restart.rank} {restart.cause}; training goes on from step {restart.step} ({steps} again), "
        f"after {restart.seconds:.1f} s. {limit}"
    )
