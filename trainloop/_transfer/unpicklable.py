"""Find the parts of an object that can't be pickled: path, type and remedy."""

from __future__ import annotations

import functools
import io
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
from torch import Tensor, nn
from torch.optim import Optimizer

from trainloop._transfer.pickling import Pickler, contents_of_cell
from trainloop._transfer.torch_objects import optimizer_state

_MOST_FOUND = 5
_MOST_VISITED = 2000


@dataclass(frozen=True)
class Unpicklable:
    """A part that can't be sent."""

    path: str
    """Attributes, indices and keys from a root to the part, such as ``train_loader.dataset.transform.file``."""
    type: str
    """Name of the part's class."""
    reason: str
    """Error that pickling the part raised."""
    advice: str
    """Remedy."""

    def __str__(self) -> str:
        return f"{self.path}: {self.type}\n    {self.reason}\n    {self.advice}"


def find_unpicklable(roots: Mapping[str, object]) -> list[Unpicklable]:
    """Return at most five parts of ``roots`` that can't be pickled, beginning with the parts nearest to the roots.

    Parameters
    ----------
    roots : mapping of str to object
        Objects by the names that paths start with.
    """
    found: list[Unpicklable] = []
    visited: set[int] = set()
    # Breadth first: a part that several paths reach is named by the shortest.
    queue = deque(_failing(roots.items()))
    keep = list(queue)  # keep objects alive, so that their ids stay unique
    while queue and len(found) < _MOST_FOUND and len(visited) < _MOST_VISITED:
        path, obj = queue.popleft()
        if id(obj) in visited:
            continue
        visited.add(id(obj))
        advice = _known_advice(obj)
        # Name an object that is valid in one process only, not a part of this object: a thread, not its lock.
        parts = [] if advice else _failing((path + suffix, part) for suffix, part in _parts_by_path(obj))
        keep += parts
        queue.extend(parts)
        if not parts and (error := _error_of(obj)) is not None:
            general = _ADVICE_OF_GLOBALS if "<global " in path else _GENERAL_ADVICE
            found.append(Unpicklable(path.lstrip("."), type(obj).__qualname__, _reason(error), advice or general))
    return found


def explain(roots: Mapping[str, object], error: Exception) -> str:
    """Return the message of an ``UnpicklableError``.

    Parameters
    ----------
    roots : mapping of str to object
        The objects that were sent, by the names that paths start with.
    error : Exception
        The error of pickling, shown if no culprit is found.
    """
    found = find_unpicklable(roots)
    if not found:
        return f"an object that fit() sends to the ranks can't be pickled: {_reason(error)}"
    things = "\n".join(f"  {thing}" for thing in found)
    return f"these objects can't be sent to the ranks, which are other processes:\n{things}"


# --------------------------------------------------------------------------------------------------------------------
# Trial pickling
# --------------------------------------------------------------------------------------------------------------------


class _Probe(Pickler):
    """Pickle without storing the stream, and without reading the data of arrays and tensors."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), lambda buffer: None)

    def _reduce_storage(self, storage: Any) -> Any:
        return int, ()

    def _reduce_array(self, array: Any) -> Any:
        return NotImplemented if array.dtype.hasobject else (int, ())


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _error_of(obj: object) -> Exception | None:
    from trainloop._transfer.payload import pickled_for_spawning

    with pickled_for_spawning():
        try:
            _Probe().dump(obj)
        except Exception as error:  # whatever a user's __reduce__ raises
            return error
    return None


def _failing(parts: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the parts that can't be pickled, by bisection: a list may have millions of parts, most of which can."""
    parts = list(parts)
    if not parts or _error_of([part for _, part in parts]) is None:
        return []
    if len(parts) == 1:
        return parts
    # Testing halves takes log2(n) tests for each part that can't be pickled, instead of one test for every part.
    middle = len(parts) // 2
    return _failing(parts[:middle]) + _failing(parts[middle:])


# --------------------------------------------------------------------------------------------------------------------
# The parts of an object as pickling sees them, with names that the user knows
# --------------------------------------------------------------------------------------------------------------------


def _parts_by_path(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, functools.partial):
        yield ".func", obj.func
        yield from ((f".args[{i}]", value) for i, value in enumerate(obj.args))
        yield from ((f".keywords[{key!r}]", value) for key, value in obj.keywords.items())
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        yield ".__func__", obj.__func__
    elif isinstance(obj, types.FunctionType):
        yield from _function_parts(obj)
    elif isinstance(obj, type):
        yield from ((f".{name}", value) for name, value in vars(obj).items() if not _is_pythons(name, value))
    elif isinstance(obj, (staticmethod, classmethod)):
        yield "", obj.__func__
    elif isinstance(obj, property):
        yield from (("", f) for f in (obj.fget, obj.fset, obj.fdel) if f is not None)
    elif type(obj) in (list, tuple, set, frozenset, deque):
        yield from ((f"[{i}]", value) for i, value in enumerate(obj))
    elif isinstance(obj, types.MappingProxyType) or type(obj) is dict:
        yield from _items_by_path(obj.items())
    elif isinstance(obj, Tensor):
        yield from _attribute_parts(obj, vars(obj))
    elif isinstance(obj, Optimizer):  # its own __reduce__ leaves out most attributes, which are sent
        yield from _attribute_parts(obj, optimizer_state(obj))
    else:
        yield from _reduced_parts(obj)


def _is_pythons(name: str, value: object) -> bool:
    """Return True for a part of a class that cloudpickle leaves out, since a new class gets its own."""
    return name == "_abc_impl" or isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType))


def _items_by_path(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    for key, value in items:
        yield f"[{_short(key)}]", value
        if not isinstance(key, (str, int)):
            yield f"<key {_short(key)}>", key


def _short(key: object) -> str:
    if isinstance(key, (str, int, float, bytes, tuple)):
        text = repr(key)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return type(key).__qualname__


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from ((f".<closure {name}>", value) for value in contents_of_cell(cell))
    for i, value in enumerate(function.__defaults__ or ()):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        yield f".<default {names[i - len(function.__defaults__ or ())]}>", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f".<default {name}>", value
    yield from ((f".{name}", value) for name, value in vars(function).items())
    by_name = cloudpickle.cloudpickle._should_pickle_by_reference(function)
    if not by_name and Pickler(io.BytesIO()).module_of_variables(function) is None:
        names = cloudpickle.cloudpickle._extract_code_globals(function.__code__)
        scope = function.__globals__
        yield from ((f".<global {name}>", scope[name]) for name in names if name in scope)


def _reduced_parts(obj: Any) -> Iterator[tuple[str, Any]]:
    try:
        reduced = obj.__reduce_ex__(4)
    except Exception:  # the object itself can't be pickled, rather than a part of it
        return
    if not isinstance(reduced, tuple):
        return
    function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    yield f".<{getattr(function, '__name__', 'constructor')}>", function
    for i, value in enumerate(arguments or ()):
        yield (f".{type(obj).__name__}" if isinstance(value, type) else f".<argument {i}>"), value
    slots: Any = None
    if isinstance(state, tuple) and len(state) == 2 and all(s is None or isinstance(s, dict) for s in state):
        state, slots = state
    for part in (state, slots):
        if isinstance(part, dict):
            yield from _attribute_parts(obj, part)
        elif part is not None:
            yield ".<state>", part
    yield from ((f"[{i}]", value) for i, value in enumerate(items or ()))
    yield from _items_by_path(pairs or ())


def _attribute_parts(obj: Any, state: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(obj, nn.Module) and name in ("_modules", "_parameters", "_buffers"):
            yield from ((_attribute(child), part) for child, part in value.items())
        else:
            yield _attribute(name), value


def _attribute(name: object) -> str:
    # nn.Sequential and nn.ModuleList number their parts.
    return f"[{name}]" if not isinstance(name, str) or name.isdigit() else f".{name}"


# --------------------------------------------------------------------------------------------------------------------
# Texts
# --------------------------------------------------------------------------------------------------------------------


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:197]}..."


_LAZILY = "create it at first use, in the rank, and leave it out of __getstate__."
_GENERAL_ADVICE = f"{_LAZILY[0].upper()}{_LAZILY[1:]}"
_ADVICE_OF_GLOBALS = (
    "A function uses this global variable of the script: read the values that it needs in your process, and keep them "
    f"in the object (self.scale = FLAGS.scale), or {_LAZILY}"
)
_FILE = "An open file belongs to one process: keep its path and open it at first use, or leave it out of __getstate__."
_CONNECTION = f"A connection belongs to one process: keep its address; {_LAZILY}"
# Keys: the module, or the name, of one of the class's bases.
_ADVICE = {
    "io": _FILE,
    "_io": _FILE,
    "h5py": _FILE,
    "lmdb": _FILE,
    "mmap": f"A mapped file belongs to one process: keep its path; {_LAZILY}",
    "generator": "A generator can't be copied: keep the function that makes it, or convert it to a list.",
    "coroutine": "A coroutine can't be copied: keep the function that makes it.",
    "async_generator": "A generator can't be copied: keep the function that makes it.",
    "_thread": f"A lock belongs to one process, like everything that threads share: {_LAZILY}",
    "threading": f"Threads, and objects that they share, belong to one process: {_LAZILY}",
    "queue": f"A queue between threads belongs to one process: {_LAZILY}",
    "_queue": f"A queue between threads belongs to one process: {_LAZILY}",
    "socket": _CONNECTION,
    "_socket": _CONNECTION,
    "ssl": _CONNECTION,
    "select": _CONNECTION,
    "selectors": _CONNECTION,
    "sqlite3": f"A database connection belongs to one process: keep its path; {_LAZILY}",
    "concurrent": f"An executor's workers belong to one process: {_LAZILY}",
    "asyncio": f"An event loop and its tasks belong to one process: {_LAZILY}",
    "weakref": "A weak reference can't be sent: keep the object itself, or leave it out of __getstate__.",
    "frame": "A running frame can't be copied: keep the values that you need from it.",
    "traceback": "A traceback can't be copied: keep its text (traceback.format_exc()).",
    "_ctypes": "Memory of C code belongs to one process: keep the values, and create the pointer in the rank.",
    "subprocess": f"A running program belongs to the process that started it: {_LAZILY}",
    "multiprocessing": f"Create it with torch.multiprocessing.get_context('spawn'), or {_LAZILY}",
    "logging": f"A handler has a lock: keep the logger, which is sent by name, or {_LAZILY}",
    "_DispatchModule": (
        "An operator (torch.library.custom_op) can't be copied: define it in a module that the script imports."
    ),
    "ScriptFunction": (
        "A function in TorchScript can't be copied: define it in a module that the script imports, or use the original."
    ),
    "Stream": f"A stream belongs to one process's GPU context: {_LAZILY}",
    "Event": f"An event belongs to one process: {_LAZILY}",
}


def _known_advice(obj: object) -> str:
    """Return advice about an object of a type that is valid in one process only; an empty string for other types."""
    for base in type(obj).__mro__[:-1]:
        for name in (base.__module__.partition(".")[0], base.__name__):
            if name in _ADVICE:
                return _ADVICE[name]
    return ""
