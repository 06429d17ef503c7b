"""ModelCheckpoint decides when, and by which rank, checkpoints are written, and handles errors."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trainloop import checkpoint, distributed
from trainloop._support.distribution import import_extra
from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import check_flags, choice_of, count_of, number_of, texts_of
from trainloop.callbacks.base import Saver, logs_nothing
from trainloop.callbacks.checkpoints.due import DueSteps
from trainloop.callbacks.checkpoints.excluded import ExcludedParts
from trainloop.callbacks.checkpoints.run_checkpoints import BackgroundWrite, RunCheckpoints, error_of, weights_name
from trainloop.callbacks.monitor import Mode, Monitor
from trainloop.checkpoint import Checkpoint, CheckpointInfo
from trainloop.checkpoint.file import check_exists
from trainloop.checkpoint.sharded import load_model, load_parameters_beside
from trainloop.checkpoint.sharded_writing import FolderWriting, check_offered
from trainloop.devices import has_ranks
from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.optim.parameters import criterion_module, own_parameters

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelCheckpoint"]

_FILES = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".tar", ".pkl", ".h5", ".onnx")
_OTHERS_S = 2.0  # seconds to wait for other ranks' shards after an exception


class ModelCheckpoint(Saver):
    """Write checkpoints by epoch, by optimizer step, by time, or when a metric improves. Keep the newest and the best.

    ``fit(resume_from='last')`` resumes from the newest complete checkpoint. At the end of training, and at SIGTERM,
    SIGHUP, SIGUSR1 or, in a job of submitit, LSF or Grid Engine, SIGUSR2, another checkpoint is written if the state
    has changed since the last one.

    Parameters
    ----------
    dirpath : str or path
        Folder, or fsspec URL such as ``s3://bucket/run`` (extra ``cloud``). Created with the first checkpoint. Files in
        it are named by epoch and step, such as ``checkpoint-epoch=0003-step=00000120.pt``.
    every_n_epochs : int or None
        Write at the end of every n-th epoch, after its ``val_loss`` is known. A resumed run then starts with the next
        epoch.
    every_n_steps : int or None
        Write after every n-th optimizer step, counted over the whole training. All hooks of the step, including
        ``on_batch_end``, have run by then, so their changes and logs are in the checkpoint.
    monitor : str, optional
        Metric in ``history`` by which checkpoints at the end of epochs are ranked. Whenever the metric improves, a
        checkpoint is written, in addition to the checkpoints of ``every_n_*``. With ``every_n_steps`` or
        ``every_n_minutes``, the metric may also be logged within an epoch, such as a validation every 500 steps: each
        checkpoint is then ranked by the newest value at that moment. (A metric that every step logs is ranked by its
        mean over the epoch.)
    mode : {'auto', 'min', 'max'}
        ``'min'`` if lower is better, ``'max'`` if higher is; ``'auto'`` decides by words in the name (``loss``,
        ``rmse``, ``accuracy``) or, if a torchmetrics metric has the name, by that metric. For other names, pass the
        mode.
    keep : int or None
        Number of checkpoints to keep: the best by ``monitor`` or, if there is no monitor, the newest. None keeps all.
        The newest is always kept, too. Only files of this run are deleted, including files that the run wrote before it
        was resumed.
    async_save : bool
        If True, the loop waits only while the state is copied to host memory, and a thread writes the copy. If a
        checkpoint is due before the previous one is on disk, the loop waits for the previous one. So a killed run loses
        at most the steps since the last complete checkpoint.
    every_n_minutes : float or None
        Write a checkpoint after the first step that ends at least this many minutes after the last checkpoint, by rank
        0's clock.
    safetensors : bool
        Write the model's weights beside each checkpoint as well, as ``*.safetensors`` (extra ``safetensors``).
    exclude : str or sequence of str
        Parts of the model to leave out, such as ``"teacher"`` or ``"encoder.embed.weight"``. They must be frozen, and
        the script must load them before ``fit``. A resumed run checks that their values (in ``fsdp``, only their
        shapes) are the same as in the first run.

    Attributes
    ----------
    best_path : str or None
        Path of the kept checkpoint with the best value of ``monitor``. During training, ``best_path`` and ``last_path``
        are known only on rank 0; afterwards they are known on all ranks.
    last_path : str or None
        Path of the newest checkpoint on disk.
    best_value : float or None
        Value of ``monitor`` in the checkpoint at ``best_path``.

    Raises
    ------
    ConfigurationError
        For invalid arguments; at ``fit``, if the folder is not writable, or if the run can't produce the metric
        ``monitor``.
    CheckpointError
        At the first checkpoint, if a callback's ``state_dict`` contains anything other than plain types and tensors.

    Warns
    -----
    RuntimeWarning
        If a checkpoint can't be written (for example, on a full disk). Training continues, and earlier checkpoints are
        kept.

    Examples
    --------
    >>> keeper = ModelCheckpoint("checkpoints", monitor="val_loss", every_n_steps=500)
    >>> tl.fit(num_epochs=10, callbacks=[keeper], resume_from="last")
    >>> keeper.load_best()
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        monitor: str | None = None,
        mode: Mode = "auto",
        keep: int | None = 3,
        async_save: bool = False,
        *,
        every_n_minutes: float | None = None,
        safetensors: bool = False,
        exclude: str | Sequence[str] = (),
    ) -> None:
        # Runs after all other callbacks at each hook, because their changes must be in the checkpoint.
        super().__init__("ModelCheckpoint", execution_order=1000)
        self.every_n_epochs = count_of("ModelCheckpoint", "every_n_epochs", every_n_epochs, optional=True)
        self.every_n_steps = count_of("ModelCheckpoint", "every_n_steps", every_n_steps, optional=True)
        self.every_n_minutes = number_of("ModelCheckpoint", "every_n_minutes", every_n_minutes, optional=True, above=0)
        self.keep = count_of("ModelCheckpoint", "keep", keep, optional=True)
        self.async_save, self.safetensors = async_save, safetensors
        check_flags(type(self).__name__, async_save=self.async_save, safetensors=self.safetensors)
        if safetensors:
            import_extra("safetensors.torch", "ModelCheckpoint: safetensors=True", "safetensors")
        self._excluded = ExcludedParts(tuple(texts_of("ModelCheckpoint", "exclude", exclude)))
        choice_of("ModelCheckpoint", "mode", mode, "auto", "min", "max")
        self._metric = Monitor(monitor, mode, owner="ModelCheckpoint") if monitor is not None else None
        self.state_key = monitor or ""
        # Rank 0's newest path, best path and best value, as received by other ranks that a launcher started.
        self._received: tuple[str | None, tuple[str | None, float | None]] | None = None
        name = str(dirpath).rstrip("/")
        if name.endswith(_FILES) and not os.path.isdir(name):
            raise ConfigurationError(
                f"ModelCheckpoint: dirpath={name!r}: must be a folder, but this is the name of a file. Checkpoints "
                "in it get names by epoch and step; best_path is the path of the best one, and load_best() loads it. "
                f"Pass, for example, {os.path.splitext(name)[0]!r}."
            )
        self._folder = checkpoint.folder(dirpath)
        self._begin_run()
        self._first_step = 0  # the step before the first one of this run
        self._saved_step: int | None = None  # None: the state has changed since the last checkpoint
        self._fit = ""  # ID of the call of fit; the same after each restart
        self._restarted = False  # resumed from a checkpoint of the same fit, after a failure
        self._due = DueSteps()
        self._failed = False
        self._host_copy = checkpoint.HostCopy()
        self._writing: BackgroundWrite | None = None

    def _begin_run(self) -> None:
        self._checkpoints = RunCheckpoints(self._folder, self._metric, with_weights=self.safetensors)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_host_copy": checkpoint.HostCopy(), "_writing": None}

    # -- for users -----------------------------------------------------------------------------------------------------

    @property
    def monitor(self) -> str | None:
        return self._metric.name if self._metric is not None else None

    @property
    def exclude(self) -> Sequence[str]:
        """Names of the parts that are left out."""
        return self._excluded.names

    @property
    def dirpath(self) -> str:
        """Absolute path or URL of the folder."""
        return self._checkpoints.folder.location

    @property
    def last_path(self) -> str | None:
        return self._checkpoints.newest if self._received is None else self._received[0]

    @property
    def best_path(self) -> str | None:
        return self._best[0]

    @property
    def best_value(self) -> float | None:
        return self._best[1]

    @property
    def _best(self) -> tuple[str | None, float | None]:
        return self._checkpoints.best if self._received is None else self._received[1]

    def load_best(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Load the weights of the best checkpoint into the loop's model, and into its criterion if that is a module.

        Parameters that only the optimizer has are loaded, too, but no states of optimizers.
        If ``monitor`` is the loss of an average of the weights (``ema_val_loss``), the model gets this average. During
        training in ``ddp`` (for example in ``on_train_end``), all ranks must call this method together.

        In another process than the training's, create a ``ModelCheckpoint`` of the same folder, and pass the model. The
        metric and its direction are read from the folder; see :func:`trainloop.checkpoint.best`.

        Parameters
        ----------
        model : nn.Module, optional
            Model to load the weights into; all else then stays unchanged. Default: the loop's model.

        Returns
        -------
        dict
            The state in that checkpoint.

        Raises
        ------
        CheckpointError
            If the folder does not exist, if no checkpoint was ranked by a metric, or if the best one is damaged.
        """
        self._finish_writing()
        path, monitor = self.best_path, self.monitor
        if not self._fit:  # not used in a training: another process wrote the folder
            if model is None and self.train_loop_obj is None:
                raise ConfigurationError(
                    "load_best(): this ModelCheckpoint belongs to no loop. Pass the model, as in load_best(model)."
                )
            found = checkpoint.best(self._folder, monitor)
            path, monitor = found.path, found.info.monitor if found.info else monitor
        path = distributed.broadcast_object(path)
        if path is None:
            check_exists(self._folder)
            raise CheckpointError(
                f"no checkpoint in {self.dirpath} was ranked by monitor={self.monitor!r}. Pass monitor to "
                "ModelCheckpoint, and train for at least one epoch. If training has warned that writing failed, free "
                "space or change dirpath. If every value was NaN, add TerminateOnNaN to find the first step with a NaN."
            )
        state = checkpoint.load(path)
        loop: Any = self.train_loop_obj
        into = loop.model if model is None else model
        load_model(into, _judged(state, into, monitor))
        if loop is not None and into is loop.model:
            criterion = criterion_module(loop.criterion) if state.get("criterion") else None
            if criterion is not None:  # without the tensors of the model
                own, saved = criterion.state_dict(), state["criterion"]
                kept = {**own, **{name: copy.deepcopy(own[name]) for name in saved if name in own}}
                try:
                    criterion.load_state_dict({**own, **saved})
                except RuntimeError:  # other names or shapes; a module may take the shapes of what it loads
                    criterion.load_state_dict(kept)
                    warn(
                        f"load_best: the checkpoint's criterion has other tensors ({', '.join(saved)}) than "
                        f"{type(criterion).__name__}, so tl.criterion is unchanged. Assign the criterion of the best "
                        "epoch before an evaluation."
                    )
            text = load_parameters_beside(loop, state) if loop.optimizer is not None else ""
            if text and loop.is_global_zero:
                warn(text)
            loop.note(left_behind=loop.left_behind and any(p.is_meta for p in own_parameters(loop.model)))
        return state

    # -- for the loop --------------------------------------------------------------------------------------------------

    def last_state(self, *, whole: bool = True) -> dict[str, Any] | None:
        """Return the state of the newest complete checkpoint in the folder, from any run; None if there is none yet."""
        found = checkpoint.load_newest(self._checkpoints.folder, whole=whole)
        return None if found is None else found[1]

    def last_stamp(self) -> int:
        """Return the stamp of the newest complete checkpoint in the folder, from any run; 0 if there is none yet."""
        return max((c.info.stamp for c in checkpoint.checkpoints(self._checkpoints.folder) if c.info), default=0)

    def own_checkpoints(self, runs: Collection[str] = ()) -> list[Checkpoint]:
        """Return the complete checkpoints that this run or one of ``runs`` wrote, oldest first."""
        return self._checkpoints.on_disk(runs)

    def save_due(self) -> None:
        """Write a checkpoint if one is due. Called after the last hook of a step. Collective."""
        step = self.train_loop_obj.global_step
        if step == self._saved_step:
            return  # AMP skipped this step
        reason = self._due.reason(step, self.every_n_steps, self.every_n_minutes)
        if reason is not None:
            self._save_checkpoint(reason)

    def save_now(self, reason: str) -> None:
        """Write a checkpoint now, unless the last one has the same state, and wait until it is on disk.

        Collective: all ranks call it, between two steps. No rank returns before the file is complete. The run ends
        afterwards, and some launchers (torchrun, ``srun -K``) kill the other ranks soon after the first one exits.
        """
        self._finish_writing()
        # Only rank 0 knows whether the write succeeded.
        missing = self._saved_step != self.train_loop_obj.global_step or self._failed
        if distributed.exchange_ints([int(missing)])[0][0]:
            self._save_checkpoint(reason)
            self._finish_writing()
            distributed.barrier()

    def save_finished(self) -> None:
        """Write a checkpoint at the end of training, after the last step. Collective."""
        self._save_checkpoint("end", final=True)
        self._finish_writing()
        self._host_copy = checkpoint.HostCopy()
        self.share_paths()

    def write_into(self, folder: str) -> None:
        self._folder = checkpoint.folder(folder)
        self._begin_run()

    def save_held(self, state: dict[str, Any]) -> str | None:
        loop = self.train_loop_obj
        self._finish_writing(_OTHERS_S)
        if self._saved_step == loop.global_step and not self._failed:
            return None
        info = CheckpointInfo(loop.history_epoch, loop.global_step, self._checkpoints.run, 0, None, "error")
        error = error_of(partial(self._write, self._excluded.removed_unchecked(state), info))
        self._report_failed_write(error, info.step)
        return self.last_path if error is None else None

    def share_paths(self) -> None:
        """Send rank 0's paths and best value to the other ranks that a launcher started. Collective."""
        if distributed.get_world_size() > 1:
            first = distributed.is_global_zero()
            received = distributed.broadcast_object((self.last_path, self._best) if first else None)
            self._received = None if first else received

    def state_dict(self) -> dict[str, Any]:
        return {
            "run": self._checkpoints.run,
            "fit": self._fit,
            "step": self.train_loop_obj.global_step,
            "saved_step": self._saved_step,  # not always equal to "step": another callback may write this state
            "monitor": self.monitor,
            "metric": self._metric.state_dict() if self._metric is not None else {},
            "best": list(self._best),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restarted = bool(self._fit) and state.get("fit") == self._fit
        self._saved_step = state["saved_step"] if self._restarted else state["step"]
        same = state["monitor"] == self.monitor
        if self.train_loop_obj.is_global_zero:
            self._checkpoints.take_over(state["run"], None if self._restarted else state["step"], same_metric=same)
            path, value = state.get("best", (None, None))  # older checkpoints lack this entry
            # Each rank of a launcher takes up a finished run by itself, without a rank of the loop's.
            first = distributed.is_global_zero()
            if first and same and path is not None and self._checkpoints.run != state["run"]:
                warn(
                    f"ModelCheckpoint({self.dirpath!r}): this run resumes in another folder, or not from its newest "
                    "checkpoint, so best_path, load_best() and keep count only the checkpoints that it writes from now "
                    f"on. The best one before had {self.monitor} = {value:g}: {path}"
                )
        if self._metric is not None and same:
            self._metric.load_state_dict(state["metric"])

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self._begin_run()  # the earlier checkpoints are those of another loop

    def on_train_loop_registration(self) -> None:
        self._fit = uuid4().hex
        if self._metric is not None:
            self._metric.check(self.train_loop_obj)
        several = has_ranks(self.train_loop_obj.gpu_mode)
        if not several or distributed.is_global_zero() or self._is_sharded():  # this rank writes files
            self._checkpoints.folder.check_writable()
        if self._is_sharded():
            check_offered(self.dirpath, safetensors=self.safetensors)
        self._excluded.check(self.train_loop_obj)

    def on_train_begin(self) -> None:
        self._fit = distributed.broadcast_object(self._fit)  # each host has created its own ID
        self._saved_step, self._restarted = None, False
        self._failed, self._received = False, None
        self._excluded.begin(self.train_loop_obj.model.state_dict())
        if self.train_loop_obj.is_global_zero:
            self._checkpoints.folder.remove_dead()
        if self._metric is not None:
            self._metric.begin(self.train_loop_obj)
        self._first_step = self.train_loop_obj.global_step
        self._due.restart(self._first_step)

    def on_restart(self, failure: Any) -> None:
        """Write the checkpoint of this step again if it was not yet complete when the failure occurred."""
        if not self._restarted:
            return
        loop = self.train_loop_obj
        is_last = loop.is_global_zero and self._saved_step == loop.global_step
        missing = is_last and all(one.info and one.info.step != loop.global_step for one in self.own_checkpoints())
        if distributed.exchange_ints([int(missing)])[0][0]:
            self._save_checkpoint("restart")

    @logs_nothing
    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        self._saved_step = None  # the history has a new row
        value = self._value_within()
        if value is None and self._metric is not None:
            every = self.every_n_steps
            due = not every or loop.global_step // every > self._first_step // every
            value = self._metric.new_value(loop, due=due, within=bool(every))
        improved = False
        if self._metric is not None:
            self._finish_writing()
            # Only rank 0 knows which checkpoints were written. A value without a checkpoint can't be the best.
            best = self.best_value if loop.is_global_zero else None
            better = value is not None and self._metric.improves(value, best)
            improved = bool(distributed.exchange_ints([int(better)])[0][0])
        if self.every_n_epochs is not None and (loop.epoch + 1) % self.every_n_epochs == 0:
            self._save_checkpoint("epoch", value)
        elif improved:
            self._save_checkpoint("improved", value)

    @logs_nothing
    def on_train_end(self) -> None:
        self.save_now("end")
        self._host_copy = checkpoint.HostCopy()  # releases the memory
        self.share_paths()

    def on_exception(self, exception: BaseException) -> None:
        self._finish_writing(_OTHERS_S)  # wait no longer, because other ranks may have ended
        self._host_copy = checkpoint.HostCopy()

    def _value_within(self) -> float | None:
        """Return the metric's newest value if it is logged within epochs. All logs have been exchanged before."""
        within = self.every_n_steps is not None or self.every_n_minutes is not None
        return self._metric.newest_within(self.train_loop_obj, ranks=True) if within and self._metric else None

    # -- writing -------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, reason: str, value: float | None = None, *, final: bool = False) -> None:
        """Write a checkpoint. Collective: rank 0 writes; the other ranks wait only until rank 0 has their state."""
        loop = self.train_loop_obj
        self._finish_writing()  # first, so that the next copy can reuse the memory of the previous one
        self._saved_step = loop.global_step
        state = loop.checkpoint_state(keep_shards=True) if self._is_sharded() else loop.checkpoint_state()
        if state is not None:
            state = self._excluded.removed(state)
        self._due.restart(self.train_loop_obj.global_step)
        if reason in ("steps", "time"):
            value = self._value_within()
        info = CheckpointInfo(loop.history_epoch, loop.global_step, self._checkpoints.run, 0, value, reason)
        if value is not None and self._metric is not None:
            info = replace(info, monitor=self._metric.name, minimize=self._metric.minimize)
        copy = self._host_copy.copy if self.async_save and not final else None
        give_up: Callable[[], None] | None = None
        if self._is_sharded():
            if loop.is_global_zero:
                self._checkpoints.remove_unfinished()
            folder = FolderWriting(
                self.dirpath,
                checkpoint.checkpoint_name(info),
                self._checkpoints.run,
                state,
                partial(self._checkpoints.write_as, info, keep=self.keep, in_folder=True),
                copy=copy,
                wait_s=loop.timeout,
            )
            write, give_up = folder.write, folder.give_up
        elif state is not None:
            write = partial(error_of, partial(self._write, state if copy is None else copy(state), info))
        else:
            return
        if copy is not None:
            self._writing = BackgroundWrite(write, info.step, give_up)
            return
        error = write()
        if loop.is_global_zero:
            self._report_failed_write(error, info.step)

    def _is_sharded(self) -> bool:
        return self.train_loop_obj.gpu_mode == "fsdp"

    def _write(self, state: dict[str, Any], info: CheckpointInfo) -> None:
        def put(name: str, info: CheckpointInfo) -> None:
            path = self._checkpoints.folder.path
            checkpoint.save(path(name), state, info)
            if self.safetensors:
                checkpoint.save_weights(path(weights_name(name)), state["model"], run=self._checkpoints.run)

        self._checkpoints.remove_unfinished()
        self._checkpoints.write_as(info, put, keep=self.keep, in_folder=False)

    def _finish_writing(self, seconds: float | None = None) -> None:
        """Wait for the writing thread and report its error. After ``seconds``, stop waiting for other ranks' shards."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            error = writing.wait(seconds)
            if self.train_loop_obj.is_global_zero:
                self._report_failed_write(error, writing.step)

    def _report_failed_write(self, error: Exception | None, step: int) -> None:
        self._failed = error is not None
        if isinstance(error, CheckpointError):
            raise error  # later checkpoints would fail too
        if error is not None:
            newest = self._checkpoints.newest_known or "none yet"
            warn(
                f"the checkpoint of step {step} could not be written to {self.dirpath} ({type(error).__name__}: "
                f"{error}). Training continues. Newest complete checkpoint: {newest}. Free space, or change dirpath.",
                RuntimeWarning,
            )


def _judged(state: dict[str, Any], model: nn.Module, monitor: str | None) -> dict[str, Any]:
    """Return a checkpoint's state with the weights whose metric was monitored: the model's, or their average."""
    for callback in state["callbacks"]:
        metric = callback.get("state", {}).get("metric")
        if isinstance(metric, str) and monitor is not None and monitor.startswith(metric):
            average = callback["state"]["average"]
            name_of = {id(p): name for name, p in model.named_parameters()}  # an average has tied parameters once
            every = model.named_parameters(remove_duplicate=False)
            averages = {name: average[name_of[id(p)]] for name, p in every if name_of[id(p)] in average}
            return {**state, "model": {**state["model"], **averages}}
    return state
