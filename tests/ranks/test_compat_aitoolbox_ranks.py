"""A script for AIToolbox in ranks: the one line of the script is enough for modules that import ``aitoolbox`` there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# A module of the user's own knows nothing of trainloop.
MODULE = """
import torch
from torch import nn
from aitoolbox.torchtrain.callbacks.abstract import AbstractCallback
from aitoolbox.torchtrain.model import TTModel
from aitoolbox.torchtrain.multi_loss_optim import MultiLoss, MultiOptimizer

class Net(TTModel):
    def __init__(self, several):
        super().__init__()
        torch.manual_seed(0)
        self.several = several
        self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
    def forward(self, x):
        return self.a(self.trunk(x))
    def get_loss(self, batch_data, criterion, device):
        x, y = batch_data
        if not self.several:
            return criterion(self(x), y)
        hidden = self.trunk(x)
        return MultiLoss({"a": criterion(self.a(hidden), y), "b": criterion(self.b(hidden), y)})
    def get_predictions(self, batch_data, device):
        x, y = batch_data
        return self(x).argmax(1), y, {}

class Optimizers(MultiOptimizer):
    def step(self, optimizer_idx, iteration, amp_grad_scaler):
        if optimizer_idx == 0 or iteration % 2:
            super().step(optimizer_idx, iteration, amp_grad_scaler)
    def zero_grad(self, optimizer_idx, iteration):
        if optimizer_idx == 0 or iteration % 2:
            super().zero_grad(optimizer_idx, iteration)

class Rows:  # a batch of the user's own kind
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __iter__(self):
        return iter((self.x, self.y))

class Decaying:  # no torch optimizer
    def __init__(self, inner):
        self.inner, self.steps = inner, 0
    def step(self):
        self.steps += 1
        self.inner.param_groups[0]["lr"] = 0.5 / self.steps
        self.inner.step()
    def zero_grad(self):
        self.inner.zero_grad()

class Spy(AbstractCallback):
    def __init__(self):
        super().__init__("spy")
        self.seen = []
    def on_epoch_end(self):
        loop = self.train_loop_obj
        self.seen.append([loop.ddp_rank, loop.world_size, loop.epoch, loop.iteration, len(loop.loss_batch_accum)])
"""

SCRIPT = """
import json, sys
import trainloop.compat.aitoolbox
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from aitoolbox.torchtrain.callbacks.performance_eval import ModelPerformanceEvaluation
from aitoolbox.torchtrain.train_loop import *
from aitoolbox.experiment.result_package.basic_packages import ClassificationResultPackage
from nets import Decaying, Net, Optimizers, Rows, Spy

def data(samples):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, torch.randint(3, (samples,), generator=generator))

def optimizer_of(model):
    if not model.several:
        return torch.optim.SGD(model.parameters(), lr=0.3)
    last = [*model.b.parameters(), *model.trunk.parameters()]
    return Optimizers([torch.optim.SGD(model.a.parameters(), lr=0.3), torch.optim.SGD(last, lr=0.3)])

if __name__ == "__main__":
    facts = {}
    for several in (False, True):
        model, spy = Net(several), Spy()
        loaders = [DataLoader(data(samples), batch_size=8) for samples in (64, 32)]
        tl = TrainLoopCheckpointEndSave(
            model, *loaders, None, optimizer_of(model), nn.CrossEntropyLoss(), "project", f"experiment_{several}",
            sys.argv[1], {"lr": 0.3}, val_result_package=ClassificationResultPackage(), cloud_save_mode=None,
            gpu_mode="ddp",
        )
        performance = ModelPerformanceEvaluation(ClassificationResultPackage(), {})
        unused = {"find_unused_parameters": not several}
        fitted = tl.fit(
            2, callbacks=[spy, performance], num_gpus=2, on_gpu=False, backend="gloo", ddp_model_args=unused
        )
        facts[str(several)] = {
            "weights": {name: p.tolist() for name, p in model.named_parameters()},
            "history": dict(tl.train_history.items()),
            "seen": spy.seen,
            "after": [fitted is model, tl.epoch, tl.experiment_timestamp],
        }
    model = Net(False)
    optimizer = Decaying(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    rows = [Rows(*batch) for batch in DataLoader(data(48), batch_size=8)]
    tl = TrainLoop(model, rows, None, None, optimizer, nn.CrossEntropyLoss(), gpu_mode="ddp")
    for epochs in (1, 2):  # the second fit begins with the last epoch's number
        tl.fit(epochs, num_gpus=2, on_gpu=False, backend="gloo", ddp_model_args={"find_unused_parameters": True})
    facts["own"] = {
        "weights": {name: p.tolist() for name, p in model.named_parameters()},
        "optimizer": [tl.optimizer.inner is optimizer, optimizer.steps, optimizer.inner.param_groups[0]["lr"]],
    }
    print(json.dumps(facts))
"""


def by_hand(several: bool) -> dict[str, torch.Tensor]:
    """The same training in one process, in plain PyTorch, with the batches of both ranks as one."""
    torch.manual_seed(0)
    parts = nn.ModuleDict({"trunk": nn.Linear(4, 4), "a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
    generator = torch.Generator().manual_seed(64)
    rows = torch.randn(64, 4, generator=generator), torch.randint(3, (64,), generator=generator)
    first = torch.optim.SGD(parts["a"].parameters() if several else parts.parameters(), lr=0.3)
    second = torch.optim.SGD([*parts["b"].parameters(), *parts["trunk"].parameters()], lr=0.3)
    for _ in range(2):
        for i, (x, y) in enumerate(DataLoader(TensorDataset(*rows), batch_size=16)):
            hidden = parts["trunk"](x)
            nn.functional.cross_entropy(parts["a"](hidden), y).backward(retain_graph=several)
            first.step()
            first.zero_grad()
            if several:
                nn.functional.cross_entropy(parts["b"](hidden), y).backward()
                if i % 2:
                    second.step()
                    second.zero_grad()
    return dict(parts.named_parameters())


def own_by_hand(epochs: int) -> dict[str, torch.Tensor]:
    """Steps of two batches' mean, at a rate that falls step by step."""
    torch.manual_seed(0)
    parts = nn.ModuleDict({"trunk": nn.Linear(4, 4), "a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
    generator = torch.Generator().manual_seed(48)
    rows = torch.randn(48, 4, generator=generator), torch.randint(3, (48,), generator=generator)
    optimizer = torch.optim.SGD(parts.parameters(), lr=1.0, momentum=0.9)
    rates = (0.5 / step for step in range(1, 100))
    for _ in range(epochs):
        for x, y in DataLoader(TensorDataset(*rows), batch_size=16):
            optimizer.param_groups[0]["lr"] = next(rates)
            optimizer.zero_grad()
            nn.functional.cross_entropy(parts["a"](parts["trunk"](x)), y).backward()
            optimizer.step()
    return dict(parts.named_parameters())


@pytest.mark.slow
def test_a_script_for_aitoolbox_trains_in_ranks(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT)
    package = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "results"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    own = facts["own"]
    assert own["optimizer"] == [True, 9, 0.5 / 9]
    for name, expected in own_by_hand(3).items():
        assert torch.allclose(torch.tensor(own["weights"][name]), expected, atol=1e-6), name
    for several in (False, True):
        found = facts[str(several)]
        for name, expected in by_hand(several).items():
            assert torch.allclose(torch.tensor(found["weights"][name]), expected, atol=1e-6), (several, name)
        same_model, epoch, stamp = found["after"]
        assert (same_model, epoch) == (True, 1)
        assert found["seen"] == [[0, 2, 0, 3, 0], [0, 2, 1, 3, 0]]
        losses = {"accumulated_loss_a", "loss_a", "val_loss_b"} if several else {"accumulated_loss", "loss", "val_loss"}
        assert all(len(found["history"][name]) == 2 for name in losses | {"val_Accuracy"})
        assert found["history"]["train_end_val_Accuracy"] == pytest.approx(found["history"]["val_Accuracy"][-1:])
        folder = tmp_path / "results" / "project" / f"experiment_{several}_{stamp}"
        saved = torch.load(folder / "model" / f"model_experiment_{several}_{stamp}.pth", weights_only=True)
        assert (saved["epoch"], saved["iteration_idx"]) == (1, 7)
        assert set(saved["model_state_dict"]) == set(found["weights"])
        assert (folder / "checkpoint_model" / f"model_experiment_{several}_{stamp}_E0.pth").is_file()
