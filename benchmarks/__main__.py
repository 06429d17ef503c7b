"""Run all benchmarks and write RESULTS.rst: python -m benchmarks [--rounds 9]"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks import ddp, growth, step
from benchmarks.timing import machine

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds a table (9)")
    rounds = parser.parse_args().rounds
    where, begin = machine(), time.perf_counter()
    parts = [
        ("In one process", step.tables(rounds)),
        ("With two ranks", ddp.tables(rounds)),
        ("Import, evaluation, long epochs", [*growth.tables(rounds), growth.long_epoch()]),
    ]
    minutes = (time.perf_counter() - begin) / 60
    title = "Benchmark results"
    lines = [
        f"{title}\n{'=' * len(title)}\n",
        f"Written by ``make bench`` in {minutes:.0f} minutes: medians of {rounds} rounds,\n"
        "one thread a process. Ratios are to the loop written by hand.\n",
        where,
        "",
    ]
    for heading, tables in parts:
        lines += [f"{heading}\n{'-' * len(heading)}\n", *(t if isinstance(t, str) else t.text() for t in tables)]
    (HERE / "RESULTS.rst").write_text("\n".join(lines))
    print(f"wrote {HERE / 'RESULTS.rst'}")


if __name__ == "__main__":
    main()
