"""Compute a step's gradients from the losses of its micro-batches, and take the optimizers' steps.

A step's gradients are the gradients of one mean over all samples of the step (or units, if ``get_loss`` returns a
weight), over all micro-batches and ranks. The backward of each micro-batch adds its part. Then
:meth:`Gradients.complete` reduces and scales the sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from trainloop import distributed
from trainloop._support.reduction import DeclaredReductions, sum_rule
from trainloop.callbacks.base import HooksOfRanks
from trainloop.devices import has_ranks
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss
from trainloop.optim.optimizers import explain_no_closure, needs_closure, optimizers_of, parameters_of
from trainloop.optim.parameters import explain_sparse, note_registrations, own_parameters, trained_parameters
from trainloop.parallel import TTDistributedDataParallel, reduce_gradients
from trainloop.parallel.dp import refuse_changes_in_get_loss
from trainloop.parallel.sharded.shards import clip_gradients, is_sharded, local_shard
from trainloop.train_loop.progress.running import TrainingRun
from trainloop.train_loop.run.losses import BatchLoss, read_loss
from trainloop.train_loop.training.consistency import SameWeights, check_same_on_all_ranks
from trainloop.train_loop.training.own_weights import OwnWeights
from trainloop.train_loop.training.step_weight import Converted, StepWeight, as_factor
from trainloop.train_loop.training.trained import TrainedParameters


class Gradients:
    """Compute gradients from losses, for the parameters that a rank trains, and step the optimizers.

    Parameters
    ----------
    run : TrainingRun
        The run that has the model, criterion and optimizers.

    Attributes
    ----------
    weight : StepWeight
        What the losses of the current step weigh.
    own_weights : OwnWeights
        The losses of a ``MultiLoss`` that have weights of their own.
    sums : SumRule or None
        Rule that decides which losses are sums over samples; ``None`` if no loss is a sum.
    optimizers : list of Optimizer
    parameters : list of Tensor
        Parameters of the model.
    learned : list of Tensor
        Parameters of the model and the criterion, and others of the optimizer.
    trained : TrainedParameters or None
        Detects parameters that are frozen or unfrozen; ``None`` in modes without ranks.
    ranks : int
        Number of ranks whose gradients are averaged.
    """

    def __init__(self, run: TrainingRun) -> None:
        loop = run.loop
        self._run = run
        self._place = place = run.place
        self.outdated = False
        """True if the optimizer, the criterion or a module has changed since the last step."""
        self.ranks = loop.world_size if run.parallel else 1
        self.scales = place.scaler.is_enabled()
        """True if losses are multiplied by AMP's scale."""
        self._exchanges = place.collective and self.ranks > 1
        """True if each backward is an exchange between ranks."""
        self.weight = StepWeight(place, self.ranks)
        self.own_weights = OwnWeights(run, self.weight, self.ranks, self._optimizers_of)
        self.take_rules()
        self._take_optimizers()
        self.trained = (
            TrainedParameters(loop.model, lambda: (loop.criterion, loop.optimizer), loop.timeout)
            if has_ranks(loop.gpu_mode)
            else None
        )
        self._same = SameWeights(loop.model, lambda: loop.criterion)
        self._take_parameters()
        watched = loop.grad_accumulation + 1  # until the second step: in the first, a network's copy equals it
        if place.collective:
            if self._exchanges:
                place.wrapper.complete_units()
            place.wrapper.watch_forwards(watched)
        elif loop.gpu_mode == "dp":
            refuse_changes_in_get_loss(place.wrapper, watched)

    def take_rules(self) -> None:
        """Take the rule for sums from the criterion as it is now."""
        loop = self._run.loop
        self.sums = sum_rule(loop.model, loop.criterion)
        self.declared = DeclaredReductions(loop.criterion)

    def _take_optimizers(self) -> None:
        loop, place = self._run.loop, self._place
        self._multi_optimizer = loop.optimizer
        self.optimizers = optimizers_of(loop.optimizer)
        # DDP's reducer expects one backward per forward, but several optimizers need several backwards.
        self._always_later = isinstance(place.wrapper, TTDistributedDataParallel) and len(self.optimizers) > 1
        place.steps(self.optimizers)
        place.check_parameters()
        self._stepped = self._now_stepped()

    def _take_parameters(self) -> None:
        loop = self._run.loop
        self.parameters: list[Tensor] = [*own_parameters(loop.model)]
        # A criterion may have parameters, too (a margin, class weights), and an optimizer; no wrapper contains them.
        self.learned: list[Tensor] = trained_parameters(loop.model, loop.criterion, loop.optimizer)
        stepped = (p for one in optimizers_of(loop.optimizer) for p in parameters_of(one))
        # Of a network that a criterion only reads (a teacher): clip_grad_norm_(model.parameters()) does not count them.
        self._not_clipped = set(map(id, self.learned)).difference(map(id, self.parameters), map(id, stepped))
        self._beside: set[int] = set()
        has_buffers = next(loop.model.buffers(), None) is not None
        self._shares_buffers = self._exchanges and has_buffers
        if self._place.collective:  # parameters outside of the wrapper, and those that it does not shard
            self._beside = {id(p) for p in self.learned if not is_sharded(p)}

    # -- parameters that are frozen, unfrozen or added while ranks train ---------------------------------------------

    def follow_at_epoch_begin(self, settings: dict[str, Any]) -> HooksOfRanks:
        """Take the parameters, the optimizers and the rule for sums as they are now. Collective.

        Return what the ranks' callbacks do. Settings that differ are an error.
        """
        outdated, self.outdated = self._steps_others() or self.outdated, False
        self.take_rules()
        self._take_optimizers()
        if self.trained is None:
            if outdated:
                self._take_parameters()
            return HooksOfRanks.of(self._run.loop.callbacks)
        wrapper = self._place.wrapper
        shares = self._shares_buffers or bool(getattr(wrapper, "broadcast_buffers", False))
        ignored = getattr(wrapper, "parameters_to_ignore", ())  # DDP's name for parameters and buffers
        shared = [(name, b) for name, b in self._run.loop.model.named_buffers() if shares and name not in ignored]
        changed, alike = self.trained.agree(zlib.crc32(repr(settings).encode()), shared)
        # Before a change is followed, which is an exchange: other ranks may not have this change.
        of_ranks = HooksOfRanks.of(self._run.loop.callbacks) if alike else check_same_on_all_ranks(settings)
        if (2 in changed) and min(changed) < 2:
            raise ConfigurationError(
                f"rank {changed.index(2)} has replaced, added or removed parameters of the model, the criterion or the "
                f"optimizer, but rank {changed.index(min(changed))} has not. Make the same changes on every rank."
            )
        if any(changed):
            self._follow(self.trained)
        return of_ranks

    def follow_at_step_begin(self) -> None:
        """Follow what has changed within an epoch. In modes with ranks, wait until the others have the same change."""
        outdated, self.outdated = self._steps_others() or self.outdated, False
        self._place.check_parameters()
        if outdated:
            self._take_optimizers()
        if self.trained is None:
            if outdated:
                self._take_parameters()
        elif self.trained.changed(everything=outdated):
            self.trained.meet()
            self._follow(self.trained)

    def now_learned(self) -> list[Tensor]:
        """Return :attr:`learned`, with what ``get_loss`` itself has added in this step.

        In modes with ranks, this is followed at the next step, by all ranks.
        """
        stepped = self._now_stepped()
        if self.trained is None and (self.outdated or not _are_same(stepped, self._stepped)):
            self._stepped = stepped
            self._take_parameters()
        return self.learned

    def _now_stepped(self) -> list[Tensor]:
        return [parameter for optimizer in self.optimizers for parameter in parameters_of(optimizer)]

    def _steps_others(self) -> bool:
        """Return True if a callback has replaced an optimizer in a MultiOptimizer, or parameters of an optimizer."""
        return self.follow_optimizers() or not _are_same(self._now_stepped(), self._stepped)

    def follow_optimizers(self) -> bool:
        """Follow an optimizer that a callback has replaced in a MultiOptimizer; return True if there is one."""
        replaced = not _are_same(optimizers_of(self._run.loop.optimizer), self.optimizers)
        if replaced:
            self._run.assigned("optimizer")
        return replaced

    def _follow(self, trained: TrainedParameters) -> None:
        trained.note()
        self._take_parameters()
        self._same.check(self._place.wrapper, trained.beside)  # torch 2.6 sends rank 0's to all ranks when it wraps
        self._place.wrap_again()

    def assigned(self, name: str) -> None:
        """Follow an assignment of ``tl.criterion`` at the next batch, and of ``tl.optimizer`` at the next step."""
        self.outdated = True
        loop = self._run.loop
        if name == "criterion":
            self.take_rules()
            return
        before, now = self.optimizers, optimizers_of(loop.optimizer)
        self._place.steps(now)
        if not now:
            loop.note(optimizer=self._multi_optimizer)
            raise ConfigurationError("tl.optimizer = None while training: each step needs an optimizer.")
        own, theirs = (
            {(needs_closure(one), getattr(one, "training_class", None)): type(one).__name__ for one in those}
            for those in (before, now)
        )
        if own.keys() != theirs.keys():
            loop.note(optimizer=self._multi_optimizer)
            other = next((name for kind, name in theirs.items() if kind not in own), type(now[0]).__name__)
            raise ConfigurationError(
                f"tl.optimizer = {other}(...): its steps are of another kind than those of "
                f"{type(before[0]).__name__}, as one of them needs a closure. End training, and call fit again with it."
            )

    def noting_registrations(self) -> AbstractContextManager[Any]:
        """Inside the block, note when a module registers a parameter or another module."""

        def note(module: nn.Module, name: str, value: Any) -> None:
            self.outdated = True
            if self._place.collective:
                first, _ = self._place.registered.get((module, name), (module._parameters.get(name), None))
                self._place.registered[module, name] = first, value

        return note_registrations(note)

    def check_same_weights(self) -> None:
        """Check that all ranks have the same weights. Collective in ``ddp``."""
        if self.trained is not None:
            self.trained.warn_if_unreached()
            # A rank without a batch in the last step has not changed its buffers.
            buffers_too = not self.weight.ragged
            callbacks = self._run.loop.callbacks
            self._same.check(
                self._place.wrapper, self.trained.beside, self.optimizers, callbacks, buffers_too=buffers_too
            )

    def begin_step(self, ragged: bool) -> None:
        """Prepare for a step; ``ragged`` is True if ranks have different numbers of micro-batches. Collective."""
        weight = self.weight
        weight.ragged = ragged
        weight.reduced_later = (
            ragged or self._always_later or self.own_weights.separated
        ) and not self._place.collective
        self.share_buffers()
        if weight.reduced_later and isinstance(self._place.wrapper, TTDistributedDataParallel):
            self._place.wrapper.passed_by()

    def share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks before a forward, unless DDP's own forward does this. Collective."""
        if self.weight.reduced_later or self._shares_buffers:
            self._place.share_buffers()

    def is_whole(self, count: int) -> bool:
        """Return True if one micro-batch of this process is the whole step, of ``count`` micro-batches.

        Its loss is already the mean over the step's units, so its gradients are the step's: scaling would only add
        rounding errors, and there is nothing to :meth:`complete`.
        """
        return count == 1 and self.trained is None

    # -- a get_loss that calls backward itself -------------------------------------------------------------------------

    @property
    def combines(self) -> bool:
        """True if the loop scales gradients, or combines those of several micro-batches, replicas or ranks."""
        loop = self._run.loop
        return loop.gpu_mode != "single" or loop.grad_accumulation > 1 or self.scales

    def now(self) -> list[Tensor | None]:
        """Return the gradients of parameters, for :meth:`refuse_own_backward`."""
        found = [p.grad for p in self.learned]
        if self._place.collective:  # gathered parameters, whose gradients are not reduced yet
            known = set(map(id, self.learned))
            own = [p.grad for p in own_parameters(self._run.loop.model) if id(p) not in known]
            found += [gradient for gradient in own if gradient is not None]
        return found

    def refuse_own_backward(self, before: list[Tensor | None]) -> None:
        """Raise an error if ``get_loss`` has changed gradients, which :meth:`now` returned before the call."""
        after = self.now()
        if len(before) == len(after) and all(map(_is_same, before, after)):
            return
        raise ConfigurationError(
            "get_loss changes the gradients of parameters, by backward() or zero_grad(). The loop can't weigh such "
            "gradients by the samples of their batch, scale them for fp16, or average them over micro-batches, "
            "replicas or ranks. Return the loss (a MultiLoss for several), and let the loop run backward. For other "
            "gradients, such as those of inputs, call torch.autograd.grad(loss, inputs). To save memory, use "
            "TrainLoop(checkpoint_modules=...). Or use gpu_mode='single' with grad_accumulation=1 and without fp16."
        )

    # -- for each micro-batch ----------------------------------------------------------------------------------------

    def scaled(self, read: BatchLoss, scale: float | None, count: int, size: int, *, last: bool = True) -> Any:
        """Scale a micro-batch's loss so that the gradients, added up and averaged over ranks, are the step's gradients.

        A mean over samples is scaled to its part of the step's mean. A mean over other units is scaled to the sum over
        its units, divided by the step's samples and the usual number of units per sample. Once all units are known,
        :meth:`complete` divides by the units per sample, relative to the usual number.

        Parameters
        ----------
        read : BatchLoss
        scale : float or None
            Weight of the micro-batch by samples, if the step's micro-batches differ in size.
        count : int
            Number of micro-batches of the step.
        size : int
            Number of samples of the micro-batch.
        last : bool
            True for the last micro-batch of the step.
        """
        loss, weight, step = read.loss, read.units, self.weight
        step.given.append(read.explicit)
        began, own = bool(self.own_weights.names), isinstance(weight, dict)
        if self.own_weights.names is None or self.own_weights.agrees or isinstance(loss, MultiLoss):
            self.own_weights.agree(loss, weight)
        step.weighted = step.weighted or (weight is not None and not own)
        if read.is_sum is True:  # gradients of micro-batches add up unscaled, and are averaged over ranks
            if self.ranks == 1:
                return loss
            step.add(0.0)  # the weight that DDP carries is otherwise the last one of a mean
            return loss * self.ranks
        if self.ranks == 1 and count == 1:  # the only rank of a group: as in is_whole
            return loss
        share = 1 / count if scale is None else scale
        if read.is_sum:  # of a MultiLoss whose other losses are means
            factor = self.ranks / (share or 1.0)  # of no samples, a sum is zero
            loss = loss.map(lambda part: part * factor, read.is_sum)
        if self.own_weights.names or own:
            if weight is not None and not own:
                raise ConfigurationError(
                    "get_loss returned a MultiLoss whose losses have weights of their own for one batch, and a loss "
                    "with a weight (of its class weights, or of targets that are not ignored) for this one. Return a "
                    "MultiLoss for every batch, such as MultiLoss({'loss': loss})."
                )
            at_once = last and not step.ragged and (count == 1 or not began)
            return self.own_weights.scaled(loss, weight if own else {}, share, size, at_once=at_once)
        if isinstance(loss, MultiLoss):
            self.own_weights.note_averages(loss, share)
        usual = step.usual(None, size if weight is None else weight, size) if step.weighted else 1.0
        # With as many units as samples, the bits are the same as without a weight.
        if weight is None or (not isinstance(weight, Tensor) and weight == size):
            if weight is None and isinstance(loss, Tensor):
                step.add_samples(loss, share / usual)
            else:
                step.add(share / usual, units=weight is not None)
            loss = loss * scale if scale is not None else loss / count if count > 1 else loss
            return loss if usual == 1 else loss / usual
        units = step.exact(weight) * (share / max(size, 1) / usual)
        step.add(units, units=True, uneven=True)
        return loss * as_factor(units, loss)

    def _optimizers_of(self, loss: Any) -> Mapping[str, Any]:
        """Return the index of each loss's optimizer; empty if there is only one optimizer."""
        if len(self.optimizers) == 1 or not isinstance(loss, MultiLoss):
            return {}
        return loss.assigned_to(self._multi_optimizer).loss_optimizer_map or {}

    def backward(self, loss: Tensor | MultiLoss) -> None:
        """Run backward of a scaled loss.

        Each part of a ``MultiLoss`` reaches only the parameters of the part's optimizer.
        """
        scaler = self._place.scaler
        if self.own_weights.parts:
            self._backward_of_parts(loss)
        elif isinstance(loss, Tensor):
            scaler.scale(loss).backward()
        elif len(self.optimizers) == 1:
            scaler.scale(loss.total()).backward()
        else:
            loss = loss.assigned_to(self._multi_optimizer).map(scaler.scale)
            assert loss.loss_optimizer_map is not None
            lacks = self._exchanges and len({*loss.loss_optimizer_map.values()}) < len(self.optimizers)
            lacks = lacks or any(map(self._is_frozen, loss.values()))
            for i, optimizer in enumerate(self.optimizers):
                last = i == len(self.optimizers) - 1
                with self._between_backwards(last=last):
                    if not lacks:
                        self.backward_into(partial(loss.backward, i), optimizer)
                    elif (own := loss.for_optimizer(i)) is not None and not self._is_frozen(own):
                        self.backward_into(partial(own.backward, retain_graph=not last), optimizer)
                    else:
                        self._exchange(loss, i, retain_graph=not last)

    def _is_frozen(self, loss: Tensor) -> bool:
        """Return True in ``fsdp`` for a loss without a graph: a backward of zeros takes its place."""
        return self._place.collective and not loss.requires_grad

    def _exchange(self, loss: Tensor | MultiLoss, optimizer: int | None, *, retain_graph: bool) -> None:
        """Run a backward of zeros: other ranks may have a loss here, and in ``fsdp``, a backward is an exchange."""
        beside = [(p, p.grad) for p in self.learned if id(p) in self._beside]
        backward = partial(_zero_of(loss).backward, retain_graph=retain_graph)
        with self._place.wrapper.reaching(set()):
            self._backward_for(optimizer, backward)
        for p, gradient in beside:
            p.grad = gradient

    def _between_backwards(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one of several backward passes through the graph of one forward."""
        return nullcontext() if last or not self._place.collective else self._place.wrapper.keeping_gathered()

    def _backward_of_parts(self, loss: Tensor | MultiLoss) -> None:
        """Run backward of each loss with its own weight into separate gradients, after that of the other losses."""
        which = self._optimizers_of(loss)
        losses = dict(loss) if isinstance(loss, MultiLoss) else {"": loss}
        # For each pass: the name of its part, the index of its optimizer, and its loss. In fsdp, a backward pass is an
        # exchange, so all ranks run the same ones; without a loss, a rank runs one of zeros.
        exchanges, names = self._exchanges, self.own_weights.names or {}
        own: list[tuple[str | None, int | None, Tensor | None]] = [
            (name, which.get(name, names.get(name)), losses.pop(name, None))
            for name in self.own_weights.parts
            if exchanges or name in losses
        ]
        others: dict[int | None, list[Tensor]] = {}
        if exchanges:
            others = {i: [] for i in (range(len(self.optimizers)) if len(self.optimizers) > 1 else (None,))}
        for name, other in losses.items():
            others.setdefault(which.get(name), []).append(other)
        passes = [*((None, i, sum(of[1:], of[0]) if of else None) for i, of in others.items()), *own]
        aside: list[tuple[Tensor, Tensor | None]] = []
        for i, (part, optimizer, part_loss) in enumerate(passes):
            if part is not None and not aside:
                aside = [(parameter, parameter.grad) for parameter in self.learned]
                for parameter in self.learned:
                    parameter.grad = None
            last = i == len(passes) - 1
            with self._between_backwards(last=last):
                if part_loss is None or self._is_frozen(part_loss):
                    self._exchange(loss, optimizer, retain_graph=not last)
                else:
                    self._backward_for(
                        optimizer, partial(self._place.scaler.scale(part_loss).backward, retain_graph=not last)
                    )
            if part is not None:
                self.own_weights.parts[part].take(self.learned)
        for parameter, gradient in aside:
            parameter.grad = gradient

    def so_far(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient from the step's backward passes so far, including separate gradients."""
        own = [part.gradients[parameter] for part in self.own_weights.parts.values() if parameter in part.gradients]
        if parameter.grad is not None:
            own.insert(0, parameter.grad)
        return sum(own[1:], own[0]) if own else None

    def _backward_for(self, optimizer: int | None, backward: Callable[..., None]) -> None:
        """Call ``backward()`` for the parameters of an optimizer, by its index; for all if it is None."""
        if optimizer is None:
            backward()
        else:
            self.backward_into(backward, self.optimizers[optimizer])

    def backward_into(self, backward: Callable[..., None], *optimizers: torch.optim.Optimizer) -> None:
        """Call ``backward(inputs=...)`` for parameters of these optimizers; other parameters keep their gradients."""
        own = [p for optimizer in optimizers for p in parameters_of(optimizer) if p.requires_grad]
        if not self._place.collective:
            if own:  # otherwise all are frozen; torch rejects an empty list of inputs
                backward(inputs=own)
            return
        # The graph contains a unit's full parameters, not the optimizer's shards, so shards can't be ``inputs`` of
        # backward.
        its = {id(p) for p in own}
        others = [(p, p.grad) for p in self.learned if id(p) not in its]
        for p, _ in others:
            p.grad = None
        with self._place.wrapper.reaching(its):
            backward()
        for p, gradient in others:
            p.grad = gradient

    def zero_backward(self, batch: Any) -> None:
        """Run forward and backward of another rank's batch, with zero gradients."""
        place = self._place
        with place.autocast, self._run.seeing_functions(idle=True):
            output = place.wrapper.get_loss(batch, self._run.loop.criterion, place.device)
        read = read_loss(output, 1)
        self.own_weights.agree(read.loss, None)
        self.own_weights.expect_all()
        self.backward(read.loss * 0.0)

    # -- for each step -----------------------------------------------------------------------------------------------

    def complete(self, parameters: Sequence[Tensor]) -> Tensor | float | None:
        """Reduce gradients that backward has not reduced, and divide all gradients by the step's weight if it is not 1.

        Return the factor by which the gradients were multiplied; ``None`` if it is 1.
        """
        self._run.stage = "complete"
        step, in_parts = self.weight, bool(self.own_weights.parts)
        try:
            if len(step.given) > 1:
                step.check()
            weighted = step.weighted
            if step.ragged and self.ranks > 1:  # a rank without a batch has no weight
                flags = distributed.exchange_ints([int(weighted), int(in_parts)])
                weighted, in_parts = (any(column) for column in zip(*flags))
            if in_parts:
                self.own_weights.join()
            if self._place.collective:
                reduce_gradients([p for p in parameters if id(p) in self._beside])
                if self._exchanges:
                    self._place.wrapper.drop_unreached(parameters)
            elif step.reduced_later:
                reduce_gradients(parameters)
            elif isinstance(self._place.wrapper, TTDistributedDataParallel):
                self._place.wrapper.check_reduced()
                if self.trained is not None:
                    self.trained.reduce_beside()
            if self.trained is not None:
                self.trained.warn_of_unused(parameters)
            self.own_weights.end_step()
            if in_parts or (self.ranks == 1 and len(step.given) <= 1):  # see scaled
                return None
            factor = step.factor(weighted=weighted)
        finally:
            step.clear()
        if not isinstance(factor, Tensor) and factor == 1:
            return None
        like = Converted(factor)
        for parameter in parameters:
            if parameter.grad is not None:
                own = local_shard(parameter.grad)  # gradients are on the CPU under CPUOffloadPolicy
                own.mul_(like(own))
        return factor

    def loss_over_ranks(self, scaled_losses: list[Any], factor: Tensor | float | None) -> Tensor:
        """Return a step's loss over all ranks, from each rank's micro-batches; every rank gets the same bits."""
        if self.own_weights.joined and not self.is_whole(len(scaled_losses)):
            scaled_losses = [*map(self.own_weights.unscaled, scaled_losses)]
        parts = [loss.total() if isinstance(loss, MultiLoss) else loss for loss in scaled_losses]
        if self.ranks == 1 and factor is None:
            return sum(parts[1:], parts[0])  # in the order in which a hand-written loop adds them up
        value = self.weight.zero() + sum(part.reshape(()) for part in parts)
        if self.ranks > 1:
            torch.distributed.all_reduce(value)
            value /= self.ranks
        return value if factor is None else value * factor

    def show_and_clip(
        self, optimizers: Iterable[tuple[int, torch.optim.Optimizer]], parameters: Sequence[Tensor]
    ) -> None:
        """Unscale the complete gradients, call ``on_after_gradient_update``, and clip them."""
        run = self._run
        run.stage = "hooks"
        for i, optimizer in optimizers:
            self._place.scaler.unscale_(optimizer)  # before clipping, as torch's notes on AMP require
            if run.hooks.on_after_gradient_update:
                self._leave_buckets(parameters)
                for hook in run.hooks.on_after_gradient_update:
                    hook(i)
        if run.loop.gradient_clip_norm is not None:
            # torch's function can't stack the norms of sharded and unsharded gradients.
            clip = clip_gradients if self._place.collective else nn.utils.clip_grad_norm_
            if self._not_clipped:
                parameters = [p for p in parameters if id(p) not in self._not_clipped]
            try:
                clip(parameters, run.loop.gradient_clip_norm)
            except (RuntimeError, NotImplementedError):
                explain_sparse(run.loop.model, run.loop.criterion, run.loop.optimizer, "gradient_clip_norm")
                raise

    def _leave_buckets(self, parameters: Sequence[Tensor]) -> None:
        """Give each gradient a graph of its own, which hooks may add to: the graph of DDP's buckets would never end."""
        if isinstance(self._place.wrapper, TTDistributedDataParallel):
            for p in parameters:
                if p.grad is not None and p.grad.layout is torch.strided:
                    p.grad = p.grad.data

    def take_steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Step each optimizer; with a scaler only if its gradients are finite."""
        self._run.stage = "step"
        if not self.scales:
            for optimizer in optimizers:
                try:
                    with self._place.stepping(optimizer):
                        optimizer.step()
                except (TypeError, ValueError, RuntimeError, AssertionError) as error:
                    explain_no_closure(error, optimizer)
                    raise
            return
        scaler = self._place.scaler
        for optimizer in optimizers:
            with self._place.stepping(optimizer):
                scaler.step(optimizer)
        # Private in torch 2.6 to 2.13, which have no other way to report a skipped step without waiting for the device.
        states = scaler._per_optimizer_states
        several = len(optimizers) > 1  # update() adds the others' values to the first tensor
        self._run.loop.progress.found_inf = [
            (optimizer, found.clone() if several else found)
            for optimizer in optimizers
            for found in states[id(optimizer)]["found_inf_per_device"].values()
        ]
        scaler.update()

    @property
    def skipped_all(self) -> bool:
        """True if AMP skipped the last step of all optimizers. Waits for the device."""
        return all(self.skipped(one) for one, _ in self._run.loop.progress.found_inf)

    def skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if AMP skipped the last step of one of the optimizers. Waits for the device."""
        return any(bool(found.item()) for one, found in self._run.loop.progress.found_inf if one is optimizer)


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_same(before: Tensor | None, after: Tensor | None) -> bool:
    """Return True for the same gradient, also if DDP has moved it into a bucket."""
    if before is after or before is None or after is None:
        return before is after
    return before.layout is after.layout is torch.strided and not is_sharded(before) and torch.equal(before, after)


def _zero_of(loss: Tensor | MultiLoss) -> Tensor:
    """Return a zero that depends on all parameters that the loss depends on."""
    return (loss if isinstance(loss, Tensor) else loss.total()) * 0.0
