"""Repeat, in this process, a step that a ``FailureRecorder`` has recorded, with the code that trains a step."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from trainloop import checkpoint
from trainloop._launch.script.settings import numeric_settings, write_settings
from trainloop._support import rng
from trainloop._support.carried import places_of
from trainloop._support.reduction import graph_nodes
from trainloop._support.stopping import LocalStop
from trainloop._support.user_line import warn
from trainloop.callbacks.watch.failure_recorder import named_losses, not_finite, recorded_modules, recorded_parameters
from trainloop.data import StepBatches
from trainloop.data.batch.batches import move_to
from trainloop.distributed import Rank
from trainloop.errors import CheckpointError, ConfigurationError, DeviceError
from trainloop.optim.optimizers import optimizers_of
from trainloop.train_loop.arguments.options import AmpOptions, FitJob
from trainloop.train_loop.arguments.run_config import RunConfig
from trainloop.train_loop.execution.execute import run_here
from trainloop.train_loop.progress.progress import Progress
from trainloop.train_loop.run.placement import move_state
from trainloop.train_loop.saving.compatibility import described_differences
from trainloop.train_loop.training.gradients import Gradients
from trainloop.train_loop.training.special_steps import ClosureTraining
from trainloop.train_loop.training.training import Training

if TYPE_CHECKING:
    from trainloop.train_loop.loop import TrainLoop
    from trainloop.train_loop.progress.loop_state import LoopState

__all__ = ["Replay", "replay"]


@dataclass
class Replay:
    """The result of a replay that did not fail."""

    error: str
    """The recorded failure, in one line."""
    loss: dict[str, float] = field(default_factory=dict)
    """Losses of the failing batch, by their names in the ``MultiLoss``; a single loss is called ``'loss'``."""
    gradient_norms: dict[str, float] = field(default_factory=dict)
    """Norm of each parameter's gradient, which includes the gradients of the step's earlier batches."""
    loss_difference: float | None = None
    """Largest difference from the recorded loss; None if no loss was recorded."""
    gradient_difference: float | None = None
    """Largest difference from a recorded gradient; None if no gradient was recorded."""
    module: str | None = None
    """With ``detect='nan'``: the first module whose output has a value that is not finite."""
    function: str | None = None
    """With ``detect='nan'``: the first backward function that got finite gradients and returned one that is not
    finite."""
    line: str | None = None
    """Line of the forward pass whose backward is :attr:`function`."""
    not_finite_before: list[str] = field(default_factory=list)
    """With ``detect='nan'``: names of the weights, buffers and batches that were not finite before the forward."""
    notes: list[str] = field(default_factory=list)
    """Reasons why the results may differ from the results on the rank."""
    batch: Any = None
    """The batch that was loaded again if the loader had failed; otherwise None."""

    def __str__(self) -> str:
        lines = [f"recorded: {self.error}", "the replay did not fail"]
        lines += [f"{name}: {value:g}" for name, value in self.loss.items()]
        for what, value in (("loss", self.loss_difference), ("gradient", self.gradient_difference)):
            lines += [] if value is None else [f"largest difference from the recorded {what}: {value:g}"]
        lines += [f"not finite before the forward: {name}" for name in self.not_finite_before]
        lines += [f"first module with a value that is not finite: {self.module}"] if self.module else []
        if self.function:
            lines.append(
                "first backward function with a gradient that is not finite: "
                f"{self.function}{f', of {self.line}' if self.line else ''}"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def replay(
    loop: TrainLoop[Any],
    path: str | os.PathLike[str],
    *,
    detect: Literal["nan"] | None = None,
    device: str | torch.device | None = None,
    trusted: bool = False,
) -> Replay:
    """Repeat a recorded step in mode ``single``, up to the forward and backward that failed.

    During the replay, the model has the recorded weights, buffers and modes, and each forward begins with the recorded
    random states and precision. The line that failed on the rank raises the same error. You can use ``breakpoint()`` or
    ``python -m pdb``, because ``get_loss`` and the functions that it calls are on the stack. Afterwards the loop's own
    weights, optimizers and random states are restored. If a loader failed, the batch is loaded again.

    Parameters
    ----------
    loop : TrainLoop
        A loop with the same model, criterion, kind of optimizer and dataset.
    path, detect, device, trusted
        As for :meth:`.TrainLoop.replay`.

    Returns
    -------
    Replay
        If the step does not fail.

    Raises
    ------
    Exception
        The error of the step.
    CheckpointError
        If the file is not a record, is a record of another model, or contains a pickled batch and ``trusted`` is False.
    ConfigurationError
        For invalid arguments, or if the loop is running.

    Notes
    -----
    On a CPU of the same kind and with the same library versions, the results are bit-identical to those on the rank.
    There are three exceptions: several replicas in ``dp``, values from other ranks, and ``compile``.
    :class:`.FailureRecorder` lists what a record does not contain.

    Examples
    --------
    >>> print(tl.replay("failures/failure-step=00001234-rank=3.pt", detect="nan"))            # doctest: +SKIP
    """
    if detect not in (None, "nan"):
        raise ConfigurationError(f"replay: detect={detect!r}: must be 'nan' or None.")
    if loop.running is not None:
        raise ConfigurationError("replay was called by a callback of the running loop. Call it outside of fit.")
    record = checkpoint.load(path)
    if "failure" not in record:
        raise CheckpointError(
            f"{os.fspath(path)} is not a record of a FailureRecorder. Pass the path that the FailureRecorder printed."
        )
    if record["kind"] == "loader":
        return _loaded_again(loop, record)
    if loop.optimizer is None:
        raise ConfigurationError("replay repeats a training step, but optimizer is None. Pass one to the loop.")
    own = dict(_tensors_by_path(loop))
    if any(nn.parameter.is_lazy(tensor) for tensor in own.values()):
        raise ConfigurationError("replay: the model has lazy parameters without a shape. Run it on a batch first.")
    wrong = described_differences(own, {**record["parameters"], **record["buffers"]}, "record")
    if wrong:
        raise CheckpointError(f"the record belongs to another model: {wrong}. Pass the model of the recorded run.")
    batches = _unpacked(record["batches"], path, trusted)
    carried = _unpacked(record["carried"], path, trusted)
    where = _usable(device) if device is not None else loop.run_config.devices[0]
    if where.type == "cuda":
        batches = move_to(batches, where)
    counts = [len(batches)] if record["ragged"] else None  # this process is the only rank
    step = StepBatches(batches, record["sizes"], record["scales"], record["total"], counts)
    with _as_recorded(loop, record, where), run_here(loop, LocalStop(), FitJob()) as run:
        for path_of_module, module, name, _ in places_of(loop.model):
            setattr(module, name, move_to(carried[path_of_module], where))
        return _repeated_step(cast(Training, run), record, step, detect)


def _usable(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:  # AssertionError: a build of torch without CUDA
        why = str(error).partition("\n")[0]
        raise DeviceError(f"replay: device={device!r}: {why}. Pass a device of this machine, such as 'cpu'.") from error


def _unpacked(packed: dict[str, Any], path: Any, trusted: bool) -> Any:
    if "problem" in packed:
        raise CheckpointError(f"{os.fspath(path)} has no batch: {packed['problem']}. Make the loader yield plain data.")
    if "plain" in packed:
        return packed["plain"]
    if not trusted:
        raise CheckpointError(
            f"{os.fspath(path)} has a batch or carried state that is pickled, because it contains objects other than "
            "tensors, numbers, strings and containers of these. Reading a pickle can run any code. If you trust the "
            "person who made the file, pass trusted=True."
        )
    return torch.load(io.BytesIO(packed["pickle"]), map_location="cpu", weights_only=False, mmap=False)


def _loaded_again(loop: TrainLoop[Any], record: dict[str, Any]) -> Replay:
    loader, indices = loop.train_loader, record["indices"]
    if not hasattr(loader, "dataset"):
        raise ConfigurationError(
            "replay: the record is of a failed DataLoader, but train_loader has no dataset. Use the run's DataLoader."
        )
    dataset = loader.dataset
    fetch = getattr(dataset, "__getitems__", None)
    with rng.isolated():
        if getattr(loader, "batch_sampler", None) is None:
            batch = loader.collate_fn(dataset[indices[0]])
        else:
            batch = loader.collate_fn(fetch(indices) if fetch else [dataset[index] for index in indices])
    note = "the dataset draws different random numbers than it did on the rank"
    return Replay(_error_of(record), batch=batch, notes=[note])


def _error_of(record: dict[str, Any]) -> str:
    place, error = record["place"], record["error"]
    text = ": ".join(filter(None, (error["type"], error["text"].partition("\n")[0])))
    return f"rank {place['rank']}, step {place['step']}: {text}"


# -- restoring the recorded state --------------------------------------------------------------------------------------


def _tensors_by_path(loop: LoopState) -> Iterator[tuple[str, Tensor]]:
    yield from recorded_parameters(loop).items()
    for root, part in recorded_modules(loop).items():
        yield from part.named_buffers(prefix=root)


@contextmanager
def _as_recorded(loop: TrainLoop[Any], record: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Load the recorded state into the loop, in mode ``single`` on this device; restore everything at the end."""
    place = record["place"]
    with ExitStack() as undo:
        undo.enter_context(rng.isolated())
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(write_settings, numeric_settings())
        undo.callback(_restore_dict, vars(loop), dict(vars(loop)))
        for optimizer in optimizers_of(loop.optimizer):
            undo.callback(move_state, optimizer)  # back to the parameters' device
        for module in {m for part in recorded_modules(loop).values() for m in part.modules()}:
            undo.callback(_restore_dict, module._buffers, dict(module._buffers))
            undo.callback(setattr, module, "training", module.training)
        for _, module, name, _ in places_of(loop.model):
            undo.callback(setattr, module, name, getattr(module, name))
        for _, tensor in _tensors_by_path(loop):
            undo.callback(_put_back, tensor, tensor.data, tensor.grad, tensor.requires_grad)
        # Each tensor gets new memory: the loop's own memory must not change.
        values = {**record["parameters"], **record["buffers"]}
        for name, tensor in _tensors_by_path(loop):
            tensor.grad, tensor.data = None, values[name].to(tensor.device)
            tensor.requires_grad_(record["requires_grad"].get(name, False))
        torch.set_num_threads(record["threads"])
        write_settings(record["settings"])
        loop.note(progress=Progress(place["epoch"], place["step"] - 1, place["total_iteration_idx"] - 1))
        loop.gradient_clip_norm = record["gradient_clip_norm"]
        loop.note(callbacks=[], process=Rank(), run_config=RunConfig("single", [device]))
        amp = AmpOptions(record["amp"], loop.options.amp.scaler)
        loop.options = replaced(loop.options, amp=amp, compile_args=None, compiles_step=False)
        yield


def _restore_dict(values: dict[str, Any], before: dict[str, Any]) -> None:
    values.clear()
    values.update(before)


def _put_back(tensor: Tensor, data: Tensor, grad: Tensor | None, requires_grad: bool) -> None:
    tensor.grad = None
    tensor.data = data
    tensor.grad = grad
    tensor.requires_grad_(requires_grad)


# -- the step ----------------------------------------------------------------------------------------------------------


class _Reached(BaseException):
    """Raised after the backward that the record describes."""


class _Repeats:
    """Restores the random states before each forward, and ends the step after the backward that failed."""

    def __init__(self, states: list[dict[str, Any]]) -> None:
        self._states = states
        self._begun = 0
        self.losses: dict[str, Tensor] = {}

    def forward_begins(self, first: bool) -> None:
        rng.restore(self._states[self._begun])
        self._begun += 1

    def backward_ended(self, loss: Any) -> None:
        if self._begun == len(self._states):
            self.losses = named_losses(loss)
            raise _Reached


def _repeated_step(run: Training, record: dict[str, Any], step: StepBatches, detect: str | None) -> Replay:
    loop, place = run.loop, record["place"]
    modules = {f"{r}.{n}": m for r, part in recorded_modules(loop).items() for n, m in part.named_modules()}
    for name, module in modules.items():
        module.training = record["training"].get(name, module.training)
    run.gradients = gradients = Gradients(run)
    gradients.ranks = place["world_size"]  # the loss is scaled by the number of batches
    gradients.weight.usual_units.update(record.get("usual_units", {}))  # older records lack it
    if run.place.scaler.is_enabled() and record["scaler"]:
        run.place.scaler.load_state_dict(record["scaler"])
    run.watch = watch = _Repeats(record["random"])
    result = Replay(_error_of(record), notes=_notes(record))
    forward_backward: Callable[..., Any] = run.forward_backward
    if isinstance(run, ClosureTraining):  # the class's own method only stores the step for the optimizer's closure
        forward_backward = super(ClosureTraining, run).forward_backward
    show_and_clip, complete = gradients.show_and_clip, gradients.complete
    # No optimizer may step: if get_loss yields its losses, the recorded weights already include the earlier steps.
    vars(gradients).update(dict.fromkeys(("complete", "show_and_clip", "take_steps"), _nothing))
    with ExitStack() as undo:
        undo.enter_context(run.listening(run.recorder))
        if detect is not None:
            result.not_finite_before = not_finite({**dict(_tensors_by_path(loop)), "the batch": step.batches})
            undo.enter_context(_finding_origin(run, result))
        with suppress(_Reached):
            forward_backward(step)
    if record["stage"] in ("hooks", "step") and place["world_size"] == 1:
        complete(gradients.learned)
        loop.gradient_clip_norm = None if record["stage"] == "hooks" else loop.gradient_clip_norm
        show_and_clip(enumerate(gradients.optimizers), gradients.learned)
    result.loss = {name or "loss": float(value) for name, value in watch.losses.items()}
    found = {name: grad for name, t in _tensors_by_path(loop) if (grad := gradients.so_far(t)) is not None}
    result.gradient_norms = {name.partition(".")[2]: float(g.norm()) for name, g in found.items()}
    if record["loss"]:
        result.loss_difference = _largest_difference(watch.losses, record["loss"])
    if record["compares"]:
        result.gradient_difference = _largest_difference(found, record["gradients"])
    return result


def _nothing(*_: Any) -> None:
    pass


def _notes(record: dict[str, Any]) -> list[str]:
    notes = []
    if record["stepped"]:
        notes.append("an optimizer had stepped, or was stepping: the record has the weights after that step")
    if record["batch_changed"]:
        notes.append("get_loss changed a tensor of the batch in place: the record has the changed values")
    if unread := record.get("random_unread"):
        notes.append(
            f"Python's or numpy's generator was used for the first time in {rng.Snapshots.PERIOD} forwards, and its "
            f"recorded state is from {unread} forwards before the failing one"
        )
    if record["not_put_back"]:
        notes.append(f"buffers have the values after the failing forward: {', '.join(record['not_put_back'])}")
    if notes:
        warn(f"the replay's numbers may differ: {'; '.join(notes)}.")
    return notes


def _largest_difference(own: dict[str, Tensor], recorded: dict[str, Tensor]) -> float:
    """Return the largest difference; infinity if a tensor is missing, or a value is NaN on one side only."""
    if own.keys() != recorded.keys():
        return math.inf
    largest = 0.0
    for name, value in own.items():
        one, other = (t.detach().to_dense().cpu().double() for t in (value, recorded[name]))
        same = (one == other) | (one.isnan() & other.isnan())
        difference = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = max(largest, float(difference.max())) if difference.numel() else largest
    return largest


# -- finding values that are not finite ----------------------------------------------------------------------------


@contextmanager
def _finding_origin(run: Training, result: Replay) -> Iterator[None]:
    """Find the origin of the first value that is not finite, in forward and in backward."""
    scale = run.place.scaler.scale

    def after_forward(module: nn.Module, _: Any, output: Any) -> None:
        if result.module is None and not_finite({"": output}):
            name = next((n for n, part in run.loop.model.named_modules() if part is module), "")
            result.module = f"{name or 'the model'} ({type(module).__name__})"

    def before_backward(loss: Any) -> Any:
        if result.module is None and not_finite({"": loss}):
            result.module = "get_loss, outside of all modules"
        for node in graph_nodes([loss]):
            node.register_hook(lambda made, given, node=node: after_backward(node, made, given))
        return scale(loss)

    def after_backward(node: Any, made: Any, given: Any) -> None:
        if result.function is None and not not_finite({"": given}) and not_finite({"": made}):
            result.function, result.line = node.name(), _line_of(node.metadata.get("traceback_", []))

    with ExitStack() as undo:
        for module in run.loop.model.modules():
            undo.callback(module.register_forward_hook(after_forward).remove)
        vars(run.place.scaler)["scale"] = before_backward
        # With this, autograd keeps the lines of the forward pass.
        undo.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        try:
            yield
        except Exception as error:
            if result.module is not None and hasattr(error, "add_note"):
                error.add_note(f"First module with a value that is not finite: {result.module}")
            raise


def _line_of(lines: list[str]) -> str | None:
    """Return the innermost line outside of torch and this package."""
    own = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    places = [line.strip() for line in lines if not any(folder in line for folder in own)]
    return " ".join(places[-1].split()) if places else None
