"""State that a model carries from batch to batch: it differs between ranks, and checkpoints store it by columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainloop._support.nested import map_parts, map_together
from trainloop.errors import ConfigurationError


def names_of(module: nn.Module) -> Mapping[str, int]:
    """Return the attributes that a module's ``carried_state`` names, each with the dimension of its columns."""
    return getattr(module, "carried_state", None) or {}


def places_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, int]]:
    """Yield path, module, attribute and dimension of the columns of each carried state."""
    for path, module in model.named_modules():
        for name, dim in names_of(module).items():
            yield f"{path}.{name}".lstrip("."), module, name, dim


def check_carried(model: nn.Module, gpu_mode: str) -> None:
    """Check the ``carried_state`` of a model's modules.

    Raises
    ------
    ConfigurationError
        If it is malformed; in ``dp``, which creates new replicas for each batch; or if it names a buffer or parameter,
        which DDP copies from rank 0.
    """
    for module in model.modules():
        names = names_of(module)
        own = names if isinstance(names, Mapping) else {"hidden": None}
        for name, dim in own.items():
            if not isinstance(dim, int) or not hasattr(module, name):
                raise ConfigurationError(
                    f"carried_state={names!r} of {type(module).__name__}: must be a dict that maps the name of an "
                    f"attribute (set in __init__: self.{name} = None) to its batch dimension (an int)."
                )
    for path, module, name, _ in places_of(model):
        if name in module._buffers or name in module._parameters:
            raise ConfigurationError(
                f"carried_state names {path}, which is a buffer or parameter, so ranks would get rank 0's value. Make "
                f"it a plain attribute (in __init__: self.{name} = None)."
            )
        if gpu_mode == "dp":
            raise ConfigurationError(
                f"{path} is carried from batch to batch, but gpu_mode='dp' makes new replicas for each batch. Use "
                f"gpu_mode='ddp' with trainloop.data.SplitBatches."
            )


def carried_state_of(model: nn.Module) -> dict[str, Any]:
    """Return the state that this rank carries: CPU tensors, in the model's tuples, lists and dicts."""
    return {
        path: _map_tensors(lambda t: t.detach().cpu(), getattr(module, name))
        for path, module, name, _ in places_of(model)
    }


def load_carried_state(model: nn.Module, saved: list[dict[str, Any]], rank: int, world_size: int) -> None:
    """Load the states that :func:`carried_state_of` returned on the ranks that wrote a checkpoint.

    Parameters
    ----------
    model : nn.Module
    saved : list of dict
        States of every rank, in order. If the number of ranks has changed, the columns are divided again.
    rank, world_size : int
        The rank to load for.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for path, module, name, dim in places_of(model):
        values = [of_rank[path] for of_rank in saved if path in of_rank]
        if len(values) != len(saved):
            continue
        if len(saved) == world_size:
            value = values[rank]
        else:
            value = _own_columns(
                _join_columns([value for value in values if value is not None], dim), dim, rank, world_size
            )
        setattr(module, name, _map_tensors(lambda t: t.to(device).clone(), value))


def _own_columns(value: Any, dim: int, rank: int, world_size: int) -> Any:
    """Return one rank's columns of a state."""
    return _map_tensors(lambda t: t.tensor_split(world_size, dim)[rank] if t.ndim > dim else t, value)


def _join_columns(values: list[Any], dim: int) -> Any:
    """Join the columns of all ranks' states."""
    if values and isinstance(values[0], Tensor):
        return torch.cat(values, dim) if values[0].ndim > dim else values[0]
    return map_together(lambda parts: _join_columns(parts, dim), values) if values else None


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return map_parts(lambda part: _map_tensors(function, part), value)
