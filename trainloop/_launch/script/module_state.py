"""Send what the script has set in its modules: a rank imports them again, and would use the values of the import.

The caller describes the attributes of the user's modules and classes (:func:`dumped_modules`): plain values and small
objects are sent, functions and classes are named. Once a rank has imported such a module, it compares the attributes
with its own, and writes those that differ (:func:`receive_modules`). Only differences count, so an unchanged module
costs one comparison, and values that the import derives from the rank (``LOCAL_RANK = int(os.environ[...])``) stay.
Functions, classes and objects of the script that it has put into other libraries are sent, too, where its modules refer
to these libraries.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import pickle
import random
import re
import sys
import threading
import types
import warnings
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from trainloop._launch.script.assignments import assigned_in_libraries
from trainloop._launch.script.rank_names import rank_dependent
from trainloop._support.user_line import warn
from trainloop._transfer import load_device
from trainloop._transfer.pickling import Pickler, StateUnpickler
from trainloop._transfer.users_modules import in_library, users_modules

_MOST_BYTES = 1 << 20  # of one value; of a larger one, type, length and the beginning are compared
_MOST_IN_ALL = 16 << 20
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_METHODS = (staticmethod, classmethod, property)
_PYTHONS = frozenset({  # most values of libraries have these types
    *_ATOMS, dict, frozenset, list, set, tuple, types.BuiltinFunctionType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.MethodDescriptorType, types.ModuleType, types.WrapperDescriptorType,
})  # fmt: skip
_WITHOUT_STATE = ("typing", "__future__", "logging", "re", "abc", "_abc", "threading", "_thread")
_WEAK = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_COMPILERS_OWN = re.compile(r"__\w*_\d")
_MISSING = object()
_OWN_FILE = ""
_FILE_LOADER = importlib.machinery.SourceFileLoader


class _Sent(NamedTuple):
    """An attribute of a module or class of the caller."""

    kind: str
    """``'atom'``, ``'pickle'``, ``'known'`` (a pickle with references to the work), ``'function'``, or ``'unsent'``."""
    value: Any
    """The value, its pickle, a function's description, or the type and length of an object that can't be sent."""
    extra: Any = None
    """Pickle of a function that has no importable name; the reason why an object can't be sent."""


# --------------------------------------------------------------------------------------------------------------------
# In the caller
# --------------------------------------------------------------------------------------------------------------------


def dumped_modules(
    known: Sequence[object] = (), used: list[object] | None = None, large: list[object] | None = None
) -> bytes:
    """Return a description of the state of the user's modules, for :func:`receive_modules` in a rank.

    Parameters
    ----------
    known : sequence of objects
        Objects that are sent with the work. Variables that refer to them do so in the rank, too.
    used : list, optional
        Receives those to which variables refer, which the rank passes to the result of :func:`receive_modules`. The
        script's functions and classes are among them: they must be in one pickle with those of the work, or they would
        have other global variables than these.
    large : list, optional
        Receives the values that are too large.
    """
    users = users_modules()
    limit = _Limit(_MOST_IN_ALL, known, used)
    limit.large = limit.large if large is None else large
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects may warn if their attributes are read or pickled
        found = {name: dict(_sent_values(module, limit)) for name, module in users.items()}
        for name, path, value in _patches(users):
            found.setdefault(name, {})[path] = _sent_value(value, name, path, limit)
        for name, path, value in assigned_in_libraries(users):
            if not _is_own(value):
                found.setdefault(name, {}).setdefault(path, _sent_value(value, name, path, limit))
    return pickle.dumps(found)


class SentModules:
    """The state of the user's modules in a pickle: unpickling calls :func:`receive_modules`, and returns a callable.

    It takes no arguments, and must be called after the rest of the pickle has been read.

    Parameters
    ----------
    known : sequence of objects
        Objects to which the rest of the pickle may refer. Variables that refer to them do so after unpickling, too.
    """

    def __init__(self, known: Sequence[object]) -> None:
        self._known = known

    def __reduce__(self) -> tuple[Any, ...]:
        used: list[object] = []
        return _received, (dumped_modules(self._known, used), used)


class LoadedCode:
    """The loaded versions of the user's modules and the functions replaced in them; kept ranks must have the same.

    Comparisons consider modules that both objects know: a module that was imported later has no older version.
    """

    def __init__(self) -> None:
        users = users_modules()
        self._specs = {name: module.__spec__ for name, module in users.items()}  # reloading creates a new one
        self._patches = {(name, path): value for name, path, value in _patches(users)}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LoadedCode):
            return NotImplemented
        both = self._specs.keys() & other._specs.keys()
        pairs = [(self._specs[name], other._specs[name]) for name in both]
        pairs += [(value, other._patches.get(place)) for place, value in self._patches.items()]
        return all(one is another for one, another in pairs) and self._patches.keys() == other._patches.keys()

    __hash__ = None  # type: ignore[assignment]  # only compared


def _patches(users: Mapping[str, types.ModuleType]) -> Iterator[tuple[str, str, Any]]:
    """Find what the user has put into modules and classes of libraries to which the user's modules refer.

    These are functions, methods and properties of the user's modules, classes, and objects of these classes.
    """
    programs, function = [*users.values(), sys.modules["__main__"]], types.FunctionType
    own, names = {id(vars(module)) for module in programs}, {*users, "__main__"}

    def is_users(value: Any) -> bool:
        kind = type(value)  # not isinstance: torch has objects whose __class__ warns
        if kind in _METHODS or kind is partial:
            value = value.fget if kind is property else value.func if kind is partial else value.__func__
            kind = type(value)
        if kind is function:
            return id(value.__globals__) in own
        return (value if issubclass(kind, type) else kind).__module__ in names

    named: dict[int, Any] = {}
    found: list[Any] = [
        *programs,
        torch,
        torch.nn,
    ]  # a program with ``import torch`` may set ``torch.nn.functional.gelu``
    for _ in range(2):
        inside = {
            id(value): value
            for module in found
            for name, value in list(vars(module).items())
            if (type(value) is types.ModuleType or issubclass(type(value), type)) and name[0] != "_"
        }
        found = [value for key, value in inside.items() if type(value) is types.ModuleType and key not in named]
        named.update(inside)
    for owner in named.values():
        is_class = isinstance(owner, type)
        module, prefix = (owner.__module__, f"{owner.__qualname__}.") if is_class else (owner.__name__, "")
        if module in names or module not in sys.modules or "<locals>" in prefix:
            continue
        for path, value in list(vars(owner).items()):
            kind = type(value)
            if id(value.__globals__) in own if kind is function else kind not in _PYTHONS and is_users(value):
                yield module, prefix + path, value


def _sent_value(value: Any, module: str, path: str, limit: _Limit) -> _Sent:
    if isinstance(value, (*_FUNCTIONS, *_METHODS)):
        return _sent_function(value, module, path, getattr(sys.modules[module], "__file__", None), limit)
    return _Sent("atom", value) if type(value) in _ATOMS else _sent_object(value, limit)


def _is_own(value: Any) -> bool:
    """Return True if each process has its own: a module, a weak reference, or a generator, which imports seed."""
    # Not a constant: numpy.random is imported when it is first read, in 8 ms.
    generators = random.Random, np.random.Generator, np.random.RandomState, torch.Generator
    return isinstance(value, (types.ModuleType, weakref.ref, weakref.finalize, *generators))


def _sent_values(module: types.ModuleType, limit: _Limit) -> Iterator[tuple[str, _Sent]]:
    name, file = module.__name__, module.__file__
    for path, value in _values_by_path(vars(module), name):
        if type(value) in _ATOMS:
            yield path, _Sent("atom", value)
        elif isinstance(value, ContextVar):
            if (set_here := value.get(_MISSING)) is not _MISSING:
                yield path, _sent_object(set_here, limit)
        elif isinstance(value, threading.local):
            yield path, _sent_object(vars(value), limit)
        elif isinstance(value, (*_FUNCTIONS, *_METHODS)):
            sent = _sent_function(value, name, path, file, limit)
            # Import hooks, such as pytest's, change the code; ranks may import the module without them.
            yield path, sent if type(module.__loader__) is _FILE_LOADER else sent._replace(value=sent.value[:4])
            if isinstance(registry := getattr(value, "registry", None), types.MappingProxyType):
                yield f"{path}.registry", _sent_object(dict(registry), limit)
        elif not _is_own(value) and type(value).__module__.partition(".")[0] not in _WITHOUT_STATE:
            yield path, _sent_object(value, limit)


def _values_by_path(namespace: Mapping[str, Any], module: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module and of its own classes by their paths, without those of Python and torch.

    ``torch.compile`` puts what a compiled function uses into its module, such as ``__builtins_dict___0``, and fails in
    a process where such a name exists already.
    """
    for name, value in list(namespace.items()):
        pythons_own = name.startswith("__") and (name.endswith("__") or (not prefix and _COMPILERS_OWN.match(name)))
        if pythons_own and not (prefix and isinstance(value, types.FunctionType)):
            continue
        path = prefix + name
        yield path, value
        own_class = isinstance(value, type) and value.__module__ == module and value.__qualname__ == path
        if own_class and not hasattr(value, "__members__"):  # an enum can't be changed
            yield from _values_by_path(vars(value), module, f"{path}.")


def _sent_function(value: Any, module: str, path: str, file: str | None, limit: _Limit) -> _Sent:
    description = _description(value, file)
    made_by = description[2]
    own = description[:2] == (module, path)
    # By name: its own code, code of a library's decorator or of a dataclass, and functions and classes of other places.
    if own and (made_by in (None, _OWN_FILE, "<string>") or in_library(made_by)):
        return _Sent("function", description)
    if not own and _resolved(*description[:2]) is value:
        return _Sent("function", description)
    file_ = io.BytesIO()
    pickler = _ObjectPickler(limit, file_)
    try:
        pickler.dump(value if getattr(value, "__module__", None) == "__main__" else _copied_function(value))
    except Exception as error:  # whatever is in a closure
        return _Sent("function", description, str(error))
    if pickler.kind == "known":
        return _Sent("known", file_.getvalue())
    return _Sent("function", description, file_.getvalue())


def _copied_function(function: Any) -> Any:
    """Return a copy of a function, which is sent by value although the original has a name in a module."""
    if type(function) is not types.FunctionType:
        return function
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__qualname__, copy.__module__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__module__,
    )
    copy.__dict__.update(function.__dict__)
    return copy


def _description(value: Any, own_file: str | None) -> tuple[Any, ...]:
    """Return a function's or class's module, name, file and code, to compare it between processes.

    The module's own file has no name here: a library may generate it in each process, in a folder of its own.
    """
    inner = [value]
    if isinstance(value, property):
        inner = [part for part in (value.fget, value.fset, value.fdel) if part is not None]
    elif isinstance(value, staticmethod | classmethod):
        inner = [value.__func__]
    first = inner[0] if inner else value
    code = getattr(first, "__code__", None)
    place = (getattr(first, "__module__", None), getattr(first, "__qualname__", ""))
    if not isinstance(code, types.CodeType):  # types.FunctionType has such an attribute, too
        return (*place, None, type(value).__name__)
    file = _OWN_FILE if code.co_filename == own_file else code.co_filename
    return (*place, file, type(value).__name__, tuple(_digest(getattr(f, "__code__", None)) for f in inner))


def _digest(code: Any) -> int:
    if not isinstance(code, types.CodeType):
        return 0
    parts = [code.co_code, repr(code.co_names).encode()]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            parts.append(str(_digest(constant)).encode())
        elif isinstance(constant, frozenset):  # its order differs between processes
            parts.append(repr(sorted(map(repr, constant))).encode())
        else:
            parts.append(repr(constant).encode())
    return zlib.crc32(b"\0".join(parts))


def _resolved(module: str | None, qualname: str) -> Any:
    found: Any = sys.modules.get(module or "") if module != "__main__" else None
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


class _Limit(io.RawIOBase):
    """A file of limited size. ``left`` is the number of bytes that all values may still use."""

    def __init__(self, left: int, known: Sequence[object] = (), used: list[object] | None = None) -> None:
        self.left = left
        self.large: list[object] = []
        """Values that were too large."""
        self.known = {id(obj): obj for obj in known}
        self.used = used
        self.numbers: dict[int, int] = {}
        """Positions in ``used``, by the objects' ids."""
        self.importable: dict[str, bool] = {}
        """Whether new processes find a module, which the values share: it is looked up in the file system."""
        self.parts: list[bytes] = []
        """What one value has written so far."""

    def is_known(self, obj: Any) -> bool:
        """Return True if an object is sent with the work: it is one of ``known``, or a definition of the script."""
        if self.used is not None and id(obj) not in self.known and isinstance(obj, (types.FunctionType, type)):
            own = getattr(obj, "__globals__", None) is vars(sys.modules["__main__"])
            if (own or obj.__module__ == "__main__") and _can_be_sent(obj):
                self.known[id(obj)] = obj
        return self.used is not None and id(obj) in self.known

    def write(self, data: Any) -> int:
        view = data.raw() if isinstance(data, pickle.PickleBuffer) else memoryview(data)
        self.parts.append(bytes(view[: _MOST_BYTES + 1]))
        self.left -= len(self.parts[-1])
        if self.left < 0 or sum(map(len, self.parts)) > _MOST_BYTES:
            raise _TooLargeError
        return len(view)

    def taken(self) -> bytes:
        data, self.parts = b"".join(self.parts), []
        return data


class _TooLargeError(Exception):
    pass


def _can_be_sent(obj: object) -> bool:
    try:
        Pickler(io.BytesIO(), lambda buffer: None).dump(obj)
    except Exception:  # whatever is in a closure or a global variable
        return False
    return True


class _ObjectPickler(Pickler):
    keeps_shared = False

    def __init__(self, limit: _Limit, file: Any = None) -> None:
        super().__init__(limit if file is None else file)
        self._limit = limit
        self._importable = limit.importable
        self.kind = "pickle"

    def persistent_id(self, obj: Any) -> int | None:
        if not self._limit.is_known(obj):
            return None
        assert self._limit.used is not None
        self.kind, numbers = "known", self._limit.numbers
        if id(obj) not in numbers:
            numbers[id(obj)] = len(numbers)
            self._limit.used.append(obj)
        return numbers[id(obj)]

    def is_importable(self, module: types.ModuleType) -> bool:
        if module.__name__ not in self._importable:
            self._importable[module.__name__] = super().is_importable(module)
        return self._importable[module.__name__]


def _sent_object(value: Any, limit: _Limit) -> _Sent:
    """Return the pickle of an object; its type and length if it can't be sent."""
    try:
        pickler = _ObjectPickler(limit)
        pickler.dump(value)
        return _Sent(pickler.kind, limit.taken())
    except _TooLargeError:
        limit.large.append(value)
        reason = "it is larger than 1 MiB" if limit.left >= 0 else "all such values together are larger than 16 MiB"
        # The order of a set differs between processes.
        begins = 0 if isinstance(value, (set, frozenset)) else zlib.crc32(b"".join(limit.parts)[:_MOST_BYTES])
    except Exception as error:  # whatever a __reduce__ raises
        reason = f"{type(error).__name__}: {error}"
        begins = 0
    limit.left += len(limit.taken())
    length = None
    with contextlib.suppress(Exception):
        length = len(value)
    return _Sent("unsent", (type(value).__module__, type(value).__qualname__, length, begins), reason)


# --------------------------------------------------------------------------------------------------------------------
# In a rank
# --------------------------------------------------------------------------------------------------------------------


def receive_modules(dumped: bytes, device: torch.device | None = None, warns: bool = True) -> Callable[..., None]:
    """Give the user's modules of this process the caller's state: now, or as soon as they have been imported.

    Parameters
    ----------
    dumped : bytes
        The caller's :func:`dumped_modules`.
    device : torch.device, optional
        Destination of tensors that were on a CUDA device; the CPU by default.
    warns : bool
        True on the rank that warns about attributes that could not be sent.

    Returns
    -------
    callable
        To be called once the work has been opened, with the objects of the work that were ``used``: writes the
        attributes that refer to these, or to modules imported later.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Receiver)]
    receiver = _Receiver(pickle.loads(dumped), device, warns)
    sys.meta_path.insert(0, receiver)
    for name in receiver.sent:
        if name in sys.modules:
            receiver.write(sys.modules[name])
    return receiver.finish


def _received(dumped: bytes, used: Sequence[object]) -> Callable[[], None]:
    return partial(receive_modules(dumped), used)


class _NotImportedError(Exception):
    pass


def _register(function: Any, registry: Mapping[type, Any]) -> None:
    for kind, implementation in registry.items():
        function.register(kind, implementation)


class _Receiver:
    """Writes the caller's attributes into modules, at the end of their import: a finder of ``sys.meta_path``."""

    def __init__(self, sent: dict[str, dict[str, _Sent]], device: torch.device | None, warns: bool) -> None:
        self.sent = sent
        self._device, self._warns = device, warns
        self._late: list[tuple[types.ModuleType, str]] | None = []
        """Attributes to be written at the end; None after the end."""
        self._known: Sequence[object] = ()
        self._finding: set[str] = set()
        self._written: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders find, with a loader that finally calls :meth:`write`."""
        if name not in self.sent or name in self._finding:
            return None
        self._finding.add(name)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = None if find is None or finder is self else find(name, path, target)
                if spec is not None:
                    self._write_after(spec.loader)
                    return spec
        finally:
            self._finding.discard(name)
        return None

    def _write_after(self, loader: Any) -> None:
        execute: Any = getattr(type(loader), "exec_module", None)

        def exec_module(module: types.ModuleType) -> None:  # an import hook may have one loader for several modules
            vars(loader).pop("exec_module", None)
            execute(loader, module)
            if module.__name__ in self.sent:
                self.write(module)

        if execute is not None and not isinstance(loader, type):
            with contextlib.suppress(AttributeError):  # a loader without attributes of its own: written at the end
                loader.exec_module = exec_module

    def write(self, module: types.ModuleType) -> None:
        """Write the caller's attributes into a module that has been imported."""
        edited, file = [], getattr(module, "__file__", None)  # a built-in module has none
        self._written.add(module.__name__)
        for path, sent in self.sent[module.__name__].items():
            *parents, name = path.split(".")
            owner: Any = module
            for part in parents:
                owner = getattr(owner, part, None)
            own = vars(owner).get(name, _MISSING) if owner is not None else _MISSING
            put = partial(setattr, owner, name)
            if isinstance(own, ContextVar):
                own, put = own.get(_MISSING), own.set
            elif isinstance(own, threading.local):
                own = vars(own)
            elif isinstance(own, types.MappingProxyType):
                put = partial(_register, owner)  # of functools.singledispatch
            if owner is None or self._is_same(own, sent, file):
                continue
            known = sent.kind == "function" and own is not _MISSING
            if known and _description(own, file)[:4] == sent.value[:4]:
                if sent.value[2] == _OWN_FILE and type(module.__loader__) is _FILE_LOADER:
                    edited.append(path)  # the same function, with other code
                continue
            by_rank = not isinstance(own, types.FunctionType) and path in rank_dependent(module.__name__)
            if by_rank and sent.kind == "known" and self._late is not None:
                self._late.append((module, path))
                continue
            if by_rank and not (sent.kind == "known" and self._has_same_contents(own, sent)):
                # Not a number, of which each rank has its own (RANK), nor what a decorator has made of a function.
                if sent.kind in ("pickle", "known") and own is not _MISSING and not callable(own):
                    self._warn(module, path, own, "each derives it from its own rank, or by functions that read it")
                continue
            try:
                # A library's function may use the object, without an import of the user's module that has its class.
                imports = self._late is None and file is not None and in_library(file)
                self._set_sent(owner, name, own, sent, put, imports=imports)
            except Exception as error:
                if self._late is not None:
                    self._late.append((module, path))
                elif not isinstance(error, _NotImportedError) or own is _MISSING:
                    self._warn(module, path, own, str(error))
        if edited and self._warns and not set(edited) & rank_dependent(module.__name__):
            others = f" and {len(edited) - 1} more functions" if len(edited) > 1 else ""
            warn(
                f"the ranks have other code than this process for {module.__name__}.{edited[0]}{others}: the file "
                f"{module.__file__} has changed since this process imported it, and the ranks import the new version. "
                "Reload the module (importlib.reload), or start the program again."
            )

    def finish(self, known: Sequence[object] = ()) -> None:
        """Write the remaining attributes, now that the modules of the work have been imported."""
        late, self._late, self._known = self._late or [], None, known
        for name in self.sent.keys() & sys.modules.keys() - self._written:  # their loaders could not be extended
            self.write(sys.modules[name])
        for module, path in late:
            name, sent = module.__name__, self.sent[module.__name__]
            self.sent[name] = {path: sent[path]}
            try:
                self.write(module)
            finally:
                self.sent[name] = sent

    def _is_same(self, own: Any, sent: _Sent, file: str | None) -> bool:
        if sent.kind == "atom":
            return type(own) is type(sent.value) and (own == sent.value or own != own)
        if own is _MISSING or sent.kind == "known":
            return False
        if sent.kind == "function":
            return (
                isinstance(own, (*_FUNCTIONS, *_METHODS)) and _description(own, file)[: len(sent.value)] == sent.value
            )
        found = _sent_object(own, _Limit(_MOST_IN_ALL))
        return found[:2] == sent[:2]

    def _has_same_contents(self, own: Any, sent: _Sent) -> bool:
        pickles = (_sent_object(value, _Limit(_MOST_IN_ALL)) for value in (own, self._unpickled(sent.value)))
        return next(pickles)[:2] == next(pickles)[:2]

    def _set_sent(
        self, owner: Any, name: str, own: Any, sent: _Sent, put: Callable[[Any], object], *, imports: bool
    ) -> None:
        if sent.kind == "unsent":
            raise TypeError(sent.extra)
        if sent.kind == "atom":
            new = sent.value
        elif sent.kind in ("pickle", "known"):
            if sent.kind == "known" and self._late is not None:
                raise _NotImportedError("the work has not been opened")
            new = self._unpickled(sent.value, imports=imports)
        elif isinstance(sent.extra, bytes):
            new = self._unpickled(sent.extra)
        else:
            module, qualname = sent.value[:2]
            if module in self.sent and module not in sys.modules:
                importlib.import_module(module)
            new = _resolved(module, qualname)
            if new is None or (isinstance(owner, types.ModuleType) and (module, qualname) == (owner.__name__, name)):
                raise TypeError(sent.extra or f"{module}.{qualname} can't be found by its name")
        merged = _merged(own, new, set(map(id, self._known)))
        if merged is not own:
            put(merged)

    def _unpickled(self, stream: bytes, *, imports: bool = False) -> Any:
        with load_device(self._device):
            return _Unpickler(io.BytesIO(stream), self._known, {} if imports else self.sent).load()

    def _warn(self, module: types.ModuleType, path: str, own: Any, reason: str) -> None:
        if self._warns:
            has = "nothing" if own is _MISSING else f"the {type(own).__qualname__} of its import"
            warn(
                f"{module.__name__}.{path} of this process can't be sent to the ranks, which import the module again "
                f"({reason}). They have {has}. Set it when the module is imported, or keep it in the model, the "
                "dataset or a callback."
            )


class _Unpickler(StateUnpickler):
    def __init__(self, file: io.BytesIO, known: Sequence[object], users: Mapping[str, Any]) -> None:
        super().__init__(file, known)
        self._users = users

    def find_class(self, module: str, name: str) -> Any:
        """Find a class, but don't import ``users``' modules that this rank has not imported so far."""
        if module in self._users and module not in sys.modules:
            raise _NotImportedError(f"the ranks have not imported {module}")
        return super().find_class(module, name)


def _merged(own: Any, new: Any, known: Container[int]) -> Any:
    """Write ``new`` into the object ``own``, to which other modules may refer; return the object to be used.

    The work refers to objects with the ids ``known``: these are used themselves. A container gets their items, too.
    """
    if type(own) is not type(new) or isinstance(own, type):
        return new
    if id(new) in known:
        if type(own) in (dict, list, set) and own is not new:  # a closure or a default may refer to it
            own.clear()
            own.extend(new) if isinstance(own, list) else own.update(new)
        return new
    if isinstance(own, dict):
        items = {key: _merged(own[key], value, known) if key in own else value for key, value in dict.items(new)}
        own.clear()
        dict.update(own, items) if type(own) is not OrderedDict else own.update(items)
    elif isinstance(own, list) and type(own) is list:
        own[:] = new
    elif type(own) in (set, bytearray, *_WEAK):
        own.clear()
        own.extend(new) if isinstance(own, bytearray) else own.update(new)
        return own
    elif type(own).__reduce_ex__ is not object.__reduce_ex__ or hasattr(type(own), "__setstate__"):
        return new
    if type(getattr(own, "__dict__", None)) is dict and not callable(own):
        attributes = vars(own)
        items = {key: _merged(attributes.get(key), value, known) for key, value in vars(new).items()}
        attributes.clear()
        attributes.update(items)
        return own
    return own if isinstance(own, dict | list) else new
