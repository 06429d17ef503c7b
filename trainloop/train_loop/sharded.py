"""How one rank of ``fsdp`` runs the model: sharded while the run lasts, and whole again afterwards, or not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainloop import distributed
from trainloop.errors import ConfigurationError
from trainloop.optim import parameters_of
from trainloop.parallel import TTFullyShardedDataParallel
from trainloop.parallel.shards import (
    free,
    gathered,
    is_sharded,
    local_part,
    map_tensors,
    put_part,
    shard_like,
    stays_whole,
    whole,
)
from trainloop.train_loop.placement import Placement, move_state

if TYPE_CHECKING:
    from trainloop._transfer.result import ResultFile
    from trainloop.train_loop.loop import TrainLoop

__all__ = ["LeftBehind", "ShardedPlacement", "check_has_values", "noting_values", "sharded"]

_TRIMMED_AFTER = 32 << 20  # bytes that this process has freed, and may still hold


class _Scaler(torch.amp.GradScaler):
    """torch's, over what each rank has of the gradients, sharded and whole, and with one verdict for all ranks.

    Its own kernel takes no mix of them, and with sharded ones alone a rank's overflow was missed (torch 2.13, Gloo).
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in parameters_of(optimizer):
            if p.grad is None:
                continue
            if p.grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")  # torch's words
            part = local_part(p.grad)
            if part.numel():
                kinds.setdefault((part.device, part.dtype), []).append(part)
        for (device, _), parts in kinds.items():
            found = found_inf.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(parts, found, inv_scale.to(device))
            if found is not found_inf:  # of gradients that are offloaded
                found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
        torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX)
        return {found_inf.device: found_inf}


class ShardedPlacement(Placement):
    """A model whose forward is an exchange of all ranks."""

    collective = True
    scaler_type = _Scaler

    def wrap_again(self) -> None:
        """Do nothing: a unit looks at its parameters' ``requires_grad`` at each forward."""

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Do nothing: gradients are reduced in each micro-batch, since whole ones would take as much as the model."""
        return nullcontext()

    def share_buffers(self) -> None:
        """Send rank 0's buffers to all ranks."""
        self.wrapper.share_buffers()

    def make_whole(self, callbacks: Iterable[Any]) -> None:
        """Make sharded tensors that callbacks keep, in dictionaries and lists too, whole where they are sent back."""
        callbacks = list(callbacks)
        found: dict[int, Any] = {}
        _map_kept(callbacks, lambda tensor: found.setdefault(id(tensor), tensor))
        shards = [tensor for tensor in found.values() if is_sharded(tensor)]
        file = _result_file()
        whole_ones = map(gathered, shards) if file is None else _in_file(shards, file)
        made = dict(zip(map(id, shards), whole_ones, strict=True))
        _map_kept(callbacks, lambda tensor: made.get(id(tensor), tensor))

    @property
    def evaluated(self) -> Any:
        """The wrapper: only it can gather parameters."""
        return self.wrapper


def _map_kept(callbacks: Iterable[Any], function: Callable[[Tensor], Any]) -> None:
    """Replace each tensor that callbacks keep by ``function(tensor)``."""
    for callback in callbacks:
        for name, value in list(vars(callback).items()):
            if isinstance(value, dict):
                value.update({key: map_tensors(item, function) for key, item in value.items()})
            elif type(value) is list:
                value[:] = map_tensors(value, function)
            elif is_sharded(value):
                setattr(callback, name, function(value))


@contextmanager
def sharded(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], wrapper_args: dict[str, Any], *, gives_back: str
) -> Iterator[Any]:
    """The wrapper around the model; optimizers step its shards. Afterwards all are as they were, but for their values.

    Parameters
    ----------
    model : nn.Module
        Equal on all ranks.
    optimizers : list of torch.optim.Optimizer
        Their state is sharded along.
    wrapper_args : dict
        Further arguments of the wrapper's constructor.
    gives_back : {'all', 'host', 'none'}
        Whose model and optimizers get the values that were reached: each rank's, or of each host those of local rank 0,
        in the file from which the launching process reads the result. Collective, at the end; where an exception ends
        the run, and with ``'none'``, the model has the values it came with.
    """
    from trainloop._transfer.pages import drop_unwritten_pages  # keeps `import trainloop` fast

    originals = dict(model.named_parameters())
    kept = {name: p.data for name, p in originals.items()}  # a unit that goes to its GPU takes its parameters along
    buffers = {name: (buffer, buffer.data) for name, buffer in model.named_buffers()}
    in_place = [p for p in originals.values() if stays_whole(p)] + [buffer for buffer, _ in buffers.values()]
    for tensor in in_place if optimizers else ():  # they would not be as they came where nothing is given back
        tensor.data = tensor.data.clone()
    given = False
    if "init_sync" not in wrapper_args:  # ranks of one host map the same weights; others have made their own
        wrapper_args = {**wrapper_args, "init_sync": not _all_here() or _result_file() is None}
    wrapper = TTFullyShardedDataParallel(model, **wrapper_args)
    for name, p in originals.items():
        if not stays_whole(p):
            p.data = kept[name]
    shards = dict(model.named_parameters())
    arrived = [(optimizer.state, list(optimizer.param_groups)) for optimizer in optimizers]
    own_state = [{p: dict(own) for p, own in optimizer.state.items()} for optimizer in optimizers]
    _move(optimizers, originals, shards, lambda value, p: shard_like(value, p) if value.shape == p.shape else value)
    for optimizer in optimizers:  # scalars, and the counters of fused kernels
        move_state(optimizer)
    read = [*kept.values(), *(value for came in own_state for own in came.values() for value in own.values())]
    here = [t for t in read if isinstance(t, Tensor) and (t.device.type, t.layout) == ("cpu", torch.strided)]
    drop_unwritten_pages((t.data_ptr(), t.nbytes) for t in here)  # shards are cut; the caller's file keeps all of it
    try:
        yield wrapper
        if gives_back != "none":
            wrapper.reshard_units()
            names = {id(p): name for _, name, p in _found_again(model, shards)}
            file = _result_file() if gives_back == "host" else None
            _give_back(model, names, originals, kept, optimizers, own_state, file)
            given = True
    finally:
        again = _found_again(model, shards)
        shards = {name: p for _, name, p in again}
        wrapper.take_off({now: originals[name] for now, name, _ in again})
        for name, p in originals.items():
            if stays_whole(p):
                p.data = kept[name]
        _give_back_buffers(model, buffers, as_they_came=bool(optimizers) and not given)
        for optimizer in optimizers if not given else ():  # state of values that are gone is of no use
            for stepped in {*shards.values(), *originals.values()}:
                optimizer.state.pop(stepped, None)
        _move(optimizers, shards, originals, lambda value, _: value)
        own = {id(shard): originals[name] for name, shard in shards.items()}
        for optimizer, (state, groups) in zip(optimizers, arrived, strict=True):
            if optimizer.state is not state:  # load_state_dict() makes others, and who sent these looks at them
                state.clear()
            for group in groups:
                group["params"] = [own.get(id(p), p) for p in group["params"]]


def _is_first_of_host() -> bool:
    from trainloop._launch import place_here  # keeps `import trainloop` fast

    return place_here().local_rank == 0


def _found_again(model: nn.Module, shards: dict[str, nn.Parameter]) -> list[tuple[str, str, nn.Parameter]]:
    """The parameters that were sharded: their names now and then, and what they are now.

    A callback may have put a module with an adapter in the place of another one.
    """
    names = {id(p): name for name, p in shards.items()}
    found = [(now, names.get(id(p), now), p) for now, p in model.named_parameters() if id(p) in names or is_sharded(p)]
    return [(now, name, p) for now, name, p in found if name in shards]


def _give_back(
    model: nn.Module,
    names: dict[int, str],
    originals: dict[str, nn.Parameter],
    kept: dict[str, Tensor],
    optimizers: list[torch.optim.Optimizer],
    own_state: list[dict[Any, dict[Any, Any]]],
    file: ResultFile | None,
) -> None:
    """Write the values reached into the model's own parameters and its optimizers' state, one tensor after the other.

    With a file each rank writes its part into that, and its memory is free for the next: all of it is there once. Else
    every rank gathers it; a device that had room for its shards need not have any for all of them, so each whole one
    leaves it before the next.
    """
    receives = file is None or _is_first_of_host()
    shards: list[Any] = []
    owners: list[tuple[dict[Any, Any] | None, Any, Tensor | None, torch.device]] = []
    for p in model.parameters():
        if id(p) not in names:
            continue
        name = names[id(p)]
        target = originals[name]
        target.requires_grad_(p.requires_grad)
        if is_sharded(p):
            shards.append(p)
            owners.append((None, None, target, kept[name].device))
        elif receives:
            (kept[name] if p is target else target).data.copy_(p.detach())
    for optimizer, came in zip(optimizers, own_state, strict=True):
        for stepped in parameters_of(optimizer):
            if id(stepped) not in names:
                continue
            name = names[id(stepped)]
            own, before = optimizer.state.get(stepped, {}), came.get(originals[name], {})
            for key, value in own.items():
                if is_sharded(value):
                    shards.append(value)
                    owners.append((own, key, before.get(key), kept[name].device))
                elif isinstance(value, Tensor) and value.device.type != "cpu" and receives:
                    own[key] = value.to(kept[name].device)
    in_file = None if file is None else _in_file(shards, file, frees=True)
    for i, (state, key, home, device) in enumerate(owners):
        full = whole(shards[i]) if in_file is None else in_file[i]
        fits = home is not None and home.shape == full.shape and home.dtype == full.dtype
        if home is not None and fits and receives:
            if in_file is None:
                home.detach().copy_(full)
            else:
                home.data = full
        if state is not None:
            state[key] = home if fits else full.to(device) if in_file is None else full
        del full


def _in_file(shards: Sequence[Any], file: ResultFile, *, frees: bool = False) -> list[Tensor]:
    """Write sharded tensors into the file of this host's result; returns them whole, as views of it. Collective."""
    from trainloop._transfer.pages import trim  # keeps `import trainloop` fast

    room = file.room_for((shard.shape, shard.dtype) for shard in shards)
    all_here, kept = _all_here(), 0
    for shard, target in zip(shards, room, strict=True):
        if not (all_here and put_part(shard, target)):
            full = whole(shard)
            if _is_first_of_host():
                target.copy_(full)
            del full
        if frees:
            kept += local_part(shard).nbytes
            free(shard)
            if kept > _TRIMMED_AFTER:
                trim()
                kept = 0
    if frees:
        trim()
    distributed.barrier()
    return room


def _result_file() -> ResultFile | None:
    from trainloop._launch.rank_process import result_file  # keeps `import trainloop` fast

    return result_file()


def _all_here() -> bool:
    """Return True if all ranks are on this host."""
    from trainloop._launch import place_here  # keeps `import trainloop` fast

    here = place_here()
    return here.local_world_size == here.world_size


def _give_back_buffers(model: nn.Module, buffers: dict[str, tuple[Tensor, Tensor]], *, as_they_came: bool) -> None:
    """Copy buffers back into the memory, and so onto the device, where they came; those replaced since stay."""
    now = dict(model.named_buffers())
    for name, (buffer, came) in buffers.items():
        if name not in now:
            continue
        if as_they_came:
            owner, _, own_name = name.rpartition(".")
            model.get_submodule(owner)._buffers[own_name] = buffer
        elif now.get(name) is not buffer:
            continue
        elif buffer.shape == came.shape and buffer.dtype == came.dtype:
            came.copy_(buffer.data)
        else:
            came = buffer.data.to(came.device)
        buffer.data = came


def _move(
    optimizers: list[torch.optim.Optimizer],
    before: dict[str, nn.Parameter],
    after: dict[str, nn.Parameter],
    convert: Callable[[Tensor, Any], Any],
) -> None:
    """Replace parameters by those of the same names, in the optimizers' groups and state."""
    new = {id(p): after[name] for name, p in before.items() if name in after}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        state = list(optimizer.state.items())
        optimizer.state.clear()
        for p, own in state:
            target = new.get(id(p), p)
            if target is not p and isinstance(own, dict):  # which stays the one that users may hold
                own.update({k: convert(v, target) for k, v in own.items() if isinstance(v, Tensor) and v.ndim})
            optimizer.state[target] = own


class LeftBehind:
    """The parameters of a model that ``fit(gather=False)`` left as they were, until something is loaded into them."""

    def __init__(self, model: nn.Module) -> None:
        self._note(model.parameters())

    def _note(self, parameters: Iterable[nn.Parameter]) -> None:
        # load_state_dict() writes in place, which counts the version up, or with assign=True puts others.
        self._seen = [(weakref.ref(p), p._version) for p in parameters]

    def _left(self) -> list[nn.Parameter]:
        return [p for ref, version in self._seen if (p := ref()) is not None and p._version == version]

    def __getstate__(self) -> dict[str, Any]:  # for a loop that is copied or pickled, with its model
        return {"left": self._left()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._note(state["left"])

    def any_in(self, model: nn.Module) -> bool:
        """Return True if the model still has one of them, or a parameter on the meta device."""
        left = set(map(id, self._left()))
        return any(p.is_meta or id(p) in left for p in model.parameters())


@contextmanager
def noting_values(loop: TrainLoop[Any], *, gather: bool) -> Iterator[None]:
    """Around a training: afterwards the loop knows whether its model has the values that were reached."""
    before, step = loop.left_behind, loop.global_step
    loop.left_behind = None  # of no use to ranks
    try:
        yield
    except BaseException:  # where the ranks are others', the loop may have come further than its model
        loop.left_behind = before if gather or loop.global_step == step else LeftBehind(loop.model)
        raise
    if not gather:
        loop.left_behind = LeftBehind(loop.model)


def check_has_values(loop: TrainLoop[Any], who: str) -> None:
    """Raise where the loop's epochs and history are of a training whose values the model does not have.

    Raises
    ------
    ConfigurationError
        Saying where they are, and how to get them.
    """
    if loop.left_behind is None:
        return
    if not loop.left_behind.any_in(loop.model):
        loop.left_behind = None
        return
    raise ConfigurationError(
        f"{who}: the trained values are in the checkpoint only, since fit had gather=False, and the model has those it "
        "came with. Go on with fit(resume_from='last'), or load the checkpoint: "
        "loop.model.load_state_dict(trainloop.checkpoint.load(folder)['model'])."
    )
