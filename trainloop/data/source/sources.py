"""Define sources of a rank's batches, and the plan of all ranks' batches: one class for each kind of loader.

A source yields this rank's part of one global batch after another. The source for loaders of indexed datasets is in
:mod:`trainloop.data.source.indexed`. Training chooses a source in :mod:`trainloop.data.feed.train`, and groups its
batches into steps. Evaluation chooses a source in :mod:`trainloop.data.feed.evaluation`, which gives each rank whole
batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice, repeat
from typing import Any, TypeVar

from torch.utils.data import (
    DataLoader,
    MapDataPipe,
    Subset,
    TensorDataset,
)
from torch.utils.data.dataloader import default_collate
from torch.utils.data.distributed import DistributedSampler

from trainloop._support.rng import derive_seed
from trainloop._support.sharding import BatchPlan, shard_size
from trainloop._support.user_line import warn
from trainloop.data.batch.batches import SampleCounter, integers_of, may_change_count
from trainloop.data.batch.randomness import IsolatedRandomState, isolated_iter
from trainloop.data.batch.starting import start_reading
from trainloop.data.batch.stops import slipped_out
from trainloop.data.loader import libraries, loaders
from trainloop.data.loader.loader_copies import copy_loader
from trainloop.data.order.columns import SplitBatches
from trainloop.data.order.orders import batches_of, cuts_torchs_order, digest_of, length_of, rest_of, size_of
from trainloop.data.order.samplers import RankSizes
from trainloop.data.source.tensors import TensorRows, draw_base_seed, loader_batches, loads_batches_here
from trainloop.data.stream.positions import InProcess, Position, StreamPlaces
from trainloop.data.stream.streams import StreamPart, counting_loader, seed_stream, stream_loader

T = TypeVar("T")


class Source:
    """Base class of all sources: reads passes of a loader, and yields this rank's part of each global batch."""

    loader: Any
    """The loader that is read: the user's, or its copy for this rank."""

    shares: bool = True
    """True if ranks split one common order; False if each rank's loader has a separate order."""

    sizes_known: bool = True
    """True if items are ``(sizes, batch)``, with the sizes of all ranks; False for ``(size, batch)`` of this rank."""

    counts: bool = False
    """True if the loader's own code may leave out or multiply samples, so that each batch is counted when it arrives:
    items are ``(size, batch)`` even if the plan of sizes is known."""

    num_batches: int | None = None
    """Global batches of a pass; None if unknown before reading."""

    num_samples: int | None = None
    """Samples of a pass, over all ranks; None if unknown before reading."""

    global_batch_size: int | None = None
    """Samples of a full global batch; None if undefined."""

    loader_batches: int = 1
    """Batches of the loader in a global batch: one for each rank, unless ranks divide the same batch."""

    position: Position | None = None
    """Position according to the state of the user's stream or loader; None if neither has a state."""

    @property
    def rule(self) -> str:
        """Name of the method by which ranks obtain the same order; it determines which exchanges they do."""
        return type(self).__name__

    @property
    def draws_order(self) -> bool:
        """True if a pass's order may depend on the seed."""
        return True

    @property
    def draws_only_torch(self) -> bool:
        """True if reading a pass draws no numbers from the generators of Python and numpy."""
        return False

    @property
    def skips(self) -> bool:
        """True if the batches before the first one that is asked for are not read, and the order is the same.

        False if it draws random numbers between the batches, or if this is unknown.
        """
        return False

    @property
    def order_digest(self) -> int | None:
        """Checksum of a pass's order, which must agree on all ranks; None if the order can't differ.

        In training, it covers the beginning of the pass, and is known after the first item. In evaluation, it covers
        the entire pass, and is known at the end.
        """
        return self._digest

    _digest: int | None = None

    @property
    def shard_digest(self) -> int | None:
        """Checksum of the first batch of a pass, which a sampler of the user has chosen for this rank.

        None if no such sampler was copied to ranks. Known after the first item.
        """
        return None

    def _comparing_first(self, items: Iterator[T], digest: Callable[[T], int | None]) -> Iterator[T]:
        """Return the items after taking the first one's checksum, where all ranks must read the same first item."""
        first = list(islice(items, 1))
        self._digest = (digest(first[0]) if first else None) or 0
        return chain(first, items)

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's part of each global batch of an epoch from ``first_batch`` on, with its size or sizes.

        After ``position.load()``, yield the parts that follow the loaded position. If this rank has no part in a global
        batch, its entry in ``sizes``, or its ``size``, is None, and the batch must be ignored.
        """
        raise NotImplementedError

    def row_order(self, sizes: Sequence[int]) -> Sequence[int] | None:
        """Return the permutation to dataset order; see :meth:`trainloop.data.EvalFeed.row_order`."""
        return None

    def note_indices(self) -> None:
        """Record indices for :meth:`next_indices` from the next pass on; some sources always record them."""

    def next_indices(self) -> Any:
        """Return the indices of the batch that is read next, or that could not be read; None if unknown."""
        return None


def plan_of(loader: Any, world_size: int = 1) -> BatchPlan | None:
    """Return the plan of an epoch of a loader that cuts a sampler of known length into batches."""
    batches = loaders.plain_batches(loader)
    length = None if batches is None else length_of(batches.sampler)
    if batches is None or length is None:
        return None
    return BatchPlan(length, batches.batch_size, world_size, batches.drop_last)


def plans_of_ranks(loader: Any, plan: BatchPlan, world_size: int) -> list[BatchPlan]:
    """Return the plan of each rank's epoch of a loader that is already split over ranks; ``plan``: this rank's."""
    batches: Any = loaders.plain_batches(loader)
    sampler: Any = loaders.distributed_sampler(loader)
    if batches is None or batches.sampler is not sampler or isinstance(sampler, DistributedSampler):
        return [plan] * world_size  # all ranks have equal numbers
    rank = sampler.rank
    plans = []
    try:
        for other in range(world_size):
            sampler.rank = other
            plans.append(BatchPlan(length_of(sampler) or 0, batches.batch_size, 1, batches.drop_last))
    finally:
        sampler.rank = rank
    return plans


class LoggedIndices:
    """A user's batch sampler, with a log of the batches that were requested and have not arrived yet.

    Parameters
    ----------
    base : iterable
        The batch sampler; its attributes can be read from this object, too.
    """

    def __init__(self, base: Any) -> None:
        self.base = base
        self.log: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.log.clear()
        return self._logged(batches_of(self.base))  # now: the sampler may draw random numbers when its iteration starts

    def _logged(self, batches: Iterator[Any]) -> Iterator[Any]:
        for indices in rest_of(batches):
            self.log.append(indices)
            yield indices

    def __len__(self) -> int:
        return len(self.base)

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # during unpickling
            raise AttributeError(name)
        return getattr(self.base, name)

    def taken_size(self) -> int | None:
        """Remove the entry of the batch that has arrived; return its number of indices, or None for anything else."""
        size = size_of(self.log.popleft()) if self.log else -1
        return None if size < 0 else size


_REPEATED = (
    "{}: its IterableDataset does not divide its samples over the loader's {} workers, so each worker yields every "
    "sample, as in a hand-written loop. Pass TrainLoop(seed=...), with which trainloop divides the samples (as in ddp "
    "and fsdp), use torch.utils.data.get_worker_info() in the dataset's __iter__, or use num_workers=1."
)


class UserLoader(Source):
    """The user's loader, iterated as in a hand-written loop; for one process without a seed."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self._name = name
        self._plan = plan_of(loader)
        # An __iter__ of the user's own may yield other batches than the sampler cuts.
        self._own_iter = loaders.iterates_itself(loader)
        self._batch_size = getattr(loader, "batch_size", None)
        self.num_batches = None if loaders.is_stream(loader) else length_of(loader)
        self.num_samples = None if self._plan is None else self._plan.num_taken
        self.global_batch_size = self._batch_size if self._plan is None else self._plan.batch_size
        self.counts = may_change_count(loader)
        self._counter = SampleCounter(name, self._batch_size)
        self._counted: LoggedIndices | None = None
        self._warned = False
        # The workers of a loader with persistent workers are those of the user's loader, so it is not copied.
        reads_loader = isinstance(loader, DataLoader) and not loaders.iterates_itself(loader)
        if reads_loader and loaders.is_stream(loader) and not loader.persistent_workers:
            self.loader = counting_loader(loader, name)
        elif not getattr(loader, "in_order", True):  # otherwise, batches would get each other's sizes
            if reads_loader and not loader.persistent_workers:
                self.loader = copy_loader(loader)
            else:
                self._own_iter = True
        self.position = self._place = InProcess.of(self.loader, name)
        self._copyable = (
            self._place is None
            and reads_loader
            and loader.batch_sampler is not None
            and not loaders.is_stream(loader)
            and not loader.persistent_workers
        )
        if self._plan is None:  # only the sampler knows how many samples a batch has
            self.note_indices()

    def note_indices(self) -> None:
        if self._counted is None and self._copyable:
            self._counted = LoggedIndices(self.loader.batch_sampler)
            self.loader = copy_loader(self.loader, batch_sampler=self._counted)

    def next_indices(self) -> Any:
        return self._counted.log[0] if self._counted is not None and self._counted.log else None

    @property
    def skips(self) -> bool:
        return self._place is None and _skips(self.loader)

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        # Not a generator: the loader's iterator must be created now, in the caller's random state.
        if self._plan is not None:
            self._plan = plan_of(self.loader)  # the sampler may have another length in each epoch
        passed = 0 if self.skips or (self._place is not None and self._place.resumes) else first_batch
        batches = _batches_of(self.loader, self._name, first_batch) if self._place is None else self._place.read()
        # zip() asks for the size once the batch has arrived.
        taken = repeat(None) if self._counted is None else iter(self._counted.taken_size, -1)
        return self._sized(islice(zip(batches, taken), passed, None), first_batch)

    def _sized(self, batches: Iterator[tuple[Any, int | None]], first_batch: int) -> Iterator[tuple[Any, Any]]:
        planned = islice(() if self._plan is None else self._plan.all_shares(), first_batch, None)
        for batch, taken in batches:
            sizes = next(planned, None if taken is None else (taken,))
            if isinstance(batch, StreamPart):
                if batch.repeated and not self._warned:
                    self._warned = True
                    warn(_REPEATED.format(self._name, self.loader.num_workers))
                yield (batch.size if self.counts else (batch.size,)), batch.batch
            elif self.counts or sizes is None or self._own_iter:
                size = self._counter.count(batch, None if sizes is None else sizes[0])
                yield (size if self.counts else (size,)), batch
            else:
                yield sizes, batch


def _skips(loader: Any) -> bool:
    """Return True if :func:`_batches_of` passes over batches without loading them, and draws the same order.

    The order of torch's samplers does not depend on numbers that the dataset draws.
    """
    here = loads_batches_here(loader) and not loaders.is_stream(loader) and not isinstance(loader.dataset, MapDataPipe)
    return here and cuts_torchs_order(loader.batch_sampler)


def _batches_of(loader: Any, name: str, first: int = 0) -> Iterator[Any]:
    """Return an iterator with the same batches and random draws as ``iter(loader)``; see :func:`_skips`.

    Without workers, this calls the loader's sampler, dataset and ``collate_fn`` directly. That avoids the profiler mark
    that torch sets around each batch, which takes 20 of the 500 microseconds of a small model's step.
    """
    if not loads_batches_here(loader) or loaders.is_stream(loader) or isinstance(loader.dataset, MapDataPipe):
        return start_reading(loader, name)
    dataset: Any = loader.dataset
    fetch, collate = getattr(dataset, "__getitems__", None), loader.collate_fn
    batches_of_indices = batches_of(loader.batch_sampler)
    draw_base_seed(loader)

    def load(indices: Any) -> Any:
        try:
            return collate(fetch(indices) if fetch else [dataset[index] for index in indices])
        except StopIteration as stop:
            raise slipped_out(stop, name) from stop

    return map(load, islice(rest_of(batches_of_indices), first if _skips(loader) else 0, None))


class Tensors(Source):
    """The batches and random draws of a ``TensorDataset``'s loader, at less cost; for one process without a seed."""

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        self.loader = loader
        self._name = name
        plan = plan_of(loader)
        self.num_batches = length_of(loader)
        self.num_samples = None if plan is None else plan.num_taken
        self.global_batch_size = None if plan is None else plan.batch_size

    @property
    def draws_only_torch(self) -> bool:
        """True for torch's own samplers, collate function and dataset. They may have changed since the last pass."""
        batches, dataset = self.loader.batch_sampler, self.loader.dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
        return (
            cuts_torchs_order(batches) and type(dataset) is TensorDataset and self.loader.collate_fn is default_collate
        )

    @property
    def skips(self) -> bool:
        return TensorRows.of(self.loader) is not None

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        # In each pass, since the dataset's tensors and indices may have changed.
        rows = TensorRows.of(self.loader)
        if rows is not None:
            batches = loader_batches(rows, self.loader, first_batch)
        else:
            batches = islice(_batches_of(self.loader, self._name), first_batch, None)
        sizes: RankSizes = (0,)
        for batch in batches:
            # Yield the same tuple while nothing changes, so that step weights can be reused by identity.
            size = batch[0].shape[0]  # len(), of a tensor, is a function in Python
            if size != sizes[0]:
                sizes = (size,)
            yield sizes, batch


class Stream(Source):
    """An iterable dataset's loader; a copy of the loader reads the whole stream and keeps this rank's samples."""

    sizes_known = False

    def __init__(
        self, loader: DataLoader[Any], rank: int, world_size: int, seed: int, name: str, presharded: bool
    ) -> None:
        self._name, self.shares = name, not presharded
        self._seed = derive_seed(seed, "stream", rank) if presharded else derive_seed(seed, "stream")
        # A stream that is already this rank's shard is read as by one process.
        shared = world_size > 1 and not presharded
        self.loader = stream_loader(
            loader, *((0, 1) if presharded else (rank, world_size)), shared=shared, with_places=True, name=name
        )
        batch_size = None if loader.batch_sampler is None else loader.batch_size
        self.global_batch_size = None if batch_size is None else batch_size * world_size
        self.loader_batches = world_size
        # A stream's length, and how workers divide it, depend on the dataset: an estimate, not a guarantee.
        length = length_of(loader.dataset)
        plan = BatchPlan(length or 0, batch_size or 1, 1 if presharded else world_size, loader.drop_last)
        self.num_batches = None if length is None else plan.num_batches
        self.num_samples = None if length is None or batch_size is None or presharded else length
        self._places = StreamPlaces(self.loader, presharded=presharded)
        self.position = self._places if self.loader.dataset.stateful else None
        self._digest = 0 if self.loader.dataset.compares else None

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[int | None, Any]]:
        # The seed is the same on all ranks, unlike for a map-style dataset's batches: ranks must read one stream.
        seed = derive_seed(self._seed, epoch)
        seed_stream(self.loader, seed)
        isolated = IsolatedRandomState(seed)
        with isolated:
            parts = start_reading(self.loader, self._name)
        if self.loader.num_workers == 0:
            parts = isolated_iter(parts, isolated)
        if self.position is not None:
            first_batch = 0 if self.position.resumes else first_batch
            parts = self._places.read(parts)
        if self._digest is not None:
            parts = self._comparing_first(parts, lambda part: part.digest)
        for part in islice(parts, first_batch, None):
            yield part.size, part.batch


class Opaque(Source):
    """An opaque iterable: each rank iterates all of it, and keeps every ``world_size``-th batch.

    Parameters
    ----------
    seed : int or None
        None to draw from the global generators, without isolation.
    presharded : bool
        True if the iterable is already this rank's shard, so that the rank keeps all batches.
    with_position : bool
        True to track the iterable's position, if it has a state, so that training can resume from it.
    """

    sizes_known = False

    def __init__(
        self,
        loader: Any,
        rank: int,
        world_size: int,
        seed: int | None,
        name: str,
        *,
        presharded: bool,
        with_position: bool,
    ) -> None:
        self.loader = loader if seed is None else libraries.same_on_all_ranks(loader)
        self._name, self.shares = name, not presharded
        self._seed = None if seed is None else derive_seed(seed, "stream", *([rank] if presharded else []))
        self._rank, self._step = (0, 1) if presharded else (rank, world_size)
        self.loader_batches = world_size
        self._counter = SampleCounter(name, getattr(loader, "batch_size", None))
        length = None if loaders.is_stream(loader) else length_of(loader)
        self.num_batches = None if length is None else shard_size(length, 0, self._step)
        if self._step > 1 and isinstance(loader, DataLoader) and loaders.keeps_iterator(loader):
            loaders.check_requested((), loader, name)  # this rank's iterator has an order of its own
        with_position = with_position and not (self._step > 1 and libraries.positions_count_ranks(loader))
        self.position = self._place = InProcess.of(self.loader, name) if with_position else None
        unknown = libraries.is_split(loader) is None and libraries.is_split(getattr(loader, "dataset", None)) is None
        self._digest = 0 if self._step > 1 and unknown else None

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[int | None, Any]]:
        isolated = None if self._seed is None else IsolatedRandomState(derive_seed(self._seed, epoch))
        first, place = first_batch * self._step + self._rank, self._place
        resumes = place is not None and place.resumes
        with isolated or nullcontext():
            if place is None:
                batches = start_reading(self.loader, self._name)
            else:
                # The loaded position is just after this rank's own batch of a round.
                first = self._step - 1 if resumes else first
                batches, place.isolated = place.read(), isolated
        if isolated is not None:
            batches = isolated_iter(batches, isolated)
        if self._digest is not None:
            self._digest = 0
            if not resumes:  # ranks resume at different batches of a round
                batches = self._comparing_first(
                    batches, lambda one: digest_of(integers_of(one.batch if isinstance(one, StreamPart) else one))
                )
        for batch in islice(batches, first, None, self._step):
            if isinstance(batch, StreamPart):
                yield batch.size, batch.batch
            else:
                yield self._counter.count(batch), batch


class Columns(Source):
    """Batches that all ranks read; each rank keeps a block of columns."""

    def __init__(self, loader: SplitBatches, rank: int, world_size: int, seed: int | None, name: str) -> None:
        self.loader = loader
        self._rank, self._world_size, self._name = rank, world_size, name
        self._seed = None if seed is None else derive_seed(seed, "columns")
        self.num_batches = length_of(loader)

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        # The random state is the same on all ranks, because they must read the same batches.
        isolated = None if self._seed is None else IsolatedRandomState(derive_seed(self._seed, epoch))
        with isolated or nullcontext():
            batches = start_reading(self.loader, self._name)
        if isolated is not None:
            batches = isolated_iter(batches, isolated)
        for batch in islice(batches, first_batch, None):
            columns = self.loader.columns(batch)
            sizes = self.loader.sizes(columns, self._world_size)
            yield sizes, self.loader.part(batch, columns, self._rank, self._world_size)
