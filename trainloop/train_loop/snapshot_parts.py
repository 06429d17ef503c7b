"""What only a snapshot holds, and a checkpoint does not: Python's own state of a loop's parts."""

from __future__ import annotations

import io
import random
import socket
import threading
import types
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from trainloop.train_loop import handover
from trainloop.transfer.shared import put_into
from trainloop.transfer.torch_objects import optimizer_state

if TYPE_CHECKING:
    from trainloop.train_loop.handover import Arrival
    from trainloop.train_loop.loop import TrainLoop

__all__ = [
    "FUNCTIONS",
    "OF_A_PROCESS",
    "attributes",
    "own_attributes",
    "owner_text",
    "put_attributes",
    "put_into_datasets",
]

# Nobody expects these in a snapshot: each process has its own.
OF_A_PROCESS = (io.IOBase, socket.socket, threading.Thread, type(threading.Lock()), type(threading.RLock()))
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial, type)
_PLAIN = (bool, int, float, str, type(None), random.Random, np.random.Generator, np.random.RandomState)
# Of a loop's attributes: what is made anew in each process, or has a place of its own in a snapshot.
_STRUCTURE = frozenset(
    "model train_loader validation_loader test_loader optimizer criterion callbacks message_service history options "
    "site process running found_inf last_loss timeout drawn_seed restarts".split()
)


def attributes(loop: TrainLoop[Any], arrival: Arrival) -> dict[str, dict[Any, Any]]:
    """What is Python's own state of a loop's parts, by section and part; contents are dictionaries of their own."""
    modules: dict[Any, dict[str, Any]] = {}
    for (root, path, name), value in handover.plain_attributes(loop).items():
        modules.setdefault((root, path), {})[name] = value
    return {
        "modules": modules,
        "loop": {"": {name: value for name, value in vars(loop).items() if name not in _STRUCTURE}},
        "attributes of callbacks": {
            i: handover.callback_state(callback) for i, callback in enumerate(arrival.callbacks)
        },
        "datasets": {i: _plain_values(dataset) for i, dataset in enumerate(_datasets(loop))},
        # Those of optimizers are in the common part.
        "parts": {
            path: content for path, content in arrival.parts_now().items() if path.partition(".")[0] != "optimizer"
        },
    }


def owner_text(loop: TrainLoop[Any], arrival: Arrival, section: str, key: Any) -> str:
    """Whose it is what a section of a snapshot has under a key."""
    if section in ("stateful", "attributes of callbacks"):
        name: str = arrival.callbacks[key[0] if isinstance(key, tuple) else key].callback_name
        return name
    if section == "modules":
        root, path = key
        return type((loop.criterion if root else loop.model).get_submodule(path)).__name__
    return {"loop": "the loop", "datasets": "a dataset"}.get(section, str(key))


def _datasets(loop: TrainLoop[Any]) -> list[Any]:
    """Indexed datasets, with those they wrap; a stream says itself where it stands, or is read again from its begin."""
    found: list[Any] = []
    for loader in (loop.train_loader, loop.validation_loader, loop.test_loader):
        dataset = getattr(loader, "dataset", None)
        while isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset) and dataset not in found:
            found.append(dataset)
            dataset = getattr(dataset, "dataset", None)
    return found


def _plain_values(dataset: Any) -> dict[str, Any]:
    """What a callback may set in a dataset, such as a level of difficulty, and generators that it draws from here."""
    return {name: value for name, value in vars(dataset).items() if isinstance(value, _PLAIN)}


def put_attributes(loop: TrainLoop[Any], arrival: Arrival, mine: dict[str, Any]) -> None:
    handover.put_plain_attributes(
        loop, {(*key, name): value for key, own in mine["modules"].items() for name, value in own.items()}
    )
    vars(loop).update(mine["loop"].get("", {}))
    put_into_datasets(loop, mine["datasets"])
    for (i, name), saved in mine["stateful"].items():
        getattr(arrival.callbacks[i], name).load_state_dict(saved)
    for i, saved in mine["attributes of callbacks"].items():
        handover.put_callback_state(arrival.callbacks[i], saved)
    kept: dict[str, set[Any]] = {}
    for section, path, name in mine["omitted"]:
        if section == "parts":
            kept.setdefault(path, set()).add(name)
    put_into(arrival.parts, mine["parts"], kept)


def put_into_datasets(loop: TrainLoop[Any], values: dict[int, dict[str, Any]]) -> None:
    for i, dataset in enumerate(_datasets(loop)):
        vars(dataset).update(values.get(i, {}))


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of an optimizer, what its ``state_dict()`` does not have."""
    state = optimizer_state(optimizer, hooks=False)
    return {name: value for name, value in state.items() if name not in ("state", "param_groups", "defaults")}
