"""What type checkers and editors know of the package, asked of the checkers themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "typed"
PACKAGE = SCRIPTS.parent.parent


def output_of(command: list[str], folder: Path) -> str:
    pytest.importorskip(command[0], reason=f"{command[0]} is not installed; make test-all has it")
    environment = {**os.environ, "MYPYPATH": os.pathsep.join([str(PACKAGE), str(SCRIPTS)])}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode in (0, 1), f"{done.stdout}\n{done.stderr}"  # 1: errors were found
    return done.stdout


def mypy_lines(script: Path, folder: Path) -> set[int]:
    # An empty configuration: a user's project has its own, and not this repository's.
    (folder / "mypy.ini").write_text("[mypy]\n")
    out = output_of(["mypy", "--strict", "--output=json", str(script)], folder)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {row["line"] for row in found if row["severity"] == "error" and Path(row["file"]).name == script.name}


def pyright_lines(script: Path, folder: Path) -> set[int]:
    settings = {
        "typeCheckingMode": "strict",
        "pythonVersion": "3.10",
        "extraPaths": [str(PACKAGE), str(SCRIPTS)],
        "include": [str(script)],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    out = output_of(["basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)], folder)
    found = json.loads(out)["generalDiagnostics"]
    return {row["range"]["start"]["line"] + 1 for row in found if row["severity"] == "error"}


@pytest.mark.slow  # half a minute: torch is read
@pytest.mark.parametrize("lines", [mypy_lines, pyright_lines])
def test_a_typed_script_is_right_and_misspelt_names_are_wrong(
    lines: Callable[[Path, Path], set[int]], tmp_path: Path
) -> None:
    assert lines(SCRIPTS / "user_script.py", tmp_path) == set()
    script = SCRIPTS / "misspelt.py"
    marked = {i for i, line in enumerate(script.read_text().splitlines(), start=1) if line.endswith("# wrong")}
    assert len(marked) > 10
    assert lines(script, tmp_path) == marked
