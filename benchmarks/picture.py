"""The README's picture, drawn from RESULTS.rst: python -m benchmarks.picture"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from benchmarks.pages import PRELIMINARY

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.rst"
PICTURE = HERE.parent / "docs" / "_static" / "benchmarks.svg"

# Tables of RESULTS.rst that are drawn, and what a reader calls them.
SHOWN = {
    "MLP, in memory": "a tiny model",
    "MLP, ten metrics a step": "ten metrics logged a step",
    "CNN": "a CNN",
    "Transformer": "a transformer",
    "DDP, two ranks": "ddp, two CPU ranks",
}
OURS, BASE, FLOORS = "trainloop", "PyTorch", "public torch calls"
TITLE = "Time of a step, as a ratio to the hand-written PyTorch loop; shorter is faster"
MOST = 2.5  # longer bars are broken

LEFT, WIDTH, ROW, GAP, LABEL = 250, 420, 20, 16, 36


def tables(text: str) -> dict[str, list[tuple[str, float]]]:
    """Each table's loops and their ratios to the base, in the order of the file."""
    found: dict[str, list[tuple[str, float]]] = {}
    lines = text.splitlines()
    for i, line in enumerate(lines[1:], start=1):
        if not re.fullmatch("~+", line):
            continue
        rows: list[tuple[str, float]] = []
        rules = [j for j in range(i, len(lines)) if re.fullmatch("=+( =+)+", lines[j])][:3]
        if len(rules) == 3 and lines[rules[0] + 1].startswith("loop"):
            edges = [match.span() for match in re.finditer("=+", lines[rules[0]])]
            if " ratio " not in lines[rules[0] + 1]:
                continue
            (ratio,) = (edge for edge in edges if edge[0] == lines[rules[0] + 1].index("ratio"))
            for row in lines[rules[1] + 1 : rules[2]]:
                rows.append((row[slice(*edges[0])].strip(), float(row[slice(*ratio)])))
            found[lines[i - 1]] = rows
    return found


def drawn(text: str) -> str:
    """The picture of a RESULTS.rst, as SVG."""
    of_table, y = tables(text), 34
    machine = next(line.removeprefix("* ").partition(";")[0] for line in text.splitlines() if line.startswith("* "))
    machine += "; preliminary" if PRELIMINARY in text else ""
    body: list[str] = []
    scale = WIDTH / MOST
    for title, name in SHOWN.items():
        body.append(f'<text x="8" y="{y + 14}" class="head">{escape(name)}</text>')
        y += ROW
        for loop, ratio in of_table[title]:
            if loop == BASE or loop.startswith(FLOORS):
                continue
            length = min(ratio, MOST) * scale
            kind = "ours" if loop.startswith(OURS) else "theirs"
            # A number that the line would run through stands behind it.
            at = LEFT + (scale if length < scale < length + LABEL else length) + 5
            body.append(f'<text x="{LEFT - 8}" y="{y + 14}" class="loop">{escape(loop)}</text>')
            body.append(f'<rect x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="{ROW - 5}" class="{kind}"/>')
            if ratio > MOST:
                body.append(f'<path d="M{LEFT + length - 24:.1f} {y + ROW}l8 -{ROW}h6l-8 {ROW}z" class="gap"/>')
            body.append(f'<text x="{at:.1f}" y="{y + 14}">{ratio:.2f}</text>')
            y += ROW
        y += GAP
    one, width, height = LEFT + scale, LEFT + WIDTH + 70, y + 22
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            "<style>text{font:12px sans-serif;fill:#222}.head{font-weight:bold}.loop{text-anchor:end}"
            ".ours{fill:#1f77b4}.theirs{fill:#b8b8b8}.gap{fill:white}.note{fill:#666}</style>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="8" y="18" class="note">{TITLE}</text>',
            *body,
            f'<line x1="{one:.1f}" y1="26" x2="{one:.1f}" y2="{y - 4}" stroke="#222" stroke-dasharray="3 3"/>',
            f'<text x="{one:.1f}" y="{y + 10}" text-anchor="middle">PyTorch: 1</text>',
            f'<text x="8" y="{y + 10}" class="note">{escape(machine)}</text>',
            "</svg>",
            "",
        ]
    )


def write(folder: Path = HERE) -> None:
    """Draw the results that are in a folder; pictures of other results than the repository's are drawn beside them."""
    path = PICTURE if folder == HERE else folder / PICTURE.name
    path.write_text(drawn((folder / RESULTS.name).read_text()))
    print(f"wrote {path}")


if __name__ == "__main__":
    write()
