"""Determine what a loop trains: parameters of the model, of the criterion, and of the optimizer alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from trainloop._support.nested import entries_of, leaves_of
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import MultiOptimizer, optimizers_of, parameters_of


def criterion_module(criterion: Any, within: tuple[Any, ...] = ()) -> nn.Module | None:
    """Return a criterion as one module: itself, or a module of all modules in its entries, by their names.

    ``None`` if it contains no modules. ``within``: the criteria that contain this one; a function may refer to itself.
    """
    if isinstance(criterion, nn.Module):
        return criterion
    whole = nn.Module()
    if all(criterion is not outer for outer in within):
        for name, part in entries_of(criterion).items():
            module = criterion_module(part, (*within, criterion))
            if module is not None:
                # With brackets, it is no name of nn.Module's own. add_module would be noted by note_registrations().
                whole._modules[f"[{name}]".replace(".", "_")] = module
    return whole if whole._modules else None


def criterion_modules(criterion: Any) -> list[nn.Module]:
    """Return the modules of a criterion: itself, or one of the modules in its entries."""
    whole = criterion_module(criterion)
    return [] if whole is None else [whole]


def modules_beside(model: nn.Module, criterion: Any) -> list[nn.Module]:
    """Return the modules of a criterion that are no parts of the model, to which a function may refer, too."""
    of_model = set(map(id, model.modules()))
    return [one for _, one in leaves_of(criterion, "") if isinstance(one, nn.Module) and id(one) not in of_model]


def move_to(module: nn.Module, device: torch.device) -> None:
    """Move a module; its parameters stay the objects that an optimizer has.

    After ``torch.__future__.set_overwrite_module_params_on_conversion(True)``, ``module.to`` creates other parameters.
    """
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    try:
        module.to(device)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


def trained_modules(model: nn.Module, criterion: Any) -> list[nn.Module]:
    """Return all modules that a loop trains: the model, and the criterion if it is a module or contains modules."""
    return [model, *criterion_modules(criterion)]


def have_torchs_train(modules: Sequence[nn.Module]) -> bool:
    """Return True if ``train(mode)`` only sets the mode of each of these modules.

    Not if a class, or a module itself (``module.train = lambda mode: module``), has a method of its own.
    """
    return {getattr(module.train, "__func__", None) for module in modules} == {nn.Module.train}


def set_modes(parts: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Set the mode of each module, and nothing else: no module's ``train()`` is called."""
    for part, training in zip(parts, modes, strict=True):
        if part.training is not training:  # reading is ten times as fast as assigning
            if "training" in part.__dict__:  # nn.Module.__setattr__ first searches parameters, modules and buffers
                part.__dict__["training"] = training
            else:  # a scripted module, or a property
                part.training = training


def restore_modes(parts: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Set the mode of each module by its ``train()``, which may undo what ``eval()`` did, such as merge LoRA's weights.

    ``parts``: a module comes before those inside it, as in ``model.modules()``.
    """
    for part, training in zip(parts, modes, strict=True):
        if part.training is not training:
            part.train(training)
    set_modes(parts, modes)  # a train() decides about modes, too


def named_trained_parameters(
    model: nn.Module, criterion: Any, optimizer: Optimizer | MultiOptimizer | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, parameter)`` for all parameters that a loop trains, each once.

    First the model's, then the criterion's, whose names begin with ``criterion.``, then those that only the optimizer
    has, such as an unknown of an equation beside the network.
    """
    seen: set[int] = set()
    prefix = ""
    for module in trained_modules(model, criterion):
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + name, parameter
        prefix = "criterion."
    stepped = [tensor for one in optimizers_of(optimizer) for tensor in parameters_of(one)]
    for i, tensor in enumerate(stepped):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield f"parameter {i} of the optimizer", tensor


def note_registrations(note: Callable[[nn.Module, str, Any], None]) -> ExitStack:
    """Call ``note(module, name, value)`` when a module registers a parameter or another module: torch's public hooks.

    Closing the result, or leaving it as a context, ends this.
    """
    undo = ExitStack()
    undo.callback(register_module_parameter_registration_hook(note).remove)
    undo.callback(register_module_module_registration_hook(note).remove)
    return undo


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a module, even if its class overrides ``parameters`` (to return a part, for example)."""
    return [parameter for _, parameter in module.named_parameters()]


def trained_parameters(
    model: nn.Module, criterion: Any, optimizer: Optimizer | MultiOptimizer | None = None
) -> list[Tensor]:
    """Return all parameters that a loop trains, in the order of :func:`named_trained_parameters`."""
    return [parameter for _, parameter in named_trained_parameters(model, criterion, optimizer)]


def parameters_beside(
    model: nn.Module, criterion: Any, optimizer: Optimizer | MultiOptimizer | None
) -> dict[str, Tensor]:
    """Return the parameters that only the optimizer has, by name; no module of the model or criterion has them."""
    registered = {id(parameter) for parameter in trained_parameters(model, criterion)}
    named = named_trained_parameters(model, criterion, optimizer)
    return {name: parameter for name, parameter in named if id(parameter) not in registered}


def explain_sparse(model: nn.Module, criterion: Any, optimizer: Optimizer | MultiOptimizer | None, what: str) -> None:
    """Called after an error of clipping: raise an error that names the parameter if a gradient is sparse."""
    for name, parameter in named_trained_parameters(model, criterion, optimizer):
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ConfigurationError(
                f"{what}: the gradient of {name} is sparse, and torch can't clip sparse gradients. Use sparse=False in "
                "its embedding, or clip the other gradients yourself in a callback's on_after_gradient_update."
            )
