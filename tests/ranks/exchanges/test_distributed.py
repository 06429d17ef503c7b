"""Exchanges in one process (tables) and between two real ranks (a few scenarios, many facts each)."""

from __future__ import annotations

import collections
import math
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit.ranks import run_ranks

from trainloop import distributed as td
from trainloop.distributed.objects import _gloo_beside
from trainloop.errors import ConfigurationError, UnpicklableError


class Pair(NamedTuple):
    a: Any
    b: Any


# -- who is who --------------------------------------------------------------------------------------------------------


def test_rank_reads_well_in_a_log_line() -> None:
    rank = td.Rank(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, num_nodes=2)
    assert repr(rank) == "Rank(rank=5(8), local_rank=1(4), node=1(2))"
    assert repr(td.Rank()) == "Rank(rank=0(1), local_rank=0(1), node=0(1))"
    with pytest.raises(AttributeError):
        rank.rank = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"RANK": "3", "LOCAL_RANK": "1", "SLURM_PROCID": "7"}, 3),
        ({"LOCAL_RANK": "1", "SLURM_PROCID": "7"}, 1),
        ({"SLURM_PROCID": "7"}, 7),
        ({"RANK": "0", "LOCAL_RANK": "1"}, 0),
        ({"RANK": " 2 "}, 2),
        ({"RANK": "two", "LOCAL_RANK": "1"}, 1),
        ({"RANK": "", "SLURM_PROCID": "4"}, 4),
        ({"RANK": "-1", "LOCAL_RANK": "1.0", "SLURM_PROCID": "1_0"}, 0),
        ({"RANK": "²", "LOCAL_RANK": "٣"}, 0),
    ],
    ids=str,
)
def test_rank_before_there_is_a_group(environ: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert td.get_rank() == rank
    assert td.is_global_zero() == (rank == 0)
    assert td.rank_zero_only(lambda: "ran")() == ("ran" if rank == 0 else None)


def test_world_size_without_a_group_is_one_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert td.get_world_size() == 1
    assert td.all_gather(torch.zeros(2)).shape == (1, 2)


def test_rank_zero_only_keeps_the_function_and_reads_the_rank_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    @td.rank_zero_only
    def add(a: int, *, b: int) -> int:
        """Sum."""
        return a + b

    monkeypatch.setenv("RANK", "1")
    assert add(1, b=2) is None
    monkeypatch.setenv("RANK", "0")
    assert add(1, b=2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Sum.")


# -- one process -------------------------------------------------------------------------------------------------------


def assert_same(got: Any, expected: Any) -> None:
    """Equal in structure, types, dtypes and values."""
    assert type(got) is type(expected), (got, expected)
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape, got.device) == (expected.dtype, expected.shape, expected.device)
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            assert_same(ours, theirs)
    else:
        assert got == expected


def test_all_gather_in_one_process_adds_an_axis_of_one() -> None:
    value = {"t": torch.arange(3), "n": [1, 2.5, True, None], "p": Pair(torch.tensor(1.0), np.float32(2)), "e": {}}
    expected = {
        "t": torch.arange(3)[None],
        "n": [torch.tensor([1]), torch.tensor([2.5], dtype=torch.float64), torch.tensor([True]), None],
        "p": Pair(torch.tensor([1.0]), torch.tensor([2.0])),
        "e": {},
    }
    assert_same(td.all_gather(value), expected)


def test_all_gather_result_is_a_copy() -> None:
    value = torch.zeros(2, requires_grad=True)
    gathered = td.all_gather(value)
    gathered += 1
    assert value.tolist() == [0, 0]
    with torch.no_grad():
        assert not td.all_gather(value).requires_grad


def test_all_gather_keeps_the_kind_of_dict() -> None:
    value = collections.defaultdict(list, a=torch.tensor(1))
    gathered = td.all_gather(value)
    assert isinstance(gathered, collections.defaultdict)
    assert gathered["new"] == []
    assert value["a"].shape == ()


@pytest.mark.parametrize(
    ("value", "reduce", "expected"),
    [
        (torch.tensor([1, 2]), "mean", torch.tensor([1.0, 2.0])),
        (torch.tensor([1, 2]), "sum", torch.tensor([1, 2])),
        (torch.tensor([True, False]), "mean", torch.tensor([1.0, 0.0])),
        (torch.tensor([True, False]), "sum", torch.tensor([1, 0])),
        (torch.tensor([True, False]), "max", torch.tensor([True, False])),
        (torch.tensor([1, 2], dtype=torch.uint8), "min", torch.tensor([1, 2], dtype=torch.uint8)),
        (torch.tensor(1.5, dtype=torch.bfloat16), "mean", torch.tensor(1.5, dtype=torch.bfloat16)),
        (torch.tensor(1 + 2j), "sum", torch.tensor(1 + 2j)),
        (torch.empty(0, 3), "max", torch.empty(0, 3)),
        (3, "mean", 3.0),
        (3, "sum", 3),
        (True, "sum", 1),
        (True, "min", True),
        (0.1, "mean", 0.1),
        (1j, "mean", 1j),
        (np.arange(2), "sum", torch.arange(2)),
        (np.arange(2)[::-1], "sum", torch.tensor([1, 0])),
        (np.arange(2, dtype=">i4"), "sum", torch.arange(2, dtype=torch.int32)),
        ({"a": [1, None], "b": Pair(2.0, ())}, "max", {"a": [1, None], "b": Pair(2.0, ())}),
    ],
    ids=str,
)
def test_all_reduce_in_one_process(value: Any, reduce: Any, expected: Any) -> None:
    assert_same(td.all_reduce(value, reduce), expected)


def test_all_reduce_defaults_to_the_mean_and_gives_a_copy() -> None:
    value = torch.tensor([2, 4])
    assert td.all_reduce(value).dtype == torch.float32
    result = td.all_reduce(value, "sum")
    result += 1
    assert value.tolist() == [2, 4]


def test_objects_in_one_process() -> None:
    obj = threading.Lock()  # nothing is pickled where there is no one to send to
    assert td.gather_object(obj) == [obj]
    assert td.broadcast_object(obj) is obj
    assert td.exchange_ints([1, 2]) == [[1, 2]]
    td.barrier()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: td.all_reduce(1, "avg"), ConfigurationError, "reduce='avg': must be 'mean', 'sum', 'min' or 'max'"),  # type: ignore[arg-type]
        (lambda: td.broadcast_object(1, src=1), ConfigurationError, r"src=1: must be a rank from 0 to 0"),
        (lambda: td.all_gather({"a": ["x"]}), TypeError, r"value\['a'\]\[0\] is of type str.*gather_object"),
        (lambda: td.all_gather(np.array(["x"])), TypeError, "value is of type ndarray, not a tensor or a number"),
        (lambda: td.all_gather(torch.eye(2).to_sparse()), TypeError, r"layout torch.sparse_coo.*\.to_dense\(\)"),
        (lambda: td.all_reduce([1j], "max"), TypeError, r"value\[0\] is complex.*no order"),
        (lambda: td.all_gather([2**63]), TypeError, r"value\[0\] is 9223372036854775808.* 64 bits.*gather_object"),
        (lambda: td.exchange_ints([1, 2.5]), TypeError, "float"),
    ],
)
def test_wrong_values(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# -- two ranks ---------------------------------------------------------------------------------------------------------


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


class Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("holds a socket")


def exchanges() -> dict[str, Any]:
    rank = dist.get_rank()
    facts: dict[str, Any] = {"rank": td.get_rank(), "world_size": td.get_world_size(), "zero": td.is_global_zero()}
    facts["rank_zero_only"] = td.rank_zero_only(lambda: "ran")()
    by_dtype = td.all_gather([torch.tensor([0, 1, rank]).to(dtype) for dtype in DTYPES])
    facts["by dtype"] = [(gathered.dtype, gathered.view(torch.uint8)) for gathered in by_dtype]
    nested = {"t": torch.full((2, 1), rank), "n": [rank, rank / 3, None], "p": Pair(np.int32(rank), torch.zeros(0, 3))}
    facts["nested"] = td.all_gather(nested)
    facts["other order of keys"] = td.all_gather({"a": 1, "b": 2} if rank else {"b": 2, "a": 1})
    facts["strided"] = td.all_gather(torch.arange(6).reshape(2, 3).t()[1:] + rank)
    facts["conjugate"] = td.all_gather(torch.tensor([1j * rank]).conj())
    facts["promoted"] = td.all_gather(0.5 if rank else 1)
    facts["nothing"] = td.all_gather({})

    own = torch.tensor([1.0, 3.0]) * (rank + 1)
    for reduce in ("mean", "sum", "min", "max"):
        facts[reduce] = td.all_reduce([own, rank, rank == 1, torch.tensor([2, 7]) + rank, rank / 3], reduce)
    facts["own after"] = own
    gone = torch.full((2, 999), 3.0 + rank)
    gone[rank] = torch.nan
    facts["NaN"] = [td.all_reduce([gone, 1.0 if rank == 0 else math.nan], reduce) for reduce in ("min", "max")]
    half = torch.tensor(2048.0 if rank else 1.0, dtype=torch.float16)
    facts["half"] = td.all_reduce(half, "mean")
    facts["complex"] = td.all_reduce(torch.tensor([1 + 2j * rank]), "sum")
    facts["bits"] = td.all_reduce(torch.rand(1000, generator=torch.Generator().manual_seed(rank)), "mean")

    facts["objects"] = td.gather_object({"rank": rank, "long": "x" * (5000 * rank)})
    facts["long objects"] = td.gather_object(b"y" * (1020 + rank))  # around the length that needs a second exchange
    sent = {"from": rank, "blob": bytes(3000)}
    facts["broadcast 0"] = td.broadcast_object(sent)["from"]
    facts["broadcast 1"] = td.broadcast_object(sent, src=1)["from"]
    facts["to rank 1"] = [td.gather_to("x" * (5000 * rank), 1), td.gather_to([rank] * 3, 1), td.gather_to(None)]
    facts["ints"] = td.exchange_ints([rank, -(2**62)] + [5] * rank)
    facts["many ints"] = td.exchange_ints(list(range(300 * rank)))
    td.barrier()

    facts["errors"] = {
        "shapes": error_of(lambda: td.all_gather({"same": 1, "x": torch.zeros(2 + rank, 3)})),
        "ndims": error_of(lambda: td.all_reduce(torch.zeros((1,) * rank), "sum")),
        "structure": error_of(lambda: td.all_gather([1, 2] if rank else [1])),
        "type on one rank": error_of(lambda: td.all_gather(["text"] if rank else [1])),
        "type on both": error_of(lambda: td.all_reduce("text", "sum")),
        "other function": error_of(lambda: td.all_gather(1) if rank else td.all_reduce(1, "sum")),
        "other reduction": error_of(lambda: td.all_reduce(1, "max" if rank else "sum")),
        "complex": error_of(lambda: td.all_reduce(1j, "max")),
        "too long a sum": error_of(lambda: td.all_reduce(2**62 if rank else 1, "sum")),
        "gather": error_of(lambda: td.gather_object(Unpicklable() if rank else 1)),
        "gather to": error_of(lambda: td.gather_to(Unpicklable() if rank else 1)),
        "gather to nobody": error_of(lambda: td.gather_to(1, dst=2)),
        "broadcast": error_of(lambda: td.broadcast_object(Unpicklable(), src=1)),
        "src": error_of(lambda: td.broadcast_object(1, src=2)),
        "int": error_of(lambda: td.all_reduce(1, "avg")),  # type: ignore[arg-type]
    }
    facts["after all errors"] = td.all_gather(rank)
    return facts


def test_two_ranks(tmp_path: Path) -> None:
    facts = run_ranks(exchanges, 2, folder=tmp_path)
    for rank, mine in enumerate(facts):
        assert (mine["rank"], mine["world_size"], mine["zero"]) == (rank, 2, rank == 0)
        assert all(tensor.isnan().all() and math.isnan(number) for tensor, number in mine["NaN"])
        assert mine["rank_zero_only"] == (None if rank else "ran")
        for dtype, (gathered_dtype, gathered) in zip(DTYPES, mine["by dtype"], strict=True):
            expected = torch.tensor([[0, 1, 0], [0, 1, 1]]).to(dtype)
            assert gathered_dtype == dtype
            assert torch.equal(gathered, expected.view(torch.uint8)), dtype
        assert_same(
            mine["nested"],
            {
                "t": torch.tensor([[[0], [0]], [[1], [1]]]),
                "n": [torch.tensor([0, 1]), torch.tensor([0, 1 / 3], dtype=torch.float64), None],
                "p": Pair(torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2, 0, 3)),
            },
        )
        assert sorted(mine["other order of keys"].items()) == sorted(
            {"a": mine["other order of keys"]["a"], "b": mine["other order of keys"]["b"]}.items()
        )
        assert mine["other order of keys"]["a"].tolist() == [1, 1]
        assert mine["strided"].tolist() == [[[1, 4], [2, 5]], [[2, 5], [3, 6]]]
        assert mine["conjugate"].tolist() == [[0], [-1j]]
        assert_same(mine["promoted"], torch.tensor([1.0, 0.5], dtype=torch.float64))
        assert mine["nothing"] == {}

        assert_same(mine["mean"], [torch.tensor([1.5, 4.5]), 0.5, 0.5, torch.tensor([2.5, 7.5]), 1 / 6])
        assert_same(mine["sum"], [torch.tensor([3.0, 9.0]), 1, 1, torch.tensor([5, 15]), 1 / 3])
        assert_same(mine["min"], [torch.tensor([1.0, 3.0]), 0, False, torch.tensor([2, 7]), 0.0])
        assert_same(mine["max"], [torch.tensor([2.0, 6.0]), 1, True, torch.tensor([3, 8]), 1 / 3])
        assert mine["own after"].tolist() == [1.0 + rank, 3.0 + 3 * rank]
        assert_same(mine["half"], torch.tensor(1024.5, dtype=torch.float16))  # 2049 is no float16: summed in float32
        assert mine["complex"].tolist() == [2 + 2j]
        assert torch.equal(mine["bits"], facts[0]["bits"])

        assert mine["objects"] == [{"rank": 0, "long": ""}, {"rank": 1, "long": "x" * 5000}]
        assert mine["long objects"] == [b"y" * 1020, b"y" * 1021]
        assert (mine["broadcast 0"], mine["broadcast 1"]) == (0, 1)
        assert mine["to rank 1"] == (
            [["", "x" * 5000], [[0] * 3, [1] * 3], None] if rank else [None, None, [None, None]]
        )
        assert mine["ints"] == [[0, -(2**62)], [1, -(2**62), 5]]
        assert mine["many ints"] == [[], list(range(300))]
        assert mine["after all errors"].tolist() == [0, 1]

    assert facts[0]["errors"] == facts[1]["errors"]  # on every rank, and the same
    errors = facts[0]["errors"]
    assert errors["shapes"] == (
        "ValueError: all_gather: the ranks' values differ in structure or shape (rank 0: value['x']: float32 of shape "
        "(2, 3); rank 1: value['x']: float32 of shape (3, 3)). Every rank must pass the same structure and shapes. If "
        "only the first axis differs, as in an uneven last batch, use all_gather(value, concat=True). Otherwise pad or "
        "cut the tensors to one shape, or use gather_object, which accepts different shapes."
    )
    assert "rank 0: value: float32 of shape (); rank 1: value: float32 of shape (1,)" in errors["ndims"]
    assert "rank 0: nothing; rank 1: value[1]: int64 of shape ()" in errors["structure"]
    assert errors["type on one rank"].startswith("TypeError: all_gather: on rank 1, value[0] is of type str, not a ten")
    assert errors["type on both"].startswith("TypeError: all_reduce('sum'): on rank 0, value is of type str")
    assert "different exchanges (rank 0: all_reduce('sum'), rank 1: all_gather)" in errors["other function"]
    assert "different exchanges (rank 0: all_reduce('sum'), rank 1: all_reduce('max'))" in errors["other reduction"]
    assert errors["complex"].startswith("TypeError: all_reduce('max'): value is complex")
    assert errors["too long a sum"].startswith(
        "TypeError: all_reduce('sum'): on rank 1, value is 4611686018427387904, "
    )
    assert errors["gather"].startswith(
        "UnpicklableError: gather_object: the object of rank 1 can't be pickled (Unpicklable: RuntimeError: holds a "
    )
    assert errors["gather to"].startswith("UnpicklableError: gather_to: the object of rank 1 can't be pickled")
    assert errors["gather to nobody"] == "ConfigurationError: gather_to: dst=2: must be a rank from 0 to 1."
    assert errors["broadcast"].startswith("UnpicklableError: broadcast_object: the object of rank 1 can't be pickled")
    assert errors["src"] == "ConfigurationError: broadcast_object: src=2: must be a rank from 0 to 1."
    assert errors["int"].startswith("ConfigurationError: reduce='avg'")


def beside_a_group_without_cpu(folder: str) -> dict[str, Any]:
    """The exchanges where the user's own group takes no CPU tensors, as one of NCCL alone; twice, with a new group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    facts: dict[str, Any] = {}
    for attempt in ("first", "second"):
        dist.init_process_group("cuda:gloo", init_method=f"file://{folder}/{attempt}", rank=rank, world_size=world_size)
        facts[attempt] = [
            td.exchange_ints([rank]),
            td.all_gather(torch.tensor(rank)).tolist(),
            td.all_reduce(rank, "sum"),
            td.broadcast_object(rank, src=1),
            len(_gloo_beside),
        ]
        td.barrier()
        dist.destroy_process_group()
    # What the runner finds at the end is as it made it: and whole, as a rank that left at once would break off the
    # connections that the other is still making.
    dist.init_process_group("gloo", init_method=f"file://{folder}/last", rank=rank, world_size=world_size)
    td.barrier()
    return facts


@pytest.mark.long
def test_a_gloo_group_is_made_beside_one_that_takes_no_cpu_tensors(tmp_path: Path) -> None:
    for facts in run_ranks(beside_a_group_without_cpu, 2, str(tmp_path), folder=tmp_path):
        assert facts["first"][:-1] == facts["second"][:-1] == [[[0], [1]], [0, 1], 1, 1]
        assert facts["first"][-1] == 1


def within_compiled_code() -> dict[str, Any]:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def exchanging(x: torch.Tensor) -> Any:
        y = td.all_gather(x * 2, concat=True).sum() + td.all_reduce(x.detach().sum(), "sum")
        return y + td.exchange_ints([3])[0][0] + len(td.gather_object("x")) + len(td.broadcast_object("yes"))

    compiled = torch.compile(exchanging, backend=backend)
    x = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo hides one of torch's own, but not where warnings are errors
        for _ in range(3):
            y = compiled(x)
            y.backward()
    return {"y": y.item(), "gradient": x.grad, "graphs": len(graphs)}


@pytest.mark.long
def test_compiled_code_calls_the_exchanges_and_does_not_contain_them(tmp_path: Path) -> None:
    for facts in run_ranks(within_compiled_code, 2, folder=tmp_path):
        assert facts["y"] == 8 + 4 + 3 + 2 + 3
        assert facts["gradient"].tolist() == [12, 12]  # the sum over ranks of three passes
        assert facts["graphs"] <= 6  # the parts of the function; with the exchanges' own code, more than 20


def test_unpicklable_error_is_a_type_error() -> None:
    assert issubclass(UnpicklableError, TypeError)


@pytest.mark.parametrize(
    "call", ["barrier", "gather_object", "broadcast_object", "gather_to", "all_gather", "all_reduce"]
)
def test_before_torchruns_processes_have_a_group_a_warning_says_that_nothing_is_exchanged(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=rf"{call}\(\) did not wait.*init_process_group"):
        getattr(td, call)(*[1.0] * (call != "barrier"))
