"""``compile='step'``: forward, loss, backward, clipping and the optimizer's step as one graph.

Dynamo traces the whole step, with its guards: Python values that ``get_loss`` reads are checked before each step, and
a change causes a recompilation. Inductor compiles it to one C++ function on the CPU, and to one CUDA graph on CUDA. In
the graph, a changing learning rate is a tensor; schedulers and other code still see a number. Steps that can't be one
graph run as without ``compile``, after a warning.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainloop._metrics import Recorder
from trainloop._support.reduction import attached_divisor, functional_losses
from trainloop._support.user_line import described_names, warn
from trainloop._transfer.users_modules import in_library
from trainloop.data import StepBatches
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiOptimizer
from trainloop.optim.losses import weighed
from trainloop.optim.optimizers import is_scheduled, is_watched, note_steps_elsewhere
from trainloop.train_loop.run.losses import split_loss
from trainloop.train_loop.training.trained import not_optimized
from trainloop.train_loop.training.training import Training


class WholeStepTraining(Training):
    """A training run whose steps are one compiled graph if possible.

    The graph accepts batches of the first batch's size; a shorter last batch runs without the graph. Gradients stay in
    the same memory, even between steps.
    """

    backend = "inductor"
    """Backend of ``torch.compile``."""
    _whole: Callable[[Any], tuple[Tensor, Any]] | None = None
    """Compiled step; ``None`` before the first batch, and if steps are not compiled."""
    _refused = False
    """True if the user was warned that steps are not one graph."""
    _size = 0
    """Number of samples in the batches that the graph accepts."""
    _attached = False
    """True if the parameters have the graph's gradients."""
    step_taken = False
    """True if the graph has taken the current step."""
    _constants: tuple[Any, Any, float | None] | None = None
    """The criterion, the optimizer and the norm for clipping in the graph; ``None`` before it is compiled."""
    _parameters: Sequence[Tensor] = ()
    """Parameters that the graph trains."""
    _gradients: Sequence[Tensor] = ()
    """Their gradients, which stay in the same memory."""
    _settings: list[dict[str, Any]]
    """Optimizer settings that are constants of the graph; these include learning rates if ``_rates`` is ``None``."""
    _rates: list[Tensor] | None = None
    """Learning rates of the groups, as the graph reads them; ``None`` while they are constants of the graph."""

    def forward_backward(
        self, step: StepBatches, *, first: bool = True, begun: int = 0, wants_loss: bool = False
    ) -> Tensor | None:
        """Run the whole step in the graph if it accepts the step; otherwise run the step without it."""
        if self._refused or not self._takes(step):
            if self._attached:  # otherwise backward would add to the last step's gradients
                self._detach()
            return super().forward_backward(step, first=first, begun=begun, wants_loss=wants_loss)
        loop, recorder, (size,) = self.loop, self.recorder, step.sizes
        self.stage = "forward"
        self.begin_batch(0, size)
        # Compile only now: hooks of the batch or the epoch may set a rate, or unfreeze layers.
        changed = self._changed()
        if changed is None and self._whole is None:
            self._compile(follows_rates=self._is_scheduled())
        elif changed is None and self._settings and (now := self._settings_now()) != self._settings:
            changed = self._apply_settings(now)
        if changed is not None:
            self._stop_compiling(changed)
            return super().forward_backward(step, first=first, begun=1, wants_loss=wants_loss)
        self._attached = True
        for parameter, gradient in zip(self._parameters, self._gradients):
            if parameter.grad is not gradient:  # in the first step, and after zero_grad() in a hook
                parameter.grad = gradient
        assert self._whole is not None
        if self.watch is not None:
            self.watch.forward_begins(True)
        try:
            # The graph shows no divisors: they are attached while it is traced.
            with nullcontext() if self._settings else _without_torchs_warnings(), functional_losses([]):
                loss, weight = self._whole(step.batches[0]) if self._rates is None else self._with_rates(step)
        except Exception as error:
            if not self._may_continue(error):
                raise
            self._stop_compiling(f"{type(error).__name__}: {_described(error)}")
            self._logged.clear()
            return super().forward_backward(step, first=first, begun=1, wants_loss=wants_loss)
        if not self._settings:
            self._settings = self._settings_now()
        logged, self._logged[:] = self._logged[:], ()
        for entry in logged:
            recorder.log(*entry)
        if loss.is_cuda:
            loss = loss.clone()  # the next replay overwrites the graph's memory
        loop.progress.last_loss = recorder.add_loss(loss, size if weight is None else weight)
        self.step_taken = True
        if self.watch is not None:
            self.watch.backward_ended(loss)
        return None

    def step(self) -> None:
        """Do the rest of the step, including the optimizer's step if the graph has not taken it."""
        if not self.step_taken:
            super().step()
            return
        self.step_taken = False
        self.count_step()
        for hook in self.hooks.on_batch_end:
            hook()

    # -- conditions --------------------------------------------------------------------------------------------------

    def _takes(self, step: StepBatches) -> bool:
        if not self._size:
            reason = self._reason_against(step)
            if reason is not None:
                self._stop_compiling(reason)
                return False
            self._size = step.sizes[0]
        return len(step.sizes) == 1 and step.sizes[0] == self._size

    def _reason_against(self, step: StepBatches) -> str | None:
        """Return the reason why steps can't be one graph, if it is known before compiling; else ``None``."""
        if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
            return f"torch {torch.__version__} can't trace a backward pass into a graph (torch 2.13 can)"
        if self.loop.gpu_mode != "single":
            return f"gpu_mode={self.loop.gpu_mode!r} exchanges gradients between backward and the optimizer's step"
        if self.loop.grad_accumulation > 1 or len(step.batches) != 1:
            return "a step of several micro-batches is several backward passes"
        if self.place.scaler.is_enabled():
            return "with fp16, a step may be skipped after backward (use bf16)"
        return self._reason_of_loop()

    def _reason_of_loop(self) -> str | None:
        """Return the reason why steps can't be one graph, if callbacks can bring it about while the loop runs."""
        loop, gradients = self.loop, self.gradients
        if self.hooks.on_after_gradient_update:
            users = [cb.callback_name for cb in loop.callbacks if cb.uses_hook("on_after_gradient_update")]
            whose = f"of {', '.join(users)} " if users else ""
            return f"on_after_gradient_update {whose}runs between backward and the optimizer's step"
        if gradients.sums is not None:
            return _OF_SUMS
        if isinstance(loop.optimizer, MultiOptimizer):
            return "there are several optimizers"
        (optimizer,) = gradients.optimizers
        if not type(optimizer).__module__.startswith("torch.optim"):
            return f"{type(optimizer).__name__} is not one of torch's own optimizers"
        if any(group.get("fused") for group in optimizer.param_groups):
            return "torch keeps optimizers with fused=True out of graphs (leave fused out: the compiler fuses anyway)"
        if is_watched(optimizer):
            return _WATCHED
        if loop.gradient_clip_norm is not None and (left := not_optimized(loop.model, [optimizer])):
            return (
                f"{described_names(left)} require gradients, but are in no optimizer: the graph does not compute their "
                "gradients, which count in the norm that gradient_clip_norm limits"
            )
        return self._hooked()

    def _hooked(self) -> str | None:
        parameters = (p for group in self.loop.optimizer.param_groups for p in group["params"])
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters):  # torch has no public names
            return (
                "hooks of parameters, of register_hook or register_post_accumulate_grad_hook, need a backward pass "
                "outside of a graph"
            )
        if nn.modules.module._has_any_global_hook():
            return "a graph would not notice when hooks of all modules (register_module_forward_hook) change"
        return None

    def _begin_epoch(self) -> Iterator[StepBatches]:
        steps = super()._begin_epoch()
        if self._whole is not None and (reason := self._reason_of_loop()) is not None:  # hooks may have been added
            self._stop_compiling(reason)
        return steps

    def _changed(self) -> str | None:
        """Return the reason if a callback has changed what the graph contains, or can't do. Called before each step."""
        if self._constants is None:
            return self._reason_of_loop()
        criterion, optimizer, norm = self._constants
        loop, text = self.loop, "tl.{} was assigned, but the graph contains the one before"
        if loop.criterion is not criterion:
            return text.format("criterion")
        if loop.optimizer is not optimizer:
            return text.format("optimizer")
        if loop.gradient_clip_norm != norm:
            return text.format("gradient_clip_norm")
        if self.gradients.sums is not None:  # criterion.reduction was set
            return _OF_SUMS
        return _WATCHED if is_watched(optimizer) else self._hooked()

    def _may_continue(self, error: Exception) -> bool:
        """Return True if a failed step has changed nothing, because it failed in the compilation."""
        module = type(error).__module__
        return not self._settings or module.startswith(("torch._dynamo", "torch._inductor", "torch.fx"))

    def _stop_compiling(self, reason: str) -> None:
        self._refused, self._whole = True, None
        self._detach()
        warn(f"compile='step': steps are not compiled from here on. The reason: {reason}.")

    def _detach(self) -> None:
        self._attached = False
        for parameter, gradient in zip(self._parameters, self._gradients):  # also of those that left the optimizer
            if parameter.grad is gradient:
                parameter.grad = None
        self.gradients.optimizers[0].zero_grad(set_to_none=True)

    def _settings_now(self) -> list[dict[str, Any]]:
        """Return each group's settings; ``params`` is replaced by the trained parameters."""
        (optimizer,) = self.gradients.optimizers
        return [{**group, "params": [p.requires_grad for p in group["params"]]} for group in optimizer.param_groups]

    def _is_scheduled(self) -> bool:
        """Return True if learning rates are numbers that are likely to change; graphs read tensors at each step."""
        (optimizer,) = self.gradients.optimizers
        return is_scheduled(optimizer) and not any(isinstance(g["lr"], Tensor) for g in optimizer.param_groups)

    def _apply_settings(self, now: list[dict[str, Any]]) -> str | None:
        """Apply settings that changed since the graph was compiled; if the graph can't follow, return the reason."""
        before = self._settings
        if [group["params"] for group in now] != [group["params"] for group in before]:
            return "parameters were frozen, unfrozen or added, but the graph trains a fixed set of parameters"
        if any(isinstance(group["lr"], Tensor) for group in (*now, *before)):
            kept = now
        else:
            kept = [{**group, "lr": was["lr"]} for group, was in zip(now, before)]
        if kept != before:
            names = {
                key
                for group, was in zip(kept, before)
                for key in group.keys() | was.keys()
                if key not in was or key not in group or group[key] != was[key]
            }
            return (
                f"the optimizer's {', '.join(sorted(names))} changed, but only a learning rate may change after the "
                "graph is compiled"
            )
        if self._rates is None:
            self._detach()
            self._compile(follows_rates=True)
        else:
            for rate, group, was in zip(self._rates, now, before):
                if group["lr"] is not was["lr"]:
                    rate.fill_(group["lr"])  # no copy from the host, which would wait for the device
            self._settings = now
        return None

    def _with_rates(self, step: StepBatches) -> tuple[Tensor, Any]:
        """Run the graph's step with learning rates as tensors; outside of this call, learning rates are numbers."""
        groups = self.gradients.optimizers[0].param_groups
        numbers = [group["lr"] for group in groups]
        assert self._whole is not None
        assert self._rates is not None
        try:
            for group, rate in zip(groups, self._rates):
                group["lr"] = rate
            return self._whole(step.batches[0])
        finally:
            for group, number in zip(groups, numbers):
                group["lr"] = number

    # -- the graph ---------------------------------------------------------------------------------------------------

    def _compile(self, *, follows_rates: bool) -> None:
        """Compile the graph; with ``follows_rates``, learning rates may change, otherwise they are constants."""
        loop, (optimizer,) = self.loop, self.gradients.optimizers
        self._settings = []
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        # If assigned inside the graph, a gradient would be an input that changes with each step.
        self._gradients = [torch.zeros_like(p) for p in self._parameters]
        for gradient in self._gradients:
            # A CUDA graph writes only to inputs with a fixed address; otherwise torch silently creates no CUDA graph.
            torch._dynamo.mark_static_address(gradient)
        if follows_rates:
            # As precise as Python floats; a 0-d tensor does not change the parameters' precision.
            device, exact = self.place.device, torch.float32 if self.place.device.type == "mps" else torch.float64
            self._rates = [
                torch.full((), float(group["lr"]), dtype=exact, device=device) for group in optimizer.param_groups
            ]
        note_steps_elsewhere(optimizer)
        parameters, gradients = self._parameters, self._gradients
        clipped, norm = list(self.gradients.learned), loop.gradient_clip_norm
        self._constants = loop.criterion, optimizer, norm
        model, criterion, device, autocast = loop.model, loop.criterion, self.place.device, self.place.autocast
        take_step = inspect.unwrap(type(optimizer).step)  # without torch's graph breaks around it

        def whole_step(batch: Any) -> tuple[Tensor, Any]:
            with autocast:
                loss, weight = split_loss(model.get_loss(batch, criterion, device))
            if not isinstance(loss, Tensor):
                raise ConfigurationError("get_loss returned several losses")
            if weight is None:
                weight = attached_divisor(loss)
            else:
                loss = weighed(loss, weight)
            found = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for gradient, value in zip(gradients, found, strict=True):
                    gradient.copy_(value)
                if norm is not None:
                    nn.utils.clip_grad_norm_(clipped, norm)
                take_step(optimizer)
            return loss.detach(), weight

        # Dynamo counts compilations per code object, which all fits of a process would share, and rejects the ninth.
        whole_step.__code__ = whole_step.__code__.replace()
        mode = "reduce-overhead" if device.type == "cuda" else None  # as a CUDA graph
        if self._whole is None:
            self.undo.enter_context(torch._dynamo.config.patch(trace_autograd_ops=True))
            self.undo.callback(self._detach)
        self._whole = torch.compile(whole_step, fullgraph=True, mode=mode, backend=self.backend)

    def sink_of_parts(self, recorder: Recorder) -> Callable[..., None]:
        """Return the function that modules call to log a value.

        Values that the graph logs are outputs of the graph, and are sent after the step.
        """
        # One list for the whole run: an evaluation calls this method again, but the graph keeps appending to its list.
        self._logged: list[tuple[Any, ...]] = self.__dict__.get("_logged", [])
        logged, log = self._logged, recorder.log

        def sink(name: str, value: Any, asked: Any, batch_size: Any = None) -> None:
            if torch.compiler.is_dynamo_compiling():
                logged.append((name, value.detach() if isinstance(value, Tensor) else value, asked, batch_size))
            else:
                log(name, value, asked, batch_size)

        return sink


_OF_SUMS = "the loss is a sum over samples"
_WATCHED = "a hook or a wrapper observes the optimizer's steps"


@contextmanager
def _without_torchs_warnings() -> Iterator[None]:
    """Ignore warnings about deprecated parts of torch that compilation uses; a filter may turn them into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _described(error: Exception) -> str:
    """Return a compiler's error in one line: its title, its explanation, and the innermost line of the user's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    places = [line for line in lines if line.startswith('File "') and not in_library(line.split('"')[1])]
    return "; ".join([*(lines[:1] or ["no message"]), *explained[:1], *places[-1:]])
