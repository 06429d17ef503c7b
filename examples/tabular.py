"""Regression on a table of numbers, scikit-learn's diabetes data, with early stopping and a learning rate schedule.

python examples/tabular.py --epochs 60
"""

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from digits import arguments
from trainloop import TrainLoop, TTBasicModel
from trainloop.callbacks import EarlyStopping, LRScheduler, TensorBoard


class Regression(TTBasicModel):
    """A model whose batches are (row, target), so it only defines ``forward``."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).squeeze(1)


if __name__ == "__main__":
    args = arguments(__doc__, epochs=60)
    torch.manual_seed(0)
    x, y = load_diabetes(return_X_y=True, scaled=False)
    train, rest = train_test_split(range(len(y)), test_size=142, random_state=0)
    validation, test = rest[:71], rest[71:]
    mean, std = x[train].mean(0), x[train].std(0)
    rows = torch.tensor((x - mean) / std, dtype=torch.float32)
    target_mean, target_std = y[train].mean(), y[train].std()
    targets = torch.tensor((y - target_mean) / target_std, dtype=torch.float32)

    def loader(part: list[int], shuffle: bool = False) -> DataLoader:
        return DataLoader(TensorDataset(rows[part], targets[part]), batch_size=32, shuffle=shuffle)

    model = Regression(rows.shape[1])
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    tl = TrainLoop(model, loader(train, shuffle=True), loader(validation), loader(test), optimizer, nn.MSELoss())
    model = tl.fit(
        num_epochs=args.epochs,
        callbacks=[
            EarlyStopping(monitor="val_loss", patience=10),
            LRScheduler(schedule, interval="epoch"),
            TensorBoard("runs/tabular"),
        ],
    )

    y_pred, y_true, _ = tl.predict_on_test_set()
    explained = 1 - ((y_pred - y_true) ** 2).sum() / ((y_true - y_true.mean()) ** 2).sum()
    print(f"stopped after {tl.epoch} of {args.epochs} epochs; R2 on {len(y_true)} held-out patients: {explained:.2f}")
    print("TensorBoard logs: runs/tabular   (tensorboard --logdir runs)")
