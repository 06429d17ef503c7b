"""``python -m trainloop doctor``: what each reading leads to, on machines that are only described here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from trainloop.doctor import examine
from trainloop.doctor.checks import missing_library, remedy_for
from trainloop.doctor.probe import Imported, Readings, missing_of_extras
from trainloop.resources.machine import available

GIB = 2**30
TORCH: dict[str, Any] = {"version": "2.13.0+cu128", "gpus": 2, "gloo": True, "threads": 2, "warnings": []}
REQUIRES = (
    "numpy",
    "nvidia-cudnn-cu12==9.10.2.21; platform_system == 'Linux'",
    "nvidia-cuda-nvrtc-cu12==12.8.93",
    "nvidia-cuda-runtime-cu12 (==12.8.90) ; platform_system == 'Linux'",
)


def machine(**changed: Any) -> Readings:
    """A machine without a problem, with these readings changed."""
    sound = Readings(
        torch=Imported(TORCH),
        torch_requirements=REQUIRES,
        shm=(16 * GIB, 15 * GIB),
        descriptors=(65536, 65536),
        resources=available(cpu_count=16, memory=64 * GIB, num_gpus=0, environ={}, root="/nowhere"),
    )
    return replace(sound, **changed)


def torch(**changed: Any) -> dict[str, Any]:
    return {"torch": Imported({**TORCH, **changed})}


NO_CUDNN = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
OLD_DRIVER = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."

# Readings, and in the report: the line's name, its status, and a word of what is found or to be done.
CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "cudnn is missing": (
        {"torch": Imported(None, NO_CUDNN)}, "import torch", "problem", "pip install 'nvidia-cudnn-cu12==9.10.2.21'"),
    "cudart is missing": (
        {"torch": Imported(None, "ImportError: libcudart.so.12: cannot open shared object file")},
        "import torch", "problem", "pip install 'nvidia-cuda-runtime-cu12==12.8.90'"),
    "torch is missing": (
        {"torch": Imported(None, "ModuleNotFoundError: No module named 'torch'")}, "import torch", "problem",
        "pip install --force-reinstall torch"),
    "torch crashes": ({"torch": Imported(None, "killed by signal 11")}, "import torch", "problem", "faulthandler"),
    "the driver is old": (torch(gpus=0, warnings=[OLD_DRIVER]), "gpus", "problem", "python -m torch.utils.collect_env"),
    "no Gloo": (torch(gloo=False), "ddp", "problem", "an official build of torch"),
    "a Python whose forks may hang": (
        {"python": (3, 11, 7)}, "python", "attention", "3.11.7 install Python 3.11.10 or newer: a DataLoader's"),
    "a Python that has this repaired": ({"python": (3, 10, 15)}, "python", "ok", "3.10.15"),
    "a package that is too old": (
        {"conflicts": ("torchvision 0.1 requires torch==1.0, but you have torch 2.13.0.",)}, "requirements", "problem",
        "requires torch==1.0, but you have torch 2.13.0. install the packages that are named here"),
    "another project's package of this import name": (
        {"other_distribution": "trainloop 0.11.0 in /site"}, "tt-trainloop", "problem",
        "pip uninstall -y trainloop tt-trainloop"),
    "some extras": (
        {"extras": {"plot": (), "wandb": ("wandb",), "ray": ("ray",), "metrics": ()}}, "extras", "ok",
        "installed: plot, metrics; without wandb, ray (pip install '.[wandb]')"),
    "all extras": ({"extras": {"plot": ()}}, "extras", "ok", "installed: plot"),
    "no extras": ({"extras": {"ray": ("ray",)}}, "extras", "ok", "installed: no extra; without ray ("),
    "Docker's /dev/shm": ({"shm": (GIB // 16, GIB // 16)}, "/dev/shm", "attention", "--shm-size"),
    "few descriptors": ({"descriptors": (256, 4096)}, "file descriptors", "attention", "ulimit -n 4096"),
    "a full disk": ({"temporary": ("/tmp", GIB // 8)}, "temporary files", "attention", "TMPDIR"),
    "no loopback": ({"loopback_error": "Connection refused"}, "loopback", "problem", "ip link set lo up"),
    "a host without an address": ({"hostname_error": "n1: unknown"}, "host name", "attention", "/etc/hosts"),
    "a port that is taken": (
        {"port_error": "can't be used here", "environ": {"MASTER_PORT": "29500"}}, "port", "problem",
        "MASTER_PORT=29500 can't be used here"),
    "half of torchrun's variables": (
        {"environ": {"RANK": "0", "WORLD_SIZE": "2"}}, "torchrun", "attention", "without MASTER_ADDR, MASTER_PORT"),
    "a rank too many": (
        {"environ": {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}}, "torchrun", "problem",
        "less than WORLD_SIZE"),
    "a rank of torchrun": (
        {"environ": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}}, "torchrun", "ok",
        "joins"),
    "Slurm without CPUs a task": (
        {"environ": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}}, "slurm", "attention",
        "--cpus-per-task"),
    "too many threads": ({"environ": {"OMP_NUM_THREADS": "64"}}, "threads", "attention", "OMP_NUM_THREADS=16"),
    "little memory": (
        {"resources": available(cpu_count=2, memory=GIB, num_gpus=0, environ={}, root="/nowhere")}, "memory",
        "attention", "1.0 GiB"),
}  # fmt: skip


def test_a_sound_machine_is_all_right() -> None:
    report = examine(machine())
    assert {check.status for check in report.checks} == {"ok"}, report
    assert all(not check.remedy for check in report.checks)
    assert report.ok
    assert str(report).splitlines()[-1] == "problem: 0, attention: 0"


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_with_its_remedy(case: str) -> None:
    changed, name, status, word = CASES[case]
    report = examine(machine(**changed))
    check = report[name]
    assert check.status == status
    assert word in f"{check.found} {check.remedy}"
    assert report.ok is (status != "problem")
    assert bool(check.remedy) is (status != "ok")
    again = json.loads(report.to_json())
    assert again["ok"] is report.ok
    assert {"name": name, "status": status, "found": check.found, "remedy": check.remedy} in again["checks"]
    assert any(line.startswith(status) and f"  {name} " in line for line in str(report).splitlines())


@pytest.mark.parametrize(("port", "found"), [("99999999", "is not a port"), ("taken", "(Address already in use)")])
def test_a_machine_without_a_free_disk_or_port_is_read(port: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", fails)
    for slow in ("in_process", "_conflicts"):
        monkeypatch.setattr(f"trainloop.doctor.probe.{slow}", lambda *_: Imported(TORCH) if _ else ())
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]) if port == "taken" else port)
        report = examine()
    assert found in report["port"].found
    assert "No usable temporary directory" in report["temporary files"].found
    assert report["temporary files"].status == "attention"


def test_a_cgroup_counts_against_the_host(tmp_path: Any) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("200000 100000\n")
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    limited = available(root=tmp_path, cpu_count=64, memory=256 * GIB, num_gpus=0, environ={})
    report = examine(machine(resources=limited, torch=Imported({**TORCH, "threads": 64})))
    assert "2 of the host's 64, limited by" in report["cpus"].found
    assert "cpu.max" in report["cpus"].found
    assert "4.0 GiB of the host's 256.0, limited by" in report["memory"].found
    assert "OMP_NUM_THREADS=2" in report["threads"].remedy


def test_what_an_extra_needs_is_looked_up_also_through_another_extra() -> None:
    found = missing_of_extras(
        [
            "numpy>=1.24",
            'torch>=2.6; extra == "tabular"',
            "no-such-package>=2.1; extra == 'tabular'",
            'tt-trainloop[tabular]; extra == "multimodal"',
            'nor-this~=1.0; extra == "multimodal"',
            'numpy>=1; extra == "plot"',
            'nor-this; extra == "test-all"',
        ]
    )
    assert found == {
        "tabular": ("no-such-package",),
        "multimodal": ("no-such-package", "nor-this"),
        "plot": (),
    }


LIBRARIES = {
    "ImportError: libcudnn.so.9: cannot open shared object file: No such file": (
        "libcudnn.so.9", "pip install 'nvidia-cudnn-cu12==9.10.2.21', which contains libcudnn.so.9."),
    "libcudnn_ops.so.9: undefined symbol: _ZN": ("libcudnn_ops.so.9", "pip install 'nvidia-cudnn-cu12==9.10.2.21'"),
    "ValueError: libnvrtc.so.*[0-9] not found in the system path": (
        "libnvrtc.so.*[0-9]", "pip install 'nvidia-cuda-nvrtc-cu12==12.8.93'"),
    "ImportError: libcuda.so.1: cannot open shared object file": ("libcuda.so.1", "is part of NVIDIA's driver"),
    "ImportError: libGL.so.1: cannot open shared object file": ("libGL.so.1", "apt-file search libGL.so.1"),
    "ImportError: cannot import name 'x' from 'y'": (None, ""),
}  # fmt: skip


@pytest.mark.parametrize("message", LIBRARIES)
def test_a_loaders_message_leads_to_a_package(message: str) -> None:
    library, remedy = LIBRARIES[message]
    assert missing_library(message) == library
    if library is not None:
        assert remedy in remedy_for(library, REQUIRES)


@pytest.mark.long
def test_a_reader_that_has_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "trainloop"], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
