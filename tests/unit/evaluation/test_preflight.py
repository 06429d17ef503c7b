"""preflight: what it finds, and that it leaves the loop as it was."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.callbacks import ConfusionMatrix, EarlyStopping, LRScheduler, ModelCheckpoint, TensorBoard
from trainloop.errors import ConfigurationError, WorkerFailedError
from trainloop.tools import preflight
from trainloop.tools.preflight import preflight_epoch


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.fc(x))))


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class ByRank(Net):
    """Its loss depends on who computes it."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        return super().get_loss(batch_data, criterion, device) * (10 if torch.distributed.is_initialized() else 1)


def ragged(samples: list[Any]) -> tuple[Tensor, Tensor]:
    width = int(samples[0][1]) + 1
    return torch.stack([x for x, _ in samples])[:, :width], torch.stack([y for _, y in samples])


def loop_of(model: nn.Module, **arguments: Any) -> TrainLoop:
    optimizer = optim.SGD(model.parameters(), lr=0.1)  # Adam's steps don't show a loss that is ten times too large
    loader = arguments.pop("loader", None) or DataLoader(make_data(), batch_size=8, shuffle=True)
    return TrainLoop(model, loader, None, None, optimizer, nn.CrossEntropyLoss(), accelerator="cpu", **arguments)


@pytest.mark.long
def test_a_sound_loop_passes_and_stays_as_it_was() -> None:
    torch.manual_seed(0)
    loop = loop_of(Net(), gpu_mode="ddp", devices=2)
    before, state = copy.deepcopy(loop.model.state_dict()), torch.get_rng_state()
    report = loop.preflight()
    assert report.ok, report
    assert "weights agree" in report["single equals ddp on 2 CPU ranks"].detail
    assert all(torch.equal(before[key], value) for key, value in loop.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert loop.global_step == 0
    assert len(str(report).splitlines()) == len(report.findings)


@pytest.mark.long
def test_generators_of_the_loader_stay_as_they_were_and_give_both_modes_one_order() -> None:
    model = Net()
    loop = loop_of(model)
    loop.train_loader = DataLoader(make_data(), 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    before = loop.train_loader.generator.get_state()
    report = loop.preflight(steps=2)
    assert report.ok, report
    assert torch.equal(loop.train_loader.generator.get_state(), before)


def test_sparse_gradients_are_checked() -> None:
    class Words(Net):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(4, 8, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.words(x[:, 0].long().clamp(0, 3)))

    assert "all 7 trainable parameters" in preflight._gradients(loop_of(Words()))


@pytest.mark.usefixtures("starts_processes")
def test_what_it_finds() -> None:
    loop = loop_of(Unused())
    loop.train_loader.dataset.note = (i for i in range(3))
    report = loop.preflight()
    assert not report.ok
    assert "train_loader.dataset.note" in report["can be sent to ranks"].detail
    assert "extra.weight, extra.bias" in report["gradients"].detail
    assert "find_unused_parameters" in report["gradients"].detail
    assert report["batches on all ranks"].ok
    assert "LOOK" in str(report)


@pytest.mark.long
def test_an_unused_parameter_is_one_line_and_the_others_are_compared() -> None:
    report = loop_of(Unused(), seed=3).preflight()
    assert [finding.check for finding in report.findings if not finding.ok] == ["gradients"]
    assert "weights agree" in report.findings[-1].detail
    assert len(str(report).splitlines()) == len(report.findings)


class FailsInRanks(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        if torch.distributed.is_initialized():
            raise KeyError("what is missing")
        return super().get_loss(batch_data, criterion, device)


@pytest.mark.long
def test_a_rank_that_fails_is_one_line_with_its_traceback_beside_it() -> None:
    report = loop_of(FailsInRanks(), seed=3).preflight()
    found = report.findings[-1]
    assert "KeyError" in found.detail
    assert len(str(report).splitlines()) == len(report.findings)
    assert "in get_loss" in found.traceback
    assert "in get_loss" not in str(report)


@pytest.mark.long
def test_a_transformer_with_dropout_and_adam_passes() -> None:
    class Words(Net):
        """Its attention has a bias whose gradient is only rounding."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.layer(x[:, :, None].expand(-1, -1, 4)).mean(2))

    torch.manual_seed(0)
    model, data = Words(), make_data()
    adam = optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    loop = TrainLoop(model, loader, None, None, adam, nn.CrossEntropyLoss(), gpu_mode="ddp", devices=2)
    report = loop.preflight()
    assert report.ok, report


@pytest.mark.long
def test_it_finds_a_loss_that_depends_on_the_mode() -> None:
    report = loop_of(ByRank(), seed=3).preflight()
    assert [finding.check for finding in report.findings if not finding.ok] == ["single equals ddp on 2 CPU ranks"]
    assert "differs between the two modes by" in report.findings[-1].detail


def test_it_finds_a_sum_that_is_taken_for_a_mean() -> None:
    class Sum(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
            return nn.functional.cross_entropy(self(batch_data[0]), batch_data[1], reduction="sum")

    class Declared(Sum):
        loss_reduction = "sum"

    class Misdeclared(Net):
        loss_reduction = "sum"

    class Yielding(Sum):
        loss_reduction = "sum"

        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            yield super().get_loss(batch_data, criterion, device)

    found = {}
    for kind in (Sum, Declared, Misdeclared, Yielding):
        loop = loop_of(kind())
        found[kind] = [preflight._one_batch, preflight._gradients]
        for i, check in enumerate(found[kind]):
            try:
                found[kind][i] = check(loop)
            except preflight._Found as finding:
                found[kind][i] = f"LOOK {finding}"
    assert "LOOK" in found[Sum][0]
    assert "is the sum of the losses of its halves" in found[Sum][0]
    assert "is the mean of the losses of its halves" in found[Misdeclared][0]
    for kind in (Declared, Yielding):
        assert "LOOK" not in " ".join(found[kind]), found[kind]


def test_it_finds_batches_of_several_shapes() -> None:
    loop = loop_of(Net(), loader=DataLoader(make_data(), batch_size=4, collate_fn=ragged))
    finding = loop.preflight()["batches on all ranks"]
    assert not finding.ok
    assert "Pad to one shape" in finding.detail


@pytest.mark.parametrize("missing", ["train_loader", "optimizer"])
def test_it_needs_what_training_needs(missing: str) -> None:
    loop = loop_of(Net())
    setattr(loop, missing, None)
    with pytest.raises(ConfigurationError, match=f"{missing} is None"):
        loop.preflight()


def loop_over(n: int, model: Any = None, *, gpu_mode: str = "ddp", **loader: Any) -> TrainLoop:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(n, 8), torch.randint(3, (n,)))
    return loop_of(
        NoNorm() if model is None else model,
        loader=DataLoader(data, 16, shuffle=True, **loader),
        gpu_mode=gpu_mode,
        devices=1 if gpu_mode == "single" else 2,
        progress_bar=False,
    )


class NoNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(x))


@pytest.mark.long
@pytest.mark.parametrize("n, drop_last", [(33, False), (48, False), (66, False), (48, True)])
def test_a_short_last_global_batch_is_no_false_alarm(n: int, drop_last: bool) -> None:
    report = loop_over(n, drop_last=drop_last).preflight()
    assert report.ok, report


class Stream(IterableDataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return iter(make_data(self.n))


@pytest.mark.long
@pytest.mark.parametrize(("n", "compared"), [(36, "after 2 steps"), (8, "")])
def test_a_short_stream_is_no_false_alarm(n: int, compared: str) -> None:
    """Without a length; the comparison takes three steps of two batches if there are as many."""
    loop = loop_of(NoNorm(), progress_bar=False)
    loop.train_loader = DataLoader(Stream(n), 8)
    report = loop.preflight()
    finding = report["single equals ddp on 2 CPU ranks"]
    assert finding.ok, report
    assert (compared or "not compared: there are fewer than 2 batches") in finding.detail


def test_its_numbers_are_checked() -> None:
    for wrong in ({"steps": 0}, {"ranks": "x"}):
        with pytest.raises(ConfigurationError, match=f"preflight: {next(iter(wrong))}=.*must be an int of 1 or more"):
            loop_of(Net()).preflight(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpu_mode", "remedy"),
    [
        ("single", r"drop_last=True\) to leave that batch out\.$"),  # one process has no other part of the batch
        ("dp", "a replica gets.*drop_last=True.*, or gpu_mode='ddp' with sync_batchnorm=True"),
        pytest.param("ddp", "a rank gets.*drop_last=True.*, or .*sync_batchnorm=True", marks=pytest.mark.long),
    ],
)
def test_a_batchnorm_of_one_sample_ends_training_with_what_to_do(gpu_mode: str, remedy: str) -> None:
    loop = loop_over(33, Net(), gpu_mode=gpu_mode)
    with pytest.raises((ValueError, WorkerFailedError)) as failed:
        loop.fit(num_epochs=1)
    text = str(failed.value).partition(" (its traceback follows)")[0]
    assert re.search(f"(?s)Expected more than 1 value per channel.*{remedy}", text)


class Predicts(Net):
    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        raise ValueError("broken predictions")


class Broken(AbstractCallback):
    def on_epoch_end(self) -> None:
        raise ValueError("broken callback")


class Notes(AbstractCallback):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__("notes")
        self.called = 0
        self.optimizer = optimizer

    def on_train_end(self) -> None:
        self.called += 1
        assert self.optimizer in (None, self.train_loop_obj.optimizer)


@pytest.mark.parametrize(
    ("model", "callback", "text"),
    [
        (Net, lambda folder: EarlyStopping("val_los", mode="min"), "Did you mean 'val_loss'"),
        (
            Net,
            lambda folder: ModelCheckpoint(folder, monitor="val_accuracy"),
            "monitor='val_accuracy' is not in the history",
        ),
        (Net, lambda folder: Broken("broken"), "broken callback"),
        (Predicts, lambda folder: Notes(), "broken predictions"),
    ],
)
def test_the_end_of_an_epoch_is_tried(model: Any, callback: Any, text: str, tmp_path: Path) -> None:
    tl = loop_of(model())
    tl.validation_loader = tl.train_loader
    with pytest.raises(Exception, match=text):
        preflight_epoch(tl, [callback(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_callbacks_are_copied_with_what_they_refer_to(tmp_path: Path) -> None:
    tl = loop_of(Net())
    notes = Notes(tl.optimizer)
    before = copy.deepcopy(tl.model.state_dict())
    schedule = LRScheduler(optim.lr_scheduler.CosineAnnealingLR(tl.optimizer, T_max=10))
    callbacks = [notes, schedule, ModelCheckpoint(tmp_path), TensorBoard(tmp_path)]
    assert preflight_epoch(tl, callbacks).endswith("left out, since they write: TensorBoard")
    assert notes.called == 0
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(before[name], value) for name, value in tl.model.state_dict().items())
    assert tl.optimizer.param_groups[0]["lr"] == 0.1
    tl.fit(num_epochs=1, callbacks=[notes])
    assert "notes" in preflight_epoch(tl, tl.callbacks)  # after fit, callbacks refer to the loop


def test_a_callback_that_draws_into_a_file_is_left_out(tmp_path: Path) -> None:
    tl = loop_of(Net())
    tl.validation_loader = tl.train_loader
    drawn, counted = ConfusionMatrix("validation", path=tmp_path / "matrix.png"), ConfusionMatrix("validation")
    assert (drawn.writes, counted.writes) == (True, False)
    preflight_epoch(tl, [drawn])
    assert list(tmp_path.iterdir()) == []
