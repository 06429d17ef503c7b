"""The file by which ranks' results come back: shared room, its memory given back as it is read, used again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from trainloop._transfer import pack_state, unpack_state
from trainloop._transfer.pages import anonymous_file
from trainloop._transfer.pickling import Fingerprint
from trainloop._transfer.result import ResultFile


@pytest.fixture
def fd() -> Iterator[int]:
    number = anonymous_file("result")
    yield number
    os.close(number)


KINDS = [((3, 5), torch.float64), ((), torch.int64), ((0, 4), torch.float32), ((700, 700), torch.bfloat16)]


def rooms(file: ResultFile) -> list[torch.Tensor]:
    return file.room_for([(torch.Size(shape), dtype) for shape, dtype in KINDS])


def test_ranks_write_into_the_same_tensors_and_the_reader_empties_the_file(fd: int) -> None:
    for turn in range(2):  # the same ranks may do more work
        first, second = ResultFile(fd), ResultFile(fd)
        ours, theirs = rooms(first), rooms(second)
        more = first.room_for([(torch.Size([9]), torch.float32)])
        for i, tensor in enumerate(theirs):
            tensor[...] = 10 * turn + i
        more[0].fill_(turn)
        shared = torch.arange(5000.0)
        state = {
            "room": ours,
            "twice": ours[3],
            "view": ours[0][1],
            "more": more,
            "tied": [shared, shared[10:]],
            "array": np.arange(4000).reshape(2, -1).T,
            "empty": np.zeros((0, 3)),
            "word": "word",
        }
        first.write({"answer": turn, "state": pack_state(state)})
        held = 512 * os.fstat(fd).st_blocks
        result: Any = ResultFile(fd).read()
        assert held > ours[3].nbytes
        assert 512 * os.fstat(fd).st_blocks <= 4096
        found = unpack_state(result["state"])
        assert result["answer"] == turn
        assert result["state"].buffers == []  # let go one by one
        for i, (tensor, (shape, dtype)) in enumerate(zip(found["room"], KINDS, strict=True)):
            assert tensor.shape == shape
            assert tensor.dtype == dtype
            assert torch.all(tensor == 10 * turn + i)
        assert found["twice"].untyped_storage().data_ptr() == found["room"][3].untyped_storage().data_ptr()
        assert torch.equal(found["view"], found["room"][0][1])
        assert torch.equal(found["more"][0], torch.full([9], float(turn)))
        assert found["tied"][0][10:].data_ptr() == found["tied"][1].data_ptr()
        assert np.array_equal(found["array"], state["array"])
        assert found["empty"].shape == (0, 3)
        found["room"][3].untyped_storage().resize_(0)  # as one that torch has made


def test_a_fingerprint_tells_changes_of_large_and_small_memory() -> None:
    large, small = torch.zeros(5000), np.zeros(3)
    before = Fingerprint([large, small, "text"]).fixed()
    assert Fingerprint([large, small, "text"]) == before
    large[4000] = 1
    assert Fingerprint([large, small, "text"]) != before
    large[4000] = 0
    small[1] = 1
    assert Fingerprint([large, small, "text"]) != before
    with pytest.raises(TypeError, match="generator"):
        Fingerprint(item for item in [])
