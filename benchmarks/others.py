"""The same training by other libraries, as their own guides write it; those that are not installed are left out."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import pty
import subprocess
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

Train = Callable[[nn.Module, "DataLoader[Any]", int], None]

CRITERION = nn.CrossEntropyLoss()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@contextlib.contextmanager
def shown(on_terminal: bool) -> Iterator[None]:
    """Standard output and errors go nowhere, or to a terminal, where bars are drawn; another process reads it."""
    if not on_terminal:
        with open(os.devnull, "w") as null, contextlib.redirect_stderr(null), contextlib.redirect_stdout(null):
            yield
        return
    ours, theirs = pty.openpty()
    with subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reader:
        os.close(ours)
        with open(theirs, "w") as screen, contextlib.redirect_stderr(screen), contextlib.redirect_stdout(screen):
            yield
        reader.wait()


def quietly(function: Train, on_terminal: bool = False) -> Train:
    """Silence the library's own messages, which would be timed; keep its bar if one is to be drawn."""

    def run(model: nn.Module, loader: DataLoader[Any], epochs: int) -> None:
        with warnings.catch_warnings(), shown(on_terminal):
            warnings.simplefilter("ignore")
            function(model, loader, epochs)

    return run


def with_lightning(*, bar: bool = False, metrics: int = 0) -> Train:
    import lightning

    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = CRITERION(self.model(x), y)
            for i in range(metrics):
                self.log(f"metric_{i}", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    def train(model: nn.Module, loader: DataLoader[Any], epochs: int) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=bar,
            enable_model_summary=False,
        )
        trainer.fit(Module(model), loader)

    return quietly(train, on_terminal=bar)


def with_fabric() -> Train:
    from lightning.fabric import Fabric

    def train(model: nn.Module, loader: DataLoader[Any], epochs: int) -> None:
        fabric = Fabric(accelerator="cpu", devices=1)
        wrapped, optimizer = fabric.setup(model, sgd(model))
        batches = fabric.setup_dataloaders(loader)
        wrapped.train()
        for _ in range(epochs):
            for x, y in batches:
                loss = CRITERION(wrapped(x), y)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return quietly(train)


def with_accelerate() -> Train:
    from accelerate import Accelerator

    def train(model: nn.Module, loader: DataLoader[Any], epochs: int) -> None:
        accelerator = Accelerator(cpu=True)
        wrapped, optimizer, batches = accelerator.prepare(model, sgd(model), loader)
        wrapped.train()
        for _ in range(epochs):
            for x, y in batches:
                loss = CRITERION(wrapped(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return quietly(train)


def with_ignite() -> Train:
    from ignite.engine import create_supervised_trainer

    def train(model: nn.Module, loader: DataLoader[Any], epochs: int) -> None:
        create_supervised_trainer(model, sgd(model), CRITERION).run(loader, max_epochs=epochs)

    return quietly(train)


def installed() -> dict[str, Train]:
    """Name to training function, of those that can be imported here."""
    makers = {
        "Ignite": ("ignite", with_ignite),
        "Fabric": ("lightning", with_fabric),
        "Accelerate": ("accelerate", with_accelerate),
        "Lightning": ("lightning", with_lightning),
    }
    return {name: later(make) for name, (module, make) in makers.items() if importlib.util.find_spec(module)}


def later(make: Callable[[], Train]) -> Train:
    """Return what ``make`` returns, made at the first call: other contenders' processes do without the library."""
    made = functools.cache(make)

    def run(model: nn.Module, loader: DataLoader[Any], epochs: int) -> None:
        made()(model, loader, epochs)

    return run
