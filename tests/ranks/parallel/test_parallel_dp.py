"""TTDataParallel's replicas on the CPU against one module; how a batch is cut and results are put together."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.parallel_models import (
    CPU,
    Net,
    TwoLosses,
    Weighted,
    WithBatchNorm,
    batch_of,
    furthest,
    gradients,
    total_of,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss
from trainloop.parallel import TTDataParallel
from trainloop.parallel.replicas.gather import combine_losses, combine_predictions, gather, rows_of_ones
from trainloop.parallel.replicas.scatter import NotDivisibleError, chunk_sizes, scatter

# -- DP: cutting and putting together ----------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    names: Any
    fixed: int = 3


class Sample:
    """An object that says nothing about itself."""

    def __init__(self, i: int) -> None:
        self.i = i

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sample) and other.i == self.i

    def __repr__(self) -> str:
        return f"Sample({self.i})"  # the same in each process that collects these tests


def plain(value: Any) -> Any:
    """Tensors and arrays as lists, with a mark, so that ``==`` compares."""
    if isinstance(value, (Tensor, np.ndarray)):
        return (type(value).__name__, value.tolist())
    if isinstance(value, dict):
        return type(value)({key: plain(item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    if dataclasses.is_dataclass(value):
        return (type(value), [plain(getattr(value, f.name)) for f in dataclasses.fields(value)])
    return value


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("num_chunks", range(1, 9))
def test_chunks_are_those_of_torch(length: int, num_chunks: int) -> None:
    expected = [len(chunk) for chunk in torch.arange(length).chunk(num_chunks)]
    assert chunk_sizes(length, num_chunks) == expected


t = torch.arange
ONE, ONES, NAN = torch.tensor(1.0), torch.ones(3), float("nan")


@pytest.mark.parametrize(
    ("value", "num_chunks", "expected"),
    [
        (t(5), 2, [t(3), t(3, 5)]),
        ([t(5), np.arange(5) * 2], 2, [[t(3), np.arange(3) * 2], [t(3, 5), np.arange(3, 5) * 2]]),
        ((t(3), "constant", None, 7), 2, [(t(2), "constant", None, 7), (t(2, 3), "constant", None, 7)]),
        ({"x": t(3), "names": ["a", "b", "c"]}, 2, [{"x": t(2), "names": ["a", "b"]}, {"x": t(2, 3), "names": ["c"]}]),
        ([t(3), ("a", "b", "c")], 2, [[t(2), ("a", "b")], [t(2, 3), ("c",)]]),
        ([t(2), [Sample(0), Sample(1)]], 2, [[t(1), [Sample(0)]], [t(1, 2), [Sample(1)]]]),
        (Point(t(2), {"y": t(2)}), 2, [Point(t(1), {"y": t(1)}), Point(t(1, 2), {"y": t(1, 2)})]),
        (Batch(t(2), ["a", "b"]), 2, [Batch(t(1), ["a"]), Batch(t(1, 2), ["b"])]),
        # Of another length than the batch: class weights, a scalar.
        ([t(4), ONES, ONE], 2, [[t(2), ONES, ONE], [t(2, 4), ONES, ONE]]),
        # Two tensors are no list of two samples, and neither are lists of lists.
        ([t(2), t(2)], 2, [[t(1), t(1)], [t(1, 2), t(1, 2)]]),
        ((["a", "b", "c"], [1, 2, 3]), 2, [(["a", "b"], [1, 2]), (["c"], [3])]),
        # Fewer parts than asked for, one part, none that can be cut.
        (t(5), 4, [t(2), t(2, 4), t(4, 5)]),
        (t(1), 4, [t(1)]),
        (t(0), 2, [t(0)]),
        ("text", 2, ["text"]),
        ((), 2, [()]),
        ({"a": 1}, 2, [{"a": 1}]),
    ],
    ids=repr,
)  # fmt: skip
def test_scatter(value: Any, num_chunks: int, expected: list[Any]) -> None:
    before = copy.deepcopy(value)
    assert plain(scatter(value, num_chunks)) == plain(expected)
    assert plain(value) == plain(before)


def test_scatter_along_another_dimension() -> None:
    first, second = scatter([torch.ones(2, 5), torch.ones(3)], 2, dim=1)
    assert (first[0].shape, second[0].shape, second[1].shape) == ((2, 3), (2, 2), (3,))


class Rows(Tensor):
    """A tensor with attributes, such as those of medical images."""


@pytest.mark.parametrize(
    "labels, divided", [(["a", "b", "c", "d"], False), ({"id": [1, 2, 3, 4]}, False), ("text", True)]
)
def test_a_tensor_whose_attributes_may_belong_to_its_rows_stays_whole(labels: Any, divided: bool) -> None:
    rows = torch.arange(4.0).as_subclass(Rows)
    rows.labels = labels
    if divided:
        assert [len(part) for part in scatter({"x": rows}, 2, length=4)[0].values()] == [2]
        return
    with pytest.raises(NotDivisibleError, match="a Rows whose attributes may belong to its rows"):
        scatter({"x": rows}, 2, length=4)


@pytest.mark.parametrize(
    ("given", "sizes", "expected"),
    [
        ([torch.tensor(1.0), torch.tensor(4.0)], [4, 2], torch.tensor(2.0)),
        ([(torch.tensor(1.0), 30), (torch.tensor(4.0), 10)], [1, 1], (torch.tensor(1.75), 40)),
        ([(ONE, torch.tensor(30)), (4 * ONE, torch.tensor(10))], [1, 1], (1.75 * ONE, torch.tensor(40))),
        ([(torch.tensor(2.0), 3), (torch.tensor(float("nan")), 0)], [1, 1], (torch.tensor(2.0), 3)),
        ([(2 * ONE, torch.tensor(3)), (NAN * ONE, torch.tensor(0))], [1, 1], (2 * ONE, torch.tensor(3))),
        ([{"a": torch.tensor(1.0)}, {"a": torch.tensor(4.0)}], [2, 1], {"a": torch.tensor(2.0)}),
    ],
    ids=repr,
)  # fmt: skip
def test_losses_combine(given: list[Any], sizes: list[int], expected: Any) -> None:
    assert plain(combine_losses(given, sizes)) == plain(expected)


@pytest.mark.parametrize("number", [float, torch.as_tensor], ids=["numbers", "tensors"])
def test_a_part_without_weight_gives_no_gradient_even_if_its_loss_is_0_by_0(number: Any) -> None:
    x = torch.tensor([3.0, 5.0], requires_grad=True)
    losses = [((x * kept).sum() / sum(kept), number(sum(kept))) for kept in (Tensor([1, 1]), Tensor([0, 0]))]
    loss, _ = combine_losses(losses, [2, 2])
    loss.backward()
    assert loss == 4.0
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0.5]


def test_integer_weights_divide_in_the_precision_of_the_loss() -> None:
    losses = [(torch.tensor(value, dtype=torch.float64), torch.tensor(n)) for value, n in ((1.0, 1), (2.0, 2))]
    assert combine_losses(losses, [1, 2])[0].item() == 1 / 3 + 2 * (2 / 3)
    loss, weight = combine_losses([(loss, None) for loss, _ in losses], [1, 2])
    assert (loss.item(), weight) == (1 / 3 + 2 * (2 / 3), None)


@pytest.mark.parametrize(
    "weight",
    [np.bool_(True), np.uint8(200), np.float16(40000), torch.tensor(True), torch.tensor(200, dtype=torch.uint8)],
    ids=lambda weight: f"{type(weight).__name__} {weight.dtype}",
)
def test_weights_of_small_dtypes_are_added_without_overflow(weight: Any) -> None:
    loss, total = combine_losses([(torch.tensor(1.0), weight), (torch.tensor(3.0), weight)], [2, 2])
    assert (loss.item(), float(total)) == (2.0, 2 * float(weight))


def test_multi_losses_combine_by_name() -> None:
    one, two = (MultiLoss({"a": torch.tensor(a), "b": torch.tensor(8.0)}, {"a": 1, "b": 0}, False) for a in (1.0, 4.0))
    combined = combine_losses([one, two], [2, 1])
    assert combined.item() == {"a": 2.0, "b": 8.0}
    assert (combined.loss_optimizer_map, combined.retain_graph_until_last) == ({"a": 1, "b": 0}, False)
    combined, weight = combine_losses([(one, 1), (two, 3)], [2, 1])
    assert (combined.item(), weight) == ({"a": 3.25, "b": 8.0}, 4)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(2), r"get_loss returned a tensor of shape \(2,\). Return a 0-d tensor"),
        (3.0, r"get_loss returned 3.0, a float. Return"),
        ((torch.tensor(1.0), torch.ones(2)), r"with a tensor of shape \(2,\) as the weight"),
        (None, "get_loss returned None, a NoneType"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        combine_losses([loss, loss], [1, 1])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([t(2), t(2, 3)], t(3)),
        ([np.arange(2), np.arange(1)], np.array([0, 1, 0])),
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([("a", "b"), ("c",)], ("a", "b", "c")),
        ([(t(1), ["a"], {}), (t(1), ["b"], {})], (torch.tensor([0, 0]), ["a", "b"], {})),
        ([Point(t(1), 2), Point(t(1), 2)], Point(torch.tensor([0, 0]), 2)),
        ([{"a": {"b": t(1)}}, {"a": {"b": t(1)}, "late": 5}], {"a": {"b": torch.tensor([0, 0])}, "late": 5}),
        ([torch.tensor(1.0), torch.tensor(1.0)], torch.tensor(1.0)),
        (["one", "one"], "one"),
        ([None, None], None),
        ([[], ["a"]], ["a"]),
        ([t(2), torch.tensor(3)], torch.tensor([0, 1, 3])),  # squeezed: one sample
        ([[1, 2], 3], [1, 2, 3]),
        ([np.arange(2.0), 3.0], np.array([0.0, 1.0, 3.0])),
    ],
    ids=repr,
)
def test_predictions_combine(given: list[Any], expected: Any) -> None:
    assert plain(combine_predictions(given, [1, 1])) == plain(expected)


def test_forward_outputs_are_gathered_as_dataparallel_does() -> None:
    one = {"a": t(2), "b": [t(1), None], "c": Point(torch.tensor(1), torch.tensor(2))}
    two = {"a": t(1), "b": [t(1), None], "c": Point(torch.tensor(3), torch.tensor(4))}
    expected = {
        "a": torch.tensor([0, 1, 0]),
        "b": [torch.tensor([0, 0]), None],
        "c": Point(torch.tensor([1, 3]), torch.tensor([2, 4])),
    }
    assert plain(gather([one, two])) == plain(expected)


@dataclasses.dataclass
class Named:
    names: list[Any]
    levels: list[Any]
    boxes: list[Any]
    settings: list[Any]


@pytest.mark.parametrize("rows", [6, 7])
def test_lists_of_forward_with_an_item_for_each_sample_are_joined(rows: int) -> None:
    """Previously, those of the first replica were returned, or zip raised an error."""

    class Boxes(nn.Module):
        def forward(self, x: Tensor, names: list[str]) -> Named:
            boxes = [{"box": row.expand(i + 2, 4), "name": name} for i, (row, name) in enumerate(zip(x, names))]
            return Named(names, [x, x * 2], boxes, [1.5, "one"])

    x, names = torch.arange(4.0 * rows).view(rows, 4), [f"picture {i}" for i in range(rows)]
    found = TTDataParallel(Boxes(), devices=2)(x, names)
    assert found.names == names
    assert plain(found.levels) == plain([x, x * 2])
    assert [box["name"] for box in found.boxes] == names
    assert all(torch.equal(box["box"][0], row) for box, row in zip(found.boxes, x, strict=True))
    assert found.settings == [1.5, "one"]


def test_lists_of_forward_that_fit_no_samples_are_named() -> None:
    class Found(nn.Module):
        def forward(self, x: Tensor) -> list[Any]:
            return [0.5] * (len(x) + 1)

    with pytest.raises(ConfigurationError, match=r"lists of lengths \[5, 4\] for parts of \[4, 3\] samples"):
        TTDataParallel(Found(), devices=2)(torch.zeros(7, 1))


# -- DP: replicas on the CPU -------------------------------------------------------------------------------------------


class Recurrent(Net):
    """Layers that keep their weights elsewhere than in their parameters' dict."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(torch.stack([x, x + 1], dim=1))
        mixed, _ = self.attention(states, states, states)
        return super().forward(self.norm(mixed[:, 0]))


class Penalised(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        return criterion(self(x), y) + 0.1 * sum(p.square().sum() for p in self.parameters())


DP_MODELS: list[type[Net]] = [Net, Weighted, TwoLosses, Recurrent, Penalised]


@pytest.mark.long(every=3)
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("cls", DP_MODELS)
def test_dp_trains_as_single(cls: type[Net], size: int, replicas: int) -> None:
    torch.manual_seed(0)
    model = cls()
    reference = copy.deepcopy(model)
    wrapper = TTDataParallel(model, devices=replicas)
    criterion = nn.CrossEntropyLoss()
    outputs = []
    for net, get_loss in ((model, wrapper.get_loss), (reference, reference.get_loss)):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            output = get_loss(batch_of(step, size), criterion, CPU)
            total_of(output).backward()
            optimizer.step()
        outputs.append(output)
    assert furthest(gradients(model), gradients(reference)) < 1e-6
    assert furthest(dict(model.state_dict()), dict(reference.state_dict())) < 1e-6
    assert type(outputs[0]) is type(outputs[1])
    assert total_of(outputs[0]).item() == pytest.approx(total_of(outputs[1]).item(), abs=1e-6)
    if isinstance(outputs[1], tuple):
        assert outputs[0][1] == outputs[1][1]


def test_dp_with_more_precision_is_as_exact() -> None:
    model = Net().double()
    reference = copy.deepcopy(model)
    x, y = batch_of(0, 7)
    TTDataParallel(model, devices=3).get_loss((x.double(), y), nn.CrossEntropyLoss(), CPU).backward()
    reference.get_loss((x.double(), y), nn.CrossEntropyLoss(), CPU).backward()
    assert furthest(gradients(model), gradients(reference)) < 1e-14


def test_dp_predicts_as_single() -> None:
    model = Net()
    wrapper = TTDataParallel(model, devices=3)
    batch = batch_of(0, 7)
    predicted, true, metadata = wrapper.get_predictions(batch, CPU)
    expected, _, expected_metadata = model.get_predictions(batch, CPU)
    assert predicted.tolist() == expected.tolist()
    assert true.tolist() == batch[1].tolist()
    assert metadata == expected_metadata
    with torch.no_grad():
        loss = wrapper.get_loss_eval(batch, nn.CrossEntropyLoss(), CPU)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(model.get_loss(batch, nn.CrossEntropyLoss(), CPU).item(), abs=1e-6)
    torch.testing.assert_close(wrapper(batch[0]), model(batch[0]))
    torch.testing.assert_close(wrapper(x=batch[0]), model(batch[0]))


class Squeezes(Net):
    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        x, y = batch_data
        return {"x": x[:, 0].squeeze()}, y.squeeze().tolist(), {"id": x[:, 1].squeeze(), "temperature": "0.5"}


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_that_squeeze_the_axis_of_one_row_predict_as_single(size: int, replicas: int) -> None:
    x, y = batch_of(0, size)
    predicted, true, metadata = TTDataParallel(Squeezes(), devices=replicas).get_predictions((x, y), CPU)
    assert torch.as_tensor(true).tolist() == y.tolist()
    assert torch.equal(torch.as_tensor(predicted["x"]), x[:, 0])
    assert torch.equal(torch.as_tensor(metadata["id"]), x[:, 1])
    assert metadata["temperature"] == "0.5"


def test_metadata_without_rows_that_differ_are_the_rows_of_parts_with_one_sample() -> None:
    rows = [(t(1), t(1), {"id": torch.tensor(i), "const": 0.5}) for i in (3, 4)]
    (*_, first), (*_, second) = rows_of_ones(rows)
    assert plain([first, second]) == plain([{"id": torch.tensor([i]), "const": 0.5} for i in (3, 4)])


def test_the_rows_of_other_arrays_are_joined() -> None:
    given = [memoryview(b"ab"), memoryview(b"c")]  # has ndim, like a Categorical of pandas or an array of JAX
    assert combine_predictions(given, [2, 1]) == [97, 98, 99]


def test_predictions_have_a_row_for_each_sample_in_any_dim() -> None:
    predicted = [torch.ones(2, 3), torch.zeros(1, 3)]
    assert combine_predictions(predicted, [2, 1], dim=1).shape == (3, 3)
    assert combine_predictions([t(2), t(1)], [2, 1], dim=1).shape == (3,)
    assert combine_predictions([torch.ones(5, 2), torch.ones(5, 1)], [2, 1], dim=1).shape == (5, 3)


class Spy(Net):
    """Writes down what a replica finds around itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.register_buffer("seen", torch.zeros(()))
        self.notes: list[dict[str, Any]] = []
        self.written = "before"

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        names, x = batch_data
        self.encoder.seen += len(x)
        self.written = "in a replica"
        noise = torch.rand(2)
        self.notes.append(
            {
                "thread": threading.current_thread().name,
                "size": len(x),
                "names": names,
                "logged as": {part.__dict__.get("_log_batch_size") for part in self.modules()},
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "autocast": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
                "dtype": torch.get_autocast_dtype("cpu"),
                "device": self.device,
                "tied": self.tied.weight is self.encoder.weight,
                "own weights": self.encoder.weight is not SPIED[0].encoder.weight,
                "shares memory": self.encoder.weight.data_ptr() == SPIED[0].encoder.weight.data_ptr(),
                "parameters": len(list(self.parameters())),
                "noise": noise.tolist(),
                "context": CONTEXT.get(),
            }
        )
        return self(x).mean()


SPIED: list[Spy] = []
CONTEXT: contextvars.ContextVar[str] = contextvars.ContextVar("CONTEXT", default="default")


def spied(**surroundings: Any) -> list[dict[str, Any]]:
    model = Spy()
    SPIED[:] = [model]
    wrapper = TTDataParallel(model, devices=2)
    with contextlib.ExitStack() as stack:
        for context in surroundings.values():
            stack.enter_context(context)
        wrapper.get_loss((list("abcdefg"), batch_of(0, 7)[0]), None, CPU)
    assert model.written == "in a replica"  # the same in all replicas
    assert model.encoder.seen.item() == 4  # the first replica's buffers are the module's
    assert "_log_batch_size" not in vars(model)
    return model.notes


def test_a_replica_has_its_part_and_its_own_module() -> None:
    first, second = spied()
    assert (first["size"], first["names"], first["logged as"]) == (4, list("abcd"), {4})
    assert (second["size"], second["names"], second["logged as"]) == (3, list("efg"), {3})
    for i, note in enumerate((first, second)):
        assert note["thread"] == f"TTDataParallel replica {i}"
        assert note["device"] == CPU
        assert note["tied"]
        assert note["own weights"]
        assert note["shares memory"]
        assert note["parameters"] == len(list(SPIED[0].parameters()))
        assert (note["grad"], note["inference"], note["autocast"], note["context"]) == (True, False, None, "default")


def test_a_batch_that_can_not_be_cut_is_passed_on() -> None:
    class OfSample(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            return super().get_loss(batch_of(batch_data.i, 7), criterion, device)

    model, criterion = OfSample(), nn.CrossEntropyLoss()
    loss = TTDataParallel(model, devices=2).get_loss(Sample(3), criterion, CPU)
    assert torch.equal(loss, model.get_loss(Sample(3), criterion, CPU))


def test_a_replica_has_the_callers_modes() -> None:
    CONTEXT.set("mine")
    for note in spied(no_grad=torch.no_grad(), autocast=torch.autocast("cpu", torch.float16)):
        assert (note["grad"], note["autocast"], note["context"]) == (False, torch.float16, "mine")
    CONTEXT.set("default")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert [note["dtype"] for note in spied()] == [torch.float16] * 2
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)
    for note in spied(inference=torch.inference_mode()):
        assert (note["grad"], note["inference"]) == (False, True)


class _DoublesLinear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


class _DoublesMatrix(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.addmm.default else result


BLOCKS: dict[str, Callable[[], Any]] = {
    "function mode": _DoublesLinear,
    "dispatch mode": _DoublesMatrix,
    "default device": lambda: torch.device("meta"),
}
if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):  # since torch 2.8
    BLOCKS["saved tensors"] = lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved * 3 if saved.is_floating_point() else saved, lambda saved: saved
    )


@pytest.mark.parametrize("block", BLOCKS)
def test_torchs_blocks_around_a_call_hold_in_replicas(block: str) -> None:
    class Made(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if torch.empty(1).device.type == "meta" else 1.0)

    def gradient(module: Any, within: contextlib.AbstractContextManager[Any]) -> Tensor:
        with within:
            loss = module.get_loss(batch, nn.CrossEntropyLoss(), CPU)
        return torch.autograd.grad(loss, model.encoder.weight)[0]

    model, batch = Made().double(), [part.double() if part.is_floating_point() else part for part in batch_of(0, 7)]
    expected = gradient(model, BLOCKS[block]())
    assert not torch.allclose(expected, gradient(model, contextlib.nullcontext()))
    wrapped = TTDataParallel(model, devices=2)
    torch.testing.assert_close(gradient(wrapped, BLOCKS[block]()), expected, rtol=1e-12, atol=1e-12)


def test_random_numbers_in_replicas_are_those_of_the_seed() -> None:
    torch.manual_seed(5)
    expected = [torch.rand(2).tolist() for _ in range(2)]
    for _ in range(5):
        model = Spy()
        SPIED[:] = [model]
        torch.manual_seed(5)
        TTDataParallel(model, devices=2).get_loss((list("ab"), batch_of(0, 2)[0]), None, CPU)
        assert [note["noise"] for note in model.notes] == expected


class Odd(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


@pytest.mark.parametrize(("error", "raised"), [(ValueError("bad label"), ValueError), (Odd(1, 2), RuntimeError)])
def test_what_a_replica_raises_comes_out_with_its_number(error: BaseException, raised: type[BaseException]) -> None:
    class Raising(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            if len(batch_data[0]) == 2:
                raise error
            return super().get_loss(batch_data, criterion, device)

    wrapper = TTDataParallel(Raising(), devices=2)
    with pytest.raises(raised, match=rf"(?s)Caught {type(error).__name__} in replica 1 on cpu.*in get_loss"):
        wrapper.get_loss(batch_of(0, 5), nn.CrossEntropyLoss(), CPU)


def test_a_replica_that_exits_keeps_the_exit_code() -> None:
    class Exiting(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            sys.exit(3)

    with pytest.raises(SystemExit) as ended:
        TTDataParallel(Exiting(), devices=2).get_loss(batch_of(0, 5), nn.CrossEntropyLoss(), CPU)
    assert ended.value.code == 3


def test_user_hooks_fire_in_each_replica_and_once_on_the_sum() -> None:
    model = Net()
    fired: collections.Counter[str] = collections.Counter()
    sums = []
    model.head.weight.register_hook(lambda grad: sums.append(grad.clone()))
    model.head.weight.register_post_accumulate_grad_hook(lambda _: fired.update(["accumulated"]))
    model.head.register_forward_hook(lambda *_: fired.update(["forward"]))
    model.head.register_full_backward_hook(lambda *_: fired.update(["backward"]))
    TTDataParallel(model, devices=2).get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU).backward()
    assert fired == {"accumulated": 1, "forward": 6, "backward": 6}
    assert len(sums) == 1
    assert torch.equal(sums[0], model.head.weight.grad)


def test_batchnorm_keeps_the_statistics_of_the_first_part() -> None:
    model, reference = WithBatchNorm(), WithBatchNorm()
    x, y = batch_of(0, 7)
    TTDataParallel(model, devices=2).get_loss((x, y), nn.CrossEntropyLoss(), CPU)
    reference.get_loss((x[:4], y[:4]), nn.CrossEntropyLoss(), CPU)
    assert furthest(dict(model.named_buffers()), dict(reference.named_buffers())) == 0


def test_training_goes_on_after_an_in_place_change_of_weights() -> None:
    """Replicas hold views of the weights: an optimizer step between forward and backward is found out, as ever."""
    model = Net()
    wrapper = TTDataParallel(model, devices=2)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        wrapper.get_loss(batch_of(step), nn.CrossEntropyLoss(), CPU).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = wrapper.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU)
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 0}, "devices=0: the number of replicas on the CPU must be an int of 1 or more"),
        ({"devices": True}, "devices=True: the number of replicas"),
        ({"devices": "2"}, "devices='2': the number of replicas"),
        (
            {"devices": 2, "device_ids": [0]},
            r"devices=2 asks for replicas on the CPU, but device_ids=\[0\].*Pass devices, or the other two",
        ),
    ],
)
def test_dp_refuses_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TTDataParallel(Net(), **arguments)


def test_dp_refuses_a_module_that_is_elsewhere() -> None:
    with pytest.raises(ConfigurationError, match=r"the module is on meta. Call module.cpu"):
        TTDataParallel(nn.Linear(2, 2, device="meta"), devices=2)
    wrapper = TTDataParallel(nn.Linear(2, 2), devices=2)
    wrapper.module.to("meta")
    with pytest.raises(RuntimeError, match="must be on cpu, its first device, but has a tensor on meta"):
        wrapper(torch.ones(2, 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there, it runs on the GPUs")
def test_dp_without_gpus_calls_the_module_as_it_is() -> None:
    model = Net()
    wrapper = TTDataParallel(model)
    assert (
        wrapper.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU).item()
        == model.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU).item()
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.14 asks for it
def test_dp_refuses_the_result_of_torch_compile_and_accepts_a_module_compiled_in_place() -> None:
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    compiled = nn.Sequential(blocks[0], torch.compile(blocks[1], backend="eager"))
    with pytest.raises(ConfigurationError, match=r"1 is the result of torch.compile.* in place, model.1.compile\(\)"):
        TTDataParallel(compiled, devices=2)
    TTDataParallel(compiled, devices=1)
    blocks[1].compile(backend="eager")
    x = torch.ones(4, 2)
    torch.testing.assert_close(TTDataParallel(blocks, devices=2)(x), blocks(x))


@pytest.mark.parametrize(
    "values", [(torch.tensor(1.5), torch.tensor(2)), (1, float("nan")), ("a", "b"), ({1}, {2})], ids=repr
)
def test_parts_that_predict_other_values_without_rows_are_an_error(values: tuple[Any, Any]) -> None:
    given = [(t(2), t(2), {"loss": value}) for value in values]
    with pytest.raises(ConfigurationError, match=r"without rows for a part of a batch, and .* for another"):
        combine_predictions(given, [2, 2])
    assert combine_predictions([float("nan"), float("nan")], [2, 2]) != 0


def test_parts_of_which_some_predict_none_are_an_error() -> None:
    assert combine_predictions([(t(2), None, None), (t(1), None, None)], [2, 1])[1:] == (None, None)
    for odd in ([(t(2), None, {}), (t(1), t(1), {})], [(t(2), t(2), {"id": t(2)}), (t(1), t(1), {"id": None})]):
        with pytest.raises(ConfigurationError, match=r"returned None for a part of a batch, and a result for another"):
            combine_predictions(odd, [2, 1])
