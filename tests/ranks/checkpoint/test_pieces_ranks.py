"""``fit(num_iterations=...)`` in pieces, in all modes: the second call continues in the middle of the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import EarlyStopping, ModelCheckpoint, ThresholdEarlyStopping
from trainloop.data import SplitBatches
from trainloop.errors import CheckpointError


def state_of(tl: TrainLoop) -> Any:
    return [p.tolist() for p in tl.model.parameters()], tl.history.to_dict(), tl.epoch, tl.global_step


@pytest.mark.parametrize("mode", ["dp", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("ddp", "fsdp"))])
def test_pieces_are_one_run(mode: str, tmp_path: Path) -> None:
    whole, pieces, resumed = (make_loop(shuffle=True, seed=3, gpu_mode=mode, devices=2) for _ in range(3))
    with whole.ranks():
        whole.fit(num_iterations=9)  # in ddp, an epoch has 4 batches
        pieces.fit(num_iterations=5, callbacks=[ModelCheckpoint(tmp_path)])
        resumed.fit(num_iterations=9, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
        for number in (1, 3):
            pieces.fit(num_iterations=number)
    assert state_of(resumed) == state_of(whole)
    assert state_of(pieces) == state_of(whole)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("columns", [False, True])
def test_a_piece_ends_within_a_step_whose_batches_differ_in_size(mode: str, *, columns: bool) -> None:
    tl = make_loop(gpu_mode=mode, devices=2)
    if columns:  # the ranks' batches differ in every step
        x, y = make_data().tensors
        tl.train_loader = SplitBatches([(x[i : i + 15], y[i : i + 15]) for i in range(0, 60, 15)], dim=0)
    with tl.ranks():  # an epoch has 4 batches; of a rank's loader, the last has fewer samples
        for done, steps in ((3, 2), (4, 3), (7, 5), (8, 6)):
            tl.fit(num_iterations=done - tl.total_iteration_idx - 1, grad_accumulation=2)
            assert (tl.total_iteration_idx, tl.global_step) == (done - 1, steps)
    assert tl.history.epochs("loss") == [0, 1]


class Noisy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.generator, dtype=x.dtype))


class Seeds(AbstractCallback):
    """Each rank draws other noise."""

    def on_batch_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 0:
            loop.model.generator.manual_seed(loop.rank)


def test_each_ranks_generators_in_the_model_continue_in_the_next_piece() -> None:
    models = []
    for pieces in ([4], [2, 2]):
        torch.manual_seed(0)
        tl = make_loop(Noisy(), seed=3, gpu_mode="ddp", devices=2)
        with tl.ranks():
            for number in pieces:
                tl.fit(num_iterations=number, callbacks=[Seeds("seeds")])
        models.append(tl.model)
    assert all(map(torch.equal, *(model.parameters() for model in models)))


class Constant(AbstractCallback):
    def on_epoch_end(self) -> None:
        self.train_loop_obj.insert_metric_result_into_history("score", 1.0)


@pytest.mark.parametrize(
    "mode, batches, stopping, ended",
    [
        # The end of each piece is judged and, in single, the end of the epoch of 7 batches in the middle of piece 3.
        ("single", 2, EarlyStopping("score", patience=2), [2, 3, 5]),
        ("single", 7, EarlyStopping("score", patience=2), [2, 4]),
        ("single", 2, ThresholdEarlyStopping("score", 2.0, patience=1), [1, 3, 5]),
        pytest.param("ddp", 2, EarlyStopping("score", patience=2), [2, 4], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_patience_counts_evaluations_over_all_pieces(mode: str, batches: int, stopping: Any, ended: list[int]) -> None:
    tl = make_loop(gpu_mode=mode, devices=2 if mode == "ddp" else 1)
    found = []
    with tl.ranks():
        for piece in range(6):
            before = tl.global_step
            tl.fit(num_iterations=batches, callbacks=[Constant("constant"), stopping])
            if tl.early_stop:
                found.append(piece)
            assert tl.global_step > before  # after an end by the callback, too
    assert found == ended


def test_patience_continues_over_calls_with_epochs() -> None:
    tl, stopping = make_loop(), EarlyStopping("score", patience=2)
    found = []
    for epochs in (1, 2, 1, 3):
        before = tl.epoch
        tl.fit(num_epochs=epochs, callbacks=[Constant("constant"), stopping])
        found.append((tl.epoch - before, tl.early_stop))
    assert found == [(1, False), (2, True), (1, False), (1, True)]
    other = make_loop()
    other.fit(num_epochs=5, callbacks=[Constant("constant"), stopping])  # begins with a new count
    assert other.epoch == 3


class Batches:
    """Batches of different sizes, in an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        sizes = [3, 7, 2, 8, 5, 5, 4, 6, 1, 9, 6, 4]  # 60 samples
        starts = [sum(sizes[:i]) for i in range(12)]
        return (list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))

    def __len__(self) -> int:
        return 12


@pytest.mark.long
@pytest.mark.parametrize("of_iterable", [False, True])
@pytest.mark.parametrize("mode, devices, accumulation", [("single", 1, 2), ("ddp", 2, 1)])
def test_with_other_ranks_a_run_resumes_at_the_next_batch_of_a_batch_sampler(
    mode: str, devices: int, accumulation: int, *, of_iterable: bool, tmp_path: Path
) -> None:
    def make(mode: str, devices: int) -> TrainLoop:
        tl = make_loop(gpu_mode=mode, devices=devices)
        loader = DataLoader(make_data(), batch_sampler=Batches())
        tl.train_loader = list(loader) if of_iterable else loader
        return tl

    other = ("ddp", 2, 1) if mode == "single" else ("single", 1, 2)
    whole, first, resumed = make(mode, devices), make(*other[:2]), make(mode, devices)
    whole.fit(num_epochs=2, grad_accumulation=accumulation)
    saving = ModelCheckpoint(tmp_path, every_n_steps=2, every_n_epochs=None, keep=None)
    first.fit(num_epochs=1, grad_accumulation=other[2], callbacks=[saving])
    # After 2 of 6 steps, 4 of 12 batches are done.
    resumed.fit(
        num_epochs=2, grad_accumulation=accumulation, callbacks=[saving], resume_from=min(tmp_path.glob("*.pt"))
    )
    torch.testing.assert_close(list(resumed.model.parameters()), list(whole.model.parameters()))
    assert resumed.history["loss"] == pytest.approx(whole.history["loss"])


def test_a_run_whose_steps_have_other_numbers_of_batches_resumes_where_one_begins_or_not_at_all(tmp_path: Path) -> None:
    first, resumed = make_loop(), make_loop()
    for tl in (first, resumed):
        tl.train_loader = DataLoader(make_data(), batch_sampler=Batches())
    every = ModelCheckpoint(tmp_path, every_n_steps=3, every_n_epochs=None, keep=None)
    first.fit(num_epochs=1, callbacks=[every])
    with pytest.raises(CheckpointError, match=r"after 3 batches .* steps have 2 batches .* no step begins"):
        resumed.fit(num_epochs=2, grad_accumulation=2, callbacks=[every], resume_from=min(tmp_path.glob("*.pt")))
    resumed.fit(num_epochs=2, grad_accumulation=3, callbacks=[every], resume_from=min(tmp_path.glob("*.pt")))
    assert resumed.global_step == 3 + 3 + 4


@pytest.mark.parametrize(
    "before, now, at, devices, warns",
    [
        (4, 8, 2, 1, True),
        (8, 4, 2, 1, True),
        (4, 8, 8, 1, True),  # as many batches as an epoch has now
        (4, 8, 15, 1, False),  # the end of the epoch
        (8, 8, 2, 1, False),
        pytest.param(4, 4, 4, 2, False, marks=pytest.mark.long),  # 15 batches, in 8 steps
    ],
)
def test_other_batches_of_an_iterable_are_warned_of_in_the_middle_of_an_epoch(
    before: int, now: int, at: int, devices: int, warns: bool, recwarn: Any, tmp_path: Path
) -> None:
    first, resumed = make_loop(), make_loop(gpu_mode="ddp" if devices > 1 else "single", devices=devices)
    for tl, size in ((first, before), (resumed, now)):
        tl.train_loader = list(DataLoader(make_data(60), size))
    every = ModelCheckpoint(tmp_path, every_n_steps=1, every_n_epochs=None, keep=None)
    first.fit(num_epochs=1, callbacks=[every])
    (path,) = tmp_path.glob(f"checkpoint-*step={at:08}.pt")
    resumed.fit(num_epochs=2, callbacks=[every], resume_from=path)
    found = [str(one.message) for one in recwarn if "train_loader has up to" in str(one.message)]
    assert len(found) == warns


@pytest.mark.parametrize("batch_size, accumulation, steps", [(5, 1, 12), (16, 3, 2), (4, 2, 8), (None, 5, 3)])
def test_after_the_last_batch_of_an_epoch_a_run_resumes_with_steps_of_any_size(
    batch_size: int | None, accumulation: int, steps: int, tmp_path: Path
) -> None:
    """The last batch is smaller, so that no step of another size begins after the samples of full batches."""
    first, resumed = make_loop(), make_loop()
    for tl, size in ((first, 16), (resumed, batch_size)):
        loader = DataLoader(make_data(60), size)
        tl.train_loader = loader if batch_size else DataLoader(make_data(60), batch_sampler=Batches())
    every = ModelCheckpoint(tmp_path, every_n_steps=1, every_n_epochs=None, keep=None)
    first.fit(num_epochs=1, callbacks=[every])
    last = max(tmp_path.glob("checkpoint-epoch=0001-*.pt"))
    resumed.fit(num_epochs=2, grad_accumulation=accumulation, callbacks=[every], resume_from=last)
    assert resumed.global_step == first.global_step + steps
    assert resumed.history["loss"][0] == first.history["loss"][0]
    assert len(resumed.history["loss"]) == 2


@pytest.mark.parametrize("length", [41, 90])
def test_after_the_last_batch_of_an_epoch_a_run_resumes_with_a_dataset_of_another_length(
    length: int, tmp_path: Path
) -> None:
    first, resumed = make_loop(), make_loop()
    first.train_loader, resumed.train_loader = (DataLoader(make_data(rows), 16) for rows in (60, length))
    every = ModelCheckpoint(tmp_path, every_n_steps=1, every_n_epochs=None, keep=None)
    first.fit(num_epochs=1, callbacks=[every])
    (last,) = tmp_path.glob("checkpoint-epoch=0001-step=00000004.pt")
    resumed.fit(num_epochs=2, callbacks=[every], resume_from=last)
    assert resumed.global_step == 4 + -(-length // 16)
    assert resumed.history["loss"][0] == first.history["loss"][0]
    with pytest.raises(CheckpointError, match="in the middle of an epoch of 60"):
        resumed.fit(num_epochs=2, resume_from=min(tmp_path.glob("*.pt")))
