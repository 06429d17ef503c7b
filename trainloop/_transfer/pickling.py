"""Pickle objects without an importable name and references to known ones, with the data of arrays beside the stream.

Classes and functions of ``__main__``, notebook cells and closures are sent by value (cloudpickle). The bytes of numpy
arrays and torch storages are sent as protocol 5's out-of-band buffers, so that the reader decides where to put them.
"""

from __future__ import annotations

import contextlib
import contextvars
import copyreg
import ctypes
import functools
import hashlib
import importlib.machinery
import inspect
import io
import mmap
import multiprocessing.process
import operator
import os
import pickle
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch.multiprocessing.reductions import rebuild_storage_fd, reduce_storage
from torch.utils.data import DataLoader

from trainloop._transfer.classes import reduce_class, reduce_named_type
from trainloop._transfer.pages import anonymous_file, write_all
from trainloop._transfer.torch_objects import compile_context_of, reduce_compiled_function, reducer_for

_IN_STREAM = 256  # bytes; a smaller buffer is copied into the stream, since a separate buffer would cost more
_BLOCK = 64 << 10
_MOST_OWN = 16 << 20  # bytes of user-shared memory that each rank copies; larger memory is mapped
_VIEWED = 4096  # bytes; smaller arrays are pickled by numpy
_STANDARD_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")

_loading = threading.local()


@contextlib.contextmanager
def load_device(device: torch.device | None) -> Iterator[None]:
    """While unpickling in this context, put tensors from a CUDA device on ``device`` (``None``: the CPU)."""
    before = getattr(_loading, "device", None)
    _loading.device = device
    try:
        yield
    finally:
        _loading.device = before
        # torch keeps a list of the sparse tensors that it has rebuilt, until they are validated.
        torch._utils._validate_loaded_sparse_tensors()


@contextlib.contextmanager
def explained_rebuilding() -> Iterator[None]:
    """Say in an error of unpickling when it occurred: an object may be pickled without an error, but not be rebuilt."""
    try:
        yield
    except ImportError:  # names the module
        raise
    except Exception as error:
        when = "while an object from another process was rebuilt from its pickle"
        # Python 3.10 has no add_note.
        error.args = (f"{error} ({when}: pickle.loads(pickle.dumps(obj)) fails in the same way)",)
        raise


class Pickler(cloudpickle.Pickler):
    """cloudpickle's pickler, with the memory of storages and arrays as buffers.

    Rejects objects that cloudpickle would silently change, such as open files.

    Parameters
    ----------
    file : file object
        Receives the stream.
    keep_out : callable, optional
        Receives each buffer that is not small, and keeps it beside the stream. By default, all are in the stream.
    """

    keeps_shared = True
    """True if the reader shares user-shared memory with its own child processes."""
    large: frozenset[int] = frozenset()
    """``id`` of values of variables that are not sent with their modules: functions that use them bring them."""
    hands_on = True
    """True if this process, which has to hand on the descriptors of pipes and mappings, lives until all are read."""

    def __init__(self, file: Any, keep_out: Callable[[pickle.PickleBuffer], None] | None = None) -> None:
        def is_in_stream(buffer: pickle.PickleBuffer) -> bool:
            if keep_out is None or buffer.raw().nbytes < _IN_STREAM:
                return True
            keep_out(buffer)
            return False

        super().__init__(file, protocol=5, buffer_callback=is_in_stream)
        self.main_names: dict[str, Any] = {}
        """Classes and functions of ``__main__`` that were sent, by their names in ``__main__``."""
        self.copies: list[np.ndarray[Any, Any]] = []
        """Copies of arrays that were made for the stream, so that their memory is not the user's."""
        self._by_value: dict[str, bool] = {}
        # Functions of (pickler, object): a method bound to the pickler would create a cycle, which keeps memory.
        self._reducers: dict[type, Callable[[Pickler, Any], Any] | None] = {}

    def dump(self, obj: Any) -> None:
        """Pickle ``obj``; may be called again to append to the same stream, which the same unpickler reads."""
        try:
            super().dump(obj)
        finally:
            for name, registered in self._by_value.items():
                if registered:
                    cloudpickle.unregister_pickle_by_value(sys.modules[name])
            self._by_value.clear()

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduction of ``obj``; ``NotImplemented`` for the default one."""
        # Called for every object that is not of a simple built-in type, so the decision is made once per class.
        kind = type(obj)
        try:
            reduce = self._reducers[kind]
        except KeyError:
            reduce = self._reducers[kind] = _reducer_of(kind)
        return NotImplemented if reduce is None else reduce(self, obj)

    # -- classes and functions -------------------------------------------------------------------------------------

    def _reduce_definition(self, obj: Any) -> Any:
        self._note_definition(obj)
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and isinstance(obj, types.FunctionType):  # so it is sent by value
            context = compile_context_of(obj)
            if context is not None:
                return reduce_compiled_function(obj, context)
            if (module := self.module_of_variables(obj)) is not None:
                reduced = _with_variables_of(module, reduced, self.large)
            return _with_shared_cells(obj, reduced) if obj.__closure__ else reduced
        if isinstance(obj, type) and isinstance(reduced, tuple):
            # A renamed class of C++, as torch.nn.attention.SDPBackend, is not found by its qualified name.
            is_renamed = obj.__qualname__ != obj.__name__ and "." not in obj.__qualname__
            if is_renamed and (named := _reduce_by_name(self, obj)) is not NotImplemented:
                return named
            return reduce_class(obj, reduced)
        return reduced

    def _reduce_cached(self, function: Any) -> Any:
        """Return the reduction of a function with ``functools.cache``, which functools itself sends by name."""
        if self._has_name(function, function.__qualname__):
            return NotImplemented
        return _cached, (function.__wrapped__, function.cache_parameters())

    def _reduce_named_type(self, obj: Any) -> Any:
        return NotImplemented if self._has_name(obj, obj.__name__) else reduce_named_type(obj)

    def _has_name(self, obj: Any, qualname: str) -> bool:
        """Return True if a new process finds an object in its module, by its name."""
        self._note_definition(obj)
        name = obj.__module__
        if name != "__main__" and name not in cloudpickle.list_registry_pickle_by_value():
            with contextlib.suppress(AttributeError):
                return operator.attrgetter(qualname)(sys.modules.get(name)) is obj
        return False

    def _note_definition(self, obj: Any) -> None:
        """Record definitions of ``__main__``; let a module that a new process can't import be sent by value."""
        name = getattr(obj, "__module__", None)
        if not isinstance(name, str):
            return
        if name == "__main__":
            qualname = getattr(obj, "__qualname__", obj.__name__)
            if "." not in qualname and getattr(sys.modules["__main__"], qualname, None) is obj:
                self.main_names[qualname] = obj
        elif name not in self._by_value:
            module = sys.modules.get(name)
            self._by_value[name] = module is not None and not self.is_importable(module)
            if self._by_value[name]:
                if name in cloudpickle.list_registry_pickle_by_value():
                    self._by_value[name] = False  # keep the user's registration
                else:
                    cloudpickle.register_pickle_by_value(module)

    def module_of_variables(self, function: types.FunctionType) -> str | None:
        """Return the module whose variables a function by value uses; ``None`` if the reader can't import it."""
        name = function.__globals__.get("__name__", "__main__")
        module = sys.modules.get(name) if name not in ("__main__", "__mp_main__") else None
        if type(module) is not types.ModuleType or vars(module) is not function.__globals__:
            return None
        by_value = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        known = self._by_value.get(module.__name__) is False
        return module.__name__ if not by_value and (known or self.is_importable(module)) else None

    def is_importable(self, module: types.ModuleType) -> bool:
        """Return True if a new process with this one's ``sys.path`` finds the module; checks the file system."""
        spec = getattr(module, "__spec__", None)
        if spec is not None and (spec.origin in ("built-in", "frozen") or spec.name in sys.builtin_module_names):
            return True
        top = module.__name__.partition(".")[0]
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            with contextlib.suppress(Exception):  # another library's finder may raise
                if find_spec is not None and find_spec(top, None) is not None:
                    return True
        # For '' in sys.path, a new process also looks in the folder in which this program has started.
        started_in = [multiprocessing.process.ORIGINAL_DIR] if "" in sys.path else []  # type: ignore[attr-defined]
        return importlib.machinery.PathFinder.find_spec(top, [*sys.path, *started_in]) is not None

    # -- memory ----------------------------------------------------------------------------------------------------

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type == "meta":
            return functools.partial(torch.UntypedStorage, device="meta"), (storage.nbytes(),)
        on_cpu = storage.device.type == "cpu"
        if self.keeps_shared and on_cpu and storage.is_shared() and getattr(storage, "filename", None) is None:
            # The user shares it between processes (for example an epoch counter for workers).
            return _own_shared_storage, reduce_storage(storage)
        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().numpy()
        if not on_cpu:
            self.copies.append(data)
        return _storage_from_buffer, (pickle.PickleBuffer(memoryview(data)), not on_cpu)  # type: ignore[arg-type]

    def _reduce_text_stream(self, stream: Any) -> Any:
        for name in _STANDARD_STREAMS:
            if stream is getattr(sys, name):
                return getattr, (sys, name)
        # cloudpickle would send a copy of an open file's contents.
        return _refuse_pickling(self, stream) if type(stream) is io.TextIOWrapper else NotImplemented

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        """Return the reduction of an array as a view of memory, with any strides."""
        kind = type(array)
        if array.nbytes < _VIEWED or array.dtype.hasobject:
            return NotImplemented
        if isinstance(array, np.memmap) and (reduced := _reduce_memmap(array)) is not None:
            return reduced
        if kind.__reduce_ex__ is not np.ndarray.__reduce_ex__ or kind.__reduce__ is not np.ndarray.__reduce__:
            return NotImplemented
        low, high = _bounds(array)
        if high - low > 2 * array.nbytes:  # a thin slice of a large array
            array = np.array(array, copy=True, order="C", subok=True)
            self.copies.append(array)
            low, high = _bounds(array)
        memory = (ctypes.c_ubyte * (high - low)).from_address(low)
        memory.array = array  # type: ignore[attr-defined]  # keeps the memory alive
        start = array.__array_interface__["data"][0] - low
        view_of = None if kind is np.ndarray else kind
        return _array_from_buffer, (
            pickle.PickleBuffer(memory),
            array.dtype,
            array.shape,
            array.strides,
            start,
            array.flags.writeable,
            view_of,
        )


def _reducer_of(kind: type) -> Callable[[Pickler, Any], Any] | None:
    """Return the function that pickles objects of a class; ``None`` for the default."""
    if kind in _BY_NAME:
        return _reduce_by_name
    for base, reduce in _SPECIAL:
        if issubclass(kind, base):
            return reduce
    # Connections, shared values and the like are sent in the same way as multiprocessing sends them to processes that
    # it starts. The exceptions are sockets and methods, which its module `reduction` handles.
    theirs = ForkingPickler._extra_reducers.get(kind)  # type: ignore[attr-defined]
    if theirs is None or not theirs.__module__.startswith("multiprocessing.") or "reduction" in theirs.__module__:
        return reducer_for(kind) or _reducer_of_sentinels(kind)
    by_descriptor = theirs.__module__ in ("multiprocessing.connection", "multiprocessing.heap")
    return lambda pickler, obj: theirs(obj) if pickler.hands_on or not by_descriptor else _refuse_pickling(pickler, obj)


def _reducer_of_sentinels(kind: type) -> Callable[[Pickler, Any], Any] | None:
    """Return the reducer of a class whose module has its objects, which are compared by ``is``: dataclasses.MISSING."""
    is_plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    if not is_plain or kind in copyreg.dispatch_table or kind.__module__ == "__main__":
        return None
    module = sys.modules.get(kind.__module__)
    named = {id(value) for value in list(vars(module).values()) if type(value) is kind} if module is not None else set()

    def reduce(pickler: Pickler, obj: Any) -> Any:
        has_state = id(obj) not in named or object.__reduce_ex__(obj, 4)[2] is not None
        return NotImplemented if has_state else _reduce_by_name(pickler, obj)

    return reduce if named else None


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(pickler: Pickler, found: functools.cached_property[Any]) -> Any:
    """Leave out the lock that it has before Python 3.12."""
    if type(found) is not functools.cached_property:
        return NotImplemented
    return functools.cached_property, (found.func,), {k: v for k, v in vars(found).items() if k != "lock"}


def _reduce_weak_dict(pickler: Pickler, mapping: Any) -> Any:
    return type(mapping), (), None, None, iter(list(mapping.items()))


def _reduce_weak_set(pickler: Pickler, items: weakref.WeakSet[Any]) -> Any:
    return type(items), (), list(items), None, None, type(items).update


def _reduce_context_manager(pickler: Pickler, manager: Any) -> Any:
    """Send a call of a ``contextlib.contextmanager``; as a decorator, it is called again for each use."""
    if inspect.getgeneratorstate(manager.gen) != inspect.GEN_CREATED:
        return NotImplemented
    return type(manager), (manager.func, manager.args, manager.kwds)


def _reduce_context_variable(pickler: Pickler, variable: contextvars.ContextVar[Any]) -> Any:
    """Send a variable of the script with its default and its value."""
    if (named := _reduce_by_name(pickler, variable)) is not NotImplemented:
        return named
    default, values = {}, []
    with contextlib.suppress(LookupError):
        default["default"] = contextvars.Context().run(variable.get)
    with contextlib.suppress(LookupError):
        values = [variable.get()]
    return _context_variable, (variable.name, default, values)


def _reduce_proxy(pickler: Pickler, proxy: Any) -> Any:
    """Send a ``weakref.proxy``, which passes even its reduction on to the object: the reader would get a copy."""
    return weakref.proxy, (proxy.__repr__.__self__,)


_BY_NAME = {
    object,
    threading.local,
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.BoundedSemaphore,
    type(threading.Lock()),
    type(threading.RLock()),
    torch.library.CustomOpDef,
    torch.jit.ScriptFunction,
}

_of_modules: dict[int, tuple[object, str, str]] = {}  # by id: the object (so that the id stays its own), module, name


def _reduce_by_name(pickler: Pickler, obj: object) -> Any:
    """Send an object by the name that a module gives it, as each process has its own; other objects by default.

    A bare ``object()`` is a sentinel, which its library compares by ``is``. Locks, operators
    (``torch.library.custom_op``) and functions in TorchScript can't be sent.
    """
    if id(obj) not in _of_modules:
        modules = [one for one in tuple(sys.modules.values()) if isinstance(one, types.ModuleType)]
        found = ((one, name) for one in modules for name, value in tuple(vars(one).items()) if value is obj)
        for module, name in found:
            if module.__name__ not in ("__main__", "__mp_main__") and pickler.is_importable(module):
                _of_modules[id(obj)] = obj, module.__name__, name
                break
        else:
            return NotImplemented
    return _attribute_of_module, _of_modules[id(obj)][1:]


def _reduce_generator(pickler: Pickler, generator: types.GeneratorType[Any, Any, Any]) -> Any:
    """Send a generator that has ended, such as parameters that an optimizer's constructor has read, as an empty one."""
    return (iter, ((),)) if inspect.getgeneratorstate(generator) == inspect.GEN_CLOSED else NotImplemented


def _reduce_typed_storage(pickler: Pickler, storage: torch.storage.TypedStorage) -> Any:
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _reduce_memoryview(pickler: Pickler, view: memoryview) -> Any:
    return _memoryview, (pickle.PickleBuffer(view), view.format, view.shape)


def _refuse_pickling(pickler: Pickler, obj: Any) -> Any:
    raise TypeError(f"cannot pickle {type(obj).__qualname__!r} object")


def _without_iterator(pickler: Pickler, loader: DataLoader[Any]) -> Any:
    """Pickle a loader without the iterator that persistent workers leave in it and that only this process can use."""
    if getattr(loader, "_iterator", None) is None:
        return NotImplemented
    reduced = list(object.__reduce_ex__(loader, 4))
    if isinstance(reduced[2], dict):
        reduced[2] = {**reduced[2], "_iterator": None}
    return tuple(reduced)


def _bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return the lowest address of an array's memory, and the address behind its end."""
    low = high = array.__array_interface__["data"][0]
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return low, high + array.itemsize


def _reduce_memmap(array: np.memmap[Any, Any]) -> Any:
    """Pickle an array in a mapped file by its path, to map it again; ``None`` if the file may have other values."""
    source: Any = array
    while source is not None and not isinstance(source, mmap.mmap):
        source = getattr(source, "base", None)
    path = getattr(array, "filename", None)
    # Mode 'c' may have changes that are not in the file.
    if source is None or path is None or array.mode not in ("r", "r+", "w+"):
        return None
    low, high = _bounds(array)
    memory = np.frombuffer(source, dtype=np.uint8)
    first = memory.__array_interface__["data"][0]
    if not first <= low <= high <= first + memory.nbytes:
        return None
    map_start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    if array.mode != "r":
        array.flush()
    start = array.__array_interface__["data"][0] - low
    mode = "r" if array.mode == "r" else "r+"
    place = map_start + low - first
    return _memmap_of_file, (path, mode, place, high - low, array.dtype, array.shape, array.strides, start)


_NAMED_TYPES = (typing.NewType, typing.ParamSpec, getattr(typing, "TypeVarTuple", typing.ParamSpec))  # since 3.11
_SPECIAL: list[tuple[Any, Callable[[Any, Any], Any]]] = [
    ((type, types.FunctionType), lambda pickler, obj: pickler._reduce_definition(obj)),
    (types.CellType, lambda pickler, cell: (types.CellType, ())),  # the functions that have it send its contents
    (torch.UntypedStorage, lambda pickler, obj: pickler._reduce_storage(obj)),
    (torch.storage.TypedStorage, _reduce_typed_storage),
    (type(functools.cache(len)), lambda pickler, obj: pickler._reduce_cached(obj)),
    (np.ndarray, lambda pickler, obj: pickler._reduce_array(obj)),
    (memoryview, _reduce_memoryview),
    (io.TextIOBase, lambda pickler, obj: pickler._reduce_text_stream(obj)),
    ((torch.Stream, torch.Event), _refuse_pickling),  # their handles are valid in one process only
    (DataLoader, _without_iterator),
    (functools.cached_property, _reduce_cached_property),
    # functools.singledispatch has one.
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _reduce_weak_dict),
    (weakref.WeakSet, _reduce_weak_set),
    (weakref.ProxyTypes, _reduce_proxy),
    (types.GeneratorType, _reduce_generator),
    (contextlib._GeneratorContextManager, _reduce_context_manager),
    (contextvars.ContextVar, _reduce_context_variable),
    (_NAMED_TYPES, lambda pickler, obj: pickler._reduce_named_type(obj)),
]


# -- in the reading process --------------------------------------------------------------------------------------------


def _attribute_of_module(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _context_variable(name: str, default: dict[str, Any], values: Sequence[Any]) -> contextvars.ContextVar[Any]:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar(name, **default)
    for value in values:
        variable.set(value)
    return variable


def _function_of(module: str, code: types.CodeType, *others: Any) -> types.FunctionType:
    return types.FunctionType(code, vars(importlib.import_module(module)), *others)


def _storage_from_buffer(buffer: Any, on_accelerator: bool) -> torch.UntypedStorage:
    """Return a storage over ``buffer``'s own memory, or a copy on the rank's device."""
    nbytes = memoryview(buffer).nbytes
    if nbytes == 0:
        storage = torch.UntypedStorage(0)
    elif isinstance(buffer, bytearray):
        # The data was read from a stream or file: copy it into a storage that can be resized, like torch's own.
        storage = torch.UntypedStorage(nbytes)
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).copy_(torch.frombuffer(buffer, dtype=torch.uint8))
    else:
        storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    device = getattr(_loading, "device", None)
    if on_accelerator and device is not None and device.type != "cpu":
        storage = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).to(device).untyped_storage()
    return storage


def _own_shared_storage(rebuild: Callable[..., Any], args: tuple[Any, ...]) -> torch.UntypedStorage:
    """Return a storage with the sender's contents, in memory that this process shares only with its child processes.

    Ranks that shared the sender's memory would race: each would increment one counter, and read the sum. Large data
    is mapped from the sender's memory: it exists once, and a page becomes private when this process writes to it.
    """
    by_descriptor = rebuild is rebuild_storage_fd
    if by_descriptor:
        _, descriptor, nbytes = args
        fd = descriptor.detach()
        source = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        os.close(fd)
        data = np.frombuffer(source, np.uint8)
    else:
        data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(rebuild(*args)).numpy()
    if not data.nbytes:
        return torch.UntypedStorage(0)
    if sys.platform == "win32":  # on other systems, torch shares memory by name
        return torch.from_numpy(data).clone().share_memory_().untyped_storage()
    own, copied = anonymous_file("shared"), 0
    os.ftruncate(own, data.nbytes)
    for begin in range(0, data.nbytes, _BLOCK):
        block = data[begin : begin + _BLOCK]
        if block.any():  # zeros take no memory: a cache that the loader's workers will fill
            copied += block.nbytes
            if by_descriptor and copied > _MOST_OWN:
                os.close(own)
                return _storage_from_buffer(memoryview(source), False)
            write_all(own, memoryview(block), begin)  # type: ignore[arg-type]  # an array has a buffer
    descriptor = types.SimpleNamespace(detach=lambda: own)
    storage: torch.UntypedStorage = rebuild_storage_fd(torch.UntypedStorage, descriptor, data.nbytes)
    return storage


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _array_from_buffer(
    buffer: Any,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    start: int,
    writeable: bool,
    kind: type | None,
) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer, start, strides)
    if kind is not None:
        array = array.view(kind)
    array.flags.writeable = writeable
    return array


def _memmap_of_file(
    path: Any,
    mode: Any,
    place: int,
    nbytes: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    start: int,
) -> np.ndarray[Any, Any]:
    memory = np.memmap(path, dtype=np.uint8, mode=mode, offset=place, shape=(nbytes,))
    return as_strided(memory[start : start + dtype.itemsize].view(dtype), shape, strides, subok=True)


def _memoryview(buffer: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    return memoryview(buffer).cast("B").cast(format, shape)  # type: ignore[call-overload]


def _with_variables_of(module: str, reduced: Any, large: Container[int]) -> Any:
    """Return cloudpickle's reduction of a function, with the variables of the reader's module.

    cloudpickle sends copies of them, so that the module's other functions would not see what this one assigns.
    """
    _, (code, _, *others), (attributes, slots), *rest = reduced
    brought = {name: value for name, value in slots["__globals__"].items() if id(value) in large}
    slots = {**slots, "__globals__": brought, "_cloudpickle_submodules": []}
    return _function_of, (module, code, *others), (attributes, slots), *rest


def _with_shared_cells(function: types.FunctionType, reduced: Any) -> Any:
    """Return cloudpickle's reduction of a function, with its very cells: functions may share a variable.

    cloudpickle makes new cells for each function, so that one of them would not see what another one assigns.
    """
    make, (*arguments, _), (attributes, slots), _, _, set_state = reduced
    cells = function.__closure__ or ()
    contents = list(map(contents_of_cell, cells))
    return (
        make,
        (*arguments, cells),
        (set_state, (attributes, {**slots, "__closure__": None}), contents),
        None,
        None,
        _fill,
    )


def contents_of_cell(cell: types.CellType) -> tuple[Any, ...]:
    """Return the value of a function's outer variable, as a tuple; empty if it has none yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _fill(function: types.FunctionType, state: Any) -> None:
    set_state, of_function, contents = state
    for cell, held in zip(function.__closure__ or (), contents, strict=True):
        if held:
            (cell.cell_contents,) = held
    set_state(function, of_function)


# --------------------------------------------------------------------------------------------------------------------
# Returned state: objects that both sides know
# --------------------------------------------------------------------------------------------------------------------


class StatePickler(Pickler):
    """Pickle state: the objects in ``known`` are sent as references to their index.

    Parameters
    ----------
    file, keep_out
        As in :class:`Pickler`.
    known : sequence of objects
        Objects that the reader has, too; compared by identity.
    """

    keeps_shared = hands_on = False

    def __init__(
        self,
        file: Any,
        known: Sequence[object],
        keep_out: Callable[[pickle.PickleBuffer], None] | None = None,
    ) -> None:
        super().__init__(file, keep_out)
        self._index = {id(obj): i for i, obj in enumerate(known)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._index.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            # A class that was received by value must not be returned as a second class of the same name.
            # A class created here, for example in a hook, is unknown there and is sent by value.
            tracker_id = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            if tracker_id in _arrived_classes:
                return _tracked_class, (tracker_id,)
        return super().reducer_override(obj)


class StateUnpickler(pickle.Unpickler):
    """Read the stream of a :class:`StatePickler`.

    Parameters
    ----------
    file : file object
    known : sequence of objects
        This side's objects, in the sender's order.
    buffers : iterable of buffers, optional
        The buffers that were sent separately from the stream.
    """

    def __init__(self, file: Any, known: Sequence[object], buffers: Iterable[Any] | None = None) -> None:
        super().__init__(file, buffers=buffers)
        self._known = known

    def persistent_load(self, pid: int) -> object:
        return self._known[pid]


# IDs of classes received by value. cloudpickle tracks classes created here, too, once they have been pickled.
_arrived_classes: set[str] = set()


@contextlib.contextmanager
def noting_classes() -> Iterator[None]:
    """Record the classes received by value in this context. The sender has these classes under the same IDs."""
    tracked = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    before = set(tracked)
    yield
    _arrived_classes.update(set(tracked) - before)


def _tracked_class(tracker_id: str) -> type:
    found: type | None = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if found is None:
        raise pickle.UnpicklingError("a class that was sent to the ranks no longer exists in the process that sent it")
    return found


class PackedState(NamedTuple):
    """A pickled state, with its large memory in separate buffers, which stay separate if the state is pickled again."""

    stream: bytes
    buffers: list[Any]
    """In the packing process, ``PickleBuffer`` objects over the live memory."""


def pack_state(state: object, known: Sequence[object] = ()) -> PackedState:
    """Pickle ``state`` without a copy of the memory of tensors and arrays.

    Objects in ``known`` are sent as references to their index. The reader replaces the references by its own objects,
    which it lists in the same order. For example, the state of callbacks is written into the objects that the user
    created.

    Parameters
    ----------
    state : object
        Any picklable object, including classes and functions of ``__main__`` and closures.
    known : sequence of objects
        Objects that the reader has, too; compared by identity.
    """
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    StatePickler(file, known, buffers.append).dump(state)
    return PackedState(file.getvalue(), buffers)


def unpack_state(packed: PackedState, known: Sequence[object] = ()) -> Any:
    """Invert :func:`pack_state`, with this side's ``known`` and tensors on the CPU; buffers are released once read."""
    packed.buffers.reverse()
    buffers = (packed.buffers.pop() for _ in range(len(packed.buffers)))
    with load_device(None), explained_rebuilding():
        return StateUnpickler(io.BytesIO(packed.stream), known, buffers).load()


class Fingerprint:
    """A state's pickle stream and a digest of its large memory, to detect changes.

    Raises
    ------
    Exception
        Any error that pickling raises.
    """

    def __init__(self, state: object, known: Sequence[object] = ()) -> None:
        self._stream, self._buffers = pack_state(state, known)
        self._summed: bytes | None = None

    def fixed(self) -> Fingerprint:
        """Compute the digest now, since the memory may change; by default it is computed on use. Return this object."""
        if self._summed is None:
            total = hashlib.sha256()
            for buffer in self._buffers:
                total.update(buffer.raw())
            self._summed, self._buffers = total.digest(), []
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return self._stream == other._stream and self.fixed()._summed == other.fixed()._summed

    __hash__ = None  # type: ignore[assignment]  # only compared
