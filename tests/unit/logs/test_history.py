"""The record of a training: read-only, by epoch and by step, as table, picture and plain data."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainloop.errors import ConfigurationError
from trainloop.history import History, format_table


def steps(**columns: dict[int, float]) -> Any:
    return {
        name: (np.array(list(values), np.int64), np.array(list(values.values()), np.float64))
        for name, values in columns.items()
    }


@pytest.fixture
def history() -> History:
    """Three epochs; val_loss is missing in the second, f1 was found in the last."""
    history = History()
    for epoch, loss in enumerate([0.5, 0.25, 0.125]):
        history.record("loss", loss, epoch)
        if epoch != 1:
            history.record("val_loss", 2 * loss, epoch)
    history.record("f1", 0.75, 2)
    history.record_steps(steps(loss={1: 0.6, 2: 0.4}))
    history.record_steps(steps(loss={3: 0.3}, lr={3: 0.01}))
    return history


def test_is_a_mapping_of_lists(history: History) -> None:
    assert dict(history) == {"loss": [0.5, 0.25, 0.125], "val_loss": [1.0, 0.25], "f1": [0.75]}
    assert history.to_dict() == dict(history)
    assert json.loads(json.dumps(history.to_dict())) == dict(history)
    assert len(history) == 3
    assert "loss" in history
    assert history.get("accuracy") is None
    with pytest.raises(KeyError, match=r"accuracy"):
        history["accuracy"]


def test_nobody_changes_it_by_what_it_gives(history: History) -> None:
    for values in (history["loss"], history.to_dict()["loss"], history.steps("loss"), history.step_indices("loss")):
        values.clear()
    assert history["loss"] == [0.5, 0.25, 0.125]
    assert history.steps("loss") == [0.6, 0.4, 0.3]
    with pytest.raises(TypeError):
        history["loss"] = [1.0]  # type: ignore[index]


def test_steps(history: History) -> None:
    assert history.steps("loss") == [0.6, 0.4, 0.3]
    assert history.step_indices("loss") == [1, 2, 3]
    assert history.step_indices("lr") == [3]
    assert history.step_names == ["loss", "lr"]
    assert history.steps("accuracy") == history.step_indices("accuracy") == []


def test_rows_know_their_epoch(history: History) -> None:
    rows = [
        {"epoch": 1, "loss": 0.5, "val_loss": 1.0},
        {"epoch": 2, "loss": 0.25},
        {"epoch": 3, "loss": 0.125, "val_loss": 0.25, "f1": 0.75},
    ]
    assert history.rows() == rows
    assert [history.row(epoch) for epoch in range(3)] == rows
    assert history.row(7) == {"epoch": 8}
    assert all(next(iter(row)) == "epoch" for row in rows)


def test_a_second_value_in_an_epoch(history: History) -> None:
    history.record("f1", 0.8, 2)
    assert history["f1"] == [0.75, 0.8]
    assert history.row(2)["f1"] == history.rows()[2]["f1"] == 0.8
    history.record("f1", 0.9, 2, replace=True)
    assert history["f1"] == [0.75, 0.9]
    history.record("f1", 1.0, 3, replace=True)
    assert history["f1"] == [0.75, 0.9, 1.0]


def test_a_metric_called_epoch_leaves_rows_right(history: History) -> None:
    history.record("epoch", 17.0, 0)
    assert history.rows()[0]["epoch"] == history.row(0)["epoch"] == 1
    assert history["epoch"] == [17.0]
    assert history._repr_html_().count("<th>epoch</th>") == 1


def test_repr_is_a_table(history: History) -> None:
    lines = repr(history).splitlines()
    assert lines[0].split() == ["epoch", "loss", "val_loss", "f1"]
    assert lines[1].split() == ["1", "0.5", "1"]
    assert lines[3].split() == ["3", "0.125", "0.25", "0.75"]
    assert len({len(line) for line in lines}) == 1
    assert repr(History()) == "History(empty)"


def test_html_is_a_table_with_names_escaped(history: History) -> None:
    history.record("a<b&c", 1.0, 0)
    html = history._repr_html_()
    assert "<th>a&lt;b&amp;c</th>" in html
    assert html.count("<tr>") == 4
    assert "<tr><td>2</td><td>0.25</td><td></td><td></td><td></td></tr>" in html


def test_format_table_takes_any_rows() -> None:
    assert format_table([{"a": 1, "b": 2.5}, {"b": 1e-9}]) == "a      b\n1    2.5\n   1e-09"


def test_state_survives_a_checkpoint_and_a_pickle(history: History) -> None:
    for copy in (History(), pickle.loads(pickle.dumps(history))):
        copy.load_state_dict(history.state_dict())
        assert dict(copy) == dict(history)
        assert copy.rows() == history.rows()
        assert copy.steps("loss") == history.steps("loss")
        assert copy.step_indices("loss") == history.step_indices("loss")
        copy.record("loss", 0.0, 3)
        copy.record_steps(steps(loss={4: 0.2}))
        assert copy.steps("loss") == [0.6, 0.4, 0.3, 0.2]
    assert history["loss"] == [0.5, 0.25, 0.125]
    empty = History()
    empty.load_state_dict(History().state_dict())
    assert dict(empty) == {}


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_plot_writes_a_picture(history: History, ending: str, tmp_path: Path, may_leave: Any) -> None:
    may_leave(".ttf")  # matplotlib keeps fonts open
    pytest.importorskip("matplotlib")
    path = tmp_path / f"history.{ending}"
    figure = history.plot(str(path))
    assert path.read_bytes()[:8].lstrip(b"\x89").startswith({"png": b"PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending])
    titles = {axes.get_title(): [line.get_label() for line in axes.get_lines()] for axes in figure.axes}
    assert titles == {"loss": ["loss", "val_loss"], "f1": ["f1"]}
    loss, val_loss = figure.axes[0].get_lines()
    assert (list(loss.get_xdata()), list(loss.get_ydata())) == ([1, 2, 3], [0.5, 0.25, 0.125])
    assert list(val_loss.get_xdata()) == [1, 3]


def test_plot_puts_many_metrics_into_a_grid(may_leave: Any) -> None:
    may_leave(".ttf")
    pytest.importorskip("matplotlib")
    history = History()
    for i in range(7):
        history.record(f"metric_{i}", 1.0, 0)
        history.record(f"test_metric_{i}", 1.0, 0)
    figure = history.plot()
    assert len(figure.axes) == 7
    assert figure.get_size_inches().tolist() == [15.0, 10.5]


def test_nothing_to_plot() -> None:
    with pytest.raises(ConfigurationError, match=r"history is empty: nothing to plot. Call fit first."):
        History().plot()


def test_without_matplotlib_the_error_names_the_extra(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"history.plot needs matplotlib: pip install '\.\[plot\]'."):
        history.plot()


def test_table_of_pandas(history: History) -> None:
    pandas = pytest.importorskip("pandas")
    table = history.to_dataframe()
    assert list(table["epoch"]) == [1, 2, 3]
    assert list(table["loss"]) == [0.5, 0.25, 0.125]
    assert pandas.isna(table["val_loss"][1])


def test_a_state_stays_as_it_was() -> None:
    """When the row of values in which it was taken ends later, and when it is loaded."""
    history = History()
    history.begin_row(0)
    history.record("loss", 1.0, 0)
    state = history.state_dict()
    history.record("late", 2.0, 0)
    history.end_row()
    assert state["row"] == {"epoch": 0, "begins": {}, "ends": None}
    History().load_state_dict(state)
    assert state["row"]["ends"] is None
