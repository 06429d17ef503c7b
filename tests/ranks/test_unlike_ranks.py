"""Ranks that somebody else started make their own loaders: where these differ, all ranks say so before any waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ranks import run_own_ranks
from trainloop import TrainLoop, TTBasicModel, distributed
from trainloop.data import train_feed
from trainloop.errors import ConfigurationError

CPU: Any = {"accelerator": "cpu", "devices": 2}
ROWS, BATCH = 66_001, 6_000  # long enough for an order to be drawn once on a host


def loader(sampler: Sampler[Any] | None = None, rows: int = ROWS, batch: int = BATCH, **arguments: Any) -> Any:
    return DataLoader(TensorDataset(torch.arange(float(rows))), batch, sampler=sampler, **arguments)


def weighted(weights: Any = None, number: int = ROWS, seed: int | None = None) -> WeightedRandomSampler:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return WeightedRandomSampler(torch.ones(ROWS) if weights is None else weights, number, generator=generator)


# By what differs: a loader, the feed's arguments, and what the error says.
UNLIKE: dict[str, tuple[Callable[[int], Any], Callable[[int], dict[str, Any]], str]] = {
    "weights": (
        lambda rank: loader(weighted(torch.arange(1.0, ROWS + 1) + rank)),
        lambda rank: {},
        "WeightedRandomSampler gives another order on each rank",
    ),
    "the state of a generator": (
        lambda rank: loader(weighted(seed=rank)),
        lambda rank: {},
        "WeightedRandomSampler gives another order on each rank",
    ),
    "a shuffle's generator": (
        lambda rank: loader(RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(rank))),
        lambda rank: {},
        "RandomSampler gives another order on each rank",
    ),
    "draws, of which only some are shared": (
        lambda rank: loader(weighted(number=65_000 + 1000 * rank)),
        lambda rank: {},
        "train_loader has 65000 samples in 6 batches of 12000 over all ranks on rank 0, and 66000 samples in 6 batches",
    ),
    "draws of a short order": (
        lambda rank: loader(weighted(number=100 + rank), batch=10),
        lambda rank: {},
        "100 samples in 5 batches of 20 over all ranks on rank 0, and 101 samples in 6 batches",
    ),
    "rows in order": (lambda rank: loader(rows=100 + 50 * rank), lambda rank: {}, "100 samples in 1 batches"),
    "batch_size": (lambda rank: loader(batch=10 + rank), lambda rank: {}, "of 22 over all ranks on rank 1"),
    "samplers": (
        lambda rank: loader(weighted() if rank else RandomSampler(range(ROWS))),
        lambda rank: {},
        "has another kind of sampler, on rank 1 than on rank 0",
    ),
    "seeds": (lambda rank: loader(shuffle=True), lambda rank: {"seed": rank}, "rank 1 has another seed than rank 0"),
    "accumulation": (
        lambda rank: loader(batch=2000),
        lambda rank: {"grad_accumulation": 1 + rank},
        "fit(grad_accumulation=2) on rank 1, 1 on rank 0",
    ),
}


def errors_of(rank: int) -> dict[str, str]:
    """What each case raises; an exchange after it shows that no rank is left behind in one."""
    found = {}
    for name, (make, arguments, _) in UNLIKE.items():
        given = arguments(rank)
        accumulation = given.pop("grad_accumulation", 1)
        feed = feed_of(make(rank), rank, **given)
        try:
            found[name] = f"{sum(1 for _ in feed.steps(accumulation))} steps"
        except ConfigurationError as error:
            found[name] = str(error)
        assert distributed.exchange_ints([rank]) == [[0], [1]]
    return found


def feed_of(of_rank: Any, rank: int, **arguments: Any) -> Any:
    options = {"rank": rank, "world_size": 2, "seed": 3, "exchange_ints": distributed.exchange_ints, **arguments}
    return train_feed(of_rank, **options)


def samples_of_given(rank: int) -> int:
    """Ranks that read what they were given: another seed is theirs to choose."""
    own = DistributedSampler(range(100), num_replicas=2, rank=rank, seed=5)  # type: ignore[arg-type]
    return sum(step.total for step in feed_of(loader(own, 100, 10), rank, seed=rank).steps(1))


def of_rank() -> tuple[dict[str, str], int]:
    rank = distributed.get_rank()
    return errors_of(rank), samples_of_given(rank)


def test_all_ranks_say_what_differs(tmp_path: Path) -> None:
    everyone = run_own_ranks(of_rank, 2, folder=tmp_path)
    for errors, given in everyone:
        for name, (_, _, message) in UNLIKE.items():
            assert message in errors[name], name
        assert given == 100
    assert everyone[0] == everyone[1]


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def fit_own_data() -> str:
    rank = distributed.get_rank()
    model, rows = Net(), torch.randn(40 + 20 * rank, 4)
    own = DataLoader(TensorDataset(rows, rows[:, :1]), 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = TrainLoop(model, own, None, None, optimizer, torch.nn.MSELoss(), gpu_mode="ddp", **CPU)
    with pytest.raises(ConfigurationError) as raised:
        loop.fit(1)
    return str(raised.value)


def test_fit_of_data_that_each_rank_has_read_for_itself(tmp_path: Path) -> None:
    for error in run_own_ranks(fit_own_data, 2, folder=tmp_path):
        assert "train_loader has 40 samples in 2 batches of 20 over all ranks on rank 0, and 60 samples in 3" in error
