"""Name the types of a loop's arguments, to keep the loop's signature readable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from typing_extensions import TypeVar

from trainloop.model import TTModel
from trainloop.optim import MultiOptimizer

__all__ = "Accelerator Amp Collate Devices GpuMode Loader ModelT Modules Optimizers StartMethod Transform".split()

ModelT = TypeVar("ModelT", bound=TTModel, default=TTModel)
"""Class of the user's model: ``fit`` returns the model object that was passed to the loop."""

Loader = Iterable[Any]
"""A ``DataLoader``, or any object whose iteration starts from the beginning each time."""

Optimizers = Optimizer | MultiOptimizer
"""One optimizer, or several."""

GpuMode = Literal["single", "dp", "ddp", "fsdp", "auto", "ddp_spawn", "ddp_notebook", "ddp_fork"]
"""Mode: ``'auto'`` is ``'single'`` for one device, else ``'ddp'``; the last three are Lightning's names of modes."""

Accelerator = Literal["auto", "cpu", "gpu", "cuda", "mps"]
"""Kind of device by name; ``'auto'`` for the best available kind."""

StartMethod = Literal["auto", "forkserver", "spawn"]
"""Method by which ranks are started."""

Devices = int | str | Sequence[int]
"""Number or indices of devices, or ``'auto'``; see :func:`trainloop.devices.parse_devices`."""

Amp = bool | Literal["bf16", "fp16"] | dict[str, Any]
"""Mixed precision; a dict has arguments of ``GradScaler``."""

Modules = type[nn.Module] | str | Callable[[str, nn.Module], bool]
"""Modules, chosen by class, by name (``'encoder.layers.*'``), or by a function of name and module."""

Collate = Callable[[Any, list[Any]], list[Any]]
"""``(batch, collected) -> collected``."""

Transform = Callable[[list[Any]], Any]
"""``collected -> result``."""
