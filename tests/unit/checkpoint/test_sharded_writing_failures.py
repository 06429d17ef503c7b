"""What rank 0 learns of another rank's part that can't be written."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from trainloop.checkpoint import sharded_writing
from trainloop.checkpoint.sharded_writing import FolderWriting, _write_parts, take_shards


def test_a_disk_too_full_for_word_of_it_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writing = FolderWriting(str(tmp_path), "name", "run", {}, lambda put: None, wait_s=5.0)
    writing._world_size = 2
    other = copy.copy(writing)
    other._rank = 1
    monkeypatch.setattr(sharded_writing.json, "dump", full)
    assert other.write() is None
    error = writing.write()
    assert "rank 1: OSError: [Errno 28] No space left on device" in str(error)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_rank_0_has_removed_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        _write_parts(str(tmp_path / "gone"), {"w": torch.ones(4)}, {"w": ((0,), (4,))}, 1)
    assert not (tmp_path / "gone").exists()


def test_shards_whose_keys_read_alike_have_names_of_their_own() -> None:
    first, second = torch.zeros(2), torch.ones(3)
    first.device_mesh = second.device_mesh = None  # type: ignore[attr-defined]  # as a sharded tensor has
    state, shards = take_shards({"kept": {1: first, "1": second}})
    assert state["kept"].keys() == {1, "1"}
    assert [shard.numel() for shard in shards.values()] == [2, 3]
    assert [list(mark.values()) for mark in state["kept"].values()] == [[name] for name in shards]
