"""The file: written whole or not at all, verified, unable to run code."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints import in_small_tmpfs, make_state, same, write_some
from places import ROOT
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
    with pytest.raises(CheckpointError, match=r"step=00000030.pt is no whole checkpoint: .*Use another one"):
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
        with pytest.raises(CheckpointError, match=r"is damaged: its checksum is|is no whole checkpoint"):
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


def test_several_damaged_ones_give_one_warning(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 4)
    os.truncate(paths[3], 0)
    data = bytearray(paths[2].read_bytes())
    data[1000] ^= 1
    paths[2].write_bytes(data)
    epoch, messages = load_newest_with_warnings(tmp_path)
    assert (epoch, len(messages)) == (2, 1)
    assert "it has 0 bytes" in messages[0]
    assert "checksum" in messages[0]


def test_an_old_damaged_one_is_nobodys_concern(tmp_path: Path) -> None:
    paths = write_some(tmp_path)
    os.truncate(paths[0], 100)
    assert load_newest_with_warnings(tmp_path) == (3, [])


def test_whole_ones_give_no_warning(tmp_path: Path) -> None:
    write_some(tmp_path)
    assert load_newest_with_warnings(tmp_path) == (3, [])


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    for path in write_some(tmp_path, 2):
        os.truncate(path, 50)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded. To start afresh, move them away"):
        checkpoint.load_newest(tmp_path)


def test_an_empty_or_missing_folder_has_no_newest(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path) is None
    assert checkpoint.load_newest(tmp_path / "none") is None


def test_all_deleted_is_a_fresh_start_with_a_warning(tmp_path: Path) -> None:
    for path in write_some(tmp_path, 2):
        path.unlink()
    with pytest.warns(RuntimeWarning, match=r"is missing.\nThere is no other: training starts afresh"):
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


def test_load_takes_a_folder_for_its_newest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a folder with no checkpoint in it. Give a checkpoint's path"):
        checkpoint.load(tmp_path)
    write_some(tmp_path)
    assert checkpoint.load(tmp_path)["place"]["epoch"] == 3


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"none.pt: no such file. Give a checkpoint's path, or resume_from='last'"
    ):
        checkpoint.load(tmp_path / "none.pt")


def test_what_is_no_dict_is_told(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.pt", [1, 2])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"a.pt holds a list, not a dict. Use a checkpoint that trainloop wrote"):
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
            r"names code \(classes or functions\).*nothing of it was run" if form == "torch.save" else "is a pickle of"
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
        CheckpointError, match=r"state\['callbacks'\]\['x'\]\[1\] is a .*RunsWhenUnpickled, which can't"
    ):
        checkpoint.save(tmp_path / "a.pt", {"callbacks": {"x": [1, RunsWhenUnpickled(tmp_path)]}})
    assert os.listdir(tmp_path) == []


# -- a full disk, a kill ---------------------------------------------------------------------------------------------


FULL_DISK = """
import errno, os, sys, torch
from trainloop import checkpoint
where = sys.argv[1]
small = {"w": torch.zeros(1000)}
checkpoint.save(where + "/checkpoint-epoch=0000-step=00000001.pt", small)
for size in (3_000_000, 900_000, 2_000_000):  # in the zip's first record, and in a later one
    try:
        checkpoint.save(where + "/checkpoint-epoch=0000-step=00000002.pt", {"v": small["w"], "w": torch.zeros(size)})
        print("written", size)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        print("full", size, os.listdir(where))
checkpoint.load(where + "/checkpoint-epoch=0000-step=00000001.pt")
checkpoint.save(where + "/checkpoint-epoch=0000-step=00000003.pt", small)
print("then", sorted(os.listdir(where)))
"""


def test_a_full_disk_leaves_the_earlier_whole_and_nothing_else(tmp_path: Path) -> None:
    done = in_small_tmpfs(FULL_DISK, tmp_path, megabytes=3)
    assert done.returncode == 0, done.stderr
    first = "checkpoint-epoch=0000-step=00000001.pt"
    assert done.stdout.splitlines() == [
        f"full 3000000 ['{first}']",
        f"full 900000 ['{first}']",
        f"full 2000000 ['{first}']",
        f"then ['{first}', 'checkpoint-epoch=0000-step=00000003.pt']",
    ]
    assert "unexpected pos" not in done.stderr


WRITER = """
import os, sys, torch
from trainloop import checkpoint
from trainloop.checkpoint import CheckpointInfo
from trainloop.checkpoint import folder
where, first = sys.argv[1], int(sys.argv[2])
state = {"w": torch.zeros(250_000), "v": torch.zeros(1000), "n": 0}
os.write(1, b"ready\\n")
for i in range(first, first + 10_000):
    state["w"].fill_(i); state["v"].fill_(i); state["n"] = i
    info = CheckpointInfo(step=i, stamp=i, run="r")
    name = checkpoint.checkpoint_name(info)
    checkpoint.save(os.path.join(where, name), state, info)
    checkpoint.mark_newest(folder(where), name, run="r")
    old = checkpoint.checkpoint_name(CheckpointInfo(step=i - 2))
    folder(where).remove(old)
"""


def test_a_kill_during_the_write_always_leaves_a_whole_one(tmp_path: Path) -> None:
    """50 kills, spread over the 1 to 3 ms that a write of 1 MB takes; each writer goes on where the last one was."""
    rng = random.Random(0)
    first, before, leftovers = 1, 0, 0
    # One start of Python and torch for all: the writer forks before each round, and the fork is killed.
    code = (
        "import os, signal, sys\n"
        f"code = compile({WRITER!r}, 'writer', 'exec')\n"
        "import torch, trainloop.checkpoint\n"
        "torch.set_num_threads(1)\n"
        "for line in sys.stdin:\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        sys.argv[2] = line.strip()\n"
        "        exec(code, {})\n"
        "        os._exit(0)\n"
        "    os.write(1, b'%d\\n' % pid)\n"
        "    os.waitpid(pid, 0)\n"
        "    os.write(1, b'gone\\n')\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    try:
        for round_ in range(50):
            print(first, file=starter.stdin, flush=True)
            said = [starter.stdout.readline().strip() for _ in range(2)]
            pid = int(next(line for line in said if line != "ready"))
            if round_ == 0:
                while not checkpoint.checkpoints(tmp_path):  # there has to be a first one
                    time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
            assert starter.stdout.readline() == "gone\n"
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = checkpoint.load_newest(tmp_path)
            assert found is not None
            state = found[1]
            assert state["w"].eq(state["n"]).all()
            assert state["v"].eq(state["n"]).all()
            assert state["n"] >= before, "an older one than before the kill"
            before = state["n"]
            first = before + 1
            leftovers += len(list(tmp_path.glob(".*.tmp")))
            folder(tmp_path).remove_unfinished("someone else")
            folder(tmp_path).remove_unfinished("r")
            assert not list(tmp_path.glob(".*.tmp"))
    finally:
        starter.stdin.close()
        starter.wait(20)
        starter.stdout.close()
    assert leftovers >= 10, "the kills did not hit the writes"


WRITES_AND_WAITS = """
import sys, time
from trainloop.checkpoint import folder
def write(file):
    file.write(b"half")
    file.flush()
    print("half", flush=True)
    time.sleep(1000)
folder(sys.argv[1]).write("checkpoint.pt", write, writer="another-run")
"""


def test_what_a_killed_process_of_any_run_left_goes_and_nothing_else(tmp_path: Path) -> None:
    others = [".x.pt.run-b.0123abcd.tmp", ".checkpoint.pt.run.0123456789abcdef0123.tmp", ".swp.tmp", "mine.tmp"]
    for name in others:  # of an older version, of another host, of other programs
        (tmp_path / name).touch()
    command = [sys.executable, "-c", WRITES_AND_WAITS, str(tmp_path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"half\n"
        assert len(os.listdir(tmp_path)) == len(others) + 2
        writers[0].kill()
        writers[0].wait()
        folder(tmp_path).remove_dead()
        assert len(os.listdir(tmp_path)) == len(others) + 1, "the living one's stays, the dead one's goes"
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    folder(tmp_path).remove_dead()
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    folder(tmp_path / "none").remove_dead()


def test_unfinished_files_of_others_stay(tmp_path: Path) -> None:
    names = [".checkpoint-epoch=0-step=1.pt.run-a.0123abcd.tmp", ".x.pt.run-b.0123abcd.tmp", "mine.run-a.0123abcd.tmp"]
    for name in names:
        (tmp_path / name).touch()
    folder(tmp_path).remove_unfinished("run-a")
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])
    folder(tmp_path / "none").remove_unfinished("run-a")
