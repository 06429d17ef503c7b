"""Record a step that fails or has values that are not finite, so that ``tl.replay(path)`` can repeat it.

Until a step fails, the recorder keeps only references and random states. The training calls it twice per batch
(:class:`~trainloop.train_loop.training.training.Watch`). The record is a checkpoint file, which can be read without
running code. If a batch is not plain data, the file contains it as pickled bytes.
"""

from __future__ import annotations

import io
import logging
import math
import operator
import os
import platform
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from time import perf_counter
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from trainloop import checkpoint
from trainloop._launch.failures import RECORDED, about_record, described, failure_of
from trainloop._launch.rank_process import started_by_launch
from trainloop._launch.script.settings import numeric_settings
from trainloop._support import rng
from trainloop._support.carried import places_of
from trainloop._support.nested import map_parts, tensors_of
from trainloop.callbacks.arguments import count_of
from trainloop.callbacks.base import AbstractCallback, require_alone
from trainloop.callbacks.watch.nan import describe_not_finite
from trainloop.callbacks.weights.gradient import norms_of, which_are_finite
from trainloop.checkpoint import CheckpointInfo
from trainloop.errors import CheckpointError
from trainloop.optim.parameters import criterion_module, named_trained_parameters, parameters_beside
from trainloop.parallel import TTDistributedDataParallel
from trainloop.parallel.sharded.shards import bytes_of, is_sharded

__all__ = ["FailureRecorder", "named_losses", "not_finite", "recorded_modules", "recorded_parameters"]

# BatchNorm and similar layers only write these buffers in training, and do not change them in evaluation.
_WRITTEN_ONLY = ("running_mean", "running_var", "num_batches_tracked")
_MAX_BUFFER_BYTES = 1 << 20  # maximum total size of the buffers that are copied in each step
_CHECK_SHARE = 1 / 400  # fraction of the training time that checks of gradients may take
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class FailureRecorder(AbstractCallback):
    """Record a step that fails, so that :meth:`.TrainLoop.replay` can repeat it in one process, under a debugger.

    The failing rank writes one file if ``get_loss``, backward, clipping, an optimizer's step or a hook of the step
    raises, or if the loss or a gradient is not finite. The file contains the batches of the step up to the one that
    failed, the weights, buffers and gradients, the random states before each forward, the precision, the traceback and
    the versions. If a dataset or a collate function raises, the file contains the indices of the batch, not the batch.
    The error's message and ``WorkerFailedError.recorded`` name the file.

    In each ``fit``, only the first value that is not finite is recorded, and training continues. To end training, add
    :class:`TerminateOnNaN`. Gradients that AMP's scaler finds infinite are not an error.

    Parameters
    ----------
    dirpath : str or path
        Folder or URL; the first record creates it. Each rank writes its own file.
    check_every_n_steps : int, optional
        Steps between two checks for values that are not finite. (A check waits for the GPU.) By default, a loss on the
        CPU is checked in each batch. Gradients, and losses on other devices, are checked as often as possible within
        0.25 % of the training time. If a gradient is not finite in a step without a check, the optimizer's step makes
        weights non-finite, and the record of the next check reports that.

    Attributes
    ----------
    recorded : str or None
        Path of the last record that this process wrote.

    Raises
    ------
    ConfigurationError
        For invalid arguments; at ``fit``, if the folder is not writable, or if there is a second recorder.

    Notes
    -----
    The following is not recorded:

    * the failure of a rank that is killed, by a signal or because the host is out of memory;
    * failures in evaluation and prediction, and in loaders without indices (streams, plain iterables, persistent
      workers without a seed);
    * in ``fsdp``, a step in which parameters of the rank are sharded at the moment of the failure (the error names
      them);
    * values that ``get_loss`` receives from other ranks, as in ``sync_batchnorm``.

    A replay can't restore or compare everything:

    * The record has the weights at the time of the failure. If an optimizer has changed the weights since the forward,
      the replay reports this. If ``get_loss`` yields its losses, the replay repeats the losses before the failing one
      without their optimizer steps.
    * Once Python's and numpy's random states have not changed for 100 forwards, they are read only before every 100th
      forward. If a program uses these generators rarely, the replay reports that its numbers may differ.
    * Buffers, of spectral norm for example, are copied before each step: the smallest ones, up to 1 MiB in total. If a
      forward changes other buffers, the record has their values after the failing forward, and names them. The record
      has all other state of the model, except ``carried_state``, as it was after the failing forward.
    * ``ddp`` averages gradients during the last backward of a step, so the rank's own gradients of that batch no longer
      exist. A replay always compares the loss. It compares gradients in ``single`` and ``dp``, in micro-batches before
      the last one of a step, and in steps whose ``get_loss`` yields its losses.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[FailureRecorder("failures")])                        # doctest: +SKIP
    >>> tl.replay("failures/failure-step=00001234-rank=3.pt")                                 # doctest: +SKIP
    """

    writes = True

    def __init__(self, dirpath: str | os.PathLike[str], check_every_n_steps: int | None = None) -> None:
        # Runs before all other callbacks, because their on_exception may replace the weights.
        super().__init__("FailureRecorder", execution_order=-sys.maxsize)
        self.check_every_n_steps = count_of(
            "FailureRecorder", "check_every_n_steps", check_every_n_steps, optional=True
        )
        self.recorded: str | None = None
        self._folder = checkpoint.folder(dirpath)
        self._fit = ""  # ID of the call of fit; the same after each restart
        self._found = False
        self._forget_step()

    def _forget_step(self) -> None:
        self._step: Any = None  # the step that the attributes below describe
        self._random = rng.Snapshots()
        self._states: list[rng.States] = []  # random states before each forward
        self._ended = 0  # number of backward passes that have ended
        self._losses: dict[str, Tensor] = {}
        self._batches: list[Any] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._position: dict[str, Any] = {}
        self._buffers: list[tuple[str, nn.Module, str]] = []  # buffers that a replay may have to restore
        self._seen: dict[str, tuple[Any, int]] = {}
        self._planned: list[Any] = []  # the buffers that the next three attributes are for
        self._groups: list[tuple[list[str], list[Tensor]]] = []  # buffers that are copied together, and their paths
        self._large: dict[str, Tensor] = {}  # buffers that are not copied
        self._copies: list[Tensor] = []  # of each group
        self._carriers: list[tuple[str, nn.Module, str]] | None = None
        self._carried: dict[str, Any] = {}
        self._num_checks, self._next_check = 0, 0.0

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        blank = FailureRecorder.__new__(FailureRecorder)
        blank._forget_step()
        return {**state, **blank.__dict__}

    def on_train_loop_registration(self) -> None:
        require_alone(self, FailureRecorder)
        self._fit, self._found = uuid4().hex, False
        self._folder.check_writable()

    def on_train_begin(self) -> None:
        self._forget_step()
        self.train_loop_obj.watch(self)

    def on_train_end(self) -> None:
        self._forget_step()

    # -- before a failure: references and random states --------------------------------------------------------------

    def forward_begins(self, first: bool) -> None:
        """Save the random states. The training loop calls this right before each forward, after the batch is loaded."""
        if first:
            self._note_step()
        self._states.append(self._random.take())

    def _note_step(self) -> None:
        loop = self.train_loop_obj
        run = loop.watch()
        self._step, self._states, self._ended, self._losses = run.step_in_work, [], 0, {}
        # get_loss may remove an entry from a dict, or write into a tensor.
        self._versions = []
        self._batches = [self._shell(batch) for batch in self._step.batches]
        self._position = {
            "epoch": loop.epoch,
            "step": loop.global_step + 1,
            "total_iteration_idx": loop.total_iteration_idx,
        }
        if self._carriers is None:
            self._carriers = [(path, module, name) for path, module, name, _ in places_of(loop.model)]
            self._buffers = [
                (f"{path}.{name}", module, name)
                for root, part in recorded_modules(loop).items()
                for path, module in part.named_modules(prefix=root)
                for name, buffer in module._buffers.items()
                if buffer is not None and name not in _WRITTEN_ONLY and not buffer.is_inference()
            ]
        self._carried = {path: getattr(module, name) for path, module, name in self._carriers}
        if self._buffers:
            wrapper = run.place.wrapper
            if isinstance(wrapper, TTDistributedDataParallel) and not run.gradients.weight.reduced_later:
                wrapper.share_buffers_early()
            self._copy_buffers()

    def _shell(self, value: Any) -> Any:
        """Return a copy of nested containers with the same tensors, and store the tensors' versions."""
        if isinstance(value, Tensor):
            if not value.is_inference():
                self._versions.append((value, value._version))
            return value
        try:
            return map_parts(self._shell, value)
        except Exception:  # a container that can't be built from its parts
            return value

    def _copy_buffers(self) -> None:
        now = [module._buffers[name] for _, module, name in self._buffers]
        if len(now) != len(self._planned) or not all(map(operator.is_, now, self._planned)):
            self._plan_copies(now)
        try:
            self._copies = [_copied_together(group) for _, group in self._groups]
        except RuntimeError:  # a buffer has another shape or dtype now
            self._plan_copies(now)
            self._copies = [_copied_together(group) for _, group in self._groups]
        self._seen = {path: (buffer, buffer._version) for path, buffer in self._large.items()}

    def _plan_copies(self, now: list[Any]) -> None:
        """Group the smallest buffers, by their forms: a copy of many small tensors costs as much as a copy of one."""
        named = {path: buffer for (path, *_), buffer in zip(self._buffers, now, strict=True) if buffer is not None}
        self._planned, self._large = now, {}
        groups: dict[Any, tuple[list[str], list[Tensor]]] = {}
        left = _MAX_BUFFER_BYTES
        for path, buffer in sorted(named.items(), key=lambda entry: bytes_of(entry[1])):
            left -= bytes_of(buffer)
            if left < 0:
                self._large[path] = buffer
                continue
            alone = type(buffer) is not Tensor or buffer.layout is not torch.strided or buffer.is_quantized
            form = path if alone else (buffer.shape, buffer.dtype, buffer.device)
            paths, group = groups.setdefault(form, ([], []))
            paths.append(path)
            group.append(buffer)
        self._groups = list(groups.values())

    def backward_ended(self, loss: Any) -> None:
        """Check values if a check is due. The training loop calls this right after each backward."""
        self._ended += 1
        self._losses = named_losses(loss)
        if self._found:
            return
        loop = self.train_loop_obj
        run = loop.watch()
        on_cpu = run.place.device.type == "cpu"
        last = self._ended % max(len(self._batches), 1) == 0
        every, begun = self.check_every_n_steps, perf_counter()
        due = begun >= self._next_check if every is None else self._position["step"] % every == 0
        checks_all = due and last
        bad_loss = (checks_all or (on_cpu and (due or every is None))) and not _are_finite(self._losses)
        names: list[str] = []
        if checks_all and not run.place.scaler.is_enabled():
            trained = named_trained_parameters(loop.model, loop.criterion, loop.optimizer)
            names = not_finite({name: run.gradients.so_far(p) for name, p in trained})
        if checks_all:
            self._num_checks += 1
            if self._num_checks > 1:  # the first check is slow, like any first call
                now = perf_counter()
                self._next_check = now + (now - begun) / _CHECK_SHARE
        if bad_loss or names:
            self._found = True
            self._record_values(describe_not_finite(loss=bad_loss, gradients=names))

    # -- a failure ---------------------------------------------------------------------------------------------------

    def _record_values(self, what: str) -> None:
        loop = self.train_loop_obj
        weights = not_finite(dict(named_trained_parameters(loop.model, loop.criterion, loop.optimizer)))
        where = f"{what} in step {self._position['step']} (epoch {self._position['epoch'] + 1})"
        if weights:
            where += f"; parameters that were not finite before this step: {len(weights)} (such as {weights[0]!r})"
        try:
            refused = self._refused()
            if refused:
                line = refused
            else:
                path = self._write_record(
                    "step", "not finite", {"type": "", "text": where, "traceback": ""}, "backward"
                )
                line = f'Find the cause in your own script: tl.replay("{path}", detect="nan")'
        except Exception as error:
            line = self._not_written(error)
        self.train_loop_obj.report(f"Rank {self.train_loop_obj.rank}: {where}. {line}", logging.WARNING)

    def on_exception(self, exception: BaseException) -> None:
        """Record the failure. If the recorder itself fails, add a note to the error."""
        if not isinstance(exception, Exception):  # signals, and ranks that are stopped
            return
        try:
            note = self._record_exception(exception)
        except Exception as error:
            note = self._not_written(error)
        self._forget_step()
        if note and hasattr(exception, "add_note"):
            # For a rank started by launch, the message of WorkerFailedError names the file.
            if getattr(exception, RECORDED, None) is None or not started_by_launch():
                exception.add_note(note)
        elif note:  # Python 3.10
            print(note, file=sys.stderr, flush=True)

    def _record_exception(self, exception: Exception) -> str:
        run = self.train_loop_obj.watch()
        failure = failure_of(exception, self.train_loop_obj.rank)
        if run is None or failure.consequence or failure.timeout:
            return ""
        error = {
            "type": type(exception).__qualname__,
            "text": failure.message,
            "traceback": "".join(traceback.format_exception(exception)),
        }
        if run.step_in_work is not None:
            refused = self._refused()
            if refused:
                return refused
            if self._step is not run.step_in_work:  # a hook failed before the first forward
                self.forward_begins(True)
            path = self._write_record("step", error["type"], error, run.stage)
        elif run.stage == "data":
            indices = run.feed.next_indices()
            if indices is None:
                return ""
            self._position = {"epoch": run.loop.epoch, "step": run.loop.global_step + 1, "total_iteration_idx": 0}
            path = self._write_record("loader", error["type"], error, run.stage, checkpoint.plain(indices))
        else:
            return ""
        with suppress(Exception):  # a class with __slots__ may not allow it
            setattr(exception, RECORDED, path)
        return about_record(path)

    def _refused(self) -> str:
        """Return the reason why no record can be written; an empty string if a record can be written."""
        sharded = [name for name, p in self.train_loop_obj.model.named_parameters() if is_sharded(p)]
        if not sharded:
            return ""
        return (
            "FailureRecorder wrote no record: a record needs full parameters, but some were sharded when the step "
            f"failed (for example {sharded[0]!r}). To get a record, resume from a checkpoint with gpu_mode='ddp'."
        )

    def _not_written(self, error: Exception) -> str:
        return f"FailureRecorder could not write to {self._folder.location}: {described(error)}"

    def _write_record(self, kind: str, reason: str, error: dict[str, str], stage: str, indices: Any = None) -> str:
        """Write the record and return its path. If this call of fit has recorded the same failure, return that path."""
        loop, step = self.train_loop_obj, self._position["step"]
        stem = f"failure-step={step:08d}-rank={loop.rank}"
        for version in count(1):
            path = self._folder.path(f"{stem}{f'_{version}' if version > 1 else ''}.pt")
            try:
                info = checkpoint.read_info(path)
            except FileNotFoundError:
                break
            except CheckpointError:
                continue
            if (info.run, info.reason) == (self._fit, reason):  # recorded before a restart
                self.recorded = path
                return path
        record = {
            "failure": 1,
            "kind": kind,
            "error": error,
            "place": {**self._position, "rank": loop.rank, "world_size": loop.world_size, "mode": loop.gpu_mode},
            "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
            "indices": indices,
            **(self._step_state(stage) if kind == "step" else {}),
        }
        info = CheckpointInfo(epoch=self._position["epoch"], step=step, run=self._fit, reason=reason)
        checkpoint.save(path, record, info)
        self.recorded = path
        return path

    def _step_state(self, stage: str) -> dict[str, Any]:
        loop = self.train_loop_obj
        run = loop.watch()
        stage = "backward" if stage == "forward" else stage
        step, several = self._step, run.losses_stepped > 0
        alternating = stage != "backward" and several
        # DDP averages gradients during a step's last backward, unless the loop averages them afterwards.
        local = loop.world_size == 1 or run.gradients.weight.reduced_later or self._ended < len(step.batches)
        compares = (stage == "backward" and local and self._ended == len(self._states)) or (
            stage in ("hooks", "step") and loop.world_size == 1 and not alternating
        )
        modules = recorded_modules(loop)
        parameters = recorded_parameters(loop)
        buffers = {f"{r}.{n}": b for r, part in modules.items() for n, b in part.named_buffers()}
        changed = [path for path, mark in self._seen.items() if path in buffers and self._moved(buffers[path], mark)]
        copies = {
            path: copy
            for (paths, _), joined in zip(self._groups, self._copies)
            for path, copy in zip(paths, [joined] if len(paths) == 1 else joined.unbind(), strict=True)
        }
        amp = loop.options.amp.on(run.place.device)
        return {
            "stage": stage,
            "stepped": stage in ("step", "done") or run.step_taken,
            "losses_stepped": run.losses_stepped,
            "ended": self._ended,
            "compares": compares and not run.step_taken,
            "loss": self._losses if self._ended == len(self._states) else {},
            "batches": _packed(self._batches),
            "sizes": list(step.sizes),
            "scales": step.scales,
            "total": step.total,
            "ragged": step.counts is not None,
            "batch_changed": any(tensor._version != version for tensor, version in self._versions),
            "random": [state.captured() for state in self._states],
            "random_unread": self._random.unread(),
            "parameters": parameters,
            "buffers": {**buffers, **{path: copy for path, copy in copies.items() if path in buffers}},
            "not_put_back": changed,
            "gradients": {name: g for name, p in parameters.items() if (g := run.gradients.so_far(p)) is not None},
            "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
            "training": {f"{r}.{n}": m.training for r, part in modules.items() for n, m in part.named_modules()},
            "carried": _packed(self._carried),
            "amp": amp.dtype,
            "scaler": run.place.scaler.state_dict(),
            "usual_units": dict(run.gradients.weight.usual_units),
            "gradient_clip_norm": loop.gradient_clip_norm,
            "settings": numeric_settings(),
            "threads": torch.get_num_threads(),
        }

    @staticmethod
    def _moved(buffer: Tensor, mark: tuple[Any, int]) -> bool:
        return buffer is not mark[0] or buffer._version != mark[1]


def _copied_together(group: list[Tensor]) -> Tensor:
    """Return a copy of a tensor, or of several tensors of one form, by one operation."""
    return group[0].detach().clone() if len(group) == 1 else torch.stack(group).detach()


def recorded_modules(loop: Any) -> dict[str, nn.Module]:
    """Return the modules whose weights and buffers are recorded, by the first part of their paths in the record."""
    parts = {"model": loop.model, "criterion": criterion_module(loop.criterion)}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def recorded_parameters(loop: Any) -> dict[str, Tensor]:
    """Return the parameters that are recorded, by path: those of the modules, and those that only the optimizer has.

    Not shards of a module that a callback has replaced, which the optimizer still has.
    """
    modules = recorded_modules(loop)
    beside = parameters_beside(loop.model, loop.criterion, loop.optimizer)
    own = {f"{root}.{name}": p for root, part in modules.items() for name, p in part.named_parameters()}
    return {**own, **{f"optimizer.{name}": p for name, p in beside.items() if not is_sharded(p)}}


def named_losses(loss: Any) -> dict[str, Tensor]:
    """Return the detached losses by the names in a ``MultiLoss``; a single loss has the name ``''``."""
    losses = {"": loss} if isinstance(loss, Tensor) else dict(loss)
    return {name: value.detach() for name, value in losses.items()}


def _are_finite(losses: Mapping[str, Tensor]) -> bool:
    return all(math.isfinite(value.item()) for value in losses.values())


def not_finite(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the values, nested or not, that contain NaN or infinity. Waits for the device once."""
    tensors = [(name, tensor) for name, value in values.items() for tensor in _floating_point(value)]
    if not tensors:
        return []
    finite = which_are_finite(norms_of([tensor for _, tensor in tensors], math.inf))
    return list(dict.fromkeys(name for (name, _), ok in zip(tensors, finite, strict=True) if not ok))


def _floating_point(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested value that can contain NaN, except sharded tensors."""
    for found in tensors_of(value):
        tensor = found.detach().coalesce().values() if found.is_sparse else found.detach()
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()) and not is_sharded(tensor):
            yield tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no norm


def _is_plain_data(value: Any) -> bool:
    """Return True if a checkpoint restores the value with the same types."""
    kind = type(value)
    if kind is Tensor:
        return not (value.requires_grad or value.is_meta or value.is_quantized)
    if kind in (list, tuple, set):
        return all(map(_is_plain_data, value))
    if kind is dict:
        return all(_is_plain_data(key) and _is_plain_data(item) for key, item in value.items())
    return kind in _PLAIN


def _packed(value: Any) -> dict[str, Any]:
    if _is_plain_data(value):
        return {"plain": value}
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as error:
        return {"problem": f"{type(value).__name__} can't be pickled ({described(error)})"}
    return {"pickle": file.getvalue()}
