"""A few trials of the soak; ``make soak`` runs hundreds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_few_trials_of_the_soak() -> None:
    command = [
        sys.executable,
        str(Path(__file__).with_name("soak.py")),
        "--trials",
        "4",
        "--seed",
        "5",
        "--together",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
