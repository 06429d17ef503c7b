"""The output of a run: a bar where there is a screen, a table everywhere, from rank 0 only, nothing torn."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import math
import os
import pty
import re
import struct
import sys
import termios
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kit.ranks import run_ranks
from kit.small_loop import Net, make_loop
from torch import Tensor

from trainloop import AbstractCallback, TrainLoop
from trainloop._support import output as screens
from trainloop.callbacks import ModelCheckpoint, ThresholdEarlyStopping
from trainloop.train_loop.progress import display
from trainloop.train_loop.progress.display import Display
from trainloop.train_loop.progress.timings import Timings

MEASURED = Timings(steps=5, samples=100, seconds=0.05, data=0.0125)
LAST = ["seconds", "samples/s", "data", "wait"]


class Screen(io.StringIO):
    """A terminal that keeps what was written."""

    def isatty(self) -> bool:
        return True


def on_screen(monkeypatch: pytest.MonkeyPatch, *streams: str) -> Screen:
    """No fixture: between a test's setup and its call pytest puts its own streams in place."""
    screen = Screen()
    for stream in streams or ("stderr",):
        monkeypatch.setattr(sys, stream, screen)
    return screen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(display.time, "perf_counter", lambda: now[0])
    return now


# -- the bar -----------------------------------------------------------------------------------------------------------


def test_bar_is_drawn_by_the_clock(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    screen = on_screen(monkeypatch)
    shown = Display(True)
    assert shown.next_look == math.inf
    shown.begin_epoch(1, 3, 40, batches_done=10)
    assert "epoch 2/3" in screen.getvalue()
    assert "10/40" in screen.getvalue()
    assert shown.next_look == pytest.approx(clock[0] + display.REDRAW_S)
    clock[0] += 0.5
    shown.look(20, lambda: {"loss": 0.123456, "accuracy": 1.0}, lambda: MEASURED)
    assert "20/40" in screen.getvalue()
    assert "loss=0.1235, accuracy=1, samples/s=2,000, data wait=25%" in screen.getvalue()
    assert shown.next_look == pytest.approx(clock[0] + display.REDRAW_S)
    shown.end_epoch()
    assert shown.next_look == math.inf
    assert screen.getvalue().rstrip(" ").endswith("\r")  # wiped: what is printed next stands on an empty line


def test_lengths_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    shown = Display(True)
    shown.begin_epoch(0, 0, None)
    shown.look(3, dict, Timings)
    shown.end_epoch()
    assert "epoch 1: 3batch" in screen.getvalue()


def test_without_a_screen_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        shown = Display(True)
        shown.begin_epoch(0, 1, 10)
        assert shown.next_look == math.inf
        shown.look(1, lambda: pytest.fail("nobody looks"), Timings)
        shown.end_epoch()
        assert stream is None or stream.getvalue() == ""


def test_disabled_shows_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    screen = on_screen(monkeypatch)
    shown = Display(False)
    shown.write("hello")
    shown.begin_epoch(0, 1, 10)
    shown.row({"epoch": 1}, Timings())
    assert shown.next_look == math.inf
    assert screen.getvalue() == capsys.readouterr().out == ""


@pytest.mark.parametrize("config, found", [({"IPKernelApp": {}}, True), ({}, False), (None, False)], ids=str)
def test_a_notebook_is_known_by_its_kernel(config: Any, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal's IPython is none, nor is a script that happens to have imported it."""
    shell = None if config is None else types.SimpleNamespace(config=config)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert screens.in_notebook() is found
    assert screens.has_screen() is found
    monkeypatch.delitem(sys.modules, "IPython")
    assert screens.in_notebook() is False


# -- the table ---------------------------------------------------------------------------------------------------------


def test_rows_stand_under_their_head(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    shown = Display(True)
    for epoch, values in enumerate([{"loss": -1.23456e-5}, {"loss": 2.0}, {"loss": 1.0, "a_long_metric": 0.5}]):
        shown.begin_epoch(epoch, 3, 1)
        clock[0] += 1.25
        shown.row({"epoch": epoch + 1, **values}, MEASURED)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["epoch", "loss", *LAST],
        ["1", "-1.2346e-05", "1.2", "2,000", "25%"],
        ["2", "2", "1.2", "2,000", "25%"],
        ["epoch", "loss", "a_long_metric", *LAST],
        ["3", "1", "0.5", "1.2", "2,000", "25%"],
    ]
    for block in (lines[:3], lines[3:]):
        assert len({len(line) for line in block}) == 1


def test_columns_that_come_and_go_have_one_head(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    shown = Display(True)
    for epoch in range(6):
        shown.begin_epoch(epoch, 6, 1)
        val = {"val_loss": 0.5} if epoch % 2 else {}
        late = {"late": 7.0} if epoch > 3 else {}
        shown.row({"epoch": epoch + 1, "loss": 1.0, **val, **late}, MEASURED)
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split() for line in lines if "epoch" in line]
    assert heads[1:] == [
        ["epoch", "loss", "val_loss", *LAST],
        ["epoch", "loss", "val_loss", "late", *LAST],
    ]
    assert len(lines) == 6 + 3
    first, last = lines[4], lines[8]  # a row without val_loss, below a head that has it; a row with all
    assert first.split() == ["3", "1", "0.0", "2,000", "25%"]
    assert len(first) == len(lines[2])
    assert last.split() == ["6", "1", "0.5", "7", "0.0", "2,000", "25%"]


# -- whole runs --------------------------------------------------------------------------------------------------------


def shown_loop(**arguments: Any) -> TrainLoop:
    tl = make_loop(**arguments)
    tl.progress_bar = True
    return tl


def is_table(lines: list[str], epochs: int, names: list[str]) -> bool:
    return lines[0].split() == ["epoch", *names, *LAST] and [line.split()[0] for line in lines[1:]] == [
        str(epoch) for epoch in range(1, epochs + 1)
    ]


COLUMNS = ["loss", "accuracy", "val_loss", "val_accuracy"]


def test_a_run_into_a_file_is_a_first_line_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    tl = shown_loop()
    tl.fit(num_epochs=2)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == repr(tl)
    assert lines[0].startswith("TrainLoop(single on cpu, effective batch 16, Net with 27 parameters")
    assert is_table(lines[1:], 2, COLUMNS), out
    assert err == ""
    tl.fit(num_epochs=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == repr(tl)
    assert lines[2].split()[0] == "3"


def test_without_progress_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = on_screen(monkeypatch)
    make_loop().fit(num_epochs=1)
    assert capsys.readouterr().out == screen.getvalue() == ""


def test_whoever_prints_at_an_epochs_end_prints_on_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch, "stderr", "stdout")  # one terminal, as usual

    class Prints(AbstractCallback):
        def on_epoch_end(self) -> None:
            print("from a callback")

        def on_exception(self, exception: BaseException) -> None:
            print("an exception")

        def on_epoch_begin(self) -> None:
            if self.train_loop_obj.epoch == 1:
                raise KeyError("stop")

    with pytest.raises(KeyError):
        shown_loop().fit(num_epochs=2, callbacks=[Prints()])
    visible = [line.rsplit("\r", 1)[-1].rstrip() for line in screen.getvalue().split("\n")]
    assert "from a callback" in visible
    assert "an exception" in visible
    assert not any("epoch 1/2" in line for line in visible)


def test_bar_shows_the_metrics_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    monkeypatch.setattr(display, "REDRAW_S", 0.0)

    class Shows(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Tensor:
            self.log("shown", 0.25, prog_bar=True)
            return super().get_loss(batch_data, criterion, device)

    shown_loop(model=Shows()).fit(num_epochs=1)
    assert re.search(r"epoch 1/1: .*7/7.*loss=[0-9.]+, shown=0.25", screen.getvalue())
    assert "accuracy" not in screen.getvalue()


def read_all(terminal: int) -> bytes:
    """Everything written to a terminal until nobody has it open."""
    chunks = []
    try:
        while chunk := os.read(terminal, 65536):
            chunks.append(chunk)
    except OSError:  # how it ends on Linux
        pass
    finally:
        os.close(terminal)
    return b"".join(chunks)


@contextlib.contextmanager
def streams_are(stdout: int, stderr: int) -> Iterator[None]:
    """This process's standard streams, and so those of ranks that it starts."""
    before = [os.dup(1), os.dup(2)]
    with pytest.MonkeyPatch.context() as patch:
        for number, (name, descriptor) in enumerate({"stdout": stdout, "stderr": stderr}.items(), start=1):
            os.dup2(descriptor, number)
            patch.setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False)))
        try:
            yield
        finally:
            for number, (stream, descriptor) in enumerate(zip((sys.stdout, sys.stderr), before), start=1):
                stream.flush()
                os.dup2(descriptor, number)
                os.close(descriptor)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Implicitly cleaning up <Temp:ResourceWarning")  # by PyTorch 2.6, as a rank ends
def test_of_two_ranks_one_shows_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table into a file, bar on a terminal: of rank 0 alone."""
    monkeypatch.delenv("COLUMNS", raising=False)
    # What stays after a fit, such as the fork server, starts here: the terminal ends when nobody has it open.
    run_ranks(os.getpid, 1, folder=tmp_path)
    tl = make_loop(gpu_mode="ddp", devices=2)
    tl.progress_bar = True
    ours, theirs = pty.openpty()
    # As in many containers: the terminal says that it has 0 columns, on which tqdm would draw an empty line.
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    with ThreadPoolExecutor(1) as pool, capfd.disabled(), open(tmp_path / "table", "w+") as table:
        reading = pool.submit(read_all, ours)
        try:
            with streams_are(table.fileno(), theirs):
                tl.fit(num_epochs=2)
        finally:
            os.close(theirs)
        bar = reading.result(timeout=20).decode()
        lines = (tmp_path / "table").read_text().splitlines()
    assert lines[0].startswith("TrainLoop(ddp on 2 x cpu, effective batch 32, Net with 27 parameters"), bar
    assert is_table(lines[1:], 2, COLUMNS), lines
    # each epoch's bar begins once, and all that is left of them is an empty line
    assert [bar.count(f"epoch {epoch}/2:   0%") for epoch in (1, 2)] == [1, 1]
    assert bar.rstrip(" ").endswith("\r")
    assert "\n" not in bar.rstrip()
    # Of rank 0's steps, and the samples of both.
    found = tl.timings
    assert [(part.steps, part.samples) for part in (found, *found.epochs)] == [(8, 202), (4, 101), (4, 101)], found


@pytest.mark.parametrize("bar", [True, False])
def test_events_are_silenced_without_a_bar(bar: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def fit() -> str:
        tl = make_loop(progress_bar=bar)
        tl.fit(num_epochs=3, callbacks=[stop(), ModelCheckpoint(tmp_path)], resume_from="last")
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    def stop() -> ThresholdEarlyStopping:
        return ThresholdEarlyStopping("loss", -1.0, patience=0)

    assert ("ThresholdEarlyStopping ended training after epoch 1" in fit()) == bar
    assert ("Nothing left to do" in fit()) == bar


def test_an_event_of_a_callback(capsys: pytest.CaptureFixture[str]) -> None:
    class Reports(AbstractCallback):
        def on_epoch_end(self) -> None:
            self.train_loop_obj.report("half of it is done", logging.WARNING)

    make_loop().fit(num_epochs=1, callbacks=[Reports("reports")])
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "half of it is done\n")
