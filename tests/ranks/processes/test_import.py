"""``import trainloop`` changes nothing in torch."""

from __future__ import annotations

import subprocess
import sys

CHANGES = """
import sys, types
import torch, torch.distributed, torch.optim, torch.utils.data
from torch.nn.parallel import DataParallel, DistributedDataParallel

PLACES = [torch, torch.nn, torch.nn.Module, torch.optim, torch.optim.Optimizer, torch.optim.SGD, torch.utils.data,
          torch.utils.data.DataLoader, DataParallel, DistributedDataParallel, torch.distributed, torch.Tensor]

def unwrapped(value):
    while isinstance(value, types.FunctionType):
        yield id(value), sorted(vars(value))
        value = vars(value).get("__wrapped__")

def state():
    return [{name: (id(value), list(unwrapped(value))) for name, value in vars(place).items()
             if not isinstance(value, types.ModuleType) and name != "__warningregistry__"} for place in PLACES]

before = state()
import trainloop, trainloop.callbacks, trainloop.parallel, trainloop.train_loop, trainloop._launch
trainloop.TrainLoop
for place, was, now in zip(PLACES, before, state()):
    changed = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    assert not changed, (place, changed)
"""


def test_the_import_changes_nothing_in_torch() -> None:
    subprocess.run([sys.executable, "-c", CHANGES], check=True)
