"""Run the benchmarks of steps, epochs and data: python -m benchmarks [--rounds 9]

They write RESULTS.rst, the picture and README's table. What takes longer has commands of its own, each with its page:
``python -m benchmarks.starting``, ``.failure_recorder``, ``.restarts``, ``.fsdp``, ``.tabular``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import ddp, epochs, growth, picture, readme, step
from benchmarks.pages import HERE, Page, Size, heading, parser, size_of


def printed_by(script: str, *arguments: str) -> list[str]:
    """The output of a benchmark that runs in a process of its own, so that its memory is measured alone."""
    command = [sys.executable, str(HERE / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    return ["::\n", *(f"    {line}".rstrip() for line in done.stdout.splitlines()), ""]


def _memory(size: Size, out: Path) -> list[str]:
    return printed_by("data_memory.py", *["--mib", "2"] * size.tiny)


def _order(size: Size, out: Path) -> list[str]:
    return printed_by("epoch_order.py", *["--sizes", "1000"] * size.tiny)


def _checkpoint(size: Size, out: Path) -> list[str]:
    return printed_by("checkpoint.py", "--dir", str(out), *["--rounds", "1", "--every", "1"] * size.tiny)


def _growth(size: Size, out: Path) -> list[str]:
    return [*(table.text() for table in growth.tables(size)), growth.long_epoch(size)]


PARTS: dict[str, tuple[str, Callable[[Size, Path], list[str]]]] = {
    "step": ("In one process", lambda size, out: [table.text() for table in step.tables(size)]),
    "epochs": ("Epochs, evaluation, predictions", lambda size, out: [table.text() for table in epochs.tables(size)]),
    "ddp": ("With two ranks", lambda size, out: [table.text() for table in ddp.tables(size)]),
    "growth": ("Import, metrics, long epochs", _growth),
    "memory": ("Memory of the data", _memory),
    "order": ("The order of a shuffled epoch", _order),
    "checkpoint": ("Checkpoints of 200 MB", _checkpoint),
}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, rounds=9)
    made.add_argument("--only", nargs="+", choices=PARTS, help="parts of the page, into another folder (all)")
    given = made.parse_args(arguments)
    if given.only and given.out == HERE:
        made.error("--only: the page has all parts. Pass --out FOLDER, to keep the page.")
    size = size_of(given)
    page = Page("RESULTS", "Benchmark results", "make bench")
    lines: list[str] = []
    for name in given.only or PARTS:
        title, part = PARTS[name]
        lines += [heading(title), *part(size, given.out)]
    note = (
        f"The tables have medians of {size.rounds} rounds;\neach loop has a process of its own, with one thread. "
        "Ratios are relative to the hand-written PyTorch loop."
    )
    page.write(given.out, size, note, lines)
    if not given.only:
        picture.write(given.out)
        readme.write(given.out)


if __name__ == "__main__":
    main()
