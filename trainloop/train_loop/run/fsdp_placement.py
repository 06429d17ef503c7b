"""Run the model on one rank of ``fsdp``: sharded during the run, and gathered at the end if that is requested."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainloop import distributed
from trainloop._launch import place_here
from trainloop._launch.rank_process import result_file
from trainloop._support.nested import stored_items
from trainloop._support.user_line import warn_or_print
from trainloop._transfer.pages import evict_clean_pages, trim
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import inner_optimizers, parameters_of
from trainloop.optim.parameters import own_parameters
from trainloop.parallel import TTFullyShardedDataParallel
from trainloop.parallel.sharded.misuse import RefusesLostChanges, cannot_step, explain_deepcopy, is_of_shards
from trainloop.parallel.sharded.shards import (
    free,
    full_tensor,
    is_sharded,
    local_shard,
    map_tensors,
    of_plain_type,
    state_like,
    stays_whole,
    step_shards,
    unlike_on_ranks,
    write_shard,
)
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.run.placement import Placement, move_state, of_half_precision

if TYPE_CHECKING:
    from trainloop._transfer.result import ResultFile

_LIBRARIES = frozenset(("builtins", "functools", "numpy", "torch", "trainloop", "types"))
_NOT_SEARCHED = (Tensor, nn.Module, LoopState, torch.utils.data.Dataset, type)
_SEARCHED = 1000  # items of a list or dict: longer ones are data
_TRIMMED_AFTER = 32 << 20  # bytes freed by this process that the allocator may still keep


class _Scaler(torch.amp.GradScaler):
    """torch's scaler for sharded and unsharded gradients. It skips a step on all ranks or on none.

    torch's kernel does not accept sharded and unsharded gradients in one call. With sharded gradients only, it missed
    another rank's overflow (torch 2.13, Gloo).
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        for p in parameters_of(optimizer):
            if p.grad is None:
                continue
            if p.grad.dtype == torch.float16 and not allow_fp16:
                raise of_half_precision(optimizer)
            part = local_shard(p.grad)
            if part.numel():
                infinite = part.isfinite().logical_not_().any()
                found_inf.copy_(torch.maximum(found_inf, infinite.to(found_inf)))
                part.mul_(inv_scale.to(part.device))  # offloaded gradients are on another device
        torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX)
        return {found_inf.device: found_inf}


class _OnShards(RefusesLostChanges):
    """Convert whole tensors to Python's and numpy's types, and refuse to pickle a shard."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _CONVERSIONS and is_sharded(args[0]):
            converted = func(full_tensor(args[0]), *args[1:], **(kwargs or {}))
            if isinstance(converted, np.ndarray):
                converted.flags.writeable = False  # numpy then refuses a change, which would not reach the shards
            return converted
        if func == Tensor.__reduce_ex__ and is_sharded(args[0]):
            raise ConfigurationError(
                "a sharded tensor can't be pickled, as torch.save() does: the file would contain one rank's shard. In "
                "fsdp, ModelCheckpoint writes the model, and the optimizers. To write a file yourself, get whole "
                "tensors on all ranks, state = {k: v.full_tensor() if hasattr(v, 'full_tensor') else v for k, v in "
                "model.state_dict().items()}, and save them on one."
            )
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def _explaining_shards(what: str, explained: Callable[[str], ConfigurationError] | None = None) -> Iterator[None]:
    """Raise an error for what the code of a user's method ``what`` does with a shard in vain, or can't do with it.

    ``explained`` may return another error for what torch says.
    """
    try:
        with _OnShards():
            yield
    except Exception as error:
        explain_deepcopy(error)
        if not is_of_shards(error):
            raise
        fact = f"torch says: {str(error) or type(error).__name__}"
        if explained is not None:
            raise explained(fact) from error
        raise ConfigurationError(
            f"{what} uses a parameter of which this rank has a shard only, a DTensor, outside of get_loss, "
            "get_loss_eval and get_predictions. To call the model, call "
            "self.train_loop_obj.predict_with_model([batch]) or evaluate_model_loss on all ranks. To change values, "
            "use operations that work elementwise (p.mul_, p.copy_ of another DTensor), p.to_local(), or "
            "p.full_tensor() on all ranks. A tensor that a callback keeps is full after a resume or an earlier fit: to "
            "shard it again, call distribute_tensor(t, p.device_mesh, p.placements, src_data_rank=None) of "
            f"torch.distributed.tensor. Or make the change before fit, or use gpu_mode='ddp'. {fact}"
        ) from error


_CONVERSIONS = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__format__)


class ShardedPlacement(Placement):
    """Placement of a model whose forward is an exchange between all ranks."""

    collective = True
    scaler_type = _Scaler

    def wrap_again(self) -> None:
        """Do nothing: a unit reads its parameters' ``requires_grad`` at each forward."""

    def steps(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Write the state of optimizers that a callback has assigned into the caller's shapes at the end, too."""
        for optimizer in optimizers:
            for one in (optimizer, *inner_optimizers(optimizer).values()):
                step_shards(one)
                if all(one is not known for known in self.stepped):
                    self.stepped.append(one)

    def check_parameters(self) -> None:
        """Raise an error if a sharded parameter was removed from its module, or replaced by another one."""
        if self._owned is None:
            self._owned = [
                (module, name, path, p)
                for path, module in self.model.named_modules()
                for name, p in module._parameters.items()
                if p is not None and is_sharded(p)
            ]
        for module, name, path, before in self._owned:
            now = module._parameters.get(name)
            # In get_loss, it is one that FSDP has gathered. At the next forward, FSDP puts back its own.
            first, newest = self.registered.get((module, name), (before, before))
            if now is None or (newest is not before and newest is not first):
                raise ConfigurationError(
                    f"{f'{path}.' if path else ''}{name} was {'removed' if now is None else 'replaced'} by a callback "
                    "or in get_loss. In fsdp, units of parameters are sharded when the run begins, and can't change "
                    "later. Write values in place (`with torch.no_grad(): p.copy_(...)`), make the change before fit, "
                    "replace the whole module, or use gpu_mode='ddp'."
                )

    def guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook, with an error for what FSDP ignores or can't do with a shard."""

        @functools.wraps(hook)
        def guard(*args: Any) -> Any:
            with _explaining_shards(getattr(hook, "__qualname__", "a hook")):
                return hook(*args)

        return guard

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Guard the steps of the user's own optimizers, like hooks; those of torch change values in place."""
        kind = type(optimizer)
        if kind.__module__.startswith("torch.optim."):
            return nullcontext()
        return _explaining_shards(f"{kind.__qualname__}.step", partial(cannot_step, optimizer))

    _owned: list[tuple[nn.Module, str, str, nn.Parameter]] | None = None

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Do nothing: gradients are reduced in each micro-batch, since full gradients are as large as the model."""
        return nullcontext()

    def share_buffers(self) -> None:
        """Send rank 0's buffers to all ranks."""
        self.wrapper.share_buffers()

    def make_whole(self, keeping: Iterable[Any], added: dict[str, Any]) -> None:
        """On ranks that send state back, gather sharded tensors that objects keep, even in dicts and lists.

        Those of modules' parameters, and of optimizers' states and groups, get the caller's shapes later.
        """
        keeping = [*keeping, *self.model.modules()]
        kept: list[tuple[str, Any]] = [*map(_class_and_attributes, keeping), ("TrainLoop", added)]
        modules = [owner for owner in keeping if isinstance(owner, nn.Module)]
        optimizers = [owner for owner in keeping if isinstance(owner, torch.optim.Optimizer)]
        others = {id(part) for one in modules for part in (one._parameters, one._buffers, one._modules)}
        others |= {id(part) for one in optimizers for part in (one.state, one.param_groups)}
        seen = set(others)
        for one in optimizers:  # their states may contain objects, such as the projector of GaLore
            name = f"{type(one).__qualname__}.state"
            kept += [(name, vars(part)) for own in list(one.state.values()) for part in _own_objects(own, seen)]
        for _, attributes in kept:  # grows: objects of the user's own may keep others
            kept += map(_class_and_attributes, _own_objects(attributes, seen))
        found: dict[int, tuple[str, Any]] = {}
        for owner, attributes in kept:
            for name, value in list(attributes.items()):
                of_one = functools.partial(_note_tensor, found, f"{owner}.{name}")
                _map_kept([{name: value}], others, of_one)
        of_model: dict[int, Any] = self.wrapper.former_parameters()  # the caller's callbacks get the caller's own
        places: dict[str, list[Any]] = {}
        for key, (place, tensor) in found.items():
            if key not in of_model and is_sharded(tensor):
                places.setdefault(place, []).append(tensor)
        shards, parts = _on_all_ranks(places)
        file = result_file()  # None under a launcher, where every rank keeps its objects
        whole_ones = (full_tensor(one).cpu() for one in shards) if file is None else _in_file(shards, file)
        made = of_model | dict(zip(map(id, shards), whole_ones, strict=True))
        made.update((id(one), local_shard(one).detach().cpu()) for one in parts)
        _map_kept([attributes for _, attributes in kept], others, lambda tensor: made.get(id(tensor), tensor))

    @property
    def evaluated(self) -> Any:
        """Model for evaluation: the wrapper, since only the wrapper can gather parameters."""
        return self.wrapper


def _class_and_attributes(owner: Any) -> tuple[str, dict[str, Any]]:
    return type(owner).__qualname__, vars(owner)


def _note_tensor(found: dict[int, tuple[str, Any]], place: str, tensor: Tensor) -> Tensor:
    found.setdefault(id(tensor), (place, tensor))
    return tensor


def _on_all_ranks(places: dict[str, list[Any]]) -> tuple[list[Any], list[Any]]:
    """Return the sharded tensors that every rank has, in one order, and those that only some ranks have. Collective.

    Rank 0 warns of the latter: nothing can make them whole.
    """
    unlike = unlike_on_ranks(places)
    if unlike and distributed.is_global_zero():
        warn_or_print(
            f"gpu_mode='fsdp': {', '.join(unlike[:3])} {'has' if len(unlike) == 1 else 'have'} other sharded tensors "
            "on rank 0 than on other ranks, for example because a hook keeps them on one rank only. They can't be made "
            "whole: after fit, they contain only a rank's own part. Keep them on every rank."
        )
    common = sorted(places.keys() - set(unlike))
    left = [tensor for place in places.keys() - set(common) for tensor in places[place]]
    return [tensor for place in common for tensor in places[place]], left


def _map_kept(kept: Iterable[dict[str, Any]], others: set[int], function: Callable[[Tensor], Any]) -> None:
    """Replace each tensor in these attributes by ``function(tensor)``, except in values whose ``id`` is in others."""
    for attributes in kept:
        for name, value in list(attributes.items()):
            if id(value) in others:
                continue
            if isinstance(value, dict):
                for key, item in list(value.items()):  # Counter.update would add
                    now, mapped = function(key) if is_sharded(key) else key, _map_shards(item, function)
                    if now is not key:
                        del value[key]
                    if now is not key or mapped is not item:
                        value[now] = mapped
            elif type(value) in (list, deque):
                for i, item in enumerate(value):
                    if (mapped := _map_shards(item, function)) is not item:
                        value[i] = mapped
            elif (now := _map_shards(value, function)) is not value:
                attributes[name] = now


def _own_objects(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield objects of the user's own classes in a value, such as an average of the weights, once each."""
    if id(value) in seen or isinstance(value, _NOT_SEARCHED):
        return
    if isinstance(value, (dict, list, tuple, deque)):
        seen.add(id(value))
        # A copy: a thread of the user's may change the container meanwhile.
        for part in stored_items(value)[:_SEARCHED]:
            yield from _own_objects(part, seen)
    elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _LIBRARIES:
        seen.add(id(value))
        yield value


def _map_shards(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Map the tensors in a value; return the same object if none of them is sharded."""
    tensors: list[Tensor] = []
    map_tensors(value, tensors.append)
    return map_tensors(value, function) if any(map(is_sharded, tensors)) else value


@contextmanager
def sharded(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], wrapper_args: dict[str, Any], *, values_to: str
) -> Iterator[Any]:
    """Shard and wrap the model, and let optimizers step the shards; afterwards restore everything except the values.

    Parameters
    ----------
    model : nn.Module
        Model, equal on all ranks.
    optimizers : list of torch.optim.Optimizer
        Optimizers, whose state is sharded too.
    wrapper_args : dict
        Further arguments of the wrapper's constructor.
    values_to : {'all', 'host', 'none'}
        Ranks whose model and optimizers get the trained values at the end (collective): all ranks, or local rank 0 of
        each host, in the file from which the launching process reads the result. With ``'none'``, or if an exception
        ends the run, the model gets its initial values back.
    """

    originals = dict(model.named_parameters())
    kept = {name: p.data for name, p in originals.items()}  # moving a unit to its GPU moves its parameters, too
    buffers = {name: (buffer, buffer.data) for name, buffer in model.named_buffers()}
    in_place = [p for p in originals.values() if stays_whole(p)] + [buffer for buffer, _ in buffers.values()]
    for tensor in in_place if optimizers else ():  # copies: a failed run must not change the caller's tensors
        tensor.data = tensor.data.clone()
    returned = False
    if "init_sync" not in wrapper_args:  # not if all ranks map the same weights, which the launching process has sent
        wrapper_args = {**wrapper_args, "init_sync": not _all_here() or result_file() is None}
    wrapper = TTFullyShardedDataParallel(model, **wrapper_args)
    with wrapper.without_references():
        for name, p in originals.items():
            if not stays_whole(p):
                p.data = kept[name]
    shards = dict(model.named_parameters())
    first = dict(shards)
    before = [(optimizer.state, list(optimizer.param_groups)) for optimizer in optimizers]
    # Other entries, such as a count of steps, belong to no parameter, and stay as they are.
    own_state = [{p: dict(own) for p, own in one.state.items() if isinstance(own, dict)} for one in optimizers]
    _replace_parameters(optimizers, originals, shards, state_like)
    for optimizer in optimizers:  # scalars, and the step counters of fused kernels
        move_state(optimizer)
    read = [*kept.values(), *(value for states in own_state for own in states.values() for value in own.values())]
    here = [t for t in read if isinstance(t, Tensor) and (t.device.type, t.layout) == ("cpu", torch.strided)]
    evict_clean_pages((t.data_ptr(), t.nbytes) for t in here)  # shards are copies; the file has full tensors
    try:
        yield wrapper
        own_state += [{} for _ in optimizers[len(own_state) :]]  # of optimizers that a callback has assigned
        if values_to != "none":
            wrapper.reshard_units()
            names = {id(p): name for name, p in first.items()}  # of modules that callbacks have removed, too
            names.update((id(p), name) for _, name, p in _found_again(model, shards))
            file = result_file() if values_to == "host" else None
            now = [*{id(p): p for p in (*own_parameters(model), *first.values())}.values()]
            with wrapper.without_references():
                _write_back(now, names, originals, kept, optimizers, own_state, file)
            returned = True
    finally:
        for optimizer in optimizers[len(before) :]:
            before.append((optimizer.state, list(optimizer.param_groups)))
        again = _found_again(model, shards)
        shards = {**first, **{name: p for _, name, p in again}}
        wrapper.take_off({now: originals[name] for now, name, _ in again})
        for name, p in originals.items():
            if stays_whole(p):
                p.data = kept[name]
        _put_back_buffers(model, buffers, restore=bool(optimizers) and not returned)
        for optimizer in optimizers if not returned else ():  # the state is useless without the trained values
            for stepped in {*shards.values(), *originals.values()}:
                optimizer.state.pop(stepped, None)
        _replace_parameters(optimizers, shards, originals, lambda _, value: value)
        own = {id(shard): originals[name] for name, shard in shards.items()}
        for optimizer, (state, groups) in zip(optimizers, before, strict=True):
            if optimizer.state is not state:  # load_state_dict() creates a new dict, but the caller reads the old dict
                state.clear()
            for group in groups:
                group["params"] = [own.get(id(p), p) for p in group["params"]]


def _is_first_of_host() -> bool:
    return place_here().local_rank == 0


def _found_again(model: nn.Module, shards: dict[str, nn.Parameter]) -> list[tuple[str, str, nn.Parameter]]:
    """Return the current name, the former name and the current value of each parameter that was sharded.

    A callback may have replaced a module by another module, for example one with an adapter.
    """
    names = {id(p): name for name, p in shards.items()}
    found = [(now, names.get(id(p), now), p) for now, p in model.named_parameters() if id(p) in names or is_sharded(p)]
    return [(now, name, p) for now, name, p in found if name in shards]


class _Written:
    """Sharded tensors whose values are written back into full tensors, one at a time.

    With a file, each rank writes its shard into it and frees the shard's memory, so the full model exists only once.
    Without a file, every rank gathers each tensor and moves it off the device before the next one: a device with room
    for its shards may have no room for the full model.
    """

    def __init__(self, file: ResultFile | None) -> None:
        self.receives = file is None or _is_first_of_host()
        self._file = file
        self._shards: list[Any] = []
        self._homes: list[tuple[Tensor | None, torch.device]] = []

    def add(self, shard: Any, home: Tensor | None, device: torch.device) -> None:
        """Add a tensor, with the one that gets its values, and the device of a new one if it doesn't fit."""
        self._shards.append(shard)
        self._homes.append((home, device))

    def write(self) -> dict[int, Tensor]:
        """Write all values; return the full tensors by the ids of the shards. Collective."""
        in_file = None if self._file is None else _in_file(self._shards, self._file, frees=True)
        wholes: dict[int, Tensor] = {}
        for i, (home, device) in enumerate(self._homes):
            full = full_tensor(of_plain_type(self._shards[i])) if in_file is None else in_file[i]
            if home is None or home.shape != full.shape or home.dtype != full.dtype:
                home = full.to(device) if in_file is None else full
            elif self.receives and in_file is None:
                home.detach().copy_(full)
            elif self.receives:
                home.data = full
            wholes[id(self._shards[i])] = home
            del full
        return wholes


def _write_back(
    parameters: Sequence[nn.Parameter],
    names: dict[int, str],
    originals: dict[str, nn.Parameter],
    kept: dict[str, Tensor],
    optimizers: list[torch.optim.Optimizer],
    own_state: list[dict[Any, dict[Any, Any]]],
    file: ResultFile | None,
) -> None:
    """Write the trained values into the model's parameters and its optimizers' state. Collective."""
    written = _Written(file)
    for p in parameters:
        if id(p) not in names:
            continue
        name = names[id(p)]
        target = originals[name]
        target.requires_grad_(p.requires_grad)
        if is_sharded(p):
            written.add(p, target, kept[name].device)
        elif written.receives:
            (kept[name] if p is target else target).data.copy_(p.detach())
    own_types: set[str] = set()
    states: list[tuple[dict[Any, Any], Any]] = []
    seen: set[int] = set()
    for optimizer, initial in zip(optimizers, own_state, strict=True):
        for stepped in parameters_of(optimizer):
            if id(stepped) not in names or id(optimizer.state.get(stepped)) in seen:
                continue
            seen.add(id(optimizer.state.get(stepped)))  # an optimizer within another one may share its state
            name = names[id(stepped)]
            own, before = optimizer.state.get(stepped, {}), initial.get(originals[name], {})
            for key, value in own.items():  # a value may be a list or dict of tensors, as in Shampoo
                found: list[Tensor] = []
                map_tensors(value, found.append)
                for tensor in filter(is_sharded, found):
                    if type(part := local_shard(tensor)) is not Tensor:
                        own_types.add(type(part).__name__)
                    written.add(tensor, before.get(key) if tensor is value else None, kept[name].device)
                if any(map(is_sharded, found)):
                    states.append((own, key))
                elif isinstance(value, Tensor) and value.device.type != "cpu" and written.receives:
                    own[key] = value.to(kept[name].device)
    if own_types and distributed.is_global_zero():
        warn_or_print(
            f"gpu_mode='fsdp': an optimizer's state has tensors of {', '.join(sorted(own_types))}. They come back from "
            "the ranks as plain tensors of their values, with which another fit continues. To continue with the "
            "optimizer's own tensors, resume from a ModelCheckpoint, with as many ranks."
        )
    wholes = written.write()
    for own, key in states:
        own[key] = map_tensors(own[key], lambda tensor: wholes.get(id(tensor), tensor))


def _in_file(shards: Sequence[Any], file: ResultFile, *, frees: bool = False) -> list[Tensor]:
    """Write sharded tensors into the file of this host's result; return the full tensors as views of the file.

    Collective.
    """
    room = file.room_for((shard.shape, shard.dtype) for shard in shards)
    all_here, kept = _all_here(), 0
    for shard, target in zip(shards, room, strict=True):
        if not (all_here and write_shard(shard, target)):
            full = full_tensor(of_plain_type(shard))
            if _is_first_of_host():
                target.copy_(full)
            del full
        if frees:
            kept += local_shard(shard).nbytes
            free(shard)
            if kept > _TRIMMED_AFTER:
                trim()
                kept = 0
    if frees:
        trim()
    distributed.barrier()
    return room


def _all_here() -> bool:
    """Return True if all ranks are on this host."""
    here = place_here()
    return here.local_world_size == here.world_size


def _put_back_buffers(model: nn.Module, buffers: dict[str, tuple[Tensor, Tensor]], *, restore: bool) -> None:
    """Copy buffers back into their original memory and device; with ``restore``, put back replaced buffers, too."""
    now = dict(model.named_buffers())
    for name, (buffer, original) in buffers.items():
        if name not in now:
            continue
        if restore:
            owner, _, own_name = name.rpartition(".")
            model.get_submodule(owner)._buffers[own_name] = buffer
        elif now.get(name) is not buffer:
            continue
        elif buffer.shape == original.shape and buffer.dtype == original.dtype:
            original.copy_(buffer.data)
        else:
            original = buffer.data.to(original.device)
        buffer.data = original


def _replace_parameters(
    optimizers: list[torch.optim.Optimizer],
    before: dict[str, nn.Parameter],
    after: dict[str, nn.Parameter],
    convert: Callable[[Any, Tensor], Any],
) -> None:
    """In the optimizers' groups and state, replace each parameter by the one of the same name in ``after``.

    ``convert`` gets this parameter and a tensor of its state.
    """
    new = {id(p): after[name] for name, p in before.items() if name in after}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        state = list(optimizer.state.items())
        optimizer.state.clear()
        for p, own in state:
            target = new.get(id(p), p)
            if target is not p and isinstance(own, dict):  # the same dict, since users may refer to it
                own.update({key: map_tensors(value, partial(convert, target)) for key, value in own.items()})
            optimizer.state[target] = own
