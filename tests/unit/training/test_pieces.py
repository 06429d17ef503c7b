"""``fit(num_iterations=...)`` in pieces: each call continues in the middle of the epoch, as one call would."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.columns_model import chunks, make_model
from kit.loops import cpu_loop
from kit.small_loop import Net, Scores, make_loop
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from conftest import make_data
from trainloop import AbstractCallback, MultiLoss, TrainLoop
from trainloop.callbacks import (
    EarlyStopping,
    LRScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAverage,
)
from trainloop.data import SplitBatches
from trainloop.errors import ConfigurationError


class Reads(Net):
    """Remembers the first value of each batch, and has dropout, so that random states matter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        if self.training:
            self.seen.append(float(x[0, 0]))
        return super().get_loss((nn.functional.dropout(x, 0.3, self.training), y), criterion, device)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from make_data()


def make(workers: int = 0, data: Any = None, *, shuffle: bool = True, **kwargs: Any) -> TrainLoop:
    torch.manual_seed(0)
    tl = make_loop(Reads(), **kwargs)
    tl.train_loader = DataLoader(data or make_data(), 16, shuffle=shuffle, num_workers=workers)
    return tl


class Noisy(Dataset[Any]):
    """Draws noise from generators of its own."""

    def __init__(self) -> None:
        self.data = make_data()
        self.torch, self.python = torch.Generator().manual_seed(0), random.Random(0)
        self.numpy = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + torch.rand((), generator=self.torch) + self.python.random() + float(self.numpy.random()), y


class Counts(Dataset[Any]):
    """Counts the samples that are read."""

    def __init__(self) -> None:
        self.data, self.reads = make_data(), 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.data[index]


class NoisyByEpoch(Noisy):
    """Seeds them when an epoch begins."""

    def set_epoch(self, epoch: int) -> None:
        self.torch.manual_seed(epoch)
        self.python.seed(epoch)
        self.numpy = np.random.default_rng(epoch)


class NoisyStream(IterableDataset[Any], NoisyByEpoch):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            yield self[index]


def state_of(tl: TrainLoop) -> Any:
    rates = [group["lr"] for group in tl.optimizer.param_groups]
    weights = [p.tolist() for p in tl.model.parameters()]
    return weights, rates, tl.model.seen, tl.history.to_dict(), tl.epoch, tl.global_step, tl.total_iteration_idx


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", [Noisy, NoisyByEpoch, NoisyStream])
def test_generators_of_a_dataset_continue(kind: Any, seed: int | None) -> None:
    def fit(*pieces: int) -> Any:
        tl = make(data=kind(), shuffle=kind is not NoisyStream, seed=seed)
        for number in pieces:
            tl.fit(num_iterations=number)
        return tl.model.seen

    assert fit(3, 2, 6) == fit(11)  # an epoch has 7 batches


@pytest.mark.long(every=3)
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("mode", ["single", "dp"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_pieces_are_one_run(seed: int | None, mode: str, accumulation: int) -> None:
    def fit(*pieces: int) -> TrainLoop:
        tl = make(seed=seed, gpu_mode=mode, devices=2 if mode == "dp" else 1)
        schedule = LRScheduler(StepLR, step_size=1, gamma=0.5)
        for number in pieces:
            tl.fit(num_iterations=number, grad_accumulation=accumulation, callbacks=[schedule])
        return tl

    if mode == "dp":
        assert fit(4, 4, 10).global_step == fit(18).global_step
        return
    whole, pieces = fit(18), fit(4, 4, 10)  # an epoch has 7 batches
    if accumulation == 1:
        assert state_of(pieces) == state_of(whole)
    assert pieces.model.seen == whole.model.seen
    assert pieces.epoch == 3


def test_with_workers() -> None:
    whole, pieces = make(workers=1, seed=1), make(workers=1, seed=1)
    whole.fit(num_iterations=9)
    for _ in range(3):
        pieces.fit(num_iterations=3)
    assert state_of(pieces) == state_of(whole)


def test_a_cut_step_does_not_skip_batches() -> None:
    tl = make(shuffle=False)
    tl.fit(num_iterations=3, grad_accumulation=2)
    tl.fit(num_iterations=4, grad_accumulation=2)
    rows = make_data().tensors[0][:, 0]
    assert tl.model.seen == [float(rows[16 * i]) for i in range(7)]


@pytest.mark.parametrize("mode", ["single", "dp"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_piece_may_end_within_a_step_whose_batches_differ_in_size(mode: str, *, stream: bool) -> None:
    tl = make(shuffle=False, gpu_mode=mode, devices=2 if mode == "dp" else 1, seed=1)
    if stream:  # its sizes are known when a batch is read
        tl.train_loader = DataLoader(Stream(), 16)
    for done, steps in ((5, 3), (6, 4), (7, 5), (13, 8)):  # the seventh batch has 5 samples
        before = tl.total_iteration_idx
        tl.fit(num_iterations=done - before - 1, grad_accumulation=2)
        assert (tl.total_iteration_idx, tl.global_step) == (done - 1, steps)
    assert tl.history.epochs("loss") == [0, 1]


def test_resumed_to_more_iterations_is_the_longer_run(tmp_path: Path) -> None:
    def callbacks(folder: str) -> list[AbstractCallback]:
        stop = EarlyStopping("val_loss", patience=1)
        return [
            LRScheduler(StepLR, step_size=1, gamma=0.5),
            stop,
            ModelCheckpoint(tmp_path / folder, monitor="val_loss"),
        ]

    whole, first, second = (make(seed=3) for _ in range(3))
    whole.fit(num_iterations=17, callbacks=callbacks("whole"))
    first.fit(num_iterations=9, callbacks=callbacks("pieces"), resume_from="last")
    second.fit(num_iterations=17, callbacks=callbacks("pieces"), resume_from="last")
    second.model.seen = first.model.seen + second.model.seen
    assert state_of(second) == state_of(whole)
    again = make(seed=3)
    again.fit(num_iterations=17, callbacks=callbacks("pieces"), resume_from="last")  # nothing is left to do
    assert again.model.seen == []
    again.fit(num_iterations=4)
    whole.fit(num_iterations=4)
    assert again.model.seen == whole.model.seen[-4:]


class EpochMean(WeightAverage):
    """The mean of the weights at the ends of all epochs, as in the documentation of its base class."""

    def __init__(self) -> None:
        super().__init__(apply_on_train_end=True)

    def on_epoch_end(self) -> None:
        def mean(averages: list[Tensor], weights: list[Tensor], updates: int) -> None:
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight, 1 / (updates + 1))

        self.update(mean)


def epoch_callback(kind: str) -> AbstractCallback:
    if kind == "plateau":
        return LRScheduler(ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.5)
    return StochasticWeightAveraging(start=0, update_batchnorm=False) if kind == "swa" else EpochMean()


@pytest.mark.parametrize(
    "kind, resumed", [("plateau", False), ("swa", False), ("plateau", True), ("swa", True), ("mean", True)]
)
def test_what_counts_epochs_does_not_count_a_cut_one(kind: str, resumed: bool, tmp_path: Path) -> None:
    """Averages of epochs, and schedules by a metric: pieces, and resuming a piece, are one call."""

    def fit(*pieces: int, folder: str | None = None) -> TrainLoop:
        tl = make(seed=3)
        counting = epoch_callback(kind)
        for number in pieces:
            callbacks = [counting] if folder is None else [counting, ModelCheckpoint(tmp_path / folder)]
            tl.fit(num_iterations=number, callbacks=callbacks, resume_from=None if folder is None else "last")
        return tl

    whole = fit(17)
    if resumed:
        fit(10, folder="pieces")  # at its end, the model has the average, and training continues from other weights
        pieces = fit(17, folder="pieces")
    else:
        pieces = fit(10, 3, 4)
    assert state_of(pieces)[:2] == state_of(whole)[:2]


def test_an_average_of_epochs_without_a_whole_epoch_is_reported() -> None:
    tl = make(seed=3)
    with pytest.warns(UserWarning, match="ended in the middle of the first epoch to average, so there is no average"):
        tl.fit(num_iterations=9, callbacks=[StochasticWeightAveraging(start=1)])


def test_each_value_counts_once_for_monitors(tmp_path: Path) -> None:
    tl, keeper = make(), ModelCheckpoint(tmp_path, monitor="val_loss", keep=1)
    for number in range(1, 4):
        tl.fit(num_iterations=2, callbacks=[keeper])
        assert len(tl.history["val_loss"]) == 1
        assert tl.global_step == 2 * number
        assert keeper.best_value == tl.history["val_loss"][-1]


class Inserts(AbstractCallback):
    """Inserts its values, as ``ModelPerformanceEvaluation`` does: in steps, and at the ends of epochs and training."""

    def on_batch_end(self) -> None:
        self.insert("in_step")

    def on_epoch_end(self) -> None:
        self.insert("at_end")

    def on_train_end(self) -> None:
        self.insert("train_end")

    def insert(self, name: str) -> None:
        self.train_loop_obj.insert_metric_result_into_history(name, self.train_loop_obj.global_step)


@pytest.mark.parametrize("resumed", [False, True])
def test_inserted_values_of_a_cut_end_are_replaced_when_the_epoch_continues(resumed: bool, tmp_path: Path) -> None:
    def fit(tl: TrainLoop, number: int, folder: str) -> None:
        callbacks = [Inserts("inserts"), *([ModelCheckpoint(tmp_path / folder)] if resumed else [])]
        tl.fit(num_iterations=number, callbacks=callbacks, resume_from="last" if resumed else None)

    whole, pieces = make(seed=3), make(seed=3)
    fit(whole, 17, "whole")  # an epoch has 7 batches
    for total, more in ((3, 3), (6, 3), (10, 4), (17, 7)):
        pieces = make(seed=3) if resumed else pieces
        fit(pieces, total if resumed else more, "pieces")
    assert pieces.history["at_end"] == [7, 14, 17]
    assert pieces.history["in_step"] == [*range(1, 18)]
    # What a fit inserts at its end stays if its epoch is over.
    assert pieces.history.to_dict() == whole.history.to_dict()
    pieces.insert_metric_result_into_history("mine", 1.0)
    pieces.fit(num_iterations=4, callbacks=[Inserts("inserts")])
    assert pieces.history["at_end"] == [7, 14, 21]
    assert pieces.history["mine"] == [1.0]


class Fails(AbstractCallback):
    def __init__(self, *, fails: bool) -> None:
        super().__init__("fails")
        self.fails = fails
        self.names: list[str] = []

    def on_epoch_end(self) -> None:
        history = self.train_loop_obj.history
        self.names += [name for name, values in history.items() if not values or name == "train_end"]
        if self.fails:
            raise ValueError("a hook's")


def test_values_of_a_cut_end_are_replaced_after_a_failure_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    def fit(tl: TrainLoop, number: int, *, fails: bool = False, resume: Any = None) -> Fails:
        failing = Fails(fails=fails)
        callbacks = [Inserts("inserts"), failing, ModelCheckpoint(tmp_path)]
        tl.fit(num_iterations=number, callbacks=callbacks, resume_from=resume)
        return failing

    whole, pieces, resumed = (make(seed=3) for _ in range(3))
    whole.fit(num_iterations=14, callbacks=[Inserts("inserts")])  # an epoch has 7 batches
    fit(pieces, 3)
    with pytest.raises(ValueError, match="a hook's"):
        fit(pieces, 11, fails=True)
    seen = fit(resumed, 11, resume="last")
    assert resumed.history.to_dict() == whole.history.to_dict()
    assert seen.names == []  # no metric without values, and none of the end that was replaced


@pytest.mark.parametrize("way", ["end_epoch", "num_epochs", "loader", "dataset"])
def test_ways_to_begin_a_new_epoch(way: str) -> None:
    tl = make(shuffle=False)
    tl.fit(num_iterations=3)
    if way == "end_epoch":
        tl.end_epoch()
        tl.end_epoch()  # nothing is left of it
    elif way == "loader":
        tl.train_loader = DataLoader(make_data(), 16)
    elif way == "dataset":
        tl.train_loader.dataset.tensors = tuple(t[:90] for t in make_data().tensors)
    tl.fit(**{"num_epochs": 1} if way == "num_epochs" else {"num_iterations": 2})
    assert tl.model.seen[3:5] == tl.model.seen[:2]
    assert tl.epoch == 2
    assert len(tl.history["loss"]) == 2
    with pytest.raises(ConfigurationError, match="needs a running fit"):
        make().end_epoch()


def test_after_ctrl_c_too() -> None:
    class Press(AbstractCallback):
        def on_batch_end(self) -> None:
            if self.train_loop_obj.global_step == 9:
                os.kill(os.getpid(), signal.SIGINT)

    whole, tl = make(seed=2), make(seed=2)
    whole.fit(num_iterations=12)
    with pytest.raises(KeyboardInterrupt):
        tl.fit(num_epochs=4, callbacks=[Press("press")])
    tl.fit(num_iterations=3)
    assert state_of(tl) == state_of(whole)


def test_a_stream_without_a_state_is_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    tl = make(data=Stream(), shuffle=None)  # type: ignore[arg-type]
    tl.progress_bar = True
    tl.fit(num_iterations=2)
    tl.fit(num_iterations=2)
    assert len(set(tl.model.seen)) == 4
    assert "are read again and discarded" in capsys.readouterr().out


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_that_are_done_are_not_read_again(*, shuffle: bool) -> None:
    tl, data = make(data=(counts := Counts()), shuffle=shuffle), []
    for _ in range(4):
        before = counts.reads
        tl.fit(num_iterations=2)  # of 16 samples; the epoch has 7 batches, the last of 5 samples
        data.append(counts.reads - before)
    assert data == [32, 48, 48, 37]  # one batch more, with which the order is drawn


def test_draws_from_the_loaders_generator_between_pieces_stay() -> None:
    def draws(generator: torch.Generator) -> DataLoader[Any]:
        return DataLoader(make_data(), 16, shuffle=True, generator=generator)

    by_hand, seen = torch.Generator().manual_seed(0), []
    first = iter(draws(by_hand))
    seen += [float(next(first)[0][0, 0]) for _ in range(3)]
    torch.rand(5, generator=by_hand)
    seen += [float(x[0, 0]) for loader in (first, draws(by_hand)) for x, _ in loader]
    tl, generator = make_loop(Reads()), torch.Generator().manual_seed(0)
    tl.train_loader = draws(generator)
    tl.fit(num_iterations=3)
    torch.rand(5, generator=generator)  # another loop that reads this loader does so, too
    tl.fit(num_iterations=11)
    assert tl.model.seen == seen


def test_a_loss_of_parts_is_the_sum_of_their_means_over_all_pieces() -> None:
    class Parts(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return MultiLoss({"a": super().get_loss(batch_data, criterion, device), "b": self.fc.weight.mean()})

    tl = make_loop(Parts())
    tl.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    tl.fit(num_iterations=3)
    tl.criterion = nn.CrossEntropyLoss(reduction="sum")
    tl.fit(num_iterations=4)
    assert tl.history["loss"] == pytest.approx([tl.history["loss_a"][0] + tl.history["loss_b"][0]])


def test_values_of_on_train_begin_belong_to_the_epoch_that_continues() -> None:
    class AtBegin(AbstractCallback):
        def on_train_begin(self) -> None:
            self.train_loop_obj.insert_metric_result_into_history("begun", 1.0)

    tl = make()
    for _ in range(2):
        tl.fit(num_iterations=2, callbacks=[AtBegin("at begin")])
    assert tl.history.epochs("begun") == [0, 0]


@pytest.mark.parametrize("where", ["step", "end"])
def test_an_epoch_that_is_repeated_after_a_failure_is_judged(where: str) -> None:
    class Breaks(AbstractCallback):
        def on_batch_end(self) -> None:
            if where == "step":
                raise ValueError("a hook's")

        def on_epoch_end(self) -> None:
            raise ValueError("a hook's")

    tl, scores = make(), Scores([1.0], "a_loss")
    if where == "step":  # the value that is replaced is that of a piece
        tl.fit(num_iterations=3, callbacks=[scores])
    with pytest.raises(ValueError, match="a hook's"):
        tl.fit(num_iterations=7, callbacks=[scores, Breaks("breaks")])
    stopping, plateau = EarlyStopping("a_loss", patience=9), LRScheduler(ReduceLROnPlateau, monitor="a_loss")
    tl.fit(num_epochs=1, callbacks=[scores, stopping, plateau])
    assert tl.history["a_loss"] == [1.0]
    assert [stopping.best, plateau.scheduler.best] == [1.0, 1.0]


def test_optimizer_settings_between_pieces_hold() -> None:
    model = Reads()
    tl = make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.1))
    tl.fit(num_iterations=2)
    tl.optimizer.param_groups[0]["lr"] = 0.0
    before = [p.clone() for p in model.parameters()]
    tl.fit(num_iterations=2)
    assert all(map(torch.equal, before, model.parameters()))


def test_epoch_counts_an_unfinished_epoch_between_pieces_and_is_its_index_within() -> None:
    seen: list[int] = []

    class Looks(AbstractCallback):
        def on_batch_end(self) -> None:
            seen.append(self.train_loop_obj.epoch)

    tl, after = make_loop(), []
    for _ in range(3):  # an epoch has 7 batches
        tl.fit(num_iterations=3, callbacks=[Looks("looks")])
        after.append(tl.epoch)
    assert after == [1, 1, 2]
    assert seen == [0] * 7 + [1] * 2


def test_a_piece_continues_with_the_state_that_the_model_carries() -> None:
    found = []
    for pieces in ((14,), (3, 2, 5, 4)):  # an epoch has 7 chunks
        model = make_model()
        sgd, data = optim.SGD(model.parameters(), lr=0.5), SplitBatches(chunks(7, 33), dim=1)
        tl = cpu_loop(model, data, sgd)
        for number in pieces:
            tl.fit(num_iterations=number)
        found.append([tl.history.to_dict(), *(p.tolist() for p in model.parameters())])
    assert found[0] == found[1]


def test_a_run_killed_after_a_step_that_a_piece_cut_short_resumes_at_its_next_batch(tmp_path: Path) -> None:
    def fit(tl: TrainLoop, number: int, **arguments: Any) -> TrainLoop:
        tl.fit(num_iterations=number, grad_accumulation=2, **arguments)
        return tl

    whole, killed, resumed = (make(seed=3) for _ in range(3))
    fit(whole, 3)
    fit(whole, 9)
    fit(killed, 3)  # its last step has one batch, so the steps of the rest of the epoch begin at odd batches
    saving = ModelCheckpoint(tmp_path, every_n_steps=1, every_n_epochs=None, keep=None)
    fit(killed, 9, callbacks=[saving])
    fit(resumed, 9, callbacks=[saving], resume_from=min(tmp_path.glob("*.pt")))
    weights = [[p.tolist() for p in tl.model.parameters()] for tl in (whole, killed, resumed)]
    assert weights[1] == weights[0]
    assert weights[2] == weights[0]
