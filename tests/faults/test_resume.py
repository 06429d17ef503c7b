"""Killed at any moment and resumed, a run ends with the same bits as the one that nobody disturbed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from kit.checkpoints import same
from kit.resume_job import (
    ACCUMULATION,
    BATCH,
    EPOCHS,
    EVERY,
    SAMPLES,
    Jobs,
    batches_by_step,
    jobs,
    steps_done,
    wait_for_steps,
)

from trainloop import checkpoint

STEPS_AN_EPOCH = {"single": 9, "ddp": 5}
STEPS = {mode: EPOCHS * steps for mode, steps in STEPS_AN_EPOCH.items()}


@pytest.fixture(autouse=True)
def the_server_stays(may_leave: Any) -> None:
    may_leave("resume_job.serve")  # it serves all tests of this file


@pytest.fixture(scope="module")
def job() -> Iterator[Jobs]:
    with jobs() as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(job: Jobs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By mode: what a run without any checkpoint ends with, and the samples of its steps."""
    made: dict[str, Any] = {}

    def make(mode: str) -> tuple[Any, dict[int, list[int]]]:
        if mode not in made:
            where = tmp_path_factory.mktemp(mode)
            # Workers or none, the numbers are the same; in ranks they are slow to start.
            job.start(where, mode=mode, every=None, workers=0 if mode == "ddp" else 1)
            assert job.wait() == 0, (where / "output").read_text()
            made[mode] = end_of(where), batches_by_step(where)
        return made[mode]

    return type("Undisturbed", (dict,), {"__missing__": lambda _, mode: make(mode)})()


def end_of(where: Path) -> Any:
    return torch.load(where / "end.pt", weights_only=True)


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for key in a for line in differences(a[key], b[key], f"{where}/{key}")]
    return [] if same(a, b) else [f"{where}: {a} != {b}"]


def kill(pid: int, mode: str, victim: str, rng: random.Random) -> None:
    """SIGKILL to the whole job, its main process or a rank. Ranks that were not hit have to end by themselves."""
    try:
        main = psutil.Process(pid)
        children = main.children()
        everyone = main.children(recursive=True)
        for process in {"all": [main, *everyone], "main": [main], "rank": [rng.choice(children or [main])]}[victim]:
            process.kill()
    except psutil.NoSuchProcess:
        return  # the job was faster
    if mode == "ddp":  # a new run must not find them still writing
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive, f"left running after a kill of {victim}: {alive}"
    for worker in everyone:  # torch's own look for their parent every 5 s
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


def kill_and_resume(
    job: Jobs, where: Path, mode: str, kills: list[tuple[int, float, str]], **arguments: Any
) -> list[int]:
    """Kill the job after so many steps of each attempt and a delay, then let it run to its end.

    Returns
    -------
    list of int
        Steps that each attempt but the first did again.
    """
    rng = random.Random(0)
    repeated = []
    reached = 0
    for attempt, (after, delay_s, victim) in enumerate([*kills, (0, 0.0, "nobody")]):
        pid = job.start(where, mode=mode, attempt=attempt, **arguments)
        if victim == "nobody":
            code = job.wait()
            assert code == 0, (where / "output").read_text()
        else:
            wait_for_steps(where, attempt, after, pid)
            time.sleep(delay_s)
            kill(pid, mode, victim, rng)
            code = job.wait()
            if victim != "rank" and not (where / "end.pt").exists():
                assert code == -signal.SIGKILL, (where / "output").read_text()
        lines = (where / f"seen-{attempt:03d}-0").read_text().splitlines() if steps_done(where, attempt) else []
        if lines:
            first, last = (int(line[1 : line.index(",")]) for line in (lines[0], lines[-1]))
            if attempt:
                repeated.append(max(reached + 1 - first, 0))
            reached = max(reached, last)
        if (where / "end.pt").exists():
            break
    return repeated


def assert_as_undisturbed(
    where: Path, expected: tuple[Any, dict[int, list[int]]], repeated: list[int], most: int = EVERY
) -> None:
    assert differences(end_of(where), expected[0]) == []
    batches = batches_by_step(where)
    assert batches == expected[1]
    assert all(steps <= most for steps in repeated), repeated
    assert "RuntimeWarning" not in (where / "output").read_text()  # no checkpoint was found damaged


def random_kills(mode: str, count: int, seed: int) -> list[tuple[int, float, str]]:
    """Before the first checkpoint, in steps, while saving, in evaluation, near the end."""
    rng = random.Random(seed)
    victims = ["main"] if mode == "single" else ["all", "main", "rank"]
    return [
        (rng.randrange(STEPS[mode]), rng.choice([0.0, rng.uniform(0, 0.02)]), rng.choice(victims)) for _ in range(count)
    ]


@pytest.mark.long
def test_checkpoints_change_nothing(job: Jobs, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    job.start(tmp_path, mode="single")
    assert job.wait() == 0, (tmp_path / "output").read_text()
    assert_as_undisturbed(tmp_path, undisturbed["single"], [])
    expected = undisturbed["single"][1]
    for epoch in range(EPOCHS):
        steps = range(epoch * 9 + 1, epoch * 9 + 10)
        assert sorted(i for step in steps for i in expected[step]) == list(range(SAMPLES))
    assert len(expected) == STEPS["single"]
    assert max(map(len, expected.values())) == BATCH * ACCUMULATION


@pytest.mark.long
def test_killed_again_and_again_it_ends_with_the_same_bits(
    job: Jobs, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """One run, killed three times."""
    kills = sorted(random_kills("single", 3, seed=1))
    # Each attempt goes on from the last checkpoint, so it reaches the next kill after fewer steps.
    before = [0, *(after for after, *_ in kills)]
    relative = [(max(after - (b - b % EVERY), 1), *rest) for b, (after, *rest) in zip(before, kills)]
    repeated = kill_and_resume(job, tmp_path, "single", relative)
    assert_as_undisturbed(tmp_path, undisturbed["single"], repeated)


@pytest.mark.long
def test_ranks_killed_and_resumed_end_with_the_same_bits(
    job: Jobs, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    repeated = kill_and_resume(job, tmp_path, "ddp", [(10, 0.003, "all")], workers=0)
    assert_as_undisturbed(tmp_path, undisturbed["ddp"], repeated)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["single", "ddp"])
@pytest.mark.parametrize("kill_number", range(30))
def test_each_of_30_kills(job: Jobs, undisturbed: dict[str, Any], tmp_path: Path, mode: str, kill_number: int) -> None:
    in_thread = kill_number % 3 == 2
    kills = random_kills(mode, 1, seed=kill_number)
    repeated = kill_and_resume(job, tmp_path, mode, kills, async_save=in_thread)
    # A thread may still be writing the newest one while the loop is on its way to the next.
    assert_as_undisturbed(tmp_path, undisturbed[mode], repeated, 2 * EVERY if in_thread else EVERY)


@pytest.mark.slow
def test_signalled_as_ranks_and_resumed_as_one_process_the_batches_go_on(
    job: Jobs, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """SIGTERM to one rank of two; then one process whose batches are as large as both ranks' together."""
    job.start(tmp_path, mode="ddp", every=1000, workers=0, signal_at=(1, 7))
    assert job.wait() == 143, (tmp_path / "output").read_text()
    (written,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert written.info is not None
    assert written.info.reason == "SIGTERM"
    # All ranks stopped after the same step, the signal's or a few later.
    last_steps = {path.read_text().splitlines()[-1].partition(",")[0] for path in tmp_path.glob("seen-*")}
    assert last_steps == {f"[{written.info.step}"}
    job.start(tmp_path, mode="single", attempt=1, every=1000, batch=2 * BATCH)
    assert job.wait() == 0, (tmp_path / "output").read_text()
    assert batches_by_step(tmp_path) == undisturbed["ddp"][1]
    assert end_of(tmp_path)["counters"][:2] == undisturbed["ddp"][0]["counters"][:2]


@pytest.mark.long
def test_a_signal_writes_a_checkpoint_at_that_step(job: Jobs, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """Checkpoints only at the end and at signals: no step is done again."""
    for attempt, after in enumerate((4, 8)):
        pid = job.start(tmp_path, mode="single", attempt=attempt, every=1000)
        wait_for_steps(tmp_path, attempt, after, pid)
        os.kill(pid, signal.SIGTERM)
        assert job.wait() == 143, (tmp_path / "output").read_text()
        newest = checkpoint.checkpoints(tmp_path / "checkpoints")[-1].info
        assert newest is not None
        assert newest.reason == "SIGTERM"
    job.start(tmp_path, mode="single", attempt=2, every=1000)
    assert job.wait() == 0, (tmp_path / "output").read_text()
    assert_as_undisturbed(tmp_path, undisturbed["single"], [])
    lines = sum(path.read_text().count("\n") for path in tmp_path.glob("seen-*"))
    assert lines == STEPS["single"], "steps were done twice"
