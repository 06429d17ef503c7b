"""Find the kinds of a table's columns in training, and clean the columns for training and prediction."""

from __future__ import annotations

import datetime
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from pandas.api import types

from trainloop.errors import ConfigurationError
from trainloop.extending import warn

Kind = Literal["number", "boolean", "category", "date", "text", "picture"]
Rows = np.ndarray[Any, Any]

_BY_TYPE: dict[str, Kind] = {
    **dict.fromkeys(["integer", "floating", "mixed-integer-float", "decimal", "timedelta", "timedelta64"], "number"),
    **dict.fromkeys(["datetime", "datetime64", "date", "period"], "date"),
    "boolean": "boolean",
    "categorical": "category",
}
_BOOLEANS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
_PICTURE = r"(?i).\.(png|jpe?g|bmp|gif|webp|tiff?)$"
_ORDERED = r"^\s*(\d{1,2})([/.-])(\d{1,2})[/.-]\d{2,4}\b"
_DATE = r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b"
_ROW_NUMBER = r"(?i)(^|[_ .])(id|uuid|guid|index|row_?(number|nr|id))$|^unnamed: 0$"
_PARTS = ("year", "month", "day", "day_of_week", "seconds")
_SAMPLE = 20_000  # maximum number of rows that are read to find a column's kind
_LARGEST = 1e38  # maximum absolute value of a number, because forests compute in single precision
_FEW = 20  # with fewer rows, no column is treated as an identifier


def read_table(data: object, what: str = "train_data") -> pd.DataFrame:
    """Return a DataFrame, or read a CSV or Parquet file. Column names are converted to strings, and must be unique."""
    if isinstance(data, (str, os.PathLike)):
        path = os.path.expanduser(os.fspath(data))
        try:
            data = (pd.read_parquet if path.lower().endswith((".parquet", ".pq")) else pd.read_csv)(path)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigurationError(
                f"{what}={path!r} can't be read ({error}). Pass a DataFrame, or a path to CSV or Parquet."
            ) from error
    if not isinstance(data, pd.DataFrame):
        raise ConfigurationError(
            f"{what} is a {type(data).__name__}, but must be a pandas DataFrame, or a path to a CSV or Parquet file."
        )
    names = pd.Index([as_text(name) for name in data.columns])
    if names.has_duplicates:
        twice = _listed(names[names.duplicated()].unique().sort_values())
        raise ConfigurationError(f"{what} has columns with the same name: {twice}. Rename or drop all but one of each.")
    if not len(data):
        raise ConfigurationError(f"{what} has no rows (its columns: {_listed(names)}). Pass at least one row.")
    return data.set_axis(names, axis=1)


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are used, with their kinds, and the columns that are dropped."""

    kinds: Mapping[str, Kind]
    """Kind of each column that is used, in the order of the table."""
    dropped: Mapping[str, str]
    """Reason for dropping, by column."""
    day_first: Mapping[str, bool] = field(default_factory=dict)
    """For each column of dates: True if its texts have the day before the month, as learnt from all values."""
    parts: Mapping[str, list[str]] = field(default_factory=dict)
    """For each column of dates: the names of its parts in the cleaned table, which no column of the user has."""
    durations: Collection[str] | None = None
    """Columns of numbers that were durations in training, which are converted to seconds; None if it is unknown."""
    learnt: bool = False
    """True if the kinds were learnt from a table."""

    @classmethod
    def learn(cls, frame: pd.DataFrame) -> Columns:
        """Find the kinds of a table's columns. Raise ConfigurationError if no column is usable."""
        kinds: dict[str, Kind] = {}
        dropped: dict[str, str] = {}
        for name, series in frame.items():
            with scalars(name, "train_data"):
                distinct = series.nunique(dropna=False)
            if distinct <= 1:
                dropped[name] = f"all its values are {'missing' if series.isna().all() else 'the same'}"
            elif _identifies_rows(name, series, kind := _kind_of_column(series), distinct):
                dropped[name] = "it differs in each row, like an identifier"
            else:
                kinds[name] = kind
        if not kinds:
            reasons = "; ".join(f"{name!r}: {why}" for name, why in dropped.items())
            raise ConfigurationError(f"no column is left to learn from ({reasons}). Pass columns that vary.")
        durations = [name for name, kind in kinds.items() if kind == "number" and _is_duration(frame[name])]
        dates = [name for name, kind in kinds.items() if kind == "date"]
        names: dict[str, list[str]] = {}
        for name in dates:
            taken = {*map(str, frame.columns), *(part for parts in names.values() for part in parts)}
            names[name] = parts = _parts_of(name)
            while taken.intersection(parts):
                names[name] = parts = [f"{part}_" for part in parts]
        return cls(kinds, dropped, {name: _day_first(frame[name]) for name in dates}, names, durations, True)

    def only(self, kinds: Iterable[Kind]) -> Columns:
        """Return a copy that has only the columns of these kinds."""
        return replace(self, kinds={name: kind for name, kind in self.kinds.items() if kind in kinds}, dropped={})

    def of(self, kind: Kind) -> list[str]:
        """Return the names of this kind's columns in the cleaned table; dates and booleans are numbers there."""
        if kind != "number":
            return list(self.only([kind]).kinds)
        numbers = self.only(["number", "boolean", "date"]).kinds.items()
        return [part for name, of in numbers for part in (self._parts_of(name) if of == "date" else [name])]

    def _parts_of(self, name: str) -> list[str]:
        return self.parts.get(name) or _parts_of(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A state that was saved by an earlier version has no more than the first two.
        self.__dict__.update({"day_first": {}, "parts": {}, "durations": None, "learnt": False, **state})

    def used_in(self, frame: pd.DataFrame, what: str = "data") -> pd.DataFrame:
        """Return the used columns of a table. Raise ConfigurationError if the table lacks any."""
        if missing := [name for name in self.kinds if name not in frame.columns]:
            raise ConfigurationError(
                f"{what} lacks these columns of the training data: {_listed(missing)}. It has: "
                f"{_listed(frame.columns)}. Pass a table with all columns of the training data."
            )
        return frame[[*self.kinds]]

    def clean(self, frame: pd.DataFrame, what: str = "data") -> pd.DataFrame:
        """Return the used columns as floats or strings. Missing values are NaN, or ``''`` among strings."""
        frame = self.used_in(frame, what)
        cleaned: dict[str, Rows] = {}
        for name, kind in self.kinds.items():
            series = frame[name]
            if kind == "number":
                cleaned[name] = _as_numbers(series, what)
                was = name in (self.durations or ())
                if self.durations is not None and was != _is_duration(series) and series.notna().any():
                    has, had, hint = ("durations", "numbers", "series.dt.total_seconds()")
                    if was:
                        has, had, hint = ("numbers", "durations", "pd.to_timedelta(series, unit='h')")
                    raise ConfigurationError(
                        f"column {name!r} of {what} has {has}, but had {had} in training, so their unit is unknown. "
                        f"Pass {had}, such as {hint}."
                    )
            elif kind == "boolean":
                cleaned[name] = np.array([_BOOLEANS.get(str(value).lower(), np.nan) for value in series], dtype=float)
                if self.learnt:
                    _report_other_values(series, np.isnan(cleaned[name]), what, "True and False")
            elif kind == "date":
                dates = _as_dates(series, self.day_first.get(name, False))
                cleaned.update(zip(self._parts_of(name), _dates(dates), strict=True))
                if name in self.day_first:
                    _report_other_values(series, dates.isna().to_numpy(), what, "dates")
            else:
                cleaned[name] = _texts(series, what)
        return pd.DataFrame(cleaned, index=frame.index)

    def __str__(self) -> str:
        lines = [f"{kind:<9} {_listed(names)}" for kind in get_args(Kind) if (names := self.only([kind]).kinds)]
        return "\n".join(lines + [f"dropped   {name!r}: {why}" for name, why in self.dropped.items()])


@contextmanager
def scalars(name: object, what: str) -> Iterator[None]:
    """Raise ConfigurationError if the distinct values of a column are not found, because it has lists or mappings."""
    try:
        yield
    except TypeError as error:
        raise ConfigurationError(
            f"column {str(name)!r} of {what} has values that are not scalars ({error}). Use one value per cell: split "
            "the column into several, or drop it."
        ) from error


def _listed(names: Iterable[object]) -> str:
    """List names for an error message; the list is shortened if it is long."""
    texts = [repr(str(name)) for name in names]
    most = 12
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


# -- kinds of columns ------------------------------------------------------------------------------------------------


def _kind_of_column(series: pd.Series) -> Kind:
    present = series.dropna()
    if len(present) > _SAMPLE:
        present = present.sample(_SAMPLE, random_state=0)
    if known := _BY_TYPE.get(types.infer_dtype(present)):
        return known
    texts = pd.Series([_text(value) for value in present])

    def share(pattern: str) -> float:
        return float(np.mean([re.search(pattern, text) is not None for text in texts]))

    if share(_PICTURE) > 0.95:
        return "picture"
    if pd.to_numeric(texts, errors="coerce").notna().all() and not share(r"^\s*0\d"):
        return "number"  # '01234' is a postcode, not a number
    if share(_DATE) > 0.95 and _as_dates(texts).notna().mean() > 0.95:
        return "date"
    words = np.mean([len(text.split()) for text in texts])
    return "text" if words >= 3 and texts.nunique() >= max(10, 0.01 * len(texts)) else "category"


def _identifies_rows(name: str, series: pd.Series, kind: Kind, distinct: int) -> bool:
    """Return True if the column identifies rows. For a column of numbers, its name decides."""
    if not distinct == len(series) >= _FEW:
        return False
    numbered = kind == "number" and re.search(_ROW_NUMBER, name) is not None
    return kind == "category" or (numbered and bool((_as_numbers(series, "") % 1 == 0).all()))


# -- cleaning --------------------------------------------------------------------------------------------------------


def floats(series: pd.Series) -> Rows:
    """Return the values as floats. Values that are not numbers are NaN."""
    if not types.is_numeric_dtype(series.dtype):
        series = series.astype(object)
    try:
        return pd.to_numeric(series, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    except OverflowError:  # an int is larger than all floats
        largest = sys.float_info.max
        return floats(series.map(lambda value: np.inf if isinstance(value, int) and abs(value) > largest else value))


def _is_duration(series: pd.Series) -> bool:
    return types.infer_dtype(series, skipna=True).startswith("timedelta")


def _as_numbers(series: pd.Series, what: str) -> Rows:
    if _is_duration(series):
        series = pd.to_timedelta(series.astype(object)).dt.total_seconds()
    numbers = floats(series)
    invalid = np.isnan(numbers) & series.notna()
    if invalid.any():
        raise ConfigurationError(
            f"column {str(series.name)!r} of {what} has {series[invalid].iloc[0]!r}, but had numbers in training. "
            "Use numbers, or None for missing values."
        )
    return np.where(np.isfinite(numbers), numbers.clip(-_LARGEST, _LARGEST), np.nan)


def _day_first(series: pd.Series) -> bool:
    """Return True if the texts of a column of dates have the day before the month, from all values of the column."""
    texts = series.dropna().astype(object)
    texts = texts[[isinstance(value, str) for value in texts]]
    found = texts.str.extract(_ORDERED) if len(texts) else pd.DataFrame(columns=[0, 1, 2])
    found = found.dropna()
    if found.empty:
        return False
    first, second = (found[column].astype(int).to_numpy() > 12 for column in (0, 2))
    dotted = bool((found[1] == ".").mean() > 0.5)
    if first.any() and not second.any():
        return True
    if second.any() and not first.any():
        return False
    why = "have the day first and others the month" if first.any() else "show whether the day or the month is first"
    examples = texts[found.index]
    share, order = "some" if first.any() else "none", "day.month.year" if dotted else "month/day/year"
    warn(
        f"column {str(series.name)!r} has dates such as {examples.iloc[0]!r}, of which {share} {why}. Dates that can "
        f"be read in both ways are read as {order}. Write dates as 2020-12-31, or pass a column of datetimes."
    )
    return dotted


def _report_other_values(series: pd.Series, missing: Rows, what: str, had: str) -> None:
    """Warn about values that are not of the column's kind, and so are missing."""
    other = missing & series.notna().to_numpy()
    if other.any():
        warn(
            f"column {str(series.name)!r} of {what} has {series[other].iloc[0]!r}, but had {had} in training. "
            f"{int(other.sum())} such values are treated as missing."
        )


def _as_dates(series: pd.Series, day_first: bool = False) -> pd.Series:
    """Return the values as dates, each read by itself: not in a format that another value of the table has."""
    series = series.reset_index(drop=True)  # labels may repeat
    if isinstance(series.dtype, pd.PeriodDtype):
        series = series.dt.to_timestamp()
    # pandas can't do the next steps with Arrow types, and returns no dates with a time zone for booleans and durations.
    if series.dtype.kind == "M" and not isinstance(series.dtype, pd.ArrowDtype):
        return pd.to_datetime(series, errors="coerce", utc=True)
    series = series.astype(object)
    series = series.map(_as_date, na_action="ignore").astype(object)
    with warnings.catch_warnings():  # pandas warns if it parses values one by one
        warnings.simplefilter("ignore")
        stamps: dict[str, Any] = {}
        texts = {value for value in series if isinstance(value, str)}
        # With dayfirst, pandas would read 2020-01-12 as 1 December.
        ordered = {value for value in texts if re.match(_ORDERED, value)}
        for group, first in ((ordered, day_first), (texts - ordered, False)):
            values = pd.Series([*group], dtype=object)
            read = pd.to_datetime(values, errors="coerce", utc=True, format="mixed", dayfirst=first)
            stamps.update(zip(values, read, strict=True))
        series = series.map(lambda value: stamps[value] if isinstance(value, str) else value, na_action="ignore")
        dates: pd.Series = pd.to_datetime(series.astype(object), errors="coerce", utc=True)
    return dates


def _as_date(value: Any) -> Any:
    """Return a value that pandas reads as a date or text; other values, such as numbers, are no dates."""
    if isinstance(value, pd.Period):
        return value.to_timestamp()
    return value if isinstance(value, str | datetime.date | np.datetime64) else None


def _parts_of(name: object) -> list[str]:
    return [f"{name}.{part}" for part in _PARTS]


def _dates(dates: pd.Series) -> list[Rows]:
    # Microseconds, because nanoseconds end in 2262, and many tables use 9999-12-31 for 'never'.
    since = (dates.dt.as_unit("us") - pd.Timestamp(0, tz="UTC").as_unit("us")).dt.total_seconds()
    values = [*(getattr(dates.dt, part) for part in _PARTS[:-1]), since]
    return [np.asarray(value, dtype=float) for value in values]


def as_text(value: Any) -> str:
    """Return ``str(value)``; for a text, such as a member of an enum of texts, the text to which it is equal."""
    return "" + value if isinstance(value, str) else str(value)


def _text(value: Any) -> str:
    """Return a value as a string that can be encoded.

    3 and 3.0 become the same string: pandas reads ints as floats if a value is missing.
    """
    whole = isinstance(value, (float, np.floating)) and value % 1 == 0
    return as_text(int(value) if whole else value).encode(errors="replace").decode()


def _texts(series: pd.Series, what: str) -> Rows:
    with scalars(series.name, what):
        codes, values = pd.factorize(series)
    if types.infer_dtype(series, skipna=True).startswith("mixed"):  # True and 1 are equal, but not the same text
        return np.array(
            ["" if missing else _text(value) for value, missing in zip(series, series.isna())], dtype=object
        )
    names = [_text(value) for value in values]
    return np.array([*names, ""], dtype=object)[codes]  # a missing value has the code -1
