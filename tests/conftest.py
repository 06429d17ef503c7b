"""What all tests share: a tiny model, data of an odd length, and a check that a test leaves nothing behind."""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import logging
import math
import multiprocessing
import multiprocessing.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, popen_forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

from trainloop._launch import spawning
from trainloop._processes import fork_server as processes

# A rank, a loader's worker and a test's own subprocess each take a thread a core otherwise, and two cores then
# run a hundred threads. Set before the first test, so that children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# Nor does a compiled model of ten parameters need a pool of interpreters, each of which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A shell's background jobs (nohup make test &) ignore Ctrl-C, and so would every process the tests press it for.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Searches wait for the CPUs that other runs on the machine have leased: here only those of the same process, or each
# waits for the tests beside it.
os.environ["TRAINLOOP_LEASE_DIR"] = tempfile.mkdtemp(prefix="leases-")
atexit.register(shutil.rmtree, os.environ["TRAINLOOP_LEASE_DIR"], ignore_errors=True)
# Other programs, with names alike, use the machine too: semaphores made here, and by children, say whose they are.
multiprocessing.current_process()._config["semprefix"] = f"/mp-tests-{os.getpid()}"  # type: ignore[attr-defined]

ODD_LENGTH = 101  # divisible by no batch size and no number of ranks that the tests use


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The suite of the world imports what only its own extra installs: it is read when it is asked for.

    Likewise the tests of the simulated GPU, which are for processes that have one.
    """
    asked_for = {
        "ecosystem": "ecosystem" in config.option.markexpr.replace("not ecosystem", ""),
        "simulated_cuda": "FAKEGPU" in os.environ,
    }
    here = Path(__file__).parent
    inside = [name for name in asked_for if here / name in (collection_path, *collection_path.parents)]
    return True if inside and not asked_for[inside[0]] else None


def pytest_configure(config: pytest.Config) -> None:
    """Let no property fail for being slow: two cores run several tests at once. (Tests on a GPU need no hypothesis.)"""
    with contextlib.suppress(ImportError):
        import hypothesis

        hypothesis.settings.register_profile("shared cores", deadline=None)
        hypothesis.settings.load_profile("shared cores")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run only the K-th (modulo N) of N parts of the tests")
    parser.addoption(
        "--slow-part", metavar="K/N", help="of the slow and the long tests run only the K-th (modulo N) of N parts"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of a test with ``@pytest.mark.long(but=2)``, let the first two cases be none of the long ones.

    With ``long(every=3)`` these are the first of each three: of a product of cases each value of each parameter, if the
    number has no divisor in common with those of the parameters' values.
    """
    mark = item.get_closest_marker("long")
    if mark is not None and mark.kwargs:
        test = item.nodeid.partition("[")[0]
        # Not a global of this module: ranks would receive it, and read this file since theirs differs.
        seen = item.session.__dict__.setdefault("_cases_seen", collections.Counter())
        seen[test] += 1
        if seen[test] <= mark.kwargs.get("but", 0) or seen[test] % mark.kwargs.get("every", math.inf) == 1:
            item.own_markers.remove(mark)


@pytest.hookimpl(trylast=True)  # after -k and -m, so that the parts are of equal size
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for option in ("--part", "--slow-part"):
        if part := config.getoption(option):
            divided = [
                item
                for item in items
                if option == "--part" or item.get_closest_marker("slow") or item.get_closest_marker("long")
            ]
            divided.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
            k, n = map(int, part.split("/"))
            n = min(n, len(divided) or 1)  # no part without a test, which pytest calls a failure
            left_out = {*divided} - {*divided[k % n :: n]}
            config.hook.pytest_deselected(items=list(left_out))
            items[:] = [item for item in items if item not in left_out]
    if not torch.cuda.is_available():
        no_gpu = pytest.mark.skip(reason="no CUDA device on this machine")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(no_gpu)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[object]:
    """With an older PyTorch, skip what needs fsdp on the CPU: the loop refuses it there, before any process starts."""
    try:
        return (yield)
    except Exception as error:  # an AssertionError, where a rank's own error is shown, or another one is expected
        is_fsdp = any(words in str(error) for words in ("gpu_mode='fsdp' on the CPU: PyTorch", "'ignored_params'"))
        if torch.__version__ < TorchVersion("2.10") and is_fsdp:
            pytest.skip("fsdp on the CPU needs PyTorch 2.10")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported stays, so that the garbage collector finds nothing there, and it would look many times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let each file of tests be alone, as where it is the only one that was collected.

    The loop describes all modules of the user's program to its ranks, which takes seconds for 270 files of tests.
    """
    folder = str(Path(__file__).parent)
    files = {name: module for name, module in sys.modules.items() if name.startswith("test_")}
    files = {name: module for name, module in files.items() if (module.__file__ or "").startswith(folder)}
    session._files = files  # type: ignore[attr-defined]  # no global of this module, which the loop would send, too
    for name in files:
        del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def _alone_and_frozen(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only this file's module is there, and what is imported by now need not be visited by the garbage collector again.

    These are a million objects. Each full collection of a test visited them all, and in a worker that a loader forks
    the visit alone made a copy of every page.
    """
    origins = {getattr(value, "__module__", None) for value in vars(request.module).values()}  # other files' helpers
    files = request.session._files  # type: ignore[attr-defined]
    here = {name: module for name, module in files.items() if name in {request.module.__name__, *origins}}
    sys.modules.update(here)
    gc.collect()
    gc.freeze()
    yield
    for name in here:
        del sys.modules[name]


# -- what hangs --------------------------------------------------------------------------------------------------------

_LAST_WORDS_S = 20.0  # before pytest's own limit for a test, which ends the whole process and leaves its children


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that waits for a child that hangs fails with that child's stack, and the others still run."""
    limit = float(item.config.getini("faulthandler_timeout") or 0) - _LAST_WORDS_S
    if limit <= 0 or not hasattr(signal, "SIGALRM"):  # not on Windows
        return (yield)
    before = signal.signal(signal.SIGALRM, lambda *_: end_children(f"{item.nodeid} runs for {limit:.0f} s"))
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def end_children(why: str) -> None:
    """Kill what this process has started but for what lives as long as it, and print where each of them stood."""
    py_spy = Path(sys.executable).with_name("py-spy")
    doomed = _children()
    for pid, line in doomed.items():
        stack = [py_spy, "dump", "--native", "--pid", str(pid)]
        said = subprocess.run(stack, capture_output=True, text=True) if py_spy.exists() else None
        print(f"{why}; ended: {line}\n{said.stdout if said else ''}", file=sys.stderr)
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- how ranks start ---------------------------------------------------------------------------------------------------

# Both ways are users' own; `make test-all` runs all tests with each. Scripts that tests run have it by inheritance.
os.environ.setdefault(processes.METHOD_VARIABLE, "forkserver" if sys.platform == "linux" else "spawn")
# Ranks import the file of their test, and so pytest, which took a third of a rank's life.
spawning.SERVER_MODULES = (*spawning.SERVER_MODULES, "pytest", "psutil")


@pytest.fixture(params=["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def each_start_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A test that runs with ranks from a fork server, and with ranks that are fresh interpreters."""
    monkeypatch.setenv(processes.METHOD_VARIABLE, request.param)
    method: str = request.param
    return method


@pytest.fixture
def starts_processes() -> None:
    """Asked for by tests of ``tests/unit`` that start an interpreter or ranks and are neither long nor slow."""


REMEDY = "Move it to tests/ranks, or mark it long."


@pytest.fixture(autouse=True)
def _unit_tests_start_no_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers that a loader forks are cheap; a start of Python is not. Long and slow tests may: they run seldom."""
    elsewhere = Path(__file__).parent / "unit" not in request.path.parents
    marked = any(request.node.get_closest_marker(mark) for mark in ("long", "slow"))
    if elsewhere or marked or "starts_processes" in request.fixturenames:
        yield
        return

    def opens(self: Any, command: Any, *args: Any, **kwargs: Any) -> None:
        if "python" in str(command):  # and not what libraries ask of the machine (lscpu)
            pytest.fail(f"tests/unit starts no Python, and this test does: {command!r:.200}. {REMEDY}")
        popen(self, command, *args, **kwargs)

    def spawns(path: bytes, command: list[Any], fds: Any) -> int:
        if "--multiprocessing-fork" in command:
            pytest.fail(f"tests/unit starts no ranks, and this test does. {REMEDY}")
        return spawn(path, command, fds)

    def served(popen: Any, process: Any) -> None:
        pytest.fail(f"tests/unit starts no ranks, and this test does. {REMEDY}")

    popen, spawn = subprocess.Popen.__init__, multiprocessing.util.spawnv_passfds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", opens)
        patch.setattr(multiprocessing.util, "spawnv_passfds", spawns)
        patch.setattr(popen_forkserver.Popen, "_launch", served)
        yield


# -- a tiny model and its data -----------------------------------------------------------------------------------------


def make_data(length: int = ODD_LENGTH, *, features: int = 8, classes: int = 3, seed: int = 0) -> TensorDataset:
    """``length`` rows of ``features`` float32 and a label that a linear model can learn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, features, generator=generator)
    w = torch.randn(features, classes, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x @ w).argmax(1))


@pytest.fixture
def data() -> TensorDataset:
    return make_data()


@pytest.fixture
def loader(data: TensorDataset) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(data, batch_size=16)


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


class _Prints(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)


@pytest.fixture
def events_on_stdout() -> Iterator[None]:
    """Print what the loop logs as events, which it does without a progress bar."""
    logger, handler = logging.getLogger("trainloop"), _Prints()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is also the current one, for what writes ``runs/`` or ``checkpoints/`` by default."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- nothing left behind -----------------------------------------------------------------------------------------------

_GRACE_S = 5.0  # for what is ending just when the test returns:
_ENDS_BY_ITSELF = ("threads", "children", "shared memory", "file descriptors")
# Set by libraries when they are first imported or used, for the life of the process.
_ENVIRONMENT_OF_LIBRARIES = (
    "PYTEST_",
    "KMP_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "CUDA_MODULE_LOADING",
    "TRITON_",
    "JUPYTER_",
    "MPLBACKEND",
    "TENSORBOARD_",
)
_THREADS_OF_LIBRARIES = ("IPythonHistorySavingThread", "tqdm_monitor", "ThreadPoolExecutor-AsyncCompile", "pydevd")
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(_ENVIRONMENT_OF_LIBRARIES)}


def _threads() -> set[str]:
    return {
        f"{thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if thread.is_alive()
        and not thread.name.startswith(_THREADS_OF_LIBRARIES)
        and type(thread).__name__ not in ("TMonitor", "_DummyThread")
    }


def _children() -> dict[int, str]:
    """Process numbers, with a line for each."""
    # multiprocessing's resource tracker and the fork servers live as long as this process, on purpose.
    keep = {getattr(resource_tracker._resource_tracker, "_pid", None)}
    keep.add(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    found = {}
    for child in _descendants():
        try:
            if child.pid not in keep and not _is_resource_tracker(child):
                found[child.pid] = f"pid {child.pid}: {child.status()} {' '.join(child.cmdline())[:200]}"
        except psutil.NoSuchProcess:
            continue
    return found


def _descendants() -> list[psutil.Process]:
    """Of this process; through all of /proc, as psutil does it, only where it has children that have any themselves."""
    childless = {getattr(resource_tracker._resource_tracker, "_pid", None)}
    if (server := forkserver._forkserver._forkserver_pid) is not None:  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            if not Path(f"/proc/{server}/task/{server}/children").read_text():
                childless.add(server)
    try:
        lists = [Path(f"/proc/self/task/{thread}/children").read_text() for thread in os.listdir("/proc/self/task")]
        if {int(pid) for pids in lists for pid in pids.split()} <= childless:
            return []
    except OSError:  # a kernel without these files, or a thread that has just ended
        pass
    return psutil.Process().children(recursive=True)


def _is_resource_tracker(child: psutil.Process) -> bool:
    return "resource_tracker" in " ".join(child.cmdline())  # joblib brings one of its own


def _shared_memory() -> set[str]:
    """Names in /dev/shm of this user; those that carry another process's number are its own affair."""
    found = set()
    if os.path.isdir("/dev/shm"):
        own = os.getuid()
        with os.scandir("/dev/shm") as entries:
            for entry in entries:
                try:
                    if entry.stat(follow_symlinks=False).st_uid == own and _made_by_this_process(entry.name):
                        found.add(entry.name)
                except FileNotFoundError:  # another process has just removed it
                    continue
    return found


def _made_by_this_process(name: str) -> bool:
    """A semaphore, torch_<pid>_... and joblib's folders tell their maker; others are judged by the time of the test."""
    if name.startswith("sem."):
        # Those of a launch begin with the launching process's number. joblib, which comes with scikit-learn, names all
        # of a process's semaphores anew once it is imported.
        return name.startswith((f"sem.mp-tests-{os.getpid()}-", f"sem.mp-{os.getpid()}-", f"sem.loky-{os.getpid()}-"))
    maker = re.match(r"(torch|joblib_memmapping_folder)_(\d+)_", name)
    return maker is None or int(maker[2]) == os.getpid()


def _held_by_others(name: str) -> bool:
    """Whether an entry of /dev/shm is mapped or open in a process that has nothing to do with this one."""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for pid in psutil.pids():
        if pid not in own:
            try:
                if f"/dev/shm/{name}" in Path(f"/proc/{pid}/maps").read_text():
                    return True
                if any(os.readlink(fd).startswith(f"/dev/shm/{name}") for fd in Path(f"/proc/{pid}/fd").iterdir()):
                    return True
            except OSError:  # it has ended, or is another user's
                continue
    return False


def _descriptors() -> dict[int, str]:
    keep = {getattr(resource_tracker._resource_tracker, "_fd", None)}
    keep.add(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    if processes._folder is not None:
        keep.add(processes._folder.lock_fd)
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
        if int(name) not in keep and not target.startswith(("/dev/null", "/dev/urandom", "/dev/nvidia", "/proc/")):
            found[int(name)] = target
    return found


def _state() -> dict[str, Any]:
    return {
        "environment": _environment(),
        "threads": _threads(),
        "children": set(_children().values()),
        "shared memory": _shared_memory(),
        "file descriptors": _descriptors(),
        "current folder": os.getcwd(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "torch threads": torch.get_num_threads(),
        "affinity": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        "signal handlers": [signal.getsignal(s) for s in _SIGNALS],
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
    }


def left_behind(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What ``after`` has that ``before`` had not, a line for each, empty where they agree."""
    lines = []
    for what, then in before.items():
        now = after[what]
        if what in ("threads", "children", "shared memory"):
            new = sorted(now - then)
            lines += [f"{what}: {n}" for n in new if what != "shared memory" or not _held_by_others(n)]
        elif what == "file descriptors":
            lines += [f"{what}: {fd} -> {target}" for fd, target in sorted(now.items()) if then.get(fd) != target]
        elif what == "environment":
            for name in sorted(then.keys() | now.keys()):
                if then.get(name) != now.get(name):
                    lines.append(f"{what}: {name} was {then.get(name)!r}, is {now.get(name)!r}")
        elif what == "start method":
            if then is not None and now != then:
                lines.append(f"{what}: was {then!r}, is {now!r}")
        elif now != then:
            lines.append(f"{what}: was {then!r}, is {now!r}")
    return lines


_DRIVERS = (" -> anon_inode:[eventfd]", " -> pipe:[")  # file descriptors of the driver of CUDA
_drivers_are_open = False


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare the process with what it was before the test.

    A test that can't help leaving something (a library's first use starts a thread, say) names it: :func:`may_leave`.
    """
    before = _state()
    allowed: list[str] = []
    request.node._may_leave = allowed
    yield
    global _drivers_are_open
    if torch.cuda.is_initialized() and not _drivers_are_open:  # with the first context, for the life of this process
        drivers = [line for line in left_behind(before, _state()) if any(one in line for one in _DRIVERS)]
        allowed += drivers
        _drivers_are_open = bool(drivers)
    deadline = time.monotonic() + _GRACE_S
    stayed: set[str] | None = None
    while True:
        lines = [line for line in left_behind(before, _state()) if not any(word in line for word in allowed)]
        # Other processes' semaphores come and go in /dev/shm: what counts is what stays.
        here = {line for line in lines if line.startswith("shared memory")}
        stayed = here if stayed is None else stayed & here
        lines = [line for line in lines if line not in here or line in stayed]
        if not any(line.startswith(_ENDS_BY_ITSELF) for line in lines) or time.monotonic() > deadline:
            break
        gc.collect()  # tensors in shared memory, loaders and writers close what they hold when they are collected
        time.sleep(0.05)
    if lines:
        if before["torch threads"] != torch.get_num_threads():
            torch.set_num_threads(before["torch threads"])  # so that one test's fault is not all others'
        pytest.fail("left behind by this test:\n  " + "\n  ".join(lines), pytrace=False)


@pytest.fixture
def may_leave(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``may_leave('tensorboard')``: lines that hold this word are no fault of this test."""

    def allow(*words: str) -> None:
        request.node._may_leave.extend(words)

    return allow
