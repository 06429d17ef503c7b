"""Random states of a loader's persistent workers, for others that take their place after a restart.

Without a seed a persistent worker draws on, epoch after epoch, from where the last one left it. So a run that goes on
in another process needs these states; and its first pass must draw no more from this process's generators than a later
pass does, which starts no workers.

A worker takes batches to load, and no other messages. But one that raises ``queue.Empty`` where it is unpickled counts
as none there, and the worker waits for the next: ``_worker_loop`` has done so from torch 1.0 to 2.13. If it does so no
more, the worker ends with a traceback. Of a loader's iterator ``_index_queues`` and ``_workers`` are read,
``_index_sampler`` is written, and ``_shutdown_workers`` called.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import queue
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, get_worker_info

from trainloop import rng
from trainloop.signals import started

__all__ = [
    "Message",
    "answered_as_none",
    "ask_workers",
    "end_workers",
    "keeps_workers",
    "note_states",
    "start_workers",
]

_WAIT_S = 60.0  # for a batch that a worker may still be loading, of a pass that was broken off
_TAKEN_S = 5.0  # for the answer of workers that have taken the message
_LOOK_S = 0.0005
# What a folder or a file that can't be written, or is not whole, raises.
_NO_ANSWER = (OSError, RuntimeError, EOFError, pickle.UnpicklingError)


def note_states(loader: Any) -> bool:
    """Let a loader's persistent workers, between two passes, note their random states for :func:`ask_workers`.

    Nothing is waited for or written, so it may be done for states that nobody will want.

    Returns
    -------
    bool
        Whether there are workers that do.
    """
    if not keeps_workers(loader) or loader._iterator is None:
        return False
    for index_queue in loader._iterator._index_queues:
        index_queue.put(Message(_note, None))
    return True


def ask_workers(loader: Any, *, noted: bool = False) -> list[dict[str, Any]] | None:
    """The random states of a loader's persistent workers; plain types and tensors.

    Parameters
    ----------
    loader
        Between two passes, or anywhere for ``noted`` ones: each worker first loads what it was asked for before.
    noted : bool
        The states that :func:`note_states` had them note.

    Returns
    -------
    list of dict or None
        As :func:`trainloop.rng.packed` of each worker; None where there are none, or one can't tell.
    """
    if not keeps_workers(loader) or loader._iterator is None:
        return None
    iterator = loader._iterator
    try:
        with tempfile.TemporaryDirectory() as folder:
            for index_queue in iterator._index_queues:
                index_queue.put(Message(_tell, (folder, noted)))
            answers = [Path(folder, str(worker_id)) for worker_id in range(len(iterator._workers))]
            deadline = time.monotonic() + _WAIT_S
            while not all(map(os.path.exists, answers)):
                now = time.monotonic()
                if all(index_queue.empty() for index_queue in iterator._index_queues):
                    deadline = min(deadline, now + _TAKEN_S)  # as of a worker that may write no file here
                if now > deadline or not all(worker.is_alive() for worker in iterator._workers):
                    return None
                time.sleep(_LOOK_S)
            return [torch.load(answer, weights_only=True) for answer in answers]
    except _NO_ANSWER:
        return None


def start_workers(loader: Any, states: list[dict[str, Any]] | None) -> None:
    """Start a loader's persistent workers with the states that :func:`ask_workers` gave, before its next pass.

    Nothing is drawn from this process's generators, nor from the user's. It does nothing where there are other workers.
    """
    if states is None or not keeps_workers(loader) or loader._iterator is not None:
        return
    if len(states) != loader.num_workers:
        return
    with rng.isolated(), _nothing_to_load(loader):
        iterator: Any = started(loader)
    iterator._index_sampler = loader._index_sampler
    for index_queue, state in zip(iterator._index_queues, states, strict=True):
        buffer = io.BytesIO()  # a tensor would go through a file
        torch.save(state, buffer)
        index_queue.put(Message(_go_on, buffer.getvalue()))


def end_workers(loader: Any) -> None:
    """End a loader's persistent workers, now.

    Once nobody refers to them they would end as well, but only when the garbage collector finds them where a traceback
    or a circle of objects refers to them; and it may have closed their queues by then, so that each is waited for in
    vain for seconds, and then killed.
    """
    iterator = getattr(loader, "_iterator", None)
    if keeps_workers(loader) and iterator is not None:
        loader._iterator = None
        iterator._shutdown_workers()


def keeps_workers(loader: Any) -> bool:
    """Whether it is torch's own that keeps them; torchdata's has workers of another kind."""
    return (
        isinstance(loader, DataLoader)
        and loader.persistent_workers
        and loader.num_workers > 0
        and type(loader)._get_iterator is DataLoader._get_iterator
    )


@contextmanager
def _nothing_to_load(loader: DataLoader[Any]) -> Iterator[None]:
    """For as long as the workers start, the sampler is empty, and their first seed is drawn from another generator."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    before = {"generator": loader.generator, name: getattr(loader, name)}
    # Its __setattr__ refuses samplers.
    loader.__dict__.update({"generator": torch.Generator(), name: ()})
    try:
        yield
    finally:
        loader.__dict__.update(before)


class Message:
    """What is done in the worker that takes it from its queue of indices."""

    def __init__(self, does: Any, argument: Any) -> None:
        self._does, self._argument = does, argument

    def __reduce__(self) -> tuple[Any, ...]:
        return self._does, (self._argument,)


def answered_as_none() -> NoReturn:
    """In a worker, at the end of what a :class:`Message` does: the worker waits for the next."""
    raise queue.Empty


_noted: dict[str, Any] | None = None
"""In a worker: its random states when it was last told to note them."""


def _note(_: None) -> None:
    global _noted
    try:
        _noted = rng.packed()
    except Exception:
        _noted = None
    answered_as_none()


def _tell(how: tuple[str, bool]) -> None:
    folder, noted = how
    worker = get_worker_info()
    # Whatever is raised here but queue.Empty would end the worker, and the run, for a state that it can do without.
    with contextlib.suppress(Exception):
        answer = Path(folder, str(worker.id))  # type: ignore[union-attr]
        try:
            state = _noted if noted else rng.packed()
            if state is not None:
                part = answer.with_suffix(".part")
                torch.save(state, part)
                part.replace(answer)
        finally:
            # Where no file can be filled, an empty one may still be made; and nobody waits for the answer in vain.
            if not answer.exists():
                answer.touch()
    answered_as_none()


def _go_on(state: bytes) -> None:
    rng.restore(torch.load(io.BytesIO(state), weights_only=True))
    answered_as_none()
