"""Ranks from a fork server are what spawned ones are, and the server is nobody's burden."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from kit.loops import cpu_loop
from kit.programs import run_script, wait_until
from kit.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTModel
from trainloop._launch import launch
from trainloop._processes import fork_server as processes
from trainloop.errors import ConfigurationError, WorkerFailedError

# A rank looks at all that a process inherits, under circumstances that the server did not start with.
FACTS = """
import json, locale, multiprocessing, os, random, resource, signal, sys, warnings
import numpy, torch, trainloop.errors
from trainloop._launch import launch

def facts(stop):
    import multiprocessing, threading
    import torch.distributed as dist
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    own = {int(name) for name in os.listdir("/proc/self/fd")}
    return {
        "caller": multiprocessing.parent_process().pid, "group": os.getpgrp(), "session": os.getsid(0),
        "folder": os.readlink("/proc/self/cwd"), "umask": status["Umask"],
        "signals": [status[name] for name in ("SigBlk", "SigIgn")],
        "handlers": {s: repr(signal.getsignal(s))[:40] for s in (signal.SIGHUP, signal.SIGUSR2, signal.SIGPIPE)},
        "cpus": sorted(os.sched_getaffinity(0)), "nice": os.nice(0),
        "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_CORE, resource.RLIMIT_STACK)],
        "environment": {k: v for k, v in os.environ.items() if k != "TRAINLOOP_LAUNCH"},
        "path": sys.path, "argv": sys.argv, "flags": repr(sys.flags), "encoding": locale.getpreferredencoding(),
        # Without multiprocessing's.
        "main": sorted(set(vars(sys.modules["__main__"])) - {"main", "spawn_main"}),
        "file": sys.modules["__main__"].__file__,
        "names": [thread.name for thread in threading.enumerate()],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "streams": [
            (s.encoding, s.errors, s.line_buffering, s.isatty(), s.fileno(), s.name, s.mode)
            for s in (sys.__stdout__, sys.__stderr__)
        ],
        "out": [os.readlink(f"/proc/self/fd/{i}") for i in range(3)],
        "filters": [f[:1] + (f[2].__name__,) for f in warnings.filters],
        "descriptors": sorted(
            target.split(" ")[0].partition("loop-mp-")[0]
            for target in map(target_of, own)
            if not target.startswith(("pipe", "socket", "anon_", "/dev/null"))
        ),
        "cuda": torch.cuda.is_initialized(),
        "children": multiprocessing.active_children(),
        "oom": open("/proc/self/oom_score_adj").read(), "cgroup": open("/proc/self/cgroup").read(),
    }

def target_of(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "pipe"

def drawn(stop):
    import torch.distributed as dist
    mine = [random.random(), numpy.random.rand(), torch.rand(()).item()]
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody

if __name__ == "__main__":
    launch(facts, ranks_per_node=1, start_method="forkserver")  # the server starts, before all that follows
    os.chdir(sys.argv[1])
    os.environ["SET_LATER"] = "\\udcff and long " + 100_000 * "x"  # longer than a socket takes at once
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    warnings.simplefilter("error", FutureWarning)
    sys.path.append("/nowhere")
    os.dup2(os.open("other-output", os.O_WRONLY | os.O_CREAT), 2)
    found = {how: launch(facts, ranks_per_node=1, start_method=how) for how in ("forkserver", "spawn")}
    found["process"] = os.getpid()
    found["draws"] = launch(drawn, ranks_per_node=2, start_method="forkserver")
    found["draws"] += launch(drawn, ranks_per_node=2, start_method="forkserver")
    # What no process can take over:
    os.nice(1)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    os.environ["TORCH_LOGS"] = "+dynamo"
    try:
        launch(facts, ranks_per_node=1, start_method="forkserver")
    except trainloop.errors.ConfigurationError as error:
        found["refused"] = str(error)
    found["as spawned"] = launch(facts, ranks_per_node=1)
    found["spawned"] = launch(facts, ranks_per_node=1, start_method="spawn")
    print(json.dumps(found, default=str))
"""


@pytest.mark.long
def test_a_rank_is_what_a_spawned_one_is(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FACTS)
    command = [sys.executable, "-X", "utf8", "-W", "ignore::ImportWarning", str(script), str(tmp_path)]
    environment = {**os.environ, processes.METHOD_VARIABLE: "auto"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for rank in (own for own in found.values() if isinstance(own, dict) and "path" in own):
        # torch 2.6 appends a temporary folder of its own.
        rank["path"] = [path for path in rank["path"] if not path.startswith("/tmp/tmp")]
    assert found["forkserver"] == found["spawn"]
    assert found["spawn"]["caller"] == found["process"]
    assert found["spawn"]["folder"] == str(tmp_path)
    assert len({number for rank in found["draws"] for number in rank}) == 12  # no two ranks draw alike
    assert (
        "these settings changed since the server started: SigIgn, TORCH_LOGS, priority. Use 'spawn'" in found["refused"]
    )
    assert found["as spawned"] == found["spawned"]
    assert found["spawn"]["umask"].strip() == "0027"


@pytest.mark.long
def test_a_server_is_found_warm_and_replaced_where_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit() -> tuple[int, dict[str, Any]]:
        facts = run_ranks(what_the_rank_sees, 2, folder=tmp_path)
        return server_pid(), facts[1]

    monkeypatch.setenv(processes.METHOD_VARIABLE, "forkserver")
    first, _ = fit()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # read by nothing before a process uses a GPU
    second, facts = fit()
    assert second == first
    assert facts["CUDA_VISIBLE_DEVICES"] == "7"
    assert facts["imported"]  # before the rank was
    os.kill(first, signal.SIGKILL)
    third, _ = fit()
    assert third != first


def server_pid() -> int:
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def what_the_rank_sees() -> dict[str, Any]:
    return {**os.environ, "imported": "torch.distributed" in sys.modules and parent_is_server()}


def parent_is_server() -> bool:
    return "multiprocessing.forkserver" in Path(f"/proc/{os.getppid()}/cmdline").read_text()


def killed(stop: Any) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def kills_the_server(stop: Any) -> None:
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        Path(os.environ["NOTE"]).write_text(" ".join(map(str, pids)))
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


@pytest.mark.long
def test_ranks_end_with_their_server_and_the_next_call_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(processes.METHOD_VARIABLE, "forkserver")
    monkeypatch.setenv("NOTE", str(tmp_path / "pids"))
    with pytest.raises(WorkerFailedError, match=r"with exit code 255(.|\n)*fork server, .* was killed"):
        launch(kills_the_server, ranks_per_node=2)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), seconds=10)
    assert launch(parent, ranks_per_node=1) == server_pid()


SHARED = """
import multiprocessing, os, random, signal, sys, time
from trainloop._launch import launch

def parent(stop):
    import os
    return os.getppid()

def facts(connection):
    import numpy, torch
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH", "TRAINLOOP_FORK_SERVER")
    connection.send((
        os.getppid(), [os.environ.get(name) for name in names], torch.get_num_threads(),
        [float(torch.rand(())), numpy.random.rand()],
        [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    ))
    time.sleep(1000)

def as_others_are(method):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=facts, args=(theirs,))
    process.start()
    found = ours.recv()
    process.terminate()
    process.join()
    return (*found, process.exitcode)

if __name__ == "__main__":
    os.environ["TRAINLOOP_START_METHOD"] = "auto"
    if sys.argv[1] == "first":
        foreign = as_others_are("forkserver")
        print(launch(parent, ranks_per_node=1) == os.getpid())  # spawned: the server is another's
    else:
        server = launch(parent, ranks_per_node=1)
        others = [as_others_are("forkserver") for _ in range(2)]
        fresh = as_others_are("spawn")
        alike = [other[1:3] + other[4:] == fresh[1:3] + fresh[4:] for other in others]
        print([other[0] == server for other in others], alike)
        print(len({number for other in others for number in other[3]}))
"""


@pytest.mark.long
def test_the_program_s_own_processes_may_come_from_the_same_server(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def said(who: str) -> list[str]:
        done = run_script(tmp_path, SHARED, who, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert said("first") == ["True"]
    assert said("second") == ["[True, True] [True, True]", "4"]


@pytest.mark.long
def test_a_rank_that_a_signal_ends_is_named(each_start_method: str) -> None:
    with pytest.raises(WorkerFailedError, match=r"rank 1 of 2 was killed by signal SIGSEGV") as caught:
        launch(killed, ranks_per_node=2)
    assert (caught.value.rank, caught.value.exitcode) == (1, -signal.SIGSEGV)


def names_in_a_set() -> list[str]:
    return list({f"class {i}" for i in range(20)})


def test_all_ranks_iterate_over_sets_of_strings_in_one_order(each_start_method: str, tmp_path: Path) -> None:
    first, second = (run_ranks(names_in_a_set, 2, folder=tmp_path) for _ in range(2))
    assert first[0] == first[1] == second[0] == second[1]


IN_JOBLIB = """
import multiprocessing
from joblib import Parallel, delayed
from trainloop._launch import launch

def method(stop):
    import multiprocessing
    import torch.distributed as dist
    dist.barrier()  # a rank that ends at once may close the connection that the other is opening
    return multiprocessing.get_start_method()

def of_caller_and_ranks():
    return multiprocessing.get_start_method(), launch(method, ranks_per_node=2)

if __name__ == "__main__":
    print(Parallel(n_jobs=2, backend="loky")([delayed(of_caller_and_ranks)()]))
"""


@pytest.mark.long
def test_ranks_start_in_a_worker_of_joblib_whose_start_method_only_joblib_knows(
    each_start_method: str, tmp_path: Path
) -> None:
    done = run_script(tmp_path, IN_JOBLIB)
    assert done.stdout.strip() == f"[('loky', {multiprocessing.get_all_start_methods()[0]!r})]", done.stderr


ORPHANS = """
import multiprocessing, os, sys, time
from trainloop._launch import launch

def work(stop):
    import os, sys, time
    os.write(1, f"{os.getppid()} {os.getpid()}\\n".encode())
    time.sleep(100)

if __name__ == "__main__":
    if os.fork() == 0:
        time.sleep(100)
    launch(work, ranks_per_node=2)
"""


@pytest.mark.long
def test_the_server_ends_with_its_caller(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    environment = {**os.environ, processes.METHOD_VARIABLE: "forkserver", "TRAINLOOP_ALL_RANKS_OUTPUT": "1"}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as caller:
        assert caller.stdout is not None
        lines = [[int(pid) for pid in caller.stdout.readline().split()] for _ in range(2)]
        assert lines[0][0] == lines[1][0]
        pids = {pid for line in lines for pid in line}
        forked = next(c for c in psutil.Process(caller.pid).children() if "script.py" in c.cmdline()[-1])
        caller.kill()
        deadline = time.monotonic() + 20
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [pid for pid in pids if psutil.pid_exists(pid)]
        forked.kill()
    assert not left


def parent(stop: Any) -> int:
    return os.getppid()


@pytest.mark.long
def test_where_there_can_be_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ConfigurationError, match="a fork server can't be used here, because this program is frozen"):
        launch(killed, ranks_per_node=1, start_method="forkserver")
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(processes, "begin_server", cannot)
        patch.setenv(processes.METHOD_VARIABLE, "auto")
        assert launch(parent, ranks_per_node=1) == os.getpid()
    monkeypatch.setenv(processes.METHOD_VARIABLE, "fork")
    with pytest.raises(ConfigurationError, match="TRAINLOOP_START_METHOD='fork': must be 'auto', 'forkserver' or"):
        launch(killed, ranks_per_node=1)


def cannot(modules: Any) -> None:
    raise processes.NoServerError("it requires Linux")


@pytest.mark.long
def test_a_fork_of_the_program_spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is another process's."""
    monkeypatch.setenv(processes.METHOD_VARIABLE, "auto")
    launch(parent, ranks_per_node=1)
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(theirs, str(launch(parent, ranks_per_node=1) == os.getpid()).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours) as file:
        assert file.read() == "True"
    os.waitpid(pid, 0)


def threads_here(stop: Any) -> int:
    return torch.get_num_threads()


@pytest.mark.long
def test_fewer_threads_of_openmp_than_of_mkl(each_start_method: str) -> None:
    variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}  # of which torch takes MKL's when it is loaded
    assert launch(threads_here, ranks_per_node=1, child_env=variables) == 1


class Line(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return criterion(self.fc(batch_data[0]), batch_data[1])

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self.fc(batch_data[0]), batch_data[1], {}


class Threads(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("threads")
        self.number = 0

    def on_train_begin(self) -> None:
        self.number = torch.get_num_threads()


@pytest.mark.long
def test_fewer_threads_that_the_caller_has_set_stay_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")  # of the tests
    model, here, there = Line(), Threads(), Threads()
    loader = DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8, 1)), 4)
    tl = TrainLoop(
        model, loader, optimizer=torch.optim.SGD(model.parameters(), 0.1), criterion=nn.MSELoss(), accelerator="cpu"
    )
    tl.fit(num_epochs=1, callbacks=[here])
    tl.callbacks.clear()
    tl.fit(num_epochs=1, callbacks=[there], max_restarts=1)
    assert here.number == there.number == torch.get_num_threads() == 1


def trained_from(start: float) -> tuple[list[float], list[float]]:
    """What two ranks make of weights, and the losses; where one of them fails, its error's words."""
    model = Line()
    nn.init.constant_(model.fc.weight, start)
    nn.init.zeros_(model.fc.bias)
    x = torch.arange(24.0).reshape(8, 3) / 24
    tl = cpu_loop(
        model,
        DataLoader(TensorDataset(x, start * x[:, :1]), 2, shuffle=True, num_workers=1),
        criterion=nn.MSELoss(),
        gpu_mode="ddp",
        devices=2,
        seed=int(start),
    )
    tl.fit(num_epochs=2, callbacks=[Breaks()] if start == BROKEN else [])
    return model.fc.weight.flatten().tolist(), list(tl.history["loss"])


BROKEN = 3.0


class Breaks(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("breaks")

    def on_epoch_begin(self) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("on purpose")


@pytest.mark.long
def test_fits_of_several_threads_at_once(each_start_method: str) -> None:
    alone = [trained_from(start) for start in (1.0, 2.0)]
    if pid := server_pid():  # all of them ask for one at once
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX":
            time.sleep(0.01)
    before = dict(os.environ)
    with ThreadPoolExecutor(4) as threads:
        together = [threads.submit(trained_from, start) for start in (1.0, 2.0, BROKEN, 1.0)]
        with pytest.raises(WorkerFailedError, match="rank 1 of 2 raised ZeroDivisionError: on purpose"):
            together.pop(2).result()
        assert [one.result() for one in together] == [*alone, alone[0]]
    assert dict(os.environ) == before
