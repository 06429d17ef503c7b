"""``make gpu`` runs to its end before the day there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_for_gpus_runs_where_there_is_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["failures"] == 0
    results = report["results"]
    assert {"MLP", "MLP, compile='step'", "ResNet-18, bf16", "GPT-2 small, bf16", "ddp with one rank"} < set(results)
    assert all(values["ratio"] > 0 for values in results.values() if "ratio" in values)
    page = (tmp_path / "GPU.rst").read_text()
    assert all(f"\n{name}\n" in page for name in results)
