"""A user's typed script: type checkers in their strict modes find nothing in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TrainLoopCheckpoint, TTModel
from trainloop.callbacks import EarlyStopping, LRScheduler, ModelCheckpoint, TensorBoard
from trainloop.resources import ResourceQuota
from trainloop.schedulers import CosineWithWarmupScheduler


class Net(TTModel):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y

    def get_loss(self, batch_data: tuple[Tensor, Tensor], criterion: nn.Module, device: torch.device) -> Tensor:
        x, y = batch_data
        loss: Tensor = criterion(self(x.to(device)), y.to(device))
        self.log("twice", loss.detach() * 2, reduce="mean", prog_bar=True)
        return loss

    def get_predictions(
        self, batch_data: tuple[Tensor, Tensor], device: torch.device
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        x, y = batch_data
        return self(x.to(device)).argmax(1), y, {}

    def own_method(self) -> int:
        return self.fc.out_features


class StopAt(AbstractCallback):
    def __init__(self, loss: float) -> None:
        super().__init__("stop at a loss")
        self.loss = loss

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.history["loss"][-1] < self.loss or loop.global_step > 100:
            loop.early_stop = True
        self.log("width", loop.model.fc.in_features)

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        rate: float = self.train_loop_obj.optimizer.param_groups[0]["lr"]
        self.log("rate", rate)


def make_data() -> TensorDataset:
    return TensorDataset(torch.randn(40, 8), torch.randint(3, (40,)))


def main() -> None:
    net = Net()
    optimizer = optim.Adam(net.parameters())
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(make_data(), batch_size=8, shuffle=True)
    tl = TrainLoop(
        net,
        loader,
        loader,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        gpu_mode="single",
        use_amp="bf16",
        accelerator="cpu",
        devices=1,
        resources=ResourceQuota(num_cpus=1),
    )
    model = tl.fit(
        num_epochs=2,
        callbacks=[
            StopAt(0.1),
            EarlyStopping("val_loss", patience=2),
            ModelCheckpoint("checkpoints", keep=1),
            LRScheduler(optim.lr_scheduler.StepLR(optimizer, 1)),
            TensorBoard("runs"),
            CosineWithWarmupScheduler(num_warmup_steps=1, num_training_steps=10),
        ],
    )
    print(model.own_method(), tl.model.own_method())  # of the user's own class
    epoch: int = tl.epoch
    steps: int = tl.global_step
    losses: list[float] = tl.history["loss"]
    mode: str = tl.gpu_mode
    y_pred, _, _ = tl.predict_on_validation_set()
    print(epoch, steps, losses, mode, y_pred, tl.early_stop, tl.device, tl.rank, tl.effective_batch_size)

    kept = TrainLoopCheckpoint(net, loader, loader, None, optimizer, None, "project", "experiment", "results")
    print(kept.fit(num_epochs=1).own_method(), kept.experiment_name)


if __name__ == "__main__":
    main()
