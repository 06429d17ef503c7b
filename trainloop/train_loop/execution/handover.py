"""Send a loop to the ranks, and write its state back into the caller's objects; explain what can't be rebuilt."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler
from torch.utils.hooks import RemovableHandle

from trainloop._support.carried import names_of
from trainloop._support.user_line import warn
from trainloop._transfer import PackedState, pack_state, unpack_state
from trainloop._transfer.pages import trim
from trainloop._transfer.shared import KEPT, changed_parts, fingerprint, fingerprints, put_into, shared_parts
from trainloop._transfer.torch_objects import kept_attributes
from trainloop.data.feed.marks import LoaderMarks
from trainloop.data.loader.generators import generator_states, set_generator_states
from trainloop.model import OF_LOGS
from trainloop.optim.optimizers import note_steps_elsewhere, optimizers_of
from trainloop.optim.parameters import own_parameters, trained_modules
from trainloop.parallel.sharded.shards import is_mark_of_sharding, storage_address
from trainloop.parallel.transparent import attributes_of
from trainloop.train_loop.progress.loop_state import LoopState, added_attributes
from trainloop.train_loop.saving.script_values import (
    given_functions,
    put_script_values,
    script_values,
    script_variables,
)

COUNTERS = (
    *("epoch", "global_step", "total_iteration_idx", "timings_of_last_fit", "last_loss"),
    *("own_optimizer_states", "callbacks_of_ranks"),
    *("cut", "early_stop", "ends"),  # in this order: setting early_stop changes ends
)
# Attributes of the loop that callbacks may assign in ranks, and that come back if they have.
_SETTINGS = (
    *("optimizer", "criterion", "gradient_clip_norm", "grad_accumulation", "end_auto_eval"),
    *("num_epochs", "num_iterations", "collate_batch_pred_fn", "pred_transform_fn"),
)
_LOADERS = ("train_loader", "validation_loader", "test_loader")
_MISSING = object()
# A module's hooks, in dicts by the IDs that handles remember.
_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
# Attributes of every nn.Module that torch maintains.
_TORCH_OWN = frozenset(nn.Module().__dict__) - {"training"} | {*OF_LOGS, "_compiled_call_impl"}


def known_objects(loop: LoopState) -> list[object]:
    """Return the objects of a loop that both sides have, in the same order.

    They are sent as references. So a callback that is sent back still refers to the caller's model.
    """
    found: dict[int, object] = {}

    def add(objects: Iterable[object]) -> None:
        for item in objects:
            if item is not None:
                found.setdefault(id(item), item)

    add([loop, loop.history])
    for module in _root_modules(loop):
        add(module.modules())
        add(own_parameters(module))
        add(module.buffers())
    add([loop.optimizer, *optimizers_of(loop.optimizer), loop.criterion])
    for loader in (loop.train_loader, loop.validation_loader, loop.test_loader):
        add([loader, getattr(loader, "dataset", None)])
    add(loop.callbacks)
    for module in _modules(loop).values():
        for name in _HOOKS:
            add(vars(module).get(name, {}).values())
    return list(found.values())


def loaders_of(loop: LoopState) -> tuple[Any, Any, Any]:
    """Return the loop's three loaders; ``None`` for a missing one."""
    return loop.train_loader, loop.validation_loader, loop.test_loader


def _objects_by_path(loop: LoopState) -> dict[str, Any]:
    """Return a dict from path to object for all objects in optimizers, criterion, callbacks and modules' attributes."""
    roots: dict[str, object] = {"optimizer": loop.optimizer, "criterion": loop.criterion}
    for i, callback in enumerate(loop.callbacks):
        roots.update((f"callbacks.{i}.{name}", value) for name, value in kept_attributes(callback).items())
    roots.update(
        (f"modules.{root}.{path}.{name}", value) for (root, path, name), value in _plain_attributes(loop).items()
    )
    roots.update((f"tl.{name}", value) for name, value in added_attributes(loop).items())
    roots.update((path, own.value) for path, own in script_values(loop).items())
    given = given_functions(loop)
    roots.update((f"functions.{path}", one) for path, one in given.items())
    optimizers = [loop.optimizer, *optimizers_of(loop.optimizer)]
    own = [loop.criterion, *optimizers] if not isinstance(loop.criterion, nn.Module) else optimizers
    walked = {id(obj) for obj in (*own, *given.values())}
    apart = {id(obj): obj for obj in known_objects(loop) if id(obj) not in walked}
    return shared_parts(roots, apart)


def sent_objects(loop: LoopState) -> list[object]:
    """Return the objects that are sent with a loop, at any depth: other variables of the script may be the same."""
    found = {id(obj): obj for obj in known_objects(loop)}
    attributes = [*_plain_attributes(loop).values(), *added_attributes(loop).values(), loop.optimizer, loop.criterion]
    attributes += [value for callback in loop.callbacks for value in kept_attributes(callback).values()]
    data: list[Any] = [loader for loader in loaders_of(loop) if loader is not None]
    for one in data:  # grows: a loader has a dataset and a sampler, which may have others
        found[id(one)] = one
        own = kept_attributes(one).values()
        data += [part for part in own if isinstance(part, (Dataset, Sampler)) and id(part) not in found]
        attributes += own
    parts = shared_parts({str(number): value for number, value in enumerate(attributes)}, {})
    # The script's functions are sent with the values that they use; a module may have them under its own name, too.
    used = script_values(loop, adds=lambda value: True, also=[*data, *attributes, *parts.values()])
    parts |= script_variables(used, {id(part): part for part in parts.values()})
    return [*found.values(), *parts.values()]


class CallerSide:
    """The caller's side of a run in ranks: the parts of the loop that receive the ranks' state."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop
        self._known = known_objects(loop)
        self._objects = _objects_by_path(loop)
        self._callbacks = list(loop.callbacks)
        self._script = self._script_now()
        self.paths = tuple(self._objects)
        """Paths of the parts, for :class:`RankSide`. Both sides number the parts in the same way."""

    def receive(self, data: PackedState) -> Any:
        """Write a rank's end state into the caller's objects; return the ``result`` that was sent with it."""
        state = unpack_state(data, [*self._known, *self._objects.values()])
        self._keep_own_changes(state)
        _receive(self._loop, state, self._callbacks)
        if self._loop.progress.global_step:
            note_steps_elsewhere(self._loop.optimizer)
        # Tensors that share a parameter's memory already have the parameter's values. (A rank with shards sends initial
        # values.)
        own = {storage_address(tensor) for _, tensor in _tensors_by_name(self._loop)} - {0}
        tensors = {path: obj for path, obj in self._objects.items() if isinstance(obj, torch.Tensor)}
        views = {path for path, tensor in tensors.items() if storage_address(tensor) in own}
        put_into(self._objects, {path: value for path, value in state["parts"].items() if path not in views})
        for text in state["warnings"]:
            warn(text)
        result = state["result"]
        del state  # free the model's memory now
        trim()
        return result

    def _script_now(self) -> dict[str, Any]:
        values = script_values(self._loop)
        return {path: fingerprint(own.value, self._known, fixed=True) for path, own in values.items()}

    def _keep_own_changes(self, state: dict[str, Any]) -> None:
        """Remove from a rank's state the script's values that this process has changed since, in another thread."""
        own = {path for path, mark in self._script_now().items() if mark != self._script.get(path)}
        for changes in (state["script"], state["parts"]):
            for path in [one for one in changes if any(f"{one}.".startswith(f"{mine}.") for mine in own)]:
                del changes[path]


class RankSide:
    """The rank's side of a run: remembers the loop's state on arrival, so that only changes are sent back.

    One rank of each host ``sends`` its state. The other ranks only call the callbacks' ``__getstate__``, since it may
    be an exchange between all ranks.
    """

    def __init__(self, loop: LoopState, paths: Iterable[str] = (), *, sends: bool = True) -> None:
        self._loop, self._sends = loop, sends
        self.callbacks = list(loop.callbacks)
        """Callbacks that the caller sent; hooks may later change the loop's list."""
        # A pickled optimizer loses a mark set by torch's schedulers, which would then print a warning.
        warnings.filterwarnings("ignore", message=r"Seems like `optimizer\.step\(\)` has been overridden")
        if not sends:
            return
        found = _objects_by_path(loop)
        self.parts = {path: found[path] for path in paths if path in found}
        """Objects that exist on both sides, by path."""
        # A part that is missing here is replaced by an object, so that the other parts keep their numbers.
        self.known = [*known_objects(loop), *(found.get(path, object()) for path in paths)]
        """Objects that both sides have, in the same order."""
        self._loaders = loaders_of(loop)  # a hook may replace them
        self._marks = [LoaderMarks(loader) for loader in self._loaders]
        self._settings = {name: getattr(loop, name) for name in _SETTINGS}
        self._of_callbacks = [set(vars(callback)) for callback in self.callbacks]
        self._modules = _modules(loop)
        self._children = {key: _children(module) for key, module in self._modules.items()}
        self._structures = {key: _structure(module) for key, module in self._modules.items()}
        self._attributes = {
            key: fingerprint(value, self.known, fixed=True) for key, value in _plain_attributes(loop).items()
        }
        added = added_attributes(loop)
        self._added = {name: fingerprint(value, self.known, fixed=True) for name, value in added.items()}
        attributes = _tensor_attributes(loop)
        self._of_tensors = {key: fingerprint(own, self.known, fixed=True) for key, own in attributes.items()}
        script = script_values(loop)
        self._script = {path: fingerprint(own.value, self.known, fixed=True) for path, own in script.items()}
        self._arrived = fingerprints(self.parts, self.known)

    def end_state(self, result: Any) -> PackedState | None:
        """Return the loop's current state (its tensors are not copied) and ``result``, for :class:`CallerSide`."""
        loop = self._loop
        callbacks = [_callback_state(callback) for callback in self.callbacks]
        if not self._sends:
            return None
        # A module of the caller may be elsewhere now. A new one is sent as a child of a module of the caller.
        now = {id(module): key for key, module in _modules(loop).items()}
        remaining = {key: module for key, module in self._modules.items() if id(module) in now}
        then = {id(module): key for key, module in remaining.items()}
        state = {
            "modules": {
                key: self._sent_children(module, now[id(module)][1], then)
                for key, module in remaining.items()
                if _children(module) != self._children[key]
            },
            "structures": {
                key: _sent_structure(module)
                for key, module in remaining.items()
                if _structure(module) != self._structures[key]
                and self._can_send(_sent_structure(module), f"module {key[1]!r}, changed in training, can't be pickled")
            },
            "settings": self._changed_settings(),
            "added": self._changed_additions(),
            "deleted of loop": [name for name in self._added if name not in vars(loop)],
            "warnings": self._about_loaders(),
            "tensors": {key: (t.detach().cpu(), t.requires_grad) for key, t in _tensors_by_name(loop) if not t.is_meta},
            "attributes": self._changed_attributes(now),
            "deleted": [
                (*now[id(module)], name)
                for root, path, name in self._attributes
                if (module := remaining.get((root, path))) is not None and name not in vars(module)
            ],
            "attributes of tensors": {
                key: own
                for key, own in _tensor_attributes(loop).items()
                if fingerprint(own, self.known) != self._of_tensors.get(key)
                and self._can_send(own, f"an attribute of {key[1]}, set in training, can't be pickled")
            },
            "parts": changed_parts(self.parts, self._arrived, self.known),
            "script": {
                path: own.value
                for path, own in script_values(loop).items()
                if self.parts.get(path) is not own.value
                and fingerprint(own.value, self.known) not in (None, self._script.get(path))
            },
            "generators": generator_states(self._loaders),
            "history": loop.history.state_dict(),
            "scaler": loop.scaler_state,
            "counters": {name: getattr(loop, name) for name in COUNTERS},
            "callbacks": list(map(self._that_can_be_sent, callbacks, self.callbacks)),
            "deleted of callbacks": [
                names - set(vars(cb)) for names, cb in zip(self._of_callbacks, self.callbacks, strict=True)
            ],
            "list of callbacks": self._changed_list(),
            "result": result,
        }
        packed = pack_state(state, self.known)
        if self._rebuild_error(packed) is not None:  # without this, the caller would lose all of the training
            self._leave_out_what_fails(state)
            packed = pack_state(state, self.known)
        return packed

    def _sent_children(self, module: nn.Module, path: str, known: Mapping[int, Any]) -> dict[str, Any]:
        """Return a module's children by name; in place of one that can't be sent, the receiver keeps what it has."""
        children: dict[str, Any] = dict(module._modules)
        for name, child in children.items():
            problem = f"module {f'{path}.{name}'.lstrip('.')!r}, added in training, can't be pickled"
            if child is not None and id(child) not in known and not self._can_send(child, problem):
                children[name] = KEPT
        return children

    def _changed_attributes(self, now: Mapping[int, tuple[int, str]]) -> dict[tuple[int, str, str], Any]:
        """Return the attributes that have changed in modules of the caller, by where the modules are now."""
        then = {now[id(module)]: key for key, module in self._modules.items() if id(module) in now}
        changed = {}
        for key, value in _plain_attributes(self._loop).items():
            if key[:2] not in then:  # the attribute of a new module, which is sent with it
                continue
            mark, before = fingerprint(value, self.known), self._attributes.get((*then[key[:2]], key[2]))
            if mark is None:
                if before is not None:
                    warn(f"model attribute {key[2]!r} can no longer be pickled, so your process keeps the old value.")
            elif mark != before:
                changed[key] = value
        return changed

    def _rebuild_error(self, packed: PackedState) -> Exception | None:
        """Return the error of an object that can be pickled, but not rebuilt from the pickle. No memory is copied."""
        try:
            unpack_state(packed._replace(buffers=list(packed.buffers)), self.known)
        except Exception as error:  # whatever a user's __setstate__ or __init__ raises
            return error
        return None

    def _rebuilds(self, value: Any, what: str) -> bool:
        """Return True if a value can be rebuilt from its pickle; otherwise warn."""
        error = self._rebuild_error(pack_state(value, self.known))
        if error is not None:
            warn(f"{what} can't be rebuilt in your process, which keeps what it has. {type(error).__name__}: {error}")
        return error is None

    def _leave_out_what_fails(self, state: dict[str, Any]) -> None:
        """Remove the entries of the state that can't be rebuilt, with a warning for each."""
        described = {
            "structures": "module {0[1]!r}, changed in training,",
            "settings": "tl.{0}, assigned in training,",
            "added": "tl.{0}, assigned in training,",
            "attributes": "model attribute {0[2]!r}",
            "attributes of tensors": "an attribute of {0[1]}, set in training,",
            "script": "{0}, changed in training,",
        }
        for kind, what in described.items():
            state[kind] = {key: v for key, v in state[kind].items() if self._rebuilds(v, what.format(key))}
        for (_, path), children in state["modules"].items():
            for name, child in children.items():
                if not self._rebuilds(child, f"module {f'{path}.{name}'.lstrip('.')!r}, added in training,"):
                    children[name] = KEPT
        for path, contents in list(state["parts"].items()):
            if isinstance(contents, dict):
                fails = {key for key, v in contents.items() if not self._rebuilds((key, v), f"{path}: {key}")}
                state["parts"][path] = {key: KEPT if key in fails else v for key, v in contents.items()}
            elif not self._rebuilds(contents, path):
                del state["parts"][path]
        state["callbacks"] = [
            {k: v for k, v in own.items() if self._rebuilds(v, f"{callback!r}: its {k}")}
            if isinstance(own, dict)
            else own
            for own, callback in zip(state["callbacks"], self.callbacks, strict=True)
        ]
        if state["list of callbacks"] is not None:
            state["list of callbacks"] = [
                one
                for one in state["list of callbacks"]
                if self._rebuilds(one, f"callback {one.callback_name!r}, added in training,")
            ]

    def _changed_settings(self) -> dict[str, Any]:
        """Return what hooks have assigned to the loop, except for loaders."""
        now = {name: getattr(self._loop, name) for name in _SETTINGS}
        return {
            name: value
            for name, value in now.items()
            if value is not self._settings[name]
            and self._can_send(value, f"tl.{name}, assigned in training, can't be pickled")
        }

    def _changed_additions(self) -> dict[str, Any]:
        """Return the attributes of the loop that hooks have added, or have assigned or changed in place."""
        return {
            name: value
            for name, value in added_attributes(self._loop).items()
            if self.parts.get(f"tl.{name}") is not value  # otherwise its changes are among those of the parts
            and fingerprint(value, self.known) != self._added.get(name, _MISSING)
            and self._can_send(value, f"tl.{name}, assigned in training, can't be pickled")
        }

    def _about_loaders(self) -> list[str]:
        """Return a warning for each loader that hooks have replaced or changed, since data do not come back."""
        found = []
        for name, before, marks in zip(_LOADERS, self._loaders, self._marks):
            if before is None:
                continue
            if getattr(self._loop, name) is not before:
                found.append(
                    f"tl.{name} was assigned in the ranks, and loaders do not come back: your process has the one that "
                    "you passed. To use another one after fit, assign it there."
                )
            elif marks.changed(by_epoch=False):
                found.append(
                    f"tl.{name} or its dataset or sampler was changed in the ranks, and data do not come back: in your "
                    "process, they are unchanged. To use the change after fit, make it there, too."
                )
        return found

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


def _plain_attributes(loop: LoopState) -> dict[tuple[int, str, str], Any]:
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


def _tensor_attributes(loop: LoopState) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the attributes that code has set on parameters and buffers, of those that have any."""
    return {key: own for key, tensor in _tensors_by_name(loop) if (own := attributes_of(tensor))}


def _receive(loop: LoopState, state: dict[str, Any], callbacks: list[Any]) -> None:
    _put_structures(loop, state["modules"], state["structures"])
    _put_tensors(loop, state["tensors"])
    _put_plain_attributes(loop, state["attributes"], state["deleted"])
    for key, tensor in _tensors_by_name(loop):
        vars(tensor).update(state["attributes of tensors"].get(key, {}))
    put_script_values(loop, state["script"])
    set_generator_states(loaders_of(loop), state["generators"])
    loop.history.load_state_dict(state["history"])
    loop.scaler_state = state["scaler"]
    loop.note(**state["settings"], **state["added"])
    for name in state["deleted of loop"]:
        vars(loop).pop(name, None)
    for name, value in state["counters"].items():
        setattr(loop, name, value)
    for callback, saved, names in zip(callbacks, state["callbacks"], state["deleted of callbacks"], strict=True):
        _put_callback_state(callback, saved)
        for name in names:
            vars(callback).pop(name, None)
    if state["list of callbacks"] is not None:
        loop.note(callbacks=state["list of callbacks"])


def _put_tensors(loop: LoopState, values: Mapping[tuple[int, str], tuple[torch.Tensor, bool]]) -> None:
    """Write values and ``requires_grad`` into a loop's parameters and buffers."""
    tensors = dict(_tensors_by_name(loop))
    with torch.no_grad():
        for key, (value, requires_grad) in values.items():
            own = tensors.get(key)
            if own is not None and own.shape == value.shape and own.dtype == value.dtype:
                own.copy_(value)
                if own.requires_grad != requires_grad:
                    own.requires_grad_(requires_grad)
            elif isinstance(own, nn.Parameter) and not nn.parameter.is_lazy(own):  # ``p.data = ...`` during the run
                own.data = value.to(own.device)
                own.grad = None
                own.requires_grad_(requires_grad)
            elif not requires_grad:  # a buffer that was created or reshaped during the run
                root, path = key
                owner, _, name = path.rpartition(".")
                _root_modules(loop)[root].get_submodule(owner).register_buffer(name, value)


def _put_plain_attributes(
    loop: LoopState, values: Mapping[tuple[int, str, str], Any], deleted: Iterable[tuple[int, str, str]]
) -> None:
    """Write the other side's :func:`_plain_attributes` into this side's modules; skip missing modules."""
    modules = _modules(loop)
    for root, path, name in deleted:  # such as one that became a buffer, which it would hide
        if (root, path) in modules:
            vars(modules[root, path]).pop(name, None)
    for (root, path, name), value in values.items():
        if (root, path) in modules:
            object.__setattr__(modules[root, path], name, value)


def _children(module: nn.Module) -> list[Any]:
    return [(name, _Same(child)) for name, child in module._modules.items()]


def _structure(module: nn.Module) -> list[Any]:
    """Return what a module has besides children and the values of its tensors, to compare it with a later state."""
    buffers = [(name, None if b is None else (b.shape, b.dtype)) for name, b in module._buffers.items()]
    persistent = sorted(module._non_persistent_buffers_set)
    hooks = [[(key, _Same(hook)) for key, hook in vars(module).get(name, {}).items()] for name in _HOOKS]
    parameters = [(name, _Same(p)) for name, p in module._parameters.items()]
    return [type(module), parameters, buffers, persistent, hooks]


class _Same:
    """An object that is compared by identity, and kept alive, so that no other object gets its address."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.obj is other.obj

    __hash__ = None  # type: ignore[assignment]  # only compared


def _sent_structure(module: nn.Module) -> dict[str, Any]:
    # The very dicts of hooks, since handles that callbacks keep refer to these.
    slots = {name: vars(module)[name] for name in (*_HOOKS, "_is_full_backward_hook") if name in vars(module)}
    slots["_parameters"] = dict(module._parameters)
    slots["_buffers"] = {name: None if b is None else b.detach().cpu() for name, b in module._buffers.items()}
    slots["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    return {"class": type(module), "slots": slots}


def _put_structures(
    loop: LoopState,
    children_of: Mapping[tuple[int, str], dict[str, Any]],
    changed: Mapping[tuple[int, str], dict[str, Any]],
) -> None:
    """Change modules as callbacks have changed them on the other side: children, parameters, buffers, hooks, class."""
    modules = _modules(loop)
    for key, children in children_of.items():
        mine = modules[key]._modules
        sent = {name: mine.get(name, KEPT) if child is KEPT else child for name, child in children.items()}
        mine.clear()
        mine.update((name, child) for name, child in sent.items() if child is not KEPT)
    for key, saved in changed.items():
        module = modules[key]
        module.__class__ = saved["class"]
        before = dict(module._buffers)
        for name, value in saved["slots"].items():
            vars(module)[name] = value
            if name in _HOOKS:  # a hook that is registered later must get another ID
                RemovableHandle.next_id = max([RemovableHandle.next_id, *(one + 1 for one in value)])
        for name, buffer in module._buffers.items():
            own = before.get(name)
            if own is not None and buffer is not None and (own.shape, own.dtype) == (buffer.shape, buffer.dtype):
                module._buffers[name] = own  # its values are written into it


def _put_callback_state(callback: Any, saved: Any) -> None:
    """Load the other side's :func:`_callback_state` into a callback."""
    if hasattr(callback, "__setstate__"):
        callback.__setstate__(saved)
    else:
        callback.__dict__.update(saved)


def _modules(loop: LoopState) -> dict[tuple[int, str], nn.Module]:
    """Return all modules, by root and name in it; list positions would shift when a callback adds a module."""
    roots = enumerate(_root_modules(loop))
    return {(root, path): module for root, top in roots for path, module in top.named_modules()}


def _root_modules(loop: LoopState) -> list[nn.Module]:
    return trained_modules(loop.model, loop.criterion)


def _tensors_by_name(loop: LoopState) -> Iterable[tuple[tuple[int, str], torch.Tensor]]:
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
