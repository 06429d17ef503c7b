"""Record a step that fails on one of two ranks, and repeat it in this process; then find the source of a NaN.

python examples/debug_failed_step.py
"""

import traceback

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from digits import DigitsCNN, arguments, datasets
from trainloop import TrainLoop
from trainloop.callbacks import FailureRecorder, TerminateOnNaN
from trainloop.errors import WorkerFailedError


class Normalized(DigitsCNN):
    """Divides features by their norm; the gradient of the square root is not finite for a blank image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Linear(64, 32, bias=False), nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.layers(images.flatten(1))
        norm = features.square().sum(1, keepdim=True).sqrt()
        return self.head(features / (norm + 1e-6))


if __name__ == "__main__":
    args = arguments(__doc__, epochs=1)
    torch.manual_seed(0)
    train_set = datasets()[0]
    images, labels = train_set.tensors
    loader = DataLoader(train_set, batch_size=32, shuffle=True)

    # An exception in one rank: a wrong label.
    right = labels[500].item()
    labels[500] = 10
    model = DigitsCNN()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    tl = TrainLoop(
        model, loader, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), gpu_mode="ddp", devices=2, seed=0
    )
    try:
        tl.fit(num_epochs=args.epochs, callbacks=[FailureRecorder("failures")])
    except WorkerFailedError as error:
        recorded = error.recorded
        print(f"rank {error.rank} failed and wrote {recorded}")
    assert recorded is not None

    try:
        tl.replay(recorded)
    except IndexError as error:
        print(f"the replay raises it again: {error}")
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        batch = next(frame for frame in frames if frame.f_code.co_name == "get_loss").f_locals
        print(f"labels of the batch that failed: {batch['labels'].tolist()}")
    labels[500] = right

    # A gradient that is not finite: a blank image.
    images[700] = 0
    model = Normalized()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    tl = TrainLoop(model, loader, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), seed=0)
    recorder = FailureRecorder("failures", check_every_n_steps=1)
    tl.fit(num_epochs=args.epochs, callbacks=[recorder, TerminateOnNaN()])
    assert recorder.recorded is not None

    found = tl.replay(recorder.recorded, detect="nan")
    print(found)
    print(f"the replay found {found.function}")
