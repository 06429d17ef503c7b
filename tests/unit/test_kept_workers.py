"""``with tl.ranks():`` in one process: loaders' workers go on where new ones would be the same, and only there."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from reference import identical
from trainloop import AbstractCallback, TrainLoop, TTModel
from trainloop.signals import WorkerInit, signals


class Rows(Dataset[Any]):
    """Rows with the number of the process that loads them."""

    def __init__(self, rows: Any, also: Any = None) -> None:
        self.rows, self.also = rows, also

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
    loader = DataLoader(
        data, 4, num_workers=2, persistent_workers=True, **({"shuffle": True, "prefetch_factor": 3} | options)
    )
    return TrainLoop(
        model,
        loader,
        optimizer=torch.optim.SGD(model.parameters(), 0.01),
        gpu_mode=mode,
        devices=2 if mode == "dp" else "auto",
        accelerator="cpu",
        seed=3,
        progress_bar=False,
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
@pytest.mark.parametrize("mode", ["single", "dp"])
def test_the_same_numbers_from_workers_that_stay(mode: str) -> None:
    def calls(inside: bool) -> tuple[list[Any], list[set[int]]]:
        tl = loop_of(Rows(rows()), mode, generator=torch.Generator().manual_seed(7))
        found: list[Any] = []
        pids = [workers_of(tl)]
        context = tl.ranks()
        if inside:
            context.__enter__()
        for iterations in (0, 3, 0):  # one ends in the midst of an epoch, with batches on their way
            if iterations:
                tl.fit(num_iterations=iterations)
            else:
                pids.append(workers_of(tl))
            found += [tl.predict_on_train_set()[0].clone(), tl.model.fc.weight.detach().clone()]
        if inside:
            context.__exit__(None, None, None)
        return found, pids

    (new, of_each), (kept, of_one) = calls(False), calls(True)
    assert identical(dict(enumerate(new)), dict(enumerate(kept)))
    assert not of_each[1] & of_each[2]
    assert of_one[1] == of_one[2] != of_one[0]
    assert not alive(of_one[2])


def in_place(tl: TrainLoop[Net], data: Rows) -> None:
    data.rows.mul_(-1)


def by_numpy(tl: TrainLoop[Net], data: Rows) -> None:
    data.rows.numpy()[:] *= -1  # which leaves no trace in the tensor's version


def other_attribute(tl: TrainLoop[Net], data: Rows) -> None:
    data.rows = -data.rows


def other_loader(tl: TrainLoop[Net], data: Rows) -> None:
    tl.train_loader = DataLoader(Rows(-data.rows), 4, shuffle=True, num_workers=2, persistent_workers=True)


def other_collate(tl: TrainLoop[Net], data: Rows) -> None:
    def negated(samples: list[Any]) -> Any:
        x, pids = torch.utils.data.default_collate(samples)
        return -x, pids

    tl.train_loader = DataLoader(
        data, 4, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=3, collate_fn=negated
    )


@pytest.mark.parametrize("change", [in_place, by_numpy, other_attribute, other_loader, other_collate])
def test_changed_data_is_never_missed(change: Callable[..., None]) -> None:
    data = Rows(rows())
    tl = loop_of(data)
    with tl.ranks():
        first = workers_of(tl)
        before = tl.model.sum
        change(tl, data)
        second = workers_of(tl)
        assert tl.model.sum == pytest.approx(-before, rel=0.1)
        assert not first & second
        assert not alive(first)
        assert workers_of(tl) == second


def test_surroundings_and_what_a_hook_changes_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Doubles(AbstractCallback):
        def on_epoch_begin(self) -> None:
            self.train_loop_obj.train_loader.dataset.rows = 2 * self.train_loop_obj.train_loader.dataset.rows

    tl = loop_of(Rows(rows()))
    with tl.ranks():
        found = [workers_of(tl)]
        for change in (
            lambda: monkeypatch.setenv("READ_BY_WORKERS", "now"),
            lambda: monkeypatch.chdir(tmp_path),
            lambda: torch.set_default_dtype(torch.float64),
        ):
            try:
                change()
                found.append(workers_of(tl))
            finally:
                torch.set_default_dtype(torch.float32)
        before = tl.model.sum
        assert not set.intersection(*found)
        workers_of(tl, callbacks=[Doubles()])
        assert tl.model.sum == pytest.approx(2 * before, rel=0.1)
        tl.model.sum = 0.0
        workers_of(tl, callbacks=[Doubles()])
        assert tl.model.sum == pytest.approx(4 * before, rel=0.1)


def mapped(folder: Path) -> Any:
    array = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.float32, (600, 8))
    array[:] = 1
    return array


@pytest.mark.parametrize(
    "also",
    [
        pytest.param(lambda: torch.zeros(1).share_memory_(), id="shared tensor"),
        pytest.param(multiprocessing.Lock, id="lock of processes"),
        pytest.param(threading.Lock, id="can't be pickled"),
        pytest.param(lambda: np.zeros(65 << 20, np.uint8), id="too large to compare"),
    ],
)
def test_workers_that_can_not_be_compared_are_started_anew(also: Callable[[], Any]) -> None:
    tl = loop_of(Rows(rows(), also()))
    with tl.ranks():
        first, second = workers_of(tl), workers_of(tl)
    assert not first & second
    assert not alive(first | second)


@pytest.mark.long
def test_another_file_by_the_name_of_a_mapped_one(tmp_path: Path) -> None:
    tl = loop_of(Rows(mapped(tmp_path)))
    with tl.ranks():
        first = workers_of(tl)
        assert workers_of(tl) == first
        (tmp_path / "rows.npy").unlink()
        tl.train_loader.dataset.rows = mapped(tmp_path)  # the same name and values
        assert not workers_of(tl) & first


class OwnState(Rows):
    """Each worker's copy changes with its reads."""

    def __init__(self, kind: str) -> None:
        super().__init__(rows())
        self.kind = kind
        self.generator = np.random.default_rng(5)
        self.reads = np.zeros(1000)
        self.file: Any = None

    def __getitem__(self, index: int) -> Any:
        x, pid = super().__getitem__(index)
        if self.kind == "generator":
            x = x + float(self.generator.random())
        elif self.kind == "counter":
            self.reads[0] += 1
            x = x * float(self.reads[0])
        else:
            self.file = self.file or open(os.devnull)  # noqa: SIM115  # as h5py's and others', opened in the worker
        return x, pid

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"file": None} if self.kind == "file left out" else {}
        return {**self.__dict__, **left_out}


def own_generators(worker_id: int) -> None:
    worker = torch.utils.data.get_worker_info()
    assert worker is not None
    worker.dataset.generator = np.random.default_rng(worker_id)  # type: ignore[attr-defined]


def collate_with_state() -> Any:
    seen: list[int] = []

    def collate(samples: list[Any]) -> Any:
        seen.append(len(samples))
        x, pids = torch.utils.data.default_collate(samples)
        return x * len(seen), pids

    return collate


# What the workers keep; whether they stay.
OF_THEIR_OWN: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "generator": (lambda: {"data": OwnState("generator")}, False),
    "generator for each worker": (
        lambda: {"data": OwnState("generator"), "worker_init_fn": own_generators},
        False,
    ),
    "counter": (lambda: {"data": OwnState("counter")}, False),
    "counter of the collate function": (lambda: {"data": Rows(rows()), "collate_fn": collate_with_state()}, False),
    "file": (lambda: {"data": OwnState("file")}, False),
    "file left out": (lambda: {"data": OwnState("file left out")}, True),
    "nothing, with own first steps": (lambda: {"data": Rows(rows()), "worker_init_fn": int}, True),
}


@pytest.mark.parametrize("what", OF_THEIR_OWN)
def test_what_workers_made_of_their_copies_is_not_carried_over(what: str) -> None:
    make, stay = OF_THEIR_OWN[what]

    def calls(inside: bool) -> tuple[list[float], list[set[int]]]:
        tl, sums = loop_of(**make()), []
        with tl.ranks() if inside else contextlib.nullcontext():
            pids = []
            for _ in range(3):
                pids.append(workers_of(tl))
                sums.append(tl.model.sum)
        return sums, pids

    (new, _), (kept, pids) = calls(False), calls(True)
    assert new == kept
    assert (pids[0] == pids[1] == pids[2]) == stay
    assert not alive(set.union(*pids))


class RunsAnother(AbstractCallback):
    def __init__(self, other: TrainLoop[Net], *, fails: bool) -> None:
        super().__init__("runs another")
        self.other, self.fails = other, fails

    def on_batch_end(self) -> None:
        if self.train_loop_obj.global_step % 6 != 2:
            return
        self.other.predict_on_train_set()
        workers_of(self.other)
        if self.fails:
            self.other.callbacks.clear()
            with pytest.raises(ZeroDivisionError):
                self.other.fit(num_epochs=1, callbacks=[Raises()])


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
def test_a_callback_runs_another_loop(fails: bool) -> None:
    def runs(inside: bool) -> tuple[list[Any], list[set[int]]]:
        tl, other = loop_of(Rows(rows())), loop_of(Rows(-rows()))
        with tl.ranks() if inside else contextlib.nullcontext():
            pids = [workers_of(tl, callbacks=[RunsAnother(other, fails=fails)]), workers_of(tl)]
            assert other.model.workers
            assert not alive(other.model.workers)
        return [tl.history["loss"], other.history["loss"], tl.model.fc.weight.tolist()], pids

    (new, of_each), (kept, of_one) = runs(False), runs(True)
    assert new == kept
    assert not of_each[0] & of_each[1]
    assert of_one[0] == of_one[1]
    assert not alive(of_one[0])


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


def test_blocks_of_two_threads_end_in_any_order() -> None:
    opened, closed = threading.Event(), threading.Event()

    def in_a_thread() -> None:
        with loop_of(Rows(rows())).ranks():
            opened.set()
            assert closed.wait(60)

    thread = threading.Thread(target=in_a_thread)
    with loop_of(Rows(rows())).ranks():
        thread.start()
        assert opened.wait(60)
    closed.set()
    thread.join()
    with signals():  # what spawned workers are sent, to learn of signals
        assert pickle.loads(pickle.dumps(WorkerInit(None)))._mark is not None


class Raises(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("raises")

    def on_batch_end(self) -> None:
        raise ZeroDivisionError


def test_failures_and_dead_workers() -> None:
    tl = loop_of(Rows(rows()))
    with pytest.raises(KeyError), tl.ranks():
        first = workers_of(tl)
        with pytest.raises(ZeroDivisionError):
            tl.fit(num_epochs=1, callbacks=[Raises()])
        assert not alive(first)
        tl.callbacks.clear()
        second = workers_of(tl)
        os.kill(min(second), signal.SIGKILL)
        dead = f"/proc/{min(second)}/task"  # its other threads may be a moment behind
        while alive({min(second)}) or len(os.listdir(dead)) > 1:
            pass
        third = workers_of(tl)
        assert not second & third
        with tl.ranks():  # inside another: nothing ends with it
            assert workers_of(tl) == third
        assert workers_of(tl) == third
        raise KeyError
    assert not alive(first | second | third)
    assert not workers_of(tl) & third


def test_after_a_signal_workers_are_new() -> None:
    class Signals(AbstractCallback):
        def on_batch_end(self) -> None:
            if self.train_loop_obj.global_step == asked[-1]:
                os.kill(os.getpid(), signal.SIGUSR1)

    tl, asked = loop_of(Rows(rows())), [2]
    with tl.ranks():
        first = workers_of(tl)
        started = set(multiprocessing.active_children())
        asked.append(tl.global_step + 1)
        tl.predict_on_train_set()
        of_predictions = set(multiprocessing.active_children()) - started
        assert of_predictions
        with pytest.raises(SystemExit):
            tl.fit(num_epochs=1, callbacks=[Signals()])
        assert not alive(first)
        # The signal may have been for the whole group, so for the workers that nobody read, too.
        assert not any(process.is_alive() for process in of_predictions)
        tl.callbacks.clear()
        second = workers_of(tl)
        # To the whole group, in a later call than the one that started them: they outlive it as new ones do.
        asked.append(tl.global_step + 1)

        class ToAll(Signals):
            def on_batch_end(self) -> None:
                if self.train_loop_obj.global_step == asked[-1]:
                    for pid in (os.getpid(), *second):
                        os.kill(pid, signal.SIGTERM)

        with pytest.raises(SystemExit) as ended:
            tl.fit(num_epochs=1, callbacks=[ToAll()])
        assert ended.value.code == 143
