"""Sharded tensors (``DTensor``): get this rank's shard or the full tensor, and shard other tensors in the same way.

``torch.distributed.tensor`` takes half a second to import, so it is imported only once such a tensor exists.
"""

from __future__ import annotations

import copy
import math
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainloop.distributed.objects import exchange_ints, gather_object
from trainloop.distributed.tensors import reduce_in_place
from trainloop.errors import ConfigurationError

ShardSlice = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor, by dimension."""

MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes that torch (2.6 to 2.13) gives to every module in a unit."""


def is_sharded(tensor: object) -> bool:
    """Return True if an object is a ``DTensor``."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def unlike_on_ranks(shards: Mapping[str, Sequence[Tensor]]) -> list[str]:
    """Return the names of sharded tensors that ranks do not have alike, as when a hook keeps one on rank 0 only.

    Collective. The result is the same on every rank.
    """
    mine = {name: [tuple(tensor.shape) for tensor in tensors] for name, tensors in shards.items()}
    own = zlib.crc32(repr(sorted(mine.items())).encode())
    if all(theirs == own for (theirs,) in exchange_ints([own])):
        return []
    everyone = gather_object(mine)
    names = {name for theirs in everyone for name in theirs}
    return sorted(name for name in names if len({repr(theirs.get(name)) for theirs in everyone}) > 1)


def stays_whole(parameter: Tensor) -> bool:
    """Return True if every rank has the full parameter, since it is a scalar or empty, which torch can't divide.

    It is empty, too, while it is lazy and has no shape yet.
    """
    return is_lazy(parameter) or parameter.ndim == 0 or parameter.numel() == 0


def is_mark_of_sharding(name: str) -> bool:
    """Return True if a module's attribute is one that ``fully_shard`` adds."""
    return name in MARKS or name.startswith("__composable_api")


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor, which shares its memory; return a plain tensor unchanged."""
    if not is_sharded(tensor):
        # A gradient itself: what changes a detached sparse tensor in place can replace its entries, and misses these.
        return cast(Tensor, tensor.detach() if tensor.requires_grad else tensor)
    with torch.no_grad():  # to_local() then returns the shard itself
        return cast(Tensor, tensor.to_local().detach())


def full_tensor(tensor: Any) -> Tensor:
    """Return the full tensor on every rank of its mesh.

    Collective for a sharded tensor; a plain one is returned unchanged.
    """
    full: Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor
    return full


def gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor on the CPU of rank 0, and an empty tensor on other ranks. Collective.

    A plain tensor is returned unchanged.
    """
    if not is_sharded(tensor):
        return tensor
    full = full_tensor(tensor)
    return full.new_empty(0, device="cpu") if torch.distributed.get_rank() else full.cpu()


def shard_like(value: Tensor, like: Any) -> Any:
    """Shard a full tensor in the same way, and on the same device, as another tensor, without an exchange.

    Parameters
    ----------
    value : Tensor
        Tensor with the shape of ``like``; only this rank's part of it is read. If it is already sharded, it is only
        moved.
    like : DTensor or Tensor
        Tensor with the sharding and device of the result. If ``like`` is a plain tensor, the result is a full tensor.
    """
    if not is_sharded(like) or is_sharded(value):
        return value.detach().to(like.device)
    part = _own_part(value.detach(), like)
    part = part.to(like.to_local().device, copy=True, memory_format=torch.contiguous_format)
    return spread_like(part, like, value.shape)


def state_like(parameter: Any, value: Tensor) -> Any:
    """Place a full tensor of an optimizer's state like its parameter, without an exchange.

    If the parameter is sharded, a tensor of the same shape is sharded in the same way, and so is one with as many rows,
    such as the means of a matrix's rows in Adafactor: the optimizer may change it in place by a sharded result. A
    tensor of another shape, such as the means of columns, is full on every rank; it is a ``DTensor``, too, because the
    optimizer combines it with shards.
    """
    if not is_sharded(parameter) or is_sharded(value) or not value.ndim:
        return value
    value = _of_plain_type(value.detach())  # a library's own type (torchao's) can't be cut at each row
    if value.shape == parameter.shape or _has_rows_of(parameter, value):
        return shard_like(value, parameter)
    full = parameter.detach().new_empty(value.shape, dtype=value.dtype)  # on the device of the shards
    full.to_local().copy_(value)
    return full


def _has_rows_of(parameter: Any, value: Tensor) -> bool:
    """Return True if a tensor of another shape can be divided as a parameter whose shards are on the mesh's device."""
    cut = [placement.dim for placement in parameter.placements if placement.is_shard()]
    return parameter.to_local().device.type == parameter.device_mesh.device_type and all(
        dim < value.ndim and value.shape[dim] == parameter.shape[dim] for dim in cut
    )


def without_terms(tensor: Any) -> Any:
    """Return a sharded tensor with the sum on each rank if each rank has a term of it. Collective in this case."""
    from torch.distributed.tensor import Replicate

    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def is_first_replica(tensor: Any) -> bool:
    """Return True if no rank before this one has the same part of a sharded tensor."""
    coordinates = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    return all(place == 0 or placement.is_shard() for placement, place in coordinates)


def slice_of(tensor: Any) -> ShardSlice:
    """Return offsets and sizes of this rank's shard within the full tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # not public up to 2.13

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)


def write_shard(tensor: Any, into: Tensor) -> bool:
    """Write this rank's shard of a tensor into the full tensor, in memory that the ranks share; no exchange.

    Returns
    -------
    bool
        True if all ranks together write the full tensor; False, without writing, if each rank has a term of a sum.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        return False
    if is_first_replica(tensor):
        _own_part(into, tensor).copy_(local_shard(tensor))
    return True


def _own_part(value: Tensor, like: Any) -> Tensor:
    """Return a view of a full tensor: the part that corresponds to this rank's shard of ``like``."""
    mesh = like.device_mesh
    for dim, placement in enumerate(like.placements):
        if placement.is_shard():
            size, rank = mesh.size(dim), mesh.get_local_rank(dim)
            chunks = value.chunk(size, placement.dim)
            value = chunks[rank] if rank < len(chunks) else value.narrow(placement.dim, 0, 0)
    return value


def free(tensor: Any) -> None:
    """Release the memory of this rank's shard; the tensor must no longer be used.

    Memory that torch can't resize, such as pinned memory, is released with the last tensor that uses it, and so is that
    of tensors without a storage of their own (torchao's).
    """
    part = local_shard(tensor)
    storage = part.untyped_storage()
    if type(part) is Tensor and storage.resizable():
        storage.resize_(0)


def spread_like(part: Tensor, like: Any, shape: torch.Size) -> Any:
    """Return a tensor of the given shape, sharded like ``like``, from this rank's ``part``, without an exchange."""
    from torch.distributed.tensor import DTensor

    if part.device.type != like.device_mesh.device_type:  # the part is on the host, and from_local would move it
        made: Any = torch.empty_like(like, dtype=part.dtype)
        made.to_local().copy_(part)
        return made
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=strides)


def of_plain_type(tensor: Any) -> Any:
    """Return a sharded tensor whose shards are plain, from one with shards of a library's own type (torchao's)."""
    part = local_shard(tensor)
    plain = _of_plain_type(part)
    return tensor if plain is part else spread_like(plain, tensor, tensor.shape)


def _of_plain_type(part: Tensor) -> Tensor:
    """Return a tensor with the values of one of a library's own type; a plain tensor is returned itself."""
    if type(part) is Tensor:
        return part
    return torch.empty(part.shape, dtype=part.dtype, device=part.device).copy_(part)


def storage_address(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor shares with its views.

    It is 0 for a tensor without a storage: a sparse one, or one of a library's own type (torchao's).
    """
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
    except RuntimeError:
        return 0


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply ``function`` to each tensor in nested dicts, lists and tuples; return other objects unchanged."""
    if isinstance(value, Tensor):
        return function(value)
    return map_items(value, lambda _, item: map_tensors(item, function))


def map_items(value: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return a dict, list, tuple or deque of ``function(key or index, item)`` of each item; other objects unchanged.

    Unlike :func:`~trainloop._support.nested.map_parts` it copies no objects of other types: a state may contain
    user objects, which must remain the same objects.
    """
    if isinstance(value, dict):
        return with_items(value, {key: function(key, item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(function(i, item) for i, item in enumerate(value))
    if type(value) is deque:
        return deque((function(i, item) for i, item in enumerate(value)), value.maxlen)
    return value


def with_items(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return ``items`` as a dictionary of the type of ``like``, with its attributes (a state's module versions)."""
    if type(like) not in (OrderedDict, Counter, defaultdict):
        return items
    made = copy.copy(like)
    made.clear()
    made.update(items)
    return made


def norms_over_ranks(tensors: Sequence[Any], order: float = 2.0) -> list[Tensor]:
    """Return, on every rank, the norm of each full tensor, of which ranks may have shards. Collective.

    All tensors with the same sharding need one exchange. The norm of an empty part (of a tensor that is smaller than
    the number of ranks) is zero here; torch has no infinity norm of an empty tensor (2.13).
    """
    norms: list[Tensor] = []
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        part = local_shard(tensor)
        norm = torch.linalg.vector_norm(part, order) if part.numel() else part.real.new_zeros(())
        norms.append(norm if norm.dtype.itemsize > 2 else norm.float())
        if is_sharded(tensor):
            shards = tuple(dim for dim, placement in enumerate(tensor.placements) if placement.is_shard())
            alike.setdefault((tensor.device_mesh, shards, norm.device, norms[-1].dtype), []).append(i)
    for (mesh, shards, *_), places in alike.items():
        together = torch.stack([norms[i] for i in places])
        together = together if math.isinf(order) else together**order
        for dim in shards:
            reduce_in_place(together, "max" if math.isinf(order) else "sum", mesh.get_group(dim))
        together = together if math.isinf(order) else together ** (1 / order)
        for i, norm in zip(places, together.unbind(), strict=True):
            norms[i] = norm
    return norms


def clip_gradients(
    parameters: Iterable[Tensor], most: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, **others: Any
) -> None:
    """Apply ``nn.utils.clip_grad_norm_`` with the norm of all gradients, even if only some are sharded."""
    parameters, norm_type = list(parameters), float(norm_type)  # torch accepts 'inf', too
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(map(is_sharded, gradients)):
        nn.utils.clip_grad_norm_(parameters, most, norm_type, error_if_nonfinite, **others)
        return
    norms = norms_over_ranks(gradients, norm_type)
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)  # as in torch
    for gradient in gradients:
        part = local_shard(gradient)
        part.mul_(factor.to(part.device, part.real.dtype))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sums(tensors: list[Tensor]) -> list[int]:
    """Return a checksum of each tensor's bits that does not depend on the order of summation; waits once per device."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append((i, _bit_sum(tensor.detach())))
    sums = [0] * len(tensors)
    for parts in by_device.values():
        for (i, _), value in zip(parts, torch.stack([part for _, part in parts]).tolist(), strict=True):
            sums[i] = value
    return sums


def _bit_sum(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).contiguous()
    size = flat.element_size()
    # Eight bytes at a time where possible: torch sums narrower integers thirty times slower (on the CPU).
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % (8 // size) if size < 8 else flat.numel()
    rest = flat[whole:].view(_INTEGERS[size]).sum(dtype=torch.int64)
    return flat[:whole].view(torch.int64).sum() + rest if whole else rest


# -- sparse tensors ----------------------------------------------------------------------------------------------------


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the data: indices and values of a sparse tensor, or the tensor itself."""
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # a layout of a backend, such as MKL-DNN's


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor of any layout."""
    return sum(part.nbytes for part in dense_parts(tensor))


# -- references from before the sharding -------------------------------------------------------------------------------


class _Reference(nn.Parameter):
    """A parameter that was replaced by a shard: what is done with it is done with the shard.

    Callbacks, criteria and optimizers may refer to parameters of the model. Without this, they would read old values
    and change nothing.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GRADIENT:
            return func(_shard_of(args[0]), *map(resolved, args[1:]))
        return func(*map(resolved, args), **{key: resolved(value) for key, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name == _PLACE:
            raise AttributeError(name)
        return getattr(resolved(self), name)


_PLACE = "_tt_place"
_GRAD: Any = Tensor.grad  # a descriptor of the class
_GRADIENT = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)


def _shard_of(reference: Any) -> Any:
    """Return the shard for which a former parameter stands, even while its unit is whole: only a shard has a gradient.

    Between a forward and its backward, a root unit is whole, and scripts often clear gradients there.
    """
    module, name, known = vars(reference)[_PLACE]
    now = module._parameters[name]
    return now if is_sharded(now) else known


def resolved(value: Any) -> Any:
    """Return the shard for which a former parameter stands; return other values, and tuples and lists, with theirs."""
    if type(value) is _Reference:
        module, name, _ = vars(value)[_PLACE]
        return module._parameters[name]
    if type(value) in (list, tuple):  # of several tensors, as in torch.stack()
        return type(value)(map(resolved, value))
    return value


def step_shards(optimizer: torch.optim.Optimizer) -> None:
    """Replace former parameters in an optimizer's groups, such as a group that a callback has added, by their shards.

    Raises
    ------
    ConfigurationError
        If the optimizer would step a shard twice, which torch refuses for parameters.
    """
    if not any(type(p) is _Reference for group in optimizer.param_groups for p in group["params"]):
        return
    for group in optimizer.param_groups:
        group["params"] = resolved(group["params"])
    for former in [p for p in optimizer.state if type(p) is _Reference]:
        optimizer.state[resolved(former)] = optimizer.state.pop(former)
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if len({*ids}) < len(ids):
        raise ConfigurationError("some parameters appear in more than one parameter group of an optimizer.")


class References:
    """Let the parameters that a model had before it was sharded stand for its shards.

    Parameters
    ----------
    module : nn.Module
        The sharded model.
    before : mapping from str to nn.Parameter
        Its former parameters by name.
    """

    def __init__(self, module: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
        self._found = []
        for full_name, parameter in before.items():
            owner_name, _, name = full_name.rpartition(".")
            owner = module.get_submodule(owner_name)
            if owner._parameters[name] is not parameter:
                # Weak: unless something else refers to it, its memory is free.
                self._found.append((weakref.ref(parameter), type(parameter), (owner, name)))

    def of_shards(self) -> dict[int, nn.Parameter]:
        """Return the former parameters by the ``id`` of their shards, and by their own."""
        found = [(parameter, owner._parameters[name]) for parameter, _, (owner, name) in self._alive()]
        return {id(key): parameter for parameter, shard in found for key in (parameter, shard)}

    def begin(self) -> None:
        for parameter, _, (owner, name) in self._alive():
            vars(parameter)[_PLACE] = owner, name, owner._parameters[name]
            parameter.__class__ = _Reference

    def end(self) -> None:
        """Let them be parameters of their own again."""
        for parameter, kind, _ in self._alive():
            parameter.__class__ = kind
            vars(parameter).pop(_PLACE, None)

    def _alive(self) -> Iterator[tuple[nn.Parameter, type, tuple[nn.Module, str]]]:
        for reference, kind, place in self._found:
            parameter = reference()
            if parameter is not None:
                yield parameter, kind, place
