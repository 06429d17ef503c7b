"""Ranks exchange logs by sums with the same results as by gathering, in bytes that don't grow with their number."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_group import RankOfGroup, SimulatedGroup

from trainloop.errors import ConfigurationError
from trainloop.metrics import Asked, EpochEnd, Recorder, exact, rows_of
from trainloop.metrics.exchange import Gathered, Reduced

finite = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)


def log(recorder: Recorder, name: str, value: Any, batch_size: Any = None, **asked: Any) -> None:
    recorder.log(name, value, Asked(**asked), batch_size)


# -- sums in limbs -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(finite, st.integers(0, 2)), max_size=8), min_size=1, max_size=4))
def test_limbs_add_up_to_the_rounded_exact_sum(ranks: list[list[tuple[float, int]]]) -> None:
    parts = [
        (np.array([value for value, _ in entries], np.float64), np.array([place for _, place in entries], np.int64))
        for entries in ranks
    ]
    negative_low, high = np.max([exact.span(values) for values, _ in parts], axis=0).tolist()
    limbs = sum(exact.to_limbs(values, places, 3, -negative_low, high) for values, places in parts)
    assert isinstance(limbs, np.ndarray)
    found = exact.from_limbs(limbs, -negative_low)
    for place in range(3):
        values = [value for entries in ranks for value, where in entries if where == place]
        assert found[place] == math.fsum(values)
        exactly = exact.expansion(limbs[:, place].tolist(), -negative_low)
        assert sum(map(Fraction, exactly)) == sum(map(Fraction, values))


@pytest.mark.parametrize(
    "values",
    [
        (1.0, 2**-53),  # halfway: to the even one
        (1.0, 2**-53, 2**-1074),  # a little more than halfway
        (1.0, 2**-52, 2**-53),
        (1e16, 1.0, -1e16),
        (5e-324, 5e-324),
        (1.7e308, -1.7e308, 3.0),
        (-(2.0**53), -1.0),
        (0.0, -0.0),
    ],
    ids=str,
)
def test_rounding_of_limbs(values: tuple[float, ...]) -> None:
    array, places = np.array(values), np.zeros(len(values), np.int64)
    negative_low, high = exact.span(array)
    limbs = exact.to_limbs(array, places, 1, -negative_low, high)
    assert exact.from_limbs(limbs, -negative_low).tolist() == [math.fsum(values)]


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

    return by(lambda rank: Gathered(rank.gather_object)), by(Reduced)


def assert_close(reduced: list[Any], gathered: list[Any], greatest: float) -> None:
    """Step by step; a sum of steps may have been rounded at each rank."""
    assert [step for step, _ in reduced] == [step for step, _ in gathered]
    for (_, ours), (_, theirs) in zip(reduced, gathered, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            rounding = 0.0 if name.startswith(("min", "max")) else 1e-13 * greatest
            assert value == pytest.approx(theirs[name], rel=0, abs=rounding, nan_ok=True)


@settings(deadline=None, max_examples=60)
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
    assert metrics_by_sums == pytest.approx(metrics, rel=0, abs=0, nan_ok=True)  # to the last bit


def test_two_ranks_have_the_very_bits_of_gathering() -> None:
    """One value a step and rank: a sum of two floats is rounded once either way."""
    draw = np.random.default_rng(0)
    values = draw.standard_normal((2, 200)) * 10.0 ** draw.integers(-8, 8, (2, 200))

    def work(recorder: Recorder, rank: int) -> Any:
        for step, value in enumerate(values[rank].tolist(), start=1):
            recorder.step, recorder.batch_size = step, 7 + rank
            log(recorder, "mean", value)
            log(recorder, "sum", value, reduce="sum")
            if step % 3 == rank:
                log(recorder, "lone", value)  # as it was logged: value * weight / weight is not always the value
        end = recorder.finish_epoch()
        return rows_of(end.steps), end.metrics

    gathered, reduced = both_ways(2, work)
    assert reduced == gathered
    assert [row["lone"] for _, row in reduced[0][0] if "lone" in row] == [
        values[step % 3, step - 1] for step in range(1, 201) if step % 3 < 2
    ]


def test_what_is_not_shared_stays_on_its_rank() -> None:
    def work(recorder: Recorder, rank: int) -> Any:
        recorder.step = 1
        log(recorder, "own", float(rank), sync_dist=False)
        log(recorder, "main", float(rank + 1), rank_zero_only=True)
        log(recorder, "all", float(rank))
        end = recorder.finish_epoch(attachment=("from", rank))
        return end.metrics, rows_of(end.steps), end.attachments, recorder.rank_zero_only_names

    gathered, reduced = both_ways(3, work)
    assert reduced == gathered


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

    _, reduced = both_ways(3, work)
    assert reduced == [["a", "b", "d", "c"]] * 3


def test_ranks_must_agree_on_options_by_sums_too() -> None:
    def work(recorder: Recorder, rank: int) -> str:
        recorder.step = 1
        log(recorder, "x", 1.0, reduce="mean" if rank == 0 else "sum")
        with pytest.raises(ConfigurationError) as error:
            recorder.finish_epoch()
        return str(error.value)

    gathered, reduced = both_ways(3, work)
    assert reduced == gathered
    assert "rank 0 logs it with reduce='mean', rank 1 with reduce='sum'" in reduced[0]


def test_a_checkpoint_holds_the_whole_once() -> None:
    """Rank 0 keeps the sums over ranks, others what is their own; all of them go on, as one process would."""

    def work(recorder: Recorder, rank: int) -> Any:
        recorder.step = 1
        log(recorder, "x", 0.1 + rank, rank + 1)
        log(recorder, "least", float(-rank), reduce="min")
        log(recorder, "own", float(rank), sync_dist=False)
        if rank == 2:
            log(recorder, "of_2", 3.0)
        recorder.exchange_steps()
        return recorder.state_dict(once=True), recorder.finish_epoch()

    _, reduced = both_ways(3, work)
    states = [state for state, _ in reduced]
    assert [sorted(state) for state in states] == [["least", "of_2", "own", "x"], ["own"], ["own"]]
    expected: list[EpochEnd] = [end for _, end in reduced]

    def resumed(recorder: Recorder, rank: int) -> Any:
        recorder.load_state_dict(states[rank])
        return recorder.finish_epoch().metrics

    for way in both_ways(3, resumed):
        assert way == [end.metrics for end in expected]


# -- the cost ----------------------------------------------------------------------------------------------------------


def flushes(world_size: int, metrics: int) -> tuple[SimulatedGroup, list[Any]]:
    group = SimulatedGroup(world_size)

    def work(rank: RankOfGroup) -> Any:
        recorder = Recorder(rank=rank.get_rank(), exchange=Reduced(rank))
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
