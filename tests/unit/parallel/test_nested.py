"""One walker over containers: every kind comes back as what it was, with other parts."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_map

from trainloop import distributed
from trainloop._support.carried import carried_state_of, load_carried_state
from trainloop._support.nested import map_parts, map_together, packed, parts_of, paths_of, unpacked, with_parts
from trainloop.data import SplitBatches, count_samples, move_to
from trainloop.model import TTBasicModel
from trainloop.parallel.replicas.gather import combine_predictions, gather
from trainloop.parallel.replicas.scatter import scatter
from trainloop.train_loop.run.rows import join_rows, on_cpu, rows_at

Pair = namedtuple("Pair", "x y")


class Checked(NamedTuple):
    """Its ``_make`` skips what a ``__new__`` of a subclass asks for."""

    x: Any
    y: Any


class Strict(Checked):
    def __new__(cls, x: Any) -> Strict:
        raise AssertionError("made anew")


class Batch(MutableMapping[str, Any]):
    """Holds its items in an object that a shallow copy shares."""

    def __init__(self, items: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Rows(Batch):
    """As a tensordict: indexed by keys, or by rows as a tensor, and iterates over the rows."""

    def __getitem__(self, key: Any) -> Any:
        return self._items[key] if isinstance(key, str) else Rows({name: v[key] for name, v in self._items.items()})

    def __iter__(self) -> Any:
        return (self[i] for i in range(self.shape[0]))

    @property
    def shape(self) -> Any:
        return getattr(self._items["x"], "shape", ())

    def keys(self) -> Any:
        return self._items.keys()

    def items(self) -> Any:
        return self._items.items()

    def values(self) -> Any:
        return self._items.values()


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding: attributes beside the data, and a constructor of its own."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


@dataclass(frozen=True, eq=False)
class Frozen:
    x: Any
    y: Any
    doubled: Any = field(init=False)
    later: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", [self.x, self.x])


@dataclass(slots=True)
class Slots:
    x: Any
    y: Any


class OwnList(list[Any]):
    def __init__(self, parts: Any, *, name: str = "") -> None:
        super().__init__(parts)


def in_all_kinds(x: Any, y: Any) -> list[Any]:
    filled: defaultdict[str, Any] = defaultdict(list)
    filled.update(x=x, y=y)
    return [
        [x, y],
        (x, y),
        {"x": x, 1: y},
        Pair(x, y),
        Strict._make([x, y]),
        filled,
        OrderedDict(y=y, x=x),
        MappingProxyType({"x": x, "y": y}),
        Batch({"x": x, "y": y}),
        Rows({"x": x, "y": y}),
        Encoding({"x": x, "y": y}, "fast"),
        Frozen(x, y),
        Slots(x, y),
        OwnList([x, y]),
    ]


KINDS = pytest.mark.parametrize("number", range(14), ids=[type(kind).__name__ for kind in in_all_kinds(0, 0)])


def leaves(value: Any) -> list[Any]:
    parts = parts_of(value)
    return [value] if parts is None else [leaf for part in parts for leaf in leaves(part)]


@KINDS
def test_a_container_stays_what_it_was(number: int) -> None:
    def doubled(value: Any) -> Any:
        return 2 * value if isinstance(value, int) else map_parts(doubled, value)

    value = in_all_kinds(1, {"in": (2, None)})[number]
    expected = in_all_kinds(2, {"in": (4, None)})[number]
    changed = doubled(value)
    assert type(changed) is type(value)
    assert changed == expected or leaves(changed) == leaves(expected)
    assert leaves(value) == leaves(in_all_kinds(1, {"in": (2, None)})[number])  # and is itself unchanged
    assert len(paths_of(value)) == len(parts_of(value) or ())
    same = with_parts(value, parts_of(value) or ())
    assert same == value or leaves(same) == leaves(value)
    if isinstance(value, defaultdict):
        assert changed["new"] == []
    if isinstance(value, Encoding):
        assert changed.encodings == "fast"
    together = map_together(lambda parts: parts, [value, changed])
    assert type(together) is type(value)
    assert leaves(together) != leaves(value)


def test_single_values_are_no_containers() -> None:
    for value in ("text", b"bytes", 1.5, None, {1, 2}, torch.ones(2), np.ones(2), Frozen, range(3)):
        assert parts_of(value) is None
        assert map_parts(repr, value) is value
        assert map_together(repr, [value, value]) is value


def test_a_type_that_its_parts_can_not_make_becomes_the_plain_one() -> None:
    assert map_parts(str, torch.Size([2, 3])) == ("2", "3")
    largest = torch.ones(2, 3).max(1)
    assert isinstance(map_parts(Tensor.double, largest), torch.return_types.max)
    with pytest.raises(ValueError, match="zip"):
        map_together(sum, [[1, 2], [1]])


def test_plain_trees_are_torchs_own() -> None:
    tree = {"a": [1, (2, 3)], "b": OrderedDict(c=4), "d": Pair(5, {"e": 6})}

    def squared(value: Any) -> Any:
        return value**2 if isinstance(value, int) else map_parts(squared, value)

    assert squared(tree) == tree_map(lambda leaf: leaf**2, tree)


@KINDS
def test_every_use_takes_every_kind(number: int) -> None:
    x, y = torch.arange(8.0).reshape(4, 2), torch.arange(4)
    batch = in_all_kinds(x, y)[number]
    meta = torch.device("meta")
    assert count_samples(batch) == 4
    assert all(leaf.device == meta for leaf in leaves(move_to(batch, meta))[:2])
    halves = scatter(batch, 2)
    assert [[len(leaf) for leaf in leaves(half)[:2]] for half in halves] == [[2, 2], [2, 2]]
    assert all(torch.equal(a, b) for a, b in zip(leaves(gather(halves)), leaves(batch), strict=True))
    part = SplitBatches([batch], dim=0).part(batch, 4, rank=1, world_size=2)
    assert all(torch.equal(a, b) for a, b in zip(leaves(part), leaves(halves[1]), strict=True))
    gathered = distributed.all_gather(batch)
    assert type(gathered) is type(batch)
    assert [tuple(leaf.shape) for leaf in leaves(gathered)[:2]] in ([(1, 4, 2), (1, 4)], [(1, 4), (1, 4, 2)])
    sliced = on_cpu(in_all_kinds(x[:1], y[:1])[number])
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in leaves(sliced))
    state = unpacked(packed(in_all_kinds(x.numpy(), {"inner": y.numpy()})[number]))
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves(state))


def test_predictions_in_odd_containers_are_joined() -> None:
    halves = [Pair(torch.ones(2), ["a", "b"]), Pair(torch.zeros(1), ["c"])]
    for joined in (join_rows(halves), combine_predictions(halves, [2, 1])):
        assert type(joined) is Pair
        assert joined.x.tolist() == [1, 1, 0]
        assert joined.y == ["a", "b", "c"]


@dataclass
class Meta:
    names: list[str]
    scores: Tensor


def test_metadata_in_dataclasses_and_read_only_mappings_are_joined_and_put_in_order() -> None:
    halves = [Meta(["a", "b"], torch.ones(2)), Meta(["c"], torch.zeros(1))]
    for joined in (join_rows(halves), combine_predictions(halves, [2, 1])):
        assert (type(joined), joined.names, joined.scores.tolist()) == (Meta, ["a", "b", "c"], [1, 1, 0])
        in_order = rows_at(joined, [2, 0, 1], 3)
        assert (in_order.names, in_order.scores.tolist()) == (["c", "a", "b"], [0, 1, 1])
    views = [MappingProxyType(vars(half)) for half in halves]
    assert combine_predictions(views, [2, 1])["names"] == ["a", "b", "c"]
    assert join_rows([Meta, Meta]) == [Meta, Meta]


def test_basic_model_moves_inputs_in_mappings() -> None:
    class Sum(TTBasicModel):
        def forward(self, inputs: Any) -> Tensor:
            assert isinstance(inputs, Encoding)
            total: Tensor = inputs["x"].sum(1)
            return total

    inputs = Encoding({"x": torch.ones(2, 3, device="meta")}, "fast")
    del inputs.data["x"]
    inputs["x"] = torch.ones(2, 3)
    loss = Sum().get_loss((inputs, torch.zeros(2)), nn.MSELoss(), torch.device("cpu"))
    assert loss.item() == 9


def test_state_carried_in_a_named_tuple_is_saved() -> None:
    class Recurrent(nn.Module):
        carried_state = {"state": 1}

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.state: Any = None

    model = Recurrent()
    saved = []
    for rank in range(2):
        model.state = Pair(torch.full((1, 2), float(rank)), {"c": torch.full((3, 2), float(rank))})
        saved.append(carried_state_of(model))
    load_carried_state(model, saved, rank=0, world_size=1)
    assert model.state.x.tolist() == [[0, 0, 1, 1]]
    assert model.state.y["c"].shape == (3, 4)


def test_a_packed_sequence_is_asked_itself() -> None:
    packed_rows = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move_to([packed_rows], torch.device("meta"))[0]
    assert type(moved) is type(packed_rows)
    assert moved.data.is_meta
    assert moved.batch_sizes.tolist() == [2, 2, 1]  # which torch keeps on the CPU
