"""Rows of predictions over ranks: in the calling process, on rank 0 or on all, at once and as a stream."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainloop import AbstractCallback, TTModel, distributed

SAMPLES = 101


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i)]), i


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, _ = batch_data
        return self.fc(x.to(device)).square().mean()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, index = batch_data
        self.log("seen", x.mean())
        return 3 * x, [str(i) for i in index.tolist()], {"rank": [distributed.get_rank()] * len(x)}


class Predicts(AbstractCallback):
    """What each rank gets of each way to predict inside ``fit``."""

    def __init__(self) -> None:
        super().__init__("predicts")
        self.found: Any = None

    def on_epoch_end(self) -> None:
        tl = self.train_loop_obj
        facts: dict[str, Any] = {}
        for name, arguments in {
            "default": {},
            "main": {"rows_to": "main"},
            "stream": {"stream": True},
            "stream to main": {"stream": True, "rows_to": "main"},
        }.items():
            rows: Any = tl.predict_with_model(tl.test_loader, dataset_info={"type": name}, **arguments)  # type: ignore[arg-type]
            facts[name] = [y for _, y_true, _ in rows for y in y_true] if "stream" in name else rows[1]
        # One that is given up after its first batch
        for _ in tl.predict_with_model(tl.test_loader, stream=True):
            break
        distributed.barrier()  # rank 0 removes the folder when all have its files open
        facts["left"] = os.listdir(tempfile.gettempdir())
        facts["logged"] = {name: tl.history[f"{name}_seen"] for name in ("default", "main", "stream")}
        self.found = distributed.gather_to(facts)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_go_where_they_are_needed(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    model, predicts = Net(), Predicts()
    tl = cpu_loop(
        model,
        DataLoader(Numbers(), 16),
        torch.optim.SGD(model.parameters(), lr=1e-6),
        None,
        test_loader=DataLoader(Numbers(), 4, shuffle=True),
        gpu_mode="ddp",
        devices=ranks,
        end_auto_eval=False,
    )
    names = [str(i) for i in range(SAMPLES)]
    tl.fit(num_epochs=1, callbacks=[predicts])
    for rank, facts in enumerate(predicts.found):
        assert facts["default"] == facts["stream"] == names
        assert facts["main"] == (None if rank else names)
        assert facts["stream to main"] == ([] if rank else names)
        assert not [name for name in facts["left"] if name.startswith("trainloop-rows")]
        assert set(map(tuple, facts["logged"].values())) == {(50.0,)}
    # Outside of fit: in this process, from all ranks.
    y_pred, y_true, metadata = tl.predict_with_model(tl.test_loader)
    assert y_true == names
    assert y_pred.squeeze().tolist() == [3.0 * i for i in range(SAMPLES)]
    assert set(metadata["rank"]) == set(range(ranks))
    streamed = list(tl.predict_with_model(tl.test_loader, stream=True))
    assert [y for _, part, _ in streamed for y in part] == names
    assert torch.equal(torch.cat([part for part, _, _ in streamed]), y_pred)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("trainloop-rows")]
