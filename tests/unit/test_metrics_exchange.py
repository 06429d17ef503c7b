"""Ranks exchange logs, whatever each of them has logged; the group is simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulated_group import SimulatedGroup

from trainloop._metrics import LogCall, Recorder, rows_of
from trainloop.errors import ConfigurationError


def log(recorder: Recorder, name: str, value: Any, batch_size: Any = None, **asked: Any) -> None:
    recorder.log(name, value, LogCall(**asked), batch_size)


def on_ranks(world_size: int, work: Callable[[Recorder, int], Any]) -> list[Any]:
    return SimulatedGroup(world_size).run(
        lambda rank: work(Recorder(rank=rank.get_rank(), gather=rank.gather_object), rank.get_rank())
    )


def test_what_is_not_shared_stays_on_its_rank() -> None:
    def work(recorder: Recorder, rank: int) -> Any:
        recorder.step = 1
        log(recorder, "own", float(rank), sync_dist=False)
        log(recorder, "main", float(rank + 1), rank_zero_only=True)
        log(recorder, "all", float(rank))
        end = recorder.finish_epoch(attachment=("from", rank))
        return end.metrics, rows_of(end.steps), end.attachments, recorder.rank_zero_only_names

    results = on_ranks(3, work)
    assert [metrics["own"] for metrics, *_ in results] == [0.0, 1.0, 2.0]
    assert {metrics["all"] for metrics, *_ in results} == {1.0}
    assert ["main" in metrics for metrics, *_ in results] == [True, False, False]
    assert all(attachments == [("from", 0), ("from", 1), ("from", 2)] for _, _, attachments, _ in results)
    assert all(names == {"main"} for *_, names in results)


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

    results = on_ranks(3, work)
    assert results[0] == results[1] == results[2]
    first, late, after = results[0]
    assert first["x"] == pytest.approx(0.1)
    assert late == {"x": pytest.approx((3 * 0.3 + 2 * 0.7) / 11), "new": 1.0}
    assert after == {"x": 5.0}


def test_names_in_another_order_or_of_one_rank_have_one_order() -> None:
    def work(recorder: Recorder, rank: int) -> Any:
        names = ["a", "b", "c"] if rank == 0 else ["d", "c", "a"]
        for step in (1, 2):
            recorder.step = step
            for name in names[: step + 1]:
                log(recorder, name, float(rank))
            recorder.exchange_steps()
        return list(recorder.finish_epoch().metrics)

    assert on_ranks(3, work) == [["a", "b", "c", "d"]] * 3


def test_ranks_must_agree_on_options() -> None:
    def work(recorder: Recorder, rank: int) -> str:
        recorder.step = 1
        log(recorder, "x", 1.0, reduce="mean" if rank == 0 else "sum")
        with pytest.raises(ConfigurationError) as error:
            recorder.finish_epoch()
        return str(error.value)

    for message in on_ranks(3, work):
        assert "rank 0 logs it with reduce='mean', rank 1 with reduce='sum'" in message
