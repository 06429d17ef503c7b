"""Columns and targets as other libraries, files and people hand them over; no process is started."""

from __future__ import annotations

import datetime
import enum
import pickle
from contextlib import nullcontext
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from trainloop.errors import ConfigurationError
from trainloop.tabular.columns import Columns, read_table
from trainloop.tabular.models import matrix
from trainloop.tabular.targets import Target, find_metric, held_out_rows, labelled_rows

N = 60
DAYS = pd.date_range("2024-01-01", periods=N, freq="37h")
GAPS = [i % 5 if i % 7 else None for i in range(N)]
ODD: dict[str, tuple[Any, str]] = {
    "nullable ints": (pd.Series(GAPS, dtype="Int64"), "number"),
    "nullable floats": (pd.Series(GAPS, dtype="Float64"), "number"),
    "nullable booleans": (pd.Series([None, True, False] * (N // 3), dtype="boolean"), "boolean"),
    "booleans with gaps": (pd.Series([None, True, False] * (N // 3), dtype=object), "boolean"),
    "Arrow ints": (pd.Series(GAPS, dtype="int64[pyarrow]"), "number"),
    "Arrow decimals": (
        pd.Series([Decimal(i) / 4 for i in range(N)], dtype=pd.ArrowDtype(pa.decimal128(9, 2))),
        "number",
    ),
    "Arrow booleans": (pd.Series([None, True, False] * (N // 3), dtype="bool[pyarrow]"), "boolean"),
    "Arrow texts": (pd.Series([None, "a", "b"] * (N // 3), dtype="string[pyarrow]"), "category"),
    "Arrow categories": (
        pd.Series([None, "a", "b"] * (N // 3), dtype=pd.ArrowDtype(pa.dictionary(pa.int8(), pa.string()))),
        "category",
    ),
    "Arrow nanoseconds": (pd.Series(DAYS).astype("timestamp[ns][pyarrow]"), "date"),
    "Arrow time zone": (
        pd.Series(DAYS.tz_localize("UTC")).astype(pd.ArrowDtype(pa.timestamp("us", tz="Europe/Berlin"))),
        "date",
    ),
    "Arrow durations": (pd.Series(pd.to_timedelta(range(N), unit="s")).astype("duration[ns][pyarrow]"), "number"),
    "decimals": (pd.Series([Decimal(i) / 4 if i % 5 else None for i in range(N)], dtype=object), "number"),
    "sparse": (pd.Series(pd.arrays.SparseArray([i % 3 for i in range(N)])), "number"),
    "huge": (pd.Series(np.linspace(-1, 1, N) * 1e300), "number"),
    "infinite": (pd.Series([np.inf, -np.inf, 1.0, 2.0] * (N // 4)), "number"),
    "beyond int64": (pd.Series([10**30 + i for i in range(N)], dtype=object), "number"),
    "intervals": (pd.Series(pd.cut(np.arange(N), 4)), "category"),
    "of two types": (pd.Series([i if i % 2 else f"t{i % 4}" for i in range(N)], dtype=object), "category"),
    "dates and a word": (pd.Series([DAYS[i] if i % 3 else "unknown" for i in range(N)], dtype=object), "category"),
    "bytes": (pd.Series([b"a", b"b"] * (N // 2), dtype=object), "category"),
    "bytes that are no text": (pd.Series([b"\xff", b"b"] * (N // 2), dtype=object), "category"),
    "half a character": (pd.Series(["\ud800", "b"] * (N // 2), dtype=object), "category"),
    "time zone": (pd.Series(DAYS.tz_localize("Asia/Tokyo")), "date"),
    "several time zones": (
        pd.Series([day.tz_localize(["UTC", "Asia/Tokyo"][i % 2]) for i, day in enumerate(DAYS)], dtype=object),
        "date",
    ),
    "never": (pd.Series([datetime.datetime(9999, 12, 1 + i % 28) for i in range(N)], dtype=object), "date"),
    "very long texts": (pd.Series([f"{i} " + "so on " * 5000 for i in range(N)]), "text"),
    "one long word": (pd.Series(["x" * 50_000 + str(i % 4) for i in range(N)]), "category"),
    "no Latin letters": (pd.Series(["слово", "言葉", "🙂"] * (N // 3)), "category"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_column_is_told_cleaned_and_made_numbers(name: str) -> None:
    series, kind = ODD[name]
    frame = pd.DataFrame({name: series, "other": np.arange(N) % 2})
    columns = Columns.learn(frame)
    assert columns.kinds[name] == kind
    # Before pandas 3, a column of dates ends in the year 2262.
    ends = name == "never" and pd.__version__ < "3"
    with pytest.warns(UserWarning, match="such values are treated as missing") if ends else nullcontext():
        whole = columns.clean(frame)
        alone = columns.clean(frame.iloc[[4]].reset_index(drop=True))
    assert alone.equals(whole.iloc[[4]].reset_index(drop=True))
    missing = series.isna() if kind in ("boolean", "number") else None
    if missing is not None:
        numbers = pd.to_numeric(series.astype(object), errors="coerce").astype(float)
        if kind == "number" and "durations" not in name:
            expected = numbers.where(np.isfinite(numbers)).clip(-1e38, 1e38)
            assert np.array_equal(whole[name], expected, equal_nan=True)
        else:
            assert whole[name].isna().tolist() == missing.tolist()
    if kind == "date" and name != "never":
        stamps = [pd.Timestamp(value) for value in series]
        assert whole[f"{name}.seconds"].tolist() == [stamp.timestamp() for stamp in stamps]
    for onehot in (True, False):
        numbers = matrix(columns, onehot=onehot, scale=onehot).fit_transform(whole).astype(np.float32)  # as forests do
        assert np.isfinite(numbers).all()
    # All of it missing, at prediction.
    nothing = frame.head(2).assign(**{name: None})
    assert np.isfinite(matrix(columns, onehot=True).fit(whole).transform(columns.clean(nothing))).all()


def test_identifiers_are_dropped_and_what_only_looks_like_one_is_not() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "customer_id": rng.permutation(N),
            "key": [f"{i:04x}" + "k" for i in range(N)],
            "price_index": rng.normal(size=N),
            "customers": rng.permutation(N),
            "happened": DAYS,
            "remark": [f"this is remark {i}" for i in range(N)],
            "constant": 3,
        }
    )
    columns = Columns.learn(frame)
    assert list(columns.dropped) == ["customer_id", "key", "constant"]
    assert list(columns.kinds) == ["price_index", "customers", "happened", "remark"]
    assert "dropped   'customer_id': it differs in each row, like an identifier" in str(columns)


def test_names_that_are_numbers_and_names_that_are_equal_then() -> None:
    frame = pd.DataFrame({0: [1.0, 2.0], 1: ["a", "b"], ("two", 3): [True, False]})
    assert list(read_table(frame).columns) == ["0", "1", "('two', 3)"]
    assert list(frame.columns) == [0, 1, ("two", 3)]  # the user's own stays as it is
    with pytest.raises(ConfigurationError, match="train_data has columns with the same name: '0'"):
        read_table(frame.rename(columns={1: "0"}))


@pytest.mark.parametrize(
    "values, problem",
    [
        (pd.Series([1, 2] * 30, dtype="Int64"), "binary"),
        (pd.Series([1, 2, 3] * 20, dtype="int64[pyarrow]"), "multiclass"),
        (pd.Series([True, False] * 30, dtype="boolean"), "binary"),
        (pd.Series([True, False] * 30, dtype="bool[pyarrow]"), "binary"),
        (pd.Series(["a", "b", "c"] * 20, dtype="string[pyarrow]"), "multiclass"),
        (pd.Series(np.array([7, -3], dtype=np.int8).repeat(30)), "binary"),
        (pd.Series([pd.Timestamp("2024-01-01"), pd.Timestamp("2024-02-01")] * 30), "binary"),
        (pd.Series([True, None, False] * 20, dtype="boolean").dropna(), "binary"),
        (pd.Series(["a", 1, 2.5] * 20, dtype=object), "multiclass"),
        (pd.Series(["a", "b"] * 30, dtype=pd.CategoricalDtype(["b", "a", "never"])), "binary"),
        (pd.Series(np.arange(60) / 7, dtype="Float64"), "regression"),
        (pd.Series(np.arange(60) / 7, dtype="double[pyarrow]"), "regression"),
        (pd.Series([Decimal(i) / 4 for i in range(60)], dtype=object), "regression"),
    ],
)
def test_targets_of_other_types_come_back(values: pd.Series, problem: str) -> None:
    target = Target.learn("y", values, None)
    assert target.problem == problem
    encoded = target.encode(values)
    if problem == "regression":
        assert encoded.tolist() == [float(value) for value in values]
        return
    assert len(target.classes) == values.nunique()
    assert "np." not in repr(target.classes)
    found = pd.Series(target.decode(np.eye(target.num_outputs)[encoded]))
    assert found.tolist() == values.tolist()
    assert found.dtype == values.dtype


def test_rows_without_a_label_are_left_out_and_nan_is_no_class() -> None:
    frame = pd.DataFrame({"x": range(40), "y": pd.Series(["a", None, "b", np.nan] * 10, dtype=object)})
    kept = labelled_rows(frame, "y", "train_data")
    assert len(kept) == 20
    assert Target.learn("y", kept["y"], None).classes == ("a", "b")


def test_a_class_with_one_row_is_learnt_and_not_validated_on() -> None:
    y = np.array([0] * 50 + [1] * 49 + [2])
    target = Target("y", "multiclass", ("a", "b", "c"))
    train, validation = held_out_rows(y, target)
    assert sorted([*train, *validation]) == list(range(100))
    assert 2 in y[train]
    assert 2 not in y[validation]
    chances = np.full((len(validation), 3), 1 / 3)
    assert find_metric("log_loss", "multiclass")(y[validation], chances) == pytest.approx(-np.log(3))
    assert find_metric("accuracy", "multiclass")(y[validation], np.eye(3)[y[validation]]) == 1.0


def test_ints_larger_than_any_float_are_missing_like_infinity() -> None:
    frame = pd.DataFrame({"x": pd.Series([10**400, -(10**400), 3, None] * 15, dtype=object)})
    columns = Columns.learn(frame)
    assert columns.kinds["x"] == "number"
    assert columns.clean(frame)["x"][:4].tolist() == pytest.approx([np.nan, np.nan, 3, np.nan], nan_ok=True)
    values = pd.Series([10**400 + i for i in range(60)], dtype=object)
    with pytest.raises(ConfigurationError, match="label 'y' has values that are not finite numbers"):
        Target.learn("y", values, None)
    assert Target.learn("y", values % 3 + 10**400, None).problem == "multiclass"


@pytest.mark.parametrize(
    "values, dtype",
    [([True, None], "boolean"), ([True, False], "category"), ([1, 2], "timedelta64[s]"), (["soon", "later"], object)],
)
def test_values_that_are_no_dates_are_missing_at_prediction(values: list[Any], dtype: str) -> None:
    frame = pd.DataFrame({"when": pd.Series(values, dtype=dtype)})
    assert Columns({"when": "date"}, {}).clean(frame).isna().all(axis=None)


def test_durations_and_numbers_of_an_unknown_unit_are_not_mixed() -> None:
    hours = pd.DataFrame({"x": [1.0, 2.0, 3.0]})
    spans = pd.DataFrame({"x": pd.to_timedelta(hours["x"], unit="h")})
    assert Columns.learn(spans).clean(spans)["x"].tolist() == [3600, 7200, 10800]
    for learnt, other, had in ((hours, spans, "numbers"), (spans, hours, "durations")):
        columns = pickle.loads(pickle.dumps(Columns.learn(learnt)))
        assert columns.clean(learnt.assign(x=None)).isna().all(axis=None)
        with pytest.raises(ConfigurationError, match=f"column 'x' of data has .*, but had {had} in training"):
            columns.clean(other)


@pytest.mark.parametrize("value", [[1], {}, np.zeros(2)])
def test_values_that_are_not_scalars_are_named_at_prediction_and_as_labels(value: object) -> None:
    values = pd.Series([value] * 4, name="c")
    with pytest.raises(ConfigurationError, match="column 'c' of data has values that are not scalars"):
        Columns({"c": "category"}, {}).clean(values.to_frame())
    with pytest.raises(ConfigurationError, match="column 'c' of train_data has values that are not scalars"):
        Target.learn("c", values, None)
    with pytest.raises(ConfigurationError, match="column 'c' of data has values that are not scalars"):
        Target("c", "binary", (0, 1)).encode(values)


@pytest.mark.parametrize("value", ["many", np.inf, pd.Timestamp("2024-01-01"), pd.Timedelta("1h")])
def test_labels_that_are_no_numbers_are_named_when_a_regression_is_scored(value: object) -> None:
    target = Target("y", "regression", ())
    assert target.encode(pd.Series(["1.5", 2, Decimal(3)], dtype=object)).tolist() == [1.5, 2.0, 3.0]
    with pytest.raises(ConfigurationError, match=r"label 'y' has the value .*, which is not a finite number"):
        target.encode(pd.Series([1.0, value], dtype=object))
    if not isinstance(value, str):
        with pytest.raises(ConfigurationError, match="label 'y' has the value "):
            target.encode(pd.Series([value]))


WHEN = pd.Series(pd.date_range("2020-01-01", "2021-12-31", freq="11D"))
DATES: dict[str, tuple[pd.Series, pd.Series]] = {
    "day first": (WHEN.dt.strftime("%d/%m/%Y"), WHEN),
    "month first": (WHEN.dt.strftime("%m/%d/%Y"), WHEN),
    "with times": (WHEN.dt.strftime("%d.%m.%Y %H:%M"), WHEN),
    "ISO and day first": (WHEN.dt.strftime("%d/%m/%Y").where(WHEN.index % 2 == 0, WHEN.dt.strftime("%Y-%m-%d")), WHEN),
    "periods": (
        pd.Series([pd.Period(day, "M") for day in WHEN], dtype=object),
        WHEN.dt.to_period("M").dt.to_timestamp(),
    ),
    "kinds": (pd.Series([day if i % 2 else str(day) for i, day in enumerate(WHEN)], dtype=object), WHEN),
}


@pytest.mark.parametrize("name", DATES)
def test_dates_mean_the_same_in_any_table(name: str) -> None:
    values, days = DATES[name]
    frame = pd.DataFrame({"when": values, "other": np.arange(len(values)) % 2})
    columns = Columns.learn(frame)
    whole = columns.clean(frame)
    assert whole["when.month"].tolist() == days.dt.month.tolist()
    assert whole["when.day"].tolist() == days.dt.day.tolist()
    assert columns.clean(frame[::-1]).equals(whole[::-1])
    for i in range(0, len(frame), 7):
        assert columns.clean(frame.iloc[[i]]).equals(whole.iloc[[i]])


def test_an_order_that_no_date_shows_is_reported() -> None:
    values = [f"{1 + i % 12:02}/{1 + i % 7:02}/2020" for i in range(N)]
    frame = pd.DataFrame({"a": values, "b": [value.replace("/", ".") for value in values]})
    with pytest.warns(UserWarning, match="dates such as") as warned:
        columns = Columns.learn(frame)
    assert [str(one.message).partition(" has ")[0] for one in warned] == ["column 'a'", "column 'b'"]
    assert "of which none show whether the day or the month is first" in str(warned[0].message)
    assert "are read as day.month.year" in str(warned[1].message)
    whole = columns.clean(frame)
    assert whole["a.month"].tolist() == whole["b.day"].tolist()


def test_other_values_are_reported_at_prediction() -> None:
    frame = pd.DataFrame({"d": DAYS, "b": np.arange(N) % 2 == 0})
    columns = Columns.learn(frame)
    more = pd.DataFrame({"d": [20200101, "soon", None], "b": ["yes", True, None]}, dtype=object)
    with pytest.warns(UserWarning, match="in training") as warned:
        cleaned = columns.clean(more)
    assert cleaned["d.year"].isna().all()
    assert cleaned["b"].tolist() == pytest.approx([np.nan, 1.0, np.nan], nan_ok=True)
    texts = sorted(str(one.message) for one in warned)
    assert texts[0].startswith("column 'b' of data has 'yes', but had True and False in training. 1 such")
    assert texts[1].startswith("column 'd' of data has 20200101, but had dates in training. 2 such values")


def test_the_text_of_a_value_does_not_depend_on_other_rows() -> None:
    frame = pd.DataFrame({"m": pd.Series([True, 1, "a", 1.0, None] * (N // 5), dtype=object)})
    columns = Columns.learn(frame)
    whole = columns.clean(frame)["m"]
    assert whole[:5].tolist() == ["True", "1", "a", "1", ""]
    assert columns.clean(frame[::-1])["m"][::-1].tolist() == whole.tolist()
    assert [columns.clean(frame.iloc[[i]])["m"].iloc[0] for i in range(5)] == whole[:5].tolist()


class Colour(str, enum.Enum):
    RED = "red"
    BLUE = "blue"


def test_a_member_of_an_enum_of_texts_is_the_text_to_which_it_is_equal() -> None:
    members = pd.DataFrame({"c": pd.Series([*Colour] * (N // 2), dtype=object)})
    texts = pd.DataFrame({"c": ["red", "blue"] * (N // 2)})
    assert Columns.learn(members).clean(members).equals(Columns.learn(texts).clean(texts))
    assert read_table(members.rename(columns={"c": Colour.RED})).columns.tolist() == ["red"]


def test_parts_of_dates_have_names_of_their_own() -> None:
    frame = pd.DataFrame({"when.month": list("abc") * (N // 3), "when": DAYS, "when.day": np.arange(N) % 3})
    columns = Columns.learn(frame)
    cleaned = columns.clean(frame)
    assert not cleaned.columns.has_duplicates
    assert cleaned["when.month"].tolist() == frame["when.month"].tolist()
    assert cleaned["when.month_"].tolist() == DAYS.month.tolist()
    assert {*columns.of("number"), *columns.of("category")} == {*cleaned.columns}
    dates = columns.only(["date"])
    assert [*dates.clean(frame).columns] == dates.of("number")
