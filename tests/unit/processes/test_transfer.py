"""Sending to other processes: every kind of array and object, memory held once, and what can't be sent."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import gc
import importlib
import logging
import mmap
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainloop import _transfer as transfer
from trainloop._transfer import pack, pages
from trainloop._transfer.pages import MovedPages, anonymous_file, evict_clean_pages
from trainloop._transfer.torch_objects import attributes_in
from trainloop.errors import UnpicklableError

MIB = 1 << 20


_sent = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def give_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Open a payload whose sender keeps it to the test's end, for as long as what was read is valid."""
    # Other tests of this process may have left a library's threads.
    monkeypatch.setattr(pages, "_other_threads", lambda: False)
    yield
    _sent.close()


def there_and_back(obj: Any) -> Any:
    """``obj`` as a rank would get it, read in this process; valid to the test's end."""
    return _sent.enter_context(pack(obj)).handle.open()


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool(np.all(a == b))


# -- tensors and arrays ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 63, 5000, 70_000], ids=lambda n: f"{n} elements")
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint8],
    ids=lambda d: str(d).removeprefix("torch."),
)
def test_tensors(length: int, dtype: torch.dtype) -> None:
    t = torch.arange(length).to(dtype)
    assert equal(there_and_back(t), t)


@pytest.mark.parametrize("length", [0, 1, 63, 5000, 70_000], ids=lambda n: f"{n} elements")
@pytest.mark.parametrize("dtype", ["f4", "f2", "?", "i8", "c16", "U3", "S5", "datetime64[s]", "timedelta64[ms]", ">i4"])
def test_arrays(length: int, dtype: str) -> None:
    a = (np.arange(length) % 1000).astype(dtype)
    b = there_and_back(a)
    assert equal(b, a)
    assert b.flags.writeable


class Recarray(np.recarray):
    """A user's subclass."""


BIG = np.arange(60_000, dtype=np.int64)
ARRAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "every second": lambda: BIG[::2],
    "backwards": lambda: BIG[::-1],
    "transposed": lambda: BIG.reshape(300, 200).T,
    "Fortran order": lambda: np.asfortranarray(BIG.reshape(300, 200)),
    "a column": lambda: BIG.reshape(30_000, 2)[:, 1],
    "one in a thousand": lambda: BIG.reshape(6, 10_000)[:, ::1000],
    "thin slice of a large one": lambda: np.zeros((1000, 1000))[:, :3],
    "broadcast": lambda: np.broadcast_to(BIG[:10], (1000, 10)),
    "read-only": lambda: readonly(BIG.copy()),
    "zero dimensions": lambda: np.array(3.5),
    "structured": lambda: np.zeros(3000, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "record": lambda: np.zeros(3000, dtype=[("a", "i4"), ("b", "f8")]).view(Recarray),
    "matrix": lambda: np.asmatrix(BIG.reshape(300, 200)),
    "objects": lambda: np.array([1, "a", None, (2,)] * 2000, dtype=object),
    "masked": lambda: np.ma.masked_array(BIG, BIG % 2 == 1),
}


def readonly(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    a.flags.writeable = False
    return a


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_every_form(name: str) -> None:
    a = ARRAYS[name]()
    b = there_and_back(a)
    assert equal(b, a)
    assert b.flags.writeable == a.flags.writeable


def test_a_thin_slice_does_not_drag_its_base_along() -> None:
    with pack(np.zeros((1000, 1000))[:, :3]) as payload:
        assert payload.handle.size < 100_000


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_mapped_file_is_mapped_there_too(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "data.bin"
    np.arange(100_000, dtype=np.int32).tofile(path)
    whole = np.memmap(path, dtype=np.int32, mode=mode)
    if mode == "c":
        whole[5] = -1  # not in the file: its memory travels
    for a in (whole, whole[1000:90_000:3], whole[50_000:].reshape(100, 500)):
        with pack(a) as payload:
            b = payload.handle.open()
            assert equal(b, a)
            assert b.flags.writeable == a.flags.writeable
            if mode != "c":
                assert payload.handle.size < 4096
                assert b.filename == whole.filename


class Tagged(torch.Tensor):
    """A user's subclass."""


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.arange(60_000.0).view(300, 200).T,
    "every third": lambda: torch.arange(60_000.0)[::3],
    "expanded": lambda: torch.arange(10.0).expand(500, 10),
    "requires grad": lambda: torch.ones(5000, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(5000)),
    "subclass": lambda: torch.ones(5000).as_subclass(Tagged),
    "conjugate": lambda: torch.ones(5000, dtype=torch.complex64).conj(),
    "zero dimensions": lambda: torch.tensor(2.0),
    "unsigned": lambda: torch.arange(5000).to(torch.uint16),
    "of eight bits": lambda: nn.Parameter(torch.ones(5000).to(torch.float8_e4m3fn), requires_grad=False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_every_form(name: str) -> None:
    t = TENSORS[name]()
    u = there_and_back(t)
    assert equal(u, t)
    assert (u.stride(), u.requires_grad) == (t.stride(), t.requires_grad)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_sparse_quantized_and_meta_tensors() -> None:
    coo = torch.eye(100).to_sparse()
    csr = torch.eye(100).to_sparse_csr()
    quantized = torch.quantize_per_tensor(torch.arange(100.0), 0.5, 1, torch.quint8)
    meta = torch.empty(10, 10, device="meta")
    a, b, c, e = there_and_back((coo, csr, quantized, meta))
    assert torch.equal(a.to_dense(), torch.eye(100))
    assert a.is_sparse
    assert torch.equal(b.to_dense(), torch.eye(100))
    assert b.layout == torch.sparse_csr
    assert torch.equal(c.dequantize(), quantized.dequantize())
    assert (e.device.type, e.shape) == ("meta", (10, 10))


def test_what_shares_memory_goes_on_sharing_it() -> None:
    base = torch.zeros(100_000)
    array = np.zeros(100_000)
    lin = nn.Linear(300, 300)
    lin.tied = lin.weight
    t, view, a, tail, from_array, module = there_and_back(
        (base, base[10:].view(9, -1), array, array[500:], torch.from_numpy(array), lin)
    )
    t[10], a[500] = 1.0, 2.0
    assert view[0, 0] == 1.0
    assert (tail[0], from_array[500]) == (2.0, 2.0)
    assert module.tied is module.weight
    assert base[10] == 0
    assert array[500] == 0  # the sender's own is untouched


def test_optimizer_state_stays_bound_to_its_parameters() -> None:
    model = nn.Linear(200, 200)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    there, opt = there_and_back((model, optimizer))
    assert opt.param_groups[0]["params"][0] is there.weight
    assert torch.equal(opt.state[there.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    before = model.weight.detach().clone()
    there(torch.ones(1, 200)).sum().backward()
    opt.step()
    assert not torch.equal(there.weight, before)
    assert torch.equal(model.weight, before)


def test_small_storages_can_be_resized() -> None:
    t = there_and_back(torch.ones(10))
    t.resize_(1000)
    assert t.shape == (1000,)


# -- held once ---------------------------------------------------------------------------------------------------------


def private_bytes() -> int:
    """Memory of this process that nobody else has."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_Dirty"))


def file_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


LARGE: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(8 * MIB),
    "array": lambda: np.arange(8 * MIB),
    "list of arrays": lambda: [np.full(MIB // 8, i) for i in range(64)],
    "rows of an array": lambda: list(np.arange(8 * MIB).reshape(64, -1)),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_data_is_held_once_and_comes_back(kind: str) -> None:
    size = 64 * MIB
    data, expected = LARGE[kind](), LARGE[kind]()
    head, expected_head = (data[0], expected[0]) if isinstance(data, list) else (data, expected)
    gc.collect()  # memory of earlier tests must not be freed meanwhile
    before = private_bytes()
    with pack(data) as payload:
        assert payload.shared_in_place > 0.98 * size
        assert private_bytes() < before - 0.95 * size  # it is the file's now
        assert file_bytes(payload.handle.fd) < 1.05 * size
        there = payload.handle.open()
        pairs = zip(data, there, strict=True) if isinstance(data, list) else [(data, there)]
        assert all(equal(b, a) for a, b in pairs)
        there_head = there[0] if isinstance(data, list) else there
        head[1], there_head[2] = -5, -6  # each side's writes are its own
        assert there_head[1] == expected_head[1]
        assert head[2] == expected_head[2]
        del there, there_head, pairs
    expected_head[1] = -5
    assert equal(head, expected_head)
    assert private_bytes() > before - 0.1 * size
    assert "trainloop-payload" not in Path("/proc/self/maps").read_text()


@pytest.mark.long
def test_memory_is_given_back_when_the_sender_is_done() -> None:
    used = []
    for _ in range(25):
        data = torch.ones(4 * MIB)
        with pack(data) as payload:
            payload.handle.open()
        del data
        used.append(private_bytes())
    # malloc keeps a few for itself.
    assert used[-1] < used[4] + 64 * MIB, used


def test_a_forked_child_sees_its_own_memory_while_it_is_shared() -> None:
    data = np.zeros(MIB)
    with pack(data):
        pid = os.fork()
        if pid == 0:
            data[1000] = 1.0
            os._exit(int(data[1000]) + 40)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 41
        assert data[1000] == 0


def test_many_small_arrays_are_one_mapping() -> None:
    data = [np.full(600, i, np.int16) for i in range(20_000)]
    with pack(data) as payload:
        there = payload.handle.open()
        with open("/proc/self/maps") as file:
            assert sum("trainloop-payload" in line for line in file) < 10
        assert all(equal(a, b) for a, b in zip(data, there, strict=True))


def test_unusual_memory_stays_where_it_is(tmp_path: Path) -> None:
    """Memory that is mapped from a file, or shared, is copied, not moved."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(MIB))
    of_file: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=MIB)
    anonymous = mmap.mmap(-1, MIB)  # shared with forked children
    array = np.frombuffer(anonymous, dtype=np.uint8)
    with pack((torch.empty(0, dtype=torch.uint8).set_(of_file), array)) as payload:
        assert payload.shared_in_place == 0
        t, a = payload.handle.open()
        assert (t.sum(), a.sum()) == (0, 0)
        array[5] = 1
        assert a[5] == 0
    del array
    anonymous.close()


def test_pages_move_only_within_one_kind_of_memory() -> None:
    fd = anonymous_file("test")
    try:
        data = np.ones(MIB, np.uint8)  # before it looks which memory there is
        pages = MovedPages(fd)
        address = data.__array_interface__["data"][0]
        assert not pages.write(address, MIB, 1)  # not at the same place within a page
        assert pages.write(address, MIB, 2 * MIB + address % mmap.PAGESIZE)
        assert pages.nbytes >= MIB - 2 * mmap.PAGESIZE
        data[:] += 1
        pages.restore()
        assert pages.nbytes == 0
        assert (data == 2).all()
    finally:
        os.close(fd)


def test_what_was_only_read_of_a_file_leaves_this_process_and_what_was_written_stays() -> None:
    fd = anonymous_file("test")
    try:
        os.write(fd, bytes(range(256)) * (MIB // 256))
        mapped = mmap.mmap(fd, MIB, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        data = np.frombuffer(mapped, np.uint8)
        data[300_000:310_000] = 7  # in no file
        expected, address = data.copy(), data.__array_interface__["data"][0]
        written = -(-310_000 // mmap.PAGESIZE) - 300_000 // mmap.PAGESIZE
        # What lies beside a span, on its first and last page, may be in use by others.
        assert evict_clean_pages([(address + 1, MIB - 2)]) == MIB - (written + 2) * mmap.PAGESIZE
        assert evict_clean_pages([(address + 1, MIB - 2)]) == 0
        assert (data == expected).all()
        assert evict_clean_pages([(address, MIB)]) == MIB - written * mmap.PAGESIZE  # read again just now
        own = np.ones(MIB, np.uint8)
        assert evict_clean_pages([(own.__array_interface__["data"][0], MIB)]) == 0
        assert (own == 1).all()
        del data
        mapped.close()
    finally:
        os.close(fd)


def test_without_memfd_a_temporary_file_without_a_name_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pack(np.arange(100_000)) as payload:
        assert equal(payload.handle.open(), np.arange(100_000))
        assert not list(tmp_path.iterdir())


# -- objects of every origin -------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


def test_closures_lambdas_and_local_classes() -> None:
    scale = 3

    class Local:
        def __init__(self) -> None:
            self.f = lambda x: x * scale

    there = there_and_back(Local())
    assert there.f(2) == 6
    assert there_and_back(Colour.RED) is Colour.RED


CLASSES_WITH_SLOTS = """
import dataclasses, typing

class Plain:
    __slots__ = ("a",)

class Derived(Plain):
    __slots__ = "b"

class WithDict(Plain):
    __slots__ = ["b", "__dict__", "__weakref__"]

class Without(Plain):
    pass

@dataclasses.dataclass(slots=True)
class Data:
    a: int
    b: int = 2

class Named(typing.NamedTuple):
    a: int

def plain(kind, **attributes):
    made = kind()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made

made = [plain(Plain, a=1), plain(Derived, a=1, b=2), plain(WithDict, a=1, b=2, c=3), plain(Without, a=1, c=3),
        Data(1), Named(1)]
"""


def test_classes_with_slots_have_slots_there(monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(CLASSES_WITH_SLOTS, scope)
    with pack(scope["made"]) as payload:
        tracker = transfer.pickling.cloudpickle.cloudpickle
        monkeypatch.setattr(tracker, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})  # as in a new process
        for here, there in zip(scope["made"], payload.handle.open(), strict=True):
            assert type(there) is not type(here)
            assert hasattr(there, "__dict__") == hasattr(here, "__dict__")
            assert there.__reduce_ex__(4)[2] == here.__reduce_ex__(4)[2]
            assert tuple(there.__reduce_ex__(4)[1][1:]) == tuple(here.__reduce_ex__(4)[1][1:])


CLASSES_WITH_HOOKS = """
import abc, typing

names, made = [], []
T = typing.TypeVar("T")

class Meta(abc.ABCMeta):
    def __new__(metaclass, name, bases, namespace, **keywords):
        names.append(name)
        namespace["upper"] = namespace["label"].upper()
        return super().__new__(metaclass, name, bases, namespace, **keywords)

class Root(metaclass=Meta):
    label = "root"

    def __init_subclass__(cls, *, key, **keywords):
        super().__init_subclass__(**keywords)
        if key in names:
            raise ValueError(f"{key} is known already")
        names.append(key)
        cls.key = key

class Leaf(Root, typing.Generic[T], key="leaf's key"):
    label = "leaf"

    class Inner:
        pass

made = [Leaf(), Leaf, Leaf.Inner, Leaf[int], names]
"""


def test_code_that_runs_when_a_class_is_defined_does_not_run_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(CLASSES_WITH_HOOKS, scope)
    known = list(scope["names"])
    with pack([scope["made"], scope["Root"]]) as payload:
        tracker = transfer.pickling.cloudpickle.cloudpickle
        monkeypatch.setattr(tracker, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})  # as in a new process
        (leaf, cls, inner, of_int, names), root = payload.handle.open()
        again = payload.handle.open()[0][1]
    assert again is cls is type(leaf) is not scope["Leaf"]
    assert names == known == scope["names"] == ["Root", "Leaf", "leaf's key"]
    assert (cls.key, cls.upper, cls.__mro__[1:]) == ("leaf's key", "LEAF", (root, Generic, object))
    assert type(cls).__name__ == "Meta"
    assert inner.__qualname__ == "Leaf.Inner"
    assert of_int.__args__ == (int,)
    with pytest.raises(ValueError, match="leaf's key is known already"):  # the hook is there
        types.new_class("Other", (root,), {"key": "leaf's key"}, lambda own: own.update(label="other"))


ENUMS = """
import enum

class Meta(enum.EnumMeta):
    def __new__(metaclass, name, bases, namespace, **keywords):
        made.append(name)
        return super().__new__(metaclass, name, bases, namespace, **keywords)

    def __len__(cls):
        return 100

made = []

class Planet(enum.Enum, metaclass=Meta):
    EARTH = (6.0, 2.0)
    WORLD = EARTH
    MARS = (1.0, 4.0)

    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius
        made.append(self.name)

class Level(int, enum.Enum):
    LOW = 1, "low"
    HIGH = 2, "high"

    def __new__(cls, value, label):
        self = int.__new__(cls, value)
        self._value_, self.label = value, label
        return self

class Mode(enum.Flag):
    READ = 1
    WRITE = 2
    BOTH = 3
"""


def test_enums_keep_members_attributes_aliases_combined_flags_and_metaclass(monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(ENUMS, scope)
    scope["Planet"].MARS.moons = 2
    names = ["Planet", "EARTH", "WORLD", "MARS"]
    with pack([[scope[name] for name in ("Planet", "Level", "Mode")], scope["Planet"].EARTH, scope["made"]]) as payload:
        tracker = transfer.pickling.cloudpickle.cloudpickle
        monkeypatch.setattr(tracker, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})  # as in a new process
        (planet, level, mode), earth, made = payload.handle.open()
        assert payload.handle.open()[1] is earth
    assert made == scope["made"]
    assert sorted(made) == sorted(names)
    assert planet.WORLD is planet.EARTH is planet((6.0, 2.0)) is earth
    assert (earth.mass, earth.radius, planet.MARS.moons) == (6.0, 2.0, 2)
    assert len(planet) == 100
    assert (level(2), level.HIGH.label, level.HIGH + 1) == (level.HIGH, "high", 3)
    assert (mode.READ | mode.WRITE) is mode.BOTH
    assert mode.BOTH.name == "BOTH"


TYPES = """
import contextlib, contextvars, typing

Name = typing.NewType("Name", str)
P = typing.ParamSpec("P")
T = typing.TypeVar("T")

class Wrapped(typing.Generic[P, T]):
    pass

@contextlib.contextmanager
def counting(by):
    counts.append(by)
    yield

counts = []

@counting(2)
def decorated():
    return len(counts)

unset, variable = contextvars.ContextVar("unset", default=1), contextvars.ContextVar("variable")
variable.set(5)
"""


def test_types_with_names_only_decorating_context_managers_and_context_variables_of_main_are_sent() -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(TYPES, scope)
    sent = [scope[name] for name in ("Name", "P", "Wrapped", "decorated", "unset", "variable")]
    name, parameters, wrapped, decorated, unset, variable = there_and_back(sent)
    assert (name.__name__, name.__supertype__, name.__module__, name("a")) == ("Name", str, "__main__", "a")
    assert wrapped.__parameters__[0] is parameters
    assert [decorated(), decorated()] == [1, 2]
    assert contextvars.Context().run(unset.get) == unset.get() == 1
    assert variable.get() == 5
    with pytest.raises(LookupError):
        contextvars.Context().run(variable.get)


def test_cached_and_generic_functions_of_main_are_sent() -> None:
    code = """
import functools

@functools.cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

@functools.singledispatch
def kind(value):
    return "other"

@kind.register
def _(value: int):
    return "int"

class Model:
    @functools.lru_cache(maxsize=3)
    def twice(self, n):
        return 2 * n

    @functools.cached_property
    def five(self):
        return 5
"""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(code, scope)
    assert (scope["kind"](1), scope["Model"]().five) == ("int", 5)
    fib, kind, model = there_and_back((scope["fib"], scope["kind"], scope["Model"]()))
    assert (fib(30), kind(1), kind("1"), model.twice(4), model.five) == (832040, "int", "other", 8, 5)
    assert fib is not scope["fib"]
    assert type(model).twice.cache_parameters() == {"maxsize": 3, "typed": False}
    assert there_and_back(cached_in_a_module) is cached_in_a_module


@functools.cache
def cached_in_a_module() -> int:
    return 1


def test_definitions_of_main_are_found_by_name_there() -> None:
    main = sys.modules["__main__"]
    exec("class Batch(tuple):\n    pass", main.__dict__)
    try:
        batch = main.Batch
        with pack([batch((1, 2))]) as payload:
            del main.Batch
            (there,) = payload.handle.open()
            assert main.Batch is type(there)
            assert tuple(there) == (1, 2)
    finally:
        main.__dict__.pop("Batch", None)


def test_modules_that_a_new_process_could_not_import_travel_by_value() -> None:
    module = types.ModuleType("made_by_hand")
    exec("def double(x):\n    return helper(x)\ndef helper(x):\n    return 2 * x", module.__dict__)
    sys.modules["made_by_hand"] = module
    try:
        with pack(module.double) as payload:
            del sys.modules["made_by_hand"]
            assert payload.handle.open()(4) == 8
    finally:
        sys.modules.pop("made_by_hand", None)


def test_standard_streams_and_loggers_travel_by_name() -> None:
    stream, log = there_and_back((sys.stderr, logging.getLogger("some.name")))
    assert stream is sys.stderr
    assert log is logging.getLogger("some.name")


def test_memoryviews_keep_their_form() -> None:
    view = memoryview(np.arange(6000, dtype=np.int32).reshape(3, 2000))  # type: ignore[arg-type]
    there = there_and_back(view)
    assert (there.shape, there.format, there[2, 1999]) == ((3, 2000), "i", 5999)


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index * index


def test_a_loader_with_living_workers_travels_without_them() -> None:
    loader = DataLoader(Squares(), num_workers=1, persistent_workers=True)
    list(loader)
    there = there_and_back(loader)
    assert there._iterator is None
    assert len(there.dataset) == 4
    assert loader._iterator is not None
    loader._iterator._shutdown_workers()  # type: ignore[attr-defined]


def test_a_sentinel_of_a_module_is_the_modules_own_there_and_others_stay_the_same_among_themselves() -> None:
    sentinel, own = vars(functools)["_initial_missing"], object()
    there = there_and_back({"lr": sentinel, "again": [sentinel], "own": own, "same": own})
    assert there["lr"] is sentinel
    assert there["again"][0] is sentinel
    assert there["own"] is there["same"]
    assert there["own"] is not own

    @dataclasses.dataclass
    class Options:
        lr: float

    missing = dataclasses.MISSING  # of a class without state
    kind, default = there_and_back((Options, missing))
    assert dataclasses.fields(kind)[0].default is default is missing


def test_locks_and_context_variables_of_a_module_are_the_modules_own_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["import contextvars, threading", "RATE = contextvars.ContextVar('rate')", "EACH = threading.local()"]
    lines += ["LOCK, AGAIN, READY = threading.Lock(), threading.RLock(), threading.Event()"]
    (tmp_path / "keeps_locks.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    names = importlib.import_module("keeps_locks")
    kept = [names.RATE, names.EACH, names.LOCK, names.AGAIN, names.READY]
    assert all(a is b for a, b in zip(there_and_back(kept), kept, strict=True))
    with pytest.raises(UnpicklableError, match="lock"):
        there_and_back({"lock": threading.Lock()})


def test_an_optimizer_that_has_kept_the_parameters_it_was_given_is_sent() -> None:
    class Keeps(torch.optim.SGD):  # as Adam-mini: named_parameters() is a generator, which the constructor reads
        def __init__(self, named: Any) -> None:
            self.named = named
            super().__init__([p for _, p in named], lr=0.1)

    there = there_and_back(Keeps(torch.nn.Linear(2, 1).named_parameters()))
    assert list(there.named) == []
    assert [p.shape for p in there.param_groups[0]["params"]] == [(1, 2), (1,)]


def test_a_generator_of_random_numbers_keeps_its_place() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    there = there_and_back(generator)
    assert torch.equal(torch.rand(3, generator=there), torch.rand(3, generator=generator))


def test_weak_collections_refer_to_the_objects_that_are_sent_with_them() -> None:
    key = Squares()
    sent = key, weakref.WeakSet([key]), weakref.WeakValueDictionary(a=key), weakref.WeakKeyDictionary({key: 1})
    there, items, values, keys = there_and_back(sent)
    assert list(items) == [there]
    assert dict(values) == {"a": there}
    assert dict(keys) == {there: 1}
    del there
    gc.collect()
    assert not len(items) + len(values) + len(keys)


def test_a_proxy_refers_to_the_object_that_is_sent_with_it() -> None:
    model = nn.Linear(2, 1)
    there, proxy = there_and_back((model, weakref.proxy(model)))
    there.flag = 7
    assert proxy.flag == 7
    model = weakref.proxy(nn.Linear(2, 1))  # that of an object that is gone
    with pytest.raises(UnpicklableError, match="no longer exists"):
        there_and_back(model)


def test_both_sides_objects_meet_in_the_state_that_returns() -> None:
    class Callback:
        def __init__(self) -> None:
            self.best: Any = None

    mine, other = Callback(), nn.Linear(2, 2)
    with pack([mine, other]) as payload:
        there, other_there = payload.handle.open()
        there.best = {"model": other_there, "again": there, "t": torch.ones(3), "kind": type(there)}
        data = pickle.dumps(transfer.pack_state(there.__dict__, [there, other_there]), pickle.HIGHEST_PROTOCOL)
    state = transfer.unpack_state(pickle.loads(data), [mine, other])
    assert state["best"]["model"] is other
    assert state["best"]["again"] is mine
    assert state["best"]["kind"] is Callback
    assert torch.equal(state["best"]["t"], torch.ones(3))


def test_a_class_that_is_gone_is_named() -> None:
    from trainloop._transfer.pickling import _tracked_class

    with pytest.raises(Exception, match="no longer exists in the process that sent it"):
        _tracked_class("unknown")


@pytest.mark.parametrize(
    "state, attributes",
    [
        ({"a": 1}, {"a": 1}),
        (({"a": 1}, {"b": 2}), {"a": 1, "b": 2}),
        ((None, {"b": 2}), {"b": 2}),
        (({"a": 1}, None), {"a": 1}),
        ((1, 2), {}),
        (({"a": 1}, 2), {}),
        (None, {}),
    ],
)
def test_attributes_in_a_state(state: Any, attributes: dict[str, Any]) -> None:
    """What ``__getstate__`` may return."""
    assert attributes_in(state) == attributes


@pytest.mark.gpu
def test_cuda_tensors_go_to_the_device_of_the_rank() -> None:
    model = nn.Linear(100, 100).cuda()
    with pack(model) as payload:
        on_cpu = payload.handle.open(torch.device("cpu"))
        on_gpu = payload.handle.open(torch.device("cuda", 0))
    assert on_cpu.weight.device.type == "cpu"
    assert on_gpu.weight.device == torch.device("cuda", 0)
    assert torch.equal(on_cpu.weight, model.weight.cpu())
    assert torch.equal(on_gpu.weight, model.weight)
