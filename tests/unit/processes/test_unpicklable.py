"""Objects that can't be sent to ranks are found before these start, with their path, type and what to do."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import ctypes
import functools
import io
import logging
import mmap
import multiprocessing
import os
import select
import socket
import sqlite3
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainloop._transfer import pack
from trainloop.errors import UnpicklableError


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index * index


def generator() -> Iterator[int]:
    yield 1


async def coroutine() -> None:
    pass


def running_frame() -> types.FrameType:
    return sys._getframe()


class Resources:
    """Things that must be closed after a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = open(folder / "notes.txt", "w+")  # noqa: SIM115
        self.binary = open(folder / "notes.bin", "wb")  # noqa: SIM115
        self.database = sqlite3.connect(":memory:")
        self.socket = socket.socket()
        self.executor = concurrent.futures.ThreadPoolExecutor(1)
        self.loop = asyncio.new_event_loop()
        self.program = subprocess.Popen([sys.executable, "-c", ""])
        self.poll = select.epoll()
        self.coroutine = coroutine()

    def close(self) -> None:
        self.file.close()
        self.binary.close()
        self.database.close()
        self.socket.close()
        self.executor.shutdown()
        self.loop.close()
        self.program.wait()
        self.poll.close()
        self.coroutine.close()


@pytest.fixture
def resources(tmp_path: Path, starts_processes: None) -> Iterator[Resources]:
    made = Resources(tmp_path)
    yield made
    made.close()


KINDS: dict[str, tuple[Callable[[Resources], Any], str, str]] = {
    "text file": (lambda r: r.file, "TextIOWrapper", "keep its path"),
    "binary file": (lambda r: r.binary, "BufferedWriter", "keep its path"),
    "lock": (lambda r: threading.Lock(), "lock", "A lock belongs"),
    "recursive lock": (lambda r: threading.RLock(), "RLock", "A lock belongs"),
    "generator": (lambda r: generator(), "generator", "keep the function"),
    "coroutine": (lambda r: r.coroutine, "coroutine", "keep the function"),
    "socket": (lambda r: r.socket, "socket", "keep its address"),
    "thread": (lambda r: threading.current_thread(), "_MainThread|Thread", "Threads, and"),
    "database": (lambda r: r.database, "Connection", "keep its path"),
    "executor": (lambda r: r.executor, "ThreadPoolExecutor", "An executor's workers"),
    "event loop": (lambda r: r.loop, "_UnixSelectorEventLoop", "An event loop and"),
    "weak reference": (lambda r: weakref.ref(r), "ReferenceType|weakref", "keep the object itself"),
    "frame": (lambda r: running_frame(), "frame", "keep the values"),
    "pointer": (lambda r: ctypes.pointer(ctypes.c_int(1)), "LP_c_int", "Memory of C code"),
    "program": (lambda r: r.program, "Popen", "A running program"),
    "poll object": (lambda r: r.poll, "epoll", "leave it out"),
    "thread-local data": (lambda r: threading.local(), "_local", "threads share"),
    "log handler": (lambda r: logging.StreamHandler(), "StreamHandler", "keep the logger"),
    "mapped file": (lambda r: mmap.mmap(-1, 10), "mmap", "leave it out"),
    "stream": (lambda r: torch.Stream(device="cpu"), "Stream", "A stream belongs"),
    "multiprocessing lock": (lambda r: multiprocessing.get_context("fork").Lock(), "Lock|SemLock", "spawn"),
}
if sys.version_info < (3, 11):  # which pickles it, and fails in the rank
    del KINDS["multiprocessing lock"]


def send(obj: Any, roots: dict[str, Any] | None = None) -> None:
    with pack(obj, roots=roots):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_sent_is_named_with_its_path(kind: str, resources: Resources) -> None:
    make, type_name, advice = KINDS[kind]
    try:
        thing = make(resources)
    except RuntimeError as error:  # torch without streams for the CPU
        pytest.skip(str(error))
    dataset = Squares()
    dataset.transform = types.SimpleNamespace(thing=thing)  # type: ignore[attr-defined]
    loader = DataLoader(dataset)
    with pytest.raises(UnpicklableError) as caught:
        send([1, loader], roots={"model": nn.Linear(1, 1), "train_loader": loader})
    message = str(caught.value)
    path, _, found = message.splitlines()[1].strip().partition(": ")
    assert path == "train_loader.dataset.transform.thing", message
    assert found in type_name.split("|"), message
    assert advice in message, message


class WithSlots:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class WithDefault:
    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def method(self) -> None:
        pass


PATHS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda x: [1, [2, x]], "root[1][1]"),
    "dict value": (lambda x: {"a": {"b": x}}, "root['a']['b']"),
    "dict key": (lambda x: {x: 1}, "root<key lock>"),
    "tuple in a set": (lambda x: (0, {x}), "root[1][0]"),
    "slots": (lambda x: WithSlots(x), "root.inner"),
    "partial": (lambda x: functools.partial(print, x, end=""), "root.args[0]"),
    "partial's keyword": (lambda x: functools.partial(print, end=x), "root.keywords['end']"),
    "bound method": (lambda x: WithDefault(x).method, "root.__self__.lock"),
    "closure": (lambda x: lambda: x, "root.<closure x>"),
    "default": (lambda x: lambda a, b=x: b, "root.<default b>"),
    "keyword default": (lambda x: lambda *, b=x: b, "root.<default b>"),
    "module": (lambda x: with_attribute(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), x), "root[1].thing"),
    "named module": (lambda x: with_attribute(nn.ModuleDict({"a": nn.ReLU()}), x), "root.a.thing"),
    "optimizer": (lambda x: with_attribute_of_its_own(torch.optim.SGD([torch.ones(1)], 1.0), x), "root.thing"),
    "parameter": (lambda x: with_attribute_of_its_own(nn.Parameter(torch.ones(1)), x), "root.thing"),
    "hook": (lambda x: hooked(x), "root._forward_hooks[...].<closure x>"),
    "deque": (lambda x: collections.deque([1, x]), "root[1]"),
    "default dict": (lambda x: collections.defaultdict(list, {"k": [x]}), "root['k'][0]"),
    "ordered dict": (lambda x: collections.OrderedDict(k=x), "root['k']"),
    "exception": (lambda x: ValueError(x), "root.<argument 0>"),
    "one of many": (lambda x: [*range(100_000), x, *range(100_000)], "root[100000]"),
    "class attribute": (lambda x: type("Local", (), {"shared": x}), "root.shared"),
    "object array": (lambda x: np.array([1, x], dtype=object), "root"),
    "cycle": (lambda x: cyclic(x), "root.lock"),
}


def with_attribute(module: nn.Module, x: Any) -> nn.Module:
    list(module.children())[-1].thing = x
    return module


def with_attribute_of_its_own(obj: Any, x: Any) -> Any:
    obj.thing = x
    return obj


def hooked(x: Any) -> nn.Module:
    module = nn.ReLU()
    module.register_forward_hook(lambda *args: print(x))
    return module


def cyclic(x: Any) -> WithDefault:
    made = WithDefault(x)
    made.itself = [made]  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("name", PATHS)
def test_paths_through_every_kind_of_holder(name: str) -> None:
    make, path = PATHS[name]
    obj = make(threading.Lock())
    with pytest.raises(UnpicklableError) as caught:
        send(obj, roots={"root": obj})
    line = str(caught.value).splitlines()[1].strip()
    before, _, after = path.partition("...")
    assert line.startswith(before)
    assert f"{after}: " in line, line


def test_all_of_several_are_named_the_nearest_first() -> None:
    lock = threading.Lock()
    data = {"deep": [[threading.Lock()]], "near": lock, "again": [lock]}
    with pytest.raises(UnpicklableError) as caught:
        send(data, roots={"data": data})
    paths = [line.strip().partition(": ")[0] for line in str(caught.value).splitlines() if ": lock" in line]
    assert paths == ["data['near']", "data['deep'][0][0]"]


def test_a_global_of_a_function_of_main() -> None:
    main = sys.modules["__main__"]
    scope = {"__name__": "__main__", "LOCK": threading.Lock()}
    exec("def work():\n    return LOCK", scope)
    assert main.__name__ == "__main__"
    with pytest.raises(UnpicklableError, match=r"root.<global LOCK>: lock"):
        send(scope["work"], roots={"root": scope["work"]})


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def test_an_object_that_refuses_says_why() -> None:
    with pytest.raises(UnpicklableError, match=r"(?s)a\.b: Refuses.*not me.*leave it out of __getstate__"):
        send([Refuses()], roots={"a": types.SimpleNamespace(b=Refuses())})


def test_without_a_culprit_the_error_itself_is_told() -> None:
    with pytest.raises(UnpicklableError, match=r"can't be pickled: not me"):
        send(Refuses(), roots={"model": nn.Linear(1, 1)})


def test_a_failed_try_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(UnpicklableError):
            send(TensorDataset(torch.ones(100_000)).__dict__ | {"x": io.BytesIO().getbuffer, "l": threading.Lock()})
    assert len(os.listdir("/proc/self/fd")) == len(before)
