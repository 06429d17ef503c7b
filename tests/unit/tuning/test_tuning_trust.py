"""Pickles on disk are read only where nobody else can have written them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainloop.errors import ConfigurationError
from trainloop.tuning import BaggedPredictor
from trainloop.tuning.storage import Storage, read, write


class Model:
    def predict(self, x: list[float]) -> list[float]:
        return [2 * value for value in x]


IDENTITY = {"version": 1, "seed": 1}


@pytest.mark.parametrize(
    ("where", "mode", "wrong"),
    [
        ("file", 0o646, "this file is writable by other users"),
        ("file", 0o666, "this file is writable by other users"),
        ("folder", 0o777, "this folder is writable by other users"),
        ("file", 0o600, None),
        ("folder", 0o1777, None),  # as /tmp: others can't replace one's own file
    ],
)
def test_what_others_may_write_is_not_unpickled(where: str, mode: int, wrong: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "bag"
    file = folder / "predictor"
    BaggedPredictor([Model()]).save(file)
    (file if where == "file" else folder).chmod(mode)
    if wrong is None:
        assert BaggedPredictor.load(file).predict([1.0]).tolist() == [2.0]
        return
    with pytest.raises(
        ConfigurationError, match=rf"{wrong} \(mode {mode:o}\).*execute arbitrary code. Run chmod go-w .*trusted=True"
    ):
        BaggedPredictor.load(file)
    assert BaggedPredictor.load(file, trusted=True).predict([1.0]).tolist() == [2.0]


def test_a_search_is_not_gone_on_with_where_others_may_write(tmp_path: Path) -> None:
    store = Storage(tmp_path / "search", IDENTITY)
    store.begin_trial(0, {"lr": 1})
    assert store.params(0) == {"lr": 1}
    (store.trial_folder(0) / "params.pkl").chmod(0o666)
    with pytest.raises(ConfigurationError, match=r"params\.pkl': this file is writable by other users"):
        store.params(0)
    store.close()
    store.folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="search': this folder is writable by other users"):
        Storage(store.folder, IDENTITY)
    store = Storage(store.folder, IDENTITY, trusted=True)
    assert store.params(0) == {"lr": 1}
    store.close()


def test_what_is_written_can_be_read_again_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(tmp_path / "a" / "b" / "file", {"x": 1})
    finally:
        os.umask(before)
    assert read(tmp_path / "a" / "b" / "file") == {"x": 1}
    assert (tmp_path / "a").stat().st_mode & 0o022 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_user_s_file_is_not_unpickled(tmp_path: Path) -> None:
    write(tmp_path / "file", 1)
    os.chown(tmp_path / "file", 65534, 65534)
    with pytest.raises(ConfigurationError, match=r"file': this file is owned by user 'nobody'.*folder that you own"):
        read(tmp_path / "file")
    write(tmp_path / "other" / "file", 1)
    os.chown(tmp_path / "other", 65534, 65534)
    with pytest.raises(ConfigurationError, match="other': this folder is owned by user 'nobody'"):
        read(tmp_path / "other" / "file")


def test_a_group_of_one_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems that make a group for each user set a umask of 002."""
    import grp
    import pwd
    import types

    write(tmp_path / "file", 1)
    (tmp_path / "file").chmod(0o664)
    user = pwd.getpwuid(os.geteuid())
    members: list[str] = []
    monkeypatch.setattr(grp, "getgrgid", lambda gid: types.SimpleNamespace(gr_name=user.pw_name, gr_mem=members))
    assert read(tmp_path / "file") == 1
    members.append("somebody")
    with pytest.raises(ConfigurationError, match="is writable by other users"):
        read(tmp_path / "file")
