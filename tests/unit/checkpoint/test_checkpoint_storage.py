"""Folders on a disk and behind URLs, and weights in safetensors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import in_small_tmpfs, make_state

from trainloop import checkpoint
from trainloop.checkpoint import CheckpointInfo, folder
from trainloop.checkpoint.export import export
from trainloop.errors import CheckpointError, ConfigurationError

# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", ["", None, 3])
def test_what_is_no_folder_is_told(location: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a folder. Pass a path or a URL such as 's3://bucket/run'"):
        folder(location)


def test_a_url_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(
        ConfigurationError, match=r"'s3://b/run' is a URL, which needs fsspec: pip install '\.\[cloud\]'"
    ):
        folder("s3://b/run")


def test_a_url_without_its_file_system_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigurationError, match=r"'gs://b/run' needs a package .*pip install '\.\[cloud\]'"):
        folder("gs://b/run")


def test_an_unknown_url_is_told() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigurationError, match=r"'nope://x': fsspec can't open this URL"):
        folder("nope://x")


def test_file_urls_and_home_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder("~/run").location == str(tmp_path / "run")
    assert folder(f"file://{tmp_path}/run").location == str(tmp_path / "run")
    assert (folder(tmp_path) / "a").location == str(tmp_path / "a")


def test_memory_urls_hold_checkpoints() -> None:
    fsspec = pytest.importorskip("fsspec")
    where = folder("memory://test-checkpoint/run")
    assert checkpoint.load_newest(where) is None
    try:
        for i in (1, 2):
            info = CheckpointInfo(step=i, stamp=i)
            checkpoint.save(where.path(checkpoint.checkpoint_name(info)), make_state(i), info)
            checkpoint.mark_newest(where, checkpoint.checkpoint_name(info))
        found = checkpoint.load_newest("memory://test-checkpoint/run/")
        assert found is not None
        assert found[1]["place"]["epoch"] == 2
        # A write that fails leaves what was there.
        newest = checkpoint.checkpoint_name(info)

        def fails(file: Any) -> None:
            file.write(b"half")
            raise OSError("the line broke")

        with pytest.raises(OSError, match="the line broke"):
            where.write(newest, fails)
        assert len(where.names()) == 3
        assert checkpoint.load(where.path(newest))["place"]["epoch"] == 2
        where.remove(newest)
        where.remove(newest)
        with pytest.warns(RuntimeWarning, match="the newest checkpoint written, is missing"):
            found = checkpoint.load_newest(where)
        assert found is not None
        assert found[1]["place"]["epoch"] == 1
    finally:
        fsspec.filesystem("memory").rm("/test-checkpoint", recursive=True)


# -- safetensors -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes have names")
def test_only_files_are_replaced(tmp_path: Path) -> None:
    source, pipe = tmp_path / "a.pt", tmp_path / "pipe"
    checkpoint.save(source, make_state(1))
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="it is a device or a pipe, not a file"):
        checkpoint.save(pipe, make_state(1))
    with pytest.raises(ConfigurationError, match="pipe can't be written: it is a device or a pipe, not a file"):
        export(source, pipe)
    with pytest.raises(ConfigurationError, match="is a checkpoint, which the weights would replace"):
        export(source, source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "pipe"]
    assert pipe.is_fifo()
    checkpoint.load(source)
    export(source, tmp_path / "b")
    export(source, tmp_path / "b")


EXPORT = """
import sys
import torch
from trainloop import checkpoint
from trainloop.checkpoint.export import export
where = sys.argv[1]
checkpoint.save(where + "/b.pt", {"model": {"weight": torch.ones(160_000)}})
open(where + "/filler", "wb").write(bytes(1_200_000))
try:
    export(where + "/b.pt", where + "/c")
except ValueError as error:
    print(error)
"""


@pytest.mark.long
def test_an_export_to_a_full_disk_is_an_error(tmp_path: Path) -> None:
    done = in_small_tmpfs(EXPORT, tmp_path, megabytes=2)
    assert done.returncode == 0, done.stderr
    assert "c can't be written: No space left on device" in done.stdout


def test_weights_in_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    weight = torch.randn(3, 4)
    path = tmp_path / "w.safetensors"
    checkpoint.save_weights(path, {"a": weight, "tied": weight, "t": weight.T})
    loaded = checkpoint.load_weights(path)
    assert all(torch.equal(loaded[k], v) for k, v in {"a": weight, "tied": weight, "t": weight.T}.items())
    (tmp_path / "other.safetensors").write_bytes(b"no weights")
    for wrong, reason in (
        (tmp_path, "can't be read"),
        (tmp_path / "missing", "no such file"),
        (tmp_path / "other.safetensors", "can't be read"),
    ):
        with pytest.raises(CheckpointError, match=f"{wrong.name}.*{reason}.* path of a safetensors file"):
            checkpoint.load_weights(wrong)


def test_safetensors_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(
        ConfigurationError, match=r"writing '.*w.safetensors' needs safetensors: pip install '\.\[safetensors\]'"
    ):
        checkpoint.save_weights(tmp_path / "w.safetensors", {})
