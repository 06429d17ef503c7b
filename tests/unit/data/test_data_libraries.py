"""Attributes by which streams of other libraries tell of ranks, and their iterators, which begin anew each time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.loader_kinds import ROWS, Rows
from kit.simulated_ranks import rank_steps
from torch import distributed
from torch.utils.data import DataLoader, IterableDataset

from trainloop.data import TrainFeed
from trainloop.data.loader.libraries import is_split
from trainloop.data.source.sources import Opaque
from trainloop.errors import ConfigurationError


class OneByOne(IterableDataset[Any]):
    """Its own iterator, as litdata's ``StreamingDataset``: ``iter`` begins anew."""

    def __iter__(self) -> Iterator[Any]:
        self.rows = iter([Rows()[i] for i in range(ROWS)])
        return self

    def __next__(self) -> Any:
        return next(self.rows)


class Asking(OneByOne):
    """Asks for its rank, and says nothing of what for."""

    def __iter__(self) -> Iterator[Any]:
        try:
            distributed.get_world_size()
        except ValueError:  # no process group in these tests
            pass
        return super().__iter__()


class Streaming(Asking):
    __module__ = "litdata.streaming.dataset"

    def __init__(self, world_size: int) -> None:
        self.distributed_env = SimpleNamespace(world_size=world_size)


def seen(make: Any, world_size: int) -> list[list[int]]:
    """Rows of each rank in its first epoch."""
    ranks = rank_steps(make, world_size, epochs=1)
    return [[int(i) for step in epochs[0] for batch in step.batches for i in batch[-1]] for epochs in ranks]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_plain_tensor_as_a_dataset_is_shared_out(world_size: int) -> None:
    # torch.Tensor has a method is_distributed(), which says nothing of ranks.
    rows = seen(lambda: DataLoader(torch.arange(ROWS), 4, collate_fn=lambda items: (torch.stack(items),)), world_size)
    assert Counter(i for of_rank in rows for i in of_rank) == Counter(range(ROWS))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stream", [OneByOne, lambda: Streaming(1)], ids=["of one's own", "litdata's"])
def test_an_iterator_that_begins_anew_is_read_once(stream: Any, world_size: int) -> None:
    rows = seen(lambda: DataLoader(stream(), 4), world_size)
    assert Counter(i for of_rank in rows for i in of_rank) == Counter(range(ROWS))


class OwnIter(DataLoader[Any]):
    """A loader with an ``__iter__`` of its own, as litdata's: the stream that it holds is an iterator, too."""

    def __iter__(self) -> Any:
        self.begun = True
        yield from super().__iter__()


class StreamingLoader(OwnIter):
    """As litdata's ``StreamingDataLoader``: it keeps iterators over its workers' numbers, and asks for the ranks."""

    __module__ = "litdata.streaming.dataloader"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._worker_idx = itertools.cycle([0])
        self._worker_idx_iter = iter(self._worker_idx)

    def state_dict(self) -> dict[str, Any]:
        return {"of all ranks together": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("its state does not describe what one rank has read")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", [OwnIter, StreamingLoader])
def test_a_loader_with_its_own_iter_over_such_a_stream_is_shared_out(kind: Any, world_size: int) -> None:
    stream = OneByOne if kind is OwnIter else lambda: Streaming(1)
    rows = seen(lambda: kind(stream(), 4), world_size)
    assert Counter(i for of_rank in rows for i in of_rank) == Counter(range(ROWS))


def test_the_position_of_a_loader_that_counts_the_ranks_itself_is_used_only_in_one_process() -> None:
    def position(world_size: int) -> Any:
        return Opaque(
            StreamingLoader(Streaming(1), 4), 0, world_size, 7, "train_loader", presharded=False, with_position=True
        ).position

    assert position(1) is not None
    assert position(2) is None


def test_a_stream_that_was_made_in_a_rank_is_its_ranks_own() -> None:
    rows = seen(lambda: DataLoader(Streaming(2), 4), 2)
    assert rows == [list(range(ROWS))] * 2


def test_a_stream_that_asks_and_says_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Asking calls .*get_world_size.*is_distributed = True"):
        seen(lambda: DataLoader(Asking(), 4), 2)


def test_what_streams_say() -> None:
    assert is_split(OneByOne()) is None
    assert is_split(SimpleNamespace(is_distributed=False)) is False
    assert is_split(SimpleNamespace(_distributed=object())) is True
    assert (is_split(Streaming(1)), is_split(Streaming(2))) == (False, True)


class Pipeline(IterableDataset[Any]):
    """As webdataset's: a list of stages."""

    __module__ = "webdataset.pipeline"

    def __init__(self, *stages: Any) -> None:
        self.pipeline = list(stages)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def single_node_only() -> None:
    """Stands for webdataset's stage of this name, which refuses several ranks."""


def split_by_node() -> None:
    """Stands for webdataset's stage of this name, which gives each rank its own shards."""


def test_what_the_stages_of_a_pipeline_say() -> None:
    says_no, says_yes = SimpleNamespace(is_distributed=False), SimpleNamespace(is_distributed=True)
    assert is_split(Pipeline()) is None
    assert is_split(Pipeline(OneByOne())) is None
    assert is_split(Pipeline(OneByOne(), says_no)) is False
    assert is_split(Pipeline(says_no, says_yes)) is True
    assert is_split(Pipeline(Pipeline(says_no))) is False
    assert is_split(Pipeline(OneByOne(), single_node_only)) is False
    assert is_split(Pipeline(single_node_only, split_by_node)) is True
    assert is_split(Pipeline(DataLoader(Pipeline(split_by_node)))) is True  # WebLoader


class Environment:
    """The data of an agent: it never ends, and has no length."""

    def __iter__(self) -> Iterator[Any]:
        i = 0
        while True:
            yield tuple(column[i % ROWS : i % ROWS + 1] for column in Rows().rows)
            i += 1


def test_an_environment_never_ends() -> None:
    from trainloop.data import TrainFeed

    feed = TrainFeed(Environment(), seed=3)
    steps = feed.steps(1)
    rows = [int(next(steps).batches[0][-1]) for _ in range(2 * ROWS)]
    assert rows == [*range(ROWS), *range(ROWS)]
    assert feed.num_batches is None


class Counting(OneByOne):
    """As Mosaic's ``StreamingDataset``: its order follows from the passes that it has counted itself."""

    __module__ = "streaming.base.dataset"
    next_epoch = 0

    def __iter__(self) -> Iterator[Any]:
        rows = [Rows()[(i + 3 * self.next_epoch) % ROWS] for i in range(ROWS)]
        self.next_epoch += 1
        yield from rows


def test_a_stream_that_counts_its_passes_begins_with_the_pass_of_a_resumed_epoch() -> None:
    def epoch_of(feed: TrainFeed, epoch: int) -> list[int]:
        feed.set_epoch(epoch)
        return [int(i) for step in feed.steps(1) for batch in step.batches for i in batch[-1]]

    feed = TrainFeed(DataLoader(Counting(), 4))
    epochs = [epoch_of(feed, epoch) for epoch in range(3)]
    assert len({tuple(rows) for rows in epochs}) == 3
    assert epoch_of(TrainFeed(DataLoader(Counting(), 4)), 2) == epochs[2]
