"""Warnings point to the user's line, whatever is between it and the place where they are made."""

from __future__ import annotations

import ast
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import make_loop

import trainloop
from trainloop import AbstractCallback, errors
from trainloop._launch.script import settings
from trainloop._support import user_line

PACKAGE = Path(trainloop.__file__).parent


def line_of(text: str) -> int:
    """The number of this file's only line that ends in a comment."""
    (found,) = [i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {text}")]
    return found


def only(caught: list[warnings.WarningMessage], what: str) -> tuple[str, int]:
    (found,) = [each for each in caught if what in str(each.message)]
    return found.filename, found.lineno


def test_warnings_of_fit_point_to_its_call() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_loop(accelerator="auto").fit(num_epochs=1, num_gpus=0)  # the call
    assert only(caught, "num_gpus=0") == (__file__, line_of("the call"))


def test_warnings_in_a_block_point_to_the_block_s_line() -> None:
    class Typo(AbstractCallback):
        def on_epoch_start(self) -> None:
            pass

    loop = make_loop()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.random.fork_rng():
            loop.fit(num_epochs=1, callbacks=[Typo("typo")])  # in a block
    assert only(caught, "on_epoch_start is not called by fit") == (__file__, line_of("in a block"))


BETWEEN = """
import contextlib, functools
import torch
from trainloop._support.user_line import warn

@contextlib.contextmanager
def block():
    warn("at the begin")
    yield
    warn("at the end", RuntimeWarning)

def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        with block():
            return function(*args)
    return inner

@decorated
@torch.no_grad()
def inside():
    warn("inside")
"""


def test_through_decorators_and_context_managers_of_the_library() -> None:
    names: dict[str, Any] = {}
    exec(compile(BETWEEN, str(PACKAGE / "between.py"), "exec"), names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with names["block"]():  # a block
            names["inside"]()  # a decorated function
    assert [(str(each.message), each.filename, each.lineno, each.category) for each in caught] == [
        ("at the begin", __file__, line_of("a block"), UserWarning),
        ("at the begin", __file__, line_of("a decorated function"), UserWarning),
        ("inside", __file__, line_of("a decorated function"), UserWarning),
        ("at the end", __file__, line_of("a decorated function"), RuntimeWarning),
        ("at the end", __file__, line_of("a block"), RuntimeWarning),
    ]


def test_without_a_line_of_the_user_it_is_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a rank, or a thread of this package: what is on the stack there is the interpreter's."""
    monkeypatch.setattr(user_line, "_caller", None)
    caught: list[Any] = []

    def in_thread() -> None:
        thread = threading.Thread(target=user_line.warn, args=("from a thread",))
        thread.start()
        thread.join()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *shown: caught.append(shown[2:4]))
        in_thread()
        settings.apply_settings(settings.dumped_settings())  # the fit
        in_thread()
    assert Path(caught[0][0]).name == "threading.py"
    assert caught[1] == (__file__, line_of("the fit"))


def test_a_warning_is_shown_once_a_line_and_filters_apply() -> None:
    names: dict[str, Any] = {}
    exec(compile(BETWEEN, str(PACKAGE / "between.py"), "exec"), names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            names["inside"]()
    assert [str(each.message) for each in caught] == ["at the begin", "inside", "at the end"]
    with pytest.raises(UserWarning, match="at the begin"):
        names["inside"]()  # this project's tests have warnings as errors


@pytest.mark.long
def test_all_warnings_go_this_way() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name != "user_line.py":
            for node in ast.walk(ast.parse(path.read_text())):
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                assert called not in ("warnings.warn", "warnings.warn_explicit"), f"{path}:{node.lineno}: use warn()"  # type: ignore[attr-defined]


def test_the_error_of_an_unknown_argument_is_among_the_errors() -> None:
    with pytest.raises(errors.UnknownArgumentError):
        make_loop(epochs=3)
    assert "UnknownArgumentError" in errors.__all__
    assert "UnknownArgumentError(TypeError)" in (errors.__doc__ or "")
    # Every class is in the tree of the docstring, which the documentation shows.
    assert all(name in (errors.__doc__ or "") for name in errors.__all__)
