"""What a script does after ``fit``: in one process, in ``ddp`` started here and on all ranks of a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
    import logging
    import json, sys
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from trainloop import TTBasicModel
    from trainloop.callbacks import EarlyStopping, ModelCheckpoint, TensorBoard
    from trainloop.train_loop import TrainLoop, TrainLoopCheckpointEndSave

    class Net(TTBasicModel):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            return self.fc(x)

    def accuracy(y_pred, y_true, metadata):
        return float((y_pred.argmax(1) == y_true).double().mean())

    def plain(value):
        if isinstance(value, torch.Tensor):
            return [list(value.shape), round(value.double().sum().item(), 9)]
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return round(value, 9) if isinstance(value, float) else value

    def loop_of(kind, *args, **kwargs):
        torch.manual_seed(0)
        model = Net()
        ranks = 1 if mode == "single" else 2
        train, val = (DataLoader(data, 12 // ranks, shuffle=True), DataLoader(data, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return kind(model, train, val, None, optimizer, nn.CrossEntropyLoss(), *args, gpu_mode=mode, devices=ranks,
                    accelerator="cpu", seed=3, progress_bar=False, **kwargs)

    def main():
        found = {}

        def note(name, value):
            found[name] = plain(value)

        def loop_after(name, tl):
            note(name, [tl.epoch, tl.global_step, tl.total_iteration_idx, tl.early_stop, tl.ends, tl.history.to_dict()])
            note(name + ": weights", tl.model.state_dict())
            note(name + ": optimizer", tl.optimizer.state_dict()["state"])

        # Nothing improves by so much, so that training ends early.
        tl, keeper = loop_of(TrainLoop), ModelCheckpoint("kept", monitor="val_loss", keep=5)
        stopping, board = EarlyStopping("val_loss", min_delta=100, patience=1), TensorBoard()
        tl.fit(num_epochs=4, callbacks=[keeper, stopping, board])
        loop_after("stopped", tl)
        note("stopping", [stopping.best, stopping.best_epoch, stopping.stopped_epoch])
        note("paths", [Path(path).name for path in (keeper.best_path, keeper.last_path)])
        note("best", keeper.best_value)
        places.append(board.log_dir)
        note("loaded", keeper.load_best()["place"]["epoch"])
        note("loaded: weights", tl.model.state_dict())
        note("predictions", tl.predict_on_validation_set())
        note("loss", tl.evaluate_loss_on_validation_set())
        if tl.is_main_process():
            torch.save(tl.model.state_dict(), "saved.pt")

        # Several fits in a row, each from the disk; after the last nothing is left to do.
        for epochs in (1, 3, 3):
            tl, keeper = loop_of(TrainLoop), ModelCheckpoint("again")
            tl.fit(num_epochs=epochs, callbacks=[keeper], resume_from="last")
            loop_after(f"{epochs} epochs", tl)
            note(f"{epochs} epochs: path", Path(keeper.last_path).name)

        for epochs in (1, 2, 2):
            tl = loop_of(TrainLoopCheckpointEndSave, "project", "experiment", "results",
                         val_result_package={"accuracy": accuracy})
            tl.fit(num_epochs=epochs, resume_from="last")
            loop_after(f"tracked, {epochs} epochs", tl)
            note("results", tl.results)
            places.append(tl.experiment_timestamp)
        rank = tl.process.rank
        Path(f"found-{rank}.json").write_text(json.dumps([found, places]))

    mode = sys.argv[1]
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")  # events are logged
    rows = torch.randn(48, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data, places = TensorDataset(rows, torch.arange(48) % 3), []
    torch.set_default_dtype(torch.float64)
    if __name__ == "__main__":
        main()
"""


@pytest.mark.long
def test_a_script_has_the_same_after_fit_in_every_mode_and_on_all_ranks(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ways = {
        "single": ["script.py", "single"],
        "here": ["script.py", "ddp"],
        "torchrun": [*torchrun, "script.py", "ddp"],
    }
    found: dict[str, Any] = {}
    for way, arguments in ways.items():
        folder = tmp_path / way
        folder.mkdir()
        (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        for path in sorted(folder.glob("found-*.json")):
            found[f"{way}, {path.stem}"] = json.loads(path.read_text())
        assert done.stdout.count("Nothing left to do: ") == 2
    expected, _ = found["single, found-0"]
    assert (expected["stopped"][3], [end[:2] for end in expected["stopped"][4]]) == (True, [["EarlyStopping"] * 2])
    assert set(found) == {"single, found-0", "here, found-0", "torchrun, found-0", "torchrun, found-1"}
    for way, (values, _) in found.items():
        assert {name: values[name] for name in expected if values[name] != expected[name]} == {}, way
    # Folders are named by the time, one for all ranks and resumed runs.
    assert found["torchrun, found-0"][1] == found["torchrun, found-1"][1]
    assert len(set(found["torchrun, found-0"][1])) == 2
