"""What trains: parameters that are frozen, unfrozen or added while ranks train, modes, hooks and buffers."""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainloop import distributed
from trainloop._support.user_line import described_names, warn_or_print
from trainloop.distributed.tensors import copy_from_first
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import parameters_of
from trainloop.optim.parameters import criterion_modules, have_torchs_train, named_trained_parameters, own_parameters
from trainloop.parallel import reduce_gradients
from trainloop.parallel.ddp import cloned_gradient, hooked_node
from trainloop.parallel.sharded.shards import is_sharded

# Seconds that a rank that changes requires_grad within an epoch waits for the others to do the same.
_RENDEZVOUS_S = 300.0
_rendezvous = itertools.count()  # counts in this process, so that keys in one process group are unique
_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


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

    Attributes
    ----------
    beside : dict
        Parameters of the criterion and the optimizer that the model does not have, by name.
    """

    def __init__(self, model: nn.Module, beside: Callable[[], tuple[Any, Any]], timeout_s: float) -> None:
        self._model = model
        self._now_beside = beside
        self._warned = False  # of parameters without a gradient
        self._patience_s = min(_RENDEZVOUS_S, timeout_s / 2)
        self.beside: dict[str, Tensor] = {}
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
        self.beside, buffers = _own_tensors(criterion, optimizer, self._model)
        if other and distributed.get_world_size() > 1:
            # DDP's constructor does the same with the model's parameters.
            copy_from_first([*self.beside.values(), *buffers])

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
        pairs = ((list(own_parameters(self._model)), self._parameters), (beside.values(), self.beside.values()))
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
        if late or self.beside:
            reduce_gradients([*self.beside.values(), *late])

    def warn_of_unused(self, parameters: Sequence[Tensor]) -> None:
        """Warn, after the first step of these parameters, of those outside of the model that got no gradient."""
        if self._reached is not True:
            self._reached = any(p.grad is not None for p in parameters)
        if self._warned or not self.beside:
            return
        self._warned = True
        stepped = set(map(id, parameters))
        unused = [n for n, p in self.beside.items() if id(p) in stepped and p.requires_grad and p.grad is None]
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


def begin_training(model: nn.Module, modules: Sequence[nn.Module], kept: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Switch to training mode, except for modules that the user has put into ``eval()``; return these modules.

    Parameters
    ----------
    model : nn.Module
        Model to train. If the model itself is in evaluation mode, as a loaded model may be, its modules' modes are
        ignored: all modules except ``kept`` train.
    modules : sequence of nn.Module
        All modules of the model.
    kept : sequence of nn.Module
        The modules that the last call returned.

    Notes
    -----
    A class that overrides ``train()`` decides for itself and for all modules inside it.
    """
    if model.training:
        # Users freeze BatchNorm by eval(); a plain model.train() each epoch would undo it.
        kept = [module for module in modules if not module.training]
        if not kept and have_torchs_train(modules):
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
