"""A process group simulated in one process: ranks are threads, and the bytes that each would send are counted."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch


class SimulatedGroup:
    """Collectives of ``world_size`` threads.

    A reduction counts as many bytes as it is long, on each rank; an exchange of objects those of all ranks' objects.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.bytes_of_reductions = [0] * world_size
        self.bytes_of_objects = [0] * world_size
        self.exchanges = 0
        self._board: list[Any] = []
        self._result: Any = None
        self._failed = False
        # One rank runs at a time, from exchange to exchange: a thousand at once would take minutes to make way.
        self._turns = [threading.Semaphore(0) for _ in range(world_size)]

    def of_rank(self, rank: int) -> RankOfGroup:
        """What :mod:`trainloop.distributed` is to that rank."""
        return RankOfGroup(self, rank)

    def run(self, work: Callable[[RankOfGroup], Any]) -> list[Any]:
        """What ``work`` returns on each rank; the first error that one raised."""
        results: list[Any] = [None] * self.world_size
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = work(self.of_rank(rank))
            except BaseException as error:
                errors.append(error)
                self._failed = True
            self._next(rank)

        before = threading.stack_size(1 << 20)  # a thousand of them
        try:
            threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.world_size)]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        self._turns[0].release()
        for thread in threads:
            thread.join()
        try:
            if errors:
                raise next((error for error in errors if not isinstance(error, Abandoned)), errors[0])
        finally:
            errors.clear()  # their frames, and this one, would hold each other, and a loader's workers
        return results

    def exchange(self, rank: int, mine: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """``combine`` of what all ranks gave, by the last that comes."""
        self._board.append(mine)
        if rank == self.world_size - 1:
            self._result, self._board = combine(self._board), []
            self.exchanges += 1
        self._next(rank)
        if not self._turns[rank].acquire(timeout=100) or self._failed:
            raise Abandoned
        return self._result

    def _next(self, rank: int) -> None:
        self._turns[(rank + 1) % self.world_size].release()


class Abandoned(Exception):
    """Another rank failed."""


class RankOfGroup:
    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def get_rank(self) -> int:
        return self._rank

    def all_reduce(self, value: Any, reduce: str) -> Any:
        self._group.bytes_of_reductions[self._rank] += value.nbytes
        combine = torch.sum if reduce == "sum" else torch.amax
        return self._group.exchange(self._rank, value, lambda all_values: combine(torch.stack(all_values), 0)).clone()

    def exchange_ints(self, values: Any, purpose: str = "exchange_ints") -> list[list[int]]:
        everyone = self._group.exchange(self._rank, list(values), list)
        return [list(theirs) for theirs in everyone]

    def gather_object(self, obj: Any) -> list[Any]:
        everyone = self._group.exchange(self._rank, pickle.dumps(obj), list)
        self._group.bytes_of_objects[self._rank] += sum(map(len, everyone))
        return [obj if rank == self._rank else pickle.loads(data) for rank, data in enumerate(everyone)]
