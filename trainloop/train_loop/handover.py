"""Send a loop to the ranks, and write its state back into the caller's objects."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainloop._support.carried import names_of
from trainloop._support.user_line import warn
from trainloop._transfer import PackedState, pack_state, unpack_state
from trainloop._transfer.pages import trim
from trainloop._transfer.shared import changed_parts, fingerprint, fingerprints, put_into, shared_parts
from trainloop._transfer.torch_objects import kept_attributes
from trainloop.data.orders import generator_states, set_generator_states
from trainloop.optim import optimizers_of
from trainloop.parallel.shards import is_mark_of_sharding

if TYPE_CHECKING:
    from trainloop.train_loop.loop import TrainLoop

__all__ = ["CallerSide", "RankSide", "loaders_of"]

COUNTERS = (
    *("epoch", "global_step", "total_iteration_idx", "timings_of_last_fit", "last_loss"),
    *("early_stop", "ends"),  # in this order: setting early_stop changes ends
)
_MISSING = object()
# Attributes of every nn.Module that torch maintains.
_TORCH_OWN = frozenset(nn.Module().__dict__) - {"training"} | {"_log_sink", "_log_batch_size", "_compiled_call_impl"}


def known_objects(loop: TrainLoop[Any]) -> list[object]:
    """Return the objects of a loop that both sides have, in the same order.

    They are sent as references. So a callback that is sent back still refers to the caller's model.
    """
    found: dict[int, object] = {}

    def add(objects: Iterable[object]) -> None:
        for item in objects:
            if item is not None:
                found.setdefault(id(item), item)

    add([loop, loop.message_service, loop.history])
    for module in _root_modules(loop):
        add(module.modules())
        add(module.parameters())
        add(module.buffers())
    add([loop.optimizer, *optimizers_of(loop.optimizer), loop.criterion])
    for loader in (loop.train_loader, loop.validation_loader, loop.test_loader):
        add([loader, getattr(loader, "dataset", None)])
    add(loop.callbacks)
    return list(found.values())


def loaders_of(loop: TrainLoop[Any]) -> tuple[Any, Any, Any]:
    """Return the loop's three loaders; ``None`` for a missing one."""
    return loop.train_loader, loop.validation_loader, loop.test_loader


def _parts(loop: TrainLoop[Any]) -> dict[str, Any]:
    """Return a dict from path to object for all objects in optimizers, criterion, callbacks and modules' attributes."""
    roots: dict[str, object] = {"optimizer": loop.optimizer, "criterion": loop.criterion}
    for i, callback in enumerate(loop.callbacks):
        roots.update((f"callbacks.{i}.{name}", value) for name, value in kept_attributes(callback).items())
    roots.update(
        (f"modules.{root}.{path}.{name}", value) for (root, path, name), value in _plain_attributes(loop).items()
    )
    optimizers = [loop.optimizer, *optimizers_of(loop.optimizer)]
    own = [loop.criterion, *optimizers] if not isinstance(loop.criterion, nn.Module) else optimizers
    apart = {id(obj): obj for obj in known_objects(loop) if all(obj is not other for other in own)}
    return shared_parts(roots, apart)


class CallerSide:
    """The caller's side of a run in ranks: the parts of the loop that receive the ranks' state."""

    def __init__(self, loop: TrainLoop[Any]) -> None:
        self._loop = loop
        self._known = known_objects(loop)
        self._parts = _parts(loop)
        self._callbacks = list(loop.callbacks)
        self.paths = tuple(self._parts)
        """Paths of the parts, for :class:`RankSide`. Both sides number the parts in the same way."""

    def receive(self, data: PackedState) -> Any:
        """Write a rank's end state into the caller's objects; return the ``result`` that was sent with it."""
        state = unpack_state(data, [*self._known, *self._parts.values()])
        _receive(self._loop, state, self._callbacks)
        # Tensors that share a parameter's memory already have the parameter's values. (A rank with shards sends initial
        # values.)
        own = {_address(tensor) for _, tensor in _tensors(self._loop)} - {0}
        views = {path for path, part in self._parts.items() if isinstance(part, torch.Tensor) and _address(part) in own}
        put_into(self._parts, {path: value for path, value in state["parts"].items() if path not in views})
        result = state["result"]
        del state  # free the model's memory now
        trim()
        return result


class RankSide:
    """The rank's side of a run: remembers the loop's state on arrival, so that only changes are sent back.

    One rank of each host ``sends`` its state. The other ranks only call the callbacks' ``__getstate__``, since it may
    be an exchange between all ranks.
    """

    def __init__(self, loop: TrainLoop[Any], paths: Iterable[str] = (), *, sends: bool = True) -> None:
        self._loop, self._sends = loop, sends
        self.callbacks = list(loop.callbacks)
        """Callbacks that the caller sent; hooks may later change the loop's list."""
        # A pickled optimizer loses a mark set by torch's schedulers, which would then print a warning.
        warnings.filterwarnings("ignore", message=r"Seems like `optimizer\.step\(\)` has been overridden")
        if not sends:
            return
        found = _parts(loop)
        self.parts = {path: found[path] for path in paths if path in found}
        """Objects that exist on both sides, by path."""
        # A part that is missing here is replaced by an object, so that the other parts keep their numbers.
        self.known = [*known_objects(loop), *(found.get(path, object()) for path in paths)]
        """Objects that both sides have, in the same order."""
        self._loaders = loaders_of(loop)  # a hook may replace them
        self._modules = _modules(loop)
        self._attributes = {
            key: fingerprint(value, self.known, fixed=True) for key, value in _plain_attributes(loop).items()
        }
        self._arrived = fingerprints(self.parts, self.known)

    def end_state(self, result: Any) -> PackedState | None:
        """Return the loop's current state (its tensors are not copied) and ``result``, for :class:`CallerSide`."""
        loop = self._loop
        callbacks = [_callback_state(callback) for callback in self.callbacks]
        if not self._sends:
            return None
        modules = _modules(loop)
        # Send only the outermost modules that a callback has added. References to the caller's objects are kept.
        added = {key for key, module in modules.items() if self._modules.get(key) is not module}
        added -= {(root, path) for root, path in added if (root, path.rpartition(".")[0]) in added}
        changed: dict[Any, Any] = {}
        for key, value in _plain_attributes(loop).items():
            if any(key[0] == root and f"{key[1]}.".startswith(f"{path}.") for root, path in added):
                continue
            mark = fingerprint(value, self.known)
            if mark is None:
                if self._attributes.get(key) is not None:
                    warn(f"model attribute {key[2]!r} can no longer be pickled, so your process keeps the old value.")
            elif mark != self._attributes.get(key):
                changed[key] = value
        state = {
            "modules": {
                key: modules[key]
                for key in added
                if self._can_send(modules[key], f"module {key[1]!r}, added in training, can't be pickled")
            },
            "tensors": {key: (t.detach().cpu(), t.requires_grad) for key, t in _tensors(loop) if not t.is_meta},
            "attributes": changed,
            "parts": changed_parts(self.parts, self._arrived, self.known),
            "generators": generator_states(self._loaders),
            "history": loop.history.state_dict(),
            "scaler": loop.scaler_state,
            "counters": {name: getattr(loop, name) for name in COUNTERS},
            "messages": loop.message_service.__dict__,
            "callbacks": list(map(self._that_can_be_sent, callbacks, self.callbacks)),
            "list of callbacks": self._changed_list(),
            "result": result,
        }
        return pack_state(state, self.known)

    def _can_send(self, value: Any, problem: str) -> bool:
        """Return True if a value can be pickled; otherwise warn."""
        can = fingerprint(value, self.known) is not None
        if not can:
            warn(f"{problem}, so your process does not get it.")
        return can

    def _changed_list(self) -> list[Any] | None:
        """Return the loop's callbacks if a hook has added or removed some; ``None`` if the list is unchanged.

        The caller gets copies of new callbacks.
        """
        now = self._loop.callbacks
        if len(now) == len(self.callbacks) and all(map(operator.is_, now, self.callbacks)):
            return None
        added = "added in training, can't be pickled"
        return [one for one in now if self._can_send(one, f"callback {one.callback_name!r}, {added}")]

    def _that_can_be_sent(self, state: Any, callback: Any) -> Any:
        if not isinstance(state, dict):
            return state
        return {k: v for k, v in state.items() if self._can_send(v, f"{callback!r}: its {k} can no longer be pickled")}


def _plain_attributes(loop: TrainLoop[Any]) -> dict[tuple[int, str, str], Any]:
    """Return the attributes of all modules, by root module, the module's name in it, and the attribute's name."""
    return {
        (root, path, name): value
        for (root, path), module in _modules(loop).items()
        for name, value in kept_attributes(module).items()
        # Attributes that __getstate__ omits or replaces are local to one process.
        if name not in _TORCH_OWN
        and not is_mark_of_sharding(name)
        and module.__dict__.get(name, _MISSING) is value
        and name not in names_of(module)  # rank 0's columns are not the columns of the caller
    }


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _receive(loop: TrainLoop[Any], state: dict[str, Any], callbacks: list[Any]) -> None:
    _put_modules(loop, state["modules"])
    _put_tensors(loop, state["tensors"])
    _put_plain_attributes(loop, state["attributes"])
    set_generator_states(loaders_of(loop), state["generators"])
    loop.history.load_state_dict(state["history"])
    loop.scaler_state = state["scaler"]
    for name, value in state["counters"].items():
        setattr(loop, name, value)
    loop.message_service.__dict__.update(state["messages"])
    for callback, saved in zip(callbacks, state["callbacks"], strict=True):
        _put_callback_state(callback, saved)
    if state["list of callbacks"] is not None:
        loop.callbacks = state["list of callbacks"]


def _put_tensors(loop: TrainLoop[Any], values: Mapping[tuple[int, str], tuple[torch.Tensor, bool]]) -> None:
    """Write values and ``requires_grad`` into a loop's parameters and buffers."""
    tensors = dict(_tensors(loop))
    with torch.no_grad():
        for key, (value, requires_grad) in values.items():
            own = tensors.get(key)
            if own is not None and own.shape == value.shape and own.dtype == value.dtype:
                own.copy_(value)
                if own.requires_grad != requires_grad:
                    own.requires_grad_(requires_grad)
            elif not requires_grad:  # a buffer that was created or reshaped during the run
                root, path = key
                owner, _, name = path.rpartition(".")
                _root_modules(loop)[root].get_submodule(owner).register_buffer(name, value)


def _put_plain_attributes(loop: TrainLoop[Any], values: Mapping[tuple[int, str, str], Any]) -> None:
    """Write the other side's :func:`_plain_attributes` into this side's modules; skip missing modules."""
    modules = _modules(loop)
    for (root, path, name), value in values.items():
        if (root, path) in modules:
            object.__setattr__(modules[root, path], name, value)


def _put_modules(loop: TrainLoop[Any], added: Mapping[tuple[int, str], nn.Module]) -> None:
    """Add or replace the modules that a callback has added or replaced on the other side."""
    for (root, path), module in added.items():
        owner, _, name = path.rpartition(".")
        _root_modules(loop)[root].get_submodule(owner)._modules[name] = module


def _put_callback_state(callback: Any, saved: Any) -> None:
    """Load the other side's :func:`_callback_state` into a callback."""
    if hasattr(callback, "__setstate__"):
        callback.__setstate__(saved)
    else:
        callback.__dict__.update(saved)


def _modules(loop: TrainLoop[Any]) -> dict[tuple[int, str], nn.Module]:
    """Return all modules, by root and name in it; list positions would shift when a callback adds a module."""
    roots = enumerate(_root_modules(loop))
    return {(root, path): module for root, top in roots for path, module in top.named_modules()}


def _root_modules(loop: TrainLoop[Any]) -> list[nn.Module]:
    return [loop.model, *([loop.criterion] if isinstance(loop.criterion, nn.Module) else [])]


def _tensors(loop: TrainLoop[Any]) -> Iterable[tuple[tuple[int, str], torch.Tensor]]:
    """Yield parameters and buffers (including non-persistent ones) by root module and name; tied ones only once."""
    for root, module in enumerate(_root_modules(loop)):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield (root, name), tensor


def _callback_state(callback: Any) -> Any:
    """Return the part of a callback that its ``__getstate__`` sends to another process."""
    get_state = getattr(type(callback), "__getstate__", None)
    if get_state is not None and get_state is not getattr(object, "__getstate__", None):
        return callback.__getstate__()
    return dict(callback.__dict__)
