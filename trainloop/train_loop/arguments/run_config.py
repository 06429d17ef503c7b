"""Determine the mode, devices and nodes of a loop's runs from the arguments of the loop and of ``fit``."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainloop._launch import rank_from_launcher
from trainloop._support.user_line import warn
from trainloop.devices import has_ranks, is_all, resolve_mode, whole_number
from trainloop.distributed import Rank
from trainloop.errors import ConfigurationError
from trainloop.parallel.sharded.undoing import check_cpu
from trainloop.train_loop.arguments.checks import short
from trainloop.train_loop.arguments.devices import requested
from trainloop.train_loop.arguments.options import Options


@dataclass(frozen=True)
class RunConfig:
    """Mode, devices and nodes of runs; determined when the loop is created, and again by each ``fit``."""

    mode: str
    """``'single'``, ``'dp'``, ``'ddp'`` or ``'fsdp'``."""
    devices: list[torch.device]
    """This node's devices, in rank order."""
    num_nodes: int = 1
    node_rank: int = 0
    backend: str | None = None
    """Backend of the process group; ``None`` to choose it for the devices."""
    init_method: str | None = None
    """Rendezvous of several nodes; ``None`` for ``MASTER_ADDR`` and ``MASTER_PORT``."""
    here: Rank | None = None
    """Rank that a launcher has given this process; ``None`` if ``fit`` starts the ranks."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that train together, on all nodes."""
        if not has_ranks(self.mode):
            return 1
        return len(self.devices) * self.num_nodes if self.here is None else self.here.world_size


def run_config_of(
    options: Options, num_gpus: Any = None, on_gpu: Any = None, num_nodes: int = 1, *, select: bool = False
) -> RunConfig:
    """Return the configuration of the next runs.

    Parameters
    ----------
    options : Options
        The loop's arguments.
    num_gpus, on_gpu, num_nodes
        The arguments of ``fit``.
    select : bool
        With ``auto_select_gpus``, choose GPUs that are free now, and lease them.
    """
    with warnings.catch_warnings():
        if select and num_gpus is None and on_gpu is None:
            warnings.simplefilter("ignore")  # the loop's constructor has warned of these devices
        # A quota can reduce the number of devices; the mode 'auto' depends on the remaining devices.
        devices = requested(options, num_gpus, on_gpu, select=select).resolved(options.quota)
    mode = resolve_mode(options.gpu_mode, len(devices), num_nodes, kind=devices[0].type)
    if sys.platform == "win32" and (mode == "fsdp" or num_nodes > 1):
        what = "gpu_mode='fsdp'" if mode == "fsdp" else f"num_nodes={num_nodes}"
        raise ConfigurationError(f"{what} does not work on Windows. Use gpu_mode='ddp' on one host, or WSL2 or Linux.")
    if mode == "fsdp" and devices[0].type == "cpu":
        check_cpu()
    return RunConfig(mode, devices, num_nodes, here=rank_from_launcher() if has_ranks(mode) else None)


def run_config_under_launcher(config: RunConfig, asked: Any, here: Rank) -> RunConfig:
    """Return the configuration of processes that torchrun or Slurm started; the launcher sets their number.

    Parameters
    ----------
    config : RunConfig
    asked : int, str or sequence of int
        Argument ``devices`` of the loop.
    here : Rank
        Rank of this process.

    Warns
    -----
    UserWarning
        On each host's first process, if ``devices`` asks for another number.
    """
    number = len(config.devices)
    if number != here.local_world_size and not is_all(asked) and here.local_rank == 0:
        warn(
            f"devices={asked!r} asks for {number} process{'es' * (number > 1)} per host, but the launcher (torchrun or "
            f"Slurm) has started {here.local_world_size} on this host, and all of them train. Leave devices out, or "
            f"start {number} (torchrun --nproc-per-node {number})."
        )
    if config.devices[0].type == "cpu":
        return replace(config, devices=[torch.device("cpu")] * here.local_world_size)
    return config


def check_rendezvous_point(num_nodes: int, node_rank: Any, init_method: Any) -> int:
    """Return this node's rank; raise an error for several nodes without a rendezvous point."""
    rank = whole_number(node_rank)
    if rank is None or not 0 <= rank < num_nodes:
        raise ConfigurationError(
            f"node_rank={short(node_rank)} with num_nodes={num_nodes}: must be an int from 0 to {num_nodes - 1}."
        )
    if init_method is not None and not (
        isinstance(init_method, str) and init_method.startswith(("tcp://", "file://", "env://"))
    ):
        raise ConfigurationError(
            f"init_method={short(init_method)}: must be 'tcp://ADDRESS:PORT', 'file:///shared/new_file', 'env://' "
            "or None."
        )
    by_environment = init_method is None or init_method.startswith("env://")
    if num_nodes > 1 and by_environment and rank_from_launcher() is None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. "
                "On every node, set MASTER_ADDR and MASTER_PORT to an address and a free port of node 0, or pass "
                "init_method='tcp://ADDRESS:PORT'."
            )
    return rank


def check_backend(backend: Any, config: RunConfig) -> str | None:
    """Return the process group's backend; raise an error if torch lacks it, or it can't serve the ranks' devices."""
    if backend is None:
        return None
    # This includes backends that plugins have registered.
    names = [*(name.lower() for name in torch.distributed.Backend.backend_list if name != "undefined")]
    parts = [part.split(":")[-1] for part in backend.lower().split(",")] if isinstance(backend, str) else []
    if not parts or not all(part in names for part in parts):
        raise ConfigurationError(
            f"backend={short(backend)}: must be one of {', '.join(map(repr, names))}, or None for gloo on the CPU and "
            "nccl on CUDA."
        )
    # Modes without ranks create no process group: a script may pass the same backend in all modes.
    if has_ranks(config.mode):
        lacking = next((part for part in parts if not torch.distributed.is_backend_available(part)), None)
        if lacking is not None:
            raise ConfigurationError(
                f"backend={short(backend)}: this torch ({torch.__version__}) was built without {lacking}. Leave "
                "backend out for gloo on the CPU and nccl on CUDA."
            )
        kind = config.devices[0].type
        if not any(_serves(part, kind) for part in backend.lower().split(",")):
            raise ConfigurationError(
                f"backend={short(backend)} with ranks on {kind}: this backend can't exchange their tensors. Leave "
                "backend out for gloo on the CPU and nccl on CUDA, or choose other devices."
            )
    return str(backend).lower()


def _serves(part: str, kind: str) -> bool:
    """Return True if a part of a backend's name, ``'gloo'`` or ``'cuda:nccl'``, is for devices of a kind."""
    device, _, name = part.rpartition(":")
    # A plugin may not declare its devices.
    return device in ("", kind) and kind in torch.distributed.Backend.backend_capability.get(name, [kind])
