"""What follows a fit that was finished already, such as another fit, is what follows the training itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.callbacks import ModelCheckpoint
from trainloop.distributed import gather_object

ROWS = 23


class Noisy(TTBasicModel):
    """Draws noise from its own generator, and dropout from torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.dropout = nn.Dropout(0.3)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.dropout(x))

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Tensor:
        x, y = batch_data
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return criterion(self(x + 0.1 * noise), y)


class OfEachRank(AbstractCallback):
    """Counts batches, and keeps the count in the state of each rank."""

    def __init__(self) -> None:
        super().__init__("of each rank")
        self.count = 0

    def on_batch_end(self) -> None:
        self.count += 1

    def rank_state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def two_fits(mode: str, seed: int | None, order: str, folder: Path) -> Any:
    """Return the weights after each of two fits; the first resumes from the newest checkpoint, if there is one."""
    torch.manual_seed(11)
    model = Noisy()
    rows = TensorDataset(torch.randn(ROWS, 4, dtype=torch.float64), torch.arange(ROWS) % 3)

    def drawn(key: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(key)
        sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(ROWS)], ROWS, generator=generator)
        return DataLoader(rows, 4, sampler=sampler)

    loaders = {
        "shuffled": lambda: DataLoader(rows, 4, shuffle=True),
        "with a generator": lambda: DataLoader(rows, 4, shuffle=True, generator=torch.Generator().manual_seed(7)),
        "drawn": lambda: drawn(7),
    }
    tl = TrainLoop(
        *(model, loaders[order](), drawn(8), None, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()),
        gpu_mode=mode,
        accelerator="cpu",
        devices=1 if mode == "single" else 2,
        seed=seed,
        progress_bar=False,
    )
    counts, found = OfEachRank(), []
    tl.fit(num_epochs=2, callbacks=[counts, ModelCheckpoint(folder)], resume_from="last")
    found.append((model.layer.weight.tolist(), counts.count, float(tl.last_loss)))
    found.append(tl.predict_on_validation_set()[1].tolist())
    tl.fit(num_epochs=2, callbacks=[counts])
    return [*found, (model.layer.weight.tolist(), counts.count, tl.history.to_dict())]


class FromItsRank(OfEachRank):
    """Counts from a number of its own on each rank, and notes the counts of all ranks."""

    def __init__(self, *, resets: bool = False) -> None:
        super().__init__()
        self.resets, self.seen = resets, []

    def on_train_begin(self) -> None:
        if self.resets or not self.count:
            self.count = 100 * (1 + self.train_loop_obj.rank)

    def on_train_end(self) -> None:
        self.seen.append(gather_object(self.count))


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_another_fit_continues_the_states_of_each_rank(mode: str) -> None:
    rows = TensorDataset(torch.randn(32, 4, dtype=torch.float64), torch.arange(32) % 3)
    model = Noisy()
    tl = TrainLoop(
        *(model, DataLoader(rows, 4), None, None, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()),
        gpu_mode=mode,
        accelerator="cpu",
        devices=2,
        progress_bar=False,
    )
    counts, resetting = FromItsRank(), FromItsRank(resets=True)
    for length in ({"num_iterations": 3}, {"num_iterations": 2}, {"num_epochs": 1}):  # the second ends in another epoch
        tl.fit(**length, callbacks=[counts, resetting])
    assert counts.seen == [[103, 203], [105, 205], [109, 209]]
    assert resetting.seen == [[103, 203], [102, 202], [104, 204]]
    counts.count = 0  # by the user
    tl.fit(num_epochs=1, callbacks=[counts, FromItsRank()])
    assert counts.seen[-1] == [104, 204]


@pytest.mark.long(every=5)
@pytest.mark.parametrize("order", ["shuffled", "with a generator", "drawn"])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("mode", ["single", "dp", pytest.param("ddp", marks=pytest.mark.long)])
def test_another_fit_continues_as_after_the_training(tmp_path: Path, mode: str, order: str, seed: int | None) -> None:
    straight = two_fits(mode, seed, order, tmp_path)
    assert two_fits(mode, seed, order, tmp_path) == straight
