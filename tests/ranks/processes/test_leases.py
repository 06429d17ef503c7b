"""Leases between real processes: no device twice, an end with the owner, nobody waits for ever."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trainloop.errors import DeviceError, ResourceError
from trainloop.resources import gpus, lease
from trainloop.resources.lease import Request, acquire

ROOT = str(Path(lease.__file__).parents[2])
GPUS = [f"gpu-{index}" for index in range(8)]

# A run: takes {kind: [number, pool]}, says so, and does what its standard input says. Imports no torch: it starts soon.
RUN = """
import json, os, sys, time
from trainloop.resources.lease import Request, acquire
wanted = {kind: Request(*request) for kind, request in json.loads(sys.argv[1]).items()}
timeout_s = json.loads(sys.argv[2])
print("asks", flush=True)
try:
    held = acquire(wanted, timeout_s=timeout_s)
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
    sys.exit()
print(json.dumps(held.names), flush=True)
order = sys.stdin.readline().strip()
if order == "release":
    held.close()
elif order == "raise":
    raise RuntimeError
elif order == "_exit":
    os._exit(3)
elif order == "fork":  # a child that lives on, as a worker of a loader does
    if os.fork() == 0:
        print("forked", os.getpid(), flush=True)
        time.sleep(60)
    os._exit(0)
elif order == "memory":
    import resource
    resource.setrlimit(resource.RLIMIT_DATA, (2**28, 2**28))
    bytearray(2**40)
print("done", flush=True)
sys.stdin.readline()
"""


class Run:
    """A process that holds a lease, or waits for one."""

    def __init__(self, folder: Path, timeout_s: float | None = 30, **wanted: list[object]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, json.dumps(wanted), json.dumps(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ROOT, "TRAINLOOP_LEASE_DIR": str(folder)},
        )
        assert self.line() == "asks"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def answer(self) -> dict[str, list[str]]:
        return json.loads(self.line())  # type: ignore[no-any-return]

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path))
    runs: list[Run] = []

    def start_one(timeout_s: float | None = 30, **wanted: list[object]) -> Run:
        runs.append(Run(tmp_path, timeout_s, **wanted))
        return runs[-1]

    yield start_one
    for run in runs:
        run.end()


def test_eight_runs_that_start_at_once_get_eight_gpus_and_the_ninth_none(start: Callable[..., Run]) -> None:
    runs = [start(gpu=[1, GPUS], cpu=[2, [f"cpu-{index}" for index in range(16)]]) for _ in range(8)]
    answers = [run.answer() for run in runs]
    assert sorted(name for answer in answers for name in answer["gpu"]) == GPUS
    assert len({name for answer in answers for name in answer["cpu"]}) == 16
    with pytest.raises(ResourceError, match=r"1 of 8 gpus could not be leased at once, .* leased gpus gpu-0, gpu-1"):
        acquire({"gpu": Request(1, GPUS)}, timeout_s=0)


FIND = """
import sys
from trainloop import devices
from trainloop.resources import gpus
devices._cuda_count = lambda: 8
gpus.names = lambda count: [f"gpu-{i}" for i in range(count)]
gpus._TRY_GPUS = "import sys\\nfor line in sys.stdin: print(1, flush=True)"
print(devices.find_usable_cuda_devices(int(sys.argv[1])), flush=True)
sys.stdin.readline()
"""


@pytest.mark.long(but=1)
@pytest.mark.parametrize("each", [4, 2, 1])
def test_runs_that_look_for_usable_gpus_at_once_get_different_ones(each: int, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": ROOT, "TRAINLOOP_LEASE_DIR": str(tmp_path)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", FIND, str(each)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for _ in range(8 // each)
    ]
    found = [index for run in runs for index in json.loads(run.stdout.readline())]  # type: ignore[union-attr]
    for run in runs:
        run.communicate("\n", timeout=30)
    assert sorted(found) == list(range(8))


@pytest.mark.long(every=3)
@pytest.mark.parametrize("end", ["release", "raise", "_exit", signal.SIGKILL, "memory", signal.SIGTERM, signal.SIGINT])
def test_a_lease_ends_with_its_owner_however_that_ends(end: str | int, start: Callable[..., Run]) -> None:
    run = start(gpu=[8, GPUS])
    assert run.answer() == {"gpu": GPUS}
    with pytest.raises(ResourceError, match="could not be leased"):
        acquire({"gpu": Request(1, GPUS)}, timeout_s=0)
    if isinstance(end, str):
        run.order(end)
    else:
        run.process.send_signal(end)
    with acquire({"gpu": Request(8, GPUS)}, timeout_s=30) as held:
        assert held.names == {"gpu": GPUS}


def test_a_worker_that_outlives_its_killed_owner_holds_no_lease(start: Callable[..., Run]) -> None:
    filelock = pytest.importorskip("filelock", "3.30")  # older ones leave the descriptor open in a forked child
    assert filelock
    run = start(gpu=[8, GPUS])
    run.answer()
    run.order("fork")
    worker = int(run.line().split()[1])
    try:
        with acquire({"gpu": Request(8, GPUS)}, timeout_s=30) as held:
            os.kill(worker, 0)  # still there
            assert held.names == {"gpu": GPUS}
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_waiter_that_dies_holds_nobody_up(end: int, start: Callable[..., Run]) -> None:
    first = start(gpu=[1, GPUS])
    first.answer()
    waiting = start(gpu=[8, GPUS])
    waiting.process.send_signal(end)
    waiting.process.wait(timeout=30)
    with acquire({"gpu": Request(7, GPUS)}, timeout_s=30) as held:
        assert held.names == {"gpu": GPUS[1:]}


def test_a_request_is_granted_whole_or_not_at_all(start: Callable[..., Run]) -> None:
    first = start(cpu=[1, ["cpu-0"]])
    first.answer()
    with pytest.raises(ResourceError, match=r"2 of 8 gpus and 1 of 1 cpus could not be leased .*cpus cpu-0"):
        acquire({"gpu": Request(2, GPUS), "cpu": Request(1, ["cpu-0"])}, timeout_s=0.2)
    with acquire({"gpu": Request(8, GPUS)}, timeout_s=0):
        pass  # nothing of the refused request is held


def test_two_that_want_each_other_s_devices_do_not_wait_for_ever(start: Callable[..., Run]) -> None:
    """Crosswise requests, over and over: with half-served ones this would stand still soon."""
    names = ["gpu-0", "gpu-1"]
    runs = [start(gpu=[2, names[::step]]) for step in (1, -1, 1, -1)]
    served = 0
    for run in runs:
        threading.Thread(target=lambda run=run: (run.answer(), run.order("release"), run.order(""))).start()
    for run in runs:
        run.process.wait(timeout=60)
        served += run.process.returncode == 0
    assert served == 4


def test_what_can_never_be_had_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="9 gpus cannot be granted: this process may use only 8"):
        acquire({"gpu": Request(9, GPUS)}, where=tmp_path / "unused")
    assert not (tmp_path / "unused").exists()


def test_a_wait_ends_in_time(start: Callable[..., Run]) -> None:
    start(gpu=[8, GPUS]).answer()
    began = time.monotonic()
    answer = start(gpu=[1, GPUS], timeout_s=0.3).line()
    assert "ResourceError: 1 of 8 gpus could not be leased within 0.3 s" in answer
    assert 0.3 <= time.monotonic() - began < 20


def test_as_many_as_there_are_up_to_a_number(start: Callable[..., Run]) -> None:
    start(gpu=[6, GPUS]).answer()
    with acquire({"gpu": Request(8, GPUS, least=1)}, timeout_s=0) as held:
        assert held.names == {"gpu": ["gpu-6", "gpu-7"]}
        with pytest.raises(ResourceError, match="1 of 8 gpus could not be leased"):
            acquire({"gpu": Request(8, GPUS, least=1)}, timeout_s=0)


def test_two_requests_of_one_process_exclude_each_other_too(tmp_path: Path) -> None:
    request = {"gpu": Request(1, GPUS)}
    with acquire(request, where=tmp_path) as first, acquire(request, where=tmp_path) as second:
        assert first.names != second.names
    first.close()  # again does nothing
    with acquire({"gpu": Request(8, GPUS)}, where=tmp_path, timeout_s=0) as held:
        assert len(held.names["gpu"]) == 8


def test_each_user_has_a_folder_that_others_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = os.umask(0o077)
    try:
        acquire({"gpu": Request(1, ["GPU-1/../x y"])}, where=tmp_path / "a" / "b").close()
    finally:
        os.umask(old)
    (own,) = (tmp_path / "a" / "b").iterdir()
    assert (own.name, own.stat().st_mode & 0o7777) == (f"trainloop-leases-{os.geteuid()}", 0o755)
    (held,) = own.glob("held-*")
    assert (held.name, held.stat().st_mode & 0o777) == ("held-GPU-1_.._x_y.lock", 0o644)
    assert (own / "desk.lock").stat().st_mode & 0o777 == 0o600
    monkeypatch.delenv("TRAINLOOP_LEASE_DIR", raising=False)
    assert str(lease.folder()) == "/tmp"


def test_who_holds_a_device_is_named(start: Callable[..., Run]) -> None:
    run = start(gpu=[1, GPUS])
    run.answer()
    with pytest.raises(ResourceError, match=rf"\(process {run.process.pid} of user \S+ \(.*python"):
        acquire({"gpu": Request(8, GPUS)}, timeout_s=0)


def test_a_folder_that_is_a_link_is_refused_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "desk.lock").write_text("my thesis")
    (tmp_path / f"trainloop-leases-{os.geteuid()}").symlink_to(precious)
    with pytest.raises(
        ResourceError,
        match=r"it is a link or file of user .* so that nobody else can change leases. Have it removed",
    ):
        acquire({"gpu": Request(1, GPUS)}, where=tmp_path)
    assert (precious / "desk.lock").read_text() == "my thesis"


def test_a_desk_that_stays_locked_is_an_error_that_names_who(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire({"gpu": Request(1, GPUS)}, where=tmp_path).close()
    code = "import sys; from trainloop.resources import lease; from pathlib import Path; holds = lease._LeaseFolder"
    code += "(Path(sys.argv[1])).locked(); holds.__enter__(); print('holds', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        monkeypatch.setattr(lease, "_LOCK_TIMEOUT_S", 0.3)
        with pytest.raises(ResourceError, match=rf"were locked for 0\.3 s by process {holder.pid} of user \S+ \(.*-c "):
            acquire({"gpu": Request(1, GPUS)}, where=tmp_path)
        with lease.one_at_a_time("desk", tmp_path):
            pass  # a choice goes on without it
    finally:
        holder.communicate()


def test_a_holder_s_line_cannot_command_a_terminal(tmp_path: Path) -> None:
    with acquire({"gpu": Request(1, GPUS)}, where=tmp_path):
        (held,) = tmp_path.glob("*/held-*")
        held.write_text("process 1 \x1b[31mof user root\n" + 300 * "x")
        with pytest.raises(ResourceError, match=r"\(process 1 \?\[31mof user root\?x{100,199}\)"):
            acquire({"gpu": Request(8, GPUS)}, where=tmp_path, timeout_s=0)
        held.write_text("")  # as older releases of filelock leave it
        with pytest.raises(ResourceError, match=r"\(an unknown process\)"):
            acquire({"gpu": Request(8, GPUS)}, where=tmp_path, timeout_s=0)


@pytest.fixture
def place_of_all() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="leases-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.hosts
def test_runs_of_two_users_exclude_each_other_and_cannot_touch_each_other_s_files(place_of_all: Path) -> None:
    """As root, with nobody as the other user."""
    other = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    become = "import filelock, json, os, time; from trainloop.resources import lease; os.setgroups([])"
    become += "; os.setgid(65534); os.setuid(65534)"
    command = [sys.executable, "-c", f"{become}\n{RUN}"]
    environ = {**os.environ, "PYTHONPATH": ROOT, "TRAINLOOP_LEASE_DIR": str(place_of_all)}
    theirs = subprocess.Popen(
        [*command, json.dumps({"gpu": [7, GPUS]}), "5"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
    )  # fmt: skip
    try:
        assert theirs.stdout is not None
        assert theirs.stdout.readline().strip() == "asks"
        assert json.loads(theirs.stdout.readline()) == {"gpu": GPUS[:7]}
        with acquire({"gpu": Request(1, GPUS)}, where=place_of_all) as mine:
            assert mine.names == {"gpu": ["gpu-7"]}
            text = rf"\(process {theirs.pid} of user nobody \(.*python"
            with pytest.raises(ResourceError, match=text):
                acquire({"gpu": Request(2, GPUS)}, where=place_of_all, timeout_s=0.1)
        # The other user makes this user's folder first, with links to what root may write.
        precious = place_of_all / "precious"
        precious.write_text("root's own")
        shutil.rmtree(place_of_all / "trainloop-leases-0")
        trap = (
            f"mkdir trainloop-leases-0; for f in desk held-gpu-0; do ln -s {precious} trainloop-leases-0/$f.lock; done"
        )
        subprocess.run(["sh", "-c", trap], check=True, **{**other, "cwd": str(place_of_all)})  # type: ignore[call-overload]
        with pytest.raises(ResourceError, match="it is a folder of user nobody, but must be your own folder"):
            acquire({"gpu": Request(1, GPUS)}, where=place_of_all)
        assert precious.read_text() == "root's own"
    finally:
        theirs.kill()
        theirs.communicate()
    with acquire({"gpu": Request(1, GPUS)}, where=place_of_all / "elsewhere") as mine:
        assert mine.names == {"gpu": GPUS[:1]}


def test_a_child_is_told_that_it_works_within_its_parent_s_lease() -> None:
    code = "from trainloop.resources import lease; print(lease.inherited()); lease.inherit(); print(lease.inherited())"
    environ = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert done.stdout.split() == ["False", "True"]


def test_gpus_are_tried_in_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that is made to try a GPU must not stay in this process."""
    here: list[int] = []
    code = "import os, sys\nfor line in sys.stdin: print(int(os.getpid() != {} and int(line) != 1), flush=True)"
    monkeypatch.setattr(gpus, "_TRY_GPUS", code.format(os.getpid()))
    monkeypatch.setattr(gpus, "_accepts_a_tensor", lambda index: here.append(index) or True)
    with gpus._Probe() as probe:
        assert [probe.accepts_a_tensor(index) for index in (0, 1, 2)] == [True, False, True]
        assert here == []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # device 1 may be in use by this process
        assert probe.accepts_a_tensor(1)
    assert here == [1]
    assert probe._process.returncode is not None


def test_a_process_that_can_not_try_gpus_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_TRY_GPUS", "raise SystemExit('libcuda is broken')")
    with (
        gpus._Probe() as probe,
        pytest.raises(DeviceError, match=r"GPU 3 can't be tried, .*: libcuda is broken\. Choose the GPUs yourself"),
    ):
        probe.accepts_a_tensor(3)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DeviceError, match=r"no process for it starts: .*nowhere"):
        gpus._Probe()
