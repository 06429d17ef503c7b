"""Decide which attributes of a wrapper refer to the wrapped model, and which to the wrapper itself."""

from __future__ import annotations

import functools
import inspect
import sys
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import distributed as torch_ddp
from torch.nn.parameter import is_lazy

from trainloop.errors import ConfigurationError

METHODS = frozenset(("get_loss", "get_loss_eval", "get_predictions"))
"""The model's methods that run through the wrapper's forward."""

# Set once the wrapper is complete: until then, every attribute is the wrapper's own.
_READY = "_tt_ready"

_OF_DDP = vars(torch_ddp)


def copy_attributes(source: nn.Module, copy: nn.Module) -> None:
    """Give the parameters and buffers of a copy of a module the attributes that code has set on the module's own.

    Libraries mark parameters in this way (``weight._no_weight_decay = True``), and torch's copies lose the marks.
    """
    for part, copied in zip(source.modules(), copy.modules(), strict=True):
        for own, others in ((part._parameters, copied._parameters), (part._buffers, copied._buffers)):
            for name, tensor in own.items():
                if tensor is not None and tensor.__dict__ and (other := others.get(name)) is not None:
                    vars(other).update(attributes_of(tensor))


_OF_TORCH = ("_is_param", "_fsdp", "_dynamo")  # what names of attributes begin with that torch itself sets


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that code has set on a tensor, without the marks that torch sets."""
    return {name: value for name, value in vars(tensor).items() if not name.startswith(_OF_TORCH)}


class SharedName:
    """A name that torch's wrapper uses and a model may use, too.

    ``DistributedDataParallel`` keeps some thirty public attributes (``device``, ``dim``, ``logger``, ``reducer``, ...)
    that its own methods read from ``self`` at every step. The model must keep its own attribute of such a name, and
    torch must not find it. The calling code decides: torch's code gets torch's value, and all other code gets the
    model's attribute, if there is one.

    Parameters
    ----------
    name : str
    method : callable, optional
        Torch's method of that name. Default: torch's value is an attribute of the instance.
    """

    def __init__(self, name: str, method: Callable[..., Any] | None = None) -> None:
        self.name = name
        self.method = method

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self if self.method is None else self.method
        asking = sys._getframe(1).f_globals
        # First the module that reads some twenty of these names in each step.
        if asking is _OF_DDP or _asked_by_torch(asking) or not model_has(wrapper, self.name):
            if self.name in wrapper.__dict__:
                return wrapper.__dict__[self.name]
            if self.method is not None:
                return functools.partial(self.method, wrapper)
        raise AttributeError(self.name)  # Python then calls __getattr__, which looks in the model

    def __set__(self, wrapper: Any, value: Any) -> None:
        vars(wrapper)[self.name] = value

    def __delete__(self, wrapper: Any) -> None:
        vars(wrapper).pop(self.name)


class Transparent(nn.Module):
    """Base class of wrappers. Attributes that are not the wrapper's own are read, written and deleted on the model.

    These names refer to the wrapper: ``module``, the methods of ``nn.Module`` and of torch's wrapper, and names with a
    leading underscore that the model doesn't have. Every other name refers to the model, even if it is new.
    """

    get_loss: Callable[..., Any]
    """The model's method, run as the wrapper runs ``forward``."""

    get_loss_eval: Callable[..., Any]
    """The model's method, run as the wrapper runs ``forward``."""

    get_predictions: Callable[..., Any]
    """The model's method, run as the wrapper runs ``forward``."""

    def _run_method(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model's method through the wrapper's forward."""
        raise NotImplementedError

    def _become_transparent(self) -> None:
        """From now on, let attributes refer to the model; called at the end of construction and of unpickling."""
        for name in vars(self):
            if not name.startswith("_") and name != "training" and not hasattr(type(self), name):
                setattr(type(self), name, SharedName(name))
        self.__dict__[_READY] = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = _wrapped_model(self)
            # copy and pickle look for special methods on the instance, and must not find the model's.
            if module is None or (name.startswith("__") and name.endswith("__")):
                raise
        attribute = getattr(module, name)  # for a missing attribute, the error names the model's class
        return functools.partial(self._run_method, name) if name in METHODS else attribute

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_of_the_model(name, sys._getframe(1).f_globals):
            setattr(_wrapped_model(self), name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_of_the_model(name, sys._getframe(1).f_globals):
            delattr(_wrapped_model(self), name)
        else:
            super().__delattr__(name)

    def _is_of_the_model(self, name: str, asking: dict[str, Any]) -> bool:
        if _READY not in self.__dict__ or _asked_by_torch(asking):
            return False
        if isinstance(inspect.getattr_static(type(self), name, None), SharedName):
            return model_has(self, name)
        if name in self.__dict__ or name in self._modules or hasattr(type(self), name):
            return False
        return not name.startswith("_") or model_has(self, name)

    def __dir__(self) -> Iterable[str]:
        module = _wrapped_model(self)
        return sorted({*super().__dir__(), *(dir(module) if module is not None else ())})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key != _READY})
        self._become_transparent()


def model_has(wrapper: nn.Module, name: str) -> bool:
    """Return True if the wrapped model has an attribute of this name; properties are not evaluated."""
    module = _wrapped_model(wrapper)
    if module is None:
        return False
    registered = (vars(module), module._parameters, module._buffers, module._modules)
    if any(name in names for names in registered) or hasattr(type(module), name):
        return True
    # A compiled module, or another wrapper, has the attributes of the module inside it.
    return type(module).__getattr__ is not nn.Module.__getattr__ and hasattr(module, name)


def check_not_lazy(module: nn.Module, wrapper: str) -> None:
    """Raise ConfigurationError if parameters or buffers of the module have no shape yet."""
    lazy = [
        name for tensors in (module.named_parameters(), module.named_buffers()) for name, t in tensors if is_lazy(t)
    ]
    if lazy:
        raise ConfigurationError(
            f"{wrapper}: {type(module).__name__} has lazy tensors without a shape: {', '.join(lazy)}. Run one batch "
            "through the model first, e.g. `model(inputs)` under torch.no_grad()."
        )


def check_values(module: nn.Module, name: str = "model") -> None:
    """Raise an error for parameters and buffers on the meta device; of the model, ``fsdp`` initializes them."""
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ConfigurationError(
                f"{name}.{path} is on the meta device and has no values. Call {name}.to_empty(device='cpu') and set "
                f"its values, or load them with {name}.load_state_dict(state, assign=True). If the module is only a "
                f"template, such as for torch.func.functional_call, hide it from the {name}: self.base = [module]."
            )


_NOT_EXCHANGED = ("int16", "uint16", "uint32", "uint64")  # by Gloo and NCCL; Gloo also lacks types of 8-bit floats


def check_sendable(module: nn.Module, wrapper: str, device: str | None = None) -> None:
    """Raise ConfigurationError if ranks can't exchange a buffer of the module, on ``device`` or where the buffer is."""
    for name, buffer in module.named_buffers():
        dtype = str(buffer.dtype).removeprefix("torch.")
        if buffer.is_quantized:
            kind, remedy = "a quantized", "Register its integers (int_repr()) as a buffer, and quantize them in forward"
        elif buffer.layout != torch.strided:
            kind, remedy = "a sparse", "Register its indices and its values as buffers, and join them in forward"
        elif dtype in _NOT_EXCHANGED or (dtype.startswith("float8") and (device or buffer.device.type) == "cpu"):
            kind, remedy = (
                f"a {dtype}",
                "Register it as another dtype, such as torch.int32, and convert it in forward",
            )
        else:
            continue
        raise ConfigurationError(
            f"{wrapper}: the buffer {name} of {type(module).__name__} is {kind} tensor, which ranks can't exchange. "
            f"{remedy}, or use gpu_mode='single'."
        )


def check_same_model(
    module: nn.Module, wrapper: str, group: dist.ProcessGroup | None, ignored: Collection[str] = ()
) -> None:
    """Raise ConfigurationError on all ranks of the group if their models differ. Collective.

    Torch assigns tensors to each other by their places. In a model that is built from a set, whose order differs
    between processes, it would average the gradients of different layers.
    """
    registered = [*module.named_parameters(), *module.named_buffers()]
    mine = [
        f"{name} ({str(t.dtype).removeprefix('torch.')} of shape {list(t.shape)}, requires_grad={t.requires_grad})"
        for name, t in registered
        if name not in ignored and f".{name}" not in ignored  # as torch names what is the root's own
    ]
    # The module's GPU, which is not always the current one: NCCL allows one rank per GPU.
    gpus = [t.device for _, t in registered if t.device.type == "cuda"]
    device = torch.device("cpu") if dist.get_backend(group) != "nccl" else gpus[0] if gpus else torch.device("cuda")

    def differing(numbers: list[int]) -> list[bool]:
        both = torch.tensor([numbers, [-number for number in numbers]], device=device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        return (both.sum(0) > 0).tolist()  # the largest is not the smallest

    if not any(differing([len(mine), zlib.crc32(repr(mine).encode())])):
        return
    most = torch.tensor(len(mine), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    mine += ["missing"] * (int(most) - len(mine))
    place = differing([zlib.crc32(one.encode()) for one in mine]).index(True)
    raise ConfigurationError(
        f"{wrapper}: the ranks' models differ. Tensor {place} of {type(module).__name__} (its parameters, then its "
        f"buffers, in the order of registration) is {mine[place]} on rank {dist.get_rank()}, and another one on other "
        "ranks. Build the model in the same way on every rank: register layers in the same order (a set has another "
        "order in each process: use sorted(...)), and freeze the same parameters."
    )


def _wrapped_model(wrapper: nn.Module) -> nn.Module | None:
    return wrapper.__dict__.get("_modules", {}).get("module")


_TORCH_OR_WRAPPERS = ("torch.", f"{__package__}.")


def _asked_by_torch(asking: dict[str, Any]) -> bool:
    name = asking.get("__name__", "")
    # This module asks for the user: the model may be another wrapper.
    return name.startswith(_TORCH_OR_WRAPPERS) and name != __name__
