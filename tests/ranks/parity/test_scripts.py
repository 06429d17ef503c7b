"""One script, run in every way that a user runs scripts: all of them train, and agree in the weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from kit.programs import wait_until

SCRIPT = """
import json, sys, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from trainloop import TrainLoop, TTModel
from trainloop.callbacks import AbstractCallback

class Net(TTModel):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(x)

    def get_loss(self, batch_data, criterion, device):
        x, y = batch_data
        return criterion(self(x.to(device)), y.to(device))

    def get_predictions(self, batch_data, device):
        x, y = batch_data
        return self(x.to(device)).argmax(1), y, {}

class Points(Dataset):
    def __init__(self, transform):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(101, 8, generator=g)
        self.y = torch.randint(0, 3, (101,), generator=g)
        self.transform = transform

    def __len__(self):
        return 101

    def __getitem__(self, index):
        return self.transform(self.x[index]), self.y[index]

class Counts(AbstractCallback):
    def __init__(self):
        super().__init__("counts")
        self.steps = 0

    def on_batch_end(self):
        self.steps += 1

def main():
    scale = 2.0
    torch.manual_seed(1)
    model, counts = Net(), Counts()
    loader = DataLoader(Points(lambda x: scale * x), batch_size=8, shuffle=True, num_workers=WORKERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = TrainLoop(model, loader, None, loader, optimizer, nn.CrossEntropyLoss(), gpu_mode="ddp",
                     accelerator="cpu", devices=2, seed=3, progress_bar=False, end_auto_eval=False)
    assert loop.fit(num_epochs=EPOCHS, callbacks=[counts]) is model
    print(f"RESULT {json.dumps([counts.steps, model.fc.weight.flatten().tolist()])}\\n", end="", flush=True)
""".replace("WORKERS", "0").replace("EPOCHS", "2")
GUARDED = f"{SCRIPT}\nif __name__ == '__main__':\n    main()\n"


def results(output: str) -> list[object]:
    """What the processes of a run printed; two may share a line."""
    return [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT")]


def run(*arguments: str, folder: Path, stdin: str | None = None, **environment: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return results(done.stdout)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> object:
    """What ``python script.py`` printed: steps that rank 0's callback counted, and weights."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(GUARDED)
    (result,) = run("script.py", folder=folder)
    return result


WAYS: dict[str, tuple[list[str], str | None, int]] = {
    "standard input": (["-"], GUARDED, 1),
    "module": (["-m", "script"], None, 1),
    "command": (["-c", GUARDED], None, 1),
    "torchrun": (["-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"], None, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_a_script_trains_alike(way: str, expected: list[object], tmp_path: Path) -> None:
    arguments, stdin, processes = WAYS[way]
    (tmp_path / "script.py").write_text(GUARDED)
    assert expected[0] == 14  # batches of two epochs
    assert run(*arguments, folder=tmp_path, stdin=stdin) == [expected] * processes


@pytest.mark.long
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("order", ["os.chdir('repo'); import trained", "import trained; os.chdir('elsewhere')"])
def test_ranks_import_the_modules_of_a_program_that_changes_its_folder(
    order: str, method: str, expected: object, tmp_path: Path
) -> None:
    repo = tmp_path / "repo"
    for folder in (repo, repo / "elsewhere"):
        folder.mkdir()
    asks = "        from trained import Points\n        assert type(self) is Points\n        return self.transform("
    text = SCRIPT.replace("        return self.transform(", asks)
    assert text != SCRIPT
    (repo / "trained.py").write_text(text)
    started_in = tmp_path if "repo" in order else repo
    # As in a notebook, '' is in sys.path, and multiprocessing is imported before the folder changes.
    command = f"import os, torch.multiprocessing; {order}; trained.main()"
    assert run("-c", command, folder=started_in, TRAINLOOP_START_METHOD=method) == [expected]


@pytest.mark.slow
def test_tasks_of_slurm_train_alike(expected: object, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(GUARDED)
    tasks = []
    for rank in range(2):
        slurm = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        job = {"SLURM_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        tasks.append(
            subprocess.Popen(
                [sys.executable, "script.py"],
                cwd=tmp_path,
                env={**os.environ, **slurm, **job},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    assert [results(task.communicate()[0]) for task in tasks] == [[expected]] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_notebook_trains_alike_and_runs_again(
    expected: object, tmp_path: Path, may_leave: Callable[..., None]
) -> None:
    may_leave("[eventpoll]", "socket:[")  # of nbclient's event loop
    nbformat = pytest.importorskip("nbformat", reason="nbformat and nbclient are not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbformat and nbclient are not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in (SCRIPT, "main()", "main()")]
    nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell in notebook.cells[1:]:
        text = "".join(output.get("text", "") for output in cell.outputs)
        assert results(text) == [expected]


@pytest.mark.long
def test_workers_that_ranks_spawn_find_the_scripts_classes(expected: object, tmp_path: Path) -> None:
    text = GUARDED.replace("num_workers=0", "num_workers=1, multiprocessing_context='spawn', persistent_workers=True")
    # What spawned workers get is pickled by name, so a lambda won't do, here as in any PyTorch program.
    text = text.replace("lambda x: scale * x", "double").replace(
        "def main():", "def double(x):\n    return 2 * x\n\ndef main():"
    )
    (tmp_path / "script.py").write_text(text)
    assert run("script.py", folder=tmp_path) == [expected]


# -- ended from outside ------------------------------------------------------------------------------------------------


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of many epochs with DataLoader workers, at work."""
    script = GUARDED.replace("num_epochs=2", "num_epochs=100000").replace("num_workers=0", "num_workers=1")
    script = script.replace("self.steps += 1", "self.steps += 1; open('at-work', 'w').close()")
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until((tmp_path / "at-work").exists, process, seconds=100)
    yield process
    for pid in group_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def group_of(session: int) -> list[int]:
    """Processes of a session, but for multiprocessing's resource tracker, which ends by itself after them."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session and "resource_tracker" not in " ".join(psutil.Process(pid).cmdline()):
                found.append(pid)
        except (psutil.Error, OSError):
            continue
    return found


def check_that_all_end(session: int) -> None:
    wait_until(lambda: not group_of(session), seconds=10, pause_s=0.1)


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Its ranks, in their order: children of the fork server, or of the script if they are spawned."""
    children = [c for c in psutil.Process(process.pid).children() if "resource_tracker" not in " ".join(c.cmdline())]
    servers = [child for child in children if "forkserver" in " ".join(child.cmdline())]
    return sorted([c for s in servers for c in s.children()] or children, key=lambda child: child.pid)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_rank_ends_fit(training: subprocess.Popen[str], which: int) -> None:
    ranks_of(training)[which].kill()
    _, err = training.communicate(timeout=30)
    assert f"trainloop.errors.WorkerFailedError: rank {which} of 2 was killed by signal SIGKILL" in err, err
    check_that_all_end(training.pid)


@pytest.mark.slow
def test_ctrl_c_ends_with_one_traceback_and_no_process(training: subprocess.Popen[str]) -> None:
    os.killpg(training.pid, signal.SIGINT)
    _, err = training.communicate(timeout=30)
    assert "Interrupted: training stops after this step." in err
    assert err.count("Traceback") == 1, err
    assert err.rstrip().endswith("KeyboardInterrupt")
    check_that_all_end(training.pid)


@pytest.mark.slow
def test_sigterm_to_all_ends_in_order(training: subprocess.Popen[str]) -> None:
    os.killpg(training.pid, signal.SIGTERM)  # as Slurm does: to workers as well
    _, err = training.communicate(timeout=30)
    assert training.returncode == 143
    assert "Traceback" not in err, err
    check_that_all_end(training.pid)


@pytest.mark.slow
def test_a_killed_parent_leaves_nothing(training: subprocess.Popen[str]) -> None:
    before = set(os.listdir("/dev/shm"))
    training.kill()
    training.communicate(timeout=30)
    check_that_all_end(training.pid)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if str(training.pid) in name}
