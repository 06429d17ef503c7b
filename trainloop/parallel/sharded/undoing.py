"""Undo ``fully_shard``, and correct torch itself: gradients that it would leave out, and operations on shards.

``fully_shard`` changes a module in place: it replaces its class and adds hooks and marks. ``fit`` must return the same
model object without these changes. This module has all private torch names that this needs (checked in torch 2.6 to
2.15). If a later torch renames one, :func:`can_undo` reports it before anything is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from trainloop._support.nested import tensors_of
from trainloop.distributed.ranks import refuse_on_one_rank
from trainloop.errors import ConfigurationError
from trainloop.parallel.sharded.shards import MARKS

_ON_CPU = "2.10"  # the first torch whose numbers on the CPU are right
_NEEDED = {
    "torch.distributed._composable_state": ("_module_state_mapping",),
    "torch.distributed._composable.contract": ("REGISTRY_KEY", "STATE_KEY"),
    "torch.distributed.fsdp": ("FSDPModule",),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": ("FSDPParamGroup.post_backward", "FSDPParamGroup.unshard"),
    "torch.distributed.tensor": ("DTensor._op_dispatcher._custom_op_handlers",),
}


@cache
def can_undo() -> None:
    """Check that this torch has the private names that this module needs.

    Raises
    ------
    ConfigurationError
        If a name is missing; the error names it.
    """
    missing = ""
    for module, names in _NEEDED.items():
        try:
            found = import_module(module)
        except ImportError as error:
            missing = str(error)
            break
        missing = missing or next((f"{module} has no {name}" for name in names if not _has_attribute(found, name)), "")
    if missing:
        raise ConfigurationError(
            f"gpu_mode='fsdp' with torch {torch.__version__}: {missing}, which is needed to undo the sharding. Install "
            "torch 2.6 to 2.15, or use gpu_mode='ddp'."
        )


def _has_attribute(module: Any, name: str) -> bool:
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True


def correct_operations() -> None:
    """Make some operations on sharded tensors those of the whole tensor. (torch 2.6 to 2.15)

    ``item()``, ``float()`` and ``bool()``: torch returns this rank's part, such as the norm of its shard for
    ``p.grad.norm().item()``. This is an exchange between the tensor's ranks, like other operations on sharded tensors.

    ``view_as_real`` and ``view_as_complex``, by which optimizers change complex parameters: if ranks have parts of
    different sizes, torch gathers the tensor, and the change of the gathered copy is lost.

    Muon makes each matrix of its updates orthogonal, in bfloat16. On shards, the sums of its iteration would be rounded
    in another order, and matrices with fewer rows than ranks could not be stepped.
    """
    from torch.distributed.tensor import DTensor

    if can_step_muon() and not isinstance(muon := torch.optim._muon._zeropower_via_newtonschulz, partial):
        torch.optim._muon._zeropower_via_newtonschulz = partial(_of_whole_matrix, muon)
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _whole_number
    handlers[torch.ops.aten.view_as_real.default] = _view_of_parts
    handlers[torch.ops.aten.view_as_complex.default] = _view_of_parts


def can_step_muon() -> bool:
    """Return True if torch has Muon, and :func:`correct_operations` can make its numbers those of whole matrices."""
    return _has_attribute(torch.optim, "_muon._zeropower_via_newtonschulz")


def _of_whole_matrix(function: Callable[..., torch.Tensor], update: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(update, DTensor):
        return function(update, *args, **kwargs)
    whole = function(update.full_tensor(), *args, **kwargs)
    return distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)


def _whole_number(operation: Any, args: Any, kwargs: Any) -> Any:
    if not all(placement.is_replicate() for placement in args[0].placements):
        refuse_on_one_rank("item() of a sharded tensor")
    return operation(args[0].full_tensor())


def _view_of_parts(operation: Any, args: Any, kwargs: Any) -> Any:
    """Return ``view_as_real`` or ``view_as_complex`` as a view of this rank's part."""
    from torch.distributed.tensor import DTensor

    whole = args[0]
    mesh, placements = whole.device_mesh, whole.placements
    of_whole = operation(torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta"))
    part = operation(whole.to_local())
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=of_whole.shape, stride=of_whole.stride())


def check_cpu() -> None:
    """Check that ``fully_shard`` of this torch trains on the CPU.

    Torch 2.6 does not support it. Torch 2.7 and 2.8 add up float32 gradients instead of averaging them: their Gloo
    computes the sum where it is asked for the average. Torch 2.9 computes norms of float64 with float32 accuracy.

    Raises
    ------
    ConfigurationError
    """
    if torch.__version__ < TorchVersion(_ON_CPU):
        raise ConfigurationError(
            f"gpu_mode='fsdp' on the CPU: PyTorch {torch.__version__} supports it on GPUs only. Install PyTorch "
            f"{_ON_CPU} or newer, or use gpu_mode='ddp'."
        )


def undo_fully_shard(part: nn.Module) -> None:
    """Remove the class, the hooks and the marks of ``fully_shard`` from one module of a model; keep its parameters."""
    from torch.distributed import _composable_state
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed.fsdp import FSDPModule

    for name in MARKS:
        part.__dict__.pop(name, None)
    if not isinstance(part, FSDPModule):
        return
    state = part._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in parameter_groups(part):
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
    part.__class__ = type(part).__mro__[2]  # after FSDP<class> and FSDPModule
    _composable_state._module_state_mapping.pop(part, None)
    for key in (STATE_KEY, REGISTRY_KEY):
        part.__dict__.pop(key, None)


def parameter_groups(part: Any) -> list[Any]:
    """Return the ``FSDPParamGroup``s of a unit. Up to about 2.9, torch stores a single one, later a list."""
    state = part._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reduce_late_gradients(output: Any, groups: list[Any]) -> None:
    """Make the backward of a forward's output reduce gradients that a unit gets after its own backward.

    torch reduces a unit's gradients once, when it has the gradients of the unit's inputs. With a gradient penalty, the
    gradient of a weight is complete only later, and torch would leave it out: without an error, the optimizer would
    skip the parameter. Marked as unfinished, a unit is completed at the end of the backward, by torch itself.

    Must be called before torch adds its own hooks to the output, so that the mark is set before torch completes units.
    """
    queued = False

    def finish() -> None:
        nonlocal queued
        queued = False
        for group in groups:
            if any(_has_gradient(p) for p in group.fsdp_params):
                group._training_state = type(group._training_state).IDLE

    def queue(_: torch.Tensor) -> None:
        nonlocal queued
        if not queued:
            queued = True
            torch.autograd.Variable._execution_engine.queue_callback(finish)

    for tensor in tensors_of(output):
        if tensor.requires_grad:
            tensor.register_hook(queue)


class GatheredUnits:
    """Notes the order in which this rank gathers units.

    Ranks that gather different units of equal sizes, as two experts, exchange their shards without an error from torch.

    Parameters
    ----------
    groups : list
        All ``FSDPParamGroup``s of a model.
    """

    def __init__(self, groups: list[Any]) -> None:
        self._order = 0
        for i, group in enumerate(groups):
            group.unshard = partial(self._unshard, group, i, group.unshard)

    def take(self) -> int:
        """Return a number of at most 64 bits for the order since the last call; 0 if there is none."""
        order, self._order = self._order, 0
        return order

    def _unshard(self, group: Any, index: int, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        before = group._all_gather_result
        unshard(*args, **kwargs)
        if group._all_gather_result is not before:  # otherwise, it is gathered already
            self._order = hash((self._order, index))


class CompleteUnits:
    """Let ranks' losses depend on different parameters of a unit: those that a loss does not reach get zeros.

    torch packs the gradients that a rank has into one tensor for each unit. With other gradients on another rank, it
    would add up those of different parameters.

    Parameters
    ----------
    groups : list
        All ``FSDPParamGroup``s of a model.
    """

    def __init__(self, groups: list[Any]) -> None:
        self.inside_forward = False
        self.counted: set[int] | None = None
        """``id`` of each shard whose gradients are kept from the present backward; ``None`` for all."""
        self._reached: set[int] = set()
        self._order: list[int] = []
        for i, group in enumerate(groups):
            group.post_backward = partial(self._post_backward, group, i, group.post_backward)

    def take_reached(self) -> tuple[set[int], list[int]]:
        """Return what backward passes have reached on this rank since the last call.

        That is the ``id`` of each shard, and the index of each unit in the order of the exchanges.
        """
        found, self._reached, self._order = (self._reached, self._order), set(), []
        return found

    def _post_backward(self, group: Any, index: int, post_backward: Callable[..., None], *args: Any) -> None:
        if not self.inside_forward and group.reduce_grads:
            trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")]
            reached = {id(p.sharded_param) for p in trained if _has_gradient(p)}
            self._reached |= reached if self.counted is None else reached & self.counted
            # A unit whose backward begins may still reach none of its trained parameters, such as an optional adapter.
            begun = group._training_state is type(group._training_state).PRE_BACKWARD
            exchanged = trained if reached or begun else []
            self._order += [index] if exchanged else []
            for p in exchanged:
                if id(p.sharded_param) not in reached:
                    p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
        post_backward(*args)


def drop_gathered_gradients(groups: list[Any]) -> None:
    """Drop gradients of gathered parameters that were not reduced; else the next backward would add to them."""
    for group in groups:
        for p in group.fsdp_params:
            whole = getattr(p, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
                if p.unsharded_accumulated_grad is not None:  # since torch 2.15, this is whole.grad itself
                    p.unsharded_accumulated_grad = None


def _has_gradient(parameter: Any) -> bool:
    """Return True if an ``FSDPParam`` has a gradient that was not reduced."""
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and (whole.grad is not None or parameter.unsharded_accumulated_grad is not None)
