"""Contents that may stand in a checkpoint, and their copy in host memory."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.checkpoints import same
from torch import Tensor, nn

from trainloop import checkpoint
from trainloop.checkpoint import HostCopy, plain
from trainloop.checkpoint.plain import pinned_like
from trainloop.errors import CheckpointError

Point = namedtuple("Point", "x y")


class Level(enum.IntEnum):
    HIGH = 3


class Colour(str, enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "value, expected",
    [
        (np.float64(0.1), 0.1),
        (np.int32(4), 4),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (Level.HIGH, 3),
        (Colour.RED, "red"),
        (Point(1, np.float32(0.5)), (1, 0.5)),
        (deque([1, 2]), deque([1, 2])),
        (defaultdict(lambda: 0, a=1), {"a": 1}),
        (frozenset([1, 2]), {1, 2}),
        ({np.int64(3): 1}, {3: 1}),
        (torch.float16, torch.float16),
        (torch.Size([2]), torch.Size([2])),
        (np.array([1, 2], dtype=np.uint32), torch.tensor([1, 2], dtype=torch.uint32)),
        (np.array(2.0), torch.tensor(2.0, dtype=torch.float64)),
        (np.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T),
        (np.array([1.5], dtype=">f4"), torch.tensor([1.5])),
        (nn.Parameter(torch.ones(2)), torch.ones(2)),
        (torch.ones(2, requires_grad=True) * 2, torch.full((2,), 2.0)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_plain_types_come_back_from_disk(tmp_path: Path, value: Any, expected: Any) -> None:
    checkpoint.save(tmp_path / "a.pt", {"value": value})
    loaded = checkpoint.load(tmp_path / "a.pt")["value"]
    assert same(loaded, expected)
    assert not getattr(loaded, "requires_grad", False)


@pytest.mark.parametrize(
    "value, message",
    [
        (
            {"f": [print]},
            r"state\['f'\]\[0\] is a builtins.builtin_function_or_method, which a checkpoint can't contain",
        ),
        ({"f": np.array([object()])}, r"state\['f'\] is a numpy.ndarray of object"),
        ({"f": np.datetime64("2020-01-01")}, r"state\['f'\] is a datetime.date"),
        ({(1, print): 2}, r"the key \(1, <built-in function print>\) of state\[1\] is a builtins"),
        ({"f": torch.empty(2, device="meta")}, r"state\['f'\] is a torch.Tensor of torch.float32"),
        ({"f": np.longdouble(2)}, r"state\['f'\] is a numpy.[a-z0-9]+ of float128"),
        ({"f": Path("x")}, r"state\['f'\] is a pathlib\.(_local\.)?PosixPath.*Make state_dict\(\) return these types"),
    ],
)
def test_what_is_not_plain_is_named_by_its_path(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        plain(value)


def test_a_view_does_not_bring_its_whole_storage(tmp_path: Path) -> None:
    table = torch.randn(100_000, 4)
    checkpoint.save(tmp_path / "a.pt", {"row": table[7], "again": table[7]})
    assert (tmp_path / "a.pt").stat().st_size < 10_000
    assert torch.equal(checkpoint.load(tmp_path / "a.pt")["row"], table[7])


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(300, 300)
    for state in ({"a": weight, "b": weight.detach()}, HostCopy().copy({"a": weight, "b": weight.detach()})):
        checkpoint.save(tmp_path / "a.pt", state)
        assert (tmp_path / "a.pt").stat().st_size < 1.5 * weight.nbytes
        loaded = checkpoint.load(tmp_path / "a.pt")
        assert torch.equal(loaded["a"], weight)
        assert torch.equal(loaded["b"], weight)


def test_a_host_copy_is_a_copy_in_the_same_memory_each_time() -> None:
    source = {
        "w": torch.randn(50, 60),
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "half": torch.randn(7).to(torch.bfloat16),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "n": [1, "a"],
    }
    expected = plain(source, tensor=torch.clone)
    keeper = HostCopy()
    copied = keeper.copy(source)
    where = copied["w"].data_ptr()
    assert copied["image"].is_contiguous(memory_format=torch.channels_last)
    source["w"].zero_()
    source["sparse"].mul_(0)
    assert torch.equal(copied["w"], expected["w"])
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    assert all(same(copied[k], expected[k]) for k in ("image", "half", "flag", "empty", "n"))
    again = keeper.copy(source)
    assert again["w"].data_ptr() == where
    assert not again["w"].any()
    assert keeper.copy({"w": torch.ones(500, 60), "v": torch.ones(2)})["v"].tolist() == [1, 1]  # larger than before


@pytest.mark.gpu
def test_a_host_copy_of_a_gpus_tensors(tmp_path: Path) -> None:
    """Pinned, complete when copy() returns, untouched by what the GPU does next; the file opens without a GPU."""
    weight = torch.randn(4000, 4000, device="cuda")
    state = {"w": weight, "tied": weight.detach(), "step": torch.tensor(3.0), "half": weight[0].bfloat16()}
    keeper = HostCopy()
    for _ in range(20):
        weight.mul_(1.01)  # still running when the copy is asked for
    expected = weight.clone()
    copied = keeper.copy(state)
    weight.zero_()
    assert copied["w"].device.type == "cpu"
    assert copied["w"].is_pinned()
    assert copied["tied"].data_ptr() == copied["w"].data_ptr()
    assert torch.equal(copied["w"], expected.cpu())
    weight.copy_(expected)
    for saved in (state, copied):
        checkpoint.save(tmp_path / "a.pt", saved)
        raw = torch.load(tmp_path / "a.pt", weights_only=True)
        assert raw["w"].device.type == "cpu"
        assert torch.equal(raw["w"], expected.cpu())
        assert torch.equal(raw["half"], state["half"].cpu())


class Halves(torch.Tensor):
    """A tensor made of two others, as low-bit optimizers keep their state."""

    @staticmethod
    def __new__(cls, parts: list[torch.Tensor]) -> Halves:
        return torch.Tensor._make_wrapper_subclass(cls, (2 * len(parts[0]),), dtype=parts[0].dtype)

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.left, self.right = parts

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: Any) -> Halves:
        return cls([parts["left"], parts["right"]])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, *others = args
        return cls([func(part, *others, **(kwargs or {})) for part in (first.left, first.right)])


def test_tensors_made_of_tensors_need_their_librarys_word(tmp_path: Path) -> None:
    state = {"optimizer": Halves([torch.arange(2.0), torch.arange(2.0, 4.0)])}
    with pytest.raises(CheckpointError, match=r"state\['optimizer'\] is a .*Halves of torch.float32"):
        checkpoint.save(tmp_path / "a.pt", state)

    with torch.serialization.safe_globals([Halves]):  # as torchao does when it is imported
        checkpoint.save(tmp_path / "a.pt", HostCopy().copy(state))
        loaded = checkpoint.load(tmp_path / "a.pt")["optimizer"]
    assert type(loaded) is Halves
    assert loaded.left.tolist() + loaded.right.tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match="names code"):
        checkpoint.load(tmp_path / "a.pt")


def test_pinned_tensors_share_blocks_that_are_powers_of_two() -> None:
    """torch's allocator of pinned memory rounds each allocation up to a power of two."""
    sizes = []

    def allocate(size: int) -> Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    likes = [torch.rand(1000, 1100).t(), torch.zeros((), dtype=torch.int64), torch.zeros(0, 3), torch.rand(5, 7).half()]
    likes += [torch.rand(950 + i, 300).bfloat16() for i in range(40)]
    likes += [torch.rand(2, 3, 50, 50).to(memory_format=torch.channels_last), torch.zeros(3, dtype=torch.bool)]
    copies = pinned_like(likes, allocate)
    for like, copy in zip(likes, copies, strict=True):
        copy.copy_(like)
    for like, copy in zip(likes, copies, strict=True):
        assert torch.equal(like, copy)
        assert (like.stride(), like.dtype) == (copy.stride(), copy.dtype)
        assert copy.untyped_storage().nbytes() == copy.nbytes
    total = sum(like.nbytes for like in likes)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert sum(sizes) < 1.6 * total < sum(1 << (like.nbytes - 1).bit_length() for like in likes if like.numel())


def test_containers_with_a_behaviour_of_their_own_keep_it_in_a_file(tmp_path: Path) -> None:
    lasts: defaultdict[str, Any] = defaultdict(list, a=[deque([torch.ones(1)], maxlen=2)])
    state = {"seen": Counter("aab"), "lasts": lasts, "window": deque([1, 2, 3], maxlen=3), "free": defaultdict(None)}
    checkpoint.save(tmp_path / "state.pt", HostCopy().copy(state))
    loaded = checkpoint.load(tmp_path / "state.pt")
    assert {key: type(value) for key, value in loaded.items()} == {key: type(value) for key, value in state.items()}
    loaded["seen"]["c"] += 1
    assert loaded["seen"] == {"a": 2, "b": 1, "c": 1}
    loaded["window"].append(4)
    assert loaded["window"] == deque([2, 3, 4])
    loaded["lasts"]["a"][0].extend([5, 6])
    loaded["lasts"]["b"].append(7)
    assert loaded["lasts"] == {"a": [deque([5, 6])], "b": [7]}
    assert loaded["free"].default_factory is None
    raw = torch.load(tmp_path / "state.pt", weights_only=True)  # without this package, the items are there
    assert list(raw["window"].values()) == [1, 2, 3]


def test_attributes_of_an_ordered_dict_may_be_such_containers(tmp_path: Path) -> None:
    weights = OrderedDict(a=torch.ones(1))
    weights.__dict__.update(_metadata=defaultdict(dict, {"": {"version": 1}}), lasts=[deque([1], maxlen=2)])
    checkpoint.save(tmp_path / "state.pt", {"model": weights})
    found = vars(checkpoint.load(tmp_path / "state.pt")["model"])
    assert found == {"_metadata": {"": {"version": 1}}, "lasts": [deque([1])]}
    assert found["_metadata"].default_factory is dict
    assert found["lasts"][0].maxlen == 2
