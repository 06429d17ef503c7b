"""Ranks whose temporary folder has a long path, as those of clusters' jobs and of macOS may have."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from kit.small_loop import make_loop
from torch.utils.data import DataLoader

from conftest import make_data


@pytest.mark.long
def test_workers_of_ranks_send_tensors_from_a_folder_with_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers send descriptors over a socket, whose path has at most 107 characters."""
    folder = tmp_path / ("a" * max(1, 90 - len(str(tmp_path))))
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    loop = make_loop(gpu_mode="ddp", accelerator="cpu", devices=2, timeout=60)
    loop.train_loader = DataLoader(make_data(), 16, num_workers=1)
    loop.fit(num_epochs=1)
    assert len(loop.history["loss"]) == 1
