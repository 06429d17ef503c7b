"""Distributed data parallel: one process for each GPU, or two on the CPU. This is what ``make demo`` runs.

    python examples/ddp_training.py --epochs 10

Added to ``single_training.py``: ``gpu_mode``, ``devices``, and a checkpoint after each epoch.
"""

from pathlib import Path

import torch
from torch import nn, optim

from digits import DigitsCNN, arguments, loaders, report
from trainloop import TrainLoop
from trainloop.callbacks import ModelCheckpoint, TensorBoard
from trainloop.distributed import is_global_zero

if __name__ == "__main__":  # a spawned loader worker imports this file, and must not train
    args = arguments(__doc__, epochs=12)
    torch.manual_seed(0)
    model = DigitsCNN()
    train_loader, validation_loader, test_loader = loaders(batch_size=16)  # per rank; two ranks: 32 in each step

    tl = TrainLoop(
        model,
        train_loader,
        validation_loader,
        test_loader,
        optim.Adam(model.parameters(), lr=1e-3),
        nn.CrossEntropyLoss(),
        gpu_mode="ddp",
        devices=torch.cuda.device_count() or 2,
        seed=0,
    )
    checkpoint = ModelCheckpoint("checkpoints/ddp", monitor="val_loss", keep=1)
    model = tl.fit(num_epochs=args.epochs, callbacks=[TensorBoard("runs/ddp"), checkpoint])

    report(tl)
    if is_global_zero():
        print(f"TensorBoard logs: {Path('runs/ddp').resolve()}   (tensorboard --logdir runs)")
        print(f"checkpoints:      {Path('checkpoints/ddp').resolve()}")
