"""The end of an ``fsdp`` training: what the ranks hold together while the values reached come back to the caller."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import Layers, cpu_loop
from kit.ranks import run_own_ranks
from kit.sharded_models import needs_fsdp_on_cpu
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TTBasicModel, TTModel
from trainloop.callbacks import ExponentialMovingAverage, ModelCheckpoint

WIDTH = 1024


class Wide(TTModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(24)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Tensor:
        return self(batch_data).square().mean()

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        return self(batch_data), batch_data, {}


class Ended(AbstractCallback):
    """Leaves a mark when all steps are done, and stays a while for memory to be read.

    Also reads how much of the caller's weights is still in rank 0's own memory.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("Ended")
        self.mark = folder / "ended"
        self.of_callers = -1

    def on_train_end(self) -> None:
        self.of_callers = resident_bytes("trainloop-payload")
        self.mark.touch()
        time.sleep(0.5)


def resident_bytes(name: str) -> int:
    """Of a mapped file what is in this process's page table."""
    found, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if not line.split()[0].endswith(":"):
                inside = name in line
            elif inside and line.startswith("Rss:"):
                found += 1024 * int(line.split()[1])
    return found


def family() -> set[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat") as file:
            children.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    found, left = set(), [os.getpid()]
    while left:
        pid = left.pop()
        found.add(pid)
        left += children.get(pid, [])
    return found


def held_bytes() -> int:
    """Memory of this process and those it has started: what is each one's own, and the library's files in memory."""
    own, files = 0, {}
    for pid in family():
        with suppress(OSError):
            with open(f"/proc/{pid}/smaps_rollup") as file:
                own += sum(1024 * int(line.split()[1]) for line in file if line.startswith("Pss_Anon:"))
            for fd in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{fd}"
                with suppress(OSError):
                    if "trainloop-" in os.readlink(path):
                        status = os.stat(path)
                        files[status.st_ino] = 512 * status.st_blocks
    return own + sum(files.values())


@contextmanager
def watched(mark: Path) -> Iterator[list[int]]:
    """Readings from the moment that there is the mark."""
    readings: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            if mark.exists():
                readings.append(held_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield readings
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_what_comes_back_is_there_once_beside_the_callers_own(tmp_path: Path) -> None:
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    copy = 3 * sum(4 * p.numel() for p in model.parameters())  # of parameters and state
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    loop = cpu_loop(
        model,
        torch.utils.data.DataLoader(torch.randn(16, WIDTH), batch_size=4),
        optimizer,
        None,
        gpu_mode="fsdp",
        devices=2,
    )
    ended = Ended(tmp_path)
    state: list[dict[str, Any]] = []
    with loop.ranks():
        for _ in range(2):  # in the second the caller has an optimizer's state of its own, too
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            with watched(ended.mark) as readings:
                loop.fit(num_epochs=1, callbacks=[ended])
            ended.mark.unlink()
            assert 0 <= ended.of_callers < 0.1 * copy / 3  # it has been read: a shard of it would be a half
            assert max(readings) - readings[0] < 0.5 * copy  # with a second one it would be 1
            assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
            assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
            state.append(dict(optimizer.state[model.blocks[0].weight]))
            del before
    assert all(first is second for first, second in zip(state[0].values(), state[1].values(), strict=True))
    assert float(state[1]["step"]) == 4


class Counts(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("Counts")
        self.counts = Counter("aab")
        self.nested = [self.counts, {"inside": self.counts}]

    def on_epoch_end(self) -> None:
        self.counts["c"] += 1


def test_what_callbacks_keep_without_shards_stays_the_same() -> None:
    model, counts = Layers(nn.Linear(4, 2)), Counts()
    inside = counts.nested[1]
    cpu_loop(
        model,
        DataLoader(TensorDataset(torch.ones(4, 4), torch.ones(4, 2)), batch_size=2),
        criterion=nn.MSELoss(),
        gpu_mode="fsdp",
        devices=1,
    ).fit(num_epochs=1, callbacks=[counts])
    assert counts.counts == Counter("aabc")
    assert counts.nested == [counts.counts, inside]
    assert counts.nested[1] is inside
    assert inside["inside"] is counts.counts  # type: ignore[index, call-overload]


class Projector:
    """An object in an optimizer's state, as in GaLore."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrices = [matrix]


class Lookahead(torch.optim.SGD):
    """Keeps slow weights in attributes of its own: a dict by parameter, lists, and a tensor; and in its state."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            if not hasattr(self, "slow"):
                self.slow = {p: p.detach().clone() for p in parameters}
                self.lists = [[p.detach().clone() for p in parameters]]
                self.first = parameters[0].detach().clone()
                self.state[parameters[0]]["projector"] = Projector(parameters[0].detach().clone())
            found = super().step(closure)
            for p, slow in self.slow.items():
                slow.lerp_(p, 0.5)
        return found


class KeepsInModules(AbstractCallback):
    """As for elastic weight consolidation: squared gradients and old weights are attributes of the model and others."""

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        model: Any = self.train_loop_obj.model
        for name, p in model.named_parameters():
            model.fisher[name] = model.fisher.get(name, 0) + p.grad.detach() ** 2

    def on_epoch_end(self) -> None:
        tl: Any = self.train_loop_obj
        tl.model.layers[0].old = tl.model.layers[0].weight.detach().clone()
        tl.criterion.old = [p.detach().clone() for p in tl.model.parameters()]


class Layered(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)])
        self.fisher: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@needs_fsdp_on_cpu
def test_what_optimizers_models_and_criteria_keep_comes_back_whole() -> None:
    kept = []
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for how in ({}, {"gpu_mode": "fsdp", "devices": 2}):
        model, criterion = Layered(), nn.MSELoss()
        optimizer = Lookahead(model.parameters(), lr=0.1, momentum=0.9)
        cpu_loop(model, DataLoader(TensorDataset(x, x), 12 // (2 if how else 1) // 2), optimizer, criterion, **how).fit(
            num_epochs=2, callbacks=[KeepsInModules()]
        )
        slow: Any = optimizer.slow
        assert all(key is p for key, p in zip(slow, model.parameters(), strict=True))
        old: Any = (model.layers[0].old, *criterion.old)
        within = optimizer.state[model.layers[0].weight]["projector"].matrices
        kept.append([*slow.values(), *optimizer.lists[0], optimizer.first, *within, *model.fisher.values(), *old])
        assert all(type(tensor) is Tensor for tensor in kept[-1])
    for one, other in zip(*kept, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


class Average:
    """An average of the weights as scripts have it: an object of its own, which a callback keeps."""

    def __init__(self, parameters: Any) -> None:
        self.shadow = [p.detach().clone() for p in parameters]
        self.ends = (self.shadow[0] + 1, self.shadow[-1] + 1)

    def step(self, parameters: Any) -> None:
        for average, p in zip(self.shadow, parameters, strict=True):
            average.lerp_(p.detach(), 0.1)


class KeepsAnObject(AbstractCallback):
    average: Any = None

    def on_train_begin(self) -> None:
        self.average = {"ema": deque([Average(self.train_loop_obj.model.parameters())])}
        self.last: deque[Tensor] = deque(maxlen=2)

    def on_after_optimizer_step(self) -> None:
        self.average["ema"][0].step(self.train_loop_obj.model.parameters())
        self.last.append(next(self.train_loop_obj.model.parameters()).detach().clone())


def kept_by_callbacks(**how: Any) -> list[Tensor]:
    model, keeps, ema = Layered(), KeepsAnObject("keeps"), ExponentialMovingAverage(decay=0.5)
    x = torch.ones(8, 4, dtype=torch.float64)
    loop = cpu_loop(model, DataLoader(TensorDataset(x, x), 8 // (2 if how else 1)), criterion=nn.MSELoss(), **how)
    for _ in range(2):  # the second one continues with what the first one has left
        loop.fit(num_epochs=2, callbacks=[keeps, ema])
    average = keeps.average["ema"][0]
    assert keeps.last.maxlen == len(keeps.last) == 2
    kept = [*average.shadow, *average.ends, *keeps.last, *ema.average.values()]
    assert all(type(tensor) is Tensor for tensor in kept)
    return kept


@pytest.mark.long
@needs_fsdp_on_cpu
def test_what_callbacks_and_their_objects_keep_comes_back_whole(tmp_path: Path) -> None:
    expected = kept_by_callbacks()
    found = [kept_by_callbacks(gpu_mode="fsdp", devices=2)]
    found += run_own_ranks(partial(kept_by_callbacks, gpu_mode="fsdp"), 2, folder=tmp_path)
    for kept in found:  # under a launcher, on each rank
        torch.testing.assert_close(list(kept), list(expected), rtol=1e-12, atol=1e-12)


class KeepsOnOneRank(KeepsAnObject):
    def on_after_optimizer_step(self) -> None:
        if self.train_loop_obj.is_global_zero:
            super().on_after_optimizer_step()


@pytest.mark.long
@needs_fsdp_on_cpu
def test_shards_that_one_rank_alone_keeps_are_named_and_others_come_back_whole(capfd: Any) -> None:
    model, keeps, ema = Layered(), KeepsOnOneRank("keeps"), ExponentialMovingAverage(decay=0.5)
    x = torch.ones(8, 4, dtype=torch.float64)
    loop = cpu_loop(model, DataLoader(TensorDataset(x, x), 4), criterion=nn.MSELoss(), gpu_mode="fsdp", devices=2)
    loop.fit(num_epochs=1, callbacks=[keeps, ema])
    assert "KeepsOnOneRank.last has other sharded tensors on rank 0 than on other ranks" in capfd.readouterr().err
    whole = next(model.parameters()).shape
    assert [len(part) for part in keeps.last] == [whole[0] // 2]  # one step, rank 0's half
    assert keeps.average["ema"][0].shadow[0].shape == next(iter(ema.average.values())).shape == whole


class Halves(Tensor):
    """A tensor in bfloat16 that appears as float64. It has no storage of its own, like a state in 8 bits of torchao."""

    half_: Tensor

    @staticmethod
    def __new__(cls, half: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float64)  # type: ignore[attr-defined]

    def __init__(self, half: Tensor) -> None:
        self.half_ = half

    def __tensor_flatten__(self) -> Any:
        return ["half_"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, *_: Any) -> Any:
        return cls(parts["half_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        halves = [arg.half_ if isinstance(arg, Halves) else arg for arg in args]
        found = func(*halves, **(kwargs or {}))
        return cls(found) if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default) else found


torch.serialization.add_safe_globals([Halves])


class HalfMomentum(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if "mean" not in self.state[p]:
                zeros = Halves(torch.zeros_like(p.to_local(), dtype=torch.bfloat16))
                mesh: Any = (p.device_mesh, p.placements)
                self.state[p]["mean"] = DTensor.from_local(
                    zeros, *mesh, run_check=False, shape=p.shape, stride=p.stride()
                )
            mean = self.state[p]["mean"].to_local()
            assert type(mean) is Halves
            p.to_local().add_(mean.half_.lerp_(p.grad.to_local().bfloat16(), 0.5), alpha=-0.1)


@needs_fsdp_on_cpu
def test_a_state_of_tensors_without_a_storage_comes_back_and_is_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trained = []
    for resumes in (False, True):
        model = Layered()
        optimizer = HalfMomentum(model.parameters())
        loop = cpu_loop(model, DataLoader(TensorDataset(x, x), 2), optimizer, nn.MSELoss(), gpu_mode="fsdp", devices=2)
        keeper = ModelCheckpoint(str(tmp_path), every_n_epochs=None, every_n_steps=1, keep=9)
        found = next(tmp_path.glob("*step=00000002*")) if resumes else None
        loop.fit(num_epochs=1, callbacks=[keeper], resume_from=found)
        assert capfd.readouterr().err.count("an optimizer's state has tensors of Halves") == 1
        means = [optimizer.state[p]["mean"] for p in model.parameters()]
        assert all(type(mean) is Tensor and torch.equal(mean, mean.bfloat16().double()) for mean in means)
        trained.append([*model.parameters(), *means])
    assert all(map(torch.equal, *trained))


@needs_fsdp_on_cpu
def test_a_state_of_tensors_without_a_storage_is_sharded_as_plain_tensors() -> None:
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p]["own"] = Halves(torch.ones_like(p, dtype=torch.bfloat16))
    cpu_loop(model, DataLoader(TensorDataset(x, x), 2), optimizer, nn.MSELoss(), gpu_mode="fsdp", devices=2).fit(
        num_epochs=1
    )
    assert all(torch.equal(optimizer.state[p]["own"], torch.ones_like(p)) for p in model.parameters())
