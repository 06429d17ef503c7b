"""Draws ``_static/history.png`` from the demo's training: python docs/make_pictures.py"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
EPOCHS = 12

TRAIN = """
import sys
sys.path.insert(0, {examples!r})
import torch
from digits import DigitsCNN, loaders
from torch import nn, optim
from trainloop import TrainLoop

if __name__ == "__main__":
    torch.manual_seed(0)
    model = DigitsCNN()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    tl = TrainLoop(model, *loaders(16), optimizer, nn.CrossEntropyLoss(), gpu_mode="ddp", devices=2, seed=0)
    tl.fit(num_epochs={epochs})
    tl.history.plot({plot!r})
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        plot = HERE / "_static" / "history.png"
        script.write_text(TRAIN.format(examples=str(HERE.parent / "examples"), epochs=EPOCHS, plot=str(plot)))
        subprocess.run([sys.executable, str(script)], cwd=folder, check=True)


if __name__ == "__main__":
    main()
