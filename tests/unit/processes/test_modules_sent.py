"""What is sent of the user's modules, in the process that starts ranks."""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.util
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import pytest
import torch

from trainloop._launch.script.assignments import assigned_in_libraries, assigned_names
from trainloop._launch.script.module_state import dumped_modules, receive_modules
from trainloop._launch.script.rank_names import rank_dependent
from trainloop._transfer.pickling import pack_state, unpack_state
from trainloop._transfer.users_modules import users_modules

Imports = Callable[[str, str], types.ModuleType]


@pytest.fixture
def module_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Imports:
    """Writes a module of this name and source, and imports it."""

    def imported(name: str, source: str) -> types.ModuleType:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module(name)

    return imported


MODULE = """
from types import FunctionType

class Node:
    __code__ = property(lambda self: "of a syntax tree")

LR = 0.1
"""


def test_modules_with_attributes_that_look_like_functions_are_sent(module_of_a_user: Imports) -> None:
    module_of_a_user("nodes_of_a_user", MODULE)
    found = pickle.loads(dumped_modules())["nodes_of_a_user"]
    assert found["LR"].value == 0.1
    assert found["FunctionType"].value[:2] == ("builtins", "function")
    assert found["Node"].value[:2] == ("nodes_of_a_user", "Node")


def test_assignments_to_attributes_of_libraries_are_found_by_their_names() -> None:
    source = """
import a.b, c.d as e
from f import g as h, i
from . import near
a.b.x = 1
e.y, h.z = 2, 3
def main():
    import late
    late.u += 1
    self.v = e.read
    near.w = i[0].t = 4
"""
    assert assigned_names(source, in_functions=False) == {"a.b.x", "c.d.y", "f.g.z", "late.u"}
    assert assigned_names(source, in_functions=True) == {"late.u"}
    assert assigned_names("%matplotlib inline", in_functions=False) == frozenset()


def test_only_variables_of_libraries_that_exist_are_sent(
    monkeypatch: pytest.MonkeyPatch, module_of_a_user: Imports
) -> None:
    source = """
import html, json, logging, os, sys
def set_up():
    html.added, logging.raiseExceptions, json.decoder.gone = [1], False, 2
    json.tool, sys.own, os.own, json.other.x = html, 3, 4, 5
"""
    module = module_of_a_user("sets_up", source)
    monkeypatch.setattr("html.added", [1], raising=False)
    found = {(name, path): value for name, path, value in assigned_in_libraries({"sets_up": module})}
    assert found == {("html", "added"): [1], ("logging", "raiseExceptions"): True}


@pytest.mark.long
def test_what_the_compiler_puts_into_a_module_is_not_sent(module_of_a_user: Imports) -> None:
    module = module_of_a_user("compiled_of_a_user", "LR = 0.1\ndef twice(x):\n    return (2 * x).sin()\n")
    torch.compile(module.twice, backend="eager")(torch.ones(2))
    module.__dict__.update({"__compiled_fn_2_b51868cc_e69d": module.twice, "__resume_at_76_3": module.twice})
    assert any(name.startswith("__builtins_dict_") for name in vars(module))
    found = pickle.loads(dumped_modules())["compiled_of_a_user"]
    assert found.keys() == {"LR", "twice"}


def test_names_from_the_rank_are_found_in_modules_that_import_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"part_{i}_of_a_user" for i in range(16)]  # 15! ways from one to another
    for i, name in enumerate(names):
        imports = "".join(f"import {other}\n" for other in names if other != name)
        first = 'import os\nLOCAL = int(os.environ.get("LOCAL_RANK", 0))\n' if i == 0 else f"DEPTH = {i}\n"
        (tmp_path / f"{name}.py").write_text(f"{imports}{first}")
    (tmp_path / "whole_of_a_user.py").write_text(
        f"from {names[-1]} import DEPTH\nimport {names[0]}\n"
        f"SHARD = {names[0]}.LOCAL + 1\nBOTH = [SHARD, DEPTH]\nLR = DEPTH\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("whole_of_a_user")
    found = rank_dependent("whole_of_a_user")
    assert {"SHARD", "BOTH"} <= found
    assert not {"LR", "DEPTH"} & found


def test_a_variable_with_a_name_that_another_module_derives_from_the_rank_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "places_of_a_user": "import torch.distributed as dist\nrank = LOCAL = dist.is_initialized()",
        "tools_of_a_user": "import places_of_a_user as places",
        "lora_of_a_user": "from tools_of_a_user import *\nMINE = places.LOCAL",
        "config_of_a_user": (
            "import tools_of_a_user as tools\nrank: int = 8\nscales = [rank]\n"
            "def setup():\n    global device\n    lr = tools.places.rank\n    device = lr\nlr = 0.1\ndevice = 0\n"
        ),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("config_of_a_user")
    importlib.import_module("lora_of_a_user")
    assert rank_dependent("config_of_a_user") == {"setup", "device"}
    assert "MINE" in rank_dependent("lora_of_a_user")


def test_a_library_in_a_folder_of_its_own_is_no_module_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "some_library_of_tests-1.0.dist-info"  # as pip install --target makes it
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-library-of-tests\nVersion: 1.0\n")
    (about / "RECORD").write_text("some_library_of_tests/__init__.py,,\nsome_library_of_tests/part.py,,\n")
    (tmp_path / "some_library_of_tests").mkdir()
    (tmp_path / "some_library_of_tests" / "__init__.py").write_text("from some_library_of_tests import part")
    (tmp_path / "some_library_of_tests" / "part.py").write_text("TOKEN = object()")
    (tmp_path / "module_beside_a_library.py").write_text("LR = 0.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("some_library_of_tests")
    importlib.import_module("module_beside_a_library")
    layer = "some_library_of_tests.part_Layer_propagate"  # as torch_geometric names what it generates for a layer
    monkeypatch.setitem(sys.modules, layer, types.ModuleType(layer))
    generated(tmp_path / "generated", "def propagate(x):\n    return x\n", layer)
    users = users_modules()
    assert "module_beside_a_library" in users
    assert not {"some_library_of_tests", "some_library_of_tests.part", layer} & users.keys()


def generated(folder: Path, code: str, name: str = "generated_for_a_layer") -> types.ModuleType:
    """As libraries generate modules: in each process, in a folder of its own."""
    folder.mkdir()
    file = folder / f"{name}.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_a_module_that_each_process_generates_is_the_same_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "generated_for_a_layer", types.ModuleType("generated_for_a_layer"))
    code = "class Layer:\n    pass\ndef collect(x):\n    return x\nLR = 0.1\nLayer.collect = collect\n"
    caller = generated(tmp_path / "caller", code)
    caller.LR = 0.5
    dumped = pickle.dumps({"generated_for_a_layer": pickle.loads(dumped_modules())["generated_for_a_layer"]})
    rank = generated(tmp_path / "rank", code)
    own = rank.collect
    finders = list(sys.meta_path)
    try:
        receive_modules(dumped)()  # a warning would be an error here
    finally:
        sys.meta_path[:] = finders
    assert rank.LR == 0.5
    assert rank.collect is own


CONTEXT = """
import contextvars, threading

RUN = contextvars.ContextVar("RUN", default="none")
UNSET = contextvars.ContextVar("UNSET", default="default")
THREAD = threading.local()
FUNCTIONS = contextvars.ContextVar("FUNCTIONS", default=())
"""


def test_values_of_context_variables_and_of_thread_local_data_are_sent(
    monkeypatch: pytest.MonkeyPatch, module_of_a_user: Imports
) -> None:
    module = module_of_a_user("context_of_a_user", CONTEXT)
    module.RUN.set("mine")
    module.THREAD.depth = 3
    module.FUNCTIONS.set(len)
    finders = [finder for finder in sys.meta_path if finder is importlib.machinery.PathFinder]  # without pytest's
    monkeypatch.setattr(sys, "meta_path", finders)
    sent = dumped_modules()
    module.FUNCTIONS.set(generator := (i for i in [1]))
    unsent = dumped_modules()
    del sys.modules["context_of_a_user"]
    again = importlib.import_module("context_of_a_user")  # as in a rank
    receive_modules(sent)()
    assert (again.RUN.get(), again.UNSET.get(), again.THREAD.depth) == ("mine", "default", 3)
    assert again.FUNCTIONS.get() is len
    with pytest.warns(UserWarning, match=r"context_of_a_user\.FUNCTIONS of this process can't be sent.*generator"):
        receive_modules(unsent)()
    assert again.FUNCTIONS.get() is not generator


def test_implementations_that_a_script_registers_are_sent(module_of_a_user: Imports) -> None:
    source = "import functools\n@functools.singledispatch\ndef size(x):\n    return 0\n"
    module = module_of_a_user("sizes_of_a_user", source + "size.register(str, len)\n")

    def of_list(x: list[int]) -> int:
        return sum(x)

    of_list.__module__ = "__main__"
    module.size.register(list, of_list)
    used: list[object] = []
    sent = dumped_modules((), used)
    assert of_list in used
    del sys.modules["sizes_of_a_user"]
    again = importlib.import_module("sizes_of_a_user")  # as in a rank
    receive_modules(sent)(used)
    assert [again.size(one) for one in (1.5, "ab", [3, 4])] == [0, 2, 7]


REGISTRIES = """
import weakref

class Layer:
    made, by_name = weakref.WeakSet(), weakref.WeakValueDictionary()

made, by_name = Layer.made, Layer.by_name
"""


def test_weak_registries_have_the_objects_of_the_work(module_of_a_user: Imports) -> None:
    module = module_of_a_user("registries_of_a_user", REGISTRIES)
    layer, other, used = module.Layer(), module.Layer(), list[object]()
    for name, one in {"layer": layer, "other": other}.items():
        module.made.add(one)
        module.by_name[name] = one
    sent = dumped_modules([layer], used)
    del sys.modules["registries_of_a_user"]
    again = importlib.import_module("registries_of_a_user")  # as in a rank
    mine = again.made, again.by_name
    there = again.Layer()
    receive_modules(sent)([there for _ in used])
    gc.collect()
    for owner in (again, again.Layer):
        assert (list(owner.made), dict(owner.by_name)) == ([there], {"layer": there})
        assert owner.made is mine[0]
        assert owner.by_name is mine[1]


LARGE = """
import os
import numpy, torch
FIRST, TABLE, WORDS = numpy.zeros(1 << 22), torch.zeros(1 << 19), [0.5] * (1 << 18)
NAMES = {str(i) for i in range(1 << 18)}
SMALL = {"scale": 1.0}

def load():
    if int(os.environ.get("RANK", 0)) == 0:
        pass
    return {"lr": 0.1}

RANK, CONFIG, SAME = int(os.environ.get("RANK", -1)), load(), load()
"""


def test_values_that_keep_those_of_the_import_are_named(
    monkeypatch: pytest.MonkeyPatch, module_of_a_user: Imports
) -> None:
    module = module_of_a_user("large_of_a_user", LARGE)
    module.TABLE = module.TABLE + 1
    module.WORDS[0] = 0.25
    module.CONFIG["lr"] = module.SMALL["scale"] = 5.0
    sent = pickle.dumps({"large_of_a_user": pickle.loads(dumped_modules())["large_of_a_user"]})
    del sys.modules["large_of_a_user"]
    monkeypatch.setenv("RANK", "0")
    again = importlib.import_module("large_of_a_user")  # as in a rank
    with pytest.warns(UserWarning, match="large_of_a_user") as found:
        receive_modules(sent)()
    assert again.SMALL == {"scale": 5.0}  # larger values leave room for it
    texts = [str(one.message) for one in found]
    assert [text.split()[0].partition(".")[2] for text in texts] == ["CONFIG", "TABLE", "WORDS"]
    assert "larger than 1 MiB" in texts[1]
    assert "derives it from its own rank" in texts[0]


CLOSURES = """
SEEN = {}

def noting(name):
    return lambda value: SEEN.update({name: value})

def counting():
    def count():
        global calls
        calls = globals().get("calls", 0) + 1
    return count
"""


def test_a_function_without_a_name_has_the_variables_of_its_module(module_of_a_user: Imports) -> None:
    module = module_of_a_user("closures_of_a_user", CLOSURES)
    note, count = unpack_state(pack_state([module.noting("x"), module.counting()]))
    note(3)
    count()
    assert module.SEEN == {"x": 3}
    assert module.calls == 1


def test_definitions_of_the_script_in_modules_are_sent_with_the_work(
    monkeypatch: pytest.MonkeyPatch, module_of_a_user: Imports
) -> None:
    module = module_of_a_user("registry_of_a_user", "MODELS = {}\n")
    script, lock = sys.modules["__main__"], Lock()
    net = type("Net", (), {"__module__": "__main__"})
    hook = types.FunctionType((lambda: None).__code__, vars(script), "hook")
    broken = types.FunctionType((lambda: lock).__code__, vars(script), "broken", None, (types.CellType(lock),))
    vars(module).update(MODELS={"net": net}, hook=hook, broken=broken)
    used: list[object] = []
    dumped = dumped_modules((), used)
    assert {net, hook} <= set(used)
    assert broken not in used
    vars(module).update(MODELS={}, hook=None)
    finders = [finder for finder in sys.meta_path if finder is importlib.machinery.PathFinder]  # without pytest's
    monkeypatch.setattr(sys, "meta_path", finders)
    receive_modules(dumped, warns=False)(used)
    assert vars(module)["MODELS"]["net"] is net
    assert vars(module)["hook"] is hook
