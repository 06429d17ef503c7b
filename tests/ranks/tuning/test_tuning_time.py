"""A search whose time is over ends at once, whatever its processes are doing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainloop.resources import ResourceQuota
from trainloop.tuning import tune

IMPORTS_S = 40.0


class Zero:
    def fit(self, x: Any, y: Any) -> None:
        pass

    def predict(self, x: Any) -> Any:
        return np.zeros(len(x))


def kill_server() -> None:
    if (pid := forkserver._forkserver._forkserver_pid) is not None:  # type: ignore[attr-defined]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_waiting_threads() -> None:
    """Each waits for a server that imports, and once for another one in its place."""
    while any(thread.name == "trainloop-fold-start" for thread in threading.enumerate()):
        kill_server()
        time.sleep(0.05)


@pytest.mark.long
def test_a_fork_server_that_still_imports_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As scikit-learn and torch take many seconds to import on a machine that is busy."""
    kill_server()
    request.addfinalizer(end_waiting_threads)
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "leases"))
    (tmp_path / "imports_slowly.py").write_text(f"import time; time.sleep({IMPORTS_S})")
    monkeypatch.syspath_prepend(tmp_path)
    x = np.arange(8.0)
    began = time.monotonic()
    result = tune(
        lambda params, fold: Zero(),
        {"a": [1, 2]},
        num_trials=2,
        num_bag_folds=2,
        data=(x, x),
        total=ResourceQuota(1),
        time_limit_s=1.0,
        progress=False,
        preload=["imports_slowly"],
    )
    assert time.monotonic() - began < IMPORTS_S / 2
    assert result.interrupted
    assert "time was up" in result.trials[0].errors[0]
