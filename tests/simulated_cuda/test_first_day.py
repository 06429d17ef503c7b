"""The checks of ``make gpu`` that need no real kernels, on the simulated device: they find what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_checks import CHECKS
from benchmarks.gpu_plan import SIMULATED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SIMULATED)
def test_a_check_finds_what_it_should(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_LOG", str(tmp_path / "log"))  # by which the simulated NVML knows contexts
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "leases"))
    found = CHECKS[name]()
    assert "failed" not in found, found
    assert "left_out" not in found, found
