"""A table's columns: what each one is, and the same table cleaned, in training and at prediction."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainloop.errors import ConfigurationError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Columns", "Kind", "read_table"]

Kind = Literal["number", "boolean", "category", "date", "text", "picture"]

_PICTURE = re.compile(r".\.(png|jpe?g|bmp|gif|webp|tiff?)$", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b")
_ROW_NUMBER = re.compile(r"(^|[_ .])(id|uuid|guid|index|row_?(number|nr|id))$|^unnamed: 0$", re.IGNORECASE)
_PARTS = ("year", "month", "day", "day_of_week", "seconds")
_SAMPLE = 20_000  # rows that are looked at to tell what a column is
_FEW = 20  # rows below which nothing is taken for a row's name


def read_table(data: object, what: str = "train_data") -> pd.DataFrame:
    """A DataFrame as it is, or the CSV or Parquet file at a path.

    Raises
    ------
    ConfigurationError
        If it is neither, has no rows, or two columns of one name.
    """
    pandas = import_pandas()
    if isinstance(data, (str, os.PathLike)):
        path = os.fspath(data)
        reader = pandas.read_parquet if path.lower().endswith((".parquet", ".pq")) else pandas.read_csv
        try:
            data = reader(path)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigurationError(
                f"{what}={path!r} can't be read: {error}. Give a DataFrame, or a path to CSV or Parquet."
            ) from error
    if not isinstance(data, pandas.DataFrame):
        raise ConfigurationError(
            f"{what} is a {type(data).__name__}: must be a pandas DataFrame, or a path to a CSV or Parquet file."
        )
    names = [str(name) for name in data.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"{what} has more than one column {_listed(twice)}. Rename or drop all but one of each."
        )
    if not len(data):
        raise ConfigurationError(f"{what} has no rows (its columns: {_listed(names)}). Give at least one.")
    return data.set_axis(names, axis=1)


def import_pandas() -> Any:
    """Pandas, or the error that names the extra."""
    try:
        import pandas
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"trainloop.tabular needs {error.name}: pip install 'trainloop[tabular]'.") from error
    return pandas


@dataclass(frozen=True)
class Columns:
    """Which columns are used, as what, and which are not and why."""

    kinds: Mapping[str, Kind]
    """By name, in the table's order."""
    dropped: Mapping[str, str]
    """Why, by name."""

    @classmethod
    def learn(cls, frame: pd.DataFrame) -> Columns:
        """What the columns of a table are.

        Raises
        ------
        ConfigurationError
            If none is of use, or one holds lists, arrays or mappings.
        """
        kinds: dict[str, Kind] = {}
        dropped: dict[str, str] = {}
        for name in frame.columns:
            series = frame[name]
            try:
                distinct = series.nunique(dropna=False)
            except TypeError as error:
                raise ConfigurationError(
                    f"column {name!r} holds values that are no scalars ({error}). Give one value a cell: split it into "
                    "columns, or drop it."
                ) from error
            if distinct <= 1:
                dropped[name] = "all its values are missing" if series.isna().all() else "all its values are the same"
                continue
            kind = _kind_of(series)
            if len(series) >= _FEW and distinct == len(series) and _names_rows(name, series, kind):
                dropped[name] = "it is different in each row, as an identifier is"
            else:
                kinds[name] = kind
        if not kinds:
            reasons = "; ".join(f"{name!r}: {why}" for name, why in dropped.items())
            raise ConfigurationError(
                "no column is left to learn from" + (f" ({reasons})" if reasons else "") + ". Give columns that vary."
            )
        return cls(kinds, dropped)

    def of(self, *kinds: Kind) -> list[str]:
        """Names of the cleaned table's columns of these kinds; a date is several numbers."""
        names: list[str] = []
        for name, kind in self.kinds.items():
            if "number" in kinds and kind == "date":
                names += [f"{name}.{part}" for part in _PARTS]
            elif kind in kinds or ("number" in kinds and kind == "boolean"):
                names.append(name)
        return names

    def clean(self, frame: pd.DataFrame, what: str = "data") -> pd.DataFrame:
        """The columns in use, each of one type: floats with NaN, or text with ``''`` for what is missing.

        Raises
        ------
        ConfigurationError
            If columns are missing, or a column of numbers holds something else.
        """
        pandas = import_pandas()
        missing = [name for name in self.kinds if name not in frame.columns]
        if missing:
            raise ConfigurationError(
                f"{what} lacks the column{'s' * (len(missing) > 1)} {_listed(missing)} of the training "
                f"data; it has {_listed(frame.columns)}. Give a table with these columns."
            )
        cleaned: dict[str, Any] = {}
        for name, kind in self.kinds.items():
            series = frame[name]
            if kind == "number":
                cleaned[name] = _numbers(series, what)
            elif kind == "boolean":
                cleaned[name] = _booleans(series)
            elif kind == "date":
                cleaned.update(_dates(series))
            else:
                cleaned[name] = _texts(series)
        return pandas.DataFrame(cleaned, index=frame.index)

    def __str__(self) -> str:
        lines = [
            f"{kind:<9} {_listed(names)}"
            for kind in ("number", "boolean", "category", "date", "text", "picture")
            if (names := [name for name, other in self.kinds.items() if other == kind])
        ]
        return "\n".join(lines + [f"dropped   {name!r}: {why}" for name, why in self.dropped.items()])


def _listed(names: Any, most: int = 12) -> str:
    names = [repr(str(name)) for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# -- what a column is ------------------------------------------------------------------------------------------------


def _kind_of(series: pd.Series) -> Kind:
    from pandas.api import types

    if types.is_bool_dtype(series.dtype):
        return "boolean"
    if types.is_numeric_dtype(series.dtype) or types.is_timedelta64_dtype(series.dtype):
        return "number"
    if types.is_datetime64_any_dtype(series.dtype) or str(series.dtype).startswith("period"):
        return "date"
    if str(series.dtype) == "category":
        return "category"
    present = series.dropna()
    if len(present) > _SAMPLE:
        present = present.sample(_SAMPLE, random_state=0)
    inferred = types.infer_dtype(present, skipna=True)
    if inferred == "boolean":
        return "boolean"
    if inferred in ("integer", "floating", "mixed-integer-float", "decimal", "timedelta"):
        return "number"
    if inferred in ("datetime", "date", "datetime64", "period"):
        return "date"
    return _kind_of_texts(present.astype(str))


def _kind_of_texts(texts: pd.Series) -> Kind:
    pandas = import_pandas()

    def share(pattern: re.Pattern[str]) -> float:
        return float(np.mean([pattern.search(text) is not None for text in texts]))

    if share(_PICTURE) > 0.95:
        return "picture"
    if pandas.to_numeric(texts, errors="coerce").notna().all() and not share(re.compile(r"^\s*0\d")):
        return "number"  # but '01234' is a postcode
    if share(_DATE) > 0.95 and _as_dates(texts).notna().mean() > 0.95:
        return "date"
    distinct = texts.nunique()
    if distinct >= max(10, 0.01 * len(texts)) and np.mean([len(text.split()) for text in texts]) >= 3:
        return "text"
    return "category"


def _names_rows(name: str, series: pd.Series, kind: Kind) -> bool:
    """Whether a column without equal values names its rows. Numbers may all differ and still count something."""
    if kind == "number":
        whole = bool((_numbers(series, "") % 1 == 0).all())
        return whole and _ROW_NUMBER.search(name) is not None
    return kind == "category"


# -- cleaned ---------------------------------------------------------------------------------------------------------


def _numbers(series: pd.Series, what: str) -> np.ndarray[Any, Any]:
    pandas = import_pandas()
    if series.dtype.kind == "m":
        return np.asarray(series.dt.total_seconds(), dtype=float)
    if str(series.dtype) == "category":
        series = series.astype(object)
    if pandas.api.types.infer_dtype(series, skipna=True) == "timedelta":
        return _numbers(pandas.to_timedelta(series), what)
    values = pandas.to_numeric(series, errors="coerce")
    lost = values.isna() & series.notna()
    if lost.any():
        raise ConfigurationError(
            f"column {str(series.name)!r} of {what} holds {series[lost].iloc[0]!r}, but numbers in training. "
            "Give numbers there, or None where there is none."
        )
    numbers = values.to_numpy(dtype=float, na_value=np.nan)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _booleans(series: pd.Series) -> np.ndarray[Any, Any]:
    known = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
    return np.array([known.get(str(value).lower(), np.nan) for value in series], dtype=float)


def _as_dates(series: pd.Series) -> pd.Series:
    pandas = import_pandas()
    series = series.reset_index(drop=True)  # labels may repeat
    if str(series.dtype).startswith("period"):
        series = series.dt.to_timestamp()
    with warnings.catch_warnings():  # pandas warns where it parses one by one
        warnings.simplefilter("ignore")
        dates: pd.Series = pandas.to_datetime(series, errors="coerce", utc=True)
        lost = dates.isna() & series.notna()
        if lost.any() and series.dtype.kind not in "mM":  # another notation than that of the first row
            dates[lost] = pandas.to_datetime(series[lost], errors="coerce", utc=True, format="mixed")
    return dates


def _dates(series: pd.Series) -> dict[str, np.ndarray[Any, Any]]:
    dates = _as_dates(series)
    parts = {part: getattr(dates.dt, part) for part in _PARTS[:-1]}
    since = (dates - import_pandas().Timestamp(0, tz="UTC")).dt.total_seconds()
    values = {**parts, "seconds": since}
    return {f"{series.name}.{part}": np.asarray(value, dtype=float) for part, value in values.items()}


def _texts(series: pd.Series) -> np.ndarray[Any, Any]:
    """As strings; 3 and 3.0 are one category, since a column of ints with gaps is one of floats."""
    codes, values = import_pandas().factorize(series)
    names = np.empty(len(values) + 1, dtype=object)
    names[:-1] = [str(int(v)) if isinstance(v, (float, np.floating)) and v % 1 == 0 else str(v) for v in values]
    names[-1] = ""  # code -1: missing
    return names[codes]
