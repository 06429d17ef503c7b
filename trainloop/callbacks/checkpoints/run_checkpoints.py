"""Manage one run's checkpoints in a folder: name them, find the best, delete old ones, write in background threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import count
from uuid import uuid4

import torch

from trainloop import checkpoint
from trainloop.callbacks.monitor import Monitor
from trainloop.checkpoint import Checkpoint, CheckpointInfo, Folder, sharded

__all__ = ["BackgroundWrite", "RunCheckpoints", "error_of", "weights_name"]


class RunCheckpoints:
    """Checkpoints that one run writes. Files of other runs in the same folder are never replaced or deleted.

    Parameters
    ----------
    folder : Folder
    metric : Monitor, optional
        Metric by which checkpoints are ranked.
    with_weights : bool
        True if the run writes a file :func:`weights_name` beside each checkpoint.
    """

    def __init__(self, folder: Folder, metric: Monitor | None, *, with_weights: bool) -> None:
        self.folder, self._metric, self._with_weights = folder, metric, with_weights
        self.run = f"{time.time_ns():x}-{uuid4().hex[:8]}"
        """Name of the run, which is stored in each checkpoint. A resumed run keeps it."""
        self._files: list[Checkpoint] | None = None  # oldest first; None before the folder is read
        self._cleaned = False  # True after remove_unfinished
        self._stamp = 0
        self._same_metric = True

    @property
    def newest(self) -> str | None:
        """Path of the newest checkpoint."""
        files = self._run_files()
        return files[-1].path if files else None

    @property
    def newest_known(self) -> str | None:
        """Path of the newest checkpoint that is known without reading the folder, which may not respond."""
        return self._files[-1].path if self._files else None

    @property
    def best(self) -> tuple[str | None, float | None]:
        """Path and value of the checkpoint with the best value of the metric."""
        ranked = _best_first(self._run_files(), self._metric)
        return (ranked[0].path, ranked[0].info.value) if ranked and ranked[0].info else (None, None)

    def on_disk(self, runs: Collection[str] = ()) -> list[Checkpoint]:
        """Read the folder again and return the complete checkpoints of this run and of ``runs``, oldest first."""
        return _of_runs([self.run, *runs], checkpoint.checkpoints(self.folder))

    def remove_unfinished(self) -> None:
        """Remove unfinished files of this run before the first checkpoint, when no write can be in progress."""
        if not self._cleaned:
            self._cleaned = True
            self.folder.remove_unfinished(self.run)

    def write_as(
        self, info: CheckpointInfo, put: Callable[[str, CheckpointInfo], None], *, keep: int | None, in_folder: bool
    ) -> None:
        """Write a checkpoint with ``put`` under a new name, and delete checkpoints that are no longer kept.

        Parameters
        ----------
        info : CheckpointInfo
            Info without its stamp.
        put : callable
            Function that writes the checkpoint; takes its name and the complete info.
        keep : int or None
            Number of checkpoints to keep, including this one; None for all.
        in_folder : bool
            True if the checkpoint is a folder of shards rather than a file.
        """
        files = self._run_files()
        # Clocks can be set back, and may be too coarse to distinguish two checkpoints.
        self._stamp = max(time.time_ns(), self._stamp + 1)
        info = replace(info, stamp=self._stamp)
        # A checkpoint replaces the one of the same step. But the final checkpoint does not replace one with a metric:
        # the weights may have changed since, and the metric would not fit. Nor does any checkpoint without a metric.
        place = (info.epoch, info.step)
        replaced = [f for f in files if f.info is not None and (f.info.epoch, f.info.step) == place]
        if info.reason == "end" or info.value is None:
            replaced = [f for f in replaced if f.info is not None and f.info.value is None]
        # A folder can't be replaced in one operation, so the new one gets another name.
        name = self._free_name(info, [] if in_folder else [f.name for f in replaced], in_folder=in_folder)
        put(name, info)
        checkpoint.mark_newest(self.folder, name, run=self.run)
        written = Checkpoint(self.folder.path(name), name, info)
        kept = _checkpoints_to_keep([*(f for f in files if f not in replaced), written], keep, self._metric)
        for file in files:
            if file not in kept and file.name != name:
                self._remove(file)
        self._files = kept

    def take_over(self, run: str, step: int | None, *, same_metric: bool) -> None:
        """Continue ``run`` if training resumes after its newest checkpoint in this folder; otherwise start a new run.

        A continued run owns the files of ``run``. ``step`` is the step of the checkpoint that training resumes from,
        which may be in another folder; ``None`` always continues ``run``. If ``same_metric`` is False, values in
        earlier checkpoints are ignored.
        """
        found = _of_runs([run], checkpoint.checkpoints(self.folder)) if step is not None else []
        if step is None or (found and found[-1].info is not None and found[-1].info.step <= step):
            self.run = run
        self._files, self._same_metric, self._cleaned = None, same_metric, False

    def _run_files(self) -> list[Checkpoint]:
        if self._files is None:
            found = checkpoint.checkpoints(self.folder)
            # Stamps must be higher than the stamps of other runs, because the highest stamp marks the newest
            # checkpoint.
            self._stamp = max([self._stamp, *(file.info.stamp for file in found if file.info is not None)])
            self._files = _of_runs([self.run], found)
            if not self._same_metric:
                self._files = [
                    replace(file, info=replace(file.info, value=None)) for file in self._files if file.info is not None
                ]
        return self._files

    def _free_name(self, info: CheckpointInfo, replaceable: Sequence[str], *, in_folder: bool) -> str:
        """Return the first name for the checkpoint that is unused or in ``replaceable``."""
        # The weights beside a checkpoint may be all that is left of another run.
        taken = set(self.folder.entries()).difference(replaceable, map(weights_name, replaceable))
        names = (checkpoint.checkpoint_name(info, version, sharded=in_folder) for version in count(1))
        return next(name for name in names if taken.isdisjoint((name, weights_name(name))))

    def _remove(self, file: Checkpoint) -> None:
        if file.name.endswith(".pt"):
            self.folder.remove(file.name)
        else:
            sharded.remove_folder(file.path)
        if self._with_weights:
            self.folder.remove(weights_name(file.name))


def weights_name(name: str) -> str:
    """Return the name of the weights file beside a checkpoint, in the safetensors format."""
    return name.removesuffix(".pt") + ".safetensors"


def _of_runs(runs: Collection[str], files: Sequence[Checkpoint]) -> list[Checkpoint]:
    return [file for file in files if file.info is not None and file.info.run in runs]


def _best_first(files: Sequence[Checkpoint], metric: Monitor | None) -> list[Checkpoint]:
    """Return the checkpoints with a metric that is not NaN, best first; if metrics are equal, the older one first."""
    if metric is None or not files:  # without files, the metric's direction may be unknown yet
        return []
    rated = [(file.info.value, file) for file in files if file.info is not None and file.info.value is not None]
    sign = 1.0 if metric.minimize else -1.0
    ranked = sorted((pair for pair in rated if pair[0] == pair[0]), key=lambda pair: sign * pair[0])
    return [file for _, file in ranked]


def _checkpoints_to_keep(files: Sequence[Checkpoint], keep: int | None, metric: Monitor | None) -> list[Checkpoint]:
    """Return the checkpoints of ``files`` (oldest first) to keep, oldest first.

    The newest is always kept, because a killed run resumes from it. If fewer than ``keep`` checkpoints have a metric,
    the newest of the others are kept, too.
    """
    if keep is None:
        return list(files)
    best = _best_first(files, metric)
    others = [file for file in reversed(files) if file not in best]
    chosen = [*[*best, *others][:keep], files[-1]]
    return [file for file in files if file in chosen]


class BackgroundWrite:
    """One write in a background thread.

    Parameters
    ----------
    write : callable
        Function that writes, and returns its error or None.
    step : int
        Step of the state that is written.
    give_up : callable, optional
        Function that makes ``write`` stop waiting for other ranks.
    """

    def __init__(
        self, write: Callable[[], Exception | None], step: int, give_up: Callable[[], None] | None = None
    ) -> None:
        self.step = step
        self.give_up = give_up
        self._error: Exception | None = None
        # A thread starts on GPU 0. If it uses CUDA there, it creates a context in the memory of another rank's GPU.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # Not a pool: it takes no work once the main thread has ended, while a thread may still train.
        self._thread = threading.Thread(
            target=self._run_in_thread, name=f"checkpoint of step {step}", daemon=False, args=(write,)
        )
        self._thread.start()

    def _run_in_thread(self, write: Callable[[], Exception | None]) -> None:
        # ``write`` is not an attribute: only the thread refers to the data, so the data is freed once it is written.
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        self._error = write()

    def wait(self, seconds: float | None = None) -> Exception | None:
        """Wait until the write ends, and return its error. After ``seconds``, it stops waiting for other ranks."""
        if seconds is not None:
            self._thread.join(seconds)
            if self.give_up is not None:
                self.give_up()
        self._thread.join()
        return self._error


def error_of(write: Callable[[], None]) -> Exception | None:
    """Return the error that a write raised; None if it succeeded."""
    # Not only OSError, because fsspec file systems raise other errors.
    try:
        write()
    except Exception as error:
        return error
    return None
