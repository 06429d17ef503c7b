"""Resume a stream at the position in its ``state_dict()``, or read the stream again with the same random numbers.

A stream without ``state_dict()`` is read again from the beginning of its epoch, with the same result if the stream is
deterministic. A stream with a state resumes from that state: this is faster, and the only correct way if the stream's
position continues across epochs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from trainloop._support import rng
from trainloop._support.nested import packed, unpacked
from trainloop.data.batch.randomness import IsolatedRandomState
from trainloop.data.batch.starting import started_with_workers
from trainloop.data.batch.stops import guard_stop_iteration
from trainloop.data.loader import libraries
from trainloop.data.loader.parts import has_state
from trainloop.data.order.orders import length_of

T = TypeVar("T")


def is_stateful(thing: Any) -> bool:
    """Return True if a dataset or loader can report its position, and resume exactly from there."""
    # A nearly correct state must not be used: without a state the epoch is read again, which is correct.
    return has_state(thing) and libraries.resumes_exactly(thing)


def holder_of(loader: Any) -> Any:
    """Return the object whose state is the position of a loader read in this process; None if there is no such object.

    A loader of an indexed dataset has no such object: its epoch is repeated from the beginning, with the same random
    numbers in workers, which no loader's state contains.
    """
    if not isinstance(loader, DataLoader):
        return loader if is_stateful(loader) else None
    if not isinstance(loader.dataset, IterableDataset):
        return None
    dataset = loader.dataset if is_stateful(loader.dataset) else None
    if is_stateful(loader):
        # torchdata's loader always has a state. For a dataset without a state, it repeats the beginning, with other
        # draws.
        return loader if dataset is not None or not libraries.is_torchdata(loader) else None
    return dataset if loader.num_workers == 0 else None


class InProcess:
    """The position of a loader that this process iterates, from the state of :func:`holder_of`'s object."""

    @classmethod
    def of(cls, loader: Any, name: str) -> InProcess | None:
        """Return the position of a user's loader; None if no object's state contains the position."""
        holder = holder_of(loader)
        return None if holder is None else cls(holder, loader, name)

    def __init__(self, holder: Any, loader: Any, name: str) -> None:
        self._holder, self._loader, self._name = holder, loader, name
        self._iterator: Any = None
        self._num_batches = None if isinstance(loader, DataLoader) else length_of(loader)
        self._count = 0
        self._begun = self._ended = self._draws = self._at_end = False
        self._loaded: dict[str, Any] | None = None
        self.resumes = False
        self.isolated: IsolatedRandomState | None = None
        """Random state in which the loader is iterated; None for the process's own state."""

    def now(self) -> dict[str, Any] | None:
        """Return a copy of the position, since a holder may return an object that it keeps changing."""
        if not self._begun:
            return self._loaded
        own = packed(pickle.loads(pickle.dumps(self._holder.state_dict())))
        draws = None
        if self.isolated is not None and self._draws and not self._ended:
            with self.isolated:
                draws = rng.capture(devices=False)
        # A short last batch means that the dataset has ended, as the loader's own state also shows.
        fetcher = getattr(self._iterator, "_dataset_fetcher", None)
        ended = self._ended or self._count == self._num_batches or getattr(fetcher, "ended", False)
        return {"of": type(self._holder).__name__, "own": own, "draws": self._draws, "rng": draws, "ended": ended}

    def state(self, now: Any) -> dict[str, Any] | None:
        """Return ``now`` unchanged: it is already plain data."""
        return now

    def load(self, state: dict[str, Any], *, begins: bool, same_ranks: bool, same_batches: bool) -> bool:
        """Load the holder's state; return False if it does not fit.

        A state of another number of ranks does not fit, since those ranks have read other parts of a round.
        """
        # The loader's library defines the content of the state, so only the type's name shows if it is from this
        # loader.
        if not same_ranks or state.get("of") != type(self._holder).__name__ or state.get("own") is None:
            return False
        if begins and self._holder is self._loader and not state["ended"]:
            return True  # the epoch was interrupted, and a loader's next iteration starts from the beginning
        self._holder.load_state_dict(unpacked(state["own"]))
        self._loaded, self.resumes = state, not begins
        self._begun = False
        return True

    def read(self) -> Iterator[Any]:
        """Return an iterator over the loader's batches from the loaded position on; it counts the batches."""
        loaded, self._loaded = self._loaded, None
        if self.resumes and loaded is not None and loaded["ended"] and not isinstance(self._holder, DataLoader):
            self.resumes = False
            self._begun = self._ended = self._at_end = True
            return iter(())
        at_end = self._at_end or (loaded is not None and not self.resumes)
        batches = retry_if_empty(self._iterated) if at_end else self._iterated()
        self._at_end = False
        self._draws = self.resumes and loaded is not None and loaded["draws"]
        if self._draws and loaded is not None and loaded["rng"] is not None:
            rng.restore(loaded["rng"])
        self._begun = self._ended = self.resumes = False
        self._count = 0
        return self._with_noted_draws(batches)

    def _iterated(self) -> Iterator[Any]:
        self._iterator = started_with_workers(self._loader, self._name)
        return guard_stop_iteration(self._iterator, self._name)

    def _with_noted_draws(self, batches: Iterator[T]) -> Iterator[T]:
        while True:
            before = None if self._draws or not self._begun else rng.read(devices=False)
            try:
                batch = next(batches)
            except StopIteration:
                break
            self._draws = self._draws or (before is not None and rng.drew(before, devices=False))
            self._begun = True
            self._count += 1
            yield batch
        self._begun = self._ended = True


class Place:
    """A stream's position in the process that reads it: this process, or a loader's worker.

    If the stream draws from global generators for each item, its position includes their state. If the stream draws
    only at its start (for example an order) or never, it restarts from the epoch's first state, to get the same order.
    """

    def __init__(self, dataset: Any, worker: Any) -> None:
        self._dataset = dataset
        self._worker = worker
        self._draws_each = self._restarts = False
        self._draws: dict[str, Any] | None = None
        self._at_first: rng.States | None = None
        self.group = 0
        """Index of the first global batch of this pass."""
        self.begun = self.ended = False
        self.waits = False
        """True if the worker has had its turn in the loader's current round."""

    def load(self, state: dict[str, Any]) -> None:
        """Load the dataset's state, and what :class:`StreamPlaces` knows of the worker."""
        self._dataset.load_state_dict(unpacked(state["own"]))
        self.ended = state["ended"]
        if self.ended:
            return
        self.group, self.waits, self._draws = state["group"], state["waits"], state["rng"]
        self._restarts = state["begins"]
        self._draws_each = self._draws is not None
        if self._worker is not None and state["asked"]:
            self._worker.asked = True

    def read(self, stream: Callable[[dict[str, Any] | None], Iterator[T]], *, at_end: bool) -> Iterator[T]:
        """Yield the samples of ``stream(draws)``, where ``draws`` is the random state for the first sample, or None.

        ``at_end`` is True if the dataset's state may be the end of an epoch, as it is if a loaded epoch begins.
        """
        at_end = at_end or self._restarts
        for sample in retry_if_empty(lambda: stream(self._draws)) if at_end else stream(self._draws):
            if not self.begun:
                self.begun = True
                if not self._draws_each:
                    self._at_first = rng.read(devices=False)
            yield sample

    def saved(self, group: int) -> tuple[int, bytes]:
        """Return the worker, and its state for resuming at the global batch ``group``.

        The state is pickled, since the dataset may keep changing the object that it returned, and the loader would send
        tensors through files.
        """
        reads = self.begun and not self.ended
        if reads and not self._draws_each:
            assert self._at_first is not None  # read() has set it
            self._draws_each = rng.drew(self._at_first, devices=False)
        place: dict[str, Any] = {
            "group": group,
            "asked": self._worker is not None and self._worker.asked,
            "ended": self.ended,
            "rng": rng.capture(devices=False) if reads and self._draws_each else None,
        }
        try:
            data = pickle.dumps({**place, "own": packed(self._dataset.state_dict())})
        except Exception as error:  # a user's __reduce__ may raise anything; state() reports it
            data = pickle.dumps({**place, "own": None, "error": f"{type(error).__name__}: {error}"})
        return 0 if self._worker is None else self._worker.info.id, data


class StreamPlaces:
    """The positions of all processes that read a stream, after the last global batch taken from each.

    Parameters
    ----------
    loader : DataLoader
        Loader of a :class:`~trainloop.data.stream.streams.StreamShard`.
    presharded : bool
        True if the stream is already this rank's shard; else every rank reads all of it and keeps a part.
    """

    def __init__(self, loader: Any, presharded: bool) -> None:
        self._loader = loader
        self._presharded = presharded
        self._places: dict[int, tuple[int, bytes]] = {}
        self._ended = False
        self.resumes = False

    def read(self, parts: Iterator[Any]) -> Iterator[Any]:
        """Yield the parts of an epoch, from its beginning or from a loaded position, without workers' skipped turns."""
        if not self.resumes:
            # Until its first turn, a persistent worker's position is the end of the last epoch.
            self._places = {worker: (0, data) for worker, (_, data) in self._places.items() if self._outlives_epoch}
        self._ended = self.resumes = False
        if self._loader.num_workers:
            self._loader.dataset.places = {}  # the workers have received the places at their start
        for part in parts:
            if part.place is not None:
                worker, data = part.place
                self._places[worker] = self._places.get(worker, (0, b""))[0] + 1, data
            if not part.is_turn:
                yield part
        self._ended = True

    def now(self) -> dict[int, tuple[int, bytes]]:
        """Return pickled positions by worker; empty after an epoch if the workers have ended with the epoch."""
        return {} if self._ended and not self._outlives_epoch else dict(self._places)

    @property
    def _outlives_epoch(self) -> bool:
        # Other workers start again each epoch, with the dataset as it is in this process.
        return self._loader.persistent_workers or not self._loader.num_workers

    def state(self, now: dict[int, tuple[int, bytes]]) -> dict[str, Any] | None:
        """Return each worker's number of turns in this epoch, and the state from which it resumes; None if unknown."""
        workers = {worker: {**pickle.loads(data), "turns": turns} for worker, (turns, data) in now.items()}
        for place in workers.values():
            if "error" in place:
                raise TypeError(place["error"])
        if not workers:
            return None
        return {
            "of": type(self._loader.dataset.dataset).__name__,
            "workers": workers,
            "num_workers": self._loader.num_workers,
            "own_share": self._presharded,
        }

    def load(self, state: dict[str, Any], *, begins: bool, same_ranks: bool, same_batches: bool) -> bool:
        """Set the position of each worker; return False if the state does not fit.

        Without workers, if each rank keeps a part of the whole stream, the stream's position fits any number of ranks.
        """
        shard, num_workers = self._loader.dataset, self._loader.num_workers
        same = state.get("num_workers") == num_workers and state["own_share"] == self._presharded
        if not same or state["of"] != type(shard.dataset).__name__ or not shard.stateful:
            return False
        if not (same_ranks or not self._presharded) or not (same_batches or not num_workers):
            return False
        places: dict[int, dict[str, Any]] = state["workers"]
        fresh = {"group": 0, "ended": False, "rng": None, "waits": False, "begins": True}
        if begins:
            shard.places = {worker: {**p, **fresh} for worker, p in places.items()} if self._outlives_epoch else {}
            self._places = {worker: (0, pickle.dumps(p)) for worker, p in places.items()}
            return True
        # A loader reads its workers in turn, from the first on; a worker that has had its turn in this round skips it.
        unread = {"turns": 0, "ended": False}
        turns = [places.get(worker, unread) for worker in range(max(1, num_workers))]
        round_begun = min((p["turns"] for p in turns if not (p["turns"] and p["ended"])), default=0)
        shard.places = {
            worker: {**p, "waits": p["turns"] > round_begun, "begins": False} if p["turns"] else {**p, **fresh}
            for worker, p in places.items()
        }
        self._places = {worker: (p["turns"], pickle.dumps(p)) for worker, p in places.items()}
        self.resumes = True
        return True


Position = InProcess | StreamPlaces
"""A source's position after the last batch that the source yielded, from the state of the user's own objects.

``resumes`` is True if the next items are the rest of an epoch, so that no item must be skipped. ``now()`` returns a
handle of the current position. ``state(now)`` converts this handle into data, even after further batches. Both may
raise any exception of the user's objects. ``load(state)`` returns True if the source has moved to the position.
"""


def retry_if_empty(read: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Return the items of ``read()``; if there are no items, call it again and return the items of the second call.

    After an epoch, the state of some streams is the epoch's end, although the next iteration starts from the beginning.
    If such a state is loaded, the first pass is empty.
    """
    items = read()
    first = list(islice(items, 1))
    return chain(first, items) if first else read()
