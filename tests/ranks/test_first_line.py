"""The line that a run begins with, where ranks print it."""

from __future__ import annotations

import pytest

from small_loop import make_loop


def test_ranks_of_the_cpu_that_nobody_counted_are_told_how_to_be_more(capfd: pytest.CaptureFixture[str]) -> None:
    said = {}
    for devices in ("auto", 1, 2):
        tl = make_loop(gpu_mode="ddp", devices=devices)
        tl.progress_bar = True
        tl.fit(num_epochs=1)
        said[devices] = capfd.readouterr().out.splitlines()[0].removeprefix(repr(tl))
    assert said == {"auto": ": 1 rank; devices=2 for two", 1: "", 2: ""}
