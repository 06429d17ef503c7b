"""Data parallel: one process, each batch split over all GPUs, or over two copies of the model on the CPU.

python examples/dp_training.py --epochs 10
"""

import torch
from torch import nn, optim

from digits import DigitsCNN, arguments, loaders, report
from trainloop import TrainLoop
from trainloop.callbacks import TensorBoard

if __name__ == "__main__":
    args = arguments(__doc__)
    torch.manual_seed(0)
    model = DigitsCNN()
    train_loader, validation_loader, test_loader = loaders(batch_size=32)

    tl = TrainLoop(
        model,
        train_loader,
        validation_loader,
        test_loader,
        optim.Adam(model.parameters(), lr=1e-3),
        nn.CrossEntropyLoss(),
        gpu_mode="dp",
        devices=torch.cuda.device_count() or 2,  # replicas; same results as in `single`
    )
    model = tl.fit(num_epochs=args.epochs, callbacks=[TensorBoard("runs/dp")])

    report(tl)
    print("TensorBoard logs: runs/dp   (tensorboard --logdir runs)")
