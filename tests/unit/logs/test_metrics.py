"""Recorders: what comes out of what was logged, for any number of ranks, without a process."""

from __future__ import annotations

import gc
import math
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.simulated_group import RankOfGroup, SimulatedGroup

from trainloop._metrics import EpochEnd, LateRead, LogCall, Recorder, exact_sum, named_losses, rows_of
from trainloop._metrics.exchange import Gathered
from trainloop._metrics.reducing import Options, step_values
from trainloop.errors import ConfigurationError

PLAIN = LogCall()


def log(recorder: Recorder, name: str, value: Any, batch_size: Any = None, **asked: Any) -> None:
    recorder.log(name, value, LogCall(**asked), batch_size)


def in_ranks(world_size: int, work: Callable[[Recorder, int], Any], **arguments: Any) -> tuple[list[Any], int]:
    """Results of ``work(recorder, rank)`` by rank, and the number of exchanges; ranks are threads here."""
    group = SimulatedGroup(world_size)

    def on_rank(of: RankOfGroup) -> Any:
        return work(Recorder(rank=of.get_rank(), exchange=Gathered(of.gather_object), **arguments), of.get_rank())

    return group.run(on_rank), group.exchanges


# -- sums --------------------------------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)


@given(st.lists(finite, max_size=30), st.integers(0, 30))
def test_exact_sum_is_exact_and_adds_up(values: list[float], cut: int) -> None:
    whole = exact_sum(values)
    assert sum(map(Fraction, whole)) == sum(map(Fraction, values))
    assert (whole[0] if whole else 0.0) == math.fsum(values)
    parts = exact_sum([*exact_sum(values[cut:]), *exact_sum(values[:cut])])
    assert sum(map(Fraction, parts)) == sum(map(Fraction, values))


@pytest.mark.parametrize(
    "values, expected",
    [
        ([], []),
        ([0.0, -0.0], []),
        ([math.inf, 1.0], [math.inf]),
        ([math.nan, 1.0], [math.nan]),
        ([math.inf, -math.inf], [math.nan]),
        ([1e308, 1e308], [math.inf]),
        ([1e16, 1.0, 1.0, 1.0], [1.0000000000000004e16, -1.0]),
    ],
    ids=str,
)
def test_exact_sum_of(values: list[float], expected: list[float]) -> None:
    assert exact_sum(values) == pytest.approx(expected, nan_ok=True, rel=0)


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reduce, step_value, epoch_value",
    [("mean", (1 * 10 + 4 * 30) / 40, (1 * 10 + 4 * 30 + 7 * 20) / 60), ("sum", 5, 12), ("min", 1, 1), ("max", 4, 7)],
)
def test_reduce(reduce: str, step_value: float, epoch_value: float) -> None:
    recorder = Recorder()
    for step, value, size in [(1, 1.0, 10), (1, torch.tensor(4.0), 30), (2, 7, 20)]:  # two micro-batches in step 1
        recorder.step, recorder.batch_size = step, size
        log(recorder, "x", value, reduce=reduce)
    end = recorder.finish_epoch()
    assert rows_of(end.steps) == [(1, {"x": step_value}), (2, {"x": 7.0})]
    assert end.metrics == {"x": epoch_value}
    assert recorder.finish_epoch() == EpochEnd({}, {}, {}, [None])  # empty again


@pytest.mark.parametrize(
    "value, expected",
    [
        (3, 3.0),
        (True, 1.0),
        (0.1, 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(2**40), 2.0**40),
        (Fraction(1, 4), 0.25),
        (torch.tensor(0.1, dtype=torch.float64), 0.1),
        (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
        (torch.tensor(2**40), 2.0**40),
        (torch.tensor(True), 1.0),
        (torch.tensor([[3.0]]), 3.0),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (torch.tensor(2.0, requires_grad=True) * 3, 6.0),
        (torch.tensor(math.inf), math.inf),
    ],
    ids=lambda value: repr(value).replace("\n", ""),
)
def test_values_are_taken_whole(value: Any, expected: float) -> None:
    recorder = Recorder()
    recorder.step = 1
    log(recorder, "x", value)
    end = recorder.finish_epoch()
    assert end.metrics == {"x": expected}
    assert end.steps["x"][1].tolist() == [expected]


@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max"])
def test_nan_is_never_lost(reduce: str) -> None:
    for values in ([1.0, math.nan, 2.0], [math.nan, 1.0, 2.0]):
        recorder = Recorder()
        for step, value in enumerate(values, start=1):
            recorder.step = step
            log(recorder, "x", value, reduce=reduce)
        end = recorder.finish_epoch()
        assert math.isnan(end.metrics["x"])
        assert end.steps["x"][1].tolist() == pytest.approx(values, nan_ok=True)


def test_weight_is_the_batch_or_what_is_given() -> None:
    recorder = Recorder()
    recorder.step, recorder.batch_size = 1, 8
    log(recorder, "batch", 1.0)
    log(recorder, "given", 1.0, 2)
    log(recorder, "tokens", 1.0, torch.tensor(2))
    log(recorder, "numpy", 1.0, np.int64(2))
    recorder.step, recorder.batch_size = 2, 24
    for name in ("batch", "given", "tokens", "numpy"):
        log(recorder, name, 2.0)
    metrics = recorder.finish_epoch().metrics
    assert metrics["batch"] == (8 + 48) / 32
    assert metrics["given"] == metrics["tokens"] == metrics["numpy"] == (2 + 48) / 26


def test_weight_zero_does_not_count_even_for_nan() -> None:
    recorder = Recorder()
    recorder.step = 1
    log(recorder, "x", math.nan, 0)
    log(recorder, "x", 3.0, 5)
    log(recorder, "nothing", torch.tensor(math.nan), torch.tensor(0))
    end = recorder.finish_epoch()
    assert end.metrics["x"] == 3.0
    assert math.isnan(end.metrics["nothing"])
    assert end.steps["x"][1].tolist() == [3.0]


def test_a_value_is_what_it_was_when_logged() -> None:
    """The value counts as it was, whatever is done to the tensor later: a loss that grows by +=, a reused buffer."""
    recorder = Recorder()
    recorder.step = 1
    loss = torch.tensor(2.0, requires_grad=True) * 1
    buffer = torch.tensor(5.0)
    log(recorder, "loss_before", loss)
    log(recorder, "buffer", buffer)
    log(recorder, "alias", loss.detach())
    loss += 1
    buffer.zero_()
    recorder.step = 2
    log(recorder, "buffer", buffer)
    end = recorder.finish_epoch()
    assert end.metrics["loss_before"] == end.metrics["alias"] == 2.0
    assert end.steps["buffer"][1].tolist() == [5.0, 0.0]


def test_no_graph_is_kept() -> None:
    recorder = Recorder()
    weight = torch.ones(3, requires_grad=True)
    activation = torch.exp(weight)
    alive: list[bool] = []

    class Canary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.canary = Watched()
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad.expand(3)

    class Watched:
        def __del__(self) -> None:
            alive.append(False)

    value = Canary.apply(activation)
    log(recorder, "x", value)
    del value
    gc.collect()
    assert alive == [False]


def test_slots_are_used_again() -> None:
    """No object is left of what was read, however much was logged."""
    recorder = Recorder()
    value = torch.tensor(1.0)

    def some_steps(first: int) -> None:
        for step in range(first, first + 300):
            recorder.step = step
            for name in "abcd":
                log(recorder, name, value)
        recorder.exchange_steps()

    some_steps(1)
    gc.collect()
    before = len(gc.get_objects())
    for i in range(1, 6):
        some_steps(300 * i + 1)
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert recorder.finish_epoch().metrics == dict.fromkeys("abcd", 1.0)


def test_inference_mode_leaves_slots_usable() -> None:
    recorder = Recorder()
    with torch.inference_mode():
        log(recorder, "x", torch.tensor(1.0))
    log(recorder, "x", torch.tensor(3.0))
    assert recorder.finish_epoch().metrics == {"x": 2.0}


@given(st.lists(st.tuples(st.integers(1, 6), finite, st.integers(1, 64), st.booleans()), min_size=1, max_size=40))
def test_flush_times_do_not_show(entries: list[tuple[int, float, int, bool]]) -> None:
    entries.sort(key=lambda entry: entry[0])
    results = []
    for flushes in (False, True):
        recorder, steps = Recorder(), []
        for step, value, weight, flush in entries:
            recorder.step = step
            log(recorder, "mean", value, weight)
            log(recorder, "sum", torch.tensor(value, dtype=torch.float64), reduce="sum")
            if flush and flushes:
                recorder.compact()
        end = recorder.finish_epoch()
        steps += rows_of(end.steps)
        results.append((steps, end.metrics))
    assert results[0] == results[1]
    metrics = results[0][1]
    products = [value * weight for _, value, weight, _ in entries]
    if all(map(math.isfinite, products)):
        assert metrics["mean"] == math.fsum(products) / math.fsum(weight for _, _, weight, _ in entries)
    assert metrics["sum"] == math.fsum(value for _, value, _, _ in entries)


def test_on_step_and_on_epoch() -> None:
    recorder = Recorder()
    recorder.step = 1
    log(recorder, "both", 1.0)
    log(recorder, "step", 1.0, on_epoch=False)
    log(recorder, "epoch", 1.0, on_step=False)
    log(recorder, "neither", 1.0, on_step=False, on_epoch=False)
    end = recorder.finish_epoch()
    assert list(end.steps) == ["both", "step"]
    assert list(end.metrics) == ["both", "epoch"]


def test_evaluation_prefixes_names_and_keeps_no_steps() -> None:
    recorder = Recorder(on_step=False, prefix="val_")
    recorder.step = 1
    log(recorder, "accuracy", 1.0)
    log(recorder, "val_f1", 0.5, on_step=True)
    recorder.add_loss(torch.tensor(2.0), 4)
    end = recorder.finish_epoch()
    assert end.metrics == {"val_accuracy": 1.0, "val_f1": 0.5}
    assert end.losses == {"": 2.0}
    assert end.steps == {}
    assert named_losses(end.losses, "val_") == {"val_loss": 2.0}


def test_loss_and_its_parts() -> None:
    from trainloop import MultiLoss

    recorder = Recorder()
    for step, (g, d, size) in enumerate([(1.0, 2.0, 10), (4.0, 8.0, 30)], start=1):
        recorder.step = step
        whole = recorder.add_loss(MultiLoss({"g": torch.tensor(g), "d": torch.tensor([d])}), torch.tensor(size))
        assert whole.shape == ()
        assert whole.item() == g + d
    end = recorder.finish_epoch()
    assert named_losses(end.losses) == {"loss": (3 * 10 + 12 * 30) / 40, "loss_g": 130 / 40, "loss_d": 260 / 40}
    assert list(end.steps) == ["loss", "loss_g", "loss_d"]


def test_numbers_may_name_the_parts_of_a_loss() -> None:
    from trainloop import MultiLoss

    recorder = Recorder()
    recorder.step = 1
    recorder.add_loss(MultiLoss({0: torch.tensor(1.0), 1: torch.tensor(2.0)}), 10)  # type: ignore[dict-item]
    assert named_losses(recorder.finish_epoch().losses) == {"loss": 3.0, "loss_0": 1.0, "loss_1": 2.0}


def test_bar_shows_the_newest_value() -> None:
    recorder = Recorder()
    log(recorder, "shown", torch.tensor(1.0), prog_bar=True)
    log(recorder, "hidden", torch.tensor(1.0))
    assert recorder.bar_values() == {"shown": 1.0}
    log(recorder, "shown", torch.tensor(2.0), prog_bar=True)
    assert LateRead()(recorder.bar_values()) == {"shown": 2.0}
    recorder.compact()
    log(recorder, "hidden", torch.tensor(7.0))  # takes the slot that held the shown one
    assert recorder.bar_values() == {"shown": 2.0}


def test_threads_may_log_the_same_metrics() -> None:
    """As replicas on several GPUs do: first calls at the same time, too."""
    for _ in range(20):
        recorder = Recorder()
        start = threading.Barrier(4)

        def work(i: int, recorder: Recorder = recorder, start: threading.Barrier = start) -> None:
            start.wait()
            for k in range(100):
                log(recorder, "x", torch.tensor(float(i)))
                log(recorder, f"y{k % 3}", torch.tensor(1.0), reduce="sum")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        metrics = recorder.finish_epoch().metrics
        assert metrics["x"] == 1.5
        assert metrics["y0"] + metrics["y1"] + metrics["y2"] == 400


# -- ranks -------------------------------------------------------------------------------------------------------------

entries_of_a_rank = st.lists(
    st.tuples(
        st.sampled_from(["mean", "sum", "min", "max"]),
        st.integers(1, 5),
        st.floats(-1e6, 1e6, width=32),
        st.integers(0, 9),
        st.booleans(),
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(st.lists(entries_of_a_rank, min_size=2, max_size=3))
def test_ranks_may_log_anything(ranks: list[list[tuple[str, int, float, int, bool]]]) -> None:
    """Other metrics, in another order, or none: the values are those of one process that logged it all."""

    def work(recorder: Recorder, rank: int) -> tuple[list[Any], EpochEnd]:
        half: list[Any] = []
        for reduce, step, value, weight, compacts in sorted(ranks[rank], key=lambda entry: entry[1]):
            recorder.step = step
            log(recorder, f"by_{reduce}", torch.tensor(value), weight, reduce=reduce)
            if compacts:
                recorder.compact()
        recorder.step = 5
        half += rows_of(recorder.exchange_steps())
        return half, recorder.finish_epoch()

    results, exchanges = in_ranks(len(ranks), work)
    assert exchanges == 2  # one for the steps, one for the epoch, whatever was logged
    alone = Recorder()
    for entries in ranks:
        for reduce, step, value, weight, _ in entries:
            alone.step = step
            log(alone, f"by_{reduce}", value, weight, reduce=reduce)
    expected = alone.finish_epoch()
    for rows, end in results:
        assert end.steps == {}
        assert end.metrics == pytest.approx(expected.metrics, rel=0, nan_ok=True)  # to the last bit
        expected_rows = rows_of(expected.steps)
        assert [step for step, _ in rows] == [step for step, _ in expected_rows]
        for (_, ours), (_, theirs) in zip(rows, expected_rows, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-9, nan_ok=True)
    assert len({repr(result) for result in results}) == 1  # the same bits on every rank


def test_nothing_is_sent_without_a_step() -> None:
    def work(recorder: Recorder, rank: int) -> Any:
        recorder.step = 1
        log(recorder, "x", 1.0)
        sizes = [len(recorder.exchange_steps())]
        log(recorder, "x", 3.0)
        sizes += [len(recorder.exchange_steps()), len(recorder.finish_epoch().steps), len(recorder.exchange_steps())]
        return sizes

    results, exchanges = in_ranks(2, work)
    assert exchanges == 2
    assert results == [[1, 0, 1, 0]] * 2


def test_a_rank_without_batches_learns_the_losses() -> None:
    from trainloop import MultiLoss

    def work(recorder: Recorder, rank: int) -> Any:
        if rank == 1:
            recorder.add_loss(MultiLoss({"a": torch.tensor(1.0), "b": torch.tensor(2.0)}), 3)
        return recorder.finish_epoch().losses

    results, _ = in_ranks(2, work)
    assert results == [{"": 3.0, "a": 1.0, "b": 2.0}] * 2


# -- a half-done epoch in a checkpoint ---------------------------------------------------------------------------------


def test_a_loaded_epoch_goes_on() -> None:
    whole, first = Recorder(), Recorder()
    values = [0.1, 0.2, 0.3, 0.4]
    for step, value in enumerate(values, start=1):
        for recorder in [whole, first] if step <= 2 else [whole]:
            recorder.step = step
            log(recorder, "x", value, step)
            log(recorder, "least", value, reduce="min")
            recorder.add_loss(torch.tensor(value), step)
    first.exchange_steps()
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = Recorder()
    second.load_state_dict(state)
    for step, value in enumerate(values[2:], start=3):
        second.step = step
        log(second, "x", value, step)
        log(second, "least", value, reduce="min")
        second.add_loss(torch.tensor(value), step)
    ours, theirs = second.finish_epoch(), whole.finish_epoch()
    assert (ours.losses, ours.metrics) == (theirs.losses, theirs.metrics)
    assert rows_of(ours.steps) == rows_of(theirs.steps)[2:]


def test_one_process_takes_over_from_two() -> None:
    def work(recorder: Recorder, rank: int) -> Any:
        recorder.step = 1
        log(recorder, "x", float(rank), rank + 1)
        log(recorder, "own", float(rank), sync_dist=False)
        recorder.exchange_steps()
        return recorder.state_dict()

    (own, other), _ = in_ranks(2, work)
    recorder = Recorder()
    recorder.load_state_dict(own, [other])
    assert recorder.finish_epoch().metrics == {"x": 2 / 3, "own": 0.0}


def test_a_metric_of_another_kind_starts_anew() -> None:
    first = Recorder()
    log(first, "x", 5.0, reduce="max")
    first.compact()
    second = Recorder()
    second.load_state_dict(first.state_dict())
    log(second, "x", 1.0)
    assert second.finish_epoch().metrics == {"x": 1.0}


# -- errors ------------------------------------------------------------------------------------------------------------


class Averages:
    """Has the methods of a torchmetrics metric."""

    def update(self, value: float) -> None: ...

    def compute(self) -> None: ...


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("x", torch.ones(3)), r"log\('x', ...\): the value has shape \(3,\), but must be a scalar. Reduce it first"),
        (("x", torch.ones(0)), r"shape \(0,\), but must be a scalar"),
        (("x", torch.tensor(1j)), r"log\('x', ...\): the value is complex. Log its real part"),
        (("x", "0.5"), r"log\('x', '0.5'\): the value is a str, but must be a number or a 0-d tensor."),
        (("x", None), r"log\('x', None\): the value is a NoneType"),
        (("x", [1.0]), r"the value is a list, but must be a number or a 0-d tensor.$"),
        (("x", {"a": 1.0}), r"the value is a dict, .* Log each of its values under its own name.$"),
        (("x", Averages()), r"the value is a Averages, .* the result of its compute\(\) once at the end"),
        (("", 1.0), r"log\('', ...\): the name must be a non-empty string."),
        ((3, 1.0), r"log\(3, ...\): the name must be"),
        ((["x"], 1.0), r"log\(\['x'\], ...\): the name must be"),
        (("x", 1.0, -1), r"log\('x', batch_size=-1\): must be a number of samples, 0 or more."),
        (("x", 1.0, float("inf")), r"log\('x', batch_size=inf\): must be a number of samples"),
        (("x", 1.0, "many"), r"log\('x', batch_size='many'\): must be a number"),
        (("x", 1.0, torch.ones(2)), r"log\('x', batch_size=tensor\(\[1., 1.\]\)\): must be a number"),
        (("loss", 1.0), r"log\('loss', ...\): the loop records 'loss' itself. Choose another name."),
        (("val_loss", 1.0), r"the loop records 'val_loss' itself"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refused(arguments: Any, message: str) -> None:
    recorder = Recorder(reserved=("val_loss",))
    with pytest.raises(ConfigurationError, match=message):
        log(recorder, *arguments)


def test_a_flag_that_is_only_truthy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"log\('x', on_step='no'\): must be True or False"):
        log(Recorder(), "x", 1.0, on_step="no")


def test_a_value_may_turn_wrong_later() -> None:
    recorder = Recorder()
    log(recorder, "x", torch.tensor(1.0))
    with pytest.raises(ConfigurationError, match=r"log\('x', ...\): the value has shape \(2, 2\)"):
        log(recorder, "x", torch.ones(2, 2))


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"log\('x', reduce='median'\): must be 'mean', 'sum', 'min' or 'max'."
    ):
        log(Recorder(), "x", 1.0, reduce="median")


def test_options_may_not_change() -> None:
    recorder = Recorder()
    log(recorder, "x", 1.0, prog_bar=True)
    with pytest.raises(
        ConfigurationError,
        match=r"log\('x', reduce='sum', prog_bar=False\): this metric was logged with reduce='mean', prog_bar=True "
        "before. Use the same options in all calls with this name.",
    ):
        log(recorder, "x", 1.0, reduce="sum")


def test_parts_of_the_loss_are_the_loops_own() -> None:
    from trainloop import MultiLoss

    recorder = Recorder(prefix="val_", on_step=False)
    with pytest.raises(ConfigurationError, match="the loop records 'loss' itself"):
        log(recorder, "loss", 1.0)
    log(recorder, "loss_g", 1.0)
    with pytest.raises(ConfigurationError, match="the loop records 'val_loss_g' itself"):
        recorder.add_loss(MultiLoss({"g": torch.tensor(1.0)}), 1)
    recorder.add_loss(MultiLoss({"d": torch.tensor(1.0)}), 1)
    with pytest.raises(ConfigurationError, match="the loop records 'val_loss_d' itself"):
        log(recorder, "val_loss_d", 1.0)


@pytest.mark.gpu
def test_on_cuda_nothing_waits_until_it_is_read() -> None:
    recorder = Recorder()
    values = torch.arange(4.0, device="cuda", requires_grad=True)
    tokens = torch.tensor(3, device="cuda")
    recorder.log("warm", values[0], PLAIN)  # the first slots are made here
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(4):
            recorder.step = i + 1
            recorder.log("x", values[i], PLAIN, tokens)
            recorder.add_loss(values[i] * 2, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    end = recorder.finish_epoch()
    assert end.metrics["x"] == 1.5
    assert end.losses[""] == 3.0
    assert end.steps["x"][1].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max"])
def test_a_rank_alone_gets_the_bits_that_two_ranks_get(reduce: str) -> None:
    """One value in each step is the result; with a second rank without values, the same is computed."""
    options = Options(True, True, reduce, True, None)
    steps, values = np.array([3, 4, 7]), np.array([0.1, math.nan, -2.5])
    weights = np.array([3.0, 5.0, 1.0])
    nothing = (options, np.array([], np.int64), np.array([]), np.array([]))
    alone = step_values({"a": [(options, steps, values, weights)]})["a"]
    both = step_values({"a": [(options, steps, values, weights), nothing]})["a"]
    for mine, theirs in zip(alone, both, strict=True):
        assert mine.tobytes() == theirs.tobytes()


def test_a_value_without_weight_is_no_result() -> None:
    options = Options(True, True, "mean", True, None)
    entry = options, np.array([1, 2]), np.array([5.0, 6.0]), np.array([1.0, 0.0])
    steps, values = step_values({"a": [entry]})["a"]
    assert steps.tolist() == [1, 2]
    assert values[0] == 5.0
    assert math.isnan(values[1])
