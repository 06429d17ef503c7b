"""The README's table of ratios, written from the pages: python -m benchmarks.readme"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.pages import HERE, PRELIMINARY
from benchmarks.picture import tables
from benchmarks.timing import rule_of

README = HERE.parent / "README.rst"
BEGIN, END = (
    ".. Written by make bench, from the pages that are named; do not edit.",
    ".. The end of what make bench writes.",
)

# What a row says, and where its ratios are: page, table, and the loop of each column.
ROWS = [
    ("a training step of a small MLP", "RESULTS", "MLP, in memory", ("trainloop", "Accelerate", "Lightning")),
    (
        "a script that trains one step in two CPU processes",
        "STARTING",
        "The whole script, two ranks",
        ("trainloop, fork server", "Accelerate, fork", "Lightning, spawn"),
    ),
    (
        "the same script in eight CPU processes",
        "STARTING",
        "The whole script, 8 ranks",
        ("trainloop, fork server", "Accelerate, fork", "Lightning, spawn"),
    ),
]
STARTS = (
    "The hand-written script of the rows from STARTING is an ``mp.spawn`` whose caller makes the same model and",
    "optimizer first. A script that makes them only in its processes imports less; the page compares with it, too.",
    "",
)
MEMORY = "memory for a {} MiB dataset in two processes"


def written(results: str, starting: str) -> str:
    """Return the block between the marks, from the texts of the two pages."""
    pages = {"RESULTS": results, "STARTING": starting}
    if PRELIMINARY in results:
        text = "are preliminary, so they are not repeated here. They are relative to a hand-written PyTorch loop."
        return "\n".join([BEGIN, "", f"The figures of {_link('RESULTS')}", text, "", END])
    pages = {name: "" if PRELIMINARY in page else page for name, page in pages.items()}
    rows = [("measurement", "trainloop", "Accelerate", "Lightning", "measured in")]
    for text, page, title, columns in ROWS:
        ratios = dict(tables(pages[page]).get(title, []))
        if ratios:
            shown = [f"{ratios[column]:.2f}" if column in ratios else "" for column in columns]
            rows.append((text, *shown, _link(page)))
    size, ours, theirs = memory_of(results)
    rows.append((MEMORY.format(size), f"{ours / theirs:.2f}", "", "", _link("RESULTS")))
    cores = re.findall(r"^\* .*?(\d+) cores;", results, re.MULTILINE)[0]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = rule_of(widths)
    lines = [" ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join(
        [
            BEGIN,
            "",
            f"The numbers are relative to a hand-written PyTorch loop, on {cores} CPU cores: 0.5 means half the time, "
            "or half\nthe memory in the last row.",
            "",
            rule,
            lines[0],
            rule,
            *lines[1:],
            rule,
            "",
            *(STARTS if any(row[-1] == _link("STARTING") for row in rows) else ()),
            END,
        ]
    )


def memory_of(results: str) -> tuple[str, float, float]:
    """Return the size of the dataset in MiB, and the memory in datasets with trainloop and by hand."""
    size = re.findall(r"^ +(\S+) MiB, 2 ranks: summed PSS", results, re.MULTILINE)[0]
    ours, theirs = re.findall(r"^ +tensors +(\S+) +(\S+)$", results, re.MULTILINE)[0]
    return size, float(ours), float(theirs)


def block_of(readme: str) -> str:
    """Return the block between the marks as it is."""
    return readme[readme.index(BEGIN) : readme.index(END) + len(END)]


def _link(page: str) -> str:
    return f"`{page} <benchmarks/{page}.rst>`_"


def write(folder: Path = HERE) -> None:
    """Write the table from the pages that are there; for pages in another folder, write a copy of README there."""
    starting = folder / "STARTING.rst"
    text = README.read_text()
    block = written((folder / "RESULTS.rst").read_text(), starting.read_text() if starting.exists() else "")
    path = README if folder == HERE else folder / "README.rst"
    path.write_text(text.replace(block_of(text), block))
    print(f"wrote {path}")


if __name__ == "__main__":
    write()
