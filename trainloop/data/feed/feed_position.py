"""A feed's position in an epoch, for loaders and streams: store it, move there at a resume, or read the epoch again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from trainloop._support import rng
from trainloop._support.user_line import warn
from trainloop.data.loader.generators import (
    generators_of,
    generators_of_datasets,
    generators_read,
    kept_in_checkpoints,
    set_states,
)
from trainloop.data.loader.loader_copies import isolated_base_seed, persistent_workers
from trainloop.data.source.indexed import Indexed
from trainloop.data.source.sources import Source

_LIVE = object()  # represents the source's current position


class FeedPosition:
    """The position of a :class:`~trainloop.data.feed.train.TrainFeed`: reads the feed's source from there on.

    An epoch resumes from the random states at its beginning, which determine its order. If the user's stream or loader
    has a state, it resumes from that as well; otherwise, batches that were done are read again and discarded, unless
    the source's order makes this unnecessary.

    Parameters
    ----------
    source : Source
    loader
        The user's loader, whose generators may determine the order.
    name : str
        The user's name for the loader, for messages.
    rank, world_size : int
    draws_globally : bool
        True if the order may also be drawn from the global generators.
    """

    def __init__(
        self, source: Source, loader: Any, name: str, *, rank: int, world_size: int, draws_globally: bool
    ) -> None:
        self._source = source
        self._loader = loader
        self._generators = generators_of(loader)
        self._name = name
        self._rank, self._world_size = rank, world_size
        self._draws_globally = draws_globally
        self._at_epoch_begin: _States | None = None  # None between epochs
        self._loaded_position: dict[str, Any] | None = None  # the source's position, until it is read
        self._loaded_global: dict[str, Any] | None = None  # states of the global generators, until the order is read
        self._after_item: Any = _LIVE  # the source's position after the last item, if further items were read ahead
        self._loaded_order: list[int] | None = None  # that of the resumed epoch, until it is compared
        self._replaces_workers = False  # True if resumed from an epoch that began with persistent workers running
        self._kept: dict[str, Any] = {}  # states of generators, until the batches that are left are read

    def replace_workers(self) -> None:
        """Start the next epoch like one with persistent workers, although new workers must be started for it."""
        self._replaces_workers = True

    def begin_epoch(self, *, resumed: bool) -> None:
        """Begin an epoch; ``resumed`` is True if a part of it was done before the position was loaded."""
        self._at_epoch_begin = self._random_states()
        if resumed and self._loaded_global:  # the epoch began with the checkpoint's states, not the current states
            self._at_epoch_begin = self._at_epoch_begin._replace(of_process=self._loaded_global)

    def end_epoch(self, *, complete: bool) -> None:
        """End the epoch, ``complete`` or before its last item; the next epoch draws a new order."""
        self._at_epoch_begin = self._loaded_position = self._loaded_global = self._loaded_order = None
        if complete:
            self._after_item = _LIVE

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[Any, Any]]:
        """Return the source's items of an epoch from a micro-batch on, or from the loaded position."""
        if not self._replaces_workers:
            return self._items_from(epoch, first_batch)
        self._replaces_workers = False
        # The new workers' base seed must not be drawn from the generator that determines the order.
        with isolated_base_seed(self._source.loader):
            items = self._items_from(epoch, first_batch)
            first = list(islice(items, 1))
        return chain(first, items)

    def _items_from(self, epoch: int, first_batch: int) -> Iterator[tuple[Any, Any]]:
        loaded, loaded_global, self._after_item = self._loaded_position, self._loaded_global, _LIVE
        self._loaded_position = self._loaded_global = None
        kept, self._kept = self._kept, {}
        follows = loaded is not None and self._move_source(loaded, begins=first_batch == 0)
        if not (first_batch and loaded_global):
            if isinstance(self._source, Indexed):  # other sources read the batches that are done again, or have a state
                set_states(generators_of_datasets(self._loader), kept)
            return self._source.items(epoch, first_batch)
        # The order depends on the global generators at the beginning of the epoch. Once it is drawn again, they return
        # to the checkpoint's states, which the loop has restored.
        with rng.isolated():
            rng.restore(loaded_global)
            if not follows:
                # One batch at least, with which the order is drawn.
                passed = first_batch - 1 if self._source.skips else 0
                items = self._source.items(epoch, passed)
                for _ in islice(items, first_batch - passed):
                    pass
                set_states(generators_read(self._loader), kept)
                return items
            items = self._source.items(epoch, first_batch)
            if loaded is not None and not loaded["state"].get("draws", True):
                items = chain(list(islice(items, 1)), items)
            return items

    def _move_source(self, loaded: dict[str, Any], *, begins: bool) -> bool:
        """Move the source to a checkpoint's position; if it does not fit, warn that the epoch is read again."""
        same_ranks = loaded["world_size"] == self._world_size
        size = loaded["global_batch_size"]
        same_batches = same_ranks if size is None else size == self._source.global_batch_size
        position = self._source.position
        if (
            position is not None
            and (same_ranks or size is not None)
            and position.load(loaded["state"], begins=begins, same_ranks=same_ranks, same_batches=same_batches)
        ):
            return True
        if self._rank == 0:
            warn(
                f"{self._name}: the stream's position in the checkpoint is for a different loader, or for different "
                f"numbers of ranks ({loaded['world_size']} then, {self._world_size} now) or workers, so the epoch is "
                "read again from its start. This is correct unless positions continue across epochs. In that case, "
                "resume with the same loader, ranks and workers."
            )
        return False

    def in_order(self, items: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the items; warn if the epoch was resumed, and its sampler draws another order than before."""
        before, self._loaded_order = self._loaded_order, None
        first = list(islice(items, 1))
        now = self._order_checksum() if before is not None and first else None  # nothing is left of a complete epoch
        if before is not None and now is not None and before[0] != now[0] and before[1:] == now[1:] and not self._rank:
            warn(
                f"{self._name}: the resumed run reads the samples of this epoch in another order than the run that "
                "wrote the checkpoint, so that some of them are read twice, and others not at all. The loader has "
                "another sampler than in that run, or the sampler's order depends on something that the checkpoint has "
                "from a later time, or does not have: the model, weights that a callback sets, a generator without a "
                "seed. Let it draw the order from its epoch (set_epoch) or from the global generators of torch, numpy "
                "or Python, give it a state_dict() and load_state_dict() with what determines the order, or write "
                "checkpoints at the end of epochs only."
            )
        yield from first
        yield from items

    def _order_checksum(self) -> list[int] | None:
        """Return a checksum of the beginning of the epoch's order, and the sizes that it depends on, if it is known."""
        digest = self._source.order_checksum() if isinstance(self._source, Indexed) else None
        return None if digest is None else [digest, self._world_size, self._source.global_batch_size or 0]

    def note(
        self, items: Iterator[tuple[Any, Any]], read_ahead: Callable[[Iterator[tuple[Any, Any]]], Iterator[Any]]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield ``read_ahead(items)``, which reads items before it yields them; the position follows the yielded ones.

        ``read_ahead`` takes and yields pairs, and changes only their second element, the batch.
        """
        if self._source.position is None:
            yield from read_ahead(items)
            return
        placed = (((size, self._position_now()), batch) for size, batch in items)
        for (size, self._after_item), batch in read_ahead(placed):
            yield size, batch

    def state(self, plain: Callable[[Any, str], Any], *, ended: bool) -> dict[str, Any]:
        """Return the position as plain types and tensors; see :meth:`TrainFeed.state_dict`."""
        begin = None if ended else self._at_epoch_begin
        states = (self._random_states() if begin is None else begin).captured()
        states["generators"] = kept_in_checkpoints(states["generators"], plain, self._name)
        states["order"] = None if begin is None else self._order_checksum()
        position = self._source.position
        if self._loaded_position is not None or position is None:
            return {**states, "position": self._loaded_position}
        try:
            now = self._position_now() if self._after_item is _LIVE else self._after_item
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
        sizes = {"world_size": self._world_size, "global_batch_size": self._source.global_batch_size}
        return {**states, "position": {**sizes, "state": state}}

    def load(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state`; generators that no longer exist are ignored."""
        set_states(self._generators, state["generators"])
        if self._draws_globally:
            self._loaded_global = state["global"]
        # Older checkpoints contain the workers' random states here.
        self._replaces_workers = bool(state.get("workers")) and persistent_workers(self._source.loader) is None
        self._loaded_position = state.get("position")
        self._loaded_order = state.get("order")

    def keep_generators(self, states: dict[str, Any]) -> None:
        """Set these states of generators once the batches that are done have been skipped."""
        self._kept = states

    def _position_now(self) -> Any:
        """Return the source's position; the error of the user's ``state_dict`` is returned, and raised if it counts."""
        assert self._source.position is not None  # checked by the callers
        try:
            return self._source.position.now()
        except Exception as error:
            return error

    def _random_states(self) -> _States:
        """Return the current states. A later :meth:`_States.captured` costs time, and is called only by checkpoints."""
        return _States(
            generators={name: generator.get_state() for name, generator in self._generators.items()},
            of_process=rng.read(only_torch=self._source.draws_only_torch) if self._draws_globally else None,
            workers=self._replaces_workers or persistent_workers(self._source.loader) is not None,
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
