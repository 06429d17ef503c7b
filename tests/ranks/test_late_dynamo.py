"""torch._dynamo is imported by what compiles, and by nothing else that a training does."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

BEGIN = """
import sys, threading, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import trainloop
from trainloop import TrainLoop, TTBasicModel, TTDistributedDataParallel

def loaded():
    return "torch._dynamo" in sys.modules

class Model(TTBasicModel):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x)

torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(12, 4), torch.randint(2, (12,))), batch_size=4)
"""


def run(script: str) -> None:
    """In an interpreter of its own, as this one may have imported it."""
    script = textwrap.dedent(BEGIN) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_training_does_not_import_it() -> None:
    run("""
        from torch.optim.lr_scheduler import StepLR
        from trainloop.callbacks import LRScheduler
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
            model = Model()
            optimizer = kind(model.parameters(), lr=0.1)
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            tl = TrainLoop(model, data, data, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), gpu_mode="single",
                           accelerator="cpu", progress_bar=False)
            tl.fit(num_epochs=1, grad_accumulation=2, callbacks=[LRScheduler(StepLR, step_size=1)])
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
        import tempfile, torch.distributed as dist
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            wrapper = TTDistributedDataParallel(nn.Linear(4, 2))
            wrapper(torch.ones(3, 4)).sum().backward()
            assert not wrapper._use_python_reducer
            dist.destroy_process_group()
        assert not loaded()
        """)


@pytest.mark.long
def test_ranks_do_not_import_it_unless_the_caller_has(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        BEGIN
        + """
class Tells(trainloop.AbstractCallback):
    def on_train_end(self):
        self.train_loop_obj.model.linear.bias.data.fill_(loaded())

def told():
    model = Model()
    tl = TrainLoop(model, data, optimizer=torch.optim.Adam(model.parameters()), criterion=nn.CrossEntropyLoss(),
                   gpu_mode="ddp", accelerator="cpu", devices=2, progress_bar=False)
    return tl.fit(num_epochs=1, callbacks=[Tells("tells")]).linear.bias[0].item()

if __name__ == "__main__":
    assert told() == 0.0 and not loaded()
    import torch._dynamo
    assert told() == 1.0
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_compiler_finds_everything_as_ever_afterwards() -> None:
    run("""
        from torch.optim import Optimizer
        def trained(compiled):
            torch.manual_seed(1)
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            def step(x):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            step = torch.compile(step, backend="eager") if compiled else step
            for _ in range(3):
                step(torch.ones(3, 4))
            return model.weight.detach()
        plain = trained(False)
        assert torch.equal(plain, trained(True)) and loaded()
        import torch._dynamo
        for name in ("zero_grad", "add_param_group"):  # torch's own keeps the compiler off
            kept = getattr(Optimizer, name).__wrapped__.__dict__["__dynamo_disable"]
            assert kept.__module__.startswith("torch._dynamo") or hasattr(kept, "_torchdynamo_orig_callable"), kept
        """)


@pytest.mark.long
def test_ddps_constructor_meets_the_real_one_wherever_it_asks_for_more() -> None:
    run("""
        from trainloop.late_dynamo import keeping_off
        with keeping_off():
            assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer" and not loaded()
        assert "_dynamo" not in vars(torch)
        with keeping_off():
            assert torch._dynamo.config.optimize_ddp is True and loaded()  # another thread's torch.compile
        assert torch._dynamo is sys.modules["torch._dynamo"]
        torch._dynamo.config.optimize_ddp = "no_optimization"
        with keeping_off():
            assert torch._dynamo.utils.get_optimize_ddp_mode() == "no_optimization"
        """)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(torch._dynamo.utils, "get_optimize_ddp_mode"), reason="torch of before 2.9")
def test_the_answer_is_that_of_a_setting_nobody_has_changed() -> None:
    run("""
        from trainloop.late_dynamo import keeping_off
        with keeping_off():
            answer = torch._dynamo.utils.get_optimize_ddp_mode()
        assert answer == torch._dynamo.utils.get_optimize_ddp_mode() and loaded()
        """)
