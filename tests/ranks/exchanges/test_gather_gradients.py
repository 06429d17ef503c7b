"""all_gather with gradients: a contrastive loss over all ranks' rows trains as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import reference
from kit.loops import cpu_loop
from kit.ranks import run_own_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTModel, distributed

SAMPLES, GLOBAL_BATCH = 40, 12  # the last global batch: 4 rows, of three ranks 2, 1 and 1


class Contrastive(TTModel):
    """Pairs of views; ``own_rows``: each rank's loss is over its own rows against all, else over all against all."""

    def __init__(self, own_rows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        self.own_rows = own_rows

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        queries, keys = self.encoder(x), self.encoder(y)
        all_keys = self.all_gather(keys, concat=True)
        counts = [len(x)] if not dist.is_initialized() else distributed.gather_object(len(x))
        if self.own_rows:
            first = sum(counts[: distributed.get_rank()])
            return nn.functional.cross_entropy(queries @ all_keys.t(), torch.arange(first, first + len(x)))
        all_queries = self.all_gather({"queries": queries}, concat=True)["queries"]
        return nn.functional.cross_entropy(all_queries @ all_keys.t(), torch.arange(sum(counts)))

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self.encoder(batch_data[0]), batch_data[1], {}


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x + 0.1 * torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64))


def train(own_rows: bool, accumulation: int) -> dict[str, Tensor]:
    model = Contrastive(own_rows)
    tl = cpu_loop(
        model,
        DataLoader(rows(), GLOBAL_BATCH // distributed.get_world_size()),
        torch.optim.SGD(model.parameters(), 0.5),
        None,
        gpu_mode="ddp",
    )
    tl.fit(num_epochs=2, grad_accumulation=accumulation)
    return model.state_dict()


def gradients_by_hand() -> dict[str, Any]:
    """Unequal rows, a new axis, dtypes, numbers; what each rank's tensor gets."""
    rank, facts = dist.get_rank(), {}
    own = torch.arange(1.0 + rank).requires_grad_()  # 1 row, 2 rows, ...
    joined = distributed.all_gather(own, concat=True)
    (joined * torch.arange(1.0, 1.0 + len(joined)) * (rank + 1)).sum().backward()
    facts["joined"], facts["gradient"] = joined.detach(), own.grad
    half = torch.full((2,), float(rank), dtype=torch.bfloat16).requires_grad_()
    stacked = distributed.all_gather([half, rank])[0]
    (stacked.float() * 3).sum().backward()
    facts["stacked"], facts["half"] = tuple(stacked.shape), half.grad
    facts["numbers"] = distributed.all_gather(rank, concat=True)
    with torch.no_grad():
        facts["no graph"] = distributed.all_gather(own, concat=True).requires_grad
    empty = torch.ones(rank, 2).requires_grad_()  # a rank without rows
    distributed.all_gather(empty, concat=True).sum().backward()
    facts["empty"] = empty.grad
    for name, value in (("shape", torch.ones(2, 1 + rank)), ("gradient", torch.ones(2).requires_grad_(rank == 0))):
        try:
            distributed.all_gather(value, concat=True)
        except ValueError as e:
            facts[f"wrong {name}"] = str(e)
    try:
        distributed.all_gather(own)
    except ValueError as e:
        facts["unequal"] = str(e)
    return facts


def test_each_tensor_gets_the_sum_over_ranks(tmp_path: Path) -> None:
    facts = run_own_ranks(gradients_by_hand, 2, folder=tmp_path)
    for rank, mine in enumerate(facts):
        assert mine["joined"].tolist() == [0, 0, 1]
        assert mine["gradient"].tolist() == ([3.0] if rank == 0 else [6.0, 9.0])  # 1 x and 2 x, of both ranks
        assert mine["stacked"] == (2, 2)
        assert mine["half"].dtype == torch.bfloat16
        assert mine["half"].tolist() == [6, 6]
        assert mine["numbers"].tolist() == [0, 1]
        assert not mine["no graph"]
        assert torch.equal(mine["empty"], torch.full((rank, 2), 2.0))
        assert "rank 0: value: float32 of shape (2, 1); rank 1: value: float32 of shape (2, 2)" in mine["wrong shape"]
        assert "rank 0: value: float32 of shape (2,) with a gradient; rank 1: value: float32" in mine["wrong gradient"]
        assert "all_gather(value, concat=True)" in mine["unequal"]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("own_rows", [True, False])
def test_a_contrastive_loss_equals_one_process(tmp_path: Path, own_rows: bool, world_size: int) -> None:
    theirs = Contrastive(own_rows)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.5)
    for _ in range(2):
        for x, y in DataLoader(rows(), GLOBAL_BATCH):
            logits = theirs.encoder(x) @ theirs.encoder(y).t()
            nn.functional.cross_entropy(logits, torch.arange(len(x))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for weights in run_own_ranks(train, world_size, own_rows, 1, folder=tmp_path):
        assert reference.largest_difference(weights, theirs) < 1e-9


def test_one_process() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    assert torch.equal(distributed.all_gather(x, concat=True), x)
    distributed.all_gather(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2))
    assert distributed.all_gather(2.5, concat=True).tolist() == [2.5]
