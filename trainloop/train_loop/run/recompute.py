"""Gradient checkpointing: chosen modules keep only their inputs, and recompute activations in the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainloop._support import rng
from trainloop._support.nested import tensors_of
from trainloop.errors import ConfigurationError
from trainloop.model import TTModel
from trainloop.parallel.sharded.shards import is_sharded
from trainloop.train_loop.run.idle import ModuleStates

# In dp, a thread for each GPU runs backward. All threads share Python's and numpy's generators.
_one_at_a_time = threading.RLock()


def chosen_modules(model: nn.Module, choice: Any) -> list[nn.Module]:
    """Return the modules that ``checkpoint_modules`` selects, without modules inside of selected modules.

    Parameters
    ----------
    model : nn.Module
    choice : type, str, callable or sequence of them, or None
        Classes, names (``*`` stands for any part: ``'encoder.layers.*'``), or functions ``(name, module) -> bool``.

    Raises
    ------
    ConfigurationError
        If ``choice`` has another type, or no module matches one of its items.
    """
    if choice is None:
        return []
    parts = list(choice) if isinstance(choice, (list, tuple, set, frozenset)) else [choice]
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for part in parts:
        matched = {name: module for name, module in modules.items() if _matcher(part)(name, module)}
        if not matched:
            shown = part.__name__ if isinstance(part, type) else repr(part)
            raise ConfigurationError(
                f"checkpoint_modules: no module of {type(model).__name__} matches {shown}. The model has: "
                f"{', '.join(list(modules)[:8]) or 'none'}{', ...' if len(modules) > 8 else ''}."
            )
        found.update(matched)
    # Checkpointing inside a checkpointed module would compute the inner module three times.
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    return list({id(found[name]): found[name] for name in outer}.values())


def _matcher(part: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(part, type) and issubclass(part, nn.Module):
        return lambda name, module: isinstance(module, part)
    if isinstance(part, str):
        # A star matches one part of a name: 'layers.*' are the layers, but not their submodules.
        return lambda name, module: name.count(".") == part.count(".") and fnmatchcase(name, part)
    if callable(part) and not isinstance(part, (type, nn.Module)):
        return lambda name, module: bool(part(name, module))
    raise ConfigurationError(
        f"checkpoint_modules={part!r}: must be a module class, a name such as 'encoder.layers.*', a function (name, "
        "module) -> bool, or a list of these."
    )


@contextmanager
def recomputing(model: nn.Module, choice: Any) -> Iterator[None]:
    """In the context, chosen modules keep only their inputs while gradients are recorded."""
    modules = chosen_modules(model, choice)
    classes = [type(module) for module in modules]
    logging = [part for part in model.modules() if isinstance(part, TTModel)]
    # One class for all modules of a class: fsdp's default units are repeated blocks of the same class.
    recomputed = {cls: _recomputed(cls, logging) for cls in dict.fromkeys(classes)}
    for module, cls in zip(modules, classes):
        # Change the class, like torch's fully_shard, since this does not affect names, hooks, dp's replicas and
        # state_dict.
        module.__class__ = recomputed[cls]
    try:
        yield
    finally:
        for module, cls in zip(modules, classes):
            module.__class__ = cls


def _recomputed(cls: type[nn.Module], logging: list[TTModel]) -> type[nn.Module]:
    first = iter([True])

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = partial(cls.forward, self)
        # Without gradients, there is no backward that would need activations.
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        begin, run = _Forward.begin, _checkpointed
        if torch.compiler.is_compiling():
            begin, run = torch.compiler.disable(begin), torch.compiler.disable(run, recursive=False)
        return run(self, begin(self, logging, first, args, kwargs), own, args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """Ensure that copies and pickles are instances of the user's own class."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return object.__new__, (cls,), state

    own = {"forward": forward, "__reduce_ex__": reduce, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), own)


def _checkpointed(module: nn.Module, before: _Forward, forward: Any, args: Any, kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint  # torch 2.6 imports sympy here (0.2 s)

    inputs, parameters = _versions(before.inputs), _versions(module.parameters())

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _Reentered(before.again)

    def run(*_: Tensor) -> Any:
        return forward(*args, **kwargs)

    # torch would not notice changes of tensors in keywords and containers, and takes some keywords for its own.
    output = checkpoint(run, *before.inputs, use_reentrant=False, context_fn=contexts)
    before.compares = before.compares or _versions(module.parameters()) != parameters
    if _versions(before.inputs) != inputs:
        raise _not_repeatable(module, "an input in place (write x = x + y instead of x += y)")
    before.states.drop_unchanged()
    return output


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not (is_lazy(tensor) or tensor.is_inference())]


def _not_repeatable(module: nn.Module, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"checkpoint_modules: the forward of {type(module).__name__} changes {what}, so computing it again would give "
        "other values. Change this, or leave the module out of checkpoint_modules."
    )


class _Reentered:
    """A context that may be entered again: each backward pass through a graph recomputes the module.

    A penalty on gradients, for example, runs one backward pass with ``create_graph=True``, and the loss another one.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class _Forward:
    """What a module's forward reads beside its inputs and parameters, as it is before the forward."""

    @classmethod
    def begin(cls, *arguments: Any) -> _Forward:
        """Return a new object, in a function that compilers can leave out."""
        return cls(*arguments)

    def __init__(
        self, module: nn.Module, logging: list[TTModel], first: Iterator[bool], args: Any, kwargs: Any
    ) -> None:
        parts = list(module.modules())
        self._module = module
        self.compares = next(first, False)  # also if a parameter's version has changed: ``p.data.mul_(2)`` changes none
        self._logging = [*logging, *(part for part in parts if isinstance(part, TTModel))]  # dp has replicas
        self.inputs = [tensor for tensor in tensors_of((args, kwargs)) if not tensor.is_inference()]
        self.states = ModuleStates(parts, self.inputs, module=module, arguments=[args, kwargs])
        self._trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._random = rng.read(devices=False)  # torch restores its own states, but not Python's and numpy's

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the forward compute the same values again; it changes nothing, and logs nothing."""
        # A GAN's loss may freeze its critic for one forward only.
        toggled = [(p, was) for p, was in self._trained if p.requires_grad != was]
        with _one_at_a_time, self.states.in_use(), self._parameters_stay():
            now = rng.read(devices=False)
            for parameter, was in toggled:
                parameter.requires_grad_(was)
            sinks = [part.__dict__.pop("_log_sink", None) for part in self._logging]
            self._random.restore()
            try:
                yield
            finally:
                now.restore()
                for parameter, was in toggled:
                    parameter.requires_grad_(not was)
                for part, sink in zip(self._logging, sinks):
                    if sink is not None:
                        part.__dict__["_log_sink"] = sink

    @contextmanager
    def _parameters_stay(self) -> Iterator[None]:
        """Raise an error if this forward changes parameters, where :attr:`compares` is True: comparing takes time."""
        named = self._module.named_parameters() if self.compares else ()
        copies = [(name, p, p.detach().clone()) for name, p in named if not is_sharded(p)]
        try:
            yield
        finally:  # torch stops a forward with an exception as soon as backward has what it needs
            # Changes such as clamp_() may be repeated; those of an embedding's max_norm, up to rounding.
            changed = [name for name, p, copied in copies if not torch.allclose(p, copied, rtol=1e-4, equal_nan=True)]
            if changed:
                raise _not_repeatable(self._module, f"its parameter {changed[0]}")
