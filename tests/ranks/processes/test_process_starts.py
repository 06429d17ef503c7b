"""Processes of callers that have few descriptors, threads that start others, and libraries that set variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainloop._processes import fork_server as processes


def run_script(folder: Path, script: str, *, shell_suffix: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script whose ranks come from a fork server; the suffix redirects its descriptors."""
    path = folder / "script.py"
    path.write_text(script)
    environment = {**os.environ, processes.METHOD_VARIABLE: "forkserver", "TRAINLOOP_ALL_RANKS_OUTPUT": "1"}
    command = f'exec "$0" "$1" {shell_suffix}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, str(path)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


WITHOUT_OUTPUT = """
import os, sys, traceback
from trainloop._launch import launch

def prints(stop):
    import os, sys, torch.distributed as dist
    print("printed by a rank", flush=True)
    os.write(2, b"written by a rank")
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, dist.get_rank())
    return numbers, [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)]

if __name__ == "__main__":
    own = open("own", "w")
    own.write("the user's")
    own.flush()
    sys.excepthook = lambda kind, error, trace: open("failed", "w").write("".join(traceback.format_exception(error)))
    # A server that the first call has started serves the second.
    found = [launch(prints, ranks_per_node=2) for _ in range(2)]
    with open("found", "w") as file:
        file.write(repr((own.fileno(), found)))
"""


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.long
def test_ranks_of_a_caller_without_standard_output(tmp_path: Path, closed: str) -> None:
    done = run_script(tmp_path, WITHOUT_OUTPUT, shell_suffix=closed)
    failed = tmp_path / "failed"
    assert done.returncode == 0, done.stderr + (failed.read_text() if failed.exists() else "")
    number, found = eval((tmp_path / "found").read_text())
    assert number == (0 if "<" in closed else 1)
    for numbers, outputs in found:
        assert numbers == [0, 1]
        assert outputs[0] == os.devnull
        assert (outputs[1] == os.devnull) == ("2>" in closed)
    assert (tmp_path / "own").read_text() == "the user's"


FORKS = """
import os, threading, time
from trainloop.errors import WorkerFailedError
from trainloop._launch import launch

def fails(stop):
    raise ValueError("on purpose")

ended = threading.Event()
pids = []

def fork_again_and_again():
    while not ended.wait(0.1):
        if (pid := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        pids.append(pid)

if __name__ == "__main__":
    thread = threading.Thread(target=fork_again_and_again)
    thread.start()
    try:
        launch(fails, ranks_per_node=1)
    except WorkerFailedError as error:
        assert "on purpose" in str(error), error
    ended.set()
    thread.join()
    alive = [os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in pids]
    for pid in (pid for pid, lives in zip(pids, alive) if lives):
        os.kill(pid, 9)
    print(len(pids) > 5, all(alive))
"""


@pytest.mark.long
def test_forks_that_another_thread_makes_while_ranks_start_live_on(tmp_path: Path) -> None:
    done = run_script(tmp_path, FORKS)
    assert done.stdout.splitlines()[-1:] == ["True True"], done.stderr


SLOW_SERVER = """
import sys, threading, time
from trainloop._processes import fork_server as processes

if __name__ == "__main__":
    main = sys.modules["__main__"]
    started = []
    starting = threading.Thread(target=lambda: started.extend(processes.from_server([(print, ("here",))], ["slow"])))
    starting.start()
    begin, seen = time.monotonic(), []
    while starting.is_alive():
        with processes._process_lock:
            seen.append((time.monotonic(), hasattr(main, "__file__")))
        time.sleep(0.001)
    waits = [after[0] - before[0] for before, after in zip(seen, seen[1:])]
    waited = time.monotonic() - begin
    for process in started:
        process.join()  # first, so that two processes do not write at once
    print(waited > 3, max(waits) < 1, all(has_file for _, has_file in seen))
"""


@pytest.mark.long
def test_another_thread_may_start_processes_while_the_server_imports(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3)\n")
    done = run_script(tmp_path, SLOW_SERVER)
    assert done.stdout.splitlines() == ["here", "True True True"], done.stderr


REFUSALS = """
import os, signal, sys, time
from multiprocessing import forkserver
from trainloop._processes import fork_server as processes

asked = []
connect = forkserver.connect_to_new_process

def counted(fds):
    asked.append(1)
    return connect(fds)

def outcome():
    asked.clear()
    try:
        (process,) = processes.from_server([(time.sleep, (1000,))], ["math"])
    except processes.NoServerError as error:
        return str(error), len(asked)
    parent = int(open(f"/proc/{process.pid}/stat").read().split()[3])
    process.kill()
    process.join()
    return parent, len(asked) > 0

if __name__ == "__main__":
    forkserver.connect_to_new_process = counted
    server, _ = outcome()
    os.environ["KMP_DUPLICATE_LIB_OK"] = "True"  # as scikit-learn does
    assert outcome() == (server, True)
    os.environ["TORCH_LOGS"] = "+dynamo"
    text = "these settings changed since the server started: TORCH_LOGS"
    for _ in range(2):
        refused = outcome()
        assert (refused[0], refused[1] > 0) == (text, True), refused
    del os.environ["TORCH_LOGS"]
    assert outcome() == (server, True)
    os.environ["TORCH_LOGS"] = "+dynamo"
    assert outcome()[0] == text
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    other, _ = outcome()  # a new one has the variable
    assert isinstance(other, int) and other != server, other
    print("done")
"""


def test_a_server_refuses_for_as_long_as_it_and_the_state_are_the_same(tmp_path: Path) -> None:
    done = run_script(tmp_path, REFUSALS)
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr
    assert not done.stderr
