"""Two wrappers in a hand-written training loop, without a TrainLoop.

    python examples/wrappers_standalone.py --epochs 10

The first part runs ``TTDataParallel`` with two replicas in this process, the second ``TTDistributedDataParallel`` with
two processes. Both use the same loop: it calls ``get_loss`` and ``get_predictions`` on the wrapper, and sets attributes
of the model through the wrapper.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

from digits import DigitsCNN, arguments, datasets
from trainloop import TTDataParallel, TTDistributedDataParallel
from trainloop.distributed import all_reduce, is_global_zero


class CountingCNN(DigitsCNN):
    """The CNN for digits, with an additional attribute that the loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs_trained = 0


def train(wrapper: nn.Module, loader: DataLoader, device: torch.device, epochs: int, log_dir: str) -> None:
    """A hand-written loop that works with either wrapper."""
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(wrapper.parameters(), lr=2e-3)
    writer = SummaryWriter(log_dir) if is_global_zero() else None
    for epoch in range(epochs):
        wrapper.train()
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        losses = []
        for batch in loader:
            loss = wrapper.get_loss(batch, criterion, device)  # through the wrapper's forward
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        wrapper.epochs_trained += 1  # an attribute of the model
        mean_loss = all_reduce(torch.stack(losses).mean(), "mean").item()  # over ranks; also works in one process
        if writer is not None:
            writer.add_scalar("loss", mean_loss, epoch)
            print(f"  epoch {epoch + 1:2d}  loss {mean_loss:.4f}")
    if writer is not None:
        writer.close()


def report(name: str, wrapper: nn.Module, device: torch.device, log_dir: str) -> None:
    """Accuracy on the test images. Each rank reads all of them, so no exchange is needed."""
    wrapper.eval()
    right = total = 0
    with torch.no_grad():
        for batch in DataLoader(datasets()[2], batch_size=128):
            y_pred, y_true, _ = wrapper.get_predictions(batch, device)
            right += int((y_pred.cpu() == y_true.cpu()).sum())
            total += len(y_true)
    if is_global_zero():
        print(f"{name}: accuracy {right / total:.2%} of {total} held-out images, {wrapper.epochs_trained} epochs")
        print(f"TensorBoard logs: {Path(log_dir).resolve()}\n")


def data_parallel(epochs: int) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = CountingCNN().to(device)
    wrapper = TTDataParallel(model) if torch.cuda.is_available() else TTDataParallel(model, devices=2)
    train(wrapper, DataLoader(datasets()[0], batch_size=32, shuffle=True), device, epochs, "runs/standalone_dp")
    report("TTDataParallel", wrapper, device, "runs/standalone_dp")


def rank_main(rank: int, world_size: int, folder: str, epochs: int) -> None:
    """The function that each process runs. The processes find each other through a file in a folder."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(max((os.cpu_count() or 1) // world_size, 1))  # otherwise every rank would use all cores
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world_size,
    )
    try:
        torch.manual_seed(0)
        wrapper = TTDistributedDataParallel(CountingCNN().to(device))
        train_set = datasets()[0]
        loader = DataLoader(train_set, batch_size=16, sampler=DistributedSampler(train_set))
        train(wrapper, loader, device, epochs, "runs/standalone_ddp")
        report("TTDistributedDataParallel", wrapper, device, "runs/standalone_ddp")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    args = arguments(__doc__)
    data_parallel(args.epochs)
    world_size = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(world_size, folder, args.epochs), nprocs=world_size)
