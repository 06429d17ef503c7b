"""``with tl.ranks():`` the same processes do one call after the other, and nobody could tell but by the clock."""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTModel
from trainloop._launch import keeping, launch
from trainloop.errors import UnpicklableError, WorkerFailedError

ROWS = make_data(64)


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        if self.training:
            pids = self.all_gather(os.getpid()).tolist()
            self.seen.append((pids, os.environ.get("WANDB_CHANGED"), os.getcwd()))
        x, y = batch_data
        return criterion(self(x.to(device)), y.to(device))

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return self(x.to(device)).argmax(1), y, {}


def loop_of(model: Net, data: TensorDataset, **options: Any) -> TrainLoop[Net]:
    return cpu_loop(
        model,
        DataLoader(data, batch_size=8),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        validation_loader=DataLoader(data, batch_size=8),
        gpu_mode="ddp",
        devices=2,
        **options,
    )


def train_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, smoothing: float = 0
) -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)
    for i in range(0, len(x), 16):
        optimizer.zero_grad()
        criterion(model(x[i : i + 16]), y[i : i + 16]).backward()
        optimizer.step()


class Fails(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("fails")

    def on_epoch_end(self) -> None:
        if dist.get_rank() == 1:
            raise ValueError("on purpose")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")  # by torch 2.6, of a folder of its own
def test_calls_in_kept_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model, data = Net(), TensorDataset(*(t.clone() for t in ROWS.tensors))
    by_hand = copy.deepcopy(model.fc)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    x, y = (t.clone() for t in ROWS.tensors)
    tl = loop_of(model, data)
    with tl.ranks():
        tl.fit(num_epochs=1)
        train_by_hand(by_hand, optimizer, x, y)
        # What changed in between: data and learning rate in place, other objects, the process's own state.
        data.tensors[0].mul_(2)
        tl.optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.01
        with monkeypatch.context() as patch, tl.ranks():  # inside another: nothing new, and nothing ends with it
            patch.setenv("WANDB_CHANGED", "yes")
            patch.chdir(tmp_path)
            tl.criterion = nn.CrossEntropyLoss(label_smoothing=0.5)
            tl.fit(num_epochs=1)
            train_by_hand(by_hand, optimizer, 2 * x, y, 0.5)
            tl.criterion = nn.CrossEntropyLoss()
        tl.train_loader = DataLoader(TensorDataset(-x, y), batch_size=8)
        predicted, _, _ = tl.predict_on_train_set()
        tl.fit(num_epochs=1)
        torch.testing.assert_close(predicted, by_hand(-x).argmax(1))
        train_by_hand(by_hand, optimizer, -x, y)
        torch.testing.assert_close(model.fc.weight.data, by_hand.weight.data, atol=1e-6, rtol=1e-5)

        pids = {tuple(seen[0]) for seen in model.seen}
        assert len(pids) == 1  # the same two processes in all calls
        here, there = (None, os.getcwd()), ("yes", str(tmp_path))
        assert [seen[1:] for seen in model.seen[::4]] == [here, there, here]
        first = next(iter(pids))

        # What can't be sent is told before anything happens, and the ranks stay.
        model.file = open(os.devnull)  # type: ignore[assignment]  # noqa: SIM115
        with pytest.raises(UnpicklableError, match=r"model\.file"):
            tl.fit(num_epochs=1)
        model.file.close()
        del model.file
        model.seen.clear()
        tl.fit(num_epochs=1)
        assert model.seen[0][0] == list(first)

        # A failure ends them, and the next call has others.
        with pytest.raises(WorkerFailedError, match="rank 1 of 2 raised ValueError: on purpose"):
            tl.fit(num_epochs=1, callbacks=[Fails()])
        assert not any(map(psutil.pid_exists, first))
        tl.callbacks.clear()
        model.seen.clear()
        tl.fit(num_epochs=1)
        second = tuple(model.seen[0][0])
        assert not set(first) & set(second)

        # So does the death of a rank that waits.
        os.kill(second[1], signal.SIGKILL)
        while psutil.pid_exists(second[1]):
            time.sleep(0.01)
        model.seen.clear()
        assert tl.evaluate_loss_on_validation_set() > 0
        tl.fit(num_epochs=1)
        third = tuple(model.seen[0][0])
        assert not set(second) & set(third)
        assert not any(map(psutil.pid_exists, second))
    assert not any(map(psutil.pid_exists, third))
    model.seen.clear()
    tl.fit(num_epochs=1)
    assert not set(model.seen[0][0]) & {*first, *second, *third}
    assert "Traceback" not in capfd.readouterr().err


def memory_of_ranks(stop: Any, block: Any) -> list[tuple[int, int, str]]:
    assert block.sum()
    mine = (os.getpid(), len(os.listdir("/proc/self/fd")), os.environ.get("GLOO_SOCKET_IFNAME"))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


@pytest.mark.long
def test_kept_ranks_hold_nothing_of_a_call() -> None:
    block = torch.ones(64 << 20, dtype=torch.uint8)
    with keeping():
        started = launch(functools.partial(memory_of_ranks, block=block), ranks_per_node=2)
        facts = [launch(functools.partial(memory_of_ranks, block=block), ranks_per_node=2) for _ in range(3)]
        assert len({tuple(pid for pid, _, _ in calls) for calls in facts}) == 1
        assert len({tuple(fds for _, fds, _ in calls) for calls in facts}) == 1  # none is left open
        # Groups that the work makes go over the same interface in each call.
        assert {interface for calls in facts for _, _, interface in calls} == {started[0][2]} != {None}
        held = [psutil.Process(pid).memory_full_info().pss for pid, _, _ in facts[0]]
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid, _, _ in facts[0]]
    assert not any("trainloop-payload" in text for text in maps)
    assert all(pss > 0 for pss in held)


@pytest.mark.long
def test_the_work_keeps_what_it_has_set_and_takes_on_what_the_caller_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def facts(stop: Any) -> dict[str, Any]:
        own = os.environ.setdefault("WANDB_OWN", str(os.getpid()))
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        return {
            "own": (os.getpid(), int(own)),
            "callers": [os.environ.get(name) for name in ("WANDB_KEPT", "WANDB_NEW", "WANDB_GONE")],
            "cpus": [os.sched_getaffinity(thread) for thread in threads],
            "umask": f"{os.umask(0):o}",
        }

    monkeypatch.setenv("WANDB_KEPT", "kept")
    monkeypatch.setenv("WANDB_GONE", "not yet")
    cpus, umask = os.sched_getaffinity(0), os.umask(0o022)
    try:
        with keeping():
            first = launch(facts, ranks_per_node=1)
            monkeypatch.setenv("WANDB_NEW", "new")
            monkeypatch.delenv("WANDB_GONE")
            os.sched_setaffinity(0, {min(cpus)})
            second = launch(facts, ranks_per_node=1)
            os.umask(0o027)
            third = launch(facts, ranks_per_node=1)
    finally:
        os.sched_setaffinity(0, cpus)
        os.umask(umask)
    assert first["callers"] == ["kept", None, "not yet"]
    assert second["callers"] == third["callers"] == ["kept", "new", None]
    assert second["own"] == first["own"]
    assert {frozenset(each) for each in second["cpus"]} == {frozenset({min(cpus)})}
    # What a process can't take on later is a reason for another one.
    assert third["own"][0] != first["own"][0]
    assert (first["umask"], third["umask"]) == ("22", "27")


@pytest.mark.long
def test_ctrl_c_stops_the_work_and_leaves_the_ranks(each_start_method: str) -> None:
    def steps(stop: Any) -> tuple[list[int], int]:
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        while True:
            if dist.get_rank() == 0:
                caller = multiprocessing.parent_process()
                assert caller is not None
                os.kill(caller.pid, signal.SIGINT)
            time.sleep(0.05)
            if reasons := stop.reached():
                return pids, reasons

    with keeping():
        first, reasons = launch(steps, ranks_per_node=2)
        second, again = launch(steps, ranks_per_node=2)
    assert (first, reasons) == (second, again)
    assert reasons


class LoadedRows(Dataset[Any]):
    """Rows with the number of the process that loaded them; large enough to lie in memory shared with the caller."""

    def __init__(self) -> None:
        self.rows = torch.full((64, 1024), 0.5)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return torch.as_tensor(self.rows[index]) + 0.001 * torch.rand(1024), os.getpid()


class Mean(TTModel):
    """Keeps what each call's batches held on both ranks, and who loaded them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        rows, pids = batch_data
        self.seen.append((self.all_gather(pids).flatten().tolist(), float(self.all_gather(rows.sum()).sum())))
        return (rows.mean() - self.weight).square()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return batch_data[0], batch_data[1], {}


@pytest.mark.long
def test_loaders_workers_are_those_of_a_call() -> None:
    def calls(inside: bool) -> Any:
        torch.manual_seed(0)
        model, data = Mean(), LoadedRows()
        loader = DataLoader(
            data, 8, shuffle=True, num_workers=1, persistent_workers=True, generator=torch.Generator().manual_seed(4)
        )
        tl = cpu_loop(model, loader, criterion=None, gpu_mode="ddp", devices=2, seed=1)
        sums, workers, predicted = [], [], []

        def fit(**arguments: Any) -> None:
            model.seen.clear()
            tl.fit(num_epochs=2, **arguments)
            sums.append([total for _, total in model.seen])
            workers.append({pid for pids, _ in model.seen for pid in pids})
            assert len(workers[-1]) == 2  # one of each rank, for both epochs
            assert not any(map(psutil.pid_exists, workers[-1]))

        with tl.ranks() if inside else contextlib.nullcontext():
            fit()
            predicted.append([part.clone() for part in tl.predict_on_train_set()[:2]])
            data.rows.numpy()[:] *= -2
            fit()
            if inside:
                # A failure ends ranks and workers; the next call has others.
                with pytest.raises(WorkerFailedError, match="on purpose"):
                    tl.fit(num_epochs=1, callbacks=[Fails()])
                assert not any(map(psutil.pid_exists, workers[-1]))
                tl.callbacks.clear()
                fit()
        assert not set.intersection(*workers)
        return sums[:2], [rows for rows, _ in predicted]

    new, kept = calls(False), calls(True)
    assert new[0] == kept[0]
    assert all(map(torch.equal, new[1], kept[1]))
