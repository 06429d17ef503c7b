"""No callback waits for the device within a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import make_loop
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from trainloop import AbstractCallback
from trainloop.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    GradientClipping,
    GradientStats,
    LearningRateMonitor,
    LRScheduler,
    TensorBoard,
    TerminateOnNaN,
    TimeLimit,
)

# By these a value comes from the device to Python, or decides what Python does next.
WAITING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique", "masked_select", "index.Tensor")


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


class Begin(AbstractCallback):
    """First of all in each hook of the step; ``End`` is the last."""

    def __init__(self, begin: Any) -> None:
        super().__init__("begin", execution_order=-(10**6))
        for hook in ("on_batch_begin", "on_after_gradient_update", "on_after_optimizer_step", "on_batch_end"):
            setattr(self, hook, begin)


class End(Begin):
    def __init__(self, end: Any) -> None:
        super().__init__(end)
        self.execution_order = 10**6


def callbacks(folder: Path, steps: int = 7) -> list[AbstractCallback]:
    return [
        TensorBoard(folder, log_every_n_steps=1),
        TerminateOnNaN(check_every_n_steps=10**6),
        GradientStats(every_n_steps=1, per_parameter=True),
        GradientClipping(max_norm=1.0, max_value=0.5),
        LRScheduler(lr_scheduler.OneCycleLR, "step", max_lr=0.1, total_steps=steps),
        LearningRateMonitor(),
        ExponentialMovingAverage(0.9),
        EarlyStopping("loss"),
        TimeLimit(hours=1),
    ]


def test_nothing_is_read_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))  # what is on the CPU is read at once
    watch = Watch()
    begin, end = Begin(watch.__enter__), End(lambda: watch.__exit__(None, None, None))
    make_loop().fit(num_epochs=1, callbacks=[begin, *callbacks(tmp_path), end])
    assert any("_foreach_norm" in call for call in watch.calls)  # it does watch
    assert [call for call in watch.calls if call.startswith(WAITING)] == []
    # What it would look like otherwise:
    with watch:
        torch.ones(1).sum().item()
    assert watch.calls[-1].startswith(WAITING)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_is_read_in_a_step_on_a_gpu(tmp_path: Path) -> None:
    begin = Begin(lambda: torch.cuda.set_sync_debug_mode("error"))
    end = End(lambda: torch.cuda.set_sync_debug_mode("default"))
    loop = make_loop(accelerator="cuda", devices=1)
    try:
        loop.fit(num_epochs=2, callbacks=[begin, *callbacks(tmp_path, 14), end])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loop.global_step == 14
