"""What trackers of other services get from a run that was struck: none is missing, and what comes twice is the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from kit.loops import cpu_loop
from kit.survival import Strikes, rows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTBasicModel
from trainloop.callbacks import MLflowTracking, WandBTracking

# They write down what they are told, in whichever process: as the services' own libraries, which tests don't have.
WANDB = """
    import json, uuid
    from types import SimpleNamespace

    def told(*what):
        with open("TOLD", "a") as file:
            print(json.dumps(what), file=file)

    def init(**arguments):
        id = arguments.get("id") or uuid.uuid4().hex
        told("wandb", "begins", id, bool(arguments.get("id")))
        return SimpleNamespace(
            id=id, log=lambda values: told("wandb", "gets", id, values.pop("global_step"), values),
            define_metric=lambda *args, **kwargs: None, finish=lambda exit_code: told("wandb", "ends", id, exit_code),
        )
"""
MLFLOW = """
    import uuid
    from types import SimpleNamespace
    from wandb import told
    from mlflow import entities

    class MlflowClient:
        def __init__(self, tracking_uri=None):
            pass

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="0")

        def create_run(self, experiment_id, **arguments):
            id = uuid.uuid4().hex
            told("mlflow", "begins", id, False)
            return SimpleNamespace(info=SimpleNamespace(run_id=id))

        def update_run(self, id, status):
            told("mlflow", "begins", id, True)

        def log_batch(self, id, metrics):
            for metric in metrics:
                told("mlflow", "gets", id, metric.step, {metric.key: metric.value})

        def set_terminated(self, id, status):
            told("mlflow", "ends", id, status)
"""
ENTITIES = """
    class Metric:
        def __init__(self, key, value, timestamp, step):
            self.key, self.value, self.step = key, value, step
"""


class Logs(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def get_loss(self, batch_data: list[torch.Tensor], criterion: nn.Module, device: torch.device) -> torch.Tensor:
        loss: torch.Tensor = super().get_loss(batch_data, criterion, device)
        self.log("twice", 2 * loss.detach(), on_step=True, on_epoch=True)
        return loss


@pytest.mark.long
def test_trackers_of_a_run_that_was_struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a checkpoint nothing had been sent; after an epoch's end its values and last steps had, and go again."""
    libraries, said = tmp_path / "libraries", tmp_path / "said"
    (libraries / "mlflow").mkdir(parents=True)
    for name, text in [("wandb.py", WANDB), ("mlflow/__init__.py", MLFLOW), ("mlflow/entities.py", ENTITIES)]:
        lines = (line.removeprefix("    ") for line in text.replace("TOLD", str(said)).splitlines())
        (libraries / name).write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(libraries))
    torch.manual_seed(0)
    model = Logs()
    tl = cpu_loop(model, DataLoader(TensorDataset(*rows()), 12, shuffle=True), seed=3)
    strikes = Strikes(str(tmp_path), [(0, "on_batch_end", 5, "SIGKILL"), (0, "on_epoch_begin", 8, "SIGKILL")])
    trackers = [WandBTracking(batch_log_frequency=1), MLflowTracking(log_every_n_steps=1)]
    tl.fit(num_epochs=2, callbacks=[strikes, *trackers], max_restarts=2, restart_every_steps=3)
    assert [(restart.step, restart.steps_repeated) for restart in tl.restarts] == [(3, 1), (6, 2)]

    told = [json.loads(line) for line in said.read_text().splitlines()]
    for service in ("wandb", "mlflow"):
        mine = [rest for name, *rest in told if name == service]
        assert len({id for _, id, *_ in mine}) == 1  # one run there
        assert [rest[0] for what, _, *rest in mine if what == "begins"] == [False, True, True]
        assert mine[-1][0] == "ends"
        sent = [(step, key, value) for what, _, *rest in mine if what == "gets" for step, key, value in each(*rest)]
        steps = Counter(step for step, key, _ in sent if key == "twice")
        assert sorted(steps) == list(range(1, 17))
        assert {step for step, times in steps.items() if times == 2} == {7, 8}  # and those of the epoch's end
        assert max(steps.values()) == 2
        assert [step for step, key, _ in sent if key == "epoch/twice"] == [8, 8, 16]
        values = {(step, key): value for step, key, value in sent}
        assert all(values[step, key] == value for step, key, value in sent)  # the second time as the first


def each(step: int, values: dict[str, float]) -> list[tuple[int, str, float]]:
    return [(step, key, value) for key, value in values.items() if key != "epoch"]
