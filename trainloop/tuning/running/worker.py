"""Train one fold: the main function of a fold's process.

The process binds itself to its CPUs, ends when its parent ends, and writes its result into the fold's folder. Nothing
in this module runs in the process that called ``tune``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path

import torch

from trainloop._support import platform, rng
from trainloop.resources import ResourceQuota, enforce, lease
from trainloop.tuning import fitting
from trainloop.tuning.storage import read, write, write_bytes

_MIN_LEFT_S = 1e-3
_until: float | None = None  # time.time() at which this process should end training; None without a time limit


@dataclass
class Job:
    """The task of a child process: one fold to train."""

    trial: int
    """Number of the trial."""
    fold: int
    """Number of the fold; 0 without bagging."""
    folder: str
    """Folder into which the child writes its result."""
    work: str
    """File with the data that all folds of the search share."""
    params: str
    """File with the trial's parameters."""
    seed: int
    """Seed of all random generators, so that a fold's score doesn't depend on where it runs."""
    quota: ResourceQuota
    """Quota of the model."""
    cpus: list[int] = field(default_factory=list)
    """CPUs of the child; if empty, all CPUs that it may use."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that must be set before the child loads libraries."""
    trusted: bool = False
    """True if the files are read without checking who may have written them."""
    until: float | None = None
    """Time (seconds since 1970) at which the model should end training by itself; None without a time limit."""
    probe: bool = False
    """True if the child only reads the length and targets of the data."""


def train_fold(job: Job) -> None:
    """Train the fold of ``job``, then end the process. This is the main function of a child process.

    The process has its own session, so a Ctrl-C in the terminal reaches only the search, which then ends all processes
    of the fold. The output is written to ``log.txt`` in the fold's folder.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    folder = Path(job.folder)
    try:
        out = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except FileNotFoundError:  # the search has reached its time limit, and removed its folder, while this process began
        os._exit(1)
    for number in (1, 2):
        os.dup2(out, number)
    os.close(out)
    platform.unblock_signals(signal.valid_signals())
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with_parent, args=(parent.sentinel,), daemon=True).start()
    if job.cpus:
        platform.set_affinity(job.cpus)
    try:
        _train_job(job, folder)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        write_bytes(folder / "error.txt", traceback.format_exc().encode(errors="replace"))
        _exit_at_once(1)
    _exit_at_once(0)


def _exit_at_once(exitcode: int) -> None:
    """End this process without waiting for its threads and children, which may never end. The search kills them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exitcode)


def seconds_left() -> float | None:
    """Return the number of seconds that the model in this process still has, so that it can end early.

    With ``tune(..., time_limit_s=...)``, the remaining time is divided equally among the remaining models when a model
    begins. Time that a model does not use is available to later models. A tenth of the time is reserved for predictions
    and files.

    Returns
    -------
    float or None
        At least 0.001, because ``TimeLimit`` does not accept 0; None if there is no limit, and outside of ``tune``.

    Examples
    --------
    In ``make_loop``, or in an estimator's ``fit``:

    >>> TimeLimit(seconds_left() or 3600)  # doctest: +SKIP
    """
    return None if _until is None else max(_MIN_LEFT_S, _until - time.time())


def _end_with_parent(sentinel: int) -> None:
    """Kill the fold's process group when the parent ends."""
    connection.wait([sentinel])
    if sys.platform != "win32" and os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _train_job(job: Job, folder: Path) -> None:
    global _until
    _until = job.until
    # The search has already leased this fold's resources. A lease by the fold would wait until the search ends.
    lease.inherit()
    quota = job.quota
    # The CPU seconds before this line were spent on imports.
    began, used = time.monotonic(), _cpu_seconds()
    device = None
    if 0 < float(quota.num_gpus) < 1:
        device = torch.device("cuda", 0)
    with enforce.applied(quota, device=device):
        work = read(Path(job.work), trusted=job.trusted)
        params = read(Path(job.params), trusted=job.trusted)
        work["modules"]()  # writes what refers to modules that the work has imported
        rng.seed_all(job.seed)
        if job.probe:
            length, targets = fitting.learn_rows(work["make_loop"], params)
            write(folder / "result.pkl", {"length": length, "targets": fitting.as_rows(targets)})
            return
        fold = work["folds"][job.fold] if work["folds"] is not None else None
        made = work["make_loop"](dict(params), fold)
        fitting.check_rows(made, fold, work["rows"])
        outcome = fitting.fit(
            made, fold=fold, data=work["data"], fit_args=work["fit_args"], params=params, metric=work["metric"]
        )
        write(folder / "model.pkl", outcome.stored or outcome.model)
        write(folder / "predictions.pkl", outcome.predictions)
        result = {
            "score": outcome.score,
            "classes": outcome.classes,
            "seconds": time.monotonic() - began,
            "cpus": len(platform.affinity()) or int(quota.num_cpus),
            "gpus": float(quota.num_gpus),
            "cpu_seconds": _cpu_seconds() - used,
            "facts": dict(getattr(outcome.model, "facts", None) or {}),
        }
        # This file is written last, because a fold with this file counts as finished.
        write(folder / "result.pkl", result)


def _cpu_seconds() -> float:
    """Return the CPU seconds that the kernel has counted for this process and its ended children."""
    return sum(os.times()[:4])
