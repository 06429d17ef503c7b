"""Store the checked arguments of a loop and of ``fit``, and how runs ended or restarted; all are immutable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from trainloop.errors import ConfigurationError

__all__ = ["AmpOptions", "End", "FitJob", "Options", "Restart", "RestartOptions"]

_MPS_SCALER = TorchVersion("2.8")  # the first torch whose GradScaler works on mps


@dataclass(frozen=True)
class AmpOptions:
    """Settings of mixed precision, from the argument ``use_amp``."""

    dtype: torch.dtype | None = None
    """Dtype of autocast; ``None`` for off."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """Arguments of the ``GradScaler``."""
    chosen: bool = True
    """True if the user chose the dtype; otherwise it depends on the device, see :meth:`on`."""

    def on(self, device: torch.device) -> AmpOptions:
        """Return the options for this device: bf16 if it is fast there, else fp16.

        Raises
        ------
        ConfigurationError
            If neither dtype works on the device.
        """
        if self.dtype is None:
            return self
        if device.type == "mps":
            return self._on_mps(torch.backends.mps.is_macos_or_newer(14, 0))
        if self.chosen:
            return self
        has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8
        return AmpOptions(torch.bfloat16 if has_bf16 else torch.float16, self.scaler)

    def _on_mps(self, has_bf16: bool) -> AmpOptions:
        dtype = self.dtype if self.chosen or has_bf16 else torch.float16
        if dtype == torch.bfloat16 and not has_bf16:
            raise ConfigurationError("use_amp='bf16' on mps needs macOS 14 or newer. Use use_amp=False or True.")
        if dtype == torch.float16 and torch.__version__ < _MPS_SCALER:
            raise ConfigurationError(
                f"use_amp with fp16 on mps: the GradScaler of this torch ({torch.__version__}) computes in float64, "
                "which mps does not have. Install torch 2.8 or newer, or use use_amp=False."
            )
        return AmpOptions(dtype, self.scaler, self.chosen)

    def described(self, device: torch.device) -> str:
        """Return a short text for a log line, empty for off. Creates no CUDA context in a process that starts ranks."""
        if self.dtype is None:
            return ""
        if not self.chosen and device.type == "cuda":
            return ", AMP bf16 or fp16"
        return ", AMP bf16" if self.dtype == torch.bfloat16 else ", AMP fp16"

    @property
    def scales(self) -> bool:
        """True if gradients need a ``GradScaler``, as in fp16."""
        return self.dtype == torch.float16


@dataclass(frozen=True)
class Options:
    """Arguments of the loop that never change. Devices and nodes are in its ``RunConfig``."""

    gpu_mode: Any
    """Mode as given; :func:`trainloop.devices.resolve_mode` resolves ``'auto'`` and Lightning's names."""
    accelerator: Any
    devices: Any
    auto_select_gpus: bool
    amp: AmpOptions
    compile_args: dict[str, Any] | None
    """Arguments of ``torch.compile``; ``None`` if the model is not compiled."""
    quota: Any
    """A ``ResourceQuota`` or ``None``."""
    start_method: str = "auto"
    """Method by which ranks start: ``'auto'``, ``'forkserver'`` or ``'spawn'``."""
    compiles_step: bool = False
    """True if a whole step is compiled to one graph."""
    checkpoint_modules: Any = None
    """Modules whose activations are recomputed in the backward pass; ``None`` for no modules."""


@dataclass(frozen=True)
class RestartOptions:
    """Options of a ``fit`` that restarts after failures."""

    most: int
    """Maximum number of restarts; -1 for no limit."""
    every: int | None = None
    """Steps between two checkpoints; ``None`` to choose the number by the time that a checkpoint takes."""


@dataclass(frozen=True)
class FitJob:
    """Options of one ``fit``, as they are sent to the ranks."""

    gather: bool = True
    """In ``fsdp``, True if the trained values are written into the caller's model and optimizers."""
    resume: dict[str, Any] | None = None
    """State of the checkpoint to resume from."""
    restarts: RestartOptions | None = None
    """Options of a run that restarts after failures; ``None`` if the first failure ends it."""


class End(NamedTuple):
    """A request to end training."""

    kind: str
    """Name of the callback's class; with ``name``, it identifies the callback in checkpoints. Empty for an assignment
    to ``early_stop``, which does not say who assigns."""
    name: str
    reason: str = ""
    """Reason as text; empty if the callback gave none."""
    key: str | None = None
    """With ``arguments``, it distinguishes callbacks of one class and name; None in older checkpoints."""
    arguments: str | None = None


class Restart(NamedTuple):
    """One restart of a run: an item of ``tl.restarts``, and the argument of ``on_restart``."""

    rank: int
    """Global rank that failed first."""
    cause: str
    """Cause of the failure, such as ``was killed by signal SIGKILL``."""
    step: int
    """Optimizer step after which training was resumed."""
    steps_repeated: int
    """Number of steps after :attr:`step` that had already been done and were repeated."""
    seconds: float
    """Seconds from the failure until the first step after :attr:`step` was done, or until the next failure."""
