"""Ranks are started under a debugger, or an error says what stands in the way: the folder, the limits, the guard."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainloop._launch import launch, launching
from trainloop._transfer import pack
from trainloop.distributed.peers import DisturbedStartError
from trainloop.errors import UnpicklableError, WorkerFailedError

SCRIPT = """
import os, resource, shutil, sys
import torch.distributed as dist
from trainloop._launch import launch

def work(stop):
    return dist.get_world_size()

if __name__ == "__main__":
    print("STARTED", launch(work, ranks_per_node=2))
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gone")
    os.mkdir(folder)
    os.chdir(folder)
    os.rmdir(folder)
    try:
        launch(work, ranks_per_node=2)
    except Exception as error:
        print("FOLDER", type(error).__name__, error)
    os.chdir("/")
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, used + 3))
    try:
        launch(work, ranks_per_node=2)
    except Exception as error:
        print("FILES", type(error).__name__, error)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
@pytest.mark.parametrize("method", ["auto", "spawn"])
def test_a_debugger_a_deleted_folder_and_few_files(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "pdb", "-c", "continue", str(script)],
        input="q\n",
        capture_output=True,
        text=True,
        env={**os.environ, "TRAINLOOP_START_METHOD": method},
    )
    assert "STARTED 2" in done.stdout, done.stdout + done.stderr
    assert "FOLDER ConfigurationError the current folder of this process can't be read" in done.stdout
    assert "FILES ConfigurationError ranks can't be started: the limit of " in done.stdout, done.stdout


UNGUARDED = """
from trainloop._launch import launch

class Work:
    def __call__(self, stop):
        return 1

launch(Work(), ranks_per_node=1)
"""


def test_a_module_that_ranks_import_needs_a_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unguarded.py").write_text(UNGUARDED)
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("unguarded")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "unguarded", module)
    with pytest.raises(WorkerFailedError, match=r"inside an `if __name__ == '__main__':` block") as caught:
        spec.loader.exec_module(module)  # as IPython's %run -n does
    assert 'unguarded.py", line 8, in <module>' in caught.value.traceback


def disturbed(stop: object) -> None:
    raise DisturbedStartError("user nobody connected")


@pytest.mark.long
def test_a_disturbed_start_is_repeated_five_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(launching, "_PAUSES_S", (0.0, 0.01, 0.02))
    with pytest.raises(WorkerFailedError, match="user nobody connected"):
        launch(disturbed, ranks_per_node=1)
    said = capsys.readouterr().err
    pauses += [float(line.split("after ")[1].split(" s)")[0]) for line in said.splitlines() if "Restarting" in line]
    assert pauses == [0.0, 0.01, 0.02]
    assert "Restarting the ranks (3 of 3, after 0.02 s): user nobody connected" in said


class Flags:
    def __reduce__(self) -> Any:
        raise TypeError("can't pickle flags")


def test_a_global_of_the_script_is_the_only_one_named() -> None:
    space: dict[str, Any] = {"__name__": "__main__", "torch": torch, "FLAGS": Flags()}
    exec(
        "from abc import ABC\nclass Net(ABC, torch.nn.Module):\n    def forward(self, x):\n        return FLAGS", space
    )
    net = space["Net"]()
    with pytest.raises(UnpicklableError) as error, pack(net, roots={"model": net}):
        pass
    assert "_abc_impl" not in str(error.value)
    assert "<global FLAGS>" in str(error.value)
    assert "A function uses this global variable of the script" in str(error.value)
