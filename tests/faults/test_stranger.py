"""Another user of the host against a run: connections in the place of a rank, pickles for answers. Needs root.

Before messages bore a key, this stranger's code ran as the run's owner within a few tries (issue 13, point 10).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import trainloop

ROOT = str(Path(trainloop.__file__).parents[1])

# Ranks tell each other where they listen a moment after they began to: else a stranger had to be quicker than they are.
SLOW_STORE = """
import time
import torch.distributed as dist

class SlowStore(dist.Store):
    def __init__(self, *args):
        super().__init__()
        self.store = FileStore(*args)

    def set(self, key, value):
        time.sleep(1)
        self.store.set(key, value)

    def forwarded(name):
        return lambda self, *args: getattr(self.store, name)(*args)

    add, check, compare_set, get, wait = map(forwarded, ("add", "check", "compare_set", "get", "wait"))

if dist.FileStore.__name__ == "FileStore":
    FileStore, dist.FileStore = dist.FileStore, SlowStore
"""

# A group that the user made: nobody has looked who is connected to it.
OWN_GROUP = (
    SLOW_STORE
    + """
import sys
from datetime import timedelta
from trainloop import distributed as td
store = dist.FileStore(sys.argv[1] + "/store", 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2, timeout=timedelta(seconds=10))
for _ in range(3):
    assert td.broadcast_object({"a": 1}) == {"a": 1}
    assert td.gather_object([1, 2]) == [[1, 2], [1, 2]]
"""
)

# Its ranks have the slow store as well: the interpreter that they are forked from imports it (sitecustomize.py).
LAUNCHED = (
    SLOW_STORE
    + """
from trainloop import distributed as td
from trainloop._launch import launch

def work(stop):
    for _ in range(3):
        assert td.broadcast_object({"a": 1}) == {"a": 1}
        assert td.gather_object([1, 2]) == [[1, 2], [1, 2]]

if __name__ == "__main__":
    launch(work, ranks_per_node=2, backend="gloo", timeout_s=10)
"""
)


# The same with torch's own object collectives, which unpickle what comes: shows that the stranger can do what it tries.
TORCHS_OWN = (
    OWN_GROUP.partition("for _ in range(3)")[0]
    + """
dist.broadcast_object_list([{"a": 1}], src=0)
dist.all_gather_object([None, None], [1, 2])
"""
)

TOGETHER = 2  # most of a try is waiting


class Outcome(NamedTuple):
    """Of one try."""

    code_ran: bool
    asked: int
    """How often a rank asked the stranger for something."""
    exitcodes: list[int]
    said: str
    """By the ranks, in all."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stranger-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        (Path(name) / "for-all").mkdir()
        (Path(name) / "for-all").chmod(0o777)
        yield Path(name)


@pytest.fixture
def networks() -> Iterator[list[list[str]]]:
    """How commands begin that run in a network of their own: elsewhere the stranger would disturb all other runs."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making a network namespace needs root and iproute2")
    names = [f"trainloop-stranger-{os.getpid()}-{i}" for i in range(TOGETHER)]
    made: list[str] = []
    try:
        for name in names:
            done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"a network namespace can't be made here: {done.stderr.strip()}")
            made.append(name)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=True)


def attack(script: str, folder: Path, number: int, inside: list[str], prefix: str = "00", most: int = 1000) -> Outcome:
    """One try; ``prefix``: what the stranger's pickles begin with, in hexadecimal; ``most``: listeners it looks for."""
    run = folder / str(number)
    run.mkdir()
    (run / "script.py").write_text(script)
    if script is LAUNCHED:
        (run / "sitecustomize.py").write_text(SLOW_STORE)
    trap = folder / "for-all" / f"trap-{number}"
    stranger_py = str(Path(__file__).parent / "stranger.py")
    command = [*inside, sys.executable, stranger_py, str(trap), "150", "65534", prefix, str(most)]
    stranger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "watches\n"
    environ = {
        **os.environ,
        "PYTHONPATH": f"{run}{os.pathsep}{ROOT}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [*inside, sys.executable, str(run / "script.py"), str(run), str(rank)],
            stderr=subprocess.PIPE, text=True, env=environ,
        )
        for rank in range(1 if script is LAUNCHED else 2)
    ]  # fmt: skip
    try:
        said = "".join(process.communicate()[1] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        stranger.send_signal(signal.SIGTERM)
        told, _ = stranger.communicate(timeout=30)
    return Outcome(trap.exists(), int(told.split()[1]), [process.returncode for process in processes], said)


def attacks(script: str, tries: int, folder: Path, networks: list[list[str]], prefix: str = "00") -> list[Outcome]:
    """So many tries, as many at a time as there are networks."""

    def in_network(i: int) -> list[Outcome]:
        return [attack(script, folder, number, networks[i], prefix) for number in range(i, tries, TOGETHER)]

    with ThreadPoolExecutor(TOGETHER) as pool:
        return [outcome for outcomes in pool.map(in_network, range(TOGETHER)) for outcome in outcomes]


@pytest.mark.hosts
@pytest.mark.parametrize(
    "tries", [2, *(pytest.param(5, marks=pytest.mark.slow, id=f"5, round {i}") for i in range(10))]
)
@pytest.mark.parametrize("script", [OWN_GROUP, LAUNCHED], ids=["own group", "launched"])
def test_a_stranger_runs_no_code(script: str, tries: int, folder: Path, networks: list[list[str]]) -> None:
    outcomes = attacks(script, tries, folder, networks)
    assert len(outcomes) == tries
    assert not any(outcome.code_ran for outcome in outcomes)
    for outcome in outcomes:
        assert all(outcome.exitcodes), outcome.said  # it stood in a rank's place each time, and that ended the run
        if script is LAUNCHED:
            assert "user nobody (uid 65534) connected to this run's process group" in outcome.said, outcome.said
            assert outcome.said.count("Restarting the ranks (") == 5
        else:
            assert outcome.asked


@pytest.mark.hosts
def test_one_scan_of_ports_does_not_end_a_run(folder: Path, networks: list[list[str]]) -> None:
    # The listeners of two ranks.
    outcome = attack(LAUNCHED, folder, 0, networks[0], most=2)
    assert outcome.exitcodes == [0], outcome.said
    assert "Restarting the ranks (1 of 5, after 0 s): user nobody (uid 65534) connected to this run" in outcome.said
    assert "(seen by the run's process " in outcome.said


@pytest.mark.hosts
@pytest.mark.slow
def test_where_pickles_are_believed_its_code_runs(folder: Path, networks: list[list[str]]) -> None:
    # Whether it is asked for a pickle depends on whose place it took, which the numbers of ports decide.
    assert any(attack(TORCHS_OWN, folder, number, networks[0], prefix="").code_ran for number in range(8))
