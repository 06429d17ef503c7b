"""The process that trains one fold: from its first line to its last.

It takes its CPUs before it imports anything that counts them, ends when its parent does, and writes its result into the
fold's folder. None of this runs in the searching process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from trainloop._support import platform

__all__ = ["Job", "seconds_left", "train_fold"]

_OVER_S = 1e-3
_until: float | None = None  # when the model that this process trains should have ended, by time.time()


@dataclass
class Job:
    """A child's task: one fold to train."""

    trial: int
    """Number of the trial."""
    fold: int
    """Number of the fold; 0 without bagging."""
    folder: str
    """Where the child writes what it came to."""
    work: str
    """File with what all folds of the search share."""
    params: str
    """File with the trial's parameters."""
    seed: int
    """For all random generators, so that a fold's score doesn't depend on where it ran."""
    quota: tuple[Any, Any, Any]
    """CPUs, GPUs and memory of the model."""
    cpus: list[int] = field(default_factory=list)
    """CPUs of the child; all it finds where the list is empty."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that must be there before its libraries are loaded."""
    trusted: bool = False
    """True if the files are read whoever may have written them."""
    until: float | None = None
    """Seconds of the epoch at which the model should have ended by itself; None without a time limit."""
    probe: bool = False
    """Only look at the data, for its length and targets."""

    def write(self) -> Path:
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self)))
        return path


def train_fold(job_file: str, log: str) -> None:
    """Train the fold of ``job_file``: the main function of its process, which ends here.

    The process has a session of its own: a Ctrl-C in the terminal is for the search, which then ends all that the fold
    has started. Its output goes into the file ``log``.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(out, number)
    os.close(out)
    platform.unblock_signals(signal.valid_signals())
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with_the_parent, args=(parent.sentinel,), daemon=True).start()
    job = Job(**json.loads(Path(job_file).read_text()))
    if job.cpus:
        platform.set_affinity(job.cpus)
    folder = Path(job.folder)
    try:
        _train(job, folder)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        from trainloop.tuning.storage import write_bytes

        write_bytes(folder / "error.txt", traceback.format_exc().encode(errors="replace"))
        _exit_at_once(1)
    _exit_at_once(0)


def _exit_at_once(exitcode: int) -> None:
    """End this process without waiting for threads and children, which may never end; the search kills them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exitcode)


def seconds_left() -> float | None:
    """Seconds that the model in this process may still take, for one that can end sooner with what it has.

    Under ``tune(..., time_limit_s=...)`` each model gets an equal part of the time that is left when it begins; what
    one does not need is for those after it. A tenth is kept back, for predictions and files.

    Returns
    -------
    float or None
        A thousandth at least, so that ``TimeLimit`` takes it; None without a limit, and where nothing of ``tune``
        trains.

    Examples
    --------
    In ``make_loop``, or in an estimator's ``fit``:

    >>> TimeLimit(seconds_left() or 3600)  # doctest: +SKIP
    """
    return None if _until is None else max(_OVER_S, _until - time.time())


def _end_with_the_parent(sentinel: int) -> None:
    """All of the fold's processes are in one group."""
    connection.wait([sentinel])
    if sys.platform != "win32" and os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _train(job: Job, folder: Path) -> None:
    from trainloop.resources import ResourceQuota, enforce, lease
    from trainloop.tuning.storage import read, write

    global _until
    _until = job.until
    # The search has leased what this fold may use: a lease of its own would wait for the search to end.
    lease.inherit()
    quota = ResourceQuota(*job.quota)
    # CPU seconds used up to here were imports.
    began, used = time.monotonic(), _cpu_seconds()
    device = None
    if 0 < float(quota.num_gpus) < 1:
        import torch

        device = torch.device("cuda", 0)
    with enforce.applied(quota, device=device):
        work = read(Path(job.work), trusted=job.trusted)
        params = read(Path(job.params), trusted=job.trusted)
        _seed(job.seed)
        # Only now: it may import torch, which reads the number of threads that applied() has set.
        from trainloop.tuning import fitting

        if job.probe:
            length, targets = fitting.learn_rows(work["make_loop"], params)
            write(folder / "result.pkl", {"length": length, "targets": fitting.as_rows(targets)})
            return
        fold = work["folds"][job.fold] if work["folds"] is not None else None
        made = work["make_loop"](dict(params), fold)
        outcome = fitting.fit(
            made, fold=fold, data=work["data"], fit_args=work["fit_args"], params=params, metric=work["metric"]
        )
        write(folder / "model.pkl", outcome.model)
        write(folder / "predictions.pkl", outcome.predictions)
        result = {
            "score": outcome.score,
            "history": outcome.history,
            "classes": outcome.classes,
            "seconds": time.monotonic() - began,
            "cpus": len(platform.affinity()) or int(quota.num_cpus),
            "gpus": float(quota.num_gpus),
            "cpu_seconds": _cpu_seconds() - used,
            "facts": dict(getattr(outcome.model, "facts", None) or {}),
        }
        # Last: a fold that has this file is finished.
        write(folder / "result.pkl", result)


def _cpu_seconds() -> float:
    """CPU seconds of this process and its ended children, counted by the kernel."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _seed(seed: int) -> None:
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    # If the work needs torch, it is imported by now; imported later, its default seed is a constant too.
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
