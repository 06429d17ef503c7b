"""Names of modes, and what a mode makes of devices, nodes and batches: arithmetic on arguments."""

from __future__ import annotations

from typing import Literal

from trainloop.devices.requests import shown, whole_number
from trainloop.errors import ConfigurationError

__all__ = [
    "check_num_nodes",
    "dp_chunks",
    "effective_batch_size",
    "global_rank",
    "has_ranks",
    "resolve_mode",
    "world_size",
]

Mode = Literal["single", "dp", "ddp", "fsdp"]

_MODES: dict[str, Mode] = {
    "single": "single",
    "dp": "dp",
    "ddp": "ddp",
    "ddp_spawn": "ddp",
    "ddp_notebook": "ddp",
    "ddp_fork": "ddp",
    "fsdp": "fsdp",
    "fsdp2": "fsdp",
}
_REPLACED: dict[str, str] = {
    "ddp2": "it was dropped in Lightning 1.8; use gpu_mode='ddp'",
    "horovod": "use gpu_mode='ddp', under torchrun or Slurm for several machines",
    "ddp_sharded": "use gpu_mode='fsdp', which shards parameters, gradients and the optimizer's state",
    "fsdp_native": "use gpu_mode='fsdp'",
    "deepspeed": "use gpu_mode='fsdp', which shards parameters, gradients and the optimizer's state",
}


def resolve_mode(name: object, num_devices: int, num_nodes: int = 1, *, kind: str | None = None) -> Mode:
    """Return the mode for a strategy's name.

    Parameters
    ----------
    name : str
        ``'single'``, ``'dp'``, ``'ddp'``, ``'fsdp'``, ``'auto'`` (``single`` for one device and node, else ``ddp``), or
        one of Lightning's names for ``ddp`` in processes: ``'ddp_spawn'``, ``'ddp_notebook'``, ``'ddp_fork'``.
    num_devices, num_nodes : int
        Devices on each node, and nodes.
    kind : str, optional
        Kind of the devices (``torch.device.type``), where it is known: ``mps`` has ``single`` only.

    Raises
    ------
    ConfigurationError
        For a strategy that is not offered, with its replacement, or that can't work on these devices and nodes.
    """
    num_nodes = check_num_nodes(num_nodes)
    if name == "auto":
        mode: Mode = "single" if num_devices == 1 and num_nodes == 1 else "ddp"
    elif isinstance(name, str) and name in _MODES:
        mode = _MODES[name]
    else:
        word = name.strip().lower() if isinstance(name, str) else ""
        # 'ddp_sharded_spawn', 'fsdp_native', 'deepspeed_stage_2' are kinds of the strategies above.
        replaced = next((known for known in _REPLACED if word == known or word.startswith(f"{known}_")), None)
        if replaced is not None:
            raise ConfigurationError(f"gpu_mode={shown(name)}: {_REPLACED[replaced]}.")
        raise ConfigurationError(f"gpu_mode={shown(name)}: must be 'single', 'dp', 'ddp', 'fsdp' or 'auto'.")
    if num_nodes > 1 and not has_ranks(mode):
        raise ConfigurationError(
            f"gpu_mode={shown(name)} with num_nodes={num_nodes}: it works on one node only. "
            "Use gpu_mode='ddp' or 'fsdp'."
        )
    if kind == "mps" and mode != "single":
        raise ConfigurationError(f"gpu_mode={shown(name)} on mps: an Apple GPU is one device. Use gpu_mode='single'.")
    return mode


def has_ranks(mode: object) -> bool:
    """Return True if a mode runs as one process a device."""
    return mode in ("ddp", "fsdp")


def check_num_nodes(num_nodes: object) -> int:
    """``num_nodes``, checked.

    Raises
    ------
    ConfigurationError
        Unless it is an int of 1 or more; no bool, no text.
    """
    number = whole_number(num_nodes)
    if number is None or number < 1:
        raise ConfigurationError(f"num_nodes={shown(num_nodes)}: must be an int of 1 or more, the number of machines.")
    return number


def world_size(num_devices: int, num_nodes: int = 1) -> int:
    """Ranks of a ``ddp`` or ``fsdp`` run over all nodes."""
    return num_devices * check_num_nodes(num_nodes)


def global_rank(node_rank: int, num_devices: int, local_rank: int) -> int:
    """Global rank of a node's ``local_rank``; every node has the same number of devices."""
    return node_rank * num_devices + local_rank


def effective_batch_size(mode: str, batch_size: int, num_devices: int, num_nodes: int = 1) -> int:
    """Samples of one global batch, for loaders of ``batch_size``.

    ``batch_size`` is per process: ``ddp`` and ``fsdp`` multiply it by their ranks, ``single`` and ``dp`` (which splits
    it) don't.
    Gradient accumulation multiplies the samples of an optimizer step, not this.

    Raises
    ------
    ConfigurationError
        For more than one node in a mode that works on one.
    """
    mode = resolve_mode(mode, num_devices, num_nodes)
    return batch_size * world_size(num_devices, num_nodes) if has_ranks(mode) else batch_size


def dp_chunks(batch_size: int, num_devices: int) -> list[int]:
    """Samples of each device in ``dp``: ``torch.chunk``'s split, which may leave devices idle.

    Examples
    --------
    >>> dp_chunks(7, 2), dp_chunks(9, 4)
    ([4, 3], [3, 3, 3])
    """
    size = -(-batch_size // num_devices)
    return [min(size, batch_size - start) for start in range(0, batch_size, size)] if size else []
