"""Programs that tests write and run, and moments that tests wait for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def run_script(
    folder: Path, text: str, *arguments: str, modules: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``script.py`` in a folder, beside its modules; what it printed and how it ended."""
    for name, content in {**(modules or {}), "script": text}.items():
        (folder / f"{name}.py").write_text(content)
    options = {"cwd": folder, "capture_output": True, "text": True, "timeout": 200, **options}
    return subprocess.run([sys.executable, str(folder / "script.py"), *arguments], **options)


def wait_until(
    condition: Callable[[], Any], run: subprocess.Popen[str] | None = None, seconds: float = 60, pause_s: float = 0.05
) -> None:
    """Wait for a condition, while a process, if given, has not ended."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        assert run is None or run.poll() is None, run.communicate()
        time.sleep(pause_s)
