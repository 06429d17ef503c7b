"""Small tables for the tests of ``trainloop.tabular``."""

from __future__ import annotations

import datetime

import numpy as np
import pandas as pd


def mixed(rows: int = 120, seed: int = 0) -> pd.DataFrame:
    """A column of each kind, with gaps; the class is in the number and in the category."""
    rng = np.random.default_rng(seed)
    number = rng.normal(size=rows)
    colour = rng.choice(["red", "green", "blue"], rows)
    frame = pd.DataFrame(
        {
            "number": number,
            "count": pd.array(rng.integers(0, 9, rows), dtype="Int64"),
            "flag": rng.random(rows) > 0.5,
            "colour": colour,
            "when": pd.date_range("2024-01-01", periods=rows, freq="7h"),
            "said": [f"it was number {i} and quite {word}" for i, word in enumerate(colour)],
            "constant": 1,
            "empty": None,
            "key": [f"k{i:05d}" for i in range(rows)],
            "class": np.where(number + (colour == "red") > 0.3, "yes", "no"),
        }
    )
    for column in ("number", "count", "colour", "when", "said"):
        frame.loc[rng.choice(rows, rows // 10, replace=False), column] = None
    return frame


def kinds_of_columns(rows: int = 60) -> pd.DataFrame:
    """The same kinds as other libraries and files hand them over."""
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=5 * i) for i in range(rows)]
    return pd.DataFrame(
        {
            "float": np.linspace(-1, 1, rows),
            "infinite": np.where(np.arange(rows) % 3, np.inf, 2.0),
            "object ints": pd.Series([i % 5 for i in range(rows)], dtype=object),
            "texts of numbers": [str(i / 3) for i in range(rows)],
            "seconds": pd.to_timedelta(range(rows), unit="s"),
            "counting up": range(rows),
            "nullable": pd.array([True, False, None] * (rows // 3), dtype="boolean"),
            "object flags": pd.Series([True, None] * (rows // 2), dtype=object),
            "ints as categories": pd.Categorical([i % 3 for i in range(rows)]),
            "postcodes": [f"0{i % 7:03d}" for i in range(rows)],
            "of both": [i % 4 if i % 2 else "a" for i in range(rows)],
            "texts of dates": [str(day) for day in days],
            "dates": days,
            "zoned": pd.date_range("2024", periods=rows, tz="Europe/Ljubljana"),
            "months": pd.period_range("2020-01", periods=rows, freq="M"),
            "sentences": [f"number {i} is {i * i} squared" for i in range(rows)],
            "pictures": [f"folder/{i}.PNG" for i in range(rows)],
            "names": [f"name {i}" for i in range(rows)],
            "row_id": range(100, 100 + rows),
            "same": "x",
            "missing": None,
        }
    )
