"""Detect and explain operations of a model that can't work with sharded parameters, in a replica, or on some ranks."""

from __future__ import annotations

import contextlib
import copy
import operator
import weakref
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainloop._support.nested import tensors_of
from trainloop._support.user_line import warn
from trainloop.distributed.ranks import refuse_on_one_rank
from trainloop.errors import ConfigurationError
from trainloop.parallel.shards import bit_sums, dense_parts, is_sharded, local_shard, stays_whole

__all__ = [
    "RefusesLostChanges",
    "SetAttributes",
    "WatchedForwards",
    "WatchedTensors",
    "explain_deepcopy",
    "explain_replica",
    "explain_sharded",
    "is_compiled",
    "is_of_shards",
    "refuse_exchanges",
    "refuse_gradients_of_shards",
    "refuse_other_parameters",
    "refuse_shards_in_functions",
    "used_outside_of_forward",
]


# In torch's errors about operations that can't work with a shard.
_OF_SHARDS = (
    "DTensor",
    "Sharding propagation",
    "sharding strategy",  # an operation that torch does not know for shards
    "sharded tensor",
    "numpy() is not supported for tensor subclasses",
    "to not have been used in the graph",  # torch.autograd.grad, where the model was called: it used gathered copies
)


def is_of_shards(error: BaseException) -> bool:
    """Return True if torch raised an error because a tensor is a rank's shard."""
    if isinstance(error, AssertionError):  # some have no text
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        return frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_SHARDS)


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
    if "mixed torch.Tensor and DTensor" in text or "sharding strategy" in text:
        raise used_outside_of_forward(f"torch says: {text}") from error
    if ("setStorage" in text and "storage of size 0" in text) or "its data is not allocated yet" in text:
        raise ConfigurationError(
            "gpu_mode='fsdp': backward needs a module's gathered parameters again after they were freed. The usual "
            "cause is a gradient penalty (torch.autograd.grad(..., create_graph=True)) before another forward pass of "
            "the same loss: compute the penalty after all forward passes. Another cause is an entry of a MultiLoss "
            "that depends on a tensor which a block keeps as an attribute: return the tensor from the block's forward. "
            f"Or use gpu_mode='ddp'. torch says: {text}"
        ) from error


class _RefusesExchanges(TorchDispatchMode):
    """Raise an error for a collective of torch with ranks that don't make it, which would wait for them."""

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self, ranks: Iterable[int], evaluates: bool) -> None:
        super().__init__()
        self._ranks, self._evaluates = frozenset(ranks), evaluates

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled: torch refuses those with ``fullgraph=True`` in other modes."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            missing = ", ".join(map(str, self._missing(func, args)))
            if missing:
                remedy = _IN_EVALUATION if self._evaluates else _IN_TRAINING
                name = func.__name__.partition(".")[0].rstrip("_")
                raise ConfigurationError(
                    f"the model exchanges values with all ranks (torch's {name}), but rank {missing} has no samples in "
                    f"this batch, so this rank would wait until the timeout. {remedy}"
                )
        return func(*args, **(kwargs or {}))

    def _missing(self, func: Any, args: tuple[Any, ...]) -> list[int]:
        """Return the ranks of the collective's group that have no batch."""
        if func.__name__.startswith(("send", "recv", "wait", "_wrap")):  # between two ranks, or of an earlier one
            return []
        world: Any = dist.group.WORLD
        if func.namespace == "_c10d_functional" and args[-1] != world.group_name:  # named, not given
            return []
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                with contextlib.suppress(RuntimeError):  # an object of another kind, such as a reduction
                    group = dist.ProcessGroup.unbox(arg)
                    return sorted({*dist.get_process_group_ranks(group)} - self._ranks)
        return sorted({*range(dist.get_world_size())} - self._ranks)


_IN_TRAINING = (
    "Pass drop_last=True to the loader, so that all ranks have batches. If the exchange is for an average over all "
    "ranks, such as one over boxes, return (loss, weight) from get_loss instead: trainloop averages over all ranks."
)
_IN_EVALUATION = (
    "In an evaluation, ranks have different numbers of batches. Use the functions of trainloop.distributed, which are "
    "computed over the batch alone there, or call torch.distributed only if self.training."
)


def refuse_exchanges(ranks: Iterable[int], *, evaluates: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which torch's collectives that need other ranks than these raise an error.

    It costs time for each operation, so it is for batches that some rank does not have. It does not look into compiled
    functions.
    """
    # In the modes of older versions of torch, some operations (flex_attention) are errors.
    knows_all = hasattr(TorchDispatchMode, "supports_higher_order_operators")
    return _RefusesExchanges(ranks, evaluates) if knows_all else nullcontext()


def explain_replica(error: Exception) -> None:
    """Raise an explanation if ``get_loss`` freezes or copies parameters of a replica; return for other causes."""
    if isinstance(error, RuntimeError) and "requires_grad flags of leaf variables" in str(error):
        raise ConfigurationError(
            "gpu_mode='dp': get_loss changes requires_grad of a parameter, but the parameters of a replica are copies, "
            "whose flags can't change. For gradients of inputs only, call torch.autograd.grad(output, inputs), which "
            "leaves the gradients of parameters unchanged. Otherwise, use gpu_mode='ddp' or 'single', or set the flags "
            f"in a callback. torch says: {error}"
        ) from error
    if isinstance(error, RuntimeError) and "support the deepcopy protocol" in str(error):
        raise ConfigurationError(
            "gpu_mode='dp': get_loss calls copy.deepcopy with a tensor that has a graph, or with a module: a replica's "
            "parameters are such tensors. Copy detached tensors, and call the module with them by "
            f"torch.func.functional_call, or use gpu_mode='ddp' or 'single'. torch says: {error}"
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
                if isinstance(part, Tensor) and (self._has(source) or _is_copy(part, source)):
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
            lost = any(self._has(t) for t in tensors)
        else:
            return
        if lost:
            raise ConfigurationError(
                f"gpu_mode='fsdp': {name} would change a copy of a part of a sharded tensor, such as p.grad[:3], and "
                "the tensor would stay the same. Change the whole tensor by operations that work elementwise, such as "
                "p.grad.mul_(mask). Shard the mask in the same way: torch.distributed.tensor.distribute_tensor(mask, "
                "p.device_mesh, p.placements, src_data_rank=None). Or use gpu_mode='ddp'."
            )

    def _has(self, tensor: Any) -> bool:
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
    return own.numel() > 0 and own.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def _changes(name: str) -> bool:
    """Return True for the name of a function that changes its first argument."""
    return name in _IN_PLACE or (name[-1:] == "_" and name[-2:] != "__" and name != "requires_grad_")


def is_compiled(module: nn.Module) -> bool:
    """Return True for the result of ``torch.compile``, and for a module that was compiled in place."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


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
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_of(output)]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        before = [one for one, _ in node.next_functions]
        nodes += before
        function = getattr(type(node), "_forward_cls", None)  # of functions in Python
        if function is None or function.__module__.partition(".")[0] == "torch":
            continue
        name = next((names[id(own)] for one in before if id(own := getattr(one, "variable", None)) in names), None)
        if name is not None:
            raise ConfigurationError(
                f"gpu_mode='fsdp': {function.__qualname__}, an autograd.Function, is called with {name}, of which this "
                "rank has a shard only. Its backward can't compute gradients of the gathered parameters that the "
                "forward uses. Shard the model as one unit with fsdp_model_args={'shard': []}, or use gpu_mode='ddp'."
            )


class WatchedTensors:
    """Find buffers and parameters that ``get_loss`` changes: a replica computes them from its part of the batch.

    BatchNorm's statistics are those of the first part, as in ``nn.DataParallel``. A value that is the same on all
    replicas, such as a count of steps, is right.

    Parameters
    ----------
    module : nn.Module
    values : bool
        Compare the values' bits, too. Versions of tensors do not show changes through ``.data``.
    """

    def __init__(self, module: nn.Module, values: bool = False) -> None:
        self._module = module
        self._before = {
            (path, name): (tensor, tensor._version)
            for path, part in module.named_modules()
            if not hasattr(part, "track_running_stats") and not isinstance(part, torch.jit.ScriptModule)
            for name, tensor in [*part._buffers.items(), *part._parameters.items()]
            if tensor is not None
        }
        self._bits = self._bits_now() if values else {}

    def _bits_now(self) -> dict[tuple[str, str], list[int]]:
        """Return checksums of the watched tensors."""
        dense = [(key, part) for key, (tensor, _) in self._before.items() for part in dense_parts(tensor)]
        found: dict[tuple[str, str], list[int]] = {}
        for (key, _), bits in zip(dense, bit_sums([part for _, part in dense]), strict=True):
            found.setdefault(key, []).append(bits)
        return found

    def check(self, replicas: list[nn.Module]) -> None:
        """Raise an error if the first replica has changed or replaced a tensor, unless all replicas have equal values.

        Raises
        ------
        ConfigurationError
            The message names the tensor.
        """
        if not self._before:
            return
        parts = [dict(replica.named_modules()) for replica in replicas]
        now = self._bits_now() if self._bits else {}
        for (path, name), (tensor, version) in self._before.items():
            own = [getattr(part.get(path), name, None) for part in parts]
            is_buffer = name in self._module.get_submodule(path)._buffers
            replaced = isinstance(own[0], Tensor) and _place_of(own[0]) != _place_of(tensor)
            changed = tensor._version != version or now.get((path, name)) != self._bits.get((path, name))
            if not replaced and not changed:
                continue
            first: Any = own[0]
            same = is_buffer and all(isinstance(t, Tensor) and torch.equal(t.to(first.device), first) for t in own)
            if replaced or not same:
                shown = f"{path}.{name}" if path else name
                raise ConfigurationError(
                    f"gpu_mode='dp': get_loss changes {shown}, but each replica has only a part of the batch, so "
                    f"{'the change would be lost' if replaced else 'the change would be that of the first part'}. Use "
                    "gpu_mode='ddp' or 'single', or change it in a callback's on_after_optimizer_step."
                )


_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def _place_of(tensor: Tensor) -> list[int]:
    return [part.data_ptr() for part in dense_parts(tensor)]


class SetAttributes:
    """Find the attributes that a method sets in replicas of a model or a criterion; keep those that all set alike.

    A count of steps is the same in all replicas, and so is what pruning computes before each forward (``weight``, from
    a parameter and a mask, which the next call of ``torch.nn.utils.prune`` reads from the module). What a replica
    computes from its part of the batch is lost.

    A replica is a shallow copy, but gets its own copy of a dict or list of numbers, also of a nested one: if all
    replicas changed one, it would count each step several times. Other objects are shared; ``shared_changes`` names
    those that are changed in place.
    """

    def __init__(self, module: Any, replicas: list[Any]) -> None:
        self._modules = _modules_of(module)
        self._replicas = [_modules_of(replica) for replica in replicas]
        self._shared: list[tuple[str, Any, Any]] = []  # name, object, its content
        self._before = {path: dict(getattr(part, "__dict__", {})) for path, part in self._replicas[0].items()}
        self._containers: list[tuple[str, str, Any, Any, list[Any]]] = []  # path, name, object, its items, copies
        copied: list[dict[int, Any]] = [{} for _ in replicas]  # one container may have several names
        for path, part in self._modules.items():
            own = getattr(part, "__dict__", {})
            for name in own.keys() - _OF_ANY_MODULE:
                if _has_numbers(value := own[name]) and path in self._replicas[0]:
                    holders = [parts[path].__dict__ for parts in self._replicas]
                    for held, memo in zip(holders, copied, strict=True):
                        if held.get(name) is value:
                            held[name] = copy.deepcopy(value, memo)
                    copies = [held.get(name) for held in holders]
                    self._containers.append((path, name, value, copy.deepcopy(value), copies))
                    self._before[path].pop(name, None)
                elif (content := _content_of(value)) is not None:
                    self._shared.append((f"{path}.{name}" if path else name, value, content))

    def keep(self) -> list[str]:
        """Set the module's attributes; return the names of those that had such a value, or None, and are lost."""
        lost = []
        for path, before in self._before.items():
            part = self._modules.get(path)
            own = [getattr(parts[path], "__dict__", {}) for parts in self._replicas]
            for name, first in own[0].items() if part is not None else ():
                # a class may have its first value
                old = before[name] if name in before else getattr(type(part), name, _MISSING)
                was_value = old is None or isinstance(old, (Tensor, int, float))  # a sum may begin with 0
                if first is old or not (_is_plain(first) or (isinstance(first, Tensor) and was_value)):
                    continue
                same = all(_same(other.get(name), first) for other in own[1:])
                if same and not _counts_samples(old, first, before.get("_log_batch_size", 1)):
                    vars(part)[name] = first
                elif (old is None or _is_state(old)) and (_is_state(first) or isinstance(old, (int, float))):
                    # A sum of losses may have their graph; begun as a number, it is no cache of this forward's output.
                    lost.append(f"{path}.{name}" if path else name)
        return lost + self._keep_containers()

    def shared_changes(self) -> list[str]:
        """Return the names of tensors, arrays and containers that replicas share and have changed in place."""
        return [name for name, value, before in self._shared if _differs(_content_of(value), before)]

    def _keep_containers(self) -> list[str]:
        """Write the numbers of the replicas' dicts and lists into those of the module."""
        lost, done = [], set[int]()
        for path, name, value, before, copies in self._containers:
            own = [parts[path].__dict__.get(name) for parts in self._replicas]
            # A new object is not among the copies.
            if not _keep_items(value, before, own, done) and all(map(operator.is_, own, copies)):
                lost.append(f"{path}.{name}" if path else name)
            for one in copies:  # a generator continues with them
                if type(one) is type(value):
                    _set_items(one, copy.deepcopy(value))
        return lost


_MISSING = object()  # an attribute that did not exist before; new ones are usually caches


def _keep_items(value: Any, before: Any, own: list[Any], done: set[int]) -> bool:
    """Write what all replicas have changed alike into ``value``, or what they append; return False if they differ."""
    if any(type(one) is not type(value) for one in own):
        return False
    if all(_equal(one, before) for one in own) or id(value) in done:
        return True
    if all(_equal(one, own[0]) for one in own):
        _set_items(value, own[0])
        return True
    done.add(id(value))
    if isinstance(value, list):
        are_longer = all(_equal(one[: len(before)], before) for one in own)
        for one in own if are_longer else ():  # each part's results, in order
            value.extend(one[len(before) :])
        return are_longer
    kept = True
    for key in {key: None for one in own for key in one}:
        items = [one.get(key, _MISSING) for one in own]
        found = [item for item in items if item is not _MISSING]
        if len(found) == 1 and key not in before:  # of a sample that only this part has
            value[key] = found[0]
        elif all(_equal(item, items[0]) for item in items):
            value[key] = _updated(value.get(key), items[0])
        else:
            is_container = isinstance(value.get(key), (dict, list))
            kept &= is_container and _keep_items(value[key], before[key], items, done)
    return kept


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors or arrays of several numbers
        return False


def _set_items(container: Any, like: Any) -> None:
    """Give a container these items; containers in it stay the same objects."""
    if isinstance(container, list):
        container[:] = [*map(_updated, container, like), *like[len(container) :]]
        return
    for key in container.keys() - like.keys():
        del container[key]
    for key, item in like.items():
        container[key] = _updated(container.get(key), item)


def _updated(old: Any, item: Any) -> Any:
    if type(old) is type(item) and isinstance(item, (dict, list)):
        _set_items(old, item)
        return old
    return item


def _content_of(value: Any) -> Any:
    """Return what shows whether a tensor, an array, a deque of numbers, or a dict's or list's numbers have changed."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes()) if value.nbytes <= 65_536 and value.dtype != object else None
    if isinstance(value, deque):
        return list(value) if len(value) <= 1000 and all(map(_is_plain, value)) else None
    if (isinstance(value, dict) or (isinstance(value, list) and value)) and len(value) <= 1000:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        content = {key: (item, _content_of(item)) for key, item in items if _is_state(item)}
        return content if content or not value else None
    return None


def _differs(now: Any, before: Any) -> bool:
    """Return True if a content has changed. New items of a dict or list are no change, except numbers in an empty dict.

    Nor is another tensor in the place of one: usually, it is what the last forward has computed.
    """
    if not isinstance(before, dict):
        return bool(now != before)
    now = now or {}
    if not before:
        return any(_is_number(item) for item, _ in now.values())
    for key, (old, content) in before.items():
        new, its_content = now.get(key, (old, content))
        if its_content != content if new is old else _is_number(old) and not _equal(new, old):
            return True
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value


def _modules_of(value: Any) -> dict[str, Any]:
    """Return the modules of a model or criterion by path; a criterion that is no module is its only part."""
    return dict(value.named_modules()) if isinstance(value, nn.Module) else {"": value}


def _has_numbers(value: Any) -> bool:
    """Return True for a dict or list of at most 1,000 numbers, such as counts, and for any Counter.

    Text, tuples and other dicts and lists may be among the numbers. An empty one may be meant for anything, except a
    Counter and a ``defaultdict`` of numbers.
    """
    counts = isinstance(value, Counter) or (isinstance(value, defaultdict) and value.default_factory in (int, float))
    leaves = list(islice(_leaves(value, 3), None if counts else 1001)) if isinstance(value, (dict, list)) else [None]
    if not all(map(_is_plain, leaves)):
        return False
    return counts or (len(leaves) <= 1000 and any(isinstance(leaf, (int, float)) for leaf in leaves))


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    """Yield the items of a dict or list, and those of the dicts, lists and tuples in it."""
    if depth and isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item, depth - 1)
    elif isinstance(value, tuple):
        yield from value
    else:
        yield value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str))


def _is_state(value: Any) -> bool:
    """Return True for a number, or a tensor that is no part of a graph."""
    if isinstance(value, Tensor):
        return not (value.requires_grad or value.grad_fn)
    return value is not None and _is_plain(value)


def _counts_samples(old: Any, value: Any, size: int) -> bool:
    """Return True if a number has grown by the number of samples of a part, so that other parts are missing."""
    numbers = isinstance(value, (int, float)) and isinstance(old, (int, float))
    return size > 1 and numbers and bool(value - old == size)


def _same(value: Any, first: Any) -> bool:
    if type(value) is not type(first):
        return False
    if isinstance(first, Tensor):
        return torch.equal(value.to(first.device), first)
    return bool(value == first) or value != value  # NaN


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
                unit.register_forward_pre_hook(lambda part, _, name=name: self._note(name, part)),
                unit.register_forward_hook(
                    lambda part, *_, name=name, is_root=is_root: self._compare(name, part, is_root),
                    prepend=True,
                ),
            ]

    def refusing_lost_changes(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        watches = self._sees_functions and not self.ended and torch.is_grad_enabled()
        return RefusesLostChanges(self._refuse_data) if watches else nullcontext()

    def _refuse_data(self, tensor: Tensor) -> None:
        """Raise an error for an operation on a gathered ``p.data``: it may change values in later forwards only."""
        if is_sharded(tensor) or tensor.is_nested or tensor.layout is not torch.strided or not tensor.numel():
            return
        for seen in (seen for unit in self._seen.values() for seen in unit):
            if tensor.shape == seen.parameter.shape and tensor.data_ptr() == seen.address:
                self._refuse(seen.name)

    def _note(self, name: str, unit: nn.Module) -> None:
        self._seen.pop(name, None)  # left over from a forward that did not end, as in checkpoint's recomputation
        if not torch.is_grad_enabled():
            return
        whole = [(n, p) for n, p in unit.named_parameters(name) if not is_sharded(p) and not stays_whole(p)]
        bits = bit_sums([p for _, p in whole])
        self._seen[name] = [_Seen(n, p, p._version, p.data_ptr(), own) for (n, p), own in zip(whole, bits, strict=True)]

    def _refuse(self, name: str) -> NoReturn:
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
                if not kept or value.layout is not torch.strided:
                    continue
                of = gathered.get(value.untyped_storage().data_ptr())
                if of is not None:
                    self._warned = True
                    warn(
                        f"gpu_mode='fsdp': the attribute {name} of {type(module).__name__} shares the memory of "
                        f"{of.removeprefix('module.')}, which is gathered for this pass only. Reading it afterwards "
                        "could crash the process. Keep a copy: .clone()."
                    )

    def _compare(self, name: str, unit: nn.Module, is_root: bool) -> None:
        # Skip parameters without memory: a backward within the forward has freed them.
        then = [seen for seen in self._seen.pop(name, []) if seen.parameter.untyped_storage().nbytes()]
        bits = bit_sums([seen.parameter for seen in then])
        for seen, own in zip(then, bits, strict=True):
            now = (seen.parameter._version, seen.parameter.data_ptr(), own)
            if now != (seen.version, seen.address, seen.bits):
                self._refuse(seen.name)
        if then and not self._warned:
            self._warn_of_kept(unit, {seen.parameter.untyped_storage().data_ptr(): seen.name for seen in then})
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
