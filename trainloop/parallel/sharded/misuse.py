"""Detect and explain what a model can't do with sharded parameters, such as changes that the shards would not get."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from trainloop._support.nested import tensors_of
from trainloop._support.reduction import answer_of, graph_nodes, innermost_mode, is_compiled, outside_of_fast_modules
from trainloop._support.user_line import warn
from trainloop.distributed.ranks import refuse_on_one_rank
from trainloop.errors import ConfigurationError, TrainLoopError
from trainloop.parallel.sharded.shards import bit_sums, is_sharded, local_shard, stays_whole, storage_address

# In torch's errors about operations that can't work with a shard.
_OF_SHARDS = (
    "DTensor",
    "Sharding propagation",
    "sharding strategy",  # an operation that torch does not know for shards
    "sharded tensor",
    "numpy() is not supported for tensor subclasses",
    "invalid python storage",  # copy.deepcopy of a gradient that is a part of FSDP's buffer
    "to not have been used in the graph",  # torch.autograd.grad, where the model was called: it used gathered copies
)


def is_of_shards(error: BaseException) -> bool:
    """Return True if torch raised an error because a tensor is a rank's shard."""
    if isinstance(error, TrainLoopError):  # it has its own explanation
        return False
    if _raised_by_dtensors(error):  # an AssertionError without a text, or an IndexError in a lookup
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_SHARDS)


def _raised_by_dtensors(error: BaseException) -> bool:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
    return where.startswith("torch.distributed.tensor")


def cannot_step(optimizer: Optimizer, fact: str = "") -> ConfigurationError:
    """Return an error for an optimizer whose calculations need whole parameters."""
    return ConfigurationError(
        f"{type(optimizer).__name__} with gpu_mode='fsdp': it can't step sharded parameters. Use gpu_mode='ddp', or an "
        f"element-wise optimizer such as AdamW. {fact}".rstrip()
    )


def used_outside_of_forward(fact: str) -> ConfigurationError:
    """Return an error for a sharded parameter that was not gathered where it was used."""
    return ConfigurationError(
        "gpu_mode='fsdp': a parameter was used outside of the forward of its block (the module that is sharded as one "
        "unit), where it is a DTensor with one rank's shard. Use it in the block's forward (which does not run if you "
        "call only a submodule), use weight_decay for a penalty over self.parameters(), choose larger blocks with "
        f"fsdp_model_args={{'shard': ...}}, or use gpu_mode='ddp'. {fact}"
    )


def explain_deepcopy(error: Exception) -> None:
    """Raise an explanation if code has copied a sharded module; return if the error has another cause."""
    if "FSDP does not support deepcopy" in str(error):
        raise ConfigurationError(
            "gpu_mode='fsdp': copy.deepcopy(module) can't copy a module that is sharded. To keep weights, copy the "
            "tensors: {name: p.detach().clone() for name, p in model.named_parameters()}, which are shards, too. Make "
            "a second model before fit, as a submodule of the first one, or use gpu_mode='ddp'."
        ) from error


def explain_sharded(error: Exception) -> None:
    """Raise an explanation if sharded parameters caused this torch error; return if the error has another cause."""
    explain_deepcopy(error)
    text = str(error)
    without_text = isinstance(error, AssertionError) and _raised_by_dtensors(error)
    if "mixed torch.Tensor and DTensor" in text or "sharding strategy" in text or without_text:
        raise used_outside_of_forward(f"torch says: {text or type(error).__name__}") from error
    if ("setStorage" in text and "storage of size 0" in text) or "its data is not allocated yet" in text:
        raise ConfigurationError(
            "gpu_mode='fsdp': backward needs a module's gathered parameters again after they were freed. The usual "
            "cause is a gradient penalty (torch.autograd.grad(..., create_graph=True)) before another forward pass of "
            "the same loss: compute the penalty after all forward passes. Another cause is a loss that depends on a "
            "tensor which a block keeps as an attribute, or returns in an object in which torch finds no tensors: "
            "return the tensor, a dict or a dataclass from the block's forward, or pass fsdp_model_args="
            f"{{'reshard_after_forward': False}}. Or use gpu_mode='ddp'. torch says: {text}"
        ) from error


class RefusesLostChanges(TorchFunctionMode):
    """Raise an error if code changes a sharded tensor in a way that has no effect on the shards.

    That is a change in place of a part that is a gathered copy (for a plain tensor, the same parts are views), and what
    FSDP ignores because it keeps its own references to the sharded parameters.

    ``changes``, if given, is called with each other tensor before it is changed in place.
    """

    def __init__(self, changes: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()
        self._copies: dict[int, weakref.ref[Tensor]] = {}
        self._tells = changes

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is innermost_mode:
            return answer_of(self, args)
        if func in _IGNORED and args and is_sharded(args[0]):
            if func == _SETS_DATA and local_shard(args[0]).data_ptr() == local_shard(args[1]).data_ptr():
                return None  # `p.data += x` has changed the shard itself before
            raise ConfigurationError(
                f"{_IGNORED[func]} on a parameter that is sharded: FSDP would ignore it. In fsdp, write values by "
                "`with torch.no_grad(): p.copy_(...)` or p.mul_(...), and change gradients in on_after_gradient_update."
            )
        self._refuse_change(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if _returns_views(func, args):
            source = args[0]
            for part in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(part, Tensor) and (self._is_known_copy(source) or _is_copy(part, source)):
                    self._copies[id(part)] = weakref.ref(part)
        return result

    def _refuse_change(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise an error if a function would change such a copy in place."""
        name = _name_of(function)
        changed = [*args[:1], *(kwargs[key] for key in ("out", "tensor", "input") if key in kwargs)]
        if self._tells is not None and _changes(name) and changed and isinstance(changed[0], Tensor):
            self._tells(changed[0])
        if name == "__setitem__" and _is_plain_index(args[1]) and is_sharded(args[0]):
            part = args[0][args[1]]
            lost = _is_copy(part, args[0])
        elif self._copies and ("out" in kwargs or _changes(name)):
            tensors = [t for value in changed for t in (value if isinstance(value, (list, tuple)) else [value])]
            lost = any(self._is_known_copy(t) for t in tensors)
        else:
            return
        if lost:
            raise ConfigurationError(
                f"gpu_mode='fsdp': {name} would change a copy of a part of a sharded tensor, such as p.grad[:3], and "
                "the tensor would stay the same. Change the whole tensor by operations that work elementwise, such as "
                "p.grad.mul_(mask). Shard the mask in the same way: torch.distributed.tensor.distribute_tensor(mask, "
                "p.device_mesh, p.placements, src_data_rank=None). Or use gpu_mode='ddp'."
            )

    def _is_known_copy(self, tensor: Any) -> bool:
        found = self._copies.get(id(tensor))
        return found is not None and found() is tensor


_SETS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_IGNORED = {
    _SETS_DATA: "p.data = ...",
    Tensor.register_hook: "p.register_hook(...)",
    Tensor.register_post_accumulate_grad_hook: "p.register_post_accumulate_grad_hook(...)",
}
# Functions that return views of a plain tensor.
_VIEWS = frozenset(
    "__getitem__ select narrow chunk split split_with_sizes tensor_split unbind unfold view view_as reshape flatten "
    "ravel unflatten diagonal transpose permute movedim t squeeze unsqueeze detach".split()
)
_IN_PLACE = frozenset(
    "__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__".split()
)


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", "")


def _returns_views(function: Any, args: tuple[Any, ...]) -> bool:
    name = _name_of(function)
    if name not in _VIEWS or not args or not is_sharded(args[0]):
        return False
    return name != "__getitem__" or _is_plain_index(args[1])


def _is_plain_index(index: Any) -> bool:
    """Return True if a plain tensor's part with this index is a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or part is ... or (isinstance(part, (int, slice)) and not isinstance(part, bool)) for part in parts
    )


def _is_copy(part: Tensor, source: Tensor) -> bool:
    own, whole = local_shard(part), local_shard(source)
    address = storage_address(own) if own.numel() else 0
    return address != 0 and address != storage_address(whole)


def _changes(name: str) -> bool:
    """Return True for the name of a function that changes its first argument."""
    return name in _IN_PLACE or (name[-1:] == "_" and name[-2:] != "__" and name != "requires_grad_")


def refuse_other_parameters(name: str, unit: nn.Module) -> Any:
    """Raise an error at a forward of a sharded unit that one rank makes alone, or with replaced parameters.

    One rank can't gather the unit's parameters. And if ``torch.func.functional_call`` has replaced parameters,
    gathering would replace them again, so that the unit would run with its own weights.
    Return the handle of the unit's hook.
    """
    places = [
        (part._parameters, key) for part in unit.modules() for key, p in part._parameters.items() if p is not None
    ]

    def check(*_: Any) -> None:
        refuse_on_one_rank("the model, whose parameters are sharded")
        for parameters, key in places:
            if not isinstance(parameters.get(key), (nn.Parameter, type(None))):
                raise ConfigurationError(
                    f"gpu_mode='fsdp': torch.func.functional_call can't replace {key} of {name}, which is sharded: its "
                    "own weights would be used. Use gpu_mode='ddp', or shard the model as one unit with "
                    "fsdp_model_args={'shard': []}."
                )

    return unit.register_forward_pre_hook(check, prepend=True)


def refuse_freed_input(name: str, unit: nn.Module) -> Any:
    """Raise an error in the first training forward of a sharded unit that frees the memory of its input.

    A reversible layer does so, and writes the input again into its tensor in backward. FSDP gives a unit other tensor
    objects, so the layer that has returned the input would read memory without values.
    Return the handle of the unit's hook, which removes itself.
    """

    def check(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        inputs = [t for t in tensors_of((args, kwargs)) if type(t) is Tensor and t.requires_grad and t.numel()]
        if any(map(_is_freed, inputs)):
            raise ConfigurationError(
                f"gpu_mode='fsdp': {name} frees the memory of its input and recomputes it in backward. The layer "
                "before it would not get these values, because FSDP gives blocks other tensor objects. Let it keep its "
                "input (memcnn: keep_input=True), choose larger blocks with fsdp_model_args={'shard': ...}, or use "
                "gpu_mode='ddp'."
            )

    handle = unit.register_forward_hook(check, with_kwargs=True)
    return handle


def _is_freed(tensor: Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() == 0
    except RuntimeError:  # it has no storage, as in torch.func.vmap
        return False


@contextmanager
def refuse_gradients_of_shards(names: Mapping[int, str]) -> Iterator[None]:
    """Raise an error if a gradient of a sharded parameter is requested in the block, as by ``torch.autograd.grad``.

    The graph has gathered copies only: with ``allow_unused=True`` the gradient of a shard would be None, and with
    ``backward(inputs=...)`` it would be missing.

    Parameters
    ----------
    names : mapping from int to str
        Names of sharded parameters, by their ids.
    """
    # Both public functions call this one. A patch of them would miss "from torch.autograd import grad".
    run = getattr(torch.autograd, "_engine_run_backward", None)
    if run is None:
        yield
        return

    def checked(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        name = next((names[id(t)] for t in args[3] if id(t) in names), None) if len(args) > 3 else None
        if name is not None:
            raise ConfigurationError(
                f"gpu_mode='fsdp': a gradient is requested for {name}, of which this rank has a shard only. The "
                "forward used a gathered copy of it, so the gradient would be missing. Shard the model as one unit "
                "with fsdp_model_args={'shard': []}, or use gpu_mode='ddp'."
            )
        return run(outputs, *args, **kwargs)

    torch.autograd._engine_run_backward = checked  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run


def refuse_shards_in_functions(output: Any, names: Mapping[int, str]) -> None:
    """Raise an error if a user's ``autograd.Function`` in the graph of a forward has got a sharded parameter.

    Its backward, such as the adjoint of an ODE, would differentiate by the shard, but forward has used a gathered copy:
    the gradient would be zero.

    Parameters
    ----------
    output : nested tensors
    names : mapping from int to str
        Names of sharded parameters, by their ids.
    """
    for node in graph_nodes(tensors_of(output)):
        function = getattr(type(node), "_forward_cls", None)  # of functions in Python
        if function is None or function.__module__.partition(".")[0] == "torch":
            continue
        before = [one for one, _ in node.next_functions]
        name = next((names[id(own)] for one in before if id(own := getattr(one, "variable", None)) in names), None)
        if name is not None:
            raise ConfigurationError(
                f"gpu_mode='fsdp': {function.__qualname__}, an autograd.Function, is called with {name}, of which this "
                "rank has a shard only. Its backward can't compute gradients of the gathered parameters that the "
                "forward uses. Shard the model as one unit with fsdp_model_args={'shard': []}, or use gpu_mode='ddp'."
            )


class _Seen(NamedTuple):
    name: str
    parameter: Tensor
    version: int
    address: int
    bits: int


class WatchedForwards:
    """Raise an error if one of the next few training forwards changes parameters of a unit.

    The forward would change a gathered copy, and lose the change when the copy is freed: a momentum encoder would
    silently not be updated. Tensor versions, which count in-place operations, detect most changes. Changes through
    ``.data`` are detected by the values' bits, unless the new values equal the old ones, as in the first step of a
    momentum encoder.

    Parameters
    ----------
    units : iterable of (str, nn.Module)
        Units with their names; the last one is the root.
    forwards : int
        Number of the root's forwards.
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]], forwards: int) -> None:
        self._left = forwards
        self._warned = False
        units = list(units)
        # With a mode of torch's functions in these forwards only, compiled code would be compiled again.
        self._root = units[-1][1] if units else None
        compiled = any(is_compiled(module) for module in units[-1][1].modules()) if units else False
        self._sees_functions = not compiled
        self._seen: dict[str, list[_Seen]] = {}
        self._hooks: list[Any] = []
        for name, unit in units:
            if is_compiled(unit):
                continue  # hooks would become part of the compiled graph
            is_root = unit is units[-1][1]
            # FSDP's own hooks gather parameters before these hooks, and free parameters after them.
            self._hooks += [
                unit.register_forward_pre_hook(lambda part, _, name=name: self._note_before_forward(name, part)),
                unit.register_forward_hook(
                    lambda part, *_, name=name, is_root=is_root: self._compare_after_forward(name, part, is_root),
                    prepend=True,
                ),
            ]

    @contextmanager
    def refusing_lost_changes(self) -> Iterator[None]:
        """Enter the context of a forward."""
        if self._sees_functions and not self.ended and torch.is_grad_enabled():
            with outside_of_fast_modules(self._root), RefusesLostChanges(self._refuse_data):
                yield
        else:
            yield

    def _refuse_data(self, tensor: Tensor) -> None:
        """Raise an error for an operation on a gathered ``p.data``: it may change values in later forwards only."""
        if is_sharded(tensor) or tensor.is_nested or not (address := storage_address(tensor)):
            return
        for seen in (seen for unit in self._seen.values() for seen in unit):
            if tensor.shape == seen.parameter.shape and address == seen.address:
                self._refuse_change_in_forward(seen.name)

    def _note_before_forward(self, name: str, unit: nn.Module) -> None:
        self._seen.pop(name, None)  # left over from a forward that did not end, as in checkpoint's recomputation
        if not torch.is_grad_enabled():
            return
        whole = [(n, p) for n, p in unit.named_parameters(name) if not is_sharded(p) and not stays_whole(p)]
        bits = bit_sums([p for _, p in whole])
        noted = zip(whole, bits, strict=True)
        self._seen[name] = [_Seen(n, p, p._version, storage_address(p), own) for (n, p), own in noted]

    def _refuse_change_in_forward(self, name: str) -> NoReturn:
        self.end()
        raise ConfigurationError(
            f"gpu_mode='fsdp': {name.removeprefix('module.')} is changed during the forward pass. It is a gathered "
            "copy there, so the change would be lost. On all ranks, change parameters in a callback's "
            "on_after_optimizer_step, where each parameter is a DTensor and target.lerp_(online, 0.01) works as usual, "
            "or use gpu_mode='ddp'."
        )

    def _warn_of_kept(self, unit: nn.Module, gathered: Mapping[int, str]) -> None:
        """Warn of an attribute that shares the memory of a gathered parameter, which is freed after the pass."""
        for module in unit.modules():
            for name, value in vars(module).items():
                kept = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not is_sharded(value)
                if kept and (of := gathered.get(storage_address(value))) is not None:
                    self._warned = True
                    warn(
                        f"gpu_mode='fsdp': the attribute {name} of {type(module).__name__} shares the memory of "
                        f"{of.removeprefix('module.')}, which is gathered for this pass only. Reading it afterwards "
                        "could crash the process. Keep a copy: .clone()."
                    )

    def _compare_after_forward(self, name: str, unit: nn.Module, is_root: bool) -> None:
        # Skip parameters without memory: a backward within the forward has freed them.
        then = [seen for seen in self._seen.pop(name, []) if seen.parameter.untyped_storage().nbytes()]
        bits = bit_sums([seen.parameter for seen in then])
        for seen, own in zip(then, bits, strict=True):
            now = (seen.parameter._version, storage_address(seen.parameter), own)
            if now != (seen.version, seen.address, seen.bits):
                self._refuse_change_in_forward(seen.name)
        if then and not self._warned:
            self._warn_of_kept(unit, {seen.address: seen.name for seen in then if seen.address})
        if is_root and torch.is_grad_enabled():
            self._left -= 1
            if self._left <= 0:
                self.end()

    @property
    def ended(self) -> bool:
        """True once the forwards have been watched."""
        return not self._hooks

    def end(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seen.clear()
