"""Warn of what is likely a mistake in a training: in its model, its loss, or its state. Each warning once per fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainloop._support import rng
from trainloop._support.reduction import adds_samples, divisor_of
from trainloop._support.user_line import described_names, warn_or_print
from trainloop.callbacks.base import overrides_of_user
from trainloop.callbacks.monitor import Monitor
from trainloop.data import StepBatches
from trainloop.devices import has_replicas
from trainloop.model import TTModel
from trainloop.optim.parameters import named_trained_parameters, trained_modules
from trainloop.parallel.sharded.shards import bit_sums
from trainloop.train_loop.progress.running import TrainingRun
from trainloop.train_loop.run.losses import BatchLoss
from trainloop.train_loop.training.trained import changing_buffers, hooked_parameters, not_optimized

_COMPARED_BATCHES = 3  # of an evaluation
_MOST_ITEMS = 1000  # of a dict; a larger one is a vocabulary, for example
_MANY_SKIPPED = 20  # from its initial value, AMP's scale needs 16 skipped steps to 1


class Advice:
    """Warnings of a training run, on global rank 0 only.

    Parameters
    ----------
    run : TrainingRun
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._given: set[str] = set()
        self._saw_weight = False
        self._skipped = _Skipped()

    def once(self, about: str, text: str) -> None:
        """Warn, unless ``text`` is empty, or this run has warned ``about`` this already."""
        if text and about not in self._given and self._run.loop.is_global_zero:
            self._given.add(about)
            warn_or_print(text)

    # -- before the first step ---------------------------------------------------------------------------------------

    def eval_undone(self) -> None:
        """Warn that ``on_epoch_begin`` has put the model into ``eval()``."""
        self.once(
            "eval",
            "the model was put into eval() in on_epoch_begin, and the loop switches it back to training mode, as at "
            "the beginning of every epoch. To train in evaluation mode, call model.eval() in on_batch_begin, or put "
            "all submodules into eval() instead of the whole model.",
        )

    @contextmanager
    def seeing_draws(self) -> Iterator[None]:
        """Warn if the hooks at the beginning of an epoch draw random numbers: data would change by other ones.

        The seeds that a loader draws when a hook reads it are not meant.
        """
        loop = self._run.loop
        before = rng.read(devices=False) if loop.is_global_zero and "draws" not in self._given else None
        yield
        if before is not None and rng.drew(before, devices=False) and not rng.drew_for_loaders(before):
            names = [type(one).__name__ for one in loop.callbacks if overrides_of_user(one, "on_epoch_begin")]
            self.once(
                "draws",
                f"on_epoch_begin of {described_names(names or ['the model'])} draws random numbers, which differ "
                "between ranks. If it changes the data or their order with them, ranks read some samples several times "
                "and others never. Then draw from a generator that is the same on all ranks, such as "
                "random.Random(epoch), numpy.random.default_rng(epoch) or torch.Generator().manual_seed(epoch).",
            )

    def untrained(self, *, averages: bool) -> None:
        """Warn of parameters that require gradients but are in no optimizer, and of hooks before an average over ranks.

        Called after the hooks at the beginning of an epoch, which may have frozen some. ``averages``: gradients are
        averaged over ranks after backward.
        """
        loop = self._run.loop
        names = not_optimized(loop.model, self._run.gradients.optimizers, loop.criterion)
        if names:
            clips = " Their gradients add up from step to step, and count in the norm that gradient_clip_norm limits."
            counted = loop.gradient_clip_norm is not None and not all(name.startswith("criterion.") for name in names)
            self.once(
                "optimizer",
                f"{described_names(names)} {'require' if len(names) > 1 else 'requires'} gradients, but "
                f"{'are' if len(names) > 1 else 'is'} in no optimizer, so training does not change them. Create the "
                "optimizer after the last change of the model, or freeze them with requires_grad_(False)."
                + clips
                * counted,
            )
        named = named_trained_parameters(loop.model, loop.criterion, loop.optimizer)
        hooked = hooked_parameters(named) if averages else []
        if hooked:
            self.once(
                "hooks",
                f"{hooked[0][0]} has a hook for its gradient ({hooked[0][1]}). In ddp, the hook gets the gradient of "
                "one rank's samples, before the average over ranks. A hook that scales is right; a hook that is not "
                "linear, such as a clamp, gives other results than in one process. Change gradients in a callback's "
                "on_after_gradient_update instead, which gets the average.",
            )

    # -- in a step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def watching_counters(self, step: StepBatches, i: int) -> Iterator[None]:
        """Warn of numbers that ``get_loss`` changes in a micro-batch that some rank does not have.

        These numbers would then differ between ranks, which is right for a sum over samples, but not for a count of
        steps.
        """
        loop, counts = self._run.loop, step.counts or [0]
        if "counters" in self._given or not (min(counts) <= i < len(step.batches) and loop.is_global_zero):
            yield
            return
        before = _numbers_in_attributes(loop.model, loop.criterion)
        yield
        samples = step.sizes[i] if step.sizes[i] > 1 else None
        after = _numbers_in_attributes(loop.model, loop.criterion)
        grown = {name: value - before.get(name, value) for name, value in after.items()}
        counters = [name for name, growth in grown.items() if growth not in (0, samples)]
        if counters:
            missing = [str(rank) for rank, n in enumerate(counts) if n <= i]
            self.once(
                "counters",
                f"get_loss changes the attribute {', '.join(counters[:5])}, but step {loop.progress.global_step + 1} "
                f"has no samples for rank {', '.join(missing[:5])}, where get_loss is not called. If this is a count "
                "of steps, set it in a callback's on_batch_begin, from tl.global_step, or pass drop_last=True to the "
                "loader, so that all ranks have the same value.",
            )

    def averages(self, read: BatchLoss, count: int, calls: int) -> None:
        """Warn if ``get_loss`` combines the loss of a criterion with class weights or ignored targets.

        Parameters
        ----------
        read : BatchLoss
        count : int
            Number of micro-batches in the step.
        calls : int
            Number of calls of such criteria.
        """
        # Each of several losses must keep its criterion's divisor; a weight that get_loss returned is for all of them.
        known = read.units is not None
        if isinstance(read.units, dict):
            known = sum(divisor_of(part) is not None for part in read.loss.values()) >= calls
        if known or not self._is_averaged(count):
            return
        self.once(
            "averages",
            "get_loss calls a criterion that averages over the targets' weights (class weights or ignored targets), "
            "but the loss that get_loss returns does not show their sum. It is averaged over samples, so results "
            "depend on batch size, grad_accumulation, ranks and replicas. Return (loss, weight), where weight is the "
            "sum of the targets' weights (or the number of targets that are not ignored), or a MultiLoss with each "
            "criterion's loss under its own name (a factor is allowed), or (MultiLoss, weight) if all losses have the "
            "same weight.",
        )

    def sums(self, read: BatchLoss, count: int) -> None:
        """Warn if the loss of one of ``count`` micro-batches is a sum that neither model nor criterion declares.

        Also warn if the weight of the loss may be a metric, whose zeros would leave batches out.
        """
        loop = self._run.loop
        if read.explicit and not self._saw_weight:
            self._saw_weight = True  # a tensor on a GPU is read once only
            if 0 < (weight := float(read.units)) < 1:
                self.once(
                    "weight",
                    f"get_loss returned (loss, weight) with the weight {weight:.4g}. The weight is the number of units "
                    "that the loss is a mean over, and batches with a smaller weight count less. If it is a metric, "
                    "such as an accuracy, call self.log('accuracy', value) and return only the loss.",
                )
        declared = getattr(loop.model, "loss_reduction", None) is not None or self._run.gradients.sums is not None
        if declared or read.units is not None or not self._is_averaged(count):
            return
        if any(map(adds_samples, [read.loss] if isinstance(read.loss, Tensor) else read.loss.values())):
            self.once(
                "sums",
                "get_loss returns a loss with reduction='sum', but is taken to return a mean over samples, so results "
                "depend on batch size, grad_accumulation, ranks and replicas. Set loss_reduction = 'sum' in the class "
                "of your model, or 'mean' if the loss is a mean.",
            )

    def _is_averaged(self, count: int) -> bool:
        """Return True if losses of several batches are averaged: of micro-batches, ranks, replicas or evaluations."""
        loop = self._run.loop
        replicas = has_replicas(loop.gpu_mode, loop.run_config.devices)
        evaluates = loop.end_auto_eval and loop.validation_loader is not None
        return bool(count > 1 or self._run.parallel or replicas or evaluates)

    def monitors(self) -> None:
        """After the first step, look for misspelt names of metrics, which would end the training after its epoch."""
        loop = self._run.loop
        if "monitors" in self._given or not loop.is_global_zero:
            return
        self._given.add("monitors")
        for monitor in (part for callback in loop.callbacks for part in vars(callback).values()):
            # A part may be a proxy of an object that is gone, for which isinstance raises.
            if issubclass(type(monitor), Monitor) and (text := monitor.about_name(loop, self._run.recorder.names)):
                warn_or_print(text)

    # -- in an evaluation --------------------------------------------------------------------------------------------

    def evaluated(self, batches: Iterator[Any], kind: str) -> Iterator[Any]:
        """Yield this rank's batches of a pass; in the first of its kind, warn of counts and buffers that it changes.

        Ranks evaluate different batches, so these values differ from those in one process. Hooks of evaluations may
        reset what a pass adds up, and numbers that do not grow evenly are mostly overwritten by each batch.
        """
        loop = self._run.loop
        parts = [loop.model, *loop.callbacks]
        hooks = ("on_evaluation_begin", "on_evaluation_end")
        seen = f"evaluated {kind}"
        if not self._run.parallel or not loop.is_global_zero or seen in self._given or "evaluated" in self._given:
            yield from batches
            return
        self._given.add(seen)
        if any(overrides_of_user(part, hook) for part in parts for hook in hooks):
            yield from batches
            return
        trained = getattr(type(loop.model), "get_loss_eval", None) is TTModel.get_loss_eval and kind == "loss"
        buffers = changing_buffers(loop.model) if trained else {}
        bits = bit_sums(list(buffers.values()))
        before, growths = _numbers_in_attributes(loop.model, loop.criterion, in_dicts=True), []
        for number, item in enumerate(batches):
            yield item
            if number < _COMPARED_BATCHES:
                after = _numbers_in_attributes(loop.model, loop.criterion, in_dicts=True)
                growths.append({name: value - before.get(name, value) for name, value in after.items()})
                before = after
        even = growths[0] if growths else {}
        counts = [n for n, one in even.items() if one == 1 or (one and len(growths) > 1)]
        counts = [name for name in counts if all(growth.get(name) == even[name] for growth in growths)]
        now = bit_sums(list(buffers.values()))
        names = [*counts, *(name for name, own, then in zip(buffers, now, bits, strict=True) if own != then)]
        if names:
            self.once(
                "evaluated",
                f"an evaluation changes {described_names(names)}, and each rank evaluates only some of the batches, so "
                "values differ from those in one process. If the training uses them (a count of steps, a queue), "
                "change them only `if self.training:`, or set a count in a callback's on_batch_begin, from "
                "tl.global_step. If they belong to evaluations, reset them in the model's on_evaluation_begin.",
            )

    # -- at the end of an epoch --------------------------------------------------------------------------------------

    def nan(self, losses: dict[str, float]) -> None:
        """Warn of a training loss that is NaN, unless a callback handles it."""
        loop = self._run.loop
        names = ", ".join(name for name, value in losses.items() if value != value)
        if names and all(callback.callback_name != "TerminateOnNaN" for callback in loop.callbacks):
            self.once(
                "nan",
                f"NaN in the training loss of epoch {loop.epoch + 1} ({names}). Use "
                "fit(callbacks=[TerminateOnNaN()]) to end training at the first NaN and to see its step and parameter.",
            )

    def note_skipped(self, found: Sequence[Tensor]) -> None:
        """Add a step's ``found_inf`` of each optimizer and device."""
        self._skipped.add(found)

    def skipped(self, *, at_end: bool = False) -> None:
        """Warn if AMP has skipped many steps in a row or, at the end, all steps of the fit."""
        by_optimizer = self._skipped.in_a_row()
        in_a_row = max(by_optimizer, default=0)
        many = in_a_row >= _MANY_SKIPPED or (at_end and 0 < in_a_row == self._skipped.steps)
        if not many:
            return
        which = [i for i, n in enumerate(by_optimizer) if n == in_a_row]
        of = "" if len(which) == len(by_optimizer) else f" of optimizer {', '.join(map(str, which))} (counted from 0)"
        self.once(
            "skipped",
            f"AMP has skipped the last {in_a_row} optimizer steps{of}, because their gradients had NaN or infinite "
            f"values, so {'its' if of else 'the'} weights have not changed. The scale is now "
            f"{self._run.place.scaler.get_scale():g}. If it is still above 1, pass a smaller one, as in "
            "use_amp={'init_scale': 1024.0}. Otherwise, use use_amp='bf16', or find the operation with "
            "torch.autograd.set_detect_anomaly(True).",
        )


class _Skipped:
    """Count the last steps in a row that AMP has skipped, for each optimizer. Only reading waits for the device."""

    def __init__(self) -> None:
        self.steps = 0
        self._before: list[int] = []  # skipped in a row until the last reading
        self._since = 0  # steps since then
        self._least: torch.Tensor | None = None  # over these steps; above zero if all of them were skipped

    def add(self, found: Sequence[torch.Tensor]) -> None:
        """Add a step, with its ``found_inf`` of each optimizer and device: these were skipped unless it is zero."""
        least = found[0].reshape(1) if len(found) == 1 else torch.stack([one.to(found[0].device) for one in found])
        if self._least is not None and self._least.shape != least.shape:  # other optimizers than before
            self.in_a_row()
        self._least = least.clone() if self._least is None else torch.minimum(self._least, least)
        self.steps, self._since = self.steps + 1, self._since + 1

    def in_a_row(self) -> list[int]:
        """Return each optimizer's number; steps between two readings count only if all of them were skipped."""
        if self._least is not None:
            skipped = self._least.flatten().tolist()
            before = self._before if len(self._before) == len(skipped) else [0] * len(skipped)
            self._before = [n + self._since if all_of_them else 0 for n, all_of_them in zip(before, skipped)]
            self._since, self._least = 0, None
        return self._before


def _numbers_in_attributes(model: nn.Module, criterion: Any, *, in_dicts: bool = False) -> dict[str, float]:
    """Return the public attributes of a model, a criterion and their modules that are numbers, by path."""
    named = [
        (f"{path}.{name}".lstrip("."), value)
        for module in trained_modules(model, criterion)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if type(value) in (int, float, dict) and not name.startswith("_")
    ]
    if in_dicts:
        small = [(name, one) for name, one in named if type(one) is dict and len(one) <= _MOST_ITEMS]
        named += [(f"{name}[{key!r}]", v) for name, one in small for key, v in one.items()]
    return {name: value for name, value in named if type(value) in (int, float)}
