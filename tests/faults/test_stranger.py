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
from pathlib import Path

import pytest

import trainloop

ROOT = str(Path(trainloop.__file__).parents[1])

# A group that the user made: nobody has looked who is connected to it.
OWN_GROUP = """
import sys
from datetime import timedelta
import torch.distributed as dist
from trainloop import distributed as td
store = dist.FileStore(sys.argv[1] + "/store", 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2, timeout=timedelta(seconds=10))
for _ in range(3):
    assert td.broadcast_object({"a": 1}) == {"a": 1}
    assert td.gather_object([1, 2]) == [[1, 2], [1, 2]]
"""

LAUNCHED = """
import sys
from trainloop import distributed as td
from trainloop.launch import launch

def work(stop):
    for _ in range(3):
        assert td.broadcast_object({"a": 1}) == {"a": 1}
        assert td.gather_object([1, 2]) == [[1, 2], [1, 2]]

if __name__ == "__main__":
    launch(work, ranks_per_node=2, backend="gloo", timeout_s=10)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stranger-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        (Path(name) / "for-all").mkdir()
        (Path(name) / "for-all").chmod(0o777)
        yield Path(name)


@pytest.fixture
def inside() -> Iterator[list[str]]:
    """How a command begins that runs in a network of its own: elsewhere the stranger would disturb all other runs."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making a network namespace needs root and iproute2")
    name = f"trainloop-stranger-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a network namespace can't be made here: {made.stderr.strip()}")
    command = ["ip", "netns", "exec", name]
    try:
        subprocess.run([*command, "ip", "link", "set", "lo", "up"], check=True)
        yield command
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def attack(script: str, ranks: int, folder: Path, number: int, inside: list[str]) -> tuple[bool, int, list[int], str]:
    """One try: whether code ran, what the stranger was asked, how the processes ended, what they said."""
    run = folder / str(number)
    run.mkdir()
    (run / "script.py").write_text(script)
    trap = folder / "for-all" / f"trap-{number}"
    command = [*inside, sys.executable, str(Path(__file__).parent / "stranger.py"), str(trap), "60", "65534"]
    stranger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "watches\n"
    environ = {**os.environ, "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*inside, sys.executable, str(run / "script.py"), str(run), str(rank)],
            stderr=subprocess.PIPE, text=True, env=environ,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = "".join(process.communicate(timeout=90)[1] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        stranger.send_signal(signal.SIGTERM)
        told, _ = stranger.communicate(timeout=30)
    return trap.exists(), int(told.split()[1]), [process.returncode for process in processes], said


@pytest.mark.hosts
@pytest.mark.parametrize("tries", [2, *(pytest.param(9, marks=pytest.mark.slow, id=f"9, round {i}") for i in range(3))])
@pytest.mark.parametrize(("script", "ranks"), [(OWN_GROUP, 2), (LAUNCHED, 1)], ids=["own group", "launched"])
def test_a_stranger_runs_no_code(script: str, ranks: int, tries: int, folder: Path, inside: list[str]) -> None:
    outcomes = [attack(script, ranks, folder, number, inside) for number in range(tries)]
    assert not any(ran for ran, *_ in outcomes)
    if tries > 2:
        assert any(asked for _, asked, *_ in outcomes), "the stranger never stood in a rank's place"
    for _, asked, codes, said in outcomes:
        if any(codes) and script is LAUNCHED and asked:
            assert "user nobody (uid 65534) connected to this run's process group" in said, said
