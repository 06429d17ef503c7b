"""Class weights and ignored targets over ranks: each mode equals one process fed the whole global batches."""

from __future__ import annotations

import pytest
import torch
from kit.class_losses import CASES, trained

MOST_TELLING = ("weights", "ignored", "tokens", "smoothed", "MultiLoss", "MultiLoss, factors", "MultiLoss, pairs")
MOST_TELLING += ("MultiLoss, optimizers", "MultiLoss, own weights")
# Its graph lacks the divisor, also in the epoch after a step without samples for rank 1.
MOST_TELLING += tuple(case for case in CASES if case == "linear module, in chunks")  # since torch 2.13


def _compare(case: str, mode: str, ranks: int, accumulation: int) -> None:
    whole = trained(case, "single", batch_size=12)
    size = 12 // ranks // accumulation
    over_ranks = trained(case, mode, batch_size=size, accumulation=accumulation, devices=ranks, seed=0)
    torch.testing.assert_close(over_ranks, whole, rtol=0, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("case", MOST_TELLING)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_ranks_step_as_one_process(case: str, accumulation: int) -> None:
    _compare(case, "ddp", 2, accumulation)


@pytest.mark.long
@pytest.mark.parametrize("case", ["weights", "ignored", "MultiLoss", "MultiLoss, pairs"])
def test_sharded_ranks_step_as_one_process(case: str) -> None:
    _compare(case, "fsdp", 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks, accumulation", [(2, 1), (2, 3), (3, 1), (3, 2)])
def test_all_kinds_over_ranks(case: str, mode: str, ranks: int, accumulation: int) -> None:
    _compare(case, mode, ranks, accumulation)
