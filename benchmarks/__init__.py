"""Benchmarks; ``make bench`` runs those of a step, and CONTRIBUTING.rst names the others."""

import os
import sys

# An installed package has its bytecode. Without it, each process that is started would compile 180 files, for 0.2 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
