"""Event files: their bytes against tensorboard's records, what a run writes by tensorboard's own reader."""

from __future__ import annotations

import copy
import enum
import json
import math
import os
import re
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from kit.event_files import event_files, read, steps, values_of
from kit.small_loop import STEPS_PER_EPOCH, Net, Raises, Scores, make_loop
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor, nn, optim
from torch.utils.tensorboard import SummaryWriter

from trainloop import AbstractCallback, MultiOptimizer
from trainloop.callbacks import LearningRateMonitor, LRScheduler, ModelCheckpoint, TensorBoard
from trainloop.callbacks.reports import tensorboard
from trainloop.callbacks.reports.event_files import EventFile
from trainloop.errors import ConfigurationError

# -- the file ----------------------------------------------------------------------------------------------------------

finite_or_not = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45])
step_numbers = st.integers(0, 300) | st.integers(0, 2**62)
names = st.sampled_from(["loss", "a", "val/größe", "x" * 150])
rows_of_scalars = st.lists(st.tuples(step_numbers, st.dictionaries(names, finite_or_not, max_size=4)), max_size=8)


@settings(max_examples=40)
@given(rows=rows_of_scalars)
def test_same_bytes_as_tensorboard_s_records(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("events")
    file = EventFile(str(folder))
    file.write_scalars(rows)
    file.close()
    written = Path(file.path).read_bytes()
    events = [Event.FromString(data) for data in RawEventFileLoader(file.path).Load()]

    expected = folder / "expected"
    with open(expected, "wb") as handle:
        writer = RecordWriter(handle)
        writer.write(Event(wall_time=events[0].wall_time, file_version="brain.Event:2").SerializeToString())
        kept = [(step, scalars) for step, scalars in rows if scalars]
        for (step, scalars), event in zip(kept, events[1:], strict=True):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()])
            writer.write(Event(wall_time=event.wall_time, step=step, summary=summary).SerializeToString())
    assert written == expected.read_bytes()


def test_values_past_float32_become_infinite(tmp_path: Path) -> None:
    file = EventFile(str(tmp_path))
    file.write_scalars([(1, {"x": 1e300, "y": 1e-300})])
    file.close()
    assert read(tmp_path) == {"x": [(1, math.inf)], "y": [(1, 0.0)]}


def test_wall_times_are_spread_over_a_block(tmp_path: Path) -> None:
    file = EventFile(str(tmp_path))
    begun = file._last_wall_time
    file.write_scalars([(step, {"x": 0.0}) for step in range(1, 5)])
    file.close()
    times = [Event.FromString(data).wall_time for data in RawEventFileLoader(file.path).Load()][1:]
    gaps = [b - a for a, b in zip([begun, *times], times, strict=False)]
    assert all(gap == pytest.approx(gaps[0], abs=1e-6) and gap > 0 for gap in gaps)


def test_what_is_written_is_on_the_disk(tmp_path: Path) -> None:
    """A killed run loses nothing that was handed over."""
    file = EventFile(str(tmp_path))
    file.write_scalars([(1, {"x": 2.0})])
    assert read(tmp_path) == {"x": [(1, 2.0)]}
    file.close()


def test_names_sort_in_the_order_in_which_files_were_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard.time, "time", lambda: 1_000_000_000.0)  # all in one second
    paths = []
    for pid in (30, 4, 200):
        monkeypatch.setattr(tensorboard.os, "getpid", lambda pid=pid: pid)
        file = EventFile(str(tmp_path))
        file.close()
        paths.append(file.path)
        assert file.continues == (len(paths) > 1)
    assert paths == sorted(paths)


def test_a_torn_file_does_not_hide_the_next_one(tmp_path: Path) -> None:
    """A kill in the middle of a write leaves half a record."""
    first = EventFile(str(tmp_path))
    first.write_scalars([(step, {"x": 1.0}) for step in (1, 2, 3)])
    first.close()
    size = os.path.getsize(first.path)
    os.truncate(first.path, size - 7)
    second = EventFile(str(tmp_path))
    second.write(step=3, session_log=SessionLog(status=SessionLog.START))
    second.write_scalars([(step, {"x": 2.0}) for step in (3, 4)])
    second.close()
    assert read(tmp_path) == {"x": [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]}


def test_other_file_systems_by_tensorboard_s_own_layer() -> None:
    fsspec = pytest.importorskip("fsspec")
    file = EventFile("memory://run")
    file.write_scalars([(1, {"x": 2.0})])
    file.write_scalars([(2, {"x": 3.0})])
    file.close()
    [path] = fsspec.filesystem("memory").glob("/run/events*")
    data = fsspec.filesystem("memory").cat(path)
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    assert [(event.step, [v.simple_value for v in event.summary.value]) for event in found[1:]] == [
        (1, [2.0]),
        (2, [3.0]),
    ]


# -- a run -------------------------------------------------------------------------------------------------------------


def test_each_value_once_over_the_global_step(tmp_path: Path) -> None:
    loop = make_loop()
    board = TensorBoard(tmp_path, log_every_n_steps=1)
    loop.fit(num_epochs=2, callbacks=[board, Scores([0.25, 0.5])])
    found = read(tmp_path)
    every = list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert set(found) == {
        "accuracy", "loss", "lr", "epoch/accuracy", "epoch/loss", "val_accuracy", "val_loss", "score",
    }  # fmt: skip
    for name in ("loss", "accuracy"):
        assert steps(found[name]) == every
        assert values_of(found[name]) == pytest.approx(loop.history.steps(name), rel=1e-6)
    assert found["lr"] == [(step, pytest.approx(0.1)) for step in every]
    for tag, name in (("epoch/loss", "loss"), ("val_loss", "val_loss"), ("score", "score")):
        assert steps(found[tag]) == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
        assert values_of(found[tag]) == pytest.approx(loop.history[name], rel=1e-6)


def test_every_n_steps(tmp_path: Path) -> None:
    make_loop().fit(num_epochs=2, callbacks=[TensorBoard(tmp_path, log_every_n_steps=4)])
    found = read(tmp_path)
    assert steps(found["loss"]) == steps(found["lr"]) == [4, 8, 12]


def test_epoch_values_have_the_plain_name_where_there_are_no_step_values(tmp_path: Path) -> None:
    make_loop().fit(num_epochs=1, callbacks=[TensorBoard(tmp_path, log_every_n_steps=None)])
    assert set(read(tmp_path)) == {"loss", "accuracy", "val_loss", "val_accuracy"}


class Metric(str, enum.Enum):
    DOUBLE = "double"


def test_a_name_from_an_enum_of_texts_is_its_text(tmp_path: Path) -> None:
    class Logs(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            loss = super().get_loss(batch_data, criterion, device)
            self.log(Metric.DOUBLE, 2 * loss)
            return loss

    loop = make_loop(Logs())
    loop.fit(num_epochs=1, callbacks=[TensorBoard(tmp_path, log_every_n_steps=1)])
    assert {"double", "epoch/double"} <= {*read(tmp_path)}
    assert all(type(name) is str for name in loop.history)


def test_names_do_not_change_when_the_first_epoch_is_short(tmp_path: Path) -> None:
    """Step values exist, though none was due yet: the epoch's would otherwise begin under the other name."""
    make_loop().fit(num_epochs=2, callbacks=[TensorBoard(tmp_path, log_every_n_steps=10)])
    found = read(tmp_path)
    assert steps(found["loss"]) == [10]
    assert steps(found["epoch/loss"]) == [7, 14]


def test_the_learning_rate_a_step_was_made_with(tmp_path: Path) -> None:
    board, monitor = TensorBoard(tmp_path / "own", 1), LearningRateMonitor()
    halve = LRScheduler(optim.lr_scheduler.ExponentialLR, "step", gamma=0.5)
    loop = make_loop()
    loop.fit(num_iterations=4, callbacks=[halve, board])
    assert values_of(read(tmp_path / "own")["lr"]) == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    # LearningRateMonitor logs by the same name: it is there once all the same.
    loop = make_loop()
    halve = LRScheduler(optim.lr_scheduler.ExponentialLR, "step", gamma=0.5)
    loop.fit(num_iterations=4, callbacks=[halve, TensorBoard(tmp_path / "both", 1), monitor])
    assert read(tmp_path / "both")["lr"] == read(tmp_path / "own")["lr"]
    make_loop().fit(num_iterations=4, callbacks=[TensorBoard(tmp_path / "none", 1, learning_rate=False)])
    assert "lr" not in read(tmp_path / "none")


def test_learning_rates_of_groups_and_optimizers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    groups = optim.SGD(
        [{"params": [model.fc.weight], "lr": 0.1, "name": "weights"}, {"params": [model.fc.bias]}], lr=0.2
    )
    make_loop(model, optimizer=groups).fit(num_iterations=1, callbacks=[TensorBoard(tmp_path / "groups", 1)])
    found = read(tmp_path / "groups")
    assert (found["lr/weights"], found["lr/group1"]) == ([(1, pytest.approx(0.1))], [(1, pytest.approx(0.2))])
    both = MultiOptimizer([optim.SGD([model.fc.weight], lr=torch.tensor(0.1)), optim.SGD([model.fc.bias], lr=0.2)])
    make_loop(model, optimizer=both).fit(num_iterations=1, callbacks=[TensorBoard(tmp_path / "several", 1)])
    found = read(tmp_path / "several")
    assert (found["lr/optimizer0"], found["lr/optimizer1"]) == ([(1, pytest.approx(0.1))], [(1, pytest.approx(0.2))])


class OwnRate(optim.SGD):
    """A step size under another name, as in optimizers that find it by themselves."""

    def __init__(self, groups: Any, *, keeps_none: bool) -> None:
        super().__init__(groups, lr=0.1)
        for group in self.param_groups[1:]:
            group["rate"] = group.pop("lr")
            if keeps_none:
                group["lr"] = None

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group.get("rate", 0.1))


@pytest.mark.parametrize("keeps_none", [False, True])
def test_groups_without_a_learning_rate(tmp_path: Path, keeps_none: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    groups = [{"params": [model.fc.weight]}, {"params": [model.fc.bias]}]
    loop = make_loop(model, optimizer=OwnRate(groups, keeps_none=keeps_none))
    loop.fit(num_epochs=1, callbacks=[TensorBoard(tmp_path, 1), LearningRateMonitor()])
    rates = {name: values for name, values in read(tmp_path).items() if "lr" in name}
    assert set(rates) == {"lr/group0", "epoch/lr/group0"}
    assert values_of(rates["lr/group0"]) == pytest.approx([0.1] * STEPS_PER_EPOCH)


class SetsRate(AbstractCallback):
    """Sets the rate in a hook before the step, for each micro-batch or for the step; and another one for the next."""

    def __init__(self, hook: str) -> None:
        super().__init__("sets rate", execution_order=-10)
        setattr(self, hook, self.set_rate)

    def set_rate(self) -> None:
        loop = self.train_loop_obj
        loop.optimizer.param_groups[0]["lr"] = 0.05 * (loop.total_iteration_idx + 1)

    def on_after_optimizer_step(self) -> None:
        self.train_loop_obj.optimizer.param_groups[0]["lr"] = 7.0


@pytest.mark.parametrize("hook", ["on_batch_begin", "on_after_gradient_update"])
@pytest.mark.parametrize("monitored", [False, True])
def test_a_rate_that_a_callback_sets_for_its_step(hook: str, monitored: bool, tmp_path: Path) -> None:
    loop, monitors = make_loop(), [LearningRateMonitor()] if monitored else []
    loop.fit(num_iterations=6, callbacks=[SetsRate(hook), TensorBoard(tmp_path, 1), *monitors], grad_accumulation=2)
    assert values_of(read(tmp_path)["lr"]) == pytest.approx([0.1, 0.2, 0.3])
    assert loop.history.steps("lr") == pytest.approx([0.1, 0.2, 0.3] if monitored else [])


def test_arguments_of_the_script_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/ada/train.py", "--token", "hf_secret"])
    make_loop().fit(num_epochs=1, callbacks=[TensorBoard(tmp_path)])
    written = b"".join(Path(path).read_bytes() for path in event_files(tmp_path))
    assert b"| script | train.py |" in written
    for secret in (b"hf_secret", b"/home/ada"):
        assert secret not in written


def test_a_second_fit_goes_on_in_the_folder(tmp_path: Path) -> None:
    loop = make_loop()
    board = TensorBoard(tmp_path, 1)
    with SummaryWriter(str(tmp_path)) as own:  # somebody else's values in the folder stay as they are
        for epoch in range(2):
            own.add_scalar("mine", 1.0, epoch * STEPS_PER_EPOCH + 5)
            loop.fit(num_epochs=1, callbacks=[board])
    found = read(tmp_path)
    assert steps(found["loss"]) == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert steps(found["val_loss"]) == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    assert steps(found["mine"]) == [5, 5 + STEPS_PER_EPOCH]


def test_several_in_one_fit_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    boards = [TensorBoard(), TensorBoard(log_every_n_steps=1)]
    make_loop().fit(num_iterations=1, callbacks=boards)
    assert boards[1].log_dir == f"{boards[0].log_dir}_2"
    with pytest.raises(ConfigurationError, match=r"two TensorBoards with log_dir='.*', and one would replace"):
        make_loop().fit(num_iterations=1, callbacks=[TensorBoard("runs"), TensorBoard("runs", 1)])


def test_a_folder_is_taken_when_fit_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tensorboard.time, "strftime", lambda *_: "2026-01-02_03-04-05")
    boards = [TensorBoard() for _ in range(2)]
    for board in boards:  # as in two processes, neither of which has written a value
        make_loop().register_callback(board)
    assert boards[0].log_dir != boards[1].log_dir
    kept = [TensorBoard("runs/kept"), ModelCheckpoint("checkpoints")]
    make_loop().fit(num_epochs=1, callbacks=kept)
    board = TensorBoard("runs/kept")
    make_loop().fit(num_epochs=2, callbacks=[board, kept[1]], resume_from="last")
    assert board.log_dir == kept[0].log_dir
    assert not [path for path in Path(board.log_dir).iterdir() if path.is_dir()]  # none that this run did not need


def test_a_second_run_in_the_same_folder_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    def callbacks() -> list[AbstractCallback]:
        return [TensorBoard(tmp_path / "logs", 1), ModelCheckpoint(tmp_path / "checkpoints")]

    make_loop().fit(num_epochs=3, callbacks=[TensorBoard(tmp_path / "logs", 1)])
    board = TensorBoard(tmp_path / "logs", 1)
    for number in (2, 3):  # other loops with one callback
        make_loop().fit(num_epochs=1, callbacks=[board])
        assert board.log_dir == str(tmp_path / "logs" / f"run-{number}")
    make_loop(seed=1).fit(num_epochs=1, callbacks=callbacks())
    loop = make_loop(seed=1)
    loop.fit(num_epochs=2, callbacks=callbacks(), resume_from="last")  # goes on in the folder of its run
    loop.fit(num_epochs=1, callbacks=loop.callbacks)
    folders = [tmp_path / "logs", *(tmp_path / "logs" / f"run-{number}" for number in (2, 3, 4))]
    lengths = [len(steps(read(folder)["loss"])) for folder in folders]
    assert lengths == [epochs * STEPS_PER_EPOCH for epochs in (3, 1, 1, 3)]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir() if path.is_dir()) == ["run-2", "run-3", "run-4"]


def test_resumed_at_an_epoch_s_end(tmp_path: Path) -> None:
    def callbacks() -> list[AbstractCallback]:
        return [TensorBoard(tmp_path / "logs", 2), ModelCheckpoint(tmp_path / "checkpoints")]

    make_loop(seed=0).fit(num_epochs=1, callbacks=callbacks())
    loop = make_loop(seed=0)
    loop.fit(num_epochs=3, callbacks=callbacks(), resume_from="last")
    found = read(tmp_path / "logs")
    assert steps(found["val_loss"]) == [7, 14, 21]
    assert steps(found["loss"]) == list(range(2, 21, 2))
    assert values_of(found["epoch/loss"]) == pytest.approx(loop.history["loss"], rel=1e-6)


class FailsOnce(AbstractCallback):
    """While an epoch's end is evaluated, or after its values were written."""

    def __init__(self, hook: str) -> None:
        super().__init__("FailsOnce", execution_order=998)
        self.hook = hook

    def on_evaluation_begin(self, *_: Any) -> None:
        if self.hook == "on_evaluation_begin":
            raise OSError("once")

    def on_epoch_end(self) -> None:
        raise OSError("once")


@pytest.mark.parametrize("hook", ["on_evaluation_begin", "on_epoch_end"])
def test_resumed_from_the_last_step_of_an_epoch_that_had_not_ended(tmp_path: Path, hook: str) -> None:
    """Its step values were written before the checkpoint, its epoch values afterwards, and again."""

    def fit(place: str, *callbacks: AbstractCallback) -> None:
        keeper = ModelCheckpoint(tmp_path / place / "checkpoints", None, every_n_steps=STEPS_PER_EPOCH)
        board = TensorBoard(tmp_path / place / "logs", 1)
        make_loop(seed=0).fit(num_epochs=2, callbacks=[board, keeper, *callbacks], resume_from="last")

    fit("whole")
    with pytest.raises(OSError, match="once"):
        fit("failed", FailsOnce(hook))
    fit("failed")
    assert read(tmp_path / "failed" / "logs") == read(tmp_path / "whole" / "logs")


def test_default_folder(folder: Path) -> None:
    loops, boards = [make_loop(), make_loop()], [TensorBoard(), TensorBoard()]
    for loop, board in zip(loops, boards, strict=True):
        loop.fit(num_epochs=1, callbacks=[board])
    first, second = (str(board.log_dir) for board in boards)
    assert os.path.relpath(first).startswith("runs/20")
    assert "_Net" in first
    assert first != second
    loops[0].fit(num_epochs=1, callbacks=[boards[0]])
    assert boards[0].log_dir == first  # the same run goes on
    assert steps(read(first)["val_loss"]) == [7, 14]
    make_loop().fit(num_epochs=1, callbacks=[boards[0]])
    assert boards[0].log_dir not in (first, second)  # another run
    assert steps(read(boards[0].log_dir or "")["val_loss"]) == [7]


def test_the_folder_is_known_after_registration(folder: Path) -> None:
    class Looks(AbstractCallback):
        def on_train_loop_registration(self) -> None:
            self.seen = board.log_dir

    board, looks = TensorBoard(), Looks()
    make_loop().fit(num_iterations=1, callbacks=[board, looks])
    assert looks.seen == board.log_dir is not None


def test_nothing_is_open_after_an_exception(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 1)
    with pytest.raises(OSError, match="no more"):
        make_loop().fit(num_epochs=2, callbacks=[board, Raises(OSError("no more"), "on_epoch_end")])
    assert steps(read(tmp_path)["loss"]) == list(range(1, 8))


def test_a_full_disk_does_not_end_the_training(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 1)

    class Fills(AbstractCallback):
        def on_epoch_begin(self) -> None:
            if self.train_loop_obj.epoch == 1:
                assert board._log.file is not None
                board._log.file.close()
                board._log.file._file = open("/dev/full", "wb")  # noqa: SIM115
                board._log.file._records = RecordWriter(board._log.file._file)

    loop = make_loop()
    with pytest.warns(
        RuntimeWarning, match=r"writing to .* failed .*No space left on device.* Training continues"
    ) as warned:
        loop.fit(num_epochs=3, callbacks=[board, Fills()])
    assert len(warned) == 1
    assert loop.epoch == 3
    assert steps(read(tmp_path)["loss"]) == list(range(1, 8))


def test_a_file_in_the_way_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    loop = make_loop()
    with pytest.raises(ConfigurationError, match=r"runs is a file\. Choose another log_dir"):
        loop.fit(num_epochs=1, callbacks=[TensorBoard(tmp_path / "runs" / "first")])
    assert loop.global_step == 0


def test_a_folder_that_can_not_be_made_is_found_before_training() -> None:
    loop = make_loop()
    with pytest.raises(ConfigurationError, match=r"log_dir='/proc/first': .*Choose another log_dir"):
        loop.fit(num_epochs=1, callbacks=[TensorBoard("/proc/first")])
    assert loop.global_step == 0


class Noisy(Net):
    """With what drawing a graph could disturb: randomness, running statistics, a log in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.log("seen", x.mean())
        return super().forward(self.drop(self.norm(x)))


@pytest.mark.parametrize("given", ["x", torch.ones(2, 3), []])
def test_inputs_that_the_model_cannot_be_traced_with_are_named(given: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"TensorBoard: graph_input: .* can't trace"):
        make_loop().fit(num_epochs=1, callbacks=[TensorBoard(tmp_path, graph_input=given)])


def test_hyperparameters_from_numpy_and_tensors_are_numbers(tmp_path: Path) -> None:
    others = {"list": [1], "big": 10**400, "file": "a\udcff"}  # a name with a byte that is no UTF-8
    hyperparameters = {"lr": torch.tensor(0.25), "width": np.int64(8), "decay": np.array(0.5), **others}
    make_loop(Noisy()).fit(num_epochs=1, callbacks=[TensorBoard(tmp_path, hyperparameters=hyperparameters)])
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    content = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    written = HParamsPluginData.FromString(content).session_start_info.hparams
    assert [written[name].number_value for name in ("lr", "width", "decay")] == [0.25, 8, 0.5]
    texts = {name: written[name].string_value for name in others}
    assert texts == {"list": "[1]", "big": str(10**400), "file": "a\\udcff"}


def test_histograms_hyperparameters_and_graph(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Noisy()
    plain = copy.deepcopy(model)
    board = TensorBoard(
        tmp_path,
        1,
        histograms_every_n_epochs=2,
        hyperparameters={"lr": 0.1, "layers": [8, 3]},
        graph_input=torch.ones(2, 8),
    )
    torch.manual_seed(1)
    loop = make_loop(model)
    loop.fit(num_epochs=4, callbacks=[board])
    reader = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "histograms": 0})
    reader.Reload()
    assert reader.Tags()["graph"]
    assert "Linear" in str(reader.Graph())
    assert [event.step for event in reader.Histograms("parameters/fc.weight")] == [14, 28]
    assert reader.Histograms("parameters/fc.weight")[-1].histogram_value.num == model.fc.weight.numel()
    session = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"layers" in session
    assert b"[8, 3]" in session
    experiment = reader.SummaryMetadata("_hparams_/experiment").plugin_data.content
    assert b"val_loss" in experiment
    assert b"epoch/loss" in experiment

    torch.manual_seed(1)
    other = make_loop(plain)
    other.fit(num_epochs=4)
    assert loop.history.to_dict() == other.history.to_dict()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


class Remembers(Net):
    """Its loss depends on what the last forward has left: its features, with a graph, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.features: Tensor | None = None
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.features = super().forward(x)
        return self.features

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        before = 0.0 if self.features is None else self.features.detach().mean()
        return super().get_loss(batch_data, criterion, device) * (1 + 0.1 * before) / (1 + 0.01 * self.forwards)


def test_the_graph_changes_nothing_that_the_model_remembers(tmp_path: Path) -> None:
    def trained(*callbacks: Any) -> Remembers:
        torch.manual_seed(0)
        model = Remembers()
        make_loop(model).fit(num_epochs=3, callbacks=list(callbacks))
        return model

    plain, drawn = trained(), trained(TensorBoard(tmp_path, graph_input=torch.ones(2, 8)))
    assert drawn.forwards == plain.forwards
    assert all(map(torch.equal, drawn.state_dict().values(), plain.state_dict().values()))


def test_fsdp_refuses_the_graph_and_histograms_before_any_process_starts(tmp_path: Path) -> None:
    for asked in ({"graph_input": torch.ones(2, 8)}, {"histograms_every_n_epochs": 1}):
        loop = make_loop(gpu_mode="fsdp", devices=2)
        with pytest.raises(ConfigurationError, match=rf"TensorBoard\({next(iter(asked))}=.*with gpu_mode='fsdp'"):
            loop.fit(num_epochs=1, callbacks=[TensorBoard(tmp_path, **asked)])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error::UserWarning")  # a complex weight's imaginary part is not discarded
def test_histogram_of_odd_weights(tmp_path: Path) -> None:
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.big = torch.nn.Parameter(torch.full((2,), 1e38), requires_grad=False)  # of a run that diverges
            self.complex = torch.nn.Parameter(torch.tensor([1 + 2j, 3 + 4j]), requires_grad=False)

    model = Odd()
    with torch.no_grad():
        model.fc.weight[0, 0] = math.nan
        model.fc.bias.fill_(math.inf)
    make_loop(model).fit(num_epochs=1, callbacks=[TensorBoard(tmp_path, histograms_every_n_epochs=1)])
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    found = {name: reader.Histograms(f"parameters/{name}")[0].histogram_value for name in ("big", "complex")}
    assert (found["big"].num, found["complex"].num, found["complex"].sum) == (2, 4, 10)


def test_without_options_scalars_and_what_the_run_is(tmp_path: Path) -> None:
    make_loop(seed=3).fit(num_epochs=2, callbacks=[TensorBoard(tmp_path, 1)], grad_accumulation=2)
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    tags = reader.Tags()
    assert not tags["graph"]
    assert not tags["histograms"]
    assert not tags["images"]
    assert set(tags["tensors"]) == {"run/text_summary", "custom_scalars__config__"}
    [text] = reader.Tensors("run/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    for word in ("single on cpu", "effective batch 16", f"torch {torch.__version__}", "| optimizer | SGD |"):
        assert word in shown
    session = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    for name in (b"gpu_mode", b"single", b"lr", b"effective_batch_size", b"grad_accumulation", b"seed"):
        assert name in session


def test_one_quantity_is_one_chart(tmp_path: Path) -> None:
    """By TensorBoard's own plugin: training, validation and test values of all that is logged, in sections."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it brings along
        from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin

    class Adds(AbstractCallback):
        def on_epoch_end(self) -> None:
            if self.train_loop_obj.epoch == 1:  # the layout was written already
                self.log("late/metric", 1.0)
                self.log("f.1+", 1.0)

    loop = make_loop()
    loop.test_loader = loop.validation_loader
    loop.fit(num_epochs=2, callbacks=[TensorBoard(tmp_path, 1), Adds()])
    tags = set(read(tmp_path))
    multiplexer = EventMultiplexer({"run": str(tmp_path)})
    multiplexer.Reload()
    context = TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(tmp_path)))
    layout = CustomScalarsPlugin(context).layout_impl(RequestContext(), "")
    charts = {
        section["title"]: {
            chart["title"]: {tag for pattern in chart["multiline"]["tag"] for tag in tags if re.match(pattern, tag)}
            for chart in section["chart"]
        }
        for section in json.loads(layout)["category"]
    }
    assert charts == {
        "loss": {"loss": {"loss", "epoch/loss", "val_loss", "test_loss"}},
        "accuracy": {"accuracy": {"accuracy", "epoch/accuracy", "val_accuracy", "test_accuracy"}},
        "late": {"late/metric": {"late/metric"}},
        "metrics": {"f.1+": {"f.1+"}},
        "lr": {"lr": {"lr"}},
    }
    assert list(charts)[:2] == ["loss", "accuracy"]
    assert set().union(*(of_chart for section in charts.values() for of_chart in section.values())) == tags
