"""Pickle what torch itself can't: optimizers with hooks, torch's generators, compiled or parametrized modules.

Module-like objects and operators are sent by name, compiled functions by their original and its options, parametrized
and scripted modules by their parts. All private torch names that this needs are in this file; torch 2.6 to 2.15 has
them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from trainloop._support.nested import own_attributes

_EVAL_FRAME = "torch._dynamo.eval_frame"


def reducer_for(kind: type) -> Callable[[Any, Any], Any] | None:
    """Return the function of (pickler, object) that pickles a class's objects; ``None`` for the default."""
    if issubclass(kind, types.ModuleType):
        return _reduce_module_like if kind is not types.ModuleType else None
    if issubclass(kind, nn.Module):
        if issubclass(kind, torch.jit.ScriptModule):
            return _reduce_script_module
        if unparametrized_class(kind) is not kind:
            return _reduce_parametrized_module
        return _reduce_module if kind.__reduce__ is object.__reduce__ else None
    if issubclass(kind, torch.optim.Optimizer):
        plain = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
        return _reduce_optimizer if plain else None
    if issubclass(kind, torch.Tensor):
        return _reduce_tensor
    return _BY_KIND.get(kind)


# -- tensors -----------------------------------------------------------------------------------------------------------


def _reduce_tensor(pickler: Any, tensor: torch.Tensor) -> Any:
    """Pickle a tensor with its hooks or its subclass of Parameter, which torch omits, or with a dtype of torch.load."""
    hooks = {name: found for name in _TENSOR_HOOKS if (found := getattr(tensor, name, None))}
    hooks = hooks if tensor.is_leaf else {}
    kind = type(tensor)
    is_own_kind = kind is not nn.Parameter and kind.__reduce_ex__ is nn.Parameter.__reduce_ex__
    if not hooks and not is_own_kind and tensor.dtype not in _LOADED_ONLY:
        return NotImplemented
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "backward hook .* will not be serialized")
        rebuild, args, *_ = tensor.__reduce_ex__(4)
    if rebuild is getattr(torch._utils, "_rebuild_tensor_v3", None):
        rebuild = _rebuild_loaded_only
    if is_own_kind:  # torch makes a plain Parameter of it
        rebuild, args = _rebuild_as, (kind, rebuild, args)
    # Hooks are set once the tensor exists: a hook may refer to it.
    return rebuild, args, hooks or None, None, None, _set_hooks if hooks else None


def _rebuild_as(kind: type, rebuild: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    made = rebuild(*args)
    made.__class__ = kind
    return made


def _rebuild_loaded_only(storage: torch.UntypedStorage, *args: Any) -> torch.Tensor:
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
    return torch._utils._rebuild_tensor_v3(typed, *args)


_LOADED_ONLY: set[torch.dtype] = getattr(torch.storage, "_new_dtypes", set)()  # uint16, float8 and the like


def _set_hooks(tensor: torch.Tensor, hooks: dict[str, dict[int, Any]]) -> None:
    for name, found in hooks.items():
        setattr(tensor, name, found)  # the same dict: the handles that remove hooks refer to it


_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


# -- by name -----------------------------------------------------------------------------------------------------------


def _object_at(path: str) -> Any:
    """Return the object at a dotted path that begins with a module."""
    module, _, rest = path.partition(".")
    found: Any = importlib.import_module(module)
    for name in rest.split(".") if rest else ():
        module = f"{module}.{name}"
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(module)
    return found


def _reduce_module_like(pickler: Any, module: types.ModuleType) -> Any:
    """Pickle ``torch.backends.cudnn``, ``torch.ops`` or a library's lazy module by its name."""
    name = getattr(module, "__name__", None)
    if not isinstance(name, str):
        return NotImplemented
    if sys.modules.get(name) is module:
        return importlib.import_module, (name,)
    try:
        return (_object_at, (name,)) if _object_at(name) is module else NotImplemented
    except Exception:  # any error of a module's __getattr__
        return NotImplemented


def _reduce_operator(pickler: Any, operator: Any) -> Any:
    return _object_at, (f"torch.ops.{operator}",)


def _reduce_number_info(pickler: Any, info: Any) -> Any:
    return type(info), (getattr(torch, info.dtype),)


def _reduce_generator(pickler: Any, generator: torch.Generator) -> Any:
    # A process's default generator maps to the other process's default one.
    return (_object_at, ("torch.default_generator",)) if generator is torch.default_generator else NotImplemented


_BY_KIND: dict[type, Callable[[Any, Any], Any]] = {
    type(torch.ops.aten.add): _reduce_operator,
    type(torch.ops.aten.add.Tensor): _reduce_operator,
    torch.finfo: _reduce_number_info,
    torch.iinfo: _reduce_number_info,
    torch.Generator: _reduce_generator,
}


# -- compiled code -----------------------------------------------------------------------------------------------------


def compile_context_of(function: types.FunctionType) -> Any:
    """Return the object by which ``torch.compile`` compiled (or disabled) a function; ``None`` for other functions."""
    if _EVAL_FRAME not in sys.modules or not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    # functools.wraps copies a compiled function's attributes, but not its closure.
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name == "self" and type(cell.cell_contents).__module__ == _EVAL_FRAME:
            return cell.cell_contents
    return None


def reduce_compiled_function(function: types.FunctionType, context: Any) -> Any:
    """Pickle the original function and its compile options; the reader compiles it again."""
    return context, (function._torchdynamo_orig_callable,)  # type: ignore[attr-defined]


# -- modules -----------------------------------------------------------------------------------------------------------


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _reduce_module(pickler: Any, module: nn.Module) -> Any:
    """Pickle what ``module.compile()`` has put into the module, which torch leaves out; the reader compiles again."""
    if not (compiled := _compiled_in_place(module)):
        return NotImplemented
    reduced: Any = module.__reduce_ex__(4)
    make, args, state, *others = reduced
    if not isinstance(state, dict):  # of a __getstate__ of the user's
        return NotImplemented
    return make, args, {**state, **compiled}, *others


def _compiled_in_place(module: nn.Module) -> dict[str, Any]:
    name = "_compiled_call_impl"  # torch has no public name for it
    return {name: vars(module)[name]} if vars(module).get(name) is not None else {}


def _state_of_module(kind: Any, module: nn.Module) -> Any:
    get_state = getattr(kind, "__getstate__", None)
    state = dict(module.__dict__) if get_state is None else get_state(module)
    return {**state, **compiled} if (compiled := _compiled_in_place(module)) else state


def _reduce_parametrized_module(pickler: Any, module: nn.Module) -> Any:
    kind = unparametrized_class(type(module))
    names = tuple(module.parametrizations)  # type: ignore[arg-type]
    return _new_parametrized, (kind, names), _state_of_module(kind, module)


def _new_parametrized(kind: Any, names: tuple[str, ...]) -> nn.Module:
    module: nn.Module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _reduce_optimizer(pickler: Any, optimizer: torch.optim.Optimizer) -> Any:
    state = optimizer_state(optimizer)
    if type(optimizer).__setstate__ is torch.optim.Optimizer.__setstate__:
        state.setdefault("defaults", {})  # which it reads, but a wrapper that calls no super().__init__() lacks
    return _new, (type(optimizer),), state


def optimizer_state(optimizer: torch.optim.Optimizer, hooks: bool = True) -> dict[str, Any]:
    """Return all attributes of an optimizer (torch pickles three), or the state that its own ``__getstate__`` returns.

    That state is not used if torch's ``__setstate__`` would fail without ``defaults``, as for many forms of Lookahead.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    hooks : bool
        True to include the hooks before and after steps.
    """
    kind = type(optimizer)
    if kind.__getstate__ is not torch.optim.Optimizer.__getstate__:
        own = dict(kind.__getstate__(optimizer))
        if "defaults" in own or kind.__setstate__ is not torch.optim.Optimizer.__setstate__:
            return own
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not (name == "step" and hasattr(value, "_wrapped_by_lr_sched"))  # a scheduler's wrapper of it
        and (hooks or not (name.startswith("_optimizer_") and name.endswith("_hooks")))
    }


def _reduce_script_module(pickler: Any, module: Any) -> Any:
    """Pickle code as TorchScript's archive; parameters and buffers are separate, so that an optimizer shares them."""
    file = io.BytesIO()
    with _script_may_be_old():
        torch.jit.save(module, file)
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return _load_script, (file.getvalue(),), tensors, None, None, _set_script_tensors


def _load_script(data: bytes) -> Any:
    with _script_may_be_old():
        return torch.jit.load(io.BytesIO(data), map_location="cpu")


@contextlib.contextmanager
def _script_may_be_old() -> Iterator[None]:
    """Suppress torch's TorchScript deprecation: the user was warned at creation; sending must not warn again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*(torch\.jit|TorchScript)")
        yield


def _set_script_tensors(module: Any, tensors: dict[str, torch.Tensor]) -> None:
    for path, tensor in tensors.items():
        *parts, name = path.split(".")
        setattr(functools.reduce(getattr, parts, module), name, tensor)  # get_submodule rejects script modules


# -- what pickling keeps -----------------------------------------------------------------------------------------------


def kept_attributes(obj: object) -> dict[str, Any]:
    """Return the attributes that pickling an object keeps, according to its ``__getstate__``.

    Attributes that ``__getstate__`` leaves out (weak references, locks, files) are missing. Attributes that it replaces
    have the new value: an attribute is sent unchanged if ``kept_attributes(obj)[name] is own_attributes(obj)[name]``.
    Empty if the state is not a dictionary, or if pickling is refused.
    """
    return attributes_in(kept_state(obj))


def attributes_in(state: Any) -> dict[str, Any]:
    """Return the attributes in a result of ``__getstate__``; empty if it contains none by name."""
    # A pair contains the attributes, and the attributes in slots; either may be None.
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    if not all(part is None or isinstance(part, dict) for part in parts):
        return {}
    return {name: value for part in parts for name, value in (part or {}).items()}


def kept_state(obj: object) -> Any:
    """Return the state that an object's ``__getstate__`` returns; ``None`` if it has no state, or if this raises."""
    kind = unparametrized_class(type(obj))
    get_state = getattr(kind, "__getstate__", None)
    if get_state is None or get_state is getattr(object, "__getstate__", None):
        return own_attributes(obj) or ({} if hasattr(obj, "__dict__") else None)
    try:
        return get_state(obj)
    except Exception:  # whatever a user's __getstate__ raises: pickling itself will report it
        return None


def unparametrized_class(kind: type) -> type:
    """Return the class that a parametrized module had before; any other class unchanged.

    ``torch.nn.utils.parametrize`` gives a module a new class, whose ``__getstate__`` raises.
    """
    own = vars(kind).get("__getstate__")
    return kind.__bases__[0] if getattr(own, "__qualname__", "") == _REFUSES and issubclass(kind, nn.Module) else kind


_REFUSES = "_inject_new_class.<locals>.getstate"
