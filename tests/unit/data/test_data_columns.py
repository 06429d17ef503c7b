"""Batches that ranks share by columns: who gets which, in training and evaluation, and what is refused."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from kit.columns_model import Recurrent, chunks
from kit.simulated_ranks import in_ranks, rank_steps
from torch import nn, optim
from torch.utils.data import DataLoader

from trainloop import TrainLoop
from trainloop._support.carried import carried_state_of, load_carried_state
from trainloop.data import EvalFeed, SplitBatches
from trainloop.errors import ConfigurationError

Chunk = namedtuple("Chunk", "text lengths names scale")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_rank_has_its_own_columns_of_every_batch(world_size: int) -> None:
    data = chunks(7, 33)
    ranks = rank_steps(lambda: SplitBatches(data, dim=1), world_size)
    for epoch in range(2):
        steps = [rank[epoch] for rank in ranks]
        assert {len(of_rank) for of_rank in steps} == {len(data)}
        for i, (text, target) in enumerate(data):
            parts = [of_rank[i].batches[0] for of_rank in steps]
            assert torch.equal(torch.cat([part[0] for part in parts], 1), text)
            assert torch.equal(torch.cat([part[1] for part in parts], 1), target)
            assert all(part[1].is_contiguous() for part in parts)
            assert len({part[0].shape[1] for part in parts}) <= 2  # as even as it goes
            # The mean over ranks of `scale * loss` counts each column once.
            weights = [of_rank[i].scales[0] if of_rank[i].scales else 1.0 for of_rank in steps]
            assert [w * 7 / world_size for w in weights] == pytest.approx([part[0].shape[1] for part in parts])
            assert {of_rank[i].total for of_rank in steps} == {7}


def test_more_ranks_than_columns_and_steps_of_several_chunks() -> None:
    ranks = rank_steps(lambda: SplitBatches(chunks(2, 33), dim=1), 3, grad_accumulation=2, epochs=1)
    assert [[len(step.batches) for step in rank[0]] for rank in ranks] == [[2, 2, 2, 1], [2, 2, 2, 1], [0, 0, 0, 0]]
    assert all(step.counts for rank in ranks for step in rank[0])


def test_an_epoch_goes_on_in_its_middle() -> None:
    def make() -> SplitBatches:
        return SplitBatches(DataLoader(chunks(4, 33), batch_size=None, shuffle=True), dim=1)  # type: ignore[arg-type]

    whole, late = rank_steps(make, 2), rank_steps(make, 2, skip=3)
    for rank in range(2):
        for epoch in range(2):
            for a, b in zip(whole[rank][epoch][3:], late[rank][epoch], strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a.batches[0], b.batches[0], strict=True))
    texts = [[step.batches[0][0].shape for step in rank[0]] for rank in whole]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_gives_each_rank_the_same_columns(world_size: int) -> None:
    data = chunks(5, 12)

    def of_rank(ranked: dict[str, Any]) -> list[Any]:
        feed = EvalFeed(SplitBatches(data), **ranked)
        assert feed.num_batches == len(data)
        return list(feed.batches())

    found = in_ranks(world_size, of_rank)
    in_order = sorted((item for rank in found for item in rank), key=lambda item: item[0])
    assert sum(size for _, _, size in in_order) == 5 * len(data)
    rows = [row for _, (text, _), _ in in_order for row in text.T.tolist()]
    assert rows == [row for text, _ in data for row in text.T.tolist()]


def test_parts_of_a_batch_of_any_kind() -> None:
    loader = SplitBatches([], dim=1)
    batch = {
        "chunk": Chunk(torch.arange(12).view(3, 4), np.arange(4), list("abcd"), torch.tensor(2.0)),
        "word": "all",
    }
    assert loader.columns(batch) == 4
    part = loader.part(batch, 4, 1, 3)["chunk"]
    assert type(part) is Chunk
    assert part.text.tolist() == [[2], [6], [10]]
    assert (part.lengths.tolist(), part.names, float(part.scale)) == ([2], ["c"], 2.0)
    assert SplitBatches([], dim=0).part(torch.arange(12).view(4, 3), 4, 0, 2).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((torch.zeros(5, 4), torch.zeros(20)), r"\(5, 4\), a Tensor of shape \(20,\)"),
        ((torch.zeros(5, 4), torch.zeros(4, 5)), r"\(5, 4\), a Tensor of shape \(4, 5\)"),
        ({"text": "words"}, "no tensor"),
    ],
    ids=["flat target", "transposed", "no tensor"],
)
def test_columns_that_do_not_agree_are_refused(batch: Any, found: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"SplitBatches\(dim=1\) can't split .*{found}.*flatten it in get_loss"
    ):
        SplitBatches([batch]).columns(batch)


def test_what_is_no_loader_or_dimension_is_refused() -> None:
    for loader in (iter([]), 3):
        with pytest.raises(ConfigurationError, match=r"SplitBatches\(loader=.*must be a DataLoader"):
            SplitBatches(loader)  # type: ignore[arg-type]
    for dim in (-1, "1", True):
        with pytest.raises(ConfigurationError, match=rf"SplitBatches\(dim={dim!r}\)"):
            SplitBatches([], dim=dim)  # type: ignore[arg-type]
    assert type(SplitBatches([], dim=np.int64(2)).dim) is int  # type: ignore[arg-type]


def carrying(columns: list[int]) -> list[Recurrent]:
    """A model for each rank, with its columns' state; a rank without columns has none."""
    models = []
    start = 0
    for count in columns:
        model = Recurrent()
        state = torch.arange(start, start + count).double().view(-1, 1)
        model.hidden = (state, -state) if count else None
        models.append(model)
        start += count
    return models


@pytest.mark.parametrize("before", [[5], [3, 2], [2, 2, 1], [1, 1, 1, 1, 1, 0]])
@pytest.mark.parametrize("after", [[5], [3, 2], [2, 2, 1]])
def test_columns_are_dealt_out_again_over_other_ranks(before: list[int], after: list[int]) -> None:
    saved = [carried_state_of(model) for model in carrying(before)]
    for rank, expected in enumerate(carrying(after)):
        model = Recurrent()
        load_carried_state(model, saved, rank, len(after))
        assert all(torch.equal(a, b) for a, b in zip(model.hidden, expected.hidden, strict=True))


def loop_of(model: Any, **kwargs: Any) -> TrainLoop:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loader = SplitBatches(chunks(4, 10))
    return TrainLoop(model, loader, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), **kwargs)


def test_what_can_not_be_carried_is_refused() -> None:
    model = Recurrent()
    with pytest.raises(ConfigurationError, match=r"hidden is carried .* gpu_mode='dp'.*'ddp' with .*SplitBatches"):
        loop_of(model, gpu_mode="dp", accelerator="cpu", devices=2).fit(num_epochs=1)
    model.carried_state = {"state": 1}  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match=r"carried_state=\{'state': 1\} of Recurrent.*self.state = None"):
        loop_of(model).fit(num_epochs=1)
    for wrong in (("hidden",), "hidden"):
        model.carried_state = wrong  # type: ignore[assignment, misc]
        with pytest.raises(ConfigurationError, match=r"carried_state=.*'hidden'.* of Recurrent: must be a dict"):
            loop_of(model).fit(num_epochs=1)
    model.carried_state = {"state": 1}  # type: ignore[misc]
    model.register_buffer("state", None)
    with pytest.raises(ConfigurationError, match="names state, which is a buffer"):
        loop_of(model).fit(num_epochs=1)
