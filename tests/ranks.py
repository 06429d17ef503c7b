"""Real ranks for tests: a function run by each of several processes in one Gloo group on the CPU."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainloop.launch import launch
from trainloop.stopping import StopAgreement
from trainloop.transfer import dump_state, load_state

__all__ = ["run_ranks"]


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, folder: Path, timeout: float = 60) -> list[Any]:
    """What ``fn(*args)`` returned on each of ``world_size`` ranks, in their order.

    The process group is up when ``fn`` is called, and each rank has one thread. ``fn`` returns facts; asserts belong
    into the test. A rank that raises ends all, and its error comes out as ``WorkerFailedError``; so does a hang, with
    every rank's stack, after ``timeout`` seconds in one collective.

    Parameters
    ----------
    folder : Path
        The test's own folder (``tmp_path``), for what the ranks return.
    """
    run = folder / f"ranks-{uuid.uuid4().hex}"
    run.mkdir()
    # A backend of its own choice would be NCCL-aware where GPUs are; these are CPU ranks.
    launch(
        functools.partial(_call, fn=fn, args=args, run=str(run)),
        ranks_per_node=world_size,
        backend="gloo",
        timeout_s=timeout,
        child_env={"OMP_NUM_THREADS": "1"},
    )
    return [load_state((run / str(rank)).read_bytes()) for rank in range(world_size)]


def _call(stop: StopAgreement, *, fn: Callable[..., Any], args: tuple[Any, ...], run: str) -> None:
    result = fn(*args)
    with open(os.path.join(run, str(dist.get_rank())), "wb") as file:
        file.write(dump_state(result))
