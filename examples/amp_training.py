"""Automatic mixed precision: bfloat16 on the CPU and on GPUs that support it, else float16 with a gradient scaler.

python examples/amp_training.py --epochs 10
"""

import torch
from torch import nn, optim

from digits import DigitsCNN, arguments, loaders, report
from trainloop import TrainLoop
from trainloop.callbacks import TensorBoard


class DigitsMLP(DigitsCNN):
    """Linear layers: torch's bfloat16 convolutions are slow on CPUs without instructions for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


if __name__ == "__main__":
    args = arguments(__doc__)
    torch.manual_seed(0)
    model = DigitsMLP()
    train_loader, validation_loader, test_loader = loaders(batch_size=32)

    tl = TrainLoop(
        model,
        train_loader,
        validation_loader,
        test_loader,
        optim.Adam(model.parameters(), lr=1e-3),
        nn.CrossEntropyLoss(),
        gpu_mode="single",
        use_amp=True,  # or "bf16", "fp16", or a dict of GradScaler arguments
    )
    model = tl.fit(num_epochs=args.epochs, callbacks=[TensorBoard("runs/amp")])

    report(tl)
    print("TensorBoard logs: runs/amp   (tensorboard --logdir runs)")
