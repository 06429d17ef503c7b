"""Ranks exchange logs by sums with the same results as by gathering, in bytes that don't grow with their number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.simulated_group import RankOfGroup, SimulatedGroup

from trainloop._metrics import LogCall, Recorder, rows_of
from trainloop._metrics.exchange import Gathered, Summed
from trainloop.errors import ConfigurationError


def log(recorder: Recorder, name: str, value: Any, batch_size: Any = None, **asked: Any) -> None:
    recorder.log(name, value, LogCall(**asked), batch_size)


# -- the same as by gathering ------------------------------------------------------------------------------------------

number = st.one_of(
    st.floats(-1e6, 1e6, width=32),
    st.floats(-1e250, 1e250),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0.0]),
)
entries_of_a_rank = st.lists(
    st.tuples(
        st.sampled_from(["mean", "sum", "min", "max"]),
        st.sampled_from(["a", "b"]),
        st.integers(1, 5),
        number,
        st.sampled_from([0, 1, 2, 7, 0.1, 2**40]),
    ),
    max_size=10,
)


def both_ways(world_size: int, work: Callable[[Recorder, int], Any]) -> tuple[list[Any], list[Any]]:
    def by(kind: Callable[[RankOfGroup], Any]) -> list[Any]:
        return SimulatedGroup(world_size).run(
            lambda rank: work(Recorder(rank=rank.get_rank(), exchange=kind(rank)), rank.get_rank())
        )

    return by(lambda rank: Gathered(rank.gather_object)), by(Summed)


def assert_close(reduced: list[Any], gathered: list[Any], greatest: float) -> None:
    """Step by step; a sum of steps may have been rounded at each rank."""
    assert [step for step, _ in reduced] == [step for step, _ in gathered]
    for (_, ours), (_, theirs) in zip(reduced, gathered, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            rounding = 0.0 if name.startswith(("min", "max")) else 1e-13 * greatest
            assert value == pytest.approx(theirs[name], rel=0, abs=rounding, nan_ok=True)


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_values_of_a_step_come_when_it_is_finished(reduce: Any) -> None:
    """Also if a hook asks within the first step of a fit, such as early stopping every n steps in a second fit."""

    def work(recorder: Recorder, rank: int) -> Any:
        recorder.step = 5
        log(recorder, "x", float(rank), reduce=reduce)
        within = dict(recorder.exchange_steps(finished=4))
        log(recorder, "x", float(rank), reduce=reduce)
        return within, recorder.exchange_steps(finished=5)["x"][1].tolist()

    expected = {"mean": 0.5, "max": 1.0}[reduce]
    for found in both_ways(2, work):
        assert found == [({}, [expected])] * 2


@pytest.mark.long
@settings(max_examples=60)
@given(st.lists(entries_of_a_rank, min_size=2, max_size=4))
def test_sums_tell_the_same_as_gathering(ranks: list[list[tuple[str, str, int, float, float]]]) -> None:
    def work(recorder: Recorder, rank: int) -> Any:
        seen: list[Any] = []
        for half in (0, 1):
            for reduce, name, step, value, weight in sorted(ranks[rank], key=lambda entry: entry[2]):
                if (step > 3) == half:
                    recorder.step = step
                    log(recorder, f"{reduce}_{name}", value, weight, reduce=reduce)
            recorder.step = 3 + 2 * half
            if not half:
                seen += rows_of(recorder.exchange_steps())
        end = recorder.finish_epoch()
        return seen + rows_of(end.steps), end.losses, end.metrics

    gathered, reduced = both_ways(len(ranks), work)
    assert len({repr(result) for result in reduced}) == 1  # the same bits on every rank
    (steps, losses, metrics), (steps_by_sums, losses_by_sums, metrics_by_sums) = gathered[0], reduced[0]
    values = [abs(entry[3]) for entries in ranks for entry in entries if math.isfinite(entry[3])]
    assert_close(steps_by_sums, steps, max(values, default=0.0))
    assert losses_by_sums == losses
    greatest = max(values, default=0.0) * max(len(values), 1)
    for name, value in metrics.items():
        rounding = 0.0 if name.startswith(("min", "max")) else 1e-13 * greatest
        assert metrics_by_sums[name] == pytest.approx(value, rel=1e-12, abs=rounding, nan_ok=True)


def test_what_is_not_shared_stays_on_its_rank() -> None:
    def work(recorder: Recorder, rank: int) -> Any:
        recorder.step = 1
        log(recorder, "own", float(rank), sync_dist=False)
        log(recorder, "main", float(rank + 1), rank_zero_only=True)
        log(recorder, "all", float(rank))
        end = recorder.finish_epoch(attachment=("from", rank))
        return end.metrics, rows_of(end.steps), end.attachments, recorder.rank_zero_only_names

    gathered, reduced = both_ways(2, work)
    assert reduced == gathered
    assert [metrics for metrics, *_ in reduced] == [{"all": 0.5, "own": 0.0, "main": 1.0}, {"all": 0.5, "own": 1.0}]
    assert [rows for _, rows, *_ in reduced] == [[(1, metrics)] for metrics, *_ in reduced]
    assert all(attachments == [("from", 0), ("from", 1)] for _, _, attachments, _ in reduced)
    assert all(names == {"main"} for *_, names in reduced)


def test_what_is_logged_late_joins_its_epoch() -> None:
    def work(recorder: Recorder, rank: int) -> Any:
        recorder.step = 1
        log(recorder, "x", 0.1 * rank, 3)
        first = recorder.finish_epoch()
        recorder.between_steps(1)
        if rank == 1:
            log(recorder, "x", 0.7, 2)
            log(recorder, "new", 1.0)
        late = recorder.finish_epoch(late=True)
        recorder.step = 2
        log(recorder, "x", 5.0)
        return first.metrics, late.metrics, recorder.finish_epoch().metrics

    gathered, reduced = both_ways(3, work)
    assert reduced == gathered
    assert reduced[0][1]["new"] == 1.0


def test_names_in_another_order_or_of_one_rank_have_one_order() -> None:
    def work(recorder: Recorder, rank: int) -> Any:
        names = ["a", "b", "c"] if rank == 0 else ["d", "c", "a"]
        for step in (1, 2):
            recorder.step = step
            for name in names[: step + 1]:
                log(recorder, name, float(rank))
            recorder.exchange_steps()
        return list(recorder.finish_epoch().metrics)

    gathered, reduced = both_ways(3, work)
    assert reduced == gathered == [["a", "b", "c", "d"]] * 3


def test_ranks_must_agree_on_options() -> None:
    def work(recorder: Recorder, rank: int) -> str:
        recorder.step = 1
        log(recorder, "x", 1.0, reduce="mean" if rank == 0 else "sum")
        with pytest.raises(ConfigurationError) as error:
            recorder.finish_epoch()
        return str(error.value)

    gathered, reduced = both_ways(3, work)
    expected = "log('x', ...): rank 0 logs this metric with reduce='mean', but rank 1 with reduce='sum'. "
    assert reduced == gathered == [expected + "Use the same options in all calls with this name."] * 3


# -- the cost ----------------------------------------------------------------------------------------------------------


def flushes(world_size: int, metrics: int) -> tuple[SimulatedGroup, list[Any]]:
    group = SimulatedGroup(world_size)

    def work(rank: RankOfGroup) -> Any:
        recorder = Recorder(rank=rank.get_rank(), exchange=Summed(rank))
        rows: list[Any] = []
        sent = []
        for flush in range(2):
            for step in range(8 * flush + 1, 8 * flush + 9):
                recorder.step, recorder.batch_size = step, 32
                for i in range(metrics):
                    log(recorder, f"metric {i}", 1.0 + step / 8 + rank.get_rank())
            rows += rows_of(recorder.exchange_steps())
            sent.append(group.bytes_of_reductions[rank.get_rank()])
        inserted = recorder.finish_epoch({"same on all": [(0, 1.5)]})
        return rows, inserted.metrics, inserted.attachments, sent

    return group, group.run(work)


@pytest.mark.parametrize("most", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_bytes_by_the_number_of_metrics_not_of_ranks(most: int) -> None:
    sent = {}
    for world_size, metrics in ((16, 3), (16, 6), (most, 3)):
        group, results = flushes(world_size, metrics)
        assert group.bytes_of_objects == [0] * world_size  # names were the same, so nobody had to tell them
        rows, epoch, attachments, after_flush = results[0]
        assert all(result[:3] == (rows, epoch, attachments) for result in results)
        assert [row["metric 0"] for _, row in rows] == [1.0 + s / 8 + (world_size - 1) / 2 for s in range(1, 17)]
        assert attachments == [{"same on all": [(0, 1.5)]}]
        sent[world_size, metrics] = after_flush[1] - after_flush[0]
        assert len(set(group.bytes_of_reductions)) == 1
    assert sent[most, 3] == sent[16, 3]
    assert sent[16, 6] <= 2 * sent[16, 3]
