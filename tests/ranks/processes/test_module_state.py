"""What a script has set in its modules is the same in ranks, which import them again; otherwise a warning names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.programs import run_script
from kit.sharded_models import FSDP

MODULES = {
    "conf": """
import os, threading
from dataclasses import dataclass
RANK = int(os.environ.get("RANK", -1))
IS_FIRST = RANK < 1
LR, SAME, NAMES, ARGS, CONNECTION = 0.1, 1, ["a"], None, None
rank = 4  # of LoRA: not a process's
CFG = {"optimizer": {"lr": 0.1}, "epochs": 1}
OPTIMIZER = CFG["optimizer"]
LOCK = threading.Lock()
@dataclass
class Config:
    lr: float = 0.1
class Options:
    lr = 0.1
    class Inner:
        depth = 1
    @staticmethod
    def double(x):
        return 2 * x
    def triple(self, x):
        return 3 * x
config = Config()
""",
    "ops": """
import functools
from conf import CFG, IS_FIRST, LR, config
TABLE = {}
def register(f):
    @functools.wraps(f)
    def wrapper(*args):
        return f(*args)
    TABLE[f.__name__] = wrapper
    return wrapper
@register
def scale(x):
    return 10 * x
def shift(x):
    return x + 1
def other(x):
    return x - 1
def set_up():
    from xml.sax import handler
    handler.version = "mine"
""",
    "parts": """
class Times:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, x):
        return self.factor * x
""",
    "lazy": """
DEPTH = 1
def build():
    return DEPTH
""",
}
SCRIPT = """
import argparse, contextlib, functools, io, json, logging, os, sys, textwrap as wrapping, warnings
sys.dont_write_bytecode = True  # the test edits a file within a second
import numpy, torch
import torch.nn.functional as F
import torch.distributed as dist
import conf, ops, lazy, parts
logging.raiseExceptions = False
logging.getLevelName = logging.getLevelName  # as a test does that sets it back
contextlib.closing = contextlib.closing
torch.load = functools.partial(torch.load, weights_only=False)
from trainloop._launch import keeping, launch
from trainloop.tuning import tune

def readings(stop):
    import conf, ops, torch, xml.sax.handler
    mine = {
        "values": [conf.LR, conf.SAME, conf.NAMES, conf.rank, conf.ARGS.seed, conf.ADDED],
        "imported before": ops.LR,
        "dict": [conf.CFG, conf.OPTIMIZER, ops.CFG is conf.CFG],
        "object": [conf.config.lr, ops.config is conf.config],
        "class": [conf.Options.lr, conf.Options.Inner.depth, conf.Options.double(1), conf.Options().triple(1)],
        "functions": [ops.shift(1), ops.other(1), ops.scale(1)],
        "library": [float(torch.nn.functional.gelu(torch.ones(()))), torch.nn.Linear.extra_repr(torch.nn.Linear(1, 1))],
        "library's attributes": [
            torch.nn.Linear(1, 1).gain, torch.nn.Linear.half(4), torch.nn.Bilinear(3)(4),
            torch.nn.functional.silu(2), torch.nn.functional.mish(2),
        ],
        "library's variables": [
            logging.raiseExceptions, torch.load.keywords, xml.sax.handler.version, wrapping.TextWrapper.x,
            F.celu.__name__,
        ],
        "rank": [conf.RANK, conf.IS_FIRST, ops.IS_FIRST],
        "imported later": "lazy" in sys.modules,
    }
    import lazy
    mine["lazy"] = lazy.build()
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody

def power(x, exponent):
    return x ** exponent

def code(stop):
    import lazy
    return [lazy.build(), os.getpid()]

class Estimator:
    def fit(self, x, y):
        self.seen = conf.LR, conf.Options.lr, lazy.DEPTH
        return self
    def predict(self, x):
        return x[:, 0]
    def score(self, x, y):
        return conf.LR

def make(params, fold=None):
    return Estimator()

def main():
    conf.LR, conf.NAMES, conf.ADDED, conf.rank = 0.5, ["a", "b"], "new", 8
    conf.ARGS = argparse.Namespace(seed=3)
    conf.CFG["optimizer"]["lr"] = 0.5
    conf.config.lr = 0.5
    conf.CONNECTION = open(os.devnull)
    conf.Options.lr, conf.Options.Inner.depth = 0.5, 7
    conf.Options.double = staticmethod(lambda x: 20 * x)
    conf.Options.triple = lambda self, x: 30 * x
    ops.shift = lambda x: x + 100
    lazy.DEPTH = 9
    ops.set_up()
    wrapping.TextWrapper.x, F.celu = [1], F.relu
    F.gelu = lambda x: x * 5
    torch.nn.Linear.extra_repr = lambda self: "mine"
    torch.nn.Linear.gain = property(lambda self: 2)
    torch.nn.Linear.half = staticmethod(lambda x: x / 2)
    F.silu, F.mish = functools.partial(power, exponent=3), parts.Times(7)
    torch.nn.Bilinear = parts.Times
    found = {}
    for method in ("forkserver", "spawn"):
        with warnings.catch_warnings(record=True) as here:
            warnings.simplefilter("always")
            found[method] = launch(readings, ranks_per_node=2, start_method=method)
    data = numpy.ones((4, 1)), numpy.ones(4)
    found["tune"] = tune(make, {"a": [1]}, data=data, num_trials=1, num_bag_folds=2, searcher="grid")
    found["tune"] = found["tune"].predictor.models[0].seen
    with keeping():
        found["kept"] = [launch(code, ranks_per_node=1)]
        lazy.DEPTH = 10
        found["kept"].append(launch(code, ranks_per_node=1))
        with open(lazy.__file__, "a") as file:
            file.write("\\ndef build():\\n    return -DEPTH\\n")
        found["kept"].append(launch(code, ranks_per_node=1))  # not reloaded: the old code here and there
        print("EDITED", file=sys.stderr, flush=True)
        found["edited"] = None
    found["edited"] = launch(code, ranks_per_node=1)
    print("RELOADED", file=sys.stderr, flush=True)
    import importlib
    with keeping():
        found["reloaded"] = [launch(code, ranks_per_node=1)]
        with open(lazy.__file__, "a") as file:
            file.write("\\ndef build():\\n    return 2 * DEPTH\\n")
        importlib.reload(lazy)
        found["reloaded"].append(launch(code, ranks_per_node=1))
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""


@pytest.mark.long
def test_what_the_script_sets_in_its_modules(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT, modules=MODULES)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for method in ("forkserver", "spawn"):
        for rank, readings in enumerate(found[method]):
            assert readings == {
                "values": [0.5, 1, ["a", "b"], 8, 3, "new"],
                "imported before": 0.1,  # as in the caller, where ``from conf import LR`` came first
                "dict": [{"optimizer": {"lr": 0.5}, "epochs": 1}, {"lr": 0.5}, True],
                "object": [0.5, True],
                "class": [0.5, 7, 20, 30],
                "functions": [101, 0, 10],
                "library": [5.0, "mine"],
                "library's attributes": [2, 2.0, 12, 8, 14],
                "library's variables": [False, {"weights_only": False}, "mine", [1], "relu"],
                "rank": [rank, rank == 0, rank == 0],
                "imported later": False,
                "lazy": 9,
            }
    first, edited, _ = (
        done.stderr.partition("EDITED")[0],
        *done.stderr.partition("EDITED")[2].partition("RELOADED")[::2],
    )
    # Once for each start that imports the module; no other attribute is named.
    assert first.count("conf.CONNECTION of this process can't be sent to the ranks") == 2, first
    assert first.count("UserWarning") == 2, first
    assert "conf.CONNECTION" not in edited  # conf is not imported by these ranks
    assert found["tune"] == [0.5, 0.5, 9]
    (value, pid), (later, same), (kept, again) = found["kept"]
    assert [value, later, kept] == [9, 10, 10]
    assert pid == same == again
    assert "lazy.build: the file" in edited
    assert "importlib.reload" in edited
    assert found["edited"][0] == -10
    (one, pid), (two, other) = found["reloaded"]
    assert (one, two) == (-10, 2)  # reloading sets DEPTH again
    assert pid != other


SETTINGS = """
import os
def load():
    if int(os.environ.get("RANK", 0)) == 0:
        pass  # what one process prints
    return {"depth": 1}
TABLE = load()
CONFIG, SEEN = {"scale": 1}, []
class Options:
    scale = 1
options = Options()
def _reader(config):
    return lambda: config["scale"]
at_import = _reader(CONFIG)
def set_scale(scale):
    CONFIG["scale"] = options.scale = scale
    SEEN.append(scale)
"""
SHARING_SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset
import settings
from settings import CONFIG, SEEN, TABLE, at_import, options, set_scale
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
set_scale(2)

class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.full((8,), float(CONFIG["scale"])), torch.tensor(0)

class Net(TTBasicModel):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 3)
    def forward(self, x):
        return self.fc(x)
    def get_loss(self, batch_data, criterion, device=None):
        loss = super().get_loss(batch_data, criterion, device)
        self.log("data", batch_data[0].mean())
        self.log("options", options.scale)
        return loss

class Curriculum(AbstractCallback):
    at_start = None
    def on_train_begin(self):
        self.at_start = at_import(), TABLE is settings.TABLE
    def on_epoch_begin(self):
        set_scale(self.train_loop_obj.epoch + 3)

if __name__ == "__main__":
    model, callback = Net(), Curriculum("curriculum")
    loop = TrainLoop(model, DataLoader(Data(), 2), None, None, torch.optim.SGD(model.parameters(), 0.1),
                     torch.nn.CrossEntropyLoss(), gpu_mode="ddp", devices=2)
    loop.fit(num_epochs=2, callbacks=[callback])
    print([callback.at_start, *(loop.history[name] for name in ("data", "options")), SEEN, CONFIG])
"""


def test_a_variable_that_the_script_and_its_module_share_is_one_object_in_ranks(tmp_path: Path) -> None:
    done = run_script(tmp_path, SHARING_SCRIPT, modules={"settings": SETTINGS})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([(2, True), [3.0, 4.0], [3.0, 4.0], [2, 3, 4], {"scale": 4}])
    assert "UserWarning" not in done.stderr


PARTS = {
    "registry": """
MODELS, HOOKS = {}, []
def model(cls):
    MODELS[cls.__name__] = cls
    return cls
def after(x):
    return x
""",
    "layers": """
import torch
SEEN = {"penalty": 0.0}
def penalty():
    return SEEN["penalty"]
def layer(size):
    made = torch.nn.Linear(8, size)
    made.register_forward_hook(lambda module, args, output: SEEN.update(penalty=output.square().mean()))
    return made
""",
}
USES = """
import functools, sys
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
import layers, registry
from trainloop import TrainLoop, TTBasicModel

FOUND, CALLS = {}, [0]

def keep(module, args, output):
    FOUND["output"] = output

def count(x):
    CALLS[0] += 1
    FOUND["twice"] = 2 * x
    return x

def again(x):
    CALLS.append(0)
    return count(x)

@registry.model
class Net(TTBasicModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(layers.layer(5), nn.Linear(5, 3))
        self.layers[1].register_forward_hook(keep)
    def forward(self, x):
        return self.layers(x)
    def get_loss(self, batch_data, criterion, device):
        loss = super().get_loss(batch_data, criterion, device)
        registry.HOOKS[0](registry.after(loss))
        return FOUND["twice"] + FOUND["output"].square().mean() + layers.penalty()

def trained(mode, fits=1):
    torch.manual_seed(0)
    model = registry.MODELS["Net"]()
    data = TensorDataset(torch.randn(24, 8), torch.randint(3, (24,)))
    ranks = 1 if mode == "single" else 2
    loop = TrainLoop(
        model, DataLoader(data, 8 // ranks), optimizer=optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(), gpu_mode=mode, accelerator="cpu", devices=ranks, progress_bar=False,
    )
    with loop.ranks():
        for _ in range(fits):
            loop.fit(num_epochs=1)
    return loop.history["loss"]

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    registry.HOOKS.append(count)
    registry.after = functools.wraps(registry.after)(again)
    expected = trained("single", fits=2)
    for mode in sys.argv[1:]:
        CALLS[:] = [0]
        torch.testing.assert_close(trained(mode, fits=2), expected, rtol=0, atol=1e-12)
        assert CALLS == [12, *6 * [0]], CALLS  # rank 0 has three steps in each of the two fits
"""


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", FSDP])
def test_functions_and_classes_in_other_modules_share_their_variables_with_the_work(mode: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, USES, mode, modules=PARTS)
    assert done.returncode == 0, done.stderr
