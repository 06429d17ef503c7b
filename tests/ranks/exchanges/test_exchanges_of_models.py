"""A model that calls ``torch.distributed`` itself, in a batch that some rank does not have: an error, not a wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop, TTModel
from trainloop.errors import WorkerFailedError
from trainloop.train_loop.run.idle import refuse_exchanges


class Normalised(TTModel):
    """Divides its loss by the mean number of rows over ranks, as detectors divide by the number of boxes."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(3, 2), where
        self.norm: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))

    def exchanged(self, value: float, where: str) -> Tensor:
        count = torch.tensor(value)
        if where == self.where:
            dist.all_reduce(count)
            count /= dist.get_world_size()
        return count

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        rows = self.exchanged(float(len(batch_data[0])), "training" if self.training else "loss")
        return (self(batch_data[0]) - batch_data[1]).square().sum() / rows

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        self.exchanged(1.0, "predictions")
        return self(batch_data[0]), batch_data[1], {}


def loop_of(where: str, rows: int, ranks: int) -> TrainLoop[Normalised]:
    model, generator = Normalised(where), torch.Generator().manual_seed(0)
    if where == "nowhere":
        model.norm = nn.BatchNorm1d(2)
    data = TensorDataset(torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator))
    return cpu_loop(
        model,
        DataLoader(data, 4),
        criterion=None,
        validation_loader=DataLoader(data, 6),
        gpu_mode="ddp",
        devices=ranks,
        sync_batchnorm=True,
        timeout=60,
    )


refuses = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
    reason="in this version of torch, a mode that sees exchanges has errors",
)


@refuses
@pytest.mark.parametrize(
    ("where", "rows", "ranks", "missing"),
    [
        ("training", 9, 2, "1"),
        pytest.param("training", 14, 3, "2", marks=pytest.mark.long),
        pytest.param("loss", 16, 2, "1", marks=pytest.mark.long),
        pytest.param("predictions", 16, 2, "1", marks=pytest.mark.long),
    ],
)
def test_an_exchange_with_a_rank_without_a_batch_is_refused(where: str, rows: int, ranks: int, missing: str) -> None:
    loop = loop_of(where, rows, ranks)
    with pytest.raises(WorkerFailedError, match=f"torch's allreduce.*rank {missing} has no samples"), loop.ranks():
        loop.fit(num_epochs=1)
        loop.predict_on_validation_set()


@pytest.mark.long
@pytest.mark.parametrize("where", ["training", "loss", "predictions"])
def test_exchanges_between_ranks_that_all_have_batches_are_made(where: str) -> None:
    rows = 24
    loop = loop_of(where, rows, 2)
    with loop.ranks():
        loop.fit(num_epochs=1)
        predictions, _, _ = loop.predict_on_validation_set()
    assert len(predictions) == rows


@pytest.mark.long
def test_synchronised_batchnorm_covers_the_ranks_that_have_batches() -> None:
    loop = loop_of("nowhere", 14, 3)  # the last batch's rows are on two of three ranks
    loop.fit(num_epochs=1)
    assert loop.global_step == 2


@pytest.mark.long
@refuses
def test_compiled_functions_may_be_one_graph_where_exchanges_are_refused() -> None:
    layer, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.ones(4, 3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    before = compiled(x)
    with refuse_exchanges([0]):  # in another mode, torch refuses fullgraph=True
        assert torch.equal(compiled(x), before)
