"""The simulated device does what CUDA's documentation says, as far as users of torch can see it; no trainloop here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakegpu
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpu

SIZE = 1 << 18
LATE_S = 60  # later than any load of the machine makes this process: nothing comes before somebody waits for it


def counted(function: Callable[[], Any], what: str = "synchronisations") -> int:
    before = fakegpu.count(what)
    function()
    return fakegpu.count(what) - before


def test_a_copy_on_another_stream_comes_late_and_can_be_waited_for() -> None:
    """CUDA C++ Programming Guide, 'Asynchronous Concurrent Execution'."""
    source, target = torch.ones(SIZE).pin_memory(), torch.zeros(SIZE, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with fakegpu.lag(LATE_S), torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    assert not copied.query()
    unordered = target.sum()
    torch.cuda.current_stream().wait_event(copied)
    assert (unordered.item(), target.sum().item()) == (0, SIZE)
    assert copied.query()


def test_pinned_memory_is_read_late_and_pageable_memory_at_once() -> None:
    """CUDA Runtime API, 'API synchronization behavior': pageable memory is staged before the call returns."""
    side, found = torch.cuda.Stream(), {}
    for name, source in {"pageable": torch.ones(SIZE), "pinned": torch.ones(SIZE).pin_memory()}.items():
        with fakegpu.lag(LATE_S), torch.cuda.stream(side):
            target = source.to("cuda", non_blocking=True)
            source.zero_()  # too early for the pinned one
        side.synchronize()
        found[name] = target.sum().item()
    assert found == {"pageable": SIZE, "pinned": 0}


def test_a_kernel_that_takes_long_keeps_its_stream_busy_and_not_the_host() -> None:
    torch.cuda._sleep(300_000_000)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert done.query()


def test_synchronisations_and_transfers_are_counted() -> None:
    x, pinned = torch.ones(8, device="cuda"), torch.ones(8).pin_memory()
    assert counted(lambda: (x * 2).relu().sum()) == 0
    assert counted(lambda: x.sum().item()) == 1
    assert counted(lambda: x.nonzero()) >= 1
    assert counted(lambda: x[x > 0]) >= 1
    assert counted(lambda: torch.ones(8).to("cuda")) == 1
    assert counted(lambda: pinned.to("cuda", non_blocking=True)) == 0
    assert counted(lambda: pinned.to("cuda", non_blocking=True), "to device") == 1
    assert counted(lambda: x.tolist(), "to host") == 1
    assert counted(lambda: torch.zeros((), device="cuda"), "to device") == 0


def test_devices_and_the_cpu_are_not_mixed() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match=r"same device.*cuda:0 and cpu"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match=r"same device.*cuda:0 and cuda:1"):
        x + torch.ones(3, device="cuda:1")
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a scalar may be on the CPU


def test_a_fused_kernel_does_not_read_the_cpus_memory() -> None:
    layer = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.Adam(layer.parameters(), fused=True)
    layer(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = state["step"].cpu()
    with pytest.raises(RuntimeError, match=r"illegal memory access|on the same device|CUDA"):
        optimizer.step()


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}])
def test_optimizers_and_layers_compute_what_the_cpu_does(kind: dict[str, bool]) -> None:
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5))
        model.double().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), **kind)
        x, y = torch.randn(4, 1, 5, 5, dtype=torch.double).to(device), torch.arange(4).to(device)
        for _ in range(3):
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        results.append([t.cpu() for t in model.state_dict().values()])
    torch.testing.assert_close(*results)


def test_random_numbers_are_the_devices_own() -> None:
    before = torch.get_rng_state()
    state = torch.cuda.get_rng_state()
    first = nn.functional.dropout(torch.ones(64, device="cuda"))
    assert not torch.equal(nn.functional.dropout(torch.ones(64, device="cuda")), first)
    torch.cuda.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(64, device="cuda")), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_is_bounded() -> None:
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    assert 0 < free <= total


def run_python(code: str, **variables: str) -> str:
    environ = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_fork_of_a_process_that_uses_cuda_cannot() -> None:
    """CUDA C++ Programming Guide, 'Initialization': also where the parent only counted devices."""
    code = """
import os, torch
torch.cuda.device_count(), torch._C._cuda_getDeviceCount()
if os.fork() == 0:
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        print("initialization error" in str(error) or "re-initialize" in str(error), flush=True)
    os._exit(0)
os.wait()
"""
    assert run_python(code) == "True"


def test_a_context_comes_with_the_first_use_of_a_device(tmp_path: Path) -> None:
    code = """
import torch
torch.cuda.device_count(), torch.cuda.get_device_properties(0), torch.cuda.init(), torch.cuda.current_device()
with torch.cuda.device(1):
    torch.ones(1).pin_memory(), torch.ones(1, device="cuda")
"""
    log = tmp_path / "log"
    run_python(code, FAKECUDA_LOG=str(log))
    contexts = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines() if " context " in line]
    assert contexts == ["context device 1"]


def test_another_sitecustomize_does_not_hide_the_kernels(tmp_path: Path) -> None:
    """Debian's Python has one, which is found before those of an environment."""
    (tmp_path / "sitecustomize.py").write_text("print('first')")
    code = "import torch; print(torch.ones(3, device='cuda').sum().item())"
    path = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    assert run_python(code, PYTHONPATH=path).split() == ["first", "3.0"]
