"""What trains: modes, parameters, hooks, groups of optimizers; compare it and the weights' bits between ranks."""

from __future__ import annotations

import itertools
import operator
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainloop import distributed
from trainloop._support.user_line import described_names, warn_or_print
from trainloop.callbacks.base import AbstractCallback
from trainloop.distributed.tensors import copy_from_first
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import parameters_of
from trainloop.optim.parameters import criterion_modules, named_trained_parameters, own_parameters
from trainloop.optim.states import divides_state
from trainloop.parallel import TTDistributedDataParallel, reduce_gradients
from trainloop.parallel.ddp import cloned_gradient, comm_hooks_of, hooked_node
from trainloop.parallel.sharded.shards import bit_sums, is_sharded

# Seconds that a rank that changes requires_grad within an epoch waits for the others to do the same.
_RENDEZVOUS_S = 300.0
_rendezvous = itertools.count()  # counts in this process, so that keys in one process group are unique
_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_CAUSES_OF_OTHER_WEIGHTS = (
    "Either gradients were not averaged (a layer that torch.utils.checkpoint recomputes several times in a step "
    "needs use_reentrant=False), or only some ranks changed their weights. Compute losses in get_loss, and change "
    "parameters on every rank in the same way: in a callback, since get_loss is not called on a rank without "
    "samples of an epoch's last step. If the first forward pass initializes parameters, call the model once before "
    "fit. If a launcher started the processes, an optimizer that has a state before fit needs the same state in all "
    "of them. An optimizer or a hook that draws random numbers must draw the same on all ranks: keep a "
    "torch.Generator or random.Random with a fixed seed in it, and pass it to each draw; or, in a subclass, call "
    "super().step() within torch.random.fork_rng(), after torch.manual_seed(number of the step)."
)


class TrainedParameters:
    """Parameters that a rank of ``ddp`` trains; detects when parameters are frozen, unfrozen or added.

    DDP averages the gradients of the parameters that required gradients when it was created. If these change, the loop
    wraps the model again. At the start of an epoch, ranks compare their parameters. Within an epoch, each rank checks
    its own parameters before each step, and synchronizes with the others only if it detects a change.

    Parameters
    ----------
    model : nn.Module
    beside : callable
        Returns the current criterion and optimizer. Their own parameters, which the model does not have, are outside of
        DDP; this class averages their gradients.
    timeout_s : float
        Timeout of the run, in seconds.
    """

    def __init__(self, model: nn.Module, beside: Callable[[], tuple[Any, Any]], timeout_s: float) -> None:
        self._model = model
        self._now_beside = beside
        self._warned: set[str | int] = set()  # causes of warnings that this run has given
        self._patience_s = min(_RENDEZVOUS_S, timeout_s / 2)
        self._beside: dict[str, Tensor] = {}
        self._known_criterion: Any = self  # none yet
        self._reached: bool | None = None  # False after steps without gradients
        self.note()

    def note(self) -> None:
        """Record that the wrapper trains the parameters that require gradients now."""
        self._named = dict(self._model.named_parameters())
        self._parameters = list(self._named.values())
        self._kinds = _kinds_of(self._parameters)
        self._hooked = [(p, hooked_node(p)) for p in self._parameters if p.requires_grad]
        self._frozen = [p for p in self._parameters if not p.requires_grad]
        criterion, optimizer = self._now_beside()
        other, self._known_criterion = criterion is not self._known_criterion, criterion
        self._beside, buffers = _own_tensors(criterion, optimizer, self._model)
        if other and distributed.get_world_size() > 1:
            # DDP's constructor does the same with the model's parameters.
            copy_from_first([*self._beside.values(), *buffers])

    def changed(self, *, everything: bool = False) -> bool:
        """Return True if a parameter was frozen, unfrozen, converted or reshaped since :meth:`note`.

        Called before each step. With ``everything``, return True also if parameters were added, removed or replaced.
        """
        return self._are_converted(each=everything) or (everything and not self._are_same())

    def _are_converted(self, *, each: bool) -> bool:
        if _kinds_of(self._parameters) != self._kinds:
            return True
        # .half() and back replaces the nodes with DDP's hooks. To compare each node in each step would take too long.
        return any(hooked_node(p) is not node for p, node in (self._hooked if each else self._hooked[:1]))

    def _are_same(self) -> bool:
        criterion, optimizer = self._now_beside()
        beside, buffers = _own_tensors(criterion, optimizer, self._model)
        if criterion is not self._known_criterion and (beside or buffers):
            return False
        # Not as one list: a parameter that leaves the model is often one that only the optimizer has afterwards.
        pairs = ((list(own_parameters(self._model)), self._parameters), (beside.values(), self._beside.values()))
        return all(len(now) == len(before) and all(map(operator.is_, now, before)) for now, before in pairs)

    def agree(self, settings: int, shared: Iterable[tuple[str, Tensor]] = ()) -> tuple[list[int], bool]:
        """Check that all ranks train the same parameters. Collective, when an epoch begins.

        Parameters
        ----------
        settings : int
            Checksum of this rank's settings.
        shared : iterable of (name, buffer)
            Buffers that rank 0's replace on all ranks, so that their shapes must be equal.

        Returns
        -------
        changed : list of int
            For each rank: 0 if its parameters are as before, 1 if one has changed, 2 if they are other objects.
        alike : bool
            True if all ranks have the same settings.

        Raises
        ------
        ConfigurationError
            If a parameter trains only on some ranks, or a shared buffer has another shape; the message names it.
        """
        # Digests first: ranks exchange the names of thousands of parameters only if the digests differ.
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        shapes = {name: tuple(buffer.shape) for name, buffer in shared if not nn.parameter.is_lazy(buffer)}
        changed = int(self._are_converted(each=True)) if self._are_same() else 2
        checksums = [zlib.crc32(repr(one).encode()) for one in (names, shapes)]
        digests = distributed.exchange_ints([*checksums, changed, settings])
        if any(digest != digests[0][0] for digest, *_ in digests):
            _raise_unequal(distributed.gather_object(names))
        if any(digest != digests[0][1] for _, digest, *_ in digests):
            _raise_unequal_buffers(distributed.gather_object(shapes))
        return [theirs for _, _, theirs, _ in digests], all(theirs == settings for *_, theirs in digests)

    def meet(self) -> None:
        """Within an epoch, wait until the other ranks make the change that this rank has detected.

        Raises
        ------
        ConfigurationError
            If the other ranks make no change in time, or make a different change.
        """
        number, rank, world_size = next(_rendezvous), distributed.get_rank(), distributed.get_world_size()
        if world_size == 1:
            return
        names = [name for name, p in self._model.named_parameters() if p.requires_grad or p.grad is not None]
        # Use the process group's store: a collective could be matched with another one on a rank without a change.
        # torch 2.6 to 2.13 has no public access to the store.
        store = dist.distributed_c10d._get_default_store()
        keys = [f"trainloop/trained/{number}/{other}" for other in range(world_size)]
        store.set(keys[rank], "\n".join(names))
        for other, key in enumerate(keys):
            try:
                store.wait([key], timedelta(seconds=self._patience_s))
            except RuntimeError as e:
                before = {name for name, (flag, *_) in zip(self._named, self._kinds, strict=True) if flag}
                flags = sorted(before.symmetric_difference(names))[:5]
                change = f"requires_grad of {', '.join(flags)}" if flags else "the parameters, their dtypes or shapes"
                raise ConfigurationError(
                    f"rank {rank} changed {change}, but rank {other} did not do so "
                    f"within {self._patience_s:g} s. Gradients can be averaged only if all ranks train the same "
                    "parameters, so make the same changes on every rank at the same step."
                ) from e
        everyone = [store.get(key).decode().split("\n") for key in keys]
        if any(theirs != names for theirs in everyone):
            _raise_unequal(everyone)

    def reduce_beside(self) -> None:
        """Average the gradients that DDP doesn't: of parameters outside of the model, or unfrozen in this step."""
        late = [p for p in self._frozen if p.grad is not None]
        if late:
            self.meet()
        if late or self._beside:
            reduce_gradients([*self._beside.values(), *late])

    def warn_of_unused(self, parameters: Sequence[Tensor]) -> None:
        """Warn, after the first step of these parameters, of those outside of the model that got no gradient."""
        if self._reached is not True:
            self._reached = any(p.grad is not None for p in parameters)
        if "unused" in self._warned or not self._beside:
            return
        self._warned.add("unused")
        stepped = set(map(id, parameters))
        unused = [n for n, p in self._beside.items() if id(p) in stepped and p.requires_grad and p.grad is None]
        if unused and distributed.is_global_zero():
            warn_or_print(
                f"{described_names(unused)}, which the model does not have, got no gradient in the first step. If "
                "get_loss reads a parameter from a global of another module, that is not the optimizer's in ranks, "
                "where the module is imported again: make it an attribute of the model or the criterion."
            )

    def warn_if_unreached(self) -> None:
        """Warn, at the end of an epoch, if no parameter has got a gradient so far."""
        if self._reached is False and distributed.is_global_zero():
            warn_or_print(
                "No trained parameter got a gradient in this epoch, so the training has not changed the model. If "
                "get_loss reads the model from a global of another module, that is a copy in ranks, where the module "
                "is imported again: use self in get_loss, or make it an attribute of the model."
            )
        self._reached = True

    def check_same_weights(
        self,
        wrapper: Any,
        optimizers: Sequence[Any] = (),
        callbacks: Sequence[AbstractCallback] = (),
        *,
        buffers_too: bool = False,
    ) -> None:
        """Check that all ranks have the same weights, bit for bit. Collective; one exchange of five integers.

        The settings of the optimizers are compared, too, since ranks have different shards of the weights in ``fsdp``.
        The check is skipped if the user has registered a communication hook, which may let ranks differ for some time
        (local SGD). Warn once about a callback's parameter or an optimizer's state that differs, and about a module's
        mode and a buffer (only rank 0's value is kept) if ``buffers_too``.

        Raises
        ------
        ConfigurationError
            If settings or weights differ; the message names the first setting or parameter that differs.
        """
        in_ddp = isinstance(wrapper, TTDistributedDataParallel)
        if in_ddp and comm_hooks_of(wrapper):
            return
        ignored = wrapper.parameters_to_ignore if in_ddp else ()
        named: dict[str, Tensor] = {  # in fsdp, those that are whole on each rank
            name: p
            for name, p in self._model.named_parameters()
            if name not in ignored and type(p) is nn.Parameter and not is_sharded(p)
        }
        named.update(self._beside)
        # Sums of bits, not of values: NaN is equal to itself, and no rounding hides a difference.
        sums = bit_sums(list(named.values()))
        shares_buffers = buffers_too and (not in_ddp or wrapper.broadcast_buffers)
        buffers = {**changing_buffers(self._model), **self._buffers_beside()} if shares_buffers else {}
        settings = _settings_of(optimizers)
        of_callbacks = _of_callbacks(callbacks, {id(p) for p in (*own_parameters(self._model), *self._beside.values())})
        if not named and not buffers and not settings and not of_callbacks:
            return
        of_buffers, in_callbacks = bit_sums(list(buffers.values())), bit_sums(list(of_callbacks.values()))
        states = _states_of(optimizers, {id(p): name for name, p in named.items()})
        modes = self._modes() if buffers_too else {}
        compared = (settings, sums, states, in_callbacks, of_buffers, [*modes.values()])
        digests = distributed.exchange_ints([zlib.crc32(repr(one).encode()) for one in compared])
        differs = [len(set(digest)) > 1 for digest in zip(*digests, strict=True)]
        if differs[0]:  # a cause of different weights
            _raise_different(settings)
        warnings = (
            (2, lambda: _warn_of_states(states)),
            (3, lambda: _warn_of_callbacks(list(of_callbacks), in_callbacks)),
            (4, lambda: _warn_of_buffers(list(buffers), of_buffers)),
            (5, lambda: _warn_of_modes(modes)),
        )
        for which, warn in warnings:
            if differs[which] and which not in self._warned:
                self._warned.add(which)
                warn()
        if not differs[1]:
            return
        everyone = distributed.exchange_ints(sums)
        name, tensor = next(
            (name, tensor)
            for i, (name, tensor) in enumerate(named.items())
            if len({theirs[i] for theirs in everyone}) > 1
        )
        odd = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        values = tensor.detach()
        distance = (distributed.all_reduce(values, "max") - distributed.all_reduce(values, "min")).abs().max()
        part = dict(self._model.named_modules()).get(name.rpartition(".")[0])
        causes = _CAUSES_OF_OTHER_WEIGHTS
        if getattr(part, "max_norm", None) is not None:
            causes = (
                "An embedding with max_norm changes its weight in forward, on each rank for the rank's own samples. "
                "Leave max_norm out and scale rows in a callback's on_after_optimizer_step."
            )
        raise ConfigurationError(
            f"the ranks' weights differ: {name} differs by up to {float(distance):.3g} between rank 0 and rank "
            f"{', '.join(map(str, odd))}. {causes}"
        )

    def _modes(self) -> dict[str, bool]:
        """Return which modules of the model and the criterion are in training mode."""
        roots = [("model", self._model), *(("criterion", one) for one in criterion_modules(self._now_beside()[0]))]
        return {
            f"{path.removeprefix('model.')} ({type(module).__name__})": module.training
            for prefix, root in roots
            for path, module in root.named_modules(prefix=prefix)
        }

    def _buffers_beside(self) -> dict[str, Tensor]:
        """Return the criterion's buffers that ``get_loss`` may change, by name."""
        of_model = {id(buffer) for buffer in self._model.buffers()}
        return {
            f"criterion.{name}": buffer
            for module in criterion_modules(self._now_beside()[0])
            for name, buffer in changing_buffers(module).items()
            if id(buffer) not in of_model
        }


def _of_callbacks(callbacks: Sequence[AbstractCallback], others: set[int]) -> dict[str, Tensor]:
    """Return the parameters that callbacks train, by name: those of modules in their attributes, but not ``others``.

    A callback that runs on one rank only, or that has a state for each rank, may have parameters of its own.
    """
    names = Counter(callback.callback_name for callback in callbacks)
    return {
        f"{callback.callback_name}.{name}" + f" (callback {i})" * (names[callback.callback_name] > 1): parameter
        for i, callback in enumerate(callbacks)
        if callback.device_idx_execution is None and not callback.uses_hook("rank_state_dict")
        for attribute, value in vars(callback).items()
        if isinstance(value, (nn.Module, nn.Parameter))
        for name, parameter in (
            [(attribute, value)]
            if isinstance(value, nn.Parameter)
            else [(f"{attribute}.{name}", p) for name, p in value.named_parameters()]
        )
        if parameter.requires_grad and id(parameter) not in others and type(parameter) is nn.Parameter
    }


def _states_of(optimizers: Sequence[Any], names: dict[int, str]) -> dict[str, int]:
    """Return checksums of the state of parameters in optimizers that are not torch's, by ``name (class)``.

    In such a class, each rank may have the state of some parameters only, as in Muon, and send them to the others.
    """
    found: dict[str, list[Tensor]] = {}
    for optimizer in optimizers:
        if type(optimizer).__module__.startswith("torch.optim.") or divides_state(optimizer):
            continue
        for p in parameters_of(optimizer):
            state = optimizer.state.get(p) if id(p) in names else None
            tensors = [t for t in (state.values() if isinstance(state, dict) else ()) if _is_plain_state(t)]
            if tensors:
                found[f"{names[id(p)]} ({type(optimizer).__name__})"] = tensors
    sums = iter(bit_sums([tensor for tensors in found.values() for tensor in tensors]))
    return {name: sum(next(sums) for _ in tensors) for name, tensors in found.items()}


def _is_plain_state(value: Any) -> bool:
    # A subclass, such as torchao's quantized states, may not support the operations of a checksum.
    return type(value) is Tensor and value.is_floating_point() and value.layout == torch.strided


def _names_that_differ(names: Iterable[str], sums: Iterable[int]) -> list[str]:
    """Return the names, of all ranks, whose sums differ between ranks. Collective."""
    everyone = distributed.gather_object(dict(zip(names, sums, strict=True)))
    known = dict.fromkeys(name for one in everyone for name in one)
    return [name for name in known if len({one.get(name) for one in everyone}) > 1]


def _warn_of_states(states: dict[str, int]) -> None:
    """Warn, on rank 0, about states of optimizers that differ between ranks. Collective."""
    odd = _names_that_differ(states, states.values())
    if odd and distributed.is_global_zero():
        warn_or_print(
            f"the optimizer's states of {described_names(odd)} differ between ranks. Checkpoints, and the optimizer "
            "after fit, have those of rank 0 only, so that a resumed run, or a second fit, takes other steps. If each "
            "rank steps a part of the parameters and sends it to the others, let all ranks step all parameters, as in "
            "the optimizer's version for a single device: all ranks have the same gradients."
        )


def _warn_of_callbacks(names: list[str], sums: list[int]) -> None:
    """Warn, on rank 0, about parameters of callbacks that differ between ranks. Collective."""
    odd = _names_that_differ(names, sums)
    if odd and distributed.is_global_zero():
        warn_or_print(
            f"the callbacks' parameters {described_names(odd)} differ between ranks, as each rank trains them with its "
            "own samples. Checkpoints, and the callbacks after fit, have those of rank 0 only. Make the parameters a "
            "part of the model, with an optimizer of their own in a MultiOptimizer, or average their gradients over "
            "the ranks before each step (trainloop.distributed.all_reduce)."
        )


def _warn_of_buffers(names: list[str], sums: list[int]) -> None:
    """Warn, on rank 0, about buffers that differ between ranks. Collective."""
    odd = _names_that_differ(names, sums)
    if distributed.is_global_zero():
        warn_or_print(
            f"get_loss has changed {described_names(odd)} differently on each rank, as each has a part of the "
            "samples. Rank 0's buffers replace those of all ranks before each step (a criterion's: at the end), "
            "so the other ranks' changes are lost. Gather what changes them, self.all_gather(values, concat=True), "
            "so that all ranks make the same change. If each rank should have its own values, use plain attributes "
            "(see carried_state)."
        )


def _warn_of_modes(modes: dict[str, bool]) -> None:
    """Warn, on rank 0, about modules in other modes on other ranks. Collective."""
    odd = _names_that_differ(modes, modes.values())
    if distributed.is_global_zero():
        warn_or_print(
            f"the modules {described_names(odd)} are in training mode on some ranks and in evaluation mode on others, "
            "so that ranks compute different losses. Call train() and eval() on every rank."
        )


def changing_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that ``get_loss`` may change, by name, without BatchNorm's statistics."""
    return {
        name: buffer
        for path, part in model.named_modules()
        if not hasattr(part, "track_running_stats")
        for name, buffer in part.named_buffers(path, recurse=False)
        if buffer.layout == torch.strided and not nn.parameter.is_lazy(buffer)
    }


def _kinds_of(parameters: Sequence[nn.Parameter]) -> list[tuple[Any, ...]]:
    """Return what DDP's reducer assumes of each parameter to stay the same."""
    return [(p.requires_grad, p.dtype, p.shape) for p in parameters]


def _own_tensors(criterion: Any, optimizer: Any, model: nn.Module) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return a criterion's and an optimizer's parameters, by name, and a criterion's buffers: all but the model's.

    Shards are the model's, or were until a callback has replaced a module.
    """
    of_model = {id(tensor) for tensor in (*own_parameters(model), *model.buffers())}
    named = named_trained_parameters(model, criterion, optimizer)
    buffers = [buffer for module in criterion_modules(criterion) for buffer in module.buffers()]
    own = {name: p for name, p in named if id(p) not in of_model and not is_sharded(p)}
    return own, [b for b in buffers if id(b) not in of_model]


def _settings_of(optimizers: Sequence[Any]) -> list[str]:
    """Return the settings of all parameter groups that are plain values, such as ``lr=0.1 (parameter group 0)``."""
    found = []
    for i, optimizer in enumerate(optimizers):
        which = f" of optimizer {i}" if len(optimizers) > 1 else ""
        for j, group in enumerate(optimizer.param_groups):
            for name in getattr(optimizer, "defaults", ()):
                value = group.get(name)
                if isinstance(value, Tensor) and value.numel() == 1:
                    value = value.item()
                if value is None or isinstance(value, (bool, int, float, str, tuple)):
                    found.append(f"{name}={value!r} (parameter group {j}{which})")
    return found


def _raise_different(settings: list[str]) -> None:
    """Raise an error that names the first setting that is different on another rank. Collective."""
    everyone = distributed.gather_object(settings)
    rank, theirs = next((rank, theirs) for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    mine, other = next(
        ((a, b) for a, b in zip(everyone[0], theirs, strict=False) if a != b),
        (f"{len(everyone[0])} settings", f"{len(theirs)} settings"),
    )
    raise ConfigurationError(
        f"the ranks' optimizers differ: rank 0 has {mine}, but rank {rank} has {other}. All ranks take the same step, "
        "so set the same values on every rank. Compute them from values that all ranks have, such as tl.history, or "
        "average your own with trainloop.distributed.all_reduce(value, 'mean'). (tl.last_loss is the loss of this "
        "rank's batch.)"
    )


def _raise_unequal(everyone: list[list[str]]) -> None:
    for rank, names in enumerate(everyone):
        odd = [name for name in dict.fromkeys([*names, *everyone[0]]) if (name in names) != (name in everyone[0])]
        if odd:
            does, other = (rank, 0) if odd[0] in names else (0, rank)
            raise ConfigurationError(
                f"{', '.join(odd[:5])}: trained on rank {does} (requires_grad), but frozen on rank {other}. Gradients "
                "can be averaged only if all ranks train the same parameters, so freeze and unfreeze on every rank at "
                "the same step."
            )


def _raise_unequal_buffers(everyone: list[dict[str, tuple[int, ...]]]) -> None:
    for rank, shapes in enumerate(everyone):
        for name, shape in everyone[0].items():
            if shapes.get(name, shape) != shape:
                raise ConfigurationError(
                    f"the buffer {name} has shape {shape} on rank 0, but {shapes[name]} on rank {rank}. Rank 0's "
                    "buffers replace those of all ranks before each step. Keep a state with one row per sample "
                    "in a plain attribute, not in a buffer, reset it in a callback's on_epoch_begin, or (in ddp) pass "
                    "ddp_model_args={'broadcast_buffers': False}."
                )


def not_optimized(model: nn.Module, optimizers: Sequence[Any], criterion: Any = None) -> list[str]:
    """Return the names of the parameters that require gradients but are in no optimizer."""
    stepped = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    named = named_trained_parameters(model, criterion)
    return [name for name, p in named if p.requires_grad and id(p) not in stepped]


def hooked_parameters(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    """Return the names of the parameters with a hook for their gradient, each with the method that adds the hook."""
    return [
        (name, made_by)
        for name, p in named
        for kind, made_by in _HOOKS.items()
        # The wrapper of ddp copies sparse gradients by a hook of its own.
        if p.requires_grad and any(hook is not cloned_gradient for hook in (getattr(p, kind) or {}).values())
    ]


# -- modules that the user keeps in evaluation mode --------------------------------------------------------------------


def begin_training(model: nn.Module, kept: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Switch to training mode, except for modules that the user has put into ``eval()``; return these modules.

    Parameters
    ----------
    model : nn.Module
        Model to train. If the model itself is in evaluation mode, as a loaded model may be, its modules' modes are
        ignored: all modules except ``kept`` train.
    kept : sequence of nn.Module
        The modules that the last call returned.

    Notes
    -----
    A class that overrides ``train()`` decides for itself and for all modules inside it.
    """
    modules = list(model.modules())
    if model.training:
        # Users freeze BatchNorm by eval(); a plain model.train() each epoch would undo it.
        kept = [module for module in modules if not module.training]
        if not kept and all(type(module).train is nn.Module.train for module in modules):
            return []  # they are in training mode already; train() would assign each module's mode
    model.train()
    if kept:
        decided = {
            id(part) for module in modules if type(module).train is not nn.Module.train for part in module.modules()
        }
        for module in kept:
            if id(module) not in decided:
                module.training = False
    return [module for module in kept if not module.training]


def about_eval_mode(model: nn.Module, kept: Sequence[nn.Module]) -> str:
    """Return a line that names the modules in evaluation mode. (Some libraries return their models in this mode.)"""
    found = {id(module) for module in kept}
    names = [name for name, module in model.named_modules() if id(module) in found]
    whole = [name for name in names if name.rpartition(".")[0] not in names]
    shown = described_names(whole)
    return f"modules that stay in eval() while training: {shown} (to train them, call .train() on them before fit)"
