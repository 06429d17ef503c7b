"""Loaders' persistent workers end with the call that started them, also inside ``with tl.ranks():``."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
from typing import Any

import psutil
import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from trainloop import AbstractCallback, TrainLoop, TTModel
from trainloop.data.loader.loader_copies import end_workers


class Rows(Dataset[Any]):
    """Rows with the number of the process that loads them."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return torch.as_tensor(self.rows[index]) + 0.01 * torch.rand(8), os.getpid()


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 1)
        self.workers: set[int] = set()
        self.sum = 0.0

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, pids = batch_data[0].float(), batch_data[1]
        self.workers.update(pids.tolist())
        self.sum += float(x.sum())
        return self.fc(x).pow(2).mean()

    def get_predictions(self, batch_data: Any, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return batch_data[0], batch_data[1], {}


def loop_of(data: Any, mode: str = "single", **options: Any) -> TrainLoop[Net]:
    torch.manual_seed(0)
    model = Net()
    defaults = {"persistent_workers": True, "shuffle": True, "prefetch_factor": 3}
    loader = DataLoader(data, 4, num_workers=2, **(defaults | options))
    return cpu_loop(
        model,
        loader,
        torch.optim.SGD(model.parameters(), 0.01),
        None,
        gpu_mode=mode,
        devices=2 if mode == "dp" else "auto",
        seed=3,
    )


def rows() -> Tensor:
    return torch.arange(8.0 * 21).reshape(21, 8) / 100


def workers_of(tl: TrainLoop[Net], **arguments: Any) -> set[int]:
    tl.model.workers.clear()
    tl.model.sum = 0.0
    tl.fit(num_epochs=1, **arguments)
    found = set(tl.model.workers)
    assert os.getpid() not in found
    return found


def alive(pids: set[int]) -> bool:
    return any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:gpu_mode='dp'. get_loss changes sum")
@pytest.mark.parametrize("mode", ["single", "dp"])
def test_calls_in_a_block_load_what_they_load_outside(mode: str) -> None:
    def calls(inside: bool) -> list[Any]:
        tl = loop_of(Rows(rows()), mode, generator=torch.Generator().manual_seed(7))
        found: list[Any] = []
        workers: list[set[int]] = []
        with tl.ranks() if inside else contextlib.nullcontext():
            for change in (1, -1, -1):
                tl.train_loader.dataset.rows.mul_(change)
                workers.append(workers_of(tl))
                assert not alive(workers[-1])
                found += [tl.model.sum, tl.predict_on_train_set()[0].tolist(), tl.model.fc.weight.tolist()]
        assert not set.intersection(*workers)
        return found

    assert calls(False) == calls(True)


class Raises(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("raises")

    def on_batch_end(self) -> None:
        raise ZeroDivisionError


def test_workers_end_with_their_call_without_the_garbage_collector() -> None:
    tl = loop_of(Rows(rows()))
    gc.disable()
    try:
        loaded = set(tl.predict_on_train_set()[1].tolist())
        loaded |= workers_of(tl)
        with pytest.raises(ZeroDivisionError) as failure:  # whose traceback holds what the failed run held
            tl.fit(num_epochs=1, callbacks=[Raises()])
        loaded |= tl.model.workers
        assert len(loaded) == 5  # one has loaded the only batch of the third call
        assert not alive(loaded)
        assert failure.tb is not None
    finally:
        gc.enable()


class Breaks(Rows):
    def __getitem__(self, index: int) -> Any:
        raise ValueError("row")


@pytest.mark.parametrize("where", ["get_loss", "the dataset"])
def test_workers_end_with_a_call_that_fails(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while the error's traceback refers to them, and before the folder of their sockets is removed."""
    if where == "the dataset":
        multiprocessing.util.get_temp_dir()  # a program may have used this before
    loop = loop_of((Breaks if where == "the dataset" else Rows)(rows()), persistent_workers=False)
    if where == "get_loss":
        monkeypatch.setattr(Net, "get_loss", lambda self, batch_data, criterion, device: 1 / 0)
    before = psutil.Process().children()
    with pytest.raises((ValueError, ZeroDivisionError)) as caught:
        loop.fit(num_epochs=1)
    assert caught.value.__traceback__ is not None
    assert [child for child in psutil.Process().children() if child not in before] == []


def test_workers_that_keep_running_follow_changes_between_two_calls() -> None:
    rows = TensorDataset(torch.arange(6.0).view(-1, 1))
    part = Subset(rows, [0, 1, 2])

    class Seen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[float] = []

        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            self.rows += batch_data[0].flatten().tolist()
            return self.fc(batch_data[0].expand(-1, 8)).mean()

    model = Seen()
    loader = DataLoader(part, 4, num_workers=1, persistent_workers=True)
    # Without a seed, the loop reads the user's loader itself, whose workers keep running as in a hand-written loop.
    loop = TrainLoop(model, loader, optimizer=torch.optim.SGD(model.parameters(), 0.01), progress_bar=False)
    loop.fit(num_epochs=1)
    running = loader._iterator
    loop.fit(num_epochs=1)
    assert running is not None
    assert loader._iterator is running  # nothing has changed
    part.indices += [4]  # type: ignore[operator]
    loop.fit(num_epochs=1)
    part.indices = [5, 3]
    loop.fit(num_epochs=1)
    assert model.rows == [0, 1, 2, 0, 1, 2, 0, 1, 2, 4, 5, 3]
    assert len(loop.worker_marks) == 1
    loader._iterator._shutdown_workers()  # type: ignore[union-attr]


class StreamOfRows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from map(Rows(rows()).__getitem__, range(21))


class Fails(AbstractCallback):
    def on_batch_end(self) -> None:
        raise RuntimeError("not this batch")


def test_workers_of_a_stream_end_with_a_call_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    tl = loop_of(StreamOfRows(), persistent_workers=False, shuffle=False)
    with pytest.raises(RuntimeError, match="not this batch") as error:
        workers_of(tl, callbacks=[Fails()])
    assert error.traceback  # which refers to the iterator of the workers
    assert tl.model.workers
    assert not alive(tl.model.workers)
    assert "Traceback" not in capfd.readouterr().err


class Grows(AbstractCallback):
    """Adds rows to the dataset after each epoch."""

    def on_epoch_end(self) -> None:
        dataset = self.train_loop_obj.train_loader.dataset
        dataset.rows = torch.cat([dataset.rows, dataset.rows[:2]])


class TakesTheFunction(AbstractCallback):
    """Makes the next epoch's loader with the functions of the last one's."""

    def on_epoch_end(self) -> None:
        tl = self.train_loop_obj
        old = tl.train_loader
        tl.train_loader = DataLoader(old.dataset, 5, num_workers=2, worker_init_fn=old.worker_init_fn)


class EvaluatesFirst(Grows):
    """Reads the training loader before the training does, and keeps this feed while the loader changes."""

    def on_train_begin(self) -> None:
        self.train_loop_obj.evaluate_loss_on_train_set()

    def on_batch_end(self) -> None:
        self.train_loop_obj.evaluate_loss_on_train_set()


def notes_worker(worker: int) -> None:
    pass


@pytest.mark.filterwarnings("ignore:the training changes")
@pytest.mark.parametrize("callback", [Grows, TakesTheFunction, EvaluatesFirst])
@pytest.mark.parametrize("seed", [None, 3])
def test_workers_of_a_loader_that_changes_between_epochs_have_a_folder_for_their_sockets(
    callback: type[AbstractCallback], seed: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    tl = loop_of(Rows(rows()), persistent_workers=False, timeout=20, worker_init_fn=notes_worker)
    tl.seed = seed
    first = tl.train_loader
    tl.fit(num_epochs=3, callbacks=[callback("changes")])
    assert "Traceback" not in capfd.readouterr().err
    assert first.worker_init_fn is notes_worker
    assert len(list(tl.train_loader)) > 4  # by hand


@pytest.mark.filterwarnings("ignore:the training changes")
@pytest.mark.parametrize("seed", [None, 3])
def test_workers_outlive_signals_after_the_loader_has_changed(seed: int | None) -> None:
    found: list[Any] = []

    class Reads(Grows):
        def on_batch_begin(self) -> None:
            found.append(type(self.train_loop_obj.train_loader.worker_init_fn).__name__)

    tl = loop_of(Rows(rows()), persistent_workers=False)
    tl.seed = seed
    tl.fit(num_epochs=3, callbacks=[Reads("changes")])
    assert set(found) == {"WorkerInit"}


def sets_zero(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.rows = torch.zeros_like(info.dataset.rows)  # type: ignore[attr-defined]


class AssignsTheFunction(AbstractCallback):
    """Assigns another function to both loaders before the second epoch."""

    def on_epoch_begin(self) -> None:
        tl = self.train_loop_obj
        if tl.epoch == 1:
            tl.train_loader.worker_init_fn = tl.validation_loader.worker_init_fn = sets_zero


class Sums(Net):
    """Logs the sum of each batch, which is small if the rows are zeros."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.log("rows", float(batch_data[0].sum()))
        return super().get_loss(batch_data, criterion, device)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_init_fn_that_a_callback_assigns_is_called_from_the_next_epoch_on(
    seed: int | None, persistent: bool
) -> None:
    tl = loop_of(Rows(rows()), persistent_workers=persistent, worker_init_fn=notes_worker)
    tl.model = Sums()
    tl.optimizer = torch.optim.SGD(tl.model.parameters(), 0.01)
    tl.seed = seed
    tl.validation_loader = DataLoader(Rows(rows()), 4, num_workers=1, persistent_workers=persistent)
    tl.fit(num_epochs=2, callbacks=[AssignsTheFunction("assigns")])
    for name in ("rows", "val_rows"):
        before, after = tl.history[name]
        assert before > 10 > after, name
    assert tl.train_loader.worker_init_fn is tl.validation_loader.worker_init_fn is sets_zero
    for loader in (tl.train_loader, tl.validation_loader):
        end_workers(loader)


class GrowsAndEvaluates(Grows):
    """Adds rows within an epoch, and reads them."""

    def on_batch_end(self) -> None:
        self.on_epoch_end()
        self.train_loop_obj.evaluate_loss_on_train_set()


@pytest.mark.filterwarnings("ignore:the training changes")
@pytest.mark.parametrize("persistent", [False, True])
def test_an_evaluation_of_the_changed_training_loader_leaves_the_workers_of_the_epoch(persistent: bool) -> None:
    tl = loop_of(Rows(rows()), persistent_workers=persistent, timeout=20)
    tl.seed = None
    tl.fit(num_epochs=1, callbacks=[GrowsAndEvaluates("grows")])
    assert tl.global_step == 6  # the batches of the 21 rows at the beginning
    tl.fit(num_epochs=1)
    assert tl.global_step == 6 + 9  # of 33 rows
    end_workers(tl.train_loader)
