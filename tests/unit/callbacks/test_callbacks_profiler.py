"""Profiler, ThroughputMonitor and StochasticWeightAveraging, against torch's own classes."""

from __future__ import annotations

import copy
import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.loops import Layers
from kit.small_loop import STEPS_PER_EPOCH, Raises, make_loop
from torch import nn, optim
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback
from trainloop.callbacks import ModelCheckpoint, Profiler, StochasticWeightAveraging, ThroughputMonitor
from trainloop.errors import ConfigurationError

# -- profiler ----------------------------------------------------------------------------------------------------------


def test_the_profiler_traces_the_steps_it_is_asked_for(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "profile", skip=3, warmup=1, active=2)
    make_loop().fit(num_epochs=2, callbacks=[profiler])
    (path,) = profiler.traces
    assert Path(path).name == "rank0_step6.pt.trace.json"
    events = json.loads(Path(path).read_text())["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep")}
    assert len(steps) == 2
    assert "aten::addmm" in profiler.table
    short = Profiler(tmp_path, skip=100)
    make_loop().fit(num_epochs=1, callbacks=[short])
    assert short.traces == []
    with pytest.raises(ConfigurationError, match="active=0"):
        Profiler(active=0)


def test_the_profiler_ends_with_a_training_that_fails(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, skip=0, warmup=1, active=50)
    with pytest.raises(KeyError, match="here"):
        make_loop().fit(num_epochs=1, callbacks=[profiler, Raises(KeyError("here"), step=2)])
    again = Profiler(tmp_path, skip=0, warmup=1, active=1)  # torch has one profiler at a time
    make_loop().fit(num_epochs=1, callbacks=[again])
    assert len(again.traces) == 1


# -- throughput --------------------------------------------------------------------------------------------------------


class Slow:
    """A loader that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.loader = DataLoader(make_data(), 16)
        self.seconds = seconds

    def __iter__(self) -> Any:
        for batch in self.loader:
            time.sleep(self.seconds)
            yield batch


@pytest.mark.parametrize("devices", [1, 2])
def test_a_warning_says_that_the_threads_of_replicas_are_not_profiled(tmp_path: Path, devices: int) -> None:
    profiler = Profiler(tmp_path, skip=0, warmup=1, active=1)
    loop = make_loop(gpu_mode="dp", accelerator="cpu", devices=devices)
    with pytest.warns(UserWarning, match="threads of several replicas") if devices > 1 else nullcontext():
        loop.fit(num_epochs=1, callbacks=[profiler])
    assert ("aten::addmm" in profiler.table) == (devices == 1)


def test_several_profilers_need_steps_of_their_own(tmp_path: Path) -> None:
    def traced(*skips: int, ranks: tuple[int | None, ...] = (None, None)) -> list[str]:
        both = [
            Profiler(tmp_path, skip=skip, warmup=1, active=1, device_idx_execution=rank)
            for skip, rank in zip(skips, ranks, strict=True)
        ]
        make_loop().fit(num_epochs=1, callbacks=both)
        return [Path(path).name.partition(".")[0] for one in both for path in one.traces]

    assert traced(4, 0) == ["rank0_step6", "rank0_step2"]
    assert traced(0, 0, ranks=(0, 1)) == ["rank0_step2"]
    for skips in ((0, 0), (0, 2), (2, 0)):  # two at once end the process
        with pytest.raises(ConfigurationError, match=r"two Profilers .*, with skip=. and skip=."):
            traced(*skips)
    with pytest.raises(ConfigurationError, match="several ThroughputMonitors: pass only one"):
        make_loop().fit(num_epochs=1, callbacks=[ThroughputMonitor(2), ThroughputMonitor(3)])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_throughput_is_samples_over_seconds(accumulation: int) -> None:
    loop = make_loop(validation=False)
    loop.train_loader = Slow(0.03)
    monitor = ThroughputMonitor(every_n_steps=100, units=lambda samples: samples * 5, flops=True, peak_flops=1e9)
    began = time.perf_counter()
    loop.fit(num_epochs=2, callbacks=[monitor], grad_accumulation=accumulation)
    seconds = time.perf_counter() - began
    history = loop.history
    values = {name: history[f"throughput/{name}"][-1] for name in ("samples_per_s", "units_per_s", "step_s", "waiting")}
    assert 101 / seconds < values["samples_per_s"] < 101 / (STEPS_PER_EPOCH * 0.03)
    assert values["units_per_s"] == pytest.approx(5 * values["samples_per_s"])
    steps = -(-STEPS_PER_EPOCH // accumulation)
    assert values["step_s"] * steps * values["samples_per_s"] == pytest.approx(101)
    assert 0.03 * STEPS_PER_EPOCH * values["samples_per_s"] / 101 <= values["waiting"] * 1.01 <= 1.01
    # A step of whole batches: one product forward, one backward for the weights.
    assert monitor.flops_per_step == accumulation * 2 * (16 * 2 * 8 * 3)
    assert history["throughput/mfu"][-1] == pytest.approx(history["throughput/flops_per_s"][-1] / 1e9)


@pytest.mark.parametrize("devices", [1, 2])
def test_flops_of_the_threads_of_replicas_are_not_counted_in_part(devices: int) -> None:
    monitor = ThroughputMonitor(flops=True)
    loop = make_loop(gpu_mode="dp", accelerator="cpu", devices=devices)
    with pytest.raises(ConfigurationError, match="of several replicas") if devices > 1 else nullcontext():
        loop.fit(num_epochs=1, callbacks=[monitor])
    assert monitor.flops_per_step == (None if devices > 1 else 2 * (16 * 2 * 8 * 3))


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),  # a seventh of an A100
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A3000 Laptop GPU", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("Tesla T4", 65e12),
    ],
)
def test_the_peak_is_that_of_the_gpu(gpu: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    monitor = ThroughputMonitor()
    monitor.train_loop_obj = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    monitor.on_train_begin()
    assert monitor.peak_flops == peak


def test_throughput_has_step_values_by_windows() -> None:
    loop = make_loop()
    loop.fit(num_epochs=1, callbacks=[ThroughputMonitor(every_n_steps=3)])
    assert loop.history.step_indices("throughput/step_s") == [3, 6]


@pytest.mark.parametrize("again", [False, True])
def test_throughput_of_an_epoch_that_is_resumed_counts_this_runs_steps(again: bool, tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=1)
    monitor = ThroughputMonitor(every_n_steps=2, units=lambda samples: samples * 5)
    make_loop().fit(num_iterations=4, callbacks=[monitor, saves], grad_accumulation=2)
    if not again:
        monitor = ThroughputMonitor(every_n_steps=2, units=lambda samples: samples * 5)
    loop = make_loop()
    loop.fit(num_epochs=1, callbacks=[monitor, saves], grad_accumulation=2, resume_from="last")
    units, samples = (loop.history.steps(f"throughput/{name}_per_s") for name in ("units", "samples"))
    assert loop.history.step_indices("throughput/units_per_s") == [2, 4]
    assert units == pytest.approx([5 * value for value in samples])
    assert samples[-1] * loop.history.steps("throughput/step_s")[-1] == pytest.approx((2 * 16 + 5) / 2)


# -- stochastic weight averaging ---------------------------------------------------------------------------------------


def normed() -> Layers:
    torch.manual_seed(0)
    return Layers(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Rates(AbstractCallback):
    def __init__(self) -> None:
        super().__init__(execution_order=1)
        self.seen: list[float] = []

    def on_epoch_begin(self) -> None:
        self.seen.append(self.train_loop_obj.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_swa_is_the_loop_of_torchs_documentation(strategy: Any) -> None:
    model = normed()
    reference = copy.deepcopy(model)
    loop = make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.1))
    swa = StochasticWeightAveraging(0.02, start=0.5, anneal_epochs=3, anneal_strategy=strategy)
    rates = Rates()
    loop.fit(num_epochs=6, callbacks=[swa, rates])

    optimizer = optim.SGD(reference.parameters(), lr=0.1)
    average, scheduler, expected = AveragedModel(reference), None, []
    for epoch in range(6):
        if epoch == 3:
            scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3, anneal_strategy=strategy)
        elif scheduler is not None:
            scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
        for x, y in loop.train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(reference(x), y).backward()
            optimizer.step()
        if epoch >= 3:
            average.update_parameters(reference)
    update_bn(loop.train_loader, average)
    assert rates.seen == pytest.approx(expected)
    for (name, found), wanted in zip(model.state_dict().items(), average.module.state_dict().values()):
        torch.testing.assert_close(found, wanted, msg=name)
    assert not [name for name in loop.history if name.startswith("train_")]  # the last pass records nothing


def test_swa_resumes_and_goes_on(tmp_path: Path) -> None:
    def run(epochs: int, resume: bool = False) -> Layers:
        model = normed()
        loop = make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.1), seed=1)
        callbacks = [StochasticWeightAveraging(0.02, start=2), ModelCheckpoint(tmp_path / str(resume or epochs))]
        return loop.fit(num_epochs=epochs, callbacks=callbacks, resume_from=str(tmp_path / "3") if resume else None)

    whole = run(5).state_dict()
    run(3)
    resumed = run(5, resume=True).state_dict()
    # Statistics of the run that was broken off were of its average; those of the weights that go on are computed anew.
    for name, value in whole.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(resumed[name], value, msg=name)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_fraction_is_of_the_fit_in_which_swa_begins(resumed: bool, tmp_path: Path) -> None:
    loop = make_loop()
    loop.fit(num_epochs=4)
    swa, rates = StochasticWeightAveraging(0.02, start=0.75, anneal_epochs=0), Rates()
    loop.fit(num_epochs=4, callbacks=[swa, rates, ModelCheckpoint(tmp_path)])
    assert swa.updates == 1
    assert rates.seen == [0.1, 0.1, 0.1, 0.02]
    if resumed:
        loop, swa = make_loop(), StochasticWeightAveraging(0.02, start=0.75, anneal_epochs=0)
    callbacks = [swa, rates, ModelCheckpoint(tmp_path)]
    loop.fit(num_epochs=12 if resumed else 8, callbacks=callbacks, resume_from="last" if resumed else None)
    assert swa.updates == 9  # it continues, without a pause
    assert rates.seen[4:] == [0.02] * 8
    assert swa.start_epoch == 7


def test_swa_that_never_began_changes_nothing() -> None:
    plain, averaged = normed(), normed()
    for model, callbacks in ((plain, []), (averaged, [StochasticWeightAveraging(start=10)])):
        loop = make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.1))
        with pytest.warns(match="start=10.*before the first epoch to average") if callbacks else nullcontext():
            loop.fit(num_epochs=2, callbacks=callbacks)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), averaged.state_dict().values()))


def test_swa_refuses_iterations() -> None:
    with pytest.raises(ConfigurationError, match="num_iterations"):
        make_loop().fit(num_iterations=3, callbacks=[StochasticWeightAveraging(start=0.5)])
