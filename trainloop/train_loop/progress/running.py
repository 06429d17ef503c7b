"""Describe a training run as the modules see it that save, resume and compare it; ``training.py`` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from trainloop.train_loop.progress.loop_state import LoopState

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from trainloop._metrics import Recorder
    from trainloop.callbacks.base import HookTable

Stage = Literal["data", "forward", "backward", "complete", "hooks", "step", "done"]
"""What a run is doing: waiting for the next batches; in a step, a micro-batch's first hooks and forward, its backward,
the end of the gradients' computation, hooks and clipping, the optimizers' steps; or what follows a step."""


class TrainingRun(Protocol):
    """A training run at work in this process."""

    loop: LoopState
    stage: Stage
    place: Any
    """Placed model, a :class:`~trainloop.train_loop.run.placement.Placement`."""
    hooks: HookTable
    parallel: bool
    """True if there are other ranks."""
    seed: int | None
    exchange: Any
    """Exchange of logs."""
    recorder: Recorder
    feed: Any
    gradients: Any
    history_epoch: int
    start_epoch: int
    start_iteration: int
    epoch_steps: int
    """Steps since the epoch began."""
    epoch_batches: int
    """Batches since the epoch began."""
    epoch_finished: bool
    skip_steps: int
    """Steps of the next epoch that were done before the loaded checkpoint."""
    skip_batches: int | None
    """Batches of these steps; ``None`` if nothing was done before."""
    before_cut: dict[str, Any] | None
    """States before the hooks at the end of an epoch that the end of this run has cut short."""
    ended: bool
    """True if this run resumes after a callback had ended the training."""
    finished: bool
    """True if all work at the end is done, except for the last checkpoint."""

    def assigned(self, name: str) -> None:
        """Follow an attribute of the loop that was assigned a new value."""

    def flush_logs(self, *, exchange: bool = False) -> None:
        """Read the logs and pass them to ``on_log``; with ``exchange``, add all steps so far to the history."""

    def shared_of(self, loader: Any, name: str) -> Any:
        """Return the properties of an evaluation loader that must be equal on all ranks."""

    def changed_beside(self) -> dict[str, int]:
        """Return checksums of what the training has changed and checkpoints do not contain, by path."""

    def is_done(self) -> bool:
        """Return True if neither a step nor the end of a resumed epoch is left."""

    def seeing_functions(self, *, idle: bool = False) -> AbstractContextManager[None]:
        """Attach divisors to the results of functions; ``idle``: the batch is another rank's."""

    @property
    def reads_loader(self) -> bool:
        """True if the feed reads the loop's training loader as it is now."""

    def take_data(self, epoch: int | None = None) -> None:
        """Read the loop's loaders from now on, as they are in ``epoch``. Collective if ranks exchange sizes."""
