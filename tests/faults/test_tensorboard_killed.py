"""Event files of a run that was killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from kit.event_files import event_files, read
from kit.places import IMPORTS
from kit.small_loop import make_loop

from trainloop import AbstractCallback
from trainloop.callbacks import ModelCheckpoint, TensorBoard

KILLED = """
    import os, signal
    from test_tensorboard_killed import resumable
    from trainloop import AbstractCallback

    class Kill(AbstractCallback):
        def on_batch_end(self):
            if self.train_loop_obj.global_step == 10:
                os.kill(os.getpid(), signal.SIGKILL)

    resumable(Kill())
"""


def resumable(*callbacks: AbstractCallback) -> None:
    board, keeper = TensorBoard(log_every_n_steps=1), ModelCheckpoint("checkpoints", every_n_steps=4)
    make_loop(seed=0, shuffle=True).fit(num_epochs=3, callbacks=[board, keeper, *callbacks], resume_from="last")


@pytest.mark.long
def test_killed_and_resumed(folder: Path) -> None:
    """Killed between two checkpoints: the steps after the last one are done again, and are shown once."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([IMPORTS, str(Path(__file__).parent)])}
    command = [sys.executable, "-c", textwrap.dedent(KILLED)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    resumable()
    make_loop(seed=0, shuffle=True).fit(num_epochs=3, callbacks=[TensorBoard(folder / "whole", 1)])
    [logs] = (folder / "runs").iterdir()
    assert len(event_files(logs)) == 2
    assert read(logs) == read(folder / "whole")
