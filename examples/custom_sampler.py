"""Use your own sampler in ``ddp``: each rank takes its shard of the sampler's order.

    python examples/custom_sampler.py --epochs 8

The sampler begins with digits that are easy to distinguish, and adds the others epoch by epoch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Sampler

from digits import DigitsCNN, arguments, datasets, report
from trainloop import TrainLoop
from trainloop.callbacks import TensorBoard


class Curriculum(Sampler[int]):
    """Yield the indices of the first classes in random order, with one more class in each epoch."""

    def __init__(self, labels: Tensor, order: list[int], begin_with: int) -> None:
        self.labels, self.order, self.begin_with = labels, torch.tensor(order), begin_with
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the loop before each epoch, on every rank."""
        self.epoch = epoch

    def known(self) -> Tensor:
        classes = self.order[: self.begin_with + self.epoch]
        return torch.isin(self.labels, classes).nonzero().squeeze(1)

    def __len__(self) -> int:
        return len(self.known())

    def __iter__(self) -> Iterator[int]:
        indices = self.known()
        return iter(indices[torch.randperm(len(indices))].tolist())


if __name__ == "__main__":
    args = arguments(__doc__, epochs=8)
    torch.manual_seed(0)
    train_set, validation_set, test_set = datasets()
    sampler = Curriculum(train_set.tensors[1], order=[0, 4, 6, 2, 7, 5, 3, 1, 9, 8], begin_with=5)

    model = DigitsCNN()
    tl = TrainLoop(
        model,
        DataLoader(train_set, batch_size=16, sampler=sampler),
        DataLoader(validation_set, batch_size=128),
        DataLoader(test_set, batch_size=128),
        optim.Adam(model.parameters(), lr=1e-3),
        nn.CrossEntropyLoss(),
        gpu_mode="ddp",
        devices=torch.cuda.device_count() or 2,
    )
    model = tl.fit(num_epochs=args.epochs, callbacks=[TensorBoard("runs/sampler")])

    report(tl)
    print("TensorBoard logs: runs/sampler   (tensorboard --logdir runs)")
