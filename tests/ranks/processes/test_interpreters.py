"""Facts that only a fresh interpreter shows: the modules an import loads, seeds equal in all processes, a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from trainloop._support import rng


def test_a_shell_is_interactive_and_a_script_is_not() -> None:
    code = "import trainloop.devices as d; print(d._interactive())"
    script = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    shell = subprocess.run([sys.executable, "-i", "-c", code], capture_output=True, text=True, timeout=60, input="")
    assert script.stdout.strip() == "False"
    assert shell.stdout.strip().startswith("True")


def test_importing_devices_imports_nothing_heavy() -> None:
    code = "import sys; import trainloop.devices; print({'psutil', 'pynvml', 'filelock'} & set(sys.modules))"
    path = {**os.environ, "PYTHONPATH": os.getcwd()}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=path)
    assert run.stdout.strip() == "set()"


# A full collection visits all of torch's objects (50 ms and more), and whether one falls into the import is a matter of
# how many objects torch itself has made by then: the import's own cost is measured without.
FRESH = """
import gc, json, sys, time
gc.disable()
begin = time.process_time()
import torch
before = set(sys.modules)
start = time.process_time()
import trainloop
trainloop.TrainLoop, trainloop.TTModel
share = (time.process_time() - start) / (start - begin)
brought = sorted(set(sys.modules) - before)
from trainloop._support import rng
from trainloop.callbacks import TensorBoard
TensorBoard("x")
print(json.dumps({
    "share": share,
    "brought": brought,
    "seed": rng.derive_seed(1, "rank", 2),
    "tensorboard": "tensorboard" in sys.modules,
}))
"""


def fresh_interpreter() -> dict[str, Any]:
    """Results of an interpreter that has imported nothing yet, and has other hashes of texts than this one."""
    # The first run may compile to bytecode, which later ones find.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "PYTHONHASHSEED": "77"},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    return fresh_interpreter()  # one for several facts: each imports torch, which takes seconds


@pytest.mark.long
def test_tensorboard_is_not_imported_before_it_is_used(fresh: dict[str, Any]) -> None:
    assert fresh["tensorboard"] is False


def test_derived_seeds_are_the_same_in_every_process(fresh: dict[str, Any]) -> None:
    assert fresh["seed"] == rng.derive_seed(1, "rank", 2)


HEAVY = ("tensorboard", "matplotlib", "ray", "optuna", "psutil", "sklearn", "pandas", "torchmetrics")


def test_import_is_cheap(fresh: dict[str, Any]) -> None:
    """At most a tenth of what ``import torch`` takes, both of the process's own time: 120 ms where that is 1.2 s."""
    heavy = [
        module
        for module in fresh["brought"]
        if module.partition(".")[0] in HEAVY or module.startswith("multiprocessing.managers")
    ]
    assert not heavy, heavy
    shares = [fresh["share"]]
    while min(shares) >= 0.1 and len(shares) < 6:  # a busy machine's cold caches count, the least is ours
        shares.append(fresh_interpreter()["share"])
    assert min(shares) < 0.1, shares
