"""The map of the house and the two ways in CONTRIBUTING.rst: complete, and true."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from kit.places import ROOT
from test_house import Net, Tracer
from test_layers import ALLOWED_UP, imported_parts, module_files
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainloop
from trainloop import TrainLoop

PACKAGE = Path(trainloop.__file__).parent
TEXT = (ROOT / "CONTRIBUTING.rst").read_text()


def section(title: str) -> list[str]:
    """Lines of a section."""
    begin = TEXT.index(f"{title}\n{'-' * len(title)}\n")
    end = re.compile(r"^.+\n-+\n", re.MULTILINE).search(TEXT, begin + 2 * len(title) + 2)
    return TEXT[begin : end.start() if end else None].splitlines()


def rows(indent: int) -> list[list[str]]:
    """Files and folders of the map's lines at an indent, each line's together."""
    found = []
    for line in section("A map of the house"):
        if re.match(rf" {{{indent}}}\S", line):
            names = []
            for word in line.split():
                if not word.endswith((".py", "/")):
                    break
                names.append(word)
            found.append(names)
    return found


def test_the_map_has_every_part_of_the_package() -> None:
    shown = [name for row in rows(4) for name in row]
    there = [path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()]
    assert sorted(shown) == sorted(set(there) - {"__init__.py", "__pycache__/"})


def test_the_list_of_files_has_the_first_line_of_each() -> None:
    lines = re.findall(
        r"^    ((\w+(?:/\w+)?)/\w+\.py) +(.+)$", "\n".join(section("The packages, file by file")), re.MULTILINE
    )
    shown = {name: text for name, _, text in lines}
    packages = dict.fromkeys(package for _, package, _ in lines)
    files = [path for package in packages for path in sorted((PACKAGE / package).glob("*.py"))]
    first_lines = {
        path.relative_to(PACKAGE).as_posix(): str(ast.get_docstring(ast.parse(path.read_text()))).partition("\n")[0]
        for path in files
        if path.name != "__init__.py"
    }
    assert shown == first_lines
    shown_whole = {package.partition("/")[0] for package in packages}
    assert shown_whole == {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}


def test_modules_import_what_stands_below_them_on_the_map() -> None:
    level = {re.sub(r"(\.py|/)$", "", name): i for i, row in enumerate(rows(4)) for name in row}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {other}, which stands above it on the map"
        for part, paths in module_files().items()
        for path in paths
        for other, line in imported_parts(path)
        if part in level and other in level and level[other] < level[part] and (part, other) not in ALLOWED_UP
    ]
    assert not wrong, "\n".join(wrong)


def way(title: str) -> list[tuple[str, str]]:
    """File and function of each line of a way."""
    return re.findall(r"^ {4}(\S+\.py) +([\w.]+)  ", "\n".join(section(title)), re.MULTILINE)


def defined(tree: ast.AST, name: str) -> bool:
    """Whether a function, class or method of that name is defined."""
    first, _, rest = name.partition(".")
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = [node for node in ast.iter_child_nodes(tree) if isinstance(node, kinds) and node.name == first]
    return bool(found) and (not rest or defined(found[0], rest))


@pytest.mark.parametrize("title", ["The way of a batch", "The way of a fit in ddp", "The way of a failure"])
def test_every_step_of_the_ways_is_there(title: str) -> None:
    steps = way(title)
    lines = [line for line in section(title) if line.startswith("    ")]
    assert len(steps) == len(lines) > 5, "a line of the way reads: file, function, two spaces, what it does"
    missing = [f"{file} {name}" for file, name in steps if not defined(ast.parse((PACKAGE / file).read_text()), name)]
    assert not missing


def test_the_stack_above_get_loss_is_the_one_that_the_way_names() -> None:
    model = Net(Tracer())
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(2, (8,))), batch_size=4)
    loop = TrainLoop(
        model,
        loader,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        accelerator="cpu",
        progress_bar=False,
    )
    try:
        loop.fit(num_epochs=1)
    finally:
        sys.setprofile(None)  # which the model sets after each get_loss
    named = re.search(r"``(\w+)``,\s+``(\w+)``, ``(\w+)``\s+and\s+``(\w+)`` are on", TEXT)
    assert named is not None
    checked = "checked"  # above fit, the decorator that explains unknown keywords
    assert model.stacks == [[*reversed(named.groups()), checked]] * 2
