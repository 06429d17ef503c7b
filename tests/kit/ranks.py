"""Real ranks for tests: a function run by each of several processes in one Gloo group on the CPU.

:func:`run_ranks` starts them as the library does; in :func:`run_own_ranks` they are started by hand, so that a
``TrainLoop`` takes part in their group, as often as a test wants.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainloop._launch import launch
from trainloop._support.stopping import StopAgreement
from trainloop._transfer import pack_state, unpack_state

__all__ = ["run_own_ranks", "run_ranks"]


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
    return [unpack_state(pickle.loads((run / str(rank)).read_bytes())) for rank in range(world_size)]


def _call(stop: StopAgreement, *, fn: Callable[..., Any], args: tuple[Any, ...], run: str) -> None:
    dist.barrier()  # a rank whose work is done at once would break off connections that others are still making
    result = fn(*args)
    with open(os.path.join(run, str(dist.get_rank())), "wb") as file:
        pickle.dump(pack_state(result), file, pickle.HIGHEST_PROTOCOL)


def run_own_ranks(fn: Callable[..., Any], world_size: int, *args: Any, folder: Path, timeout: float = 120) -> list[Any]:
    """What ``fn(*args)`` returned on each of ``world_size`` forks of this process, in a group of their own making.

    An error in one of them comes out as an ``AssertionError`` with its traceback.
    """
    run = folder / f"ranks-{uuid.uuid4().hex}"
    run.mkdir()
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=_own_rank, args=(rank, world_size, fn, args, str(run))) for rank in range(world_size)
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # python 3.12: other threads are not in the fork
            for child in children:
                child.start()
        deadline = time.monotonic() + timeout
        while any(child.is_alive() for child in children) and not any(child.exitcode for child in children):
            assert time.monotonic() < deadline, f"ranks still ran after {timeout} s"
            time.sleep(0.01)
    finally:
        for child in children:
            child.kill()
            child.join()
    errors = [(path.name, path.read_text()) for path in sorted(run.glob("error-*"))]
    assert not errors, "\n".join(f"{name}:\n{text}" for name, text in errors)
    return [unpack_state(pickle.loads((run / str(rank)).read_bytes())) for rank in range(world_size)]


def _own_rank(rank: int, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], run: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=60)  # of one exchange
        meeting = f"file://{run}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=limit)
        dist.barrier()  # as in _call
        result = fn(*args)
        with open(os.path.join(run, str(rank)), "wb") as file:
            pickle.dump(pack_state(result), file, pickle.HIGHEST_PROTOCOL)
        dist.destroy_process_group()
    except BaseException:
        with open(os.path.join(run, f"error-{time.monotonic_ns()}-{rank}"), "w") as file:
            file.write(traceback.format_exc())
        os._exit(1)
