"""Split an ``IterableDataset`` over ranks: each sample is on one rank, with any number of workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from itertools import chain, islice
from types import FrameType
from typing import Any

import torch.distributed as dist
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    Sampler,
    default_collate,
    default_convert,
)

from trainloop._support import rng
from trainloop._support.rng import derive_seed
from trainloop.data.batch.batches import SampleCounter, integers_of
from trainloop.data.batch.randomness import IsolatedRandomState, SeedOnArrival, seed_cpu
from trainloop.data.batch.stops import slipped_out
from trainloop.data.loader.libraries import is_split, same_on_all_ranks
from trainloop.data.loader.loader_copies import copy_loader
from trainloop.data.order.orders import digest_of, rest_of
from trainloop.data.stream.positions import Place, is_stateful
from trainloop.errors import ConfigurationError


class StreamPart:
    """A rank's samples of one global batch of a stream."""

    def __init__(
        self, batch: Any, size: int | None, place: tuple[int, bytes] | None = None, is_turn: bool = False
    ) -> None:
        self.batch = batch
        self.size = size
        """Samples in ``batch``; None if the rank has no samples."""
        self.place = place
        """The worker and its position after this part, pickled; None if the dataset has no state."""
        self.is_turn = is_turn
        """True if the part has no global batch, and only says that it is the worker's turn."""
        self.repeated = False
        """True if other workers yield the same samples, because the dataset does not divide them over workers."""
        self.digest: int | None = None
        """In a pass's first part: checksum of the samples of all ranks, which all ranks must have read alike."""

    def pin_memory(self, *args: Any) -> StreamPart:
        """Return the part with its batch in pinned memory; a loader with ``pin_memory`` calls this."""
        # torch's function for nested containers; not public up to 2.13.
        from torch.utils.data._utils.pin_memory import pin_memory

        part = copy(self)
        part.batch = pin_memory(self.batch, *args)
        return part


class StreamShard(IterableDataset[Any]):
    """One rank's samples of each global batch of an iterable dataset.

    Each rank reads the whole stream, under the same random state, and keeps every ``world_size``-th sample of each
    global batch. In a loader with workers, a dataset that splits its samples over workers by ``get_worker_info``
    (itself, or in ``worker_init_fn``) works as usual. Any other dataset would yield every sample in every worker, so
    each worker keeps only every ``num_workers``-th global batch.

    Parameters
    ----------
    dataset : IterableDataset
        The user's dataset.
    batch_size : int or None
        Samples of one rank in a full global batch. If None, the dataset's elements are batches, of which each rank
        takes every ``world_size``-th.
    rank, world_size : int
        The rank whose shard this is, and the number of ranks.
    drop_last : bool
        True to leave out a short global batch.
    shared : bool
        True if other ranks read the same stream and must see the same samples.
    with_places : bool
        True to yield the position of a dataset with a state along with each global batch, also from workers. Training
        resumes from this position; evaluation does not need it.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        rank: int,
        world_size: int,
        drop_last: bool,
        shared: bool,
        with_places: bool,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.shared = shared
        self.stateful = with_places and is_stateful(dataset)
        self.places: dict[int, dict[str, Any]] = {}
        """Position from which each worker (0: this process) resumes, used once; see :class:`StreamPlaces`."""
        self._at_end = False  # True if the loaded state is the end of an epoch
        self.compares = shared and is_split(dataset) is None
        """True if ranks must compare the first global batch: it is not declared whether the dataset splits itself."""

    def __iter__(self) -> Iterator[tuple[list[Any] | None, int, Place | None, int | None]]:
        """Yield, for each global batch, this rank's samples (maybe none), its index in this worker, and the position.

        An item with None as samples is not a global batch, but a worker's skipped turn, or its position at the end.
        The last element is a checksum of the first global batch, if ranks must compare it.
        """
        worker = _WatchedWorkerInfo.current()
        if _EpochSeed.seed is not None and worker is not None:
            # A persistent worker serves many epochs, each of which starts from a separate seed.
            seed_cpu(derive_seed(_EpochSeed.seed, worker.info.id))
        size = (self.batch_size or 1) * self.world_size
        group_index = 0
        mine: list[Any] = []
        count = 0
        place = Place(self.dataset, worker) if self.stateful else None
        if place is None:
            samples = self._stream(None)
        else:
            loaded = self.places.pop(0 if worker is None else worker.info.id, None)
            if loaded is not None:
                place.load(loaded)
            at_end, self._at_end = self._at_end, place.ended
            if place.ended:
                return
            group_index = place.group
            if place.waits:
                yield None, group_index, None, None
            samples = place.read(self._stream, at_end=at_end)
        compared: list[Any] | None = [] if self.compares and not group_index else None
        for sample in samples:
            if count % self.world_size == self.rank:
                mine.append(sample)
            if compared is not None:
                compared += integers_of(sample)
            count += 1
            if count < size:
                continue
            digest, compared = None if compared is None else digest_of(compared), None
            # Checked for each batch: a dataset may read its worker's number only after its iteration has started.
            if worker is None or worker.takes(group_index):
                yield mine, group_index, place, digest
            group_index += 1
            mine, count = [], 0
        if place is not None:
            place.ended = True  # also set before a short last batch, where the dataset has reached its end
        if count and not (self.drop_last and self.batch_size) and (worker is None or worker.takes(group_index)):
            yield mine, group_index, place, None if compared is None else digest_of(compared)
            group_index += 1
        if place is not None:
            yield None, group_index, place, None

    def _stream(self, draws: dict[str, Any] | None) -> Iterator[Any]:
        if self.shared:
            return _same_on_all_ranks(self.dataset, draws)
        stream = iter(self.dataset)
        if draws is not None:
            rng.restore(draws)
        return rest_of(stream)

    def __len__(self) -> int:
        return -(-len(self.dataset) // ((self.batch_size or 1) * self.world_size))


def _same_on_all_ranks(dataset: Any, draws: dict[str, Any] | None) -> Iterator[Any]:
    """Return the dataset's samples, after reading the first to check that the dataset does not query the current rank.

    ``draws`` is the random state for drawing the first sample; None for the current state.

    Raises
    ------
    ConfigurationError
        If the dataset asks torch.distributed for the rank, and does not declare if it splits its samples.
    """
    asked: list[str] = []

    def noting(name: str, function: Callable[..., int]) -> Callable[..., int]:
        def ask(*args: Any, **kwargs: Any) -> int:
            if not _asks_as_loader(inspect.currentframe()):
                asked.append(name)
            return function(*args, **kwargs)

        return ask

    own = {name: getattr(dist, name) for name in ("get_rank", "get_world_size") if hasattr(dist, name)}
    for name, function in own.items():
        setattr(dist, name, noting(name, function))
    try:
        stream = iter(dataset)
        if draws is not None:
            rng.restore(draws)
        first = list(islice(rest_of(stream), 1))
    finally:
        for name, function in own.items():
            setattr(dist, name, function)
    # Each rank would keep a shard of what may already be its shard; most samples would never be used.
    if asked and is_split(dataset) is None:
        kind = type(dataset).__name__
        raise ConfigurationError(
            f"{kind} calls torch.distributed.{asked[0]}() while it is iterated, so it may already split its samples "
            f"over ranks. If it does, set {kind}.is_distributed = True, and each rank reads its own samples. If it "
            "yields the same samples on all ranks, set this to False, and trainloop splits them."
        )
    return chain(first, rest_of(stream))


def _asks_as_loader(frame: FrameType | None) -> bool:
    """Return True if the caller of ``frame``'s function is a DataLoader that starts an iterator of a plain dataset.

    Each iterator asks for the rank, but uses it only to split datapipes.
    """
    for _ in range(2):  # a function that reads rank and size, and its caller, which creates the iterator
        frame = frame.f_back if frame is not None else None
        if frame is None or frame.f_globals.get("__name__") != DataLoader.__module__:
            return False
    loader = frame.f_locals.get("loader") if frame is not None else None
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterDataPipe | MapDataPipe)


class PartCollate:
    """Collate a rank's samples of one global batch by the user's function, and count the samples.

    Parameters
    ----------
    collate_fn : callable
        The user's function.
    batched : bool
        True if the function takes a list of samples; False if it takes one element (``batch_size=None``).
    name : str
        The user's name for the loader, for messages.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool, rank: int, world_size: int, name: str) -> None:
        self.name = name
        self.collate_fn = collate_fn
        self.batched = batched
        self.rank = rank
        self.world_size = world_size
        self._counter = SampleCounter(name)
        self._trusts_plan = collate_fn in (default_collate, default_convert)
        self.epoch_seed = 0
        """The epoch's seed, set before each epoch for loading without workers (workers receive it with indices)."""

    def __call__(self, group: tuple[list[Any] | None, int, Place | None, int | None]) -> StreamPart:
        samples, group_index, place, digest = group
        part = self._part_of_group(samples, group_index) if samples else StreamPart(None, None, is_turn=samples is None)
        part.digest = digest
        if place is not None:
            part.place = place.saved(group_index + (samples is not None))  # after collating, which may draw, too
        return part

    def _part_of_group(self, samples: list[Any], group_index: int) -> StreamPart:
        if self.world_size == 1:
            batch = self._collate(samples)
        else:
            # Collating happens on this rank only, so its draws must not change the stream's random state, which must
            # remain the same on all ranks.
            seed = self.epoch_seed if _EpochSeed.seed is None else _EpochSeed.seed
            with IsolatedRandomState(derive_seed(seed, "collate", self.rank, group_index)):
                batch = self._collate(samples)
        planned = len(samples) if self.batched else None
        if planned is None or not self._trusts_plan:
            planned = self._counter.count(batch, planned)
        return StreamPart(batch, planned)

    def _collate(self, samples: list[Any]) -> Any:
        try:
            return self.collate_fn(samples if self.batched else samples[0])
        except StopIteration as stop:  # a worker would treat it as the end of the stream
            raise slipped_out(stop, self.name) from stop


class _EpochSeed:
    """The current epoch's seed in a worker, received with the indices; None before the first."""

    seed: int | None = None

    @staticmethod
    def set(seed: int) -> None:
        _EpochSeed.seed = seed


class EndlessSampler(Sampler[Any]):
    """An endless sampler for a stream's loader, which requests batches without an index."""

    def __init__(self) -> None:
        self.seed: int | None = None

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield None if self.seed is None else SeedOnArrival(None, self.seed, _EpochSeed.set)


class _WatchedWorkerInfo:
    """A worker's info that records if the dataset reads the worker's number."""

    def __init__(self, info: Any) -> None:
        self.info = info
        """The worker's own info, which may be read without a record."""
        self.asked = False
        """True if the dataset has read the worker's number, in this run or in an earlier one."""

    def __getattr__(self, name: str) -> Any:
        if name in ("id", "num_workers"):
            self.asked = True
        return getattr(self.__dict__["info"], name)

    @property
    def repeats(self) -> bool:
        """True if there are other workers, and the dataset has not asked which one this is."""
        return not self.asked and self.info.num_workers > 1

    def takes(self, group_index: int) -> bool:
        """Return True if this worker yields the global batch ``group_index`` of its stream."""
        return self.asked or group_index % self.info.num_workers == self.info.id

    @staticmethod
    def current() -> _WatchedWorkerInfo | None:
        """The watched info of this worker; None outside workers."""
        info: Any = torch_worker._worker_info
        assert info is None or isinstance(info, _WatchedWorkerInfo), "WatchWorker is the loader's worker_init_fn"
        return info


class WatchWorker:
    """``worker_init_fn`` that installs the user's dataset and a watched info, then calls the user's function."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info: Any = torch_worker._worker_info
        dataset = info.dataset.dataset if isinstance(info.dataset, StreamShard) else info.dataset
        user_info = torch_worker.WorkerInfo(id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=dataset)
        torch_worker._worker_info = _WatchedWorkerInfo(user_info)  # type: ignore[assignment]  # has its attributes
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def stream_loader(loader: Any, rank: int, world_size: int, *, shared: bool, with_places: bool, name: str) -> Any:
    """Return a loader of an iterable dataset that yields this rank's :class:`StreamPart` of each global batch."""
    batch_size = None if loader.batch_sampler is None else loader.batch_size
    changes: dict[str, Any] = {
        "dataset": StreamShard(
            same_on_all_ranks(loader.dataset), batch_size, rank, world_size, loader.drop_last, shared, with_places
        ),
        "sampler": EndlessSampler(),
        "batch_sampler": None,  # StreamShard cuts the stream into batches
        "collate_fn": PartCollate(loader.collate_fn, batch_size is not None, rank, world_size, name),
    }
    if loader.num_workers > 0:
        changes["worker_init_fn"] = WatchWorker(loader.worker_init_fn)
    return copy_loader(loader, **changes)


class CountingCollate:
    """Collate samples by the user's function, and count them.

    Parameters
    ----------
    collate_fn, batched, name
        As for :class:`PartCollate`.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool, name: str) -> None:
        self.collate_fn, self.batched = collate_fn, batched
        self._counter = SampleCounter(name)

    def __call__(self, samples: Any) -> StreamPart:
        batch = self.collate_fn(samples)
        part = StreamPart(batch, self._counter.count(batch, len(samples) if self.batched else None))
        worker = _WatchedWorkerInfo.current()
        part.repeated = worker is not None and worker.repeats
        return part


def counting_loader(loader: Any, name: str) -> Any:
    """Return a copy of an iterable dataset's loader that yields each batch as a :class:`StreamPart`, with its size."""
    collate = CountingCollate(loader.collate_fn, loader.batch_sampler is not None, name)
    init = {"worker_init_fn": WatchWorker(loader.worker_init_fn)} if loader.num_workers > 0 else {}
    return copy_loader(loader, collate_fn=collate, **init)


def seed_stream(loader: Any, seed: int) -> None:
    """Set the seed of a :func:`stream_loader`'s next epoch.

    It is the same on all ranks, so that they read one stream.
    """
    loader.collate_fn.epoch_seed = seed
    # Without workers, the caller isolates the whole iteration instead.
    loader.sampler.seed = seed if loader.num_workers > 0 else None
