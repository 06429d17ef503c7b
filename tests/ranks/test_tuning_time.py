"""A search whose time is over ends at once, whatever its processes are doing."""

from __future__ import annotations

import time
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


@pytest.mark.long
def test_a_template_that_still_imports_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scikit-learn and torch take many seconds to import on a machine that is busy."""
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
    assert "time was over" in result.trials[0].errors[0]
