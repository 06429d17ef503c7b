"""Where the suite lies: for tests that start a Python of their own."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
# PYTHONPATH of a process that imports the package and what tests share
IMPORTS = os.pathsep.join([str(ROOT), str(TESTS)])
