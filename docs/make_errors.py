"""Write errors.rst by making each mistake and recording the error message: python docs/make_errors.py

Each mistake is a small script, which runs in a separate process, as a user would run it. Parts that differ between
machines (paths, addresses, this library's line numbers) are left out: a test compares the page with a new run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent

BEGIN = """\
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop, TTModel
from trainloop.distributed import get_rank

class Net(TTModel):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x)

    def get_loss(self, batch_data, criterion, device):
        x, y = batch_data
        return criterion(self(x), y)

    def get_predictions(self, batch_data, device):
        x, y = batch_data
        return self(x).argmax(1), y, {}

data = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
model, loader, criterion = Net(), DataLoader(data, batch_size=4), nn.CrossEntropyLoss()
optimizer = optim.SGD(model.parameters(), lr=0.1)
common = dict(optimizer=optimizer, criterion=criterion, accelerator="cpu", progress_bar=False)
ddp = dict(gpu_mode="ddp", devices=2)

class Wrapping(TTModel):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    get_loss, get_predictions = Net.get_loss, Net.get_predictions
"""


@dataclass(frozen=True)
class Mistake:
    title: str
    code: str
    """Code that the page shows and the script runs, after BEGIN."""
    guarded: bool = True
    """True if the script runs the code under ``if __name__ == '__main__':``."""
    definitions: str = ""
    """Code that the page shows, and that the script runs before ``code`` and outside of the guard."""


MISTAKES = [
    Mistake("A mode in capitals", "TrainLoop(model, loader, **common, gpu_mode='DDP')"),
    Mistake("An unsupported mode", "TrainLoop(model, loader, **common, gpu_mode='deepspeed')"),
    Mistake("A plain module", "TrainLoop(nn.Linear(4, 2), loader, **common)"),
    Mistake("A dataset instead of a loader", "TrainLoop(model, data, **common)"),
    Mistake("Neither epochs nor iterations", "TrainLoop(model, loader, **common).fit()"),
    Mistake(
        "A callback that is not in a list",
        """
        from trainloop.callbacks import TerminateOnNaN

        TrainLoop(model, loader, **common).fit(num_epochs=1, callbacks=TerminateOnNaN())
        """,
    ),
    Mistake(
        "A device that does not exist",
        """
        from trainloop.devices import parse_devices

        parse_devices([0, 4], count=4)
        """,
    ),
    Mistake(
        "No device requested",
        """
        from trainloop.devices import parse_devices

        parse_devices(0, count=4)
        """,
    ),
    Mistake(
        "A quota larger than the total",
        """
        from trainloop.resources import ResourceQuota, plan

        bag = ResourceQuota(num_cpus=10, num_gpus=1)
        plan(ResourceQuota(num_cpus=8, num_gpus=1), num_trials=2, num_bag_folds=2, per_bag=bag)
        """,
    ),
    Mistake(
        "An open file in a dataset",
        "TrainLoop(model, DataLoader(FromFile()), **common, **ddp).fit(num_epochs=1)",
        definitions="""
        class FromFile(TensorDataset):
            def __init__(self):
                super().__init__(*data.tensors)
                self.file = open(__file__)
        """,
    ),
    Mistake(
        "A missing guard",
        "TrainLoop(model, loader, **common, **ddp).fit(num_epochs=1)",
        guarded=False,
    ),
    Mistake(
        "A rank that raises",
        "TrainLoop(Fails(model), loader, **common, **ddp).fit(num_epochs=1)",
        definitions="""
        class Fails(Wrapping):
            def get_loss(self, batch_data, criterion, device):
                if get_rank() == 1:
                    raise ValueError("rank 1 has had enough")
                return super().get_loss(batch_data, criterion, device)
        """,
    ),
    Mistake(
        "A rank that is killed",
        "TrainLoop(Dies(model), loader, **common, **ddp).fit(num_epochs=1)",
        definitions="""
        import os, signal

        class Dies(Wrapping):
            def get_loss(self, batch_data, criterion, device):
                if get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().get_loss(batch_data, criterion, device)
        """,
    ),
    Mistake(
        "A parameter without a gradient",
        "TrainLoop(Spare(model), loader, **common, **ddp).fit(num_epochs=1)",
        definitions="""
        class Spare(Wrapping):
            def __init__(self, net):
                super().__init__(net)
                self.spare = nn.Linear(4, 4)
        """,
    ),
    Mistake(
        "A loss that is NaN",
        """
        from trainloop.callbacks import TerminateOnNaN

        model.fc.weight.data[0, 0] = float("nan")
        TrainLoop(model, loader, **common).fit(num_epochs=1, callbacks=[TerminateOnNaN()])
        """,
    ),
    Mistake(
        "No checkpoint to resume from",
        "TrainLoop(model, loader, **common).fit(num_epochs=1, resume_from='checkpoints/none')",
    ),
]


def output_of(mistake: Mistake) -> str:
    """Return the script's output, without the parts that differ from run to run."""
    action = textwrap.dedent(mistake.code).strip()
    if mistake.guarded:
        action = "if __name__ == '__main__':\n" + textwrap.indent(action, "    ")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(f"{BEGIN}\n{textwrap.dedent(mistake.definitions)}\n{action}\n")
        done = subprocess.run(
            [sys.executable, script.name],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"},
        )
        said = last_error(done.stderr) if done.returncode else done.stdout or done.stderr  # a log record
        return said.replace(folder, "/home/you").strip()


def last_error(stderr: str) -> str:
    """Return the last traceback's message without the library's frames; all of ``stderr`` if there is no traceback."""
    lines = stderr.rstrip().split("\n")
    ours = [i for i, line in enumerate(lines) if line.startswith("trainloop.errors.")]
    others = [i for i, line in enumerate(lines) if re.match(r"^[A-Z]\w*(Error|Exit|Warning|Interrupt)\b", line)]
    start = (ours or others or [0])[0]
    text = "\n".join(without_library_frames(lines[start:]))
    if "train.py" not in text:  # a traceback of library frames only: the first paragraph says everything
        text = text.split("\n\n")[0]
    text = re.sub(r"\b0x[0-9a-f]+\b", "0x...", text)
    text = re.sub(r"\b(pid|process) \d+\b", r"\1 ...", text)
    if "On rank 1, these parameters got no gradient" in text:  # both ranks fail; either may report first
        text = re.sub(r"\brank ([01])\b", lambda found: f"rank {1 - int(found[1])}", text)
    return text.removeprefix("trainloop.errors.")


def without_library_frames(lines: list[str]) -> list[str]:
    kept, inside = [], False
    for line in lines:
        if re.match(r'^\s+File "', line):
            library = re.search(r'File "[^"]*/(trainloop|site-packages)/', line) is not None
            if library and not inside:
                kept.append("  ...")
            inside = library
        elif not line.startswith("    "):
            inside = False
        if not inside:
            kept.append(line)
    return kept


def shown(mistake: Mistake) -> str:
    pieces = [textwrap.dedent(piece).strip() for piece in (mistake.definitions, mistake.code)]
    code = "\n\n".join(filter(None, pieces))
    return (
        f"{mistake.title}\n{'-' * len(mistake.title)}\n\n"
        ".. not run: it is run by docs/make_errors.py\n"
        f".. code-block:: python\n\n{textwrap.indent(code, '    ')}\n\n"
        f".. code-block:: text\n\n{textwrap.indent(output_of(mistake), '    ')}\n"
    )


def page() -> str:
    title = "Error messages"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(shown, MISTAKES))
    intro = textwrap.dedent(
        """\
        Each message says what is wrong, what was given, and what to do. ``docs/make_errors.py`` generates this page:
        it makes each mistake and records the message. In the examples, ``common`` is ``dict(optimizer=optimizer,
        criterion=criterion, accelerator='cpu')``, ``ddp`` is ``dict(gpu_mode='ddp', devices=2)``, and ``Wrapping`` is a
        ``TTModel`` around another module. :doc:`guides/failures` explains how to read errors of ranks.
        """
    )
    return f"{title}\n{'=' * len(title)}\n\n{intro}\n" + "\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", help="print the page instead of writing it")
    if parser.parse_args().print:
        print(page())
    else:
        (HERE / "errors.rst").write_text(page())
