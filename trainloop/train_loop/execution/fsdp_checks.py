"""Reject models, options and views of parameters that ``fsdp`` can't train, before any process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainloop._support.nested import tensors_of
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import all_optimizers
from trainloop.optim.parameters import criterion_modules
from trainloop.parallel.sharded.misuse import cannot_step
from trainloop.parallel.sharded.shards import stays_whole, storage_address
from trainloop.parallel.sharded.undoing import can_step_muon, can_undo
from trainloop.parallel.sharded.units import check_parameters, units_of
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.training.trained import hooked_parameters

# These optimizers need a full parameter at once, or use in-place operations that DTensor lacks (torch 2.13).
_NOT_SHARDABLE = ("LBFGS", "SparseAdam", "Adafactor", "Rprop", *(() if can_step_muon() else ("Muon",)))
_FUSED = ("Adam", "AdamW")  # the kernel of these optimizers supports DTensor


def check_shardable(loop: LoopState, *, gather: bool, wrapper_args: dict[str, Any]) -> None:
    """Before any process starts, raise an error if ``fsdp`` can't train this loop.

    Raises
    ------
    ConfigurationError
        If ``fsdp`` can't train this loop; the message names an alternative.
    """
    model, options, optimizers = loop.model, loop.options, all_optimizers(loop.optimizer)
    if not gather and not any(hasattr(callback, "last_state") for callback in loop.callbacks):
        raise ConfigurationError(
            "fit(gather=False) keeps trained weights only in checkpoints, but callbacks has no ModelCheckpoint. "
            "Add one, or leave gather out."
        )
    can_undo()
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if gather and meta is not None:
        raise ConfigurationError(
            f"{meta} is on the meta device, which has no memory for the trained weights. Use fit(gather=False) with a "
            "ModelCheckpoint, or build the model on the CPU."
        )
    if options.compile_args is not None or options.compiles_step:
        given = "'step'" if options.compiles_step else "True"
        raise ConfigurationError(
            f"compile={given} with gpu_mode='fsdp': a graph of the whole model can't gather the sharded blocks one by "
            "one. Compile the blocks yourself, `for block in model.blocks: block.compile()`, and leave compile out."
        )
    _check_modules(model, wrapper_args.get("shard"))
    parts = [part for module in criterion_modules(loop.criterion) for part in module.modules()]
    _check_views(model, [*loop.callbacks, loop.criterion, *parts])
    units_in = getattr(wrapper_args.get("mp_policy"), "param_dtype", None)
    if options.amp.chosen and {units_in, options.amp.dtype} == {torch.float16, torch.bfloat16}:
        raise ConfigurationError(
            f"use_amp runs operations in {options.amp.dtype}, but mp_policy in fsdp_model_args runs the sharded blocks "
            f"in {units_in}. Use only one (mp_policy also makes exchanges smaller), or the same dtype in both."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, tuple(getattr(torch.optim, n) for n in _NOT_SHARDABLE if hasattr(torch.optim, n))):
            raise cannot_step(optimizer)
        kernel = type(optimizer).__module__.startswith("torch.optim.") and type(optimizer).__name__ not in _FUSED
        if kernel and any(group.get("fused") for group in optimizer.param_groups):
            raise ConfigurationError(
                f"{type(optimizer).__name__}(fused=True) with gpu_mode='fsdp': torch has no fused kernel for "
                "sharded parameters. Leave fused out, or use AdamW."
            )


def _check_views(model: nn.Module, holders: Iterable[Any]) -> None:
    """Raise an error for tensors that share the memory of parameters; shards have other memory.

    They may be parameters or buffers themselves, attributes of callbacks and a criterion, or a module's flat tensor of
    several parameters. (Modules have other such attributes that each forward replaces, as with
    ``nn.utils.spectral_norm``.)
    """
    named = {n: p for n, p in model.named_parameters() if not stays_whole(p) and _has_memory(p)}
    owners = {storage_address(p): name for name, p in named.items()}
    parameters = set(map(id, named.values()))
    held: list[tuple[str, Any]] = list(model.named_buffers())
    for holder in holders:
        held += [(f"{type(holder).__name__}.{key}", value) for key, value in getattr(holder, "__dict__", {}).items()]
    if len(owners) < len(named):
        _check_overlaps(named)
        flat = Counter(map(storage_address, named.values()))
        of_modules = [(f"{type(m).__name__}.{key}", value) for m in model.modules() for key, value in vars(m).items()]
        own = [(where, t) for where, v in of_modules for t in tensors_of(v) if not isinstance(t, nn.Parameter)]
        held += [(where, tensor) for where, tensor in own if _has_memory(tensor) and flat[storage_address(tensor)] > 1]
    for where, value in held:
        for tensor in tensors_of(value):
            if id(tensor) in parameters or not _has_memory(tensor):
                continue
            if (name := owners.get(storage_address(tensor))) is not None:
                raise ConfigurationError(
                    f"gpu_mode='fsdp': {where} has a view of {name} (such as p.data or a value of state_dict()). "
                    "Shards replace the parameter, so the view would keep the values from before the training. Keep "
                    "the parameter itself or, for these values, a clone()."
                )


def _has_memory(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.is_meta and tensor.numel() > 0 and storage_address(tensor) != 0


def _check_overlaps(named: Mapping[str, Tensor]) -> None:
    """Raise an error for two parameters that have elements in common, such as a matrix and its transposed view."""
    used: dict[tuple[int, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, p in named.items():
        used.setdefault((storage_address(p), p.dtype), []).append((name, p.detach()))
    for sharing in used.values():
        sharing.sort(key=lambda item: item[1].storage_offset())
        ends = [_end_in_storage(p) for _, p in sharing]
        if all(end <= p.storage_offset() for end, (_, p) in zip(ends, sharing[1:], strict=False)):
            continue  # parts of one flat tensor, one after another
        owners = torch.full((max(ends),), -1, dtype=torch.int32, device="cpu")
        for i, (name, p) in enumerate(sharing):
            elements = owners.as_strided(p.shape, p.stride(), p.storage_offset())
            if (other := int(elements.max())) >= 0:
                raise ConfigurationError(
                    f"gpu_mode='fsdp': {name} and {sharing[other][0]} share memory (as after `b.data = a.data.t()`), "
                    "but each would have shards of its own, so that they would get different values. Use one parameter "
                    "in both places, transposed in the forward if necessary, or gpu_mode='ddp'."
                )
            elements.fill_(i)


def _end_in_storage(p: Tensor) -> int:
    """Return the position after a tensor's last element in its storage."""
    return int(p.storage_offset()) + sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True)) + 1


def _check_modules(model: nn.Module, shard: Any) -> None:
    """Raise an error for features of a model that ``fully_shard`` would silently ignore."""
    done: set[int] = set()
    for name, unit in [*units_of(model, shard), (type(model).__name__, model)]:
        own = {n: p for n, p in unit.named_parameters() if id(p) not in done and not stays_whole(p)}
        check_parameters(name, own)
        done.update(map(id, own.values()))
    for name, p in model.named_parameters():
        for _, made_by in hooked_parameters([(name, p)]):
            if not stays_whole(p):
                raise ConfigurationError(
                    f"gpu_mode='fsdp': {name} has a hook for its gradient ({made_by}), which would not be called, "
                    "because shards replace the parameter. Change gradients in a callback's on_after_gradient_update, "
                    "where p.grad is sharded, or in a module's register_full_backward_hook."
                )
    for name, part in model.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise ConfigurationError(
                f"gpu_mode='fsdp': {name} is an {type(part).__name__} with max_norm={part.max_norm}, which changes its "
                "weight in forward. In fsdp, forward has a gathered copy of the weight, so the change would be lost. "
                "Leave max_norm out and scale rows in a callback's on_after_optimizer_step, or use gpu_mode='single'."
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad:
            raise ConfigurationError(
                f"gpu_mode='fsdp': {name} is an {type(part).__name__} with sparse=True, but sparse gradients can't be "
                "reduced over shards. Use sparse=False, or gpu_mode='ddp'."
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"gpu_mode='fsdp': {name or type(model).__name__} is a TorchScript module, which can't be sharded. Use "
                "the module that it was made from, or gpu_mode='ddp'."
            )
