"""The same training as in ``single_training.py``, but without the library, for comparison.

    python examples/plain_pytorch.py --epochs 10

``TrainLoop`` adds other devices, ranks, checkpoints and logs to this loop, each with one argument.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    train, rest = train_test_split(range(len(labels)), test_size=540, random_state=0, stratify=labels)
    validation, test = train_test_split(rest, test_size=360, random_state=0, stratify=labels[rest])
    x = torch.tensor(images, dtype=torch.float32).div(16).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels)
    train_loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=32, shuffle=True)
    validation_loader = DataLoader(TensorDataset(x[validation], y[validation]), batch_size=128)
    test_loader = DataLoader(TensorDataset(x[test], y[test]), batch_size=128)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).to(device)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    writer = SummaryWriter("runs/plain")
    step = 0
    for epoch in range(args.epochs):
        model.train()
        train_loss = 0.0
        for inputs, targets in train_loader:
            loss = criterion(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train_loss += loss.item() * len(inputs)
            step += 1

        model.eval()
        validation_loss = 0.0
        with torch.no_grad():
            for inputs, targets in validation_loader:
                validation_loss += criterion(model(inputs.to(device)), targets.to(device)).item() * len(inputs)
        train_loss /= len(train)
        validation_loss /= len(validation)
        writer.add_scalar("loss", train_loss, step)
        writer.add_scalar("val_loss", validation_loss, step)
        print(f"epoch {epoch + 1}/{args.epochs}  loss {train_loss:.4f}  val_loss {validation_loss:.4f}")
    writer.close()

    model.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in test_loader:
            correct += (model(inputs.to(device)).argmax(1).cpu() == targets).sum().item()
    print(f"test accuracy: {correct / len(test):.2%} of {len(test)} held-out images")
    print("TensorBoard logs: runs/plain   (tensorboard --logdir runs)")
