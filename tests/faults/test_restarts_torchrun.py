"""Where a launcher starts ranks again, ``resume_from='last'`` goes on from the disk."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from checkpoints import same
from places import IMPORTS

SCRIPT = """
    import os, signal, sys
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from survival import Rows
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
            if [loop.rank, loop.global_step] == [1, 5] and struck and not Path("done").exists():
                Path("done").touch()
                os.kill(os.getpid(), signal.SIGKILL)

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


@pytest.mark.slow
def test_torchrun_starts_ranks_again_and_they_go_on_from_the_disk(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": IMPORTS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    said = {}
    for name in ("undisturbed", "struck"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["--max-restarts=1", "job.py", name]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        said[name] = done.stderr
    assert (tmp_path / "done").exists()
    assert "max_restarts=1 has no effect here" in said["struck"]
    assert "has no effect here" not in said["undisturbed"]
    undisturbed, struck = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in said)
    assert same(struck, undisturbed)
