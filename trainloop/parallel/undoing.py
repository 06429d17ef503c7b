"""Undo ``fully_shard``. torch itself has no function that undoes it.

``fully_shard`` changes a module in place: it replaces its class and adds hooks and marks. ``fit`` must return the same
model object without these changes. This module has all private torch names that undoing needs (checked in torch 2.6 to
2.13). If a later torch renames one, :func:`can_undo` reports it before anything is sharded.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from trainloop.errors import ConfigurationError
from trainloop.parallel.shards import MARKS

__all__ = ["can_undo", "parameter_groups", "undo_fully_shard"]


_NEEDED = {
    "torch.distributed._composable_state": ("_module_state_mapping",),
    "torch.distributed._composable.contract": ("REGISTRY_KEY", "STATE_KEY"),
    "torch.distributed.fsdp": ("FSDPModule",),
}


@cache
def can_undo() -> None:
    """Check that this torch has the private names that :func:`undo_fully_shard` needs.

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
        missing = missing or next((f"{module} has no {name}" for name in names if not hasattr(found, name)), "")
    if missing:
        raise ConfigurationError(
            f"gpu_mode='fsdp' with torch {torch.__version__}: {missing}, which is needed to undo the sharding. Install "
            "torch 2.6 to 2.15, or use gpu_mode='ddp'."
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
