"""Devices and quotas on real GPUs: what is counted, leased, masked and bounded, and that looking creates no context."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainloop
from trainloop.devices import find_usable_cuda_devices, resolve, visible_devices
from trainloop.errors import DeviceError, ResourceError
from trainloop.resources import ResourceQuota, available, enforce, gpus, lease
from trainloop.resources.gpus import child_mask

pytestmark = pytest.mark.gpu

Q = ResourceQuota


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "leases"))


def run_python(code: str, **variables: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(Path(trainloop.__file__).parents[1]), **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_visible_gpus_are_resolved_and_counted() -> None:
    count = torch.cuda.device_count()
    assert available().num_gpus == count
    assert resolve("gpu", -1) == resolve("cuda", count) == [torch.device("cuda", index) for index in range(count)]
    assert resolve("auto", "0,") == [torch.device("cuda", 0)]
    with pytest.raises(DeviceError, match=f"no device {count}"):
        resolve("cuda", [count])


def test_looking_takes_no_memory_of_a_gpu() -> None:
    """A context would take hundreds of MiB; NVML sees it from outside."""
    pynvml = pytest.importorskip("pynvml")
    code = """
import os, pynvml
from trainloop.resources import available, gpus
from trainloop.devices import find_usable_cuda_devices, resolve
found = available()
names = gpus.names(found.num_gpus)
resolve("cuda", "auto")
find_usable_cuda_devices()
pynvml.nvmlInit()
pids = set()
for name in names:
    handle = pynvml.nvmlDeviceGetHandleByUUID(name)
    pids |= {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
print(os.getpid() in pids, found.num_gpus == len(names))
"""
    assert pynvml
    assert run_python(code) == "False True"


def test_names_are_uuids_of_cuda_s_own_order() -> None:
    names = gpus.names(torch.cuda.device_count())
    for index, name in enumerate(names):
        assert name == f"GPU-{torch.cuda.get_device_properties(index).uuid}" or name.startswith("MIG-")
    assert len(set(names)) == len(names)


def test_usable_gpus_are_leased() -> None:
    code = """
from trainloop.devices import find_usable_cuda_devices
from trainloop.errors import DeviceError
try:
    print(find_usable_cuda_devices(-1))
except DeviceError as error:
    print("refused", "leased by other runs" in str(error))
"""
    count = torch.cuda.device_count()
    assert run_python(code) == str(list(range(count)))
    found = find_usable_cuda_devices(-1)
    try:
        assert found == list(range(count))
        assert run_python(code) == "refused True"
        with pytest.raises(ResourceError, match="other runs have leased"):
            lease.acquire({"gpu": lease.Request(1, gpus.names(count))}, timeout_s=0)
    finally:
        for held in gpus._own_leases.values():
            held.close()
        gpus._own_leases.clear()


def test_a_child_s_mask_shows_it_its_own_gpu() -> None:
    last = torch.cuda.device_count() - 1
    mask = child_mask([last], visible_devices())
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
    expected = f"1 {torch.cuda.get_device_properties(last).uuid}"
    assert run_python(code, CUDA_VISIBLE_DEVICES=mask) == expected
    assert (
        run_python("import torch; print(torch.cuda.device_count())", CUDA_VISIBLE_DEVICES=child_mask([], None)) == "0"
    )


def test_a_fraction_of_a_gpu_is_a_wall_for_torch_s_allocator_and_falls_afterwards() -> None:
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    free = torch.cuda.mem_get_info(device)[0]
    beyond = total // 10
    if free < 2 * beyond:
        pytest.skip("the GPU is in use")
    with enforce.applied(Q(num_gpus=0.05), device=device):
        torch.empty(total // 50, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(beyond, dtype=torch.uint8, device=device)
    assert torch.empty(beyond, dtype=torch.uint8, device=device).numel() == beyond
    torch.cuda.empty_cache()


def test_a_memory_quota_lets_cuda_start_and_work() -> None:
    """The limit is on private pages; CUDA's reservations of address space must not meet it."""
    code = """
import psutil, torch
from trainloop.resources import ResourceQuota, enforce
quota = ResourceQuota(memory=psutil.Process().memory_info().rss + 8 * 2**30)
with enforce.applied(quota, device=torch.device("cuda", 0)):
    x = torch.randn(512, 512, device="cuda")
    host = (x @ x).cpu().pin_memory()
    print(bool(host.isfinite().all()))
"""
    assert run_python(code) == "True"


def test_more_gpus_than_there_are_is_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ResourceError, match=rf"num_gpus={count + 1} exceeds the number of visible GPUs .* \({count},"):
        enforce.check_quota(Q(num_gpus=count + 1))
