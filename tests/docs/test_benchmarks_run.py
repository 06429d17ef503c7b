"""Each part of the benchmarks runs, with a few steps, and writes its page into a folder (``make test-bench-part``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import pages

ROOT = Path(__file__).parent.parent.parent
LONGER = {"RECORDER": "failure_recorder", "STARTING": "starting", "RESTARTS": "restarts", "FSDP": "fsdp"}
"""Pages that take longer, and the modules that write them."""


@pytest.mark.slow
@pytest.mark.parametrize("part", bench.PARTS)
def test_each_part_of_make_bench_runs(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--tiny", "--out", str(tmp_path), "--only", part]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=580)
    page = (tmp_path / "RESULTS.rst").read_text()
    assert f"\n{bench.PARTS[part][0]}\n---" in page
    assert len(pages.commits_of(page)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("page", LONGER)
def test_a_longer_benchmark_writes_its_page(page: str, tmp_path: Path) -> None:
    run = [sys.executable, "-m", f"benchmarks.{LONGER[page]}", "--tiny", "--out", str(tmp_path)]
    subprocess.run(run, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=580)
    assert len(pages.commits_of((tmp_path / f"{page}.rst").read_text())) == 1
