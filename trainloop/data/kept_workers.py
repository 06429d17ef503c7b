"""Persistent workers that outlive the run that started them, and load for the next one.

A run makes its own twin of each loader, and new workers with it. Inside ``with tl.ranks():`` the workers of the run
before go on, if a new set would be the same: all that would be sent to it, and the process that starts it, must be byte
for byte what it was then, and so must be what each worker has of it. So data that has changed in between is never
missed; only workers that could not be told from new ones stay.

Of torch's iterator over workers it takes the sampler away and gives it another, and takes the workers' numbers off the
list of those whose death is an error at once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

from torch.utils.data import DataLoader, MapDataPipe
from torch.utils.data._utils import signal_handling

from trainloop.data.own_copies import OwnCopies
from trainloop.data.persistent import end_workers, keeps_workers
from trainloop.data.tensors import draw_base_seed
from trainloop.data.twins import twin
from trainloop.per_thread import PerThread
from trainloop.signals import heard_in_this_run, lasting_mark

__all__ = ["KeptWorkers", "ReaderOf", "keeping_workers", "kept_workers"]

ReaderOf = Callable[["DataLoader[Any]"], "DataLoader[Any]"]
"""Gives the loader to read in place of another."""

# Reading the data once takes as long as sending it to a rank; but forked workers, which are there in no time, share
# data that is larger.
_MOST_BYTES = 64 << 20
# Whatever else belongs to a loader is sent to its workers, or says how to read from them.
_NOT_SENT = frozenset(
    "sampler batch_sampler generator _iterator _IterableDataset_len_called _DataLoader__multiprocessing_context".split()
)

_log = logging.getLogger(__name__)


class KeptWorkers:
    """The workers that are kept in this process, one set for each purpose.

    Parameters
    ----------
    own_memory : bool
        Whether the loaders' data lies in memory that ends with the run: workers that stay then have a copy.
    """

    def __init__(self, *, own_memory: bool = False) -> None:
        self._own_memory = own_memory
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None
        """The surroundings at the begin of the run before, and at its end."""
        self._idle: dict[str, tuple[bytes, OwnCopies, Any]] = {}
        self._reading: dict[str, tuple[bytes, OwnCopies, DataLoader[Any]]] = {}
        self._open_runs = 0

    @contextmanager
    def for_a_run(self, surroundings: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """A run in this process. One inside another, as a callback may call it, neither takes nor leaves workers.

        Parameters
        ----------
        surroundings : callable
            What workers inherit from this process, by name. They end where some of it is neither what it was when the
            run before began nor when that ended: what a run itself changes, its persistent workers never see.
        """
        self._open_runs += 1
        try:
            # A callback of the outermost run may change what workers inherit, and that run still reads its own.
            with self._outermost_run(surroundings) if self._open_runs == 1 else nullcontext():
                yield
        finally:
            self._open_runs -= 1

    @contextmanager
    def _outermost_run(self, surroundings: Callable[[], dict[str, Any]]) -> Iterator[None]:
        from trainloop.launch.kept import changed  # `import trainloop` is to be cheap

        begin = surroundings()
        if self._before is not None and (names := changed(begin, self._before)):
            _log.debug("loaders' workers end, as this has changed: %s", ", ".join(names))
            self.close()
        try:
            yield
            if not heard_in_this_run():
                for purpose, (content, copies, reader) in self._reading.items():
                    if reader._iterator is not None:
                        self._idle[purpose] = content, copies, _put_by(reader._iterator, copies)
                self._reading.clear()
            self._before = begin, surroundings()
        finally:
            for _, _, reader in self._reading.values():
                end_workers(reader)
            self._reading.clear()
            # After a signal a worker takes the next one for its own end; those that nobody read had it, too.
            if heard_in_this_run():
                self.close()

    def reader_of(self, purpose: str, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The loader to read in place of ``loader``, now: with workers that are there, or that will be kept.

        Parameters
        ----------
        purpose : str
            There is one set of workers for each: where the loader is another than before, the former's workers end.
        """
        if self._open_runs > 1 or not _can_stay(loader) or purpose in self._reading:
            return loader
        from trainloop.transfer import load_state  # `import trainloop` is to be cheap
        from trainloop.transfer.content import content_of

        found, copies, workers = self._idle.pop(purpose, (b"", None, None))
        sent = {name: value for name, value in vars(loader).items() if name not in _NOT_SENT}
        how = [_start_method(loader), loader.batch_sampler is None]
        pickled = content_of((type(loader), sent, how), _MOST_BYTES)
        content = b"" if pickled is None else hashlib.sha256(pickled).digest()
        if workers is not None and copies is not None and (ended := _why_not(workers, copies, same=content == found)):
            _log.debug("workers of %s end, as %s", purpose, ended)
            workers._shutdown_workers()
            workers = copies = None
        if pickled is None:
            _log.debug("workers of %s will not stay: the loader can't be compared, or is too large for that", purpose)
            return loader
        if copies is not None:
            if loader.generator is not None:
                draw_base_seed(loader)  # as new workers would, from the generator that the order may come from, too
            reader = twin(loader)
            reader._iterator = _taken_up(workers, reader)
        else:
            reader = twin(loader, **(load_state(pickled)[1] if self._own_memory else {}))
            copies = OwnCopies(reader, _MOST_BYTES)
            reader.worker_init_fn = copies.worker_init_fn
        self._reading[purpose] = content, copies, reader
        return reader

    def close(self) -> None:
        """End the workers that nobody reads now."""
        while self._idle:
            _, (_, _, workers) = self._idle.popitem()
            workers._shutdown_workers()


def _can_stay(loader: DataLoader[Any]) -> bool:
    """Whether a run after this one could read from the same workers."""
    own_iteration = type(loader).__iter__ is not DataLoader.__iter__
    return keeps_workers(loader) and not own_iteration and not isinstance(loader.dataset, MapDataPipe)


def _why_not(workers: Any, copies: OwnCopies, *, same: bool) -> str:
    """Why these workers can't go on; empty if they can."""
    if not same:
        return "the loader or its data have changed"
    if copies.are_as_sent(workers):
        return ""
    dead = [worker.pid for worker in workers._workers if not worker.is_alive()]
    return f"{dead} are dead" if dead else "they may have changed their copies of the dataset"


def _start_method(loader: DataLoader[Any]) -> str | None:
    context: Any = loader.multiprocessing_context
    return None if context is None else str(context.get_start_method())


def _put_by(workers: Any, copies: OwnCopies) -> Any:
    """Workers for later: without what they were asked for, and without an error at once should one of them die."""
    copies.ask(workers)
    workers._index_sampler = workers._sampler_iter = None
    if workers._worker_pids_set:
        signal_handling._remove_worker_pids(id(workers))
        workers._worker_pids_set = False
    return workers


def _taken_up(workers: Any, reader: Any) -> Any:
    workers._index_sampler = reader._index_sampler
    signal_handling._set_worker_pids(id(workers), tuple(worker.pid for worker in workers._workers))
    workers._worker_pids_set = True
    return workers


_here: PerThread[KeptWorkers] = PerThread()  # as ranks are kept


def kept_workers() -> KeptWorkers | None:
    """Those of this thread's innermost :func:`keeping_workers`, if it is in one."""
    return _here.get()


@contextmanager
def keeping_workers(*, own_memory: bool = False) -> Iterator[None]:
    """Keep loaders' workers up between the runs in this block; an inner block shares them."""
    if kept_workers() is not None:
        yield
        return
    kept = KeptWorkers(own_memory=own_memory)
    with lasting_mark(), closing(kept), _here.set_to(kept):
        yield
