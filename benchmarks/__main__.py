"""Run all benchmarks and write RESULTS.rst: python -m benchmarks [--rounds 9]"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import ddp, growth, picture, step
from benchmarks.timing import machine

HERE = Path(__file__).parent


def printed_by(script: str, *arguments: str) -> list[str]:
    """The output of a benchmark that runs in a process of its own, so that its memory is measured alone."""
    command = [sys.executable, script, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    return done.stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds per table (9)")
    rounds = parser.parse_args().rounds
    where, begin = machine(), time.perf_counter()
    parts = [
        ("In one process", step.tables(rounds)),
        ("With two ranks", ddp.tables(rounds)),
        ("Import, evaluation, long epochs", [*growth.tables(rounds), growth.long_epoch()]),
    ]
    lines_of_scripts = [
        ("Memory of the data", printed_by("benchmarks/data_memory.py")),
        ("The order of a shuffled epoch", printed_by("benchmarks/epoch_order.py")),
        ("Checkpoints of 200 MB", printed_by("benchmarks/checkpoint.py", "--dir", str(HERE))),
    ]
    minutes = (time.perf_counter() - begin) / 60
    title = "Benchmark results"
    lines = [
        f"{title}\n{'=' * len(title)}\n",
        f"``make bench`` wrote this page in {minutes:.0f} minutes. The tables have medians of {rounds} rounds, with\n"
        "one thread per process. Ratios are relative to the hand-written PyTorch loop.\n",
        where,
        "",
    ]
    for heading, tables in parts:
        lines += [f"{heading}\n{'-' * len(heading)}\n", *(t if isinstance(t, str) else t.text() for t in tables)]
    for heading, printed in lines_of_scripts:
        lines += [f"{heading}\n{'-' * len(heading)}\n", "::\n", *(f"    {line}".rstrip() for line in printed), ""]
    (HERE / "RESULTS.rst").write_text("\n".join(lines))
    print(f"wrote {HERE / 'RESULTS.rst'}")
    picture.write()


if __name__ == "__main__":
    main()
