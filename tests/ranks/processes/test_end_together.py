"""Ranks of a launcher begin and end together, and rank 0 alone needs the folder of checkpoints."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from kit.ranks import run_own_ranks
from kit.small_loop import make_loop

from trainloop import AbstractCallback, checkpoint, distributed
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import CheckpointError


class Warned(AbstractCallback):
    """One rank hears that the job's time is over."""

    def on_batch_end(self) -> None:
        if self.train_loop_obj.rank == 1 and self.train_loop_obj.global_step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


def end_early(folder: str) -> tuple[object, list[str]]:
    if distributed.get_rank() == 0:
        write = checkpoint.save

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(1.0)  # as to a network disk
            return write(*args, **kwargs)

        checkpoint.save = slowly  # type: ignore[assignment]
    loop = make_loop(validation=False, gpu_mode="ddp", devices=2, seed=1)
    with pytest.raises(SystemExit) as ended:
        loop.fit(5, callbacks=[Warned(), ModelCheckpoint(folder, every_n_epochs=None)])
    return ended.value.code, sorted(path.name for path in Path(folder).glob("*.pt"))


def test_no_rank_ends_before_the_checkpoint_is_whole(tmp_path: Path) -> None:
    for status, found in run_own_ranks(end_early, 2, str(tmp_path / "checkpoints"), folder=tmp_path):
        assert status == 138
        assert len(found) == 1


def resume_often(folder: str) -> Any:
    """Several fits; only rank 0 finds checkpoints in its folder, and it looks late."""
    own = f"{folder}/of-rank-{distributed.get_rank()}"
    look = ModelCheckpoint.last_state

    def late(self: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return look(self, **kwargs)

    ModelCheckpoint.last_state = late  # type: ignore[method-assign]
    found, printed = [], io.StringIO()
    for epochs in (1, 3, 3, 2):
        loop = make_loop(gpu_mode="ddp", devices=2, seed=1, progress_bar=True)
        keeper = ModelCheckpoint(own, monitor="val_loss")
        with contextlib.redirect_stdout(printed):
            loop.fit(epochs, callbacks=[keeper], resume_from="last")
        weights = float(loop.model.state_dict()["fc.weight"].sum())
        found.append((loop.epoch, loop.rank, weights, keeper.best_value))
    paths = (keeper.last_path, keeper.best_path)
    with pytest.raises(CheckpointError, match=r"absent.*no such file") as failed:
        loop.fit(4, resume_from=f"{own}/absent.pt")
    return found, printed.getvalue().count("Nothing left"), str(failed.value), os.path.exists(own), paths


@pytest.mark.long
def test_rank_0_reads_what_is_resumed(tmp_path: Path) -> None:
    first, second = run_own_ranks(resume_often, 2, str(tmp_path), folder=tmp_path)
    assert [epoch for epoch, *_ in first[0]] == [1, 3, 3, 3]
    assert [rank for _, rank, *_ in second[0]] == [1] * 4
    assert [(epoch, *rest) for epoch, _, *rest in first[0]] == [(epoch, *rest) for epoch, _, *rest in second[0]]
    assert [first[1], second[1]] == [2, 0]
    assert first[2] in second[2]
    assert [first[3], second[3]] == [True, False]
    assert first[4] == second[4]
    assert None not in first[4]


class Fails(AbstractCallback):
    """Rank 1 fails, while rank 0 is in a call that another rank's end does not end."""

    def __init__(self) -> None:
        super().__init__("fails")
        self.unwound = ""

    def on_batch_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 3 and loop.rank == 1:
            raise LookupError("struck")
        if loop.global_step == 3:
            time.sleep(50)

    def on_exception(self, exception: BaseException) -> None:
        self.unwound = type(exception).__name__


def fail_in_one(folder: str) -> tuple[str, str, float]:
    # As in a group with NCCL, which this process has none of.
    dist.get_backend_config = lambda *_: "cpu:gloo,cuda:nccl"  # type: ignore[assignment]
    callback, began = Fails(), time.monotonic()
    loop = make_loop(validation=False, gpu_mode="ddp", devices=2, seed=1)
    with pytest.raises(BaseException) as ended:
        loop.fit(1, callbacks=[callback])
    took = time.monotonic() - began
    (Path(folder) / str(distributed.get_rank())).touch()
    while len(list(Path(folder).glob("[01]"))) < 2:  # the end of this process would end the other one, too
        time.sleep(0.01)
    return f"{ended.type.__name__}: {ended.value}", callback.unwound, took


@pytest.mark.long
def test_a_rank_that_fails_ends_the_others_of_a_launcher(tmp_path: Path) -> None:
    """torchrun gives them 30 s, in which a wait for NCCL does not end."""
    waiting, failed = run_own_ranks(fail_in_one, 2, str(tmp_path), folder=tmp_path)
    assert failed[:2] == ("LookupError: struck", "LookupError")
    assert waiting[0].startswith("RankTerminated: another rank has failed")
    assert waiting[1] == "RankTerminated"
    assert waiting[2] < 25


class Signalled(AbstractCallback):
    """The last rank receives a signal in its second step."""

    def __init__(self, number: int) -> None:
        super().__init__("signalled")
        self.number = number

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 2 and loop.rank == loop.world_size - 1:
            os.kill(os.getpid(), self.number)


@pytest.mark.long(but=2)
@pytest.mark.parametrize("gpu_mode", ["single", "ddp"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_a_line_says_which_signal_ends_the_run(
    name: str, gpu_mode: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "SIGUSR2":  # LSF sends it at the end of a job's time; without LSF it is the user's signal
        monkeypatch.setenv("LSB_JOBID", "7")
    loop = make_loop(validation=False, gpu_mode=gpu_mode, devices=2 if gpu_mode == "ddp" else 1, progress_bar=True)
    keepers = [ModelCheckpoint(tmp_path)] if name != "SIGHUP" else []
    with pytest.raises(BaseException):  # noqa: B017
        loop.fit(1, callbacks=[Signalled(getattr(signal, name)), *keepers])
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "received" in line]
    saved = {
        "SIGINT": "Ctrl-C writes no checkpoint.",
        "SIGHUP": "No checkpoint is written, because callbacks has no ModelCheckpoint.",
    }.get(name, f"A checkpoint of this step is written to {tmp_path}, unless there is one.")
    assert line == f"{name} received: training ends after step {loop.global_step} (epoch 1). {saved}"


class AtTheEnd(AbstractCallback):
    """A signal arrives after the last step, in the process that calls fit."""

    def on_train_end(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_after_the_last_step_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    loop = make_loop(validation=False, progress_bar=True)
    with pytest.raises(SystemExit, match="143"):
        loop.fit(1, callbacks=[AtTheEnd("at the end")])
    assert loop.global_step == 7
    assert "SIGTERM received after the last step: the training is complete." in capfd.readouterr().out.splitlines()
