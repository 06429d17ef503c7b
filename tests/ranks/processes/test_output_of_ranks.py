"""What ranks print and log reaches the caller's streams and handlers; output that fails does not end the training."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import make_loop
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainloop import AbstractCallback, TrainLoop, TTModel

LOG = logging.getLogger("output_of_ranks.app")


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        if i == 0:
            LOG.info("row %d is read", i)
        return torch.zeros(1)


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return (self.w - 1).square().mean()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return batch_data, None, {}


class Speaks(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("speaks")

    def on_epoch_begin(self) -> None:
        print("printed by", self.train_loop_obj.rank)
        print("an error", file=sys.stderr)
        print("é" * 9000)  # longer than a chunk
        LOG.debug("too low")
        LOG.info("epoch begins", extra={"facts": lambda: 1})
        try:
            raise ValueError("on purpose")
        except ValueError:
            LOG.exception("failed with %s", {"a": 1})


class Keeps(logging.Handler):
    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Tee:
    """Passes on unknown attributes, as many such classes do: its descriptor is that of the stream."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.text = stream, ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Proxy(Tee):
    """Claims to be the stream, as the proxies of wrapt do, with which Sacred captures output."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return io.TextIOWrapper


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def loop_of(workers: int = 0, **options: Any) -> TrainLoop[Net]:
    net = Net()
    loader = DataLoader(Rows(), batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None)
    return TrainLoop(
        net, loader, optimizer=torch.optim.SGD(net.parameters(), 0.1), accelerator="cpu", timeout=60, **options
    )


@pytest.fixture
def handlers() -> Iterator[dict[str, Keeps]]:
    made = {"all": Keeps(), "errors": Keeps(logging.ERROR), "root": Keeps()}
    parent = logging.getLogger("output_of_ranks")
    for name, handler in made.items():
        (logging.root if name == "root" else parent).addHandler(handler)
    parent.setLevel(logging.INFO)
    yield made
    for name, handler in made.items():
        (logging.root if name == "root" else parent).removeHandler(handler)


@pytest.mark.long
def test_records_and_prints_reach_the_callers_objects(handlers: dict[str, Keeps], tmp_path: Path) -> None:
    tee, errors = Tee(sys.stdout), io.StringIO()
    file = logging.FileHandler(tmp_path / "log")
    file.setFormatter(logging.Formatter("%(rank)s %(message)s"))
    handlers["all"].addFilter(lambda record: bool(setattr(record, "filtered", True)) or True)
    LOG.addHandler(file)
    loop = loop_of(workers=1, gpu_mode="ddp", devices=2)
    try:
        with contextlib.redirect_stdout(tee), contextlib.redirect_stderr(errors), loop.ranks():  # type: ignore[type-var]
            loop.fit(num_epochs=1, callbacks=[Speaks()])
            after_first = len(handlers["all"].records)
            second = io.StringIO()
            with contextlib.redirect_stdout(second):
                loop.fit(num_epochs=1)
    finally:
        LOG.removeHandler(file)
        file.close()
    of_rank_0 = ["epoch begins", "failed with {'a': 1}", "row 0 is read"]
    messages = [record.getMessage() for record in handlers["all"].records[:after_first]]
    assert sorted(messages) == sorted([*of_rank_0, "[rank 1] failed with {'a': 1}"])
    of_root = [record.getMessage() for record in handlers["root"].records[: after_first + 1]]
    of_root.remove(next(text for text in of_root if text.startswith("[rank 1] This rank printed a line")))
    assert sorted(of_root) == sorted(messages)  # the order between ranks is not fixed
    failed = handlers["errors"].records
    assert {record.rank for record in failed} == {0, 1}  # type: ignore[attr-defined]
    assert all("ValueError: on purpose" in str(record.exc_text) for record in failed)
    assert all(record.filtered for record in handlers["all"].records)  # type: ignore[attr-defined]
    lines = (tmp_path / "log").read_text().splitlines()
    assert "0 epoch begins" in lines
    assert "1 [rank 1] failed with {'a': 1}" in lines
    assert tee.text.count("printed by") == 1  # rank 0's
    assert "é" * 9000 + "\n" in tee.text
    assert "TrainLoop(ddp" in tee.text
    assert "an error\n" in errors.getvalue()
    assert "[rank 1] an error\n" in errors.getvalue()
    assert "TrainLoop(ddp" in second.getvalue()  # the streams of this call, in the same ranks


@pytest.mark.long(but=1)
@pytest.mark.parametrize("tee", [Tee, Proxy])
def test_an_object_with_the_descriptor_of_stdout_gets_what_ranks_print(tee: type[Tee]) -> None:
    script = sys.stdout if isinstance(sys.stdout, io.TextIOWrapper) else sys.__stdout__
    own = tee(script)
    with contextlib.redirect_stdout(own):  # type: ignore[type-var]
        loop_of(gpu_mode="ddp", devices=2).fit(num_epochs=1, callbacks=[Speaks()])
    assert own.text.count("printed by") == 1


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode", [{}, {"gpu_mode": "ddp", "devices": 2}, {"max_restarts": 1}], ids=str)
def test_output_that_cannot_be_written_does_not_end_the_training(mode: dict[str, Any]) -> None:
    fit_args = {"max_restarts": mode.pop("max_restarts")} if "max_restarts" in mode else {}
    loop = loop_of(**mode)
    broken = Broken()
    with contextlib.redirect_stdout(broken), pytest.warns(Warning, match="No space left on device") as warned:
        loop.fit(num_epochs=3, callbacks=[Speaks()], **fit_args)
    assert len([one for one in warned if "No space" in str(one.message)]) == 1
    assert len(loop.history["loss"]) == 3
    assert loop.model.w.item() > 0.3


@pytest.mark.long
@pytest.mark.parametrize("mode", ["{}", "{'gpu_mode': 'ddp', 'devices': 2}"])
def test_a_reader_that_goes_away(mode: str, tmp_path: Path) -> None:
    folder = Path(__file__).parent
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parents[1])!r}]\n"
        "from test_output_of_ranks import *\n"
        "if __name__ == '__main__':\n"
        f"    loop = loop_of(**{mode})\n"
        "    loop.fit(num_epochs=20, callbacks=[Speaks()])\n"
        "    sys.stderr.write(f\"epochs: {len(loop.history['loss'])}, w > 0: {loop.model.w.item() > 0}\\n\")\n"
    )
    command = ["bash", "-c", f'"{sys.executable}" "{script}" | head -1']
    done = subprocess.run(command, capture_output=True, text=True)
    assert "epochs: 20, w > 0: True" in done.stderr, done.stderr
    assert done.stderr.count("BrokenPipeError: [Errno 32]") == 1, done.stderr


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPUs per process")
def test_ranks_do_not_repeat_torch_s_warning_about_workers(capfd: pytest.CaptureFixture[str]) -> None:
    workers = len(os.sched_getaffinity(0))  # not too many for the machine, but for a rank's part of it
    loop = make_loop(gpu_mode="ddp", devices=2)
    loop.train_loader = DataLoader(loop.train_loader.dataset, 16, num_workers=min(workers, 4))
    loop.fit(num_iterations=1)
    assert "worker processes" not in "".join(capfd.readouterr())
