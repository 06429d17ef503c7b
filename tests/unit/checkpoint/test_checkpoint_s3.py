"""Checkpoints and experiments on S3: a local server in this process, spoken to through s3fs as the real one is."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit.checkpoints import StandIn, make_state, resumed, same

from trainloop import checkpoint
from trainloop.callbacks.checkpoints.checkpoint import ModelCheckpoint
from trainloop.callbacks.reports.experiment import Experiment
from trainloop.checkpoint import CheckpointInfo, plain
from trainloop.errors import CheckpointError

pytest.importorskip("s3fs")
server_module = pytest.importorskip("moto.server")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, may_leave: Callable[..., None]) -> str:
    """``s3://...``, an empty bucket."""
    may_leave("fsspecIO", "asyncio_", "Thread-", "socket:", "eventpoll", "eventfd", "pipe:", "(deleted)")
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import fsspec

    system = fsspec.filesystem("s3", skip_instance_cache=True)
    if system.exists("bucket"):
        system.rm("bucket", recursive=True)
    system.mkdir("bucket")
    return "s3://bucket"


@pytest.mark.long
def test_a_checkpoint_of_several_parts(bucket: str) -> None:
    import torch

    # s3fs sends parts of 50 MB.
    state = {**make_state(1.0), "large": torch.randn(14_000_000)}
    checkpoint.save(f"{bucket}/run/a.pt", state, CheckpointInfo(step=3))
    assert checkpoint.folder(f"{bucket}/run").names() == ["a.pt"]
    assert checkpoint.read_info(f"{bucket}/run/a.pt").step == 3
    assert same(checkpoint.load(f"{bucket}/run/a.pt"), plain(state))


@pytest.mark.long
def test_an_upload_that_breaks_off_leaves_the_file_before_it(bucket: str) -> None:
    where = checkpoint.folder(f"{bucket}/run")
    where.write("a.txt", lambda file: file.write(b"first"))

    def breaks(file: Any) -> None:
        file.write(b"x" * 60_000_000)  # more than one part: some have been sent
        raise OSError("the line broke")

    with pytest.raises(OSError, match="the line broke"):
        where.write("a.txt", breaks)
    with pytest.raises(OSError, match="the line broke"):
        where.write("b.txt", breaks)
    assert where.names() == ["a.txt"]
    assert where.read_text("a.txt") == "first"


@pytest.mark.long
def test_the_callback_keeps_resumes_and_passes_over_damage(bucket: str) -> None:
    where = f"{bucket}/run"
    assert ModelCheckpoint(where).last_state() is None
    keeper = ModelCheckpoint(where, keep=2, monitor="val_loss", async_save=True)
    StandIn(keeper).run(4, values=[0.1, 0.4, 0.3, 0.2])
    assert keeper.best_path == f"{where}/checkpoint-epoch=0001-step=00000005.pt"
    steps = [c.info.step for c in checkpoint.checkpoints(where) if c.info]
    assert steps == [5, 20]
    again = ModelCheckpoint(where, keep=2, monitor="val_loss")
    resumed(again).run_epoch(val_loss=0.15)
    assert [c.info.step for c in checkpoint.checkpoints(where) if c.info] == [5, 25]
    data = checkpoint.folder(where).open("checkpoint-epoch=0005-step=00000025.pt").read()
    checkpoint.folder(where).write("checkpoint-epoch=0005-step=00000025.pt", lambda file: file.write(data[:-500]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        state = ModelCheckpoint(where).last_state()
    assert state is not None
    assert state["place"]["step"] == 5
    assert len([w for w in caught if "is not a complete checkpoint" in str(w.message)]) == 1
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        checkpoint.load(f"{where}/checkpoint-epoch=0005-step=00000025.pt")


def test_a_bucket_that_is_not_there_costs_a_warning_and_is_not_made(bucket: str) -> None:
    keeper = ModelCheckpoint("s3://misspelt/run")
    with pytest.warns(RuntimeWarning, match=r"could not be written to s3://misspelt/run .*Training continues"):
        StandIn(keeper).run_epoch()
    import fsspec

    assert not fsspec.filesystem("s3", skip_instance_cache=True).exists("misspelt")


def test_an_experiments_folder(bucket: str) -> None:
    experiment = Experiment("digits", "baseline", bucket, {"lr": 0.1})
    experiment.record()
    assert json.loads(experiment.folder.read_text("hyperparams.json"))["lr"] == 0.1
    assert Experiment("digits", "baseline", bucket).earlier_timestamps() == [experiment.timestamp]
