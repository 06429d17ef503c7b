"""The house's rules: imports point down, public names are the documented ones, importing is cheap."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainloop
from trainloop import extending

PACKAGE = Path(trainloop.__file__).parent

# Lower layers first; a module may import those of lower rows and of its own part (a package's own files).
LAYERS = [
    ["errors", "distribution", "platform", "user_line"],
    ["output", "blocks"],
    ["sharding", "nested", "keywords"],
    ["resources"],
    ["devices"],
    ["stopping"],
    ["signals", "scratch", "forks"],
    ["_processes"],
    ["distributed"],
    ["_transfer", "_launch"],
    ["rng", "data"],
    ["_metrics", "history"],
    ["carried", "model", "optim", "reduction"],
    ["parallel"],
    ["checkpoint", "result_package"],
    ["callbacks", "schedulers"],
    ["extending"],
    ["train_loop"],
    ["tools", "pretrained"],
    ["tuning"],
    ["tabular"],
    ["doctor"],
    ["__main__"],
]
# A path up that is taken only when it is called, and why.
ALLOWED_UP: dict[tuple[str, str], str] = {
    ("train_loop", "tools"): "the loop's methods are front doors to them",
}

PUBLIC = """TrainLoop TrainLoopCheckpoint TrainLoopEndSave TrainLoopCheckpointEndSave TTModel TTBasicModel ModelWrap
    MultiLoss MultiOptimizer AbstractCallback TTDataParallel TTDistributedDataParallel
    TTFullyShardedDataParallel""".split()
SUBMODULES = "parallel callbacks schedulers train_loop model distributed devices resources errors".split()


def part_of(module: str) -> str:
    """The first name of a module's, below trainloop; of ``_support``, where each file is a part, the second."""
    head, _, rest = module.partition(".")
    return rest.partition(".")[0] if head == "_support" and rest else head


@functools.cache
def module_files() -> dict[str, list[Path]]:
    """Files of each part of the package: a module, or a subpackage with all it holds."""
    parts: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if relative not in (Path("__init__.py"), Path("_support/__init__.py")):
            parts.setdefault(part_of(".".join(relative.with_suffix("").parts)), []).append(path)
    return parts


def imported_parts(path: Path) -> set[tuple[str, int]]:
    """Parts of trainloop that a file imports, anywhere in it, with the line."""
    found = set()
    package = ("trainloop", *path.relative_to(PACKAGE).parent.parts)
    for node in nodes_that_run(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            whole = module in ("trainloop", "trainloop._support")
            names = [f"{module}.{alias.name}" for alias in node.names] if whole else [module]
        else:
            continue
        for name in names:
            head, _, rest = name.partition(".")
            if head == "trainloop":
                found.add((part_of(rest) or "__init__", node.lineno))
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING:``, which annotations alone need."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
                waiting.append(child)


def level_of(part: str) -> int:
    return next(level for level, parts in enumerate(LAYERS) if part in parts)


def test_every_part_has_a_layer() -> None:
    placed = {part for parts in LAYERS for part in parts}
    assert set(module_files()) <= placed, f"give these a row in LAYERS: {sorted(set(module_files()) - placed)}"


@pytest.mark.parametrize("part", sorted(module_files()))
def test_imports_point_down(part: str) -> None:
    wrong = []
    for path in module_files()[part]:
        for other, line in sorted(imported_parts(path)):
            where = f"{path.relative_to(PACKAGE.parent)}:{line} imports {other}"
            if other == "__version__":
                continue  # said by the command, and of a run in TensorBoard
            if other not in module_files():
                wrong.append(f"{where}, which is no module of this package")
            elif other != part and level_of(other) > level_of(part) and (part, other) not in ALLOWED_UP:
                wrong.append(f"{where}, which stands above it")
    assert not wrong, "\n".join(wrong)


def test_pure_parts_know_no_torch() -> None:
    for name in ("errors", "sharding"):
        modules = {
            alias.name.partition(".")[0]
            for path in module_files()[name]
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert "torch" not in modules, name


def test_public_names_are_the_documented_ones() -> None:
    assert sorted(trainloop.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(trainloop, name).__name__ == name
    assert set(PUBLIC) <= set(dir(trainloop))


@pytest.mark.parametrize("name", SUBMODULES)
def test_submodules_import_and_say_what_is_public(name: str) -> None:
    __import__(f"trainloop.{name}")
    module = sys.modules[f"trainloop.{name}"]
    assert module.__doc__, name
    missing = [public for public in module.__all__ if not hasattr(module, public)]
    assert not missing, missing


def test_star_import_of_train_loop_gives_the_loops() -> None:
    names: dict[str, object] = {}
    exec("from trainloop.train_loop import *", names)
    assert {"TrainLoop", "TrainLoopCheckpoint", "TrainLoopEndSave", "TrainLoopCheckpointEndSave"} <= set(names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="TrainLop"):
        trainloop.TrainLop  # noqa: B018


# Benchmarks, and tests that need a GPU or another library, run rarely.
@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests/ecosystem", "tests/gpu", "tests/simulated_cuda"])
def test_names_that_rarely_run_code_imports_exist(folder: str) -> None:
    files = sorted((PACKAGE.parent / folder).rglob("*.py"))
    assert files
    missing = []
    for file in files:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trainloop":
                module = importlib.import_module(str(node.module))
                missing += [
                    f"{file.name}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name) and not (PACKAGE.parent / module_file(node, alias)).exists()
                ]
    assert not missing, missing


def module_file(node: ast.ImportFrom, alias: ast.alias) -> str:
    return f"{str(node.module).replace('.', '/')}/{alias.name}.py"


# Return types of the loop's methods that lead up to tools, which these methods import when they are called.
LAZY_TYPES = {
    ("trainloop.train_loop.loop", "trainloop.tools"),
    ("trainloop.train_loop.loop", "trainloop.tools.preflight"),
    ("trainloop.train_loop.loop", "trainloop.tools.replay"),
    ("trainloop.pretrained", "trainloop.pretrained.models"),
}


def outside_of_functions(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, those under ``if TYPE_CHECKING:`` too, but for the bodies of functions."""
    waiting = [node]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield child
                waiting.append(child)


def test_imports_have_no_circle_even_for_types() -> None:
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imports: dict[str, set[str]] = {}
    for name, path in files.items():
        imports[name] = set()
        for node in outside_of_functions(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module in files:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                imports[name] |= (whole & set(files)) or {str(node.module)}
        imports[name] = {other for other in imports[name] if other != name and (name, other) not in LAZY_TYPES}
    # What imports nothing that is left is on no circle.
    left = dict(imports)
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    assert not left, {name: sorted(others & set(left)) for name, others in left.items()}


# Rooms of a package, lower ones first; "" are the files of the package itself. A room imports only rooms below it.
ROOMS = {
    "train_loop": ["arguments", "progress", "saving", "run", "training", "execution", ""],
    "callbacks": ["", "weights", "watch", "checkpoints", "reports"],
    "data": ["batch", "order", "loader", "stream", "source", "feed", ""],
    "parallel": ["sharded", "replicas", ""],
    "_launch": ["script", ""],
    "tuning": ["", "running"],
}
# Old paths, for one minor version.
MOVED = {"preflight.py", "replay.py", "restarts.py", "timings.py"}
# More than nine files in a room: what several packages share.
LARGE = {"_support": 15}


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_rooms_below_it_even_for_types(package: str) -> None:
    order, wrong = ROOMS[package], []
    rooms = {path.name for path in (PACKAGE / package).iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms | {""} == set(order)
    for path in (PACKAGE / package).rglob("*.py"):
        room = "" if path.parent.name == package else path.parent.name
        if path.name == "__init__.py" or path.name in MOVED:
            continue
        for node in outside_of_functions(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"trainloop.{package}"):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}".split(".")[2:]
                    other = inner[0] if inner and inner[0] in rooms else ""
                    if order.index(other) > order.index(room):
                        wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} imports {node.module}")
    assert not wrong


def test_rooms_are_small() -> None:
    folders: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            folder = path.parent.relative_to(PACKAGE).as_posix()
            folders[folder] = folders.get(folder, 0) + 1
    assert {name: count for name, count in folders.items() if count > 9 and name != "."} == LARGE


def test_a_package_s_first_file_defines_nothing() -> None:
    """But for lazy names."""
    allowed = {"__getattr__", "__dir__", "_home_of"}
    found = []
    for path in PACKAGE.rglob("__init__.py"):
        for node in tree_of(path).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in allowed:
                found.append(f"{path.relative_to(PACKAGE)}: {node.name}")
    assert not found


@pytest.mark.parametrize("name", sorted(MOVED))
def test_documented_paths_that_have_moved_warn(name: str) -> None:
    module = f"trainloop.train_loop.{name.removesuffix('.py')}"
    sys.modules.pop(module, None)
    with pytest.warns(FutureWarning, match=f"{module} has moved to trainloop"):
        assert [name for name in vars(importlib.import_module(module)) if name[0].isupper()]


def test_public_arguments_are_counted() -> None:
    """Each costs every reader: a new one replaces another."""
    from trainloop.tuning import tune

    counts = [len(inspect.signature(f).parameters) for f in (trainloop.TrainLoop, trainloop.TrainLoop.fit, tune)]
    assert counts == [24, 18 + 1, 24]  # fit has self, too


ADD_ONS = ("tuning", "tabular", "pretrained", "doctor")


def test_the_core_imports_no_add_on() -> None:
    wrong = []
    for part, files in module_files().items():
        if part not in (*ADD_ONS, "__main__"):
            wrong += [
                f"{path.relative_to(PACKAGE)}:{line} imports {other}"
                for path in files
                for other, line in imported_parts(path)
                if other in ADD_ONS
            ]
    assert not wrong


@pytest.mark.parametrize("package", ["tuning", "tabular", "pretrained"])
def test_add_ons_take_their_helpers_from_extending(package: str) -> None:
    elsewhere = [
        f"{path.relative_to(PACKAGE)}: {alias.name} from {node.module}"
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module != "trainloop.extending"
        for alias in node.names
        if alias.name in extending.__all__ and str(node.module).startswith("trainloop")
    ]
    assert not elsewhere
