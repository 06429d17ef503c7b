"""Kill a run in the middle of an epoch and start it again: its weights equal an uninterrupted run's, bit for bit.

python examples/resume_after_kill.py
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR

from digits import DigitsCNN, arguments, loaders
from trainloop import TrainLoop, checkpoint
from trainloop.callbacks import LRScheduler, ModelCheckpoint


def train(folder: str, epochs: int) -> None:
    """The script of a job that may be killed. It is the same for the first start and for a resume."""
    torch.manual_seed(0)
    model = DigitsCNN()
    train_loader, validation_loader, _ = loaders(batch_size=32)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    tl = TrainLoop(
        model, train_loader, validation_loader, None, optimizer, nn.CrossEntropyLoss(), seed=0, progress_bar=False
    )
    callbacks = [
        LRScheduler(CosineAnnealingLR, interval="step", T_max=epochs * len(train_loader)),
        ModelCheckpoint(folder, every_n_steps=7, keep=3),
    ]
    tl.fit(num_epochs=epochs, callbacks=callbacks, resume_from="last")
    torch.save({"model": model.state_dict(), "loss": tl.history["loss"]}, f"{folder}-end.pt")


def start(folder: str, epochs: int) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, "--epochs", str(epochs), "--train", folder])


if __name__ == "__main__":
    if "--train" in sys.argv:
        folder = sys.argv.pop(sys.argv.index("--train") + 1)
        sys.argv.remove("--train")
        train(folder, arguments(__doc__, epochs=3).epochs)
        sys.exit()

    epochs = arguments(__doc__, epochs=3).epochs
    assert start("undisturbed", epochs).wait() == 0

    job = start("killed", epochs)
    while len(checkpoint.checkpoints("killed")) < 3:  # the third: at step 21 of 40 in the first epoch
        time.sleep(0.01)
    job.send_signal(signal.SIGKILL)
    job.wait()
    newest = checkpoint.checkpoints("killed")[-1]
    assert newest.info is not None
    print(f"killed; the newest whole checkpoint is of epoch {newest.info.epoch + 1}, step {newest.info.step}")
    assert start("killed", epochs).wait() == 0  # the same command again

    ends = [torch.load(Path(f"{name}-end.pt"), weights_only=True) for name in ("undisturbed", "killed")]
    same = all(torch.equal(ends[0]["model"][name], ends[1]["model"][name]) for name in ends[0]["model"])
    print("losses, undisturbed:       ", ends[0]["loss"])
    print("losses, killed and resumed:", ends[1]["loss"])
    assert same
    assert ends[0]["loss"] == ends[1]["loss"]
    print("weights and losses are identical, bit by bit")
