"""Whether a loader's workers have changed what they were sent: each has its own copy, which nobody else sees.

A dataset may count its reads, draw from a generator of its own, or keep what it has read. New workers begin with it as
it was sent; those that stay would go on, and load other data than new ones. So a worker notes a digest of its copy when
it starts, and compares once it has nothing to do. That takes as long as reading the data once; nobody waits for it but
a call that comes at once.

A worker is asked through its queue of indices, see :mod:`trainloop.data.persistent`. It answers in shared memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from trainloop.data.persistent import Message, answered_as_none

__all__ = ["OwnCopies"]

_UNKNOWN, _SAME, _OTHER = range(3)
_WAIT_S = 60.0  # for batches that a worker may still be loading, of a pass that was broken off
_LOOK_S = 0.0005


class OwnCopies:
    """What the workers of one loader were sent: made before they start.

    Parameters
    ----------
    loader : DataLoader
        Whose workers will start.
    most : int
        Bytes to read at most; of copies that are larger nobody knows whether they have changed.
    """

    def __init__(self, loader: DataLoader[Any], most: int) -> None:
        self._answers = torch.full((loader.num_workers,), _UNKNOWN, dtype=torch.uint8).share_memory_()
        self.worker_init_fn = _Noting(loader.worker_init_fn, loader.collate_fn, self._answers, most)
        """In place of the loader's own."""

    def ask(self, workers: Any) -> None:
        """Let workers compare, once they have loaded what they were asked for. ``workers``: the loader's iterator."""
        self._answers.fill_(_UNKNOWN)
        for index_queue in workers._index_queues:
            index_queue.put(Message(_compare, None))

    def are_as_sent(self, workers: Any) -> bool:
        """What the workers found, after :meth:`ask`; False where one can't tell, or has ended."""
        deadline = time.monotonic() + _WAIT_S
        while all(worker.is_alive() for worker in workers._workers) and time.monotonic() < deadline:
            if bool((self._answers != _UNKNOWN).all()):
                return bool((self._answers == _SAME).all())
            time.sleep(_LOOK_S)
        return False


class _Noting:
    """A ``worker_init_fn`` that calls the user's, and then notes what the worker starts with."""

    def __init__(self, users: Callable[[int], Any] | None, collate: Any, answers: Tensor, most: int) -> None:
        self._users, self._collate, self._answers, self._most = users, collate, answers, most

    def __call__(self, worker_id: int) -> None:
        global _noted
        if self._users is not None:
            self._users(worker_id)
        _noted = self, self._digest()

    def compare(self, worker_id: int, before: bytes | None) -> None:
        """Write the answer."""
        answer = _OTHER
        with contextlib.suppress(Exception):
            answer = _SAME if before is not None and self._digest() == before else _OTHER
        self._answers[worker_id] = answer

    def _digest(self) -> bytes | None:
        from trainloop.transfer.content import digest_of_content  # `import trainloop` is to be cheap

        worker = get_worker_info()
        assert worker is not None
        return digest_of_content((worker.dataset, self._collate), self._most)


_noted: tuple[_Noting, bytes | None] | None = None
"""In a worker: the digest of what it had when it started."""


def _compare(_: None) -> None:
    worker = get_worker_info()
    if worker is not None and _noted is not None:
        noting, before = _noted
        noting.compare(worker.id, before)
    answered_as_none()
