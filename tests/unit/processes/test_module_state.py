"""What is sent of the user's modules, in the process that starts ranks."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path

import pytest

from trainloop._launch.module_state import dumped_modules

MODULE = """
from types import FunctionType

class Node:
    __code__ = property(lambda self: "of a syntax tree")

LR = 0.1
"""


def test_modules_with_attributes_that_look_like_functions_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nodes_of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("nodes_of_a_user")
    found = pickle.loads(dumped_modules())["nodes_of_a_user"]
    assert found["LR"].value == 0.1
    assert found["FunctionType"].value[:2] == ("builtins", "function")
    assert found["Node"].value[:2] == ("nodes_of_a_user", "Node")
