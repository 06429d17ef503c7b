"""The encoding of what ranks exchange: all of it comes back, and bytes of any other origin do nothing."""

from __future__ import annotations

import collections
import copy
import io
import math
import random
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainloop.distributed.encoding import Malformed, NotPlain, decode, dumps, encode, loads


class Pair(NamedTuple):
    a: Any
    b: Any


def there_and_back(value: Any, *, with_key: bool = False) -> Any:
    return loads(dumps(value)) if with_key else decode(memoryview(encode(value)))


def same(x: Any, y: Any) -> bool:
    """Whether two values are equal in type, structure, dtype and bits."""
    if type(x) is not type(y):
        return False
    if isinstance(x, torch.Tensor):
        alike = [(t.dtype, t.shape, t.layout, t.requires_grad, t.device) for t in (x, y)]
        a, b = (t.detach().to_dense().resolve_conj().to(torch.complex128) for t in (x, y))
        return alike[0] == alike[1] and torch.equal(a, b)
    if isinstance(x, np.ndarray):
        if x.dtype.hasobject:
            return x.shape == y.shape and all(map(same, x.reshape(-1).tolist(), y.reshape(-1).tolist()))
        # torch.load gives arrays in this machine's order of bytes.
        y = y.astype(x.dtype) if x.dtype == y.dtype.newbyteorder("=") else y
        return (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()) and bool(y.flags.writeable)
    if isinstance(x, dict):
        return same(list(x), list(y)) and all(map(same, x.values(), y.values()))
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same, x, y))
    if isinstance(x, float):
        return x == y or (math.isnan(x) and math.isnan(y))
    return bool(x == y)


shared = [1]
VALUES: dict[str, Any] = {
    "numbers": [None, True, False, 3, -(2**63), 2**63, -(2**200), 0.5, -0.0, float("nan"), float("inf"), 1 + 2j],
    "text": ["", "é", "a\udc80b\ud800", "\x00", "\U0001f600", b"", b"\x00x", bytearray(b"y")],
    "nothing": [[], (), {}, set(), [[], [[]]], [{}, {}], np.zeros((0, 3)), torch.zeros(2, 0), None],
    "ragged": [[1, 2], [3], [], [[4.5, None]]],
    "rows of text and numbers": [("a", 1, 2.0), ("b", 2, None)] * 3,
    "keys that are equal but not the same": [{1: "a"}, {True: "b"}, {1.0: "c"}],
    "keys in another order": [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
    "records": [{"x": torch.ones(i), "y": [i]} for i in range(4)],
    "sets": [{1, 2}, frozenset("ab"), collections.OrderedDict(b=1, a=2)],
    "named tuples": [Pair(1, "x"), Pair(None, Pair(2, 3))],
    "arrays": [
        np.arange(6).reshape(2, 3).T,
        np.array("x"),
        np.array(["ab", "c"]),
        np.array([b"ab"]),
        np.ones((1, 2, 3)),
    ],
    "other dtypes": [np.array([1, 2], ">i4"), np.array(["2020-01-01"], "M8[D]"), np.array([(1, 2.0)], "i4,f8")],
    "arrays of objects": np.array([[1], "a", None, {"b": np.ones(2)}, [2], (3, 4)], object).reshape(3, 2),
    "scalars": [np.float32(2), np.bool_(True), np.str_("xy"), np.datetime64("2020-01-01"), np.int8(-3), np.int8(4)],
    "tensors": [torch.tensor(1.0), torch.zeros(0, 3), torch.arange(6).reshape(2, 3).t(), torch.arange(4)[1::2]],
    "tensor dtypes": [
        torch.tensor([0, 1]).to(d) for d in (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
    ],
    "complex tensors": [torch.tensor([1 + 1j]).conj(), torch.tensor([1 + 1j]).conj().imag],
    "trained": torch.ones(2, requires_grad=True),
    "sparse": [torch.eye(3).to_sparse(), torch.eye(4).to_sparse(1), torch.zeros(3, 3).to_sparse()],
    "random states": [random.getstate(), np.random.get_state(), torch.get_rng_state()],
    "many kinds": [np.ones(1, dtype) for dtype in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "U1", "U2", "?")] * 2,
    "one in many places": [[shared, shared], {"a": shared}, (shared,)],
    "predictions": [(0, 2, torch.rand(2, 3), ["a", "b"], {"id": [7, 8]}), (1, 1, torch.rand(1, 3), ["c"], {"id": [9]})],
}


@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_plain_data_comes_back(value: Any, with_key: bool) -> None:
    assert same(there_and_back(value, with_key=with_key), copy.deepcopy(value))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
def test_compressed_sparse_tensors_come_back() -> None:
    dense = torch.eye(4)
    for tensor in (dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr(2), dense.to_sparse_bsc(2)):
        back = there_and_back(tensor)
        assert back.layout == tensor.layout
        assert torch.equal(back.to_dense(), dense)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(alphabet=st.characters())
    | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=30,
)


@given(plain)
@settings(max_examples=100)
def test_any_nesting_comes_back(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_what_stood_in_two_places_stands_in_two_places() -> None:
    rows = there_and_back([shared, [2], shared])
    assert rows[0] is rows[2]
    nested: Any = [1]
    for _ in range(60):  # as a tree, more values than atoms in a litre of air
        nested = [nested, nested]
    assert there_and_back(nested)[0] is not None


class Text(str):
    pass


def test_tensors_come_back_where_torch_says_by_an_error_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch 2.6 does in its builds for CUDA; ranks on the CPU exchanged nothing with them."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    assert decode(memoryview(encode([torch.arange(3), 1])))[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [
        object(), print, int, Path("x"), Text("a"), [1, {"a": {2: torch.nn.ReLU()}}], np.ma.masked_array([1]),
        range(3), types.SimpleNamespace(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(NotPlain):
        encode([1, value])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's reader, of a damaged archive
def test_no_byte_runs_code_or_does_anything_but_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value's bytes, damaged at random: they decode to something or are refused, in little memory."""
    module = types.ModuleType("a_module_with_a_trap")
    vars(module)["__getattr__"] = lambda name: pytest.fail(f"asked for {name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    chance = random.Random(5)
    texts = [b"a_module_with_a_trap", b"posix", b"builtins", b"trainloop.errors"]
    refused = 0
    for _ in range(60):
        for value in VALUES.values():
            data = bytearray(encode(value))
            for _ in range(chance.randint(1, 4)):
                place = chance.randrange(len(data))
                kind = chance.randrange(4)
                if kind == 0:
                    data[place] = chance.randrange(256)
                elif kind == 1:
                    data[place : place + 8] = chance.choice([0, 1, 2**31, 2**62, 2**64 - 1]).to_bytes(8, "little")
                elif kind == 2:
                    del data[place : place + chance.randint(1, 9)]
                else:
                    data[place:place] = chance.choice(texts)
                if not data:
                    break
            try:
                decode(memoryview(data))
            except Malformed:
                refused += 1
    assert refused > 300


def test_a_class_is_a_named_tuple_that_is_loaded_or_none() -> None:
    data = encode(Pair(1, 2))
    assert decode(memoryview(data)) == Pair(1, 2)
    here = f"c{Pair.__module__}\nPair\n".encode()
    assert here in data
    for module, name in [("os", "system"), ("builtins", "eval"), ("subprocess", "Popen"), ("antigravity", "x")]:
        other = f"c{module}\n{name}\n".encode()
        # As long as before: the archive has the sizes of its records.
        forged = data.replace(here, other + b"0" * max(0, len(here) - len(other)))
        with pytest.raises(Malformed):
            decode(memoryview(forged))
    assert "antigravity" not in sys.modules

    class Runs(NamedTuple):
        a: int

    class Own(Runs):
        def __new__(cls, *args: Any) -> Any:
            pytest.fail("its code was run")

    Own.__qualname__, Own.__module__ = "Own", __name__
    globals()["Own"] = Own
    try:
        with pytest.raises(NotPlain, match="Own"):
            encode(tuple.__new__(Own, (1,)))
    finally:
        del globals()["Own"]


class Trap:
    def __reduce__(self) -> Any:
        return pytest.fail, ("its code was run",)


def test_a_pickle_that_calls_something_is_refused() -> None:
    buffer = io.BytesIO()
    torch.save({"x": Trap()}, buffer)
    with pytest.raises(Malformed):
        decode(buffer.getbuffer())
    with pytest.raises(NotPlain, match="_pytest"):
        encode({"x": Trap()})


def test_sparse_indices_beyond_the_tensor_are_refused() -> None:
    tensor = torch.sparse_coo_tensor([[2]], [5.0], (3,), check_invariants=True).coalesce()
    data = bytes(encode(tensor))
    index = (2).to_bytes(8, "little")
    refused = 0
    for place in range(len(data) - 8):
        if data[place : place + 8] == index:
            try:
                decode(memoryview(data[:place] + (999).to_bytes(8, "little") + data[place + 8 :]))
            except Malformed:
                refused += 1
    assert refused
