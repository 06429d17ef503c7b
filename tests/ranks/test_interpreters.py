"""What only a fresh interpreter shows: what an import brings, seeds that no process changes, a shell."""

from __future__ import annotations

import os
import subprocess
import sys

from trainloop import rng


def test_tensorboard_is_not_imported_before_it_is_used() -> None:
    code = "import sys, trainloop.callbacks as c; c.TensorBoard('x'); print('tensorboard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "False", done.stderr


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


def test_derived_seeds_are_the_same_in_every_process() -> None:
    code = "from trainloop import rng; print(rng.derive_seed(1, 'rank', 2))"
    environment = {"PYTHONHASHSEED": "77", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, env=environment
    )
    assert int(done.stdout) == rng.derive_seed(1, "rank", 2)


# A full collection visits all of torch's objects (50 ms and more), and whether one falls into the import is a matter of
# how many objects torch itself has made by then: the import's own cost is measured without.
IMPORT_TIME = """
import gc, sys, time
import torch
gc.disable()
before = set(sys.modules)
start = time.process_time()
import trainloop
trainloop.TrainLoop, trainloop.TTModel
print((time.process_time() - start) * 1000)
print(" ".join(sorted(set(sys.modules) - before)))
"""


HEAVY = ("tensorboard", "matplotlib", "ray", "optuna", "cloudpickle", "psutil", "sklearn", "pandas", "torchmetrics")


def test_import_is_cheap() -> None:
    """At most 60 ms above ``import torch``, of the process's own time, so that other processes' work doesn't count."""
    # The first run may compile to bytecode, which later ones find.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    milliseconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT_TIME],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
            env=environment,
        )
        own_time, modules = done.stdout.split("\n")[:2]
        milliseconds.append(float(own_time))
    heavy = [
        module
        for module in modules.split()
        if module.partition(".")[0] in HEAVY or module.startswith("multiprocessing.managers")
    ]
    assert not heavy, heavy
    assert min(milliseconds) < 60, milliseconds
