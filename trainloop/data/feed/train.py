"""Read a loader's epochs as the optimizer steps of one rank, and keep the random states of its order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainloop._support.rng import derive_seed
from trainloop.data.batch.batches import on_device
from trainloop.data.feed.feed import Feed
from trainloop.data.feed.feed_position import FeedPosition
from trainloop.data.feed.marks import KeptIterators
from trainloop.data.feed.steps import BatchesLeft, ExchangeInts, StepBatches, steps_of_exchanged, steps_of_known
from trainloop.data.loader import libraries, loaders
from trainloop.data.loader.contents import contents_of
from trainloop.data.loader.loader_copies import end_workers, persistent_workers
from trainloop.data.order.columns import SplitBatches
from trainloop.data.source.indexed import Indexed, presharded_shard, train_shard
from trainloop.data.source.sources import Columns, Opaque, Source, Stream, Tensors, UserLoader
from trainloop.data.source.tensors import TensorRows
from trainloop.errors import ConfigurationError


class TrainFeed(Feed):
    """A loader's epochs as the optimizer steps of one rank.

    Before :meth:`steps`, nothing is read from the loader and no random number is drawn: the constructor only
    checks the loader.

    Parameters
    ----------
    loader
        A ``DataLoader`` of any kind, or any iterable of batches.
    rank, world_size : int
        The rank to read for, and the number of ranks.
    seed : int, optional
        Seed of order and augmentation, common to all ranks; None only in one process, where reading the loader makes
        exactly the random draws of ``for batch in loader``.
    name : str
        The user's name for the loader, for messages.
    exchange_ints : callable, optional
        A collective exchange of integers, for loaders whose sizes are unknown to other ranks. Default: no other ranks.
    device : torch.device, optional
        Device to move batches to; None to leave them where they are.

    Raises
    ------
    ConfigurationError
        If the loader can't be split over ranks correctly, or has nothing to train on.
    """

    def __init__(
        self,
        loader: Any,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = None,
        name: str = "train_loader",
        exchange_ints: ExchangeInts | None = None,
        device: torch.device | None = None,
    ) -> None:
        loaders.check_trains(loader, world_size, name)
        # If ranks drew their own orders, they would repeat some samples and miss others.
        if world_size > 1 and seed is None:
            seed = 0
        source = _source_of(loader, rank, world_size, seed, name)
        inner = loader.loader if isinstance(loader, SplitBatches) else loader
        super().__init__(source, inner, (rank, world_size, exchange_ints), seed, name)
        self._device = device
        self.num_batches = self._source.num_batches
        """Micro-batches of an epoch, the maximum over all ranks; None if unknown before reading."""
        self.num_samples = self._source.num_samples
        """Samples of an epoch over all ranks; None if unknown before reading."""
        self.global_batch_size = self._source.global_batch_size
        """Samples of a full micro-batch, over all ranks; None if undefined."""
        self.loader_batches = self._source.loader_batches
        """Batches of the loader in a micro-batch, over all ranks."""
        self.about_iterator = ""
        """Warning about an iterator that the last two epochs shared; empty if there is none."""
        self._epoch = 0
        self._kept = KeptIterators([self._users_loader, self._source.loader], name)
        self._position = FeedPosition(
            self._source, self._users_loader, name, rank=rank, world_size=world_size, draws_globally=seed is None
        )

    @property
    def shared(self) -> loaders.Shared:
        """Properties that must agree with the other ranks' feeds; otherwise ranks would do different steps.

        Compare them before the first step: some exchanges occur only for certain loaders, so that ranks with
        different loaders would wait for each other.
        """
        source = self._source
        seed = loaders.seed_in_common(self._seed) if source.shares else -1
        if not source.sizes_known:
            return loaders.Shared(seed=seed)
        counts = (source.num_samples, source.num_batches, source.global_batch_size)
        contents = -1 if loaders.is_distributed(self._users_loader) else contents_of(self._users_loader)
        samples, batches, size = (-1 if n is None else n for n in counts)
        return loaders.Shared(derive_seed(source.rule), seed, samples, batches, size, contents)

    def note_indices(self) -> None:
        """From the next epoch on, record indices, so that the indices of a batch that can't be loaded are known."""
        self._source.note_indices()

    def next_indices(self) -> list[Any] | None:
        """Return the dataset indices of the batch that is read next, or that failed; None if unknown."""
        found = self._source.next_indices()
        if found is None:
            return None
        # Without batches, an item is one index, which may be a list.
        return [found] if getattr(self._users_loader, "batch_sampler", None) is None else list(found)

    def set_epoch(self, epoch: int, *, told: bool = False) -> None:
        """Set the epoch that :meth:`steps` yields next; every rank calls it before each epoch.

        With ``told``, :func:`~trainloop.data.loader.loaders.tell_epoch` has set it in the parts of the loader.
        """
        self._epoch = epoch
        if not told:
            loaders.tell_epoch(self._users_loader, epoch)
        if persistent_workers(self.loader) is not None and loaders.tells_dataset(self._users_loader):
            # Running workers have copies of the dataset that would stay at the epoch in which they started.
            end_workers(self.loader)
            self._position.replace_workers()
        for inner in loaders.loaders_within(self._users_loader):
            if loaders.tells_dataset(inner):
                end_workers(inner)
        libraries.set_epoch(self._users_loader, epoch)

    @property
    def reads_again(self) -> bool:
        """True if the steps before a resumed position are read again and discarded: a stream without a state."""
        return self._source.position is None and loaders.is_stream(self._users_loader)

    def steps(
        self,
        grad_accumulation: int,
        skip_steps: int = 0,
        *,
        skip_batches: int | None = None,
        batches_left: BatchesLeft = lambda: math.inf,
    ) -> Iterator[StepBatches]:
        """Yield one epoch's optimizer steps.

        Collective: every rank iterates to the end, or stops at the same step. If sizes are known by arithmetic, no
        step exchanges anything.

        Parameters
        ----------
        grad_accumulation : int
            Micro-batches of a step; the epoch's last step may have fewer.
        skip_steps : int
            Number of steps that were done already. These steps are not loaded if the loader's sampler determines their
            samples, or if a stream or loader has a state with its position; otherwise, they are read and discarded.
        skip_batches : int, optional
            Number of micro-batches of these steps, if the last of them had fewer than ``grad_accumulation``.
        batches_left : callable
            Returns the number of micro-batches until the end of ``fit``, the same on all ranks: the last step may have
            fewer than ``grad_accumulation``.

        Raises
        ------
        ConfigurationError
            If the epoch is empty.
        """
        self._position.begin_epoch(resumed=skip_steps > 0)
        self._begin_pass()
        # One item per micro-batch; the items are grouped into steps below.
        done = skip_steps * grad_accumulation if skip_batches is None else skip_batches
        items = self._position.items(self._epoch, done)
        if done:
            items = self._position.in_order(items)
        if self._world_size > 1:
            items = self._with_checked_order(items)
        if self._device is not None and self._device.type != "cpu":  # on CUDA, copied during the previous step
            items = self._position.note(items, partial(on_device, device=self._device))
        if self._source.sizes_known and not self._source.counts:
            steps = steps_of_known(items, grad_accumulation, self._rank, batches_left)
        else:
            steps = steps_of_exchanged(items, grad_accumulation, self._rank, self._exchange_ints, batches_left)
        any_step = skip_steps > 0
        for step in steps:
            any_step = True
            yield step
        self._position.end_epoch(complete=True)
        if not any_step:
            hint = "An iterator can be read only once: pass an object whose __iter__ begins again in each epoch."
            if getattr(self._users_loader, "drop_last", False):
                hint = (
                    "drop_last=True leaves out a batch that is not full: give each rank samples for a full one, pass a "
                    "smaller batch_size, or leave drop_last out."
                )
            raise ConfigurationError(
                f"{self._name} yielded no batch in epoch {self._epoch + 1}, but training needs at least one. {hint}"
            )

    def _with_checked_order(self, items: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the items after comparing what ranks read, once the first item is known."""
        first = list(islice(items, 1))
        self._compare_ranks()
        yield from first
        yield from items

    def end_epoch(self) -> None:
        """End the epoch, perhaps before its last step; the next epoch draws a new order."""
        self._position.end_epoch(complete=False)
        self.about_iterator = self._kept.after_epoch()

    def state_dict(
        self, plain: Callable[[Any, str], Any] = lambda value, _: value, *, ended: bool = False
    ) -> dict[str, Any]:
        """Return the random states that determine the order, as plain types and tensors.

        Within an epoch, these are the states at its beginning; between epochs, the current states. If a stream or
        loader has a state, the result includes its position after the last step that was yielded. To resume an epoch,
        load the result, call :meth:`set_epoch`, then ``steps(..., skip_steps=...)``.

        Parameters
        ----------
        plain : callable
            Function that is called with the user's state and a name for it. If it raises an error, because a checkpoint
            can't contain the state, a warning reports the error, and the state is left out.
        ended : bool
            True if no further step of this epoch will be taken: the states are then the current ones, from which the
            next epoch draws its order.
        """
        return self._position.state(plain, ended=ended)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; generators that no longer exist are ignored."""
        self._position.load(state)

    def keep_generators(self, states: dict[str, Any]) -> None:
        """Let generators continue in these states, although the order is drawn, and ``set_epoch`` is called, again."""
        self._position.keep_generators(states)


def _source_of(loader: Any, rank: int, world_size: int, seed: int | None, name: str) -> Source:
    """Return the source for a loader of any kind, with each rank's part of every global batch."""
    if isinstance(loader, SplitBatches):
        return Columns(loader, rank, world_size, seed, name)
    presharded = loaders.is_distributed(loader)
    if presharded:
        loader = loaders.for_rank(loader, rank, world_size, name)
    rows = TensorRows.of(loader)
    if seed is None:
        return UserLoader(loader, name) if rows is None else Tensors(loader, name)
    if loaders.is_indexed(loader, presharded):
        shard = (presharded_shard if presharded else train_shard)(loader, rank, world_size, seed)
        return Indexed(loader, shard, name, rows)
    if isinstance(loader, DataLoader) and not loaders.iterates_itself(loader):
        return Stream(loader, rank, world_size, seed, name, presharded)
    return Opaque(loader, rank, world_size, seed, name, presharded=presharded, with_position=True)
