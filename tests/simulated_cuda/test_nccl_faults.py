"""A rank is lost, or hangs, while others wait for it in a collective of NCCL: who is named, how soon, what ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.errors import WorkerFailedError

pytestmark = pytest.mark.gpu


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Strikes(AbstractCallback):
    """Rank 1 is struck in its fourth step, once. A file says whether rank 0, which waits for it, unwinds."""

    def __init__(self, how: str, folder: Path) -> None:
        super().__init__("strikes")
        self.how, self.folder = how, folder

    def on_batch_begin(self) -> None:
        loop = self.train_loop_obj
        struck = self.folder / "struck"
        if loop.total_iteration_idx != 3 or loop.is_main_process() or struck.exists():
            return
        torch.cuda.synchronize()  # what it has queued is not of what is lost
        struck.write_text(str(time.time()))
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raises":
            raise LookupError("struck")
        time.sleep(1000)

    def on_exception(self, exception: BaseException) -> None:
        if self.train_loop_obj.is_main_process():
            (self.folder / "unwound").write_text(type(exception).__name__)


def make_loop(**options: Any) -> TrainLoop:
    x, y = make_data().tensors
    model = Net()
    return TrainLoop(
        model,
        DataLoader(TensorDataset(x.double(), y), 8),
        optimizer=optim.AdamW(model.parameters(), 1e-2),
        criterion=nn.CrossEntropyLoss(),
        **{"gpu_mode": "ddp", "accelerator": "cuda", "devices": 2, "progress_bar": False, "seed": 1, **options},
    )


@pytest.mark.parametrize(
    "how, detected, timeout, message",
    [
        pytest.param("killed", False, 600, "rank 1 of 2 was killed by signal SIGKILL; rank 0 was ended", id="killed"),
        pytest.param("killed", True, 600, "rank 1 of 2 was killed by signal SIGKILL; rank 0 was ended", id="detected"),
        pytest.param("raises", False, 600, "rank 1 of 2 raised LookupError: struck", id="raises"),
        pytest.param("hangs", False, 6, "rank 1 of 2 hangs: rank 0 waited 6 s for it", id="hangs"),
    ],
)
def test_the_rank_that_is_lost_is_named_and_all_end(
    how: str, detected: bool, timeout: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``detected``: NCCL notices by itself, as it does between hosts, and its watchdog ends the rank that waits."""
    if detected:
        monkeypatch.setenv("FAKENCCL_DETECTS_DEATH", "1")
    with pytest.raises(WorkerFailedError, match=message) as error:
        make_loop(timeout=timeout).fit(num_epochs=2, callbacks=[Strikes(how, tmp_path)])
    took = time.time() - float((tmp_path / "struck").read_text())
    assert error.value.rank == 1
    if how == "hangs":
        assert timeout < took < timeout + 10
        assert "time.sleep" in str(error.value) or "in on_batch_begin" in str(error.value)
    else:
        assert took < 10
    if not detected and how != "hangs":  # else its watchdog ends it at once
        assert (tmp_path / "unwound").read_text() == "RankTerminated"


@pytest.mark.parametrize("how", ["raises", "killed"])
@pytest.mark.parametrize("group", ["its own", "the script's"])
def test_a_rank_that_is_lost_ends_the_others_of_torchrun(how: str, group: str, tmp_path: Path) -> None:
    """torchrun kills them after 30 s, since its signal reaches no handler of a process that waits for NCCL."""
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([*command, how, group, str(tmp_path)], capture_output=True, text=True, env=environ)
    took = time.time() - float((tmp_path / "struck").read_text())
    assert done.returncode == 1, done.stderr
    assert took < 15, done.stderr
    assert (tmp_path / "unwound").read_text() == "RankTerminated"
    assert ("LookupError: struck" in done.stderr) == (how == "raises")


TORCHRUN = """
import os, pathlib, sys
import torch, torch.distributed as dist
from test_nccl_faults import Strikes, make_loop

how, group, folder = sys.argv[1:]
if group == "the script's":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
make_loop().fit(num_epochs=2, callbacks=[Strikes(how, pathlib.Path(folder))])
"""


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_run_survives_with_the_numbers_of_an_undisturbed_one(how: str, tmp_path: Path) -> None:
    undisturbed, struck = make_loop(), make_loop(timeout=6)
    undisturbed.fit(num_epochs=2)
    struck.fit(num_epochs=2, callbacks=[Strikes(how, tmp_path)], max_restarts=1, restart_every_steps=1)
    assert [restart.rank for restart in struck.restarts] == [1]
    torch.testing.assert_close(list(struck.model.parameters()), list(undisturbed.model.parameters()), rtol=0, atol=0)
    assert struck.history.to_dict() == undisturbed.history.to_dict()
    if how == "killed":
        assert struck.restarts[0].seconds < 10
