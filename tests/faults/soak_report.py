"""The results of the soak, as a table and as the page ``benchmarks/SOAK.rst``."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a reStructuredText table: numbers of right and wrong trials, by kind and ranks."""
    counts: Counter[tuple[str, str]] = Counter()
    for result in results:
        row = f"{result['kind']}, {result['ranks']} rank{'s' * (result['ranks'] > 1)}"
        for name in (row, "all"):
            counts[name, "wrong" if result["wrong"] else "right"] += 1
    rule = f"{'=' * 24} {'=' * 6} {'=' * 6}"
    rows = sorted({row for row, _ in counts} - {"all"})
    lines = [f"{row:24s} {counts[row, 'right']:6d} {counts[row, 'wrong']:6d}" for row in [*rows, "all"]]
    return [rule, f"{'trials':24s} {'right':>6s} {'wrong':>6s}", rule, *lines, rule]


def page(results: Sequence[dict[str, Any]]) -> str:
    """Return the page: the last outcome of each trial, and wrong outcomes before it."""
    import torch

    last = {(result["seed"], result["number"]): result for result in results}
    seeds = ", ".join(map(str, sorted({result["seed"] for result in last.values()})))
    dates = sorted({result["date"] for result in last.values()})
    commits = Counter(result["commit"] for result in last.values())
    disturbed = sum(result["kind"] != "control" for result in last.values())
    lines = [
        "The soak test",
        "=============",
        "",
        ".. Written by tests/faults/soak.py --report.",
        "",
        "Each trial of the soak test (``make soak``) is a short training with 1 to 4 CPU ranks and a random",
        "disturbance.",
        "",
        f"* {disturbed} disturbed trials.",
        f"* Seed {seeds}; {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores.",
        f"* At commit {', '.join(f'{commit} ({count} trials)' for commit, count in commits.items())}.",
        "* *control*: no disturbance. *fault*: one rank raises an exception, hangs or dies at one place. *signal*: a",
        "  random process gets a signal at a random time. *storm*: the run is killed and started again several times.",
        "  *full disk*: the disk has no space for checkpoints.",
        "* *right*: the run ends as documented, its error names the right rank, the resumed run is bit-identical to",
        "  the undisturbed one, and no process, shared memory or file is left behind.",
        "",
        *table(list(last.values())),
        "",
    ]
    if wrong := [result for result in last.values() if result["wrong"]]:
        lines += ["Wrong:", "", *map(_line, wrong), ""]
    if fixed := [r for r in results if r["wrong"] and r is not last[r["seed"], r["number"]]]:
        lines += ["Trials that were wrong at first, and right after a fix:", "", *map(_line, fixed), ""]
    return "\n".join(lines)


def _line(result: dict[str, Any]) -> str:
    return (
        f"* {result['number']} (seed {result['seed']}, {result['ranks']} ranks, {result['commit']}): {result['what']}: "
        f"{'; '.join(result['wrong'])}."
    )
