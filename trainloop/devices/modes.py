"""Names of modes, and how each mode uses devices, nodes and batches; depends on the arguments only."""

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
    "ddp2": "Lightning 1.8 removed it; use gpu_mode='ddp'",
    "horovod": "use gpu_mode='ddp', with torchrun or Slurm for several machines",
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
        Type of the devices (``torch.device.type``), if known: ``mps`` supports ``single`` only.

    Raises
    ------
    ConfigurationError
        If the strategy is not supported (the message names its replacement), or can't use these devices and nodes.
    """
    num_nodes = check_num_nodes(num_nodes)
    if name == "auto":
        mode: Mode = "single" if num_devices == 1 and num_nodes == 1 else "ddp"
    elif isinstance(name, str) and name in _MODES:
        mode = _MODES[name]
    else:
        word = name.strip().lower() if isinstance(name, str) else ""
        # 'ddp_sharded_spawn', 'fsdp_native', 'deepspeed_stage_2' are variants of the strategies above.
        replaced = next((known for known in _REPLACED if word == known or word.startswith(f"{known}_")), None)
        if replaced is not None:
            raise ConfigurationError(f"gpu_mode={shown(name)}: {_REPLACED[replaced]}.")
        raise ConfigurationError(f"gpu_mode={shown(name)}: must be 'single', 'dp', 'ddp', 'fsdp' or 'auto'.")
    if num_nodes > 1 and not has_ranks(mode):
        raise ConfigurationError(
            f"gpu_mode={shown(name)} with num_nodes={num_nodes}: this mode uses one node only. "
            "Use gpu_mode='ddp' or 'fsdp'."
        )
    if kind == "mps" and mode != "single":
        raise ConfigurationError(f"gpu_mode={shown(name)} on mps: there is only one Apple GPU. Use gpu_mode='single'.")
    return mode


def has_ranks(mode: object) -> bool:
    """Return True if a mode runs one process per device."""
    return mode in ("ddp", "fsdp")


def check_num_nodes(num_nodes: object) -> int:
    """Return ``num_nodes`` after checking it.

    Raises
    ------
    ConfigurationError
        If it is not an int of 1 or more (a bool or text is not an int).
    """
    number = whole_number(num_nodes)
    if number is None or number < 1:
        raise ConfigurationError(f"num_nodes={shown(num_nodes)}: must be an int of 1 or more, the number of machines.")
    return number


def world_size(num_devices: int, num_nodes: int = 1) -> int:
    """Return the number of ranks of a ``ddp`` or ``fsdp`` run over all nodes."""
    return num_devices * check_num_nodes(num_nodes)


def global_rank(node_rank: int, num_devices: int, local_rank: int) -> int:
    """Return the global rank of a node's ``local_rank``; every node has the same number of devices."""
    return node_rank * num_devices + local_rank


def effective_batch_size(mode: str, batch_size: int, num_devices: int, num_nodes: int = 1) -> int:
    """Return the number of samples of a global batch, for loaders with this ``batch_size``.

    ``batch_size`` is per process: ``ddp`` and ``fsdp`` multiply it by the number of ranks, while ``single`` and ``dp``
    (which splits the batch) do not. Gradient accumulation multiplies the samples of an optimizer step, not of a global
    batch.

    Raises
    ------
    ConfigurationError
        For more than one node in a mode that uses only one.
    """
    mode = resolve_mode(mode, num_devices, num_nodes)
    return batch_size * world_size(num_devices, num_nodes) if has_ranks(mode) else batch_size


def dp_chunks(batch_size: int, num_devices: int) -> list[int]:
    """Return the samples of each device in ``dp``, as split by ``torch.chunk``, which may leave devices idle.

    Examples
    --------
    >>> dp_chunks(7, 2), dp_chunks(9, 4)
    ([4, 3], [3, 3, 3])
    """
    size = -(-batch_size // num_devices)
    return [min(size, batch_size - start) for start in range(0, batch_size, size)] if size else []
