"""Code that the examples share: data, a model, and a function that scores the model. Replace it with your own.

The data are scikit-learn's handwritten digits: 1,797 grey images of 8 x 8 pixels, shipped with the package.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTModel
from trainloop.distributed import is_global_zero


class DigitsCNN(TTModel):
    """Two convolutions and two linear layers; about 98 % accuracy after ten epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        images, labels = batch_data
        return criterion(self(images), labels)

    def get_predictions(self, batch_data: Any, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
        images, labels = batch_data
        return self(images).argmax(1), labels, {}


def datasets() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """1,257 images for training, 180 for validation, and 360 for the test."""
    # Imported here: ranks receive the data, so they don't spend a second or two on importing scikit-learn.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train, rest = train_test_split(range(len(labels)), test_size=540, random_state=0, stratify=labels)
    validation, test = train_test_split(rest, test_size=360, random_state=0, stratify=labels[rest])
    x = torch.tensor(images, dtype=torch.float32).div(16).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels)
    train_set, validation_set, test_set = (TensorDataset(x[rows], y[rows]) for rows in (train, validation, test))
    return train_set, validation_set, test_set


def loaders(batch_size: int = 32) -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
    train_set, validation_set, test_set = datasets()
    return (
        DataLoader(train_set, batch_size=batch_size, shuffle=True),
        DataLoader(validation_set, batch_size=128),
        DataLoader(test_set, batch_size=128),
    )


def report(tl: Any) -> float:
    """Print and return the accuracy of the loop's model on the test images."""
    y_pred, y_true, _ = tl.predict_on_test_set()
    accuracy = (torch.as_tensor(y_pred) == torch.as_tensor(y_true)).double().mean().item()
    if is_global_zero():  # under torchrun every process runs this; only one prints
        print(f"test accuracy: {accuracy:.2%} of {len(y_true)} held-out images")
    return accuracy


def arguments(description: str | None, epochs: int = 10) -> argparse.Namespace:
    """Parse ``--epochs``, which every example accepts."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=epochs, help=f"passes over the training images ({epochs})")
    return parser.parse_args()
