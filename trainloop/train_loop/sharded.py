"""How one rank of ``fsdp`` runs the model: sharded while the run lasts, and whole again afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainloop import distributed
from trainloop.errors import ConfigurationError
from trainloop.optim import parameters_of
from trainloop.parallel import TTFullyShardedDataParallel
from trainloop.parallel.shards import gathered, is_sharded, map_tensors, shard_like, whole
from trainloop.train_loop.arguments import Options
from trainloop.train_loop.placement import Placement

__all__ = ["ShardedPlacement", "check_shardable", "sharded"]


class ShardedPlacement(Placement):
    """A model whose forward is an exchange of all ranks."""

    collective = True

    def wrap_again(self) -> None:
        """Nothing: a unit looks at its parameters' ``requires_grad`` at each forward."""

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Nothing: gradients of each micro-batch are reduced, since whole ones would take as much as the model."""
        return nullcontext()

    def share_buffers(self) -> None:
        """Rank 0's buffers to all ranks."""
        self.wrapper.share_buffers()

    def make_whole(self, callbacks: Iterable[Any]) -> None:
        """What callbacks keep of sharded tensors, in dictionaries and lists too, whole on rank 0."""
        for callback in callbacks:
            for name, value in list(vars(callback).items()):
                if is_sharded(value):
                    setattr(callback, name, gathered(value))
                elif isinstance(value, dict):
                    value.update({key: map_tensors(item, gathered) for key, item in value.items()})
                elif type(value) is list:
                    value[:] = map_tensors(value, gathered)

    @property
    def evaluated(self) -> Any:
        """The wrapper: only it can gather parameters."""
        return self.wrapper


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
    gives_back : {'all', 'main', 'none'}
        Ranks whose model and optimizers get the values that were reached. Collective, at the end; where an exception
        ends the run, and with ``'none'``, the model has the values it came with.
    """
    originals = dict(model.named_parameters())
    kept = {name: p.data for name, p in originals.items()}  # a unit that goes to its GPU takes its parameters along
    wrapper = TTFullyShardedDataParallel(model, **wrapper_args)
    for name, p in originals.items():
        if p.ndim:
            p.data = kept[name]
    shards = dict(model.named_parameters())
    arrived = [(optimizer.state, list(optimizer.param_groups)) for optimizer in optimizers]
    _move(optimizers, originals, shards, lambda value, p: shard_like(value, p) if value.shape == p.shape else value)
    try:
        yield wrapper
        if gives_back != "none":
            wrapper.reshard()
            receives = gives_back == "all" or distributed.is_global_zero()
            _give_back(model, originals, optimizers, receives)
    finally:
        shards = {name: p for name, p in model.named_parameters() if name in originals}
        wrapper.take_off(originals)
        for optimizer in optimizers:  # shards that are left, of a run that gives nothing back, are of no use
            for stepped in [p for p, own in optimizer.state.items() if any(map(is_sharded, dict(own).values()))]:
                del optimizer.state[stepped]
        _move(optimizers, shards, originals, lambda value, _: value)
        own = {id(shard): originals[name] for name, shard in shards.items()}
        for optimizer, (state, groups) in zip(optimizers, arrived, strict=True):
            if optimizer.state is not state:  # load_state_dict() makes others, and who sent these looks at them
                state.clear()
            for group in groups:
                group["params"] = [own.get(id(p), p) for p in group["params"]]


def _give_back(
    model: nn.Module, originals: dict[str, nn.Parameter], optimizers: list[torch.optim.Optimizer], receives: bool
) -> None:
    """The values reached into a model's own parameters and its optimizers' state, one tensor after the other."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in originals:
                full, target = whole(p), originals[name]
                if receives and p is not target:
                    target.copy_(full)
                target.requires_grad_(p.requires_grad)
    for optimizer in optimizers:
        for stepped in parameters_of(optimizer):
            for key, value in optimizer.state.get(stepped, {}).items():
                if is_sharded(value):
                    full = whole(value)
                    optimizer.state[stepped][key] = full if receives else full.new_empty(0)


def _move(
    optimizers: list[torch.optim.Optimizer],
    before: dict[str, nn.Parameter],
    after: dict[str, nn.Parameter],
    convert: Callable[[Tensor, Any], Any],
) -> None:
    """From these parameters to those of the same names, in groups and in state."""
    new = {id(p): after[name] for name, p in before.items() if name in after}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        state = list(optimizer.state.items())
        optimizer.state.clear()
        for p, own in state:
            target = new.get(id(p), p)
            if target is not p and isinstance(own, dict):
                own = {k: convert(v, target) if isinstance(v, Tensor) and v.ndim else v for k, v in own.items()}
            optimizer.state[target] = own


def check_shardable(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    options: Options,
    callbacks: Iterable[Any],
    *,
    gather: bool,
) -> None:
    """Raise where ``fsdp`` can't work, before any process starts.

    Raises
    ------
    ConfigurationError
        Saying what to use instead.
    """
    if not gather and not any(hasattr(callback, "last_state") for callback in callbacks):
        raise ConfigurationError(
            "fit(gather=False) leaves what was trained in checkpoints, and there is no ModelCheckpoint in callbacks. "
            "Add one, or leave gather out."
        )
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if gather and meta is not None:
        raise ConfigurationError(
            f"{meta} is on the meta device, which has no memory for what is trained. Use fit(gather=False) with a "
            "ModelCheckpoint, or build the model on the CPU."
        )
    if options.compile_args is not None or options.compiles_step:
        given = "'step'" if options.compiles_step else "True"
        raise ConfigurationError(
            f"compile={given} with gpu_mode='fsdp': a graph of the whole model leaves no place to gather its units. "
            "Compile the blocks in the script, `for block in model.blocks: block.compile()`, and leave compile out."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
            raise ConfigurationError(
                f"{type(optimizer).__name__} with gpu_mode='fsdp': it can't step sharded parameters. Use "
                "gpu_mode='ddp', or an optimizer that looks at each element by itself, such as AdamW."
            )
        for p, own in optimizer.state.items():
            for key, value in own.items() if isinstance(own, dict) and isinstance(p, Tensor) else ():
                if isinstance(value, Tensor) and value.ndim and value.shape != p.shape:
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} with gpu_mode='fsdp': its state {key!r} of shape "
                        f"{tuple(value.shape)} belongs to a parameter of shape {tuple(p.shape)}, and can't be sharded "
                        "like it. Begin with an optimizer without state, or use gpu_mode='ddp'."
                    )
