"""The doctor as a command, with installations that are broken or pretend to have GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BROKEN = 'raise ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory")'
# As much of torch as is asked of it: two GPUs, of which the second can't be reached from the first.
PRETENDED = """
import types
__version__ = "2.13.0+cu128"
version = types.SimpleNamespace(cuda="12.8", hip=None)
get_num_threads = lambda: 1
yes = lambda: True
distributed = types.SimpleNamespace(is_available=yes, is_gloo_available=yes, is_nccl_available=yes)
backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: 91002))
cuda = types.SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 2, mem_get_info=lambda i: (70 << 30, 80 << 30),
    get_device_properties=lambda i: types.SimpleNamespace(name="A100", major=8, minor=0),
    get_arch_list=lambda: ["sm_80"], can_device_access_peer=lambda i, j: False,
    nccl=types.SimpleNamespace(version=lambda: (2, 27, 3)),
)
"""


def doctor(folder: Path, source: str | None, *arguments: str) -> tuple[int, str]:
    paths = [str(Path(__file__).parent.parent.parent)]
    if source is not None:
        (folder / "torch.py").write_text(source)
        paths.insert(0, str(folder))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "trainloop", *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def lines(text: str) -> dict[str, Any]:
    return {check["name"]: check for check in json.loads(text)["checks"]}


def test_the_doctor_works_where_torch_does_not(tmp_path: Path) -> None:
    status, text = doctor(tmp_path, BROKEN, "doctor", "--json")
    assert status == 1
    assert lines(text)["import torch"]["status"] == "problem"
    assert "nvidia-cudnn" in lines(text)["import torch"]["remedy"]
    assert "loopback" in lines(text)  # all other checks go on
    status, text = doctor(tmp_path, PRETENDED, "doctor", "--json")
    assert lines(text)["gpu 1"]["found"] == "A100, 70.0 of 80.0 GiB free, sm_80"
    assert lines(text)["p2p"]["status"] == "attention"
    status, text = doctor(tmp_path, None)
    assert status == 0
    assert "python -m trainloop doctor" in text
