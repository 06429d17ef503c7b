"""Mean losses and predictions over whole loaders, put together from any number of ranks."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trainloop import MultiLoss
from trainloop._metrics import Recorder
from trainloop.errors import ConfigurationError
from trainloop.parallel.replicas.gather import combine_losses, combine_predictions
from trainloop.train_loop.run.evaluating import evaluating, keep_all_batches, mean_loss, predictions
from trainloop.train_loop.run.losses import read_loss
from trainloop.train_loop.run.rows import join_rows, on_cpu

# -- mean loss ---------------------------------------------------------------------------------------------------------


def batches_of(values: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[int, Any, int]]:
    return iter([(i, value, size) for i, (value, size) in enumerate(zip(values, sizes, strict=True))])


def losses_of(values: Sequence[Any], sizes: Sequence[int], recorder: Recorder | None = None) -> dict[str, float]:
    recorder = recorder or Recorder(on_step=False)
    return mean_loss(
        batches_of(values, sizes), lambda value, sums: read_loss(value, 1, sums), recorder, "validation_loader"
    ).losses


def test_loss_is_the_mean_over_samples() -> None:
    assert losses_of([torch.tensor(1.0), torch.tensor([4.0])], [3, 1]) == {"": 7 / 4}


def test_loss_with_weights_is_the_mean_over_units() -> None:
    given = [(torch.tensor(1.0), torch.tensor(10)), (torch.tensor(4.0), 30)]
    assert losses_of(given, [3, 1]) == {"": 130 / 40}


def test_each_part_of_a_loss_has_its_mean() -> None:
    parts = [MultiLoss({"a": torch.tensor(v), "b": torch.tensor(2 * v)}) for v in (1.0, 4.0)]
    assert losses_of(parts, [3, 1]) == {"": 3 * 7 / 4, "a": 7 / 4, "b": 2 * 7 / 4}


def test_infinite_and_nan_losses_show() -> None:
    assert losses_of([torch.tensor(math.inf), torch.tensor(1.0)], [1, 1]) == {"": math.inf}
    assert math.isnan(losses_of([torch.tensor(math.inf), torch.tensor(-math.inf)], [1, 1])[""])


def test_a_long_loader_is_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(on_step=False)
    compacts: list[int] = []
    compact = recorder.compact
    monkeypatch.setattr(recorder, "compact", lambda: compacts.append(1) or compact())
    assert losses_of([torch.tensor(0.1, dtype=torch.float64)] * 300, [1] * 300, recorder) == {"": 0.1}
    assert len(compacts) == 3


def test_no_samples_is_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"validation_loader has no samples, so there is no loss to average. Give it data."
    ):
        losses_of([], [])


@pytest.mark.parametrize(
    "output, message",
    [
        (0.5, r"get_loss returned a float. Return a 0-d tensor, \(loss, weight\) or a MultiLoss."),
        (None, r"get_loss returned a NoneType. Return a 0-d tensor"),
        ((0.5, 3), r"get_loss returned a float as the loss. Return a 0-d tensor"),
        ((torch.tensor(1.0),), r"get_loss returned a tuple of length 1. Return a loss, or \(loss, weight\), where"),
        (
            (torch.tensor(1.0), torch.ones(4, 2)),
            r"with a tensor of shape \(4, 2\) as the weight. .* store it in an attr",
        ),
        ((torch.tensor(1.0), {"tokens": 3}), r"with a dict as the weight. The weight must be a number or a 0-d tensor"),
        ((torch.tensor(1.0), -1), r"get_loss returned a loss with the weight -1. A weight is .*: 0 or more"),
        ((torch.tensor(1.0), float("nan")), r"get_loss returned a loss with the weight nan. A weight is"),
        ((torch.tensor(1.0), torch.tensor(-2)), r"get_loss returned a loss with the weight -2. A weight is"),
        (
            (torch.tensor(1.0), torch.tensor(0.5, requires_grad=True)),
            r"requires gradients.* second loss, return the sum",
        ),
        (torch.ones(4), r"get_loss returned a tensor of shape \(4,\). Return a 0-d loss, for example its .mean\(\)."),
    ],
    ids=[
        "number",
        "nothing",
        "number and weight",
        "tuple",
        "output",
        "dict",
        "negative",
        "nan",
        "tensor",
        "second",
        "unreduced",
    ],
)
def test_what_is_no_loss(output: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_loss(output, 1)
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], torch.Tensor):
        with pytest.raises(ConfigurationError, match=message):
            combine_losses([output, output], [1, 1])  # in dp


# -- modes -------------------------------------------------------------------------------------------------------------


def test_evaluating_restores_each_module() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    model[1][1].eval()  # type: ignore[index]  # frozen by the user
    before = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="inside"), evaluating(model):
        assert not any(module.training for module in model.modules())
        model[1].train()  # Monte Carlo dropout
        assert not torch.is_grad_enabled()
        raise ValueError("inside")
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


class StaysInTraining(nn.Dropout):
    def train(self, mode: bool = True) -> StaysInTraining:
        return super().train()


class EvaluatesPartly(nn.Sequential):
    def eval(self) -> EvaluatesPartly:
        self[1].eval()
        return self


def with_own_train(model: nn.Sequential) -> nn.Sequential:
    model[0].train = lambda mode=True: model[0]  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(StaysInTraining(), nn.Dropout()),
        lambda: EvaluatesPartly(nn.Dropout(), nn.Dropout()),
        lambda: with_own_train(nn.Sequential(nn.Dropout(), nn.Dropout())),
        lambda: torch.jit.script(nn.Sequential(nn.Dropout(), nn.Dropout())),
    ],
    ids=["class's train", "class's eval", "module's train", "scripted"],
)
def test_evaluating_is_what_eval_is(make: Any) -> None:
    expected, model = make(), make()
    expected.eval()
    with evaluating(model):
        assert [part.training for part in model.modules()] == [part.training for part in expected.modules()]
    assert all(part.training for part in model.modules())


# -- rows --------------------------------------------------------------------------------------------------------------

Scores = namedtuple("Scores", "label box")


@pytest.mark.parametrize(
    "batches, joined",
    [
        ([[1, 2], [3]], [1, 2, 3]),
        ([["a"], ["b", "c"]], ["a", "b", "c"]),
        ([[[1], [2, 3]], [[]]], [[1], [2, 3], []]),
        ([("a", "b"), ("c",)], ["a", "b", "c"]),
        ([("a", 0.5), ("b", 0.25)], ["a", 0.5, "b", 0.25]),
        ([(1, 2), (3, 4)], [1, 2, 3, 4]),
        ([([1, 2], ["x", "y"]), ([3], ["z"])], ([1, 2, 3], ["x", "y", "z"])),
        ([Scores([1], [2]), Scores([3], [4])], Scores([1, 3], [2, 4])),
        ([{"id": [1], "n": {"m": ["x"]}}, {"id": [2], "n": {"m": ["y"]}}], {"id": [1, 2], "n": {"m": ["x", "y"]}}),
        ([{"id": [1]}, {"id": [2], "late": [3]}], {"id": [1, 2], "late": [3]}),
        ([{}, {}], {}),
        ([None, None], None),
        ([0.5, 0.25], [0.5, 0.25]),
        ([(torch.ones(2, 4), torch.ones(1, 4)), (torch.ones(3, 4),)], None),  # boxes of each image: rows
    ],
    ids=lambda value: str(value)[:40].replace("\n", ""),
)
def test_join_rows(batches: list[Any], joined: Any) -> None:
    result = join_rows(batches)
    if isinstance(batches[0], tuple) and isinstance(batches[0][0], Tensor):
        assert [len(row) for row in result] == [2, 1, 3]
    else:
        assert result == joined
        assert type(result) is type(joined)


def test_a_pair_of_predictions_is_two_columns() -> None:
    """From the batches to the dataset's order, as a model with two heads returns them."""

    def make(rows: list[int]) -> Any:
        return (torch.tensor(rows), torch.tensor([[row, -row] for row in rows])), torch.tensor(rows), {}

    (first, second), y_true, _ = predict([2, 2, 1], 2, [4, 2, 0, 1, 3], make)
    assert first.tolist() == y_true.tolist() == [4, 2, 0, 1, 3]
    assert second.tolist() == [[row, -row] for row in first.tolist()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.bool, torch.bfloat16], ids=str)
def test_tensors_keep_their_dtype(dtype: torch.dtype) -> None:
    joined = join_rows([torch.ones(2, 3, dtype=dtype), torch.zeros(1, 3, dtype=dtype)])
    assert joined.dtype == dtype
    assert joined.shape == (3, 3)
    assert join_rows([torch.ones((), dtype=dtype), torch.ones((), dtype=dtype)]).shape == (2,)


def test_arrays_stay_arrays() -> None:
    joined = join_rows([np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32)])
    assert isinstance(joined, np.ndarray)
    assert (joined.shape, joined.dtype) == ((3, 3), np.float32)
    assert join_rows([np.float64(1.0), np.float64(2.0)]) == [1.0, 2.0]
    assert join_rows([np.array(1), np.array(2)]).tolist() == [1, 2]
    assert [row.tolist() for row in join_rows([np.ones((1, 2)), np.ones((1, 3))])] == [[1, 1], [1, 1, 1]]


def test_rows_that_differ_in_shape_become_a_list() -> None:
    rows = join_rows([torch.ones(2, 3), torch.ones(1, 5)])
    assert [row.shape for row in rows] == [(3,), (3,), (5,)]


def test_a_batch_of_another_kind_is_rows_too() -> None:
    assert [float(row) for row in join_rows([torch.ones(2), [3.0]])] == [1.0, 1.0, 3.0]


def test_a_batch_without_rows_is_one_row_or_one_value() -> None:
    assert join_rows([torch.ones(2), torch.tensor(3.0)]).tolist() == [1.0, 1.0, 3.0]  # squeezed: one sample
    assert join_rows([np.array(1), np.array([2, 3])]).tolist() == [1, 2, 3]
    assert join_rows([{"id": [1]}, None]) == [{"id": [1]}, None]
    assert join_rows([[1, 2], None]) == [[1, 2], None]


@pytest.mark.parametrize(
    ("batches", "joined"),
    [
        ([np.array([1.0, 2.0]), np.float64(3.0)], np.array([1.0, 2.0, 3.0])),
        ([np.array([1.0, 2.0], np.float32), 3.0], np.array([1.0, 2.0, 3.0], np.float32)),
        ([np.int64(3), np.array([1, 2])], np.array([3, 1, 2])),
        ([np.array([True, False]), np.True_], np.array([True, False, True])),
        ([torch.tensor([1.0, 2.0]), 3.0], torch.tensor([1.0, 2.0, 3.0])),
        ([torch.tensor([1, 2]), 0.5], torch.tensor([1.0, 2.0, 0.5])),
        ([torch.tensor([1.0]), np.float64(3.0)], torch.tensor([1.0, 3.0])),
        ([[1, 2], 3], [1, 2, 3]),
        ([["a", "b"], "cd"], ["a", "b", "cd"]),
        ([[1, 2], torch.tensor(3)], [1, 2, 3]),
        ([np.array(["a", "b"]), "c"], ["a", "b", "c"]),
    ],
    ids=str,
)
def test_a_number_among_rows_is_the_row_of_one_sample(batches: list[Any], joined: Any) -> None:
    """Calculations with numpy's arrays without axes, ``tolist()`` and ``item()`` of a squeezed batch return it."""
    result = join_rows(batches)
    assert type(result) is type(joined)
    assert getattr(result, "dtype", None) == getattr(joined, "dtype", None)
    assert list(result) == list(joined)
    assert list(join_rows([{"part": batch} for batch in batches])["part"]) == list(joined)


def test_masked_arrays_keep_their_masks() -> None:
    joined = join_rows([np.ma.masked_equal([1, 2], 2), np.ma.masked_equal([3], 3)])
    assert joined.mask.tolist() == [False, True, True]
    some = [np.ma.masked_equal([1, 2], 2), np.array([2])]
    for joined in (join_rows(some), combine_predictions(some, [2, 1])):
        assert joined.mask.tolist() == [False, True, False]


def test_nothing_to_join() -> None:
    assert join_rows([]).shape == (0,)
    assert join_rows([], empty={}) == {}


def test_on_cpu_keeps_structure_and_drops_what_a_slice_is_of() -> None:
    big = torch.arange(1000.0).reshape(10, 100)
    value = on_cpu({"a": [big[:, :1], "text"], "b": Scores(big, (None, torch.ones(2, requires_grad=True)))})
    assert value["a"][0].untyped_storage().nbytes() == 10 * 4
    assert torch.equal(value["a"][0], big[:, :1])
    assert value["a"][1] == "text"
    assert value["b"].label is not None
    assert value["b"].label.data_ptr() == big.data_ptr()
    assert not value["b"].box[1].requires_grad


# -- predictions -------------------------------------------------------------------------------------------------------


def predict(
    sizes: list[int],
    world_size: int,
    order: Sequence[int] | None = None,
    make: Callable[[list[int]], Any] = lambda rows: (torch.tensor(rows), [str(row) for row in rows], {"id": rows}),
    **functions: Any,
) -> Any:
    """Predictions of rows 0, 1, ... in batches of these sizes, batch i by rank i % world_size."""
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    parts: list[Any] = []
    seen: list[list[int]] = []

    def gather(mine: Any) -> list[Any]:
        parts.append(mine)
        return parts

    for rank in reversed(range(world_size)):
        own = [
            (i, list(range(start, start + size)), size)
            for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
            if i % world_size == rank
        ]
        seen.clear()
        result = predictions(
            iter(own), lambda rows, size: make(rows), gather, lambda s: seen.append(s) or order, **functions
        )
    assert seen == [sizes]  # of all batches of all ranks, in order
    return result


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.integers(1, 4))
def test_rows_come_in_order_whoever_had_them(sizes: list[int], world_size: int) -> None:
    y_pred, y_true, metadata = predict(sizes, world_size)
    rows = list(range(sum(sizes)))
    assert y_pred.tolist() == metadata["id"] == rows
    assert y_true == [str(row) for row in rows]


def test_rows_go_back_to_the_datasets_order() -> None:
    order = [4, 2, 0, 1, 3]

    def make(rows: list[int]) -> Any:
        nested = {"array": np.array(rows), "number": 7, "pair": Scores(rows, torch.tensor(rows))}
        return torch.tensor(rows), (rows, [str(row) for row in rows]), nested

    y_pred, y_true, metadata = predict([2, 2, 1], 2, order, make)
    assert y_pred.tolist() == order
    assert y_true == (order, [str(row) for row in order])
    assert metadata["array"].tolist() == metadata["pair"].label == metadata["pair"].box.tolist() == order
    assert metadata["number"] == [7, 7, 7]  # one a batch: not a matter of rows


def test_sparse_rows_go_back_to_the_datasets_order() -> None:
    y_pred, *_ = predict([2, 1], 1, [2, 0, 1], lambda rows: (torch.eye(3)[rows].to_sparse(), rows, {}))
    assert y_pred.to_dense().tolist() == torch.eye(3)[[2, 0, 1]].tolist()


def test_own_functions_collect_and_transform() -> None:
    def collate(y_batch: Any, collected: list[Any]) -> list[Any]:
        return [*collected, *(10 * value for value in y_batch)]

    y_pred, y_true, _ = predict([2, 1], 1, make=lambda rows: (rows, rows, {}), collate=collate, transform=tuple)
    assert y_pred == y_true == (0, 10, 20)


def test_of_no_batches() -> None:
    y_pred, y_true, metadata = predictions(iter([]), lambda *_: None, lambda mine: [mine], lambda sizes: None)
    assert y_pred.shape == y_true.shape == (0,)
    assert metadata == {}


def test_keep_all_batches_appends() -> None:
    collected: list[Any] = [1]
    assert keep_all_batches(2, collected) is collected
    assert collected == [1, 2]
