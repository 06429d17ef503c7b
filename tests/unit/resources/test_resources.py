"""Quotas, what the machine allows, the rules in force, and the fall-back to the CPU."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import threading
import uuid
import warnings
from collections.abc import Iterator
from ctypes.util import find_library
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainloop import resources
from trainloop.devices import choose_devices
from trainloop.errors import DeviceError, ResourceError
from trainloop.resources import ResourceQuota, Resources, available, enforce, gpu_or_cpu
from trainloop.resources.quota import as_number, exact, format_bytes, parse_memory

Q = ResourceQuota
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity and limits of Linux")
two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "leases"))
    for name in ("SLURM_CPUS_PER_TASK", "LOKY_MAX_CPU_COUNT", "TRAINLOOP_NUM_CPUS", "SLURM_MEM_PER_NODE"):
        monkeypatch.delenv(name, raising=False)


# -- quotas ----------------------------------------------------------------------------------------------------------


def test_a_quota_is_an_immutable_comparable_value() -> None:
    quota = Q(2, 0.5, "512MiB")
    assert quota == Q(num_cpus=2, num_gpus=Fraction(1, 2), memory=512 * 2**20)
    assert hash(quota) == hash(Q(2, 0.5, 512 * 2**20))
    assert quota != Q(2, 0.5)
    assert Q() == Q("auto", "auto", "auto")
    assert pickle.loads(pickle.dumps(quota)) == quota
    with pytest.raises(dataclasses.FrozenInstanceError):
        quota.num_cpus = 3  # type: ignore[misc]
    assert repr(Q(2)) == "ResourceQuota(num_cpus=2, num_gpus='auto', memory='auto')"


@pytest.mark.parametrize(
    "text, size",
    [
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1 kB", 1000),
        ("1kib", 1024),
        (" 2 GiB ", 2 * 2**30),
        ("3TB", 3 * 10**12),
        ("1PiB", 2**50),
        ("7B", 7),
        ("0.5KiB", 512),
        (1, 1),
        (2**33, 2**33),
        (1e9, 10**9),
        (np.int64(5), 5),
    ],
)
def test_memory_is_kept_as_bytes(text: object, size: int) -> None:
    assert parse_memory(text) == Q(memory=text).memory == size  # type: ignore[arg-type]
    assert type(Q(memory=text).memory) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "num_gpus, meant",
    [
        (0, 0),
        (0.0, 0),
        (1, 1),
        (1.5, Fraction(3, 2)),
        (0.1, Fraction(1, 10)),
        (1 - 0.9, Fraction(1, 10)),
        (0.1 + 0.2, Fraction(3, 10)),
        (1 / 3, Fraction(1, 3)),
        (np.float32(1 / 3), Fraction(1, 3)),
        (np.float64(0.25), Fraction(1, 4)),
        (np.int32(2), 2),
        (Fraction(2, 7), Fraction(2, 7)),
        (0.334, Fraction(334, 1000)),
        (0.33333, Fraction(33333, 100000)),
        (1e-9, Fraction(1, 10**9)),
        (1e18, 10**18),
    ],
)
def test_gpus_are_counted_exactly(num_gpus: float, meant: Fraction) -> None:
    assert exact(num_gpus) == meant
    assert Q(num_gpus=num_gpus).num_gpus == num_gpus


@given(st.integers(1, 1024), st.integers(0, 64))
def test_a_fraction_survives_being_a_float(denominator: int, whole: int) -> None:
    fraction = whole + Fraction(1, denominator)
    assert exact(as_number(fraction)) == fraction
    assert type(as_number(Fraction(3))) is int


MALFORMED = [
    *(("num_cpus", v) for v in (0, -1, -2, True, False, 2.0, 0.5, "2", "", "all", "AUTO ", None, [2], (1,), 1 + 0j)),
    *(("num_cpus", v) for v in (float("nan"), float("inf"), b"2", np.float64(2), np.bool_(True), Fraction(4, 2), {})),
    *(("num_gpus", v) for v in (-1, -0.5, True, False, "1", "0.5", "", "all", None, [1], {}, 1 + 0j, b"1")),
    *(("num_gpus", v) for v in (float("nan"), float("inf"), -float("inf"), Fraction(-1, 2), np.float64("nan"))),
    *(("num_gpus", v) for v in (np.bool_(True), Decimal("0.5"), "half")),
    *(("memory", v) for v in (0, -1, True, False, None, 0.0, 0.5, -1e9, float("nan"), float("inf"), [1], b"1GB")),
    *(("memory", v) for v in ("", "1", "512", "GiB", "-1GB", "0MB", "0.0B", "1XB", "1 gigabyte", "1GiBi", "1.5.0GB")),
    *(("memory", v) for v in ("1,5GB", "1e3MB", "0x10B", "+1GB", "1_0GB", "٣GB", "nan", "inf GB", "1G", ".5GB")),
]


@pytest.mark.parametrize("name, value", MALFORMED, ids=[f"{n}={v!r}" for n, v in MALFORMED])
def test_a_malformed_quota_is_refused_with_what_was_given_and_what_to_write(name: str, value: object) -> None:
    with pytest.raises(ResourceError, match="must be") as caught:
        Q(**{name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r}: must be")
    assert "'auto'" in message


def test_there_are_more_than_sixty_malformed_quotas() -> None:
    assert len(MALFORMED) > 60


def test_sizes_are_shown_in_the_unit_that_reads_best() -> None:
    assert [format_bytes(n) for n in (1, 1023, 1024, 1536, 2**30, 5 * 2**40, 2**60)] == [
        *("1 B", "1023 B", "1 KiB", "1.5 KiB", "1 GiB", "5 TiB", "1024 PiB"),
    ]


# -- the machine, faked ----------------------------------------------------------------------------------------------


class Machine:
    """A file system with cgroup files in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, **files: str) -> Machine:
        return self.write_all(files)

    def write_all(self, files: dict[str, str]) -> Machine:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return self

    def cpus(self, cpu_count: int = 64, **variables: str) -> int:
        return self.look(cpu_count, **variables).num_cpus

    def look(self, cpu_count: int = 64, **variables: str) -> Resources:
        return available(root=self.root, cpu_count=cpu_count, environ=variables, memory=2**40, num_gpus=0)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


@pytest.mark.parametrize(
    "text, cpus",
    [
        ("50000 100000\n", 1),
        ("100000 100000", 1),
        ("150000 100000\n", 2),
        ("200001 100000", 3),
        ("1 1000000", 1),
        ("400000 50000", 8),
        ("9999999 1000", 64),
        *(
            (text, 64)
            for text in ("max 100000\n", "max", "-1 100000", "", "\n", "abc", "100000", "1.5 100000", "0 100000")
        ),
        *(
            (text, 64)
            for text in (
                "100000 0",
                "100000 -1",
                "1e5 100000",
                "1 2 3",
                "٣ 1",
                "\udcff".encode("utf-8", "replace").decode(),
            )
        ),
    ],
)
def test_cpu_max_is_quota_over_period_rounded_up_and_no_limit_where_malformed(
    machine: Machine, text: str, cpus: int
) -> None:
    machine.write_all({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": text})
    assert machine.cpus() == cpus


@pytest.mark.parametrize("quota, period, cpus", [
    ("50000", "100000", 1), ("250000\n", "100000\n", 3), ("-1\n", "100000\n", 64), ("100000", "", 64), ("abc", "1", 64),
])  # fmt: skip
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_the_quota_of_version_1(machine: Machine, mount: str, quota: str, period: str, cpus: int) -> None:
    files = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period}
    machine.write_all({"proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/docker/abc\n0::/\n"})
    machine.write_all({f"sys/fs/cgroup/{mount}/docker/abc/{name}": text for name, text in files.items()})
    assert machine.cpus() == cpus


def test_every_ancestor_counts(machine: Machine) -> None:
    machine.write_all({"proc/self/cgroup": "0::/user/slice/job\n"})
    for folder, text in (("user/slice/job", "max 100000"), ("user/slice", "300000 100000"), ("user", "800000 100000")):
        machine.write_all({f"sys/fs/cgroup/{folder}/cpu.max": text})
    assert machine.cpus() == 3
    machine.write_all({"sys/fs/cgroup/cpu.max": "200000 100000"})
    assert machine.cpus() == 2
    machine.write_all({"sys/fs/cgroup/other/cpu.max": "100000 100000", "sys/fs/cgroup/user/slice/job/x/cpu.max": "1 1"})
    assert machine.cpus() == 2


def test_a_container_that_sees_its_own_group_as_the_root(machine: Machine) -> None:
    machine.write_all({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"})
    assert machine.cpus() == 1


def test_a_container_whose_group_has_the_host_s_path(machine: Machine) -> None:
    machine.write_all(
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc/job\n",
            "proc/self/mountinfo": "36 25 0:31 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu\n"
            "37 25 0:32 / /proc rw - proc proc rw\nnonsense\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "500000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
        }
    )
    assert machine.cpus() == 3
    machine.write_all({"proc/self/cgroup": "5:cpu,cpuacct:/elsewhere\n"})
    assert machine.cpus() == 5


def test_a_process_outside_its_cgroup_namespace_reads_the_mount(machine: Machine) -> None:
    machine.write_all({"proc/self/cgroup": "0::/../../other\n", "sys/fs/cgroup/cpu.max": "200000 100000"})
    machine.write_all({"other/cpu.max": "100000 100000"})
    assert machine.cpus() == 2


def test_version_2_beside_version_1(machine: Machine) -> None:
    machine.write_all({"proc/self/cgroup": "1:cpu:/\n0::/job\n", "sys/fs/cgroup/unified/job/cpu.max": "200000 100000"})
    assert machine.cpus() == 2


def test_without_a_listing_the_mounts_are_read(machine: Machine) -> None:
    machine.write_all({"sys/fs/cgroup/cpu.max": "200000 100000", "sys/fs/cgroup/memory.max": "1000000"})
    assert (machine.cpus(), machine.look().memory) == (2, 1000000)


@pytest.mark.parametrize("text, cpus", [
    ("0-3\n", 4), ("0,2,4", 3), ("0-1,8-9,11\n", 5), ("7", 1), ("0-1,1-2", 3),
    ("\n", 64), ("a-b", 64), ("3-", 64), ("3-1", 64),
])  # fmt: skip
@pytest.mark.parametrize("listing, file", [
    ("0::/job\n", "sys/fs/cgroup/job/cpuset.cpus.effective"),
    ("2:cpuset:/job\n", "sys/fs/cgroup/cpuset/job/cpuset.cpus"),
])  # fmt: skip
def test_cpu_sets_are_counted(machine: Machine, listing: str, file: str, text: str, cpus: int) -> None:
    machine.write_all({"proc/self/cgroup": listing, file: text})
    assert machine.cpus() == cpus


def test_an_empty_machine_sets_no_limit_and_one_cpu_is_the_least(machine: Machine) -> None:
    assert machine.cpus(8) == 8
    assert machine.cpus(0) == 1
    assert available(root=machine.root, affinity={2, 5, 7}, environ={}).num_cpus == 3
    assert available(root=machine.root, affinity=3, cpu_count=8, environ={}).num_cpus == 3
    assert available(root=machine.root, affinity=set(range(16)), cpu_count=8, environ={}).num_cpus == 8


@pytest.mark.parametrize("name", ["SLURM_CPUS_PER_TASK", "LOKY_MAX_CPU_COUNT", "TRAINLOOP_NUM_CPUS"])
@pytest.mark.parametrize("text, cpus", [
    ("3", 3), (" 3 ", 3), ("1", 1), ("64", 8), ("0", 8), ("-1", 8), ("", 8),
    ("2.5", 8), ("3(x2)", 8), ("٣", 8), ("auto", 8),
])  # fmt: skip
def test_variables_can_only_lower_the_count(machine: Machine, name: str, text: str, cpus: int) -> None:
    assert machine.cpus(8, **{name: text}) == cpus


def test_the_least_of_all_variables_counts(machine: Machine) -> None:
    assert machine.cpus(8, SLURM_CPUS_PER_TASK="4", LOKY_MAX_CPU_COUNT="5", TRAINLOOP_NUM_CPUS="6") == 4


def test_memory_is_the_least_of_machine_groups_and_slurm(machine: Machine) -> None:
    assert machine.look().memory == 2**40
    machine.write_all({"proc/self/cgroup": "4:memory:/a/b\n0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"})
    assert machine.look().memory == 2**40
    machine.write_all({"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n"})  # 'no limit'
    assert len(machine.look().memory_limits) == 1
    machine.write_all({"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "8000000000\n"})
    assert machine.look().memory == 8_000_000_000
    assert machine.look(SLURM_MEM_PER_NODE="1024").memory == 2**30
    assert machine.look(SLURM_MEM_PER_NODE="0").memory == 8_000_000_000
    machine.write_all({"sys/fs/cgroup/memory.max": "4096\n"})
    assert machine.look().memory == 4096


def test_what_was_found_and_what_decided_is_printed(machine: Machine) -> None:
    machine.write_all({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "50000 100000\n"})
    found = available(root=machine.root, cpu_count=64, environ={"SLURM_CPUS_PER_TASK": "4"}, memory=2**33, num_gpus=2)
    assert repr(found) == f"Resources(num_cpus=1, num_gpus=2, memory={2**33})"
    assert found == Resources(1, 2, 2**33)
    file = machine.root / "sys/fs/cgroup/job/cpu.max"
    assert str(found).splitlines() == [
        f"CPUs             1  decided by {file} (50000 100000)",
        "                64  the machine (cpu_count)",
        "                 4  SLURM_CPUS_PER_TASK=4",
        "GPUs             2  decided by num_gpus",
        "memory       8 GiB  decided by the machine (memory)",
    ]
    assert "decided by" not in str(Resources(1, 0, 1))


def test_gpus_are_the_visible_ones_and_no_context_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    found = available()
    assert found.num_gpus == 3
    assert "decided by CUDA_VISIBLE_DEVICES=4,5,7" in str(found)
    assert not torch.cuda.is_initialized()


# -- the machine, real -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("starts_processes")
def test_this_machine() -> None:
    found = available()
    assert 1 <= found.num_cpus <= len(os.sched_getaffinity(0))
    assert 0 < found.memory <= psutil.virtual_memory().total
    assert found.num_gpus == torch.cuda.device_count()


@pytest.mark.usefixtures("starts_processes")
def test_torch_is_not_imported_to_learn_that_there_is_no_gpu() -> None:
    code = "import sys; from trainloop.resources import available; print(available().num_gpus, 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    gpus, imported = run.stdout.split()
    assert int(gpus) == torch.cuda.device_count()
    a_driver = find_library("cuda") or Path("/dev/kfd").exists()
    assert imported == "False" or a_driver or int(gpus), run.stdout


def run_python(code: str, *, prefix: tuple[str, ...] = (), **variables: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(Path(resources.__file__).parents[2]), **variables}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


NUM_CPUS = "from trainloop.resources import available; print(available(num_gpus=0).num_cpus)"


@pytest.mark.usefixtures("starts_processes")
@needs_linux
@two_cpus
def test_an_affinity_of_one_core_is_one_cpu() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); {NUM_CPUS}"
    assert run_python(code) == "1"


@pytest.mark.usefixtures("starts_processes")
@two_cpus
def test_slurm_s_share_of_the_node() -> None:
    assert run_python(NUM_CPUS, SLURM_CPUS_PER_TASK="1") == "1"


@pytest.fixture
def half_a_cpu() -> Iterator[Path]:
    """A real cgroup of half a CPU, below it one without a limit, where this machine lets us make one."""
    name = f"trainloop-test-{uuid.uuid4().hex[:8]}"
    for base, files in (
        (Path("/sys/fs/cgroup"), {"cpu.max": "50000 100000"}),
        (Path("/sys/fs/cgroup/cpu"), {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}),
    ):
        group = base / name
        if not (base / "cgroup.procs").exists():
            continue  # no cgroup file system
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for file, text in files.items():
                (group / file).write_text(text)
            (group / "child").mkdir()
            yield group / "child"
            return
        except OSError:
            continue
        finally:
            for folder in (group / "child", group):
                if folder.exists():
                    folder.rmdir()
    pytest.skip("no cgroup can be made here")


@pytest.mark.usefixtures("starts_processes")
@needs_linux
@two_cpus
def test_a_real_cgroup_of_half_a_cpu_is_one_cpu(half_a_cpu: Path) -> None:
    code = f"import os; open('{half_a_cpu}/cgroup.procs', 'w').write(str(os.getpid())); {NUM_CPUS}"
    assert run_python(code) == "1"


# -- what a quota means ----------------------------------------------------------------------------------------------

EIGHT = available(root="/nowhere", cpu_count=8, environ={}, memory=2**33, num_gpus=2)


@pytest.mark.parametrize(
    "quota, ranks, what",
    [
        (
            Q(9),
            1,
            r"num_cpus=9 exceeds the number of CPUs .* \(8, limited by the machine \(cpu_count\)\)\. Request at most 8",
        ),
        (Q(1), 2, "num_cpus=1 is too few for 2 ranks: each rank needs at least one CPU"),
        (Q(num_gpus=3), 1, r"num_gpus=3 exceeds the number of visible GPUs .* \(2,"),
        (Q(num_gpus=2.5), 1, r"num_gpus=2.5 exceeds the number of visible GPUs .* \(2,"),
        (Q(num_gpus=1.5), 1, "num_gpus=1.5: one model can use a fraction of one GPU, or whole GPUs. Use 1 or 2"),
        (Q(memory="9GiB"), 1, r"memory=9 GiB exceeds the memory .* \(8 GiB, limited by the machine \(memory\)\)"),
        ("2", 1, "resources='2': must be a ResourceQuota"),
        ({"num_cpus": 2}, 1, "must be a ResourceQuota"),
    ],
)
def test_more_than_the_machine_has_is_refused_not_clamped(quota: ResourceQuota, ranks: int, what: str) -> None:
    with pytest.raises(ResourceError, match=what):
        enforce.check_quota(quota, ranks=ranks, machine=EIGHT)


def test_what_the_machine_has_is_granted() -> None:
    for quota in (Q(), Q(8, 2, "8GiB"), Q(1, 0), Q(num_gpus=0.3)):
        enforce.check_quota(quota, machine=EIGHT)
    enforce.check_quota(Q(2, 2), ranks=2, machine=EIGHT)


def cuda(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


@pytest.mark.parametrize(
    "quota, resolved, asked, expected",
    [
        (None, cuda(0, 1), "auto", cuda(0, 1)),
        (Q(4), cuda(0, 1), "auto", cuda(0, 1)),
        (Q(num_gpus=1), cuda(0, 1), "auto", cuda(0)),
        (Q(num_gpus=0.5), cuda(0, 1), " Auto ", cuda(0)),
        (Q(num_gpus=2), cuda(2, 0), [2, 0], cuda(2, 0)),
        (Q(num_gpus=0), cuda(0, 1), "auto", [torch.device("cpu")]),
        (Q(num_gpus=0), [torch.device("cpu")] * 2, 2, [torch.device("cpu")] * 2),
    ],
)
def test_auto_devices_follow_the_quota(
    quota: ResourceQuota | None, resolved: list[torch.device], asked: object, expected: list[torch.device]
) -> None:
    assert enforce.devices_under(quota, resolved, asked) == expected


def test_explicit_devices_must_fit_the_quota() -> None:
    with pytest.raises(ResourceError, match=r"devices=\[0, 1\] requests 2 GPUs, but the quota has num_gpus=0.5"):
        enforce.devices_under(Q(num_gpus=0.5), cuda(0, 1), [0, 1])


@given(st.integers(1, 40), st.integers(1, 12), st.one_of(st.none(), st.integers(1, 40)))
def test_ranks_get_disjoint_cpus_of_the_quota(num_cpus: int, ranks: int, asked: int | None) -> None:
    cpus = list(range(100, 100 + num_cpus))
    shares = enforce.cpu_shares(None if asked is None else Q(asked), ranks, cpus)
    have = num_cpus if asked is None else min(asked, num_cpus)
    assert len(shares) == ranks
    if have >= ranks:
        assert sorted(cpu for share in shares for cpu in share) == cpus[:have]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert shares == [cpus[:have]] * ranks


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, ["4", "4", "4"]),
        ({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "16"}, ["2", "4", "4"]),
        ({"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1"}, ["4", "4", "1"]),
        ({"OMP_NUM_THREADS": "2,4", "MKL_NUM_THREADS": "8,1"}, ["2,4", "4", "4"]),
        ({"OMP_NUM_THREADS": "0", "MKL_NUM_THREADS": "", "OPENBLAS_NUM_THREADS": "many"}, ["4", "4", "4"]),
    ],
)
def test_a_lower_number_of_threads_that_the_user_set_stays(environ: dict[str, str], expected: list[str]) -> None:
    values = enforce.child_environment(Q(8), ranks=2, environ=environ)
    assert values == dict(zip(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), expected))


def test_without_a_quota_ranks_divide_the_machine() -> None:
    all_cpus, before = available().num_cpus, torch.get_num_threads()
    try:
        torch.set_num_threads(all_cpus)
        assert enforce.child_environment(None, 1, environ={})["OMP_NUM_THREADS"] == str(all_cpus)
        assert enforce.child_environment(None, all_cpus, environ={})["OMP_NUM_THREADS"] == "1"
        assert enforce.child_environment(Q(), 1000, environ={})["OMP_NUM_THREADS"] == "1"
        torch.set_num_threads(1)  # and fewer that the caller has set stay, as in its own process, but under a quota
        assert set(enforce.child_environment(None, 1, environ={}).values()) == {"1"}
        assert set(enforce.child_environment(Q(2), 1, environ={}).values()) == {"2"}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "num_workers, quota, ranks, expected",
    [
        ("auto", Q(4), 1, 3),
        ("auto", Q(4), 2, 1),
        ("auto", Q(1), 1, 0),
        (3, Q(4), 1, 3),
        (0, Q(1), 1, 0),
        (5, None, 1, 5),
        (5, Q(), 1, 5),
    ],
)
def test_loader_workers_within_the_quota(
    num_workers: int, quota: ResourceQuota | None, ranks: int, expected: int, recwarn: pytest.WarningsRecorder
) -> None:
    assert enforce.cap_workers(num_workers, quota, ranks) == expected
    assert not recwarn.list


@pytest.mark.parametrize("num_workers, quota, ranks, expected", [(4, Q(4), 1, 3), (1, Q(1), 1, 0), (4, Q(4), 2, 1)])
def test_more_workers_are_capped_with_one_warning(
    num_workers: int, quota: ResourceQuota, ranks: int, expected: int
) -> None:
    with pytest.warns(
        UserWarning, match=f"num_workers={num_workers} is lowered to {expected}: the quota has"
    ) as caught:
        assert enforce.cap_workers(num_workers, quota, ranks) == expected
    assert len(caught) == 1


def test_auto_workers_without_a_quota_are_the_machine_s() -> None:
    assert enforce.cap_workers("auto", None) == available().num_cpus - 1


# -- in force --------------------------------------------------------------------------------------------------------


def state() -> dict[str, object]:
    import resource

    return {
        "affinity": os.sched_getaffinity(0),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "memory": resource.getrlimit(resource.RLIMIT_DATA),
    }


@needs_linux
@two_cpus
def test_a_quota_is_in_force_within_the_block_and_taken_back() -> None:
    before = state()
    with enforce.applied(Q(1, 0, "4GiB")):
        within = state()
        assert len(os.sched_getaffinity(0)) == torch.get_num_threads() == 1
        assert [os.environ[name] for name in enforce.THREAD_VARIABLES] == ["1", "1", "1"]
        assert within["memory"] != before["memory"]
    assert state() == before


@needs_linux
@two_cpus
def test_threads_that_outlive_the_block_get_their_cpus_back() -> None:
    before, end, began = os.sched_getaffinity(0), threading.Event(), threading.Event()

    def stay() -> None:
        began.set()
        end.wait()

    def own_choice() -> None:
        os.sched_setaffinity(0, {min(before)})
        stay()

    earlier = threading.Thread(target=own_choice)
    earlier.start()
    began.wait()
    with enforce.applied(Q(1)):
        later = threading.Thread(target=stay)
        later.start()
        assert later.native_id is not None
        assert len(os.sched_getaffinity(later.native_id)) == 1
    assert earlier.native_id is not None
    try:
        assert os.sched_getaffinity(later.native_id) == before
        assert os.sched_getaffinity(earlier.native_id) == {min(before)}
    finally:
        end.set()
        earlier.join()
        later.join()


@needs_linux
@two_cpus
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit, GeneratorExit])
def test_a_quota_is_taken_back_however_the_block_ends(error: type[BaseException]) -> None:
    before = state()
    with pytest.raises(error), enforce.applied(Q(1, 0, "4GiB")):
        assert len(os.sched_getaffinity(0)) == 1
        raise error
    assert state() == before


@needs_linux
def test_a_quota_that_fails_half_way_is_taken_back() -> None:
    before = state()
    what = r"memory=1 MiB: this process already uses"
    with pytest.raises(ResourceError, match=what), enforce.applied(Q(1, 0, "1MiB")):
        pytest.fail("the block must not run")
    assert state() == before
    with pytest.raises(ResourceError, match="for each of 2 ranks"), enforce.applied(Q(2, 0, "2MiB"), ranks=2):
        pytest.fail("the block must not run")
    assert state() == before


def test_an_impossible_quota_changes_nothing() -> None:
    before = state()
    with pytest.raises(ResourceError, match="num_cpus=100000 exceeds the number of CPUs"), enforce.applied(Q(100000)):
        pytest.fail("the block must not run")
    assert state() == before


@needs_linux
@two_cpus
def test_threads_are_raised_to_the_quota_and_lowered_by_loader_workers() -> None:
    with enforce.applied(Q(2)):
        assert torch.get_num_threads() == 2
    with enforce.applied(Q(2), loader_workers=1):
        assert torch.get_num_threads() == 1
    with enforce.applied(Q(2), loader_workers=5):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 1  # conftest's


@needs_linux
@two_cpus
def test_numpy_s_own_threads_are_bounded_too() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    with enforce.applied(Q(1)):
        assert {pool["num_threads"] for pool in threadpoolctl.threadpool_info()} == {1}


@needs_linux
@two_cpus
def test_ranks_divide_cpus_and_threads() -> None:
    shares = []
    for rank in range(2):
        with enforce.applied(Q(2), local_rank=rank, ranks=2):
            shares.append(os.sched_getaffinity(0))
            assert torch.get_num_threads() == 1
    assert len(shares[0]) == len(shares[1]) == 1
    assert not shares[0] & shares[1]
    for rank in range(2):
        with enforce.applied(None, local_rank=rank, ranks=2):
            assert os.sched_getaffinity(0) == shares[rank]


@needs_linux
def test_more_ranks_than_cpus_share_them_without_a_quota() -> None:
    before = os.sched_getaffinity(0)
    with enforce.applied(None, local_rank=70, ranks=1000):
        assert os.sched_getaffinity(0) == before
        assert torch.get_num_threads() == 1


@needs_linux
def test_the_starting_process_takes_the_cpus_of_all_ranks_and_no_threads() -> None:
    before = state()
    with enforce.applied(Q(1), local_rank=None):
        assert len(os.sched_getaffinity(0)) == 1
        assert {**state(), "affinity": None} == {**before, "affinity": None}
    assert state() == before


def test_without_a_quota_one_process_changes_nothing() -> None:
    before = state()
    with enforce.applied(None):
        assert state() == before


def test_an_auto_quota_raises_no_number_of_threads() -> None:
    with enforce.applied(Q()):
        assert torch.get_num_threads() == 1  # conftest's
        assert os.sched_getaffinity(0) == state()["affinity"]


@needs_linux
def test_an_allocation_beyond_the_memory_quota_fails_and_the_process_lives() -> None:
    held = psutil.Process().memory_info().rss
    with enforce.applied(Q(memory=held + 200 * 2**20)):
        assert torch.ones(100 * 2**18).sum() > 0  # 100 MiB
        with pytest.raises(RuntimeError, match="allocate memory"):
            torch.ones(400 * 2**18)
    assert torch.ones(400 * 2**18).sum() > 0


class FakedCuda:
    """Remembers the memory fraction of one GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fractions = [0.75]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set)
        monkeypatch.setattr(
            torch.cuda, "get_per_process_memory_fraction", lambda device: self.fractions[-1], raising=False
        )

    def set(self, fraction: float, device: torch.device) -> None:
        assert type(fraction) is float
        assert device == torch.device("cuda", 1)
        self.fractions.append(fraction)


@pytest.mark.parametrize(
    "num_gpus, seen", [(0.5, [0.75, 0.5]), (Fraction(1, 4), [0.75, 0.25]), (1, [0.75]), (2, [0.75])]
)
def test_a_fraction_of_a_gpu_bounds_its_memory(
    num_gpus: float, seen: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakedCuda(monkeypatch)
    with enforce.applied(Q(num_gpus=num_gpus), device=torch.device("cuda", 1)):
        assert gpu.fractions == seen
    assert gpu.fractions[-1] == 0.75


def test_the_cpu_has_no_gpu_memory_to_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakedCuda(monkeypatch)
    with enforce.applied(Q(num_gpus=0.5), device=torch.device("cpu")), enforce.applied(Q(num_gpus=0.5)):
        assert gpu.fractions == [0.75]


@needs_linux
def test_a_machine_without_a_place_for_locks_still_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "file" / "below"))
    with enforce.applied(Q(1)):
        assert len(os.sched_getaffinity(0)) == 1


@needs_linux
@two_cpus
@pytest.mark.parametrize("fails", [False, True])
def test_a_training_keeps_to_its_quota_and_leaves_the_process_as_it_was(fails: bool) -> None:
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from trainloop import AbstractCallback, ModelWrap, TrainLoop

    seen: list[tuple[int, int]] = []

    class Look(AbstractCallback):
        def __init__(self) -> None:
            super().__init__("look")

        def on_epoch_end(self) -> None:
            seen.append((len(os.sched_getaffinity(0)), torch.get_num_threads()))
            if fails:
                raise RuntimeError("this callback fails")

    module = nn.Linear(2, 1)
    data = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)
    model = ModelWrap(module, Feed())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loop = TrainLoop(
        model, data, optimizer=optimizer, criterion=nn.MSELoss(), resources=Q(1, 0, "8GiB"), progress_bar=False
    )
    before = state()
    if fails:
        with pytest.raises(RuntimeError, match="this callback fails"):
            loop.fit(num_epochs=1, callbacks=[Look()])
    else:
        loop.fit(num_epochs=1, callbacks=[Look()])
    assert seen == [(1, 1)]
    assert state() == before


class Feed:
    """Batches of (x, y) for a plain module."""

    def get_loss(self, model: Any, batch_data: Any, criterion: Any, device: torch.device) -> torch.Tensor:
        x, y = batch_data
        return criterion(model(x.to(device)), y.to(device))  # type: ignore[no-any-return]

    def get_loss_eval(self, model: Any, batch_data: Any, criterion: Any, device: torch.device) -> torch.Tensor:
        return self.get_loss(model, batch_data, criterion, device)

    def get_predictions(self, model: Any, batch_data: Any, device: torch.device) -> tuple[Any, Any, dict[str, Any]]:
        x, y = batch_data
        return model(x.to(device)), y, {}


# -- gpu_or_cpu ------------------------------------------------------------------------------------------------------


class LightGBMError(Exception):
    pass


def fail(error: BaseException) -> object:
    raise error


def own_refusal(accelerator: str) -> DeviceError:
    """The error of this package for an accelerator that is not there."""
    with pytest.raises(DeviceError) as caught:
        choose_devices(accelerator, "auto", cuda=0)
    return caught.value


def test_what_trains_on_the_gpu_stays_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gpu_or_cpu(lambda: "gpu", lambda: fail(AssertionError("not called"))) == "gpu"


@pytest.mark.parametrize(
    "error",
    [
        LightGBMError(
            "GPU Tree Learner was not enabled in this build.\nPlease recompile with CMake option -DUSE_GPU=1"
        ),
        LightGBMError("CUDA Tree Learner was not enabled in this build."),
        LightGBMError("No OpenCL device found"),
        own_refusal("gpu"),
        own_refusal("cuda"),
        RuntimeError("CUDA error 100: no CUDA-capable device is detected"),
        RuntimeError("No CUDA GPUs are available"),
        RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
        AssertionError("Torch not compiled with CUDA enabled"),
        ValueError("XGBoost version not compiled with GPU support."),
        Exception("Environment for task type [GPU] not found"),
        ResourceError("accelerator='gpu': no GPU is visible here, only cpu."),
    ],
    ids=str,
)
def test_a_build_without_gpu_trains_on_the_cpu_once_with_one_warning(error: Exception) -> None:
    calls: list[str] = []
    with pytest.warns(UserWarning, match="starts again on the CPU") as caught:
        assert gpu_or_cpu(lambda: fail(error), lambda: calls.append("cpu") or "cpu") == "cpu"  # type: ignore[func-returns-value]
    assert calls == ["cpu"]
    assert len(caught) == 1
    message = str(caught[0].message)
    assert f"{type(error).__name__}: {str(error).split()[0]}" in message
    assert "install the library's GPU build" in message


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_lightgbm_itself_trains_on_the_cpu_where_it_finds_no_gpu(device: str) -> None:
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # its wheel needs the system's libgomp
        pytest.skip(f"no LightGBM: {error}")
    if torch.cuda.is_available():
        pytest.skip("it may find this machine's GPU")
    x = torch.rand(200, 5, generator=torch.Generator().manual_seed(0)).numpy()
    y = (x[:, 0] > 0.5).astype(int)
    trees = lightgbm.LGBMClassifier(n_estimators=5, verbose=-1)
    with pytest.warns(UserWarning, match="on the CPU, because no GPU can be used .LightGBMError") as caught:
        gpu_or_cpu(lambda: trees.set_params(device=device).fit(x, y), lambda: trees.set_params(device="cpu").fit(x, y))
    assert len(caught) == 1
    assert trees.score(x, y) > 0.9


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        LightGBMError("Out of memory: no OpenCL device memory left"),
        LightGBMError("Label should be in [0, 2)"),
        ValueError("feature names do not match"),
        KeyboardInterrupt(),
        SystemExit(2),
    ],
    ids=repr,
)
def test_other_errors_come_out_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        gpu_or_cpu(lambda: fail(error), lambda: fail(AssertionError("not called")))
    assert caught.value is error


def test_an_error_on_the_cpu_comes_out() -> None:
    error = LightGBMError("No OpenCL device found")
    with pytest.warns(UserWarning, match="on the CPU"), pytest.raises(ValueError, match="bad labels") as caught:
        gpu_or_cpu(lambda: fail(error), lambda: fail(ValueError("bad labels")))
    assert caught.value.__context__ is None  # the GPU's error was told by the warning


@pytest.mark.usefixtures("starts_processes")
def test_importing_resources_imports_nothing_heavy() -> None:
    code = (
        "import sys; import trainloop.resources, trainloop.resources.enforce; "
        "print({'psutil', 'pynvml', 'filelock', 'threadpoolctl'} & set(sys.modules))"
    )
    assert run_python(code) == "set()"
