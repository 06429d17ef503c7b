"""Check the script's ``__main__`` guard before ranks start, and give ranks the script's file and module name."""

from __future__ import annotations

import ast
import importlib.machinery
import linecache
import multiprocessing
import os
import sys
from collections.abc import Sequence
from types import CodeType, FrameType

from trainloop.errors import ConfigurationError

_MESSAGE = """{where} starts processes, but is not inside an `if __name__ == '__main__':` block.
A process that Python starts may import the script, and would then start further processes.
Put the script's code into a function, and call it from the guard:

    def main():
        ...
        tl.fit(...)

    if __name__ == '__main__':
        main()"""


def check_main_guard() -> None:
    """Raise an error if processes are started from the top level of a script, outside its ``__main__`` guard.

    Notebooks, interactive shells, ``python -c`` and scripts on standard input don't need a guard.

    Raises
    ------
    ConfigurationError
        If the guard is missing; the message shows the guard to write.
    """
    # Check this first: otherwise each process would start more processes.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A process that is just being started imports the script that started it.
        raise ConfigurationError(_MESSAGE.format(where="The script"))
    frame = _main_frame(sys._getframe(1))
    if frame is None:
        return
    path = frame.f_code.co_filename
    source = "".join(linecache.getlines(path))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the file has changed since
        return
    if tree.body and not _is_guarded(tree, frame.f_lineno) and _is_code_of(frame.f_code, source):
        raise ConfigurationError(_MESSAGE.format(where=f"{path}, line {frame.f_lineno},"))


def _main_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the running script's top level, if there is one."""
    main = sys.modules.get("__main__")
    main_file = getattr(main, "__file__", None)
    if main is None or not main_file or hasattr(sys, "ps1") or not os.path.isfile(main_file):
        return None
    while frame is not None:
        is_script = frame.f_globals is main.__dict__ and frame.f_code.co_name == "<module>"
        if is_script and os.path.abspath(frame.f_code.co_filename) == os.path.abspath(main_file):
            return frame
        frame = frame.f_back
    return None


def _is_code_of(code: CodeType, source: str) -> bool:
    """Return False if the script's file has been changed while it runs, so that its lines are others."""
    read = compile(source, code.co_filename, "exec", dont_inherit=True)
    return (read.co_code, read.co_names, [*read.co_lines()]) == (code.co_code, code.co_names, [*code.co_lines()])


def _is_guarded(tree: ast.Module, line: int) -> bool:
    """Return True if the statement at ``line`` runs only where ``__name__`` is ``'__main__'``."""

    def has_line(parts: Sequence[ast.stmt | ast.expr]) -> bool:
        return any(part.lineno <= line <= (part.end_lineno or part.lineno) for part in parts)

    for node in ast.walk(tree):  # a guard may be inside a loop, a `with` or a `try`
        if isinstance(node, (ast.If, ast.IfExp)):
            verdict = _compares_main(node.test)
            branch = node.body if verdict else node.orelse
            if verdict is not None and has_line(branch if isinstance(branch, list) else [branch]):
                return True
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            guards = [i for i, value in enumerate(node.values) if _compares_main(value)]
            if guards and has_line(node.values[guards[0] + 1 :]):
                return True
    # `if __name__ != '__main__': raise ...` further up
    return any(
        isinstance(statement, ast.If)
        and _compares_main(statement.test) is False
        and (statement.end_lineno or statement.lineno) < line
        for statement in tree.body
    )


def _compares_main(test: ast.expr) -> bool | None:
    """Return True if the test is true in the main module only, False if in other modules only, else None."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return True if any(_compares_main(value) for value in test.values) else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    sides = [test.left, test.comparators[0]]
    names = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    main = any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)
    if not (names and main):
        return None
    if isinstance(test.ops[0], ast.Eq):
        return True
    return False if isinstance(test.ops[0], ast.NotEq) else None


def main_place() -> tuple[str | None, str | None]:
    """Return the running script's file, and its module name under ``python -m``; each is ``None`` if it is unknown."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    return (os.path.abspath(file) if file else None), (spec.name if spec is not None else None)


def take_main_place(file: str | None, name: str | None) -> None:
    """Make a rank's ``__main__`` look like the script's, without running the script.

    A DataLoader's workers that the rank spawns (``multiprocessing_context='spawn'``) then import the script, as they do
    in any PyTorch program, and find its classes.
    """
    main = sys.modules["__main__"]
    if file is not None:
        main.__file__ = file
    if name is not None:
        main.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=file)
