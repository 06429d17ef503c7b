"""Convert states to the types that a checkpoint may contain, and copy states to host memory."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_safe_globals
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainloop.errors import CheckpointError
from trainloop.parallel.sharded.shards import map_items

_UNCHANGED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

_BASES: Any = (int, float, complex, bytes)

_FACTORIES: dict[str | None, Any] = {None: None} | {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, Counter, OrderedDict, deque)
}
_MARK = "trainloop.container"


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def plain(value: Any, where: str = "state", *, tensor: Callable[[Tensor], Tensor] = _unchanged) -> Any:
    """Convert a value to the types that a checkpoint may contain, so that reading it runs no code.

    ==============================================  ==================================================================
    None, numbers, str, bytes, dtype, device, Size  unchanged; a subclass (such as IntEnum) becomes its base class
    numpy scalars                                   Python numbers
    numpy arrays                                    tensors (their data copied)
    tensors, parameters                             tensors without gradient; a view is copied from its storage
    tensors made of others (such as torchao's)      unchanged, if their class is one of torch's safe globals
    OrderedDict (with a state dict's ``_metadata``) unchanged, and so are a Counter, a deque (with its ``maxlen``), and
                                                    a defaultdict whose factory is a built-in type
    other dicts; lists; tuples, namedtuples; sets   dict; list; tuple; set
    ==============================================  ==================================================================

    Parameters
    ----------
    value : object
    where : str
        Name of ``value`` in errors.
    tensor : callable
        Function that is called with each tensor. Its result replaces the tensor.

    Returns
    -------
    object
        The value in new containers. Tensors are copied only if the table says so.

    Raises
    ------
    CheckpointError
        If ``value`` contains any other type. The message has the path to the object, and its type.
    """
    # ``nested`` is not used, because it keeps the types of containers. Here they become the types of the table.
    kind = type(value)
    if kind in _UNCHANGED:
        return value
    if isinstance(value, Tensor):
        return tensor(_plain_tensor(value, where))
    if isinstance(value, np.ndarray):
        return tensor(_tensor_from_array(value, where))
    if isinstance(value, np.generic):
        number = value.item()
        return _refuse_type(value, where) if isinstance(number, np.generic) else plain(number, where)
    if isinstance(value, Mapping):
        return _plain_mapping(value, where, tensor)
    if isinstance(value, tuple):
        return tuple(plain(item, f"{where}[{i}]", tensor=tensor) for i, item in enumerate(value))
    if isinstance(value, (list, deque)):
        items = [plain(item, f"{where}[{i}]", tensor=tensor) for i, item in enumerate(value)]
        return deque(items, value.maxlen) if type(value) is deque else items
    if isinstance(value, (set, frozenset)):
        return {plain(item, f"an element of {where}") for item in value}
    if isinstance(value, str):
        return str.__str__(value)  # str() of an Enum member would return its name
    for base in _BASES:
        if isinstance(value, base):
            return base(value)
    return _refuse_type(value, where)


def _plain_mapping(value: Mapping[Any, Any], where: str, tensor: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
    pairs = [
        (plain(key, f"the key {key!r} of {where}"), plain(item, f"{where}[{key!r}]", tensor=tensor))
        for key, item in value.items()
    ]
    if isinstance(value, defaultdict) and value.default_factory in _FACTORIES.values():
        return defaultdict(value.default_factory, pairs)
    if type(value) is not OrderedDict:
        return Counter(dict(pairs)) if type(value) is Counter else dict(pairs)
    ordered = OrderedDict(pairs)
    # Module.state_dict() stores the modules' versions in an attribute, which load_state_dict() reads to convert old
    # weights.
    ordered.__dict__.update({name: plain(item, f"{where}.{name}") for name, item in value.__dict__.items()})
    return ordered


def _plain_tensor(value: Tensor, where: str) -> Tensor:
    found = value.detach()
    if found.is_meta:  # the tensor has no data
        return _refuse_type(value, where)
    if is_traceable_wrapper_subclass(found):
        # A library allows its classes with add_safe_globals. A DTensor is rejected, because it is only a shard.
        safe = type(found) in get_safe_globals() and not hasattr(found, "device_mesh")
        return found if safe else _refuse_type(value, where)
    if type(found) is not Tensor:
        found = found.as_subclass(Tensor)
    if _has_storage(found) and found.untyped_storage().nbytes() != found.nbytes:
        found = found.clone()  # otherwise the complete storage would be written
    return found


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not is_traceable_wrapper_subclass(tensor)


def _tensor_from_array(value: np.ndarray[Any, Any], where: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
    except TypeError:
        return _refuse_type(value, where)


def _with_parts(value: Any, function: Callable[[Any], Any]) -> Any:
    """Map the items of a container, and the attributes of an OrderedDict."""
    value = map_items(value, lambda _, item: function(item))
    if type(value) is OrderedDict:
        vars(value).update({name: function(item) for name, item in vars(value).items()})
    return value


def for_file(value: Any) -> Any:
    """Replace the deques and defaultdicts of a plain state by OrderedDicts with an attribute that describes them.

    ``torch.load(weights_only=True)`` creates neither, and of the containers that it creates only an OrderedDict may
    have attributes. :func:`from_file` is the inverse.
    """
    value = _with_parts(value, for_file)
    if type(value) is deque:
        marked, mark = OrderedDict(enumerate(value)), ["deque", value.maxlen]
    elif type(value) is defaultdict:
        marked, mark = OrderedDict(value), ["defaultdict", getattr(value.default_factory, "__name__", None)]
    else:
        return value
    marked.__dict__[_MARK] = mark
    return marked


def from_file(value: Any) -> Any:
    """Return a state whose deques and defaultdicts :func:`for_file` had replaced."""
    value = _with_parts(value, from_file)
    if type(value) is not OrderedDict or _MARK not in value.__dict__:
        return value
    kind, argument = value.__dict__[_MARK]
    return deque(value.values(), argument) if kind == "deque" else defaultdict(_FACTORIES[argument], value)


def _refuse_type(value: Any, where: str) -> NoReturn:
    kind = type(value)
    dtype = f" of {value.dtype}" if isinstance(value, (np.ndarray, np.generic, Tensor)) else ""
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}{dtype}, which a checkpoint can't contain: only tensors, "
        "numbers, strings and containers of these are allowed, so that reading a checkpoint runs no code. Make "
        "state_dict() return these types, and load_state_dict() create the object again."
    )


class HostCopy:
    """Copy states into host memory, and reuse the memory of the previous copy.

    Allocating memory takes longer than copying: 200 MB take 14 ms to copy into reused pages, and 100 to 450 ms into new
    pages. For tensors on a GPU, the memory is pinned (:func:`pinned_like`). Copies then run at the speed of the bus,
    and wait for the device only once, at the end.
    """

    def __init__(self) -> None:
        self._buffers: dict[Any, list[Tensor]] = {}  # by device type, shape, strides and dtype

    def copy(self, state: Any) -> Any:
        """Return ``plain(state)`` with a copy of every tensor. The result is valid until the next call.

        Parameters
        ----------
        state : object
            Tensors on any device. Tied weights are copied once and remain tied.

        Raises
        ------
        CheckpointError
            As in :func:`plain`.
        """
        tensors, state = _tensors_and_state(state)
        distinct = {_identity(tensor): tensor for tensor in tensors}
        copied = self._reserved(distinct)
        for key, tensor in distinct.items():
            if key in copied:
                copied[key].copy_(tensor, non_blocking=tensor.is_cuda)
            else:
                copied[key] = tensor.cpu().clone()
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # the copies above were only queued
        in_order = iter(tensors)  # plain() visits tensors in the same order each time
        return plain(state, tensor=lambda _: copied[_identity(next(in_order))])

    def _reserved(self, tensors: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Return host memory for each tensor with a storage.

        Memory of the previous copy is reused where shape, strides and dtype match.
        """
        free, self._buffers = self._buffers, {}
        reserved, pinned = {}, {}
        for key, tensor in tensors.items():
            if not _has_storage(tensor):
                continue
            if free.get(_memory_form(tensor)):
                reserved[key] = free[_memory_form(tensor)].pop()
            elif tensor.is_cuda:
                pinned[key] = tensor
            else:
                reserved[key] = torch.empty_like(tensor, device="cpu")
        reserved.update(zip(pinned, pinned_like(list(pinned.values())), strict=True))
        for key, buffer in reserved.items():
            self._buffers.setdefault(_memory_form(tensors[key]), []).append(buffer)
        return reserved


def _memory_form(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.is_cuda, tensor.shape, tensor.stride(), tensor.dtype)


_BLOCK = 1 << 26
_ALIGNED = 64


def _pinned_block(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def pinned_like(tensors: Sequence[Tensor], allocate: Callable[[int], Tensor] = _pinned_block) -> list[Tensor]:
    """Return uninitialised pinned tensors with the shapes, strides and dtypes of others, each with its own storage.

    torch rounds each pinned allocation up to a power of two: a model may take twice its size. Therefore, tensors share
    blocks whose sizes are powers of two; smaller tensors fill what larger ones leave.

    Parameters
    ----------
    tensors : sequence of Tensor
        Tensors whose elements fill their storage.
    allocate : callable
        Returns a block of bytes.
    """
    found: dict[int, Tensor] = {}
    blocks: list[tuple[Any, int]] = []  # a block as an array, and the number of its bytes in use
    left = sum(tensor.nbytes for tensor in tensors)
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].nbytes):
        like, size = tensors[i], tensors[i].nbytes
        if not size:
            found[i] = torch.empty_like(like, device="cpu")
            continue
        number = next((n for n, (block, used) in enumerate(blocks) if used + size <= len(block)), len(blocks))
        if number == len(blocks):
            blocks.append((allocate(1 << (max(size, min(left, _BLOCK)) - 1).bit_length()).numpy(), 0))
        block, used = blocks[number]
        # Not a view of the block's tensor: a checkpoint would contain the whole block.
        flat = torch.frombuffer(block, dtype=like.dtype, count=like.numel(), offset=used)
        found[i] = flat.as_strided(like.shape, like.stride())
        blocks[number] = (block, -(-(used + size) // _ALIGNED) * _ALIGNED)
        left -= size
    return [found[i] for i in range(len(tensors))]


def _tensors_and_state(state: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of ``plain(state)``, in the order in which ``plain`` visits them, and the state itself."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    return tensors, plain(state, tensor=keep)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return a value that is equal for two tensors with the same bytes and shape, such as tied weights."""
    if not _has_storage(tensor) or not tensor.numel():
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
