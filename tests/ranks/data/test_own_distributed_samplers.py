"""Samplers of the user that give each rank a shard, created before ranks start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kit.small_loop import make_loop
from torch.utils.data import DataLoader, Sampler

from conftest import make_data

DATA = make_data(40)


class Shards(Sampler[int]):
    """Takes a shard in the constructor, like copies of a ``DistributedSampler`` that each rank makes for itself."""

    def __init__(self, rank: int = 0, num_replicas: int = 2, repeats: int = 1) -> None:
        self.rank, self.num_replicas, self.repeats = rank, num_replicas, repeats
        self.indices = self.shard()

    def shard(self) -> list[int]:
        return [i for i in range(40) for _ in range(self.repeats)][self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class InIter(Shards):
    def __iter__(self) -> Iterator[int]:
        return iter(self.shard())


def warnings_of(sampler: Any, capfd: pytest.CaptureFixture[str]) -> int:
    loop = make_loop(gpu_mode="ddp", devices=2, validation=False)
    loop.train_loader = DataLoader(DATA, 5, sampler=sampler)
    loop.fit(num_epochs=2)
    assert loop.global_step == 8 * getattr(sampler, "repeats", 1)
    return capfd.readouterr().err.count(f"{type(sampler).__name__} yields the same first batch on all ranks")


@pytest.mark.long
def test_a_shard_that_the_constructor_has_taken_is_warned_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert (warnings_of(InIter(), capfd), warnings_of(Shards(), capfd)) == (0, 1)


@pytest.mark.long
def test_repeated_augmentation_is_warned_of_but_trains(capfd: pytest.CaptureFixture[str]) -> None:
    assert warnings_of(InIter(repeats=2), capfd) == 1


@pytest.mark.long
def test_a_shard_that_the_constructor_has_taken_is_warned_of_once_in_evaluations(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loop = make_loop(gpu_mode="ddp", devices=2)
    loop.validation_loader = DataLoader(DATA, 5, sampler=Shards())
    loop.fit(num_epochs=2)
    text = "validation_loader: Shards yields the same first batch on all ranks"
    assert capfd.readouterr().err.count(text) == 1
    loop.validation_loader = DataLoader(DATA, 5, sampler=InIter())
    loop.evaluate_loss_on_validation_set()
    assert not capfd.readouterr().err
