"""Recognise a user's loader, what ranks must have alike, whether it can be split; let its workers outlive signals."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence, Sized
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from trainloop._launch.rank_process import started_by_launch
from trainloop._launch.script.settings import SettingsInit
from trainloop._support.platform import process_config
from trainloop._support.rng import derive_seed
from trainloop._support.scratch import scratch_folder
from trainloop._support.signals import WorkerInit
from trainloop._support.user_line import warn_or_print
from trainloop.data.loader.libraries import counters_of, cuts_batches, is_split
from trainloop.data.loader.loader_copies import end_workers_of
from trainloop.data.loader.parts import datasets_of, parts_of_loader
from trainloop.data.order.orders import length_of
from trainloop.devices import whole_number
from trainloop.errors import ConfigurationError


def is_stream(loader: Any) -> bool:
    """Return True if a loader's dataset can only be read from its beginning."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def iterates_itself(loader: Any) -> bool:
    """Return True if a loader's class defines ``__iter__``, which may change what the dataset yields."""
    return type(loader).__iter__ is not DataLoader.__iter__


def has_own_length(loader: Any) -> bool:
    """Return True if a loader's class defines ``__iter__`` and ``__len__``, so that it may yield other batches."""
    if not isinstance(loader, DataLoader):
        return False
    return iterates_itself(loader) and type(loader).__len__ is not DataLoader.__len__


def yields_otherwise(loader: Any) -> bool:
    """Return True if a loader's own length says that it yields other batches than those that its sampler cuts."""
    return has_own_length(loader) and not is_stream(loader) and length_of(loader) != DataLoader.__len__(loader)


def is_indexed(loader: Any, presharded: bool) -> bool:
    """Return True if a loader reads the indices that its sampler yields, so that another sampler can split it.

    Parameters
    ----------
    presharded : bool
        True if the loader is already split over ranks. The loader's own ``__iter__`` may split it.
    """
    if not isinstance(loader, DataLoader) or is_stream(loader):
        return False
    return not iterates_itself(loader) or not (presharded or keeps_iterator(loader))


def keeps_iterator(loader: Any) -> bool:
    """Return True if a loader's class has stored an iterator, which its ``__iter__`` continues, to keep its workers."""
    # A stream may be its own iterator.
    others = ("_iterator", "dataset", "sampler", "batch_sampler", *counters_of(loader))
    return any(isinstance(value, Iterator) for name, value in vars(loader).items() if name not in others)


def distributed_sampler(loader: Any) -> Any | None:
    """Return the sampler or batch sampler that already splits a loader's samples over ranks, if any."""
    return next(iter(_distributed_samplers(loader)), None)


def _distributed_samplers(loader: Any) -> list[Any]:
    samplers = [
        one for name, one in parts_of_loader(loader).items() if name != "loader" and not isinstance(one, DataLoader)
    ]
    return [one for one in samplers if isinstance(one, DistributedSampler) or num_ranks_of(one) > 1]


def refuse_shared_iterator(loader: Any, training: Any) -> None:
    """Raise ConfigurationError if a loader that is read within an epoch has an iterator of the training loader."""
    own = parts_of_loader(training)
    for part in parts_of_loader(loader).values():
        name = next((name for name, other in own.items() if other is part and hasattr(type(part), "__next__")), None)
        if name is not None:
            where = "train_loader" if name == "loader" else f"train_loader.{name}"
            raise ConfigurationError(
                f"{where} is its own iterator ({type(part).__name__} has __next__), so evaluating it within an epoch "
                "would take the batches of the training. Evaluate it in on_epoch_end, or return a new iterator from "
                "its __iter__."
            )


def loaders_within(loader: Any) -> list[DataLoader[Any]]:
    """Return the loaders that a loader of the user's own, which is no ``DataLoader``, reads."""
    if isinstance(loader, DataLoader):
        return []
    return [one for one in parts_of_loader(loader).values() if isinstance(one, DataLoader) and one is not loader]


def num_ranks_of(sampler: Any) -> int:
    """Return the number of ranks that a sampler says it splits its samples over; 1 if it says nothing.

    Samplers of torchvision, timm and others that are no ``DistributedSampler`` have its attributes ``num_replicas`` and
    ``rank``; those of mmengine have ``world_size`` and ``rank``.
    """
    if whole_number(getattr(sampler, "rank", None)) is None:
        return 1
    numbers = (whole_number(getattr(sampler, name, None)) for name in ("num_replicas", "world_size"))
    return next((number for number in numbers if number is not None), 1)


def is_distributed(loader: Any) -> bool:
    """Return True if a loader already gives each rank a shard."""
    if distributed_sampler(loader) is not None:
        return True
    return bool(is_split(loader) or is_split(getattr(loader, "dataset", None)))


def index_sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the loader's source of indices: its batch sampler, or its sampler if there is no batch sampler."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def plain_batches(loader: Any) -> BatchSampler | None:
    """Return the loader's batch sampler if it only cuts a sampler's order into batches."""
    if not isinstance(loader, DataLoader) or is_stream(loader):
        return None
    index_sampler = index_sampler_of(loader)
    return index_sampler if type(index_sampler) is BatchSampler or cuts_batches(index_sampler) else None


def epoch_holders(loader: Any) -> Iterator[Any]:
    """Yield the parts of a loader that have ``set_epoch``, each once: samplers, and datasets that shuffle."""
    parts = parts_of_loader(loader)
    parts |= datasets_of(parts)
    told = {name: part for name, part in parts.items() if callable(getattr(part, "set_epoch", None))}
    # Other parts within one that has set_epoch learn from it what they should know.
    usual = ("sampler.sampler", "batch_sampler.sampler", "dataset.dataset")
    own = [name for name in told if name in usual or not any(name.startswith(f"{outer}.") for outer in told)]
    yield from {id(told[name]): told[name] for name in own}.values()


def tell_epoch(loader: Any, epoch: int, told: Sequence[Any] = ()) -> list[Any]:
    """Call ``set_epoch`` of the loader's parts, except of those in ``told``; return all parts that now know the epoch.

    A part may have another length in each epoch.
    """
    holders = list(epoch_holders(loader))
    for holder in holders:
        if not any(holder is other for other in told):
            holder.set_epoch(epoch)
    return holders


def tells_dataset(loader: Any) -> bool:
    """Return True if a dataset of the loader has ``set_epoch``, so that each epoch may have other data."""
    return any(callable(getattr(part, "set_epoch", None)) for part in datasets_of(parts_of_loader(loader)).values())


def for_rank(loader: Any, rank: int, world_size: int, name: str) -> Any:
    """Set this rank in the sampler (if any) of an already distributed loader, and return the loader.

    Raises
    ------
    ConfigurationError
        If the sampler was created for another number of ranks, or if only some of the loaders within a loader have one.
    """
    sampler = distributed_sampler(loader)
    if sampler is None:
        return loader
    if not all(map(_distributed_samplers, loaders_within(loader))):
        raise ConfigurationError(
            f"{name} contains loaders with and without a sampler that splits samples over ranks. Pass all of them "
            "without such a sampler: trainloop then divides the batches among the ranks."
        )
    if num_ranks_of(sampler) != world_size:
        plain = isinstance(sampler, DistributedSampler)
        kind = "DistributedSampler" if plain else f"sampler ({type(sampler).__name__})"
        count = "num_replicas" if hasattr(sampler, "num_replicas") else "world_size"
        raise ConfigurationError(
            f"{name} has a {kind} with {count}={num_ranks_of(sampler)}, but world_size={world_size}. "
            f"Create the sampler for {world_size} ranks, or pass a loader without this sampler, which trainloop then "
            "splits over ranks."
        )
    # A loader created before the ranks started has the same rank on all of them.
    for one in _distributed_samplers(loader):
        if one.rank != rank:
            one.rank = rank
    return loader


@contextlib.contextmanager
def workers_outlive_signals(loader: Any) -> Iterator[None]:
    """Let workers started in this context outlive a signal to the whole process group; see signals.py.

    Temporary files of killed workers are removed, too. Contexts of one loader may overlap and end in any order: the
    feed of a changed loader is opened before the outdated feed is closed, and an evaluation may read the same loader.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        yield
        return
    init = loader.worker_init_fn
    if isinstance(init, WorkerInit) and init.use is not None and init.use.loader is loader:
        use = init.use
    else:
        use = _WorkersUse(loader)
    use.contexts += 1
    try:
        yield
    finally:
        use.contexts -= 1
        if not use.contexts:
            use.end()


def users_worker_init(loader: DataLoader[Any]) -> Any:
    """Return the user's ``worker_init_fn`` of a loader, also while :func:`workers_outlive_signals` has replaced it."""
    users = loader.worker_init_fn
    # More than once: a callback may have made this loader with the function of another one.
    while isinstance(users, (WorkerInit, SettingsInit)):
        users = users.users
    return users


class _WorkersUse:
    """What all contexts of :func:`workers_outlive_signals` for one loader have in common."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._users = users = users_worker_init(loader)
        self.loader: DataLoader[Any] | None = loader
        self.contexts = 0
        self._persistent = loader.persistent_workers
        self._undo = contextlib.ExitStack()
        temporary = None
        # A rank uses its launch's folder; workers that outlive this use keep Python's own folder.
        if "tempdir" not in process_config() and not self._persistent:
            temporary = self._undo.enter_context(scratch_folder(f"{os.getpid()}-{time.monotonic_ns()}")).path
        # Set on the user's loader, since a copy would not share its persistent workers; restored at the end.
        loader.worker_init_fn = self._init = WorkerInit(_with_settings(loader, users), temporary)
        self._init.use = self

    def end(self) -> None:
        loader, self.loader = self.loader, None
        if loader is not None and loader.worker_init_fn is self._init:  # otherwise, the user has assigned another one
            loader.worker_init_fn = self._users
        # The traceback of an error may refer to an iterator, so that its workers would outlive their folder.
        for iterator in () if self._persistent else tuple(self._init.iterators or ()):
            end_workers_of(iterator)
        self._undo.close()


def _with_settings(loader: DataLoader[Any], users: Any) -> Any:
    """Return the user's ``worker_init_fn``.

    If a rank spawns the workers, the function first applies the rank's settings.
    """
    context = loader.multiprocessing_context or multiprocessing
    # Forked workers inherit the settings.
    return SettingsInit(users) if context.get_start_method() != "fork" and started_by_launch() else users


def check_requested(log: Sized, loader: Any, name: str) -> None:
    """Raise an error if a loader yields a batch without having asked for indices.

    Raises
    ------
    ConfigurationError
        If ``log``, the batches requested but not yet yielded, is empty.
    """
    if not log:
        raise ConfigurationError(
            f"{name}: {type(loader).__name__}.__iter__ yielded a batch without asking the sampler for its indices, so "
            "batches can't be split over ranks. Make this __iter__ iterate over super().__iter__(), or pass a loader "
            "that is already distributed (with a DistributedSampler)."
        )


def check_passed_through(passes: int, ended: bool, loader: Any, name: str) -> None:
    """Raise an error if a loader has not read its sampler once, to the end: ranks would evaluate other samples.

    Raises
    ------
    ConfigurationError
        The message names the class of the loader.
    """
    if passes == 1 and ended:
        return
    kind = type(loader).__name__
    does = "ends before its sampler does" if passes == 1 else f"reads its sampler {passes} times"
    raise ConfigurationError(
        f"{name}: {kind}.__iter__ {does}, so ranks would not evaluate the samples that one process evaluates. Define "
        f"{kind}.__len__ (the number of batches that it yields): each rank then reads the whole loader, and takes its "
        "share of the batches."
    )


def check_orders(digests: list[list[int]], loader: Any, name: str) -> None:
    """Raise an error if ranks read different orders: their shards would repeat some samples and miss others.

    Raises
    ------
    ConfigurationError
        If the ranks' digests of their order differ.
    """
    if all(digest == digests[0] for digest in digests):
        return
    if not isinstance(loader, DataLoader) or is_stream(loader):
        kind = type(loader.dataset if is_stream(loader) else loader).__name__
        raise ConfigurationError(
            f"{name}: {kind} yields a different first batch on each rank. trainloop splits its batches over ranks, so "
            "they must be the same on all ranks: make the order depend only on the global generators of torch, numpy "
            f"or Python. If {kind} splits its samples over ranks itself, set {kind}.is_distributed = True. If only "
            "random changes of the samples differ, set it to False."
        )
    sampler = index_sampler_of(loader)
    raise ConfigurationError(
        f"{name}: {type(getattr(sampler, 'sampler', sampler)).__name__} yields a different order on each rank, so its "
        "samples can't be split over ranks. Make it draw from the global generators of torch, numpy or Python, or from "
        "a generator that has the same seed on every rank. Its data and weights must also be the same on every rank."
    )


def warn_of_equal_shards(digests: list[list[int]], loader: Any, name: str, rank: int) -> None:
    """Warn, on rank 0, if a sampler that should give each rank a shard yields the same first batch on all ranks."""
    if rank or digests[0] == [0] or any(digest != digests[0] for digest in digests):
        return
    kind = type(distributed_sampler(loader)).__name__
    warn_or_print(
        f"{name}: {kind} yields the same first batch on all ranks, so they may read the same samples, and others are "
        f"left out. Each rank has a copy of the {kind} that was created before the ranks, and the loop has set its "
        "attribute rank: read it in __iter__, not in the constructor. Or pass a sampler of the whole dataset, which "
        "trainloop splits over ranks. In training, ignore this if each rank is to augment the same samples."
    )


class Shared(NamedTuple):
    """Properties of a loader that ranks must have in common, as integers; -1 for a property that may differ."""

    rule: int = -1
    """Checksum of the kind of loader and of the way in which its order is determined."""
    seed: int = -1
    """Checksum of the seed of orders and augmentation."""
    samples: int = -1
    batches: int = -1
    batch_size: int = -1
    contents: int = -1
    """Checksum of the dataset's names and positions (:func:`~trainloop.data.loader.contents.contents_of`)."""


NO_LOADER = Shared(rule=-2)
"""Value of a rank without a loader."""


def check_shared(everyone: Sequence[Shared], name: str) -> None:
    """Raise an error if ranks would do different steps, and so wait for each other forever.

    Raises
    ------
    ConfigurationError
        If the ranks' properties differ; the message names the first difference, and the first rank that has it.
    """
    first = everyone[0]
    rank, other = next(((rank, theirs) for rank, theirs in enumerate(everyone) if theirs != first), (0, first))
    if other == first:
        return
    if NO_LOADER in (first, other):
        without, with_one = (0, rank) if first == NO_LOADER else (rank, 0)
        raise ConfigurationError(
            f"{name} is None on rank {without}, but not on rank {with_one}. Its batches are split over ranks, so pass "
            "it on every rank, or on no rank."
        )
    if (other.samples, other.batches, other.batch_size) != (first.samples, first.batches, first.batch_size):
        raise ConfigurationError(
            f"{name} has {_shown_lengths(first)} on rank 0, but {_shown_lengths(other)} on rank {rank}. Every rank "
            "must have the whole dataset, from which trainloop takes the rank's shard. Pass the same dataset, sampler "
            "and batch_size on every rank. If each rank has its own data, pass a loader that is already distributed "
            "(with a DistributedSampler, or an IterableDataset split by rank)."
        )
    if other.contents != first.contents:
        raise ConfigurationError(
            f"{name}: the dataset on rank {rank} has other names or indices than the one on rank 0, or has them in "
            "another order, so the ranks' shards would repeat some samples and leave out others. Every rank must have "
            "the whole dataset: call torch.manual_seed, or give random_split a generator with a seed, on every rank; "
            "sort the names of files; and let trainloop take the rank's shard. If each rank has its own data, set the "
            "dataset's attribute is_distributed = True."
        )
    if other.rule != first.rule:
        raise ConfigurationError(
            f"{name} is a different kind of loader, or has a different kind of sampler, on rank {rank} than on rank 0, "
            "so its samples can't be split over ranks. Create it in the same way on every rank."
        )
    raise ConfigurationError(
        f"rank {rank} has a different seed than rank 0, so these ranks would read {name} in different orders. Pass the "
        "same TrainLoop(seed=...) on every rank. Random numbers for augmentation still differ between ranks."
    )


def seed_in_common(seed: int | None) -> int:
    """Return a seed in the form that :class:`Shared` uses."""
    return -1 if seed is None else derive_seed(seed)


def _shown_lengths(shared: Shared) -> str:
    known = (("sample", "samples", shared.samples), ("global batch", "global batches", shared.batches))
    parts = [f"{n} {one if n == 1 else more}" for one, more, n in known if n >= 0] or ["no known length"]
    return " in ".join(parts) + (f" of {shared.batch_size}" if shared.batch_size >= 0 else "")


def check_iterable(loader: Any, name: str) -> None:
    """Raise an error if an object is not a loader.

    Raises
    ------
    ConfigurationError
        If the object can't be iterated.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ConfigurationError(
            f"{name}={loader!r} can't be iterated. Pass a torch DataLoader, or any iterable of batches."
        )


def check_trains(loader: Any, world_size: int, name: str) -> None:
    """Raise an error if a loader can't yield any training step.

    Raises
    ------
    ConfigurationError
        If the loader can't be iterated, has no samples, or drops all samples.
    """
    check_iterable(loader, name)
    batches = plain_batches(loader)
    samples = length_of(batches.sampler) if batches is not None else length_of(loader)
    if samples == 0 and batches is not None:
        raise ConfigurationError(
            f"{name} has no samples: its dataset or sampler has length 0. Training needs at least one sample."
        )
    if samples == 0 and not isinstance(loader, DataLoader):
        raise ConfigurationError(f"{name} has no batches: its length is 0. Training needs at least one batch.")
    if batches is not None and batches.drop_last and samples is not None:
        needed = batches.batch_size * (1 if is_distributed(loader) else world_size)
        if samples < needed:
            raise ConfigurationError(
                f"{name} has {samples} samples and drop_last=True, but one global batch takes {needed} (batch_size "
                f"{batches.batch_size} on {world_size} rank{'s' * (world_size > 1)}), so no batch would be left. Use "
                f"drop_last=False, or a smaller batch_size."
            )
