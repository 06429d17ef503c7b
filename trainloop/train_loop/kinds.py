"""Names for the types of a loop's arguments, so that its signature can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import nn
from typing_extensions import TypeVar

from trainloop.model import TTModel
from trainloop.optim import MultiOptimizer, Optimizer

__all__ = "Accelerator Amp Collate Devices GpuMode Loader ModelT Modules Optimizers StartMethod Transform".split()

ModelT = TypeVar("ModelT", bound=TTModel, default=TTModel)
"""The user's own class of model: what the loop was made with is what ``fit`` returns."""

Loader = Iterable[Any]
"""A ``DataLoader``, or anything whose iteration begins anew each time."""

Optimizers = Optimizer | MultiOptimizer
"""One optimizer, or several."""

GpuMode = Literal["single", "dp", "ddp", "fsdp", "auto", "ddp_spawn", "ddp_notebook", "ddp_fork"]
"""``'auto'`` is ``'single'`` for one device, else ``'ddp'``; the last three are Lightning's names for ``'ddp'``."""

Accelerator = Literal["auto", "cpu", "gpu", "cuda", "mps"]
"""The best there is, or one by its name."""

StartMethod = Literal["auto", "forkserver", "spawn"]
"""How ranks are started."""

Devices = int | str | Sequence[int]
"""A number, indices, or ``'auto'``; see :func:`trainloop.devices.parse_devices`."""

Amp = bool | Literal["bf16", "fp16"] | dict[str, Any]
"""Mixed precision; a dict holds arguments of ``GradScaler``."""

Modules = type[nn.Module] | str | Callable[[str, nn.Module], bool]
"""Modules by their class, by name (``'encoder.layers.*'``), or by a function of name and module."""

Collate = Callable[[Any, list[Any]], list[Any]]
"""``(batch, collected) -> collected``."""

Transform = Callable[[list[Any]], Any]
"""``collected -> result``."""
