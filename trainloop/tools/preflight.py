"""Find, within seconds, problems that would otherwise stop a long job after hours.

:func:`preflight` does not change the loop that it checks: it works on copies of the model and the optimizer, and
uses its own random generators.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from trainloop._support import rng
from trainloop._support.reduction import SumRule, sum_rule
from trainloop._support.user_line import described_names
from trainloop._transfer import pack
from trainloop.callbacks.arguments import count_of
from trainloop.callbacks.base import AbstractCallback, Saver
from trainloop.data import SplitBatches, TrainFeed
from trainloop.data.batch.batches import forms_of
from trainloop.distributed.tensors import noting_exchanges
from trainloop.errors import TrainLoopError, WorkerFailedError
from trainloop.optim import MultiLoss
from trainloop.optim.optimizers import optimizers_of
from trainloop.optim.parameters import own_parameters, trained_modules
from trainloop.parallel import TTFullyShardedDataParallel
from trainloop.parallel.replicas.scatter import NotDivisibleError, chunk_sizes, scatter
from trainloop.parallel.sharded.shards import bytes_of
from trainloop.parallel.sharded.units import units_of
from trainloop.resources.quota import format_bytes
from trainloop.tools.trial import copies, first_batch, require_training_parts, samples_in
from trainloop.train_loop.arguments.checks import check_callbacks, check_wrapper_args
from trainloop.train_loop.arguments.types import GpuMode
from trainloop.train_loop.execution.execute import sent_parts, untouched
from trainloop.train_loop.execution.handover import loaders_of
from trainloop.train_loop.loop import TrainLoop
from trainloop.train_loop.run.evaluating import evaluating
from trainloop.train_loop.run.losses import BatchLoss, explained_evaluation, loss_of, read_loss, read_yielded
from trainloop.train_loop.run.rows import check_rows, row_count
from trainloop.train_loop.training.trained import not_optimized

__all__ = ["Finding", "PreflightReport", "preflight", "preflight_epoch", "preflight_shards"]

# Sums in another order differ in the last bits. A few steps of Adam near zero gradients enlarge these differences.
TOLERANCE = 1e-4
CPU = torch.device("cpu")
_UNITS = ("shard", "reshard_after_forward")
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """Name of the check."""
    ok: bool
    """True if the check passed."""
    detail: str
    """Result of the check, with advice if it failed."""
    seconds: float
    """Duration of the check in seconds."""
    traceback: str = ""
    """Traceback of the rank that failed; not shown in the table."""


@dataclass(frozen=True)
class PreflightReport:
    """All findings. ``print`` shows them as a table."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if every check passed."""
        return all(finding.ok for finding in self.findings)

    def __getitem__(self, check: str) -> Finding:
        return next(finding for finding in self.findings if finding.check == check)

    def __str__(self) -> str:
        width = max(len(finding.check) for finding in self.findings)
        lines = []
        for finding in self.findings:
            first, *rest = finding.detail.splitlines() or [""]
            mark = "ok  " if finding.ok else "LOOK"
            lines.append(f"{mark}  {finding.check.ljust(width)}  {finding.seconds:5.1f} s  {first}")
            lines += [" " * (width + 16) + line for line in rest]
        return "\n".join(lines)

    __repr__ = __str__


def preflight(
    loop: TrainLoop[Any],
    *,
    steps: int = 3,
    ranks: int = 2,
    fsdp_model_args: dict[str, Any] | None = None,
    callbacks: Sequence[AbstractCallback] | None = None,
) -> PreflightReport:
    """Look for problems that would otherwise appear later in training.

    One of the checks trains an epoch of one batch, with evaluation, predictions and all hooks of the model and of
    copies of the callbacks. Checkpoints are written to a temporary folder. Callbacks that write elsewhere
    (TensorBoard, experiment tracking, profilers, a class with ``writes = True``) are left out.

    Parameters
    ----------
    loop : TrainLoop
        Loop that is ready to train; it is not changed.
    steps : int
        Number of optimizer steps to compare.
    ranks : int
        Number of CPU ranks whose training is compared with that of a single process.
    fsdp_model_args : dict, optional
        ``fsdp_model_args`` that ``fit`` will get. Default: the ``fsdp_model_args`` of the last ``fit``.
    callbacks : list of AbstractCallback, optional
        Callbacks that ``fit`` will get. Default: the callbacks of the last ``fit``.

    Returns
    -------
    PreflightReport
        ``report.ok`` is False if a check failed; ``print(report)`` shows the table.

    Raises
    ------
    ConfigurationError
        If the loop has no ``train_loader`` or no ``optimizer``.
    """
    require_training_parts(loop, "preflight")
    steps, ranks = count_of("preflight", "steps", steps), count_of("preflight", "ranks", ranks)
    check_wrapper_args(fsdp_model_args, "fsdp_model_args", TTFullyShardedDataParallel)
    sharding = loop.wrapper_args if fsdp_model_args is None else fsdp_model_args
    chosen = loop.callbacks if callbacks is None else check_callbacks(callbacks)
    findings = []
    checks: dict[str, Callable[[], str]] = {
        **({"shards": lambda: preflight_shards(loop, sharding)} if loop.gpu_mode == "fsdp" else {}),
        "can be sent to ranks": lambda: _sendable(loop),
        "one batch": lambda: _one_batch(loop),
        **({"one evaluation batch": lambda: _one_evaluation_batch(loop)} if _evaluated(loop) is not None else {}),
        "an epoch of one batch": lambda: preflight_epoch(loop, chosen),
        "gradients": lambda: _gradients(loop),
        "batches on all ranks": lambda: _batches(loop, steps, ranks),
        f"single equals {_mode_of_ranks(loop)} on {ranks} CPU ranks": lambda: _modes_agree(
            loop, steps, ranks, sharding
        ),
    }
    for name, run in checks.items():
        began, traceback = time.perf_counter(), ""
        try:
            with untouched(loop), rng.isolated(loop.seed or 0):
                ok, detail = True, run()
        except _Found as found:
            ok, detail = False, str(found)
        except WorkerFailedError as error:
            traceback = error.traceback
            ok, detail = False, f"{error.message.splitlines()[0]} (Its traceback: report[{name!r}].traceback)"
        except Exception as error:  # any error of the user's code is a finding; the other checks continue
            known = isinstance(error, TrainLoopError)
            ok, detail = False, str(error) if known else f"{type(error).__name__}: {error}"
        findings.append(Finding(name, ok, detail, time.perf_counter() - began, traceback))
    return PreflightReport(tuple(findings))


class _Found(Exception):
    """Raised by a check that fails; contains the finding's detail."""


def preflight_shards(loop: TrainLoop[Any], sharding: dict[str, Any]) -> str:
    """Describe the sharded units, the bytes of one rank's shards, and the bytes that are gathered at the same time."""
    ranks = loop.run_config.num_ranks
    parts = max(ranks // sharding.get("replicas", 1), 1)
    shard = sharding.get("shard")
    units = {name: sum(map(bytes_of, own_parameters(unit))) for name, unit in units_of(loop.model, shard)}
    total = sum(map(bytes_of, own_parameters(loop.model)))
    if not units and ranks > 1:
        raise _Found(
            f"no repeated blocks: the whole model ({format_bytes(total)}) is gathered on each rank for each step. Pass "
            "the class of its blocks: fit(fsdp_model_args={'shard': [Block]})."
        )
    gradients = sum(bytes_of(p) for p in own_parameters(loop.model) if p.requires_grad)
    root, largest = total - sum(units.values()), max(units.values(), default=0)
    return (
        f"units: {described_names([*units, 'the root'])}. Each of {ranks} ranks holds {format_bytes(total // parts)} "
        f"of parameters, {format_bytes(gradients // parts)} of gradients and the optimizer's state for these. Gathered "
        f"at the same time: the root, {format_bytes(root)}, and one or two units, {format_bytes(largest)} each"
    )


def _mode_of_ranks(loop: TrainLoop[Any]) -> GpuMode:
    return "fsdp" if loop.gpu_mode == "fsdp" else "ddp"


def _sendable(loop: TrainLoop[Any]) -> str:
    with pack(loop, roots=sent_parts(loop)):
        return "model, loaders, optimizer and criterion can be pickled"


def _one_batch(loop: TrainLoop[Any]) -> str:
    model, _, criterion = copies(loop, CPU)
    batch = first_batch(loop.train_loader)
    rule = sum_rule(model, criterion)
    size = samples_in(batch, loop.train_loader)
    read = _loss_of(model, batch, size, criterion, rule)
    value = _loss_value(read.loss)
    if not math.isfinite(value):
        raise _Found(f"the first batch's loss is {value}. Check its inputs and the model's initial weights.")
    if not read.explicit and isinstance(read.is_sum, bool):
        _check_reduction(model, batch, size, criterion, declared_sum=read.is_sum)
    weight = read.units if read.explicit else None
    weights = weight.values() if isinstance(weight, Mapping) else [] if weight is None else [weight]
    return ", ".join([f"loss {value:.4g}", *(f"weight {float(w):g}" for w in weights)])


def _evaluated(loop: TrainLoop[Any]) -> Any:
    return loop.validation_loader if loop.validation_loader is not None else loop.test_loader


def _one_evaluation_batch(loop: TrainLoop[Any]) -> str:
    """Compute the loss and the predictions of one batch as an evaluation does, which ``fit`` does after an epoch."""
    model, _, criterion = copies(loop, CPU)
    batch = first_batch(_evaluated(loop))
    size = samples_in(batch, _evaluated(loop))
    with evaluating(*trained_modules(model, criterion)), explained_evaluation(batch):
        loss = loss_of(model.get_loss_eval(batch, criterion, torch.device("cpu")), size).loss
        output = model.get_predictions(batch, torch.device("cpu"))
    check_rows(output, size)
    return f"loss {_loss_value(loss):.4g}, {row_count(output, size)} predictions"


def preflight_epoch(loop: TrainLoop[Any], callbacks: Sequence[AbstractCallback]) -> str:
    """Train an epoch of one batch, with evaluation, predictions and the callbacks' hooks, on copies in this process."""
    tried = [one for one in callbacks if not one.writes]
    left_out = [one.callback_name for one in callbacks if all(one is not other for other in tried)]
    try:
        model, optimizer, criterion, *copied = copies(loop, CPU, *tried)
    except Exception as error:
        if not tried:
            raise
        return f"not tried: the callbacks can't be copied ({type(error).__name__}: {error})"
    train, validation, test = (None if one is None else [first_batch(one)] for one in loaders_of(loop))
    trial = TrainLoop(
        model,
        train,
        validation,
        test,
        optimizer,
        criterion,
        loop.collate_batch_pred_fn,
        loop.pred_transform_fn,
        accelerator="cpu",
        seed=loop.seed or 0,
        progress_bar=False,
        gradient_clip_norm=loop.gradient_clip_norm,
    )
    hidden = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, hidden, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the length of this training
        for i, saver in enumerate(one for one in copied if isinstance(one, Saver)):
            saver.write_into(os.path.join(folder, str(i)))
        trial.fit(num_epochs=1, callbacks=copied)
        if _evaluated(loop) is not None:
            trial.predict_with_model(_evaluated(trial), dataset_info={"type": "validation"})
    names = ", ".join(one.callback_name for one in copied) or "none"
    return f"callbacks: {names}" + (f"; left out, since they write: {', '.join(left_out)}" if left_out else "")


def _check_reduction(model: Any, batch: Any, size: int, criterion: Any, *, declared_sum: bool) -> None:
    """Compare a batch's loss with the losses of its halves, to find out if it is their mean or their sum."""
    try:
        cut, sizes = scatter(batch, 2, length=size), chunk_sizes(size, 2)
    except NotDivisibleError:
        return
    if len(cut) != 2:
        return
    model.eval()  # with BatchNorm, a sample's loss depends on other samples; with dropout, it is random
    try:
        whole, first, second = (
            _loss_value(_loss_of(model, part, of, criterion).loss)
            for part, of in zip((batch, *cut), (size, *sizes), strict=True)
        )
    except Exception:  # the model accepts only batches of one size: nothing to compare
        return
    is_sum = math.isclose(whole, first + second, rel_tol=1e-4)
    is_mean = math.isclose(whole, (first * sizes[0] + second * sizes[1]) / sum(sizes), rel_tol=1e-4)
    if is_sum and not is_mean and not declared_sum:
        raise _Found(
            f"the loss of a batch, {whole:.4g}, is the sum of the losses of its halves ({first:.4g} and "
            f"{second:.4g}), but is treated as a mean, so ranks and micro-batches would make too small a step. Set "
            "loss_reduction = 'sum' in the model's class, give the criterion reduction='sum', or divide by the number "
            "of samples."
        )
    if is_mean and not is_sum and declared_sum:
        raise _Found(
            f"the loss of a batch, {whole:.4g}, is the mean of the losses of its halves ({first:.4g} and "
            f"{second:.4g}), but is treated as a sum, so ranks and micro-batches would make too large a step. Set "
            "loss_reduction = 'mean' in the model's class, or give the criterion reduction='mean'."
        )


def _loss_of(model: Any, batch: Any, size: int, criterion: Any, rule: SumRule | None = None) -> BatchLoss:
    return loss_of(model.get_loss(batch, criterion, torch.device("cpu")), size, rule)


def _loss_value(loss: Any) -> float:
    return float((loss.total() if isinstance(loss, MultiLoss) else loss).detach())


def _gradients(loop: TrainLoop[Any]) -> str:
    model, optimizer = _after_backward(loop)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    without = [name for name, p in trainable.items() if p.grad is None]
    grads = {
        n: p.grad.coalesce().values() if p.grad.is_sparse else p.grad
        for n, p in trainable.items()
        if p.grad is not None
    }
    not_finite = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
    unstepped = not_optimized(model, optimizers_of(optimizer))
    lines = []
    if without:
        lines.append(
            f"no gradient: {described_names(without)}. Use them in get_loss, freeze them with requires_grad_(False), "
            "or pass ddp_model_args={'find_unused_parameters': True} to fit."
        )
    if not_finite:
        lines.append(
            f"gradient not finite: {described_names(not_finite)}. Check for division by zero, log(0) and sqrt(0)."
        )
    if unstepped:
        lines.append(
            f"in no optimizer: {described_names(unstepped)}. Add them, or freeze them with requires_grad_(False)."
        )
    if lines:
        raise _Found("\n".join(lines))
    return f"all {len(trainable)} trainable parameters get a gradient"


def _after_backward(loop: TrainLoop[Any]) -> tuple[nn.Module, Any]:
    """Return copies of model and optimizer, with the first batch's gradients."""
    model, optimizer, criterion = copies(loop, CPU)
    output = model.get_loss(first_batch(loop.train_loader), criterion, torch.device("cpu"))
    for item in output if isinstance(output, Generator) else [output]:
        loss = (read_yielded(item, 1).read if isinstance(output, Generator) else read_loss(item, 1)).loss
        (loss.total() if isinstance(loss, MultiLoss) else loss).backward()
    return model, optimizer


def _batches(loop: TrainLoop[Any], steps: int, ranks: int) -> str:
    feeds = [
        TrainFeed(
            loop.train_loader,
            rank=rank,
            world_size=ranks,
            seed=loop.seed or 0,
            exchange_ints=lambda values: [values] * ranks,  # as if all ranks had the same values as this rank
        )
        for rank in range(ranks)
    ]
    seen = 0
    for steps_of_ranks in islice(zip(*(feed.steps(1) for feed in feeds), strict=False), steps):
        forms = [[", ".join(forms_of(batch, of_sample=True)) for batch in step.batches] for step in steps_of_ranks]
        if any(step.counts for step in steps_of_ranks):
            break
        for rank, form in enumerate(forms[1:], start=1):
            if form != forms[0]:
                raise _Found(
                    f"step {seen + 1}: rank 0 has {forms[0][0]}, but rank {rank} has {form[0]}. Training works, but "
                    "all_gather in get_loss would fail, and each step takes as long as its largest batch. Pad to one "
                    "shape, or sort by length."
                )
        seen += 1
    return f"same shapes and dtypes in {seen} steps" if seen else "fewer samples than ranks: nothing to compare"


def _comparable_lengths(loop: TrainLoop[Any], steps: int, ranks: int, per_step: int) -> tuple[int, int]:
    """Return how many batches of one process, and of ``ranks``, make the same steps; 0 if their samples differ."""
    single, many = (TrainFeed(loop.train_loader, world_size=size, seed=0).num_batches for size in (1, ranks))
    if single is None or many is None:
        steps = sum(1 for _ in islice(loop.train_loader, steps * per_step)) // per_step  # a stream may be shorter
        return steps * per_step, steps
    if -(-single // per_step) != many:
        return 0, 0
    epochs, rest = divmod(steps, many)
    return epochs * single + min(rest * per_step, single), steps


def _modes_agree(loop: TrainLoop[Any], steps: int, ranks: int, sharding: dict[str, Any]) -> str:
    # One process that accumulates over `ranks` batches sees the same samples as `ranks` ranks in one step.
    # But if ranks share each batch, a step has only one batch.
    per_step = 1 if isinstance(loop.train_loader, SplitBatches) else ranks
    # Another check reports parameters without a gradient; this check compares the others.
    exchanges: list[str] = []
    with noting_exchanges(exchanges):
        first = own_parameters(_after_backward(loop)[0])
        unused = any(p.grad is None for p in first if p.requires_grad)
    if exchanges:
        return (
            f"not compared: get_loss calls {exchanges[0]}, so its loss over the rows of all ranks is not the mean of "
            "the losses of batches"
        )
    iterations, steps = _comparable_lengths(loop, steps, ranks, per_step)
    if not steps:
        return (
            f"not compared: there are fewer than {per_step} batches, or drop_last leaves out different samples with "
            f"{ranks} ranks than in one process"
        )
    single = _train_copy(loop, "single", 1, iterations, per_step)
    mode = _mode_of_ranks(loop)
    arguments: dict[str, Any] = {}
    if mode == "fsdp":  # pass only the units: a precision would change results, and replicas may not divide these ranks
        arguments["fsdp_model_args"] = {key: value for key, value in sharding.items() if key in _UNITS}
    elif unused:
        arguments["ddp_model_args"] = {"find_unused_parameters": True}
    many = _train_copy(loop, mode, ranks, steps, 1, **arguments)
    worst, where = 0.0, ""
    gradients = [None if p.grad is None or p.grad.is_sparse or not p.numel() else p.grad.abs() for p in first]
    largest = max((float(gradient.max()) for gradient in gradients if gradient is not None), default=0.0)
    for (name, a), b, gradient in zip(single.named_parameters(), own_parameters(many), gradients, strict=True):
        # The difference is relative to the tensor's largest value, since single entries may be arbitrarily close to
        # zero.
        scale = max(float(a.detach().abs().max()) if a.numel() else 0.0, 1e-6)
        differences = (a - b).detach().abs()
        if gradient is not None:
            # A softmax does not depend on the keys' bias: its gradient is rounding, which Adam scales to whole steps.
            noise = (gradient > 0) & (gradient < 10 * torch.finfo(gradient.dtype).eps * largest)
            differences = differences.masked_fill(noise, 0)
        difference = float(differences.max()) / scale if a.numel() else 0.0
        if not difference <= worst:
            worst, where = difference, name
    if not worst <= TOLERANCE:
        raise _Found(
            f"after {steps} steps, {where} differs between the two modes by {worst:.1e}, relative to its largest "
            "value. Check that get_loss is a mean over samples (else return (loss, weight)) and depends only on the "
            "batch. Random numbers that the model draws itself (noise, functional dropout) and layers that change in "
            "each forward pass (spectral norm) are harmless causes."
        )
    return f"weights agree to {worst:.0e} after {steps} steps"


def _train_copy(
    loop: TrainLoop[Any],
    mode: GpuMode,
    devices: int,
    iterations: int,
    accumulation: int,
    **arguments: Any,
) -> nn.Module:
    model, optimizer, criterion = copies(loop, CPU)
    for module in model.modules():  # modules that draw or count per process differ between modes by design
        if isinstance(module, _DROPOUT):
            module.p = 0.0
        for name, value in list(vars(module).items()):  # of attention, LSTM, DropPath and other libraries' modules
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if hasattr(module, "track_running_stats"):  # batch and instance normalization
            module.eval()
            module.train = _stay(module)
    trial = TrainLoop(
        model,
        loop.train_loader,
        None,
        None,
        optimizer,
        criterion,
        gpu_mode=mode,
        accelerator="cpu",
        devices=devices,
        seed=loop.seed or 0,
        progress_bar=False,
        # A hanging rank must be found in seconds.
        timeout=min(loop.timeout, 120.0),
    )
    with untouched(loop):  # both modes read the same order, also from generators of the loader
        return trial.fit(num_iterations=iterations, grad_accumulation=accumulation, **arguments)


def _stay(module: nn.Module) -> Callable[..., nn.Module]:
    return lambda mode=True: module
