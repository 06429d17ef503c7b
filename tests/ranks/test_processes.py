"""Processes of callers that have few descriptors, threads that start others, and libraries that set variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainloop import processes


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
from trainloop.launch import launch

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
from trainloop.launch import launch

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
