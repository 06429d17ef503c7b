"""The file: written whole or not at all, verified, unable to run code."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import make_state, same, write_some
from torch import nn

from trainloop import checkpoint
from trainloop.checkpoint import CheckpointInfo, folder, plain
from trainloop.errors import CheckpointError


class RunsWhenUnpickled:
    """Writes a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = str(witness)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({self.witness!r}, 'w').close()",)


# -- a checkpoint is what was saved ------------------------------------------------------------------------------------


def test_load_gives_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.pt"
    checkpoint.save(path, make_state(2.0), CheckpointInfo(epoch=3, step=70, run="r", stamp=5, value=0.5, reason="end"))
    assert same(checkpoint.load(path), plain(make_state(2.0)))
    info = checkpoint.read_info(path)
    assert info == CheckpointInfo(epoch=3, step=70, run="r", stamp=5, value=0.5, reason="end")
    assert os.listdir(path.parent) == ["a.pt"]


def test_a_file_opens_with_plain_torch_and_as_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    checkpoint.save(path, make_state(1.0))
    assert same(torch.load(path, weights_only=True), plain(make_state(1.0)))
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert torch.equal(mapped["model"]["w"], make_state(1.0)["model"]["w"])
    del mapped
    import zipfile

    assert zipfile.ZipFile(path).testzip() is None


def test_permissions_are_those_of_any_other_file(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.pt", {})
    (tmp_path / "other").touch()
    assert (tmp_path / "a.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_state_dict_versions_survive(tmp_path: Path) -> None:
    weights = nn.BatchNorm1d(3).state_dict()
    checkpoint.save(tmp_path / "a.pt", {"model": weights})
    assert checkpoint.load(tmp_path / "a.pt")["model"]._metadata == weights._metadata  # type: ignore[attr-defined]


def test_a_later_version_may_tell_more_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    checkpoint.save(path, {"a": 1}, CheckpointInfo(step=4))
    data = path.read_bytes()
    length, crc, info_length = struct.unpack("<QII", data[-28:-12])
    described = json.dumps({**json.loads(data[length : length + info_length]), "weather": "fine"}).encode()
    head = struct.pack("<QII", length, crc, len(described))
    path.write_bytes(data[:length] + described + head + struct.pack("<I", zlib.crc32(described + head)) + data[-8:])
    assert checkpoint.read_info(path).step == 4
    assert checkpoint.load(path) == {"a": 1}


def test_names_sort_as_training_went() -> None:
    infos = [CheckpointInfo(epoch=e, step=s) for e, s in [(0, 7), (0, 70), (1, 105), (2, 1000), (10, 20000)]]
    names = [checkpoint.checkpoint_name(info) for info in infos]
    assert names == sorted(names)
    assert names[0] == "checkpoint-epoch=0001-step=00000007.pt"
    assert checkpoint.checkpoint_name(infos[0], version=2) == "checkpoint-epoch=0001-step=00000007_2.pt"


# -- damage ------------------------------------------------------------------------------------------------------------


def load_newest_with_warnings(where: Path) -> tuple[float, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoint.load_newest(where)
    assert found is not None
    return found[1]["place"]["epoch"], [str(w.message) for w in caught]


@pytest.mark.parametrize("tenths", range(10))
def test_cut_off_at_each_tenth_the_one_before_is_used(tmp_path: Path, tenths: int) -> None:
    paths = write_some(tmp_path)
    os.truncate(paths[-1], paths[-1].stat().st_size * tenths // 10)
    with pytest.raises(CheckpointError, match=r"step=00000030.pt is not a complete checkpoint: .*Use another"):
        checkpoint.load(paths[-1])
    epoch, messages = load_newest_with_warnings(tmp_path)
    assert epoch == 2
    assert len(messages) == 1
    assert "step=00000030.pt" in messages[0]
    assert f"Used instead: {paths[1]}" in messages[0]


def test_any_flipped_byte_is_found(tmp_path: Path) -> None:
    paths = write_some(tmp_path)
    data = paths[-1].read_bytes()
    rng = random.Random(0)
    end = range(len(data) - 200, len(data))  # info and end mark, each byte
    for at in [*rng.sample(range(len(data)), 150), *end]:
        changed = bytearray(data)
        changed[at] ^= rng.choice([1, 0x80, 0xFF])
        paths[-1].write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"is damaged: its checksum is|is not a complete checkpoint"):
            checkpoint.load(paths[-1])
    epoch, messages = load_newest_with_warnings(tmp_path)
    assert (epoch, len(messages)) == (2, 1)


def test_the_newest_missing_is_noticed(tmp_path: Path) -> None:
    paths = write_some(tmp_path)
    paths[-1].unlink()
    epoch, messages = load_newest_with_warnings(tmp_path)
    assert epoch == 2
    assert len(messages) == 1
    assert "step=00000030.pt, the newest checkpoint written, is missing" in messages[0]


def test_a_file_shorter_than_an_end_mark_is_damaged(tmp_path: Path) -> None:
    path = write_some(tmp_path)[-1]
    data = path.read_bytes()
    for length in (0, 1, 8, 20):
        path.write_bytes(data[len(data) - length :])
        with pytest.raises(CheckpointError, match=f"it has no end mark after {length} bytes"):
            checkpoint.load(path)


def test_several_damaged_ones_give_one_warning(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 4)
    os.truncate(paths[3], 0)
    data = bytearray(paths[2].read_bytes())
    data[1000] ^= 1
    paths[2].write_bytes(data)
    epoch, messages = load_newest_with_warnings(tmp_path)
    assert (epoch, len(messages)) == (2, 1)
    assert "it has no end mark after 0 bytes" in messages[0]
    assert "checksum" in messages[0]


def test_an_old_damaged_one_is_nobodys_concern(tmp_path: Path) -> None:
    paths = write_some(tmp_path)
    os.truncate(paths[0], 100)
    assert load_newest_with_warnings(tmp_path) == (3, [])


def test_whole_ones_give_no_warning(tmp_path: Path) -> None:
    write_some(tmp_path)
    assert load_newest_with_warnings(tmp_path) == (3, [])


def test_torchs_default_of_mapping_files_does_not_matter(tmp_path: Path) -> None:
    config = pytest.importorskip("torch.utils.serialization").config  # of PyTorch 2.7 or newer
    write_some(tmp_path, 1)
    config.load.mmap = True
    try:
        assert checkpoint.load_newest(tmp_path) is not None
    finally:
        config.load.mmap = False


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    for path in write_some(tmp_path, 2):
        os.truncate(path, 50)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be loaded. To start from scratch, move these files away"
    ):
        checkpoint.load_newest(tmp_path)


def test_an_empty_or_missing_folder_has_no_newest(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path) is None
    assert checkpoint.load_newest(tmp_path / "none") is None


def test_all_deleted_is_a_fresh_start_with_a_warning(tmp_path: Path) -> None:
    for path in write_some(tmp_path, 2):
        path.unlink()
    with pytest.warns(
        RuntimeWarning, match=r"is missing.\nThere is no other checkpoint, so training starts from scratch"
    ):
        assert checkpoint.load_newest(tmp_path) is None


def test_other_files_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    write_some(tmp_path, 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-of-mine.pt").write_bytes(b"x")
    (tmp_path / ".checkpoint-epoch=0009-step=00000009.pt.r.0123abcd.tmp").write_bytes(b"x")
    (tmp_path / "checkpoint-epoch=0007-step=00000007.pt").mkdir()
    assert [c.info.step for c in checkpoint.checkpoints(tmp_path) if c.info] == [10]


def test_the_newest_is_the_one_written_last_whatever_its_step(tmp_path: Path) -> None:
    """As where a second run starts afresh in the folder of a longer one."""
    write_some(tmp_path)
    info = CheckpointInfo(epoch=0, step=5, run="second", stamp=4)
    checkpoint.save(tmp_path / checkpoint.checkpoint_name(info), make_state(9), info)
    assert load_newest_with_warnings(tmp_path) == (9, [])


def test_a_damaged_newest_of_a_second_run_is_noticed(tmp_path: Path) -> None:
    """The first run's names are higher, as it trained for longer."""
    write_some(tmp_path)
    info = CheckpointInfo(epoch=0, step=5, run="second", stamp=4)
    path = tmp_path / checkpoint.checkpoint_name(info)
    checkpoint.save(path, make_state(9), info)
    checkpoint.mark_newest(checkpoint.folder(tmp_path), path.name)
    os.truncate(path, 100)
    epoch, messages = load_newest_with_warnings(tmp_path)
    assert epoch == 3
    assert len(messages) == 1
    assert "step=00000005.pt is not a complete checkpoint" in messages[0]


def test_links_that_lead_nowhere_do_not_hide_checkpoints(tmp_path: Path) -> None:
    write_some(tmp_path)
    (tmp_path / "checkpoint-epoch=0001-step=00000001.pt").symlink_to(
        tmp_path / "checkpoint-epoch=0001-step=00000001.pt"
    )
    assert load_newest_with_warnings(tmp_path) == (3, [])


def test_a_folder_with_another_state_pt_is_told(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "state.pt", make_state())
    with pytest.raises(CheckpointError, match=r"state\.pt is not the state of a sharded checkpoint"):
        checkpoint.load(tmp_path)


def test_load_takes_a_folder_for_its_newest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a folder without a checkpoint. Pass a checkpoint's path"):
        checkpoint.load(tmp_path)
    write_some(tmp_path)
    assert checkpoint.load(tmp_path)["place"]["epoch"] == 3


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"None is not a checkpoint's path"):
        checkpoint.load(None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"none.pt: no such file or folder. Pass a checkpoint's path"):
        checkpoint.load(tmp_path / "none.pt")


def test_what_is_no_dict_is_told(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.pt", [1, 2])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"a.pt contains a list, not a dict. Use a checkpoint that"):
        checkpoint.load(tmp_path / "a.pt")


def test_the_mark_of_the_newest_is_older_than_the_checkpoint(tmp_path: Path) -> None:
    """So that `ls -t | head -1` finds a checkpoint."""
    paths = write_some(tmp_path)
    assert max((p for p in tmp_path.iterdir()), key=lambda p: p.stat().st_mtime_ns) == paths[-1]


# -- code --------------------------------------------------------------------------------------------------------------


def with_end_mark(path: Path, body: bytes) -> None:
    described = b"{}"
    head = struct.pack("<QII", len(body), zlib.crc32(body), len(described))
    end = head + struct.pack("<I8s", zlib.crc32(described + head), b"TRLOOP\x00\x01")
    path.write_bytes(body + described + end)


@pytest.mark.parametrize("form", ["pickle", "torch.save", "torch.save legacy"])
@pytest.mark.parametrize("marked", [False, True], ids=["bare", "with a right end mark"])
def test_code_is_refused_and_does_not_run(tmp_path: Path, form: str, marked: bool) -> None:
    path, witness = tmp_path / "checkpoint-epoch=0009-step=00000090.pt", tmp_path / "witness"
    evil = {"model": {"w": torch.zeros(2)}, "x": RunsWhenUnpickled(witness)}
    if form == "pickle":
        path.write_bytes(pickle.dumps(evil))
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=form == "torch.save")
    if marked:
        with_end_mark(path, path.read_bytes())
    expected = "has no end mark"
    if marked:
        expected = (
            r"names code \(classes or functions\).*no code in it was run" if form == "torch.save" else "is a pickle in"
        )
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.load(path)
    assert not witness.exists()
    # Among others in a folder it is passed over like a damaged one.
    write_some(tmp_path)
    assert load_newest_with_warnings(tmp_path)[0] == 3
    assert not witness.exists()
    # The witness works: the same bytes do run where code is allowed.
    if form == "torch.save":
        torch.load(path, weights_only=False)
        assert witness.exists()


def test_what_cannot_be_read_without_code_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"state\['callbacks'\]\['x'\]\[1\] is a .*RunsWhenUnpickled, which a checkpoint can't"
    ):
        checkpoint.save(tmp_path / "a.pt", {"callbacks": {"x": [1, RunsWhenUnpickled(tmp_path)]}})
    assert os.listdir(tmp_path) == []


# -- a full disk, a kill ---------------------------------------------------------------------------------------------


def test_unfinished_files_of_others_stay(tmp_path: Path) -> None:
    names = [".checkpoint-epoch=0-step=1.pt.run-a.0123abcd.tmp", ".x.pt.run-b.0123abcd.tmp", "mine.run-a.0123abcd.tmp"]
    for name in names:
        (tmp_path / name).touch()
    folder(tmp_path).remove_unfinished("run-a")
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])
    folder(tmp_path / "none").remove_unfinished("run-a")


def test_a_folder_that_can_not_be_listed_has_nothing_of_the_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refused)
    folder(tmp_path).remove_dead()
    with pytest.raises(PermissionError):
        folder(tmp_path).names()
