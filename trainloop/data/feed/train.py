"""Read a loader's epochs as the optimizer steps of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from trainloop._support import rng
from trainloop._support.rng import derive_seed
from trainloop._support.user_line import warn
from trainloop.data.batch.batches import moved, on_device
from trainloop.data.feed.steps import ExchangeInts, StepBatches, steps_of_exchanged, steps_of_known
from trainloop.data.loader import libraries, loaders
from trainloop.data.loader.loader_copies import end_workers, isolated_base_seed, persistent_workers
from trainloop.data.order.columns import SplitBatches
from trainloop.data.order.orders import generators_of, set_states
from trainloop.data.source.indexed import Indexed, presharded_shard, train_shard
from trainloop.data.source.sources import Columns, Opaque, Source, Stream, Tensors, UserLoader
from trainloop.data.source.tensors import TensorRows
from trainloop.errors import ConfigurationError

_LIVE = object()  # represents the source's current position


class TrainFeed:
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
        A collective exchange of integers, for loaders whose sizes are unknown to other ranks.
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
        self._source = _source_of(loader, rank, world_size, seed, name)
        if (self._source.counts or not self._source.sizes_known) and world_size > 1 and exchange_ints is None:
            raise ConfigurationError(
                f"{name}: {world_size} ranks must exchange their numbers of samples, but exchange_ints is None. Pass "
                "exchange_ints=trainloop.distributed.exchange_ints."
            )
        self.num_batches = self._source.num_batches
        """Micro-batches of an epoch, the maximum over all ranks; None if unknown before reading."""
        self.num_samples = self._source.num_samples
        """Samples of an epoch over all ranks; None if unknown before reading."""
        self.global_batch_size = self._source.global_batch_size
        """Samples of a full micro-batch, over all ranks; None if undefined."""
        self._rank = rank
        self._world_size = world_size
        self._name = name
        self._exchange_ints = exchange_ints
        self._device = device
        self._epoch = 0
        self._users_loader = loader.loader if isinstance(loader, SplitBatches) else loader
        self._generators = generators_of(self._users_loader)
        self._seed, self._draws_globally = seed, seed is None
        self._at_epoch_begin: _States | None = None
        self._resumed: dict[str, Any] | None = None  # position to start from
        self._position: Any = _LIVE
        self._global_rng: dict[str, Any] | None = None
        self._replaces_workers = False  # True if resumed from an epoch that began with persistent workers running

    @property
    def loader(self) -> Any:
        """The loader that this rank reads: the user's, or its copy with this rank's sampler."""
        return self._source.loader

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
        return loaders.Shared(derive_seed(source.rule), seed, *(-1 if n is None else n for n in counts))

    def note_indices(self) -> None:
        """From the next epoch on, record indices, so that the indices of a batch that can't be loaded are known."""
        self._source.note_indices()

    def next_indices(self) -> list[Any] | None:
        """Return the dataset indices of the batch that is read next, or that failed; None if unknown."""
        found = self._source.next_indices()
        return None if found is None else list(found) if isinstance(found, (list, tuple)) else [found]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that :meth:`steps` yields next; every rank calls it before each epoch."""
        self._epoch = epoch
        for holder in loaders.epoch_holders(self._users_loader):
            holder.set_epoch(epoch)
        if loaders.tells_dataset(self._users_loader) and persistent_workers(self.loader) is not None:
            # Running workers have copies of the dataset that would stay at the epoch in which they started.
            end_workers(self.loader)
            self._replaces_workers = True
        libraries.set_epoch(self._users_loader, epoch)

    @property
    def reads_again(self) -> bool:
        """True if the steps before a resumed position are read again and discarded: a stream without a state."""
        return self._source.position is None and loaders.is_stream(self._users_loader)

    def steps(
        self, grad_accumulation: int, skip_steps: int = 0, *, skip_batches: int | None = None
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

        Raises
        ------
        ConfigurationError
            If the epoch is empty.
        """
        self._at_epoch_begin = self._states()
        if skip_steps and self._global_rng:  # the epoch began with the checkpoint's states, not the current states
            self._at_epoch_begin = self._at_epoch_begin._replace(of_process=self._global_rng)
        # One item per micro-batch; the items are grouped into steps below.
        read = self._items_of_new_workers if self._replaces_workers else self._items
        items = read(skip_steps * grad_accumulation if skip_batches is None else skip_batches)
        if self._world_size > 1 and self._exchange_ints is not None:
            items = self._checked(items, self._exchange_ints)
        if self._device is not None and self._device.type == "cuda":
            items = self._ahead(items, self._device)
        elif self._device is not None and self._device.type != "cpu":
            items = moved(items, self._device)
        if self._source.sizes_known and not self._source.counts:
            steps = steps_of_known(items, grad_accumulation, self._rank)
        elif self._world_size == 1:
            steps = steps_of_exchanged(items, grad_accumulation, 0, lambda mine: [mine])
        else:
            assert self._exchange_ints is not None  # __init__ has checked it
            steps = steps_of_exchanged(items, grad_accumulation, self._rank, self._exchange_ints)
        any_step = skip_steps > 0
        for step in steps:
            any_step = True
            yield step
        self._at_epoch_begin, self._position = None, _LIVE
        if not any_step:
            raise ConfigurationError(
                f"{self._name} yielded no batch in epoch {self._epoch + 1}, but training needs at least one. An "
                "iterator can be read only once: pass an object whose __iter__ starts from the beginning each epoch."
            )

    def _items_of_new_workers(self, first_batch: int) -> Iterator[tuple[Any, Any]]:
        """Yield the items of new workers; their base seed is not drawn from the generator that determines the order."""
        self._replaces_workers = False
        with isolated_base_seed(self.loader):
            items = self._items(first_batch)
            first = list(islice(items, 1))
        return chain(first, items)

    def _checked(self, items: Iterator[tuple[Any, Any]], exchange_ints: ExchangeInts) -> Iterator[tuple[Any, Any]]:
        """Yield the items after checking that all ranks read the same order (by at most one exchange per epoch)."""
        first = list(islice(items, 1))
        digest = self._source.order_digest
        if digest is not None:
            loaders.check_orders(exchange_ints([digest]), self._users_loader, self._name)
        yield from first
        yield from items

    def _ahead(self, items: Iterator[tuple[Any, Any]], device: torch.device) -> Iterator[tuple[Any, Any]]:
        """Copy each item to the GPU during the previous step, and yield it; track the position of the yielded item."""
        if self._source.position is None:
            yield from on_device(items, device)
            return
        placed = (((size, self._now()), batch) for size, batch in items)
        for (size, self._position), batch in on_device(placed, device):
            yield size, batch

    def _items(self, first_batch: int) -> Iterator[tuple[Any, Any]]:
        resumed, self._resumed, self._position = self._resumed, None, _LIVE
        if resumed is not None and self._resumes(resumed, begins=first_batch == 0):
            return self._following(first_batch, resumed)
        if not (first_batch and self._global_rng):
            return self._source.items(self._epoch, first_batch)
        # Without a seed, the order depends on the global generators at the beginning of the epoch. Once the order is
        # drawn again, the generators return to the checkpoint's states, which the loop has restored.
        with rng.isolated():
            rng.restore(self._global_rng)
            items = self._source.items(self._epoch, 0)
            for _ in islice(items, first_batch):
                pass
        self._global_rng = None
        return items

    def _resumes(self, resumed: dict[str, Any], *, begins: bool) -> bool:
        """Return True if the source resumes from a checkpoint's position; if not, warn that the epoch is read again."""
        same_ranks = resumed["world_size"] == self._world_size
        size = resumed["global_batch_size"]
        same_batches = same_ranks if size is None else size == self.global_batch_size
        position = self._source.position
        if (
            position is not None
            and (same_ranks or size is not None)
            and position.load(resumed["state"], begins=begins, same_ranks=same_ranks, same_batches=same_batches)
        ):
            return True
        if self._rank == 0:
            warn(
                f"{self._name}: the stream's position in the checkpoint is for a different loader, or for different "
                f"numbers of ranks ({resumed['world_size']} then, {self._world_size} now) or workers, so the epoch is "
                "read again from its start. This is correct unless positions continue across epochs. In that case, "
                "resume with the same loader, ranks and workers."
            )
        return False

    def _following(self, first_batch: int, resumed: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the items that follow the position restored by the source."""
        if not (first_batch and self._global_rng):
            return self._source.items(self._epoch, first_batch)
        # As in _items: draws at the beginning (an order) are repeated, later draws continue from the checkpoint.
        with rng.isolated():
            rng.restore(self._global_rng)
            items = self._source.items(self._epoch, first_batch)
            if not resumed["state"].get("draws", True):
                items = chain(list(islice(items, 1)), items)
        self._global_rng = None
        return items

    def end_epoch(self) -> None:
        """End the epoch, perhaps before its last step; the next epoch draws a new order."""
        self._at_epoch_begin, self._resumed, self._global_rng = None, None, None

    def state_dict(self, plain: Callable[[Any, str], Any] = lambda value, _: value) -> dict[str, Any]:
        """Return the random states that determine the order, as plain types and tensors.

        Within an epoch, these are the states at its beginning; between epochs, the current states. If a stream or
        loader has a state, the result includes its position after the last step that was yielded. To resume an epoch,
        load the result, call :meth:`set_epoch`, then ``steps(..., skip_steps=...)``.

        Parameters
        ----------
        plain : callable
            Function that is called with the user's state and a name for it. If it raises an error, because a checkpoint
            can't contain the state, a warning reports the error, and the state is left out.
        """
        states = (self._states() if self._at_epoch_begin is None else self._at_epoch_begin).captured()
        position = self._source.position
        if self._resumed is not None or position is None:
            return {**states, "position": self._resumed}
        try:
            now = self._now() if self._position is _LIVE else self._position
            if isinstance(now, Exception):
                raise now
            state = plain(position.state(now), f"{self._name}: position")
        except Exception as error:  # an error of the user's code
            warn(
                f"{self._name}: its state_dict() can't be stored in a checkpoint, so a resumed run will read the epoch "
                f"again from its start. The error: {error}"
            )
            state = None
        if state is None:
            return {**states, "position": None}
        sizes = {"world_size": self._world_size, "global_batch_size": self.global_batch_size}
        return {**states, "position": {**sizes, "state": state}}

    def _now(self) -> Any:
        assert self._source.position is not None  # checked by the callers
        try:
            return self._source.position.now()
        except Exception as error:
            return error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; generators that no longer exist are ignored."""
        set_states(self._generators, state["generators"])
        if self._draws_globally:
            self._global_rng = state["global"]
        # Older checkpoints contain the workers' random states here.
        self._replaces_workers = bool(state.get("workers")) and persistent_workers(self.loader) is None
        self._resumed = state.get("position")

    def close(self) -> None:
        """End persistent workers of this rank's copy of the loader; the feed can't be read afterwards."""
        # The user's loader keeps its persistent workers: it may be read again after fit.
        if self.loader is not self._users_loader:
            end_workers(self.loader)

    def _states(self) -> _States:
        """Return the current states. A later :meth:`_States.captured` costs time, and is called only by checkpoints."""
        return _States(
            generators={name: generator.get_state() for name, generator in self._generators.items()},
            of_process=rng.read(only_torch=self._source.draws_only_torch) if self._draws_globally else None,
            workers=self._replaces_workers or persistent_workers(self.loader) is not None,
        )


class _States(NamedTuple):
    """What determines an epoch's order."""

    generators: dict[str, Any]
    """States of the loader's generators, by name."""
    of_process: rng.States | dict[str, Any] | None
    """States of the global generators, if the order is drawn from them; a dict if they are from a checkpoint."""
    workers: bool
    """True if persistent workers are running."""

    def captured(self) -> dict[str, Any]:
        """Return the states as plain types and tensors."""
        of_process = self.of_process
        return {
            "generators": self.generators,
            "global": of_process.captured() if isinstance(of_process, rng.States) else of_process,
            "workers": self.workers,
        }


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
