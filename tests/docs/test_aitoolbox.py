"""The two multi-GPU scripts of AIToolbox's documentation run with only their imports and class names changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Its classes: aitoolbox.torchtrain.train_loop, aitoolbox.torchtrain.callbacks.performance_eval and the result package
# ClassificationResultPackage. Its data set, MNIST, is a download; these pictures have the same shape.
SCRIPT = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop.train_loop import *
from trainloop.parallel import TTDataParallel
from trainloop import TTModel
from trainloop.callbacks import ModelPerformanceEvaluation
from trainloop.result_package import classification


class CNNModel(TTModel):
    def __init__(self):
        super(CNNModel, self).__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, 1)
        self.fc1 = nn.Linear(12 * 12 * 8, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 2)
        x = self.fc1(x.view(-1, 12 * 12 * 8))
        return F.log_softmax(x, dim=1)

    def get_loss(self, batch_data, criterion, device):
        data, target = batch_data
        data, target = data.to(device), target.to(device)

        output = self(data)
        loss = criterion(output, target)

        return loss

    def get_predictions(self, batch_data, device):
        data, y_test = batch_data
        data = data.to(device)

        output = self(data)
        y_pred = output.argmax(dim=1, keepdim=False)

        return y_pred.cpu(), y_test, {{}}


def pictures(number, seed):
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(10, (number,), generator=generator)
    images = 0.1 * torch.randn(number, 1, 28, 28, generator=generator)
    for image, one in zip(images, classes):
        image[0, 2 * one + 2] += 1
    return TensorDataset(images, classes)


if __name__ == '__main__':
    model = CNNModel()  # TTModel based neural model

    train_loader = DataLoader(pictures(400, 1), batch_size=20, shuffle=True)
    val_loader = DataLoader(pictures(50, 2), batch_size=20)
    test_loader = DataLoader(pictures(50, 3), batch_size=20)

    optimizer = optim.Adam(model.parameters(), lr=0.001, betas=(0.9, 0.999))
    criterion = nn.NLLLoss()

    callbacks = [ModelPerformanceEvaluation(classification, {{}},
                                            on_train_data=True, on_val_data=True)]

    tl = TrainLoop(model,
                   train_loader, val_loader, test_loader,
                   optimizer, criterion,
                   gpu_mode='{mode}')

    model = tl.fit(num_epochs=3, callbacks=callbacks{arguments})
    print('accuracy:', tl.history['train_accuracy'][-1], tl.history['val_accuracy'][-1])
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "arguments"),
    [("dp", ""), ("ddp", ",\n                   num_nodes=1, node_rank=0, num_gpus=torch.cuda.device_count()")],
)
def test_its_script_trains(mode: str, arguments: str, tmp_path: Path) -> None:
    script = tmp_path / f"{mode}_training.py"
    script.write_text(SCRIPT.format(mode=mode, arguments=arguments))
    ran = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    scores = ran.stdout.rpartition("accuracy:")[2].split()
    assert [float(score) > 0.9 for score in scores] == [True, True]
