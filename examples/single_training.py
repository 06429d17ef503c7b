"""One process, one device: the basic example. Each of the other examples adds one feature.

python examples/single_training.py --epochs 10
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
        gpu_mode="single",
    )
    model = tl.fit(num_epochs=args.epochs, callbacks=[TensorBoard("runs/single")])

    report(tl)
    print("TensorBoard logs: runs/single   (tensorboard --logdir runs)")
