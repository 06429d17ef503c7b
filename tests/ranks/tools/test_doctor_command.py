"""The doctor as a command, with installations that are broken or pretend to have GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BROKEN = 'raise ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory")'
# As much of torch as is asked of it: two GPUs, and a warning of an old driver.
PRETENDED = """
import types, warnings
__version__ = "2.13.0+cu128"
get_num_threads = lambda: 1
distributed = types.SimpleNamespace(is_available=lambda: True, is_gloo_available=lambda: True)
cuda = types.SimpleNamespace(
    device_count=lambda: 2, is_available=lambda: warnings.warn("The NVIDIA driver on your system is too old") or True
)
"""


def doctor(folder: Path, source: str | None, *arguments: str) -> tuple[int, str]:
    paths = [str(Path(__file__).parents[3])]
    if source is not None:
        (folder / "torch.py").write_text(source)
        paths.insert(0, str(folder))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "trainloop", *arguments], env=environment, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def lines(text: str) -> dict[str, Any]:
    return {check["name"]: check for check in json.loads(text)["checks"]}


@pytest.mark.long
def test_the_doctor_works_where_torch_does_not(tmp_path: Path) -> None:
    status, text = doctor(tmp_path, BROKEN, "doctor", "--json")
    assert status == 1
    assert lines(text)["import torch"]["status"] == "problem"
    assert "libcudnn.so.9" in lines(text)["import torch"]["remedy"]
    assert "loopback" in lines(text)  # all other checks run
    status, text = doctor(tmp_path, PRETENDED, "doctor", "--json")
    assert lines(text)["torch"]["found"] == "2.13.0+cu128 with 2 GPUs"
    assert lines(text)["gpus"]["found"] == "The NVIDIA driver on your system is too old"
    status, text = doctor(tmp_path, None)
    assert status == 0
    assert "python -m trainloop doctor" in text
