"""``make gpu`` runs to its end before the day there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import LIMITS_S, Runner
from benchmarks.gpu_checks import CHECKS
from benchmarks.gpu_parts import Bench
from benchmarks.gpu_plan import PLAN, SIMULATED

ROOT = Path(__file__).parents[3]


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


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_ended_and_the_next_one_measured(tmp_path: Path) -> None:
    runner = Runner(tiny=True, out=tmp_path, limits_s={"MLP": 0.001, "a checkpoint's stall": 300.0})
    runner.run()
    assert runner.results["MLP"]["failed"].startswith("ended after")
    assert runner.results["a checkpoint's stall"]["megabytes"] > 0
    assert json.loads((tmp_path / "gpu.json").read_text())["results"] == runner.results


def test_what_the_time_was_over_for_is_left_out(tmp_path: Path) -> None:
    runner = Runner(tiny=True, out=tmp_path, limits_s={"MLP": 40.0}, budget_s=-1.0)
    runner.run()
    assert runner.results == {"MLP": {"left_out": "the time was over"}}
    assert "left_out: the time was over" in (tmp_path / "GPU.rst").read_text()


def test_each_part_has_a_limit() -> None:
    assert set(Bench(tiny=True).parts()) == set(LIMITS_S)
    assert set(SIMULATED) < set(CHECKS) < set(PLAN)


def test_all_tests_for_gpus_are_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, files = Bench(tiny=True), []
    monkeypatch.setattr(bench, "tests", lambda *names, **_: files.extend(names))
    for name, part in bench.parts().items():
        if name.startswith("tests/gpu"):
            part()
    assert sorted(f"test_{name}_gpu.py" for name in files) == sorted(
        path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")
    )


def test_a_check_that_fails_says_what_to_do(tmp_path: Path) -> None:
    runner = Runner(tiny=True, out=tmp_path, limits_s={})
    runner._found("odd batches", {"failed": "not as expected", "refused": {"sparse in ddp": "no kernel"}}, 0.0)
    page = (tmp_path / "GPU.rst").read_text()
    assert "* expected: every kind trains" in page
    assert "* what to do: data/batch/batches.py" in page
