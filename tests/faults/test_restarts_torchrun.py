"""Where a launcher starts ranks again, ``resume_from='last'`` goes on from the disk."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import same
from kit.places import IMPORTS

SCRIPT = """
    import os, signal, sys
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from kit.survival import Rows
    from trainloop import AbstractCallback, TrainLoop, TTBasicModel
    from trainloop.callbacks import ModelCheckpoint

    class Net(TTBasicModel):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

        def forward(self, x):
            return self.layers(x)

    class Kill(AbstractCallback):
        def on_batch_end(self):
            loop = self.train_loop_obj
            done = Path("done-" + sys.argv[1])
            if [loop.rank, loop.global_step] == [1, 5] and sys.argv[1] != "undisturbed" and not done.exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL if struck else signal.SIGUSR1)

    struck = sys.argv[1] == "struck"
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tl = TrainLoop(model, DataLoader(Rows(), 6, shuffle=True), None, None, optimizer, nn.CrossEntropyLoss(),
                   gpu_mode="ddp", accelerator="cpu", devices=2, seed=3, progress_bar=False)
    keeper = ModelCheckpoint("checkpoints-" + sys.argv[1], every_n_steps=3)
    tl.fit(num_epochs=2, callbacks=[Kill(), keeper], resume_from="last", max_restarts=int(struck))
    if tl.is_main_process():
        torch.save([model.state_dict(), optimizer.state_dict(), tl.history.to_dict()], sys.argv[1] + ".pt")
"""


ENVIRONMENT = {**os.environ, "PYTHONPATH": IMPORTS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.slow
def test_torchrun_starts_ranks_again_and_they_go_on_from_the_disk(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(SCRIPT))
    said = {}
    for name in ("undisturbed", "struck"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["--max-restarts=1", "job.py", name]
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        said[name] = done.stderr
    assert (tmp_path / "done-struck").exists()
    assert "max_restarts=1 has no effect here" in said["struck"]
    assert "has no effect here" not in said["undisturbed"]
    assert same(of(tmp_path, "struck"), of(tmp_path, "undisturbed"))

    # Slurm's order of things: USR1 before the end of the time, a checkpoint, the end, the same job once more.
    for codes in ([138, 138], [0, 0]):
        job = {**ENVIRONMENT, "MASTER_PORT": str(unused_port())}
        ranks = [
            subprocess.Popen(
                [sys.executable, "job.py", "requeued"],
                cwd=tmp_path,
                env={**job, **slurm(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == codes, errors
    assert same(of(tmp_path, "requeued"), of(tmp_path, "undisturbed"))


def of(folder: Path, name: str) -> Any:
    return torch.load(folder / f"{name}.pt", weights_only=True)


def unused_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def slurm(rank: int) -> dict[str, str]:
    """The variables that srun sets for a task of two on one node."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_TASKS_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }


FEWER = """
    import os, signal
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from trainloop import AbstractCallback, TrainLoop, TTBasicModel
    from trainloop.callbacks import ModelCheckpoint

    class Net(TTBasicModel):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

        def forward(self, x):
            return self.layers(x)

    class LosesItsHost(AbstractCallback):
        def on_batch_end(self):
            if "LOST" in os.environ and self.train_loop_obj.global_step == 5:
                os.kill(os.getppid(), signal.SIGKILL)  # torchrun
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = Net().double()
    x = torch.randn(92, 6, dtype=torch.double)
    data = TensorDataset(x, (x @ torch.randn(6, 3, dtype=torch.double)).argmax(1))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    Path(f"{ranks}-ranks").touch()
    loader = DataLoader(data, 12 // ranks, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tl = TrainLoop(model, loader, None, None, optimizer, nn.CrossEntropyLoss(),
                   gpu_mode="ddp" if ranks > 1 or "RANK" in os.environ else "single", accelerator="cpu", devices=1,
                   seed=3, progress_bar=False)
    keeper = ModelCheckpoint(f"checkpoints-{os.environ['NAME']}", every_n_steps=3)
    tl.fit(num_epochs=2, callbacks=[LosesItsHost(), keeper], resume_from="last")
    if tl.is_main_process():
        torch.save([model.state_dict(), tl.history.to_dict()["loss"]], os.environ["NAME"] + ".pt")
"""


@pytest.mark.slow
def test_torchrun_goes_on_with_fewer_hosts(tmp_path: Path) -> None:
    """Two agents stand for two hosts; one is lost and does not come again."""
    (tmp_path / "job.py").write_text(textwrap.dedent(FEWER))
    port = unused_port()
    agents = []
    for host in range(2):
        rendezvous = f"last_call_timeout=20,join_timeout=120,is_host={1 - host}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
        command += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=few"]
        command += [f"--rdzv-conf={rendezvous}", "--local-addr=127.0.0.1", "job.py"]
        with open(tmp_path / f"said-{host}", "w") as said:
            environment = {**ENVIRONMENT, "NAME": "fewer", **({"LOST": "1"} if host else {})}
            agents.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said))
    try:
        codes = [agent.wait(300) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert codes == [0, -9], (tmp_path / "said-0").read_text()[-3000:]
    assert (tmp_path / "2-ranks").exists()
    assert (tmp_path / "1-ranks").exists()
    subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, env={**ENVIRONMENT, "NAME": "one"}, check=True, timeout=200
    )
    torch.testing.assert_close(of(tmp_path, "fewer"), of(tmp_path, "one"), rtol=1e-9, atol=1e-9)
